"""Whether the served model can answer a request, by the task that it is served for."""

from __future__ import annotations

from typing import Final

from minisgl.config import Task
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.frontend.server.json_body import invalid
from minisgl.wire.text import ServedModel

PATHS: Final[dict[Task, str]] = {
    "generate": "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "classify": "/v1/classify",
}
"""Where a client finds what a model is served for."""
_DOES: Final[dict[Task, str]] = {
    "generate": "generates text",
    "embed": "embeds texts",
    "rerank": "scores pairs of texts",
    "classify": "classifies texts",
}


def check_task(request: GenerationRequest, model: ServedModel | None) -> None:
    """Raises ApiError when the model, if one is known, is not served for such requests."""
    if model is None:
        return
    card = model.card
    if card.task not in request.tasks:
        message = f"this model is served for the task {card.task!r}: it {_DOES[card.task]}; use {PATHS[card.task]}"
        raise ApiError.from_code("wrong_task", message)
    if request.dimensions is not None and 0 < card.output_size < request.dimensions:
        raise invalid("dimensions", f"the model's embeddings have {card.output_size} numbers, not {request.dimensions}")
