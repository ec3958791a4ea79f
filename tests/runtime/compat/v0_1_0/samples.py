"""Messages as plain values: of each type one with every field set to something else than its default (`full`) and one
with the required fields only (`least`), and some that others read in another way."""

from __future__ import annotations

import struct
from typing import Any, Final

EPOCH: Final = [1_763_860_957_123, 7]
REVISION: Final = "5f3c9d2b71"
AT: Final = "2026-11-23T03:22:37.250+00:00"

ONE: Final = bytes(range(16))
TWO: Final = bytes(range(240, 256))


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


CARD: Final = {
    "name": "Qwen/Qwen3-0.6B",
    "revision": "c1899de289a04d12100db370d81485cdf75e47ca",
    "max_model_len": 40960,
    "vocab_size": 151936,
    "eos_token_ids": [151645, 151643],
    "tokenizer_hashes": {"tokenizer.json": "aeb1" * 16, "tokenizer_config.json": "d5d0" * 16},
}
SAMPLING: Final = {
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "seed": -(2**63),
    "ignore_eos": True,
    "stop_token_ids": [13, 151645],
    "min_tokens": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.05,
    "logit_bias": {5: 1.5, 151935: -100.0},
    "logprobs": 5,
    "prompt_logprobs": 2,
}
REQUEST: Final = SAMPLING | {"max_tokens": 256}
PARAMS: Final = REQUEST | {"stop": ["\n\n", "Frage:", "终"], "include_stop_str_in_output": True}
LOGPROBS: Final = [floats(-0.5, -1.25), ints(7, 8, 9, 10), floats(-0.5, -2.0, -1.25, -3.5)]
STATUS: Final = {
    "waiting": 3,
    "running": 64,
    "used_pages": 812,
    "num_pages": 4096,
    "page_size": 16,
    "queue_times": [*range(21), 5],
    "queue_seconds": 12.75,
    "step_sizes": [*range(14)],
    "step_tokens": 90_000,
    "steps": 1234,
    "prompt_tokens": 50_000,
    "cached_tokens": 20_000,
    "prefill_tokens": 30_000,
    "generated_tokens": 60_000,
    "retractions": 2,
    "finished": 321,
    "start_seconds": {"load": 3.25, "graphs": 10.5},
    "draining": True,
}
LEAST_STATUS: Final = {
    name: 0
    for name in (
        *("waiting", "running", "used_pages", "num_pages", "steps", "prompt_tokens", "cached_tokens"),
        *("prefill_tokens", "generated_tokens", "retractions", "finished"),
    )
}
MESSAGES: Final = [
    {"role": "system", "content": "Antworte kurz – auf Deutsch.", "name": "rules"},
    {"role": "developer", "content": "No lists.", "name": "rules"},
    {"role": "user", "content": "Wie viel ist 6 × 7? 😀", "name": "ada"},
    {
        "role": "assistant",
        "content": None,
        "name": "helper",
        "tool_call_id": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": [7, None]}}}
        ],
    },
    {"role": "tool", "content": "42", "name": "multiply", "tool_call_id": "c1", "tool_calls": []},
]
FULL_MESSAGES: Final = [{"name": "", "tool_call_id": "", "tool_calls": []} | message for message in MESSAGES]
LEAST_MESSAGES: Final = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]

TO_SCHEDULER: Final = {
    "hello/full": {"type": "hello", "version": 1, "client": "frontend-0/1"},
    "hello/least": {"type": "hello", "version": 0, "client": ""},
    "submit/full": {
        "type": "submit",
        "id": ONE,
        "prompt": ints(151644, 872, 198, 2**31 - 1),
        "output": ints(40, 41),
        **REQUEST,
        "priority": -3,
        "deadline_ms": 1_763_860_999_000,
        "cache_salt": b"tenant \xff",
    },
    "submit/least": {"type": "submit", "id": TWO, "prompt": ints(1), "max_tokens": 1, "seed": 0},
    "abort/full": {"type": "abort", "id": ONE},
    "abort/least": {"type": "abort", "id": b""},
    "flush/full": {"type": "flush", "id": ONE},
    "flush/least": {"type": "flush", "id": b""},
}

FROM_SCHEDULER: Final = {
    "welcome/full": {
        "type": "welcome",
        "version": 1,
        "epoch": EPOCH,
        "model": CARD,
        "replica": "qwen-r0",
        "revision": REVISION,
    },
    "welcome/least": {
        "type": "welcome",
        "version": 1,
        "epoch": [0, 0],
        "model": CARD | {"revision": "", "eos_token_ids": [], "tokenizer_hashes": {}},
    },
    "ack/full": {"type": "ack", "id": ONE},
    "ack/least": {"type": "ack", "id": b""},
    "failed/full": {"type": "failed", "id": ONE, "code": "engine_lost", "message": "rank 1 ended; try again"},
    "failed/least": {"type": "failed", "id": TWO, "code": "draining", "message": ""},
    "prompt_logprobs/full": {"type": "prompt_logprobs", "id": ONE, "start": 1, "logprobs": LOGPROBS},
    "prompt_logprobs/least": {"type": "prompt_logprobs", "id": TWO, "start": 513, "logprobs": [b"", b"", b""]},
    "tokens/full": {
        "type": "tokens",
        "ids": ONE + TWO,
        "index": ints(0, 17),
        "token": ints(9707, 151645),
        "finish": bytes((0, 1)),
        "cached": ints(512, 0),
        "logprobs": {1: [floats(-0.125), ints(151645, 13), floats(-0.125, -2.5)]},
        "waits": {0: [0.0625, 0.5]},
    },
    "tokens/least": {"type": "tokens", "ids": b"", "index": b"", "token": b"", "finish": b"", "cached": b""},
    "status/full": {"type": "status", **STATUS},
    "status/least": {"type": "status", **LEAST_STATUS},
    "flushed/full": {"type": "flushed", "id": ONE, "pages": 77},
    "flushed/least": {"type": "flushed", "id": b"", "pages": 0},
}

TO_TOKENIZER: Final = {
    "generate/full": {
        "type": "generate",
        "id": ONE,
        "messages": FULL_MESSAGES[3:],
        "prompt": "Once upon a time",
        "tokens": ints(1, 2, 3),
        "template_variables": {"enable_thinking": False, "tools": [{"type": "function"}]},
        "echo": True,
        "params": PARAMS,
        "priority": 2,
        "deadline_ms": 1_763_860_999_000,
        "cache_salt": "tenant ü",
    },
    "generate/least": {"type": "generate", "id": TWO, "params": {}},
    "generate/chat": {"type": "generate", "id": ONE, "messages": MESSAGES, "params": {"max_tokens": 16}},
    "generate/prompt": {"type": "generate", "id": ONE, "prompt": "Once", "echo": True, "params": {"logprobs": 0}},
    "generate/tokens": {"type": "generate", "id": ONE, "tokens": ints(5, 6), "params": {"temperature": 0.0}},
    "cancel/full": {"type": "cancel", "id": ONE},
    "cancel/least": {"type": "cancel", "id": b""},
    "encode/full": {
        "type": "encode",
        "id": ONE,
        "messages": FULL_MESSAGES[3:],
        "prompt": "Once upon a time",
        "template_variables": {"enable_thinking": True},
        "add_special_tokens": False,
        "add_generation_prompt": False,
    },
    "encode/least": {"type": "encode", "id": TWO},
    "encode/chat": {"type": "encode", "id": ONE, "messages": LEAST_MESSAGES},
    "decode/full": {"type": "decode", "id": ONE, "tokens": ints(9707, 0)},
    "decode/least": {"type": "decode", "id": TWO, "tokens": b""},
    "describe/full": {"type": "describe", "id": ONE},
    "describe/least": {"type": "describe", "id": b""},
    "flush/full": {"type": "flush", "id": ONE},
    "flush/least": {"type": "flush", "id": b""},
}

REPLICAS: Final = [
    {
        "replica": "qwen-r0",
        "revision": REVISION,
        "epoch": EPOCH,
        "address": "10.0.0.7",
        "routable": True,
        "reason": "",
        "waits_for_files": False,
        "running": 3,
        "waiting": 1,
    },
    {
        "replica": "qwen-r1",
        "revision": REVISION,
        "epoch": [EPOCH[0] + 5, 1],
        "address": "fd00::7",
        "routable": False,
        "reason": "its tokenizer files are not those in use",
        "waits_for_files": True,
        "running": 0,
        "waiting": 0,
    },
    {
        "replica": "",
        "revision": "",
        "epoch": [0, 0],
        "address": "10.0.0.9",
        "routable": False,
        "reason": "it has not answered yet",
        "waits_for_files": False,
        "running": 0,
        "waiting": 0,
    },
]

FROM_TOKENIZER: Final = {
    "state/full": {
        "type": "state",
        "version": 1,
        "at": 12345.625,
        "model": {
            "card": CARD,
            "epoch": EPOCH,
            "defaults": {
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0.01,
                "repetition_penalty": 1.05,
            },
            "names": ["qwen", "qwen3"],
        },
        "status": STATUS,
        "reason": "rank 1 ended",
        "replicas": REPLICAS[1:2],
        "retried": 9,
    },
    "state/least": {"type": "state", "version": 1, "at": 0.0, "model": None, "status": None},
    "state/replicas": {
        "type": "state",
        "version": 1,
        "at": 1.5,
        "model": {"card": CARD, "epoch": EPOCH, "defaults": {}},
        "status": LEAST_STATUS,
        "replicas": [
            {name: part for name, part in replica.items() if name != "waits_for_files"} for replica in REPLICAS
        ],
    },
    "accepted/full": {"type": "accepted", "id": ONE, "prompt_tokens": 513},
    "accepted/least": {"type": "accepted", "id": b"", "prompt_tokens": 0},
    "texts/full": {
        "type": "texts",
        "ids": ONE + TWO,
        "texts": ["Grüße", "終"],
        "finished": [
            {
                "id": TWO,
                "reason": "length",
                "prompt_tokens": 513,
                "cached_tokens": 512,
                "completion_tokens": 16,
                "wait": [0.25, 0.75],
            }
        ],
        "counts": [1, 16],
        "scored": {
            0: [
                [b"Gr", b"Gr", 0, None, []],
                ["üße".encode(), "üße".encode(), 2, -0.5, [("üße".encode(), -0.5), (b"\xc3", -3.25)]],
            ]
        },
    },
    "texts/least": {"type": "texts", "ids": b"", "texts": [], "finished": [], "counts": []},
    "texts/no-wait": {
        "type": "texts",
        "ids": ONE,
        "texts": [""],
        "finished": [{"id": ONE, "reason": "stop", "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}],
        "counts": [1],
    },
    "text_failed/full": {
        "type": "text_failed",
        "id": ONE,
        "code": "invalid_request",
        "message": "logit_bias names token 200000",
        "param": "logit_bias",
    },
    "text_failed/least": {"type": "text_failed", "id": TWO, "code": "engine_lost", "message": ""},
    "encoded/full": {"type": "encoded", "id": ONE, "tokens": ints(9707, 0), "names": [b"Hello", b"\xc3"]},
    "encoded/least": {"type": "encoded", "id": TWO, "tokens": b"", "names": []},
    "decoded/full": {"type": "decoded", "id": ONE, "text": "Grüße 😀"},
    "decoded/least": {"type": "decoded", "id": TWO, "text": ""},
    "described/full": {
        "type": "described",
        "id": ONE,
        "special_tokens": {"bos_token": "<s>", "eos_token": "<|im_end|>"},
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "add_bos_token": True,
    },
    "described/least": {
        "type": "described",
        "id": TWO,
        "special_tokens": {},
        "chat_template": None,
        "add_bos_token": False,
    },
    "flushed/full": {"type": "flushed", "id": ONE, "pages": 77},
    "flushed/least": {"type": "flushed", "id": b"", "pages": 0},
}

HALF: Final = 0x3F000000
"""The bits of 0.5 in float32."""
NO_PLAN: Final[dict[str, Any]] = {
    "epoch": 0,
    "step": 0,
    "decode_slots": [],
    "decode_positions": [],
    "prefill_slots": [],
    "prefill_starts": [],
    "prefill_lengths": [],
    "prefill_sample": [],
    "prefill_tokens": [],
    "page_updates": [[], [], []],
    "new_rows": [[], [], [], [], [], [], []],
    "poison_pages": [],
    "controls": [],
    "shared_prefixes": [],
}
STEP: Final = {
    "epoch": 2**40 + 5,
    "step": 2**33 + 1,
    "decode_slots": [4, 2, 9],
    "decode_positions": [19, 700, 701],
    "prefill_slots": [7, 8],
    "prefill_starts": [0, 512],
    "prefill_lengths": [2, 3],
    "prefill_sample": [1, 0],
    "prefill_tokens": [151644, 872, 40, 41, 42],
    "page_updates": [[7, 8], [0, 32], [11, 12]],
    "new_rows": [[7, 8], [HALF, 0], [20, 0], [HALF, HALF], [0, HALF], [-1, 5], [-(2**31), 0]],
    "poison_pages": [3, 99],
}
CONTROLS: Final = [
    {
        "slot": 7,
        "prompt_length": 2,
        "repetition": 1.25,
        "frequency": 0.5,
        "presence": -0.75,
        "min_tokens": 3,
        "logprobs": 5,
        "prompt_logprobs": 2,
        "prompt_logprobs_from": 1,
        "masked_ids": [151645, 151643],
        "bias_ids": [5, 6, 7],
        "bias_values": [1.5, -100.0, 0.25],
        "prompt": [151644, 872],
        "output": [40],
    },
    {
        "slot": 8,
        "prompt_length": 515,
        "repetition": 1.0,
        "frequency": 0.0,
        "presence": 0.0,
        "min_tokens": 0,
        "logprobs": -1,
        "prompt_logprobs": -1,
        "prompt_logprobs_from": 0,
        "masked_ids": [],
        "bias_ids": [],
        "bias_values": [],
        "prompt": [],
        "output": [],
    },
]
PREFIXES: Final = [{"pages": 1, "rows": [0]}, {"pages": 43, "rows": [2, 1]}]
STEP_PLAN: Final = {
    "full": NO_PLAN | STEP | {"controls": CONTROLS, "shared_prefixes": PREFIXES},
    "least": NO_PLAN,
    "without-controls": NO_PLAN | STEP | {"shared_prefixes": PREFIXES},
    "without-prefixes": NO_PLAN | STEP | {"controls": CONTROLS},
    "decode-only": NO_PLAN | {"epoch": 1, "step": 2, "decode_slots": [0], "decode_positions": [5]},
}

TO_LEADER: Final = {
    "join/full": {
        "type": "join",
        "version": 1,
        "replica": "qwen-r0",
        "revision": REVISION,
        "tensor_parallel": 4,
        "ranks_per_pod": 2,
        "pod_index": 1,
        "pod": "qwen-r0-1",
        "place": {"node": "node-b", "devices": ["GPU-1f", "GPU-2e"], "shm_device": 42},
    },
    "join/least": {
        "type": "join",
        "version": 1,
        "replica": "",
        "revision": "",
        "tensor_parallel": 2,
        "ranks_per_pod": 1,
        "pod_index": 1,
        "pod": "",
        "place": {"node": "", "devices": [], "shm_device": -1},
    },
    "ping/full": {"type": "ping"},
    "ping/least": {"type": "ping"},
    "leaving/full": {"type": "leaving"},
    "leaving/least": {"type": "leaving"},
    "progress/full": {"type": "progress", "epoch": EPOCH, "rank": 3, "text": "weights 40 %"},
    "progress/least": {"type": "progress", "epoch": [0, 0], "rank": 0, "text": ""},
    "ready/full": {"type": "ready", "epoch": EPOCH, "rank": 3},
    "ready/least": {"type": "ready", "epoch": [0, 0], "rank": 0},
    "ended/full": {
        "type": "ended",
        "epoch": EPOCH,
        "rank": 3,
        "exit_code": -9,
        "told_to_end": True,
        "code": "out_of_memory",
        "reason": "OutOfMemory",
        "message": "CUDA out of memory\nTried to allocate 2 GiB – ü",
    },
    "ended/least": {
        "type": "ended",
        "epoch": [0, 0],
        "rank": 1,
        "exit_code": 0,
        "told_to_end": False,
        "code": "",
        "reason": "Error",
        "message": "",
    },
}

FROM_LEADER: Final = {
    "accepted/full": {"type": "accepted"},
    "accepted/least": {"type": "accepted"},
    "turned/full": {"type": "turned", "message": "this replica has 4 ranks, and the pod has been told 2"},
    "turned/least": {"type": "turned", "message": ""},
    "begin/full": {
        "type": "begin",
        "epoch": EPOCH,
        "rendezvous": "tcp://[fd00::7]:29500",
        "first_device": 2,
        "nccl_host": "host-1",
    },
    "begin/least": {"type": "begin", "epoch": [0, 0], "rendezvous": "", "first_device": None, "nccl_host": ""},
    "end/full": {"type": "end", "epoch": EPOCH},
    "end/least": {"type": "end", "epoch": [0, 0]},
    "over/full": {"type": "over"},
    "over/least": {"type": "over"},
    "gave_up/full": {"type": "gave_up", "message": "rank 1 ended 5 times"},
    "gave_up/least": {"type": "gave_up", "message": ""},
    "ping/full": {"type": "ping"},
    "ping/least": {"type": "ping"},
}

TO_CHILD: Final = {
    "start/full": {
        "type": "start",
        "name": "rank 1",
        "target": "minisgl.launcher.roles:scheduler",
        "config": {"model": "/models/qwen", "rank": 1, "devices": [0, 1], "seed": None},
        "log_level": "info",
    },
    "start/least": {"type": "start", "name": "", "target": "", "config": None, "log_level": ""},
    "gave_up/full": {"type": "gave_up", "message": "rank 1 ended 5 times"},
    "gave_up/least": {"type": "gave_up", "message": ""},
}

FROM_CHILD: Final = {
    "progress/full": {"type": "progress", "text": "weights 40 %"},
    "progress/least": {"type": "progress", "text": ""},
    "ready/full": {
        "type": "ready",
        "transport": "NCCL, P2P/IPC over NVLink",
        "max_model_len": 40960,
        "vocab_size": 151936,
    },
    "ready/least": {"type": "ready"},
    "refused/full": {"type": "refused", "code": "out_of_memory", "message": "the KV pool does not fit"},
    "refused/least": {"type": "refused", "code": "", "message": ""},
}

FAILURE: Final = {
    "at": AT,
    "rank": 1,
    "pod": "qwen-r0-1",
    "exit_code": -9,
    "reason": "Killed",
    "message": "rank 1 was killed by signal 9",
}
LATE: Final = {
    "at": "2026-11-23T04:00:00.000+00:00",
    "rank": 0,
    "pod": "",
    "exit_code": None,
    "reason": "StartupTimeout",
    "message": "",
}
LEADER: Final = {
    "kind": "engine",
    "model": "qwen",
    "replica": "qwen-r0",
    "pod": "qwen-r0-0",
    "pod_index": 0,
    "revision": REVISION,
    "epoch": EPOCH,
    "phase": "Ready",
    "progress": "",
    "ready": True,
    "ranks": [
        {"rank": 0, "pod": "qwen-r0-0", "node": "node-a", "phase": "Ready", "progress": ""},
        {"rank": 1, "pod": "qwen-r0-1", "node": "node-b", "phase": "Ready", "progress": ""},
    ],
    "ready_ranks": 2,
    "tensor": 2,
    "transport": "P2P/IPC",
    "timings": {"rendezvous": 0.512, "load": 3.04, "total": 7.99},
    "standbys": 1,
    "restarts": 1,
    "max_restarts": 5,
    "last_failure": FAILURE,
    "card": {"name": "qwen", "architecture": "Qwen3ForCausalLM", "max_model_len": 40960, "vocab_size": 151936},
}
ENGINE_STATUS: Final = {
    "engine/full": LEADER,
    "engine/least": LEADER
    | {
        "phase": "Waiting",
        "progress": "",
        "epoch": [0, 0],
        "ready": False,
        "ranks": [],
        "ready_ranks": 0,
        "transport": "",
        "timings": {},
        "standbys": 0,
        "restarts": 0,
        "last_failure": None,
        "card": None,
    },
    "engine/loading": LEADER
    | {
        "phase": "Loading",
        "progress": "rank 1: weights 40 %",
        "ready": False,
        "ranks": [
            {"rank": 0, "pod": "qwen-r0-0", "node": "node-a", "phase": "Ready", "progress": ""},
            {"rank": 1, "pod": "qwen-r0-1", "node": "node-b", "phase": "Loading", "progress": "weights 40 %"},
        ],
        "ready_ranks": 1,
        "transport": "",
        "restarts": 0,
        "last_failure": None,
        "card": None,
    },
    "engine/failed": LEADER
    | {
        "phase": "Failed",
        "progress": "rank 0 did not start within 600 s",
        "ready": False,
        "ranks": [
            {"rank": 0, "pod": "qwen-r0-0", "node": "", "phase": "Failed", "progress": ""},
            {"rank": 1, "pod": "qwen-r0-1", "node": "", "phase": "Failed", "progress": ""},
        ],
        "ready_ranks": 0,
        "restarts": 5,
        "last_failure": LATE,
    },
    "engine/follower": LEADER
    | {
        "pod": "qwen-r0-1",
        "pod_index": 1,
        "phase": "Loading",
        "progress": "waiting for pod 0",
        "ready": True,
        "ranks": [{"rank": 1, "pod": "qwen-r0-1", "node": "node-b", "phase": "Loading", "progress": "weights 40 %"}],
        "ready_ranks": 0,
        "transport": "",
        "timings": {},
        "restarts": 0,
        "last_failure": None,
        "card": None,
    },
}

FRONTEND_STATUS: Final = {
    "full": {"kind": "frontend", "pod": "qwen-frontend-7d-x", "ready": True, "draining": True, "replicas": REPLICAS},
    "least": {"kind": "frontend", "pod": "", "ready": False, "draining": False, "replicas": []},
    "serving": {
        "kind": "frontend",
        "pod": "qwen-frontend-7d-x",
        "ready": True,
        "draining": False,
        "replicas": REPLICAS,
    },
}

COMMIT: Final = "c1899de289a04d12100db370d81485cdf75e47ca"
FETCH_STATUS: Final = {
    "full": {
        "kind": "fetch",
        "phase": "Downloading",
        "percent": 42,
        "commit": COMMIT,
        "reason": "RateLimited",
        "message": "the Hub limits our requests: a token raises the limit; trying again",
    },
    "least": {},
    "downloading": {"phase": "Downloading", "percent": 42, "commit": COMMIT},
    "done": {"phase": "Done", "percent": 100, "commit": COMMIT},
    "failed": {"phase": "Failed", "reason": "AuthRequired", "message": "the Hub does not give it to us"},
}

FETCH_RECORD: Final = {
    "full": {"repository": "Qwen/Qwen3-0.6B", "revision": "main", "commit": COMMIT},
    "least": {"repository": "", "revision": "", "commit": ""},
}

RESTARTS: Final = {
    "full": [FAILURE, LATE, FAILURE | {"reason": "OutOfMemory", "exit_code": 1, "message": "memory – ü\nall"}],
    "least": [LATE],
}

SAMPLES: Final[dict[str, dict[str, Any]]] = {
    "to_scheduler": TO_SCHEDULER,
    "from_scheduler": FROM_SCHEDULER,
    "to_tokenizer": TO_TOKENIZER,
    "from_tokenizer": FROM_TOKENIZER,
    "step_plan": STEP_PLAN,
    "to_leader": TO_LEADER,
    "from_leader": FROM_LEADER,
    "to_child": TO_CHILD,
    "from_child": FROM_CHILD,
    "engine_status": ENGINE_STATUS,
    "frontend_status": FRONTEND_STATUS,
    "fetch_status": FETCH_STATUS,
    "fetch_record": FETCH_RECORD,
    "restarts": RESTARTS,
}
