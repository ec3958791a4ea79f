"""Roofline F1: the speed of a workload if every operator reached the limit of the hardware, one after another.

An operator takes max(FLOP / peak, bytes / bandwidth); the time of a forward pass is the sum over its operators, without
launch latencies and synchronization. It is an upper bound; benchmarks report their speed as a ratio to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from minisgl.layers.weights.formats import Quantization, WeightCost
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import (
    UNGATED,
    AttentionConfig,
    FeedForwardConfig,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    MoeConfig,
    Recurrence,
)

_BYTES: Final = 2
"""Bytes of an activation, of an element of K or V, and of a weight that is not quantized: bfloat16."""


_PLAIN: Final = WeightCost(_BYTES, 1.0)


def _weights(quantization: Quantization | None, *, experts: bool = False) -> WeightCost:
    """Weights of linear layers, or of `experts`, as they are in memory: some formats are dequantized while loading."""
    kept = None if quantization is None else quantization.format.kept_cost(experts=experts)
    return _PLAIN if kept is None else kept


def _matrices(part: FeedForwardConfig | MoeConfig) -> int:
    """Projections of a feed-forward, or of an expert."""
    return 2 if part.activation in UNGATED else 3


@dataclass(frozen=True, slots=True)
class Hardware:
    """Measured limits of one device."""

    bandwidth: float
    """Memory bandwidth in bytes/s, read plus write."""
    flops: float
    """Dense bf16 operations in FLOP/s; FP8 ones take half the time."""
    link: float
    """Bandwidth to other devices in bytes/s, in one direction."""


HARDWARE: Final = {
    # Measured: a copy of many GiB, and an 8192³ bf16 GEMM; the link is NVLink 4's data sheet.
    "h200": Hardware(bandwidth=4.3e12, flops=790e12, link=450e9),
    "h100": Hardware(bandwidth=3.0e12, flops=700e12, link=450e9),
}


def hardware_of(gpu_name: str) -> Hardware | None:
    """Limits of a GPU by the name that its driver reports (`NVIDIA H200`); None if it was not measured."""
    for name, hardware in HARDWARE.items():
        if name in gpu_name.lower():
            return hardware
    return None


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass."""

    tokens: int
    """Rows that are computed."""
    sampled: int
    """Rows that go through the LM head."""
    pairs: int
    """(query, key) pairs of causal attention in one layer."""
    kv_tokens: int
    """Tokens whose K and V are read: once per request, or once per group that shares them."""

    @staticmethod
    def of_prompts(lengths: Sequence[int]) -> Forward:
        """Prefill of whole prompts."""
        return Forward(sum(lengths), len(lengths), sum(n * (n + 1) // 2 for n in lengths), sum(lengths))

    @staticmethod
    def of_decode(batch: int, context: int) -> Forward:
        """Decode step of `batch` requests with `context` tokens in all."""
        return Forward(batch, batch, context, context)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of one model on `tensor_parallel` devices; all results are seconds."""

    model: ModelConfig
    hardware: Hardware
    tensor_parallel: int = 1
    kv_bytes: int = 2
    """Bytes of a number of the KV cache."""

    def forward(self, step: Forward) -> float:
        """One forward pass."""
        model, tp = self.model, self.tensor_parallel
        layers = sum(self._layer(layer, step) for layer in model.layers)
        head = self._linear(model.hidden_size, model.vocab_size // tp, step.sampled)
        sampling = step.sampled * model.vocab_size / tp * 2 * _BYTES / self.hardware.bandwidth
        return layers + head + sampling

    def _layer(self, config: LayerConfig, step: Forward) -> float:
        of, hidden, tp = config.attention, self.model.hidden_size, self.tensor_parallel
        blocks = []
        if of is not None:
            blocks.append(self._attention(of, step) if isinstance(of, AttentionConfig) else self._recurrence(of, step))
        if config.feed_forward is not None:
            blocks.append(self._feed_forward(config, step.tokens))
        # Before each block add and norm: its input and the residual stream, in and out.
        rows = step.tokens * len(blocks)
        layer = sum(blocks) + rows * 4 * hidden * _BYTES / self.hardware.bandwidth
        if tp > 1:
            layer += 2 * (tp - 1) / tp * rows * hidden * _BYTES / self.hardware.link
        return layer

    def _attention(self, of: AttentionConfig, step: Forward) -> float:
        rows, hidden, heads = step.tokens, self.model.hidden_size, of.num_heads // self.tensor_parallel * of.head_dim
        kv_width = max(1, of.num_kv_heads // self.tensor_parallel) * of.head_dim
        qkv = heads * (2 if of.output_gate else 1)
        qkv += (0 if of.reuses_kv else 1 if of.key_is_value else 2) * kv_width
        kind = _weights(self.model.quantization)
        block = self._linear(hidden, qkv, rows, kind) + self._linear(heads, hidden, rows, kind)
        # With a window, as if all contexts were at least as long.
        most = rows * of.window if of.window is not None else step.pairs
        kv = min(step.kv_tokens, most) * 2 * kv_width * self.kv_bytes
        block += self._operator(4 * min(step.pairs, most) * heads, kv + 2 * rows * heads * _BYTES)
        # QK norm, RoPE and KV store: qkv in and out.
        return block + rows * 2 * qkv * _BYTES / self.hardware.bandwidth

    def _recurrence(self, of: Recurrence, step: Forward) -> float:
        """Each sequence's state is read and written once."""
        rows, hidden, tp = step.tokens, self.model.hidden_size, self.tensor_parallel
        kind, shape = _weights(self.model.quantization), of.state_shape(tp)
        if isinstance(of, GatedDeltaConfig):
            width, gates, narrow, products = of.value_width // tp, 1, 2 * shape.heads, 3
        elif isinstance(of, Mamba2Config):
            width, gates, narrow, products = of.width // tp, 1, shape.heads, 2
        else:
            width, gates, narrow, products = of.width // tp, 2, 0, 0
        block = self._linear(hidden, shape.channels + gates * width + narrow, rows, kind)
        block += self._linear(width, hidden, rows, kind)
        numbers = shape.heads * shape.key_dim * shape.value_dim
        moved = 2 * step.sampled * shape.num_bytes(_BYTES) + rows * (shape.channels + width) * _BYTES
        block += self._operator(2 * products * rows * numbers, moved)
        # The convolution, and the gates with their norm.
        return block + rows * (2 * shape.channels + (2 + gates) * width) * _BYTES / self.hardware.bandwidth

    def _feed_forward(self, config: LayerConfig, rows: int) -> float:
        hidden, tp, part = self.model.hidden_size, self.tensor_parallel, config.feed_forward
        kind, block, pointwise_width = _weights(self.model.quantization), 0.0, 0.0
        if (moe := config.moe) is not None:
            # The router is not quantized.
            block += self._linear(hidden, moe.num_experts, rows)
            block += self._experts(moe, rows, _weights(self.model.quantization, experts=True))
            pointwise_width = _matrices(moe) * moe.experts_per_token * moe.intermediate_size / tp
            if moe.latent_size is not None:
                block += 2 * self._linear(hidden, moe.latent_size, rows)
        if (dense := part.shared if isinstance(part, MoeConfig) else part) is not None:
            matrices = _matrices(dense)
            block += self._linear(hidden, (matrices - 1) * dense.intermediate_size // tp, rows, kind)
            block += self._linear(dense.intermediate_size // tp, hidden, rows, kind)
            pointwise_width += matrices * dense.intermediate_size / tp
        return block + rows * pointwise_width * _BYTES / self.hardware.bandwidth

    def _operator(self, flop: float, bytes_moved: float, speed: float = 1.0) -> float:
        return max(flop / (self.hardware.flops * speed), bytes_moved / self.hardware.bandwidth)

    def _linear(self, inputs: int, outputs: int, rows: int, kind: WeightCost = _PLAIN) -> float:
        moved = inputs * outputs * kind.item_bytes + rows * (inputs + outputs) * _BYTES
        return self._operator(2 * rows * inputs * outputs, moved, kind.speed)

    def _experts(self, moe: MoeConfig, rows: int, kind: WeightCost) -> float:
        """Experts of one layer with uniform routing."""
        hidden, width = moe.latent_size or self.model.hidden_size, moe.intermediate_size / self.tensor_parallel
        used = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** rows)
        weights = _matrices(moe) * hidden * width
        activations = rows * moe.experts_per_token * (2 * hidden + _matrices(moe) * width)
        moved = used * weights * kind.item_bytes + activations * _BYTES
        return self._operator(2 * rows * moe.experts_per_token * weights, moved, kind.speed)

    def decode(self, batch: int, context: int) -> float:
        """One decode step of `batch` requests with `context` tokens each."""
        return self.forward(Forward.of_decode(batch, batch * context))

    def offline(
        self, prompt_lengths: Sequence[int], output_lengths: Sequence[int], *, step_tokens: int = 16384
    ) -> float:
        """All prompts first, in steps of at most `step_tokens`, then all requests decode together."""
        seconds = sum(map(self.forward, _prefill_steps(prompt_lengths, step_tokens)))
        requests = sorted(zip(output_lengths, prompt_lengths, strict=True))
        live, context, finished = len(requests), sum(prompt_lengths), 0
        for done in range(1, max(output_lengths, default=0)):
            while finished < len(requests) and requests[finished][0] <= done:
                output, prompt = requests[finished]
                context -= prompt + output - 1
                live -= 1
                finished += 1
            context += live
            seconds += self.forward(Forward.of_decode(live, context))
        return seconds

    def shared_prefix(self, *, requests: int, prefix: int, own: int, output: int) -> float:
        """Requests with one cold prefix, which is computed once and read once per step (cascade attention)."""
        pairs = prefix * (prefix + 1) // 2 + requests * (own * prefix + own * (own + 1) // 2)
        seconds = self.forward(Forward(prefix + requests * own, requests, pairs, prefix + requests * (prefix + own)))
        for step in range(1, output):
            pairs = requests * (prefix + own + step)
            seconds += self.forward(Forward(requests, requests, pairs, prefix + requests * (own + step)))
        return seconds


def _prefill_steps(prompt_lengths: Sequence[int], step_tokens: int) -> Iterator[Forward]:
    batch: list[int] = []
    for length in prompt_lengths:
        if batch and sum(batch) + length > step_tokens:
            yield Forward.of_prompts(batch)
            batch = []
        batch.append(length)
    if batch:
        yield Forward.of_prompts(batch)
