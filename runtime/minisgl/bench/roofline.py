"""The F1 floor: how fast a workload could run if every operator reached the hardware's limit, one after another.

For each operator max(FLOP / peak, bytes / bandwidth); their sum is the time of a forward pass. Launch latencies and
synchronisation are not in it, so nothing passes it; benchmarks quote their speed as a ratio to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one device reaches in practice."""

    bandwidth: float
    """Memory, bytes/s, read plus write."""
    flops: float
    """Dense bf16, FLOP/s."""
    link: float
    """To other devices, bytes/s in one direction."""


HARDWARE: Final = {
    # Measured: a copy of many GiB, and an 8192³ bf16 GEMM; the link is NVLink 4's data sheet.
    "h200": Hardware(bandwidth=4.3e12, flops=790e12, link=450e9),
    "h100": Hardware(bandwidth=3.0e12, flops=700e12, link=450e9),
}


def hardware_of(gpu_name: str) -> Hardware | None:
    """The constants for a GPU by its driver's name (`NVIDIA H200`); None when it was not measured."""
    for name, hardware in HARDWARE.items():
        if name in gpu_name.lower():
            return hardware
    return None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide its cost, on one of `tensor_parallel` ranks."""

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    tensor_parallel: int = 1
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @staticmethod
    def from_config(config: Mapping[str, Any], tensor_parallel: int = 1) -> ModelShape:
        """From a Hugging Face config.json."""
        return ModelShape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            query_heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            experts=config.get("num_experts") or 0,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            expert_intermediate=config.get("moe_intermediate_size") or 0,
            tensor_parallel=tensor_parallel,
        )

    @property
    def local_query_heads(self) -> int:
        return self.query_heads // self.tensor_parallel

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tensor_parallel)

    @property
    def kv_width(self) -> int:
        """Elements of K (or V) of one token in one layer."""
        return self.local_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass."""

    tokens: int
    """Rows that are computed."""
    sampled: int
    """Rows that go through the head."""
    pairs: int
    """(query, key) pairs of causal attention in one layer."""
    kv_tokens: int
    """Tokens whose K and V are read: once a request, or once a group that shares them."""


def forward_seconds(model: ModelShape, hardware: Hardware, forward: Forward) -> float:
    """The F1 floor of one forward pass."""

    def operator(flop: float, bytes_moved: float) -> float:
        return max(flop / hardware.flops, bytes_moved / hardware.bandwidth)

    def linear(inputs: int, outputs: int, rows: int) -> float:
        weights = inputs * outputs * model.weight_bytes
        return operator(2 * rows * inputs * outputs, weights + 2 * rows * (inputs + outputs))

    rows, tp, heads = forward.tokens, model.tensor_parallel, model.local_query_heads * model.head_dim
    qkv = heads + 2 * model.kv_width
    layer = linear(model.hidden, qkv, rows) + linear(heads, model.hidden, rows)
    if model.experts:
        layer += operator(*_experts(model, rows))
        pointwise_width = model.experts_per_token * model.expert_intermediate / tp
    else:
        layer += linear(model.hidden, 2 * model.intermediate // tp, rows)
        layer += linear(model.intermediate // tp, model.hidden, rows)
        pointwise_width = model.intermediate / tp
    layer += operator(
        4 * forward.pairs * heads, forward.kv_tokens * 2 * model.kv_width * model.kv_bytes + 4 * rows * heads
    )
    # Two add + norm (x and the residual in and out), qk-norm + RoPE + KV store (qkv in and out), SiLU · mul.
    pointwise = 2 * 4 * model.hidden * 2 + 2 * qkv * 2 + 3 * pointwise_width * 2
    layer += rows * pointwise / hardware.bandwidth
    if tp > 1:
        layer += 2 * 2 * (tp - 1) / tp * rows * model.hidden * 2 / hardware.link
    head = linear(model.hidden, model.vocabulary // tp, forward.sampled)
    sampling = forward.sampled * model.vocabulary / tp * 2 * 2 / hardware.bandwidth
    return model.layers * layer + head + sampling


def _experts(model: ModelShape, rows: int) -> tuple[float, float]:
    """(FLOP, bytes) of a layer's experts with uniform routing."""
    share = model.experts_per_token / model.experts
    hit = model.experts * (1 - (1 - share) ** rows)
    one = 3 * model.hidden * model.expert_intermediate / model.tensor_parallel
    flop = 2 * rows * model.experts_per_token * one
    activations = 2 * model.hidden + 3 * model.expert_intermediate / model.tensor_parallel
    return flop, hit * one * model.weight_bytes + rows * model.experts_per_token * activations * 2


def decode_seconds(model: ModelShape, hardware: Hardware, batch: int, context: int) -> float:
    """One decode step of `batch` requests with `context` tokens each."""
    return forward_seconds(model, hardware, Forward(batch, batch, batch * context, batch * context))


def offline_seconds(
    model: ModelShape,
    hardware: Hardware,
    prompt_lengths: Sequence[int],
    output_lengths: Sequence[int],
    *,
    step_tokens: int = 16384,
) -> float:
    """All prompts first, in steps of at most `step_tokens`, then all requests decode together."""
    seconds = sum(forward_seconds(model, hardware, step) for step in _prefill_steps(prompt_lengths, step_tokens))
    requests = sorted(zip(output_lengths, prompt_lengths, strict=True))
    live, context, ended = len(requests), sum(prompt_lengths), 0
    for done in range(1, max(output_lengths, default=0)):
        while ended < len(requests) and requests[ended][0] <= done:
            output, prompt = requests[ended]
            context -= prompt + output - 1
            live -= 1
            ended += 1
        context += live
        seconds += forward_seconds(model, hardware, Forward(live, live, context, context))
    return seconds


def _prefill_steps(prompt_lengths: Sequence[int], step_tokens: int) -> Iterator[Forward]:
    batch: list[int] = []
    for length in prompt_lengths:
        if batch and sum(batch) + length > step_tokens:
            yield _whole_prompts(batch)
            batch = []
        batch.append(length)
    if batch:
        yield _whole_prompts(batch)


def _whole_prompts(lengths: Sequence[int]) -> Forward:
    return Forward(sum(lengths), len(lengths), sum(n * (n + 1) // 2 for n in lengths), sum(lengths))


def shared_prefix_seconds(
    model: ModelShape, hardware: Hardware, *, requests: int, prefix: int, own: int, output: int
) -> float:
    """One cold prefix, computed once and read once a step for all requests (cascade attention)."""
    pairs = prefix * (prefix + 1) // 2 + requests * (own * prefix + own * (own + 1) // 2)
    seconds = forward_seconds(
        model, hardware, Forward(prefix + requests * own, requests, pairs, prefix + requests * (prefix + own))
    )
    for step in range(1, output):
        pairs = requests * (prefix + own + step)
        seconds += forward_seconds(
            model, hardware, Forward(requests, requests, pairs, prefix + requests * (own + step))
        )
    return seconds
