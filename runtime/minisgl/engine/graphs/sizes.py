"""Sizes of the steps that are captured as CUDA graphs. A step is padded to one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from minisgl.engine.batch import StepSize
from minisgl.engine.interface import MOST_PROMPTS
from minisgl.wire.plan import StepPlan
from minisgl.wire.shared_prefixes import decode_prefixes

FEWEST_PROMPTS: Final = 8
"""Prompts for which every captured step has room."""
_TOKENS_A_PROMPT: Final = 8
"""Larger steps have room for a prompt for so many of their tokens: without it many short prompts would be padded to the
whole token budget, or launched kernel by kernel."""

_ALONE_TOKENS: Final = (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 3072, 4096, 6144)
"""Prompt tokens of captured steps without decode rows. Every size costs a capture."""
_FRESH_TOKENS: Final = 512
"""Most prompt tokens of captured steps without prefixes, which copy no keys: for first tokens on an idle server."""
_MIXED_TOKENS: Final = (*range(128, 1025, 128), 1536, 2048, 3072, 4096, 6144)
"""Prompt tokens and decode rows of captured steps with both, multiples of the tiles of matrix products. The scheduler
cuts prompts to these sizes."""
_MIXED_ROWS: Final = (32, 64, 128, 256, 512)
"""Decode rows of captured steps with prompts, besides the most rows of the engine."""
_MANY_ROWS_TOKENS: Final = 2048
"""Most tokens of captured steps beside more than the fewest of these rows: larger ones compute few padded rows more."""
_LEAST_MIXED_TOKENS: Final = 64
"""Fewest prompt tokens of captured steps with decode rows."""
_TEXT_TOKENS: Final = (
    *(16, 32, 64, 128, 192, 256, 384, 512, 768, 1024),
    *range(1536, 8193, 512),
    *range(9216, 16385, 1024),
)
"""Tokens of captured steps of a model that does not generate."""
_LAUNCH_SECONDS: Final = 0.45e-3
"""Host time to launch the kernels of one layer."""
_LAUNCHES: Final = 3
"""Time of the largest captured step relative to its launch. Other threads of a server hold the interpreter's lock, so
that a launch takes up to twice as long there, and the results of the step before it wait for its end."""
_BYTES_PER_SECOND: Final = 4e12
_FLOPS: Final = 6e14
"""Operations per second of matrix products with many rows, on a Hopper GPU."""


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes with a graph, up to and including `largest`; dense, so that few rows are padding."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, *range(24, 257, 8), *range(272, 513, 16), *range(544, largest, 32)]
    return sorted({size for size in sizes if size < largest} | {largest}) if largest else []


def cascade_sizes(largest: int) -> list[int]:
    """Batch sizes with a second graph for rows that share a prefix; coarser, since such batches are large."""
    sizes = [*range(32, 257, 32), *range(320, 513, 64), *range(640, largest, 128)]
    return sorted({size for size in sizes if size < largest} | {largest}) if largest else []


def launch_bound_tokens(layers: int, parameters: int) -> int:
    """Tokens up to which a graph shortens a step of a model, since the host needs about as long to launch its kernels
    one by one. `parameters`: those of the rank that take part in the products of a token."""
    return int(_LAUNCHES * _LAUNCH_SECONDS * layers * _FLOPS / (2 * parameters))


def prefers_cascade(plan: StepPlan, page_bytes: int) -> bool:
    """Whether reading shared prefixes once saves a step with prompts more time than a graph, which has no cascade
    attention. `page_bytes`: keys and values of a page in one layer."""
    if not len(plan.shared_prefixes):
        return False
    groups = decode_prefixes(plan.shared_prefixes, len(plan.decode_slots))
    saved_pages = sum((len(group.rows) - 1) * group.pages for group in groups)
    return saved_pages * page_bytes > _LAUNCH_SECONDS * _BYTES_PER_SECOND


def prefill_sizes(most_rows: int, most_tokens: int, budget: int, *, most_prompts: int = MOST_PROMPTS) -> list[StepSize]:
    """Sizes of captured steps with up to `most_prompts` prompts, alone and beside up to `most_rows` decode rows, of up
    to `most_tokens` prompt tokens and decode rows in all; the smallest first.

    Where `most_tokens` is the whole token `budget` of a step, the last size is that of the steps of many waiting
    prompts, which all take the whole budget."""
    if not most_rows:
        return []
    few, *many = sorted({*(rows for rows in _MIXED_ROWS if rows < most_rows), most_rows})

    def size(rows: int, tokens: int, *, prefix: bool = True) -> StepSize:
        return StepSize(rows, tokens, min(max(tokens // _TOKENS_A_PROMPT, FEWEST_PROMPTS), most_prompts), prefix)

    sizes = {
        *(size(0, tokens) for tokens in _ALONE_TOKENS),
        *(size(0, tokens, prefix=False) for tokens in _ALONE_TOKENS if tokens <= _FRESH_TOKENS),
        *(size(few, tokens) for tokens in _mixed_tokens(few)),
        *(size(rows, tokens) for rows in many for tokens in _mixed_tokens(rows) if rows + tokens <= _MANY_ROWS_TOKENS),
    }
    fitting = {size for size in sizes if size.tokens + size.decode <= most_tokens}
    if most_tokens >= budget:
        fitting.add(size(most_rows, budget))
    return sorted(fitting, key=lambda size: (size.tokens + size.decode, size.decode, size.prefix))


def text_sizes(most_rows: int, most_tokens: int, *, prefixes: bool) -> list[StepSize]:
    """Sizes of captured steps of up to `most_rows` texts with up to `most_tokens` tokens in all, the smallest first.
    `prefixes`: texts may also begin behind a cached one."""
    tokens = sorted({*(each for each in _TEXT_TOKENS if each < most_tokens), most_tokens} - {0})
    kinds = (False, True) if prefixes else (False,)
    return [StepSize(0, each, min(each, most_rows), prefix) for each in tokens for prefix in kinds]


def _mixed_tokens(rows: int) -> list[int]:
    """Prompt tokens of captured steps with so many decode rows."""
    return [total - rows for total in _MIXED_TOKENS if total - rows >= _LEAST_MIXED_TOKENS]


def fitting_size(sizes: Iterable[StepSize], plan: StepPlan, most_keys: int) -> StepSize | None:
    """The first of the `sizes` of captured steps with prompts to which `plan` can be padded, or None. `most_keys`:
    bound of the keys of all its segments, with padding."""
    rows, tokens, segments = len(plan.decode_slots), len(plan.prefill_tokens), len(plan.prefill_slots)
    before = int(plan.prefill_starts.sum())
    for size in sizes:
        fits = tokens <= size.tokens and rows <= size.decode and segments <= size.segments
        if fits and (before + size.tokens <= most_keys if size.prefix else before == 0):
            return size
    return None
