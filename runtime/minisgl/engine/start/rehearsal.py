"""Warm-up of a model on tensors without memory, which shows without a GPU which of our kernels its steps launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from msgspec.structs import replace

from minisgl.attention import fa3_backend, flashinfer_backend, packed, select, xqa_backend
from minisgl.attention.backend import AttentionShape
from minisgl.attention.recurrent import RecurrentStates
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.config import EngineConfig
from minisgl.distributed.one_shot import OneShotAllReduce, one_shot_capacity
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine import pooling_engine
from minisgl.engine.drafting import Drafting
from minisgl.engine.pooling_engine import PackedTexts
from minisgl.engine.runner import Runner, attention_shapes
from minisgl.engine.start import kv_pool
from minisgl.engine.start.draft_head import new_drafting
from minisgl.engine.start.dummy_steps import decode_rows, run_eagerly, step_limits
from minisgl.engine.start.warm_up import text_plans, warm_up_plans
from minisgl.engine.tables import Tables
from minisgl.kernels.attention.stored_kv import KVScales
from minisgl.kernels.build.triton import replaced
from minisgl.kv_layout import PoolPages
from minisgl.models.build import build_pooled, packed_attention
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.decoder_config import representative_layers
from minisgl.models.drafter import Drafter, DrafterConfig
from minisgl.models.pooling_config import PoolingConfig

_DEVICE: Final = torch.device("cuda")
_PAGES: Final = 64


def rehearse(model: ModelConfig, config: EngineConfig, drafter: DrafterConfig | None = None) -> None:
    """Run the warm-up of one rank of an engine, in `Launches.recorded`. `drafter`: its draft head."""
    if model.encoder is not None:
        longest = config.max_model_len or model.max_model_len
        with rehearsal_texts(model, config) as texts:
            for plan in text_plans(longest, config.max_running, max(config.max_step_tokens, longest)):
                texts.outputs(plan)
        return
    with rehearsal_runner(model, config, drafter) as runner:
        longest = config.max_model_len or model.max_model_len
        for plan in warm_up_plans(step_limits(runner, max_step_tokens=config.max_step_tokens, max_model_len=longest)):
            run_eagerly(runner, plan)
        if runner.drafting is not None:
            runner.drafting.warm_up(runner.sampler)


@contextmanager
def rehearsal_runner(
    model: ModelConfig, config: EngineConfig, drafter: DrafterConfig | None = None
) -> Iterator[Runner]:
    """A rank without its peers, with the layers that launch all kernels. Kernels of other libraries do nothing while
    the context lasts."""
    model = _representative(model)
    dtype = getattr(torch, model.dtype_on("cuda", config.dtype))
    longest = config.max_model_len or model.max_model_len
    parallel = _SingleRank(config.tensor_parallel)
    shapes = attention_shapes(
        model,
        parallel.size,
        dtype,
        page_size=model.page_size(replace(config, device="cuda")),
        max_model_len=longest,
        device=_DEVICE,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    rows = config.max_running
    with _without_libraries():
        attention = select.AttentionKinds("auto", shapes, rows, model.kv_layers)
        shape = attention.shape
        scales, pages = [KVScales()] * len(model.kv_layers), PoolPages(_PAGES, _PAGES)
        kv = kv_pool.allocate(attention.groups, scales=scales, pages=pages, audit=False)
        states = model.state_shapes(parallel.size)
        has_drafts = not states and not kv.has_windows
        tables = kv_pool.new_tables(
            *(kv, rows, shape.pages_per_row, model.vocab_size),
            has_states=bool(states),
            decode_rows=decode_rows(rows) if has_drafts else 0,
            text_length=longest if has_drafts else 0,
        )
        decoder = Decoder(model, parallel, dtype, _DEVICE, max_position=longest)
        shared = RecurrentStates(states, rows + 1, dtype, _DEVICE, shared=True) if states else None
        drafting = None if drafter is None else _drafting(drafter, decoder, pages, tables, shape)
        yield Runner(decoder, parallel, kv, tables, attention.over(kv), shared, drafting)


def _drafting(of: DrafterConfig, target: Decoder, pages: PoolPages, tables: Tables, shape: AttentionShape) -> Drafting:
    dtype = target.parameters.dtype
    drafter = Drafter(of, TensorParallel(device=_DEVICE), dtype, _DEVICE, shape.pages_per_row * shape.page_size)
    # The target may have few of its layers.
    target.tapped = (-1,) * len(of.target_layers)
    return new_drafting(drafter, target, shape, tables, pages, audit=False)


@contextmanager
def rehearsal_texts(model: ModelConfig, config: EngineConfig) -> Iterator[PackedTexts]:
    """`rehearsal_runner` of an encoder."""
    dtype = getattr(torch, model.dtype_on("cuda", config.dtype))
    longest = config.max_model_len or model.max_model_len
    pooling = PoolingConfig(task="embed", method="mean", output_size=model.hidden_size, whole_texts=True)
    parallel = _SingleRank(config.tensor_parallel)
    with _without_libraries():
        encoder, pooler = build_pooled(model, pooling, parallel, dtype, _DEVICE, longest)
        with torch.inference_mode():
            yield PackedTexts(encoder, packed_attention(model, parallel, dtype, _DEVICE), pooler, _DEVICE)


def _representative(model: ModelConfig) -> ModelConfig:
    """The model without layers that launch the same kernels as others."""
    layers = tuple(model.layers[layer] for layer in representative_layers(model.layers))
    return replace(model, body=replace(model.decoder, layers=layers))


@contextmanager
def _without_libraries() -> Iterator[None]:
    """Context in which attention selects our own kernels, FlashAttention-3 or the reference; the latter two compute
    nothing."""
    replacements: list[tuple[Any, str, Any]] = [
        (flashinfer_backend, "why_not_flashinfer", lambda kernel: "this is a rehearsal"),
        (xqa_backend, "why_not_flashinfer", lambda kernel: "this is a rehearsal"),
        (fa3_backend, "load_fa3", _nothing),
        (fa3_backend, "attend_segments", _sums),
        (packed, "attend_segments", _nothing),
        # Tensors without memory are not pinned.
        (pooling_engine, "pinned", lambda host: host),
        (TorchPrefill, "begin", _nothing),
        (TorchPrefill, "prefill", _nothing),
        (TorchDecode, "begin", _nothing),
        (TorchDecode, "decode", _nothing),
        # Its warnings are about the machine that serves.
        (select.logger, "disabled", True),
    ]
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(replaced(owner, name, value))
        yield


def _nothing(*args: object, **kwargs: object) -> None: ...


def _sums(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.empty(q.shape[1::-1], device=q.device).T


class _SingleRank(TensorParallel):
    """A rank without its peers, whose collectives only launch kernels."""

    def __init__(self, size: int) -> None:
        super().__init__(device=_DEVICE)
        self.size = size
        if size > 1:
            self._group = _SilentGroup()
        if one_shot_capacity(size):
            self._one_shot = OneShotAllReduce(self.rank, torch.empty(size, dtype=torch.int64, device=_DEVICE))


class _SilentGroup:
    """Process group that sends nothing."""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: object) -> None: ...

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: object) -> None: ...

    def shutdown(self) -> None: ...
