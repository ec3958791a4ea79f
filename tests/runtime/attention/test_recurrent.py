"""The gated delta rule against its definition in float64, and cut into pieces."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention.recurrent import RecurrentStates, Segment, StateShape
from minisgl.kernels.attention.gated_delta import convolve, many_tokens, one_token

HEADS, KEY, VALUE = 3, 8, 5
SHAPE = StateShape(key_heads=2, value_heads=4, key_dim=8, value_dim=5, kernel_size=4)


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
    for found, expected in zip(many_tokens(*given_), by_definition(*given_), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


def test_a_token_at_a_time_computes_what_chunks_do() -> None:
    *parts, state = inputs(20, 1)
    expected, last = many_tokens(*parts, state)
    for token in range(20):
        out, states = one_token(*(part[token, None] for part in parts), state[None])
        state = states[0]
        torch.testing.assert_close(out[0], expected[token], rtol=0, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


def test_a_convolution_goes_on_where_it_was_cut() -> None:
    x, weight = torch.randn(1, 11, 6), torch.randn(6, 4)
    whole, last = convolve(x, torch.zeros(1, 3, 6), weight)
    for cut in range(1, 11):
        first, kept = convolve(x[:, :cut], torch.zeros(1, 3, 6), weight)
        second, end = convolve(x[:, cut:], kept, weight)
        torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
        assert torch.equal(end, last)


@settings(max_examples=20)
@given(data=st.data())
def test_rows_keep_their_states_however_steps_are_made(data: st.DataObject) -> None:
    """Prompts in pieces beside rows that decode, and slots that others had before."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    states = RecurrentStates([SHAPE], 3, torch.float32, torch.device("cpu"))
    weight = torch.randn(SHAPE.channels, 4, generator=generator)

    def run(x: torch.Tensor, gates: torch.Tensor, of: RecurrentStates) -> torch.Tensor:
        return of.attend(0, x, weight, -gates[:, :4], gates[:, 4:])

    for _ in range(2):
        lengths = [data.draw(st.integers(2, 12)) for _ in range(3)]
        xs = [torch.randn(n, SHAPE.channels, generator=generator) for n in lengths]
        gates = [torch.rand(n, 8, generator=generator) for n in lengths]
        expected = []
        for x, gate in zip(xs, gates, strict=True):
            alone = RecurrentStates([SHAPE], 1, torch.float32, torch.device("cpu"))
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
