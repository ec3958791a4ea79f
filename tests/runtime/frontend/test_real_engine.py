"""Fields that the engine acts on, through the official client and a complete server with a tiny model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.frontend.served import ONE_START, Served
from support.tiny_checkpoint import tiny_checkpoint

USER = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": "default", "messages": USER, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("s")
    served = Served(tiny_checkpoint(), folder, *ONE_START)
    served.wait_until_ready()
    yield served.url
    served.popen.terminate()
    served.popen.wait(60)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def content(client: openai.OpenAI, **fields: Any) -> str:
    """Return the text of the only choice; `extra`: fields that the client does not know."""
    answer = client.chat.completions.create(**GREEDY, extra_body=fields)
    return answer.choices[0].message.content or ""


def tokens_of(url: str, text: str) -> list[int]:
    tokens: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]
    return tokens


def test_seeds_and_n(client: openai.OpenAI) -> None:
    def contents(**fields: Any) -> list[str | None]:
        answer = client.chat.completions.create(model="default", messages=USER, max_tokens=16, **fields)
        return [choice.message.content for choice in answer.choices]

    three = contents(n=3, seed=5)
    assert contents(n=3, seed=5) == three
    assert contents(seed=5) == three[:1]
    assert len(set(three)) == 3
    assert contents(seed=6) != three[:1]


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_change_repetitive_text(client: openai.OpenAI, url: str, field: str) -> None:
    # Greedy text repeats a token immediately; with the penalty another one is more likely.
    strong = {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 100}[field]
    (q,), (z,) = tokens_of(url, "q"), tokens_of(url, "z")
    bias = {"logit_bias": {str(q): 50, str(z): 49}}
    plain = content(client, **bias)
    assert set(plain) <= {"q", "z"}
    assert content(client, **bias, **{field: strong}) != plain


def test_logit_bias(client: openai.OpenAI, url: str) -> None:
    (token,) = tokens_of(url, "q")
    assert content(client, logit_bias={str(token): 100}) == "q" * 8
    assert "q" not in content(client, logit_bias={str(token): -100})


def test_stop_strings_and_stop_tokens(client: openai.OpenAI, url: str) -> None:
    (q, z) = tokens_of(url, "q")[0], tokens_of(url, "z")[0]
    bias = {"logit_bias": {str(q): 100}}
    assert content(client, **bias, stop="qqq") == ""
    assert content(client, **bias, stop="qqq", include_stop_str_in_output=True) == "qqq"
    assert content(client, **bias, stop="qqq", min_tokens=5) == "qq"
    assert content(client, **bias, stop_token_ids=[q]) == ""
    assert content(client, **bias, stop_token_ids=[z]) == "q" * 8


def test_an_expression_ends_the_answer(client: openai.OpenAI, url: str) -> None:
    bias = {"logit_bias": {str(tokens_of(url, "q")[0]): 100}}
    answer = client.chat.completions.create(**GREEDY, extra_body=bias | {"stop_regex": "q{4}"})
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert choice.model_extra == {"stop_reason": "q{4}", "matched_stop": "q{4}", "token_ids": None}
    assert content(client, **bias, stop_regex=["z", "q{3}"], min_tokens=5) == "qq"


def test_only_allowed_tokens_are_generated(client: openai.OpenAI, url: str) -> None:
    allowed = [*tokens_of(url, "q"), *tokens_of(url, "z")]
    for seed in range(3):
        answer = client.chat.completions.create(
            model="default",
            messages=USER,
            seed=seed,
            max_tokens=16,
            extra_body={"allowed_token_ids": allowed, "return_token_ids": True, "ignore_eos": True},
        )
        (choice,) = answer.choices
        assert choice.model_extra is not None
        assert set(choice.model_extra["token_ids"]) <= set(allowed) and len(choice.model_extra["token_ids"]) == 16


def test_bad_words_are_not_generated(client: openai.OpenAI, url: str) -> None:
    (q,), (z,) = tokens_of(url, "q"), tokens_of(url, "z")
    bias = {"logit_bias": {str(q): 100, str(z): 90}}
    assert content(client, **bias) == "q" * 8
    assert content(client, **bias, bad_words=["q"]) == "z" * 8
    assert content(client, **bias, bad_words=["qq"]) == "qz" * 4, "one after the other"


def test_scores_of_a_prompt_are_those_of_its_echo(client: openai.OpenAI, url: str) -> None:
    request: dict[str, Any] = {"model": "default", "prompt": "Hello world", "max_tokens": 1, "temperature": 0}
    echo = client.completions.create(**request, echo=True, logprobs=2).choices[0]
    plain = client.completions.create(**request, extra_body={"prompt_logprobs": 2}).choices[0]
    assert echo.logprobs is not None and echo.logprobs.token_logprobs is not None and plain.model_extra is not None
    prompt = tokens_of(url, "Hello world")
    rows = plain.model_extra["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(prompt)
    scores = [rows[at][str(token)]["logprob"] for at, token in enumerate(prompt) if at]
    assert scores == pytest.approx(echo.logprobs.token_logprobs[1 : len(prompt)], abs=1e-4)
    native = {"text": "Hello world", "return_logprob": True, "logprob_start_len": 1}
    body = native | {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    assert [entry[0] for entry in meta["input_token_logprobs"]] == pytest.approx(scores, abs=1e-4)
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt[1:]


def test_log_probabilities_of_given_tokens_are_those_of_the_model(client: openai.OpenAI, url: str) -> None:
    request: dict[str, Any] = {"model": "default", "prompt": "Hello", "max_tokens": 3, "temperature": 0, "logprobs": 5}
    extra = {"return_tokens_as_token_ids": True}
    usual = client.completions.create(**request, extra_body=extra).choices[0].logprobs
    assert usual is not None and usual.top_logprobs is not None
    ids = [int(name.removeprefix("token_id:")) for name in usual.top_logprobs[0]][::-1]
    named = client.completions.create(**request, extra_body=extra | {"logprob_token_ids": ids}).choices[0].logprobs
    assert named is not None and named.top_logprobs is not None
    assert named.top_logprobs[0] == pytest.approx(usual.top_logprobs[0], abs=1e-4)
    for top in named.top_logprobs:
        assert {int(name.removeprefix("token_id:")) for name in top} >= set(ids)


def test_a_probe_generates_a_token(url: str) -> None:
    response = httpx.get(f"{url}/health_generate", timeout=60)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert httpx.get(f"{url}/get_server_info", timeout=60).json()["status"] == "ready"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    text = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert text.decode("utf-8", "replace") == choice.message.content
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy sampling takes the most likely token"
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)


def test_logprobs_are_unchanged_by_sampling_parameters(client: openai.OpenAI, url: str) -> None:
    def first(**fields: Any) -> tuple[str, list[tuple[str, float]]]:
        request = GREEDY | {"max_tokens": 1, "logprobs": True, "top_logprobs": 5}
        choice = client.chat.completions.create(**(request | fields)).choices[0]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        (entry,) = choice.logprobs.content
        return entry.token, [(top.token, top.logprob) for top in entry.top_logprobs]

    plain, top = first()
    forced = "z" if plain == "q" else "q"
    (token,) = tokens_of(url, forced)
    changes = {"temperature": 2, "presence_penalty": 2, "logit_bias": {str(token): 100}}
    other, still = first(**changes, seed=1, extra_body={"repetition_penalty": 2})
    assert other == forced
    assert [token for token, _ in still] == [token for token, _ in top]
    assert [logprob for _, logprob in still] == pytest.approx([logprob for _, logprob in top], abs=1e-4)


def test_the_upper_32_bits_of_a_seed_matter(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str | None:
        answer = client.chat.completions.create(model="default", messages=USER, max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    assert len({sampled(5), sampled(5 + 2**32), sampled(5 + 2**62)}) == 3


def test_prompt_logprobs_equal_those_of_generation(client: openai.OpenAI, url: str) -> None:
    prompt = tokens_of(url, "The quick brown")
    request = {"model": "default", "temperature": 0, "logprobs": 1}
    made = client.completions.create(prompt=prompt, max_tokens=4, **request).choices[0]
    assert made.logprobs is not None and made.logprobs.token_logprobs is not None
    answer = tokens_of(url, made.text)
    whole = [[*prompt, *answer], [*prompt, *answer]]
    scored = client.completions.create(prompt=whole, max_tokens=1, echo=True, seed=1234, **request)
    assert [choice.index for choice in scored.choices] == [0, 1]
    for choice in scored.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        logprobs = choice.logprobs.token_logprobs
        assert logprobs[0] is None and len(logprobs) == len(whole[0]) + 1
        if len(answer) == len(made.logprobs.token_logprobs):
            assert logprobs[len(prompt) : -1] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)


def test_streams_and_concurrency(client: openai.OpenAI, url: str) -> None:
    plain = content(client)
    stream = client.chat.completions.create(**GREEDY, n=2, stream=True, stream_options={"include_usage": True})
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [plain, plain]
    assert usage is not None and usage.completion_tokens == 16

    async def many() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as eight:
            answers = await asyncio.gather(*[eight.chat.completions.create(**GREEDY) for _ in range(8)])
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(many()) == [plain] * 8


def test_a_prompt_that_is_too_long_has_the_error_that_clients_expect(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="default", prompt="x" * 50_000)
    assert "This model's maximum context length is" in str(raised.value)
    assert "context_length_exceeded" not in raised.value.body["message"]  # type: ignore[index]
    assert raised.value.code == "context_length_exceeded"


def test_every_eos_token_of_the_checkpoint_ends_a_choice(tmp_path: Path) -> None:
    """Including one that the tokenizer does not know."""
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), model)
    generation = json.loads((model / "generation_config.json").read_text())
    (first, *_) = generation["eos_token_id"]
    second, other = 40, 41
    assert first not in (second, other)
    (model / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [first, second]}))
    served = Served(model, tmp_path, *ONE_START)
    try:
        served.wait_until_ready()

        def end(token: int, **fields: Any) -> tuple[str, int]:
            """Return the finish reason of text in which this token is always the most likely."""
            body = {"prompt": "Hello", "temperature": 0, "max_tokens": 3, "logit_bias": {str(token): 100}}
            answer = httpx.post(f"{served.url}/v1/completions", json=body | fields, timeout=60).json()
            return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

        assert end(first) == end(second) == ("stop", 1)
        assert end(other) == end(second, ignore_eos=True) == ("length", 3)
    finally:
        served.popen.terminate()
        served.popen.wait(60)
