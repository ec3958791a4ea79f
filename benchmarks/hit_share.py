"""Print how many prompt tokens of a chat trace the prefix cache serves, for a model with recurrent states.

    python benchmarks/hit_share.py --requests 300 --gib 80

Replays `chat_trace.py` through a scheduler whose engine computes nothing, on a simulated clock. The ideal is the same
replay with as many pages and a checkpoint of the states at each of them, in memory that costs nothing.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from chat_trace import BLOCK, chat_trace
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig, SchedulerConfig
from minisgl.engine.interface import EngineLimits
from minisgl.models.config import ModelConfig
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler
from minisgl.wire.messages import SamplingParams, Submit
from minisgl.wire.plan import StepPlan
from stub_engine import StubEngine

MAX_MODEL_LEN: Final = 16_384
STEP_SECONDS, TOKEN_SECONDS = 0.025, 60e-6
"""Of a step, and further ones for each token of a prompt in it."""


class _Engine(StubEngine):
    """Steps take simulated time."""

    now = 0.0

    def launch(self, plan: StepPlan) -> StepPlan:
        self.now += STEP_SECONDS + TOKEN_SECONDS * len(plan.prefill_tokens)
        return super().launch(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.6-27b", choices=BUILTIN_CONFIGS, help="a built-in configuration")
    parser.add_argument("--gib", type=int, default=80, help="memory for pages and states")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = scheduler_config(args.model, args.gib << 30, args.rows)
    requests = chat_trace(args.requests, args.seed)
    found, ideal = served(config, requests), served(replace(config, state_checkpoints=None), requests)
    sizes = f"{config.num_pages} pages of {config.page_size} tokens, {config.state_checkpoints} checkpoints"
    print(f"{sizes}: {found:.4f} of prompt tokens, ideal {ideal:.4f}, share {found / ideal:.3f}")


def scheduler_config(model: str, available: int, rows: int) -> SchedulerConfig:
    """Sizes of an engine with so many bytes for pages and states."""
    config = ModelConfig.parse(BUILTIN_CONFIGS[model])
    engine = EngineConfig(model="", device="cuda", max_running=rows)
    layout = config.kv_layout(engine, MAX_MODEL_LEN)
    pages = layout.pages_for(available).full
    return SchedulerConfig(
        num_pages=pages,
        page_size=layout.page_size,
        state_checkpoints=layout.state_checkpoints(pages),
        checkpoints_per_row=layout.checkpoints_per_row,
        max_running=rows,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=config.vocab_size,
        max_step_tokens=engine.max_step_tokens,
        overlap=True,
        cache="radix",
    )


def served(config: SchedulerConfig, requests: list[dict[str, Any]]) -> float:
    """Share of the prompts' tokens that is found in the cache when requests arrive at their times."""
    limits = EngineLimits(
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
    )
    scheduler, engine = Scheduler(config), _Engine(limits)
    loop = StepLoop(scheduler, engine, lambda: engine.now)
    waiting = [*enumerate(requests)][::-1]
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            engine.now = max(engine.now, waiting[-1][1]["timestamp"] / 1000)
        while waiting and waiting[-1][1]["timestamp"] / 1000 <= engine.now:
            scheduler.submit(_submit(*waiting.pop(), config.vocab_size))
        loop.step()
    assert scheduler.counters.finished == len(requests)
    return scheduler.counters.cached_tokens / scheduler.counters.prompt_tokens


def _submit(number: int, request: dict[str, Any], vocab_size: int) -> Submit:
    blocks = np.array(request["hash_ids"], np.int64)[:, None] * 7919 + np.arange(BLOCK) * 104_729
    tokens = (blocks.ravel()[: request["input_length"]] % vocab_size).astype(np.int32)
    params = SamplingParams(max_tokens=request["output_length"], seed=0, ignore_eos=True)
    return Submit(id=number.to_bytes(16, "big"), prompt=tokens.tobytes(), params=params)


if __name__ == "__main__":
    main()
