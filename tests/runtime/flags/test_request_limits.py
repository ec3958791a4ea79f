"""Flags of access and limits reach the options of `serve`."""

from __future__ import annotations

import argparse

import pytest

from minisgl.flags.request_limits import access_options, add_access_arguments, add_limit_arguments, request_limits
from minisgl.frontend.config import RequestLimits


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_access_arguments(parser)
    add_limit_arguments(parser)
    return parser.parse_args(flags)


def test_defaults_are_those_of_the_frontend() -> None:
    assert request_limits(parsed()) == RequestLimits()
    assert access_options(parsed()) == {"api_keys": None, "cors_origins": (), "admin_port": None, "admin_keys": None}


def test_every_flag_counts() -> None:
    args = parsed(
        *("--max-waiting", "5", "--max-waiting-tokens", "6", "--max-in-flight-per-key", "7"),
        *("--queue-timeout", "8", "--request-timeout", "9", "--stall-timeout", "10"),
        *("--api-keys", "a", "--cors-origins", "https://a.example, https://b.example"),
        *("--admin-port", "0", "--admin-keys", "b"),
    )
    assert request_limits(args) == RequestLimits(
        waiting=5,
        waiting_tokens=6,
        in_flight_per_key=7,
        queue_seconds=8.0,
        request_seconds=9.0,
        stall_seconds=10.0,
    )
    assert access_options(args) == {
        "api_keys": "a",
        "cors_origins": ("https://a.example", "https://b.example"),
        "admin_port": 0,
        "admin_keys": "b",
    }


def test_a_limit_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--max-waiting", "0")
    assert "--max-waiting" in capsys.readouterr().err
