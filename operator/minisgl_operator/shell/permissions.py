"""What the operator's role lacks, asked before the watches start.

A watch that is forbidden ends the process, which would then be started again and again. So the operator asks first,
says which right is missing in the log and in every model's status, and waits until it is granted. Of several namespaces
one that is gone, and the operator's role there with it, does not keep it from serving the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from minisgl_operator.facts.observed import Ref, Refusal
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import MODEL, WATCHED, Resource

_VERBS: Final = ("list", "watch")
_REVIEWS: Final = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview")


async def missing(client: Client, namespaces: Sequence[str]) -> Mapping[str, tuple[Refusal, ...]]:
    """By namespace, "" for the whole cluster when none is named: the rights to list and watch that the role lacks, or
    that the CRD is not there. Where all is there, the namespace is left out."""
    places = namespaces or [""]
    try:
        await client.request("GET", MODEL.path(places[0] or None), {"limit": "1"})
    except ApiError as error:
        if error.status == 404:
            message = f"the CRD {MODEL.title} is not installed"
            return dict.fromkeys(places, (Refusal(Ref(MODEL.kind, ""), 404, "NotFound", message),))
    found = {place: await _missing(client, place) for place in places}
    return {place: refusals for place, refusals in found.items() if refusals}


async def _missing(client: Client, namespace: str) -> tuple[Refusal, ...]:
    return tuple(
        [
            Refusal(Ref(resource.kind, ""), 403, "Forbidden", _message(verb, resource, namespace))
            for resource in WATCHED
            for verb in _VERBS
            if not await _allowed(client, verb, resource, namespace)
        ]
    )


def _message(verb: str, resource: Resource, namespace: str) -> str:
    where = f" in namespace {namespace}" if namespace else ""
    return f"the operator's role lacks the verb {verb} on {resource.title}{where}"


async def _allowed(client: Client, verb: str, resource: Resource, namespace: str) -> bool:
    attributes = {"verb": verb, "group": resource.group, "resource": resource.plural, "namespace": namespace}
    review = {
        "apiVersion": _REVIEWS.api_version,
        "kind": _REVIEWS.kind,
        "spec": {"resourceAttributes": attributes},
    }
    answer = await client.request("POST", _REVIEWS.path(None), body=review)
    return bool(answer["status"]["allowed"])
