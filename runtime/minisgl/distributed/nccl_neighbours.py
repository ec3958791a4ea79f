"""NCCL settings for NVLink between ranks in separate containers of one machine."""

from __future__ import annotations


def nccl_neighbours(host: str) -> dict[str, str]:
    """Environment variables with which NCCL connects containers of `host` by CUDA IPC over NVLink.

    Use it only if all of the following holds, because otherwise NCCL fails and does not fall back: the ranks'
    containers see each other's devices, their /dev/shm have the same st_dev (NCCL compares it, ncclTopoCheckP2p), and
    no two ranks have the same process id inside their own pid namespace. cuMem handles travel over a socket of the
    network namespace, which containers do not share: hence the legacy handles.
    """
    return {"NCCL_HOSTID": host, "NCCL_CUMEM_ENABLE": "0"}
