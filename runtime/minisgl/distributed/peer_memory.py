"""Device memory that the other ranks of a machine can write, by CUDA IPC."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as _c10d

from minisgl.errors import CodedError

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_NATIVE_ATOMICS: Final = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: NVLink supports them, PCIe mostly does not."""
_CLOSE_TIMEOUT: Final = timedelta(seconds=2)


class PeerMemoryError(CodedError):
    """Peer memory is not available. The message gives the reason."""

    def __init__(self, message: str) -> None:
        super().__init__("no_peer_memory", message)


def exchange(
    store: _c10d.Store, rank: int, size: int, export: Callable[[], bytes], open_peer: Callable[[bytes], int]
) -> list[int]:
    """Results of `open_peer` for the export of each other rank, in rank order. If it fails on any rank, raises
    PeerMemoryError on every rank: ranks that disagree would wait for each other forever."""
    error: PeerMemoryError | None = None
    exported = b""
    try:
        exported = export()
    except PeerMemoryError as caught:
        error = caught
    # Nothing tells the others that there will be nothing.
    store.set(f"peer_memory/{rank}", exported.hex())
    offers = [bytes.fromhex(store.get(f"peer_memory/{peer}").decode()) for peer in range(size)]
    opened: list[int] = []
    if all(offers):
        try:
            opened = [open_peer(offer) for peer, offer in enumerate(offers) if peer != rank]
        except PeerMemoryError as caught:
            error = caught
    store.set(f"peer_memory/{rank}/open", "yes" if len(opened) == size - 1 else "")
    failed = [peer for peer in range(size) if not store.get(f"peer_memory/{peer}/open")]
    if failed:
        raise error or PeerMemoryError(f"rank {failed[0]} and others could not share theirs")
    return opened


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class PeerMemory:
    """`num_bytes` zeros on the device of every rank. `addresses`: int64 [size] on this rank's device, addresses of the
    memory of each rank, including its own. All processes must see the same devices under the same numbers.

    All ranks create it at the same time, and close it when their launched work has finished. Raises PeerMemoryError on
    all ranks if one fails, or if two devices have no atomics on each other's memory.
    """

    def __init__(self, store: _c10d.Store, rank: int, size: int, device: torch.device, num_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._store, self._rank, self._size, self._device = store, rank, size, device
        self._own, self._opened = ctypes.c_uint64(0), list[ctypes.c_uint64]()
        self._closed = False
        try:
            with torch.cuda.device(device):
                addresses = exchange(store, rank, size, lambda: self._export(num_bytes), self._open)
                addresses.insert(rank, self._own.value)
                self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        except BaseException:
            self.close()
            raise

    def _export(self, num_bytes: int) -> bytes:
        handle = _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes([self._device.index]) + bytes(handle)

    def _open(self, offer: bytes) -> int:
        owner, handle = offer[0], _Handle.from_buffer_copy(offer[1:])
        atomics, address = ctypes.c_int(0), ctypes.c_uint64(0)
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(atomics), _NATIVE_ATOMICS, self._device.index, owner)
        if not atomics.value:
            raise PeerMemoryError(f"device {self._device.index} has no atomics on the memory of device {owner}")
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        self._opened.append(address)
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise PeerMemoryError(f"{name} failed with {code}")

    def close(self) -> None:
        """Release the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for address in self._opened:
            self._driver.cuIpcCloseMemHandle(address)
        # Memory that other ranks still have open must not be freed. If one died, it is freed with this process.
        # A rank without memory reports too: the others wait for it.
        with suppress(RuntimeError):
            self._store.set(f"peer_memory/{self._rank}/closed", "yes")
            self._store.wait([f"peer_memory/{peer}/closed" for peer in range(self._size)], _CLOSE_TIMEOUT)
            if self._own.value:
                self._driver.cuMemFree_v2(self._own)
