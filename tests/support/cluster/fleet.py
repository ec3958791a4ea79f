"""Several simulated models, and one operator at a time that upgrades them in waves."""

from __future__ import annotations

from typing import Any, NamedTuple

from minisgl_operator.api.defaults import Defaults, ModelDefaults
from minisgl_operator.api.objects import Manifest, Ref
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.pods import component, revision_of
from minisgl_operator.render import engine, frontend, names
from minisgl_operator.shell.store import ModelKey
from minisgl_operator.shell.upgrades import Upgrades
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, raw_model

WAVES = [{"name": "canary", "selector": {"matchLabels": {"stage": "canary"}}}]


def operator_version(version: int, **rollout: Any) -> Defaults:
    """The defaults of an operator of this version; without `rollout` it upgrades all models at once."""
    models = ModelDefaults.model_validate({"rollout": rollout} if rollout else {})
    return Defaults("minisgl-system", f"engine:{version}", f"frontend:{version}", models=models)


class _Revisions(NamedTuple):
    """Revisions of the pods of a model by an operator with these defaults."""

    model: InferenceModel | None
    defaults: Defaults | None
    frontend: str
    engine: str


class FleetModel(GuardedCluster):
    """One model; `stage` is a label that waves select."""

    full_status = True

    def __init__(self, name: str, stage: str, spec: dict[str, Any], defaults: Defaults) -> None:
        raw = raw_model(spec, source=CLAIM, name=name, uid=f"00000000-0000-4000-8000-{name:0>12}")
        raw["metadata"]["labels"] = {"stage": stage}
        super().__init__(raw, defaults)
        self.key = ModelKey("team-a", name)
        self.edited = False
        self._known = _Revisions(None, None, "", "")

    def edit(self, spec: dict[str, Any]) -> None:
        """An edit of a field that changes pods."""
        super().edit(spec)
        self.edited = True

    def versions(self) -> list[Any]:
        return [(body["metadata"].get("generation"), body.get("status")) for body in self.objects.values()]

    def uids(self) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self.pods.values()]

    @property
    def frontends(self) -> Manifest:
        return self.objects[Ref("Deployment", names.frontend(self.key.name))]

    @property
    def has_new_frontends(self) -> bool:
        return revision_of(self.frontends) == self._new_revisions().frontend

    @property
    def has_new_engines(self) -> bool:
        """True if a StatefulSet has the template of the current operator."""
        return self._new_revisions().engine in self._revisions()

    @property
    def is_done(self) -> bool:
        """True if everything has the templates of the current operator, and serves."""
        new = self._new_revisions().engine
        ready = {replica for replica, revision in self.routed().items() if revision == new}
        wanted = self.model.spec.replicas
        return self.has_new_frontends and self._revisions() <= {new} and len(ready) >= wanted

    @property
    def state(self) -> str:
        return str(self.raw.get("status", {}).get("rollout", {}).get("upgrade", {}).get("state", ""))

    @property
    def progressing(self) -> Manifest:
        return next(dict(each) for each in self.raw["status"]["conditions"] if each["type"] == "Progressing")

    def _new_revisions(self) -> _Revisions:
        model = self.model
        if self._known.model is not model or self._known.defaults is not self.defaults:
            template = engine.current_template(model, self.defaults)
            self._known = _Revisions(model, self.defaults, frontend.revision(model, self.defaults), template.revision)
        return self._known

    def _revisions(self) -> set[str | None]:
        sets = (body for ref, body in self.objects.items() if ref.kind == "StatefulSet" and component(body))
        return {revision_of(body["spec"]["template"]) for body in sets}


class Fleet:
    def __init__(self, models: list[FleetModel]) -> None:
        self.models = {model.key.name: model for model in models}
        self.start_operator(models[0].defaults)

    def start_operator(self, defaults: Defaults) -> None:
        """Replace the operator; it knows nothing but what it observes."""
        self.defaults = defaults
        self.queued: set[ModelKey] = set(self._keys())
        self._upgrades = Upgrades(defaults.models.rollout, self._keys, self.queued.add)
        for model in self.models.values():
            model.defaults = defaults
            model.turn = None
            model.edited = False

    def create(self, model: FleetModel) -> None:
        self.models[model.key.name] = model

    def delete(self, model: FleetModel) -> None:
        del self.models[model.key.name]
        self._upgrades.forget(model.key, model.now)
        self.queued.discard(model.key)

    def _keys(self) -> list[ModelKey]:
        return [model.key for model in self.models.values()]

    def reconcile(self, model: FleetModel) -> None:
        self.queued.discard(model.key)
        model.turn = None
        facts = model.facts()
        model.turn = self._upgrades.turn(model.key, model.raw["metadata"]["labels"], facts.upgrade, model.now)
        model.reconcile(facts=facts.seen_again(facts.observed, model.turn))

    def run(self, model: FleetModel) -> None:
        """Run everything else than the operator once."""
        model.look()
        model.run_controllers()
        model.run_scheduler()
        model.run_kubelets()
        model.run_frontends()
        model.look()

    def settle(self) -> None:
        """Run until nothing changes."""
        for _ in range(60):
            before = self._state()
            for model in self.models.values():
                self.reconcile(model)
                self.run(model)
            if before == self._state() and not self.queued:
                return
        raise AssertionError("not settled")

    def _state(self) -> list[Any]:
        return [
            (_without_times(each.raw), each.versions(), sorted(each.uids()), each.routed())
            for each in self.models.values()
        ]


def _without_times(raw: Manifest) -> Any:
    conditions = raw.get("status", {}).get("conditions", ())
    rollout = raw.get("status", {}).get("rollout")
    return [(each["type"], each["status"], each["message"]) for each in conditions], rollout
