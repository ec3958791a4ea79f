"""POST /generate: fields, log-probabilities and streams, in SGLang's form."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from minisgl.frontend.native.bodies import NativeBody, NativeSampling
from minisgl.frontend.native.responses import NativeFormat
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.messages import Submit
from minisgl.wire.text import ScoredToken
from support.frontend.fake_scheduler import answer_with
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, TOKENIZER, FrontendStack, ids
from support.messages import without_seed

TEXT = ids("one two")


def post(stack: FrontendStack, body: dict[str, Any], status: int = 200) -> Any:
    response = stack.http.post("/generate", json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_generate(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*ids("one two"), -EOS], cached=1)
    answer = post(stack, {"text": "Hi", "sampling_params": {"temperature": 0, "max_new_tokens": 9}})
    assert answer["text"] == "one two"
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    counts = (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
    assert counts == (len(ids("Hi")), len(ids("one two")) + 1, 1)
    (submit,) = stack.scheduler.received(Submit)
    assert (submit.params.temperature, submit.params.max_tokens) == (0, 9)


SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (1, 2),
    "min_new_tokens": (None, 2),
    "temperature": (0, 1),
    "top_p": (0.5, 1),
    "top_k": (-1, 1),
    "min_p": (0, 0.5),
    "sampling_seed": (1, 2),
    "n": (1, 2),
    "stop": (None, "e"),
    "stop_token_ids": ([], [5]),
    "ignore_eos": (False, True),
    "presence_penalty": (0, 1),
    "frequency_penalty": (0, 1),
    "repetition_penalty": (1, 2),
    "no_stop_trim": (False, True),
    "logit_bias": ({}, {"5": 1}),
    "allowed_token_ids": (None, [5]),
    "bad_words": ([], ["e"]),
    "stop_regex": (None, "[ef]"),
    "skip_special_tokens": (True, False),
    "json_schema": ('{"type": "integer"}', {"type": "string"}),
    "regex": (None, "a+"),
    "ebnf": (None, 'root ::= "a"'),
    "structural_tag": (None, {"format": {"type": "any_text"}}),
}
"""Pairs of values that must have different outcomes."""

NEEDED: dict[str, dict[str, Any]] = {
    "no_stop_trim": {"stop": "e"},
    "skip_special_tokens": {"no_stop_trim": True},
}
"""Other fields that a field needs to have an effect."""
REFUSED_SAMPLING: dict[str, tuple[Any, Any]] = {
    "use_beam_search": (False, True),
    "lora_path": (None, "x"),
    "documents": ([], [{"title": "a", "text": "b"}]),
}
"""Pairs of a value that asks for nothing, and one that would change the answer."""


def test_every_sampling_parameter_of_generate_has_an_effect_or_is_rejected_by_name(stack: FrontendStack) -> None:
    def outcome(name: str, value: Any) -> Any:
        sampling = NEEDED.get(name, {})
        stack.scheduler.reset()
        stack.scheduler.answer = answer_with([*ids("one two"), -EOS])
        answers = post(stack, {"text": "Hi", "sampling_params": sampling | {name: value}})
        answers = answers if isinstance(answers, list) else [answers]
        submits = stack.scheduler.received(Submit)
        seeds = [submit.params.seed for submit in submits] if name == "sampling_seed" else []
        requests = [without_seed(submit) for submit in submits]
        return requests, seeds, [(answer["text"], answer["meta_info"]["finish_reason"]) for answer in answers]

    named = [*SAMPLING, *REFUSED_SAMPLING, "spaces_between_special_tokens"]
    assert sorted(named) == sorted(NativeSampling.__struct_fields__)
    for name, (one, other) in SAMPLING.items():
        assert outcome(name, one) == outcome(name, one), f"{name}: nothing else differs"
        assert outcome(name, one) != outcome(name, other), name
    for name, (one, other) in REFUSED_SAMPLING.items():
        outcome(name, one)
        error = post(stack, {"text": "Hi", "sampling_params": {name: other}}, 400)["error"]
        assert (error["param"], error["code"]) == (f"sampling_params.{name}", "unsupported_parameter")


def test_generate_lists(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("one"))
    sampling = {"n": 2, "max_new_tokens": 1, "sampling_seed": 3}
    answers = post(stack, {"input_ids": [ids("a"), ids("b")], "sampling_params": sampling})
    assert len(answers) == 4
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert len(post(stack, {"text": ["a"], "sampling_params": {"max_new_tokens": 1}})) == 1


def test_generate_streams_the_whole_text_so_far(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*ids("one two"), -EOS])
    response = stack.http.post("/generate", json={"text": "Hi", "stream": True})
    *parts, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    decoded = [msgspec.json.decode(part) for part in parts]
    assert decoded[-1]["text"] == "one two"
    assert decoded[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert all(last["text"].startswith(part["text"]) for part, last in itertools.pairwise(decoded))


def test_generate_of_a_prompt_streams_plain_text(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([TOKENIZER.token_to_id("Ċ"), *ids("on")])
    response = stack.http.post("/generate", json={"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    text = "".join(
        "\n".join(line.removeprefix("data: ") for line in event.split("\n"))
        for event in response.text.split("\n\n")[:-2]
    )
    assert text.startswith("\n") and response.text.endswith("data: [DONE]\n\n")
    (submit,) = stack.scheduler.received(Submit)
    assert (submit.params.temperature, submit.params.max_tokens, submit.params.ignore_eos) == (0, 3, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "Hi", "sampling_params": {"temperature": 1}}, "sampling_params"),
        ({"prompt": "Hi", "return_logprob": True}, "return_logprob"),
        ({"text": "Hi", "max_tokens": 3}, "max_tokens"),
        ({"input_ids": [5], "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_fields_of_the_other_form_are_rejected(stack: FrontendStack, body: dict[str, Any], param: str) -> None:
    error = post(stack, body, 400)["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")


BODY: dict[str, tuple[Any, Any]] = {
    "rid": (None, "mine"),
    "stream": (False, True),
    "return_logprob": (False, True),
    "logprob_start_len": (-1, 0),
    "top_logprobs_num": (0, 2),
    "return_text_in_logprobs": (None, True),
    "token_ids_logprob": ([], [5]),
    "priority": (0, 3),
}
REFUSED: dict[str, tuple[Any, Any]] = {
    "return_hidden_states": (False, True),
    "image_data": ([], ["x"]),
    "video_data": ([], ["x"]),
    "audio_data": ([], ["x"]),
    "input_embeds": (None, [[0.5]]),
    **REFUSED_SAMPLING,
    "session_params": (None, {"id": "x"}),
    "custom_logit_processor": (None, "x"),
}
MISPLACED: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (None, 5),
    "min_new_tokens": (0, 1),
    "temperature": (None, 1),
    "top_p": (None, 0.5),
    "top_k": (None, 3),
    "min_p": (None, 0.5),
    "n": (1, 2),
    "sampling_seed": (None, 0),
    "stop": ([], "e"),
    "stop_token_ids": ([], [5]),
    "stop_regex": ([], "[ef]"),
    "no_stop_trim": (False, True),
    "presence_penalty": (0, 1),
    "frequency_penalty": (0.0, -1),
    "repetition_penalty": (None, 2),
    "logit_bias": ({}, {"5": 1}),
    "allowed_token_ids": (None, [5]),
    "bad_words": ([], ["e"]),
    "skip_special_tokens": (True, False),
    "json_schema": (None, {"type": "string"}),
    "regex": (None, "a+"),
    "ebnf": (None, 'root ::= "a"'),
    "structural_tag": (None, {"format": {"type": "any_text"}}),
}
"""Fields of `sampling_params` beside it."""
SOURCES = {"text", "input_ids", "sampling_params", "prompt", "max_tokens", "ignore_eos"}


def test_every_field_of_generate_has_an_effect_or_is_rejected_by_name(stack: FrontendStack) -> None:
    def outcome(name: str, value: Any) -> Any:
        stack.scheduler.reset()
        stack.scheduler.answer = scored_answer([*TEXT, -EOS])
        body = {"text": "Hello", "rid": "same", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        if name == "token_ids_logprob":
            body = {"text": "Hello", "rid": "same", "return_logprob": True}
        response = stack.http.post("/generate", json=body | {name: value})
        assert response.status_code == 200, response.text
        (submit,) = stack.scheduler.received(Submit)
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        return without_seed(submit), is_stream or response.json()

    known = {*BODY, *REFUSED, *MISPLACED, *SOURCES, "spaces_between_special_tokens"}
    assert known == set(NativeBody.__struct_fields__)
    assert set(NativeSampling.__struct_fields__) <= known
    for name, (one, other) in BODY.items():
        assert name == "rid" or outcome(name, one) == outcome(name, one), f"{name}: nothing else differs"
        assert outcome(name, one) != outcome(name, other), name
    for name, (one, other) in (REFUSED | MISPLACED).items():
        outcome(name, one)
        for form in ("text", "prompt"):
            error = post(stack, {form: "Hi", name: other}, 400)["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_the_output_has_its_token_ids(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*TEXT, -EOS])
    answer = post(stack, {"text": "Hi", "sampling_params": {"stop_token_ids": [EOS]}})
    assert answer["output_ids"] == [*TEXT, EOS]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


@pytest.mark.parametrize(
    ("sampling", "matched"), [({"stop": " t"}, " t"), ({"stop_regex": r"\s[t-z]"}, r"\s[t-z]")], ids=["text", "regex"]
)
def test_the_stop_that_ended_the_answer_is_named(stack: FrontendStack, sampling: dict[str, Any], matched: str) -> None:
    stack.scheduler.answer = answer_with([*TEXT, -EOS])
    answer = post(stack, {"text": "Hi", "sampling_params": sampling})
    assert answer["text"] == "one"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_prompt_and_output(stack: FrontendStack, stream: bool) -> None:
    """Every token of the output is listed, also the one that ended it, as `output_ids` has them."""
    stack.scheduler.answer = scored_answer([*TEXT, -EOS])
    body = {"text": "Hello", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "stream": stream}
    response = stack.http.post("/generate", json=body)
    last = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
    answer = msgspec.json.decode(last)
    meta = answer["meta_info"]
    prompt = ids("Hello")
    assert meta["input_token_logprobs"] == [
        [None, prompt[0], None],
        *([-token / 8, token, None] for token in prompt[1:]),
    ]
    assert meta["output_token_logprobs"] == [[-token / 8, token, None] for token in [*TEXT, EOS]]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    top = [[-1.0, 64, None], [-2.0, 65, None]]
    assert meta["input_top_logprobs"] == [None, *[top] * (len(prompt) - 1)]
    assert meta["output_top_logprobs"] == [top] * (len(TEXT) + 1)


def test_log_probabilities_begin_where_the_request_says(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*TEXT, -EOS])
    body = {"text": "Hello", "return_logprob": True, "return_text_in_logprobs": True}
    meta = post(stack, body)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert [entry[2] for entry in meta["output_token_logprobs"]][-1] == "<|im_end|>"
    assert "input_top_logprobs" not in meta and "output_top_logprobs" not in meta
    assert stack.scheduler.received(Submit)[0].params.prompt_logprobs is None
    meta = post(stack, body | {"logprob_start_len": 2})["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids("Hello")[2:]
    assert post(stack, body | {"logprob_start_len": 99})["meta_info"]["input_token_logprobs"] == []


def test_log_probabilities_of_given_tokens(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*TEXT, -EOS])
    body = {"text": "Hello", "return_logprob": True, "token_ids_logprob": [64, 65]}
    meta = post(stack, body)["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-1.0, 64, None], [-2.0, 65, None]]] * (len(TEXT) + 1)
    assert meta["input_token_ids_logprobs"] == [] and "output_top_logprobs" not in meta
    assert stack.scheduler.received(Submit)[0].params.logprob_token_ids == (64, 65)
    for other in ({"top_logprobs_num": 1}, {"logprob_start_len": 0}):
        assert post(stack, body | other, 400)["error"]["param"] == "token_ids_logprob"


def test_log_probabilities_of_the_whole_vocabulary_are_refused_with_what_is_possible(stack: FrontendStack) -> None:
    error = post(stack, {"text": "Hello", "return_logprob": True, "top_logprobs_num": -1}, 400)["error"]
    assert (error["param"], error["code"]) == ("top_logprobs_num", "invalid_value")
    assert "at most 20" in error["message"] and "`token_ids_logprob`" in error["message"]


def test_scores_of_a_prompt_may_arrive_in_parts() -> None:
    scored = [ScoredToken(b"a", b"a", 0, -1.0 * number, [], number, []) for number in range(9)]
    events = NativeFormat(logprobs=0, logprob_start=3).events("1", "org/tiny", [9])
    parts = [Delta(0, "", 0, (), None, prompt_scored=scored[first : first + 4]) for first in range(0, 9, 4)]
    *_, last = [msgspec.json.decode(events.event(part).removeprefix(b"data: ")) for part in parts]
    assert [entry[1] for entry in last["meta_info"]["input_token_logprobs"]] == [3, 4, 5, 6, 7, 8]


def test_a_prompt_can_be_scored_alone(stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer(TEXT)
    sampling = {"max_new_tokens": 0}
    body = {"input_ids": ids("Hello"), "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
    answer = post(stack, body)
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] == ids("Hello")


def test_the_identifier_of_the_client_is_returned(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(TEXT)
    assert post(stack, {"text": "Hi", "rid": "mine"})["meta_info"]["id"] == "mine"
    answers = post(stack, {"text": ["Hi", "Ho"], "rid": "mine"})
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine-0", "mine-1"]


def test_errors_of_logit_bias_name_the_key(stack: FrontendStack) -> None:
    error = post(stack, {"text": "Hi", "sampling_params": {"logit_bias": {"a": 1}}}, 400)["error"]
    assert error["param"] == "sampling_params.logit_bias" and "'a'" in error["message"]
