"""`minisgl models fetch` against a Hub that behaves, and one that does not."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_hub import FakeHub, Repository
from minisgl.cli.main import main
from minisgl.hub import fetch as model_fetch
from minisgl.hub.errors import FetchError
from minisgl.hub.fetch import fetch
from minisgl.hub.repository import HubFile, Source, files_to_download
from minisgl.wire.status import FetchStatus
from support.launcher.ports import free_port

REPOSITORY = "org/tiny"
LARGE_BYTES = 3 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("no part of what is served")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("{}")
    source = random.Random(1)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"):
        (directory / name).write_bytes(source.randbytes(LARGE_BYTES))
    return directory


@pytest.fixture
def repository(checkpoint: Path) -> Repository:
    return Repository(checkpoint, revisions=("main", "v1"))


@pytest.fixture
def hub(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(model_fetch, "_FIRST_WAIT_SECONDS", 0.01)
    fake = FakeHub({REPOSITORY: repository})
    with fake.serve("127.0.0.1", "127.0.0.2") as url:
        fake.url = url  # type: ignore[attr-defined]
        yield fake


class Told(list[FetchStatus]):
    """What was published, in order."""

    def __call__(self, status: FetchStatus) -> None:
        self.append(status)


def run_fetch(hub: FakeHub, directory: Path, revision: str = "main", repository: str = REPOSITORY) -> Told:
    told = Told()
    endpoint: str = hub.url  # type: ignore[attr-defined]
    told(fetch(Source(repository=repository, revision=revision, endpoint=endpoint), directory, told))
    return told


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_complete(directory: Path, checkpoint: Path, repository: Repository) -> None:
    found = files_of(directory)
    record = json.loads(found.pop("minisgl-fetch.json"))
    assert record == {"repository": REPOSITORY, "revision": "main", "commit": repository.commit}
    expected = files_of_top_level(checkpoint)
    assert found == {name: expected[name] for name in found}
    assert sorted(found) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ]
    assert not list(directory.parent.glob("*.partial-*"))


def files_of_top_level(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_checkpoint_and_what_is_said_on_the_way(
    hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository
) -> None:
    told = run_fetch(hub, tmp_path / "model")
    assert_complete(tmp_path / "model", checkpoint, repository)
    assert told[0].phase == "Resolving"
    assert told[-1] == FetchStatus(phase="Done", percent=100, commit=repository.commit)
    percents = [status.percent for status in told]
    assert percents == sorted(percents)
    assert any(0 < percent < 100 for percent in percents)


def test_what_is_there_is_not_fetched_again(hub: FakeHub, tmp_path: Path, repository: Repository) -> None:
    run_fetch(hub, tmp_path / "model")
    requests = hub.requests.total()
    assert run_fetch(hub, tmp_path / "model") == [FetchStatus(phase="Done", percent=100, commit=repository.commit)]
    assert hub.requests.total() == requests


def test_a_download_that_breaks_off_goes_on_where_it_ended(
    hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository
) -> None:
    repository.broken_downloads = 3
    run_fetch(hub, tmp_path / "model")
    assert_complete(tmp_path / "model", checkpoint, repository)


def test_another_try_resumes_what_the_last_one_left(
    hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    repository.broken_downloads = 2
    with pytest.raises(FetchError) as failed:
        run_fetch(hub, tmp_path / "model")
    assert failed.value.code == "Unreachable"
    assert not (tmp_path / "model").exists()
    (partial,) = tmp_path.glob("model.partial-*")
    (tmp_path / "model.partial-0123456789ab").mkdir()
    assert any(part.stat().st_size for part in partial.glob("*.part"))
    # The second file may have been given up before it was asked for.
    repository.broken_downloads = 0
    told = run_fetch(hub, tmp_path / "model")
    assert_complete(tmp_path / "model", checkpoint, repository)
    assert told[-1].phase == "Done"


def test_other_content_than_the_repository_names_is_never_kept(
    hub: FakeHub, tmp_path: Path, repository: Repository
) -> None:
    repository.corrupt = True
    with pytest.raises(FetchError, match="its hash is wrong") as failed:
        run_fetch(hub, tmp_path / "model")
    assert failed.value.code == "Unreachable"
    assert not (tmp_path / "model").exists()
    assert not [path for partial in tmp_path.glob("model.partial-*") for path in partial.glob("*.safetensors")]


def test_a_limit_is_waited_for(hub: FakeHub, tmp_path: Path, repository: Repository) -> None:
    repository.too_many_requests = 2
    told = run_fetch(hub, tmp_path / "model")
    (waiting,) = {status.message for status in told if status.reason == "RateLimited"}
    assert "limits our requests" in waiting
    reasons = [reason for reason, _ in itertools.groupby(status.reason for status in told)]
    assert reasons == ["", "RateLimited", ""], "a try that ends as the last one did is no news"
    assert (told[-1].phase, told[-1].reason) == ("Done", "")


def test_a_limit_is_not_waited_for_for_ever(
    hub: FakeHub, tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_MAX_RATE_LIMIT_SECONDS", 0.5)
    repository.too_many_requests = 1000
    with pytest.raises(FetchError) as failed:
        run_fetch(hub, tmp_path / "model")
    assert (failed.value.code, failed.value.is_retryable) == ("RateLimited", True)


def test_a_token_is_shown_to_the_hub_and_not_to_its_storage(
    hub: FakeHub, tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.token = "hf_secret"
    with pytest.raises(FetchError, match="give a token") as failed:
        run_fetch(hub, tmp_path / "model")
    assert (failed.value.code, failed.value.is_retryable) == ("AuthRequired", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run_fetch(hub, tmp_path / "model")
    assert hub.downloads(REPOSITORY) == 2


@pytest.mark.parametrize(
    ("repository_name", "revision", "token", "code"),
    [
        ("org/none", "main", "", "AuthRequired"),
        ("org/none", "main", "hf_some", "NotFound"),
        (REPOSITORY, "v2", "", "NotFound"),
        ("no name at all", "main", "", "NotFound"),
    ],
)
def test_what_is_not_there(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    repository_name: str,
    revision: str,
    token: str,
    code: str,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(FetchError) as failed:
        run_fetch(hub, tmp_path / "model", revision, repository_name)
    assert (failed.value.code, failed.value.is_retryable) == (code, False)


def test_a_repository_without_weights_is_no_checkpoint(hub: FakeHub, tmp_path: Path, checkpoint: Path) -> None:
    for weights in checkpoint.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(FetchError, match="not a servable checkpoint"):
        run_fetch(hub, tmp_path / "model")


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "_FIRST_WAIT_SECONDS", 0.01)
    source = Source(repository=REPOSITORY, revision="main", endpoint="http://127.0.0.1:1")
    with pytest.raises(FetchError) as failed:
        fetch(source, tmp_path / "model", Told())
    assert (failed.value.code, failed.value.is_retryable) == ("Unreachable", True)


def test_too_little_space_is_known_before_the_first_byte(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(FetchError, match=r"6\.0 MiB more, and .* has 1\.0 MiB free") as failed:
        run_fetch(hub, tmp_path / "model")
    assert failed.value.code == "NoSpace"
    assert not hub.downloads(REPOSITORY)


def test_two_at_once_fetch_it_once(hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository) -> None:
    repository.bytes_per_second = 6 << 20
    threads = [threading.Thread(target=run_fetch, args=(hub, tmp_path / "model")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_complete(tmp_path / "model", checkpoint, repository)
    assert hub.downloads(REPOSITORY) == 2


def test_weights_in_the_makers_own_format_are_left_out() -> None:
    def file(name: str) -> HubFile:
        return HubFile(name=name, size=1, digest="", is_large=True)

    own = [file("consolidated.safetensors"), file("config.json"), file("pytorch_model.bin")]
    assert [one.name for one in files_to_download(own)] == ["consolidated.safetensors", "config.json"]
    both = [*own, file("model.safetensors")]
    assert [one.name for one in files_to_download(both)] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("name", "status"), [(REPOSITORY, 0), ("org/none", 2)])
def test_the_command_ends_with_its_status(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, status: int
) -> None:
    log = tmp_path / "termination-log"
    url: str = hub.url  # type: ignore[attr-defined]
    command = ["models", "fetch", name, str(tmp_path / "model"), "--endpoint", url, "--termination-log", str(log)]
    assert main(command) == status
    said: dict[str, Any] = json.loads(log.read_text())
    assert json.loads(capsys.readouterr().out) == said
    assert said["kind"] == "fetch"
    assert (said["phase"], said["percent"], said["reason"]) == (
        ("Failed", 0, "AuthRequired") if status else ("Done", 100, "")
    )


def test_the_process_tells_its_progress_and_ends_at_once_when_told_to(
    hub: FakeHub, tmp_path: Path, repository: Repository
) -> None:
    repository.bytes_per_second = 1 << 20
    url: str = hub.url  # type: ignore[attr-defined]
    command = ["models", "fetch", REPOSITORY, str(tmp_path / "model"), "--endpoint", url, "--control-port"]
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "runtime")}
    process = subprocess.Popen([sys.executable, "-m", "minisgl", *command, str(port)], env=environment)
    try:
        deadline = time.monotonic() + 90
        while True:
            assert time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                    status = json.loads(answer.read())
            except OSError:
                status = {}
            if status.get("percent"):
                break
            time.sleep(0.02)
        assert (status["phase"], status["commit"]) == ("Downloading", repository.commit)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.glob("model.partial-*"))
