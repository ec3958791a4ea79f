"""Check the arguments of `LLM` calls and turn them into messages for tokenizer and scheduler."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec
import numpy as np

from minisgl.config import ConfigError, checked
from minisgl.engine.interface import EngineLimits
from minisgl.errors import CodedError
from minisgl.grammar.build import build
from minisgl.offline.outputs import OfflineError
from minisgl.tokenizer.session import submit_message
from minisgl.wire.messages import REQUEST_ID_BYTES, UNCONSTRAINED, AnswerConstraint, Pool, SamplingParams, Submit
from minisgl.wire.text import ChatMessage, Generate, Pooling, RequestOptions, StructuredOutput

Prompt = str | Sequence[int]
Message = Mapping[str, str]
"""`{"role": "user", "content": "…"}`"""

Params = SamplingParams | Sequence[SamplingParams]
"""Parameters of all prompts, or a sequence with those of each prompt."""

Constraints = StructuredOutput | Sequence[StructuredOutput | None] | None
"""Constraint of all answers, or a sequence with that of each answer; None: any text."""

_WHOLE: Final = RequestOptions(stream=False)
_OF_TEXTS: Final = (_WHOLE, RequestOptions(stream=False, truncate_prompt_tokens=-1, truncation_side="right"))
"""Options of texts that are pooled: whole, and cut to what the model takes."""


def requests_from_prompts(
    prompts: str | Sequence[Prompt], params: Params, structured_output: Constraints = None
) -> list[Generate]:
    """Messages for one text, or for several texts or lists of token ids. Raises OfflineError for any other prompt, and
    for invalid parameters."""
    several = [prompts] if isinstance(prompts, str) else prompts
    _check_prompts(several)
    each = _params_per_prompt(params, len(several))
    requests = [_generate(number, *pair) for number, pair in enumerate(zip(several, each, strict=True))]
    return _constrained(requests, structured_output)


def requests_from_chats(
    messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params, structured_output: Constraints = None
) -> list[Generate]:
    """Messages for one conversation or several. Raises OfflineError for invalid conversations and parameters."""
    one = bool(messages) and isinstance(messages[0], Mapping)
    conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
    each = _params_per_prompt(params, len(conversations))
    requests = [_generate_chat(number, *pair) for number, pair in enumerate(zip(conversations, each, strict=True))]
    return _constrained(requests, structured_output)


def pooling_requests(texts: str | Sequence[Prompt], pooling: Pooling, truncate: bool) -> list[Generate]:
    """A request for the pooled output of each text; `truncate`: of its beginning, if it is too long. Raises
    OfflineError."""
    given = [texts] if isinstance(texts, str) else texts
    _check_prompts(given)
    requests = [_generate(number, prompt, SamplingParams()) for number, prompt in enumerate(given)]
    return [msgspec.structs.replace(request, pooling=pooling, options=_OF_TEXTS[truncate]) for request in requests]


def pair_requests(query: str, documents: Sequence[str], instruction: str | None, truncate: bool) -> list[Generate]:
    """A request for the score of each document; `truncate`: of its beginning, if the pair is too long. Raises
    OfflineError."""
    if isinstance(documents, str) or not all(isinstance(each, str) for each in (query, *documents)):
        raise OfflineError("invalid_request", "expected a query and a list of documents, all of them texts")
    return [
        Generate(
            id=os.urandom(REQUEST_ID_BYTES),
            prompt=query,
            pooling=Pooling(second_text=document, instruction=instruction),
            options=_OF_TEXTS[truncate],
        )
        for document in documents
    ]


def pools_from_tokens(requests: Sequence[Generate]) -> list[Pool]:
    """Messages for the scheduler from texts of token ids, without a tokenizer. Raises OfflineError."""
    found = []
    for request in requests:
        if request.tokens is None:
            raise OfflineError("no_tokenizer", "detokenize=False allows no texts; use token ids")
        found.append(Pool(id=request.id, prompt=request.tokens))
    return found


def submits_from_tokens(requests: Sequence[Generate], limits: EngineLimits) -> list[Submit]:
    """Messages for the scheduler from prompts of token ids, without a tokenizer. Raises OfflineError and
    GrammarError."""
    # The grammar of a large schema takes longer than all else, and prompts of one call often have the same.
    wanted = {one for request in requests if (one := request.options.structured_output) is not None}
    grammars: dict[StructuredOutput | None, AnswerConstraint] = {
        one: AnswerConstraint(grammar=build(one)) for one in wanted
    }
    grammars[None] = UNCONSTRAINED
    return [_submit(request, limits, grammars[request.options.structured_output]) for request in requests]


def _submit(generate: Generate, limits: EngineLimits, constraint: AnswerConstraint) -> Submit:
    params = generate.params
    if generate.tokens is None or params.stop:
        raise OfflineError(
            "no_tokenizer", "detokenize=False allows neither text prompts nor stop strings; use token ids"
        )
    return submit_message(
        generate,
        generate.tokens,
        max_tokens=params.max_tokens or limits.max_model_len - len(generate.tokens) // 4,
        seed=random.getrandbits(63) if params.seed is None else params.seed,
        constraint=constraint,
    )


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise OfflineError("invalid_request", f"prompts: expected a text or a list of prompts, got {prompts!r:.80}")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        if isinstance(prompt, int):
            raise OfflineError(
                "invalid_request", "prompts: the token ids of one prompt must be a list in the list: [[1, 2]]"
            )
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence | np.ndarray):
            raise OfflineError(
                "invalid_request", f"prompt {number}: expected a text or a list of token ids, got {prompt!r:.80}"
            )
        if not len(prompt):
            raise OfflineError("empty_prompt", f"prompt {number}: the list of token ids is empty")


def _params_per_prompt(params: Params, count: int) -> Sequence[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise OfflineError("invalid_request", f"got {count} prompts, but {len(each)} sampling parameters")
    for number, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise OfflineError("invalid_request", f"prompt {number}: expected SamplingParams, got {one!r:.80}")
        try:
            checked(one)
        except ConfigError as error:
            raise OfflineError("invalid_request", f"prompt {number}: {error}") from error
        if one.max_tokens is not None and one.max_tokens < 1:
            raise OfflineError("invalid_request", f"prompt {number}: max_tokens: expected 1 or more")
        if isinstance(one.stop, str) or not all(isinstance(stop, str) and stop for stop in one.stop):
            raise OfflineError(
                "invalid_request", f"prompt {number}: stop: expected a tuple of non-empty texts, got {one.stop!r}"
            )
    return each


def _constrained(requests: list[Generate], constraints: Constraints) -> list[Generate]:
    if constraints is None:
        return requests
    each = [constraints] * len(requests) if isinstance(constraints, StructuredOutput) else list(constraints)
    if len(each) != len(requests):
        raise OfflineError("invalid_request", f"got {len(requests)} prompts, but {len(each)} constraints")
    from minisgl.grammar.validate import validate

    valid: set[StructuredOutput | None] = {None}
    for number, one in enumerate(each):
        if not isinstance(one, StructuredOutput | None):
            raise OfflineError("invalid_request", f"prompt {number}: expected a StructuredOutput, got {one!r:.80}")
        if one not in valid:
            assert one is not None
            try:
                validate(one)
            except CodedError as error:
                raise OfflineError(error.code, f"prompt {number}: {error.message}") from error
            valid.add(one)
    return [
        msgspec.structs.replace(request, options=msgspec.structs.replace(_WHOLE, structured_output=one))
        for request, one in zip(requests, each, strict=True)
    ]


def _generate(number: int, prompt: Prompt, params: SamplingParams) -> Generate:
    if isinstance(prompt, str):
        return Generate(id=os.urandom(REQUEST_ID_BYTES), prompt=prompt, params=params, options=_WHOLE)
    try:
        tokens = array("i", prompt).tobytes()
    except (TypeError, OverflowError) as error:
        raise OfflineError("invalid_prompt", f"prompt {number}: expected a text or token ids: {error}") from error
    return Generate(id=os.urandom(REQUEST_ID_BYTES), tokens=tokens, params=params, options=_WHOLE)


def _generate_chat(number: int, messages: Sequence[Message], params: SamplingParams) -> Generate:
    try:
        turns = msgspec.convert(list(messages), tuple[ChatMessage, ...])
    except msgspec.ValidationError as error:
        raise OfflineError("invalid_prompt", f"conversation {number}: {error}") from error
    return Generate(id=os.urandom(REQUEST_ID_BYTES), messages=turns, params=params, options=_WHOLE)
