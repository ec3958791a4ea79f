"""The kustomize tree renders the same objects as the chart, and the samples are valid InferenceModels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl_operator.api.types import InferenceModel
from support.cluster.chart import NAMESPACE, SAMPLES, Object, kustomized, of_kind, rendered
from support.cluster.kubernetes_schemas import validate

# Labels of the tool or its release.
_TOOL_LABELS = (
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "helm.sh/chart",
)


@pytest.fixture(scope="module")
def tree() -> list[Object]:
    return kustomized()


def _without_tool(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_tool(each) for key, each in value.items() if key not in _TOOL_LABELS}
        if "helm.sh/resource-policy" in kept.get("annotations", {}):
            del kept["annotations"]
        return kept
    return [_without_tool(each) for each in value] if isinstance(value, list) else value


def _by_identity(objects: list[Object]) -> dict[tuple[str, str | None, str], Object]:
    return {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): _without_tool(each)
        for each in objects
        if each["kind"] != "Namespace"
    }


def test_same_objects_as_the_chart(tree: list[Object]) -> None:
    """This includes permissions and pod security."""
    ours, charts = _by_identity(tree), _by_identity(rendered({}))
    assert ours.keys() == charts.keys()
    for identity, each in ours.items():
        if identity[0] == "CustomResourceDefinition":
            assert each["spec"] == charts[identity]["spec"]
        else:
            assert each == charts[identity]


def test_the_namespace_enforces_the_restricted_profile(tree: list[Object]) -> None:
    [namespace] = of_kind(tree, "Namespace")
    assert namespace["metadata"]["name"] == NAMESPACE
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    validate(namespace)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_inference_models_with_an_explanation(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    model, *routes = yaml.safe_load_all(text)
    InferenceModel.parse(model)
    assert not routes or model["spec"]["frontend"]["auth"], "published without a key"


def test_samples_publish_the_api_alone() -> None:
    routes = [each for path in SAMPLES for each in list(yaml.safe_load_all(path.read_text()))[1:]]
    paths = {
        path["path"]["value"] if "value" in path["path"] else path["path"]
        for each in routes
        for rule in each["spec"]["rules"]
        for path in rule.get("matches") or rule["http"]["paths"]
    }
    assert {each["kind"] for each in routes} == {"Ingress", "HTTPRoute"}
    assert paths == {"/v1"}
