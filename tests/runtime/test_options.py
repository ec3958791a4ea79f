"""Options are derived from the fields of configuration structs."""

from __future__ import annotations

import argparse
from typing import Annotated, Literal, get_type_hints

import msgspec
import pytest
from msgspec import Meta

from minisgl.config import ATTENTION_BACKENDS, ConfigError, EngineArgs, EngineConfig, engine_config
from minisgl.flags.arguments import add_options, filled, option_values
from minisgl.options import option, options_of


class Example(msgspec.Struct, frozen=True, kw_only=True):
    hidden: int = 0
    kind: Annotated[Literal["b", "a"], option("the kind")] = "a"
    count: Annotated[Annotated[int, Meta(ge=1)] | None, option("how many", default="all")] = None
    share: Annotated[Annotated[float, Meta(gt=0, le=1)], option("the share", default="{:g} of it")] = msgspec.field(
        default=0.5, name="part"
    )
    eager: Annotated[bool, option("start early")] = True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_options(parser, Example())
    return parser


def test_name_type_range_choices_default_and_help_come_from_the_field() -> None:
    found = {each.name: each for each in options_of(Example(count=3))}
    assert list(found) == ["kind", "count", "part", "eager"]
    assert found["kind"].choices == ("b", "a"), "in the order of the declaration"
    assert (found["count"].type, found["count"].bounds.ge, found["count"].default) == (int, 1, 3)
    assert found["part"].help == "the share (default: 0.5 of it)"


def test_flags_fill_the_struct() -> None:
    assert filled(_parser().parse_args([]), Example(hidden=7)) == Example(hidden=7)
    args = _parser().parse_args(["--kind", "b", "--count", "2", "--part", "1", "--no-eager"])
    assert filled(args, Example()) == Example(kind="b", count=2, share=1.0, eager=False)
    assert option_values(args, Example()) == {"kind": "b", "count": 2, "part": 1.0, "eager": False}


@pytest.mark.parametrize("flags", ["--count 0", "--part 0", "--part 1.1", "--kind c", "--hidden 1", "--eager"])
def test_a_flag_accepts_what_the_field_accepts(flags: str) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(flags.split())


def test_keywords_of_llm_are_the_options_of_the_engine() -> None:
    types = get_type_hints(EngineConfig)
    options = {each.name: types[each.field] for each in options_of(EngineConfig(model=""))}
    assert get_type_hints(EngineArgs) == options


def test_the_attention_backends_that_flags_accept_exist() -> None:
    from minisgl.attention import select

    assert set(ATTENTION_BACKENDS) == {*select._PREFILL, *select._DECODE}


@pytest.mark.parametrize("name", ["model", "device", "rank", "nccl_host"])
def test_only_options_can_be_set_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown option"):
        engine_config("m", {name: 1})
