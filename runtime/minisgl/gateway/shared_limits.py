"""Counts of requests and tokens that several gateways share, in Redis.

A gateway does not depend on it: while Redis does not answer at once, requests are counted by each gateway alone. All
commands go over one connection, in the order of their calls; those that wait for an answer at the same time are sent
together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from minisgl.errors import CodedError, describe
from minisgl.gateway.config import RedisOptions
from minisgl.gateway.keys import Tenant

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 0.25
"""Longest time that a request waits for Redis, with its turn."""
_ANSWER_SECONDS: Final = 0.25
"""Time for an answer after which Redis counts as lost."""
_CONNECT_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 1.0
"""Between two attempts to connect."""
_IDLE_SECONDS: Final = 15.0
"""Time without a command after which the connection is tried, so that no request finds out that it is lost."""
_BATCH: Final = 256
"""Most commands that are sent together."""
_MOST: Final = 1e15
"""Units that may be missing to a full bucket, which is more than any tenant uses."""
_PORT: Final = 6379
_PREFIX: Final = "minisgl:limits"
_NOBODY: Final = "*"
"""No name of a tenant."""
_UNITS: Final = ("requests", "tokens")

SCRIPT: Final = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local missing, fits = {}, true
for i = 1, 2 do
  local rate, found = tonumber(ARGV[i]), redis.call('HMGET', KEYS[i], 'missing', 'at')
  missing[i] = tonumber(found[1] or 0)
  if rate > 0 then
    missing[i] = math.max(missing[i] - math.max(now - (found[2] or now), 0) * rate / 60, 0)
    fits = fits and rate - missing[i] >= 1
  end
end
local admitted = (fits or ARGV[5] == '0') and 1 or 0
for i = 1, 2 do
  local rate, units = tonumber(ARGV[i]), tonumber(ARGV[i + 2])
  if admitted == 1 and rate > 0 and units > 0 then
    missing[i] = missing[i] + units
    redis.call('HSET', KEYS[i], 'missing', string.format('%.17g', missing[i]), 'at', string.format('%.6f', now))
    redis.call('PEXPIRE', KEYS[i], math.ceil(missing[i] * 60000 / rate) + 1000)
  end
end
return {admitted, string.format('%.17g', missing[1]), string.format('%.17g', missing[2])}
"""
"""`limits.Bucket` for requests and tokens of a tenant. Arguments: both rates per minute (0: no limit), the units of
both to take, and whether they are refused (1) where there is no room for one unit. Returns whether they were taken,
and how many units are missing to a full bucket. The time is that of Redis, so the clocks of gateways do not count."""


class RedisError(CodedError):
    """The options of Redis cannot be used. The message has no password."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_redis", message)


class Counted(NamedTuple):
    """Counts of a tenant after a command."""

    admitted: bool
    missing_requests: float
    missing_tokens: float
    """Units that are missing to a full bucket."""


class _Command(NamedTuple):
    tenant: str
    arguments: tuple[int, ...]
    answer: asyncio.Future[Counted | None]


class SharedLimits:
    """Source that keeps the connection. All methods belong to the event loop."""

    def __init__(self, options: RedisOptions) -> None:
        """Raises RedisError."""
        self._connect = _connector(options)
        self._waiting: list[_Command] = []
        self._wanted = asyncio.Event()
        self.is_up = False
        """Redis answers."""
        self.missed = 0
        """Requests that were counted by this gateway alone."""

    async def begin(self, tenant: Tenant) -> Counted | None:
        """Count a request of a tenant, unless a limit is reached. None: Redis does not answer."""
        counted = None
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                counted = await self._send(tenant, 1, 0, 1)
        except TimeoutError:
            # The commands before it are slow, though each is answered in time.
            pass
        if counted is None:
            self.missed += 1
        return counted

    def use(self, tenant: Tenant, tokens: int) -> None:
        """Count tokens that a tenant has used. Commands that come later see them."""
        self._send(tenant, 0, tokens, 0)

    async def run(self) -> None:
        """Run until cancelled."""
        problem = ""
        while True:
            client: Redis | None = None
            try:
                client = self._connect()
                await _check(client, _CONNECT_SECONDS)
                # Once more, without the time to connect: requests must not find out that it is too slow.
                await _check(client, _ANSWER_SECONDS)
                logger.info("limits are counted in Redis, together with other gateways")
                self.is_up, problem = True, ""
                await self._serve(client)
            except Exception as error:
                # Whatever it is, models must not be lost with it.
                found = "no answer in time" if isinstance(error, TimeoutError) else describe(error)
                if found != problem:
                    logger.warning("Redis does not count limits (%s); this gateway counts for itself", found)
                problem = found
            finally:
                self._give_up()
                if client is not None:
                    await _closed(client)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _send(self, tenant: Tenant, *arguments: int) -> asyncio.Future[Counted | None]:
        answer: asyncio.Future[Counted | None] = asyncio.get_running_loop().create_future()
        if self.is_up:
            rates = tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0
            self._waiting.append(_Command(tenant.name, (*rates, *arguments), answer))
            self._wanted.set()
        else:
            answer.set_result(None)
        return answer

    async def _serve(self, client: Redis) -> None:
        """Send commands until one fails."""
        while True:
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                await _check(client, _ANSWER_SECONDS)
                continue
            # Those for which nobody waits any more would only delay the others.
            self._waiting = [command for command in self._waiting if not command.answer.cancelled()]
            if batch := self._waiting[:_BATCH]:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    found = await _evaluate(client, [(command.tenant, command.arguments) for command in batch])
                del self._waiting[: len(batch)]
                for command, counted in zip(batch, found, strict=True):
                    if not command.answer.done():
                        command.answer.set_result(counted)
            if not self._waiting:
                self._wanted.clear()

    def _give_up(self) -> None:
        self.is_up = False
        for command in self._waiting:
            if not command.answer.done():
                command.answer.set_result(None)
        self._waiting.clear()
        self._wanted.clear()


async def _evaluate(client: Redis, commands: Sequence[tuple[str, tuple[int, ...]]]) -> list[Counted | None]:
    """Run the script for tenants with their arguments; None: what is kept of a tenant is no count. Raises an error of
    the client if one of them fails."""
    pipeline = client.pipeline(transaction=False)
    for tenant, arguments in commands:
        keys = [f"{_PREFIX}:{{{tenant}}}:{unit}" for unit in _UNITS]
        pipeline.eval(SCRIPT, len(keys), *keys, *map(str, arguments))
    answers: list[Any] = await pipeline.execute()
    return [_counted(*answer) for answer in answers]


def _counted(admitted: int, *missing: bytes) -> Counted | None:
    """Who may write to Redis may write any number, such as `inf` or `nan`."""
    requests, tokens = map(float, missing)
    return Counted(bool(admitted), requests, tokens) if 0 <= requests <= _MOST and 0 <= tokens <= _MOST else None


async def _check(client: Redis, seconds: float) -> None:
    """Find out whether Redis counts, which a copy does not, however well it answers. Raises an error if not."""
    async with asyncio.timeout(seconds):
        await _evaluate(client, [(_NOBODY, (60_000, 0, 1, 0, 0))])


async def _closed(client: Redis) -> None:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await client.aclose()
    except Exception as error:
        logger.debug("the connection to Redis was not closed: %s", describe(error))


def _connector(options: RedisOptions) -> Callable[[], Redis]:
    """Return a function that makes a client for the options. It reads the password each time, which may have been
    replaced. Raises RedisError, whose message does not contain the URL: it may have a password."""
    # Here, before there are requests: it takes a while.
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    try:
        parts = urlsplit(options.url)
        host, port, database = parts.hostname, parts.port or _PORT, int(parts.path.strip("/") or 0)
    except ValueError:
        parts, host, port, database = urlsplit(""), None, 0, 0
    if not host or parts.scheme not in ("redis", "rediss") or parts.query or parts.fragment:
        raise RedisError("the URL in --redis cannot be used; write redis://HOST:PORT/DATABASE, or rediss:// for TLS")
    if parts.password is not None:
        raise RedisError("--redis contains a password, which every process can see; give it with --redis-password-file")
    if parts.username is not None and options.password_file is None:
        raise RedisError("--redis names a user, who needs a password; give it with --redis-password-file")
    user = None if parts.username is None else unquote(parts.username)

    def connect() -> Redis:
        return Redis(
            host=host,
            port=port,
            db=database,
            ssl=parts.scheme == "rediss",
            username=user,
            password=_password(options.password_file),
            protocol=2,
            single_connection_client=True,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=_CONNECT_SECONDS,
            # With a limit of its own for writing, the library loses a cancellation that comes meanwhile, and so the end
            # of our time.
            socket_timeout=None,
        )

    connect()
    return connect


def _password(file: str | None) -> str | None:
    """Raises RedisError."""
    try:
        return None if file is None else Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RedisError(f"cannot read the password in --redis-password-file {file}: {reason}") from error
