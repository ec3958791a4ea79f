"""Division of one step's tokens among clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zmq

from minisgl.scheduler.clients import Clients
from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import (
    WIRE_VERSION,
    FromScheduler,
    Hello,
    ModelCard,
    PromptLogprobs,
    TokenLogprobs,
    Tokens,
    Welcome,
)
from minisgl.wire.sockets import Codec, open_socket

CARD = ModelCard(name="m", revision="", max_model_len=64, vocab_size=97, eos_token_ids=(), tokenizer_hashes={})
CODEC: Codec[FromScheduler] = Codec(FromScheduler)


def _connected(context: zmq.Context[Any], clients: Clients, name: str) -> Any:
    socket = open_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(clients.address)
    socket.send(CODEC.encode(Hello(WIRE_VERSION, name)))
    assert list(clients.receive(60_000)) == []
    assert isinstance(CODEC.decode(socket.recv()), Welcome)
    return socket


def _scores(value: float) -> TokenLogprobs:
    return TokenLogprobs(np.float32(value).tobytes(), b"", b"")


def _output(client: list[int]) -> StepOutput:
    count = len(client)
    column = np.arange(count, dtype=np.int32)
    return StepOutput(
        ids=np.array([bytes([i]) * 16 for i in range(count)], "V16"),
        client=np.array(client, np.int32),
        index=column,
        tokens=column + 50,
        finish=np.zeros(count, np.uint8),
        cached=column,
        failures=[],
    )


def test_log_probabilities_are_sent_with_their_rows_to_their_client(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    clients = Clients(context, f"ipc://{tmp_path}/s", CARD, (0, 0))
    try:
        sockets = [_connected(context, clients, name) for name in "ab"]
        plain = _output([0, 1, 0])
        scored = _output([0, 1, 0, 1])
        scored.logprobs.update({1: _scores(1.0), 2: _scores(2.0)})
        prompt = PromptLogprobs(b"p" * 16, 1, _scores(7.0))
        scored.prompt_logprobs.append((1, prompt))
        clients.send_step(plain, 0.0)
        clients.send_step(scored, 0.0)
        alone = _output([1, 1])
        alone.logprobs.update({1: _scores(3.0)})
        clients.send_step(alone, 0.0)

        first = [CODEC.decode(sockets[0].recv()) for _ in range(2)]
        second = [CODEC.decode(sockets[1].recv()) for _ in range(4)]
        assert second.pop(1) == prompt
        tokens = [message for message in (*first, *second) if isinstance(message, Tokens)]
        assert [np.frombuffer(message.token, "<i4").tolist() for message in tokens] == [
            [50, 52],
            [50, 52],
            [51],
            [51, 53],
            [50, 51],
        ]
        expected = [{}, {1: _scores(2.0)}, {}, {0: _scores(1.0)}, {1: _scores(3.0)}]
        assert [message.logprobs for message in tokens] == expected
    finally:
        clients.close()
        context.destroy(linger=0)


def test_counts_of_predictions_are_sent_with_their_rows_to_their_client(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    clients = Clients(context, f"ipc://{tmp_path}/s", CARD, (0, 0))
    try:
        sockets = [_connected(context, clients, name) for name in "ab"]
        shared = _output([0, 1, 0, 1])
        shared.predicted.update({0: (1, 2), 2: (3, 4), 3: (5, 6)})
        clients.send_step(shared, 0.0)
        alone = _output([1, 1])
        alone.predicted.update({1: (7, 8)})
        clients.send_step(alone, 0.0)

        messages = [CODEC.decode(socket.recv()) for socket in (sockets[0], sockets[1], sockets[1])]
        predicted = [message.predicted for message in messages if isinstance(message, Tokens)]
        assert predicted == [{0: (1, 2), 1: (3, 4)}, {1: (5, 6)}, {1: (7, 8)}]
    finally:
        clients.close()
        context.destroy(linger=0)
