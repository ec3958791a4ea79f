"""One StatefulSet and one headless Service for each replica: the pods that hold its ranks."""

from __future__ import annotations

from typing import Any

from minisgl_operator.api.types import EnvironmentVariable, InferenceModel
from minisgl_operator.facts.observed import Manifest
from minisgl_operator.render import model_files, names, pods
from minisgl_operator.render.child import child
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.quantity import canonical


def stateful_set(model: InferenceModel, env: Defaults, index: int, revision: str) -> Manifest:
    """The ranks of one replica. Its pods start together and are replaced together, by the operator (OnDelete): a
    rolling update would put ranks of two revisions into one group."""
    name = names.replica(model.name, index)
    template = pod_template(model, env, index)
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
    """Names for the pods of one replica, from before they are ready: ranks meet by them."""
    name = names.replica(model.name, index)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(model.name, names.ENGINE) | {names.REPLICA_LABEL: name},
        "ports": [
            {"name": "control", "port": names.CONTROL_PORT, "targetPort": "control", "protocol": "TCP"},
            {"name": "scheduler", "port": names.SCHEDULER_PORT, "targetPort": "scheduler", "protocol": "TCP"},
            {"name": "link", "port": names.LINK_PORT, "targetPort": "link", "protocol": "TCP"},
        ],
    }
    return child(model, "v1", "Service", name, names.ENGINE, {"spec": spec}, labels=_labels(name))


def pod_template(model: InferenceModel, env: Defaults, index: int) -> dict[str, Any]:
    """Without the revision, which is computed from it."""
    name = names.replica(model.name, index)
    spec = pods.pod_spec(names.engine(model.name), [_container(model, env, name)], _volumes(model))
    spec["terminationGracePeriodSeconds"] = model.spec.drain_seconds + pods.GRACE_BEYOND_DRAIN
    if model.spec.engine.runtime_class_name is not None:
        spec["runtimeClassName"] = model.spec.engine.runtime_class_name
    spec |= pods.scheduling(model.spec.engine, env)
    metadata: dict[str, Any] = {"labels": names.labels(model.name, names.ENGINE) | _labels(name)}
    if (key := model_files.cache_key(model)) is not None:
        metadata["annotations"] = {names.CACHE_KEY_ANNOTATION: key}
    return {"metadata": metadata, "spec": spec}


def _labels(replica: str) -> dict[str, str]:
    return {names.REPLICA_LABEL: replica}


def _container(model: InferenceModel, env: Defaults, replica: str) -> dict[str, Any]:
    engine = model.spec.engine
    on_gpu = engine.device == "auto"
    gpus = {engine.gpu_resource_name: str(model.spec.parallelism.ranks_per_pod)} if on_gpu else {}
    return {
        "name": names.ENGINE,
        **pods.image(engine, env.engine_image, env),
        "args": _arguments(model, replica),
        "env": [
            pods.field("MINISGL_POD_INDEX", f"metadata.labels['{names.POD_INDEX_LABEL}']"),
            pods.field("MINISGL_REVISION", f"metadata.labels['{names.REVISION_LABEL}']"),
            *pods.IDENTITY,
            {"name": "HOME", "value": pods.RUN_DIRECTORY},
            *(_variable(variable) for variable in engine.env),
        ],
        "ports": [
            pods.CONTROL_CONTAINER_PORT,
            {"name": "scheduler", "containerPort": names.SCHEDULER_PORT, "protocol": "TCP"},
            {"name": "link", "containerPort": names.LINK_PORT, "protocol": "TCP"},
        ],
        **pods.resources(engine.resources, gpus),
        # The GPU runtime writes into the root file system of a container that gets devices.
        "securityContext": pods.container_security(read_only_root=not on_gpu),
        # Loading is guarded by --startup-timeout, which knows how far it is; this only waits for the launcher.
        "startupProbe": pods.probe("/startup", period=2, failures=60),
        "livenessProbe": pods.probe("/live", period=10, failures=6),
        "readinessProbe": pods.probe("/ready", period=2, failures=2),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "run", "mountPath": pods.RUN_DIRECTORY},
            {"name": model_files.VOLUME, "mountPath": model_files.MODELS_DIRECTORY, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
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
    # The API server stores an empty value as none.
    return {key: value for key, value in body.items() if value != ""}


def _volumes(model: InferenceModel) -> list[dict[str, Any]]:
    size = {"sizeLimit": canonical(model.spec.engine.shm_size)}
    # Ranks in separate pods can use NVLink only if /dev/shm is on the same device for all of them: so it is when it
    # is a directory of the node's disk. A tmpfs is each pod's own. Nothing large is written where there is one pod
    # for each rank.
    shared = {"medium": "Memory", **size} if model.spec.parallelism.pods == 1 else size
    return [
        {"name": "run", "emptyDir": {}},
        model_files.volume(model),
        {"name": "shm", "emptyDir": shared},
        {"name": "tmp", "emptyDir": {}},
    ]
