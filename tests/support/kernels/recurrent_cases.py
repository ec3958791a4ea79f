"""The kernels of recurrent states against the same in torch: on CUDA, or in Triton's interpreter on a CPU.

Run `python -m support.kernels.recurrent_cases` for the latter. Prints, as JSON, the largest difference of each case, in
outputs and in all states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from minisgl.attention.gated_delta import GatedDeltaRule
from minisgl.attention.mamba2 import Mamba2Rule
from minisgl.attention.recurrent import Rule
from minisgl.kernels.attention.causal_convolution import convolve, convolve_rows
from minisgl.kernels.attention.gated_delta import NORM_EPS
from minisgl.kernels.attention.prompt_chunks import PromptChunks, Segment, chunks_of, most_chunks
from minisgl.kernels.pointwise.gated_norm import gate_then_norm, norm_then_gate
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end

PLACES, ROWS, CHECKPOINT = 9, 4, 7
SLOTS = (5, 0, 3, 2)
# Prompts that begin and end in chunks; one is shorter than what the convolution looks back at, and one is padding.
SEGMENTS = (Segment(3, 0, 70), Segment(1, 37, 2), Segment(6, 64, 129), Segment(8, 0, 0), Segment(0, 5, 1))
Sizes = tuple[int, int, int, int]
"""Heads of keys or groups, heads, and sizes of keys and values."""
SAVES = {3: [(64, 0)], 6: [(128, 1)]}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


def difference(
    states: torch.Tensor, ours: Callable[[torch.Tensor], torch.Tensor], theirs: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Largest difference of results, and of what becomes of `states`, relative to the largest number."""
    copies = states.clone(), states.clone()
    pairs = (ours(copies[0]), theirs(copies[1])), copies
    # NaN is larger than any bound.
    return max(
        float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
        for found, expected in pairs
    )


def convolution(device: str, dtype: torch.dtype, channels: int, taps: int, *, bias: bool, silu: bool) -> float:
    from minisgl.kernels.attention.recurrent_decode_triton import convolve_rows_cuda

    # Rows of a wider product, as projections are.
    x, weight = draw(ROWS, channels + 5).to(device, dtype)[:, :channels], draw(channels, taps).to(device, dtype)
    slots = torch.tensor(SLOTS, device=device)
    added = draw(channels).to(device, dtype) if bias else None
    inputs = draw(PLACES, taps - 1, channels).to(device, dtype)

    def theirs(inputs: torch.Tensor) -> torch.Tensor:
        on_host = inputs.cpu()
        out = convolve_rows(
            x.cpu(), on_host, slots.cpu(), weight.cpu(), None if added is None else added.cpu(), silu=silu
        )
        inputs.copy_(on_host)
        return out.to(device)

    return difference(inputs, lambda inputs: convolve_rows_cuda(x, inputs, slots, weight, added, silu=silu), theirs)


def convolution_of_prompts(
    device: str, dtype: torch.dtype, channels: int, taps: int, *, bias: bool, silu: bool
) -> float:
    from minisgl.kernels.attention.convolution_prefill_triton import convolve_prompts_cuda

    chunks, slots, offsets = _prompts(device)
    x = draw(chunks.num_tokens, channels + 5).to(device, dtype)[:, :channels]
    weight, added = draw(channels, taps).to(device, dtype), draw(channels).to(device, dtype) if bias else None

    def theirs(inputs: torch.Tensor) -> torch.Tensor:
        outputs = []
        for segment, part in _parts():
            for cut, saved in _cuts(segment):
                rows = x[None, part][:, cut]
                out, inputs[segment.slot, None] = convolve(rows, inputs[segment.slot, None], weight, added, silu=silu)
                outputs.append(out[0])
                if saved is not None:
                    inputs[CHECKPOINT + saved] = inputs[segment.slot]
        return torch.cat(outputs)

    return difference(
        draw(PLACES, taps - 1, channels).to(device, dtype),
        lambda inputs: convolve_prompts_cuda(
            x, inputs, inputs[CHECKPOINT:], slots, offsets, chunks, weight, added, silu=silu
        ),
        theirs,
    )


def rule_of_rows(device: str, dtype: torch.dtype, of: str, sizes: Sizes) -> float:
    rule, channels, gates, shape = _rule(device, dtype, of, ROWS, sizes)
    mixed, slots = draw(ROWS, channels).to(device, dtype), torch.tensor(SLOTS, device=device)
    return difference(
        draw(PLACES, *shape).to(device),
        lambda states: _kernels(rule, mixed, gates, states, slots),
        lambda states: _by_torch(rule, mixed, gates, states, slots),
    )


def rule_of_prompts(device: str, dtype: torch.dtype, of: str, sizes: Sizes, alike: bool = False) -> float:
    """`alike`: keys hardly differ, and states are hardly forgotten."""
    chunks, slots, _ = _prompts(device)
    rule, channels, gates, shape = _rule(device, dtype, of, chunks.num_tokens, sizes)
    mixed = draw(chunks.num_tokens, channels).to(device, dtype)
    if alike:
        mixed = 1.0 + 0.01 * mixed
        gates = (gates[0] - 20, *(gate + 5 for gate in gates[1:]))

    def theirs(states: torch.Tensor) -> torch.Tensor:
        outputs = []
        for segment, part in _parts():
            for cut, saved in _cuts(segment):
                of_part = tuple(gate[part][cut] for gate in gates)
                out, states[segment.slot] = rule.many_tokens(mixed[part][cut], of_part, states[segment.slot])
                outputs.append(out)
                if saved is not None:
                    states[CHECKPOINT + saved] = states[segment.slot]
        return torch.cat(outputs)

    return difference(
        draw(PLACES, *shape).to(device),
        lambda states: rule.prompts(mixed, gates, states, states[CHECKPOINT:], slots, chunks),
        theirs,
    )


def rounded_checkpoints(device: str, dtype: torch.dtype, of: str, sizes: Sizes) -> float:
    """How far checkpoints in float16 are from those in float32, but for rounding."""
    chunks, slots, _ = _prompts(device)
    rule, channels, gates, shape = _rule(device, dtype, of, chunks.num_tokens, sizes)
    mixed, states = draw(chunks.num_tokens, channels).to(device, dtype), draw(PLACES, *shape).to(device)
    wide = torch.zeros(PLACES - CHECKPOINT, *shape, device=device)
    narrow = wide.half()
    for kept in (wide, narrow):
        rule.prompts(mixed, gates, states.clone(), kept, slots, chunks)
    rounding = wide.abs() / 2**11 + torch.finfo(torch.float16).smallest_normal / 2**10
    return float(((narrow.float() - wide).abs() - rounding).max().clamp(min=0))


def norm(device: str, dtype: torch.dtype, tokens: int, groups: int, size: int, *, gate_first: bool) -> float:
    from minisgl.kernels.pointwise.gated_norm_triton import gated_norm_cuda

    width = groups * size
    heads, gate = draw(tokens, groups, size), draw(tokens, width + 3)[:, :width]
    gain = draw(width if gate_first else size)
    expected = gate_then_norm(heads.flatten(1), gate, gain, groups, 1e-6) if gate_first else None
    if expected is None:
        expected = norm_then_gate(heads, gate, gain, 1e-6)
    narrow, opening, factor = (each.to(device, dtype) for each in (heads, gate, gain))

    def ours(_: torch.Tensor) -> torch.Tensor:
        return gated_norm_cuda(narrow, opening, factor, groups, 1e-6, gate_first=gate_first).cpu()

    return difference(expected, ours, lambda _: expected)


def _kernels(
    rule: Rule, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], states: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """`Rule.one_token` on CUDA, also in the interpreter."""
    from minisgl.kernels.attention.recurrent_decode_triton import gated_delta_rows_cuda, mamba2_rows_cuda

    if isinstance(rule, GatedDeltaRule):
        (decay, step), (log_decay, bias) = gates, rule._of_heads
        return gated_delta_rows_cuda(mixed, decay, step, log_decay, bias, states, slots, rule._key_heads, NORM_EPS)
    assert isinstance(rule, Mamba2Rule)
    (raw,), (log_decay, bias, skip) = gates, rule._of_heads
    return mamba2_rows_cuda(mixed, raw, log_decay, bias, skip, states, slots, rule._groups)


def _by_torch(
    rule: Rule, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], states: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    outputs = []
    for row, slot in enumerate(slots.tolist()):
        of_row = tuple(gate[row, None] for gate in gates)
        out, states[slot] = rule.many_tokens(mixed[row, None], of_row, states[slot])
        outputs.append(out)
    return torch.cat(outputs)


def _rule(
    device: str, dtype: torch.dtype, of: str, tokens: int, sizes: Sizes
) -> tuple[Rule, int, tuple[torch.Tensor, ...], tuple[int, int, int]]:
    """The rule, the number of its channels, gates of so many tokens as parts of a wider product, and the shape of a
    state."""
    shared, heads, key, value = sizes
    channels, shape = 2 * shared * key + heads * value, (heads, key, value)
    log_decay, bias, skip = (each.to(device) for each in (draw(heads) - 1, 0.5 * draw(heads), draw(heads)))
    first, second = draw(tokens, 2 * heads).to(device, dtype).split(heads, -1)
    if of == "gated delta":
        return GatedDeltaRule(shared, heads, key, value, log_decay, bias), channels, (first, second), shape
    return Mamba2Rule(heads, shared, log_decay, bias, skip), channels, (first,), shape


def _prompts(device: str) -> tuple[PromptChunks, torch.Tensor, torch.Tensor]:
    """The segments, with their slots and offsets."""
    lengths = [each.length for each in SEGMENTS]
    size = most_chunks(sum(lengths), len(lengths))
    chunks, ends = (
        torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in chunks_of(SEGMENTS, SAVES, size)
    )
    slots = torch.tensor([each.slot for each in SEGMENTS], dtype=torch.int32, device=device)
    offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
    return PromptChunks(chunks, ends, sum(lengths)), slots, offsets


def _parts() -> list[tuple[Segment, slice]]:
    """Segments, and where their tokens are."""
    ends = np.cumsum([each.length for each in SEGMENTS]).tolist()
    return [(each, slice(end - each.length, end)) for each, end in zip(SEGMENTS, ends, strict=True) if each.length]


def _cuts(segment: Segment) -> list[tuple[slice, int | None]]:
    """Parts of a segment between states that are saved, and the checkpoints of these."""
    saves: Sequence[tuple[int, int]] = SAVES.get(segment.slot, ())
    edges = [0, *(tokens - segment.start for tokens, _ in saves), segment.length]
    places = [*(place for _, place in saves), None]
    return [(slice(*edge), place) for edge, place in zip(pairwise(edges), places, strict=True)]


CASES: dict[str, Callable[[str, torch.dtype], float]] = {
    "convolution of Qwen3.5": partial(convolution, channels=300, taps=4, bias=False, silu=True),
    "convolution of Nemotron": partial(convolution, channels=256, taps=4, bias=True, silu=True),
    "convolution of LFM2": partial(convolution, channels=40, taps=3, bias=True, silu=False),
    "convolution of prompts": partial(convolution_of_prompts, channels=72, taps=4, bias=True, silu=True),
    "convolution of prompts of LFM2": partial(convolution_of_prompts, channels=40, taps=3, bias=False, silu=False),
    "gated delta rule": partial(rule_of_rows, of="gated delta", sizes=(2, 4, 128, 128)),
    "gated delta rule of odd sizes": partial(rule_of_rows, of="gated delta", sizes=(1, 3, 24, 40)),
    "gated delta rule of prompts": partial(rule_of_prompts, of="gated delta", sizes=(1, 2, 128, 128)),
    "gated delta rule, keys alike": partial(rule_of_prompts, of="gated delta", sizes=(1, 1, 32, 16), alike=True),
    "gated delta rule of prompts of odd sizes": partial(rule_of_prompts, of="gated delta", sizes=(1, 1, 24, 40)),
    "mamba-2": partial(rule_of_rows, of="mamba-2", sizes=(2, 4, 128, 64)),
    "mamba-2 of odd sizes": partial(rule_of_rows, of="mamba-2", sizes=(1, 3, 12, 40)),
    "mamba-2 of prompts": partial(rule_of_prompts, of="mamba-2", sizes=(1, 2, 128, 64)),
    "mamba-2 of prompts of odd sizes": partial(rule_of_prompts, of="mamba-2", sizes=(1, 1, 12, 40)),
    "gated delta rule, checkpoints": partial(rounded_checkpoints, of="gated delta", sizes=(1, 2, 32, 16)),
    "mamba-2, checkpoints": partial(rounded_checkpoints, of="mamba-2", sizes=(1, 2, 32, 16)),
    "norm, then gate": partial(norm, tokens=5, groups=3, size=24, gate_first=False),
    "gate, then norm": partial(norm, tokens=70, groups=2, size=512, gate_first=True),
}

if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: case("cpu", torch.float32) for name, case in CASES.items()}))
