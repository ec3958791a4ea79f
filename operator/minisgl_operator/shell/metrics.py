"""Metrics for Prometheus, with the names of controller-runtime and client-go, so that their dashboards work."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest, condition_of
from minisgl_operator.shell.workqueue import WorkQueue

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_AS_IT_SHOULD_BE: Final = frozenset(
    {
        Reason.ACCEPTED,
        Reason.CACHED,
        Reason.NOT_NEEDED,
        Reason.SCHEDULED,
        Reason.ENGINES_READY,
        Reason.FRONTENDS_READY,
        Reason.READY,
        Reason.UP_TO_DATE,
        Reason.ALL_REPLICAS_SERVE,
        Reason.OPTIMAL,
        Reason.UNKNOWN,
        Reason.SUSPENDED,
        Reason.SCALED_TO_ZERO,
    }
)
_RECONCILE_EDGES: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters since the start of the process."""

    def __init__(self) -> None:
        self.reconciles: Counter[str] = Counter()
        self.reconcile_counts = [0] * (len(_RECONCILE_EDGES) + 1)
        self.reconcile_seconds = 0.0
        self.applies: Counter[tuple[str, str]] = Counter()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.probes: Counter[str] = Counter()

    def reconciled(self, result: str, seconds: float) -> None:
        self.reconciles[result] += 1
        self.reconcile_counts[bisect_left(_RECONCILE_EDGES, seconds)] += 1
        self.reconcile_seconds += seconds

    def requested(self, method: str, status: int) -> None:
        self.requests[method, status] += 1


def render(
    metrics: Metrics,
    work: WorkQueue[Any],
    *,
    models: Sequence[Manifest],
    resync_age: float,
    loop_lag: float,
    leader: bool,
) -> str:
    """Text in the Prometheus format 0.0.4. Times are in seconds. `models`: all InferenceModels as last seen."""
    page = _Page()
    queue, controller = 'name="inferencemodel"', 'controller="inferencemodel"'
    page.gauge("workqueue_depth", "Models that wait for a worker.", work.depth, queue)
    page.counter("workqueue_adds_total", "Times that a model was added to the queue.", {queue: work.adds})
    page.counter("workqueue_retries_total", "Times that a model failed and was requeued.", {queue: work.retries})
    longest = "workqueue_longest_running_processor_seconds"
    page.gauge(longest, "Age of the oldest reconcile that is running.", work.longest_running(), queue)
    reconciles = {f'{controller},result="{result}"': count for result, count in metrics.reconciles.items()}
    page.counter("controller_runtime_reconcile_total", "Reconciles by result.", reconciles)
    page.histogram(
        "controller_runtime_reconcile_time_seconds",
        "Time of a reconcile.",
        controller,
        metrics.reconcile_counts,
        metrics.reconcile_seconds,
    )
    requests = {f'method="{method}",code="{code}"': count for (method, code), count in metrics.requests.items()}
    text = "Requests to the API server by method and status; 0 without a response."
    page.counter("rest_client_requests_total", text, requests)
    applies = {f'kind="{kind}",result="{result}"': count for (kind, result), count in metrics.applies.items()}
    page.counter("minisgl_operator_apply_total", "Children applied, skipped without a change, or rejected.", applies)
    probes = {f'result="{result}"': count for result, count in metrics.probes.items()}
    page.counter("minisgl_operator_probes_total", "Status probes of launchers and frontends by result.", probes)
    page.gauge("minisgl_operator_models", "InferenceModels that the operator manages.", len(models))
    text = "1 if the condition Ready of the InferenceModel is True, with its reason."
    page.gauges("minisgl_operator_model_ready", text, dict(map(_ready, models)))
    text = "1 for each condition of an InferenceModel that is not as it should be, with its reason."
    page.gauges("minisgl_operator_model_condition", text, dict.fromkeys(chain.from_iterable(map(_faults, models)), 1))
    page.gauge("minisgl_operator_resync_age_seconds", "Time since the last full list.", resync_age)
    page.gauge("minisgl_operator_event_loop_lag_seconds", "Delay of the event loop.", loop_lag)
    page.gauge("minisgl_operator_leader", "1 while this process holds the Lease.", int(leader))
    return page.text()


def _ready(model: Manifest) -> tuple[str, int]:
    """Labels and value for the condition Ready of a model."""
    metadata, ready = model["metadata"], condition_of(model, "Ready") or {"status": "Unknown", "reason": "Unknown"}
    # None of these can contain a character that needs an escape.
    labels = f'namespace="{metadata["namespace"]}",name="{metadata["name"]}",reason="{ready["reason"]}"'
    return labels, int(ready["status"] == "True")


def _faults(model: Manifest) -> Iterator[str]:
    """Labels of the conditions with a reason to look at. Of a thousand models that serve there are none."""
    metadata = model["metadata"]
    for each in (model.get("status") or {}).get("conditions") or ():
        if each["reason"] not in _AS_IT_SHOULD_BE:
            own = f'type="{each["type"]}",status="{each["status"]}",reason="{each["reason"]}"'
            yield f'namespace="{metadata["namespace"]}",name="{metadata["name"]}",{own}'


class _Page:
    """Lines of the page. Labels are given as they are rendered."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, value: float, labels: str = "") -> None:
        self._metric(name, "gauge", text)
        self._lines.append(f"{name}{{{labels}}} {value:g}" if labels else f"{name} {value:g}")

    def gauges(self, name: str, text: str, values: dict[str, int]) -> None:
        self._many(name, "gauge", text, values)

    def counter(self, name: str, text: str, values: dict[str, int]) -> None:
        self._many(name, "counter", text, values)

    def _many(self, name: str, type: str, text: str, values: dict[str, int]) -> None:
        self._metric(name, type, text)
        self._lines += [f"{name}{{{labels}}} {value:g}" for labels, value in values.items()]

    def histogram(self, name: str, text: str, labels: str, counts: list[int], total: float) -> None:
        self._metric(name, "histogram", text)
        below = 0
        for edge, count in zip((*_RECONCILE_EDGES, float("inf")), counts, strict=True):
            below += count
            shown = "+Inf" if edge == float("inf") else f"{edge:g}"
            self._lines.append(f'{name}_bucket{{{labels},le="{shown}"}} {below}')
        self._lines += [f"{name}_sum{{{labels}}} {total:g}", f"{name}_count{{{labels}}} {below}"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _metric(self, name: str, type: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {type}"]
