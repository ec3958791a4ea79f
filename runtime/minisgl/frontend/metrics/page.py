"""A page of metrics in the text format of Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from minisgl.frontend.metrics.process import ProcessUse
from minisgl.frontend.metrics.types import Histogram, HttpRequests

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Page:
    """A page under construction. `labels` are those of every sample."""

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def counter(self, name: str, text: str, value: float) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} counter\n{name}{{{self._labels}}} {value}")

    def gauge(self, name: str, text: str, value: float, labels: str = "") -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} gauge\n{name}{{{self._labels}{labels}}} {value}")

    def labelled(self, name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")
        self._lines += [
            f'{name}{{{self._labels},{label}="{escape(key)}"}} {value}' for key, value in sorted(values.items())
        ]

    def samples(self, name: str, kind: str, text: str, values: Sequence[tuple[Mapping[str, str], float]]) -> None:
        """One sample for each set of labels in `values`."""
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")
        for labels, value in values:
            own = "".join(f',{key}="{escape(text)}"' for key, text in labels.items())
            self._lines.append(f"{name}{{{self._labels}{own}}} {value}")

    def histogram(self, name: str, text: str, edges: tuple[float, ...], counts: Sequence[int], total: float) -> None:
        """`counts`: one for each edge, then one for larger values."""
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} histogram")
        self._lines.append(_filled(_histogram_template(name, self._labels, edges), counts, total))

    def histograms(self, name: str, text: str, values: Mapping[str, Histogram]) -> None:
        """One histogram for each text of labels in `values`."""
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} histogram")
        for own, each in values.items():
            labels = self._labels + own
            # Most of the page, and only the values change.
            if each.template is None or each.template[0] != labels:
                each.template = labels, _histogram_template(name, labels, each.edges)
            self._lines.append(_filled(each.template[1], each.counts, each.sum))

    def http(self, requests: HttpRequests) -> None:
        totals = [
            ({"handler": route, "method": method, "status": status}, count)
            for (route, method, status), count in requests.totals.items()
        ]
        self.samples(requests.total_name, "counter", "Answered HTTP requests.", totals)
        times = {f',handler="{route}",method="{method}"': each for (route, method), each in requests.seconds.items()}
        self.histograms(requests.seconds_name, "Time to the end of the response.", times)

    def process(self, use: ProcessUse) -> None:
        self.gauge("process_start_time_seconds", "Start of this process, in Unix time.", use.started_at)
        self.counter("process_cpu_seconds_total", "CPU time of this process.", use.cpu_seconds)
        self.gauge("process_resident_memory_bytes", "Memory of this process.", use.resident_bytes)
        self.gauge("process_open_fds", "Open files of this process.", use.open_files)
        self.gauge("process_max_fds", "Limit of open files of this process.", use.max_files)

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()


@functools.lru_cache(16)
def _histogram_template(name: str, labels: str, edges: tuple[float, ...]) -> str:
    """Return the lines of a histogram with `%s` in the place of its values. Those of the engine's are kept here."""
    begins = [f'{name}_bucket{{{labels},le="{edge}"}}' for edge in (*edges, "+Inf")]
    begins += [f"{name}_count{{{labels}}}", f"{name}_sum{{{labels}}}"]
    return "\n".join(begin.replace("%", "%%") + " %s" for begin in begins)


def _filled(template: str, counts: Sequence[int], total: float) -> str:
    below = tuple(accumulate(counts))
    return template % (*below, below[-1], total)


def escape(value: str) -> str:
    """Return the value of a label as a page writes it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
