"""Server under test, and what all clients ask it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any, Final

QUESTION: Final = [{"role": "user", "content": "What is a page?"}]
TOO_LONG: Final = [{"role": "user", "content": "page " * 50_000}]


class Endpoint:
    """URL of the server, and the name of its model."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.api = f"{self.url}/v1"
        with urllib.request.urlopen(f"{self.api}/models", timeout=60) as answer:
            self.model = json.load(answer)["data"][0]["id"]


def raises(kind: type[Exception], call: Callable[[], Any], words: str) -> None:
    """Assert that the call raises an exception of this kind with these words in its text or code."""
    try:
        call()
    except kind as error:
        # Some versions of the client have the code in the message, others only as an attribute.
        assert words in f"{error} {getattr(error, 'code', '')}", error
    else:
        raise AssertionError(f"no {kind.__name__}")
