"""Additions of the user to the pods of a model: labels, annotations, volumes and resource claims."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from minisgl_operator.api.base import (
    ApiModel,
    Boolean,
    DnsLabel,
    Integer,
    LabelValue,
    ObjectName,
    Quantity,
    Rule,
    SecretKey,
    Unique,
)

# Labels that the operator, a controller of Kubernetes or a selector sets.
RESERVED_LABELS: Final = (
    "app.kubernetes.io/component",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/name",
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "pod-template-hash",
)
RESERVED_LABEL_PREFIXES: Final = (
    "apps.kubernetes.io/",
    "batch.kubernetes.io/",
    "serving.minisgl.io/",
    "statefulset.kubernetes.io/",
)
RESERVED_ANNOTATION_PREFIX: Final = "serving.minisgl.io/"
RESERVED_VOLUMES: Final = ("keys", "minisgl-ca", "minisgl-peers", "models", "run", "shm", "tmp")
RESERVED_MOUNTS: Final = (
    "/dev/shm",
    "/dev/termination-log",
    "/models",
    "/opt/minisgl",
    "/proc",
    "/run/minisgl",
    "/sys",
    "/tmp",
    "/var/run/minisgl",
)
"""Paths at and below which containers have files of their own."""
RESERVED_PARENTS: Final = (
    "/bin",
    "/dev",
    "/lib",
    "/lib64",
    "/opt",
    "/run",
    "/usr",
    "/usr/bin",
    "/usr/lib",
    "/usr/local",
    "/usr/local/bin",
    "/usr/local/lib",
    "/var",
    "/var/run",
)
"""Paths that a volume would hide together with reserved ones or with the image's programs, such as python and minisgl
in /usr/local/bin. Below them mounts are allowed."""

_MOUNT_PATTERN: Final = f"(({'|'.join(RESERVED_MOUNTS)})(/.*)?|{'|'.join(RESERVED_PARENTS)})"


def _reserved_label(key: str) -> bool:
    return key in RESERVED_LABELS or key.startswith(RESERVED_LABEL_PREFIXES)


def _beginning(variable: str, prefixes: tuple[str, ...]) -> str:
    return " || ".join(f"{variable}.startsWith('{prefix}')" for prefix in prefixes)


class PodMetadata(ApiModel):
    """Labels and annotations of pods."""

    labels: dict[str, LabelValue] = Field(default={}, max_length=32)
    """Additional labels, for example a queue of Kueue or a cost centre."""
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(default={}, max_length=32)
    """Additional annotations. They override those that the operator sets by default: see docs/kubernetes.md."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.labels) || !self.labels.exists(key, "
            f"key in {list(RESERVED_LABELS)} || {_beginning('key', RESERVED_LABEL_PREFIXES)})",
            message="the operator or Kubernetes sets one of these labels: remove it (reserved: "
            f"{', '.join((*RESERVED_LABELS, *(f'{prefix}*' for prefix in RESERVED_LABEL_PREFIXES)))})",
            field=".labels",
            holds=lambda part: not any(map(_reserved_label, part.labels)),
        ),
        Rule(
            cel="!has(self.annotations) || "
            f"!self.annotations.exists(key, key.startsWith('{RESERVED_ANNOTATION_PREFIX}'))",
            message=f"the operator sets annotations that begin with {RESERVED_ANNOTATION_PREFIX} itself: remove them",
            field=".annotations",
            holds=lambda part: not any(key.startswith(RESERVED_ANNOTATION_PREFIX) for key in part.annotations),
        ),
    )


_COMPONENT: Final = r"\.?[^./:\n][^/:\n]*"
RelativePath = Annotated[str, Field(min_length=1, max_length=255, pattern=f"^{_COMPONENT}(/{_COMPONENT})*$")]
"""A path below a directory, without components . and .. ."""
MountPath = Annotated[str, Field(min_length=2, max_length=255, pattern=f"^(/{_COMPONENT})+$")]
"""An absolute path without empty components, . and .. ."""


class VolumeItem(ApiModel):
    """One key of a ConfigMap or Secret as a file."""

    key: SecretKey
    """Key in the object."""
    path: RelativePath
    """Path of the file in the volume."""
    mode: Integer | None = Field(default=None, ge=0, le=0o777)
    """Permissions of the file, as a decimal number; default: 420, which is 0644."""


class ConfigMapVolume(ApiModel):
    """Files from a ConfigMap."""

    name: ObjectName
    """Name of the ConfigMap."""
    items: tuple[VolumeItem, ...] = Field(default=(), max_length=16)
    """Keys to mount; default: all."""
    optional: Boolean | None = None
    """Start the pod also without the ConfigMap; default: false."""


class SecretVolume(ApiModel):
    """Files from a Secret."""

    secret_name: ObjectName
    """Name of the Secret."""
    items: tuple[VolumeItem, ...] = Field(default=(), max_length=16)
    """Keys to mount; default: all."""
    optional: Boolean | None = None
    """Start the pod also without the Secret; default: false."""


class PersistentVolumeClaimVolume(ApiModel):
    """A PersistentVolumeClaim."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim. All pods that have the volume use this one claim."""
    read_only: Boolean | None = None
    """Mount the claim read-only; default: false."""


class EmptyDirVolume(ApiModel):
    """An empty directory that lives as long as the pod."""

    medium: Literal["Memory"] | None = None
    """Memory: a tmpfs, which counts as memory of the pod; default: the node's disk."""
    size_limit: Quantity | None = None
    """Size of the directory; default: no limit. A pod that exceeds it is evicted."""


class CsiVolume(ApiModel):
    """An inline volume of a CSI driver, such as one for secrets or certificates."""

    driver: ObjectName
    """Name of the driver."""
    read_only: Boolean | None = None
    """Mount the volume read-only; default: false."""
    fs_type: str | None = Field(default=None, min_length=1, max_length=63)
    """File system of the volume; default: that of the driver."""
    volume_attributes: dict[str, Annotated[str, Field(max_length=1024)]] = Field(default={}, max_length=32)
    """Attributes for the driver."""


class Volume(ApiModel):
    """An additional volume: its name, and exactly one of the other fields."""

    name: DnsLabel
    """Name of the volume, for volumeMounts."""
    config_map: ConfigMapVolume | None = None
    """Files from a ConfigMap."""
    secret: SecretVolume | None = None
    """Files from a Secret."""
    persistent_volume_claim: PersistentVolumeClaimVolume | None = None
    """A PersistentVolumeClaim."""
    empty_dir: EmptyDirVolume | None = None
    """An empty directory that lives as long as the pod."""
    csi: CsiVolume | None = None
    """An inline volume of a CSI driver."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="[has(self.configMap), has(self.secret), has(self.persistentVolumeClaim), has(self.emptyDir), "
            "has(self.csi)].filter(present, present).size() == 1",
            message="set exactly one of configMap, secret, persistentVolumeClaim, emptyDir and csi",
            holds=lambda volume: (
                [
                    volume.config_map,
                    volume.secret,
                    volume.persistent_volume_claim,
                    volume.empty_dir,
                    volume.csi,
                ].count(None)
                == 4
            ),
        ),
        Rule(
            cel=f"!(self.name in {list(RESERVED_VOLUMES)})",
            message="the operator has a volume of this name: choose another name (reserved: "
            f"{', '.join(RESERVED_VOLUMES)})",
            field=".name",
            holds=lambda volume: volume.name not in RESERVED_VOLUMES,
        ),
    )


class VolumeMount(ApiModel):
    """A mount of an additional volume."""

    name: DnsLabel
    """Name of a volume in volumes."""
    mount_path: MountPath
    """Directory in the container, as an absolute path."""
    sub_path: RelativePath | None = None
    """Directory or file in the volume; default: its root."""
    read_only: Boolean | None = None
    """Mount the volume read-only; default: false."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!self.mountPath.matches('^{_MOUNT_PATTERN}$')",
            message="the container has files of its own there: choose another path (reserved with all below: "
            f"{', '.join(RESERVED_MOUNTS)}; reserved: {', '.join(RESERVED_PARENTS)})",
            field=".mountPath",
            holds=lambda mount: re.fullmatch(_MOUNT_PATTERN, mount.mount_path) is None,
        ),
    )


class PodResourceClaim(ApiModel):
    """Devices by dynamic resource allocation (Kubernetes 1.34 and later)."""

    name: DnsLabel
    """Name of the claim in the pod."""
    resource_claim_name: ObjectName | None = None
    """An existing ResourceClaim, which all pods share."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate, from which each pod gets a claim of its own."""
    gpus: Boolean = False
    """Whether the claim has the GPUs of an engine pod, one for each rank: then engine.gpuResourceName is not requested.
    Other pods have no GPUs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            message="set exactly one of resourceClaimName and resourceClaimTemplateName",
            holds=lambda claim: (claim.resource_claim_name is None) != (claim.resource_claim_template_name is None),
        ),
    )


class PodTemplate(PodMetadata):
    """Additions to a pod and its container."""

    scheduler_name: ObjectName | None = None
    """Scheduler of the pods; default: that of the cluster."""
    volumes: Annotated[tuple[Volume, ...], Field(max_length=16), Unique("name")] = ()
    """Additional volumes."""
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=16), Unique("mount_path")] = ()
    """Mounts of these volumes in the container."""
    resource_claims: Annotated[tuple[PodResourceClaim, ...], Field(max_length=8), Unique("name")] = ()
    """Devices by dynamic resource allocation, for all of which the container gets access."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *PodMetadata.rules,
        Rule(
            cel="!has(self.volumeMounts) || self.volumeMounts.all(mount, "
            "has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name))",
            message="a mount names a volume that is not in volumes: add the volume, or correct the name",
            field=".volumeMounts",
            holds=lambda template: (
                {mount.name for mount in template.volume_mounts} <= {volume.name for volume in template.volumes}
            ),
        ),
    )
