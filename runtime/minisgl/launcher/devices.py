"""Devices of this machine, as the CUDA driver reports them: importing torch for this would take seconds."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import get_args

from minisgl.config import ConfigError, Device, DeviceChoice
from minisgl.errors import LauncherError


def cuda_device_count() -> int:
    """Number of CUDA devices that this process may use (CUDA_VISIBLE_DEVICES counts); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_device_ids() -> tuple[str, ...]:
    """UUIDs (hex) of these devices, in the order of their indices."""
    found = []
    for number in range(cuda_device_count()):
        driver = ctypes.CDLL("libcuda.so.1")
        device, uuid = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
        if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetUuid(ctypes.byref(uuid), device):
            return ()
        found.append(bytes(uuid).hex())
    return tuple(found)


def device_memory(device: Device, ranks: int, cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that each of `ranks` ranks on this machine can have at most: of the first GPU, or its part of the
    memory of this machine or container; None: unknown."""
    if device == "cuda":
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        handle, size = ctypes.c_int(0), ctypes.c_size_t(0)
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), 0):
            return None
        return None if driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle) else size.value
    size_of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = (cgroup / file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit != "max":
            size_of_machine = min(size_of_machine, int(limit))
    return size_of_machine // ranks


def open_device(index: int) -> None:
    """Start to create the driver's context of a device on another thread. This takes a second or two, as long as the
    import of torch, which then finds the context. Errors are ignored: torch reports them as well."""

    def retain() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    threading.Thread(target=retain, name="open-device", daemon=True).start()


def choose_device(wanted: DeviceChoice, ranks: int = 0) -> Device:
    """Device to run on; `auto` is CUDA if there is a device. `ranks`: ranks on this machine that need a device each.

    Raises LauncherError `no_device` when there are fewer devices than ranks, and ConfigError.
    """
    if wanted not in get_args(DeviceChoice):
        raise ConfigError(f"device: expected one of {', '.join(get_args(DeviceChoice))}, got {wanted!r:.60}")
    if wanted == "cpu":
        return "cpu"
    devices = cuda_device_count()
    if wanted == "auto" and not devices:
        return "cpu"
    if devices < ranks:
        raise LauncherError(
            "no_device",
            f"--tp {ranks} needs {ranks} CUDA device(s), but {devices} are visible: check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, lower --tp, or use --device cpu",
        )
    return "cuda"


def rank_environment(device: Device, ranks: int) -> dict[str, str]:
    """Environment variables that the process of each of `ranks` ranks needs before it imports torch."""
    threads = max(1, _cores() // ranks) if device == "cpu" else 1
    return {
        # Ranks that share the cores must not each take all of them.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # NVLink multicast hangs or fails across containers of one host; point-to-point NVLink does not.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


def _cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use; in a container with a CPU limit, the limit rounded down. With more threads the
    kernel would throttle them in the middle of each other's work."""
    cores = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return min(cores, max(1, int(quota) // int(period)))
    return cores
