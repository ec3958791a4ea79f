"""Time alone changes the state of a deleted pod only at the moments for which a reconcile is planned."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.lost_nodes import ending, next_ending, pods_to_force_delete
from minisgl_operator.facts.observed import Nodes, NodeState, Readiness
from minisgl_operator.render import names

START = datetime(2026, 1, 1, tzinfo=UTC)
seconds = st.integers(0, 700).map(lambda number: timedelta(seconds=number))
stamps = seconds.map(lambda since: START + since)
states = st.builds(NodeState, out_of_service=st.booleans()) | st.builds(
    NodeState, st.sampled_from(("False", "Unknown")), st.none() | stamps, st.booleans()
)


@st.composite
def pods(draw: st.DrawFn) -> Manifest:
    part = draw(st.sampled_from((names.ENGINE, names.FETCH)))
    metadata: Manifest = {"name": "p", "labels": names.labels("qwen", part)}
    if draw(st.booleans()):
        metadata["deletionTimestamp"] = (START + draw(seconds)).isoformat()
        metadata["deletionGracePeriodSeconds"] = draw(st.sampled_from((0, 30, 330)))
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": draw(st.none() | st.sampled_from(("a", "b")))}}


@given(pods(), st.none() | st.dictionaries(st.sampled_from(("a", "b")), states), seconds, st.floats(0, 0.999))
def test_nothing_changes_before_the_next_deadline(
    pod: Manifest, nodes: Nodes | None, at: timedelta, part: float
) -> None:
    now = START + at
    change = next_ending([pod], nodes, now)
    later = now + part * (timedelta(hours=1) if change is None else change - now)
    assert ending(pod, nodes, now) == ending(pod, nodes, later)
    assert pods_to_force_delete([pod], nodes, now) == pods_to_force_delete([pod], nodes, later)


@given(pods(), st.none() | st.dictionaries(st.sampled_from(("a", "b")), states), seconds)
def test_only_deleted_pods_of_lost_nodes_are_forced(pod: Manifest, nodes: Nodes | None, at: timedelta) -> None:
    now = START + at
    for forced in pods_to_force_delete([pod], nodes, now):
        assert nodes is not None and "deletionTimestamp" in forced["metadata"]
        assert forced["metadata"]["labels"][names.COMPONENT_LABEL] != names.FETCH
        node = nodes.get(forced["spec"]["nodeName"])
        if node is not None:
            assert node.ready != "True"
            if not node.out_of_service:
                assert node.ready == "Unknown" and node.not_ready_since is not None
                assert now - node.not_ready_since >= timedelta(seconds=300)


@pytest.mark.parametrize(("ready", "lost"), [("True", False), ("False", True), ("Unknown", True)])
def test_the_taint_of_a_machine_that_is_off_counts_only_on_a_node_that_is_not_ready(
    ready: Readiness, lost: bool
) -> None:
    pod: Manifest = {
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "labels": names.labels("qwen", names.ENGINE),
            "deletionTimestamp": START.isoformat(),
            "deletionGracePeriodSeconds": 0,
        },
        "spec": {"nodeName": "a"},
    }
    now = START + timedelta(seconds=60)
    nodes = {"a": NodeState(ready, None if ready == "True" else now, out_of_service=True)}
    assert ending(pod, nodes, now) == ("lost" if lost else "hangs")
    assert pods_to_force_delete([pod], nodes, now) == ((pod,) if lost else ())
