"""Attention over packed sequences against softmax written out, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention.length_groups import group_by_length
from minisgl.attention.packed import PackedAttention
from minisgl.attention.packed_shape import PackedShape
from minisgl.kernels.attention.rotation import Rotation

SHAPE = PackedShape(query_heads=4, kv_heads=2, head_dim=16, scale=0.3, causal=False)
LENGTHS = (150, 3, 1, 70, 70, 64, 129, 65, 2, 9)


def inputs(tokens: int, shape: PackedShape, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = shape.query_heads + 2 * shape.kv_heads
    fused = torch.randn(tokens, heads, shape.head_dim, generator=generator)
    q, k, v = torch.split(fused, [shape.query_heads, shape.kv_heads, shape.kv_heads], dim=1)
    return q, k, v


def begun(lengths: tuple[int, ...], *shapes: PackedShape, kv_layers: tuple[int, ...] = ()) -> PackedAttention:
    cpu = torch.device("cpu")
    attention = PackedAttention(shapes, kv_layers or tuple(range(len(shapes))), torch.float32, cpu)
    host = np.array(lengths, np.int32)
    attention.begin(torch.from_numpy(np.concatenate(([0], host.cumsum())).astype(np.int32)), host)
    return attention


def expected(
    lengths: tuple[int, ...],
    shape: PackedShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = []
    group = shape.query_heads // shape.kv_heads
    for query, key, value in zip(*(torch.split(part, list(lengths)) for part in (q, k, v)), strict=True):
        places = torch.arange(len(query))
        distance = places[:, None] - places
        window = shape.window or len(query)
        allowed = (distance < window) & (distance > -window)
        if shape.causal:
            allowed &= distance >= 0
        of_head = []
        for head in range(shape.query_heads):
            scores = query[:, head] @ key[:, head // group].T * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            powers = torch.where(allowed, scores.exp(), 0.0)
            total = powers.sum(1, keepdim=True) + (0.0 if sinks is None else sinks[head].exp())
            of_head.append(powers / total @ value[:, head // group])
        rows.append(torch.cat(of_head, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2, 9, 65, 150])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (1.5, False), (None, True)])
def test_each_sequence_attends_to_itself_alone(
    causal: bool, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    shape = replace(SHAPE, causal=causal, window=window, softcap=softcap)
    q, k, v = inputs(sum(LENGTHS), shape)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    found = begun(LENGTHS, shape).attend(0, q, k, v, None, sinks)
    torch.testing.assert_close(found, expected(LENGTHS, shape, q, k, v, sinks), rtol=0, atol=1e-5)


def test_queries_and_keys_are_rotated_and_layers_may_share_keys() -> None:
    q, k, v = inputs(sum(LENGTHS), SHAPE)
    angles = torch.rand(sum(LENGTHS), SHAPE.head_dim // 2)
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), dim=-1))
    attention = begun(LENGTHS, SHAPE, SHAPE, kv_layers=(0, 0))
    first = attention.attend(0, q, k, v, rotation)
    turned = rotation.apply(q, k)
    torch.testing.assert_close(first, expected(LENGTHS, SHAPE, *turned, v), rtol=0, atol=1e-5)
    other = torch.randn_like(q)
    second = attention.attend(1, other, None, None, rotation)
    wanted = expected(LENGTHS, SHAPE, rotation.apply_to_queries(other), turned[1], v)
    torch.testing.assert_close(second, wanted, rtol=0, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_groups_have_each_token_once_and_little_padding(lengths: list[int]) -> None:
    groups = group_by_length(np.array(lengths, np.int32), torch.device("cpu"))
    places = torch.arange(sum(lengths))
    seen = []
    for group in groups:
        tokens = places[group.tokens]
        assert len(tokens) == group.count * group.longest
        seen.append(tokens if group.real is None else tokens[group.real])
        assert len(seen[-1]) >= 0.8 * len(tokens)
    assert torch.equal(torch.cat(seen).sort().values, places)
    assert sum(group.count for group in groups) == len(lengths)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.booleans(), st.sampled_from([None, 3, 8]))
def test_random_lengths(lengths: list[int], causal: bool, window: int | None) -> None:
    shape, packed = replace(SHAPE, causal=causal, window=window), tuple(lengths)
    q, k, v = inputs(sum(lengths), shape)
    found = begun(packed, shape).attend(0, q, k, v, None)
    torch.testing.assert_close(found, expected(packed, shape, q, k, v), rtol=0, atol=1e-5)
