"""Import modules of a package without running its __init__, which may import hundreds of others for seconds."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


def lean_package(name: str) -> ModuleType:
    """Make modules of the package `name` importable; its __init__ runs on first access to an attribute. Raises
    ImportError if there is no such package."""
    known = sys.modules.get(name)
    if known is not None:
        return known
    specification = importlib.util.find_spec(name)
    if specification is None or specification.loader is None:
        raise ImportError(f"there is no package {name}")
    loader = specification.loader
    package: Any = importlib.util.module_from_spec(specification)

    def rest(attribute: str) -> Any:
        # The import system probes attributes before it imports a module: that must not run the __init__.
        if attribute.startswith("__") or importlib.util.find_spec(f"{name}.{attribute}") is not None:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, attribute)

    package.__getattr__ = rest
    sys.modules[name] = package
    return sys.modules[name]
