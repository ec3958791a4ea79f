"""`minisgl models check` of a model on the Hub, without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import FakeHub, Repository
from minisgl.cli.main import main
from minisgl.hub import headers
from minisgl.hub.headers import fetch_headers
from minisgl.hub.repository import Source
from minisgl.models.checkpoint import stored_tensors
from minisgl.toy.tiny import write_tiny_checkpoint

NAME = "owner/tiny"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "checkpoint", "qwen3-moe")


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a Hub with the checkpoint."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    with FakeHub({NAME: Repository(checkpoint)}).serve("127.0.0.1", "127.0.0.2") as url:
        # What HF_ENDPOINT sets at the start of the client library.
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield url


def test_a_model_on_the_hub_is_checked_as_its_directory_is(
    hub: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "check", str(checkpoint)]) == 0
    local = capsys.readouterr().out
    assert main(["models", "check", NAME]) == 0
    assert capsys.readouterr().out == local
    assert "can be served" in local


@pytest.mark.parametrize("at_once", [16, 1 << 20])
def test_of_weights_only_the_headers_are_read(
    at_once: int, hub: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "_FIRST_BYTES", at_once)
    found = tmp_path / "found"
    fetch_headers(Source(repository=NAME, revision="main", endpoint=hub), found)
    expected, tensors = stored_tensors(checkpoint), stored_tensors(found)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape, tensor.place) == expected[name][1:4]
        with tensor.file.open("rb") as file:
            file.seek(tensor.place[0])
            assert not any(file.read(64)), "a tensor was written"


def test_a_broken_header_on_the_hub_is_a_problem(
    hub: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = min(checkpoint.glob("*.safetensors"))
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    assert main(["models", "check", NAME]) == 1
    assert "(corrupt_checkpoint)" in capsys.readouterr().out


def test_findings_name_the_model_on_the_hub(hub: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert main(["models", "check", NAME]) == 1
    [problem] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert NAME in problem
    assert "/tmp" not in problem and "minisgl-check-" not in problem


@pytest.mark.parametrize(
    ("offline", "words"),
    [(False, "denies access to owner/none"), (True, "owner/none at revision main is not in the Hub's cache")],
)
def test_a_model_that_cannot_be_looked_up_is_an_error(
    offline: bool, words: str, hub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    assert main(["models", "check", "owner/none"]) != 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("minisgl: error: ")
    assert words in line
