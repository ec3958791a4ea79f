"""Where a pod may run and how its image comes to the node: the same fields, with the same meaning, as in a pod."""

from __future__ import annotations

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

    key: QualifiedName = Field(description="Key of the label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="How the label relates to the values."
    )
    values: tuple[LabelValue, ...] = Field(
        default=(), max_length=64, description="Values for In and NotIn; empty for Exists and DoesNotExist."
    )


class LabelSelector(ApiModel):
    """Objects by their labels; an empty one selects all."""

    match_labels: dict[str, LabelValue] = Field(
        default={}, max_length=64, description="Labels that an object must have, with these values."
    )
    match_expressions: tuple[LabelRequirement, ...] = Field(
        default=(), max_length=64, description="Requirements that an object's labels must meet, all of them."
    )


class Toleration(ApiModel):
    """A taint of a node that the pod puts up with."""

    key: QualifiedName | None = Field(default=None, description="Key of the taint; left out with Exists: every taint.")
    operator: Literal["Equal", "Exists"] = Field(default="Equal", description="How the taint's value is compared.")
    value: LabelValue | None = Field(default=None, description="Value of the taint, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; left out: every effect."
    )
    toleration_seconds: Integer | None = Field(
        default=None, ge=0, le=2**31 - 1, description="How long a NoExecute taint is put up with; left out: for ever."
    )

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
    """How evenly the pods spread over nodes, zones or another topology."""

    max_skew: Integer = Field(ge=1, le=1000, description="Largest difference in pods between two domains.")
    topology_key: QualifiedName = Field(description="Label of nodes that names the domain: kubernetes.io/hostname.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        description="What happens to a pod that would break the constraint."
    )
    label_selector: LabelSelector | None = Field(default=None, description="The pods that are counted.")
    min_domains: Integer | None = Field(
        default=None, ge=1, le=10_000, description="Fewest domains that must be there, for DoNotSchedule."
    )
    node_affinity_policy: Literal["Honor", "Ignore"] | None = Field(
        default=None, description="Whether nodes that the pod's affinity leaves out are counted."
    )
    node_taints_policy: Literal["Honor", "Ignore"] | None = Field(
        default=None, description="Whether nodes with taints that the pod does not tolerate are counted."
    )
    match_label_keys: tuple[QualifiedName, ...] = Field(
        default=(), max_length=16, description="Labels whose value on the new pod joins the selector."
    )


class Affinity(ApiModel):
    """Which nodes and which neighbours the pod wants. The three fields are checked when the pod is made."""

    node_affinity: dict[str, Any] | None = Field(
        default=None, max_length=2, description="Nodes that the pod needs or prefers: as nodeAffinity in a pod."
    )
    pod_affinity: dict[str, Any] | None = Field(
        default=None, max_length=2, description="Pods that it wants to be near: as podAffinity in a pod."
    )
    pod_anti_affinity: dict[str, Any] | None = Field(
        default=None, max_length=2, description="Pods that it wants to be away from: as podAntiAffinity in a pod."
    )


class ImagePullSecret(ApiModel):
    """A Secret of type kubernetes.io/dockerconfigjson."""

    name: ObjectName = Field(description="Name of the Secret, in the namespace of the InferenceModel.")


class Resources(ApiModel):
    """What a container asks of its node."""

    requests: dict[str, Quantity] = Field(
        default={}, max_length=16, description="What the scheduler sets aside: cpu, memory, ephemeral-storage."
    )
    limits: dict[str, Quantity] = Field(
        default={}, max_length=16, description="What the container may not exceed; more memory than this ends it."
    )


class PodSettings(ApiModel):
    """What engine pods and frontend pods have in common."""

    image: ImageReference | None = Field(
        default=None, description="Container image; left out: the one that the operator was installed with."
    )
    image_pull_policy: PullPolicy | None = Field(
        default=None, description="When the node pulls the image; left out: as the operator was installed."
    )
    image_pull_secrets: Annotated[tuple[ImagePullSecret, ...], Field(max_length=16), Unique("name")] = Field(
        default=(), description="Secrets for the registry of the image."
    )
    resources: Resources = Field(default=Resources(), description="CPU and memory of one pod's container.")
    node_selector: dict[str, LabelValue] = Field(
        default={}, max_length=64, description="Labels that a node must have to run the pod."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=32, description="Taints of nodes that the pod puts up with."
    )
    affinity: Affinity | None = Field(default=None, description="Which nodes and which neighbours the pod wants.")
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = Field(
        default=(), max_length=8, description="How evenly the pods spread over nodes, zones or another topology."
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="PriorityClass of the pod: who makes room for whom when nodes are full."
    )
