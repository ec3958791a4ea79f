"""Start of one rank's engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from msgspec.structs import replace

from minisgl.attention.recurrent import RecurrentStates
from minisgl.attention.select import AttentionKinds, KVGroup
from minisgl.config import EngineConfig, PooledOutput
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import StepSize
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.drafting import MOST_DRAFTED_ROWS
from minisgl.engine.graphs.sizes import (
    FEWEST_PROMPTS,
    cascade_sizes,
    graph_sizes,
    launch_bound_tokens,
    prefill_sizes,
    text_sizes,
)
from minisgl.engine.interface import EngineLimits, EngineStats
from minisgl.engine.pooling_engine import PackedTexts, PagedTexts, PoolingEngine
from minisgl.engine.runner import Runner, attention_shapes
from minisgl.engine.sampler import sampling_bytes
from minisgl.engine.start import kv_pool
from minisgl.engine.start.clock import StartClock
from minisgl.engine.start.draft_head import context_group, new_drafting
from minisgl.engine.start.dummy_steps import StepLimits, decode_rows, measure_step, run_eagerly, step_limits
from minisgl.engine.start.warm_up import text_plans, warm_up_plans
from minisgl.errors import EngineError
from minisgl.kernels.attention.stored_kv import FP8, KVScales
from minisgl.kernels.compile.compile_log import CompileLog
from minisgl.kernels.compile.preload import Preload
from minisgl.kernels.speculation.row_text_tables import RowTextTables
from minisgl.kv_layout import PoolPages
from minisgl.layers.weights.parameters import Parameters
from minisgl.models.build import build_pooled, packed_attention
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.decoder_config import representative_layers
from minisgl.models.drafter import Drafter, DrafterConfig
from minisgl.models.fit import pool_too_small, too_long
from minisgl.models.kv_scales import read_kv_scales
from minisgl.models.pooler import Pooler
from minisgl.models.pooling_config import PoolingConfig
from minisgl.models.pooling_files import read_pooling
from minisgl.models.random_weights import fill_random
from minisgl.models.weights import load_weights
from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.status import DataTypes

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a phase (`meet`, `load`, `pool`, `capture`) and its completed share, 0..1."""

AnyEngine = TypeVar("AnyEngine", CudaEngine, PoolingEngine)

_GRAPH_BYTES: Final = 8 << 20
"""Memory of one CUDA graph besides its logits: its nodes, and the activations of a decode step."""


_MOST_TEXT_BYTES: Final = 2 << 30
"""Most memory of the texts in which drafts are found."""

_MOE_GRAPH_TOKENS: Final = 1024
"""Most prompt tokens of a captured step of a model with experts: for many more, torch's kernels serve the experts."""


def create_engine(config: EngineConfig, progress: Progress | None = None) -> CpuEngine | CudaEngine | PoolingEngine:
    """Load the model and allocate all memory; with tensor parallelism, wait for the other ranks.

    Raises ModelError, RendezvousError, BackendUnavailable or EngineError, whose messages contain the remedy.
    """
    report = progress or (lambda phase, share: None)
    clock = StartClock()
    device = _device(config)
    if device.type == "cuda":
        multiply_without_workspace()
    model_config = ModelConfig.read(config.model, config.hf_overrides, config.quantization)
    if config.quantization not in (None, "fp8") and not config.dummy_weights:
        raise EngineError(
            "quantization_needs_checkpoint",
            f"--quantization {config.quantization} only makes dummy weights in this format; a checkpoint in it needs "
            "no flag. To quantize a float32, float16 or bfloat16 checkpoint while it is loaded, use --quantization fp8",
        )
    pooling = read_pooling(config.model, model_config, config.task)
    max_model_len = config.max_model_len or model_config.max_model_len
    if pooling is not None:
        config = replace(config, page_size=model_config.text_page_size(config))
        if pooling.max_length is not None and config.max_model_len is None:
            max_model_len = min(max_model_len, pooling.max_length)
    if max_model_len > model_config.max_model_len:
        raise EngineError("max_model_len_too_large", too_long(model_config, max_model_len))
    model_config.check_length(max_model_len)
    model_config.check_tensor_parallel(config.tensor_parallel)
    drafter = None if pooling is not None else _read_drafter(config, model_config)
    if config.tensor_parallel > 1:
        report("meet", 0.0)
    parallel = TensorParallel(
        rank=config.rank,
        size=config.tensor_parallel,
        rendezvous=config.rendezvous,
        device=device,
        nccl_host=config.nccl_host,
    )
    try:
        builder = _EngineBuilder(config, model_config, pooling, parallel, device, max_model_len, report, clock, drafter)
        return builder.build()
    except BaseException:
        parallel.close()
        raise


def _read_drafter(config: EngineConfig, target: ModelConfig) -> DrafterConfig | None:
    """The draft head of an engine; None: it has none. Raises ModelError or EngineError."""
    if config.draft_model is None:
        return None
    if config.tensor_parallel > 1:
        raise EngineError(
            "speculation_unsupported", "--draft-model cannot be used with several ranks; leave it out, or use --tp 1"
        )
    drafter = DrafterConfig.read(config.draft_model)
    drafter.check_target(target)
    return drafter


def planned_attention(config: EngineConfig) -> dict[str, str]:
    """Attention backends that a start would use on this machine, as `EngineStats.attention`. It creates the backends,
    but loads no model. Raises as `create_engine`."""
    model, device = ModelConfig.read(config.model, config.hf_overrides, config.quantization), _device(config)
    model.check_tensor_parallel(config.tensor_parallel)
    shapes = attention_shapes(
        model,
        config.tensor_parallel,
        _dtype(config, model),
        page_size=model.page_size(config),
        max_model_len=config.max_model_len or model.max_model_len,
        device=device,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return AttentionKinds(config.attention_backend, shapes, config.max_running, model.kv_layers).overview()


@dataclass
class _EngineBuilder:
    """Phases of a start, in order: model, KV pool, graphs."""

    _config: EngineConfig
    _model_config: ModelConfig
    _pooling: PoolingConfig | None
    _parallel: TensorParallel
    _device: torch.device
    _max_model_len: int
    _report: Progress
    _clock: StartClock
    _drafter_config: DrafterConfig | None
    _drafter: Drafter | None = None
    _states: RecurrentStates | None = None
    _speculates: bool = False

    def build(self) -> CpuEngine | CudaEngine | PoolingEngine:
        """Run all phases. Raises as `create_engine`."""
        config, parallel, device, clock = self._config, self._parallel, self._device, self._clock
        compile_log = CompileLog()
        preload = Preload(compile_log) if device.type == "cuda" else None
        self._free_before = kv_pool.free_memory(device)
        if device.type == "cuda":
            kv_pool.check_memory_balance(parallel.gather_int(self._free_before))
        clock.end("device", device)
        if self._pooling is not None and self._pooling.whole_texts:
            return self._build_packed(self._pooling, preload, compile_log)
        # First: a checkpoint whose scales cannot be used is not loaded in vain.
        self._kv_scales = self._read_kv_scales()
        self._model, pooler = self._new_model()
        model = self._model
        self._load(model.parameters)
        clock.end("load", device)
        page_size = self._model_config.page_size(config)
        shapes = attention_shapes(
            model.config,
            parallel.size,
            model.parameters.dtype,
            page_size=page_size,
            max_model_len=self._max_model_len,
            device=device,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        if preload is not None:
            preload.finish()
        kv_layers = model.config.kv_layers
        self._attention = AttentionKinds(config.attention_backend, shapes, config.max_running, kv_layers)
        self._shape = shape = self._attention.shape
        self._layout = model.config.kv_layout(config, self._max_model_len)
        attention = self._attention.overview()
        logger.info("attention backends: %s", ", ".join(f"{kind} {name}" for kind, name in attention.items()))
        kv_cache = "fp8_e4m3" if shape.stored_dtype == FP8 else model.parameters.dtype_name
        data_types = self._data_types(model.parameters, kv_cache)
        clock.end("kernels", device)
        limit = config.cuda_graph_max_batch
        self._speculates = self._finds_drafts()
        if self._speculates and self._drafter_config is not None:
            self._drafter = self._new_drafter(self._drafter_config)
            clock.end("draft_model", device)
        rows = self._decode_rows
        self._largest_graph = rows if limit is None else min(limit, rows)
        self._prefill_graphs = self._prefill_sizes() if pooler is None else self._text_sizes()
        if pooler is not None:
            self._largest_graph = 0
        if preload is not None:
            self._states = self._shared_state()
            self._warm_up(compile_log)
        pages = self._pages()
        self._states = self._new_states(pages.full)
        clock.end("warm_up", device)
        tokens = pages.full * page_size
        self._check_pool(tokens)
        runner = self._build_runner(pages, model)
        self._report("pool", 1.0)
        clock.end("pool", device)
        first = self._attention.kinds[0]
        stats = EngineStats(
            parameter_bytes=model.parameter_bytes + (self._drafter.parameters.num_bytes if self._drafter else 0),
            kv_pool_bytes=kv_pool.pool_bytes([*self._attention.groups, *self._drafter_groups()], pages),
            start_seconds=clock.seconds,
            prefill_backend=first.prefill.name,
            decode_backend=first.decode.name,
            attention=attention,
            data_types=data_types,
            transport=parallel.transport,
        )
        limits = EngineLimits(
            num_pages=pages.full,
            page_size=page_size,
            window=self._layout.window,
            num_window_pages=pages.window,
            max_running=config.max_running,
            max_model_len=min(self._max_model_len, tokens),
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
            step_graphs=()
            if pooler is not None
            else tuple((size.decode, size.tokens) for size in self._prefill_graphs),
            pooling=None if self._pooling is None else _pooled_output(self._pooling),
            state_checkpoints=None if self._states is None else self._layout.state_checkpoints(pages.full),
            checkpoints_per_row=self._layout.checkpoints_per_row,
            most_drafts=MOST_DRAFTS if self._speculates else 0,
            max_decode_rows=self._decode_rows if self._speculates else 0,
        )
        if pooler is not None:
            texts = PagedTexts(runner, pooler, self._prefill_graphs)
            return self._serving(PoolingEngine(texts, parallel, limits, stats, device, audit=config.audit), compile_log)
        if preload is None:
            return CpuEngine(runner, parallel, limits, stats, audit=config.audit)
        engine = CudaEngine(
            runner,
            parallel,
            limits,
            stats,
            max_step_tokens=config.max_step_tokens,
            largest_graph=self._largest_graph,
            prefill_graphs=self._prefill_graphs,
            audit=config.audit,
            progress=lambda share: self._report("capture", share),
        )
        clock.end("capture", device)
        return self._serving(engine, compile_log)

    def _build_packed(self, pooling: PoolingConfig, preload: Preload | None, compile_log: CompileLog) -> PoolingEngine:
        """`build` of a model that computes whole texts, without a KV pool."""
        config, model_config, device, clock = self._config, self._model_config, self._device, self._clock
        sizes = self._parallel, _dtype(config, model_config), device, self._max_model_len
        model, pooler = build_pooled(model_config, pooling, *sizes)
        self._load(model.parameters)
        clock.end("load", device)
        if preload is not None:
            preload.finish()
        attention = packed_attention(model_config, self._parallel, model.parameters.dtype, device)
        step_tokens = max(config.max_step_tokens, self._max_model_len)
        graph_tokens = min(step_tokens, config.cuda_graph_max_tokens)
        is_captured = attention.can_be_captured and self._parallel.size == 1
        graphs = text_sizes(config.max_running, graph_tokens, prefixes=False) if is_captured else []
        texts = PackedTexts(model, attention, pooler, device, graphs)
        data_types = self._data_types(model.parameters, "none")
        clock.end("kernels", device)
        limits = EngineLimits(
            # Pages only count rows: each text has one.
            num_pages=config.max_running,
            page_size=self._max_model_len,
            max_running=config.max_running,
            max_model_len=self._max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            pooling=_pooled_output(pooling),
        )
        stats = EngineStats(
            parameter_bytes=model.parameters.num_bytes,
            start_seconds=clock.seconds,
            prefill_backend="packed",
            attention={"prefill": "packed"},
            data_types=data_types,
            transport=self._parallel.transport,
        )
        engine = PoolingEngine(texts, self._parallel, limits, stats, device, audit=config.audit)
        if device.type == "cuda":
            for plan in text_plans(self._max_model_len, config.max_running, step_tokens):
                engine.collect(engine.launch(plan))
            clock.end("warm_up", device)
        return self._serving(engine, compile_log)

    def _data_types(self, parameters: Parameters, kv_cache: str) -> DataTypes:
        """Types of weights and KV cache, which are also logged."""
        [(weights, _)] = parameters.weights_by_type.most_common(1)
        data_types = DataTypes(weights=weights, kv_cache=kv_cache)
        logger.info("weights in %s, KV cache in %s", data_types.weights, data_types.kv_cache)
        if self._config.rank == 0:
            _warn_of_dequantized(parameters, self._config)
        return data_types

    def _serving(self, engine: AnyEngine, compile_log: CompileLog) -> AnyEngine:
        """The engine, after what counts kernels that are compiled from now on."""
        stats = engine.stats
        if compiled := compile_log.compiled:
            logger.info("kernels compiled at start because they were not built ahead of time: %s", ", ".join(compiled))
        stats.compiled_kernels = len(compiled)

        def count() -> None:
            stats.compiled_after_ready += 1

        compile_log.begin_serving(count)
        return engine

    def _check_pool(self, tokens: int) -> None:
        if tokens >= self._max_model_len:
            return
        if self._config.max_model_len is not None:
            raise EngineError("kv_pool_too_small", pool_too_small(tokens, self._max_model_len))
        remedy = "; a lower --max-running leaves it memory of recurrent states" if self._layout.state_bytes else ""
        logger.warning(
            "the KV pool holds %d tokens; requests are limited to this length, although the model's limit is %d%s",
            *(tokens, self._max_model_len, remedy),
        )

    def _new_model(self) -> tuple[Decoder, Pooler | None]:
        """The model, without weights yet."""
        config = self._model_config
        sizes = self._parallel, _dtype(self._config, config), self._device, self._max_model_len
        if self._pooling is None:
            return Decoder(config, *sizes), None
        model, pooler = build_pooled(config, self._pooling, *sizes)
        assert isinstance(model, Decoder), "encoders compute whole texts"
        return model, pooler

    def _new_drafter(self, of: DrafterConfig) -> Drafter:
        """The draft head, with its weights, whose contexts are part of the pages."""
        config, parameters = self._config, self._model.parameters
        drafter = Drafter(of, self._parallel, parameters.dtype, self._device, self._max_model_len)
        if config.dummy_weights:
            fill_random(drafter.parameters)
        else:
            assert config.draft_model is not None
            load_weights(drafter.parameters, config.draft_model, threads=config.load_threads)
        self._model.tapped = of.target_layers
        self._drafter = drafter
        page = kv_pool.page_bytes(self._drafter_groups())
        self._layout = replace(self._layout, full_bytes=self._layout.full_bytes + page)
        logger.info("draft head of %d layers from %s", of.model.num_layers, config.draft_model)
        return drafter

    def _drafter_groups(self) -> list[KVGroup]:
        """Contexts of the draft head in a page; empty: there is no head."""
        if self._drafter is None:
            return []
        return [context_group(self._drafter.config, self._shape)]

    def _finds_drafts(self) -> bool:
        """Whether the engine speculates. Raises EngineError where the user demands it and it cannot."""
        choice = self._config.speculative
        if choice == "off" and self._drafter_config is not None:
            choice = "ngram"
        if choice == "off" or self._pooling is not None:
            return False
        reason = self._why_no_drafts()
        if reason is None:
            return True
        if choice == "ngram":
            raise EngineError(
                "speculation_unsupported",
                f"drafts cannot be verified here: {reason}; use --speculative auto, or off without --draft-model",
            )
        logger.info("no drafts are verified: %s", reason)
        return False

    def _why_no_drafts(self) -> str | None:
        if self._layout.window is not None:
            return "the model has layers with a window, whose pages are released while a step runs"
        if self._model_config.recurrences:
            return "the model has recurrent states, which cannot go back to the last accepted draft"
        if self._device.type == "cuda":
            for name in ("flashinfer", "torch", "split"):
                if any(kind.decode.name == name for kind in self._attention.kinds):
                    return f"its decode attention, {name}, cannot verify drafts"
            if self._drafter_config is not None and self._shape.page_size % 16:
                return f"a draft head needs pages of a multiple of 16 tokens, not of {self._shape.page_size}"
            texts = RowTextTables.num_bytes(self._config.max_running + 1, self._max_model_len)
            if texts > _MOST_TEXT_BYTES:
                return (
                    f"the texts of {self._config.max_running} requests of up to {self._max_model_len} tokens take "
                    f"{texts / 2**30:.1f} GiB; lower --max-model-len or --max-running"
                )
        return None

    @property
    def _decode_rows(self) -> int:
        """Most decode rows of a step."""
        requests = self._config.max_running
        return decode_rows(requests) if self._speculates else requests

    def _new_states(self, full_pages: int) -> RecurrentStates | None:
        """States of all rows, the dummy row included, and their checkpoints beside so many pages; None: no layer has
        one."""
        shapes = self._model_config.state_shapes(self._parallel.size)
        if not shapes:
            return None
        rows, checkpoints = self._config.max_running, self._layout.state_checkpoints(full_pages)
        mib = (rows + checkpoints / self._layout.checkpoints_per_row) * self._layout.state_bytes / 2**20
        logger.info("recurrent states of %d rows and %d checkpoints take up to %.1f MiB", rows, checkpoints, mib)
        dtype, audit = self._model.parameters.dtype, self._config.audit
        try:
            return RecurrentStates(shapes, rows + 1, dtype, self._device, checkpoints=checkpoints, audit=audit)
        except RuntimeError as error:
            raise EngineError(
                "out_of_memory",
                f"recurrent states of {mib / 1024:.1f} GiB do not fit: {error}; lower --max-running or --num-pages",
            ) from error

    def _shared_state(self) -> RecurrentStates | None:
        """One state for all rows, until the memory for theirs is known; None: no layer has one."""
        shapes, dtype = self._model_config.state_shapes(self._parallel.size), self._model.parameters.dtype
        if not shapes:
            return None
        return RecurrentStates(shapes, self._config.max_running + 1, dtype, self._device, shared=True)

    def _load(self, parameters: Parameters) -> None:
        config = self._config
        if config.dummy_weights:
            fill_random(parameters)
        else:
            load_weights(
                parameters,
                config.model,
                threads=config.load_threads,
                progress=lambda done, total: self._report("load", done / total),
            )
        self._report("load", 1.0)

    def _read_kv_scales(self) -> list[KVScales]:
        """Scales of each layer with keys and values."""
        config, model_config = self._config, self._model_config
        if config.kv_cache_dtype != "fp8" or config.dummy_weights:
            return [KVScales()] * len(model_config.kv_layers)
        scales = read_kv_scales(config.model, model_config.kv_layer_numbers)
        given = any(each != KVScales() for each in scales)
        logger.info("scales of the KV cache: %s", "those of the checkpoint" if given else "1")
        return scales

    def _prefill_sizes(self) -> list[StepSize]:
        """Sizes of the steps with prompts that are captured."""
        most_keys = min(kind.prefill.most_graph_keys for kind in self._attention.kinds)
        # Collectives of several ranks in such graphs have not run on GPUs yet.
        if not most_keys or self._parallel.size > 1:
            return []
        config = self._model.config
        most = launch_bound_tokens(config.num_layers, _product_parameters(self._model, self._parallel.size))
        if config.moe is not None:
            most = min(most, _MOE_GRAPH_TOKENS)
        limits = self._config.cuda_graph_max_tokens, self._config.max_step_tokens
        # The padding of a step may be one segment of all its tokens, which has as many positions.
        most = min(most, *limits, self._max_model_len, most_keys)
        rows, budget = min(self._largest_graph, self._config.max_running), self._config.max_step_tokens
        if self._model_config.recurrences:
            # Their prompts are computed in chunks, of which a step is padded to two more for each prompt.
            return prefill_sizes(rows, most, budget, most_prompts=FEWEST_PROMPTS)
        return prefill_sizes(rows, most, budget)

    def _text_sizes(self) -> list[StepSize]:
        """Sizes of the steps of texts that are captured."""
        config = self._config
        most_keys = min(kind.prefill.most_graph_keys for kind in self._attention.kinds)
        if self._device.type != "cuda" or not most_keys or self._parallel.size > 1:
            return []
        # The padding of a step is one segment, as in steps of prompts.
        most = min(config.max_step_tokens, config.cuda_graph_max_tokens, self._max_model_len, most_keys)
        if self._model_config.moe is not None:
            most = min(most, _MOE_GRAPH_TOKENS)
        return text_sizes(config.max_running, most, prefixes=True)

    def _warm_up(self, compile_log: CompileLog) -> None:
        """Launch every kernel of later steps once, on a few layers and without a pool."""
        few_layers = self._model.with_layers(representative_layers(self._model_config.layers))
        runner = self._build_runner(PoolPages(0, 0), few_layers)
        # A small kernel, which shows at once whether a cache has the model's kernels.
        self._model.norm.forward(self._model.norm.gain.new_zeros(1, self._model_config.hidden_size), None)
        together = False
        for plan in warm_up_plans(self._limits(runner)):
            if self._pooling is not None and len(plan.decode_slots):
                continue
            if compile_log.compiled and not together:
                self._compile_together()
                together = True
            run_eagerly(runner, plan)
        if runner.drafting is not None:
            runner.drafting.warm_up(runner.sampler)

    def _compile_together(self) -> None:
        """Compile the kernels of the warm-up beside each other. Otherwise each of its steps waits for a compiler."""
        from minisgl.engine.start.rehearsal import rehearse
        from minisgl.kernels.build.triton import Architecture, Launches

        launches = Launches()
        try:
            with launches.recorded(Architecture.of(self._device)):
                rehearse(self._model_config, self._config, self._drafter_config if self._drafter else None)
            launches.load(self._device)
        except Exception:
            # It only saves time: what is missing is compiled at its first launch.
            logger.warning("kernels are compiled one after the other", exc_info=True)

    def _pages(self) -> PoolPages:
        if (given := self._config.num_pages) is not None:
            return PoolPages(given, self._layout.window_pages(given))
        if self._device.type == "cpu":
            pool_bytes = kv_pool.cpu_pool_bytes(kv_pool.free_memory(self._device), self._parallel.size)
        else:
            pool_bytes = self._cuda_pool_bytes()
        return kv_pool.pages_for_budget(self._parallel, self._layout, pool_bytes)

    def _cuda_pool_bytes(self) -> int:
        """Bytes that remain of this rank's share of the device after weights, workspaces, the largest step and
        graphs."""
        config, model = self._config, self._model
        runner = self._build_runner(PoolPages(0, 0), model)
        step_bytes = measure_step(runner, self._limits(runner))
        del runner
        torch.cuda.empty_cache()
        used = self._free_before - kv_pool.free_memory(self._device)
        logits = self._largest_graph * model.vocab_local * self._shape.dtype.itemsize
        count = len(graph_sizes(self._largest_graph))
        if any(kind.cascade is not None for kind in self._attention.kinds):
            count += len(cascade_sizes(min(self._largest_graph, config.max_running)))
        graphs = 2 * logits + count * _GRAPH_BYTES
        if self._prefill_graphs:
            # Activations of the largest one; the others reuse them.
            largest = self._prefill_graphs[-1]
            graphs += len(self._prefill_graphs) * _GRAPH_BYTES
            graphs += step_bytes * (largest.tokens + largest.decode) // config.max_step_tokens
        sampling = sampling_bytes(
            self._decode_rows, model.config.vocab_size, self._parallel.size, self._shape.dtype.itemsize
        )
        if self._speculates:
            sampling += RowTextTables.num_bytes(config.max_running + 1, self._max_model_len)
        if self._drafter is not None:
            drafted = min(MOST_DRAFTED_ROWS, config.max_running) * MOST_DRAFTS
            sampling += 2 * drafted * model.vocab_local * self._shape.dtype.itemsize
        return int(self._free_before * config.memory_fraction) - used - step_bytes - graphs - sampling

    def _limits(self, runner: Runner) -> StepLimits:
        return step_limits(runner, max_step_tokens=self._config.max_step_tokens, max_model_len=self._max_model_len)

    def _build_runner(self, pages: PoolPages, model: Decoder) -> Runner:
        config, groups = self._config, self._attention.groups
        kv = kv_pool.allocate(groups, scales=self._kv_scales, pages=pages, audit=config.audit)
        vocab_size = self._model_config.vocab_size
        has_states = bool(self._model_config.recurrences)
        tables = kv_pool.new_tables(
            kv,
            config.max_running,
            self._shape.pages_per_row,
            vocab_size,
            has_states=has_states,
            decode_rows=self._decode_rows,
            text_length=self._max_model_len if self._speculates else 0,
        )
        drafting = None
        if self._drafter is not None:
            drafting = new_drafting(self._drafter, model, self._shape, tables, pages, audit=config.audit)
        return Runner(model, self._parallel, kv, tables, self._attention.over(kv), self._states, drafting)


def _pooled_output(pooling: PoolingConfig) -> PooledOutput:
    return PooledOutput(
        task=pooling.task, size=pooling.output_size, labels=pooling.labels, whole_texts=pooling.whole_texts
    )


def _product_parameters(model: Decoder, ranks: int) -> int:
    """Parameters of this rank that take part in the matrix products of one prompt token."""
    config = model.config
    vocabularies = 1 if config.decoder.tied_embeddings else 2
    parameters = model.parameters.num_elements - vocabularies * model.vocab_local * config.hidden_size
    if model.token_inputs is not None:
        parameters -= model.token_inputs.table.weight.numel()
    if (moe := config.moe) is not None:
        layers = sum(layer.moe is not None for layer in config.layers)
        experts = 3 * config.hidden_size * moe.intermediate_size * layers // ranks
        parameters -= experts * (moe.num_experts - moe.experts_per_token)
    return parameters


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError("no_cuda", "no CUDA device is available; start with --device cpu, or check the driver")
    index = config.rank if config.device_index is None else config.device_index
    if index >= torch.cuda.device_count():
        raise EngineError(
            "too_few_devices",
            f"rank {config.rank} of {config.tensor_parallel} needs device {index}, but {torch.cuda.device_count()} "
            "are visible; use a smaller --tp or make more devices visible (CUDA_VISIBLE_DEVICES)",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _warn_of_dequantized(parameters: Parameters, config: EngineConfig) -> None:
    """Say which weights take 16 bits or more although they are quantized. On CPUs all do."""
    if not parameters.num_dequantized or (config.device == "cpu" and config.quantization is None):
        return
    reason = "they need a Hopper GPU and --dtype bfloat16"
    if parameters.keeps_quantized:
        reason = f"there are no kernels for them, or the shards of --tp {config.tensor_parallel} cut their blocks"
    logger.warning(
        "%.0f %% of the weights of linear layers are kept in %s although they are quantized: %s (docs/models.md)",
        *(100 * parameters.dequantized_share, parameters.dtype_name, reason),
    )


def _dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    name = model.dtype_on(config.device, config.dtype)
    if config.rank == 0 and config.device == "cuda":
        if config.dtype == "auto" and name != model.dtype:
            stored = model.dtype
            logger.info("the checkpoint is %s; it runs in %s, --dtype %s keeps its type", stored, name, stored)
        elif model.quantization is not None and name != "bfloat16":
            logger.warning("quantized weights become %s; with --dtype bfloat16 they keep their size on Hopper", name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


_NO_WORKSPACE: Final = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def multiply_without_workspace(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let cuBLAS and cuBLASLt of this process choose only kernels that need no workspace, unless the user has set its
    size. Both read the variables before their first product.

    With a workspace, persistent kernels count their tiles in it. Each waits for a memset, during which the device idles
    for 5 µs, and small prompts of large models are split over their inputs, which takes longer there.
    """
    for name, value in _NO_WORKSPACE.items():
        environment.setdefault(name, value)
