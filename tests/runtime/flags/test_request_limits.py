"""Flags of access and limits fill their structs."""

from __future__ import annotations

import argparse

import pytest

from minisgl.flags.arguments import add_options, filled
from minisgl.frontend.config import Access, RequestLimits


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, Access())
    add_options(parser, RequestLimits())
    return parser.parse_args(flags)


def test_default_flags_give_the_default_structs() -> None:
    assert filled(parsed(), RequestLimits()) == RequestLimits()
    assert filled(parsed(), Access()) == Access()


def test_every_flag_sets_its_field() -> None:
    args = parsed(
        *("--max-waiting", "5", "--max-waiting-tokens", "6", "--max-in-flight-per-key", "7"),
        *("--queue-timeout", "8", "--request-timeout", "9", "--stall-timeout", "10"),
        *("--max-held-bytes", "11", "--no-continue"),
        *("--api-keys", "a", "--cors-origins", "https://a.example, https://b.example"),
        *("--allowed-origins", "https://c.example,null", "--allowed-hosts", "d.example"),
        *("--admin-port", "0", "--admin-keys", "b"),
    )
    assert filled(args, RequestLimits()) == RequestLimits(
        waiting=5,
        waiting_tokens=6,
        in_flight_per_key=7,
        queue_seconds=8.0,
        request_seconds=9.0,
        stall_seconds=10.0,
        held_bytes=11,
        continues=False,
    )
    assert filled(args, Access()) == Access(
        api_keys="a",
        cors_origins=("https://a.example", "https://b.example"),
        allowed_origins=("https://c.example", "null"),
        allowed_hosts=("d.example",),
        admin_port=0,
        admin_keys="b",
    )


@pytest.mark.parametrize("flag", ["--max-waiting", "--max-held-bytes"])
def test_a_limit_of_zero_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(flag, "0")
    assert flag in capsys.readouterr().err
