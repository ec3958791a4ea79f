"""Objects of the gateway: its permissions, who reaches it, and what it reaches."""

from __future__ import annotations

from typing import Any

import pytest

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

ENABLED: Object = {"gateway": {"enabled": True}}
OF_TEAMS: Object = {"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregate": False}} | ENABLED


def gateway(values: Object, *kinds: str) -> list[Object]:
    """The gateway's objects of these kinds."""
    labels = "app.kubernetes.io/component"
    return [each for each in of_kind(rendered(values), *kinds) if each["metadata"]["labels"][labels] == "gateway"]


def container(values: Object) -> Object:
    [found] = [each for pod in pods(rendered(values)) for each in pod["containers"] if each["name"] == "gateway"]
    return found


def policy(values: Object) -> Object:
    [found] = gateway(values, "NetworkPolicy")
    return dict(found["spec"])


def test_there_is_no_gateway_by_default() -> None:
    assert not [each for each in rendered({}) if "gateway" in each["metadata"]["name"]]


def test_two_pods_that_drains_evict_one_by_one() -> None:
    [deployment], [budget] = gateway(ENABLED, "Deployment"), gateway(ENABLED, "PodDisruptionBudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert (deployment["metadata"]["name"], deployment["spec"]["replicas"]) == ("minisgl-gateway", 2)
    assert labels["app.kubernetes.io/component"] == "gateway"
    assert budget["spec"]["maxUnavailable"] == 1
    [service] = gateway(ENABLED, "Service")
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()


def test_its_pods_prefer_different_nodes_also_where_no_node_has_a_zone() -> None:
    """Preferred spread constraints have no effect on nodes without one of their labels."""
    [deployment] = gateway(ENABLED, "Deployment")
    pod = deployment["spec"]["template"]
    assert "topologySpreadConstraints" not in pod["spec"]
    preferred = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    terms = [each["podAffinityTerm"] for each in preferred]
    assert [term["topologyKey"] for term in terms] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    for term in terms:
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_another_one_may_set_the_number_of_pods() -> None:
    [deployment] = gateway({"gateway": {"enabled": True, "replicas": None}}, "Deployment")
    assert "replicas" not in deployment["spec"]


def test_it_serves_the_namespaces_of_the_operator_with_the_image_of_frontends() -> None:
    arguments = ["gateway", "--host=::", "--port=8000", "--control-port=8001"]
    assert container(ENABLED)["args"] == arguments
    assert container(OF_TEAMS)["args"] == [*arguments, "--namespace", "team-a", "team-b"]
    everything = container(MATRIX["everything"])
    assert everything["args"] == [
        *arguments,
        "--key-secrets",
        "--oidc-issuer=https://id.example.com/realms/a",
        "--oidc-audience=minisgl,api://models",
        "--oidc-tenant-claim=azp",
        "--oidc-jwks-url=https://id.example.com/keys",
        "--redis=rediss://limits@redis.example.com:6380/2",
        "--redis-password-file=/etc/minisgl/redis/password",
        "--otlp-traces-endpoint=http://collector.observability",
        "--trace-sampling=0",
        "--endpoint-picker-port=9002",
        "--endpoint-picker-plaintext",
        "--queue-timeout",
        "30",
    ]
    assert everything["image"].startswith("registry.example.com:5000/mirror/minisgl/frontend:")


@pytest.mark.parametrize(
    ("values", "places"), [(ENABLED, [("ClusterRole", None)]), (OF_TEAMS, [("Role", "team-a"), ("Role", "team-b")])]
)
def test_it_reads_models_where_they_are_and_nothing_else(values: Object, places: list[tuple[str, Any]]) -> None:
    rules = {
        (each["kind"], each["metadata"].get("namespace")): each["rules"]
        for each in gateway(values, "Role", "ClusterRole")
    }
    read = {"verbs": ["list", "watch"]}
    models = [{"apiGroups": ["serving.minisgl.io"], "resources": ["inferencemodels"]} | read]
    assert rules == dict.fromkeys(places, models)
    [account] = gateway(values, "ServiceAccount")
    for binding in gateway(values, "RoleBinding", "ClusterRoleBinding"):
        [subject] = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], NAMESPACE)


def test_it_reads_secrets_of_its_own_namespace_if_they_have_its_keys() -> None:
    [role] = gateway({"gateway": {"enabled": True, "keySecrets": True}}, "Role")
    assert role["metadata"]["namespace"] == NAMESPACE
    assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]}]


def test_it_has_variables_of_its_own() -> None:
    own = [{"name": "OTEL_TRACES_SAMPLER", "value": "traceidratio"}]
    assert container(ENABLED)["env"] == [{"name": "HOME", "value": "/tmp"}]
    assert container({"gateway": {"enabled": True, "env": own}})["env"][1:] == own
    for wrong in ({"name": "A"}, {"name": "A-B", "value": ""}, {"name": "A", "value": 1}):
        with pytest.raises(HelmError, match="gateway/env/0"):
            rendered({"gateway": {"enabled": True, "env": [wrong]}})


def test_it_leaves_the_service_before_it_stops() -> None:
    found = container(ENABLED)
    assert found["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "control"}
    for probe in ("startupProbe", "livenessProbe"):
        assert found[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_prometheus_finds_it_with_the_frontends() -> None:
    monitored = ENABLED | {"metrics": {"podMonitor": {"enabled": True}}}
    [monitor], [deployment] = gateway(monitored, "PodMonitor"), gateway(monitored, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "control", "where it needs no key"
    assert not gateway(ENABLED, "PodMonitor")
    allowed = policy(monitored | {"defaults": {"networkPolicy": {"monitoringNamespaces": ["monitoring"]}}})
    [names] = allowed["ingress"][1]["from"][1]["namespaceSelector"]["matchExpressions"]
    assert names["values"] == ["monitoring"]


def test_the_operator_finds_the_gateway_and_may_lead_models_to_it() -> None:
    flag = "--gateway=minisgl"
    assert flag in operator_pod(rendered(ENABLED))["containers"][0]["args"]
    assert flag not in operator_pod(rendered({}))["containers"][0]["args"]

    def rules(values: Object, kind: str, name: str) -> list[Object]:
        [found] = [each for each in of_kind(rendered(values), kind) if each["metadata"]["name"] == name]
        return list(found["rules"])

    pods_of_gateway = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    assert pods_of_gateway in rules(OF_TEAMS, "Role", "minisgl-operator-lease")
    assert pods_of_gateway not in rules({}, "Role", "minisgl-operator-lease")
    restricted = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices/restricted"], "verbs": ["create"]}
    assert restricted in rules(ENABLED, "ClusterRole", "minisgl-operator")
    assert restricted not in rules({}, "ClusterRole", "minisgl-operator")


def test_pods_that_may_use_a_model_s_service_reach_it_unless_the_values_say_otherwise() -> None:
    """A model without frontends is reached through the gateway."""
    anywhere, operator = policy(ENABLED)["ingress"]
    assert anywhere == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "http"}]}
    assert operator["ports"] == [{"port": "control"}]
    assert operator["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "minisgl-operator"
    [peer] = policy(OF_TEAMS)["ingress"][0]["from"]
    [names] = peer["namespaceSelector"]["matchExpressions"]
    assert names["values"] == ["team-a", "team-b", NAMESPACE]
    assert policy(MATRIX["gateway of two namespaces"])["ingress"][0]["from"] == [{"podSelector": {}}]


def test_it_reaches_names_the_api_server_and_frontends_of_its_models() -> None:
    dns, server, frontends = policy(OF_TEAMS)["egress"]
    assert {port["port"] for port in dns["ports"]} == {53, 5353}
    assert {443, 6443} <= {port["port"] for port in server["ports"]}
    [peer] = frontends["to"]
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "frontend"
    assert policy(ENABLED)["egress"][2]["to"][0]["namespaceSelector"] == {}


@pytest.mark.parametrize(
    ("oidc", "problem"),
    [
        ({"issuer": "http://id.example.com", "audiences": ["a"]}, "issuer"),
        ({"issuer": "https://id.example.com"}, "audiences"),
        ({"issuer": "https://id.example.com", "audiences": ["a,b"]}, "audiences"),
        ({"issuer": "https://id.example.com", "audiences": ["a"]}, "keySecrets"),
    ],
)
def test_tokens_need_an_audience_and_tenants(oidc: Object, problem: str) -> None:
    with pytest.raises(HelmError, match=problem):
        rendered({"gateway": {"enabled": True, "keySecrets": problem != "keySecrets", "oidc": oidc}})


@pytest.mark.parametrize(("host", "port"), [("redis", 6379), ("me@redis.a.svc:6380/1", 6380), ("[fd00::1]", 6379)])
def test_it_reaches_redis_and_has_its_password_as_a_file(host: str, port: int) -> None:
    redis: Object = {"url": f"redis://{host}", "passwordSecret": {"name": "limits", "key": "secret"}}
    values: Object = {"gateway": {"enabled": True, "redis": redis}}
    assert policy(values)["egress"][2] == {"ports": [{"port": port, "protocol": "TCP"}]}
    [deployment] = gateway(values, "Deployment")
    [_, volume] = deployment["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"] == {"secretName": "limits", "items": [{"key": "secret", "path": "password"}]}
    [_, mount] = container(values)["volumeMounts"]
    assert f"--redis-password-file={mount['mountPath']}/password" in container(values)["args"]


def test_a_password_in_the_url_of_redis_is_rejected() -> None:
    for url in ("redis://:secret@redis", "redis://me:secret@redis", "http://redis"):
        with pytest.raises(HelmError, match="gateway/redis/url"):
            rendered({"gateway": {"enabled": True, "redis": {"url": url}}})


@pytest.mark.parametrize(
    ("endpoint", "ports"),
    [
        ("http://collector.observability:4318", {4318}),
        ("https://[fd00::1]:9999/otlp/v1/traces", {9999, 4318}),
        ("https://traces.example.com", {443, 4318}),
    ],
)
def test_it_sends_traces_to_the_collector_of_the_cluster(endpoint: str, ports: set[int]) -> None:
    values: Object = {"defaults": {"traces": {"endpoint": endpoint, "sampling": 0}}} | ENABLED
    assert container(values)["args"][-2:] == [f"--otlp-traces-endpoint={endpoint}", "--trace-sampling=0"]
    *_, collector = policy(values)["egress"]
    assert {port["port"] for port in collector["ports"]} == ports and "to" not in collector
    assert not [argument for argument in container(ENABLED)["args"] if "trace" in argument]


@pytest.mark.parametrize(("plaintext", "protocol"), [(False, "http2"), (True, "kubernetes.io/h2c")])
def test_gateways_of_the_gateway_api_find_the_endpoint_picker(plaintext: bool, protocol: str) -> None:
    picker = {"enabled": True, "plaintext": plaintext}
    values: Object = {"gateway": {"enabled": True, "endpointPicker": picker}}
    found = container(values)
    flags = ["--endpoint-picker-port=9002", *(["--endpoint-picker-plaintext"] if plaintext else [])]
    assert found["args"][-len(flags) :] == flags
    assert {"name": "picker", "containerPort": 9002} in found["ports"]
    [service] = gateway(values, "Service")
    port = {"name": "grpc-picker", "port": 9002, "targetPort": "picker", "appProtocol": protocol}
    assert service["spec"]["ports"][1] == port
    [role] = gateway(values, "Role")
    assert role["metadata"]["namespace"] == NAMESPACE
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    assert role["rules"] == [slices]


def test_the_endpoint_picker_names_one_endpoint_if_the_values_say_so() -> None:
    values: Object = {"gateway": {"enabled": True, "endpointPicker": {"enabled": True, "single": True}}}
    assert container(values)["args"][-2:] == ["--endpoint-picker-port=9002", "--endpoint-picker-single"]


def test_gateways_in_all_namespaces_reach_the_endpoint_picker_unless_the_values_say_otherwise() -> None:
    anywhere: Object = {"gateway": {"enabled": True, "endpointPicker": {"enabled": True}}}
    assert policy(anywhere)["ingress"][1] == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "picker"}]}
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
    clients: Object = [{"podSelector": {}}]
    for own, of_gateway, expected in ((peers, [], peers), (peers, clients, peers), ([], clients, clients)):
        picker: Object = {"enabled": True, "ingressFrom": own}
        some: Object = {"gateway": {"enabled": True, "ingressFrom": of_gateway, "endpointPicker": picker}}
        assert policy(some)["ingress"][1]["from"] == expected


@pytest.mark.parametrize(
    "argument",
    [
        "--port",
        "--namespace=other",
        "--control-port=1",
        "--host=::",
        "--key-secrets",
        "--oidc-issuer=a",
        "--redis=a",
        "--endpoint-picker-port=1",
    ],
)
def test_an_argument_that_the_chart_sets_is_rejected(argument: str) -> None:
    with pytest.raises(HelmError, match="gateway/args/0"):
        rendered({"gateway": {"enabled": True, "args": [argument]}})


def test_the_notes_tell_the_address() -> None:
    notes = helm("install", "some", str(CHART), "--dry-run=client", values=ENABLED).partition("NOTES:")[2]
    assert "http://some-minisgl-gateway.default.svc/v1" in notes
    assert "gateway" not in helm("install", "some", str(CHART), "--dry-run=client").partition("NOTES:")[2]
