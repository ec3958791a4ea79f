#!/usr/bin/env bash
# Measures on GPUs, part after part. Each line of the log has the seconds since the beginning; a part that fails does
# not stop the next one. Results go to the directory $OUT.
#
#   OUT=results MINISGL_KERNELS_DIR=kernels benchmarks/h200.sh [PART...]
#
# Default parts: kernels tests small large start serve.
#
#   kernels compile minisgl's own kernels into MINISGL_KERNELS_DIR, which already contains those of flashinfer
#   tests   pytest -m gpu
#   small   workloads A, C and D on Qwen3-0.6B in one process, seeds 0 to 2, recorded in $OUT/h200.json
#   large   the same on Qwen3-14B
#   start   Qwen3-14B again, for the time of its start with files in the page cache and only kernels compiled ahead of
#           time, and workload C; `compiled_kernels` must be 0
#   traces  traces of the device in a few steps of A, C and D
#   serve   a server with a tiny model: one question, metrics, and a clean exit
#   online  a server with Qwen3-14B and dummy weights, under a synthetic chat trace at three speeds
#   moe     Qwen3-30B-A3B, decode at batch 1 and 64
#   load    random load, $MINUTES (8) minutes
#   tp2     on two GPUs: tests, all-reduce by size, workload A on Qwen3-14B
#   tp4     on four GPUs: all-reduce by size, Qwen3-32B under 1,000 requests of the chat trace at three speeds
#
# MINISGL is the command (default: minisgl), PYTHON an interpreter with pytest (default: python3).
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?set OUT to a directory for the results}
MINISGL=${MINISGL:-minisgl}
PYTHON=${PYTHON:-python3}
PORT=${PORT:-8123}
BEGAN=$(date +%s)
mkdir -p "$OUT"
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
# Start from the recorded results: those of other models stay, newer ones of this machine replace older ones.
[ -e "$OUT/h200.json" ] || cp benchmarks/results/h200.json "$OUT/h200.json" 2>/dev/null

log() { echo "=== [$(($(date +%s) - BEGAN)) s] $*"; }

limited() { # SECONDS COMMAND...: report an exit code other than 0
  timeout --kill-after=20 "$@" || log "exit code $? of: ${*:2}"
}

bench() { # NAME MODEL SECONDS ARGUMENTS...
  local name=$1 model=$2 seconds=$3
  shift 3
  limited "$seconds" $MINISGL bench offline --model "$model" --json "$OUT/$name.json" --record "$OUT/h200.json" "$@"
}

gpu_tests() { # ARGUMENTS...
  limited 500 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -o addopts= --import-mode=importlib --timeout 120 \
    --durations=10 tests/gpu tests/runtime/models/test_cuda.py tests/runtime/distributed/test_nccl.py "$@" \
    >>"$OUT/test-gpu.log" 2>&1
  tail -n 25 "$OUT/test-gpu.log"
}

with_server() { # LOG SERVE-ARGUMENTS... -- COMMAND...: run COMMAND while the server runs, then stop it
  local server_log=$1 arguments=() server
  shift
  while [ "$1" != -- ]; do arguments+=("$1"); shift; done
  shift
  $MINISGL serve "${arguments[@]}" --port "$PORT" --log-format json >"$server_log" 2>&1 &
  server=$!
  for _ in $(seq 240); do
    curl -sf "127.0.0.1:$PORT/ready" >/dev/null && break
    kill -0 $server 2>/dev/null || break
    sleep 0.5
  done
  log "the server is ready, or has exited"
  "$@"
  kill -TERM $server
  wait $server
  log "serve exited with $?"
  grep -hE "the engine is up|engine ready" "$server_log"
}

ask() {
  curl -s "127.0.0.1:$PORT/v1/chat/completions" -H 'content-type: application/json' \
    -d '{"model":"tiny","messages":[{"role":"user","content":"Hello"}],"max_tokens":16,"temperature":0}'
  echo
  curl -s "127.0.0.1:$PORT/metrics" | grep -E '^minisgl:engine_(start|steps)'
}

replay() { # NAME REQUESTS SPEED...: replay the trace at each speed; 2.5 is 6.5 requests per second
  local name=$1 requests=$2
  shift 2
  "$PYTHON" benchmarks/chat_trace.py "$SCRATCH/chat.jsonl" --requests "$requests"
  for speed in "$@"; do
    log "trace at speed $speed"
    limited 400 $MINISGL bench serve --url "http://127.0.0.1:$PORT" --trace "$SCRATCH/chat.jsonl" --block-size 16 \
      --trace-speed "$speed" --vocabulary 150000 --json "$OUT/serve-$name-x$speed.json"
  done
}

part() {
  case $1 in
    kernels)
      limited 200 $MINISGL kernels build qwen3-0.6b qwen3-14b qwen3-30b-a3b --tp 1 --own-only
      ;;
    tests) gpu_tests ;;
    small) bench offline-qwen3-0.6b qwen3-0.6b 240 --workload A C D --repeat 3 ;;
    large) bench offline-qwen3-14b qwen3-14b 300 --workload A C D --repeat 3 ;;
    start)
      TRITON_CACHE_DIR=$SCRATCH/empty bench start-qwen3-14b qwen3-14b 120 --workload C --repeat 3
      ;;
    traces)
      limited 120 $MINISGL bench offline --model qwen3-0.6b --workload A C D --trace "$SCRATCH/trace.json.gz"
      tar cf "$OUT/traces.tar" -C "$SCRATCH" .
      ;;
    serve)
      $MINISGL models tiny "$SCRATCH/tiny" --head-dim 128 --heads 4 --kv-heads 2
      with_server "$OUT/serve.log" "$SCRATCH/tiny" -- ask
      ;;
    online)
      $MINISGL models dummy qwen3-14b "$SCRATCH/14b"
      with_server "$OUT/serve-14b.log" "$SCRATCH/14b" --dummy-weights --max-model-len 12288 -- \
        replay 14b "${REQUESTS:-250}" 1.25 1.67 2.5
      ;;
    moe) bench offline-qwen3-30b-a3b qwen3-30b-a3b 240 --workload C C64 --repeat 2 ;;
    load)
      limited $((60 * ${MINUTES:-8} + 60)) "$PYTHON" -m support.numerics.random_load --minutes "${MINUTES:-8}" |
        tee "$OUT/random-load.json"
      ;;
    tp2)
      gpu_tests -k 'two or nccl or collectives'
      limited 120 $MINISGL bench comm --tp 2 --json "$OUT/comm-tp2.json"
      bench offline-qwen3-14b-tp2 qwen3-14b 300 --tp 2 --workload A --repeat 3
      ;;
    tp4)
      limited 120 $MINISGL bench comm --tp 4 --json "$OUT/comm-tp4.json"
      $MINISGL models dummy qwen3-32b "$SCRATCH/32b"
      with_server "$OUT/serve-32b.log" "$SCRATCH/32b" --dummy-weights --tp 4 --max-model-len 12288 -- \
        replay 32b-tp4 "${REQUESTS:-1000}" 3.33 2.5 2
      ;;
    *) log "unknown part $1" ;;
  esac
}

parts=("$@")
[ $# -gt 0 ] || parts=(kernels tests small large start serve)
for name in "${parts[@]}"; do
  log "$name"
  part "$name" 2>&1
done | tee "$OUT/h200.log"
