"""`minisgl models fetch` with a Hub that works, and with one that fails."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import socket
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
from minisgl.errors import HubError
from minisgl.hub import fetch as model_fetch
from minisgl.hub.fetch import fetch
from minisgl.hub.fetch_error import FetchError
from minisgl.hub.files import RemoteFile, files_to_download
from minisgl.hub.repository import Source
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
    (directory / "README.md").write_text("not needed by a server")
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


class Published(list[FetchStatus]):
    """Published statuses, in order."""

    def __call__(self, status: FetchStatus) -> None:
        self.append(status)


def run_fetch(hub: FakeHub, directory: Path, revision: str = "main", repository: str = REPOSITORY) -> Published:
    published = Published()
    endpoint: str = hub.url  # type: ignore[attr-defined]
    published(fetch(Source(repository=repository, revision=revision, endpoint=endpoint), directory, published))
    return published


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_complete(directory: Path, checkpoint: Path, repository: Repository) -> None:
    found = files_of(directory)
    record = json.loads(found.pop("minisgl-fetch.json"))
    assert record.pop("files").keys() == found.keys()
    assert record == {"repository": REPOSITORY, "revision": "main", "commit": repository.commit, "owner": ""}
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


def test_a_checkpoint_is_fetched_and_its_progress_published(
    hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository
) -> None:
    published = run_fetch(hub, tmp_path / "model")
    assert_complete(tmp_path / "model", checkpoint, repository)
    assert published[0].phase == "Resolving"
    assert published[-1] == FetchStatus(phase="Done", percent=100, commit=repository.commit)
    percents = [status.percent for status in published]
    assert percents == sorted(percents)
    assert any(0 < percent < 100 for percent in percents)


def test_chat_templates_and_modules_in_folders_are_fetched(hub: FakeHub, tmp_path: Path, checkpoint: Path) -> None:
    modules = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    for name in (*modules, "2_Dense/pytorch_model.bin", "onnx/model.safetensors"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text(name)
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    run_fetch(hub, tmp_path / "model")
    assert {name: (tmp_path / "model" / name).read_text() for name in modules} == {name: name for name in modules}
    assert not (tmp_path / "model" / "2_Dense" / "pytorch_model.bin").exists()
    assert not (tmp_path / "model" / "onnx").exists()
    assert (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "model" / "original").exists()


def test_what_pools_the_texts_is_fetched_with_the_model(hub: FakeHub, tmp_path: Path, checkpoint: Path) -> None:
    wanted = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    others = ["2_Dense/pytorch_model.bin", "3_Normalize/README.md", "onnx/config.json", "0_Transformer/a/config.json"]
    for name in (*wanted, *others):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(name)
    run_fetch(hub, tmp_path / "model")
    found = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").glob("*/*") if path.is_file()}
    assert found == {*wanted}


class HostileRepository(Repository):
    """Lists files outside of its directory, as a malicious mirror may."""

    def names(self) -> list[str]:
        folder = "additional_chat_templates"
        return [*super().names(), f"{folder}/../../outside.jinja", f"{folder}/deep/er.jinja"]


def test_no_file_is_written_outside_of_the_checkpoint(hub: FakeHub, tmp_path: Path, checkpoint: Path) -> None:
    (checkpoint / "additional_chat_templates" / "deep").mkdir(parents=True)
    (checkpoint / "additional_chat_templates" / "deep" / "er.jinja").write_text("{{ tools }}")
    (checkpoint.parent / "outside.jinja").write_text("{{ tools }}")
    hub.repositories[REPOSITORY] = HostileRepository(checkpoint)
    endpoint: str = hub.url  # type: ignore[attr-defined]
    _, files = Source(repository=REPOSITORY, revision="main", endpoint=endpoint).listing()
    assert {Path(file.name).parent for file in files} == {Path()}


def test_an_existing_checkpoint_is_not_fetched_again(hub: FakeHub, tmp_path: Path, repository: Repository) -> None:
    run_fetch(hub, tmp_path / "model")
    requests = hub.requests.total()
    assert run_fetch(hub, tmp_path / "model") == [FetchStatus(phase="Done", percent=100, commit=repository.commit)]
    assert hub.requests.total() == requests


def test_an_interrupted_download_is_resumed(
    hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository
) -> None:
    repository.broken_downloads = 3
    run_fetch(hub, tmp_path / "model")
    assert_complete(tmp_path / "model", checkpoint, repository)


def test_a_second_fetch_resumes_the_files_of_a_failed_one(
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
    # The second file may not have been requested when the first one failed.
    repository.broken_downloads = 0
    published = run_fetch(hub, tmp_path / "model")
    assert_complete(tmp_path / "model", checkpoint, repository)
    assert published[-1].phase == "Done"


def test_files_with_a_wrong_hash_are_never_kept(hub: FakeHub, tmp_path: Path, repository: Repository) -> None:
    repository.corrupt = True
    with pytest.raises(FetchError, match="its hash is wrong") as failed:
        run_fetch(hub, tmp_path / "model")
    assert failed.value.code == "Unreachable"
    assert not (tmp_path / "model").exists()
    assert not [path for partial in tmp_path.glob("model.partial-*") for path in partial.glob("*.safetensors")]


def test_a_rate_limited_fetch_waits_and_retries(hub: FakeHub, tmp_path: Path, repository: Repository) -> None:
    repository.too_many_requests = 2
    published = run_fetch(hub, tmp_path / "model")
    (waiting,) = {status.message for status in published if status.reason == "RateLimited"}
    assert "limits our requests" in waiting
    reasons = [reason for reason, _ in itertools.groupby(status.reason for status in published)]
    assert reasons == ["", "RateLimited", ""], "a retry with the same failure publishes no new status"
    assert (published[-1].phase, published[-1].reason) == ("Done", "")


def test_the_wait_for_a_rate_limit_is_bounded(
    hub: FakeHub, tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_MAX_RATE_LIMIT_SECONDS", 0.5)
    repository.too_many_requests = 1000
    with pytest.raises(FetchError) as failed:
        run_fetch(hub, tmp_path / "model")
    assert (failed.value.code, failed.value.is_retryable) == ("RateLimited", True)


def test_the_token_is_sent_to_the_hub_but_not_to_its_storage(
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
def test_a_missing_repository_or_revision_is_permanent(
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


def test_a_repository_without_weights_is_rejected(hub: FakeHub, tmp_path: Path, checkpoint: Path) -> None:
    for weights in checkpoint.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(FetchError, match=r"not a servable checkpoint: it needs config\.json and \*\.safetensors$"):
        run_fetch(hub, tmp_path / "model")
    (checkpoint / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(FetchError, match="has GGUF, which is not supported"):
        run_fetch(hub, tmp_path / "model")


def test_an_unreachable_hub_is_retryable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "_FIRST_WAIT_SECONDS", 0.01)
    source = Source(repository=REPOSITORY, revision="main", endpoint="http://127.0.0.1:1")
    with pytest.raises(FetchError) as failed:
        fetch(source, tmp_path / "model", Published())
    assert (failed.value.code, failed.value.is_retryable) == ("Unreachable", True)


def test_a_hub_that_keeps_silent_is_reported_while_the_fetch_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_SILENCE_SECONDS", 0.01)
    monkeypatch.setattr(model_fetch, "_MAX_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reported = threading.Event()

        def publish(status: FetchStatus) -> None:
            if "has not answered for" in status.message and status.reason == "Unreachable":
                reported.set()

        def hang_up() -> None:
            connection, _ = silent.accept()
            reported.wait(60)
            connection.close()

        hub = threading.Thread(target=hang_up)
        hub.start()
        source = Source(repository=REPOSITORY, revision="main", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(FetchError):
            fetch(source, tmp_path / "model", publish)
        hub.join()
    assert reported.is_set()


def test_nothing_is_fetched_offline(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set") as failed:
        run_fetch(hub, tmp_path / "model")
    assert failed.value.code == "hub_offline"
    assert hub.requests.total() == 0


def test_too_little_space_is_detected_before_the_download(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(FetchError, match=r"6\.0 MiB more, and .* has 1\.0 MiB free") as failed:
        run_fetch(hub, tmp_path / "model")
    assert failed.value.code == "NoSpace"
    assert not hub.downloads(REPOSITORY)


def test_two_concurrent_fetches_download_once(
    hub: FakeHub, tmp_path: Path, checkpoint: Path, repository: Repository
) -> None:
    repository.bytes_per_second = 6 << 20
    threads = [threading.Thread(target=run_fetch, args=(hub, tmp_path / "model")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_complete(tmp_path / "model", checkpoint, repository)
    assert hub.downloads(REPOSITORY) == 2


def test_weights_in_a_second_format_are_not_downloaded() -> None:
    def file(name: str) -> RemoteFile:
        return RemoteFile(name=name, size=1, digest="", is_large=True)

    own = [file("consolidated.safetensors"), file("config.json"), file("pytorch_model.bin")]
    assert [one.name for one in files_to_download(own)] == ["consolidated.safetensors", "config.json"]
    both = [*own, file("model.safetensors")]
    assert [one.name for one in files_to_download(both)] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("name", "status"), [(REPOSITORY, 0), ("org/none", 2)])
def test_the_command_prints_its_final_status(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, status: int
) -> None:
    log = tmp_path / "termination-log"
    url: str = hub.url  # type: ignore[attr-defined]
    command = ["models", "fetch", name, str(tmp_path / "model"), "--endpoint", url, "--termination-log", str(log)]
    assert main(command) == status
    status_json: dict[str, Any] = json.loads(log.read_text())
    assert json.loads(capsys.readouterr().out) == status_json
    assert status_json["kind"] == "fetch"
    assert (status_json["phase"], status_json["percent"], status_json["reason"]) == (
        ("Failed", 0, "AuthRequired") if status else ("Done", 100, "")
    )


def test_a_directory_that_cannot_be_read_is_reported(hub: FakeHub, tmp_path: Path) -> None:
    # Its name is too long: the tests may run as root, whom permissions do not stop.
    with pytest.raises(HubError, match="too long") as unusable:
        run_fetch(hub, tmp_path / ("x" * 300))
    assert unusable.value.code == "directory_unusable"


def test_the_process_reports_its_progress_and_stops_on_sigterm(
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
