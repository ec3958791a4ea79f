"""Classification of errors of a Hub: permanent or retryable, and how long to wait before a retry."""

from __future__ import annotations

from typing import Final

from minisgl.hub.fetch_error import FetchError, HttpFailure, WrongContent

RATE_LIMIT_SECONDS: Final = 30.0
"""Wait after status 429 without Retry-After."""


def classify_error(error: Exception, hub: str, repository: str, revision: str) -> FetchError | None:
    """FetchError for an error of the Hub or of the connection to it; None for any other error, such as one of the
    disk."""
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, FetchError):
        return error
    if isinstance(error, errors.HfHubHTTPError):
        status: int = error.response.status_code if error.response is not None else 0
    elif isinstance(error, HttpFailure):
        status = error.status
    elif isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        reason = str(error) or type(error).__name__
        return FetchError("Unreachable", f"{hub} cannot be reached ({reason}): check the network")
    elif isinstance(error, WrongContent | ConnectionError | httpx2.TransportError):
        return FetchError("Unreachable", f"{hub}: {error or type(error).__name__}")
    elif isinstance(error, errors.HFValidationError):
        return FetchError("NotFound", f"{repository!r} is not a repository id; it has the form owner/name")
    else:
        return None
    name = f"{repository} at revision {revision}"
    if status in (401, 403):
        return FetchError(
            "AuthRequired",
            f"{hub} denies access to {name} (HTTP status {status}): it is private or gated, or does not exist. "
            "Check its name; give a token that may read it, after accepting its terms",
        )
    if status == 404:
        return FetchError("NotFound", f"{hub} has no {name}: check its name and revision")
    if status == 429:
        return FetchError("RateLimited", f"{hub} limits our requests: a token raises the limit")
    return FetchError("Unreachable", f"{hub} did not return {name}: HTTP status {status}")


def rate_limit_seconds(error: Exception) -> float:
    """Seconds to wait after an error with status 429."""
    from huggingface_hub import errors

    seconds = None
    if isinstance(error, HttpFailure):
        seconds = error.retry_after
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        seconds = retry_after(error.response.headers.get("retry-after"))
    return RATE_LIMIT_SECONDS if seconds is None else seconds


def retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None if it is absent or a date, which is not used with status 429."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
