"""NVLink between ranks in separate containers of one machine, as far as NCCL has to be told."""

from __future__ import annotations


def nccl_neighbours(host: str) -> dict[str, str]:
    """The environment in which NCCL connects ranks of several containers of `host` by CUDA IPC over NVLink.

    Only where all of this holds, because NCCL then fails instead of falling back: the ranks' containers see each
    other's devices, their /dev/shm have the same st_dev (NCCL compares it, ncclTopoCheckP2p), and no two ranks have
    the same process id inside their own pid namespace. cuMem handles travel over a socket of the network namespace,
    which containers do not share: hence the legacy handles.
    """
    return {"NCCL_HOSTID": host, "NCCL_CUMEM_ENABLE": "0"}
