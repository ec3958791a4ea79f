"""StatefulSet and headless Service of each replica: the pods that run its ranks."""

from __future__ import annotations

from typing import Any

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import EngineSpec, InferenceModel, Parallelism, Recovery
from minisgl_operator.render import model_files, names, peer_secret, pods, single_node, templates
from minisgl_operator.render.child import child
from minisgl_operator.render.engine_template import EngineTemplate
from minisgl_operator.render.quantity import canonical


def current_template(model: InferenceModel, defaults: Defaults) -> EngineTemplate:
    """The template that the spec asks for. Its revision is a hash of it.

    `spec.recovery` has no part in it: an edit restarts nothing, and applies to pods that are created after it.
    """
    unaffected = model.spec.model_copy(update={"recovery": Recovery()})
    body = _pod_template(model.model_copy(update={"spec": unaffected}), defaults)
    return EngineTemplate(names.revision(body), body)


def stateful_set(model: InferenceModel, template: EngineTemplate, index: int) -> Manifest:
    """The pods of one replica. They start together, and the operator replaces them together (OnDelete): a rolling
    update would mix ranks of two revisions in one replica."""
    name = names.replica(model.name, index)
    body = template.for_replica(name, model.spec.recovery)
    selector = names.selector(model.name, names.ENGINE) | {names.REPLICA_LABEL: name}
    spec = {
        "replicas": template.pods,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": selector},
        "template": body,
    }
    queue = {key: value for key, value in body["metadata"]["labels"].items() if key in names.KUEUE_LABELS}
    manifest = child(model, "apps/v1", "StatefulSet", name, names.ENGINE, {"spec": spec}, labels=queue | _labels(name))
    if body["spec"].get("schedulerName") == names.VOLCANO_SCHEDULER:
        # The group that Volcano creates for a StatefulSet would start with one pod otherwise.
        manifest["metadata"]["annotations"] = {names.VOLCANO_MIN_MEMBER: str(spec["replicas"])}
    return manifest


def first_pod(model: InferenceModel, template: EngineTemplate, stateful_set: Manifest) -> Manifest:
    """Pod 0 of a replica with this template, as the controller of its existing StatefulSet would create it."""
    name = stateful_set["metadata"]["name"]
    body = template.for_replica(name, model.spec.recovery)
    owner = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": name,
        "uid": stateful_set["metadata"]["uid"],
        "controller": True,
    }
    pod = f"{name}-0"
    metadata = {
        **body["metadata"],
        "name": pod,
        "namespace": model.metadata.namespace,
        "labels": body["metadata"]["labels"] | {names.POD_INDEX_LABEL: "0", names.POD_NAME_LABEL: pod},
        "ownerReferences": [owner],
    }
    spec = {**body["spec"], "hostname": pod, "subdomain": name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def peers_service(model: InferenceModel, index: int) -> Manifest:
    """DNS names of the pods of one replica, also before they are ready: ranks need them for the rendezvous."""
    name = names.replica(model.name, index)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(model.name, names.ENGINE) | {names.REPLICA_LABEL: name},
        "ports": pods.service_ports("control", "scheduler", "link"),
    }
    return child(model, "v1", "Service", name, names.ENGINE, {"spec": spec}, labels=_labels(name))


def _pod_template(model: InferenceModel, defaults: Defaults) -> dict[str, Any]:
    """The template of the first replica, without the revision label, whose value is computed from it."""
    name = names.replica(model.name, 0)
    engine, default = model.spec.engine, defaults.models.engine
    account = model.spec.service_account_name or names.engine(model.name)
    spec = pods.pod_spec(account, _container(model, defaults, name), _volumes(model), defaults)
    spec["terminationGracePeriodSeconds"] = model.spec.drain_seconds + pods.GRACE_BEYOND_DRAIN
    runtime_class = engine.runtime_class_name or (default.runtime_class_name if _on_gpu(engine) else None)
    if runtime_class is not None:
        spec["runtimeClassName"] = runtime_class
    spec |= pods.scheduling(engine, default, defaults.engine_architecture, defaults)
    if affinity := single_node.with_pods_of_claim(model, spec.get("affinity", {})):
        spec["affinity"] = affinity
    labels = names.labels(model.name, names.ENGINE) | _labels(name)
    annotations = dict(templates.ENGINE_ANNOTATIONS)
    if (key := model_files.cache_key(model)) is not None:
        annotations[names.CACHE_KEY_ANNOTATION] = key
    return templates.template(spec, labels, annotations, default, engine.pod_template)


def _labels(replica: str) -> dict[str, str]:
    return {names.REPLICA_LABEL: replica}


def _on_gpu(engine: EngineSpec) -> bool:
    return engine.device == "auto"


def _least_requests(engine: EngineSpec, ranks: int) -> dict[str, str]:
    """Requests of a pod with `ranks` ranks that sets none."""
    if _on_gpu(engine):
        return {"cpu": str(2 * ranks), "memory": f"{8 * ranks}Gi"}
    return {"cpu": f"{250 * ranks}m", "memory": f"{512 * ranks}Mi"}


def shm_in_memory(engine: EngineSpec, parallelism: Parallelism) -> bool:
    """True if /dev/shm is a tmpfs."""
    if engine.shm_medium == "Auto":
        return parallelism.pods == 1 or parallelism.ranks_per_pod > 1
    return engine.shm_medium == "Memory"


def _container(model: InferenceModel, defaults: Defaults, replica: str) -> dict[str, Any]:
    engine = model.spec.engine
    on_gpu, ranks = _on_gpu(engine), model.spec.parallelism.ranks_per_pod
    gpus = {engine.gpu_resource_name: str(ranks)} if on_gpu and not engine.claims_gpus else {}
    return {
        "name": names.ENGINE,
        **pods.image(engine, defaults.engine_image, defaults),
        "args": _arguments(model, replica),
        "env": [
            pods.field("MINISGL_POD_INDEX", f"metadata.labels['{names.POD_INDEX_LABEL}']"),
            pods.field("MINISGL_REVISION", f"metadata.labels['{names.REVISION_LABEL}']"),
            *pods.IDENTITY,
            *map(pods.variable, engine.env),
        ],
        "ports": pods.container_ports("control", "scheduler", "link"),
        **pods.resources(engine.resources, defaults.models.engine.resources, _least_requests(engine, ranks), gpus),
        # The GPU runtime writes to the root file system of a container with devices.
        "securityContext": pods.container_security(read_only_root=not on_gpu),
        # Loading is limited by --startup-timeout, which knows its progress; this only waits for the launcher.
        **pods.probes("/startup", startup_failures=60),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            pods.RUN_MOUNT,
            pods.mount(model_files.volume(model), model_files.MODELS_DIRECTORY, read_only=True),
            {"name": "shm", "mountPath": "/dev/shm"},
            pods.TMP_MOUNT,
            pods.mount(peer_secret.volume(model.name), peer_secret.DIRECTORY, read_only=True),
        ],
    }


def _arguments(model: InferenceModel, replica: str) -> list[str]:
    spec = model.spec
    length = spec.model.max_model_len
    return [
        "engine",
        model_files.directory(model),
        *("--served-model-name", model.served_names[0]),
        *("--replica", replica),
        *("--tp", str(spec.parallelism.tensor)),
        *("--ranks-per-pod", str(spec.parallelism.ranks_per_pod)),
        *("--device", "cuda" if spec.engine.device == "auto" else "cpu"),
        *(() if spec.task == "auto" else ("--task", spec.task)),
        *("--dtype", spec.model.dtype),
        *(() if length is None else ("--max-model-len", str(length))),
        *(() if spec.engine.quantization is None else ("--quantization", spec.engine.quantization)),
        *(() if spec.engine.kv_cache_dtype == "auto" else ("--kv-cache-dtype", spec.engine.kv_cache_dtype)),
        *(() if spec.engine.speculative is None else ("--speculative", spec.engine.speculative)),
        *("--peer-domain", replica),
        *("--revision-label", "$(MINISGL_REVISION)"),
        *("--startup-timeout", str(spec.engine.startup_timeout_seconds)),
        *("--drain-timeout", str(spec.drain_seconds)),
        *("--max-restarts", str(spec.recovery.max_restarts)),
        *("--restart-window", str(spec.recovery.window_seconds)),
        *spec.engine.args,
    ]


def _volumes(model: InferenceModel) -> list[dict[str, Any]]:
    engine = model.spec.engine
    size = {"sizeLimit": canonical(engine.shm_size)}
    # Ranks in separate pods can use NVLink only if their /dev/shm is on one device, such as the node's disk; each tmpfs
    # is a device of its own. With one pod for each rank, nothing large is written there.
    shared = {"medium": "Memory", **size} if shm_in_memory(engine, model.spec.parallelism) else size
    return [
        pods.RUN,
        model_files.volume(model),
        {"name": "shm", "emptyDir": shared},
        pods.TMP,
        peer_secret.volume(model.name),
    ]
