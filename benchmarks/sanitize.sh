#!/usr/bin/env bash
# Runs the tests of our own kernels under compute-sanitizer's memcheck; its output goes to $OUT/sanitize*.log.
#
#   OUT=results benchmarks/sanitize.sh [TEST-FILE...]
#
# torch's caching allocator, which puts many tensors into one allocation and so hides accesses out of bounds, is turned
# off. Graphs cannot be captured without it, so the tests that capture graphs run separately, with the allocator.
# Kernels are slow under it in proportion to their accesses to memory, so tests run at small sizes (tests/support/
# kernels/sizes.py). Files are checked at the same time. PYTHON is an interpreter with pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?set OUT to a directory for the results}
PYTHON=${PYTHON:-python3}
SECONDS_EACH=${SECONDS_EACH:-480}
export MINISGL_SMALL_GPU_TESTS=1
# Threads of many processes at the same time would only wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
: >"$OUT/sanitize.log"

checked() { # NAME MARKERS FILE...: pytest under the sanitizer
  local name=$1 markers=$2 log began code
  shift 2
  log=$OUT/sanitize-$(basename "${name//[ :,]/-}").log
  began=$(date +%s)
  # cuDNN's attention, which some tests compare with, reads masks of booleans four bytes at a time, beyond their end.
  timeout --kill-after=20 "$SECONDS_EACH" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20 \
    --kernel-name-exclude kns=cudnn_generated "$PYTHON" -m pytest -v -m "$markers" -p no:cacheprovider -o addopts= --import-mode=importlib "$@" >"$log" 2>&1
  code=$?
  {
    echo "$name: exit code $code after $(($(date +%s) - began)) s"
    grep -E "ERROR SUMMARY|passed|failed|Invalid|out of bounds" "$log" | tail -n 5
  } | tee -a "$OUT/sanitize.log"
  return $code
}

files=("$@")
[ $# -gt 0 ] || files=(
  tests/gpu/test_{pointwise,linear,batch_linear,experts,decode_kernels,balanced_decode,cascade,sampling,resample}.py
  tests/gpu/test_{fp8,fp8_kv}.py
  # Ranks that wait for each other might wait forever.
  tests/gpu/test_one_shot_all_reduce.py::test_one_rank_alone
)
running=()
for file in "${files[@]}"; do
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 checked "$file" "gpu and not captures" "$file" &
  running+=($!)
  if grep -q pytest.mark.captures "${file%%::*}"; then
    checked "$file, graphs" "gpu and captures" "$file" &
    running+=($!)
  fi
done
status=0
for each in "${running[@]}"; do
  wait "$each" || status=1
done
exit $status
