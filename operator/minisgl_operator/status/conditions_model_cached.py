"""ModelCached: whether engines can read the model's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.text import quote
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.fetch_status import FetchStatus
from minisgl_operator.facts.pods import component
from minisgl_operator.render import model_files, names
from minisgl_operator.render.quantity import amount
from minisgl_operator.status.condition import Condition, older_image
from minisgl_operator.status.ending_pods import ending_pod

_Remedies = Mapping[str, tuple[Reason, str]]

_POD_REMEDIES: Final[_Remedies] = {
    "NoSpace": (
        Reason.NO_SPACE,
        "The PersistentVolumeClaim of the cache is full: raise spec.model.cache.size, which expands it if its "
        "StorageClass allows that, or free space on it.",
    ),
    "OutOfMemory": (
        Reason.OUT_OF_MEMORY,
        "Raise spec.fetch.resources.limits.memory, or the default of a LimitRange that sets it.",
    ),
}
_HUB_REMEDIES: Final[_Remedies] = {
    **_POD_REMEDIES,
    "AuthRequired": (
        Reason.AUTH_REQUIRED,
        "The Hub requires a token with access to it: accept the licence on the model's page, and name a Secret with a "
        "valid token in spec.model.source.huggingFace.tokenSecretRef.",
    ),
    "NotFound": (
        Reason.NOT_FOUND,
        "The repository or revision does not exist or is private: correct spec.model.source.huggingFace, or set "
        "its tokenSecretRef.",
    ),
    "RateLimited": (
        Reason.RATE_LIMITED,
        "The Hub limits the request rate (429): the fetch continues automatically; a token in tokenSecretRef raises "
        "the limit.",
    ),
    "Unreachable": (
        Reason.HUB_UNREACHABLE,
        "The Hub does not answer: check spec.model.source.huggingFace.endpoint and whether pods can reach it.",
    ),
}
_S3_REMEDIES: Final[_Remedies] = {
    **_POD_REMEDIES,
    "AuthRequired": (
        Reason.AUTH_REQUIRED,
        "The object store requires credentials that may list the bucket and read its objects: name a Secret with "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in spec.model.source.s3.secretName, or an account to which the "
        "cloud gives access in spec.serviceAccountName.",
    ),
    "NotFound": (
        Reason.NOT_FOUND,
        "The bucket or the folder does not exist, or the folder has no checkpoint that can be served: correct "
        "spec.model.source.s3, or upload what is missing.",
    ),
    "RateLimited": (
        Reason.RATE_LIMITED,
        "The object store limits the request rate: the fetch continues automatically.",
    ),
    "Unreachable": (
        Reason.S3_UNREACHABLE,
        "The object store does not answer: check spec.model.source.s3.endpoint and whether pods can reach it.",
    ),
}


def model_cached(facts: Facts) -> Condition:
    if facts.fetch is None:
        return Condition("True", Reason.NOT_NEEDED, _without_fetch(facts))
    if facts.cached:
        message = f'{facts.title} is on PersistentVolumeClaim "{model_files.cache_claim(facts.model)}".'
        return Condition("True", Reason.CACHED, message)
    # The pod of another Job counts too: fetches run one after the other.
    fetch_pods = (pod for pod in facts.observed.pods if component(pod) == names.FETCH)
    if (found := ending_pod(facts, fetch_pods)) is not None:
        return found
    if facts.fetch.suspended:
        return _suspended(facts)
    # A fetch that retries automatically reports a reason while it is in progress.
    if facts.fetch.phase == "Failed" or facts.fetch.reason:
        return _fetch_failed(facts, facts.fetch)
    if facts.fetch.phase in ("Resolving", "Downloading"):
        message = f"{facts.title} is being downloaded: {facts.fetch.percent} %."
        return Condition("False", Reason.DOWNLOADING, message)
    message = f"{facts.title} must be fetched; the pod of the fetch Job has not started."
    return Condition("False", Reason.WAITING_FOR_FETCH, message)


def _suspended(facts: Facts) -> Condition:
    job = names.fetch(facts.model.name, model_files.cache_key(facts.model))
    message = (
        f"{facts.title} must be fetched, and the fetch Job {job} is suspended: a queue such as Kueue's has not "
        f"admitted it, or a user has set spec.suspend of the Job. See `kubectl describe job {job}`, and the quota of "
        "the queue."
    )
    return Condition("False", Reason.FETCH_SUSPENDED, message)


def _without_fetch(facts: Facts) -> str:
    if (key := model_files.cache_key(facts.model)) is None:
        return f"{facts.title} is mounted without a copy."
    claim = model_files.cache_claim(facts.model)
    return (
        f'{facts.title} is not fetched, as PersistentVolumeClaim "{claim}" is ReadOnlyMany: engines read it from '
        f"directory {key} of the claim."
    )


def _fetch_failed(facts: Facts, fetch: FetchStatus) -> Condition:
    cause = f" ({quote(fetch.message)})" if fetch.message else ""
    remedies = _HUB_REMEDIES if facts.model.spec.model.source.s3 is None else _S3_REMEDIES
    reason, remedy = remedies.get(fetch.reason, (Reason.FETCH_FAILED, "See the log of the fetch pod."))
    if fetch.reason == "NoSpace" and fetch.needed_bytes:
        cause, remedy = "", _too_small(facts, fetch)
    if fetch.unknown_flags:
        remedy = older_image(fetch.unknown_flags, names.FRONTEND)
    if fetch.failures > 1:
        cause += f" in {fetch.failures} attempts"
    retry = "It is retried automatically."
    if fetch.failed:
        job = names.fetch(facts.model.name, model_files.cache_key(facts.model))
        retry = f"It is retried within 10 minutes, or immediately after `kubectl delete job {job}`."
    return Condition("False", reason, f"{facts.title} could not be fetched{cause}. {remedy} {retry}")


def _too_small(facts: Facts, fetch: FetchStatus) -> str:
    """Bytes that are missing before a download, and the size to set."""
    claim, cache = model_files.cache_claim(facts.model), facts.model.spec.model.fetch_cache
    missing = (
        f"The download needs {_size(fetch.needed_bytes)}, and {_size(fetch.free_bytes)} are free on "
        f'PersistentVolumeClaim "{claim}"'
    )
    if cache.claim_name is not None:
        return (
            f"{missing}, which spec.model.cache.claimName names: expand the claim itself, to which "
            "spec.model.cache.size does not apply, or free space on it."
        )
    live = facts.observed.child("PersistentVolumeClaim", claim)
    size = cache.size if live is None else live["spec"]["resources"]["requests"]["storage"]
    # A twentieth is for the file system's own data.
    wanted = amount(size) + (fetch.needed_bytes - fetch.free_bytes) * Fraction(21, 20)
    kept = "Revisions that replicas use are kept, and others are removed only while a replica serves."
    if cache.retain:
        kept = "Nothing is removed from a claim with spec.model.cache.retain."
    return (
        f"{missing}. {kept} Raise spec.model.cache.size to {math.ceil(wanted / 2**30)}Gi or more, which expands the "
        "claim if its StorageClass allows that."
    )


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
