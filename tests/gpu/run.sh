#!/usr/bin/env bash
# Everything that one Hopper GPU can show: checks, slice, tests. Results go into a folder as they come.
#
#   tests/gpu/run.sh [--quick | --rehearse] [--minutes M] [--only SECTION]... [RESULTS [WHEELS]]
#
# RESULTS: gpu-results; WHEELS: a folder of wheels to unpack. Sections: check, slice, tests-operations, tests-engine;
# each is a process of its own, and what goes wrong in one leaves the others alone. --minutes ends after so many
# (570 seconds: 9.5); the same command goes on with what is not done. --rehearse: tiny shapes on the CPU, no times.
# PYTHON names the interpreter (python3).
#
# Exit code: the first of the sections' codes that is not 0; 3: time was up.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
usage="usage: tests/gpu/run.sh [--quick | --rehearse] [--minutes M] [--only SECTION]... [RESULTS [WHEELS]]"

quick=()
requests=(--requests 64 128 192 256)
end=0
only=()
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --quick)
      quick=(--quick)
      requests=(--requests 128)
      ;;
    --rehearse) quick=(--rehearse) requests=(--rehearse) ;;
    --minutes)
      end=$(awk -v minutes="${2:-}" 'BEGIN { print int(60 * minutes) }')
      if ((end <= 0)); then
        echo "--minutes takes a number above 0; $usage" >&2
        exit 2
      fi
      shift
      ;;
    --only)
      if [[ " check slice tests-operations tests-engine " != *" ${2:-} "* ]]; then
        echo "--only: there is no section '${2:-}'; $usage" >&2
        exit 2
      fi
      only+=("$2")
      shift
      ;;
    *)
      echo "there is no option $1; $usage" >&2
      exit 2
      ;;
  esac
  shift
done
results=${1:-gpu-results}
python=${PYTHON:-python3}
# has NAME: whether the interpreter has this package
has() { "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }
if ! has torch 2>/dev/null; then
  echo "$python has no torch; name a Python that has: PYTHON=… tests/gpu/run.sh" >&2
  exit 2
fi
mkdir -p "$results" || exit 2
if [[ -n "${2:-}" ]]; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  "$python" "$root/tests/gpu/wheels.py" "$2" "$unpacked" || exit 2
  export PYTHONPATH="$unpacked${PYTHONPATH:+:$PYTHONPATH}"
fi
nvidia-smi >"$results/machine.txt" 2>&1
code=0

# run NAME COMMAND…: its output on the screen and in a file; keeps the first code that is not 0
run() {
  local name=$1 own left=$((end - SECONDS))
  shift
  if ((${#only[@]})) && [[ " ${only[*]} " != *" $name "* ]]; then return 0; fi
  if ((end && left < 30)); then
    echo "== $name: not run, time is up; the same command goes on with it"
    if [[ $code -eq 0 ]]; then code=3; fi
    return 3
  fi
  echo "== $name"
  # a little later than the section's own end, if it has one
  timeout --kill-after=5 "$((end ? left + 5 : 0))" "$@" 2>&1 | tee "$results/$name.txt"
  own=${PIPESTATUS[0]}
  if [[ $own -eq 124 || $own -eq 137 ]]; then echo "== $name: ended by force, code $own" | tee -a "$results/$name.txt"; fi
  if [[ $code -eq 0 ]]; then code=$own; fi
  "$python" "$root/tests/gpu/summary.py" "$results" >"$results/summary.md"
  return "$own"
}

# minutes that are left, as an option
minutes() {
  if ((end)); then awk -v left=$((end - SECONDS - 10)) 'BEGIN { printf "--minutes %.2f", left / 60 }'; fi
}

# shellcheck disable=SC2046
run check "$python" "$root/tests/gpu/check.py" "${quick[@]}" --out "$results/check.jsonl" $(minutes)
if [[ $code -eq 2 ]]; then exit 2; fi # no such GPU: the rest would say the same
# shellcheck disable=SC2046
run slice "$python" "$root/tests/gpu/slice.py" "${requests[@]}" --out "$results/slice.jsonl" $(minutes)
if has pytest; then
  paths="$root/kernels:$root${PYTHONPATH:+:$PYTHONPATH}"
  tests=(env PYTHONPATH="$paths" "$python" -m pytest -rs -m gpu --noconftest)
  run tests-operations "${tests[@]}" "$root/tests/gpu/test_hopper_gpu.py"
  run tests-engine "${tests[@]}" "$root/tests/gpu/test_engine_gpu.py"
else
  echo "no pytest here: tests/gpu/test_*.py were not run" | tee "$results/tests.txt"
fi
echo "results so far: $results/summary.md"
exit "$code"
