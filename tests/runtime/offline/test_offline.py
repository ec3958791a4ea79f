"""`LLM` on a tiny model, through its public interface."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.errors import EngineError, LauncherError
from minisgl.offline import OfflineError, Output
from minisgl.wire.messages import Submit
from support.frontend.served import RUNTIME, launched_by
from support.tiny_checkpoint import tiny_checkpoint

_SMALL: dict[str, Any] = {
    "device": "cpu",
    "num_pages": 256,
    "page_size": 4,
    "max_running": 8,
    "max_model_len": 256,
    "audit": True,
}
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(tiny_checkpoint(), **_SMALL) as llm:
        yield llm


def _greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})


def test_one_text_gives_one_output(llm: LLM) -> None:
    [output] = llm.generate("Hello there", _GREEDY)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == output.usage.completion_tokens == 12
    assert output.usage.prompt_tokens > 0
    assert output.text
    assert output.error == ""


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[7 + i, 8, 9] for i in range(20)]
    together = llm.generate(prompts, [_greedy(max_tokens=3 + i % 5) for i in range(20)])
    alone = [llm.generate([prompt], _greedy(max_tokens=3 + i % 5))[0] for i, prompt in enumerate(prompts)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_requests_are_queued_at_once_in_order_without_streams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, queued = llm._scheduler.submit, []

    def recorded(message: Submit, client: int) -> None:
        assert llm.counters.steps == steps
        assert not message.stream
        queued.append(client)
        submit(message, client)

    monkeypatch.setattr(llm._scheduler, "submit", recorded)
    steps = llm.counters.steps
    llm.generate([[7 + i] for i in range(20)], [_greedy(max_tokens=1 + i % 5) for i in range(20)])
    assert queued == list(range(20))


def test_a_second_call_uses_the_prefix_cache(llm: LLM) -> None:
    prompt = list(range(40, 60))
    [first] = llm.generate([prompt], _GREEDY)
    [second] = llm.generate([prompt], _GREEDY)
    assert second.usage.cached_tokens == 16
    assert second.token_ids == first.token_ids


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    longer = [{"role": "system", "content": "Be brief"}, *hello]
    [one] = llm.chat(hello, _GREEDY)
    both = llm.chat([hello, longer], _GREEDY)
    assert both[0].token_ids == one.token_ids
    assert both[1].usage.prompt_tokens > both[0].usage.prompt_tokens


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    [whole] = llm.generate("Hello there", _greedy(max_tokens=40))
    stop = whole.text[10:13]
    [stopped] = llm.generate("Hello there", _greedy(max_tokens=40, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert len(stopped.token_ids) == stopped.usage.completion_tokens < 40


def test_a_stop_token_ends_the_answer_after_it(llm: LLM) -> None:
    [whole] = llm.generate([[5, 6, 7]], _GREEDY)
    first = whole.token_ids[3]
    [stopped] = llm.generate([[5, 6, 7]], _greedy(stop_token_ids=(first,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(first) + 1]


def test_a_seed_gives_the_same_answer_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=11, ignore_eos=True)
    [alone] = llm.generate([[1, 2, 3]], seeded)
    among = llm.generate([[9, 9], [1, 2, 3], [4]], [other, seeded, other])
    assert among[1].token_ids == alone.token_ids


def test_default_parameters_are_those_of_the_checkpoint(llm: LLM, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    config = json.loads((checkpoint / "generation_config.json").read_text())
    # One candidate: greedy, though the temperature stays 1.
    (checkpoint / "generation_config.json").write_text(json.dumps({**config, "top_k": 1}))
    prompts = [[1, 2, 3], [7, 8]]
    with LLM(checkpoint, **{**_SMALL, "max_model_len": 24}) as default:
        found = [output.token_ids for output in default.generate(prompts)]
    greedy = [output.token_ids for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=21))]
    assert [tokens[:21] for tokens in found] == greedy


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], _GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "params", "code", "words"),
    [
        ([[1], [10**6]], _GREEDY, "invalid_token", "prompt 1: token id 1000000"),
        ([[1], [2**40]], _GREEDY, "invalid_prompt", "prompt 1"),
        ([[1], []], _GREEDY, "empty_prompt", "prompt 1"),
        ([[1]], _greedy(max_tokens=10**6), "context_length_exceeded", "maximum context length"),
        ([[1]], _greedy(temperature=-1), "invalid_request", "temperature"),
        ([[1]], _greedy(stop="text"), "invalid_request", "stop: expected `array`, got `str`: 'text'"),
        ([[1]], _greedy(max_tokens=-1), "invalid_request", "prompt 0: max_tokens: expected 1 or more"),
        ([[1]], _greedy(max_tokens="5"), "invalid_request", "prompt 0: max_tokens: expected"),
        ([[1]], [{"max_tokens": 5}], "invalid_request", "expected SamplingParams"),
        ([1, 2], _GREEDY, "invalid_request", "a list in the list"),
        ([[1], b"1234"], _GREEDY, "invalid_request", "prompt 1: expected a text or a list of token ids"),
        ([None], _GREEDY, "invalid_request", "prompt 0"),
        ([[1]], _greedy(stop=("",)), "invalid_request", "stop: expected a tuple"),
        ([[1]], [], "invalid_request", "1 prompts, but 0"),
    ],
)
def test_an_invalid_prompt_or_parameter_is_refused_before_the_first_step(
    prompts: list[list[int]], params: Any, code: str, words: str, llm: LLM
) -> None:
    steps = llm.counters.steps
    with pytest.raises(OfflineError, match=words) as refused:
        llm.generate(prompts, params)
    assert refused.value.code == code
    assert llm.counters.steps == steps


def test_an_unknown_role_is_refused(llm: LLM) -> None:
    with pytest.raises(OfflineError, match="conversation 0"):
        llm.chat([{"role": "wizard", "content": "x"}])


def test_ctrl_c_removes_all_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [expected] = llm.generate([[3, 1, 4]], _GREEDY)
    step = llm._loop.step
    steps = 0

    def step_with_a_signal() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._loop, "step", step_with_a_signal)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i, i] for i in range(1, 30)], _greedy(max_tokens=50))
    monkeypatch.undo()
    assert not llm._scheduler.has_work
    assert llm.generate([[3, 1, 4]], _GREEDY) == [
        Output(
            text=expected.text,
            token_ids=expected.token_ids,
            finish_reason="length",
            usage=expected.usage,
        )
    ]


def test_ctrl_c_in_the_last_step_takes_effect(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._loop.step

    def step_with_a_signal_at_the_end() -> Any:
        output = step()
        if not llm._scheduler.has_work:
            os.kill(os.getpid(), signal.SIGINT)
        return output

    monkeypatch.setattr(llm._loop, "step", step_with_a_signal_at_the_end)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 1, 4]], _GREEDY)


def test_after_an_error_in_the_middle_of_a_step_calls_are_refused() -> None:
    with LLM(tiny_checkpoint(), **_SMALL) as llm:
        step, steps = llm._loop.step, iter(range(100))

        def step_until_timeout() -> Any:
            if next(steps) == 3:
                raise TimeoutError("alarm of the caller")
            return step()

        llm._loop.step = step_until_timeout  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match="alarm"):
            llm.generate([[1], [2]], _GREEDY)
        with pytest.raises(OfflineError, match=r"alarm.*create a new LLM") as refused:
            llm.generate([[1]], _GREEDY)
        assert refused.value.code == "broken"


def test_the_progress_bar_is_shown_when_requested(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], _GREEDY, progress=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate([[1]] * 20, _GREEDY)
    assert capsys.readouterr().err == "", "no bar without a terminal"


def test_token_ids_need_no_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_checkpoint() / "config.json").read_bytes())
    with LLM(tmp_path, **_SMALL, dummy_weights=True, detokenize=False) as llm:
        [output] = llm.generate([[1, 2, 3]], _GREEDY)
        assert (len(output.token_ids), output.text) == (12, "")
        with pytest.raises(OfflineError, match="detokenize=False"):
            llm.generate("text", _GREEDY)


def test_overrides_of_the_configuration_reach_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RUNTIME))
    prompts = [[*range(5, 60)]]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    outputs = []
    for overrides, tp in ((None, 1), ({"rope_scaling": yarn}, 1), ({"rope_scaling": yarn}, 2)):
        with LLM(tiny_checkpoint(), **_SMALL, tp=tp, hf_overrides=overrides) as llm:
            outputs.append(llm.generate(prompts, _GREEDY)[0].token_ids)
    assert outputs[0] != outputs[1] == outputs[2]


def test_two_ranks_give_the_same_tokens_as_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RUNTIME))
    prompts = [[5, 6, 7], [8, 9]]
    with LLM(tiny_checkpoint(), **_SMALL, tp=2) as two:
        outputs = two.generate(prompts, _GREEDY)
    assert [output.token_ids for output in outputs] == [o.token_ids for o in llm.generate(prompts, _GREEDY)]


def test_an_error_names_the_rank_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RUNTIME))
    with LLM(tiny_checkpoint(), **_SMALL, tp=2) as two:
        os.kill(launched_by(os.getpid())["rank1"], signal.SIGKILL)
        with pytest.raises(LauncherError, match=r"rank1 \(pid \d+\) was killed"):
            two.generate([[1, 2]] * 8, _greedy(max_tokens=200))


def test_logprobs_of_answer_and_prompt_agree(llm: LLM) -> None:
    params = _greedy(max_tokens=4, logprobs=2, prompt_logprobs=1)
    prompt = list(range(40, 52))
    [output] = llm.generate([prompt], params)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [each.token_id for each in output.logprobs] == output.token_ids
    assert [each.token_id for each in output.prompt_logprobs] == prompt[1:]
    assert [len(each.top) for each in output.logprobs] == [2] * 4
    for each in output.logprobs:
        assert max(each.top.items(), key=lambda pair: pair[1]) == (each.token_id, each.logprob)
    [longer] = llm.generate([[*prompt, *output.token_ids]], _greedy(max_tokens=1, prompt_logprobs=2))
    assert longer.logprobs is None and longer.prompt_logprobs is not None
    for again, first in zip(longer.prompt_logprobs, [*output.prompt_logprobs, *output.logprobs], strict=True):
        assert again.token_id == first.token_id
        assert again.logprob == pytest.approx(first.logprob, abs=1e-4)


def test_log_probabilities_of_given_tokens_replace_those_of_the_most_likely(llm: LLM) -> None:
    prompt = list(range(40, 52))
    [usual] = llm.generate([prompt], _greedy(max_tokens=1, logprobs=3))
    assert usual.logprobs is not None
    wanted = [*reversed(usual.logprobs[0].top), 7]
    [named] = llm.generate([prompt], _greedy(max_tokens=2, logprobs=0, logprob_token_ids=tuple(wanted)))
    assert named.logprobs is not None
    assert [list(each.top) for each in named.logprobs] == [wanted] * 2
    for token, logprob in usual.logprobs[0].top.items():
        assert named.logprobs[0].top[token] == pytest.approx(logprob, abs=1e-4)


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    [output] = llm.generate("Hello there", _greedy(allowed_token_ids=(70, 71), ignore_eos=True))
    assert set(output.token_ids) <= {70, 71} and len(output.token_ids) == 12


def test_logits_processors_apply_to_text_prompts(llm: LLM) -> None:
    [plain] = llm.generate("Hello there", _GREEDY)
    [biased] = llm.generate("Hello there", _greedy(logit_bias={plain.token_ids[0]: -100.0}, logprobs=0))
    assert biased.token_ids[0] != plain.token_ids[0]
    assert biased.logprobs is not None and len(biased.logprobs) == 12
    stop = plain.token_ids[0]
    [early] = llm.generate("Hello there", _greedy(stop_token_ids=(stop,)))
    [late] = llm.generate("Hello there", _greedy(stop_token_ids=(stop,), min_tokens=5))
    assert len(early.token_ids) == 1 and len(late.token_ids) >= 5


def test_a_prompt_longer_than_the_context_is_refused_without_a_tokenizer_too() -> None:
    with LLM(tiny_checkpoint(), **_SMALL, detokenize=False) as llm:
        for length in (256, 300):
            with pytest.raises(OfflineError, match=f"prompt 1: .*the prompt has {length}") as refused:
                llm.generate([[1], [1] * length], SamplingParams(ignore_eos=True))
            assert refused.value.code == "context_length_exceeded"
            # Alone it leaves a negative number of tokens to generate.
            with pytest.raises(OfflineError, match=f"prompt 0: .*the prompt has {length}"):
                llm.generate([[1] * length], SamplingParams(ignore_eos=True))
        assert llm.counters.steps == 0
        [output] = llm.generate([[1]], _GREEDY)
        assert output.finish_reason in ("stop", "length"), "the next call works"


def test_logits_processors_apply_without_a_tokenizer() -> None:
    with LLM(tiny_checkpoint(), **_SMALL, detokenize=False) as llm:
        [plain] = llm.generate([[5, 6, 7]], _GREEDY)
        [biased] = llm.generate([[5, 6, 7]], _greedy(logit_bias={plain.token_ids[0]: -100.0}, logprobs=1))
    assert plain.logprobs is None and biased.logprobs is not None
    assert biased.token_ids[0] != plain.token_ids[0]
    assert plain.token_ids[0] in biased.logprobs[0].top


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_running": 0}, "max_running: expected `int` >= 1"),
        ({"page_size": 0}, "page_size: expected `int` >= 1"),
        ({"page_size": 999}, "page_size: expected `int` <= 256"),
        ({"num_pages": 0}, "num_pages"),
        ({"memory_fraction": 5.0}, "memory_fraction: expected `float` <= 1"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"tp": 0}, "tp: expected `int` >= 1: 0"),
        ({"dtype": "int8"}, "dtype: expected one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu"}, "device: expected one of auto, cpu, cuda, got 'tpu'"),
        ({"cache": "foo"}, "cache: expected one of radix, naive, got 'foo'"),
        ({"overlap": "no"}, "overlap: expected `bool`, got `str`: 'no'"),
        ({"hf_overrides": "{}"}, "hf_overrides: expected `object | null`, got `str`: '{}'"),
        ({"max_runing": 8}, "max_runing: unknown option; did you mean max_running?"),
        ({"rank": 1}, "rank: unknown option"),
    ],
)
def test_an_error_names_the_invalid_option(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        LLM(tiny_checkpoint(), **{"device": "cpu", **options})


def test_a_length_beyond_the_pool_or_the_model_is_refused() -> None:
    with pytest.raises(EngineError, match="fewer than --max-model-len 512"):
        LLM(tiny_checkpoint(), device="cpu", num_pages=4, max_model_len=512)
    with pytest.raises(EngineError, match="exceeds the model's limit of 2048 tokens"):
        LLM(tiny_checkpoint(), device="cpu", max_model_len=4096)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    options: dict[str, Any] = {"device": "cpu", "num_pages": 512, "hf_overrides": {"rope_scaling": yarn}}
    with LLM(tiny_checkpoint(), **options, max_model_len=8192) as llm:
        assert llm.limits.max_model_len == 8192


def test_a_closed_llm_refuses_calls() -> None:
    llm = LLM(tiny_checkpoint(), device="cpu", num_pages=64)
    llm.close()
    llm.close()
    with pytest.raises(OfflineError, match="is closed"):
        llm.generate("hello")
