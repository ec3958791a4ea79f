"""One rank's view of its tensor-parallel group: the collectives that a model and its sampler need."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from minisgl.distributed.nccl_report import NcclReport
from minisgl.distributed.one_shot import OneShotAllReduce, one_shot_capacity
from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError
from minisgl.errors import CodedError

logger = logging.getLogger(__name__)

_LISTENER_SECONDS: Final = 0.02
"""Pause between two looks for the store of rank 0."""


class RendezvousError(CodedError):
    """The ranks did not connect. The message names the address and what to check."""

    def __init__(self, message: str) -> None:
        super().__init__("rendezvous_failed", message)


class _Group(Protocol):
    """The used part of torch's process groups; torch's stubs lack most of it."""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work | None: ...

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> dist.Work | None: ...

    def shutdown(self) -> None: ...


class TensorParallel:
    """Ranks 0..size-1 with NCCL on CUDA or gloo on a CPU; with size 1 every call is free.

    Every rank calls the same collectives in the same order. The group is not the default group of torch.distributed,
    so a process can create several in succession. On CUDA the collectives run on the current
    stream, never wait on the host (but for `gather_int` and `barrier`), and can be captured in a graph; close the
    group only after such graphs were deleted.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        rendezvous: str = "",
        device: torch.device | str = "cpu",
        timeout_seconds: float = 120.0,
        nccl_host: str = "",
    ) -> None:
        """Wait for all ranks at `rendezvous`: `tcp://host:port` (rank 0 listens there), or `file:///path` of a file
        that does not exist yet. Raises RendezvousError after `timeout_seconds`, which also limits each collective of
        NCCL and gloo.

        `nccl_host` has NCCL treat ranks in several containers of one machine as neighbours, see `nccl_neighbours`.
        """
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.transport = "none (one rank)"
        self._group: _Group | None = None
        self._one_shot: OneShotAllReduce | None = None
        self._peer_memory: PeerMemory | None = None
        if size == 1:
            return
        timeout = timedelta(seconds=timeout_seconds)
        try:
            self._store = _meet(rendezvous, rank, size, timeout)
            if self.device.type == "cuda":
                self._start_nccl(timeout, nccl_host)
                # Ranks of one container use a file.
                if rendezvous.startswith("file:") and os.environ.get("NCCL_P2P_DISABLE") != "1":
                    self._start_one_shot()
            else:
                self._start_gloo(rendezvous, timeout)
        except (RuntimeError, OSError) as error:
            self.close()
            raise RendezvousError(
                f"rank {rank} of {size} did not meet the others at {rendezvous!r} within {timeout_seconds:.0f} s: "
                f"{error}. Check that all ranks were started with this address and can reach it"
            ) from error

    def _start_gloo(self, rendezvous: str, timeout: timedelta) -> None:
        url = urlsplit(rendezvous)
        host = _own_address(url.hostname, url.port) if url.hostname and url.port else "127.0.0.1"
        loopback = host in ("127.0.0.1", "::1")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # The default device depends on the host's name, which may not resolve in a container.
        options._devices = [gloo.create_device(hostname=host)]
        self._group = cast(_Group, gloo(self._store, self.rank, self.size, options))
        self.transport = "gloo, TCP over loopback" if loopback else f"gloo, TCP from {host}"
        self.barrier()

    def _start_nccl(self, timeout: timedelta, host: str) -> None:
        if host:
            os.environ.update(nccl_neighbours(host))
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        with NcclReport() as report:
            self._group = cast(_Group, nccl(self._store, self.rank, self.size, options))
            # NCCL connects at the first collective; it must be over before a graph is captured.
            self.barrier()
        self.transport = report.transport()

    def _start_one_shot(self) -> None:
        from minisgl.kernels.one_shot_all_reduce_triton import memory_bytes

        capacity = one_shot_capacity(self.size)
        if not capacity:
            return
        try:
            memory = PeerMemory(self._store, self.rank, self.size, self.device, memory_bytes(capacity, self.size))
        except PeerMemoryError as error:
            logger.info("short messages go by NCCL, too: the ranks cannot write each other's memory: %s", error)
            return
        self._peer_memory = memory
        self._one_shot = OneShotAllReduce(self.rank, memory.addresses)
        self.transport += f"; up to {capacity >> 10} KiB written to all ranks at once"

    def shard(self, count: int) -> slice:
        """This rank's equal part of `count` items."""
        assert count % self.size == 0, f"{count} cannot be split over {self.size} ranks"
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def shard_of_blocks(self, count: int, block: int) -> slice:
        """This rank's part of `count` items, in whole blocks of `block`; the last ranks may have less."""
        part = -(-count // (block * self.size)) * block
        return slice(min(self.rank * part, count), min((self.rank + 1) * part, count))

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks in place and return it. It must be contiguous."""
        if not tensor.numel():
            return tensor
        if self._one_shot is not None and self._one_shot.takes(tensor):
            self._one_shot.sum(tensor)
        elif self._group is not None:
            options = _c10d.AllreduceOptions()  # the operation is SUM unless said otherwise
            options.asyncOp = False
            _wait(self._group.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[...] on each rank to [size, ...] on all, ordered by rank; into `out` (contiguous) where given."""
        if self._group is None:
            return tensor.unsqueeze(0) if out is None else out.copy_(tensor.unsqueeze(0))
        if out is None:
            out = tensor.new_empty(self.size, *tensor.shape)
        options = _c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self._group._allgather_base(out.view(-1), tensor.contiguous().view(-1), options))
        return out

    def from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of rank 0 on all ranks; it is small."""
        return self.all_gather(tensor)[0]

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """[S, n] on each rank to [S, size * n] on all: columns concatenated by rank."""
        if self._group is None:
            return tensor
        return self.all_gather(tensor).movedim(0, -2).flatten(-2)

    def all_gather_pairs(self, values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [S] and integer [S] (below 2^31) on each rank to float32 [size, S] and int64 [size, S] on all.

        One small message for both: what a vocabulary-parallel argmax exchanges instead of logits.
        """
        pairs = torch.stack((values.contiguous().view(torch.int32), indices.to(torch.int32)))
        gathered = self.all_gather(pairs)
        return gathered[:, 0].contiguous().view(torch.float32), gathered[:, 1].to(torch.int64)

    def gather_int(self, value: int) -> list[int]:
        """Values of all ranks, ordered by rank. Waits for the device."""
        gathered = self.all_gather(torch.tensor([value], dtype=torch.int64, device=self.device))
        return [int(v) for v in gathered.flatten().tolist()]

    def barrier(self) -> None:
        """Wait for all ranks, and for work queued on the device before."""
        if self._group is not None:
            self.gather_int(0)

    def close(self) -> None:
        """Wait for this rank's collectives on the device, then leave the group. Idempotent."""
        self._one_shot = None
        # This rank's work has finished, so it has waited for all writes of the others.
        if self._peer_memory is not None:
            self._peer_memory.close()
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def _meet(rendezvous: str, rank: int, size: int, timeout: timedelta) -> _c10d.Store:
    url = urlsplit(rendezvous)
    if url.scheme == "file" and url.path:
        store: _c10d.Store = _c10d.FileStore(url.path, size)
        store.set_timeout(timeout)
        return store
    if url.scheme == "tcp" and url.hostname and url.port:
        if rank:
            _wait_for_listener(url.hostname, url.port, timeout)
        return _c10d.TCPStore(url.hostname, url.port, size, is_master=rank == 0, timeout=timeout)
    raise RendezvousError(f"rendezvous {rendezvous!r} is neither tcp://host:port nor file:///path")


def _wait_for_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until something listens on `port`. A store that finds nothing there tries again only after up to a second,
    for which a restart would wait. Raises OSError after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LISTENER_SECONDS)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the route to `host`. Sends no packet."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def _wait(work: dist.Work | None) -> None:
    """Wait for a collective. On CUDA the current stream orders synchronous collectives, so there is no wait."""
    if work is not None:
        work.wait()


def nccl_neighbours(host: str) -> dict[str, str]:
    """Environment variables with which NCCL connects containers of `host` by CUDA IPC over NVLink.

    Use it only if all of the following holds, because otherwise NCCL fails and does not fall back: the ranks'
    containers see each other's devices, their /dev/shm have the same st_dev (NCCL compares it, ncclTopoCheckP2p), and
    no two ranks have the same process id inside their own pid namespace. cuMem handles travel over a socket of the
    network namespace, which containers do not share: hence the legacy handles.
    """
    return {"NCCL_HOSTID": host, "NCCL_CUMEM_ENABLE": "0"}
