"""Files generated from the types of the API.

`python -m support.cluster.api_reference` writes them; a test compares them with the code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from minisgl_operator.api.crd import chart_template, manifest
from minisgl_operator.api.reference import page

ROOT = Path(__file__).parents[3]


FILES: Final[dict[Path, Callable[[], str]]] = {
    ROOT / "manifests" / "crd" / "inferencemodels.yaml": manifest,
    ROOT / "charts" / "templates" / "crd.yaml": chart_template,
    ROOT / "docs" / "inference-model.md": page,
}
"""What makes the contents, by file."""


if __name__ == "__main__":
    for path, content in FILES.items():
        path.write_text(content())
