"""Plan of an epoch: the messages to the member pods and the specs of each pod's ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.rank_specs import file_rendezvous, ipc_plans, rank_specs
from minisgl.replica.messages import Epoch, PodTopology, StartRanks
from minisgl.replica.options import EngineOptions
from minisgl.replica.topology import first_devices, on_same_host
from minisgl.scheduler.process import SchedulerProcessConfig
from minisgl.wire.sockets import url_host


class MemberAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and topology of a member pod."""

    host: str
    """Address of the pod, seen from pod 0."""
    leader_host: str
    """Address of pod 0, seen from this pod."""
    topology: PodTopology


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[StartRanks]
    """One for each of pods 1, 2, …"""
    local: list[ProcessSpec]
    """Ranks of pod 0."""
    same_host: bool
    """NCCL treats all pods as one machine."""


def plan_epoch(
    options: EngineOptions,
    epoch: Epoch,
    *,
    topology: PodTopology,
    members: Sequence[MemberAddress],
    sockets: Path,
    tokenizer_hashes: dict[str, str],
    try_same_host: bool,
    plans_token: str,
) -> EpochPlan:
    """`topology` is that of pod 0, `members` are pods 1, 2, …; `sockets` is a directory for the sockets inside pod 0.
    `try_same_host` allows NCCL to treat pods on one node as one machine. `plans_token` is random, for this start."""
    identity, ports = options.identity, options.ports
    pods = [topology, *(member.topology for member in members)]
    same_host = bool(try_same_host and members) and on_same_host(pods, identity.tensor_parallel)
    if members:
        # An address, not a name: a pod that has reached pod 0 there can reach the rendezvous too.
        rendezvous = f"tcp://{url_host(members[0].leader_host)}:{ports.rendezvous}"
    else:
        rendezvous = file_rendezvous(sockets, epoch[1])
    messages = [
        StartRanks(
            epoch=epoch,
            rendezvous=rendezvous,
            first_device=first if options.engine.device == "cuda" else None,
            nccl_host=topology.node if same_host else "",
            plans_token=plans_token,
        )
        for first in first_devices(pods, identity.ranks_per_pod)
    ]
    local_plans = ipc_plans(sockets, identity.ranks(0))
    remote_plans = [
        f"tcp://{url_host(member.host)}:{ports.plans + rank}"
        for index, member in enumerate(members, 1)
        for rank in identity.ranks(index)
    ]
    scheduler = SchedulerProcessConfig(
        engine=options.engine,
        address=f"tcp://*:{ports.scheduler}",
        plan_addresses=(*local_plans.values(), *remote_plans),
        model_name=options.model_name,
        replica=identity.replica,
        replica_revision=identity.revision,
        peer_secret=options.peer_secret,
        peer_secret_demand=str(options.secret_demand),
        plans_token=plans_token,
        drains=True,
        tokenizer_hashes=tokenizer_hashes,
        epoch=epoch,
    )
    local = _pod_specs(options, messages[0], local_plans, scheduler)
    return EpochPlan(messages=messages[1:], local=local, same_host=same_host)


def member_pod_specs(options: EngineOptions, message: StartRanks) -> list[ProcessSpec]:
    """Specs of the ranks of a member pod."""
    plans = {rank: f"tcp://*:{options.ports.plans + rank}" for rank in options.identity.ranks(options.pod_index)}
    return _pod_specs(options, message, plans, plans_token=message.plans_token)


def _pod_specs(
    options: EngineOptions,
    message: StartRanks,
    plans: Mapping[int, str],
    scheduler: SchedulerProcessConfig | None = None,
    plans_token: str = "",
) -> list[ProcessSpec]:
    engine = msgspec.structs.replace(options.engine, rendezvous=message.rendezvous, nccl_host=message.nccl_host)
    ranks = options.identity.ranks(options.pod_index)
    return rank_specs(engine, ranks, plans, scheduler, first_device=message.first_device, plans_token=plans_token)
