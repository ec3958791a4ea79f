"""Token ids, log-probabilities of prompts and what ended an answer, through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from minisgl.wire.messages import Ack, Submit
from support.frontend.fake_scheduler import answer_with, row
from support.frontend.scored_answers import scored_answer
from support.frontend.stack import EOS, FrontendStack, ids

USER: Any = [{"role": "user", "content": "Hello"}]
PROMPT = ids("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
TOKENS = ids("one two")


@pytest.fixture
def client(stack: FrontendStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.openai_url, api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **extra: Any) -> Any:
    return client.chat.completions.create(model="org/tiny", messages=USER, extra_body=extra)


def complete(client: openai.OpenAI, prompt: Any = "Hello", **extra: Any) -> Any:
    return client.completions.create(model="org/tiny", prompt=prompt, extra_body=extra)


def test_token_ids_of_a_chat(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*TOKENS, -EOS])
    answer = chat(client, return_token_ids=True, n=2)
    assert answer.prompt_token_ids == PROMPT
    assert [choice.token_ids for choice in answer.choices] == [[*TOKENS, EOS]] * 2
    plain = chat(client)
    assert plain.prompt_token_ids is None and plain.choices[0].token_ids is None


def test_token_ids_of_completions(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*TOKENS, -EOS])
    answer = complete(client, ["Hello", "Hi"], return_token_ids=True, stop=" t")
    assert [choice.prompt_token_ids for choice in answer.choices] == [ids("Hello"), ids("Hi")]
    for choice in answer.choices:
        assert choice.text == "one"
        assert choice.token_ids == TOKENS[: len(choice.token_ids)] and len(choice.token_ids) > len(ids("one"))


@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_of_a_streamed_chat(client: openai.OpenAI, stack: FrontendStack, n: int) -> None:
    stack.scheduler.answer = answer_with([*TOKENS, -EOS])
    extra = {"return_token_ids": True}
    stream: Any = client.chat.completions.create(
        model="org/tiny", messages=USER, stream=True, n=n, stop="never", extra_body=extra
    )
    chunks = list(stream)
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks] == [PROMPT] + [None] * (len(chunks) - 1)
    for index in range(n):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [token for choice in choices for token in getattr(choice, "token_ids", ())] == [*TOKENS, EOS]
        assert "".join(choice.delta.content or "" for choice in choices) == "one two"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]


def test_token_ids_of_a_stream_that_takes_its_time(client: openai.OpenAI, stack: FrontendStack) -> None:
    """Every token is an output of its own."""
    first, *others = ids("one two")
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, first)]
    stream: Any = client.chat.completions.create(
        model="org/tiny", messages=USER, stream=True, extra_body={"return_token_ids": True}
    )
    arrived: list[int] = []
    waiting = [*others, -EOS]
    for chunk in stream:
        new = [token for choice in chunk.choices for token in getattr(choice, "token_ids", ())]
        arrived += new
        if new and waiting:
            token = waiting.pop(0)
            submit = stack.scheduler.received(Submit)[-1]
            stack.scheduler.send(row(submit.id, len(arrived), abs(token), "stop" if token < 0 else None), to=submit)
    assert arrived == [first, *others, EOS]


def test_token_ids_of_a_streamed_completion(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*TOKENS, -EOS])
    stream: Any = client.completions.create(
        model="org/tiny", prompt=["Hello", "Hi"], stream=True, extra_body={"return_token_ids": True}
    )
    choices = [choice for chunk in stream for choice in chunk.choices]
    for index, prompt in enumerate(("Hello", "Hi")):
        own = [choice for choice in choices if choice.index == index]
        assert [c.prompt_token_ids for c in own if hasattr(c, "prompt_token_ids")] == [ids(prompt)]
        assert [token for c in own for token in getattr(c, "token_ids", ())] == [*TOKENS, EOS]
        assert "".join(c.text for c in own) == "one two"


def test_every_event_of_a_completion_has_ids_and_log_probabilities(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*TOKENS, -EOS])
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    stream: Any = client.completions.create(model="org/tiny", prompt="Hello", logprobs=1, stream=True, extra_body=extra)
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].prompt_token_ids == ids("Hello")
    scored = [name for choice in choices for name in choice.logprobs.tokens]
    assert scored == [f"token_id:{token}" for choice in choices for token in choice.token_ids]
    assert scored == [f"token_id:{token}" for token in (*TOKENS, EOS)]


def test_log_probabilities_cover_all_token_ids(client: openai.OpenAI, stack: FrontendStack) -> None:
    """Also those of tokens that are not part of the text, so that clients can align the two lists."""
    stack.scheduler.answer = scored_answer([*TOKENS, -EOS])
    answer = chat(client, return_token_ids=True, logprobs=True)
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [-token / 8 for token in answer.choices[0].token_ids]
    assert len(chat(client, logprobs=True).choices[0].logprobs.content) == len(TOKENS)
    stopped = complete(client, return_token_ids=True, logprobs=0, stop=" t").choices[0]
    assert stopped.text == "one"
    assert stopped.logprobs.token_logprobs == [-token / 8 for token in stopped.token_ids]


def test_a_given_token_that_is_sampled_is_reported_once(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([65, -EOS])
    (choice,) = chat(client, logprobs=True, logprob_token_ids=[64, 65, 66], return_tokens_as_token_ids=True).choices
    (entry,) = choice.logprobs.content
    assert [top.token for top in entry.top_logprobs] == ["token_id:64", "token_id:65", "token_id:66"]


@pytest.mark.parametrize(("tokens", "last"), [(TOKENS, TOKENS[-1:]), ([*TOKENS, -EOS], [])], ids=["length", "end"])
def test_the_last_event_of_a_completion_has_log_probabilities(
    client: openai.OpenAI, stack: FrontendStack, tokens: list[int], last: list[int]
) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    stream: Any = client.completions.create(
        model="org/tiny", prompt="Hello", logprobs=1, stream=True, max_tokens=len(tokens)
    )
    choices = []
    (submit,) = stack.scheduler.wait_for(Submit)
    # One step at a time, so that the last token has an event of its own.
    _, *steps = scored_answer(tokens)(submit)
    for step in steps:
        stack.scheduler.send(step, to=submit)
        choices.append(next(stream).choices[0])
    choices += [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == "one two"
    assert choices[-1].finish_reason and choices[-1].logprobs.token_logprobs == [-token / 8 for token in last]


def test_tokens_are_named_by_their_ids(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*TOKENS, -EOS])
    names = [f"token_id:{token}" for token in TOKENS]
    (choice,) = chat(client, return_tokens_as_token_ids=True, logprobs=True, top_logprobs=2).choices
    assert [entry.token for entry in choice.logprobs.content] == names
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content) == b"one two"
    assert [top.token for top in choice.logprobs.content[0].top_logprobs] == ["token_id:64", "token_id:65"]
    (choice,) = complete(client, return_tokens_as_token_ids=True, logprobs=1).choices
    assert choice.logprobs.tokens == names
    assert choice.logprobs.top_logprobs[0] == {"token_id:64": -1.0, names[0]: -TOKENS[0] / 8}


def expected(prompt: list[int], tops: int) -> list[Any]:
    """Log-probabilities of a prompt as `scored_answer` makes them."""
    rows: list[Any] = [None]
    for token in prompt[1:]:
        row = {64 + n: (-1.0 - n, n + 1) for n in range(tops)}
        row.setdefault(token, (-token / 8, None))
        rows.append({str(key): value for key, value in row.items()})
    return rows


def shown(prompt_logprobs: list[Any]) -> list[Any]:
    return [
        None if row is None else {key: (entry["logprob"], entry["rank"]) for key, entry in row.items()}
        for row in prompt_logprobs
    ]


def test_log_probabilities_of_the_prompt_of_a_chat(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer([*TOKENS, -EOS])
    answer = chat(client, prompt_logprobs=2)
    assert shown(answer.prompt_logprobs) == expected(PROMPT, 2)
    assert answer.prompt_logprobs[1]["64"]["decoded_token"] == "a"
    assert answer.choices[0].message.content == "one two" and answer.choices[0].logprobs is None
    assert chat(client).prompt_logprobs is None


@pytest.mark.parametrize(
    ("extra", "logprobs"),
    [({}, None), ({"echo": True}, None), ({"echo": True, "logprobs": 1}, 1), ({"logprobs": 3}, 3)],
    ids=["alone", "echo", "scored echo", "scored"],
)
def test_log_probabilities_of_the_prompts_of_completions(
    client: openai.OpenAI, stack: FrontendStack, extra: dict[str, Any], logprobs: int | None
) -> None:
    stack.scheduler.answer = scored_answer([*TOKENS, -EOS])
    answer = complete(client, ["Hello", "Hi"], prompt_logprobs=2, **extra)
    for choice, prompt in zip(answer.choices, ("Hello", "Hi"), strict=True):
        assert shown(choice.prompt_logprobs) == expected(ids(prompt), 2)
        assert choice.text == (prompt if "echo" in extra else "") + "one two"
        if logprobs is None:
            assert choice.logprobs is None
        else:
            assert {len(top) for top in choice.logprobs.top_logprobs[1:] if top} <= {logprobs, logprobs + 1}


def test_a_prompt_can_be_scored_without_an_answer(client: openai.OpenAI, stack: FrontendStack) -> None:
    stack.scheduler.answer = scored_answer(TOKENS)
    (choice,) = complete(client, prompt_logprobs=0, max_tokens=0).choices
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert shown(choice.prompt_logprobs) == expected(ids("Hello"), 0)


@pytest.mark.parametrize("create", [chat, complete])
def test_log_probabilities_of_prompts_are_not_streamed(client: openai.OpenAI, create: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="stream") as caught:
        create(client, prompt_logprobs=1, stream=True)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("extra", "tokens", "matched"),
    [
        ({"stop": " t"}, [*TOKENS, -EOS], " t"),
        ({"stop_regex": r"\st"}, [*TOKENS, -EOS], r"\st"),
        ({"stop_token_ids": [7]}, [*TOKENS, -7], 7),
        ({}, [*TOKENS, -EOS], None),
        ({"max_tokens": 1}, TOKENS, None),
    ],
    ids=["string", "expression", "token", "end", "length"],
)
def test_what_ended_the_answer_is_reported(
    client: openai.OpenAI,
    stack: FrontendStack,
    stream: bool,
    extra: dict[str, Any],
    tokens: list[int],
    matched: Any,
) -> None:
    stack.scheduler.answer = answer_with(tokens)
    for create in (chat, complete):
        answer = create(client, **extra) if not stream else None
        if answer is None:
            request: Any = {"messages": USER} if create is chat else {"prompt": "Hello"}
            endpoint: Any = client.chat.completions if create is chat else client.completions
            *_, answer = endpoint.create(model="org/tiny", stream=True, extra_body=extra, **request)
        (choice,) = answer.choices
        assert (choice.stop_reason, choice.matched_stop) == (matched, matched)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_given_tokens(client: openai.OpenAI, stack: FrontendStack, stream: bool) -> None:
    """The scheduler reports the given tokens in place of the most likely ones. The sampled one comes first."""
    stack.scheduler.answer = scored_answer([*TOKENS, -EOS])
    extra = {"logprob_token_ids": [64, 65, 66]}
    request: Any = {"model": "org/tiny", "messages": USER, "logprobs": True, "extra_body": extra}
    if stream:
        chunks: Any = client.chat.completions.create(**request, stream=True)
        given = [chunk.choices[0].logprobs for chunk in chunks]
        entries = [entry for logprobs in given if logprobs for entry in logprobs.content]
    else:
        entries = client.chat.completions.create(**request).choices[0].logprobs.content
    assert len(entries) == len(TOKENS)
    for entry in entries:
        assert [top.token for top in entry.top_logprobs] == [entry.token, "a", "b", "c"]
        assert entry.top_logprobs[0].logprob == entry.logprob
    (submit, *_) = stack.scheduler.received(Submit)
    assert (submit.params.logprob_token_ids, submit.params.logprobs) == ((64, 65, 66), 0)


@pytest.mark.parametrize("create", [chat, complete])
def test_log_probabilities_of_the_whole_vocabulary_are_refused_with_what_is_possible(
    client: openai.OpenAI, create: Any
) -> None:
    whole = {"top_logprobs": -1} if create is chat else {"logprobs": -1}
    for fields in ({"prompt_logprobs": -1}, {"logprobs": True} | whole):
        with pytest.raises(openai.BadRequestError, match=r"whole vocabulary.*at most 20.*`logprob_token_ids`"):
            create(client, **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_tokens_that_the_model_does_not_have_are_ignored_and_named(stack: FrontendStack, stream: bool) -> None:
    """Clients send those of every model that they know."""
    stack.scheduler.answer = answer_with([*TOKENS, -7])
    body = {"prompt": "Hello", "stop_token_ids": [512, 7, 151_645], "stream": stream}
    answered = stack.http.post("/v1/completions", json=body)
    assert answered.status_code == 200 and '"stop_reason":7' in answered.text
    assert answered.headers["x-ignored-params"] == "stop_token_ids[0], stop_token_ids[2]"
    (submit,) = stack.scheduler.received(Submit)
    assert submit.params.stop_token_ids == (7,)
    strict = stack.http.post("/v1/completions", json=body, headers={"prefer": "handling=strict"})
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "stop_token_ids[0]")
