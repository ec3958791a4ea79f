"""The route of a request by its path. Metrics have one series for each, however many paths clients invent."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.frontend.server.request_record import NO_ROUTE


class RoutePaths:
    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` of all routes; one with a parameter ends with it, as in /v1/models/{name:path}."""
        self._whole = frozenset(path for path in paths if "{" not in path)
        self._beginnings = tuple((path.partition("{")[0], path) for path in paths if "{" in path)

    def match(self, path: str) -> str:
        """Return the path of the route, with the name of its parameter, or NO_ROUTE."""
        if path in self._whole:
            return path
        return next((route for beginning, route in self._beginnings if path.startswith(beginning)), NO_ROUTE)
