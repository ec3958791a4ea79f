"""InterconnectOptimal: whether ranks communicate over the fastest transport that the hardware offers."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.facts import Facts
from minisgl_operator.status.condition import Condition, shortened


def interconnect_optimal(facts: Facts) -> Condition:
    parallelism = facts.model.spec.parallelism
    if parallelism.tensor == 1:
        return Condition("True", Reason.OPTIMAL, "A replica has only one rank.")
    if facts.model.spec.engine.device == "cpu":
        return Condition("True", Reason.OPTIMAL, "Ranks on CPUs have no faster transport.")
    if parallelism.pods == 1:
        return Condition("True", Reason.OPTIMAL, "All ranks of a replica are in one pod.")
    transports = {
        replica.name: str(replica.report.get("transport") or "")
        for replica in facts.replicas
        if replica.ready and replica.report is not None
    }
    slow = [f"{name} ({transport})" for name, transport in transports.items() if transport.startswith("NET/Socket")]
    if slow:
        message = (
            f"Ranks in separate pods communicate over TCP: {shortened(slow)}. Remove gpusPerPod, or set interconnect: "
            "SharedPod, so that they share a pod and its NVLink."
        )
        return Condition("False", Reason.CROSS_POD_TCP, message)
    if len(transports) < len(facts.replicas) or not all(transports.values()):
        message = "Not every replica has reported the transport between its ranks."
        return Condition("Unknown", Reason.UNKNOWN, message)
    message = f"Ranks communicate over {', '.join(sorted(set(transports.values())))}."
    return Condition("True", Reason.OPTIMAL, message)
