"""Pods that serve the OpenAI API, and the Services of the endpoint and of the leaders."""

from __future__ import annotations

from typing import Any, Final

from minisgl.wire.status import CONTROL_PORT, HTTP_PORT, SCHEDULER_PORT
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import gateway, names, peer_secret, pods, templates, traces
from minisgl_operator.render.child import child

_KEYS_DIRECTORY: Final = "/var/run/minisgl/keys"
_LEAST_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
_HEARS_GATEWAYS: Final = {"name": "MINISGL_HEARS_GATEWAYS", "value": "true"}
_LEAVES_NODE_AFTER: Final = 30
"""Seconds after which a frontend is created elsewhere, instead of the 300 s that Kubernetes lets it wait for its node
to return. Nothing is lost with it: the containers of a kubelet that stopped alone drain when it is back."""
_NODE_STATES: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def revision(model: InferenceModel, defaults: Defaults) -> str:
    """Revision of the frontend's pod template that the spec asks for."""
    return names.revision(_template(model, defaults))


def deployment(model: InferenceModel, defaults: Defaults) -> Manifest:
    count = model.spec.frontend.replicas
    selector = names.selector(model.name, names.FRONTEND)
    template = _template(model, defaults)
    # Pods need no label: the Deployment's controller knows which ones are new.
    labels = {names.REVISION_LABEL: names.revision(template)}
    spec = {
        "replicas": 1 if count is None else count,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector},
        # A frontend is replaced only when its successor is ready.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template,
    }
    name = names.frontend(model.name)
    return child(model, "apps/v1", "Deployment", name, names.FRONTEND, {"spec": spec}, labels=labels)


def service(model: InferenceModel) -> Manifest:
    """The endpoint, under the model's own name."""
    return child(model, "v1", "Service", model.name, names.FRONTEND, {"spec": _service_spec(model)})


def gateway_service(model: InferenceModel) -> Manifest:
    """The frontends for the gateway, which connects to their own port. The Service of the endpoint may lead to the
    gateway itself."""
    spec = _service_spec(model)
    own = {"name": "http-frontend", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}
    name = names.frontend(model.name)
    body = {"spec": {**spec, "ports": [*spec["ports"], own]}}
    return child(model, "v1", "Service", name, names.FRONTEND, body)


def leaders_service(model: InferenceModel) -> Manifest:
    """The Service in which frontends discover replicas: the address of each leader, ready or not."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(model.name, names.ENGINE) | {names.POD_INDEX_LABEL: "0"},
        "ports": pods.service_ports("control", "scheduler"),
    }
    return child(model, "v1", "Service", names.leaders(model.name), names.ENGINE, {"spec": spec})


def _service_spec(model: InferenceModel) -> dict[str, Any]:
    return {
        "type": "ClusterIP",
        "selector": names.selector(model.name, names.FRONTEND),
        "ports": [{"name": "http", "port": names.SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}],
    }


def _template(model: InferenceModel, defaults: Defaults) -> dict[str, Any]:
    return templates.template(
        _pod_spec(model, defaults),
        names.labels(model.name, names.FRONTEND),
        templates.frontend_annotations(mesh=model.spec.frontend.mesh),
        defaults.models.frontend,
        model.spec.frontend.pod_template,
        mesh=model.spec.frontend.mesh,
    )


def _pod_spec(model: InferenceModel, defaults: Defaults) -> dict[str, Any]:
    frontend, default = model.spec.frontend, defaults.models.frontend
    arguments = [
        "frontend",
        *("--engines", names.leaders(model.name)),
        *("--scheduler-port", str(SCHEDULER_PORT)),
        *("--control-port", str(CONTROL_PORT)),
        *("--port", str(HTTP_PORT)),
        *("--drain-timeout", str(model.spec.drain_seconds)),
        *("--leave-timeout", str(frontend.leave_seconds)),
        *("--served-model-name", *model.served_names),
        *traces.arguments(defaults),
    ]
    peers = peer_secret.volume(model.name)
    volumes = [pods.RUN, pods.TMP, peers]
    mounts = [pods.RUN_MOUNT, pods.TMP_MOUNT, pods.mount(peers, peer_secret.DIRECTORY, read_only=True)]
    if frontend.auth is not None:
        keys = frontend.auth.api_keys_secret_ref
        arguments += ["--api-keys", f"{_KEYS_DIRECTORY}/keys"]
        items = [{"key": keys.key, "path": "keys"}]
        volumes.append({"name": names.KEYS_VOLUME, "secret": {"secretName": keys.name, "items": items}})
        mounts.append(pods.mount(volumes[-1], _KEYS_DIRECTORY, read_only=True))
    arguments += frontend.args
    container = {
        "name": names.FRONTEND,
        **pods.image(frontend, defaults.frontend_image, defaults),
        "args": arguments,
        "env": [
            *pods.IDENTITY,
            # A variable and no flag: an older image does not know it.
            *([_HEARS_GATEWAYS] if gateway.is_heard_of(model, defaults) else []),
            *traces.variables(model, defaults),
            *map(pods.variable, frontend.env),
        ],
        "ports": pods.container_ports("http", "control"),
        **pods.resources(frontend.resources, default.resources, _LEAST_REQUESTS),
        "securityContext": pods.container_security(read_only_root=True),
        **pods.probes("/live", startup_failures=150),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    spec = pods.pod_spec(names.frontend(model.name), container, volumes, defaults)
    seconds = frontend.leave_seconds + model.spec.drain_seconds + pods.GRACE_BEYOND_DRAIN
    placement = pods.scheduling(frontend, default, defaults.frontend_architecture, defaults)
    placement["tolerations"] = [*placement.get("tolerations", ()), *_short_tolerations(placement)]
    return {**spec, "terminationGracePeriodSeconds": seconds, **placement}


def _short_tolerations(placement: dict[str, Any]) -> list[dict[str, Any]]:
    """Tolerations of nodes that stopped, unless the spec has its own. One without a key tolerates every taint."""
    own = {each.get("key") for each in placement.get("tolerations", ()) if each.get("effect") in (None, "NoExecute")}
    if None in own:
        return []
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LEAVES_NODE_AFTER}
        for key in _NODE_STATES
        if key not in own
    ]
