"""How far the fetch of a model from the Hub is, from its Job, its pod and its own report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Manifest, Observed, controller_uid
from minisgl_operator.facts.pod_failures import last_end
from minisgl_operator.facts.replicas import component, containers, holds
from minisgl_operator.render import model_files, names

# A percent that moves at each look would write the status at each look.
_PERCENT_STEP: Final = 5
_PHASES: Final = ("Resolving", "Downloading", "Done", "Failed")


@dataclass(frozen=True)
class Fetch:
    """`given_up`: the Job has failed, and nothing happens until a new one is made. `percent` is in steps of 5."""

    phase: Literal["Pending", "Resolving", "Downloading", "Done", "Failed"]
    percent: int = 0
    commit: str = ""
    reason: str = ""
    message: str = ""
    given_up: bool = False


def fetch_of(model: InferenceModel, observed: Observed) -> Fetch:
    """Of the model's present source, which is one on the Hub."""
    key = model_files.cache_key(model)
    assert key is not None
    job = observed.child("Job", names.fetch(model.name, key))
    if job is None:
        return Fetch("Pending")
    done, given_up = holds(job, "Complete"), holds(job, "Failed")
    said = _last_words(job, observed)
    phase = said.get("phase")
    percent = said.get("percent")
    return Fetch(
        phase="Done" if done else "Failed" if given_up else phase if phase in _PHASES else "Pending",
        percent=100 if done else _stepped(percent),
        commit=str(said.get("commit") or ""),
        reason=str(said.get("reason") or ""),
        message=str(said.get("message") or ""),
        given_up=given_up,
    )


def _stepped(percent: Any) -> int:
    return int(percent) // _PERCENT_STEP * _PERCENT_STEP if isinstance(percent, int | float) else 0


def _last_words(job: Manifest, observed: Observed) -> Mapping[str, Any]:
    """The report of the Job's youngest pod that says anything: while it runs by HTTP, afterwards as the message that
    it left. One that has just begun says nothing yet, and must not make the last one's reason come and go."""
    begun: Mapping[str, Any] = {}
    own = [
        pod for pod in observed.pods if component(pod) == names.FETCH and controller_uid(pod) == job["metadata"]["uid"]
    ]
    for pod in sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True):
        for container in containers(pod):
            ended = last_end(container)
            if ended is not None and (left := _decoded(str(ended.get("message") or ""))):
                return left
        report = observed.report(pod)
        if report is None:
            continue
        if report.get("phase") != "Resolving" or report.get("reason"):
            return report
        begun = begun or report
    return begun


def _decoded(message: str) -> Mapping[str, Any]:
    """The last line that is a report: without a message of its own, a container leaves the end of its log."""
    for line in reversed(message.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("kind") == "fetch":
            return found
    return {}
