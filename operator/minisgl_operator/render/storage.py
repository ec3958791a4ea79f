"""The cache of a model from the Hub, and the Job that fills it: the only pod with the Hub's token."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Manifest
from minisgl_operator.render import model_files, names, pods
from minisgl_operator.render.child import child
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.quantity import amount, canonical
from minisgl_operator.render.revision import short_hash

# A fetch that asks for something that is not there, or that it may not have, says so with this exit code.
_NO_USE: Final = 2
# Kubernetes waits 10 s, 20 s, 40 s ... between attempts.
_ATTEMPTS: Final = 6


def claim(model: InferenceModel) -> Manifest:
    """A claim to be kept has no owner, so that it outlives the model."""
    cache = model.spec.model.hub_cache
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": canonical(cache.size)}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    name = names.cache(model.name)
    return child(model, "v1", "PersistentVolumeClaim", name, names.FETCH, {"spec": spec}, owned=not cache.retain)


def not_smaller(claim: Manifest, live: Manifest) -> Manifest:
    """The claim with a size that the API server lets it have: one that is bound may grow, and none may shrink. A claim
    may be larger than what is asked for: one that was kept, or one that a person has made larger."""
    asked, has = (each["spec"]["resources"]["requests"]["storage"] for each in (claim, live))
    bound = (live.get("status") or {}).get("phase") == "Bound"
    size = asked if bound and amount(asked) > amount(has) else has
    return {**claim, "spec": {**claim["spec"], "resources": {"requests": {"storage": canonical(size)}}}}


def fetch_job(model: InferenceModel, env: Defaults) -> Manifest:
    """Its label `revision` tells one pod template from another: a Job's template cannot be changed."""
    key = model_files.cache_key(model)
    assert key is not None
    template = {
        "metadata": {"labels": names.labels(model.name, names.FETCH)},
        "spec": _pod_spec(model, env),
    }
    spec = {
        "backoffLimit": _ATTEMPTS,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": names.FETCH, "operator": "In", "values": [_NO_USE]},
                },
                # A drained node is no failed attempt.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    labels = {names.REVISION_LABEL: short_hash(template)}
    name = names.fetch(model.name, key)
    return child(model, "batch/v1", "Job", name, names.FETCH, {"spec": spec}, labels=labels)


def _pod_spec(model: InferenceModel, env: Defaults) -> dict[str, Any]:
    hub = model.spec.model.source.hugging_face
    assert hub is not None
    variables: list[dict[str, Any]] = [
        *pods.IDENTITY,
        {"name": "HOME", "value": pods.RUN_DIRECTORY},
        {"name": "HF_HOME", "value": f"{pods.RUN_DIRECTORY}/huggingface"},
    ]
    if hub.token_secret_ref is not None:
        reference = {"name": hub.token_secret_ref.name, "key": hub.token_secret_ref.key}
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    container = {
        "name": names.FETCH,
        **pods.image(model.spec.frontend, env.frontend_image, env),
        "args": [
            *("models", "fetch", hub.repo, model_files.directory(model)),
            *("--revision", hub.revision),
            *(() if hub.endpoint is None else ("--endpoint", hub.endpoint)),
            *("--control-port", str(names.CONTROL_PORT)),
            *("--termination-log", "/dev/termination-log"),
        ],
        "env": variables,
        "ports": [pods.CONTROL_CONTAINER_PORT],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
        "securityContext": pods.container_security(read_only_root=True),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": model_files.VOLUME, "mountPath": model_files.MODELS_DIRECTORY},
            {"name": "run", "mountPath": pods.RUN_DIRECTORY},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        {"name": model_files.VOLUME, "persistentVolumeClaim": {"claimName": model_files.cache_claim(model)}},
        {"name": "run", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    spec = pods.pod_spec(names.frontend(model.name), [container], volumes)
    spec["restartPolicy"] = "Never"
    return spec | _scheduling(model, env)


def _scheduling(model: InferenceModel, env: Defaults) -> dict[str, Any]:
    """It runs the frontend's image, so it may run where frontends may; it has no wish about neighbours. But the first
    pod of a volume that only one node or zone has may choose which one: it must be one that engines can run on."""
    wishes = pods.scheduling(model.spec.frontend, env) | {"affinity": {}, "topologySpreadConstraints": []}
    cache = model.spec.model.hub_cache
    if cache.claim_name is None and cache.access_mode == "ReadWriteOnce":
        engines = pods.scheduling(model.spec.engine, env)
        nodes = engines.get("affinity", {}).get("nodeAffinity")
        wishes["affinity"] = {"nodeAffinity": nodes} if nodes else {}
        wishes |= {key: engines.get(key) for key in ("nodeSelector", "tolerations")}
    return {key: value for key, value in wishes.items() if value}
