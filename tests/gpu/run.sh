#!/usr/bin/env bash
# Everything that one Hopper GPU can show, in one go: checks, slice, tests. Results go into a folder.
#
#   tests/gpu/run.sh [--quick] [RESULTS [WHEELS]]      RESULTS: gpu-results; WHEELS: a folder of wheels to unpack
#
# PYTHON names the interpreter (python3). Exit code: the first of the scripts' codes that is not 0.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

quick=()
requests=(--requests 64 128 192 256)
if [[ "${1:-}" == --quick ]]; then
  quick=(--quick)
  requests=(--requests 128)
  shift
fi
results=${1:-gpu-results}
python=${PYTHON:-python3}
if ! "$python" -c 'import torch' 2>/dev/null; then
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
code=0

# run NAME COMMAND…: its output on the screen and in a file; keeps the first code that is not 0
run() {
  local name=$1 own
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$results/$name.txt"
  own=${PIPESTATUS[0]}
  if [[ $code -eq 0 ]]; then code=$own; fi
  return "$own"
}

run check "$python" "$root/tests/gpu/check.py" "${quick[@]}"
if [[ $code -eq 2 ]]; then exit 2; fi # no such GPU: the rest would say the same
run slice "$python" "$root/tests/gpu/slice.py" "${requests[@]}"
if "$python" -c 'import pytest' 2>/dev/null; then
  paths="$root/kernels:$root${PYTHONPATH:+:$PYTHONPATH}"
  run tests env PYTHONPATH="$paths" "$python" -m pytest -m gpu --noconftest "$root/tests/gpu"
else
  echo "no pytest here: tests/gpu/test_*.py were not run" | tee "$results/tests.txt"
fi
exit "$code"
