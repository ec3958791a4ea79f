"""The table of models, and which of them a request is for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.model_names import DEFAULT_MODEL
from minisgl.frontend.server.json_body import truncate
from minisgl.gateway.models import Key, Model
from minisgl.wire.web_pages import host_name

_MAX_NAMED: Final = 10
"""Models that an error lists."""

_SERVICE: Final = "svc"


class Target(NamedTuple):
    """A model that a path or the header Host names."""

    name: str
    namespace: str


def everything(_: Model) -> bool:
    """Allow every model."""
    return True


class Table:
    """All models, found by their names."""

    def __init__(self, models: Iterable[Model] = ()) -> None:
        self._models: dict[Key, Model] = {}
        self._by_name: defaultdict[str, set[Key]] = defaultdict(set)
        """Served name → models that have it."""
        for model in models:
            self.put(model)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def get(self, key: Key) -> Model | None:
        return self._models.get(key)

    def put(self, model: Model) -> None:
        """Add a model, or replace the one with its key."""
        self.remove(model.key)
        self._models[model.key] = model
        for name in model.names:
            self._by_name[name].add(model.key)

    def remove(self, key: Key) -> None:
        model = self._models.pop(key, None)
        if model is None:
            return
        for name in model.names:
            _discard(self._by_name, name, key)

    def listed_name(self, model: Model, name: str, allowed: Callable[[Model], bool] = everything) -> str:
        """Return the name by which a client that may use the `allowed` models calls a model by its served name: the
        qualified one, if others have that name too, or it is the qualified name of another model."""
        is_unique = sum(allowed(self._models[key]) for key in self._by_name[name]) == 1
        is_taken = _key(name) in self._models and _key(name) != model.key
        return name if is_unique and not is_taken else str(model.key)

    def target_of_host(self, host: str) -> Target | None:
        """Return the model whose own Service the header Host names: NAME.NAMESPACE or NAME.NAMESPACE.svc, with the
        domain of any cluster. None: it names none, such as a Host of the gateway itself, which may be a name alone:
        whoever gave a model that name would get all requests."""
        name, *rest = host_name(host).split(".")
        if not rest or not rest[0] or rest[1:2] not in ([], [_SERVICE]):
            return None
        return Target(name, rest[0]) if Key(rest[0], name) in self._models else None

    def find(
        self, name: str | None, target: Target | None = None, allowed: Callable[[Model], bool] = everything
    ) -> Model:
        """Return the model that a request is for. `name`: the field `model` of its body; `target`: the model that its
        path or Host names. A model that is not `allowed` is not found, so that an error does not tell that it exists.
        Raises ApiError."""
        if target is not None:
            key = Key(target.namespace, target.name)
            found = self._permitted([key], allowed)
            permitted = [model for model in found if _answers_to(model, name)]
            asked = name if found else str(key)
        elif name is None or name == DEFAULT_MODEL:
            permitted = self._permitted(self._models, allowed)
            if len(permitted) > 1:
                message = "missing field 'model': there are several models, which GET /v1/models lists"
                raise ApiError(400, "missing_required_parameter", message, "model")
            asked = name
        else:
            # A qualified name is that of its namespace, whatever names models of other namespaces have.
            key = _key(name)
            permitted = self._permitted([key] if key in self._models else self._by_name.get(name, ()), allowed)
            asked = name
        if not permitted:
            raise _not_found(asked)
        if len(permitted) > 1:
            raise _ambiguous(asked, permitted)
        return permitted[0]

    def _permitted(self, keys: Iterable[Key], allowed: Callable[[Model], bool]) -> list[Model]:
        return [model for key in keys if (model := self._models.get(key)) is not None and allowed(model)]


def served_name(model: Model, name: str | None) -> str | None:
    """Return the name to which the field `model` of a body must be changed, because the model's frontends do not know
    the one that the client used; None: they do."""
    return None if name is None or name == DEFAULT_MODEL or name in model.names else model.names[0]


def _answers_to(model: Model, name: str | None) -> bool:
    return name is None or name in (DEFAULT_MODEL, str(model.key)) or name in model.names


def _key(name: str) -> Key:
    namespace, _, rest = name.rpartition("/")
    return Key(namespace, rest)


def _discard(index: defaultdict[str, set[Key]], name: str, key: Key) -> None:
    index[name].discard(key)
    if not index[name]:
        del index[name]


def _not_found(name: str | None) -> ApiError:
    shown = "there is no model" if name is None else f"model {truncate(name)!r} does not exist"
    return ApiError(404, "model_not_found", f"{shown}; GET /v1/models lists all models", "model")


def _ambiguous(name: str | None, models: list[Model]) -> ApiError:
    names = sorted(str(model.key) for model in models)
    more = ["…"] if len(names) > _MAX_NAMED else []
    listed = ", ".join([*map(repr, names[:_MAX_NAMED]), *more])
    shown = "a model of this name" if name is None else f"model {truncate(name)!r}"
    return ApiError(400, "ambiguous_model", f"{shown} exists several times; use one of {listed}", "model")
