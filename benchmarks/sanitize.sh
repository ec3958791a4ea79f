#!/usr/bin/env bash
# compute-sanitizer's memcheck over the tests of our own kernels; what it says goes to $OUT/sanitize.log.
#
#   OUT=results benchmarks/sanitize.sh [TEST-FILE...]
#
# torch's allocator puts many tensors into one allocation, in which no access is out of bounds: it is switched off. A
# graph cannot be captured then, so the tests that capture one run on their own, with the allocator.
# PYTHON is the interpreter that has pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder for the results}
PYTHON=${PYTHON:-python3}
SECONDS_EACH=${SECONDS_EACH:-150}
mkdir -p "$OUT"
: >"$OUT/sanitize.log"

checked() { # WHAT MARKERS FILE...: pytest below the sanitizer
  local what=$1 markers=$2 began code
  shift 2
  began=$(date +%s)
  timeout --kill-after=20 "$SECONDS_EACH" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20 \
    "$PYTHON" -m pytest -q -m "$markers" -p no:cacheprovider -o addopts= --import-mode=importlib "$@" >"$OUT/one.log" 2>&1
  code=$?
  [ $code -eq 0 ] || status=1
  cat "$OUT/one.log" >>"$OUT/sanitize.log"
  echo "$what: exit code $code after $(($(date +%s) - began)) s"
  grep -E "ERROR SUMMARY|passed|failed|Invalid|out of bounds" "$OUT/one.log" | tail -n 5
}

files=("$@")
[ $# -gt 0 ] || files=(
  tests/gpu/test_{pointwise,linear,batch_linear,experts,decode_kernels,balanced_decode,cascade,sampling}.py
  # Ranks that wait for each other might wait for ever.
  tests/gpu/test_one_shot_all_reduce.py::test_one_rank_by_itself
)
status=0
for file in "${files[@]}"; do
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 checked "$file" "gpu and not captures" "$file"
done
checked "tests that capture graphs" "gpu and captures" "${files[@]}"
rm -f "$OUT/one.log"
exit $status
