"""Prompts and questions that wait to be encoded, in turns of their tenants. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, TypeAlias

from minisgl.tokenizer.prompt_encoder import same_prompt
from minisgl.wire.text import Generate, Question

BATCH: Final = 32
"""Requests and questions after which a batch ends: a message that comes next waits for all of it, and so does the text
of running answers while its results are taken."""
MOST_CHOICES: Final = 256
"""Choices of one prompt in a batch: their prompt is encoded once."""
BATCH_BYTES: Final = 32 << 10
"""Bytes after which it ends. The engine begins with the first of a hundred texts while others are encoded."""

_Message: TypeAlias = "Generate | Question"


class Waiting(NamedTuple):
    size: int
    """Bytes."""
    message: _Message


class EncodeQueue:
    """One tenant's messages are in order of their arrival. Questions are those of a tenant of their own."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, deque[Waiting]] = {}
        """Messages of each tenant that has any, in the order of their turns."""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, size: int, message: _Message) -> None:
        tenant = message.tenant if isinstance(message, Generate) else b""
        self._tenants.setdefault(tenant, deque()).append(Waiting(size, message))

    def only(self) -> Waiting | None:
        """The message if there is just one."""
        if len(self._tenants) != 1:
            return None
        [waiting] = self._tenants.values()
        return waiting[0] if len(waiting) == 1 else None

    def take_batch(self) -> list[_Message]:
        """Take one message of each tenant in turn, and further choices of its prompt."""
        taken: list[_Message] = []
        left = BATCH_BYTES
        while self._tenants and left > 0 and len(taken) < BATCH:
            tenant = next(iter(self._tenants))
            waiting = self._tenants.pop(tenant)
            size, message = waiting.popleft()
            choices = [message]
            left -= size
            while waiting and len(choices) < MOST_CHOICES and same_prompt(message, waiting[0].message):
                size, message = waiting.popleft()
                choices.append(message)
                left -= size
            taken += choices
            if waiting:
                self._tenants[tenant] = waiting
        return taken
