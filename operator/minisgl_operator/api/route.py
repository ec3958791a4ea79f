"""spec.route: how Gateways of the Gateway API lead to the model."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from minisgl_operator.api.base import ApiModel, Boolean, DnsLabel, Integer, ObjectName, Rule

Hostname = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    ),
]


class ParentReference(ApiModel):
    """A Gateway, as in parentRefs of an HTTPRoute."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: DnsLabel | None = None
    """Namespace of the Gateway; default: that of the InferenceModel."""
    section_name: ObjectName | None = None
    """Name of a listener of the Gateway; default: all that admit the route."""
    port: Integer | None = Field(default=None, ge=1, le=65_535)
    """Port of a listener of the Gateway; default: all."""


ParentReferences = Annotated[tuple[ParentReference, ...], Field(max_length=8)]
Hostnames = Annotated[tuple[Hostname, ...], Field(max_length=16)]


class Route(ApiModel):
    """Route of the Gateway API to the model: by the headers X-Gateway-Model-Name and X-Gateway-Base-Model-Name with a
    served name, and by the path /NAMESPACE/NAME/v1."""

    enabled: Boolean = True
    """Create an HTTPRoute, if a Gateway is named here or in the operator's configuration."""
    parent_refs: ParentReferences = ()
    """Gateways that lead to the model; default: those of the operator's configuration."""
    hostnames: Hostnames = ()
    """Host names of requests; default: those of the operator's configuration, or all."""
    group: DnsLabel | None = None
    """Models of the namespace with the same group share their served names: a request for a name that several of them
    serve goes to one of these, by weight. The path /NAMESPACE/GROUP/v1 leads to all of them."""
    weight: Integer = Field(default=1, ge=0, le=1_000_000)
    """Part of the group's requests, relative to the weights of the others."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.weight) || self.weight == 1 || has(self.group)",
            message="weight divides the requests of a group: set group, or remove weight",
            field=".weight",
            holds=lambda route: route.weight == 1 or route.group is not None,
        ),
    )
