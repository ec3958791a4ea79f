"""Which accelerator there is, asked of the driver: importing torch for this would take seconds."""

from __future__ import annotations

import ctypes
import os
from typing import Literal

from minisgl.config import Device
from minisgl.launcher.errors import LauncherError


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


def choose_device(wanted: Literal["auto", "cpu", "cuda"], ranks: int) -> Device:
    """`auto` is CUDA where there is one. Raises LauncherError `no_device` when there are fewer devices than ranks."""
    if wanted == "cpu":
        return "cpu"
    devices = cuda_device_count()
    if wanted == "auto" and not devices:
        return "cpu"
    if devices < ranks:
        raise LauncherError(
            "no_device",
            f"{ranks} CUDA device(s) are needed, {devices} can be used: check nvidia-smi and CUDA_VISIBLE_DEVICES, "
            "lower --tp, or choose --device cpu",
        )
    return "cuda"


def default_page_size(device: Device) -> int:
    """Tokens. The fast decode kernels on CUDA want 64; small pages waste less of a CPU's small pool."""
    return 64 if device == "cuda" else 16


def rank_environment(device: Device, ranks: int) -> dict[str, str]:
    """What each rank's process needs in its environment before it imports torch."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks) if device == "cpu" else 1
    return {
        # Ranks that share the cores must not each take all of them.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # NVLink multicast hangs or fails across containers of one host; point-to-point NVLink does not.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
