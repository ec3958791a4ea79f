"""Dry run of a model's steps on tensors without memory, which shows without a GPU which of our kernels it launches."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from minisgl.attention import balanced_backend, cascade_backend, split_backend
from minisgl.attention.backend import DecodeBackend
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.paged import PagedAttention
from minisgl.distributed.one_shot import OneShotAllReduce, one_shot_capacity
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine import kv_pool
from minisgl.engine.batch import PackedStep, dummy_plan
from minisgl.engine.graph_sizes import StepSize, cascade_sizes, graph_sizes
from minisgl.engine.runner import Runner, attention_shape
from minisgl.engine.tables import Tables
from minisgl.kernels.gather_keys import GUARD, gather_keys, locate_keys
from minisgl.kernels.sample import sample
from minisgl.kernels.top_k_top_p import top_k_top_p_thresholds
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.wire.plan import StepPlan

_DEVICE: Final = torch.device("cuda")
_PAGES: Final = 64
_PREFILL_TOKENS: Final = (1, 2, 3, 4, 5, 8, 9, 16, 17, 100, 200, 400, 700, 1000, 2000, 8192)
"""Prompt lengths that reach all variants: kernels are specialized for sizes that are 1 or a multiple of 16, and for few
rows; kernels of experts have larger tiles for more rows."""
_SAMPLED_ROWS: Final = (1, 2, 16, 17)


def rehearse(config: ModelConfig, *, tensor_parallel: int, page_size: int, max_running: int) -> None:
    """Run decode steps of all sizes that are captured, and steps with prompts, on one of `tensor_parallel` ranks. Call
    it where `cuda` tensors have no memory and kernel launches are recorded."""
    config = _representative_layers(config)
    parallel = _SingleRank(tensor_parallel)
    dtype = getattr(torch, config.dtype_on("cuda"))
    model = Decoder(config, parallel, dtype, _DEVICE)
    max_model_len = config.max_model_len
    shape = attention_shape(
        config, tensor_parallel, dtype, page_size=page_size, max_model_len=max_model_len, device=_DEVICE
    )
    kv = kv_pool.allocate(shape, layers=config.num_layers, num_pages=_PAGES, audit=False)
    tables = Tables(max_running, shape.pages_per_row, kv.dummy_page, config.vocab_size, _DEVICE)
    fits = cascade_backend.why_not(shape) is None
    cascade = cascade_backend.CascadeDecode(shape, max_running) if fits else None
    nothing = _NullAttention()
    decode: DecodeBackend = nothing
    if balanced_backend.why_not(shape) is None:
        decode = balanced_backend.BalancedDecode(shape, nothing)
    if split_backend.why_not(shape) is None:
        decode = split_backend.SplitDecode(shape, decode)
    runner = Runner(model, parallel, kv, tables, PagedAttention(kv, nothing, decode, cascade))
    empty = StepPlan.build(epoch=0, step=0)
    for rows in graph_sizes(max_running):
        _step(runner, empty, PackedStep(empty, tables, StepSize(rows)))
    if cascade is not None:
        for rows in cascade_sizes(max_running):
            _step(runner, empty, PackedStep(empty, tables, StepSize(rows), cascade.layout))
    for tokens in _PREFILL_TOKENS:
        for rows in {0, 1, min(16, max_running)}:
            plan = dummy_plan(tables.dummy_slot, decode=rows, prompts=[tokens])
            _step(runner, plan, PackedStep(plan, tables))
    _copy_keys(kv, tables)
    for rows in _SAMPLED_ROWS:
        slots = torch.empty(rows, dtype=torch.int32, device=_DEVICE)
        # Logits of the model, and float32 logits after penalties and biases.
        for logits_dtype in (dtype, torch.float32):
            logits = torch.empty((rows, config.vocab_size), dtype=logits_dtype, device=_DEVICE)
            parameters = tables.sampling_rows(slots, slots)
            sample(logits, parameters, 0)
            sample(logits, parameters, 0, top_k_top_p_thresholds(logits, parameters))


def _copy_keys(kv: PagedKV, tables: Tables) -> None:
    """Launch the kernels that copy the keys of segments with a prefix."""
    segments = torch.empty(2, dtype=torch.int32, device=_DEVICE)
    located = locate_keys(tables.page_table, segments, segments, page_size=kv.page_size, most_keys=kv.page_size)
    copy = torch.empty((kv.page_size + GUARD, *kv.keys.shape[3:]), dtype=kv.keys.dtype, device=_DEVICE)
    gather_keys(kv.keys[0], kv.values[0], located, copy, copy)


def _representative_layers(config: ModelConfig) -> ModelConfig:
    """The model with only the layers that launch different kernels: the first one, which has no layer before it, a
    later one, and one of each kind where some layers have experts."""
    moe = config.moe
    if moe is None:
        return msgspec.structs.replace(config, num_layers=2)
    kinds = sorted({*moe.layers})
    layers = (kinds[0], *kinds)
    return msgspec.structs.replace(config, num_layers=len(layers), moe=msgspec.structs.replace(moe, layers=layers))


def _step(runner: Runner, plan: StepPlan, packed: PackedStep) -> None:
    step = packed.view(torch.empty(packed.size, dtype=torch.int32, device=_DEVICE))
    runner.run(plan, packed, step)


class _SingleRank(TensorParallel):
    """A rank without its peers, whose collectives only launch kernels."""

    def __init__(self, size: int) -> None:
        super().__init__(device=_DEVICE)
        self.size = size
        if one_shot_capacity(size):
            self._one_shot = OneShotAllReduce(self.rank, torch.empty(size, dtype=torch.int64, device=_DEVICE))


class _NullAttention:
    """Attention backend of another library: it launches none of our kernels."""

    name = "none"
    most_graph_keys = 0

    def for_graph(self, size: int, segments: int = 0) -> _NullAttention:
        return self

    def backend_for(self, rows: int = 0, *, mixed: bool = False, prefix: bool = False) -> str:
        return self.name

    def prepare(self, batch: AttentionBatch) -> None: ...

    def begin(self, batch: AttentionBatch) -> None: ...

    def decode(self, layer: int, kv: PagedKV, q: torch.Tensor, out: torch.Tensor) -> None: ...

    def prefill(
        self, layer: int, kv: PagedKV, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None: ...
