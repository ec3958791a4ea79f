"""StatefulSet and headless Service of each replica: the pods that run its ranks."""

from __future__ import annotations

from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import EnvironmentVariable, InferenceModel
from minisgl_operator.render import model_files, names, pods, single_node
from minisgl_operator.render.child import child
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.ports import container_ports, service_ports
from minisgl_operator.render.quantity import canonical


def stateful_set(model: InferenceModel, defaults: Defaults, index: int, revision: str) -> Manifest:
    """The pods of one replica. They start together, and the operator replaces them together (OnDelete): a rolling
    update would mix ranks of two revisions in one replica."""
    name = names.replica(model.name, index)
    template = pod_template(model, defaults, index)
    template["metadata"]["labels"][names.REVISION_LABEL] = revision
    selector = names.selector(model.name, names.ENGINE) | {names.REPLICA_LABEL: name}
    spec = {
        "replicas": model.spec.parallelism.pods,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": selector},
        "template": template,
    }
    return child(model, "apps/v1", "StatefulSet", name, names.ENGINE, {"spec": spec}, labels=_labels(name))


def peers_service(model: InferenceModel, index: int) -> Manifest:
    """DNS names of the pods of one replica, also before they are ready: ranks need them for the rendezvous."""
    name = names.replica(model.name, index)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(model.name, names.ENGINE) | {names.REPLICA_LABEL: name},
        "ports": service_ports("control", "scheduler", "link"),
    }
    return child(model, "v1", "Service", name, names.ENGINE, {"spec": spec}, labels=_labels(name))


def pod_template(model: InferenceModel, defaults: Defaults, index: int) -> dict[str, Any]:
    """The template without the revision label, whose value is computed from it."""
    name = names.replica(model.name, index)
    spec = pods.pod_spec(names.engine(model.name), [_container(model, defaults, name)], _volumes(model))
    spec["terminationGracePeriodSeconds"] = model.spec.drain_seconds + pods.GRACE_BEYOND_DRAIN
    if model.spec.engine.runtime_class_name is not None:
        spec["runtimeClassName"] = model.spec.engine.runtime_class_name
    spec |= pods.scheduling(model.spec.engine, defaults)
    if affinity := single_node.with_pods_of_claim(model, spec.get("affinity", {})):
        spec["affinity"] = affinity
    metadata: dict[str, Any] = {"labels": names.labels(model.name, names.ENGINE) | _labels(name)}
    if (key := model_files.cache_key(model)) is not None:
        metadata["annotations"] = {names.CACHE_KEY_ANNOTATION: key}
    return {"metadata": metadata, "spec": spec}


def _labels(replica: str) -> dict[str, str]:
    return {names.REPLICA_LABEL: replica}


def _container(model: InferenceModel, defaults: Defaults, replica: str) -> dict[str, Any]:
    engine = model.spec.engine
    on_gpu = engine.device == "auto"
    gpus = {engine.gpu_resource_name: str(model.spec.parallelism.ranks_per_pod)} if on_gpu else {}
    return {
        "name": names.ENGINE,
        **pods.image(engine, defaults.engine_image, defaults),
        "args": _arguments(model, replica),
        "env": [
            pods.field("MINISGL_POD_INDEX", f"metadata.labels['{names.POD_INDEX_LABEL}']"),
            pods.field("MINISGL_REVISION", f"metadata.labels['{names.REVISION_LABEL}']"),
            *pods.IDENTITY,
            *(_variable(variable) for variable in engine.env),
        ],
        "ports": container_ports("control", "scheduler", "link"),
        **pods.resources(engine.resources, gpus),
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
        *("--dtype", spec.model.dtype),
        *(() if length is None else ("--max-model-len", str(length))),
        *("--peer-domain", replica),
        *("--revision-label", "$(MINISGL_REVISION)"),
        *("--startup-timeout", str(spec.engine.startup_timeout_seconds)),
        *("--drain-timeout", str(spec.drain_seconds)),
        *("--max-restarts", str(spec.recovery.max_restarts)),
        *("--restart-window", str(spec.recovery.window_seconds)),
        *spec.engine.args,
    ]


def _variable(variable: EnvironmentVariable) -> dict[str, Any]:
    body = variable.manifest()
    # The API server drops an empty value.
    return {key: value for key, value in body.items() if value != ""}


def _volumes(model: InferenceModel) -> list[dict[str, Any]]:
    size = {"sizeLimit": canonical(model.spec.engine.shm_size)}
    # Ranks in separate pods can use NVLink only if their /dev/shm is on one device, such as the node's disk; each tmpfs
    # is a device of its own. With one pod for each rank, nothing large is written there.
    shared = {"medium": "Memory", **size} if model.spec.parallelism.pods == 1 else size
    return [pods.RUN, model_files.volume(model), {"name": "shm", "emptyDir": shared}, pods.TMP]
