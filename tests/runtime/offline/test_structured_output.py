"""Structured output of `LLM`, on a tiny model whose weights are random."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.offline import OfflineError, StructuredOutput
from support.tiny_checkpoint import tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "count": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "count", "on"],
    "additionalProperties": False,
}
AS_JSON = StructuredOutput("json", json.dumps(SCHEMA))
PARAMS = SamplingParams(max_tokens=120, seed=3)
_SMALL: dict[str, Any] = {"device": "cpu", "page_size": 4, "max_running": 8, "max_model_len": 256, "audit": True}


@pytest.fixture(scope="module", params=[True, False], ids=["text", "token ids"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(tiny_checkpoint(), num_pages=64, detokenize=request.param, **_SMALL) as llm:
        yield llm


def test_answers_satisfy_their_constraints(llm: LLM) -> None:
    prompts = [[40 + number, 8, 9] for number in range(12)]
    params = [SamplingParams(max_tokens=120, seed=number, top_p=0.95) for number in range(12)]
    pattern = StructuredOutput("regex", "[a-f]{2,30}")
    kinds = [(AS_JSON, None, pattern)[number % 3] for number in range(12)]
    together = llm.generate(prompts, params, structured_output=kinds)
    for number, output in enumerate(together):
        assert output.error == ""
        if number < 6:
            [alone] = llm.generate([prompts[number]], params[number], structured_output=kinds[number])
            assert output.token_ids == alone.token_ids
        if output.text and output.finish_reason == "stop" and kinds[number] is AS_JSON:
            jsonschema.validate(json.loads(output.text), SCHEMA)
        if output.text and output.finish_reason == "stop" and kinds[number] is pattern:
            assert re.fullmatch("[a-f]{2,30}", output.text)
    assert [output.finish_reason for output in together[::3]].count("stop") >= 2


def test_invalid_constraints_are_refused(llm: LLM) -> None:
    wrong: list[tuple[Any, str, str]] = [
        (StructuredOutput("regex", "(?=a)"), "invalid_grammar", "prompt 0: "),
        ([None, StructuredOutput("json", '{"not": {}}')], "unsupported_schema", "prompt 1: .*not"),
        ([AS_JSON], "invalid_request", "2 prompts, but 1 constraints"),
        ([AS_JSON, {"json": {}}], "invalid_request", "prompt 1: expected a StructuredOutput"),
    ]
    for constraint, code, words in wrong:
        with pytest.raises(OfflineError, match=words) as refused:
            llm.generate([[4], [5]], PARAMS, structured_output=constraint)
        assert refused.value.code == code


def test_chats_can_be_constrained() -> None:
    torch.set_num_threads(1)
    with LLM(tiny_checkpoint(), num_pages=64, **_SMALL) as llm:
        choice = StructuredOutput("choice", '["yes", "no"]')
        [output] = llm.chat([{"role": "user", "content": "Hello"}], PARAMS, structured_output=choice)
        assert output.text in ("yes", "no") and output.finish_reason == "stop"
