"""InferenceModel, its metadata and its spec. What a field's description says is what the operator does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from minisgl_operator.api.base import (
    ApiModel,
    Boolean,
    ImageReference,
    Integer,
    ObjectName,
    QualifiedName,
    Quantity,
    Rule,
    SecretKey,
    Unique,
)
from minisgl_operator.api.scheduling import LabelSelector, PodSettings, PullPolicy

GROUP: Final = "serving.minisgl.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceModel"
PLURAL: Final = "inferencemodels"

MAX_NAME_LENGTH: Final = 40
"""Children add up to 23 characters (-r999-63-<controller revision>) and every name is a DNS label of at most 63."""
_NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_MAX_PROBLEMS: Final = 5

# What the operator itself sets in an engine's container; a second value would decide which of the two wins.
RESERVED_ENVIRONMENT: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_HOSTID",
    "NVIDIA_VISIBLE_DEVICES",
    "RANK",
    "WORLD_SIZE",
)
RESERVED_ARGUMENTS: Final = (
    "--control-port",
    "--device",
    "--drain-timeout",
    "--dtype",
    "--leader",
    "--link-port",
    "--max-model-len",
    "--max-restarts",
    "--node-name",
    "--peer-domain",
    "--plans-port",
    "--pod-index",
    "--pod-name",
    "--ranks-per-pod",
    "--rendezvous-port",
    "--replica",
    "--restart-window",
    "--revision-label",
    "--scheduler-port",
    "--served-model-name",
    "--startup-timeout",
    "--state-directory",
    "--tp",
)


class InvalidSpec(ValueError):
    """An InferenceModel that cannot be served as it stands. Each problem is a pair (field, what is wrong with it)."""

    code: Final = "InvalidSpec"

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        assert problems
        self.problems = problems
        shown = [f"{field}: {problem}" for field, problem in problems[:_MAX_PROBLEMS]]
        if len(problems) > _MAX_PROBLEMS:
            shown.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        super().__init__("; ".join(shown))

    @property
    def field(self) -> str:
        return self.problems[0][0]

    @property
    def problem(self) -> str:
        return self.problems[0][1]


def _relative(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/")


_PATH_RULE: Final = Rule(
    cel="!self.path.startsWith('/') && !self.path.split('/').exists(part, part == '..')",
    message="path is relative to the root of the volume: write it without a leading / and without ..",
    field=".path",
    holds=lambda part: _relative(part.path),
)


class TokenSecretReference(ApiModel):
    """A key of a Secret."""

    name: ObjectName = Field(description="Name of the Secret, in the namespace of the InferenceModel.")
    key: SecretKey = Field(default="token", description="Key in the Secret whose value is the token.")


class HuggingFaceSource(ApiModel):
    """A model repository on the Hugging Face Hub, or on a mirror of it."""

    repo: str = Field(
        min_length=3,
        max_length=200,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Repository as owner/name.",
    )
    revision: str = Field(
        default="main",
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        description="Branch, tag or commit. It is resolved once, when the model is fetched: see status.model.commit.",
    )
    token_secret_ref: TokenSecretReference | None = Field(
        default=None, description="Secret with the Hub token. Only the pod that downloads the model gets it."
    )
    endpoint: str | None = Field(
        default=None,
        max_length=500,
        pattern=r"^https?://[^\s]+$",
        description="Address of a mirror of the Hub; left out: https://huggingface.co.",
    )


class ClaimSource(ApiModel):
    """A model that lies on a PersistentVolumeClaim. Engine pods mount it read-only."""

    claim_name: ObjectName = Field(description="Name of the claim, in the namespace of the InferenceModel.")
    path: str = Field(default="", max_length=1024, description="Directory of the model on the claim; empty: its root.")

    rules: ClassVar[tuple[Rule, ...]] = (_PATH_RULE,)


class ImageSource(ApiModel):
    """A model in an OCI image, mounted read-only as an image volume (Kubernetes 1.35 and later; before, from 1.33, with
    the feature gate ImageVolume)."""

    reference: ImageReference = Field(description="The image, by tag or by digest.")
    path: str = Field(default="", max_length=1024, description="Directory of the model in the image; empty: its root.")
    pull_policy: PullPolicy | None = Field(
        default=None, description="When the node pulls the image; left out: as Kubernetes does."
    )

    rules: ClassVar[tuple[Rule, ...]] = (_PATH_RULE,)


class ModelSource(ApiModel):
    """Where the model comes from: exactly one of the fields."""

    hugging_face: HuggingFaceSource | None = Field(
        default=None, description="A repository on the Hugging Face Hub; it is fetched once, onto a claim."
    )
    pvc: ClaimSource | None = Field(default=None, description="A directory on a PersistentVolumeClaim.")
    image: ImageSource | None = Field(default=None, description="A directory in an OCI image.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="[has(self.huggingFace), has(self.pvc), has(self.image)].filter(present, present).size() == 1",
            message="set exactly one of huggingFace, pvc and image",
            holds=lambda source: [source.hugging_face, source.pvc, source.image].count(None) == 2,
        ),
    )


class Cache(ApiModel):
    """The claim that a model from the Hub is fetched onto."""

    size: Quantity = Field(
        default="100Gi",
        description="Size of the claim. It may grow, where the StorageClass has allowVolumeExpansion, and never "
        "shrink. A claim that is larger stays as it is.",
    )
    storage_class_name: ObjectName | None = Field(
        default=None, description="StorageClass of the claim; left out: the cluster's default. It cannot be changed."
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        default="ReadWriteMany",
        description="Access mode of the claim. With ReadWriteOnce only pods on one and the same node can use it. "
        "The pod that fetches the model may choose that node, or the volume's zone, and needs no GPU itself. It goes "
        "by engine.nodeSelector, engine.affinity.nodeAffinity and engine.tolerations then: one of the first two must "
        "name the nodes with GPUs. It cannot be changed.",
    )
    claim_name: ObjectName | None = Field(
        default=None,
        description="Use this claim, which is there already, instead of making one; the other fields then have no "
        "effect. It cannot be changed.",
    )
    retain: Boolean = Field(default=False, description="Keep the claim when the InferenceModel is deleted.")


_STAYS_FROM_THE_HUB: Final = "has(self.source.huggingFace) && has(oldSelf.source.huggingFace)"


def _in_cache(side: str, field: str, absent: str) -> str:
    return f"(has({side}.cache) && has({side}.cache.{field}) ? {side}.cache.{field} : '{absent}')"


def _fixed_in_cache(field: str, absent: str) -> Rule:
    """The claim of a model that stays one from the Hub is made once: a field that shapes it cannot change."""
    now, before = (_in_cache(side, field, absent) for side in ("self", "oldSelf"))
    return Rule(
        cel=f"!({_STAYS_FROM_THE_HUB}) || {now} == {before}",
        message=f"cache.{field} cannot be changed, for the claim exists: set it back, or delete the InferenceModel and "
        "create it again",
    )


def _only_grows() -> Rule:
    """Kubernetes has no smaller claims."""
    now, before = (f"quantity(string({_in_cache(side, 'size', '100Gi')}))" for side in ("self", "oldSelf"))
    return Rule(
        cel=f"!({_STAYS_FROM_THE_HUB}) || {now}.compareTo({before}) >= 0",
        message="cache.size cannot shrink, for the claim exists: set it back, or delete the InferenceModel and create "
        "it again",
    )


class ModelSpec(ApiModel):
    """Which model is served, and under which names."""

    source: ModelSource = Field(description="Where the model comes from: exactly one of huggingFace, pvc and image.")
    served_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")], ...],
        Field(max_length=8),
        Unique(),
    ] = Field(
        default=(),
        description="Names that requests may give in their field model; the first is the one in answers. "
        "Left out: the name of the InferenceModel.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights and KV cache; auto: the checkpoint's own, float32 on CPUs.",
    )
    max_model_len: Integer | None = Field(
        default=None,
        ge=2,
        le=100_000_000,
        description="Longest prompt with its answer, in tokens; left out: what the model's configuration says.",
    )
    cache: Cache | None = Field(
        default=None,
        description="The claim that a model from the Hub is fetched onto; left out: 100Gi of the cluster's default "
        "StorageClass, ReadWriteMany.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.cache) || has(self.source.huggingFace)",
            message="cache goes with source.huggingFace only: remove cache, for pvc and image are mounted as they are",
            field=".cache",
            holds=lambda model: model.cache is None or model.source.hugging_face is not None,
        ),
        _only_grows(),
        _fixed_in_cache("storageClassName", ""),
        _fixed_in_cache("accessMode", "ReadWriteMany"),
        _fixed_in_cache("claimName", ""),
    )

    @property
    def hub_cache(self) -> Cache:
        """The cache that a model from the Hub has: the one asked for, or all defaults."""
        assert self.source.hugging_face is not None
        return self.cache or Cache()


class Parallelism(ApiModel):
    """How one replica is split over ranks, and ranks over pods."""

    tensor: Integer = Field(default=1, ge=1, le=64, description="Ranks of one replica: GPUs, or processes on CPUs.")
    gpus_per_pod: Integer | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Ranks in one pod; it divides tensor. Left out: all ranks of a replica in one pod, "
        "with interconnect Network one rank in a pod.",
    )
    interconnect: Literal["Auto", "SharedPod", "Network"] = Field(
        default="Auto",
        description="How ranks reach each other. SharedPod: all in one pod, at the speed of NVLink or PCIe. "
        "Network: in pods of their own, through the pod network. Auto: SharedPod, unless gpusPerPod splits the ranks.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.gpusPerPod) || (self.gpusPerPod <= self.tensor && self.tensor % self.gpusPerPod == 0)",
            message="gpusPerPod must divide tensor: every pod of a replica holds the same number of ranks",
            field=".gpusPerPod",
            holds=lambda spec: spec.gpus_per_pod is None or spec.tensor % spec.gpus_per_pod == 0,
        ),
        Rule(
            cel="self.interconnect != 'SharedPod' || !has(self.gpusPerPod) || self.gpusPerPod == self.tensor",
            message="interconnect SharedPod keeps all ranks in one pod: remove gpusPerPod, or use Network",
            field=".interconnect",
            holds=lambda spec: spec.interconnect != "SharedPod" or spec.gpus_per_pod in (None, spec.tensor),
        ),
    )

    @property
    def ranks_per_pod(self) -> int:
        """Ranks in each pod of a replica."""
        if self.gpus_per_pod is not None:
            return self.gpus_per_pod
        return 1 if self.interconnect == "Network" else self.tensor

    @property
    def pods(self) -> int:
        """Pods of one replica."""
        return self.tensor // self.ranks_per_pod


class KeyReference(ApiModel):
    """A key of a Secret or of a ConfigMap."""

    name: ObjectName = Field(description="Name of the object, in the namespace of the InferenceModel.")
    key: SecretKey = Field(description="Key in the object.")


class ValueFrom(ApiModel):
    """Where the value of a variable comes from: exactly one of the fields."""

    secret_key_ref: KeyReference | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeyReference | None = Field(default=None, description="A key of a ConfigMap.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="set exactly one of secretKeyRef and configMapKeyRef",
            holds=lambda value: (value.secret_key_ref is None) != (value.config_map_key_ref is None),
        ),
    )


class EnvironmentVariable(ApiModel):
    """A variable of the engine's environment."""

    name: str = Field(
        min_length=1, max_length=128, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", description="Name of the variable."
    )
    value: str | None = Field(default=None, max_length=8192, description="Its value.")
    value_from: ValueFrom | None = Field(default=None, description="A key of a Secret or ConfigMap with the value.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.value) && has(self.valueFrom))",
            message="set value or valueFrom, not both",
            field=".valueFrom",
            holds=lambda variable: variable.value is None or variable.value_from is None,
        ),
        Rule(
            cel=f"!self.name.startsWith('MINISGL_') && !(self.name in {list(RESERVED_ENVIRONMENT)})",
            message="the operator sets this variable itself: remove it (reserved are MINISGL_*, "
            f"{', '.join(RESERVED_ENVIRONMENT)})",
            field=".name",
            holds=lambda variable: (
                not variable.name.startswith("MINISGL_") and variable.name not in RESERVED_ENVIRONMENT
            ),
        ),
    )


_RESERVED_ARGUMENT: Final = f"({'|'.join(RESERVED_ARGUMENTS)})"


class EngineSpec(PodSettings):
    """The pods that hold the model's ranks."""

    device: Literal["auto", "cpu"] = Field(
        default="auto", description="auto: one GPU for each rank. cpu: no GPU is asked for, and all runs on CPUs."
    )
    args: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(
        default=(), max_length=64, description="Arguments that are appended to the engine's command line."
    )
    env: Annotated[tuple[EnvironmentVariable, ...], Field(max_length=64), Unique("name")] = Field(
        default=(), description="Variables of the engine's environment."
    )
    gpu_resource_name: QualifiedName = Field(
        default="nvidia.com/gpu", description="Resource name that a rank's GPU is asked for by."
    )
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass of the pods, where the node's default runtime hands out no GPUs."
    )
    shm_size: Quantity = Field(
        default="8Gi",
        description="Size of /dev/shm, through which the ranks of one pod exchange data. Where one pod has all ranks "
        "of a replica, what is used of it counts as memory of the pod.",
    )
    startup_timeout_seconds: Integer = Field(
        default=1800,
        ge=10,
        le=86_400,
        description="Longest start of the ranks, weights and CUDA graphs included, before it counts as failed.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.args) || !self.args.exists(argument, argument.matches('^{_RESERVED_ARGUMENT}(=|$)'))",
            message="args names an option that follows from other fields of the InferenceModel: remove it "
            f"(reserved are {', '.join(RESERVED_ARGUMENTS)})",
            field=".args",
            holds=lambda engine: (
                not any(re.match(rf"{_RESERVED_ARGUMENT}(=|\Z)", argument) for argument in engine.args)
            ),
        ),
        Rule(
            cel="!has(self.resources) || "
            "!(has(self.resources.requests) && self.gpuResourceName in self.resources.requests) && "
            "!(has(self.resources.limits) && self.gpuResourceName in self.resources.limits)",
            message="GPUs follow from parallelism: remove gpuResourceName from resources",
            field=".resources",
            holds=lambda engine: (
                engine.gpu_resource_name not in engine.resources.requests
                and engine.gpu_resource_name not in engine.resources.limits
            ),
        ),
    )


class ApiKeysSecretReference(ApiModel):
    """A key of a Secret."""

    name: ObjectName = Field(description="Name of the Secret, in the namespace of the InferenceModel.")
    key: SecretKey = Field(default="keys", description="Key in the Secret whose value has one API key in each line.")


class Auth(ApiModel):
    """Who may use the endpoint."""

    api_keys_secret_ref: ApiKeysSecretReference = Field(
        description="Secret with the API keys. A request without one of them is answered with 401."
    )


class FrontendSpec(PodSettings):
    """The pods that answer the OpenAI API. They need no GPU, no model volume and no token."""

    replicas: Integer = Field(default=1, ge=1, le=100, description="Frontend pods.")
    auth: Auth | None = Field(
        default=None, description="Who may use the endpoint; left out: everyone whom the network lets through."
    )


class Recovery(ApiModel):
    """How often the ranks of a replica are started again by themselves."""

    max_restarts: Integer = Field(
        default=5,
        ge=0,
        le=1000,
        description="Restarts of a replica's ranks within windowSeconds before it counts as failed.",
    )
    window_seconds: Integer = Field(default=3600, ge=1, le=604_800, description="How long a restart counts.")


class IpBlock(ApiModel):
    """A range of addresses."""

    cidr: str = Field(
        min_length=1, max_length=64, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", description="The range, as 10.0.0.0/8."
    )
    except_: tuple[Annotated[str, Field(max_length=64, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")], ...] = Field(
        default=(), alias="except", max_length=16, description="Ranges within it that are left out."
    )


class NetworkPeer(ApiModel):
    """Who may connect: as a peer of a NetworkPolicy."""

    pod_selector: LabelSelector | None = Field(
        default=None, description="Pods by their labels; without namespaceSelector those of the same namespace."
    )
    namespace_selector: LabelSelector | None = Field(
        default=None, description="Namespaces by their labels; without podSelector all pods in them."
    )
    ip_block: IpBlock | None = Field(default=None, description="A range of addresses, instead of the other two fields.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.ipBlock) ? !has(self.podSelector) && !has(self.namespaceSelector) "
            ": has(self.podSelector) || has(self.namespaceSelector)",
            message="set ipBlock alone, or podSelector, namespaceSelector or both",
            holds=lambda peer: (
                (peer.ip_block is None) != (peer.pod_selector is None and peer.namespace_selector is None)
            ),
        ),
    )


class NetworkPolicySpec(ApiModel):
    """Who may reach the endpoint. Engine pods are closed to all but their frontends and the operator."""

    enabled: Boolean = Field(default=True, description="Make NetworkPolicies for the pods of this model.")
    ingress_from: tuple[NetworkPeer, ...] = Field(
        default=(), max_length=32, description="Who may connect to the endpoint; left out: pods of the same namespace."
    )


class InferenceModelSpec(ApiModel):
    """What is served, and on what."""

    model: ModelSpec = Field(description="Which model is served, and under which names.")
    parallelism: Parallelism = Field(
        default=Parallelism(), description="How one replica is split over ranks, and ranks over pods."
    )
    replicas: Integer = Field(
        default=1, ge=0, le=1000, description="Copies of the model that serve side by side. kubectl scale sets it."
    )
    suspend: Boolean = Field(
        default=False,
        description="Give back all engine pods. Frontends and the cache stay, but no frontend is ready, so the Service "
        "takes no connection; false brings the engine pods back.",
    )
    engine: EngineSpec = Field(default=EngineSpec(), description="The pods that hold the model's ranks.")
    frontend: FrontendSpec = Field(default=FrontendSpec(), description="The pods that answer the OpenAI API.")
    drain_seconds: Integer = Field(
        default=300,
        ge=1,
        le=86_400,
        description="How long running requests may go on in a pod that is to stop, before they end with an error.",
    )
    recovery: Recovery = Field(
        default=Recovery(), description="How often the ranks of a replica are started again by themselves."
    )
    network_policy: NetworkPolicySpec = Field(default=NetworkPolicySpec(), description="Who may reach the endpoint.")


NAME_RULE: Final = Rule(
    cel=f"size(self.metadata.name) <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{_NAME_PATTERN}')",
    message=f"metadata.name: at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', beginning with a letter and "
    "not ending with '-': pods and Services are named after it",
    holds=lambda name: len(name) <= MAX_NAME_LENGTH and re.fullmatch(_NAME_PATTERN[1:-1], name) is not None,
)


class Metadata(BaseModel):
    """What the operator reads of an object's metadata. An object that was never applied has no uid and generation 0."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    deletion_timestamp: datetime | None = None


class InferenceModel(BaseModel):
    """An InferenceModel as it was read from the API server; the status is not part of it."""

    model_config = ConfigDict(frozen=True)

    metadata: Metadata
    spec: InferenceModelSpec

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that requests may give, at least one."""
        return self.spec.model.served_names or (self.metadata.name,)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """`raw` is the object as JSON.

        Raises:
            InvalidSpec: the API server would refuse it, or an older or newer schema let through what this one does not.
        """
        if raw.get("apiVersion") != API_VERSION or raw.get("kind") != KIND:
            found = f"{raw.get('apiVersion')} {raw.get('kind')}"
            raise InvalidSpec((("kind", f"this is {found}, and not {API_VERSION} {KIND}"),))
        try:
            model = cls.model_validate({"metadata": raw.get("metadata", {}), "spec": raw.get("spec", {})})
        except ValidationError as error:
            raise InvalidSpec(tuple(_problem(each) for each in error.errors(include_url=False))) from None
        assert NAME_RULE.holds is not None
        if not NAME_RULE.holds(model.metadata.name):
            raise InvalidSpec((("metadata.name", NAME_RULE.message.removeprefix("metadata.name: ")),))
        return model


def _problem(error: Any) -> tuple[str, str]:
    """(path of the field as it stands in the manifest, what is wrong) of one of pydantic's errors."""
    path = ""
    for step in error["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    if error["type"] == "rule":
        path += error["ctx"]["field"]
    messages = {
        "extra_forbidden": "there is no such field: remove it, or see kubectl explain imodel.spec",
        "missing": "Required value: set this field",
    }
    return path.removeprefix("."), messages.get(error["type"], error["msg"])
