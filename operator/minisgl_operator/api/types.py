"""InferenceModel, its metadata and its spec. The docstrings of fields are their descriptions in the CRD."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from minisgl_operator.api.autoscaling import Autoscaling
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
    problem,
)
from minisgl_operator.api.pod_template import PodTemplate
from minisgl_operator.api.route import Route
from minisgl_operator.api.scheduling import LabelSelector, PodSettings, PullPolicy, Resources

GROUP: Final = "serving.minisgl.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceModel"
PLURAL: Final = "inferencemodels"

MAX_NAME_LENGTH: Final = 40
"""Names of children are up to 23 characters longer (-r999-63-<controller revision>), and at most 63 in all."""
_NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_MAX_PROBLEMS: Final = 5

# Variables that the operator sets in engine containers; a second value would conflict with it.
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
RESERVED_FETCH_ENVIRONMENT: Final = ("HF_HOME", "HF_TOKEN")
RESERVED_ARGUMENTS: Final = (
    "--control-port",
    "--device",
    "--drain-timeout",
    "--dtype",
    "--kv-cache-dtype",
    "--leader",
    "--link-port",
    "--max-model-len",
    "--max-restarts",
    "--node-name",
    "--peer-domain",
    "--peer-secret",
    "--plans-port",
    "--pod-index",
    "--pod-name",
    "--quantization",
    "--ranks-per-pod",
    "--rendezvous-port",
    "--replica",
    "--restart-window",
    "--revision-label",
    "--scheduler-port",
    "--served-model-name",
    "--speculative",
    "--startup-timeout",
    "--state-directory",
    "--task",
    "--tp",
)
RESERVED_FRONTEND_ARGUMENTS: Final = (
    "--api-keys",
    "--control-port",
    "--drain-timeout",
    "--engine-control-port",
    "--engines",
    "--host",
    "--leave-timeout",
    "--peer-secret",
    "--port",
    "--scheduler-port",
    "--served-model-name",
)


class InvalidSpec(ValueError):
    """An invalid InferenceModel. `problems` are pairs (path of the field, message)."""

    code: Final = "InvalidSpec"

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        assert problems
        self.problems = problems
        shown = [f"{field}: {problem}" for field, problem in problems[:_MAX_PROBLEMS]]
        if len(problems) > _MAX_PROBLEMS:
            shown.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        super().__init__("; ".join(shown))


def _relative(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/")


_PATH_RULE: Final = Rule(
    cel="!self.path.startsWith('/') && !self.path.split('/').exists(part, part == '..')",
    message="path is relative to the root of the volume: write it without a leading / and without .. components",
    field=".path",
    holds=lambda part: _relative(part.path),
)


class TokenSecretReference(ApiModel):
    """A key of a Secret."""

    name: ObjectName
    """Name of the Secret, in the namespace of the InferenceModel."""
    key: SecretKey = "token"
    """Key in the Secret with the token."""


class HuggingFaceSource(ApiModel):
    """A model repository on the Hugging Face Hub or on a mirror."""

    repo: str = Field(min_length=3, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Repository as owner/name."""
    revision: str = Field(default="main", min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Branch, tag or commit, resolved once when the model is fetched: see status.model.commit."""
    token_secret_ref: TokenSecretReference | None = None
    """Secret with the Hub token. Only the fetch pod gets it."""
    endpoint: str | None = Field(default=None, max_length=500, pattern=r"^https?://[^\s]+$")
    """URL of a mirror of the Hub; default: https://huggingface.co."""


class S3Source(ApiModel):
    """A folder of a bucket in Amazon S3, or in a store with its protocol."""

    uri: str = Field(min_length=7, max_length=1100, pattern=r"^s3://[A-Za-z0-9][A-Za-z0-9._-]{1,254}(/[^\s]*)?$")
    """The folder as s3://BUCKET/PREFIX. It is fetched once, so give a new version of the model another prefix."""
    secret_name: ObjectName | None = None
    """Name of a Secret with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, optionally, AWS_SESSION_TOKEN. Only
    the fetch pod gets it. Default: what the cloud gives the account in serviceAccountName."""
    endpoint: str | None = Field(default=None, max_length=500, pattern=r"^https?://[^\s]+$")
    """URL of the store; default: Amazon S3."""
    region: str | None = Field(default=None, min_length=1, max_length=100, pattern=r"^[A-Za-z0-9-]+$")
    """Region of the bucket; default: us-east-1, from where Amazon S3 leads to the bucket's own."""


AccessMode = Literal["ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany"]


class ClaimSource(ApiModel):
    """A model on a PersistentVolumeClaim, which engine pods mount read-only."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim, in the namespace of the InferenceModel."""
    path: str = Field(default="", max_length=1024)
    """Directory of the model on the claim; empty: its root."""
    access_mode: AccessMode = "ReadWriteMany"
    """Access mode of the claim. With ReadWriteOnce, all engine pods are placed on one node."""

    rules: ClassVar[tuple[Rule, ...]] = (_PATH_RULE,)


class ImageSource(ApiModel):
    """A model in an OCI image, mounted read-only as an image volume (Kubernetes 1.35 and later; from 1.33 with the
    feature gate ImageVolume)."""

    reference: ImageReference
    """The image, by tag or by digest."""
    path: str = Field(default="", max_length=1024)
    """Directory of the model in the image; empty: its root."""
    pull_policy: PullPolicy | None = None
    """Pull policy of the image; default: that of Kubernetes."""

    rules: ClassVar[tuple[Rule, ...]] = (_PATH_RULE,)


class ModelSource(ApiModel):
    """Source of the model: exactly one of the fields."""

    hugging_face: HuggingFaceSource | None = None
    """A repository on the Hugging Face Hub, fetched once onto a PersistentVolumeClaim."""
    s3: S3Source | None = None
    """A folder of a bucket, fetched once onto a PersistentVolumeClaim."""
    pvc: ClaimSource | None = None
    """A directory on a PersistentVolumeClaim."""
    image: ImageSource | None = None
    """A directory in an OCI image."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="[has(self.huggingFace), has(self.s3), has(self.pvc), has(self.image)]"
            ".filter(present, present).size() == 1",
            message="set exactly one of huggingFace, s3, pvc and image",
            holds=lambda source: [source.hugging_face, source.s3, source.pvc, source.image].count(None) == 3,
        ),
    )

    @property
    def is_remote(self) -> bool:
        """True for a source outside of the cluster's volumes and images, which is copied onto a claim."""
        return self.hugging_face is not None or self.s3 is not None


class Cache(ApiModel):
    """PersistentVolumeClaim for a model from the Hub or from a bucket."""

    size: Quantity = "100Gi"
    """Size of the claim. It can be raised if the StorageClass has allowVolumeExpansion, and never lowered. A claim that
    is larger keeps its size."""
    storage_class_name: ObjectName | None = None
    """StorageClass of the claim; default: the cluster's. Immutable."""
    access_mode: AccessMode = "ReadWriteMany"
    """Access mode of the claim. With ReadWriteOnce, a required podAffinity holds the fetch pod and all engine pods on
    one node, unless engine.affinity has one. The fetch pod, which needs no GPU, may determine that node or the
    volume's zone; it then uses engine.nodeSelector, engine.affinity.nodeAffinity and engine.tolerations, and one of the
    first two must select the nodes with GPUs. ReadOnlyMany is for a claim in claimName that was filled beforehand:
    nothing is fetched. Immutable without claimName."""
    claim_name: ObjectName | None = None
    """Name of an existing claim to use instead of a new one; of the other fields only accessMode, which must be that of
    the claim, then has an effect. Immutable."""
    retain: Boolean = False
    """Keep the claim when the InferenceModel is deleted."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.accessMode != 'ReadOnlyMany' || has(self.claimName)",
            message="accessMode ReadOnlyMany is for a claim that was filled beforehand: name it in claimName, or use "
            "ReadWriteMany or ReadWriteOnce",
            field=".accessMode",
            holds=lambda cache: cache.access_mode != "ReadOnlyMany" or cache.claim_name is not None,
        ),
    )


def _is_remote(side: str) -> str:
    return f"(has({side}.source.huggingFace) || has({side}.source.s3))"


_STAYS_REMOTE: Final = f"{_is_remote('self')} && {_is_remote('oldSelf')}"


def _in_cache(side: str, field: str, absent: str) -> str:
    return f"(has({side}.cache) && has({side}.cache.{field}) ? {side}.cache.{field} : '{absent}')"


def _fixed_in_cache(field: str, absent: str, unless: str = "") -> Rule:
    """Rule for a field of the claim, which is immutable as long as the source has one. `unless`: CEL for a
    claim of the user's, which the field only describes."""
    now, before = (_in_cache(side, field, absent) for side in ("self", "oldSelf"))
    exception = f" || ({unless})" if unless else ""
    return Rule(
        cel=f"!({_STAYS_REMOTE}) || {now} == {before}{exception}",
        message=f"cache.{field} cannot be changed, as the claim exists: restore it, or delete the InferenceModel and "
        "create it again",
    )


def _cannot_shrink() -> Rule:
    """Rule for the size of the claim: Kubernetes cannot shrink claims."""
    now, before = (f"quantity(string({_in_cache(side, 'size', '100Gi')}))" for side in ("self", "oldSelf"))
    return Rule(
        cel=f"!({_STAYS_REMOTE}) || {now}.compareTo({before}) >= 0",
        message="cache.size cannot shrink, as the claim exists: restore it, or delete the InferenceModel and create "
        "it again",
    )


class ModelSpec(ApiModel):
    """The served model and its names."""

    source: ModelSource
    """Source of the model: exactly one of huggingFace, s3, pvc and image."""
    served_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")], ...],
        Field(max_length=8),
        Unique(),
    ] = ()
    """Names that requests may set in their field model; responses contain the first one. Default: the name of the
    InferenceModel."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV cache; auto: that of the checkpoint, float32 on CPUs."""
    max_model_len: Integer | None = Field(default=None, ge=2, le=100_000_000)
    """Maximum length of prompt and answer together, in tokens; default: that of the model's configuration."""
    cache: Cache | None = None
    """PersistentVolumeClaim for a model from the Hub or from a bucket; default: 100Gi of the cluster's default
    StorageClass, ReadWriteMany."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.cache) || {_is_remote('self')}",
            message="cache goes with source.huggingFace and source.s3 only: remove cache; pvc and image are mounted "
            "directly",
            field=".cache",
            holds=lambda model: model.cache is None or model.source.is_remote,
        ),
        _cannot_shrink(),
        _fixed_in_cache("storageClassName", ""),
        _fixed_in_cache("accessMode", "ReadWriteMany", unless="has(self.cache) && has(self.cache.claimName)"),
        _fixed_in_cache("claimName", ""),
    )

    @property
    def fetch_cache(self) -> Cache:
        """The cache of a model that is fetched, with all defaults if the spec has none."""
        assert self.source.is_remote
        return self.cache or Cache()


class Parallelism(ApiModel):
    """Distribution of one replica over ranks, and of ranks over pods."""

    tensor: Integer = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks of one replica: one GPU each, or one process on CPUs."""
    gpus_per_pod: Integer | None = Field(default=None, ge=1, le=64)
    """Ranks in one pod; must divide tensor. Default: all ranks of a replica; one rank with interconnect Network."""
    interconnect: Literal["Auto", "SharedPod", "Network"] = "Auto"
    """Connection between ranks. SharedPod: all ranks in one pod, over NVLink or PCIe. Network: ranks in separate pods,
    over the pod network. Auto: SharedPod, unless gpusPerPod splits the ranks."""

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

    name: ObjectName
    """Name of the object, in the namespace of the InferenceModel."""
    key: SecretKey
    """Key in the object."""


class ValueFrom(ApiModel):
    """Source of a variable's value: exactly one of the fields."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="set exactly one of secretKeyRef and configMapKeyRef",
            holds=lambda value: (value.secret_key_ref is None) != (value.config_map_key_ref is None),
        ),
    )


class EnvironmentVariable(ApiModel):
    """An environment variable of a container."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=8192)
    """Value of the variable."""
    value_from: ValueFrom | None = None
    """Key of a Secret or ConfigMap with the value."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.value) && has(self.valueFrom))",
            message="set value or valueFrom, not both",
            field=".valueFrom",
            holds=lambda variable: variable.value is None or variable.value_from is None,
        ),
        Rule(
            cel=f"!self.name.startsWith('MINISGL_') && !(self.name in {list(RESERVED_ENVIRONMENT)})",
            message="the operator sets this variable itself: remove it (reserved: MINISGL_*, "
            f"{', '.join(RESERVED_ENVIRONMENT)})",
            field=".name",
            holds=lambda variable: (
                not variable.name.startswith("MINISGL_") and variable.name not in RESERVED_ENVIRONMENT
            ),
        ),
    )


def _no_reserved_argument(reserved: tuple[str, ...]) -> Rule:
    pattern = f"({'|'.join(reserved)})"
    return Rule(
        cel=f"!has(self.args) || !self.args.exists(argument, argument.matches('^{pattern}(=|$)'))",
        message="args names an option that follows from other fields of the InferenceModel: remove it "
        f"(reserved: {', '.join(reserved)})",
        field=".args",
        holds=lambda part: not any(re.match(rf"{pattern}(=|\Z)", argument) for argument in part.args),
    )


_NO_CLAIM_OF_GPUS: Final = Rule(
    cel="!has(self.podTemplate) || !has(self.podTemplate.resourceClaims) || "
    "!self.podTemplate.resourceClaims.exists(claim, claim.gpus)",
    message="only engine pods have GPUs: remove gpus from the claim",
    field=".podTemplate.resourceClaims",
    holds=lambda part: not any(claim.gpus for claim in part.pod_template.resource_claims),
)


class EngineSpec(PodSettings):
    """Pods that run the model's ranks."""

    device: Literal["auto", "cpu"] = "auto"
    """auto: one GPU for each rank. cpu: no GPUs are requested, and ranks run on CPUs."""
    quantization: Literal["fp8", "fp8-block", "int4"] | None = None
    """Format in which the weights of an unquantized checkpoint are quantized while they are loaded: fp8, with
    one scale per output channel; fp8-block and int4 are for benchmarks with --dummy-weights in args. Default: the
    format of the checkpoint. A checkpoint that is quantized must have the default. What is in use is in
    status.replicaStatuses[].dataTypes."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache. fp8: half the memory, with small changes of answers. auto: that of model.dtype."""
    speculative: Literal["off", "auto", "ngram"] | None = None
    """Speculative decoding: whether several drafts of the next tokens are verified in one step, which changes no
    answer. ngram: drafts are found in prompt, answer and prediction; a model that cannot do it does not start. auto:
    such a model is served without. "off" needs quotes in YAML. Default: off."""
    args: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(default=(), max_length=64)
    """Additional arguments of `minisgl engine`."""
    env: Annotated[tuple[EnvironmentVariable, ...], Field(max_length=64), Unique("name")] = ()
    """Environment variables of the engine."""
    gpu_resource_name: QualifiedName = "nvidia.com/gpu"
    """Resource name of GPUs, of which a pod requests one for each rank, unless podTemplate.resourceClaims has them."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, for nodes whose default runtime provides no GPUs."""
    shm_size: Quantity = "8Gi"
    """Size of /dev/shm, which the ranks of one pod use to exchange data."""
    shm_medium: Literal["Auto", "Memory", "Node"] = "Auto"
    """Medium of /dev/shm. Memory: a tmpfs, whose contents count as memory of the pod. NCCL then uses no NVLink between
    pods on one node. Node: the node's disk, with which it can use it if each pod sees all GPUs; ranks of one pod that
    exchange data through /dev/shm are slower. Auto: Memory if a pod has several ranks or all ranks of a replica."""
    startup_timeout_seconds: Integer = Field(default=1800, ge=10, le=86_400)
    """Time limit for the start of the ranks, including weights and CUDA graphs, in seconds."""
    pod_template: PodTemplate = PodTemplate()
    """Additional labels, annotations, volumes and resource claims of the pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _no_reserved_argument(RESERVED_ARGUMENTS),
        Rule(
            cel="!has(self.quantization) || self.quantization == 'fp8' || "
            "(has(self.args) && self.args.exists(argument, argument == '--dummy-weights'))",
            message="fp8-block and int4 quantize dummy weights only: use fp8, remove quantization if the checkpoint is "
            "in this format, or add --dummy-weights to args",
            field=".quantization",
            holds=lambda engine: engine.quantization in (None, "fp8") or "--dummy-weights" in engine.args,
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

    @property
    def claims_gpus(self) -> bool:
        """True if resource claims have the GPUs, which then are not requested by number."""
        return any(claim.gpus for claim in self.pod_template.resource_claims)


class ApiKeysSecretReference(ApiModel):
    """A key of a Secret."""

    name: ObjectName
    """Name of the Secret, in the namespace of the InferenceModel."""
    key: SecretKey = "keys"
    """Key in the Secret with one API key per line."""


class Auth(ApiModel):
    """Authentication of clients."""

    api_keys_secret_ref: ApiKeysSecretReference
    """Secret with the API keys. Requests without one of them are answered with 401."""


class FrontendSpec(PodSettings):
    """Pods that serve the OpenAI API. They need no GPU, no model volume and no token."""

    replicas: Integer | None = Field(default=None, ge=1, le=100)
    """Number of frontend pods. Default: 1 at first, and then the number that another one, such as a
    HorizontalPodAutoscaler, gives the Deployment NAME-frontend."""
    min_replicas: Integer | None = Field(default=None, ge=0, le=1)
    """Frontend pods of a model that is scaled to zero. 0: none, and the cluster's gateway holds its next request;
    without a gateway, as 1. 1: those of `replicas`. Default: that of the operator's configuration, or 1."""
    auth: Auth | None = None
    """Authentication of clients; default: none, only network policies restrict access."""
    args: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(default=(), max_length=64)
    """Additional arguments of `minisgl frontend`."""
    env: Annotated[tuple[EnvironmentVariable, ...], Field(max_length=64), Unique("name")] = ()
    """Environment variables of the frontend."""
    leave_seconds: Integer = Field(default=15, ge=1, le=3600)
    """Time for which a frontend that stops is not ready but accepts new requests, in seconds. It must exceed the time
    that load balancers in front of the Service need to stop sending requests to a pod."""
    mesh: Boolean = False
    """Let frontend pods join the service mesh of their namespace, Istio or Linkerd: they are not exempt from it, and
    the NetworkPolicy allows its ports. Traffic to engines and the operator's probes bypass the proxies."""
    pod_template: PodTemplate = PodTemplate()
    """Additional labels, annotations, volumes and resource claims of the pods."""

    rules: ClassVar[tuple[Rule, ...]] = (_no_reserved_argument(RESERVED_FRONTEND_ARGUMENTS), _NO_CLAIM_OF_GPUS)


class FetchSpec(ApiModel):
    """Pod that fetches a model from the Hub or from a bucket. Its image and its place follow from frontend and
    engine."""

    resources: Resources = Resources()
    """CPU and memory of the container; default: requests of 100m and 512Mi."""
    env: Annotated[tuple[EnvironmentVariable, ...], Field(max_length=64), Unique("name")] = ()
    """Environment variables of the container, for example SSL_CERT_FILE for a mirror with a certificate of your own."""
    pod_template: PodTemplate = PodTemplate()
    """Additional labels, annotations, volumes and resource claims of the pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.env) || !self.env.exists(variable, variable.name in {list(RESERVED_FETCH_ENVIRONMENT)})",
            message="the operator sets one of these variables itself: remove it (reserved: "
            f"{', '.join(RESERVED_FETCH_ENVIRONMENT)}); a token goes to source.huggingFace.tokenSecretRef",
            field=".env",
            holds=lambda fetch: not any(variable.name in RESERVED_FETCH_ENVIRONMENT for variable in fetch.env),
        ),
        _NO_CLAIM_OF_GPUS,
    )


class Recovery(ApiModel):
    """Limit of automatic restarts of a replica's ranks. An edit restarts nothing: it applies to pods created later."""

    max_restarts: Integer = Field(default=5, ge=0, le=1000)
    """Restarts of a replica's ranks within windowSeconds before the replica fails and is tried again after a pause."""
    window_seconds: Integer = Field(default=3600, ge=1, le=604_800)
    """Time for which a restart counts, in seconds."""


class RolloutSpec(ApiModel):
    """How replicas get a new revision."""

    strategy: Literal["Auto", "Surge", "Recreate"] = "Auto"
    """Surge: add a replica of the new revision, and remove an old one when it serves. Recreate: replace one replica
    after the other in place. Auto: Surge if all pods of an additional replica get a node within 60 s, otherwise
    Recreate."""
    progress_deadline_seconds: Integer = Field(default=1800, ge=10, le=86_400)
    """Time for a new revision to serve with one replica, since the first one got pods, in seconds. Then the revision is
    given up; it is given up at once when a replica has used up its restarts before one has served. The time
    stops while the model is scaled to zero, and begins again when a suspended model is resumed."""
    auto_rollback: Boolean = True
    """Give replicas the last revision that served when the new one is given up. An edit of the engine tries again."""
    paused: Boolean = False
    """Keep the pods of existing replicas; new replicas get the last revision that served. Scaling goes on."""
    upgrade: Literal["Wave", "Immediate", "Never"] = "Wave"
    """When the model gets the pods of a new version of the operator. Wave: in its turn, if the operator upgrades models
    in waves, otherwise at once. Immediate: at once. Never: only with an edit. An edit of a field that can change pods
    always takes the new version at once."""


class IpBlock(ApiModel):
    """A range of IP addresses."""

    cidr: str = Field(min_length=1, max_length=64, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")
    """The range, such as 10.0.0.0/8."""
    except_: tuple[Annotated[str, Field(max_length=64, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")], ...] = Field(
        default=(), alias="except", max_length=16
    )
    """Ranges within `cidr` to exclude."""


class NetworkPeer(ApiModel):
    """Allowed clients, as a peer of a NetworkPolicy."""

    pod_selector: LabelSelector | None = None
    """Pods by label; without namespaceSelector, in the same namespace."""
    namespace_selector: LabelSelector | None = None
    """Namespaces by label; without podSelector, all pods in them."""
    ip_block: IpBlock | None = None
    """A range of IP addresses; excludes the other two fields."""

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
    """Network access to the endpoint. Engine pods accept connections only from their frontends and the operator."""

    enabled: Boolean = True
    """Create NetworkPolicies for the pods of this model."""
    ingress_from: tuple[NetworkPeer, ...] = Field(default=(), max_length=32)
    """Clients that may connect to the endpoint; default: pods of the same namespace."""


class Availability(ApiModel):
    """Limits on evictions of the model's pods, as by node drains."""

    disruption_budget: Literal["Auto", "None"] = "Auto"
    """PodDisruptionBudgets of the model. Auto: of several replicas one may be evicted while all others serve, and one
    frontend at a time; a drain waits for that, without end if an evicted replica fits on no other node. None: no
    budgets, a drain may evict all pods together."""


class InferenceModelSpec(ApiModel):
    """Desired state of the InferenceModel."""

    model: ModelSpec
    """The served model and its names."""
    task: Literal["auto", "generate", "embed", "rerank", "classify"] = "auto"
    """What the model is served for: generate text, embed texts, rerank (score pairs of texts) or classify texts. auto:
    what the checkpoint is made for, see status.model.task."""
    parallelism: Parallelism = Parallelism()
    """Distribution of one replica over ranks, and of ranks over pods."""
    replicas: Integer = Field(default=1, ge=0, le=1000)
    """Number of replicas, each a complete copy of the model. `kubectl scale` sets it. Ignored with autoscaling."""
    autoscaling: Autoscaling | None = None
    """Let the operator set the number of replicas by their load; default: replicas."""
    suspend: Boolean = False
    """Delete all engine pods. Frontends and the cache stay, but no frontend is ready, so the Service accepts no
    connections; false creates the engine pods again."""
    engine: EngineSpec = EngineSpec()
    """Pods that run the model's ranks."""
    frontend: FrontendSpec = FrontendSpec()
    """Pods that serve the OpenAI API."""
    fetch: FetchSpec = FetchSpec()
    """Pod that fetches a model from the Hub or from a bucket."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of engine and fetch pods, such as one that a cloud gives access to storage (workload identity). It
    must exist in the namespace. Default: accounts without any rights that the operator creates."""
    drain_seconds: Integer = Field(default=300, ge=1, le=86_400)
    """Time for running requests in a pod that stops, in seconds. Those of an engine pod then go on at another replica,
    or wait for one; those of a frontend pod end with an error."""
    recovery: Recovery = Recovery()
    """Limit of automatic restarts of a replica's ranks."""
    rollout: RolloutSpec = RolloutSpec()
    """How replicas get a new revision."""
    availability: Availability = Availability()
    """Limits on evictions of the model's pods, as by node drains."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Network access to the endpoint."""
    route: Route | None = None
    """Route of the Gateway API to the model; default: one to the Gateways of the operator's configuration, if it names
    any."""


NAME_RULE: Final = Rule(
    cel=f"size(self.metadata.name) <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{_NAME_PATTERN}')",
    message=f"metadata.name: at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', beginning with a letter and "
    "not ending with '-': pods and Services are named after it",
    holds=lambda name: len(name) <= MAX_NAME_LENGTH and re.fullmatch(_NAME_PATTERN[1:-1], name) is not None,
)


class Metadata(BaseModel):
    """The parts of an object's metadata that the operator reads. An object that was never applied has no uid and
    generation 0."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    deletion_timestamp: datetime | None = None


class InferenceModel(BaseModel):
    """An InferenceModel without its status."""

    model_config = ConfigDict(frozen=True)

    metadata: Metadata
    spec: InferenceModelSpec

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may use, at least one."""
        return self.spec.model.served_names or (self.metadata.name,)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """The model of the object `raw`.

        Raises:
            InvalidSpec: the API server would reject it, or accepted it with an older or newer schema.
        """
        if raw.get("apiVersion") != API_VERSION or raw.get("kind") != KIND:
            found = f"{raw.get('apiVersion')} {raw.get('kind')}"
            raise InvalidSpec((("kind", f"expected {API_VERSION} {KIND}, found {found}"),))
        try:
            model = cls.model_validate({"metadata": raw.get("metadata", {}), "spec": raw.get("spec", {})})
        except ValidationError as error:
            raise InvalidSpec(tuple(problem(each) for each in error.errors(include_url=False))) from None
        assert NAME_RULE.holds is not None
        if not NAME_RULE.holds(model.metadata.name):
            raise InvalidSpec((("metadata.name", NAME_RULE.message.removeprefix("metadata.name: ")),))
        return model
