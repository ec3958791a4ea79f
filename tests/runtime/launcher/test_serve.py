"""`minisgl serve` with a tiny model: real processes, the official client, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from minisgl.toy.tiny import write_tiny_checkpoint
from support.frontend.served import Served, eventually
from support.launcher.kill_matrix import Client
from support.tiny_checkpoint import tiny_checkpoint

# Several processes for each test, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)

Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Served] = []
    # Not pytest's own directory: its path is too long for a socket below it.
    with tempfile.TemporaryDirectory(prefix="served-") as folder:

        def start(*flags: str, model: Path | None = None) -> Served:
            served = Served(model or tiny_checkpoint(), Path(folder), *flags)
            started.append(served)
            return served

        yield start
        for served in started:
            served.kill()


def _client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def _long_stream(served: Served, tokens: int = 1500) -> openai.Stream[openai.types.chat.ChatCompletionChunk]:
    return _client(served).chat.completions.create(
        model=_client(served).models.list().data[0].id,
        messages=[{"role": "user", "content": "Count"}],
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


@pytest.mark.parametrize("flags", [("--tp", "2"), ("--tokenizers", "0", "--no-overlap", "--cache", "naive")])
def test_a_server_under_load_answers_and_stops_cleanly(flags: tuple[str, ...], serve: Serve) -> None:
    served = serve(*flags, "--served-model-name", "tiny")
    served.wait_until_ready()
    answer = _client(served).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=7, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7

    stream = _long_stream(served, tokens=60)
    next(stream)
    children = [name for name in served.children() if not name.startswith("standby-")]
    assert len(children) == 3 + ("--tp" in flags) - ("--tokenizers" in flags)
    served.popen.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length", "a running request may finish"
    assert served.popen.wait(60) == 0
    assert served.children() == {}
    assert served.leftovers() == []


def test_fifty_streams_are_completed_after_sigterm(serve: Serve) -> None:
    served = serve("--served-model-name", "tiny", "--drain-timeout", "120", "--num-pages", "2048")
    served.wait_until_ready()
    clients = [Client(served.url, "tiny", stream=True, tokens=300) for _ in range(50)]
    eventually(lambda: all(client.chunks for client in clients), 180)
    assert all(client.is_alive() for client in clients), "some streams had ended before the signal"
    served.popen.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(100)
    assert [client.outcome for client in clients] == ["whole"] * 50
    assert served.popen.wait(60) == 0
    assert served.children() == {}
    assert served.leftovers() == []


def test_without_restarts_a_dead_rank_stops_streams_and_server(serve: Serve) -> None:
    served = serve("--max-restarts", "0", "--max-running", "1", "--served-model-name", "tiny")
    served.wait_until_ready()
    rank0 = served.children()["rank0"]
    stream = _long_stream(served)
    next(stream)
    waiting = [Client(served.url, "tiny", stream=stream) for stream in (True, False)]
    eventually(lambda: _waiting(served) == 2)
    os.kill(rank0, signal.SIGKILL)
    with pytest.raises(openai.OpenAIError):
        list(stream)
    for client in waiting:
        client.join(30)
        assert "engine_unavailable" in client.outcome, "no request waits for an engine that is not restarted"
    assert served.popen.wait(30) == 1
    assert served.status("/ready") == 0
    assert served.children() == {}
    assert served.leftovers() == []
    last = served.lines()[-1]
    assert last["extra"]["code"] == "restarts_exhausted"
    assert last["message"].startswith("rank0 (pid")


def test_sigterm_during_a_restart_ends_waiting_requests_at_once(serve: Serve) -> None:
    served = serve("--max-running", "1", "--served-model-name", "tiny", "--drain-timeout", "600")
    served.wait_until_ready()
    stream = _long_stream(served)
    next(stream)
    waiting = [Client(served.url, "tiny", stream=stream) for stream in (True, False)]
    eventually(lambda: _waiting(served) == 2)
    os.kill(served.children()["rank0"], signal.SIGKILL)
    eventually(lambda: any(line["message"].startswith("rank0 (pid") for line in served.lines()))
    assert all(client.is_alive() for client in waiting), "they wait for the restart"
    served.popen.send_signal(signal.SIGTERM)
    with pytest.raises(openai.OpenAIError):
        list(stream)
    for client in waiting:
        client.join(30)
    assert served.popen.wait(60) == 0
    assert served.children() == {} and served.leftovers() == []
    assert all("engine_unavailable" in client.outcome for client in waiting)


def _waiting(served: Served) -> int:
    """Requests in the engine's queue."""
    page = httpx.get(f"{served.url}/metrics", timeout=60).text
    return next(int(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:num_requests_waiting"))


def test_an_answer_does_not_go_on_after_the_weights_were_replaced(serve: Serve, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    served = serve(model=model)
    served.wait_until_ready()
    stream = _long_stream(served)
    next(stream)
    write_tiny_checkpoint(model, "qwen3", seed=1)
    os.kill(served.children()["rank0"], signal.SIGKILL)
    with pytest.raises(openai.APIError) as error:
        list(stream)
    assert error.value.code == "model_changed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_aborts_streams(number: signal.Signals, serve: Serve) -> None:
    served = serve("--drain-timeout", "600")
    served.wait_until_ready()
    stream = _long_stream(served)
    next(stream)
    served.popen.send_signal(number)
    eventually(lambda: any("a second signal ends them" in line["message"] for line in served.lines()))
    served.popen.send_signal(number)
    with pytest.raises(openai.OpenAIError):
        list(stream)
    assert served.popen.wait(5) == 0
    assert served.children() == {}


def _without_weights(checkpoint: Path) -> str:
    for weights in checkpoint.glob("*.safetensors"):
        weights.unlink()
    return f"{checkpoint} holds no weights"


def _with_weights_cut_off(checkpoint: Path) -> str:
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    return f"{weights} is cut off"


def _of_an_unknown_architecture(checkpoint: Path) -> str:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "NoSuchForCausalLM"))
    return "architecture NoSuchForCausalLM is not supported"


def _with_a_broken_tokenizer(checkpoint: Path) -> str:
    tokenizer = checkpoint / "tokenizer.json"
    os.truncate(tokenizer, 100)
    return f"{tokenizer} cannot be read"


def _with_a_template_that_makes_gigabytes(checkpoint: Path) -> str:
    (checkpoint / "chat_template.jinja").write_text("{{ 'a' * 3000000000 }}")
    return "the tokenizer files in"


def _with_a_billion_layers(checkpoint: Path) -> str:
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 10**9}))
    return "num_hidden_layers is 1000000000; at most 1024 are supported"


@pytest.mark.parametrize(
    "broken",
    [
        _without_weights,
        _with_weights_cut_off,
        _of_an_unknown_architecture,
        _with_a_broken_tokenizer,
        _with_a_template_that_makes_gigabytes,
        _with_a_billion_layers,
    ],
)
def test_a_broken_checkpoint_is_reported_in_one_line(
    broken: Callable[[Path], str], serve: Serve, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint(), checkpoint)
    words = broken(checkpoint)
    served = serve(model=checkpoint)
    assert served.popen.wait(60) == 1
    assert words in served.lines()[-1]["message"]
    assert "Traceback" not in served.log.read_text()


def test_a_port_in_use_is_reported_before_anything_is_loaded(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = serve("--port", str(taken.getsockname()[1]))
        assert served.popen.wait(60) == 1
    assert "cannot listen on 127.0.0.1 port" in served.log.read_text()
    assert "--port" in served.log.read_text()
