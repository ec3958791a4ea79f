"""Frozen configuration of the runtime's processes: plain data, built once by the command line.

Every package gets the part it needs and nothing else; no package reads environment variables for these.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from minisgl.errors import CodedError

Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
CacheKind = Literal["radix", "naive"]

MAX_RUNNING: Final = 1 << 16
"""Rows of tables that are allocated at the start."""

Count = Annotated[int, Meta(ge=1)]
Rows = Annotated[int, Meta(ge=1, le=MAX_RUNNING)]
PageSize = Annotated[int, Meta(ge=1, le=256)]
Fraction = Annotated[float, Meta(gt=0, le=1)]

Config = TypeVar("Config", bound=msgspec.Struct)


class ConfigError(CodedError, ValueError):
    """An option outside of its range. The command line refuses it before; this is for callers of the library."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_option", message)


def checked(config: Config) -> Config:
    """`config`, if every field has the type and range that it declares. Raises ConfigError."""
    try:
        return msgspec.convert(msgspec.structs.asdict(config), type(config))
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
        raise ConfigError(f"{field}: {what[:1].lower()}{what[1:]}: {getattr(config, field, None)!r:.60}") from error


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's engine needs to know. The same on every rank but for `rank` and `device_index`."""

    model: str
    """Directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files)."""
    device: Device = "cpu"
    dtype: DType = "auto"
    """`auto`: what config.json says, but float32 on a CPU."""
    rank: int = 0
    tensor_parallel: Count = 1
    rendezvous: str = ""
    """`tcp://host:port` or `file:///path` at which the ranks' collectives meet; unused with one rank."""
    device_index: Annotated[int, Meta(ge=0)] | None = None
    """Which of the visible CUDA devices; None: the one with the rank's number."""
    nccl_host: str = ""
    """One name for the machine that all ranks run on, although they are in containers that NCCL takes for several
    machines; empty: NCCL finds out itself. See `TensorParallel`."""
    page_size: PageSize = 16
    """Tokens per KV page, 1..256."""
    num_pages: Count | None = None
    """Pages of the KV pool; None: as many as fit in `memory_fraction` of the free memory of every rank."""
    memory_fraction: Fraction = 0.9
    """Share of the device's free memory for weights, KV pool and graphs together."""
    max_running: Rows = 256
    """Rows of the tables: the most requests that are in the batch at a time."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Longest prompt plus answer in tokens; None: what the model supports and the pool holds."""
    max_step_tokens: Count = 8192
    """Token budget of one step: decode rows plus prefill tokens."""
    attention_backend: str = "auto"
    """`torch`, `flashinfer`, `xqa`, `balanced`, `fa3`, a pair `PREFILL,DECODE`, or `auto`."""
    cuda_graph_max_batch: Annotated[int, Meta(ge=0)] | None = None
    """Largest decode batch with a CUDA graph; None: `max_running`; 0: no graphs."""
    dummy_weights: bool = False
    """Random weights instead of the checkpoint's: only config.json is needed."""
    load_threads: Count = 4
    audit: bool = False
    """Check invariants that cost time: freed pages are filled with NaN and handed out in shuffled order,
    token hashes are compared across ranks."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler needs to know; sizes come from the engine that was started."""

    num_pages: Count
    page_size: Count
    max_running: Rows
    max_model_len: Count
    vocab_size: Count
    max_step_tokens: Count = 8192
    overlap: bool = True
    cache: CacheKind = "radix"
    eos_token_ids: tuple[int, ...] = ()
    max_waiting: Count = 1 << 20
    """Requests that may wait for a row; one more is rejected with `queue_full`."""
    audit: bool = False
    audit_seed: int = 0
