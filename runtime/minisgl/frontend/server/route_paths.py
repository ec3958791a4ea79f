"""The labels of a request in metrics. A series is kept for each, however many paths and methods clients invent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.routing import Route

from minisgl.frontend.server.request_record import NO_ROUTE, OTHER_METHOD

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are told apart where no route has them."""


class RoutePaths:
    def __init__(self, routes: Sequence[Route]) -> None:
        """A path with a parameter ends with it, as in /v1/models/{name:path}."""
        self._methods = {route.path: frozenset(route.methods or _METHODS) for route in routes}
        self._beginnings = tuple((path.partition("{")[0], path) for path in self._methods if "{" in path)

    def match(self, path: str, method: str) -> tuple[str, str]:
        """Return the path of the route, with the name of its parameter, or NO_ROUTE; and the method, or OTHER_METHOD
        if the route does not have it."""
        route = self._route_of(path)
        return route, method if method in self._methods.get(route, _METHODS) else OTHER_METHOD

    def _route_of(self, path: str) -> str:
        if path in self._methods and "{" not in path:
            return path
        return next((route for beginning, route in self._beginnings if path.startswith(beginning)), NO_ROUTE)
