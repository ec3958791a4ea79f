"""Recurrent states: the rules against their definitions in float64, and sequences cut into pieces."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention.gated_delta import GatedDeltaRule
from minisgl.attention.mamba2 import Mamba2Rule
from minisgl.attention.recurrent import Convolution, RecurrentStates, Rule
from minisgl.attention.state_shape import StateShape
from minisgl.kernels.attention import gated_delta, mamba2
from minisgl.kernels.attention.causal_convolution import convolve
from minisgl.kernels.attention.prompt_chunks import Segment
from minisgl.wire.plan import StateChange
from support.kernels.sequence_attention import change

HEADS, KEY, VALUE = 3, 8, 5
RULES: Final[dict[str, tuple[StateShape, Rule | None]]] = {
    "gated delta": (
        StateShape(4, 2 * 2 * 8 + 4 * 5, heads=4, key_dim=8, value_dim=5),
        GatedDeltaRule(2, 4, 8, 5, torch.linspace(-4.0, -1.0, 4), torch.linspace(-1.0, 1.0, 4)),
    ),
    "mamba-2": (
        StateShape(4, 4 * 5 + 2 * 2 * 8, heads=4, key_dim=8, value_dim=5),
        Mamba2Rule(4, 2, torch.linspace(-4.0, -1.0, 4), torch.zeros(4), torch.linspace(-1.0, 1.0, 4)),
    ),
    "convolution alone": (StateShape(3, 6), None),
}
every_rule = pytest.mark.parametrize("name", RULES)


def inputs(tokens: int, seed: int, *, forgets: float = 0.05) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, step and a state. States that are forgotten slowly show what is lost or mixed up."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, HEADS, KEY, generator=generator), dim=-1) for _ in "qk")
    v = torch.randn(tokens, HEADS, VALUE, generator=generator)
    decay, step = (torch.rand(tokens, HEADS, generator=generator) for _ in range(2))
    state = torch.randn(HEADS, KEY, VALUE, generator=generator)
    return q, k, v, -forgets * decay, step, state


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, states = torch.zeros(*v.shape, dtype=torch.float64), state.double().clone()
    for token in range(len(q)):
        for head in range(HEADS):
            query, key, value = (each[token, head].double() for each in (q, k, v))
            decayed = states[head] * decay[token, head].double().exp()
            states[head] = decayed + step[token, head] * torch.outer(key, value - decayed.T @ key)
            outputs[token, head] = states[head].T @ query
    return outputs, states


@settings(max_examples=15)
@given(
    tokens=st.sampled_from([1, 2, 63, 64, 65, 150]),
    seed=st.integers(0, 1000),
    forgets=st.sampled_from([0.001, 0.5, 9.0]),
)
def test_chunks_compute_what_the_rule_says(tokens: int, seed: int, forgets: float) -> None:
    given_ = inputs(tokens, seed, forgets=forgets)
    for found, expected in zip(gated_delta.many_tokens(*given_), by_definition(*given_), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    q, k, v, decay, _, state = given_
    found, last = mamba2.many_tokens(q, k, v, decay, state)
    states = state.double()
    for token in range(tokens):
        states = states * decay[token].double().exp()[:, None, None] + k[token, :, :, None] * v[token, :, None].double()
        expected = torch.einsum("hkv,hk->hv", states, q[token].double())
        torch.testing.assert_close(found[token].double(), expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(last.double(), states, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kernels", [gated_delta, mamba2])
def test_a_token_at_a_time_computes_what_chunks_do(kernels: ModuleType) -> None:
    *parts, state = inputs(20, 1)
    if kernels is mamba2:
        parts = parts[:4]
    expected, last = kernels.many_tokens(*parts, state)
    for token in range(20):
        out, states = kernels.one_token(*(part[token, None] for part in parts), state[None])
        state = states[0]
        torch.testing.assert_close(out[0], expected[token], rtol=0, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


def test_states_that_forget_at_once_do_not_blur_others() -> None:
    """A difference of large sums of decays would have few digits."""
    generator = torch.Generator().manual_seed(0)
    rule = Mamba2Rule(4, 2, torch.tensor([-4.0, 0.0, 3.0, 5.0]), torch.zeros(4), torch.zeros(4))
    mixed, step = torch.randn(64, 52, generator=generator), torch.rand(64, 4, generator=generator)
    step[::16] = 5.0
    state = torch.randn(4, 8, 5, generator=generator)
    found, last = rule.many_tokens(mixed, (step,), state)
    states, slot = state[None].clone(), torch.tensor([0])
    for token in range(64):
        out = rule.one_token(mixed[token, None], (step[token, None],), states, slot)
        torch.testing.assert_close(found[token], out[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, states[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("silu", [True, False])
def test_a_convolution_goes_on_where_it_was_cut(silu: bool) -> None:
    x, weight, bias = torch.randn(1, 11, 6), torch.randn(6, 4), torch.randn(6)
    whole, last = convolve(x, torch.zeros(1, 3, 6), weight, bias, silu=silu)
    before = torch.nn.functional.pad(x, (0, 0, 3, 0)).transpose(1, 2)
    by_torch = torch.nn.functional.conv1d(before, weight[:, None], bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(whole, torch.nn.functional.silu(by_torch) if silu else by_torch)
    for cut in range(1, 11):
        first, kept = convolve(x[:, :cut], torch.zeros(1, 3, 6), weight, bias, silu=silu)
        second, end = convolve(x[:, cut:], kept, weight, bias, silu=silu)
        torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
        assert torch.equal(end, last)


def mix(name: str, states: RecurrentStates, weight: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """`gates`: [T, 8], of which a rule takes what it needs."""
    _, rule = RULES[name]
    of_rule = (gates[:, :4], gates[:, 4:]) if name == "gated delta" else (gates[:, :4],)
    return states.mix(0, x, Convolution(weight), rule, *of_rule)


@every_rule
@settings(max_examples=20)
@given(data=st.data())
def test_rows_keep_their_states_however_steps_are_made(name: str, data: st.DataObject) -> None:
    """Prompts in pieces beside rows that decode, and slots that others had before."""
    shape = RULES[name][0]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    states = RecurrentStates([shape], 3, torch.float32, torch.device("cpu"), audit=True)
    weight = 0.3 * torch.randn(shape.channels, shape.kernel_size, generator=generator)

    def run(x: torch.Tensor, gates: torch.Tensor, of: RecurrentStates) -> torch.Tensor:
        return mix(name, of, weight, x, gates)

    for _ in range(2):
        lengths = [data.draw(st.integers(2, 12)) for _ in range(3)]
        xs = [torch.randn(n, shape.channels, generator=generator) for n in lengths]
        gates = [torch.rand(n, 8, generator=generator) for n in lengths]
        expected = []
        for x, gate in zip(xs, gates, strict=True):
            alone = RecurrentStates([shape], 1, torch.float32, torch.device("cpu"))
            change(alone, (StateChange.ZERO, 0, 0, 0))
            alone.begin(torch.empty(0, dtype=torch.int32), [Segment(0, 0, len(x))])
            expected.append(run(x, gate, alone))
        done, found = [0] * 3, [list[torch.Tensor]() for _ in range(3)]
        while done != lengths:
            left = [row for row in range(3) if done[row] < lengths[row]]
            chosen = data.draw(st.lists(st.sampled_from(left), unique=True, min_size=1))
            decode = [row for row in chosen if done[row] and data.draw(st.booleans())]
            pieces = [
                Segment(row, done[row], data.draw(st.integers(1, lengths[row] - done[row])))
                for row in chosen
                if row not in decode
            ]
            spans = [Segment(row, done[row], 1) for row in decode] + pieces
            new = [(StateChange.ZERO, piece.slot, 0, 0) for piece in pieces if not piece.start]
            change(states, *new, segments=pieces)
            states.begin(torch.tensor(decode, dtype=torch.int32), pieces)
            parts = [
                torch.cat([whole[span.slot][span.start : span.start + span.length] for span in spans])
                for whole in (xs, gates)
            ]
            out = run(parts[0], parts[1], states)
            for span, each in zip(spans, out.split([span.length for span in spans]), strict=True):
                found[span.slot].append(each)
                done[span.slot] += span.length
        for row in range(3):
            torch.testing.assert_close(torch.cat(found[row]), expected[row], rtol=0, atol=1e-5)


@every_rule
@settings(max_examples=20)
@given(data=st.data())
def test_a_sequence_goes_on_from_any_checkpoint(name: str, data: st.DataObject) -> None:
    """Behind a segment of its prompt, in the middle of one, or behind a token of its answer."""
    shape = RULES[name][0]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    weight = 0.3 * torch.randn(shape.channels, shape.kernel_size, generator=generator)
    length = data.draw(st.integers(2, 150))
    x, gates = torch.randn(length, shape.channels, generator=generator), torch.rand(length, 8, generator=generator)
    states = RecurrentStates([shape], 3, torch.float32, torch.device("cpu"), checkpoints=2, audit=True)
    no_rows = torch.empty(0, dtype=torch.int32)

    def run(start: int, end: int) -> torch.Tensor:
        return mix(name, states, weight, x[start:end], gates[start:end])

    prompt = data.draw(st.integers(1, length))
    cuts = sorted(data.draw(st.lists(st.integers(1, prompt), unique=True, min_size=1, max_size=2)))
    saves = [(StateChange.SAVE, 0, tokens, checkpoint) for checkpoint, tokens in enumerate(cuts)]
    change(states, *saves, (StateChange.ZERO, 0, 0, 0), segments=[Segment(0, 0, prompt)])
    states.begin(no_rows, [Segment(0, 0, prompt)])
    parts = [run(0, prompt)]
    states.save_last()
    for position in range(prompt, length):
        if position + 1 == (cuts[0] + length) // 2 and position + 1 > cuts[0]:
            cuts[0] = position + 1
            change(states, (StateChange.SAVE, 0, position + 1, 0))
        else:
            change(states)
        states.begin(torch.tensor([0]), [])
        parts.append(run(position, position + 1))
        states.save_last()
    expected = torch.cat(parts)
    for checkpoint, tokens in enumerate(cuts):
        if tokens < length:
            # Slot 2 has had another sequence.
            for slot, source in ((2, checkpoint), (1, -1)):
                # The checkpoint −1 is in the last slot, 2.
                change(states, (StateChange.LOAD, 2, 0, checkpoint))
                change(states, (StateChange.LOAD, slot, tokens, source))
                states.begin(no_rows, [Segment(slot, tokens, length - tokens)])
                torch.testing.assert_close(run(tokens, length), expected[tokens:], rtol=0, atol=1e-5)
    change(states, (StateChange.POISON, 0, 0, 0), (StateChange.LOAD, 1, 1, 0))
    states.begin(no_rows, [Segment(1, 0, 1)])
    assert run(0, 1).isfinite().all()
    change(states, (StateChange.LOAD, 1, 1, 0))
    states.begin(no_rows, [Segment(1, 0, 1)])
    assert not run(0, 1).isfinite().all()


def test_places_of_slots_have_two_checkpoints_of_16_bits() -> None:
    """States are loaded, moved to the place of a row, and loaded from there, rounded once."""
    shape = StateShape(kernel_size=4, channels=6, heads=2, key_dim=4, value_dim=3)
    states = RecurrentStates([shape] * 2, 4, torch.bfloat16, torch.device("cpu"), checkpoints=3, audit=True)
    generator = torch.Generator().manual_seed(0)

    def state() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(each[:, 0].shape, generator=generator).to(each.dtype) for each in states._slots)

    def read(slot: int) -> tuple[torch.Tensor, ...]:
        return tuple(each[:, slot].clone() for each in states._slots)

    types = torch.bfloat16, torch.float16
    saved = [state() for _ in range(3)]
    # Beyond the range of float16.
    saved[0][1][0, 0, 0, 0], saved[2][1][1, 0, 0, 0] = 1e6, -1e6
    for checkpoint, parts in enumerate(saved):
        for place, part in zip(states._slots, parts, strict=True):
            place[:, 0] = part
        change(states, (StateChange.SAVE, 0, 5, checkpoint))
        states.save_last()
    # −4 and −3 are in slot 2: the dummy row is slot 3.
    change(states, (StateChange.MOVE, -4, 0, 2), (StateChange.MOVE, -3, 0, 0), (StateChange.POISON, 0, 0, 2))
    change(states, (StateChange.LOAD, 0, 5, -4), (StateChange.LOAD, 1, 5, -3))
    for slot, checkpoint in ((0, 2), (1, 0)):
        for found, whole, each_type in zip(read(slot), saved[checkpoint], types, strict=True):
            assert torch.equal(found.float(), whole.clamp(-65504, 65504).to(each_type).float())
    # A row that begins in a place with checkpoints may load one of them.
    change(states, (StateChange.LOAD, 2, 5, -3), (StateChange.LOAD, 0, 5, 1))
    for slot, checkpoint in ((2, 0), (0, 1)):
        for found, whole, each_type in zip(read(slot), saved[checkpoint], types, strict=True):
            assert torch.equal(found.float(), whole.clamp(-65504, 65504).to(each_type).float())
    change(states, (StateChange.LOAD, 1, 5, 2))
    assert all(part.isnan().all() for part in read(1))
    assert all(not part.any() for part in read(3))
