"""Refusal of prompts that certainly exceed the context, before they take a place in a queue or time of a worker."""

from __future__ import annotations

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.prompts import Prompt
from minisgl.frontend.generation.request import GenerationRequest
from minisgl.wire.text import ServedModel, fewest_tokens, too_long_message


def check_prompt_lengths(request: GenerationRequest, model: ServedModel | None) -> None:
    """Raises ApiError when a prompt has more tokens than the context, whatever they are."""
    if model is None or request.options.truncate_prompt_tokens is not None:
        return
    for prompt in request.prompts:
        tokens = _fewest_tokens(prompt, model.longest_token)
        if tokens > model.card.max_model_len:
            raise ApiError.from_code("context_length_exceeded", too_long_message(model.card.max_model_len, tokens))


def _fewest_tokens(prompt: Prompt, longest_token: int) -> int:
    if prompt.tokens is not None:
        return len(prompt.tokens) // 4
    if prompt.text is not None:
        return fewest_tokens(prompt.text, longest_token)
    # Templates may leave out earlier messages, and blanks around the text of this one. Workers check what is rendered.
    last = prompt.messages[-1] if prompt.messages else None
    return fewest_tokens(last.content.strip(), longest_token) if last and last.role == "user" and last.content else 0
