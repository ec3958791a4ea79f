"""When the operator writes the tokens by which a model's pods know one another, and when engines shall require them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.facts.observed import Unreachable
from minisgl_operator.facts.peer_secret import PeerSecret, peer_secret_of, period_at
from minisgl_operator.render.names import PEERS_VOLUME
from support.cluster.scene import NOW, Scene

THIS = period_at(NOW)
MONTH = timedelta(days=30)


def scene(**known: Any) -> Scene:
    """A model of two engine pods and one frontend, whose pods report what is given by name; others report `a`."""
    found = Scene({"replicas": 2})
    for name, report in found.reports.items():
        assert not isinstance(report, Unreachable)
        found.reports[name] = {**report, "peer_secret": known.get(name.replace("-", "_"), {"a": f"{THIS}.aa"})}
    return found


def known(of: Scene) -> PeerSecret:
    return peer_secret_of(of.observed())


def test_the_secret_is_required_when_all_pods_report_a_common_token() -> None:
    assert known(scene()).required


@pytest.mark.parametrize("report", [{}, {"a": "1.other"}, {"b": f"{THIS}.aa"}, None, ["a"], {"a": 7}])
@pytest.mark.parametrize("pod", ["qwen_r1_0", "frontend_0"])
def test_one_pod_without_the_token_keeps_the_door_open(pod: str, report: Any) -> None:
    assert not known(scene(**{pod: report})).required


def test_pods_that_know_one_of_two_tokens_are_enough_while_one_is_replaced() -> None:
    both = {"a": f"{THIS}.aa", "b": f"{THIS + 1}.new"}
    secret = known(scene(qwen_r0_0=both))
    assert secret.common == {"a": f"{THIS}.aa"}
    assert secret.required


def test_a_pod_that_has_not_reported_counts_by_its_volume() -> None:
    """Those that start know the token that others know; those of an earlier version never will."""
    starting = scene()
    del starting.reports["qwen-r1-0"]
    assert not known(starting).required
    starting.pods["qwen-r1-0"]["spec"]["volumes"] = [{"name": PEERS_VOLUME}]
    assert known(starting).required
    starting.pods["qwen-r1-0"]["spec"]["volumes"] = []
    starting.pods["qwen-r1-0"]["status"]["phase"] = "Failed"
    assert known(starting).required, "it does not run any more"


def test_nothing_is_required_of_a_model_without_reports() -> None:
    empty = scene()
    empty.reports.clear()
    assert not known(empty).required


def test_a_first_token_is_written_when_all_pods_have_reported_that_they_know_none() -> None:
    of = Scene({"replicas": 2})
    assert known(of).is_unknown
    del of.reports["qwen-r1-0"]
    assert not known(of).is_unknown, "one that runs may know it"
    of.no_pods()
    assert known(of).is_unknown, "a new model"
    assert not known(scene()).is_unknown


def test_the_older_token_is_replaced_each_month() -> None:
    assert known(scene()).slot_to_replace(NOW) is None
    assert known(scene()).slot_to_replace(NOW + MONTH) == "b"
    after = {name: {"a": f"{THIS}.aa", "b": f"{THIS + 1}.bb"} for name in ("qwen_r0_0", "qwen_r1_0", "frontend_0")}
    assert known(scene(**after)).slot_to_replace(NOW + MONTH) is None
    assert known(scene(**after)).slot_to_replace(NOW + 2 * MONTH) == "a"


def test_the_only_token_that_all_pods_know_is_not_replaced() -> None:
    """Also after a long time in which no operator ran."""
    partly = scene(qwen_r0_0={"a": f"{THIS}.aa", "b": f"{THIS + 1}.bb"})
    assert known(partly).slot_to_replace(NOW + 4 * MONTH) == "b"
    assert known(scene(qwen_r1_0={})).slot_to_replace(NOW + 4 * MONTH) is None
