"""A real HTTP server and real tokenizer workers on a fake scheduler."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Mapping
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from tokenizers import Tokenizer

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.process import FrontendServer
from minisgl.parsing.names import Parsers
from minisgl.router.config import LocalEngine, TokenizerConfig
from minisgl.router.worker import run as run_worker
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.wire.messages import ModelCard
from support.frontend.fake_scheduler import WAIT_SECONDS, FakeScheduler, card
from support.tiny_tokenizers import CHATML, byte_level, write_directory

TOKENIZER = byte_level()
_DETECT = Parsers()
EOS = TOKENIZER.token_to_id("<|im_end|>")

TEMPLATE = (
    "{{ note or '' }}{% if messages[0].content == 'bad' %}{{ raise_exception('bad message') }}{% endif %}" + CHATML
)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


class FrontendStack:
    """`workers`: number of tokenizer processes; 0: a thread of the server. `model`: fields of the card."""

    def __init__(
        self,
        path: Path,
        workers: int = 0,
        *,
        wait: bool = True,
        template: str | None = None,
        max_model_len: int = 256,
        parsers: Parsers = _DETECT,
        tokenizer: Tokenizer | None = None,
        model: Mapping[str, Any] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        written = tokenizer or TOKENIZER
        write_directory(path / "model", written, chat_template=template or TEMPLATE, generation_config=generation)
        self.path = path
        self._max_model_len = max_model_len
        self._model = model
        self.scheduler_address = f"ipc://{path}/scheduler"
        self.scheduler = FakeScheduler(self.scheduler_address, self.card("org/tiny"))
        addresses = tuple(f"ipc://{path}/text{n}" for n in range(max(workers, 1)))
        self._tokenizers = [
            TokenizerConfig(
                engines=LocalEngine(scheduler_address=self.scheduler_address, model=str(path / "model")),
                frontend_address=address,
                name=f"tokenizer{n}",
                parsers=parsers,
            )
            for n, address in enumerate(addresses)
        ]
        self.workers: list[SpawnProcess] = []
        for n in range(workers):
            self.start_worker(n)
        self.server = FrontendServer(
            FrontendConfig(
                port=0, tokenizer_addresses=addresses, tokenizer=None if workers else self._tokenizers[0], **config
            )
        )
        listening = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(lambda _: listening.set(),))
        self._thread.start()
        assert listening.wait(WAIT_SECONDS)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=WAIT_SECONDS)
        if wait:
            self.wait_until_ready()

    def card(self, name: str) -> ModelCard:
        """A model with the tokenizer files of this server."""
        hashes = hash_tokenizer_files(self.path / "model")
        return card(name, self._max_model_len, tokenizer_hashes=hashes, **self._model)

    def start_worker(self, number: int) -> None:
        process = multiprocessing.get_context("spawn").Process(target=run_worker, args=(self._tokenizers[number],))
        process.start()
        self.workers.append(process)

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"

    def wait_until_ready(self, ready: bool = True) -> httpx.Response:
        """Poll as a kubelet does."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            response = self.http.get("/ready")
            if (response.status_code == 200) == ready:
                return response
            # The workers that it waits for need the processor more than this loop does.
            time.sleep(0.02)
        raise AssertionError(f"/ready still responds {response.status_code}: {response.text}")

    def wait_until_served(self, served: bool = True) -> None:
        """Wait until a model is served, or none is: a server without one is ready, because it holds requests."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (self.http.get("/v1/models").status_code == 200) != served:
            assert time.monotonic() < deadline, "the engine was not found, or its loss was not noticed"
            time.sleep(0.02)

    def join(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.http.close()
        self.server.stop()
        self.server.stop()
        self.join()
        for worker in self.workers:
            worker.terminate()
            worker.join(WAIT_SECONDS)
        self.scheduler.close()
