"""Execution of a step on the device: apply the plan's changes, run the model, sample."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, KVPool
from minisgl.attention.layered import LayeredAttention
from minisgl.attention.recurrent import RecurrentStates
from minisgl.config import KVCacheDType
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import DeviceStep, PackedStep
from minisgl.engine.drafting import Drafting
from minisgl.engine.sampler import Sampler
from minisgl.engine.tables import Tables
from minisgl.kernels.attention.stored_kv import FP8
from minisgl.kernels.pointwise.step_inputs import step_inputs
from minisgl.kernels.speculation.place_drafts import place_drafts
from minisgl.kernels.speculation.step_rows import DecodeRows
from minisgl.kernels.speculation.verify_drafts import verify_drafts
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.wire.plan import StepPlan

LogitsHook = Callable[[StepPlan, torch.Tensor], None]


def attention_shapes(
    config: ModelConfig,
    tensor_parallel: int,
    dtype: torch.dtype,
    *,
    page_size: int,
    max_model_len: int,
    device: torch.device,
    kv_cache_dtype: KVCacheDType = "auto",
) -> list[AttentionShape]:
    """Attention of each layer with keys and values on one of `tensor_parallel` ranks."""
    return [
        AttentionShape(
            query_heads=of.num_heads // tensor_parallel,
            kv_heads=max(of.num_kv_heads // tensor_parallel, 1),
            head_dim=of.head_dim,
            page_size=page_size,
            pages_per_row=-(-max_model_len // page_size),
            dtype=dtype,
            device=device,
            kv_dtype=FP8 if kv_cache_dtype == "fp8" else None,
            # A window that no sequence exceeds would only rule out kernels.
            window=None if of.window is None or of.window >= max_model_len else of.window,
            scale=of.scale,
            softcap=of.softcap,
            sinks=of.sinks,
        )
        for of in config.attentions
    ]


class StepTensors(NamedTuple):
    """Results of a step on the device; `StepProcessors.unpack` decodes the log-probabilities."""

    tokens: torch.Tensor
    """[S] int32"""
    report: torch.Tensor | None = None
    """Log-probabilities of the sampled tokens, as `logprobs.report` returns them."""
    prompt_report: torch.Tensor | None = None
    """Log-probabilities of prompt tokens."""
    verified: torch.Tensor | None = None
    """[4, R] int32 of an engine that speculates, see `verify_drafts`."""


class PlainSample(NamedTuple):
    """A step whose model has run and whose rows are sampled plainly. Its tensors are valid until the next launch."""

    packed: PackedStep
    step: DeviceStep
    logits: torch.Tensor
    """[S, vocab_local]"""
    tokens: torch.Tensor
    """[S] int32"""
    prompt_report: torch.Tensor | None = None
    """See `StepTensors`."""

    @property
    def is_late(self) -> bool:
        """True when rows wait for masks."""
        return len(self.packed.processors.late_slots) > 0


class Runner:
    """Model and tables of one rank. No method waits for the device."""

    def __init__(
        self,
        model: Decoder,
        parallel: TensorParallel,
        kv: KVPool,
        tables: Tables,
        attention: LayeredAttention,
        states: RecurrentStates | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`states`: those of layers with a recurrent state. `drafting`: a draft head with its contexts."""
        self.tables = tables
        self.drafting = drafting
        self.attention = attention
        self._states = states
        self.logits_hook: LogitsHook | None = None
        """Test hook, called with every plan that samples and its logits [S, vocab], which are valid until the next
        step. Set it on all ranks or on none: the logits of all ranks are gathered for it."""
        self._model = model
        self._parallel = parallel
        self.kv = kv
        self.sampler = Sampler(tables, parallel, model.vocab_start, model.config.vocab_size)

    @property
    def model_config(self) -> ModelConfig:
        return self._model.config

    @property
    def generates(self) -> bool:
        """Whether the model has an output head."""
        return self._model.head is not None

    @property
    def device(self) -> torch.device:
        return self.tables.page_table.device

    def with_layers(self, layers: Sequence[int]) -> Runner:
        """A runner with only these layers of the model, on the same tables and pool."""
        runner = copy.copy(self)
        runner._model = self._model.with_layers(layers)
        return runner

    def apply_updates(self, packed: PackedStep, step: DeviceStep) -> None:
        """Apply the changes of a plan to the tables, before the forward pass of its step."""
        if len(step.poison_pages):
            self.kv.poison(step.poison_pages.long(), in_window=False)
            if self.drafting is not None:
                self.drafting.kv.poison(step.poison_pages.long())
        if len(step.poison_window_pages):
            self.kv.poison(step.poison_window_pages.long(), in_window=True)
        if step.new_rows.shape[1]:
            self.tables.set_rows(step.new_rows)
        if step.changes is not None:
            self.tables.apply(step.changes)
        if step.page_updates.shape[1]:
            self.tables.set_pages(step.page_updates)
        if step.window_updates.shape[1]:
            self.tables.set_window_pages(step.window_updates)
        if len(step.texts):
            self.tables.set_texts(packed.texts, step.texts)
        if self._states is not None:
            self._states.change(packed.state_changes, step.state_changes)

    def attention_batch(self, packed: PackedStep, step: DeviceStep) -> AttentionBatch:
        """The step as attention backends read it."""
        d = packed.num_decode
        return AttentionBatch(
            page_table=self.tables.page_table,
            window_table=self.tables.window_table,
            decode_slots=step.slots[:d],
            decode_lengths=step.decode_lengths,
            prefill_slots=step.prefill_slots,
            query_offsets=step.query_offsets,
            prefill_kv_lengths=step.prefill_kv_lengths,
            host_decode_lengths=packed.decode_positions + 1,
            host_prefill_starts=packed.prefill_starts,
            host_prefill_lengths=packed.prefill_lengths,
            cascade=step.cascade,
            has_drafts=packed.has_drafts,
        )

    def logits(
        self, packed: PackedStep, step: DeviceStep, batch: AttentionBatch, attention: LayeredAttention
    ) -> torch.Tensor:
        """Logits [S, vocab_local] of the rows that sample. `attention` must be prepared for `batch`."""
        rows = step.sample_rows if packed.num_segments else None
        return self._model.local_logits(self.hidden(packed, step, batch, attention, rows))

    def hidden(
        self,
        packed: PackedStep,
        step: DeviceStep,
        batch: AttentionBatch,
        attention: LayeredAttention,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states [S, hidden] of the tokens `rows`, or of all tokens [T, hidden]."""
        tables = self.tables
        slots, positions, page_size = step.slots, step.positions, self.kv.page_size
        decode_tokens = None
        if tables.texts is not None and packed.num_decode:
            decode_tokens = self._place(packed.num_decode, step)
            if self.device.type == "cpu":
                batch = dataclasses.replace(batch, host_decode_lengths=step.decode_lengths.numpy())
        tokens, locations = step_inputs(
            slots, positions, step.prefill_tokens, tables.page_table, tables.last_token, page_size, decode_tokens
        )
        window_locations = None
        if tables.window_table is not None:
            _, window_locations = step_inputs(
                slots, positions, step.prefill_tokens, tables.window_table, tables.last_token, page_size
            )
        attention.begin(batch, locations, window_locations)
        if self._states is not None:
            if self.device.type == "cuda":
                self._states.begin_cuda(batch.decode_slots, step.prompts)
            else:
                self._states.begin(batch.decode_slots, packed.segments)
        if self.drafting is None:
            return self._model.forward(tokens, step.positions, attention, rows, self._states)
        kept: list[torch.Tensor] = []
        hidden = self._model.forward(tokens, step.positions, attention, rows, self._states, kept)
        self.drafting.store(kept, step.positions, locations)
        return hidden

    def _place(self, decode: int, step: DeviceStep) -> torch.Tensor:
        """Input tokens [D] of the decode rows, whose slots and positions are completed in the step."""
        assert self.tables.texts is not None
        rows = DecodeRows(
            step.slots[:decode],
            step.positions[:decode],
            step.decode_lengths,
            step.sample_positions,
            step.sample_rows,
        )
        return place_drafts(self.tables.texts, rows, self.tables.dummy_slot)

    def save_states(self) -> None:
        """Save recurrent states that the forward pass of a step has left, behind it."""
        if self._states is not None:
            self._states.save_last()

    def call_hook(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Call the test hook with `logits` [S, vocab_local] of all ranks."""
        if self.logits_hook is not None:
            full = self._parallel.all_gather_last_dim(logits)
            self.logits_hook(plan, full[:, : self._model.config.vocab_size])

    def sample(self, logits: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """Tokens [S] int32 without filters and processors; they become the next inputs of their rows."""
        tokens = self.sampler.sample(logits, step.sample_slots, step.sample_positions)
        self.tables.set_last_tokens(step.sample_slots, tokens)
        return tokens

    def resample(self, plain: PlainSample) -> StepTensors:
        """Sample again, into the same tokens and the next inputs, for rows with filters or logits processors. Reports
        log-probabilities, with a line for each sampled row, if any row wants them."""
        packed, report = plain.packed, None
        if packed.processors.stages:
            step = plain.step.without_padding(packed.sampled)
            report = self.sampler.resample(plain.logits, step, plain.tokens, packed.processors)
        return StepTensors(plain.tokens, report, plain.prompt_report, self.verify(plain))

    def verify(self, plain: PlainSample) -> torch.Tensor | None:
        """Verify the drafts of a step by its tokens, and find new ones. Returns `StepTensors.verified`."""
        step, texts = plain.step, self.tables.texts
        if texts is None or step.sampled is None or not plain.packed.sampled:
            return None
        verified = verify_drafts(texts, step.sampled, plain.tokens, step.sample_positions)
        if self.drafting is not None:
            self.drafting.draft(step.sampled, self.sampler)
        return verified

    def run_hidden(self, packed: PackedStep, step: DeviceStep) -> torch.Tensor:
        """Run the step eagerly up to the hidden states [S, hidden] of the last tokens of prompts that end in it."""
        self.apply_updates(packed, step)
        batch = self.attention_batch(packed, step)
        self.attention.prepare(batch)
        hidden = self.hidden(packed, step, batch, self.attention, step.sample_rows)
        self.save_states()
        return hidden

    def run_model(self, plan: StepPlan, packed: PackedStep, step: DeviceStep) -> PlainSample:
        """Run the step eagerly up to the plain sample."""
        self.apply_updates(packed, step)
        batch = self.attention_batch(packed, step)
        self.attention.prepare(batch)
        prompt_report = None
        if step.changes is not None and len(step.changes.prompt_rows):
            hidden = self.hidden(packed, step, batch, self.attention, None)
            prompt_report = self.sampler.report_prompt(self._model.local_logits, hidden, step.changes)
            logits = self._model.local_logits(hidden[step.sample_rows])
        else:
            logits = self.logits(packed, step, batch, self.attention)
        self.save_states()
        tokens = step.sample_slots
        if packed.sampled:
            self.call_hook(plan, logits)
            tokens = self.sample(logits, step)
        return PlainSample(packed, step, logits, tokens, prompt_report)
