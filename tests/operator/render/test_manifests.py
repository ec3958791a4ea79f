"""Rules that hold for every child of every model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest, ref_of
from minisgl_operator.render import names, render, revision, storage
from minisgl_operator.render.quantity import canonical
from minisgl_operator.shell.resources import CHILDREN
from support.cluster.example_models import EXAMPLES
from support.cluster.inference_models import CLAIM, DEFAULTS, HUB, inference_model
from support.cluster.kubernetes_schemas import validate

examples = pytest.mark.parametrize("model", EXAMPLES.values(), ids=EXAMPLES)


def templates(manifests: tuple[Manifest, ...]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield manifest["spec"]["template"]


def find(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    return next(each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))


@examples
def test_every_manifest_is_valid(model: Any) -> None:
    for manifest in render(model, DEFAULTS):
        validate(manifest)


@examples
def test_rendering_twice_gives_the_same(model: Any) -> None:
    assert render(model, DEFAULTS) == render(model, DEFAULTS)


@examples
def test_children_have_short_unique_names_labels_and_their_owner(model: Any) -> None:
    manifests = render(model, DEFAULTS)
    assert len({ref_of(manifest) for manifest in manifests}) == len(manifests)
    kinds = {(resource.api_version, resource.kind) for resource in CHILDREN}
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert (manifest["apiVersion"], manifest["kind"]) in kinds
        assert len(metadata["name"]) <= 63
        assert metadata["namespace"] == model.metadata.namespace
        assert metadata["labels"][names.MODEL_LABEL] == model.name
        assert metadata["labels"][names.MANAGED_BY_LABEL] == names.MANAGED_BY
        if manifest["kind"] == "PersistentVolumeClaim" and model.spec.model.fetch_cache.retain:
            assert "ownerReferences" not in metadata
            assert names.INSTANCE_LABEL not in metadata["labels"], "Argo CD would prune it with this label"
        else:
            assert metadata["labels"][names.INSTANCE_LABEL] == model.name
            (owner,) = metadata["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (model.metadata.uid, True)


@examples
def test_manifests_contain_neither_null_nor_server_fields(model: Any) -> None:
    def values(value: Any) -> Iterator[Any]:
        yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from values(inner)

    for manifest in render(model, DEFAULTS):
        assert "status" not in manifest
        assert not {"creationTimestamp", "resourceVersion", "uid"} & manifest["metadata"].keys()
        assert not [value for value in values(manifest) if value is None or value == ()]


@examples
def test_selectors_select_the_pods_and_cannot_change(model: Any) -> None:
    manifests = render(model, DEFAULTS)
    labels = [template["metadata"]["labels"] for template in templates(manifests)]
    fixed = {names.NAME_LABEL, names.INSTANCE_LABEL, names.COMPONENT_LABEL, names.REPLICA_LABEL, names.POD_INDEX_LABEL}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is None or (manifest["kind"] == "Service" and not model.spec.replicas):
            continue
        wanted = selector.get("matchLabels", selector)
        assert set(wanted) <= fixed
        plain = {key: value for key, value in wanted.items() if key != names.POD_INDEX_LABEL}
        selected = any(plain.items() <= each.items() for each in labels)
        assert selected or (model.spec.suspend and wanted[names.COMPONENT_LABEL] == names.ENGINE)


@examples
def test_services_lead_to_ports_of_containers(model: Any) -> None:
    manifests = render(model, DEFAULTS)
    ports = {
        (template["metadata"]["labels"][names.COMPONENT_LABEL], port["name"])
        for template in templates(manifests)
        for port in template["spec"]["containers"][0]["ports"]
    }
    for manifest in manifests:
        if manifest["kind"] == "Service" and not model.spec.suspend:
            component = manifest["spec"]["selector"][names.COMPONENT_LABEL]
            assert {(component, port["targetPort"]) for port in manifest["spec"]["ports"]} <= ports


@examples
def test_the_pods_of_a_replica_run_all_its_ranks(model: Any) -> None:
    for manifest in render(model, DEFAULTS):
        if manifest["kind"] == "StatefulSet":
            arguments = manifest["spec"]["template"]["spec"]["containers"][0]["args"]
            ranks = int(arguments[arguments.index("--ranks-per-pod") + 1])
            assert manifest["spec"]["replicas"] * ranks == model.spec.parallelism.tensor


@examples
def test_pods_comply_with_the_restricted_profile(model: Any) -> None:
    """Pod Security Standards, profile `restricted`."""
    volumes = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"}
    for template in templates(render(model, DEFAULTS)):
        spec = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in container["ports"])
        for volume in spec["volumes"]:
            (kind,) = volume.keys() - {"name"}
            assert kind in volumes | {"secret", "projected"}


@examples
def test_every_mount_has_a_volume(model: Any) -> None:
    for template in templates(render(model, DEFAULTS)):
        mounts = [mount["name"] for container in template["spec"]["containers"] for mount in container["volumeMounts"]]
        volumes = [volume["name"] for volume in template["spec"]["volumes"]]
        assert sorted(mounts) == sorted(volumes)


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("1000m", "1"),
        ("0.5", "500m"),
        ("1500m", "1500m"),
        ("4", "4"),
        ("1000", "1k"),
        ("1024", "1024"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Ti", "512Gi"),
        ("512Ki", "512Ki"),
        ("0.5Ki", "512"),
        ("100G", "100G"),
        ("1e3", "1e3"),
        ("15e2", "1500"),
        ("1E", "1E"),
        ("2000E", "2000E"),
        ("0", "0"),
        ("0.0000000001", "1n"),
        ("0.1Ki", "102400m"),
    ],
)
def test_quantities_have_the_form_that_the_api_server_stores(written: str, stored: str) -> None:
    assert canonical(written) == stored
    assert canonical(stored) == stored


@examples
def test_no_pod_is_told_to_listen_over_one_address_family(model: Any) -> None:
    for template in templates(render(model, DEFAULTS)):
        arguments = template["spec"]["containers"][0]["args"]
        assert not {"--host", "0.0.0.0", "127.0.0.1"} & set(arguments)


def test_all_replicas_have_one_revision_independent_of_frontends() -> None:
    model = inference_model({"replicas": 3}, source=CLAIM)
    found = {
        template["metadata"]["labels"].get(names.REVISION_LABEL)
        for template in templates(render(model, DEFAULTS))
        if template["metadata"]["labels"][names.COMPONENT_LABEL] == names.ENGINE
    }
    assert found == {revision(model, DEFAULTS)}
    same = inference_model({"replicas": 5, "frontend": {"replicas": 3, "image": "other:1"}}, source=CLAIM)
    assert revision(same, DEFAULTS) == revision(model, DEFAULTS)
    other = inference_model({"replicas": 3, "engine": {"image": "other:1"}}, source=CLAIM)
    assert revision(other, DEFAULTS) != revision(model, DEFAULTS)


@pytest.mark.parametrize(
    ("spec", "argument", "value"),
    [
        ({"engine": {"quantization": "fp8"}}, "--quantization", "fp8"),
        ({"engine": {"kvCacheDtype": "fp8"}}, "--kv-cache-dtype", "fp8"),
        *(({"engine": {"speculative": each}}, "--speculative", each) for each in ("off", "auto", "ngram")),
        ({"task": "embed"}, "--task", "embed"),
    ],
)
def test_a_field_about_the_model_is_an_argument_and_a_new_revision(
    spec: dict[str, Any], argument: str, value: str
) -> None:
    plain = inference_model(source=CLAIM)
    changed = inference_model(spec, source=CLAIM)
    assert revision(changed, DEFAULTS) != revision(plain, DEFAULTS)
    before, after = (
        find(render(model, DEFAULTS), "StatefulSet", "qwen-r0")["spec"]["template"]["spec"]["containers"][0]["args"]
        for model in (plain, changed)
    )
    place = after.index(argument)
    assert after[place : place + 2] == [argument, value]
    assert after[:place] + after[place + 2 :] == before
    engine = {"quantization": None, "kvCacheDtype": "auto", "speculative": None}
    default = inference_model({"engine": engine, "task": "auto"}, source=CLAIM)
    assert render(default, DEFAULTS) == render(plain, DEFAULTS)


def test_the_hub_token_is_in_the_fetch_pod_only() -> None:
    source = {"huggingFace": HUB["huggingFace"] | {"tokenSecretRef": {"name": "hub"}}}
    manifests = render(inference_model(source=source), DEFAULTS)
    with_token = [manifest["kind"] for manifest in manifests if "HF_TOKEN" in str(manifest)]
    assert with_token == ["Job"]


def fetch_pod(spec: dict[str, Any]) -> dict[str, Any]:
    (job,) = [each for each in render(inference_model(spec), DEFAULTS) if each["kind"] == "Job"]
    return dict(job["spec"]["template"]["spec"])


_NODES = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
_WHERE: dict[str, Any] = {
    "engine": {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": _NODES | {"podAntiAffinity": {}},
        "priorityClassName": "engines",
    },
    "frontend": {"nodeSelector": {"gpu": "no"}, "affinity": _NODES, "priorityClassName": "frontends"},
}


def test_a_fetch_to_a_single_node_volume_runs_where_engines_can() -> None:
    """The first pod of a volume with delayed binding determines its node."""
    pod = fetch_pod({"model": {"cache": {"accessMode": "ReadWriteOnce"}}, **_WHERE})
    assert pod["nodeSelector"] == {"gpu": "yes"}
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["gpu"]
    assert pod["affinity"].keys() == {"nodeAffinity", "podAffinity"}
    assert pod["affinity"]["nodeAffinity"] == _NODES["nodeAffinity"]
    assert pod["priorityClassName"] == "frontends"
    bare = fetch_pod({"model": {"cache": {"accessMode": "ReadWriteOnce"}}, "frontend": _WHERE["frontend"]})
    assert not {"nodeSelector", "tolerations"} & bare.keys()
    assert bare["affinity"].keys() == {"podAffinity"}


@pytest.mark.parametrize("cache", [{}, {"claimName": "theirs"}], ids=str)
def test_a_fetch_to_a_shared_volume_runs_where_frontends_may(cache: dict[str, Any]) -> None:
    pod = fetch_pod({"model": {"cache": cache}, **_WHERE})
    assert pod["nodeSelector"] == {"gpu": "no"}
    assert not {"tolerations", "affinity"} & pod.keys()


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_OWN_CLAIM = {"accessMode": "ReadWriteOnce"}


def node_terms(template: dict[str, Any]) -> list[dict[str, Any]]:
    return list(template["spec"].get("affinity", {}).get("podAffinity", {}).get(_REQUIRED, ()))


def matches(term: dict[str, Any], labels: dict[str, str]) -> bool:
    selector = term["labelSelector"]
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]
    )


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ({"model": {"cache": _OWN_CLAIM}}, None),
        ({"model": {"cache": _OWN_CLAIM | {"claimName": "theirs"}}}, None),
        ({}, {"pvc": CLAIM["pvc"] | {"accessMode": "ReadWriteOnce"}}),
    ],
    ids=["own claim", "claim of the user's", "model on a claim"],
)
def test_pods_that_share_a_single_node_claim_are_held_together(spec: Any, source: Any) -> None:
    """Each matches its own term, so that the scheduler places the first one freely."""
    manifests = render(inference_model({"replicas": 2, **spec}, source=source), DEFAULTS)
    engines = [each for each in templates(manifests) if names.REPLICA_LABEL in each["metadata"]["labels"]]
    sharing = [each for each in templates(manifests) if "/models" in str(each["spec"]["containers"][0]["args"])]
    assert len(engines) == 2
    assert len(sharing) == (2 if source else 3)
    for pod in sharing:
        (term,) = node_terms(pod)
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert all(matches(term, other["metadata"]["labels"]) for other in sharing)
    (frontend,) = [each for each in templates(manifests) if each not in sharing]
    assert not node_terms(frontend)
    assert not matches(term, frontend["metadata"]["labels"])


def test_engines_of_another_version_attract_the_fetch_pod() -> None:
    (term,) = node_terms({"spec": fetch_pod({"model": {"cache": _OWN_CLAIM}})})
    old = {"app.kubernetes.io/name": "minisgl", "app.kubernetes.io/instance": "qwen"}
    assert matches(term, old | {"app.kubernetes.io/component": "engine"})
    assert not matches(term, old | {"app.kubernetes.io/component": "engine", "app.kubernetes.io/instance": "other"})


def test_engines_of_other_claims_are_not_held_together() -> None:
    for spec, source in (({}, None), ({"model": {"cache": {"claimName": "theirs"}}}, None), ({}, CLAIM)):
        for template in templates(render(inference_model(spec, source=source), DEFAULTS)):
            assert not node_terms(template)


def test_a_required_pod_affinity_of_the_users_takes_the_place_of_ours() -> None:
    """Two terms would have to be matched by one pod, so the first pod would never be placed."""
    own = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "loader"}}}]
    spec: dict[str, Any] = {"model": {"cache": _OWN_CLAIM}, "engine": {"affinity": {"podAffinity": {_REQUIRED: own}}}}
    for template in templates(render(inference_model(spec), DEFAULTS)):
        if names.REPLICA_LABEL in template["metadata"]["labels"]:
            assert node_terms(template) == own
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": own[0]}]}
    spec["engine"] = {"affinity": {"podAffinity": preferred}}
    for template in templates(render(inference_model(spec), DEFAULTS)):
        if names.REPLICA_LABEL in template["metadata"]["labels"]:
            assert len(node_terms(template)) == 1
            assert template["spec"]["affinity"]["podAffinity"].items() >= preferred.items()


def test_a_read_only_cache_is_mounted_read_only_without_a_fetch() -> None:
    cache = {"claimName": "filled", "accessMode": "ReadOnlyMany"}
    manifests = render(inference_model({"model": {"cache": cache}}), DEFAULTS)
    assert not {"Job", "PersistentVolumeClaim"} & {each["kind"] for each in manifests}
    assert "qwen-fetch" not in {each["metadata"]["name"] for each in manifests}
    pod = find(manifests, "StatefulSet", "qwen-r0")["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert volume["persistentVolumeClaim"] == {"claimName": "filled", "readOnly": True}
    directory = names.cache_key("Qwen/Qwen3-8B", "main", "https://huggingface.co")
    assert pod["containers"][0]["args"][1] == f"/models/{directory}"


def test_replicas_that_share_a_node_may_be_evicted_together() -> None:
    """An evicted replica cannot start elsewhere while another one holds the claim, so a drain would never end."""
    for cache, least in ((_OWN_CLAIM, 0), ({}, 1)):
        model = inference_model({"replicas": 2, "model": {"cache": cache}})
        budget = find(render(model, DEFAULTS), "PodDisruptionBudget", "qwen-engine")
        assert budget["spec"]["minAvailable"] == least


def test_pods_get_the_default_pull_secrets_unless_the_model_sets_its_own() -> None:
    env = replace(DEFAULTS, image_pull_secrets=("one", "two"))
    for spec, wanted in (({}, ["one", "two"]), ({"engine": {"imagePullSecrets": [{"name": "own"}]}}, ["own"])):
        for template in templates(render(inference_model(spec), env)):
            named = [secret["name"] for secret in template["spec"]["imagePullSecrets"]]
            engine = template["metadata"]["labels"][names.COMPONENT_LABEL] == names.ENGINE
            assert named == (wanted if engine else ["one", "two"])


@pytest.mark.parametrize(
    ("asked", "has", "phase", "size"),
    [
        ("2Gi", "1Gi", "Bound", "2Gi"),
        ("1Gi", "2Gi", "Bound", "2Gi"),
        ("1000Mi", "1Gi", "Bound", "1Gi"),
        ("1G", "1Gi", "Bound", "1Gi"),
        ("2Gi", "1Gi", "Pending", "1Gi"),
    ],
)
def test_a_pvc_is_expanded_once_it_is_bound_and_never_shrunk(asked: str, has: str, phase: str, size: str) -> None:
    model = inference_model({"model": {"cache": {"size": asked, "storageClassName": "fast"}}})
    claim = storage.claim(model, DEFAULTS)
    live = {"spec": {"resources": {"requests": {"storage": has}}}, "status": {"phase": phase}}
    found = storage.adjusted(model, claim, live)
    assert found["spec"] == claim["spec"] | {"resources": {"requests": {"storage": size}}}


def test_a_fetch_from_the_hub_may_use_only_https_and_one_from_a_mirror_any_port() -> None:
    hub = find(render(inference_model(), DEFAULTS), "NetworkPolicy", "qwen-fetch")
    assert {port["port"] for rule in hub["spec"]["egress"] for port in rule["ports"]} == {53, 5353, 443}
    source = {"huggingFace": HUB["huggingFace"] | {"endpoint": "http://hub.mirror:8000"}}
    mirror = find(render(inference_model(source=source), DEFAULTS), "NetworkPolicy", "qwen-fetch")
    assert mirror["spec"]["egress"] == [{}]


def test_engines_accept_connections_from_their_frontends_ranks_and_the_operator() -> None:
    policy = find(render(inference_model(), DEFAULTS), "NetworkPolicy", "qwen-engine")
    ranks, frontends, operator = policy["spec"]["ingress"]
    assert "ports" not in ranks
    assert [port["port"] for port in frontends["ports"]] == [5550, 8080]
    assert operator["from"][0]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "minisgl-system"}
    }
    assert [port["port"] for port in operator["ports"]] == [8080]


def test_shared_memory_is_a_tmpfs_where_a_pod_has_several_ranks_unless_the_model_chooses() -> None:
    def shared(parallelism: dict[str, Any], medium: str = "Auto") -> dict[str, Any]:
        spec = {"parallelism": parallelism, "engine": {"shmMedium": medium}}
        manifests = render(inference_model(spec, source=CLAIM), DEFAULTS)
        volumes = find(manifests, "StatefulSet", "qwen-r0")["spec"]["template"]["spec"]["volumes"]
        return dict(next(volume["emptyDir"] for volume in volumes if volume["name"] == "shm"))

    memory, node = {"medium": "Memory", "sizeLimit": "8Gi"}, {"sizeLimit": "8Gi"}
    assert shared({"tensor": 2}) == shared({"tensor": 1}) == shared({"tensor": 8, "gpusPerPod": 4}) == memory
    assert shared({"tensor": 2, "gpusPerPod": 1}) == node
    assert shared({"tensor": 2, "gpusPerPod": 1}, "Memory") == memory
    assert shared({"tensor": 2}, "Node") == shared({"tensor": 8, "gpusPerPod": 4}, "Node") == node


@pytest.mark.parametrize(
    ("claim", "counted"),
    [
        ({"name": "gpu", "gpus": True}, False),
        ({"name": "accelerators", "gpus": True}, False),
        ({"name": "gpus"}, True),
        ({"name": "gpu-network", "gpus": False}, True),
    ],
)
def test_only_a_claim_that_says_so_replaces_the_gpus_requested_by_number(claim: dict[str, Any], counted: bool) -> None:
    claim = {**claim, "resourceClaimTemplateName": "devices"}
    model = inference_model({"parallelism": {"tensor": 2}, "engine": {"podTemplate": {"resourceClaims": [claim]}}})
    pod = find(render(model, DEFAULTS), "StatefulSet", "qwen-r0")["spec"]["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    for amounts in (resources["requests"], resources.get("limits", {})):
        assert amounts.get("nvidia.com/gpu") == ("2" if counted else None)
    assert resources["claims"] == [{"name": claim["name"]}]
    assert pod["resourceClaims"] == [{"name": claim["name"], "resourceClaimTemplateName": "devices"}]


def test_the_root_file_system_is_read_only_but_for_the_gpu_runtime() -> None:
    for device, read_only in (("auto", False), ("cpu", True)):
        manifests = render(inference_model({"engine": {"device": device}}, source=CLAIM), DEFAULTS)
        (engine,) = find(manifests, "StatefulSet", "qwen-r0")["spec"]["template"]["spec"]["containers"]
        assert engine["securityContext"]["readOnlyRootFilesystem"] is read_only


@pytest.mark.parametrize(
    ("name", "index"),
    [("qwen-r0", 0), ("qwen-r12", 12), ("qwen-r01", None), ("qwen-rx", None), ("qwen", None), ("other-r1", None)],
)
def test_replica_indices_are_read_back_from_names(name: str, index: int | None) -> None:
    assert names.replica_index("qwen", name) == index


@pytest.mark.parametrize(
    ("own", "seconds"),
    [
        ([], {"not-ready": 30, "unreachable": 30}),
        ([{"key": "team", "operator": "Exists"}], {"not-ready": 30, "unreachable": 30}),
        ([{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}], {"not-ready": 30}),
        ([{"operator": "Exists"}], {}),
    ],
    ids=["none", "another taint", "one of its own", "all taints"],
)
def test_frontends_leave_a_node_that_stopped_after_30_s(own: list[dict[str, Any]], seconds: dict[str, int]) -> None:
    model = inference_model({"frontend": {"tolerations": own}})
    found = find(render(model, DEFAULTS), "Deployment", "qwen-frontend")["spec"]["template"]["spec"]["tolerations"]
    assert found[: len(own)] == own
    added = {each["key"].removeprefix("node.kubernetes.io/"): each["tolerationSeconds"] for each in found[len(own) :]}
    assert added == seconds


def test_queues_find_their_fields_on_the_stateful_set() -> None:
    """Kueue and Volcano form one group of the pods of a StatefulSet from its own metadata."""
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "team": "a"}
    spec = {"parallelism": {"tensor": 4, "gpusPerPod": 1}, "engine": {"podTemplate": {"labels": labels}}}
    live = find(render(inference_model(spec), DEFAULTS), "StatefulSet", "qwen-r0")
    assert live["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "team" not in live["metadata"]["labels"]
    assert "annotations" not in live["metadata"]
    spec["engine"] = {"podTemplate": {"schedulerName": "volcano"}}
    live = find(render(inference_model(spec), DEFAULTS), "StatefulSet", "qwen-r0")
    assert live["metadata"]["annotations"] == {"scheduling.volcano.sh/group-min-member": "4"}


def test_an_edit_of_recovery_changes_arguments_but_not_the_revision() -> None:
    edited = inference_model({"recovery": {"maxRestarts": 9, "windowSeconds": 60}})
    assert revision(edited, DEFAULTS) == revision(inference_model(), DEFAULTS)
    live = find(render(edited, DEFAULTS), "StatefulSet", "qwen-r0")
    arguments = live["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--max-restarts") + 1] == "9"
