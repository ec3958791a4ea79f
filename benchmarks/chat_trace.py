"""Write a synthetic trace for `minisgl bench serve --trace`, with the statistics of a public chat service.

    python benchmarks/chat_trace.py trace.jsonl --requests 1000

1,000 requests have about 358,310 output tokens, like the first 1,000 of Qwen's trace A, and arrive at 2.6 per second:
`--trace-speed 2.5` replays them at 6.5 per second. Lengths are log-normal, arrivals are a Poisson process. Half of the
requests continue an earlier conversation and share its blocks of 16 tokens. The mean length of prompts is a guess.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

RATE = 2.6
MEAN_OUTPUT, SPREAD_OUTPUT = 358.31, 0.9
MEAN_INPUT, SPREAD_INPUT = 1500.0, 1.0
LONGEST_INPUT, LONGEST_OUTPUT = 8192, 2048
BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = [json.dumps(request) for request in chat_trace(args.requests, args.seed)]
    args.out.write_text("\n".join(lines) + "\n")


def chat_trace(requests: int, seed: int) -> list[dict[str, Any]]:
    """Requests in the order in which they arrive."""
    draw = random.Random(seed)
    outputs = [_length(draw, MEAN_OUTPUT, SPREAD_OUTPUT, LONGEST_OUTPUT) for _ in range(requests)]
    # Scaling makes up for the clipped tail, so that the sum is the known one.
    scale = MEAN_OUTPUT * requests / sum(outputs)
    timestamp, next_block = 0.0, 0
    conversations: list[list[int]] = []
    trace = []
    for output in outputs:
        length = _length(draw, MEAN_INPUT, SPREAD_INPUT, LONGEST_INPUT)
        blocks = -(-length // BLOCK)
        shared = draw.choice(conversations)[: blocks // 2] if conversations and draw.random() < 0.5 else []
        hash_ids = [*shared, *range(next_block, next_block + blocks - len(shared))]
        next_block += blocks - len(shared)
        conversations.append(hash_ids)
        request = {
            "timestamp": round(timestamp, 1),
            "input_length": length,
            "output_length": max(1, min(round(output * scale), LONGEST_OUTPUT)),
            "hash_ids": hash_ids,
        }
        trace.append(request)
        timestamp += draw.expovariate(RATE) * 1000
    return trace


def _length(draw: random.Random, mean: float, spread: float, longest: int) -> int:
    return max(1, min(round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)), longest))


if __name__ == "__main__":
    main()
