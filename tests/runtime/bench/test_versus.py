"""`benchmarks/versus.py` with two stub servers: the same requests for both, and the table and file of the results."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.openai_stub import Endpoint

SCRIPT = Path(__file__).parents[3] / "benchmarks/versus.py"


@pytest.fixture(scope="module")
def versus() -> Any:
    spec = importlib.util.spec_from_file_location("versus", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def servers() -> Iterator[list[Endpoint]]:
    made = [Endpoint(), Endpoint()]
    yield made
    for each in made:
        each.close()


def arguments(servers: list[Endpoint], *more: str) -> list[str]:
    urls = [f"--url={name}={each.url}" for name, each in zip(("ours", "theirs"), servers, strict=True)]
    lengths = ["--input-len", "8", "16", "--output-len", "3", "6", "--warm-up", "1", "--requests", "5"]
    return [*urls, *lengths, *more]


def test_all_servers_get_the_same_prompts_at_each_level_and_none_twice(versus: Any, servers: list[Endpoint]) -> None:
    assert versus.main(arguments(servers, "--concurrency", "1", "2", "--repeat", "2")) == 0
    ours, theirs = ([json.dumps(body["messages"]) for body in each.bodies] for each in servers)
    # Two levels twice, each with one request of the warm-up, of which the second one has eight requests.
    assert len(ours) == 2 * (1 + 5) + 2 * (1 + 8)
    assert sorted(ours) == sorted(theirs)
    assert len(set(ours)) == len(ours)
    assert all(body["stream"] and body["ignore_eos"] and body["model"] == "fake" for body in servers[0].bodies)


def test_a_level_is_the_number_of_requests_in_flight(versus: Any, servers: list[Endpoint]) -> None:
    assert versus.main(arguments(servers, "--concurrency", "3")) == 0
    # The connection of an answer that has ended may close after the next request has begun.
    assert all(each.most in (3, 4) for each in servers)


def test_the_table_has_a_line_for_each_server_and_level(
    versus: Any, servers: list[Endpoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "versus.json"
    assert versus.main(arguments(servers, "--concurrency", "1", "2", "--json", str(path))) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()[:6]
    assert heading.split()[:4] == ["concurrency", "server", "TTFT", "p50"]
    assert [line.split()[:2] for line in lines] == [["1", "ours"], ["1", "theirs"], ["2", "ours"], ["2", "theirs"]]
    figures = json.loads(path.read_text())["figures"]
    assert figures["ours_c1_completed"] == 5 and figures["theirs_c2_completed"] == 8
    assert 0 < figures["ours_c2_ttft_ms_p50"] <= figures["ours_c2_ttft_ms_p99"]


def test_a_failure_is_named_with_its_server(
    versus: Any, servers: list[Endpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].broken = True
    assert versus.main(arguments(servers, "--concurrency", "1")) == 1
    said = capsys.readouterr()
    assert "5 requests failed; the first error: theirs: " in said.err
    assert [line.split()[-1] for line in said.out.splitlines()[2:4]] == ["0", "5"]


def test_servers_have_names_of_their_own(versus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        versus.main(["--url", "a=http://127.0.0.1:1", "--url", "a=http://127.0.0.1:2"])
    assert "two servers have one name; use --url NAME=URL" in capsys.readouterr().err
    assert versus.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "cannot connect to http://127.0.0.1:1" in capsys.readouterr().err
