"""Classification of errors of an object store: permanent or retryable, with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl.hub.fetch_error import FetchError, WrongContent

_CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or use an account to which the cloud gives access"
)
_MOST_TEXT: Final = 500
"""Characters of a text of the store: a pod's last message has room for 4 KiB."""
_LIMITED: Final = ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests")
_WRONG_KEYS: Final = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "InvalidToken"),
    *("InvalidClientTokenId", "InvalidIdentityToken", "TokenRefreshRequired"),
)


def classify_error(error: Exception, server: str, bucket: str, name: str) -> FetchError | None:
    """FetchError for an error of the store or of the connection to it; None for any other error, such as one of the
    disk. `name`: URI of the checkpoint."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    if isinstance(error, FetchError):
        return error
    if isinstance(error, exceptions.ClientError):
        return _refused(error.response, server, bucket, name)
    text = _one_line(error)
    if isinstance(error, exceptions.NoCredentialsError):
        return FetchError("AuthRequired", f"there are no credentials for {name}: {_CREDENTIALS}")
    if isinstance(error, _unusable_credentials()):
        return FetchError("AuthRequired", f"the credentials for {name} cannot be used ({text}): {_CREDENTIALS}")
    if isinstance(error, exceptions.SSLError):
        return FetchError(
            "Unreachable",
            f"{server} has no certificate that is trusted ({text}): set AWS_CA_BUNDLE to a file with its authority",
        )
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.ConnectTimeoutError):
        return FetchError(
            "Unreachable", f"{server} cannot be reached ({text}): check AWS_ENDPOINT_URL_S3 and the network"
        )
    if isinstance(error, exceptions.ProxyConnectionError):
        return FetchError("Unreachable", f"{text}: check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, exceptions.ParamValidationError | exceptions.UnknownEndpointError):
        return FetchError("NotFound", f"{name}: {text}")
    # Those of urllib3 come from the middle of a download.
    if isinstance(error, exceptions.BotoCoreError | HTTPError | WrongContent | ConnectionError):
        return FetchError("Unreachable", f"{server}: {text}")
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):
        return FetchError("NotFound", f"{text}: write the endpoint as a URL, https://HOST:PORT")
    return None


def _unusable_credentials() -> tuple[type[Exception], ...]:
    from botocore import exceptions

    return (
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.ConfigNotFound,
        exceptions.ConfigParseError,
        exceptions.InvalidConfigError,
        exceptions.ProfileNotFound,
        exceptions.RefreshWithMFAUnsupportedError,
        exceptions.SSOError,
        exceptions.TokenRetrievalError,
        exceptions.UnauthorizedSSOTokenError,
    )


def _refused(response: Mapping[str, Any], server: str, bucket: str, name: str) -> FetchError:
    """FetchError for an answer that is an error."""
    found = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(found.get("Code") or status)
    parts = code, " ".join(str(found.get("Message") or "").split())
    text = _short(": ".join(dict.fromkeys(part for part in parts if part)))
    if code == "NoSuchBucket":
        return FetchError("NotFound", f"{server} has no bucket {bucket}: check its name, the endpoint and the region")
    if code in _LIMITED or status == 429:
        return FetchError("RateLimited", f"{server} limits our requests ({text})")
    if code == "RequestTimeTooSkewed":
        return FetchError("AuthRequired", f"{server} refuses the request ({text}): set the clock of this machine")
    if code in _WRONG_KEYS:
        return FetchError("AuthRequired", f"{server} does not accept the credentials for {name} ({text}): renew them")
    if status in (401, 403):
        return FetchError(
            "AuthRequired",
            f"{server} denies access to {name} ({text}): the credentials need s3:ListBucket on bucket {bucket} and "
            "s3:GetObject on its objects",
        )
    if status in (301, 307, 400) and code != "RequestTimeout":
        return FetchError("NotFound", f"{server} refuses {name} ({text}): check the endpoint and AWS_DEFAULT_REGION")
    if status == 404:
        return FetchError("NotFound", f"{server} has no {name} ({text}): check the bucket and the endpoint")
    # An error of a store has a code of its own.
    hint = "; it does not answer as an object store does: check the endpoint" if code == str(status) else ""
    return FetchError("Unreachable", f"{server} did not return {name}: {text}{hint}")


def _one_line(error: Exception) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
