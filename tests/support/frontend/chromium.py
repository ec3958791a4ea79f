"""A headless Chromium, driven over its DevTools pipe: messages of JSON, each ended by a zero byte, on descriptors 3
and 4."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

_WAIT_SECONDS = 60
_OFF = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage", "extensions")


def _find() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "Chromium is not installed: run .ci/chromium"
    return found


class Page:
    """One tab at `url`. Use as a context manager."""

    def __init__(self, url: str, *, dark: bool = False) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        their_read, self._write = os.pipe()
        self._read, their_write = os.pipe()
        self._process = subprocess.Popen(
            [
                # Chromium expects the pipe at 3 and 4, whatever numbers it has here.
                *("bash", "-c", f'exec "$0" "$@" 3<&{their_read} 4>&{their_write}', _find()),
                *("--headless", "--no-sandbox", "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars"),
                *(f"--disable-{what}" for what in _OFF),
                *(f"--user-data-dir={self._profile.name}", "--window-size=900,700", "about:blank"),
            ],
            pass_fds=(their_read, their_write),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.open(url)

    def open(self, url: str) -> None:
        """Go to `url`, with an empty storage."""
        self.send("Page.navigate", url="about:blank")
        self.send(
            "Storage.clearDataForOrigin", origin="{0.scheme}://{0.netloc}".format(urlsplit(url)), storageTypes="all"
        )
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, in CSS pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._read, 1 << 20)
                assert data, "Chromium ended"
                self._rest += data
            frame, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(frame)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; of a promise, what it resolves to."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, userGesture=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until the expression is true in the page."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.evaluate('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press_enter(self) -> None:
        self._press("Enter", 13)

    def press_escape(self) -> None:
        self._press("Escape", 27)

    def _press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # With its other processes, which would write to the profile again.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()
