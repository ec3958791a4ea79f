"""Objects that the chart renders from its values."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from minisgl.version import __version__
from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.api.pod_template import RESERVED_LABEL_PREFIXES, RESERVED_LABELS
from minisgl_operator.api.upgrades import UpgradeSettings
from minisgl_operator.shell import resources
from minisgl_operator.shell.config import Config, add_arguments, parse
from support.cluster import chart_readme
from support.cluster.chart import (
    CHART,
    MATRIX,
    NAMESPACE,
    HelmError,
    Object,
    helm,
    of_kind,
    operator_pod,
    pods,
    rendered,
)
from support.cluster.kubernetes_schemas import validate

# Their CRDs are not part of Kubernetes; tests on the API server check the first.
OTHER_KINDS = ("CustomResourceDefinition", "ServiceMonitor", "PodMonitor", "PrometheusRule")


@pytest.fixture(scope="module", params=MATRIX, ids=str)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(MATRIX[request.param])


def test_lint_finds_nothing() -> None:
    for values in MATRIX.values():
        helm("lint", "--strict", str(CHART), values=values)


def test_objects_are_valid(objects: list[Object]) -> None:
    for each in objects:
        if each["kind"] not in OTHER_KINDS:
            validate(each)
    assert len(
        {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects}
    ) == len(objects)


def test_pods_have_minimal_privileges(objects: list[Object]) -> None:
    """Tests on the API server check the restricted profile of Pod Security."""
    for pod in pods(objects):
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert not container["image"].endswith(":latest")
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert set(container["resources"]["limits"]) == {"memory"}


def test_permissions_are_listed_explicitly(objects: list[Object]) -> None:
    for role in of_kind(objects, "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
            assert not {"pods/exec", "roles", "clusterroles"} & set(rule["resources"])
            if "secrets" in rule["resources"] and not _of_gateway(role):
                assert set(rule["verbs"]) == {"create", "update"}, "Secrets of others must not be read"
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        [role] = [role for role in objects if role["kind"] == binding["roleRef"]["kind"] and _same_place(role, binding)]
        assert role["metadata"]["name"] == binding["roleRef"]["name"]


def _of_gateway(each: Object) -> bool:
    return bool(each["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway")


def _same_place(role: Object, binding: Object) -> bool:
    keys = ("name", "namespace")
    return [role["metadata"].get(key) for key in keys] == [binding["metadata"].get(key) for key in keys]


def test_the_role_covers_exactly_the_kinds_of_children() -> None:
    [role] = [role for role in of_kind(rendered({}), "ClusterRole") if role["metadata"]["name"] == "minisgl-operator"]
    children = {(child.group, child.plural) for child in resources.CHILDREN}
    written = {
        (group, resource)
        for rule in role["rules"]
        if "create" in rule["verbs"] and rule["resources"] not in (["events"], ["pods"], ["secrets"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert written == children | {(resources.HTTP_ROUTE.group, resources.HTTP_ROUTE.plural)}


@pytest.mark.parametrize(("name", "kind"), [("default", "ClusterRole"), ("namespaced", "Role")])
def test_dry_runs_of_pods_can_be_turned_off(name: str, kind: str) -> None:
    def verbs(values: Object) -> set[str]:
        rules = [rule for role in of_kind(rendered(values), kind) for rule in role["rules"]]
        return {verb for rule in rules if "pods" in rule["resources"] for verb in rule["verbs"]}

    assert verbs(MATRIX[name]) == {"list", "watch", "delete", "create"}
    assert verbs(MATRIX[name] | {"rollouts": {"dryRun": False}}) == {"list", "watch", "delete"}


def test_a_list_of_namespaces_needs_no_permissions_in_other_ones() -> None:
    objects = rendered(MATRIX["namespaced"] | {"nodes": {"read": False}})
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    places = {each["metadata"]["namespace"] for each in of_kind(objects, "Role")}
    assert places == {NAMESPACE, "team-a", "team-b"}
    [pod] = pods(objects)
    assert {"--watch-namespace=team-a", "--watch-namespace=team-b"} <= set(pod["containers"][0]["args"])


@pytest.mark.parametrize(
    ("name", "role"), [("default", "minisgl-operator-nodes"), ("namespaced", f"minisgl-operator-nodes-{NAMESPACE}")]
)
def test_nodes_may_be_read_and_nothing_else_of_the_cluster(name: str, role: str) -> None:
    found = {each["metadata"]["name"]: each["rules"] for each in of_kind(rendered(MATRIX[name]), "ClusterRole")}
    assert found[role] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}]
    without = of_kind(rendered(MATRIX[name] | {"nodes": {"read": False}}), "ClusterRole")
    assert not [rule for each in without for rule in each["rules"] if "nodes" in rule["resources"]]


@pytest.mark.parametrize("name", MATRIX)
def test_the_arguments_of_the_operator_are_valid(name: str) -> None:
    pod = operator_pod(rendered(MATRIX[name]))
    command, *arguments = pod["containers"][0]["args"]
    assert command == "run"
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, {})
    parser.add_argument("--log-level")
    parser.add_argument("--log-format")
    config = parse(parser.parse_args(arguments), {})
    assert isinstance(config, Config)
    assert config.watch_namespaces == tuple(MATRIX[name].get("watchNamespaces", ()))
    secrets = MATRIX[name].get("defaults", {}).get("imagePullSecrets", ())
    assert config.defaults.image_pull_secrets == tuple(secret["name"] for secret in secrets)
    assert config.defaults.gateway == ("minisgl" if MATRIX[name].get("gateway") else None)
    assert config.metrics_port == pod["containers"][0]["ports"][0]["containerPort"]


def _expanded(argument: str) -> str:
    """The argument as the kubelet passes it on."""
    return re.sub(r"\$(\$|\(POD_NAMESPACE\))", lambda found: "$" if found[1] == "$" else NAMESPACE, argument)


def _models(values: Object) -> ModelDefaults:
    """Defaults that an operator of the release has."""
    pod = operator_pod(rendered(values))
    found = [each for each in pod["containers"][0]["args"] if each.startswith("--defaults=")]
    return ModelDefaults.read(_expanded(found[0].partition("=")[2])) if found else ModelDefaults()


def test_defaults_of_models_reach_the_operator() -> None:
    assert _models({}) == ModelDefaults()
    given = {
        name: value
        for name, value in MATRIX["everything"]["defaults"].items()
        if name not in ("engineImage", "imagePullPolicy", "imagePullSecrets")
    }
    assert _models(MATRIX["everything"]) == ModelDefaults.model_validate(given)


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"waves": [{"name": "a", "selector": {}}]}, {"waves": [{"name": "a", "selector": {}}], "maxModels": 1}),
        ({"maxModels": 3}, {"maxModels": 3}),
        ({"window": {"startHour": 22}}, {"window": {"startHour": 22, "endHour": 24}}),
        ({"window": {"days": ["Sunday"]}}, {"window": {"days": ["Sunday"]}}),
    ],
)
def test_each_value_of_rollout_alone_makes_upgrades_go_in_waves(values: Object, settings: Object) -> None:
    assert _models({"defaults": {"rollout": values}}).rollout == UpgradeSettings.model_validate(settings)


@pytest.mark.parametrize("identity", ["Fixed", "Namespace"])
def test_pods_of_the_release_have_the_identity_of_models(identity: str) -> None:
    for pod in pods(rendered({"defaults": {"podIdentity": identity}, "test": {"model": "demo"}})):
        chosen = pod["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"}
        assert bool(chosen) == (identity == "Fixed")
        assert pod["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("key", [*RESERVED_LABELS, *(f"{prefix}x" for prefix in RESERVED_LABEL_PREFIXES)])
def test_reserved_labels_are_rejected_when_the_chart_is_installed(key: str) -> None:
    with pytest.raises(HelmError, match="/defaults/fetch/labels/"):
        rendered({"defaults": {"fetch": {"labels": {key: "a"}}}})


def test_the_crd_outlives_the_release_by_default() -> None:
    def annotations(values: Object) -> Any:
        [definition] = of_kind(rendered(values), "CustomResourceDefinition")
        return definition["metadata"].get("annotations")

    assert annotations({}) == {"helm.sh/resource-policy": "keep"}
    assert annotations({"crds": {"keep": False}}) is None
    assert not of_kind(rendered(MATRIX["without definitions"]), "CustomResourceDefinition")


@pytest.mark.parametrize(
    ("architecture", "selector", "expected"),
    [
        ("amd64", {}, {"kubernetes.io/arch": "amd64"}),
        ("", {}, None),
        ("arm64", {"pool": "a"}, {"kubernetes.io/arch": "arm64", "pool": "a"}),
        ("amd64", {"kubernetes.io/arch": "arm64"}, {"kubernetes.io/arch": "arm64"}),
    ],
)
def test_pods_of_the_release_go_to_nodes_that_can_run_their_images(
    architecture: str, selector: Object, expected: Object | None
) -> None:
    image = {"architecture": architecture}
    values = {"operator": {"image": image, "nodeSelector": selector}, "test": {"model": "demo"}}
    operator, probe = pods(rendered(values | {"defaults": {"frontendImage": image, "engineImage": image}}))
    if "chat" in {each["name"] for each in operator["containers"]}:
        operator, probe = probe, operator
    assert operator.get("nodeSelector") == expected
    assert probe.get("nodeSelector") == ({"kubernetes.io/arch": architecture} if architecture else None)
    [container] = operator["containers"]
    given = [each for each in container["args"] if "-architecture=" in each]
    flags = [f"--engine-architecture={architecture}", f"--frontend-architecture={architecture}"]
    assert given == (flags if architecture else [])


def test_images_come_from_the_registry_and_by_digest() -> None:
    pod = operator_pod(rendered(MATRIX["everything"]))
    mirror = "registry.example.com:5000/mirror/minisgl"
    assert pod["containers"][0]["image"] == f"{mirror}/operator@sha256:{'0' * 64}"
    assert f"--engine-image={mirror}/engine:1.2.3" in pod["containers"][0]["args"]


def test_common_labels_are_on_every_object_and_pod() -> None:
    objects = rendered(MATRIX["everything"])
    templates = [each["spec"]["template"] for each in of_kind(objects, "Deployment")]
    assert [each for each in (*objects, *templates) if each["metadata"]["labels"].get("team") != "platform"] == []


class _EachKeyOnce(yaml.SafeLoader):
    """Some tools that read the output of helm, such as kustomize, reject a mapping with a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        return super().construct_mapping(node, deep)


def test_common_labels_override_all_but_selector_labels() -> None:
    labels = {"app.kubernetes.io/part-of": "platform", "app.kubernetes.io/name": "mine", "empty": ""}
    values = {
        "commonLabels": labels,
        "operator": {"podLabels": labels | {"app.kubernetes.io/part-of": "pods"}},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": labels}},
        "test": {"model": "demo"},
    }
    text = helm("template", "minisgl", str(CHART), "--namespace", NAMESPACE, values=values)
    objects = [each for each in yaml.load_all(text, _EachKeyOnce) if each]
    for each in objects:
        found = each["metadata"]["labels"]
        assert found["app.kubernetes.io/part-of"] == "platform" and found["empty"] == ""
        assert found["app.kubernetes.io/name"] == ("minisgl-test" if each["kind"] == "Pod" else "minisgl-operator")
    [deployment] = of_kind(objects, "Deployment")
    of_pods = deployment["spec"]["template"]["metadata"]["labels"]
    assert of_pods["app.kubernetes.io/part-of"] == "pods"
    assert deployment["spec"]["selector"]["matchLabels"].items() <= of_pods.items()


@pytest.mark.parametrize("override", ["", "on"])
def test_names_that_look_like_numbers_or_booleans_stay_strings(override: str) -> None:
    values = {
        "crds": {"enabled": False},
        "fullnameOverride": override,
        "watchNamespaces": ["123", "off"],
        "serviceAccount": {"name": "007"},
        "operator": {"priorityClassName": "1000"},
        "test": {"model": "demo", "apiKeysSecret": "456", "apiKeysSecretKey": "7"},
    }
    text = helm("template", "12", str(CHART), "--namespace", "99", values=values)
    for each in yaml.safe_load_all(text):
        if each:
            validate(each)


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("minisgl.prod", "minisgl-prod-operator-metrics"),
        ("12", "release-12-minisgl-operator-metrics"),
        ("2.minisgl", "release-2-minisgl-operator-metrics"),
        ("3-minisgl-operator", "release-3-minisgl-operator-metrics"),
        ("1" * 53, f"release-{'1' * 24}-minisgl-operator-metrics"),
        ("4minisgl-operator" + "o" * 36, f"release-4minisgl-operator{'o' * 25}-metrics"),
    ],
)
def test_every_release_name_gives_valid_service_names(release: str, name: str) -> None:
    [service] = of_kind(rendered({}, release=release), "Service")
    assert service["metadata"]["name"] == name
    # A DNS-1035 label, which the schemas of Kubernetes do not require.
    assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)


@pytest.mark.parametrize(
    ("values", "secrets"),
    [
        ({}, None),
        ({"operator": {"imagePullSecrets": [{"name": "a"}]}}, [{"name": "a"}]),
        (
            {"operator": {"imagePullSecrets": [{"name": "a"}]}, "defaults": {"imagePullSecrets": [{"name": "b"}]}},
            [{"name": "b"}],
        ),
    ],
)
def test_the_test_s_pod_can_pull_its_image(values: Object, secrets: list[Object] | None) -> None:
    [pod] = of_kind(rendered(values | {"test": {"model": "demo"}}), "Pod")
    assert pod["spec"].get("imagePullSecrets") == secrets


def test_two_releases_in_one_namespace_have_separate_leases() -> None:
    leases = set()
    for name in ("team-a", "team-b"):
        objects = rendered({"crds": {"enabled": False}, "watchNamespaces": [name]}, release=name)
        [pod] = pods(objects)
        [lease] = [each.partition("=")[2] for each in pod["containers"][0]["args"] if each.startswith("--lease-name=")]
        [rules] = [role["rules"] for role in of_kind(objects, "Role") if role["metadata"]["name"].endswith("-lease")]
        assert [(rule.get("resourceNames"), rule["verbs"]) for rule in rules] == [
            (None, ["create"]),
            ([lease], ["get", "update"]),
        ]
        leases.add(lease)
    assert len(leases) == 2


def test_releases_of_one_name_in_two_namespaces_share_no_object_of_the_cluster() -> None:
    def in_the_cluster(namespace: str) -> set[tuple[str, str]]:
        values = {"crds": {"enabled": False}, "watchNamespaces": [namespace]}
        text = helm("template", "minisgl", str(CHART), "--namespace", namespace, values=values)
        metadata = [(each["kind"], each["metadata"]) for each in yaml.safe_load_all(text) if each]
        return {(kind, each["name"]) for kind, each in metadata if "namespace" not in each}

    found = in_the_cluster("team-a")
    roles = {("ClusterRole", f"minisgl-operator-{suffix}-team-a") for suffix in ("nodes", "view", "edit")}
    assert found == {("ClusterRoleBinding", "minisgl-operator-nodes-team-a"), *roles}
    assert not found & in_the_cluster("team-b")


def test_the_chart_version_matches_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert chart["version"] == re.sub(r"\.dev(\d+)$", r"-dev.\1", __version__), "Helm takes only SemVer"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"replicas": 2}, "replicas"),
        ({"operator": {"imag": {}}}, "imag"),
        ({"operator": {"replicas": "2"}}, "replicas"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"defaults": {"imagePullPolicy": "Sometimes"}}, "imagePullPolicy"),
        ({"defaults": {"imagePullSecrets": [{"name": "a: b"}]}}, "imagePullSecrets"),
        ({"defaults": {"podIdentity": "Random"}}, "podIdentity"),
        ({"defaults": {"engine": {"tolerations": [{"keys": "a"}]}}}, "tolerations"),
        ({"defaults": {"engine": {"labels": {"a": "b c"}}}}, "labels"),
        ({"defaults": {"frontend": {"runtimeClassName": "a"}}}, "runtimeClassName"),
        ({"defaults": {"frontend": {"annotations": {"serving.minisgl.io/a": ""}}}}, "annotations"),
        ({"defaults": {"hub": {"endpoint": "hub.example.com"}}}, "hub/endpoint"),
        ({"defaults": {"s3": {"endpoint": "minio:9000"}}}, "s3/endpoint"),
        ({"defaults": {"s3": {"secret": "minio"}}}, "s3"),
        ({"defaults": {"hub": {"tokenSecret": {"names": "a"}}}}, "hub/tokenSecret"),
        ({"defaults": {"route": {"parentRefs": [{"namespace": "a"}]}}}, "route/parentRefs/0"),
        ({"defaults": {"proxy": {"ftp": "a"}}}, "proxy"),
        ({"defaults": {"traces": {"endpoint": "collector:4317"}}}, "traces/endpoint"),
        ({"defaults": {"traces": {"endpoint": "http://collector:65536"}}}, "traces/endpoint"),
        ({"defaults": {"traces": {"endpoint": "http://me:secret@collector:4318"}}}, "traces/endpoint"),
        ({"defaults": {"traces": {"sampling": 2}}}, "traces/sampling"),
        ({"defaults": {"networkPolicy": {"monitoringNamespaces": "a"}}}, "monitoringNamespaces"),
        ({"defaults": {"rollout": {"maxModels": -1}}}, "rollout/maxModels"),
        ({"defaults": {"rollout": {"waves": [{"name": "a"}]}}}, "rollout/waves/0"),
        ({"defaults": {"rollout": {"waves": [{"name": "others", "selector": {}}]}}}, "rollout/waves/0/name"),
        ({"defaults": {"rollout": {"waves": [{"name": "a", "selector": {"stage": "b"}}]}}}, "waves/0/selector"),
        (
            {
                "defaults": {
                    "rollout": {
                        "waves": [{"name": "a", "selector": {"matchExpressions": [{"key": "b", "operator": "In"}]}}]
                    }
                }
            },
            "values",
        ),
        ({"defaults": {"rollout": {"window": {"days": ["Mon"]}}}}, "window/days"),
        ({"defaults": {"rollout": {"window": {"endHour": 25}}}}, "window/endHour"),
        ({"serviceAccount": {"create": False}}, "serviceAccount/name"),
        ({"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}, "metrics/enabled': value must be true"),
        ({"metrics": {"enabled": None, "serviceMonitor": {"enabled": True}}}, "'enabled'"),
        ({"defaults": {"frontend": {"minReplicas": 0}}}, "gateway/enabled': value must be true"),
        ({"metrics": {"rules": {"enabled": True}}}, "metrics/serviceMonitor/enabled': value must be true"),
        ({"metrics": {"rules": {"enabled": True}, "serviceMonitor": {"enabled": None}}}, "'enabled'"),
        ({"metrics": {"rules": {"enabled": True}, "serviceMonitor": None}}, "'serviceMonitor'"),
        ({"fullnameOverride": "1st"}, "fullnameOverride"),
    ],
)
def test_a_wrong_value_is_rejected_by_name(values: Object, error: str) -> None:
    with pytest.raises(HelmError, match=error):
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


@pytest.mark.parametrize(
    ("storage", "said"), [("", "the\ncluster's default, which is often block"), ("nfs", "This release uses\nnfs.")]
)
def test_the_notes_say_what_storage_a_model_needs(storage: str, said: str) -> None:
    values = {"defaults": {"storageClassName": storage}}
    notes = helm("install", "some", str(CHART), "--dry-run=client", values=values).partition("NOTES:")[2]
    assert "ReadWriteMany" in notes and "ReadWriteOnce" in notes
    assert said in notes


def test_every_value_has_a_description() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def without_description(section: Any, path: str) -> list[str]:
        found = [] if section.get("description") else [path]
        inner = schema["definitions"][section["$ref"].removeprefix("#/definitions/")] if "$ref" in section else section
        return found + [
            each
            for name, field in inner.get("properties", {}).items()
            for each in without_description(field, f"{path}.{name}")
        ]

    assert without_description(schema, "") == [""], "the schema itself has a title"


def test_the_readme_lists_all_values_with_their_defaults() -> None:
    assert chart_readme.PAGE.read_text() == chart_readme.render(), (
        "run `PYTHONPATH=tests .venv/bin/python -m support.cluster.chart_readme`"
    )


@pytest.mark.parametrize("left_out", [("rules",), ("rules", "enabled")], ids=".".join)
def test_rules_that_are_left_out_need_no_service_monitor(left_out: tuple[str, ...]) -> None:
    _validate_without(left_out, {"enabled": True})


@pytest.mark.parametrize("left_out", [("serviceMonitor",), ("serviceMonitor", "enabled")], ids=".".join)
def test_a_service_monitor_that_is_left_out_needs_no_metrics(left_out: tuple[str, ...]) -> None:
    _validate_without(left_out, {"enabled": False})


@pytest.mark.parametrize("name", ["serviceMonitor", "podMonitor", "rules", "dashboards"])
def test_a_part_of_the_metrics_that_is_null_is_left_out(name: str) -> None:
    kinds = {"serviceMonitor": "ServiceMonitor", "podMonitor": "PodMonitor", "rules": "PrometheusRule"}
    objects = rendered({"metrics": {name: None}})
    assert not of_kind(objects, kinds.get(name, "ConfigMap"))
    assert [each for each in of_kind(objects, "Service") if each["spec"]["ports"][0]["name"] == "metrics"]


def _validate_without(left_out: tuple[str, ...], metrics: Object) -> None:
    """Validate the default values with these of `metrics`, and without the one that a user sets to null."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["metrics"] |= metrics
    *parents, name = left_out
    section = values["metrics"]
    for parent in parents:
        section = section[parent]
    # Helm removes values that are null before it validates them.
    del section[name]
    jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text())).validate(values)


_WHOLE = (".operator.resources", ".gateway.resources")


def _leaves(values: Any, path: str = "") -> set[str]:
    if isinstance(values, dict) and values and path not in _WHOLE:
        return {leaf for name, value in values.items() for leaf in _leaves(value, f"{path}.{name}")}
    return {path}


def _schema_leaves(schema: Any, definitions: Any, path: str = "") -> set[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/definitions/")]
    if "properties" in schema and path not in _WHOLE:
        inner = schema["properties"].items()
        return {leaf for name, field in inner for leaf in _schema_leaves(field, definitions, f"{path}.{name}")}
    return {path}
