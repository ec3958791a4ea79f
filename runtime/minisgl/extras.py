"""Optional dependencies: the modules that a command needs, and the extra of this distribution that installs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from minisgl.errors import CodedError

_FRONTEND: Final = (
    "boto3",
    "cryptography",
    "fastapi",
    "google.protobuf",
    "grpc",
    "httptools",
    "huggingface_hub",
    "jinja2",
    "jwt",
    "llguidance",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.sdk",
    "redis",
    "tokenizers",
    "uvicorn",
    "uvloop",
)
_ENGINE: Final = ("huggingface_hub", "jinja2", "llguidance", "safetensors", "tokenizers", "torch", "tqdm")

EXTRAS: Final[Mapping[str, Sequence[str]]] = {
    "frontend": _FRONTEND,
    "engine": _ENGINE,
    "serve": tuple(dict.fromkeys((*_FRONTEND, *_ENGINE))),
    "operator": ("aiohttp", "kopf", "kubernetes", "pydantic", "uvloop"),
}
"""Modules of each extra of pyproject.toml that commands require."""


_NAMED: Final = 3
"""Missing packages that an error names."""


class MissingExtra(CodedError):
    """A command needs packages that are not installed."""

    def __init__(self, missing: Sequence[str], extra: str) -> None:
        named = [*missing[:_NAMED], *(["…"] if len(missing) > _NAMED else [])]
        packages = ", ".join(name.replace("_", "-") for name in named)
        super().__init__(
            "missing_extra",
            f"this command needs packages that are not installed ({packages}): pip install 'minisgl[{extra}]'",
        )


def require(extra: str, modules: Sequence[str] = ()) -> None:
    """Raise MissingExtra, which names `extra`, if one of `modules` (default: all of the extra) is not installed.

    Nothing is imported. A command checks this before it starts processes, whose tracebacks would say it instead.
    """
    missing = [name for name in modules or EXTRAS[extra] if not _is_installed(name)]
    if missing:
        raise MissingExtra(missing, extra)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # The package around it.
        return False
