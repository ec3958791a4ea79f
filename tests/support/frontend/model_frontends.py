"""Real frontends of one model in this process, each connected to all replicas: fake pods with a given load."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx
import msgspec

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.process import FrontendServer
from minisgl.router.config import EngineDiscovery, TokenizerConfig
from minisgl.router.worker import Worker
from support.cluster.fake_pods import Pods
from support.frontend.fake_scheduler import STATUS, WAIT_SECONDS
from support.tiny_tokenizers import CHATML, byte_level, write_directory

_LOAD: Final = re.compile(r'^vllm:num_requests_(?:running|waiting)\{model_name="(.*?)".*\} (\S+)$', re.MULTILINE)


class ModelFrontends:
    """`count` frontends of the model `name`, at first without replicas."""

    def __init__(self, path: Path, name: str, count: int) -> None:
        self._name = name
        self._pods = Pods()
        self._model = write_directory(path / "model", byte_level(), chat_template=CHATML)
        engines = EngineDiscovery(
            host=f"{name}-leaders",
            scheduler_port=self._pods.scheduler_port,
            control_port=self._pods.control_port,
            cache=str(path / "cache"),
        )
        self._frontends = [
            _Frontend(TokenizerConfig(engines=engines, frontend_address=f"ipc://{path}/{n}", names=(name,)), self._pods)
            for n in range(count)
        ]

    def metrics(self, loads: Sequence[tuple[int, int]]) -> list[str]:
        """Metrics of each frontend, once all report replicas with these numbers of running and waiting requests.
        Replicas are added as needed."""
        while len(self._pods.pods) < len(loads):
            self._pods.start(len(self._pods.pods), self._model)
        for pod, (running, waiting) in zip(self._pods.pods, loads, strict=True):
            pod.scheduler.status = msgspec.structs.replace(STATUS, running=running, waiting=waiting)
        # Until the tokenizer is loaded, a frontend reports the load without the name.
        wanted = [(self._name, str(sum(column))) for column in zip(*loads, strict=True)]
        return [frontend.metrics(wanted) for frontend in self._frontends]

    def close(self) -> None:
        for frontend in self._frontends:
            frontend.close()
        self._pods.close()


class _Frontend:
    """A server and its tokenizer worker, each in a thread."""

    def __init__(self, tokenizer: TokenizerConfig, pods: Pods) -> None:
        self._worker = Worker(tokenizer, pods.resolve)
        self._server = FrontendServer(FrontendConfig(port=0, tokenizer_addresses=(tokenizer.frontend_address,)))
        listening = threading.Event()
        self._working = threading.Thread(target=self._worker.serve)
        self._serving = threading.Thread(target=self._server.run, args=(lambda _: listening.set(),))
        self._working.start()
        self._serving.start()
        assert listening.wait(WAIT_SECONDS)

    def metrics(self, wanted: list[tuple[str, str]]) -> str:
        """Metrics, once they report these: the model's name and the number of running and of waiting requests."""
        deadline = time.monotonic() + WAIT_SECONDS
        with httpx.Client(base_url=f"http://127.0.0.1:{self._server.port}", timeout=WAIT_SECONDS) as http:
            while True:
                page = http.get("/metrics").text
                if _LOAD.findall(page) == wanted:
                    return page
                assert time.monotonic() < deadline, f"not {wanted}: {_LOAD.findall(page)}"
                time.sleep(0.02)

    def close(self) -> None:
        # The second call does not wait for requests.
        self._server.stop()
        self._server.stop()
        self._serving.join(WAIT_SECONDS)
        self._worker.stop()
        self._working.join(WAIT_SECONDS)
        assert not self._serving.is_alive() and not self._working.is_alive()
