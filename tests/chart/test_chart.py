"""What the chart makes of its values."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from minisgl.version import __version__
from minisgl_operator import resources
from minisgl_operator.config import Config, add_arguments, parse
from support.chart import CHART, MATRIX, NAMESPACE, HelmError, Object, helm, of_kind, pods, rendered

KUBERNETES = "1.36"
# Their definitions are not part of Kubernetes; the API server's tests check the first.
OTHER_KINDS = ("CustomResourceDefinition", "ServiceMonitor")


@pytest.fixture(scope="module", params=MATRIX, ids=str)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(MATRIX[request.param])


def test_lint_finds_nothing() -> None:
    for values in MATRIX.values():
        helm("lint", "--strict", str(CHART), values=values)


def test_objects_are_valid(objects: list[Object]) -> None:
    for each in objects:
        if each["kind"] not in OTHER_KINDS:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert len(
        {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects}
    ) == len(objects)


def test_pods_keep_to_little(objects: list[Object]) -> None:
    """The API server's tests hold them to the restricted Pod Security Standard."""
    for pod in pods(objects):
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert not container["image"].endswith(":latest")
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert set(container["resources"]["limits"]) == {"memory"}


def test_rights_are_spelt_out(objects: list[Object]) -> None:
    for role in of_kind(objects, "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
            assert not {"secrets", "pods/exec", "roles", "clusterroles"} & set(rule["resources"])
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        [role] = [role for role in objects if role["kind"] == binding["roleRef"]["kind"] and _same_place(role, binding)]
        assert role["metadata"]["name"] == binding["roleRef"]["name"]


def _same_place(role: Object, binding: Object) -> bool:
    keys = ("name", "namespace")
    return [role["metadata"].get(key) for key in keys] == [binding["metadata"].get(key) for key in keys]


def test_the_role_has_every_child_and_no_more() -> None:
    [role] = [role for role in of_kind(rendered({}), "ClusterRole") if role["metadata"]["name"] == "minisgl-operator"]
    children = {(child.group, child.plural) for child in resources.CHILDREN}
    written = {
        (group, resource)
        for rule in role["rules"]
        if "create" in rule["verbs"] and rule["resources"] != ["events"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert written == children


def test_a_list_of_namespaces_needs_no_right_in_the_others() -> None:
    objects = rendered(MATRIX["namespaced"])
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    places = {each["metadata"]["namespace"] for each in of_kind(objects, "Role")}
    assert places == {NAMESPACE, "team-a", "team-b"}
    [pod] = pods(objects)
    assert {"--watch-namespace=team-a", "--watch-namespace=team-b"} <= set(pod["containers"][0]["args"])


@pytest.mark.parametrize("name", MATRIX)
def test_the_operator_understands_its_arguments(name: str) -> None:
    [pod] = [pod for pod in pods(rendered(MATRIX[name])) if "serviceAccountName" in pod]
    command, *arguments = pod["containers"][0]["args"]
    assert command == "run"
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, {})
    parser.add_argument("--log-level")
    parser.add_argument("--log-format")
    config = parse(parser.parse_args(arguments), {})
    assert isinstance(config, Config)
    assert config.watch_namespaces == tuple(MATRIX[name].get("watchNamespaces", ()))
    assert config.metrics_port == pod["containers"][0]["ports"][0]["containerPort"]


def test_the_definition_outlives_the_release_unless_told_otherwise() -> None:
    def annotations(values: Object) -> Any:
        [definition] = of_kind(rendered(values), "CustomResourceDefinition")
        return definition["metadata"].get("annotations")

    assert annotations({}) == {"helm.sh/resource-policy": "keep"}
    assert annotations({"crds": {"keep": False}}) is None
    assert not of_kind(rendered(MATRIX["without definitions"]), "CustomResourceDefinition")


def test_images_come_from_the_registry_and_by_digest() -> None:
    [pod] = [pod for pod in pods(rendered(MATRIX["everything"])) if "serviceAccountName" in pod]
    mirror = "registry.example.com:5000/mirror/minisgl"
    assert pod["containers"][0]["image"] == f"{mirror}/operator@sha256:{'0' * 64}"
    assert f"--engine-image={mirror}/engine:1.2.3" in pod["containers"][0]["args"]


def test_the_version_is_the_program_s() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replicas": 2}, "replicas"),
        ({"operator": {"imag": {}}}, "imag"),
        ({"operator": {"replicas": "2"}}, "replicas"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"defaults": {"imagePullPolicy": "Sometimes"}}, "imagePullPolicy"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: Object, says: str) -> None:
    with pytest.raises(HelmError, match=says):
        rendered(values)


def _closed(schema: Any, path: str = "") -> None:
    if "properties" in schema:
        assert schema["additionalProperties"] is False, path
        for name, field in schema["properties"].items():
            _closed(field, f"{path}.{name}")


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    _closed(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator(schema).validate(values)
    assert _leaves(values) == {
        path for path in _schema_leaves(schema, schema["definitions"]) if not path.startswith(".global")
    }


def _leaves(values: Any, path: str = "") -> set[str]:
    if isinstance(values, dict) and values and path not in (".operator.resources",):
        return {leaf for name, value in values.items() for leaf in _leaves(value, f"{path}.{name}")}
    return {path}


def _schema_leaves(schema: Any, definitions: Any, path: str = "") -> set[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/definitions/")]
    if "properties" in schema and path not in (".operator.resources",):
        inner = schema["properties"].items()
        return {leaf for name, field in inner for leaf in _schema_leaves(field, definitions, f"{path}.{name}")}
    return {path}
