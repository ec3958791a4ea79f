"""A server whose GPU never finishes a kernel is restarted, and the request that met it is answered."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from support.frontend.served import Served
from support.launcher.hanging_ranks import DIRECTORY
from support.launcher.kill_matrix import Client

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_endless_kernel_is_ended_with_its_engine(
    ranks: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("each rank needs a device")
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    # Not pytest's own directory: its path is too long for a socket below it.
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        served = Served(
            checkpoint,
            Path(folder),
            *("--served-model-name", "model", "--stall-timeout", "5", "--device", "cuda"),
            *("--tp", str(ranks)),
            program="support.launcher.hanging_ranks",
        )
        try:
            served.wait_until_ready()
            # With two ranks, rank 0 waits for the other one in a collective.
            (tmp_path / f"kernel-{ranks - 1}").touch()
            clients = [Client(served.url, "model", stream=stream, tokens=40) for stream in (True, False)]
            for client in clients:
                client.join(180)
            following = Client(served.url, "model", stream=True, tokens=40)
            following.join(60)
            log = served.log.read_text()
            messages = [line["message"] for line in served.lines() if line["process"] == "launcher"]
        finally:
            served.kill()
    assert [client.outcome for client in (*clients, following)] == ["whole"] * 3, log
    assert any("a step has not finished" in message for message in messages), log
    assert sum(message.startswith("restarting engine") for message in messages) == 1
    print("\n".join(messages))
