"""A Prometheus server over pages of metrics that were scraped before, to run queries of the chart against them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.installation import ROOT

PROGRAMS: Final = ROOT / ".cache/prometheus/usr/bin"
CHART: Final = ROOT / "charts"
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_METRIC: Final = re.compile(r"\b(?:vllm:|minisgl:|minisgl_)\w+")
_WINDOW: Final = "5m"
_START_SECONDS: Final = 60


@dataclass
class Pages:
    """Samples of all pages, as OpenMetrics."""

    lines: list[str] = field(default_factory=list)
    declared: set[str] = field(default_factory=set)
    """Names of metrics, also of those without samples."""

    def add(self, page: str, at: float, labels: Mapping[str, str]) -> None:
        """Add a page that was scraped `at` this time, in seconds, from a target with these labels. As with honorLabels,
        labels of the page win."""
        for line in page.splitlines():
            if line.startswith("# TYPE "):
                self.declared.add(line.split()[2])
            if (found := _SAMPLE.match(line)) is None:
                continue
            name, own, value = found.groups()
            own = own or ""
            added = [f'{key}="{text}"' for key, text in labels.items() if f'{key}="' not in own]
            self.lines.append(f"{name}{{{','.join([*filter(None, [own]), *added])}}} {value} {at:.3f}")


def metrics_of(query: str) -> set[str]:
    """Names of the metrics in a query, without the suffixes of histograms."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in _METRIC.findall(query)}


def queries() -> dict[str, str]:
    """All queries of the chart's alerts and dashboard by title. Variables of the dashboard stand for everything."""
    import yaml

    groups = yaml.safe_load((CHART / "rules/minisgl.yaml").read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    for panel in json.loads((CHART / "dashboards/minisgl.json").read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", _WINDOW)
            found[f"{panel['title']} {target['refId']}"] = query.replace("$namespace", ".*").replace("$model", ".*")
    return found


@contextmanager
def prometheus(pages: Pages, folder: Path) -> Iterator[Prometheus]:
    """A server with the samples, which ends with the context."""
    data = folder / "data"
    source = folder / "samples.om"
    # Samples of a series must be in the order of time.
    source.write_text("\n".join([*sorted(pages.lines, key=lambda line: float(line.rsplit(" ", 1)[1])), "# EOF"]) + "\n")
    command: list[str | Path] = [PROGRAMS / "promtool", "tsdb", "create-blocks-from", "openmetrics", source, data]
    subprocess.run(command, check=True, capture_output=True)
    config = folder / "prometheus.yaml"
    config.write_text("{}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [
                PROGRAMS / "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address={address}",
                "--storage.tsdb.retention.time=10y",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            made = Prometheus(f"http://{address}")
            made.wait(server)
            yield made
        finally:
            server.terminate()
            server.wait(30)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, query: str, at: float) -> list[Any]:
        """Result of a query. Raises AssertionError with the message of an invalid one."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query, 'time': f'{at:.3f}'})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            body = json.load(error)
        assert body["status"] == "success", f"{query}: {body}"
        result: list[Any] = body["data"]["result"]
        return result

    def wait(self, server: subprocess.Popen[bytes]) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "prometheus did not start"
                time.sleep(0.1)
