"""Facts that are kept from an earlier observation are those that would be computed again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.rollout.waves import Turn
from minisgl_operator.plan.plan import plan
from minisgl_operator.status.status import derive_status
from support.cluster.fleet import WAVES, operator_version
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, raw_model


def upgraded() -> GuardedCluster:
    """A model of version 1 under an operator of version 2."""
    model = GuardedCluster(raw_model({"replicas": 2}, source=CLAIM), operator_version(1))
    model.settle()
    model.defaults = operator_version(2, waves=WAVES)
    return model


def assert_as_computed(found: Facts) -> None:
    again = replace(found)
    assert plan(found) == plan(again)
    assert derive_status(found, {}) == derive_status(again, {})
    assert found.next_change == again.next_change


@pytest.mark.parametrize("admitted", [False, True])
def test_a_turn_changes_only_what_follows_from_it(admitted: bool) -> None:
    model = upgraded()
    first = model.facts()
    assert_as_computed(first)
    turn = Turn(admitted, "canary", "canary")
    later = first.seen_again(first.observed, turn)
    assert later.turn == turn
    assert_as_computed(later)


def test_another_observation_or_time_changes_all_but_the_spec() -> None:
    model = upgraded()
    first = model.facts()
    assert_as_computed(first)
    model.pods.pop("qwen-r0-0")
    model.look()
    for observed, now in ((model.observed(), first.now), (first.observed, first.now + timedelta(hours=1))):
        later = first.seen_again(observed, first.turn, now)
        assert (later.observed, later.now) == (observed, now)
        assert_as_computed(later)
