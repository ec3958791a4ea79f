"""InterconnectOptimal: whether ranks communicate over the fastest transport that the hardware offers."""

from __future__ import annotations

from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.facts import Facts
from minisgl_operator.render.engine import shm_in_memory
from minisgl_operator.status.condition import Condition, shortened

# Prefixes of transports that reach a GPU without a copy through host memory: of one node, and between nodes. Networks
# other than Socket are InfiniBand, RoCE, and those of cloud providers (NET/Libfabric, NET/GPUDirectTCPX).
_DIRECT: Final = ("P2P", "NVLS")
_RDMA: Final = ("NET/", "COLLNET")


def interconnect_optimal(facts: Facts) -> Condition:
    parallelism = facts.model.spec.parallelism
    if parallelism.tensor == 1:
        return Condition("True", Reason.OPTIMAL, "A replica has only one rank.")
    if facts.model.spec.engine.device == "cpu":
        return Condition("True", Reason.OPTIMAL, "Ranks on CPUs have no faster transport.")
    transports = {
        replica.name: str(replica.report.get("transport") or "").partition(";")[0]
        for replica in facts.replicas
        if replica.ready and replica.report is not None
    }
    if parallelism.pods > 1 and (slow := _using(transports, "NET/Socket")):
        message = (
            f"Ranks in separate pods communicate over TCP: {shortened(slow)}. Remove gpusPerPod, or set interconnect: "
            f"SharedPod, so that they share a pod and its NVLink.{_no_nvlink_between_pods(facts)}"
        )
        return Condition("False", Reason.CROSS_POD_TCP, message)
    if slow := _using(transports, "SHM", *(("NET",) if parallelism.pods == 1 else ())):
        message = (
            f"Ranks reach each other's GPUs through the host: {shortened(slow)}. See `nvidia-smi topo -p2p r` on the "
            "node: without peer access, as with an IOMMU or on GPUs that have none, there is no faster transport."
            f"{_shm_on_disk(facts)}"
        )
        return Condition("False", Reason.NO_PEER_ACCESS, message)
    known = all(transport.startswith((*_DIRECT, *_RDMA)) for transport in transports.values())
    if len(transports) < len(facts.replicas) or not known:
        message = "Not every replica has reported the transport between its ranks."
        return Condition("Unknown", Reason.UNKNOWN, message)
    message = f"Ranks communicate over {', '.join(sorted(set(transports.values())))}."
    if _using(transports, *_RDMA):
        message += _no_nvlink_between_pods(facts)
    return Condition("True", Reason.OPTIMAL, message)


def _using(transports: dict[str, str], *prefixes: str) -> list[str]:
    """Replicas with such a transport between some of their ranks. Several are joined by ` and `."""
    return [
        f"{name} ({transport})"
        for name, transport in transports.items()
        if any(kind.startswith(prefixes) for kind in transport.split(" and "))
    ]


def _no_nvlink_between_pods(facts: Facts) -> str:
    """Cost of a tmpfs between pods; empty if none is used."""
    spec = facts.model.spec
    if spec.parallelism.pods == 1 or not shm_in_memory(spec.engine, spec.parallelism):
        return ""
    return (
        " /dev/shm is in memory, a device of its own in each pod, so NCCL uses no NVLink between pods on one node: "
        "spec.engine.shmMedium: Node allows it if each pod sees all GPUs of the replica."
    )


def _shm_on_disk(facts: Facts) -> str:
    """Cost of the node's disk within a pod; empty if it is not used."""
    spec = facts.model.spec
    if shm_in_memory(spec.engine, spec.parallelism):
        return ""
    return " /dev/shm is on the node's disk, which is slower than spec.engine.shmMedium: Memory."
