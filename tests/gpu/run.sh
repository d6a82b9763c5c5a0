#!/usr/bin/env bash
# Everything that one Hopper GPU can show: tests, slice, checks, profile, a job. Results go into a folder as they come.
#
#   tests/gpu/run.sh [--call 1|2|3|job|ranks|stream] [--quick | --rehearse] [--minutes M] [--only SECTION]... [--archive FILE]
#                    [RESULTS [WHEELS]]
#
# RESULTS: gpu-results; WHEELS: a folder of wheels to unpack. Sections: compile, tests-operations, slice, check,
# tests-engine, profile, counters, job, ranks, stream; each is a process of its own, and what goes wrong in one leaves the
# others alone. compile runs all the others at once, small, for what they compile and what fails; it keeps no times.
# --minutes ends after so many (510 seconds: 8.5); the same command goes on with what is not done. --call: a third of
# all that, in 8.5 minutes unless --minutes says otherwise: 1 compile, tests of operations, decode of 128 requests,
# quick checks; 2 the other figures of the slice, all checks; 3 tests of the engine, profile, counters. --call job: a
# whole job with a checkpoint of 30 billion weights that is made there. --call ranks: two ranks on the one GPU.
# --call stream: layers streamed to the GPU.
# --rehearse: tiny shapes on the CPU, no times and, without --minutes, no clock. PYTHON names the interpreter
# (python3).
#
# RESULTS has a folder per GPU model, and caches, what kernels were compiled to. All of it is packed into one archive
# (--archive; RESULTS.tar.xz) after each section: what was done is there even if the machine goes away. Where RESULTS is
# missing and RESULTS.tar.xz is not, that is unpacked first.
#
# Exit code: 0 all is well; 1 something failed; 2 it cannot be run here; 3 not all was run.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
usage="usage: tests/gpu/run.sh [--call 1|2|3|job|ranks|stream] [--quick | --rehearse] [--minutes M] [--only SECTION]... [--archive FILE] \
[RESULTS [WHEELS]]"
sections=" compile tests-operations slice check tests-engine profile counters job ranks stream "

refuse() {
  echo "$1; $usage" >&2
  exit 2
}

size=()     # --quick or --rehearse
rehearse=() # --rehearse alone
call=
end=0
only=()
archive=
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --quick) size=("$1") ;;
    --rehearse) size=("$1") rehearse=("$1") ;;
    --call)
      if [[ ! "${2:-}" =~ ^([123]|job|ranks|stream)$ ]]; then refuse "--call takes 1, 2, 3, job, ranks or stream"; fi
      call=$2
      shift
      ;;
    --minutes)
      end=$(awk -v minutes="${2:-}" 'BEGIN { print int(60 * minutes) }')
      if ((end <= 0)); then refuse "--minutes takes a number above 0"; fi
      shift
      ;;
    --only)
      if [[ "$sections" != *" ${2:-} "* ]]; then refuse "--only: there is no section '${2:-}'"; fi
      only+=("$2")
      shift
      ;;
    --archive)
      if [[ -z "${2:-}" ]]; then refuse "--archive takes the name of a file"; fi
      archive=$2
      shift
      ;;
    *) refuse "there is no option $1" ;;
  esac
  shift
done
results=${1:-gpu-results}
wheels=${2:-}
if [[ $call ]] && ((!end && !${#rehearse[@]})); then end=510; fi
python=${PYTHON:-python3}
here=$root/tests/gpu
# has NAME: whether the interpreter has this package
has() { "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }
if ! has torch 2>/dev/null; then
  echo "$python has no torch; name a Python that has: PYTHON=… tests/gpu/run.sh" >&2
  exit 2
fi

model=$("$python" "$here/accelerator.py" "${rehearse[@]}") || exit 2 # no such GPU
if [[ ! -e "$results" && -e "$results.tar.xz" ]]; then
  "$python" "$here/parcel.py" unpack "$results.tar.xz" "$results" || exit 2
fi
folder=$results/$model
mkdir -p "$folder" "$results/caches" || exit 2
caches=$(cd "$results/caches" && pwd)
if [[ -n "$wheels" ]]; then
  unpacked=$caches/wheels # always the same place: DeepGEMM's cache goes by the path of its headers, too
  rm -rf "$unpacked"
  "$python" "$here/wheels.py" "$wheels" "$unpacked" || exit 2
  export PYTHONPATH="$unpacked${PYTHONPATH:+:$PYTHONPATH}"
fi
export TRITON_CACHE_DIR=$caches/triton DG_JIT_CACHE_DIR=$caches/deep_gemm
nvidia-smi >"$folder/machine.txt" 2>&1
code=0
packed=

# note CODE: failures stand before what was not run
note() {
  if [[ $1 -ne 0 && ($code -eq 0 || $1 -ne 3) && $code -ne 1 ]]; then code=$1; fi
}

# pack: all that there is so far
pack() {
  "$python" "$here/summary.py" "$folder" >"$folder/summary.md"
  "$python" "$here/parcel.py" pack "$results" "${archive:-$results.tar.xz}" || note 1
  packed=yes
}

# left LIMIT: seconds for a section of at most so many (0: any number) on a GPU, 0: without end
left() {
  local most=$1 rest=$((end - SECONDS))
  if ((${#rehearse[@]})); then most=0; fi
  if ((!end)); then rest=0; fi
  if ((most && (!rest || most < rest))); then rest=$most; fi
  echo "$rest"
}

# is_wanted NAME: whether --only leaves the section in
is_wanted() { ((!${#only[@]})) || [[ " ${only[*]} " == *" $1 "* ]]; }

# run NAME LIMIT COMMAND…: its output on the screen and in a file
run() {
  local name=$1 limit=$2 seconds own
  shift 2
  if ! is_wanted "$name"; then return; fi
  if ((end && end - SECONDS < 30)); then
    echo "== $name: not run, time is up; the same command goes on with it"
    note 3
    return
  fi
  seconds=$(left "$limit")
  echo "== $name$( ((seconds)) && echo ", at most $seconds s")"
  # the signal is that of Ctrl-C, at which pytest still says what has failed
  timeout --signal=INT --kill-after=15 "$seconds" "$@" 2>&1 | tee "$folder/$name.txt"
  own=${PIPESTATUS[0]}
  if [[ $own -eq 124 || $own -eq 137 ]]; then
    echo "== $name: time was up after $seconds s" | tee -a "$folder/$name.txt"
    own=3
  elif [[ $name == tests-* && $own -eq 5 ]]; then # pytest has found no test that it could run
    echo "== $name: NOT RUN, see the reasons above" | tee -a "$folder/$name.txt"
    own=3
  fi
  if [[ $name != counters ]]; then note "$own"; fi # not every machine lets them be read
  pack
}

# compile LIMIT: on a fresh machine compiling takes most of the time, and in one process after the other one core alone
compile() {
  local limit=$1 seconds threads name pid scratch pids=() names=()
  if ! is_wanted compile; then return; fi
  if ((end && end - SECONDS < 30)); then
    echo "== compile: not run, time is up; the same command goes on with it"
    note 3
    return
  fi
  seconds=$(left "$limit")
  scratch=$(mktemp -d)
  threads=$((($(nproc) + 10) / 11)) # of each process; with all cores each the 11 of them would wait for each other
  echo "== compile, all at once$( ((seconds)) && echo ", at most $seconds s")"
  # at_once NAME COMMAND…: in the background, its output in a file
  at_once() {
    local name=$1
    shift
    OMP_NUM_THREADS=$threads timeout --signal=INT --kill-after=15 "$seconds" "$@" >"$folder/compile-$name.txt" 2>&1 &
    pids+=($!) names+=("$name")
  }
  if ((!${#rehearse[@]})); then # nothing would be compiled, and on a CPU they take minutes
    at_once tests-operations "${pytest[@]}" "$here/test_hopper_gpu.py"
    at_once tests-engine "${pytest[@]}" "$here/test_engine_gpu.py"
  fi
  for part in 1 2 3 4; do
    at_once "check-$part" "$python" "$here/check.py" "${size[@]:---quick}" --part "$part/4" --out "$scratch/$part.jsonl"
  done
  for requests in 32 64 96 128; do
    at_once "decode-$requests" "$python" "$here/trace_step.py" "${rehearse[@]}" --unit decode --layers 4 --requests "$requests"
  done
  at_once prefill "$python" "$here/trace_step.py" "${rehearse[@]}" --unit prefill --layers 5
  for place in "${!pids[@]}"; do
    wait "${pids[place]}"
    own=$? name=${names[place]}
    case $name/$own in */124 | */137 | tests-*/5) own=3 ;; esac
    echo "  $name: exit code $own after at most $SECONDS s; compile-$name.txt"
    note "$own"
  done
  rm -rf "$scratch"
  pack
}

# script NAME LIMIT FILE ARGUMENT…: one that ends by itself, a little before it would be ended
script() {
  local name=$1 limit=$2 file=$3 seconds minutes=()
  shift 3
  seconds=$(left "$limit")
  if ((seconds)); then minutes=(--minutes "$(awk -v s="$seconds" 'BEGIN { printf "%.2f", (s - 10) / 60 }')"); fi
  run "$name" "$limit" "$python" "$here/$file" "$@" "${minutes[@]}"
}

operations() { run tests-operations "$1" "${pytest[@]}" "$here/test_hopper_gpu.py"; }
engine() { run tests-engine "$1" "${pytest[@]}" "$here/test_engine_gpu.py"; }
checks() { script check "$1" check.py "${@:2}" --out "$folder/check.jsonl"; }
slices() { script slice "$1" slice.py "${@:2}" "${rehearse[@]}" --out "$folder/slice.jsonl"; }
job() { script job "$1" job.py "${rehearse[@]}" --out "$folder/job.jsonl"; }
ranks() { script ranks "$1" ranks.py "${rehearse[@]}" --out "$folder/ranks.jsonl"; }
streams() { script stream "$1" stream.py "${rehearse[@]}" --out "$folder/stream.jsonl"; }
profile() { run profile "$1" "$python" "$here/trace_step.py" "${rehearse[@]}" --out "$folder"; }
counters() {
  if ! is_wanted counters; then return; fi
  local attention=("$python" "$here/trace_step.py" "${rehearse[@]}" --attention)
  if ! command -v ncu >/dev/null || ((${#rehearse[@]})); then
    run counters "$1" "${attention[@]}"
    echo "== counters: ncu was not used" | tee -a "$folder/counters.txt"
  else # clocks stay as they are; the first launch compiles
    run counters "$1" ncu --target-processes all --clock-control none --kernel-name 'regex:_attend_(tiles?|part)' \
      --launch-skip 4 --launch-count 4 --section SpeedOfLight --section Occupancy --section WarpStateStats \
      --section MemoryWorkloadAnalysis --section LaunchStats "${attention[@]}"
  fi
}

if ((${#rehearse[@]})); then export GPU_TESTS=rehearse; fi
# failures are told when they happen, and where a test hangs
pytest=(env "PYTHONPATH=$root/kernels:$root:$here${PYTHONPATH:+:$PYTHONPATH}"
  "$python" -m pytest -v --tb=short -rs -m gpu --noconftest -p no:cacheprovider -p told_at_once -o faulthandler_timeout=90)
if ! has pytest; then pytest=(sh -c 'echo "no pytest here: tests of the GPU were not run"; exit 5'); fi
case $call in
  1)
    compile 220
    operations 60
    slices 150 --decode --requests 128
    checks 0 "${size[@]:---quick}"
    ;;
  2)
    slices 360 --requests 64 128 192 256
    checks 0 "${size[@]}"
    ;;
  3)
    engine 200
    profile 150
    counters 120
    checks 0 "${size[@]}" --only mla_prefill mla_decode
    ;;
  job) job 0 ;;
  ranks) ranks 0 ;;
  stream) streams 120 ;;
  *)
    compile 0
    operations 0
    if [[ "${size[*]}" == --quick ]]; then slices 0 --requests 128; else slices 0 --requests 64 128 192 256; fi
    checks 0 "${size[@]}"
    engine 0
    profile 0
    counters 0
    job 0
    ranks 0
    streams 0
    ;;
esac
if [[ ! $packed ]]; then pack; fi
echo "results so far: $folder/summary.md, exit code $code after $SECONDS s"
exit "$code"
