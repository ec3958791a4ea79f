"""`minisgl serve -f FILE`: what an InferenceModel, which the operator serves on a cluster, means on one machine.

The tables name every field of its spec. A field in none of them is an error, as on a cluster; a field that only
a cluster gives a meaning is warned about, for what it asks for is not there.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from minisgl.errors import CodedError
from minisgl.flags.arguments import Parser, add_engine_arguments, add_options
from minisgl.logging import LogOptions

API_VERSION: Final = "serving.minisgl.io/v1alpha1"
KIND: Final = "InferenceModel"
_MAX_FILE_BYTES: Final = 1 << 20

# Field → flag of `serve` that means the same, and the type of its value.
SETTINGS: Final[Mapping[str, tuple[str, type]]] = {
    "model.source.huggingFace.repo": ("model", str),
    "model.source.huggingFace.revision": ("revision", str),
    "model.dtype": ("dtype", str),
    "model.maxModelLen": ("max-model-len", int),
    "parallelism.tensor": ("tp", int),
    "engine.device": ("device", str),
    "engine.startupTimeoutSeconds": ("startup-timeout", int),
    "drainSeconds": ("drain-timeout", int),
    "recovery.maxRestarts": ("max-restarts", int),
    "recovery.windowSeconds": ("restart-window", int),
}
# Fields with a meaning that is not one flag.
OTHERS: Final = frozenset(
    {"model.servedNames", "model.source.huggingFace.endpoint", "engine.args", "engine.env.name", "engine.env.value"}
)
_POD: Final = "there are no pods here"
# Field → why it means nothing, and what to do instead where something can be done.
MEANINGLESS: Final[Mapping[str, str]] = {
    "model.source.huggingFace.tokenSecretRef": "set HF_TOKEN",
    "model.source.pvc": "give the model's directory: minisgl serve DIR -f FILE",
    "model.source.image": "give the model's directory: minisgl serve DIR -f FILE",
    "model.cache": "HF_HOME says where downloads are kept",
    "parallelism.gpusPerPod": _POD,
    "parallelism.interconnect": _POD,
    "replicas": "one replica is served",
    "suspend": "it is served now",
    "engine.env.valueFrom": "set the variable yourself",
    **dict.fromkeys(
        (
            *("engine.image", "engine.imagePullPolicy", "engine.imagePullSecrets", "engine.resources"),
            *("engine.gpuResourceName", "engine.runtimeClassName", "engine.shmSize", "engine.nodeSelector"),
            *("engine.tolerations", "engine.affinity", "engine.topologySpreadConstraints", "engine.priorityClassName"),
            *("frontend.image", "frontend.imagePullPolicy", "frontend.imagePullSecrets", "frontend.resources"),
            *("frontend.nodeSelector", "frontend.tolerations", "frontend.affinity", "frontend.priorityClassName"),
            *("frontend.topologySpreadConstraints", "frontend.replicas"),
        ),
        _POD,
    ),
    "frontend.auth": "everybody who reaches the port may use the endpoint, unless --api-keys names a file of keys",
    "networkPolicy": "--host says who reaches the endpoint",
}
_KNOWN: Final = (*SETTINGS, *OTHERS, *MEANINGLESS)


class ManifestError(CodedError):
    """The file is not an InferenceModel that can be served here."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_manifest", message)


class Manifest(NamedTuple):
    """An InferenceModel as `serve` takes it."""

    settings: dict[str, tuple[Any, str]]
    """By flag without dashes: its value, and the field that it is from."""
    environment: dict[str, str]
    """Variables of the engine."""
    other_names: list[str]
    """By which requests may call the model besides the first."""
    warnings: list[str]
    """One for each reason why fields mean nothing here."""


def read(path: Path) -> Manifest:
    """Raises ManifestError: not readable, not YAML, not one InferenceModel, or a field that is not known or wrong."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise ManifestError(f"{path} is larger than {_MAX_FILE_BYTES} bytes, and so no InferenceModel")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return _understand(documents)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from None


def _understand(documents: list[Any]) -> Manifest:
    if len(documents) != 1:
        raise ManifestError(f"one InferenceModel is wanted, and there are {len(documents)} objects")
    [model] = documents
    if not isinstance(model, dict) or (model.get("apiVersion"), model.get("kind")) != (API_VERSION, KIND):
        found = f"{model.get('apiVersion')} {model.get('kind')}" if isinstance(model, dict) else type(model).__name__
        raise ManifestError(f"this is {found}, and not {API_VERSION} {KIND}")
    for key in model:
        if key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            raise ManifestError(f"{key}: there is no such field: remove it")
    metadata, spec = _mapping(model.get("metadata"), "metadata"), _mapping(model.get("spec"), "spec")
    name = _of_type(metadata.get("name"), str, "metadata.name")
    manifest = Manifest({"served-model-name": (name, "metadata.name")}, {}, [], [])
    meaningless: dict[str, list[str]] = {}
    for field, value in _fields(spec, ""):
        if field in SETTINGS:
            flag, kind = SETTINGS[field]
            manifest.settings[flag] = (_of_type(value, kind, f"spec.{field}"), f"spec.{field}")
        elif field in MEANINGLESS:
            meaningless.setdefault(MEANINGLESS[field], []).append(f"spec.{field}")
        else:
            _take(field, value, manifest, meaningless)
    manifest.warnings.extend(
        f"no meaning on one machine: {', '.join(fields)}: {reason}" for reason, fields in meaningless.items()
    )
    return manifest


def _fields(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The fields that are set, down to those that the tables name. `engine.env` is given as a whole."""
    for key, inner in value.items():
        field = f"{path}.{key}".removeprefix(".")
        if inner is None:
            continue
        if field in _KNOWN or field == "engine.env":
            yield field, inner
        elif any(known.startswith(f"{field}.") for known in _KNOWN):
            yield from _fields(_mapping(inner, f"spec.{field}"), field)
        else:
            raise _unknown(field)


def _take(field: str, value: Any, manifest: Manifest, meaningless: dict[str, list[str]]) -> None:
    """The fields of OTHERS."""
    where = f"spec.{field}"
    match field:
        case "model.servedNames":
            names = _texts(value, where)
            if names:
                manifest.settings["served-model-name"] = (names[0], where)
            manifest.other_names.extend(names[1:])
        case "model.source.huggingFace.endpoint":
            manifest.environment["HF_ENDPOINT"] = _of_type(value, str, where)
        case "engine.args":
            manifest.settings.update((flag, (set_to, where)) for flag, set_to in _engine_flags(value, where))
        case _:
            for index, variable in enumerate(_of_type(value, list, where)):
                _take_variable(_mapping(variable, f"{where}[{index}]"), f"{where}[{index}]", manifest, meaningless)


def _take_variable(
    variable: Mapping[str, Any], where: str, manifest: Manifest, meaningless: dict[str, list[str]]
) -> None:
    for key in variable:
        if f"engine.env.{key}" not in _KNOWN:
            raise _unknown(f"engine.env.{key}")
    name = _of_type(variable.get("name"), str, f"{where}.name")
    if variable.get("valueFrom") is not None:
        reason = MEANINGLESS["engine.env.valueFrom"]
        meaningless.setdefault(reason, []).append(f"{where}.valueFrom of {name}")
    else:
        manifest.environment[name] = _of_type(variable.get("value") or "", str, f"{where}.value")


def _engine_flags(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Each flag of a command line of the engine that is set, with its value."""
    parser = Parser(exit_on_error=False, add_help=False)
    add_engine_arguments(parser)
    add_options(parser, LogOptions())
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        found, unknown = parser.parse_known_args(_texts(value, where))
    except argparse.ArgumentError as error:
        raise ManifestError(f"{where}: {error}") from None
    if unknown:
        raise ManifestError(f"{where}: the engine has no argument {unknown[0]}")
    for action in parser._actions:
        if hasattr(found, action.dest):
            flag = action.option_strings[0].removeprefix("--")
            if flag in {setting for setting, _ in SETTINGS.values()}:
                raise ManifestError(f"{where}: --{flag} follows from another field of the InferenceModel: remove it")
            yield flag, getattr(found, action.dest)


def _unknown(field: str) -> ManifestError:
    close = difflib.get_close_matches(field, _KNOWN, 1, 0.0)
    return ManifestError(f"spec.{field}: there is no such field; the nearest one is spec.{close[0]}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    found = _of_type({} if value is None else value, dict, where)
    return {str(key): inner for key, inner in found.items()}


def _texts(value: Any, where: str) -> list[str]:
    return [_of_type(text, str, f"{where}[{index}]") for index, text in enumerate(_of_type(value, list, where))]


def _of_type(value: Any, kind: type, where: str) -> Any:
    # To Python true is the number 1, and to an API server it is not.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {str: "text", int: "a whole number", list: "a list", dict: "an object"}[kind]
        raise ManifestError(f"{where}: {value!r} is not {wanted}")
    return value
