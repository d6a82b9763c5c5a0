#!/usr/bin/env bash
# All that must travel to a GPU machine that can fetch nothing: this tree without .git, wheels, earlier results.
#
#   tests/gpu/pack.sh [--python 3.12] [--offline] [--into FILE.tar] [WHEELS [RESULTS]]
#
# Fetches the wheels of tests/gpu/wheels.txt that the folder WHEELS (gpu-wheels) lacks, for the Python of the GPU machine;
# --offline: says which are missing. Lists everything with its size; RESULTS.tar.xz (gpu-results) travels where it is
# there. --into writes one archive of it, to be unpacked anywhere; without it the tree and the folder travel as they lie.
#
# Exit code: 0 it is complete and below 60 MiB; 1 something is missing or it is too large; 2 a wrong option.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
usage="usage: tests/gpu/pack.sh [--python 3.12] [--offline] [--into FILE.tar] [WHEELS [RESULTS]]"
most_bytes=$((60 * 1024 * 1024))
list=$root/tests/gpu/wheels.txt

version=3.12
fetch=yes
into=
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --python)
      version=${2:-}
      if [[ ! "$version" =~ ^3\.[0-9]+$ ]]; then
        echo "--python takes a version like 3.12; $usage" >&2
        exit 2
      fi
      shift
      ;;
    --offline) fetch= ;;
    --into)
      into=${2:-}
      if [[ -z "$into" ]]; then
        echo "--into takes the name of a file; $usage" >&2
        exit 2
      fi
      shift
      ;;
    *)
      echo "there is no option $1; $usage" >&2
      exit 2
      ;;
  esac
  shift
done
wheels=${1:-$root/gpu-wheels}
results=${2:-$root/gpu-results}.tar.xz
mkdir -p "$wheels" || exit 2
mapfile -t wanted < <(sed 's/ *#.*//; /^$/d' "$list")

# wheel NAME==VERSION: its file in the folder
wheel() {
  local name=${1%%==*}
  compgen -G "$wheels/${name//[-.]/_}-${1##*==}-*.whl" | head -1
}

missing=()
for one in "${wanted[@]}"; do
  if [[ -z "$(wheel "$one")" ]]; then missing+=("$one"); fi
done
if [[ $fetch && ${#missing[@]} -gt 0 ]]; then
  platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  for glibc in {39..5}; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done # pip asks for each by name
  for one in "${missing[@]}"; do
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
      --implementation cp --python-version "$version" "${platforms[@]}" --dest "$wheels" "$one"
  done
fi

# sized WORDS BYTES
sized() { printf '%8.2f MiB  %s\n' "$(awk -v bytes="$2" 'BEGIN { print bytes / 1048576 }')" "$1"; }
cd "$root" || exit 1
if [[ -e .git ]]; then
  mapfile -t files < <(git ls-files --cached --others --exclude-standard)
else
  mapfile -t files < <(find . -type f -not -path './gpu-wheels/*' -not -path './gpu-results*' -not -path '*/__pycache__/*')
fi
total=$(printf '%s\0' "${files[@]}" | du --files0-from=- -b --total 2>/dev/null | tail -1 | cut -f1)
sized "the tree, ${#files[@]} files" "$total"
packed=()
complete=yes
for one in "${wanted[@]}"; do
  file=$(wheel "$one")
  if [[ -z "$file" ]]; then
    printf '%8s      %s\n' MISSING "$one"
    complete=
    continue
  fi
  packed+=("$file")
  bytes=$(stat -c %s "$file")
  total=$((total + bytes))
  sized "$(basename "$file")" "$bytes"
done
while read -r other; do # they would be unpacked, too, and two versions of one name cannot be told apart
  if [[ " ${packed[*]} " != *" $other "* ]]; then
    echo "$other is not on the list in tests/gpu/wheels.txt: take it away"
    complete=
  fi
done < <(compgen -G "$wheels/*.whl")
if [[ -e "$results" ]]; then
  bytes=$(stat -c %s "$results")
  total=$((total + bytes))
  packed+=("$results")
  sized "$(basename "$results"): earlier results, to go on with" "$bytes"
fi
sized "all of it (at most 60.00 MiB)" "$total"
if ((total > most_bytes)); then
  echo "that is too large by $(((total - most_bytes + 1048575) / 1048576)) MiB: leave out earlier results, or files of the tree that git does not ignore"
  exit 1
fi
if [[ ! $complete ]]; then
  echo "it is not complete"
  exit 1
fi
if [[ -n "$into" ]]; then
  printf '%s\n' "${files[@]}" | tar --create --file "$into" --files-from=- --transform 's,^,batchinfer/,' || exit 1
  for file in "${packed[@]}"; do
    place=batchinfer/gpu-wheels
    if [[ "$file" == "$results" ]]; then place=batchinfer; fi
    tar --append --file "$into" --directory "$(dirname "$file")" --transform "s,^,$place/," "$(basename "$file")" || exit 1
  done
  echo "packed into $into"
fi
