"""Tensor-parallel groups in tests: ranks as threads of the test's process, which needs no second import of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.weights import load_weights
from support.kernels.sequence_attention import SequenceAttention, states_of
from support.launcher.ports import free_port

T = TypeVar("T")

# torch's flight recorder, one for all groups of a process, notes a group's first collective in a map without a lock:
# two ranks at once can end the process. It reads this when the first group is made.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def run_ranks(size: int, folder: Path, work: Callable[[TensorParallel], T]) -> list[T]:
    """Run `work` on every rank of a gloo group, with its rendezvous in a new file of `folder`. Returns the results by
    rank."""
    meeting = folder / f"rendezvous-{len(list(folder.glob('rendezvous-*')))}"

    def rank_main(rank: int) -> T:
        parallel = TensorParallel(rank=rank, size=size, rendezvous=f"file://{meeting}", timeout_seconds=60)
        try:
            return work(parallel)
        finally:
            parallel.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(rank_main, rank) for rank in range(size)]]


def load(
    checkpoint: Path,
    parallel: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    config: ModelConfig | None = None,
) -> Decoder:
    """`config`: that of the checkpoint by default."""
    model = Decoder(config or ModelConfig.read(checkpoint), parallel or TensorParallel(), dtype, device)
    load_weights(model.parameters, checkpoint, threads=2)
    return model


@torch.inference_mode()
def all_logits(model: Decoder, sequences: list[list[int]], parallel: TensorParallel | None = None) -> torch.Tensor:
    """Logits [tokens of all sequences, vocab]."""
    lengths = [len(sequence) for sequence in sequences]
    device = model.parameters.device
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(length, dtype=torch.int32, device=device) for length in lengths])
    attention = SequenceAttention(lengths, model.config.layers)
    states = states_of(lengths, model.config, 1 if parallel is None else parallel.size)
    logits = model.local_logits(model.forward(tokens, positions, attention, None, states))
    if parallel is not None:
        logits = parallel.all_gather_last_dim(logits)
    return logits[:, : model.config.vocab_size]


def process_rank_main(
    rank: int,
    size: int,
    rendezvous: str,
    device: str,
    dtype: torch.dtype,
    checkpoint: Path,
    batches: list[list[list[int]]],
    out: Path,
) -> None:
    """Run a rank in its own process, which writes the logits of `batches` of sequences, parameter bytes and transport
    to `out`."""
    torch.set_num_threads(1)
    parallel = TensorParallel(rank=rank, size=size, rendezvous=rendezvous, device=device, timeout_seconds=120)
    model = load(checkpoint, parallel, dtype, device)
    logits = torch.cat([all_logits(model, sequences, parallel) for sequences in batches])
    result = {"logits": logits.cpu(), "bytes": model.parameter_bytes, "transport": parallel.transport}
    torch.save(result, out)
    parallel.close()


def tcp_rendezvous() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
