"""Record of the kernels that this process compiles. After the start each of them is a fault: requests wait for it."""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_Variant = Mapping[str, str]
"""Type, or value of a constant, by the name of a kernel's parameter."""


class CompileLog:
    """Names of compiled kernels, and warnings about those that are compiled while the engine serves."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        """Names of kernels that were compiled, because they were in no cache."""
        self._variants: defaultdict[str, list[_Variant]] = defaultdict(list)
        self._on_compiled: Callable[[], None] | None = None

    def watch_triton(self) -> None:
        """Record kernels of Triton from now on."""
        triton: Any = importlib.import_module("triton")
        triton.knobs.compilation.listener = self._on_kernel

    def watch_flashinfer(self) -> None:
        """Record libraries that flashinfer compiles from now on. Import flashinfer first."""
        core: Any = importlib.import_module("flashinfer.jit.core")
        build = core.JitSpec.build

        def recorded(specification: Any, *args: Any, **kwargs: Any) -> None:
            library = specification.jit_library_path
            before = _modified(library)
            build(specification, *args, **kwargs)
            # It calls the compiler also for libraries that are complete.
            if _modified(library) != before:
                self._record(specification.name, "flashinfer had no such library")

        core.JitSpec.build = recorded

    def begin_serving(self, on_compiled: Callable[[], None]) -> None:
        """Warn about each kernel that is compiled from now on, and call `on_compiled`."""
        self._on_compiled = on_compiled

    def _on_kernel(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        known = self._variants[src.name]
        variant = _variant(src)
        if not cache_hit:
            self._record(src.name, _difference(variant, known))
        elif self._on_compiled is not None:
            logger.info("kernel %s was loaded while serving: %s", src.name, _difference(variant, known))
        known.append(variant)

    def _record(self, name: str, cause: str) -> None:
        self.compiled.append(name)
        if self._on_compiled is not None:
            logger.warning("kernel %s was compiled while serving, which delays requests: %s", name, cause)
            self._on_compiled()


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _variant(source: Any) -> _Variant:
    """Properties that distinguish compiled kernels of one function; `source` is Triton's description of one."""
    found = {}
    for place, (name, kind) in enumerate(source.signature.items()):
        if kind == "constexpr":
            found[name] = str(source.constants.get((place,)))
        else:
            aligned = ["tt.divisibility", 16] in source.attrs.get((place,), [])
            found[name] = f"{kind} divisible by 16" if aligned else str(kind)
    return found


def _difference(variant: _Variant, known: list[_Variant]) -> str:
    """Parameters in which `variant` differs from the nearest of the `known` ones."""
    if not known:
        return "it was not launched during the start"
    differences = [
        [f"{name} is {kind}, not {other.get(name)}" for name, kind in variant.items() if other.get(name) != kind]
        for other in known
    ]
    nearest: list[str] = min(differences, key=len)
    return ", ".join(nearest) or "its options differ"
