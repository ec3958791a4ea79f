"""Permissions that the operator's role lacks, checked before the watches start.

A forbidden watch ends the process, which would then restart endlessly. So the operator checks first, reports the
missing permission in the log and in every model's status, and waits until it is granted. With several namespaces, a
deleted one, whose role is deleted with it, does not keep the operator from serving the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.observed import Rejection
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import MODEL, WATCHED, Resource

_VERBS: Final = ("list", "watch")
_REVIEWS: Final = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview")


async def missing_permissions(client: Client, namespaces: Sequence[str]) -> Mapping[str, tuple[Rejection, ...]]:
    """Missing permissions to list and watch, or the missing CRD, by namespace; "" stands for the whole cluster when
    `namespaces` is empty. A namespace without problems is left out."""
    places = namespaces or [""]
    try:
        await client.request("GET", MODEL.path(places[0] or None), {"limit": "1"})
    except ApiError as error:
        if error.status == 404:
            message = f"the CRD {MODEL.title} is not installed"
            return dict.fromkeys(places, (Rejection(Ref(MODEL.kind, ""), 404, "NotFound", message),))
    found = {place: await _missing_in(client, place) for place in places}
    return {place: rejections for place, rejections in found.items() if rejections}


async def _missing_in(client: Client, namespace: str) -> tuple[Rejection, ...]:
    rejections = []
    where = f" in namespace {namespace}" if namespace else ""
    for resource in WATCHED:
        for verb in _VERBS:
            if not await _is_allowed(client, verb, resource, namespace):
                message = f"the operator's role lacks the verb {verb} on {resource.title}{where}"
                rejections.append(Rejection(Ref(resource.kind, ""), 403, "Forbidden", message))
    return tuple(rejections)


async def _is_allowed(client: Client, verb: str, resource: Resource, namespace: str) -> bool:
    attributes = {"verb": verb, "group": resource.group, "resource": resource.plural, "namespace": namespace}
    spec = {"resourceAttributes": attributes}
    review = {"apiVersion": _REVIEWS.api_version, "kind": _REVIEWS.kind, "spec": spec}
    response = await client.request("POST", _REVIEWS.path(None), body=review)
    return bool(response["status"]["allowed"])
