"""What the pods of a replica can reach of each other's devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from minisgl.config import Device
from minisgl.launcher.devices import cuda_device_ids

Name = Annotated[str, Meta(max_length=256)]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pod runs."""

    node: Name
    """Empty: not known."""
    devices: Annotated[tuple[Name, ...], Meta(max_length=256)]
    """UUIDs of the CUDA devices that it sees, in the order of their numbers there."""
    shm_device: int
    """st_dev of /dev/shm."""


def own_place(node: str, device: Device) -> Place:
    try:
        shm_device = os.stat("/dev/shm").st_dev
    except OSError:
        shm_device = -1
    return Place(node=node, devices=cuda_device_ids() if device == "cuda" else (), shm_device=shm_device)


def are_neighbours(places: Sequence[Place], ranks: int) -> bool:
    """NCCL may be told that the pods, in which `ranks` ranks run, are one machine: see `nccl_neighbours`. What this
    does not look at is ensured in another way: process ids differ by `ProcessSpec.pid_residue`."""
    first = places[0]
    return (
        first.node != ""
        and first.shm_device >= 0
        and len(first.devices) >= ranks
        and all(
            place.node == first.node
            and place.shm_device == first.shm_device
            and sorted(place.devices) == sorted(first.devices)
            for place in places
        )
    )


def first_devices(places: Sequence[Place], ranks_per_pod: int) -> list[int]:
    """For each pod, the number of its first rank's device. Pods to which the same devices were given share them out in
    their order, as far as they suffice."""
    first = []
    for index, place in enumerate(places):
        before = sum(
            other.node == place.node and sorted(other.devices) == sorted(place.devices) for other in places[:index]
        )
        number = before * ranks_per_pod
        first.append(number if number + ranks_per_pod <= len(place.devices) else 0)
    return first
