"""Placement of a replica's pods on nodes and devices."""

from __future__ import annotations

import os
from collections.abc import Sequence

from minisgl.config import Device
from minisgl.launcher.devices import cuda_device_ids
from minisgl.replica.messages import PodTopology


def own_topology(node: str, device: Device) -> PodTopology:
    """Topology of this pod."""
    try:
        shm_device = os.stat("/dev/shm").st_dev
    except OSError:
        shm_device = -1
    return PodTopology(node=node, devices=cuda_device_ids() if device == "cuda" else (), shm_device=shm_device)


def on_same_host(pods: Sequence[PodTopology], ranks: int) -> bool:
    """True if NCCL may treat the pods, in which `ranks` ranks run, as one machine: see `nccl_neighbours`. NCCL needs
    distinct process ids as well, which `ProcessSpec.pid_residue` gives."""
    first = pods[0]
    return (
        first.node != ""
        and first.shm_device >= 0
        and len(first.devices) >= ranks
        and all(
            pod.node == first.node
            and pod.shm_device == first.shm_device
            and sorted(pod.devices) == sorted(first.devices)
            for pod in pods
        )
    )


def first_devices(pods: Sequence[PodTopology], ranks_per_pod: int) -> list[int]:
    """Index of the device of each pod's first rank. Pods that see the same devices share them in their order, as far
    as there are enough; the other pods begin with device 0."""
    first = []
    for index, pod in enumerate(pods):
        before = sum(other.node == pod.node and sorted(other.devices) == sorted(pod.devices) for other in pods[:index])
        number = before * ranks_per_pod
        first.append(number if number + ranks_per_pod <= len(pod.devices) else 0)
    return first
