"""Bodies of /status as plain values, beside those of `support.compat.samples`, that the operator reads in different
ways."""

from __future__ import annotations

from typing import Any, Final

EPOCH: Final = [1_763_860_957_123, 7]
REVISION: Final = "5f3c9d2b71"
AT: Final = "2026-11-23T03:22:37.250+00:00"

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
    "data_types": {"weights": "fp8-block", "kv_cache": "fp8_e4m3"},
    "timings": {"rendezvous": 0.512, "load": 3.04, "total": 7.99},
    "standbys": 1,
    "restarts": 1,
    "max_restarts": 5,
    "last_failure": FAILURE,
    "card": {"name": "qwen", "architecture": "Qwen3ForCausalLM", "max_model_len": 40960, "vocab_size": 151936},
}
ENGINE_STATUS: Final = {
    "engine/ready": LEADER,
    "engine/waiting": LEADER
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
}

FRONTEND_STATUS: Final = {
    "frontend/empty": {"kind": "frontend", "pod": "", "ready": False, "draining": False, "replicas": []},
    "frontend/serving": {
        "kind": "frontend",
        "pod": "qwen-frontend-7d-x",
        "ready": True,
        "draining": False,
        "replicas": REPLICAS,
    },
}

COMMIT: Final = "c1899de289a04d12100db370d81485cdf75e47ca"
FETCH_STATUS: Final = {
    "waiting": {
        "kind": "fetch",
        "phase": "Downloading",
        "percent": 42,
        "commit": COMMIT,
        "reason": "RateLimited",
        "message": "the Hub limits our requests: a token raises the limit; trying again",
    },
    "downloading": {"phase": "Downloading", "percent": 42, "commit": COMMIT},
    "done": {"phase": "Done", "percent": 100, "commit": COMMIT},
    "failed": {"phase": "Failed", "reason": "AuthRequired", "message": "the Hub does not give it to us"},
}


SAMPLES: Final[dict[str, dict[str, Any]]] = {
    "engine_status": ENGINE_STATUS,
    "frontend_status": FRONTEND_STATUS,
    "fetch_status": FETCH_STATUS,
}
