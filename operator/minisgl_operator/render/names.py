"""Names and labels of a model's children."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

MANAGED_BY: Final = "minisgl-operator"
FIELD_MANAGER: Final = "minisgl-operator"
"""Manager of the fields that the operator applies."""
APPLICATION: Final = "minisgl"
OPERATOR_APPLICATION: Final = "minisgl-operator"
GATEWAY_APPLICATION: Final = "minisgl-gateway"

NAME_LABEL: Final = "app.kubernetes.io/name"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
POD_INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
POD_NAME_LABEL: Final = "statefulset.kubernetes.io/pod-name"
MODEL_LABEL: Final = "serving.minisgl.io/model"
REPLICA_LABEL: Final = "serving.minisgl.io/replica"
REVISION_LABEL: Final = "serving.minisgl.io/revision"
SLICE_MANAGER_LABEL: Final = "endpointslice.kubernetes.io/managed-by"
"""Label of an EndpointSlice. Those of other managers have the labels of their Service."""
CACHE_KEY_ANNOTATION: Final = "serving.minisgl.io/cache-key"
"""Annotation of engine pods: the directory of the cache that they load."""

PARTIAL_STARTS_ANNOTATION: Final = "serving.minisgl.io/partial-starts"
"""Annotation of a StatefulSet: how often in succession only a part of its pods got nodes."""
PAUSED_UNTIL_ANNOTATION: Final = "serving.minisgl.io/paused-until"
"""Annotation of a StatefulSet: its pods are not created again before this time."""
EXCEEDED_QUOTA_ANNOTATION: Final = "serving.minisgl.io/exceeded-quota"
"""Annotation of a StatefulSet: the quota that refused some of its pods when they were removed."""
PAUSE_ANNOTATIONS: Final = (PARTIAL_STARTS_ANNOTATION, PAUSED_UNTIL_ANNOTATION, EXCEEDED_QUOTA_ANNOTATION)
PRUNING_ANNOTATION: Final = "serving.minisgl.io/pruning"
"""Annotation of a fetch Job: the directories that its pods may remove, as in their arguments."""

DEFAULT_SCHEDULER: Final = "default-scheduler"
VOLCANO_SCHEDULER: Final = "volcano"
VOLCANO_MIN_MEMBER: Final = "scheduling.volcano.sh/group-min-member"
"""Annotation of a StatefulSet: number of pods that Volcano starts together."""
KUEUE_LABELS: Final = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class")
"""Labels that Kueue reads from the StatefulSet, and not from the pods."""
QUEUE_KEYS: Final = frozenset({KUEUE_LABELS[0], "scheduling.volcano.sh/queue-name"})
"""Labels and annotations of pods that name a queue."""

_REVISION_LENGTH: Final = 10

ENGINE: Final = "engine"
FRONTEND: Final = "frontend"
FETCH: Final = "fetch"
REVISION: Final = "revision"
"""Component of ControllerRevisions. Those of StatefulSets have the labels of pods."""

PEERS: Final = "peers"
"""Component of the Secrets by which the pods of a model know one another."""

KEYS_VOLUME: Final = "keys"
"""Volume of a frontend with its API keys."""
CA_VOLUME: Final = "minisgl-ca"
"""Volume of a fetch pod with a bundle of certificates."""
PEERS_VOLUME: Final = "minisgl-peers"
"""Volume of engines and frontends with the tokens of the model's pods."""

SERVICE_PORT: Final = 80
"""Port of a model's Service; `minisgl.wire.status` has the ports inside the pods."""


def replica(model: str, index: int) -> str:
    """Name of a replica's StatefulSet and of its headless Service."""
    return f"{model}-r{index}"


def replica_index(model: str, name: str) -> int | None:
    """The index in a replica's name; None for any other name."""
    prefix = f"{model}-r"
    digits = name.removeprefix(prefix)
    if not name.startswith(prefix) or not digits.isascii() or not digits.isdigit() or str(int(digits)) != digits:
        return None
    return int(digits)


def leaders(model: str) -> str:
    return f"{model}-leaders"


def engine(model: str) -> str:
    return f"{model}-engine"


def engine_revision(model: str, revision: str) -> str:
    """Name of the ControllerRevision of an engine's pod template."""
    return f"{engine(model)}-{revision}"


def frontend(model: str) -> str:
    return f"{model}-frontend"


def gateway(model: str) -> str:
    """Name of the EndpointSlice that leads to the gateway."""
    return f"{model}-gateway"


def budget(model: str, component: str) -> str:
    """Name of the PodDisruptionBudget of the model's engines or frontends."""
    return f"{model}-{component}"


def peers(model: str, slot: str) -> str:
    """Name of the Secret with one of the two tokens that the model's pods know."""
    return f"{model}-peers-{slot}"


def cache(model: str) -> str:
    return f"{model}-cache"


def fetch(model: str, key: str | None = None) -> str:
    """Name of the fetch Job for one cache key; without a key, of objects that all fetches of the model share."""
    return f"{model}-fetch" if key is None else f"{model}-fetch-{key}"


def cache_key(repo: str, revision: str, endpoint: str) -> str:
    """Directory of one model on the cache, which depends on repository, revision and mirror."""
    return hashlib.sha256(f"{repo}@{revision}@{endpoint}".encode()).hexdigest()[:16]


def revision(content: dict[str, Any]) -> str:
    """Hash of a pod template as a label's value: its revision. Equal for equal content in any order of keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_REVISION_LENGTH]


def selector(model: str, component: str) -> dict[str, str]:
    """Labels that select pods. They never change, as selectors of StatefulSets and Deployments are immutable."""
    return {NAME_LABEL: APPLICATION, INSTANCE_LABEL: model, COMPONENT_LABEL: component}


def labels(model: str, component: str) -> dict[str, str]:
    """Labels of every owned child and of every pod."""
    return {**selector(model, component), MANAGED_BY_LABEL: MANAGED_BY, MODEL_LABEL: model}
