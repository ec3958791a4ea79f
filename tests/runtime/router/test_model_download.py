from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.router import model_download
from minisgl.router.model_download import obtain
from minisgl.tokenizer.errors import TokenizerError
from minisgl.tokenizer.model_files import hash_tokenizer_files
from support.cluster.fake_pods import Files
from support.tiny_tokenizers import byte_level, write_directory

ADDRESS = "127.0.0.2"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model", byte_level())


@pytest.fixture
def files(model: Path) -> Iterator[Files]:
    served = Files(ADDRESS, 0, model)
    yield served
    served.close()


def sources(files: Files) -> list[tuple[str, int]]:
    return [(ADDRESS, files.port)]


def test_what_was_fetched_once_is_there(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    directory = obtain(hashes, sources(files), tmp_path / "cache")
    assert hash_tokenizer_files(directory) == hashes
    requests = len(files.requests)
    assert obtain(hashes, [], tmp_path / "cache") == directory
    assert len(files.requests) == requests


def test_what_was_damaged_is_fetched_again(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    directory = obtain(hashes, sources(files), tmp_path / "cache")
    (directory / "tokenizer.json").write_text("{}")
    assert hash_tokenizer_files(obtain(hashes, sources(files), tmp_path / "cache")) == hashes


def test_the_next_source_is_asked(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    assert obtain(hashes, [("127.0.0.3", 1), *sources(files)], tmp_path / "cache").is_dir()


def test_other_content_than_was_named(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"127\.0\.0\.2: tokenizer\.json has another hash") as refused:
        obtain(hashes, sources(files), tmp_path / "cache")
    assert refused.value.code == "tokenizer_unavailable"
    assert not list((tmp_path / "cache").iterdir())


def test_too_large(files: Files, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_download, "MAX_FILE_BYTES", 100)
    with pytest.raises(TokenizerError, match="is larger than"):
        obtain(hash_tokenizer_files(model), sources(files), tmp_path / "cache")


@pytest.mark.parametrize(
    "hashes",
    [{"../../etc/passwd": "0" * 64}, {"config.json": "0" * 64}, {"tokenizer.json": "../" * 20}],
    ids=["path", "name", "hash"],
)
def test_names_and_hashes_that_nobody_should_send(files: Files, tmp_path: Path, hashes: dict[str, str]) -> None:
    with pytest.raises(TokenizerError, match="cannot be fetched"):
        obtain(hashes, sources(files), tmp_path / "cache")
    assert not files.requests


def test_what_was_used_longest_ago_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_download, "KEPT_SETS", 2)
    directories = []
    for number in range(3):
        model = write_directory(tmp_path / f"model{number}", byte_level(), config={"number": number})
        served = Files(ADDRESS, 0, model)
        directories.append(obtain(hash_tokenizer_files(model), sources(served), tmp_path / "cache"))
        os.utime(directories[-1], (number, number))
        served.close()
    assert sorted((tmp_path / "cache").iterdir()) == sorted(directories[1:])
