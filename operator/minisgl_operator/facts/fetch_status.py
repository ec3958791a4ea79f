"""Progress of a fetch, from its Job, its pod and the pod's report; and whether the model is cached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, get_args

from minisgl.wire.status import FetchPhase
from minisgl_operator.api.objects import (
    Manifest,
    controller_uid,
    has_condition,
    is_deleting,
    parse_time,
    true_condition,
)
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Observed, Report
from minisgl_operator.facts.pods import component, is_ended_by_node, last_terminations, unknown_flags
from minisgl_operator.render import model_files, names

RETRY_FETCH_AFTER: Final = timedelta(minutes=10)
"""Time after which a fetch that failed permanently is retried: its token may have been corrected in the Secret, which
the operator does not read."""

# A finer percentage would write the status with every probe.
_PERCENT_STEP: Final = 5
_PHASES: Final[tuple[FetchPhase, ...]] = get_args(FetchPhase)


@dataclass(frozen=True)
class FetchStatus:
    """`failed`: the Job has failed, and a retry needs a new Job. `percent` is in steps of 5. `needed_bytes`: bytes to
    download that do not fit into the `free_bytes` of the claim; 0 if they fit. `unknown_flags`: arguments that the
    image refused. `suspended`: the Job waits for the queue that has suspended it. `failures`: pods that have failed."""

    phase: FetchPhase | Literal["Pending"]
    percent: int = 0
    commit: str = ""
    reason: str = ""
    message: str = ""
    failed: bool = False
    needed_bytes: int = 0
    free_bytes: int = 0
    unknown_flags: str = ""
    suspended: bool = False
    failures: int = 0


def fetch_job(model: InferenceModel, observed: Observed) -> Manifest | None:
    """The Job that fetches the current source; None without one, or for a source that is not fetched."""
    if not model_files.is_fetched(model):
        return None
    return observed.child("Job", names.fetch(model.name, model_files.cache_key(model)))


def fetch_status(job: Manifest | None, observed: Observed) -> FetchStatus:
    if job is None:
        return FetchStatus("Pending")
    done, failed = has_condition(job, "Complete"), has_condition(job, "Failed")
    report = _last_report(job, observed)
    end = {} if report.get("reason") else _unreported_end(job, observed)
    phase = report.get("phase")
    percent = report.get("percent")
    return FetchStatus(
        phase="Done" if done else "Failed" if failed else phase if phase in _PHASES else "Pending",
        percent=100 if done else _rounded_down(percent),
        commit=str(report.get("commit") or ""),
        reason=str(report.get("reason") or end.get("reason") or ""),
        message=str(report.get("message") or end.get("message") or ""),
        failed=failed,
        needed_bytes=_bytes(report.get("needed_bytes")),
        free_bytes=_bytes(report.get("free_bytes")),
        unknown_flags="" if report else _refused_flags(job, observed),
        suspended=has_condition(job, "Suspended"),
        failures=int((job.get("status") or {}).get("failed") or 0),
    )


def retry_time(job: Manifest) -> datetime | None:
    """The time at which a fetch that failed permanently is retried; None while it has not failed."""
    failed = true_condition(job, "Failed")
    return None if failed is None else parse_time(failed["lastTransitionTime"]) + RETRY_FETCH_AFTER


def is_cached(model: InferenceModel, observed: Observed) -> bool:
    """True if the model's files are where engines look for them: a fetch has completed, or a replica was created with
    them. Neither counts when it is older than the PVC, which was then created again and is empty."""
    if not model_files.is_fetched(model):
        return True
    key = model_files.cache_key(model)
    job = fetch_job(model, observed)
    # A Job that is being deleted may be followed by one that removes its files.
    if (
        job is not None
        and has_condition(job, "Complete")
        and not is_deleting(job)
        and not refetch_needed(model, observed, job)
    ):
        return True
    return _is_loaded(model, observed, key)


def _is_loaded(model: InferenceModel, observed: Observed, key: str | None) -> bool:
    """True if a replica was created with these files."""
    return any(
        (live["spec"]["template"]["metadata"].get("annotations") or {}).get(names.CACHE_KEY_ANNOTATION) == key
        and not _pvc_recreated_since(model, observed, live["metadata"]["creationTimestamp"])
        for ref, live in observed.children.items()
        if ref.kind == "StatefulSet" and controller_uid(live) == model.metadata.uid
    )


def refetch_needed(model: InferenceModel, observed: Observed, job: Manifest) -> bool:
    """True if the files of a complete fetch are lost, because the PVC was created again after it."""
    return _pvc_recreated_since(model, observed, job["status"]["completionTime"])


def _pvc_recreated_since(model: InferenceModel, observed: Observed, since: str) -> bool:
    """True if the cache's PVC was created after `since`. The contents of a PVC named in the spec are the user's."""
    pvc = observed.child("PersistentVolumeClaim", names.cache(model.name))
    if model.spec.model.fetch_cache.claim_name is not None or pvc is None:
        return False
    return parse_time(pvc["metadata"]["creationTimestamp"]) > parse_time(since)


def _bytes(number: Any) -> int:
    return number if isinstance(number, int) and number > 0 else 0


def _rounded_down(percent: Any) -> int:
    return int(percent) // _PERCENT_STEP * _PERCENT_STEP if isinstance(percent, int | float) else 0


def _last_report(job: Manifest, observed: Observed) -> Report:
    """The report of the Job's youngest pod that has one: its response to /status while it runs, afterwards its
    termination message. A pod that has just started reports nothing yet; the previous pod's reason stays until then.
    """
    started: Report = {}
    for pod in _pods_of(job, observed):
        for ended in last_terminations(pod):
            if left := _decode_report(str(ended.get("message") or "")):
                return left
        report = observed.report(pod)
        if report is None:
            continue
        if report.get("phase") != "Resolving" or report.get("reason"):
            return report
        started = started or report
    return started


def _unreported_end(job: Manifest, observed: Observed) -> Report:
    """Reason and message of the end of the youngest pod, if its process could not report it, as when it was killed.
    Empty while that pod runs, and if its node ended it, which says nothing about the fetch."""
    pod = youngest_pod(job, observed)
    if pod is None or is_ended_by_node(pod) or (pod.get("status") or {}).get("phase") != "Failed":
        return {}
    for ended in last_terminations(pod):
        output = str(ended.get("message") or "")
        if ended.get("reason") == "OOMKilled":
            return {"reason": "OutOfMemory", "message": "the kernel killed it for want of memory"}
        if _decode_report(output) or unknown_flags(output):
            return {}
        return {"reason": "Error", "message": f"exit code {ended.get('exitCode')}{output and f': {output}'}"}
    return {}


def youngest_pod(job: Manifest, observed: Observed) -> Manifest | None:
    return next(iter(_pods_of(job, observed)), None)


def _pods_of(job: Manifest, observed: Observed) -> list[Manifest]:
    """The Job's pods, the youngest first."""
    own = [
        pod for pod in observed.pods if component(pod) == names.FETCH and controller_uid(pod) == job["metadata"]["uid"]
    ]
    return sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True)


def _refused_flags(job: Manifest, observed: Observed) -> str:
    """Arguments that the image of the youngest pod that ended does not know; empty without any."""
    ends = (ended for pod in _pods_of(job, observed) for ended in last_terminations(pod))
    return unknown_flags(str(next(ends, {}).get("message") or ""))


def _decode_report(message: str) -> Mapping[str, Any]:
    """The last line that is a report. Without a termination message, the kubelet reports the end of the log."""
    for line in reversed(message.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("kind") == "fetch":
            return found
    return {}
