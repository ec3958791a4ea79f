"""HTTPRoute of the Gateway API for an API server that does not have it, and takes it away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from minisgl_operator.shell.resources import HTTP_ROUTE
from support.cluster.control_plane import LocalControlPlane

_DEFINITION: Final = Path(__file__).with_suffix(".yaml")


@contextmanager
def http_routes(plane: LocalControlPlane) -> Iterator[None]:
    """Serve the kind within the block."""
    plane.kubectl("apply", "-f", str(_DEFINITION))
    plane.wait_for_definition(HTTP_ROUTE.title)
    try:
        yield
    finally:
        plane.kubectl("delete", "-f", str(_DEFINITION))
