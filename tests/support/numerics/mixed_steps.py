"""Random steps: rows join with prompts, which are computed in chunks, and then decode until they end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.wire.plan import StepPlan
from support.plans import Segment, make_plan, new_row


@dataclass(frozen=True)
class MixedSteps:
    rows: int
    page_size: int
    longest_prompt: int
    longest_chunk: int
    most_tokens: int
    """Of a prompt and its answer."""
    joining: int = 3
    """Most rows that join in a step."""

    @property
    def pages_per_row(self) -> int:
        return -(-self.most_tokens // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.rows * self.pages_per_row

    def plans(self, seed: int, steps: int) -> list[StepPlan]:
        """About `steps` greedy steps."""
        random = np.random.default_rng(seed)
        plans: list[StepPlan] = []
        prompts: dict[int, list[int]] = {}
        done: dict[int, int] = {}
        decoding: dict[int, int] = {}
        free = random.permutation(self.rows).tolist()
        order = random.permutation(self.num_pages).reshape(self.rows, -1).tolist()
        for _ in range(steps):
            decode = sorted(decoding.items())
            pages, rows, segments = [], [], []
            for _ in range(min(int(random.integers(0, self.joining + 1)), len(free))):
                slot = free.pop()
                prompts[slot] = random.integers(3, 500, int(random.integers(1, self.longest_prompt + 1))).tolist()
                done[slot] = 0
                pages += [(slot, index, page) for index, page in enumerate(order[slot])]
                rows.append(new_row(slot))
            for slot, prompt in sorted(prompts.items()):
                start = done[slot]
                end = min(len(prompt), start + int(random.integers(1, self.longest_chunk + 1)))
                segments.append(Segment(slot, start, prompt[start:end], sample=end == len(prompt)))
                done[slot] = end
            # Continued prompts come before new ones.
            segments.sort(key=lambda segment: segment.start == 0)
            for slot, position in decode:
                if position + 1 == self.most_tokens or random.random() < 0.03:
                    decoding.pop(slot)
                else:
                    decoding[slot] += 1
            for slot in [slot for slot, prompt in prompts.items() if done[slot] == len(prompt)]:
                decoding[slot] = len(prompts.pop(slot))
            if decode or segments:
                plans.append(make_plan(len(plans), decode=decode, prefill=segments, pages=pages, rows=rows))
        return plans
