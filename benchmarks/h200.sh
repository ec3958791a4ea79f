#!/usr/bin/env bash
# Measures on GPUs, part after part. Each line of the log has the seconds since the beginning; a part that fails does
# not stop the next one. Results go to the directory $OUT, the newest figures to $OUT/h200.json.
#
#   OUT=results MINISGL_KERNELS_DIR=kernels benchmarks/h200.sh [PART...]
#
# Default parts: kernels tests sampling large small-models latency-0.6b latency-14b long-context compiled.
# The seconds are those of one H200 with kernels compiled ahead of time, starts included.
#
#   kernels       40 s   compile minisgl's own kernels into MINISGL_KERNELS_DIR, which already contains those of
#                        flashinfer; MODELS names others than those of the default parts
#   tests        300 s   pytest -m gpu
#   sampling     110 s   workloads A and C on Qwen3-0.6B, plain, with top-k and top-p, with penalties, with
#                        log-probabilities and a quarter of the requests each; seeds 0 to 2, one start
#   small         50 s   workloads A, C and D on Qwen3-0.6B, plain; seeds 0 to 2
#   large        120 s   the same on Qwen3-14B
#   small-models  70 s   A and C, plain and with top-k and top-p, on Llama-3.2-1B and Qwen2.5-0.5B (heads of 64)
#   latency-0.6b  95 s   a server with Qwen3-0.6B: first token on an idle server, workload A all at once, and 1,000
#                        requests of a chat trace at 20 per second
#   latency-14b  380 s   the same with Qwen3-14B, the trace at 4 per second
#   long-context  50 s   Llama-3.1-8B: the first token of a prompt of 100,000 tokens, and tokens behind it
#   compiled     190 s   A, C and D, plain and mixed, one seed, on Qwen2.5-7B, Llama-3.1-8B, both Mistral-7B and
#                        Qwen3-30B-A3B: no kernel is compiled after the start of an engine. The other parts count, too
#   compare      330 s   plain lines and starts, an older tree and this one in turn: BASE is the directory of the older
#                        package (runtime/ of its checkout), BASE_KERNELS_DIR has its kernels. Twice on Qwen3-0.6B,
#                        once on Qwen3-14B
#   constrained  110 s   Qwen3-14B and Qwen3-0.6B: answers under a schema of 20 fields beside free ones
#   start         40 s   Qwen3-14B again, for the time of its start with files in the page cache and only kernels
#                        compiled ahead of time, and workload C; `compiled_kernels` must be 0
#   quantized-start      Qwen3-14B from 29.5 GB of files in the page cache, in bf16 and quantized while it is loaded, twice in
#                        turn; `engine_up_seconds` of the second runs are compared
#   traces        60 s   traces of the device in a few steps of A, C and D
#   serve         25 s   a server with a tiny model: one question, metrics, and a clean exit
#   online       420 s   a server with Qwen3-14B and dummy weights, under a synthetic chat trace at three speeds
#   moe           60 s   Qwen3-30B-A3B, decode at batch 1 and 64
#   embed        150 s   Qwen3-0.6B and BGE-M3: embeddings of texts of 512 tokens, through HTTP and without a server;
#                        Qwen3-0.6B as a reranker: 100 documents of 300 tokens
#   gpt-oss      150 s   gpt-oss-20b and 120b: workloads A and C
#   hybrids      400 s   Qwen3.6-27B and 35B-A3B in bf16 and FP8 blocks, Nemotron 3 Nano: workloads A and C
#   fp8           90 s   FP8 blocks: workloads A and C on Qwen3-14B, C and C64 on Qwen3-30B-A3B
#   load                 random load, $MINUTES (8) minutes
#   tp2          500 s   on two GPUs: tests, all-reduce by size, workload A on Qwen3-14B
#   tp4          700 s   on four GPUs: all-reduce by size, Qwen3-32B under 1,000 requests of the chat trace at three speeds
#
# MINISGL is the command (default: minisgl), PYTHON an interpreter with pytest (default: python3). REPEAT is the number
# of seeds (3); REQUESTS shortens the traces, whose figures are recorded only for 1,000.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?set OUT to a directory for the results}
MINISGL=${MINISGL:-minisgl}
PYTHON=${PYTHON:-python3}
PORT=${PORT:-8123}
REPEAT=${REPEAT:-3}
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
  if curl -sf "127.0.0.1:$PORT/ready" >/dev/null; then
    log "the server is ready"
    # The engine captures its CUDA graphs while there are no requests.
    sleep 5
    "$@"
  else
    log "the server is not ready"
    tail -n 20 "$server_log"
  fi
  kill -TERM $server 2>/dev/null
  wait $server
  log "serve exited with $?"
  grep -hE "the engine is up|engine ready" "$server_log" || true
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

served() { # NAME SECONDS ARGUMENTS...: requests to the running server, with recorded figures
  local name=$1 seconds=$2
  shift 2
  limited "$seconds" $MINISGL bench serve --url "http://127.0.0.1:$PORT" --vocabulary 150000 \
    --json "$OUT/$name.json" --record "$OUT/h200.json" "$@"
}

latency() { # MODEL TRACE-SPEED TRACE-NAME: the figures of a served model
  local model=$1 speed=$2 trace=$3 key=${1//-/_}
  log "idle"
  served "idle-$model" 60 --warm-up 1 --num-requests 20 --max-concurrency 1 --input-len 4 4 --output-len 64 64 \
    --figures "ttft_idle_${key}_ms=ttft_ms_p50" "tpot_idle_${key}_ms=tpot_ms_p50"
  log "workload A, all at once"
  served "burst-$model" 200 --warm-up 1 --workload A --repeat "$REPEAT" \
    --figures "burst_256_${key}_itl_p99_ms=itl_ms_p99" "burst_256_${key}_tok_s=output_tokens_per_second" \
    "burst_256_${key}_ttft_p50_ms=ttft_ms_p50"
  log "trace at speed $speed"
  "$PYTHON" benchmarks/chat_trace.py "$SCRATCH/chat.jsonl" --requests "${REQUESTS:-1000}"
  local figures=(--figures "${trace}_${key}_ttft_p50_ms=ttft_ms_p50" "${trace}_${key}_ttft_p99_ms=ttft_ms_p99"
    "${trace}_${key}_itl_p99_ms=itl_ms_p99" "${trace}_${key}_tpot_p50_ms=tpot_ms_p50")
  # The figures are those of 1,000 requests; a shortened trace has other percentiles.
  [ "${REQUESTS:-1000}" = 1000 ] || figures=()
  served "trace-$model" 400 --trace "$SCRATCH/chat.jsonl" --block-size 16 --trace-speed "$speed" "${figures[@]}"
}

serve_model() { # MODEL COMMAND...: run COMMAND beside a server of a built-in configuration
  local model=$1
  shift
  $MINISGL models dummy "$model" "$SCRATCH/$model"
  with_server "$OUT/serve-$model.log" "$SCRATCH/$model" --dummy-weights -- "$@"
}

in_turn() { # NAME MODEL SECONDS ARGUMENTS...: once with the older tree, once with this one
  local name=$1 model=$2 seconds=$3
  shift 3
  PYTHONPATH=${BASE:?set BASE to the package directory of an older checkout}:${PYTHONPATH:-} \
    MINISGL_KERNELS_DIR=${BASE_KERNELS_DIR:-$MINISGL_KERNELS_DIR} \
    limited "$seconds" $MINISGL bench offline --model "$model" --json "$OUT/$name-old.json" "$@"
  limited "$seconds" $MINISGL bench offline --model "$model" --json "$OUT/$name-new.json" "$@"
  limited 20 "$PYTHON" benchmarks/compare.py "$OUT/$name-old.json" "$OUT/$name-new.json"
}

part() {
  case $1 in
    kernels)
      limited 300 $MINISGL kernels build ${MODELS:-qwen3-0.6b qwen3-14b qwen3-30b-a3b llama-3.2-1b qwen2.5-0.5b \
        llama-3.1-8b qwen2.5-7b mistral-7b-v0.3 mistral-7b-v0.1} --tp 1 --own-only
      ;;
    sampling)
      bench sampling-qwen3-0.6b qwen3-0.6b 240 --workload A C --repeat "$REPEAT" \
        --variants topk plain penalty logprobs mixed
      ;;
    small-models)
      for model in llama-3.2-1b qwen2.5-0.5b; do
        bench "offline-$model" $model 120 --workload A C --repeat "$REPEAT" --variants plain topk
      done
      ;;
    latency-0.6b) serve_model qwen3-0.6b latency qwen3-0.6b 7.7 trace_20rps ;;
    latency-14b) serve_model qwen3-14b latency qwen3-14b 1.54 trace_4rps ;;
    long-context) bench long-context-llama-3.1-8b llama-3.1-8b 150 --workload L --repeat "$REPEAT" ;;
    compiled)
      for model in qwen2.5-7b llama-3.1-8b mistral-7b-v0.3 mistral-7b-v0.1 qwen3-30b-a3b; do
        bench "compiled-$model" $model 120 --workload A C D --variants plain mixed
      done
      ;;
    compare)
      in_turn compare-1-qwen3-0.6b qwen3-0.6b 120 --workload A C --repeat "$REPEAT"
      in_turn compare-2-qwen3-0.6b qwen3-0.6b 120 --workload A C --repeat "$REPEAT"
      in_turn compare-qwen3-14b qwen3-14b 200 --workload A --repeat "$REPEAT"
      ;;
    constrained)
      for arguments in "qwen3-14b --rows 64 256 --neighbours --repeat 2" "qwen3-0.6b --rows 64 --repeat 5"; do
        # Split into words.
        limited 100 "$PYTHON" benchmarks/constrained.py --model $arguments --record "$OUT/h200.json"
      done
      ;;
    tests) gpu_tests ;;
    small) bench offline-qwen3-0.6b qwen3-0.6b 240 --workload A C D --repeat "$REPEAT" ;;
    large) bench offline-qwen3-14b qwen3-14b 300 --workload A C D --repeat "$REPEAT" ;;
    start)
      TRITON_CACHE_DIR=$SCRATCH/empty bench start-qwen3-14b qwen3-14b 120 --workload C --repeat 3
      ;;
    quantized-start)
      limited 200 "$PYTHON" benchmarks/random_checkpoint.py qwen3-14b "$SCRATCH/random-14b"
      for run in 1 2; do
        bench "start-files-bf16-$run" "$SCRATCH/random-14b" 120 --workload C
        bench "start-files-fp8-$run" "$SCRATCH/random-14b" 120 --workload C --quantization fp8
      done
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
    embed)
      for model in qwen3-0.6b bge-m3; do
        $MINISGL models dummy "$model" "$SCRATCH/$model"
        with_server "$OUT/embed-$model.log" "$SCRATCH/$model" --dummy-weights --task embed -- \
          limited 60 "$PYTHON" benchmarks/embed.py --url "http://127.0.0.1:$PORT" --config "$model" --record "$OUT/h200.json"
        limited 60 "$PYTHON" benchmarks/embed.py --offline "$model" --record "$OUT/h200.json"
      done
      with_server "$OUT/rerank.log" "$SCRATCH/qwen3-0.6b" --dummy-weights --task rerank -- \
        limited 60 "$PYTHON" benchmarks/embed.py --url "http://127.0.0.1:$PORT" --rerank --tokens 300 --record "$OUT/h200.json"
      ;;
    gpt-oss)
      bench offline-gpt-oss-20b gpt-oss-20b 240 --workload A C --repeat 2
      bench offline-gpt-oss-120b gpt-oss-120b 400 --workload A C
      ;;
    hybrids)
      for model in qwen3.6-27b qwen3.6-35b-a3b; do
        bench "offline-$model" "$model" 200 --workload C A
        bench "offline-$model-fp8" "$model" 200 --quantization fp8-block --workload C A
      done
      bench offline-nemotron-3-nano nemotron-3-nano 200 --workload C A
      ;;
    moe) bench offline-qwen3-30b-a3b qwen3-30b-a3b 240 --workload C C64 --repeat 2 ;;
    fp8)
      bench offline-qwen3-14b-fp8 qwen3-14b 120 --quantization fp8-block --workload A C
      bench offline-qwen3-30b-a3b-fp8 qwen3-30b-a3b 120 --quantization fp8-block --workload C C64
      ;;
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
[ $# -gt 0 ] || parts=(kernels tests sampling large small-models latency-0.6b latency-14b long-context compiled)
for name in "${parts[@]}"; do
  log "$name"
  part "$name" 2>&1
done | tee "$OUT/h200.log"
