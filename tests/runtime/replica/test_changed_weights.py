"""A replica that is replaced in the middle of an answer, by one with other weights or with other flags."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minisgl.router.config import EngineDiscovery, TokenizerConfig
from minisgl.router.worker import Worker
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.toy.tiny import write_tiny_checkpoint
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import Texts, WorkerState
from support.frontend.fake_frontend import FakeFrontend
from support.frontend.fake_scheduler import WAIT_SECONDS
from support.launcher.engine_pods import Pods
from support.tiny_checkpoint import tiny_checkpoint

# Two starts of an engine, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)

_TOKENS = 1000
_NAME = ("--served-model-name", "tiny")


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own directory: its path is too long for a socket below it.
    with tempfile.TemporaryDirectory(prefix="changed-") as path:
        yield Path(path)


@contextmanager
def _worker(folder: Path, pods: Pods) -> Iterator[FakeFrontend]:
    """A tokenizer worker for these pods, and the frontend that it serves."""
    frontend = FakeFrontend(f"ipc://{folder}/frontend")
    engines = EngineDiscovery(
        host="leaders",
        scheduler_port=pods.ports["scheduler"],
        control_port=pods.ports["control"],
        cache=str(folder / "cache"),
    )
    config = TokenizerConfig(engines=engines, frontend_address=f"ipc://{folder}/frontend", queue_seconds=240.0)
    worker = Worker(config, lambda _: frozenset({"127.0.0.1"}))
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        yield frontend
    finally:
        worker.stop()
        thread.join(WAIT_SECONDS)
        frontend.close()


@contextmanager
def _replica(folder: Path, model: Path, *flags: str, ports: dict[str, int] | None = None) -> Iterator[Pods]:
    folder.mkdir()
    pods = Pods(folder, model, "--tp", "1", *flags)
    pods.ports = ports or pods.ports
    pods.add()
    try:
        yield pods
    finally:
        pods.close()


@contextmanager
def _replaced_within_an_answer(folder: Path, model: Path, *flags: str) -> Iterator[tuple[FakeFrontend, bytes]]:
    """Begin an answer at a replica with the tiny checkpoint and kill that; another one takes its place."""
    with _replica(folder / "old", tiny_checkpoint(), *_NAME) as old, _worker(folder, old) as frontend:
        frontend.wait_for(WorkerState, lambda state: any(one.routable for one in state.replicas))
        request = frontend.generate(1, params=SamplingParams(max_tokens=_TOKENS, ignore_eos=True))
        frontend.wait_for(Texts)
        old.all[0].kill()
        with _replica(folder / "new", model, *flags, ports=old.ports):
            yield frontend, request


def test_an_answer_does_not_go_on_with_other_weights(folder: Path) -> None:
    other = write_tiny_checkpoint(folder / "model", "qwen3", seed=1)
    assert hash_tokenizer_files(other) == hash_tokenizer_files(tiny_checkpoint())
    with _replaced_within_an_answer(folder, other, *_NAME) as (frontend, request):
        _, failed = frontend.wait_for_end(request)
        assert failed.code == "model_changed"
        assert "the model's revision changed" in failed.message


def test_an_answer_goes_on_with_a_copy_of_the_weights_and_other_flags(folder: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint(), folder / "model", copy_function=shutil.copyfile)
    flags = ("--revision-label", "b", "--served-model-name", "other", "--max-running", "8", "--no-overlap")
    with _replaced_within_an_answer(folder, copy, *flags) as (frontend, request):
        _, finished = frontend.wait_for_end(request)
        assert (finished.completion_tokens, finished.continued) == (_TOKENS, 1)
