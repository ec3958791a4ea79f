"""Ranks agree on whether they can write each other's memory, whatever fails on any of them, and give it back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as _c10d

from minisgl.distributed import peer_memory
from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError, exchange

SIZE = 3
NUM_BYTES = 4096


def _outcomes(tmp_path: Path, fails: Callable[[str, int], bool]) -> list[list[int] | str]:
    """Result or error of each rank, where `fails` decides for each call ("export" or "open") and rank."""

    def rank_main(rank: int) -> list[int] | str:
        def export() -> bytes:
            if fails("export", rank):
                raise PeerMemoryError(f"no memory on {rank}")
            return bytes([10 + rank])

        def open_peer(offer: bytes) -> int:
            if fails("open", rank):
                raise PeerMemoryError(f"{rank} cannot open {offer[0]}")
            return offer[0]

        store = _c10d.FileStore(str(tmp_path / "store"), SIZE)
        try:
            return exchange(store, rank, SIZE, export, open_peer)
        except PeerMemoryError as error:
            return str(error)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(rank_main, range(SIZE)))


def test_each_rank_opens_the_exports_of_the_others(tmp_path: Path) -> None:
    assert _outcomes(tmp_path, lambda call, rank: False) == [[11, 12], [10, 12], [10, 11]]


@pytest.mark.parametrize("call", ["export", "open"])
@pytest.mark.parametrize("culprit", range(SIZE))
def test_a_failure_on_one_rank_fails_all_ranks(call: str, culprit: int, tmp_path: Path) -> None:
    outcomes = _outcomes(tmp_path, lambda name, rank: (name, rank) == (call, culprit))
    assert all(isinstance(outcome, str) for outcome in outcomes)
    assert str(culprit) in outcomes[culprit]


class _Driver:
    """libcuda of one rank's process: addresses are numbers, and a handle holds one."""

    def __init__(self, rank: int, fails: Callable[[str, int], bool]) -> None:
        self._rank, self._fails = rank, fails
        self.allocated: set[int] = set()
        self.opened: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = getattr(self, f"_{name.removesuffix('_v2')}")
        return lambda *arguments: 2 if self._fails(name, self._rank) else call(*arguments) or 0

    def _cuMemAlloc(self, address: Any, size: ctypes.c_size_t) -> None:
        assert size.value == NUM_BYTES
        address._obj.value = 1 + self._rank
        self.allocated.add(1 + self._rank)

    def _cuMemsetD8(self, address: ctypes.c_uint64, value: ctypes.c_ubyte, size: ctypes.c_size_t) -> None:
        assert address.value in self.allocated and (value.value, size.value) == (0, NUM_BYTES)

    def _cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> None:
        handle._obj.reserved = bytes([address.value])

    def _cuDeviceGetP2PAttribute(self, value: Any, attribute: int, source: int, destination: int) -> None:
        value._obj.value = 1

    def _cuIpcOpenMemHandle(self, address: Any, handle: Any, flags: int) -> None:
        address._obj.value = handle.reserved[0] + 100 * (1 + self._rank)
        self.opened.add(address._obj.value)

    def _cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> None:
        self.opened.remove(address.value)

    def _cuMemFree(self, address: ctypes.c_uint64) -> None:
        self.allocated.remove(address.value)


def _memories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, int], bool]
) -> tuple[list[_Driver], list[PeerMemory | str]]:
    """Each rank's driver, and its memory or its error."""
    drivers = [_Driver(rank, fails) for rank in range(SIZE)]
    # Threads stand in for processes: each loads its own.
    loads = threading.local()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: drivers[loads.rank])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def rank_main(rank: int) -> PeerMemory | str:
        loads.rank = rank
        store = _c10d.FileStore(str(tmp_path / "store"), SIZE)
        try:
            return PeerMemory(store, rank, SIZE, torch.device("cpu", rank), NUM_BYTES)
        except PeerMemoryError as error:
            return str(error)

    with ThreadPoolExecutor(SIZE) as pool:
        return drivers, list(pool.map(rank_main, range(SIZE)))


def test_memory_is_freed_when_no_rank_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drivers, memories = _memories(tmp_path, monkeypatch, lambda name, rank: False)
    each = [memory for memory in memories if isinstance(memory, PeerMemory)]
    assert [memory.addresses.tolist() for memory in each] == [[1, 102, 103], [201, 2, 203], [301, 302, 3]]
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(PeerMemory.close, each))
    for memory in each:
        memory.close()
    assert not any(driver.allocated or driver.opened for driver in drivers)


def test_memory_that_another_rank_may_have_open_is_not_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_CLOSE_TIMEOUT", timedelta(milliseconds=10))
    drivers, memories = _memories(tmp_path, monkeypatch, lambda name, rank: False)
    for memory in memories[1:]:
        assert isinstance(memory, PeerMemory)
        memory.close()
    assert all(driver.allocated and not driver.opened for driver in drivers[1:])


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_no_rank_keeps_memory_if_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    drivers, memories = _memories(tmp_path, monkeypatch, lambda name, rank: (name, rank) == (call, 1))
    assert all(isinstance(error, str) for error in memories) and call in str(memories[1])
    assert not any(driver.allocated or driver.opened for driver in drivers)
