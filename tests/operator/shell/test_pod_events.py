from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from minisgl_operator.facts.observed import ObjectEvent
from minisgl_operator.shell.client import Page
from minisgl_operator.shell.pod_events import PodEvents, waits_for_event

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def body(kind: str = "Pod", age: float = 60, uid: str = "u", spec: Any = None, **status: Any) -> dict[str, Any]:
    created = (NOW - timedelta(seconds=age)).isoformat()
    metadata = {"name": "x", "namespace": "ns", "uid": uid, "creationTimestamp": created}
    return {"kind": kind, "metadata": metadata, "spec": spec or {}, "status": status}


class Events:
    """Replaces the client: counts the lists, and returns the same events each time."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def pages(self, resource: Any, namespace: str, field_selector: str) -> AsyncIterator[Page]:
        self.asked.append(field_selector)
        late = {"reason": "FailedMount", "message": "late", "lastTimestamp": "2026-01-01T11:59:00Z", "metadata": {}}
        early = {"reason": "Scheduled", "message": "early", "eventTime": "2026-01-01T11:00:00.000000Z", "metadata": {}}
        yield Page([late], "1")
        yield Page([early], "1")


@pytest.mark.parametrize(
    ("one", "stuck"),
    [
        (body(phase="Pending"), True),
        (body(), True),
        (body(phase="Running"), False),
        (body("PersistentVolumeClaim", phase="Pending"), True),
        (body("PersistentVolumeClaim", phase="Bound"), False),
        (body("StatefulSet", spec={"replicas": 2}, replicas=1), True),
        (body("StatefulSet", spec={"replicas": 2}, replicas=2), False),
        (body("StatefulSet", spec={"replicas": 0}), False),
        (body("Job"), True),
        (body("Job", active=1), False),
        (body("Job", conditions=[{"type": "Failed"}]), False),
        (body("Service"), False),
    ],
)
def test_objects_that_wait_for_an_event(one: dict[str, Any], stuck: bool) -> None:
    assert waits_for_event(one) == stuck
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not waits_for_event(one)


async def test_events_of_new_objects_are_listed_only_after_a_delay() -> None:
    client = Events()
    found, again = await PodEvents(client).events_for([body(age=2, phase="Pending")], NOW)  # type: ignore[arg-type]
    assert (found, client.asked) == ({}, [])
    assert again == pytest.approx(3)


async def test_events_are_ordered_and_not_listed_in_every_reconcile() -> None:
    client = Events()
    stuck = PodEvents(client)  # type: ignore[arg-type]
    for _ in range(3):
        found, again = await stuck.events_for([body(phase="Pending")], NOW)
        assert found == {"u": (ObjectEvent("Scheduled", "early"), ObjectEvent("FailedMount", "late"))}
        assert again == 15
    assert client.asked == ["involvedObject.uid=u"]


async def test_events_are_listed_for_only_a_few_of_a_hundred_waiting_pods() -> None:
    client = Events()
    pods = [body(uid=f"u{number}", phase="Pending") for number in range(100)]
    await PodEvents(client).events_for(pods, NOW)  # type: ignore[arg-type]
    assert len(client.asked) == 8


async def test_waiting_pods_do_not_hide_the_events_of_controllers_and_claims() -> None:
    client = Events()
    pods = [body(uid=f"u{number}", phase="Pending") for number in range(8)]
    others = [
        body("PersistentVolumeClaim", uid="claim", phase="Pending"),
        body("StatefulSet", uid="set", spec={"replicas": 9}, replicas=8),
        body("Job", uid="job"),
    ]
    found, _ = await PodEvents(client).events_for([*pods, *others], NOW)  # type: ignore[arg-type]
    assert {"claim", "set", "job", "u0"} <= found.keys()


async def test_waiting_controllers_do_not_hide_the_events_of_pods() -> None:
    client = Events()
    sets = [body("StatefulSet", uid=f"set{number}", spec={"replicas": 1}, replicas=0) for number in range(100)]
    found, _ = await PodEvents(client).events_for([*sets, body(uid="pod", phase="Pending")], NOW)  # type: ignore[arg-type]
    assert "pod" in found
    assert len(client.asked) == 33


async def test_running_pods_cause_no_list_of_events() -> None:
    client = Events()
    assert await PodEvents(client).events_for([body(phase="Running")], NOW) == ({}, None)  # type: ignore[arg-type]
    assert client.asked == []
