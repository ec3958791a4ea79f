"""Turns of tenants. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """A queue for each tenant, from which one item of each tenant is taken in turn."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, OrderedDict[bytes, T]] = OrderedDict()
        """Items by key, of each tenant that has any, in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, tenant: bytes, key: bytes, item: T) -> None:
        """Add an item behind the others of its tenant."""
        self._tenants.setdefault(tenant, OrderedDict())[key] = item

    def remove(self, tenant: bytes, key: bytes) -> None:
        """Remove an item, if it is there."""
        items = self._tenants.get(tenant)
        if items is not None and items.pop(key, None) is not None and not items:
            del self._tenants[tenant]

    def take(self) -> T:
        """Remove and return the first item of the tenant whose turn it is; there is one."""
        tenant, items = self._tenants.popitem(last=False)
        _, item = items.popitem(last=False)
        if items:
            self._tenants[tenant] = items
        return item
