"""Overview of which attention backend serves which steps, for logs, metrics and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from minisgl.attention.backend import DecodeBackend, PrefillBackend


def overview(
    prefill: PrefillBackend, decode: DecodeBackend, cascade: DecodeBackend | None, max_rows: int
) -> dict[str, str]:
    """Name of the backend by kind of attention: `prefill`, `prefill_with_prefix`, `decode`, `decode_with_prefill`
    (decode rows beside prompts) and `decode_of_shared_prefixes`. Where the backend depends on the number of rows, up to
    `max_rows`, there is one entry for each range, such as `decode_1_to_4_rows`; where it depends on lengths, one entry
    has several names, separated by commas."""
    found = {
        "prefill": prefill.backend_for(prefix=False),
        "prefill_with_prefix": prefill.backend_for(prefix=True),
        **_ranges("decode", lambda rows: decode.backend_for(rows, mixed=False), max_rows),
        **_ranges("decode_with_prefill", lambda rows: decode.backend_for(rows, mixed=True), max_rows),
    }
    if cascade is not None:
        found["decode_of_shared_prefixes"] = cascade.backend_for(max_rows, mixed=False)
    return found


def _ranges(kind: str, backend_for: Callable[[int], str], max_rows: int) -> dict[str, str]:
    groups = [(backend, list(rows)) for backend, rows in groupby(range(1, max_rows + 1), backend_for)]
    if len(groups) == 1:
        return {kind: groups[0][0]}
    return {f"{kind}_{rows[0]}_to_{rows[-1]}_rows": backend for backend, rows in groups}
