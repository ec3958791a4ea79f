"""HTTPRoutes of the models, as a list every few seconds: kopf cannot watch a kind that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import CHILD_SELECTOR, HTTP_ROUTE
from minisgl_operator.shell.store import Id, ModelKey, Store, object_id

_log = logging.getLogger(__name__)

_SECONDS: Final = 5.0


class Routes:
    """Keeps the routes in the store, as long as a model may have one. `served`: the cluster has the kind; None: not
    known. `attempted` is set after the first look."""

    def __init__(
        self,
        client: Client,
        store: Store,
        namespaces: Callable[[], Sequence[str]],
        on_change: Callable[[ModelKey | None], None],
        *,
        always: bool,
        seconds: float = _SECONDS,
    ) -> None:
        """`namespaces` returns those to list; empty: the whole cluster. `on_change` is called with the model of a route
        that has changed, and with None when `served` has. `always`: models without spec.route have a route too."""
        self.served: bool | None = None
        self.attempted = asyncio.Event()
        self._client = client
        self._store = store
        self._namespaces = namespaces
        self._on_change = on_change
        self._always = always
        self._seconds = seconds
        self._logged = ""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            if self._always or not self.attempted.is_set() or self._any_wanted():
                await self._look()
            self.attempted.set()
            await asyncio.sleep(self._seconds)

    def _any_wanted(self) -> bool:
        models = (self._store.model(key) for key in self._store.models())
        return any(each is not None and "route" in each.body["spec"] for each in models)

    async def _look(self) -> None:
        try:
            for namespace in self._namespaces() or (None,):
                await self._list(namespace)
        except ApiError as error:
            if error.status != 404:
                if error.message != self._logged:
                    _log.warning("Could not list %s: %s", HTTP_ROUTE.title, error.message)
                self._logged = error.message
                return
        else:
            self._set_served(True)
            return
        self._set_served(False)

    async def _list(self, namespace: str | None) -> None:
        present: set[Id] = set()
        version = "0"
        async for page in self._client.pages(HTTP_ROUTE, namespace, CHILD_SELECTOR):
            version = page.resource_version
            for body in page.items:
                present.add(object_id(body))
                if (key := self._store.put(body)) is not None:
                    self._on_change(key)
        for key in self._store.sweep(HTTP_ROUTE, present, namespace, version):
            self._on_change(key)

    def _set_served(self, served: bool) -> None:
        self._logged = ""
        if served == self.served:
            return
        self.served = served
        if not served:
            for namespace in self._namespaces() or (None,):
                self._store.sweep(HTTP_ROUTE, set(), namespace, str(2**63))
        self._on_change(None)
