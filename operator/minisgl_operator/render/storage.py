"""PVC of a model from the Hub or a bucket, and the fetch Job, whose pod is the only one with the credentials."""

from __future__ import annotations

from typing import Any, Final

from minisgl.wire.status import CONTROL_PORT
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import model_files, names, pods, remote_access, single_node, templates
from minisgl_operator.render.child import child
from minisgl_operator.render.quantity import amount, canonical

# Exit code of `minisgl models fetch` when a retry is useless: the model does not exist, or access is denied.
_USELESS_RETRY: Final = 2
# Kubernetes waits 10 s, 20 s, 40 s ... between attempts.
_ATTEMPTS: Final = 6
_LEAST_REQUESTS: Final = {"cpu": "100m", "memory": "512Mi"}


def claim(model: InferenceModel, defaults: Defaults) -> Manifest:
    """The PVC; with `retain` it has no owner, so that it outlives the model."""
    cache = model.spec.model.fetch_cache
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": canonical(cache.size)}},
    }
    storage_class = cache.storage_class_name or defaults.models.storage_class_name
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    name = names.cache(model.name)
    return child(model, "v1", "PersistentVolumeClaim", name, names.FETCH, {"spec": spec}, owned=not cache.retain)


def adjusted(model: InferenceModel, claim: Manifest, live: Manifest) -> Manifest:
    """The PVC with a size and a StorageClass that the API server accepts for the live one.

    A bound PVC may be expanded, and none may shrink. The live PVC may be larger than requested: one that was retained,
    or that a user has expanded. Its class cannot change: a new default applies to new claims.
    """
    requested, current = (each["spec"]["resources"]["requests"]["storage"] for each in (claim, live))
    bound = (live.get("status") or {}).get("phase") == "Bound"
    size = requested if bound and amount(requested) > amount(current) else current
    spec = {**claim["spec"], "resources": {"requests": {"storage": canonical(size)}}}
    if model.spec.model.fetch_cache.storage_class_name is None and "storageClassName" in live["spec"]:
        spec["storageClassName"] = live["spec"]["storageClassName"]
    return {**claim, "spec": spec}


def fetch_job(model: InferenceModel, defaults: Defaults) -> Manifest:
    """The Job; its label `revision` identifies the pod template, as a Job's template is immutable."""
    key = model_files.cache_key(model)
    assert key is not None
    template = templates.template(
        _pod_spec(model, defaults),
        names.labels(model.name, names.FETCH),
        templates.FETCH_ANNOTATIONS,
        defaults.models.fetch,
        model.spec.fetch.pod_template,
    )
    spec = {
        "backoffLimit": _ATTEMPTS,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": names.FETCH, "operator": "In", "values": [_USELESS_RETRY]},
                },
                # An eviction is not a failed attempt.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    labels = {names.REVISION_LABEL: names.revision(template)}
    name = names.fetch(model.name, key)
    return child(model, "batch/v1", "Job", name, names.FETCH, {"spec": spec}, labels=labels)


def _pod_spec(model: InferenceModel, defaults: Defaults) -> dict[str, Any]:
    cache = model_files.volume(model)
    variables: list[dict[str, Any]] = [
        *pods.IDENTITY,
        {"name": "HF_HOME", "value": f"{pods.RUN_DIRECTORY}/huggingface"},
        *remote_access.variables(model, defaults),
    ]
    container = {
        "name": names.FETCH,
        **pods.image(model.spec.frontend, defaults.frontend_image, defaults),
        "args": [
            *("models", "fetch"),
            *remote_access.arguments(model, model_files.directory(model), defaults),
            *("--owner", model.name),
            "--share-files",
            *("--control-port", str(CONTROL_PORT)),
            *("--termination-log", "/dev/termination-log"),
        ],
        "env": [*variables, *map(pods.variable, model.spec.fetch.env)],
        "ports": pods.container_ports("control"),
        **pods.resources(model.spec.fetch.resources, defaults.models.fetch.resources, _LEAST_REQUESTS),
        "securityContext": pods.container_security(read_only_root=True),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            pods.mount(cache, model_files.MODELS_DIRECTORY),
            pods.RUN_MOUNT,
            pods.TMP_MOUNT,
            *remote_access.mounts(defaults),
        ],
    }
    account = model.spec.service_account_name or names.frontend(model.name)
    volumes = [cache, pods.RUN, pods.TMP, *remote_access.volumes(defaults)]
    spec = pods.pod_spec(account, container, volumes, defaults)
    spec["restartPolicy"] = "Never"
    return spec | _scheduling(model, defaults)


def _scheduling(model: InferenceModel, defaults: Defaults) -> dict[str, Any]:
    """The scheduling fields of frontends, whose image it runs, without those about other pods. For a ReadWriteOnce
    volume the first pod may choose node or zone: it must be one that engines can run on, and later pods follow it."""
    architecture = defaults.frontend_architecture
    frontends = pods.scheduling(model.spec.frontend, defaults.models.frontend, architecture, defaults)
    fields = {**frontends, "affinity": {}, "topologySpreadConstraints": []}
    if single_node.claim(model) is not None:
        architecture = defaults.engine_architecture
        engines = pods.scheduling(model.spec.engine, defaults.models.engine, architecture, defaults)
        nodes = engines.get("affinity", {}).get("nodeAffinity")
        fields["affinity"] = single_node.with_pods_of_claim(model, {"nodeAffinity": nodes} if nodes else {})
        fields |= {key: engines.get(key) for key in ("nodeSelector", "tolerations")}
    return {key: value for key, value in fields.items() if value}
