"""All children of a model, in the order in which they are made."""

from __future__ import annotations

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Manifest
from minisgl_operator.render import availability, engine, frontend, model_files, names, network, storage
from minisgl_operator.render.child import child
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.render.revision import short_hash


def render(model: InferenceModel, env: Defaults) -> tuple[Manifest, ...]:
    """Everything that the model asks for once it is settled.

    What pods need comes before what makes pods; the order is for people who read along, nothing depends on it.
    """
    return (
        *(_service_account(model, name, component) for name, component in _accounts(model)),
        *_cache(model),
        *_network_policies(model, env),
        frontend.service(model),
        frontend.leaders_service(model),
        *_fetch(model, env),
        availability.frontend_budget(model),
        frontend.deployment(model, env),
        *_replicas(model, env),
    )


def revision(model: InferenceModel, env: Defaults) -> str:
    """Of the engine's pod template. All replicas have the same one, though each template names its own replica."""
    return short_hash(engine.pod_template(model, env, 0))


def wanted_replicas(model: InferenceModel) -> int:
    return 0 if model.spec.suspend else model.spec.replicas


def _accounts(model: InferenceModel) -> tuple[tuple[str, str], ...]:
    return ((names.engine(model.name), names.ENGINE), (names.frontend(model.name), names.FRONTEND))


def _service_account(model: InferenceModel, name: str, component: str) -> Manifest:
    return child(model, "v1", "ServiceAccount", name, component, {"automountServiceAccountToken": False})


def _cache(model: InferenceModel) -> tuple[Manifest, ...]:
    if model.spec.model.source.hugging_face is None or model.spec.model.hub_cache.claim_name is not None:
        return ()
    return (storage.claim(model),)


def _fetch(model: InferenceModel, env: Defaults) -> tuple[Manifest, ...]:
    return () if model_files.cache_key(model) is None else (storage.fetch_job(model, env),)


def _network_policies(model: InferenceModel, env: Defaults) -> tuple[Manifest, ...]:
    if not model.spec.network_policy.enabled:
        return ()
    own = (network.engine_policy(model, env), network.frontend_policy(model, env))
    return own if model_files.cache_key(model) is None else (*own, network.fetch_policy(model, env))


def _replicas(model: InferenceModel, env: Defaults) -> tuple[Manifest, ...]:
    current = revision(model, env)
    indices = range(wanted_replicas(model))
    if not indices:
        return ()
    serving = {names.replica(model.name, index): model.spec.parallelism.pods for index in indices}
    return (
        availability.engine_budget(model, serving),
        *(
            manifest
            for index in indices
            for manifest in (engine.peers_service(model, index), engine.stateful_set(model, env, index, current))
        ),
    )
