#!/usr/bin/env bash
# Everything that one Hopper GPU can show, in one go: checks, tests, slice. Results go into a folder.
#
#   tests/gpu/run.sh [--quick] [RESULTS [WHEELS]]      RESULTS: gpu-results; WHEELS: a folder of wheels to unpack
#
# Exit code: the first of the scripts' codes that is not 0.
set -uo pipefail
cd "$(dirname "$0")/../.."

quick=()
if [[ "${1:-}" == --quick ]]; then
  quick=(--quick)
  shift
fi
results=${1:-gpu-results}
wheels=()
if [[ -n "${2:-}" ]]; then
  wheels=(--wheels "$2")
fi
requests=(--requests 64 128 192 256)
if [[ ${#quick[@]} -gt 0 ]]; then
  requests=(--requests 128)
fi
python=${PYTHON:-python3}
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "$python has no torch; name a Python that has: PYTHON=… tests/gpu/run.sh" >&2
  exit 2
fi
mkdir -p "$results" || exit 2
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

run check "$python" tests/gpu/check.py "${quick[@]}" "${wheels[@]}"
if [[ $? -eq 2 ]]; then exit 2; fi # no GPU, or no wheels: the rest would say the same
run slice "$python" tests/gpu/slice.py "${requests[@]}" "${wheels[@]}"
if "$python" -c 'import pytest' 2>/dev/null; then
  run tests env PYTHONPATH="kernels:.${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -m gpu --noconftest tests/gpu
else
  echo "no pytest here: tests/gpu/test_*.py were not run" | tee "$results/tests.txt"
fi
exit "$code"
