"""Training rows of the agent model."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, product

import pytest
from tokenizers import Tokenizer

from minisgl.toy.agent_cases import all_forms, examples, held_out_conversations
from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_rows import AgentRows, conversation
from minisgl.toy.agent_tokenizer import agent_tokenizer
from minisgl.toy.agent_world import ASIDE, FORMS, IRRELEVANT, NO_TOOL, TOOLS, Exchange, draw, thought, words
from minisgl.toy.training import IGNORED


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return agent_tokenizer()


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _questions(*, held_out: bool) -> set[str]:
    source = random.Random(0)
    drawn: list[Exchange] = [draw(source, list(TOOLS), held_out=held_out) for _ in range(3000)]
    return {exchange.question for exchange in drawn if exchange.tool is not None}


def test_questions_that_judge_the_model_are_not_trained() -> None:
    trained, held_out = _questions(held_out=False), _questions(held_out=True)
    assert len(held_out) > 200
    assert trained.isdisjoint(held_out)


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_questions_of_both_kinds(name: str) -> None:
    for held_out in (False, True):
        source = random.Random(1)
        drawn = [draw(source, [name], held_out=held_out) for _ in range(200)]
        tools = [exchange.tool.name for exchange in drawn if exchange.tool is not None and exchange.is_offered]
        assert set(tools) == {name}
        assert all(exchange.answer == NO_TOOL for exchange in drawn if "weather" in exchange.question and name == "add")


def test_values_are_the_same_tokens_in_questions_and_calls(tokenizer: Tokenizer) -> None:
    for word in words():
        [token] = _ids(tokenizer, word)
        call, xml = f'{{"city": "{word}"}}', f"<parameter=city>\n{word}\n</parameter>"
        for text in (f"the {word}?", f"for {word}.", call, xml):
            assert token in _ids(tokenizer, text), text


def test_rows_have_the_tokens_of_whole_prompts(tokenizer: Tokenizer) -> None:
    for seed in range(40):
        segments = list(islice(conversation(random.Random(seed), held_out=False), 6))
        pieces = [token for segment in segments for token in _ids(tokenizer, segment.text)]
        assert pieces == _ids(tokenizer, "".join(segment.text for segment in segments))


def test_labels_are_the_tokens_of_answers(tokenizer: Tokenizer) -> None:
    batch = AgentRows(tokenizer, 3, 128).batch(6)
    assert batch.tokens.shape == batch.labels.shape == (6, 128)
    for turn in batch.turns:
        labels = batch.labels[turn.row, turn.begin : turn.end].tolist()
        assert tokenizer.decode(labels, skip_special_tokens=False).endswith("<|im_end|>")
        assert IGNORED not in labels
    [following] = batch.tokens[0, 1:].unsqueeze(0).tolist()
    assert all(label in (IGNORED, token) for label, token in zip(batch.labels[0].tolist(), following, strict=False))


def test_each_question_is_judged_in_each_format_with_and_without_its_tool(tokenizer: Tokenizer) -> None:
    values = 2
    batches = all_forms(tokenizer, values)
    forms = Counter(form.skill.name for form in FORMS)
    expected: Counter[str] = Counter()
    for name, mode in product(TEMPLATES, ("", ", thinking")):
        for tool, count in forms.items():
            for kind in (tool, f"{tool} result", f"no {tool}"):
                expected[f"{name} {kind}{mode}"] = values * count
        expected[f"{name} aside{mode}"] = values * len(ASIDE)
        expected[f"{name} no tool{mode}"] = values * len(IRRELEVANT)
    assert Counter(turn.kind for batch in batches for turn in batch.turns) == expected
    assert any("result" in turn.kind for turn in held_out_conversations(tokenizer).turns)


def test_the_example_of_the_chat_page_is_judged(tokenizer: Tokenizer) -> None:
    made = [tokenizer.decode(row) for batch in examples(tokenizer) for row in batch.tokens.tolist()]
    assert sum("windy, 11 degrees" in text for text in made) == len(TEMPLATES)


def test_padding_has_no_labels(tokenizer: Tokenizer) -> None:
    for batch in all_forms(tokenizer, 1):
        for turn in batch.turns:
            assert IGNORED not in batch.labels[turn.row, turn.begin : turn.end].tolist()
        lasts = {turn.row: turn.end for turn in batch.turns}
        assert all((batch.labels[row, end:] == IGNORED).all() for row, end in lasts.items())


def test_reasoning_names_the_tool_and_says_if_it_is_missing() -> None:
    form = FORMS[0]
    offered, missing = (form.draw(random.Random(0), tools, held_out=True) for tools in (TOOLS, ()))
    assert thought(offered) == f"I need {form.skill.name} for {offered.arguments['city']}."
    assert thought(missing) == f"I need {form.skill.name}, which is missing."
    assert missing.answer == NO_TOOL
