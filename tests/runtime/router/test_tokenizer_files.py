from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.errors import TokenizerError
from minisgl.router import tokenizer_files
from minisgl.router.tokenizer_files import fetch_files, local_files
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
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


def obtain(hashes: dict[str, str], files: Files, cache: Path, hosts: tuple[str, ...] = (ADDRESS,)) -> Path:
    return fetch_files(hashes, hosts, files.port, cache)


def test_fetched_files_are_cached(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    directory = obtain(hashes, files, tmp_path / "cache")
    assert hash_tokenizer_files(directory) == hashes
    requests = len(files.requests)
    assert obtain(hashes, files, tmp_path / "cache", ()) == directory
    assert len(files.requests) == requests


def test_a_template_in_a_folder_is_fetched(files: Files, model: Path, tmp_path: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    hashes = hash_tokenizer_files(model)
    directory = obtain(hashes, files, tmp_path / "cache")
    assert hash_tokenizer_files(directory) == hashes
    assert (directory / "additional_chat_templates" / "tool_use.jinja").is_file()


def test_damaged_files_are_fetched_again(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    directory = obtain(hashes, files, tmp_path / "cache")
    (directory / "tokenizer.json").write_text("{}")
    assert hash_tokenizer_files(obtain(hashes, files, tmp_path / "cache")) == hashes


def test_the_next_host_is_tried(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    assert obtain(hashes, files, tmp_path / "cache", ("127.0.0.3", ADDRESS)).is_dir()


def test_files_with_another_hash_are_refused(files: Files, model: Path, tmp_path: Path) -> None:
    hashes = hash_tokenizer_files(model)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"127\.0\.0\.2: tokenizer\.json does not have the hash") as refused:
        obtain(hashes, files, tmp_path / "cache")
    assert refused.value.code == "tokenizer_unavailable"
    assert not list((tmp_path / "cache").iterdir())


def test_files_that_are_too_large_are_refused(
    files: Files, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 100)
    with pytest.raises(TokenizerError, match="is larger than"):
        obtain(hash_tokenizer_files(model), files, tmp_path / "cache")


@pytest.mark.parametrize(
    "hashes",
    [{"../../etc/passwd": "0" * 64}, {"config.json": "0" * 64}, {"tokenizer.json": "../" * 20}],
    ids=["path", "name", "hash"],
)
def test_unsafe_names_and_hashes_are_refused(files: Files, tmp_path: Path, hashes: dict[str, str]) -> None:
    with pytest.raises(TokenizerError, match="cannot be fetched"):
        obtain(hashes, files, tmp_path / "cache")
    assert not files.requests


def test_the_least_recently_used_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "CACHED_FILE_SETS", 2)
    directories = []
    for number in range(3):
        model = write_directory(tmp_path / f"model{number}", byte_level(), config={"number": number})
        served = Files(ADDRESS, 0, model)
        directories.append(obtain(hash_tokenizer_files(model), served, tmp_path / "cache"))
        os.utime(directories[-1], (number, number))
        served.close()
    assert sorted((tmp_path / "cache").iterdir()) == sorted(directories[1:])


def test_the_checkpoints_own_files_are_used_only_with_the_engines_hashes(model: Path) -> None:
    hashes = hash_tokenizer_files(model)
    assert local_files(model, hashes) == model
    for other in ({**hashes, "tokenizer.json": "0" * 64}, {}):
        with pytest.raises(TokenizerError, match=r"differ .* \(.*tokenizer\.json.*\): restart the server"):
            local_files(model, other)
