"""Leader pods of a model on loopback addresses: a fake scheduler and the control port with its files."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.wire.messages import FromScheduler, ModelCard, Submit
from support.frontend.fake_scheduler import FakeScheduler, card
from support.launcher.ports import free_port


class Pods:
    """Pods that listen on the same two ports, each at its own address. `addresses` are those of the DNS name."""

    def __init__(self) -> None:
        self.scheduler_port, self.control_port = free_port(), free_port()
        self.addresses: set[str] = set()
        self.pods: list[Pod] = []
        self.looked_up_in_vain = threading.Event()

    def resolve(self, _: str) -> frozenset[str]:
        if not self.addresses:
            self.looked_up_in_vain.set()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return frozenset(self.addresses)

    def start(
        self,
        number: int,
        model: Path,
        answer: Callable[[Submit], Sequence[FromScheduler]] = lambda _: (),
        *,
        epoch: tuple[int, int] = (1_700_000_000_000, 1),
        replica: str | None = None,
        **changes: Any,
    ) -> Pod:
        """Start the pod of replica `number` and add its address."""
        pod = Pod(self, f"127.0.0.{number + 2}", model, answer, epoch, replica or f"chat-r{number}", changes)
        self.addresses.add(pod.address)
        self.pods.append(pod)
        return pod

    def close(self) -> None:
        for pod in self.pods:
            pod.kill()


class Pod:
    def __init__(
        self,
        pods: Pods,
        address: str,
        model: Path,
        answer: Callable[[Submit], Sequence[FromScheduler]],
        epoch: tuple[int, int],
        replica: str,
        changes: dict[str, Any],
    ) -> None:
        self.address = address
        self._pods = pods
        self._model = card(tokenizer_hashes=hash_tokenizer_files(model), **changes)
        self._replica = replica
        self.files = Files(address, pods.control_port, model)
        self.scheduler = self._scheduler(answer, epoch)

    def _scheduler(self, answer: Callable[[Submit], Sequence[FromScheduler]], epoch: tuple[int, int]) -> FakeScheduler:
        return FakeScheduler(
            f"tcp://{self.address}:{self._pods.scheduler_port}",
            self._model,
            answer,
            epoch=epoch,
            replica=self._replica,
            revision="0123456789",
        )

    @property
    def model(self) -> ModelCard:
        return self._model

    def kill_engine(self) -> None:
        """Stop the engine; the pod keeps its address."""
        self.scheduler.close()

    def start_engine(self, answer: Callable[[Submit], Sequence[FromScheduler]], epoch: tuple[int, int]) -> None:
        self.scheduler = self._scheduler(answer, epoch)

    def drain(self) -> None:
        """Report `draining` from now on."""
        self.scheduler.status = msgspec.structs.replace(self.scheduler.status, draining=True)

    def kill(self) -> None:
        """Stop the pod; idempotent."""
        self.scheduler.close()
        self.files.close()


class Files:
    """Server of GET /files/NAME."""

    def __init__(self, address: str, port: int, model: Path) -> None:
        self.requests: list[str] = []
        self.fails = False
        """Answer 503."""
        files = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                files.requests.append(self.path)
                content = (model / self.path.removeprefix("/files/")).read_bytes()
                self.send_response(503 if files.fails else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((address, port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
