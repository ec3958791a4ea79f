"""GET /health_generate: a probe that ends in a generated token, or in the output of a text.

A probe must not fail because a server is busy: its restart would make all of its requests begin again. So the probe
also succeeds when the engine completes steps for other requests while the probe's own request waits.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord, record_of
from minisgl.frontend.server.responses import json_response
from minisgl.frontend.server.usage_report import Usage, usage_header
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.messages import REQUEST_ID_BYTES, SamplingParams
from minisgl.wire.text import Generate, Pooling, RequestOptions

PROBE_SECONDS: Final = 20.0
"""Longest time until a token or an output, or a step for other requests; as in SGLang."""
_CHECK_SECONDS: Final = 0.5
"""Interval at which the steps of the engine are looked at. Below the default timeout of Kubernetes' probes, 1 s."""
_COMPLETED_STEPS: Final = 2
"""Launched steps after which one has been completed: with overlap, a step is launched before the last one ends."""
_HIGHEST_PRIORITY: Final = 2**31 - 1
_PROMPT_TOKENS: Final = 1


class GenerationProbe:
    """Handler of one route."""

    def __init__(self, tokenizers: TokenizerPool) -> None:
        self._tokenizers = tokenizers

    async def __call__(self, request: Request) -> Response:
        """Raises ApiError: the engine is lost, or generates nothing."""
        steps = self._steps()
        generation = asyncio.create_task(self._generate(record_of(request.scope)))
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                while not (await asyncio.wait({generation}, timeout=_CHECK_SECONDS))[0]:
                    if self._steps() >= steps + _COMPLETED_STEPS:
                        # Nothing of ours was generated.
                        return _healthy(request, Usage(0, 0))
                return _healthy(request, await generation)
        except TimeoutError:
            message = f"the engine generated no token within {PROBE_SECONDS:g} s; see its log"
            raise ApiError.from_code("engine_stalled", message) from None
        finally:
            generation.cancel()
            await asyncio.wait({generation})

    def _steps(self) -> int:
        status = self._tokenizers.requests.status
        return 0 if status is None else status.counters.steps

    async def _generate(self, record: RequestRecord) -> Usage:
        """Return what was used once one token is generated; of a model that does not generate, once one is pooled.
        Raises ApiError."""
        model = self._tokenizers.model
        generates = model is None or model.card.task == "generate"
        probe = Generate(
            id=secrets.token_bytes(REQUEST_ID_BYTES),
            tokens=bytes(4 * _PROMPT_TOKENS),
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            options=RequestOptions(priority=_HIGHEST_PRIORITY, stream=False),
            pooling=None if generates else Pooling(),
        )
        try:
            stream = await self._tokenizers.submit(record, [probe], 1)
            try:
                await stream.complete()
            finally:
                self._tokenizers.release(stream)
            return Usage(_PROMPT_TOKENS, int(generates))
        except ApiError as error:
            if error.status != 429:
                raise
            # The queue is full: steps for other requests decide, until the caller cancels.
            await asyncio.get_running_loop().create_future()
            raise


def _healthy(request: Request, usage: Usage) -> Response:
    return json_response({"status": "ok"}, headers=usage_header(request.headers, usage))
