"""The few commands of Redis that gateways use, on a port of the loopback. Scripts run in Lua 5.1, as in Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from lupa.lua51 import LuaRuntime

from support.gateway.loopback_server import LoopbackServer


class FakeRedis(LoopbackServer):
    """One database. `now` is its clock, in seconds. `password`: empty, none is needed."""

    def __init__(self, password: str = "") -> None:
        super().__init__()
        self.password = password
        self.now = 1_000_000.0
        self.hashes: dict[str, dict[str, str]] = {}
        self.expires: dict[str, float] = {}
        self.commands: list[str] = []
        """Names of those that came."""
        self.is_silent = False
        """It takes commands and answers none."""
        self.refusal = ""
        """Error that it answers to scripts."""
        self._lua = LuaRuntime()
        self._scripts: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/3"

    def evaluate(self, script: str, keys: list[str], arguments: list[str]) -> list[Any]:
        """Run a script that returns a table."""
        if script not in self._scripts:
            self._scripts[script] = self._lua.eval(
                f"function(KEYS, ARGV, call) local redis = {{call = call}} {script} end"
            )
        table = self._lua.table_from
        return list(self._scripts[script](table(keys), table(arguments), self._call).values())

    def _call(self, command: str, *given: Any) -> Any:
        if command == "TIME":
            return self._lua.table_from([str(int(self.now)), str(round(self.now % 1 * 1e6))])
        key, *values = given
        if self.expires.get(key, self.now) < self.now:
            del self.expires[key], self.hashes[key]
        if command == "HMGET":
            found = self.hashes.get(key, {})
            # What is not there is false in Lua.
            return self._lua.table_from([found.get(field, False) for field in values])
        if command == "HSET":
            self.hashes.setdefault(key, {}).update(zip(values[::2], values[1::2], strict=True))
        elif command == "PEXPIRE":
            self.expires[key] = self.now + values[0] / 1000
        else:
            raise AssertionError(f"unknown command {command}")
        return 1

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_known = not self.password
        while True:
            name, *given = await _command(reader)
            self.commands.append(name)
            if self.is_silent:
                continue
            if name == "AUTH":
                is_known = given[-1] == self.password
                writer.write(b"+OK\r\n" if is_known else b"-WRONGPASS invalid username-password pair\r\n")
            elif not is_known:
                writer.write(b"-NOAUTH Authentication required.\r\n")
            elif name == "EVAL":
                writer.write(self._evaluated(given))
            else:
                writer.write(b"+OK\r\n")

    def _evaluated(self, given: list[str]) -> bytes:
        if self.refusal:
            return f"-{self.refusal}\r\n".encode()
        script, count, *rest = given
        answer = self.evaluate(script, rest[: int(count)], rest[int(count) :])
        parts = [f":{part}" if isinstance(part, int) else f"${len(part)}\r\n{part}" for part in answer]
        return "\r\n".join([f"*{len(parts)}", *parts, ""]).encode()


async def _command(reader: asyncio.StreamReader) -> list[str]:
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(length + 2))[:-2].decode())
    return words


@contextlib.asynccontextmanager
async def fake_redis(password: str = "") -> AsyncIterator[FakeRedis]:
    redis = FakeRedis(password)
    await redis.start()
    try:
        yield redis
    finally:
        await redis.stop()
