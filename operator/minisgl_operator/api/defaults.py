"""Defaults for fields that models do not set, as the flags of the operator give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, ValidationError

from minisgl_operator.api.base import ApiModel, DnsLabel, Integer, LabelValue, ObjectName, SecretKey, problem
from minisgl_operator.api.pod_template import PodMetadata
from minisgl_operator.api.route import Hostnames, ParentReferences
from minisgl_operator.api.scheduling import Resources, Toleration
from minisgl_operator.api.types import NetworkPeer, TokenSecretReference
from minisgl_operator.api.upgrades import UpgradeSettings

_MAX_PROBLEMS: Final = 5


class InvalidDefaults(ValueError):
    """The defaults are not valid; the message names each wrong field."""

    code: Final = "InvalidDefaults"


class FetchDefaults(PodMetadata):
    """Defaults for fetch pods."""

    resources: Resources = Resources()
    """CPU and memory."""


class PlacementDefaults(FetchDefaults):
    """Defaults for pods of frontends and engines."""

    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    """Taints of nodes that the pods tolerate."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""


class FrontendDefaults(PlacementDefaults):
    """Defaults for frontend pods."""

    min_replicas: Integer = Field(default=1, ge=0, le=1)
    """Frontend pods of a model that is scaled to zero: 0, or 1 for as many as otherwise."""


class EngineDefaults(PlacementDefaults):
    """Defaults for engine pods."""

    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""


class CaConfigMap(ApiModel):
    """A key of a ConfigMap in the namespace of each model."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: SecretKey = "ca.crt"
    """Key with certificates in PEM."""


class HubDefaults(ApiModel):
    """How fetch pods reach the Hub."""

    endpoint: str | None = Field(default=None, max_length=500, pattern=r"^https?://[^\s]+$")
    """URL of a mirror of the Hub."""
    token_secret: TokenSecretReference | None = None
    """Secret with a Hub token; a namespace without it fetches without a token."""
    ca_config_map: CaConfigMap | None = None
    """Certificates of authorities that are trusted instead of those in the image, also for buckets."""


class S3Defaults(ApiModel):
    """Object store of models that name no endpoint of their own."""

    endpoint: str | None = Field(default=None, max_length=500, pattern=r"^https?://[^\s]+$")
    """URL of the store; default: Amazon S3."""
    region: str | None = Field(default=None, min_length=1, max_length=100, pattern=r"^[A-Za-z0-9-]+$")
    """Region of its buckets."""
    secret_name: ObjectName | None = None
    """Secret with credentials, as source.s3.secretName; a namespace without it fetches with what the cloud gives."""


class ProxyDefaults(ApiModel):
    """Proxies of fetch pods, as in the variables HTTP_PROXY, HTTPS_PROXY and NO_PROXY."""

    http: str = Field(default="", max_length=500)
    """Proxy for http URLs."""
    https: str = Field(default="", max_length=500)
    """Proxy for https URLs."""
    no_proxy: str = Field(default="", max_length=8192)
    """Hosts to connect to without a proxy, separated by commas."""


class NetworkPolicyDefaults(ApiModel):
    """Access to the endpoints of models."""

    ingress_from: tuple[NetworkPeer, ...] = Field(default=(), max_length=32)
    """Clients of models that name none; default: pods of the model's namespace."""
    monitoring_namespaces: tuple[DnsLabel, ...] = Field(default=(), max_length=32)
    """Namespaces whose pods may read the metrics of all models, and so reach their endpoints."""


class RouteDefaults(ApiModel):
    """Routes of the Gateway API to models."""

    parent_refs: ParentReferences = ()
    """Gateways that lead to models which name none; default: only models with parentRefs of their own have a route."""
    hostnames: Hostnames = ()
    """Host names of requests to models which name none; default: all."""


def _with_a_port(url: str) -> str:
    """Raises ValueError for a URL whose host or port cannot be read: NetworkPolicies of all models have the port."""
    if urlsplit(url).port == 0:
        raise ValueError("port 0 is none")
    return url


class TraceDefaults(ApiModel):
    """Traces of frontends."""

    endpoint: Annotated[str, AfterValidator(_with_a_port)] | None = Field(
        default=None, max_length=500, pattern=r"^https?://[^\s/?#]+[^\s?#]*$"
    )
    """Collector that gets traces by OTLP over HTTP; default: no traces."""
    sampling: float = Field(default=0.1, ge=0, le=1)
    """Share of the traces that begin at a frontend which are recorded."""


class ModelDefaults(ApiModel):
    """Values for fields that a model leaves out: the flag --defaults.

    A model's own `nodeSelector` or `tolerations` replaces the default as a whole; labels, annotations and resources are
    replaced key by key.
    """

    pod_identity: Literal["Fixed", "Namespace"] = "Fixed"
    """Fixed: pods run as user and group 65532. Namespace: the admission of the namespace chooses them, as OpenShift's
    restricted-v2 does."""
    storage_class_name: ObjectName | None = None
    """StorageClass of new claims."""
    engine: EngineDefaults = EngineDefaults()
    """Defaults for engine pods."""
    frontend: FrontendDefaults = FrontendDefaults()
    """Defaults for frontend pods."""
    fetch: FetchDefaults = FetchDefaults()
    """Defaults for fetch pods."""
    hub: HubDefaults = HubDefaults()
    """How fetch pods reach the Hub."""
    s3: S3Defaults = S3Defaults()
    """Object store of models that name no endpoint of their own."""
    proxy: ProxyDefaults = ProxyDefaults()
    """Proxies of fetch pods."""
    network_policy: NetworkPolicyDefaults = NetworkPolicyDefaults()
    """Access to the endpoints of models."""
    route: RouteDefaults = RouteDefaults()
    """Routes of the Gateway API to models."""
    traces: TraceDefaults = TraceDefaults()
    """Traces of frontends."""
    rollout: UpgradeSettings | None = None
    """How models get the pods of a new operator; default: all at once."""

    @classmethod
    def read(cls, text: str) -> Self:
        """The defaults in a YAML or JSON document.

        Raises:
            InvalidDefaults: the text is no such document, or a field is unknown or wrong.
        """
        try:
            raw: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidDefaults(f"the defaults are not YAML: {' '.join(str(error).split())}") from None
        try:
            return cls.model_validate({} if raw is None else raw)
        except ValidationError as error:
            problems = [problem(each) for each in error.errors(include_url=False)][:_MAX_PROBLEMS]
            raise InvalidDefaults("; ".join(f"{path}: {text}" for path, text in problems)) from None


@dataclass(frozen=True)
class Defaults:
    """Flags of the operator; operators of one version with equal flags render equal manifests.

    `operator_namespace`: namespace of the operator's pods, whose probes NetworkPolicies allow.
    `image_pull_policy`: None leaves the choice to the API server.
    `image_pull_secrets`: names of Secrets in the namespace of each model.
    `engine_architecture`, `frontend_architecture`: label kubernetes.io/arch of nodes that can run the image; None: any.
    `gateway`: label app.kubernetes.io/instance of the gateway's pods in the operator's namespace; None: no gateway.
    `models`: defaults for the other fields.
    """

    operator_namespace: str
    engine_image: str
    frontend_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    engine_architecture: str | None = None
    frontend_architecture: str | None = None
    gateway: str | None = None
    models: ModelDefaults = field(default_factory=ModelDefaults)
