"""Frozen configuration of the runtime's processes: plain data, built once by the command line.

Every room gets the part it needs and nothing else; no room reads environment variables for these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
CacheKind = Literal["radix", "naive"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's engine needs to know. The same on every rank but for `rank`."""

    model: str
    """Directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files)."""
    device: Device = "cpu"
    dtype: DType = "auto"
    """`auto`: what config.json says, but float32 on a CPU."""
    rank: int = 0
    tensor_parallel: int = 1
    rendezvous: str = ""
    """`tcp://host:port` or `file:///path` at which the ranks' collectives meet; unused with one rank."""
    page_size: int = 16
    """Tokens per KV page, 1..256."""
    num_pages: int | None = None
    """Pages of the KV pool; None: as many as fit in `memory_fraction` of the free memory of every rank."""
    memory_fraction: float = 0.9
    """Share of the device's free memory for weights, KV pool and graphs together."""
    max_running: int = 256
    """Rows of the tables: the most requests that are in the batch at a time."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; None: what the model supports and the pool holds."""
    max_step_tokens: int = 8192
    """Token budget of one step: decode rows plus prefill tokens."""
    attention_backend: str = "auto"
    """`torch`, `flashinfer`, `xqa`, `fa3`, a pair `PREFILL,DECODE`, or `auto`."""
    cuda_graph_max_batch: int | None = None
    """Largest decode batch with a CUDA graph; None: `max_running`; 0: no graphs."""
    dummy_weights: bool = False
    """Random weights instead of the checkpoint's: only config.json is needed."""
    load_threads: int = 4
    audit: bool = False
    """Check invariants that cost time: freed pages are filled with NaN and handed out in shuffled order,
    token hashes are compared across ranks."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler needs to know; sizes come from the engine that was started."""

    num_pages: int
    page_size: int
    max_running: int
    max_model_len: int
    vocab_size: int
    max_step_tokens: int = 8192
    overlap: bool = True
    cache: CacheKind = "radix"
    eos_token_ids: tuple[int, ...] = ()
    max_waiting: int = 1 << 20
    """Requests that may wait for a row; one more is rejected with `queue_full`."""
    audit: bool = False
    audit_seed: int = 0
