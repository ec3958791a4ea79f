"""One rank of the test of NCCL: in a module of its own, so that a spawned process can import it."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.distributed.measure import measure_all_reduce
from minisgl.distributed.tensor_parallel import TensorParallel


def rank_main(rank: int, size: int, rendezvous: str, out: Path) -> None:
    torch.cuda.set_device(rank)
    parallel = TensorParallel(rank=rank, size=size, rendezvous=rendezvous, device=f"cuda:{rank}")
    assert parallel.gather_int(2**40 + rank) == [2**40 + r for r in range(size)]
    # A whole number of 16 bytes, which ranks that can write each other's memory add up that way.
    source = torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16)
    gathered = torch.empty(size, 4, 8, device="cuda", dtype=torch.bfloat16)
    indices = torch.full((4,), 2_000_000_000 + rank, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        parallel.all_gather(source, gathered)
        total = parallel.all_reduce_sum(source.clone())
        return total, parallel.all_gather_last_dim(source), *parallel.all_gather_pairs(source[:, 0].float(), indices)

    step()
    parallel.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, columns, values, winners = step()
    for value in (1, 5):
        source.fill_(value + rank)
        graph.replay()
        parallel.barrier()
        each = [float(value + r) for r in range(size)]
        assert (total == sum(each)).all()
        assert columns[0].tolist() == [v for v in each for _ in range(8)]
        assert gathered[:, 0, 0].tolist() == values[:, 0].tolist() == each
        assert winners[:, 0].tolist() == [2_000_000_000 + r for r in range(size)]
    graph.reset()
    _sums(parallel)
    for length in (5120, 256 * 5120):
        _repeated_sums(parallel, length)
    timings = measure_all_reduce(parallel, [16 << 10, 64 << 20])
    assert timings[0].seconds < timings[1].seconds
    parallel.close()
    out.write_text(parallel.transport)


def _sums(parallel: TensorParallel) -> None:
    """Sums of messages of all lengths, both written to all ranks at once and by NCCL."""
    for length in (8, 12, 5120, 40_000, 5120, 1 << 20, 16, 8 << 20, 2056, 6 << 20, 5120):
        each = [
            torch.randn(length, generator=torch.Generator("cuda").manual_seed(rank), device="cuda").bfloat16()
            for rank in range(parallel.size)
        ]
        expected = sum(message.double() for message in each)
        total = parallel.all_reduce_sum(each[parallel.rank])
        torch.testing.assert_close(total.double(), expected, rtol=2**-6, atol=2**-5)
        same = parallel.all_gather(total)
        assert all(torch.equal(other, total) for other in same)


def _repeated_sums(parallel: TensorParallel, length: int) -> None:
    """10,000 sums one behind the other, in a graph, are bitwise the same one: no rank reads what another has not
    written yet, or writes what another still reads."""
    message = torch.randn(
        length, generator=torch.Generator("cuda").manual_seed(parallel.rank), device="cuda"
    ).bfloat16()
    expected = parallel.all_reduce_sum(message.clone()).clone()
    parallel.barrier()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            wrong += (parallel.all_reduce_sum(message.clone()) != expected).sum()
    for _ in range(100):
        graph.replay()
    parallel.barrier()
    assert int(wrong) == 0
    graph.reset()
