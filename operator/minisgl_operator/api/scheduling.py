"""Scheduling and image fields, with the names and the meaning that they have in a pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from minisgl_operator.api.base import (
    ApiModel,
    ImageReference,
    Integer,
    LabelValue,
    ObjectName,
    QualifiedName,
    Quantity,
    Rule,
    Unique,
)

PullPolicy = Literal["Always", "IfNotPresent", "Never"]


class LabelRequirement(ApiModel):
    """One requirement on a label."""

    key: QualifiedName
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """Comparison of the label with the values."""
    values: tuple[LabelValue, ...] = Field(default=(), max_length=64)
    """Values for In and NotIn; empty for Exists and DoesNotExist."""

    def is_met_by(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelector(ApiModel):
    """Selects objects by label; an empty selector selects all."""

    match_labels: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that an object must have, with their values."""
    match_expressions: tuple[LabelRequirement, ...] = Field(default=(), max_length=64)
    """Requirements that an object's labels must all meet."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """True if it selects an object with these labels."""
        equal = all(labels.get(key) == value for key, value in self.match_labels.items())
        return equal and all(each.is_met_by(labels) for each in self.match_expressions)


class Toleration(ApiModel):
    """A taint of a node that the pod tolerates."""

    key: QualifiedName | None = None
    """Key of the taint; absent with operator Exists: every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Comparison of the taint's value."""
    value: LabelValue | None = None
    """Value of the taint, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; default: every effect."""
    toleration_seconds: Integer | None = Field(default=None, ge=0, le=2**31 - 1)
    """Seconds for which a NoExecute taint is tolerated; default: indefinitely."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.key) || self.operator == 'Exists'",
            message="a toleration without key needs operator Exists: set key, or tolerate every taint with Exists",
            field=".operator",
            holds=lambda toleration: toleration.key is not None or toleration.operator == "Exists",
        ),
        Rule(
            cel="self.operator != 'Exists' || !has(self.value) || self.value == ''",
            message="a toleration with operator Exists has no value: remove value, or use operator: Equal",
            field=".value",
            holds=lambda toleration: toleration.operator != "Exists" or not toleration.value,
        ),
    )


class TopologySpreadConstraint(ApiModel):
    """Spreading of pods over nodes, zones or other domains."""

    max_skew: Integer = Field(ge=1, le=1000)
    """Largest difference in pods between two domains."""
    topology_key: QualifiedName
    """Label of nodes that names the domain, such as kubernetes.io/hostname."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """Handling of a pod that would violate the constraint."""
    label_selector: LabelSelector | None = None
    """Selector of the pods that are counted."""
    min_domains: Integer | None = Field(default=None, ge=1, le=10_000)
    """Minimum number of domains, for DoNotSchedule."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Honor: count only nodes that match the pod's nodeAffinity and nodeSelector; Ignore: count all nodes."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Honor: do not count nodes with taints that the pod does not tolerate; Ignore: count all nodes."""
    match_label_keys: tuple[QualifiedName, ...] = Field(default=(), max_length=16)
    """Labels of the new pod that are added to the selector with their values."""


class Affinity(ApiModel):
    """Node and pod affinity. The three fields are validated when the pod is created."""

    node_affinity: dict[str, Any] | None = Field(default=None, max_length=2)
    """Required or preferred nodes, as nodeAffinity of a pod."""
    pod_affinity: dict[str, Any] | None = Field(default=None, max_length=2)
    """Required or preferred placement near other pods, as podAffinity of a pod."""
    pod_anti_affinity: dict[str, Any] | None = Field(default=None, max_length=2)
    """Required or preferred placement away from other pods, as podAntiAffinity of a pod."""


class ImagePullSecret(ApiModel):
    """A Secret of type kubernetes.io/dockerconfigjson."""

    name: ObjectName
    """Name of the Secret, in the namespace of the InferenceModel."""


class Resources(ApiModel):
    """Resources of a container."""

    requests: dict[str, Quantity] = Field(default={}, max_length=16)
    """Resources that the scheduler reserves: cpu, memory, ephemeral-storage."""
    limits: dict[str, Quantity] = Field(default={}, max_length=16)
    """Limits of the container; it is killed when it exceeds its memory limit."""


class PodSettings(ApiModel):
    """Fields that engine and frontend pods share."""

    image: ImageReference | None = None
    """Container image; default: that of the operator's configuration."""
    image_pull_policy: PullPolicy | None = None
    """Pull policy of the image; default: that of the operator's configuration."""
    image_pull_secrets: Annotated[tuple[ImagePullSecret, ...], Field(max_length=16), Unique("name")] = ()
    """Secrets for the image's registry."""
    resources: Resources = Resources()
    """CPU and memory of the container in each pod. Default of an engine: requests of 2 CPUs and 8Gi for each rank, 250m
    and 512Mi on CPUs; of a frontend: requests of 100m and 256Mi. A resource with a request or limit of its own has no
    default."""
    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that a node must have to run the pod."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    """Taints of nodes that the pod tolerates."""
    affinity: Affinity | None = None
    """Node and pod affinity."""
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = Field(default=(), max_length=8)
    """Spreading of pods over nodes, zones or other domains."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pod, for preemption when nodes are full."""
