"""The pods that answer the OpenAI API, and the Service that users call."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Manifest
from minisgl_operator.render import names, pods
from minisgl_operator.render.child import child
from minisgl_operator.render.defaults import Defaults

_KEYS_DIRECTORY: Final = "/var/run/minisgl/keys"


def deployment(model: InferenceModel, env: Defaults) -> Manifest:
    selector = names.selector(model.name, names.FRONTEND)
    template = {
        "metadata": {"labels": names.labels(model.name, names.FRONTEND)},
        "spec": _pod_spec(model, env),
    }
    spec = {
        "replicas": model.spec.frontend.replicas,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector},
        # A frontend is replaced only when its successor can answer.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template,
    }
    return child(model, "apps/v1", "Deployment", names.frontend(model.name), names.FRONTEND, {"spec": spec})


def service(model: InferenceModel) -> Manifest:
    """The endpoint, under the model's own name."""
    spec = {
        "type": "ClusterIP",
        "selector": names.selector(model.name, names.FRONTEND),
        "ports": [{"name": "http", "port": names.SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return child(model, "v1", "Service", model.name, names.FRONTEND, {"spec": spec})


def leaders_service(model: InferenceModel) -> Manifest:
    """How frontends find the replicas: an address for each first pod, ready or not."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(model.name, names.ENGINE) | {names.POD_INDEX_LABEL: "0"},
        "ports": [
            {"name": "control", "port": names.CONTROL_PORT, "targetPort": "control", "protocol": "TCP"},
            {"name": "scheduler", "port": names.SCHEDULER_PORT, "targetPort": "scheduler", "protocol": "TCP"},
        ],
    }
    return child(model, "v1", "Service", names.leaders(model.name), names.ENGINE, {"spec": spec})


def _pod_spec(model: InferenceModel, env: Defaults) -> dict[str, Any]:
    frontend = model.spec.frontend
    arguments = [
        "frontend",
        *("--engines", names.leaders(model.name)),
        *("--scheduler-port", str(names.SCHEDULER_PORT)),
        *("--control-port", str(names.CONTROL_PORT)),
        *("--port", str(names.HTTP_PORT)),
        *("--host", "0.0.0.0"),
        *("--drain-timeout", str(model.spec.drain_seconds)),
        *("--served-model-name", *model.served_names),
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "run", "mountPath": pods.RUN_DIRECTORY},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[dict[str, Any]] = [{"name": "run", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    if frontend.auth is not None:
        keys = frontend.auth.api_keys_secret_ref
        arguments += ["--api-keys", f"{_KEYS_DIRECTORY}/keys"]
        mounts.append({"name": "keys", "mountPath": _KEYS_DIRECTORY, "readOnly": True})
        secret = {"secretName": keys.name, "items": [{"key": keys.key, "path": "keys"}]}
        volumes.append({"name": "keys", "secret": secret})
    container = {
        "name": names.FRONTEND,
        **pods.image(frontend, env.frontend_image, env),
        "args": arguments,
        "env": [*pods.IDENTITY, {"name": "HOME", "value": pods.RUN_DIRECTORY}],
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            pods.CONTROL_CONTAINER_PORT,
        ],
        **pods.resources(frontend.resources),
        "securityContext": pods.container_security(read_only_root=True),
        "startupProbe": pods.probe("/live", period=2, failures=150),
        "livenessProbe": pods.probe("/live", period=10, failures=6),
        "readinessProbe": pods.probe("/ready", period=2, failures=2),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    spec = pods.pod_spec(names.frontend(model.name), [container], volumes)
    spec["terminationGracePeriodSeconds"] = model.spec.drain_seconds + pods.GRACE_BEYOND_DRAIN
    return spec | pods.scheduling(frontend, env)
