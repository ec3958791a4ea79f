"""A message from outside becomes a request, or is refused. The frontend has checked most of it already, with better
words; this is what keeps the engine safe from any client."""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.scheduler.controls import parse_controls
from minisgl.scheduler.request import Request
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import REQUEST_ID_BYTES, Submit

LOWEST_TEMPERATURE: Final = 1e-5
"""Below it logits / temperature leaves float32's range; the choice has long been the greedy one."""
HIGHEST_TEMPERATURE: Final = 1e5
"""Far above it float32 has no value; the choice has long been uniform."""

MAX_SALT_BYTES: Final = 1024


def parse(message: Submit, *, client: int, arrival: int, now: float, config: SchedulerConfig) -> Request:
    """Raises RequestError."""
    if len(message.id) != REQUEST_ID_BYTES:
        raise RequestError("invalid_request", f"a request id has {REQUEST_ID_BYTES} bytes, not {len(message.id)}")
    if len(message.prompt) % 4 or len(message.output) % 4 or not message.prompt:
        raise RequestError("invalid_request", "a prompt is at least one int32 token id")
    tokens = np.frombuffer(message.prompt + message.output, "<i4").astype(np.int32)
    prompt_length = len(message.prompt) // 4
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= config.vocab_size:
        bad = lowest if lowest < 0 else highest
        raise RequestError(
            "invalid_token", f"token id {bad} is outside of the model's vocabulary, 0..{config.vocab_size - 1}"
        )
    if prompt_length >= config.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {config.max_model_len} tokens, but the prompt has {prompt_length} "
            "(context_length_exceeded)",
        )
    limit = prompt_length + message.max_tokens
    if message.max_tokens < 1 or limit <= len(tokens):
        raise RequestError("invalid_request", "max_tokens leaves no token to generate")
    if limit > config.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {config.max_model_len} tokens, but {prompt_length} of the "
            f"prompt and {message.max_tokens} to generate were asked for (context_length_exceeded)",
        )
    if not (0 <= message.temperature <= HIGHEST_TEMPERATURE and 0 < message.top_p <= 1 and 0 <= message.min_p <= 1):
        raise RequestError("invalid_request", "temperature, top_p or min_p is out of range")
    if not -(2**63) <= message.seed < 2**63:
        raise RequestError("invalid_request", "seed is not a 64-bit integer")
    if len(message.cache_salt) > MAX_SALT_BYTES:
        raise RequestError("invalid_request", f"cache_salt has more than {MAX_SALT_BYTES} bytes")
    controls = parse_controls(message, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
    # Who goes on behind an output has got all that there was to say of the prompt.
    reports_prompt = message.prompt_logprobs >= 0 and not message.output
    return Request(
        id=message.id,
        client=client,
        tokens=tokens,
        prompt_length=prompt_length,
        limit=limit,
        temperature=message.temperature if message.temperature >= LOWEST_TEMPERATURE else 0.0,
        top_k=message.top_k if 0 < message.top_k < config.vocab_size else 0,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        ignore_eos=message.ignore_eos,
        stop_token_ids=frozenset(token for token in message.stop_token_ids if 0 <= token < config.vocab_size),
        priority=message.priority,
        deadline_ms=message.deadline_ms,
        arrival=arrival,
        queued_at=now,
        controls=controls,
        cache_salt=message.cache_salt,
        prompt_reported=1 if reports_prompt else prompt_length,
    )
