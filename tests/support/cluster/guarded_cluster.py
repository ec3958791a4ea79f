"""A simulated cluster that checks each plan against the rules that hold for every plan, before it is sent.

The rules are written for the observed state and share no code with the selection of replicas.
"""

from __future__ import annotations

from minisgl_operator.api.objects import Ref, has_condition, is_deleting
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Observed, Unreachable
from minisgl_operator.facts.pods import component, containers_started, replica_name, revision_of
from minisgl_operator.plan.plan import Apply, Delete, Step
from minisgl_operator.render import names
from support.cluster.simulated_cluster import SimulatedCluster


class GuardedCluster(SimulatedCluster):
    """Checks each plan before it is sent."""

    def plan_of(self, facts: Facts) -> tuple[Step, ...]:
        steps = super().plan_of(facts)
        check_removals(facts.observed, steps)
        check_drains(facts.observed, steps, self.refused)
        return steps


def check_removals(observed: Observed, steps: tuple[Step, ...]) -> None:
    """No replica that serves is deleted while one that does not is left."""
    left = {ref.name for ref, body in observed.children.items() if ref.kind == "StatefulSet" and not is_deleting(body)}
    for step in steps:
        if isinstance(step, Delete) and step.ref.kind == "StatefulSet":
            left.discard(step.ref.name)
            if may_serve(observed, step.ref.name):
                idle = [name for name in left if not may_serve(observed, name)]
                assert not idle, f"deletes {step.ref.name}, which serves, and keeps {idle}"


def check_drains(observed: Observed, steps: tuple[Step, ...], refused: set[str]) -> None:
    """No replica that serves gets a template whose pods admission refuses."""
    for step in steps:
        if not isinstance(step, Apply) or step.ref.kind != "StatefulSet" or step.ref not in observed.children:
            continue
        template = step.manifest["spec"]["template"]
        changes = revision_of(template) != revision_of(observed.children[step.ref]["spec"]["template"])
        if changes and template["spec"]["containers"][0]["image"] in refused:
            assert not may_serve(observed, step.ref.name), f"drains {step.ref.name} for pods that are refused"


def may_serve(observed: Observed, replica: str) -> bool:
    """True if the replica serves requests, or if nobody knows."""
    stateful_set = observed.children[Ref("StatefulSet", replica)]
    revision = revision_of(stateful_set["spec"]["template"])
    pods = [pod for pod in observed.pods if replica_name(pod) == replica]
    reports = [(pod, observed.reports.get(pod["metadata"]["uid"])) for pod in pods]
    # A pod that is being deleted ends whatever happens to its replica.
    unknown = (not is_deleting(pod) and containers_started(pod) and isinstance(it, Unreachable) for pod, it in reports)
    if any(unknown):
        return True
    complete = 0 < stateful_set["spec"]["replicas"] <= len(pods)
    ready = all(has_condition(pod, "Ready") and not is_deleting(pod) and revision_of(pod) == revision for pod in pods)
    if not (complete and ready):
        return False
    frontends = [observed.report(pod) for pod in observed.pods if component(pod) == names.FRONTEND]
    entries = [entry for report in frontends if report is not None for entry in report["replicas"]]
    known = any(report is not None for report in frontends)
    return not known or any(
        (entry["replica"], entry["revision"], entry["routable"]) == (replica, revision, True) for entry in entries
    )
