"""The paths of the API: which are forwarded to frontends, and the form that names a model. Pure."""

from __future__ import annotations

from typing import Final

from minisgl.gateway.routing import Target

GENERATION_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/v1/classify",
        "/classify",
        "/embed",
        "/predict",
        "/generate",
        "/invocations",
    }
)
"""POST: requests that use the model. They are held while it has no frontend, and start it."""

STREAM_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/invocations",
    }
)
"""Those of which the answer may be a stream. Others ignore or refuse the field `stream`."""

TOKENIZATION_PATHS: Final = frozenset(
    {
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/v1/tokenize",
        "/detokenize",
        "/v1/detokenize",
    }
)
"""POST: requests that a tokenizer answers alone. They start no model, as in frontends."""

INFORMATION_PATHS: Final = frozenset(
    {
        "/tokenizer_info",
        "/get_model_info",
        "/model_info",
        "/get_server_info",
        "/server_info",
        "/load",
        "/get_load",
        "/health_generate",
    }
)
"""GET: information about one model."""

USE_PATHS: Final = GENERATION_PATHS | {"/health_generate"}
"""Requests for which a model computes, whose use is counted. A probe computes, but starts no model."""

POST_PATHS: Final = GENERATION_PATHS | TOKENIZATION_PATHS
"""Paths whose body names the model."""
_OWN_PATHS: Final = frozenset({"/v1/models", "/v1/responses/compact"})
_OWN_BEGINNINGS: Final = ("/v1/models/", "/v1/responses/")
"""Paths that the gateway answers itself, also in the form that names a model."""


def split_path(path: str) -> tuple[Target | None, str]:
    """Return the model that a path `/NAMESPACE/NAME/PATH` names, and PATH, a path of the API; or None and the path as
    it is."""
    if is_known(path):
        return None, path
    _, namespace, name, rest = [*path.split("/", 3), "", "", ""][:4]
    inner = f"/{rest}"
    if not namespace or not name or not is_known(inner):
        return None, path
    return Target(name, namespace), inner


def is_known(path: str) -> bool:
    """Return whether a path belongs to the API, without the form that names a model."""
    known = path in POST_PATHS or path in INFORMATION_PATHS or path in _OWN_PATHS
    return known or path.startswith(_OWN_BEGINNINGS)
