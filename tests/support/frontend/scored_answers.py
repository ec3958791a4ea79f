"""Replies of a fake scheduler with logprobs, in the format of the wire contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from minisgl.wire.messages import Ack, FromScheduler, PromptLogprobs, Submit, TokenLogprobs, Tokens
from support.frontend.fake_scheduler import answer_with


def scores(tokens: Sequence[int], top: int) -> TokenLogprobs:
    """Return logprobs: token t has −t/8, and the most likely tokens are always 64 (`a`), 65, … at −1, −2, …"""
    top_tokens = np.arange(64, 64 + top, dtype="<i4")
    return TokenLogprobs(
        chosen=(-np.array(tokens, "<f4") / 8).tobytes(),
        top_ids=np.tile(top_tokens, len(tokens)).tobytes(),
        top=np.tile(-(top_tokens - 63).astype("<f4"), len(tokens)).tobytes(),
    )


def scored_answer(tokens: Sequence[int]) -> Callable[[Submit], list[FromScheduler]]:
    """Return a reply as `answer_with` does, with the logprobs that the request asks for."""
    unscored = answer_with(tokens)

    def answer(submit: Submit) -> list[FromScheduler]:
        messages: list[FromScheduler] = []
        for message in unscored(submit):
            if isinstance(message, Tokens) and submit.params.logprobs is not None:
                token = message.rows().token.tolist()
                tops = len(submit.params.logprob_token_ids) or submit.params.logprobs
                messages.append(msgspec.structs.replace(message, logprobs={0: scores(token, tops)}))
            else:
                messages.append(message)
            if isinstance(message, Ack) and submit.params.prompt_logprobs is not None:
                messages += _prompt(submit)
        return messages

    return answer


def _prompt(submit: Submit) -> list[FromScheduler]:
    """Return the prompt's logprobs, in two messages if the prompt is long enough."""
    prompt = np.frombuffer(submit.prompt, "<i4").tolist()
    middle = 1 + len(prompt) // 2
    return [
        PromptLogprobs(submit.id, start, scores(prompt[start:end], submit.params.prompt_logprobs or 0))
        for start, end in ((1, middle), (middle, len(prompt)))
        if start < end
    ]
