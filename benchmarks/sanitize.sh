#!/usr/bin/env bash
# compute-sanitizer's memcheck over the tests of our own kernels; what it says goes to $OUT/sanitize.log.
#
#   OUT=results benchmarks/sanitize.sh [TEST-FILE...]
#
# torch's allocator would put many tensors into one allocation, in which no access is out of bounds: it is switched off.
# That rules out CUDA graphs, and so the tests of a whole engine. PYTHON is the interpreter that has pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder for the results}
PYTHON=${PYTHON:-python3}
SECONDS_EACH=${SECONDS_EACH:-150}
mkdir -p "$OUT"
: >"$OUT/sanitize.log"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_LAUNCH_BLOCKING=0

files=("$@")
[ $# -gt 0 ] || files=(tests/gpu/test_{pointwise,linear,decode_kernels,cascade,sampling}.py)
status=0
for file in "${files[@]}"; do
  [ -e "$file" ] || continue
  began=$(date +%s)
  # Once without it: kernels are compiled at ordinary speed, and a test that fails anyway is told apart.
  "$PYTHON" -m pytest -q -x -m gpu -p no:cacheprovider -o addopts= --import-mode=importlib "$file" >/dev/null 2>&1 ||
    echo "$file fails without the sanitizer already"
  timeout --kill-after=20 "$SECONDS_EACH" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20 \
    "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -o addopts= --import-mode=importlib "$file" >"$OUT/one.log" 2>&1
  code=$?
  [ $code -eq 0 ] || status=1
  cat "$OUT/one.log" >>"$OUT/sanitize.log"
  echo "$file: exit code $code after $(($(date +%s) - began)) s"
  grep -E "ERROR SUMMARY|passed|failed|Invalid|out of bounds" "$OUT/one.log" | tail -n 5
done
rm -f "$OUT/one.log"
exit $status
