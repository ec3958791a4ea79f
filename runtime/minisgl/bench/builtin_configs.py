"""Built-in configurations: config.json of well-known models, for benchmarks with dummy weights without their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

BUILTIN_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    path.stem: json.loads(path.read_bytes()) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))
}
