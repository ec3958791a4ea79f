"""Ranks on one device, each in a stream of its own: their programs wait for each other as on several devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from minisgl.distributed.one_shot import OneShotAllReduce, one_shot_capacity


class _Ranks:
    def __init__(self, size: int) -> None:
        from minisgl.kernels.one_shot_all_reduce_triton import memory_bytes

        self._memory = torch.zeros(size, memory_bytes(one_shot_capacity(size), size), dtype=torch.uint8, device="cuda")
        addresses = torch.tensor([part.data_ptr() for part in self._memory], device="cuda")
        self._ranks = [OneShotAllReduce(rank, addresses) for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        torch.cuda.synchronize()

    def takes(self, message: torch.Tensor) -> bool:
        return all(rank.takes(message) for rank in self._ranks)

    def sum(self, messages: Sequence[torch.Tensor]) -> None:
        for rank, stream, message in zip(self._ranks, self.streams, messages, strict=True):
            with torch.cuda.stream(stream):
                rank.sum(message)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_messages_of_many_lengths_in_sequence(size: int, dtype: torch.dtype) -> None:
    ranks, draw = _Ranks(size), torch.Generator("cuda").manual_seed(0)
    # The programs of all ranks fit onto one device at a time, and all ranks take the longest message.
    lengths = [8, 2048, 2056, 5120, 40_000, 16, 60_000, 5120] * 8
    messages = [
        [torch.randn(length, generator=draw, device="cuda").to(dtype) for _ in range(size)] for length in lengths
    ]
    expected = [sum(part.double() for part in parts) for parts in messages]
    torch.cuda.synchronize()
    for parts in messages:
        ranks.sum(parts)
    torch.cuda.synchronize()
    for parts, total in zip(messages, expected, strict=True):
        assert all(torch.equal(part, parts[0]) for part in parts)
        tolerance = 2**-8 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(parts[0].double(), total, rtol=tolerance, atol=tolerance)


def test_one_rank_alone() -> None:
    """Waits for nobody: memory checkers, which may run one kernel at a time, can run it."""
    from minisgl.kernels.one_shot_all_reduce_triton import memory_bytes, num_programs, one_shot_all_reduce

    capacity = 64 << 10
    memory = torch.zeros(memory_bytes(capacity, 1), dtype=torch.uint8, device="cuda")
    addresses = torch.tensor([memory.data_ptr()], device="cuda")
    turns = torch.zeros(num_programs(capacity), dtype=torch.int32, device="cuda")
    for length in (8, 2048, 2056, 32 << 10):
        message = torch.randn(length, device="cuda").bfloat16()
        expected = message.clone()
        one_shot_all_reduce(message, addresses, turns, 0, capacity)
        assert torch.equal(message, expected)


def test_turns_overflow() -> None:
    ranks = _Ranks(2)
    for rank in ranks._ranks:
        rank._turns.fill_(2**31 - 3)
    ranks._memory.view(torch.int32).fill_(2**31 - 3)
    torch.cuda.synchronize()
    for value in range(1, 7):
        messages = [torch.full((4096,), float(value + rank), dtype=torch.bfloat16, device="cuda") for rank in range(2)]
        torch.cuda.synchronize()
        ranks.sum(messages)
        torch.cuda.synchronize()
        assert all((message == 2 * value + 1).all() for message in messages)


@pytest.mark.captures
def test_in_graphs() -> None:
    ranks = _Ranks(2)
    messages = [torch.zeros(10_240, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    ranks.sum(messages)
    torch.cuda.synchronize()
    graphs = []
    for rank, stream, message in zip(ranks._ranks, ranks.streams, messages, strict=True):
        graph = torch.cuda.CUDAGraph()
        # An odd number: a program's places change from one replay to the next.
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                rank.sum(message)
        graphs.append(graph)
    for value in range(1, 6):
        for number, message in enumerate(messages):
            message.fill_(value + number)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all((message == 4 * (2 * value + 1)).all() for message in messages)


def test_unsupported_messages_use_nccl() -> None:
    ranks = _Ranks(2)
    message = torch.zeros(one_shot_capacity(2) + 16, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
    assert ranks.takes(message[:-8]) and ranks.takes(message[:8]) and ranks.takes(message[8:16])
    assert not any(ranks.takes(m) for m in (message, message[:0], message[:4], message[4:12], message[:8].short()))
