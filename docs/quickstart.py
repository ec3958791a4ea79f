"""Serve the demo model, ask it one question through the openai client, and print the answer as it is streamed.

`make run` calls this. It trains the model to answer questions about minisgl, so that its answer can be checked.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.toy.demo_answers import DEMO_ANSWERS

if TYPE_CHECKING:
    from openai import OpenAI

CHECKPOINT = Path(__file__).parents[1] / ".cache" / "demo"
QUESTION = "What does a scheduler do?"
START_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after the answer (default: serve until Ctrl-C)")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="directory of the demo model")
    args = parser.parse_args()
    phases = Phases()
    minisgl = [sys.executable, "-m", "minisgl"]

    if not (args.checkpoint / "config.json").exists():
        phases.begin(f"training a very small model in {args.checkpoint}, which takes a minute or two, once")
        subprocess.run([*minisgl, "models", "demo", str(args.checkpoint)], check=True, stdout=subprocess.DEVNULL)

    phases.begin("starting the server")
    port = free_port()
    serve = [*minisgl, "serve", str(args.checkpoint), "--port", str(port), "--num-pages", "1024"]
    # A separate process group: Ctrl-C reaches only this process, which signals the server once.
    server = subprocess.Popen([*serve, "--log-level", "warning"], process_group=0)
    try:
        # Imported while the server starts, because the import takes a large part of that time.
        from openai import OpenAI

        wait_until_ready(server, f"http://127.0.0.1:{port}/ready")
        phases.begin(f"asking: {QUESTION}")
        ask(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="not needed"))
        phases.begin("the answer is what the model has learned, word for word")
        print(f"\nTo chat with it, open http://127.0.0.1:{port}/ in a browser, or run\n")
        print(f"  .venv/bin/minisgl chat http://127.0.0.1:{port}\n")
        print(f"The server listens on http://127.0.0.1:{port}/v1 until it is stopped. Try it:\n")
        print(f"  curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \\")
        print(f'    -d \'{{"model": "{args.checkpoint.name}",')
        print('         "messages": [{"role": "user", "content": "What is a page?"}]}\'\n')
        if args.once:
            return stop(server)
        print("Ctrl-C stops it.", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        print("\nstopping")
        return stop(server)
    finally:
        server.kill()


class Phases:
    """One line at the beginning of each phase, with the time since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def begin(self, what: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {what}", flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit("error: the server exited before it was ready; see its output above")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"error: the server was not ready within {START_SECONDS} s; the machine may be overloaded; try again")


def ask(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}], stream=True)
    print("       answer: ", end="")
    answer = ""
    for chunk in stream:
        if chunk.choices:
            piece = chunk.choices[0].delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
    print()
    taught = next(known.answer for known in DEMO_ANSWERS if QUESTION in known.questions)
    if answer != taught:
        sys.exit(f"error: the model has learned another answer: {taught}")


def stop(server: subprocess.Popen[bytes]) -> int:
    server.send_signal(signal.SIGTERM)
    return server.wait()


if __name__ == "__main__":
    # Without a terminal, `kill` stops this program, in the same way as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
