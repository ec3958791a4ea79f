"""All children of a model, in the order in which they are created."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import (
    availability,
    engine,
    frontend,
    gateway,
    model_files,
    names,
    network,
    route,
    storage,
)
from minisgl_operator.render.child import child
from minisgl_operator.render.engine_template import EngineTemplate


def render(
    model: InferenceModel,
    defaults: Defaults,
    indices: Iterable[int] | None = None,
    template: EngineTemplate | None = None,
    *,
    gateway_addresses: Sequence[str] | None = None,
    group: Sequence[route.Member] = (),
) -> tuple[Manifest, ...]:
    """Everything that the spec asks for, as if no transition were in progress, without its history. `indices` are those
    of the replicas; by default, those of a new model. `template` is that of the replicas; by default, the spec's.
    `gateway_addresses`: where the gateway takes the requests of a model without frontends; None: there are frontends.
    `group`: the models of the group of its route; empty: it has no route.

    Objects that pods need come before objects that create pods. The order helps readers; nothing depends on it.
    """
    template = template or engine.current_template(model, defaults)
    replicas = range(initial_replicas(model)) if indices is None else tuple(indices)
    return tuple(_render(model, defaults, template, replicas, gateway_addresses, group))


def revision(model: InferenceModel, defaults: Defaults) -> str:
    """Revision of the engine's pod template that the spec asks for."""
    return engine.current_template(model, defaults).revision


def initial_replicas(model: InferenceModel) -> int:
    """Number of replicas of a new model."""
    if model.spec.suspend:
        return 0
    return model.spec.replicas if model.spec.autoscaling is None else model.spec.autoscaling.min_replicas


def _render(
    model: InferenceModel,
    defaults: Defaults,
    template: EngineTemplate,
    replicas: Sequence[int],
    gateway_addresses: Sequence[str] | None,
    group: Sequence[route.Member],
) -> Iterator[Manifest]:
    fetched = model_files.is_fetched(model)
    for name, component in ((names.engine(model.name), names.ENGINE), (names.frontend(model.name), names.FRONTEND)):
        yield child(model, "v1", "ServiceAccount", name, component, {"automountServiceAccountToken": False})
    if fetched and model.spec.model.fetch_cache.claim_name is None:
        yield storage.claim(model, defaults)
    if model.spec.network_policy.enabled:
        yield network.engine_policy(model, defaults)
        yield network.frontend_policy(model, defaults)
        if fetched:
            yield network.fetch_policy(model, defaults)
    yield frontend.service(model)
    if defaults.gateway is not None:
        yield frontend.gateway_service(model)
    if gateway_addresses is not None:
        yield gateway.endpoint_slice(model, gateway_addresses)
    if group:
        yield route.http_route(model, defaults, group)
    yield frontend.leaders_service(model)
    if fetched:
        yield storage.fetch_job(model, defaults)
    if availability.has_budgets(model):
        yield availability.frontend_budget(model)
    yield frontend.deployment(model, defaults)
    if replicas:
        if availability.has_budgets(model):
            pods = {names.replica(model.name, index): template.pods for index in replicas}
            yield availability.engine_budget(model, pods)
        for index in replicas:
            yield engine.peers_service(model, index)
            yield engine.stateful_set(model, template, index)
