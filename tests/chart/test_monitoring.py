"""Alerts, dashboard and monitors of the chart."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.prometheus import CHART, PROGRAMS, queries
from minisgl_operator.render import render
from support.cluster.chart import MATRIX, NAMESPACE, of_kind, rendered
from support.cluster.inference_models import DEFAULTS, inference_model

RULES = CHART / "rules/minisgl.yaml"
MOST_CONFIG_MAP_BYTES = 1 << 20


def promtool(*arguments: str | Path) -> str:
    """Output of promtool. `make test-kubernetes` unpacks it."""
    done = subprocess.run([PROGRAMS / "promtool", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_alerts_fire_for_faults_and_for_nothing_else(tmp_path: Path) -> None:
    """With the rules of a release, beside which another one has a leader."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(rules_of_a_release()))
    promtool("check", "rules", rules)
    text = (Path(__file__).parent / "alerts_test.yaml").read_text()
    (tmp_path / "test.yaml").write_text(text.replace("RULES", str(rules)))
    promtool("test", "rules", tmp_path / "test.yaml")


def rules_of_a_release() -> Any:
    [rule] = of_kind(rendered(MATRIX["everything"]), "PrometheusRule")
    return rule["spec"]


def test_each_alert_says_what_to_do() -> None:
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_chart_has_the_rules_for_its_own_operator() -> None:
    [service] = [each for each in of_kind(rendered({}), "Service") if each["spec"]["ports"][0]["name"] == "metrics"]
    own = f'{{job="{service["metadata"]["name"]}", namespace="{NAMESPACE}"}}'
    wanted = RULES.read_text().replace("(minisgl_operator_leader ==", f"(minisgl_operator_leader{own} ==")
    assert own in wanted
    assert rules_of_a_release() == yaml.safe_load(wanted)


def test_the_chart_has_the_dashboard_unchanged() -> None:
    objects = rendered(MATRIX["everything"])
    [dashboard] = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-dashboards")]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    text = dashboard["data"]["minisgl.json"]
    assert len(text) < MOST_CONFIG_MAP_BYTES
    assert json.loads(text) == json.loads((CHART / "dashboards/minisgl.json").read_text())


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CHART / "dashboards/minisgl.json").read_text())["panels"]
    return found


def test_panels_of_the_dashboard_do_not_overlap_and_have_descriptions() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["description"]
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len(queries()) > 20


def test_numbers_of_the_dashboard_have_their_own_colors() -> None:
    """Without them, Grafana shows each number from 80 on in red, and each smaller one in green."""
    for panel in panels():
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            assert defaults["color"]["mode"] == "fixed" or defaults["thresholds"]["steps"], panel["title"]


def test_overrides_of_the_dashboard_match_series_by_their_legend() -> None:
    for panel in panels():
        legends = [target["legendFormat"] for target in panel["targets"]]
        for override in panel["fieldConfig"]["overrides"]:
            pattern = override["matcher"]["options"].strip("/")
            assert any(re.search(pattern, legend) for legend in legends), (panel["title"], pattern)


def test_rejections_are_not_shown_as_errors_too() -> None:
    [excluded] = re.findall(r'code!~"([^"]+)"', queries()["Requests per second B"])
    page = (CHART.parent / "docs/api.md").read_text()
    assert set(excluded.split("|")) == set(re.findall(r"^\| 429 \| `(\w+)`", page, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("default", {"any": True}), ("namespaced", {"matchNames": ["team-a", "team-b"]})],
)
def test_frontends_of_the_watched_namespaces_are_scraped(name: str, expected: dict[str, object]) -> None:
    [monitor] = of_kind(rendered(MATRIX[name] | {"metrics": {"podMonitor": {"enabled": True}}}), "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == expected
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "interval": "30s"}]


def test_the_monitor_selects_frontends_by_their_labels_and_scrapes_a_port_that_they_have() -> None:
    [monitor] = of_kind(rendered({"metrics": {"podMonitor": {"enabled": True}}}), "PodMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    specs = [each.get("spec", {}) for each in render(inference_model(), DEFAULTS)]
    templates = [spec["template"] for spec in specs if "template" in spec]
    selected = [each for each in templates if wanted <= each["metadata"]["labels"].items()]
    assert [each["spec"]["containers"][0]["name"] for each in selected] == ["frontend"]
    ports = {port["name"] for port in selected[0]["spec"]["containers"][0]["ports"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports


def test_every_alert_is_seen_to_fire() -> None:
    tested = (Path(__file__).parent / "alerts_test.yaml").read_text()
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert rule["alert"] in tested, rule["alert"]


def test_the_operators_metrics_keep_the_namespaces_of_models() -> None:
    [monitor] = of_kind(rendered(MATRIX["everything"]), "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True
