"""`minisgl serve -f FILE`: an InferenceModel, which the operator serves on a cluster, on one machine.

The tables name every field of its spec. A field in none of them is an error, as on a cluster; a field that has an
effect only on a cluster causes a warning.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from minisgl.errors import CodedError
from minisgl.flags.arguments import Parser, add_engine_arguments, add_options, number
from minisgl.logging import LogOptions
from minisgl.options import closest

API_VERSION: Final = "serving.minisgl.io/v1alpha1"
KIND: Final = "InferenceModel"
_MAX_FILE_BYTES: Final = 1 << 20

SETTINGS: Final[Mapping[str, tuple[str, type]]] = {
    "model.source.huggingFace.repo": ("model", str),
    "model.source.s3.uri": ("model", str),
    "model.source.huggingFace.revision": ("revision", str),
    "task": ("task", str),
    "model.dtype": ("dtype", str),
    "model.maxModelLen": ("max-model-len", int),
    "parallelism.tensor": ("tp", int),
    "engine.device": ("device", str),
    "engine.quantization": ("quantization", str),
    "engine.kvCacheDtype": ("kv-cache-dtype", str),
    "engine.speculative": ("speculative", str),
    "engine.startupTimeoutSeconds": ("startup-timeout", int),
    "drainSeconds": ("drain-timeout", int),
    "recovery.maxRestarts": ("max-restarts", int),
    "recovery.windowSeconds": ("restart-window", int),
}
"""Fields with the flag of `serve` that means the same, and the type of the value."""
SPECIAL_FIELDS: Final = frozenset(
    {
        *("model.servedNames", "model.source.huggingFace.endpoint", "model.source.s3.endpoint"),
        *("model.source.s3.region", "engine.args", "engine.env.name", "engine.env.value"),
    }
)
"""Fields with a meaning that is not one flag; see `_apply_special`."""
_NO_PODS: Final = "one machine has no pods"
CLUSTER_ONLY: Final[Mapping[str, str]] = {
    "model.source.huggingFace.tokenSecretRef": "set HF_TOKEN",
    "model.source.s3.secretName": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "model.source.pvc": "give the model's directory: minisgl serve DIR -f FILE",
    "model.source.image": "give the model's directory: minisgl serve DIR -f FILE",
    "model.cache": "set HF_HOME to the directory for downloads",
    "parallelism.gpusPerPod": _NO_PODS,
    "parallelism.interconnect": _NO_PODS,
    "replicas": "one replica is served",
    "autoscaling": "one replica is served",
    "rollout": _NO_PODS,
    "availability": _NO_PODS,
    "suspend": "the model is served now",
    "engine.env.valueFrom": "set the variable in the environment",
    **dict.fromkeys(
        (
            *("engine.image", "engine.imagePullPolicy", "engine.imagePullSecrets", "engine.resources"),
            *("engine.gpuResourceName", "engine.runtimeClassName", "engine.shmSize", "engine.shmMedium"),
            *("engine.nodeSelector", "engine.podTemplate", "frontend.podTemplate", "frontend.leaveSeconds"),
            *("frontend.mesh", "fetch"),
            *("engine.tolerations", "engine.affinity", "engine.topologySpreadConstraints", "engine.priorityClassName"),
            *("frontend.image", "frontend.imagePullPolicy", "frontend.imagePullSecrets", "frontend.resources"),
            *("frontend.nodeSelector", "frontend.tolerations", "frontend.affinity", "frontend.priorityClassName"),
            *("frontend.topologySpreadConstraints", "frontend.replicas", "frontend.minReplicas"),
            "serviceAccountName",
        ),
        _NO_PODS,
    ),
    "frontend.auth": "any client that reaches the port may use the API; to require keys, set --api-keys",
    "frontend.args": "give these flags to serve",
    "frontend.env": "set the variables in the environment",
    "route": "clients use the address of this machine",
    "networkPolicy": "set --host to the address to listen on",
}
"""Fields without effect, with the reason or what to do instead."""
_KNOWN: Final = (*SETTINGS, *SPECIAL_FIELDS, *CLUSTER_ONLY)


class ManifestError(CodedError):
    """The file is not an InferenceModel that can be served here."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_manifest", message)


class Manifest(NamedTuple):
    """An InferenceModel as settings of `serve`."""

    settings: dict[str, tuple[Any, str]]
    """Value and field of origin by flag without dashes."""
    environment: dict[str, str]
    """Environment variables of the engine."""
    other_names: list[str]
    """Names of the model in the API besides the first."""
    warnings: list[str]
    """One for each reason why fields have no effect."""


def read(path: Path) -> Manifest:
    """Read an InferenceModel, which may stand among other objects. Raises ManifestError when the file cannot be read,
    is not YAML, has not exactly one InferenceModel, or has an unknown field or a wrong value."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise ManifestError(f"{path} is larger than {_MAX_FILE_BYTES} bytes, too large for an InferenceModel")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return _parse(documents)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from None


def _parse(documents: list[Any]) -> Manifest:
    models = [document for document in documents if len(documents) == 1 or _is_model(document)]
    if len(models) != 1:
        raise ManifestError(f"expected one InferenceModel, found {len(models)} in {len(documents)} objects")
    [model] = models
    if not _is_model(model):
        found = f"{model.get('apiVersion')} {model.get('kind')}" if isinstance(model, dict) else type(model).__name__
        raise ManifestError(f"expected {API_VERSION} {KIND}, found {found}")
    for key in model:
        if key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            raise ManifestError(f"{key}: unknown field; remove it")
    metadata, spec = _mapping(model.get("metadata"), "metadata"), _mapping(model.get("spec"), "spec")
    name = _expect(metadata.get("name"), str, "metadata.name")
    manifest = Manifest({"served-model-name": (name, "metadata.name")}, {}, [], [])
    without_effect: dict[str, list[str]] = {}
    for other in documents:
        if other is not model:
            name_of_kind = str(other.get("kind")) if isinstance(other, dict) else type(other).__name__
            without_effect.setdefault("only the InferenceModel is served", []).append(name_of_kind)
    for field, value in _fields(spec, ""):
        where = f"spec.{field}"
        if field in SETTINGS:
            flag, kind = SETTINGS[field]
            manifest.settings[flag] = (_expect(value, kind, where), where)
        elif field in CLUSTER_ONLY:
            without_effect.setdefault(CLUSTER_ONLY[field], []).append(where)
        else:
            _apply_special(field, value, manifest, without_effect)
    manifest.warnings.extend(
        f"no effect on one machine: {', '.join(fields)}: {reason}" for reason, fields in without_effect.items()
    )
    return manifest


def _is_model(document: Any) -> bool:
    return isinstance(document, dict) and (document.get("apiVersion"), document.get("kind")) == (API_VERSION, KIND)


def _fields(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Fields that are set, down to those that the tables name; `engine.env` as a whole. Raises ManifestError."""
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


def _apply_special(field: str, value: Any, manifest: Manifest, without_effect: dict[str, list[str]]) -> None:
    """Apply one of SPECIAL_FIELDS to `manifest`."""
    where = f"spec.{field}"
    match field:
        case "model.servedNames":
            names = _texts(value, where)
            if names:
                manifest.settings["served-model-name"] = (names[0], where)
            manifest.other_names.extend(names[1:])
        case "model.source.huggingFace.endpoint":
            manifest.environment["HF_ENDPOINT"] = _expect(value, str, where)
        case "model.source.s3.endpoint":
            manifest.environment["AWS_ENDPOINT_URL_S3"] = _expect(value, str, where)
        case "model.source.s3.region":
            manifest.environment["AWS_DEFAULT_REGION"] = _expect(value, str, where)
        case "engine.args":
            manifest.settings.update((flag, (flag_value, where)) for flag, flag_value in _engine_flags(value, where))
        case _:
            for index, entry in enumerate(_expect(value, list, where)):
                variable = _mapping(entry, f"{where}[{index}]")
                for key in variable:
                    if f"engine.env.{key}" not in _KNOWN:
                        raise _unknown(f"engine.env.{key}")
                name = _expect(variable.get("name"), str, f"{where}[{index}].name")
                if variable.get("valueFrom") is not None:
                    reason = CLUSTER_ONLY["engine.env.valueFrom"]
                    without_effect.setdefault(reason, []).append(f"{where}[{index}].valueFrom of {name}")
                else:
                    text = _expect(variable.get("value") or "", str, f"{where}[{index}].value")
                    manifest.environment[name] = text


def _engine_flags(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Flags without dashes, and their values, in a command line of the engine. Raises ManifestError."""
    parser = Parser(exit_on_error=False, add_help=False)
    add_engine_arguments(parser)
    add_options(parser, LogOptions())
    parser.add_argument("--stall-timeout", type=number(0))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        found, unknown = parser.parse_known_args(_texts(value, where))
    except argparse.ArgumentError as error:
        raise ManifestError(f"{where}: {error}") from None
    if unknown:
        raise ManifestError("; ".join([f"{where}: the engine has no argument {unknown[0]}", *parser.hints(unknown)]))
    for action in parser._actions:
        if hasattr(found, action.dest):
            flag = action.option_strings[0].removeprefix("--")
            if flag in {setting for setting, _ in SETTINGS.values()}:
                raise ManifestError(f"{where}: --{flag} is set by another field of the InferenceModel; remove it")
            yield flag, getattr(found, action.dest)


def _unknown(field: str) -> ManifestError:
    return ManifestError(f"spec.{field}: unknown field; did you mean spec.{closest(field, _KNOWN)}?")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    found = _expect({} if value is None else value, dict, where)
    return {str(key): inner for key, inner in found.items()}


def _texts(value: Any, where: str) -> list[str]:
    return [_expect(text, str, f"{where}[{index}]") for index, text in enumerate(_expect(value, list, where))]


def _expect(value: Any, kind: type, where: str) -> Any:
    """Return `value` if it has the type. Raises ManifestError."""
    # In Python `true` is the integer 1; to an API server it is not.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = {str: "text", int: "a whole number", list: "a list", dict: "an object"}[kind]
        # YAML takes `off` and `on` for false and true.
        quotes = "; put it in quotes" if kind is str and isinstance(value, bool) else ""
        raise ManifestError(f"{where}: {value!r} is not {expected}{quotes}")
    return value
