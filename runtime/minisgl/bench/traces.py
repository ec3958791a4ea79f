"""Requests with arrival times, from a trace file or synthetic. One JSON object per line, as in the Mooncake traces:

    {"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}

`timestamp` is in ms since the beginning; `hash_ids` name the blocks of the prompt: prompts whose first ids are equal
begin with the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from minisgl.errors import BenchError

_Count = Annotated[int, msgspec.Meta(ge=1)]


class TraceRequest(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...] = ()


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a synthetic trace."""

    requests: int
    input_length: tuple[int, int]
    output_length: tuple[int, int]
    rate: float | None
    """Requests per second; None: all at the same time."""
    burstiness: float
    """Gaps between arrivals follow a gamma distribution of shape 1/burstiness; 1 is a Poisson process, more is
    burstier, near 0 is regular."""
    shared_prefixes: int
    """Number of different prefixes, each half of its prompt; 0: prompts share nothing."""
    block: int
    """Tokens per entry of `hash_ids`."""


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests of a trace file in the order of arrival. Raises BenchError `bad_trace`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError("bad_trace", f"{path} cannot be read: {error.strerror}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(msgspec.json.decode(line, type=TraceRequest))
        except msgspec.DecodeError as error:
            raise BenchError("bad_trace", f"{path}, line {number}: {error}") from error
    if not requests:
        raise BenchError("bad_trace", f"{path} contains no request")
    return sorted(requests, key=lambda request: request.timestamp)


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write a trace file. Raises BenchError `bad_trace`."""
    try:
        path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
    except OSError as error:
        raise BenchError("bad_trace", f"{path} cannot be written: {error.strerror}") from error


def make_trace(shape: TraceShape, seed: int) -> list[TraceRequest]:
    """Draw a synthetic trace; the same shape and seed give the same requests."""
    rng = random.Random(seed)
    gaps = np.zeros(shape.requests)
    if shape.rate is not None:
        gaps = np.random.default_rng(seed).gamma(1 / shape.burstiness, shape.burstiness / shape.rate, shape.requests)
        gaps[0] = 0
    requests = []
    next_id = shape.shared_prefixes << 20
    for at in np.cumsum(gaps) * 1000:
        length = rng.randint(*shape.input_length)
        blocks = -(-length // shape.block)
        shared = blocks // 2 if shape.shared_prefixes else 0
        group = rng.randrange(shape.shared_prefixes) << 20 if shared else 0
        ids = (*range(group, group + shared), *range(next_id, next_id + blocks - shared))
        next_id += blocks - shared
        requests.append(TraceRequest(round(float(at), 3), length, rng.randint(*shape.output_length), ids))
    return requests


def prompt_tokens(request: TraceRequest, number: int, *, block: int, vocabulary: int, seed: int) -> list[int]:
    """Prompt of a request: token ids below `vocabulary`. `number` distinguishes prompts without hash_ids."""
    tokens: list[int] = []
    for block_id in request.hash_ids:
        tokens += random.Random(f"{seed}/{block_id}").choices(range(vocabulary), k=block)
    rest = random.Random(f"{seed}/own/{number}")
    tokens += rest.choices(range(vocabulary), k=max(0, request.input_length - len(tokens)))
    return tokens[: request.input_length]
