"""Defaults of the operator, and how a model overrides them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.render import names, render, revision, storage
from support.cluster.inference_models import CLAIM, DEFAULTS, HUB, inference_model

COMPONENTS = (names.ENGINE, names.FRONTEND, names.FETCH)


def templates(spec: dict[str, Any] | None = None, models: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Pod templates by component."""
    defaults = replace(DEFAULTS, models=ModelDefaults.model_validate(models or {}))
    rendered = [each.get("spec", {}) for each in render(inference_model(spec), defaults)]
    found = [each["template"] for each in rendered if "template" in each]
    return {template["metadata"]["labels"][names.COMPONENT_LABEL]: template for template in found}


def resources(component: str, spec: dict[str, Any], models: dict[str, Any] | None = None) -> dict[str, Any]:
    [container] = templates(spec, models)[component]["spec"]["containers"]
    return dict(container["resources"])


@pytest.mark.parametrize(
    ("engine", "parallelism", "requests"),
    [
        ({}, {}, {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}),
        ({}, {"tensor": 8, "gpusPerPod": 4}, {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4"}),
        ({"device": "cpu"}, {"tensor": 2}, {"cpu": "500m", "memory": "1Gi"}),
        (
            {"resources": {"requests": {"cpu": 1}}},
            {"tensor": 2},
            {"cpu": "1", "memory": "16Gi", "nvidia.com/gpu": "2"},
        ),
        ({"resources": {"limits": {"memory": "4Gi"}}}, {}, {"cpu": "2", "nvidia.com/gpu": "1"}),
    ],
)
def test_engines_request_enough_for_their_ranks_unless_the_model_says_otherwise(
    engine: dict[str, Any], parallelism: dict[str, Any], requests: dict[str, str]
) -> None:
    found = resources(names.ENGINE, {"engine": engine, "parallelism": parallelism})
    assert found["requests"] == requests


def test_no_pod_is_best_effort() -> None:
    for template in templates().values():
        for container in template["spec"]["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_a_resource_of_the_model_takes_nothing_from_the_defaults() -> None:
    """A default request of 8Gi above the model's limit of 4Gi would be rejected."""
    default = {"requests": {"cpu": 3, "memory": "8Gi"}, "limits": {"cpu": 4}}
    models = {part: {"resources": default} for part in COMPONENTS}
    own = {"resources": {"limits": {"memory": "4Gi"}}}
    for part in COMPONENTS:
        found = resources(part, {part: own, "engine": {"device": "cpu", **(own if part == "engine" else {})}}, models)
        assert found == {"requests": {"cpu": "3"}, "limits": {"cpu": "4", "memory": "4Gi"}}
        found = resources(part, {"engine": {"device": "cpu"}}, models)
        assert found == {"requests": {"cpu": "3", "memory": "8Gi"}, "limits": {"cpu": "4"}}


def test_labels_and_annotations_of_the_model_win_key_by_key() -> None:
    models = {part: {"labels": {"team": "a", "cost": "1"}, "annotations": {"x": "1", "y": "1"}} for part in COMPONENTS}
    own = {"podTemplate": {"labels": {"team": "b"}, "annotations": {"y": "2", "sidecar.istio.io/inject": "true"}}}
    for part, template in templates(dict.fromkeys(COMPONENTS, own), models).items():
        metadata = template["metadata"]
        assert (metadata["labels"]["team"], metadata["labels"]["cost"]) == ("b", "1")
        assert (metadata["annotations"]["x"], metadata["annotations"]["y"]) == ("1", "2")
        assert metadata["annotations"]["sidecar.istio.io/inject"] == "true"
        assert metadata["labels"][names.COMPONENT_LABEL] == part


def test_only_frontends_are_evicted_by_node_autoscalers_and_no_pod_joins_a_mesh() -> None:
    found = templates()
    annotations = {part: template["metadata"]["annotations"] for part, template in found.items()}
    no_sidecars = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
    assert annotations[names.FRONTEND] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"} | no_sidecars
    assert {each["metadata"]["labels"]["istio.io/dataplane-mode"] for each in found.values()} == {"none"}
    assert annotations[names.FETCH] == no_sidecars
    assert annotations[names.ENGINE].items() >= {
        **no_sidecars,
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }.items()


def test_frontends_may_join_a_mesh_and_reach_engines_and_the_operator_beside_it() -> None:
    found = templates({"frontend": {"mesh": True}})
    metadata = found[names.FRONTEND]["metadata"]
    assert "istio.io/dataplane-mode" not in metadata["labels"]
    assert metadata["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
        "config.linkerd.io/skip-inbound-ports": "8080",
        "config.linkerd.io/skip-outbound-ports": "5550,8080",
        "traffic.sidecar.istio.io/excludeInboundPorts": "8080",
        "traffic.sidecar.istio.io/excludeOutboundPorts": "5550,8080",
    }
    for part in (names.ENGINE, names.FETCH):
        assert found[part] == templates()[part], "they stay outside"


def test_a_label_of_the_model_decides_about_the_ambient_mode() -> None:
    own = {"podTemplate": {"labels": {"istio.io/dataplane-mode": "ambient"}}}
    labels = templates({"engine": own})[names.ENGINE]["metadata"]["labels"]
    assert labels["istio.io/dataplane-mode"] == "ambient"


def test_the_policy_of_frontends_in_a_mesh_allows_its_proxies_and_their_control_planes() -> None:
    def ports(mesh: bool) -> dict[str, set[int]]:
        model = inference_model({"frontend": {"mesh": mesh}})
        (spec,) = (
            each["spec"]
            for each in render(model, DEFAULTS)
            if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "qwen-frontend")
        )
        return {way: {port["port"] for rule in spec[way] for port in rule["ports"]} for way in ("ingress", "egress")}

    before, after = ports(mesh=False), ports(mesh=True)
    assert after["ingress"] - before["ingress"] == {15008, 4143}
    assert after["egress"] - before["egress"] == {15012, 8086, 8090}


@pytest.mark.parametrize("identity", ["Fixed", "Namespace"])
def test_the_namespace_may_choose_user_and_group(identity: str) -> None:
    for template in templates(models={"podIdentity": identity}).values():
        security = template["spec"]["securityContext"]
        chosen = {key: security[key] for key in ("runAsUser", "runAsGroup", "fsGroup") if key in security}
        assert chosen == ({} if identity == "Namespace" else dict.fromkeys(chosen, 65532))
        assert len(chosen) == (0 if identity == "Namespace" else 3)
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}


ARCHITECTURE = "kubernetes.io/arch"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {},
            {"engine": {ARCHITECTURE: "amd64"}, "frontend": {ARCHITECTURE: "arm64"}, "fetch": {ARCHITECTURE: "arm64"}},
        ),
        (
            {"engine": {"nodeSelector": {"pool": "a"}}, "frontend": {"nodeSelector": {ARCHITECTURE: "s390x"}}},
            {
                "engine": {ARCHITECTURE: "amd64", "pool": "a"},
                "frontend": {ARCHITECTURE: "s390x"},
                "fetch": {ARCHITECTURE: "s390x"},
            },
        ),
        (
            {"engine": {"image": "mine:1"}, "frontend": {"image": "mine:2", "nodeSelector": {"pool": "b"}}},
            {"engine": None, "frontend": {"pool": "b"}, "fetch": {"pool": "b"}},
        ),
    ],
    ids=["none of its own", "node selectors", "images"],
)
def test_pods_go_to_nodes_that_can_run_their_default_images(spec: dict[str, Any], expected: dict[str, Any]) -> None:
    defaults = replace(DEFAULTS, engine_architecture="amd64", frontend_architecture="arm64")
    rendered = [each.get("spec", {}) for each in render(inference_model(spec), defaults)]
    templates = [each["template"] for each in rendered if "template" in each]
    found = {each["metadata"]["labels"][names.COMPONENT_LABEL]: each["spec"].get("nodeSelector") for each in templates}
    assert found == expected


def test_placement_of_the_model_replaces_that_of_the_defaults() -> None:
    gpu, other = [{"key": "gpu", "operator": "Exists"}], [{"key": "other", "operator": "Exists"}]
    models = {
        "engine": {"nodeSelector": {"pool": "gpu", "zone": "a"}, "tolerations": gpu, "runtimeClassName": "nvidia"},
        "frontend": {"nodeSelector": {"pool": "web"}},
    }
    found = {part: template["spec"] for part, template in templates(models=models).items()}
    engine, frontend, fetch = (found[part] for part in COMPONENTS)
    assert engine["nodeSelector"] == {"pool": "gpu", "zone": "a"}
    assert (engine["tolerations"], engine["runtimeClassName"]) == (gpu, "nvidia")
    assert frontend["nodeSelector"] == fetch["nodeSelector"] == {"pool": "web"}
    assert gpu[0] not in frontend["tolerations"]
    assert "runtimeClassName" not in frontend
    own = {"nodeSelector": {"pool": "mine"}, "tolerations": other, "runtimeClassName": "gvisor"}
    engine = templates({"engine": own}, models)[names.ENGINE]["spec"]
    assert engine["nodeSelector"] == {"pool": "mine"}
    assert (engine["tolerations"], engine["runtimeClassName"]) == (other, "gvisor")
    on_cpus = templates({"engine": {"device": "cpu"}}, models)[names.ENGINE]["spec"]
    assert "runtimeClassName" not in on_cpus, "its purpose is access to GPUs"


def test_a_fetch_to_a_single_node_volume_takes_the_defaults_of_engines() -> None:
    models = {"engine": {"nodeSelector": {"pool": "gpu"}}, "frontend": {"nodeSelector": {"pool": "web"}}}
    spec = {"model": {"cache": {"accessMode": "ReadWriteOnce"}}}
    assert templates(spec, models)[names.FETCH]["spec"]["nodeSelector"] == {"pool": "gpu"}


@pytest.mark.parametrize(
    ("own", "default", "live", "applied"),
    [
        (None, None, None, None),
        (None, "fast", None, "fast"),
        ("own", "fast", None, "own"),
        (None, "fast", "slow", "slow"),
        (None, None, "slow", "slow"),
        ("own", "fast", "own", "own"),
    ],
)
def test_a_new_default_class_leaves_existing_claims_as_they_are(
    own: str | None, default: str | None, live: str | None, applied: str | None
) -> None:
    """The class of a claim is immutable: another value would be rejected."""
    model = inference_model({"model": {"cache": {"storageClassName": own} if own else {}}}, source=HUB)
    defaults = replace(DEFAULTS, models=ModelDefaults(storage_class_name=default))
    claim = storage.claim(model, defaults)
    if live is not None:
        spec = {"storageClassName": live, "resources": {"requests": {"storage": "100Gi"}}}
        claim = storage.adjusted(model, claim, {"spec": spec})
    assert claim["spec"].get("storageClassName") == applied


def test_frontends_get_arguments_variables_and_time_to_leave() -> None:
    spec = {"args": ["--max-waiting=64"], "env": [{"name": "A", "value": "b"}], "leaveSeconds": 60}
    pod = templates({"frontend": spec, "drainSeconds": 100})[names.FRONTEND]["spec"]
    [container] = pod["containers"]
    assert container["args"][-1] == "--max-waiting=64"
    assert {"name": "A", "value": "b"} in container["env"]
    assert container["args"][container["args"].index("--leave-timeout") + 1] == "60"
    assert pod["terminationGracePeriodSeconds"] >= 60 + 100
    default = templates({"drainSeconds": 100})[names.FRONTEND]["spec"]
    assert default["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"] - 60 + 15


KEYS = st.sampled_from(["team", "example.com/a", "app.kubernetes.io/name", "serving.minisgl.io/replica", "job-name"])
VOLUMES = st.sampled_from(["own", "other", "models", "run", "shm", "tmp", "keys"])
PATHS = st.sampled_from(["/own", "/models", "/models/own", "/run", "/run/minisgl", "/dev/shm", "/tmp", "/etc/own"])
TEMPLATES = st.fixed_dictionaries(
    {
        "labels": st.dictionaries(KEYS, st.just("a"), max_size=3),
        "annotations": st.dictionaries(KEYS, st.just("a"), max_size=3),
        "volumes": st.lists(VOLUMES.map(lambda name: {"name": name, "emptyDir": {}}), max_size=3),
        "volumeMounts": st.lists(st.fixed_dictionaries({"name": VOLUMES, "mountPath": PATHS}), max_size=3),
    }
)


@settings(max_examples=200, deadline=None)
@given(added=TEMPLATES, default=TEMPLATES)
def test_additions_never_replace_what_the_operator_sets(added: dict[str, Any], default: dict[str, Any]) -> None:
    """Every template is rejected, or leaves labels, volumes and mounts as they are without it."""
    models = {part: {key: default[key] for key in ("labels", "annotations")} for part in COMPONENTS}
    try:
        found = templates({part: {"podTemplate": added} for part in COMPONENTS}, models)
    except (InvalidSpec, ValidationError):
        return
    for part, plain in templates().items():
        template = found[part]
        volatile = {names.REVISION_LABEL}
        labels = {key: value for key, value in plain["metadata"]["labels"].items() if key not in volatile}
        assert labels.items() <= template["metadata"]["labels"].items()
        for volume in plain["spec"]["volumes"]:
            assert [each for each in template["spec"]["volumes"] if each["name"] == volume["name"]] == [volume]
        [before], [after] = plain["spec"]["containers"], template["spec"]["containers"]
        for mount in before["volumeMounts"]:
            path = mount["mountPath"]
            assert [each for each in after["volumeMounts"] if f"{each['mountPath']}/".startswith(f"{path}/")] == [mount]


@pytest.mark.parametrize("part", [names.FRONTEND, names.FETCH])
def test_additions_to_other_pods_restart_no_engine(part: str) -> None:
    added = {"podTemplate": {"labels": {"team": "a"}, "schedulerName": "mine"}}
    models = [inference_model(spec, source=CLAIM) for spec in ({}, {part: added})]
    assert len({revision(model, DEFAULTS) for model in models}) == 1


def fetch(models: dict[str, Any], spec: dict[str, Any] | None = None, **source: Any) -> dict[str, Any]:
    """Pod of the fetch Job, with its variables by name as `env`."""
    return fetch_pod(models, inference_model(spec, source={"huggingFace": HUB["huggingFace"] | source}))


def fetch_pod(models: dict[str, Any], model: InferenceModel) -> dict[str, Any]:
    defaults = replace(DEFAULTS, models=ModelDefaults.model_validate(models))
    [job] = [each for each in render(model, defaults) if each["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["containers"][0]["env"]}
    return {**pod, "args": pod["containers"][0]["args"], "env": env}


@pytest.mark.parametrize(
    ("own", "default", "used"),
    [(None, None, None), (None, "https://a", "https://a"), ("https://b", "https://a", "https://b")],
)
def test_a_mirror_of_the_cluster_is_for_models_without_one_and_fetches_nothing_again(
    own: str | None, default: str | None, used: str | None
) -> None:
    source = {} if own is None else {"endpoint": own}
    arguments = fetch({"hub": {"endpoint": default}}, **source)["args"]
    assert (arguments[arguments.index("--endpoint") + 1] if "--endpoint" in arguments else None) == used
    assert arguments[3] == fetch({}, **source)["args"][3], "the same directory of the cache"


def test_a_token_of_the_cluster_is_optional_unlike_that_of_the_model() -> None:
    models = {"hub": {"tokenSecret": {"name": "hub"}}}
    reference = {"name": "hub", "key": "token", "optional": True}
    assert fetch(models)["env"]["HF_TOKEN"] == {"secretKeyRef": reference}
    own = fetch(models, tokenSecretRef={"name": "mine"})["env"]["HF_TOKEN"]
    assert own == {"secretKeyRef": {"name": "mine", "key": "token"}}
    assert "HF_TOKEN" not in fetch({})["env"]


def test_fetch_pods_trust_the_bundle_of_the_cluster() -> None:
    pod = fetch({"hub": {"caConfigMap": {"name": "company-ca"}}})
    [volume] = [each for each in pod["volumes"] if each["name"] == "minisgl-ca"]
    assert volume["configMap"] == {"name": "company-ca", "items": [{"key": "ca.crt", "path": "bundle.pem"}]}
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "minisgl-ca"]
    assert pod["env"]["SSL_CERT_FILE"] == f"{mount['mountPath']}/bundle.pem"


def test_variables_of_the_model_come_before_those_of_the_cluster() -> None:
    models = {"proxy": {"https": "http://proxy:3128", "noProxy": ".svc"}, "hub": {"caConfigMap": {"name": "a"}}}
    env = fetch(models)["env"]
    assert (env["HTTPS_PROXY"], env["NO_PROXY"]) == ("http://proxy:3128", ".svc")
    assert "HTTP_PROXY" not in env
    own = [{"name": "HTTPS_PROXY", "value": "http://mine"}, {"name": "SSL_CERT_FILE", "value": "/own.pem"}]
    changed = fetch(models, {"fetch": {"env": own}})
    assert (changed["env"]["HTTPS_PROXY"], changed["env"]["SSL_CERT_FILE"]) == ("http://mine", "/own.pem")
    names_of = [each["name"] for each in changed["containers"][0]["env"]]
    assert len(names_of) == len(set(names_of))


STORE = {"endpoint": "https://minio", "region": "lab-1", "secretName": "minio"}
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def fetch_s3(models: dict[str, Any], spec: dict[str, Any] | None = None, **source: Any) -> dict[str, Any]:
    """As `fetch`, of a model in a bucket."""
    return fetch_pod(models, inference_model(spec, source={"s3": {"uri": "s3://models/qwen3", **source}}))


def keys(name: str, *optional: str) -> dict[str, Any]:
    """Variables with the credentials of a Secret."""
    references = {key: {"name": name, "key": key} | ({"optional": True} if key in optional else {}) for key in KEYS}
    return {key: {"secretKeyRef": reference} for key, reference in references.items()}


def credentials(pod: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in pod["env"].items() if name in KEYS}


def test_the_store_of_the_cluster_is_for_models_without_one() -> None:
    pod = fetch_s3({"s3": STORE})
    assert pod["args"][2:6] == ["s3://models/qwen3", pod["args"][3], "--endpoint", "https://minio"]
    assert pod["args"][3] == fetch_s3({})["args"][3], "the same directory of the cache"
    assert pod["env"]["AWS_DEFAULT_REGION"] == "lab-1"
    assert credentials(pod) == keys("minio", *KEYS), "not every namespace has the Secret"


def test_a_model_s_own_keys_are_required_but_for_the_session() -> None:
    pod = fetch_s3({"s3": STORE}, secretName="mine", region="lab-2")
    assert credentials(pod) == keys("mine", "AWS_SESSION_TOKEN")
    assert pod["env"]["AWS_DEFAULT_REGION"] == "lab-2"


def test_another_store_does_not_get_the_keys_of_the_cluster_s() -> None:
    pod = fetch_s3({"s3": STORE}, endpoint="https://elsewhere")
    assert pod["args"][-1] != "https://minio" and "https://elsewhere" in pod["args"]
    assert not credentials(pod)
    assert "AWS_DEFAULT_REGION" not in pod["env"]
    assert pod["args"][3] != fetch_s3({})["args"][3], "another bucket has another directory of the cache"


def test_a_fetch_does_not_use_the_role_of_its_node() -> None:
    for models, source in (({}, {}), ({"s3": STORE}, {}), ({}, {"endpoint": "https://elsewhere"})):
        assert fetch_s3(models, **source)["env"]["AWS_EC2_METADATA_DISABLED"] == "true"
    own = [{"name": "AWS_EC2_METADATA_DISABLED", "value": "false"}]
    assert fetch_s3({}, {"fetch": {"env": own}})["env"]["AWS_EC2_METADATA_DISABLED"] == "false"


def test_a_slash_at_the_end_is_the_same_folder_of_a_bucket() -> None:
    assert fetch_s3({}, uri="s3://models/qwen3/")["args"][3] == fetch_s3({})["args"][3]


def test_fetch_pods_trust_the_bundle_of_the_cluster_for_buckets_too() -> None:
    models = {"hub": {"caConfigMap": {"name": "company-ca"}}, "proxy": {"https": "http://proxy:3128"}}
    pod = fetch_s3(models)
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "minisgl-ca"]
    assert pod["env"]["AWS_CA_BUNDLE"] == f"{mount['mountPath']}/bundle.pem"
    assert pod["env"]["HTTPS_PROXY"] == "http://proxy:3128"
    own = [{"name": "AWS_CA_BUNDLE", "value": "/own.pem"}, {"name": "AWS_ACCESS_KEY_ID", "value": "a"}]
    changed = fetch_s3({**models, "s3": STORE}, {"fetch": {"env": own}})
    assert (changed["env"]["AWS_CA_BUNDLE"], changed["env"]["AWS_ACCESS_KEY_ID"]) == ("/own.pem", "a")
    names_of = [each["name"] for each in changed["containers"][0]["env"]]
    assert len(names_of) == len(set(names_of))


@pytest.mark.parametrize(("models", "source"), [({"s3": STORE}, {}), ({}, {"endpoint": "http://minio:9000"})])
def test_a_fetch_from_a_store_of_the_cluster_may_use_any_port(models: dict[str, Any], source: dict[str, Any]) -> None:
    in_bucket = {"s3": {"uri": "s3://models/qwen3", **source}}
    assert policy(models, names.FETCH, source=in_bucket)["egress"] == [{}]


def test_only_a_fetch_with_credentials_of_the_cloud_reaches_the_agent_that_has_them() -> None:
    def reaches(source: dict[str, Any], models: dict[str, Any] | None = None) -> bool:
        return "169.254.170.23/32" in str(policy(models or {}, names.FETCH, source=source)["egress"])

    assert reaches({"s3": {"uri": "s3://models/qwen3"}})
    assert not reaches({"s3": {"uri": "s3://models/qwen3", "secretName": "keys"}})
    of_namespaces = {"s3": {"secretName": "minio"}}
    assert reaches({"s3": {"uri": "s3://models/qwen3"}}, of_namespaces), "not every namespace has the Secret"
    assert not reaches(HUB)
    assert "169.254.169.254" not in str(policy({}, names.FETCH, source={"s3": {"uri": "s3://models/qwen3"}}))


def policy(
    models: dict[str, Any], component: str, spec: dict[str, Any] | None = None, source: dict[str, Any] | None = None
) -> dict[str, Any]:
    defaults = replace(DEFAULTS, models=ModelDefaults.model_validate(models))
    rendered = {
        each["metadata"]["name"]: each
        for each in render(inference_model(spec, source=source), defaults)
        if each["kind"] == "NetworkPolicy"
    }
    return dict(rendered[f"qwen-{component}"]["spec"])


@pytest.mark.parametrize("models", [{"hub": {"endpoint": "http://mirror:8000"}}, {"proxy": {"https": "http://p:3128"}}])
def test_a_fetch_over_a_mirror_or_proxy_of_the_cluster_may_use_any_port(models: dict[str, Any]) -> None:
    assert policy(models, names.FETCH)["egress"] == [{}]
    assert policy({}, names.FETCH)["egress"] != [{}]


def test_clients_of_the_cluster_are_for_models_without_their_own_and_monitoring_is_for_all() -> None:
    models = {"networkPolicy": {"ingressFrom": [{"namespaceSelector": {}}], "monitoringNamespaces": ["a", "b"]}}
    expression = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    monitoring = {"namespaceSelector": {"matchExpressions": [expression]}}
    own = [{"podSelector": {"matchLabels": {"a": "b"}}}]
    for spec, clients in (({}, [{"namespaceSelector": {}}]), ({"networkPolicy": {"ingressFrom": own}}, own)):
        assert policy(models, names.FRONTEND, spec)["ingress"][0]["from"] == [*clients, monitoring]


def test_a_priority_of_the_cluster_is_for_pods_without_their_own() -> None:
    models = {"engine": {"priorityClassName": "engines"}, "frontend": {"priorityClassName": "web"}}
    found = {part: template["spec"]["priorityClassName"] for part, template in templates({}, models).items()}
    assert found == {names.ENGINE: "engines", names.FRONTEND: "web", names.FETCH: "web"}
    own = templates({"engine": {"priorityClassName": "mine"}}, models)[names.ENGINE]["spec"]
    assert own["priorityClassName"] == "mine"


def test_an_account_of_the_model_is_for_pods_with_its_files() -> None:
    found = {part: each["spec"] for part, each in templates({"serviceAccountName": "bucket-reader"}).items()}
    accounts = {part: spec["serviceAccountName"] for part, spec in found.items()}
    assert accounts == {names.ENGINE: "bucket-reader", names.FETCH: "bucket-reader", names.FRONTEND: "qwen-frontend"}
    assert not any(spec["automountServiceAccountToken"] for spec in found.values())


@pytest.mark.parametrize(
    ("endpoint", "ports"),
    [
        ("http://collector:4318", [4318]),
        ("http://[fd00::1]", [80, 4318]),
        ("https://a.example/otlp/v1/traces", [443, 4318]),
    ],
)
def test_frontends_send_traces_to_the_collector_of_the_cluster(endpoint: str, ports: list[int]) -> None:
    models = {"traces": {"endpoint": endpoint, "sampling": 0}}
    [container] = templates({"frontend": {"args": ["--max-waiting=64"]}}, models)[names.FRONTEND]["spec"]["containers"]
    assert container["args"][-5:] == ["--otlp-traces-endpoint", endpoint, "--trace-sampling", "0", "--max-waiting=64"]
    values = {each["name"]: each.get("value", "") for each in container["env"]}
    assert "k8s.namespace.name=" in values["OTEL_RESOURCE_ATTRIBUTES"]
    collector = policy(models, names.FRONTEND)["egress"][-1]
    assert collector == {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    plain = templates({}, {})[names.FRONTEND]["spec"]["containers"][0]
    assert "--otlp-traces-endpoint" not in plain["args"]
    assert len(policy({}, names.FRONTEND)["egress"]) == 2


def test_what_spans_say_of_a_pod_may_come_from_the_model() -> None:
    own = {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "a=b"}
    pod = templates({"frontend": {"env": [own]}}, {"traces": {"endpoint": "http://collector:4318"}})[names.FRONTEND]
    assert [each for each in pod["spec"]["containers"][0]["env"] if each["name"] == own["name"]] == [own]
