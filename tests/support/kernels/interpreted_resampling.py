"""The kernels that sample again, in Triton's interpreter on a CPU, against the torch version.

Run `python -m support.kernels.interpreted_resampling`. A process of its own, for whether kernels are interpreted is
settled when Triton is imported. Prints, as JSON, what each case got wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.engine.sampler import report
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end
from support.kernels.resampling import Row, expected_tokens, flat, make_batch, peaked


@dataclass(frozen=True)
class Case:
    rows: list[Row]
    logits: Callable[..., torch.Tensor] = flat
    vocabulary: int = 5037
    dtype: torch.dtype = torch.bfloat16


PENALTIES: dict[str, Any] = {"repetition": 1.3, "frequency": 0.2, "presence": 1.0}
PENALTIES |= {"prompt": (1, 2, 3, 77), "output": (5, 5, 9, 77)}
BIASES = {i * 37: 5.0 + i / 7 for i in range(100)}
CASES = {
    "plain rows": Case([Row(), Row(temperature=0.0), Row(temperature=0.3)]),
    "top-k": Case([Row(top_k=k) for k in (1, 2, 20, 63, 300, 5036, 5037, 9000)]),
    "top-k of peaked rows": Case([Row(top_k=k) for k in (1, 2, 20, 63, 300)], peaked),
    "top-p": Case([Row(top_p=p, temperature=t) for p in (0.0, 0.3, 0.9, 0.999) for t in (0.3, 1.0)]),
    "top-p of peaked rows": Case([Row(top_p=p, temperature=t) for p in (0.0, 0.3, 0.95) for t in (0.4, 1.5)], peaked),
    "min-p": Case([Row(min_p=p) for p in (0.001, 0.1, 0.9, 1.0)]),
    "all filters": Case(
        [Row(top_k=k, top_p=p, min_p=m, temperature=0.7) for k in (3, 40) for p in (0.5, 0.95) for m in (0.0, 0.1)]
    ),
    "float32": Case(
        [Row(top_k=20, top_p=0.9), Row(top_p=0.9), Row(top_p=0.2), Row(min_p=0.2)], flat, 3000, torch.float32
    ),
    "float16": Case([Row(top_k=20, top_p=0.9), Row(top_p=0.9), Row(min_p=0.2)], flat, 3000, torch.float16),
    "few columns": Case([Row(top_k=20), Row(top_p=0.8), Row(min_p=0.1), Row(**PENALTIES), Row(tops=9)], flat, 100),
    "equal logits": Case(
        [Row(top_k=5), Row(top_p=0.5), Row(min_p=0.5), Row(tops=5)], lambda s, v, d: torch.zeros(s, v, dtype=d)
    ),
    "penalties": Case([Row(temperature=t, **PENALTIES) for t in (0.0, 0.7)] + [Row(repetition=0.7, output=range(200))]),
    "penalties and filters": Case(
        [Row(top_k=7, **PENALTIES), Row(top_p=0.4, **PENALTIES), Row(min_p=0.1, **PENALTIES)]
    ),
    "extreme logits": Case(
        [Row(temperature=1e-5, top_p=0.5), Row(top_p=0.5, **PENALTIES), Row(temperature=1e-5, min_p=0.5, top_k=2000)],
        lambda s, v, d: flat(s, v, d) * 1e30,
        3000,
    ),
    "biases": Case([Row(biases=BIASES), Row(biases=BIASES, top_k=5), Row(temperature=0.0, biases={5036: 40.0})]),
    "masks": Case(
        [Row(temperature=0.0, masked=range(0, 5037, 3), mask_until=u) for u in (0, 9)]
        + [Row(temperature=0.0, biases={300: 90.0}, masked=(300, 301), mask_until=u) for u in (0, 99)]
    ),
    "bitmasks": Case(
        [Row(allowed=(31, 32, 5036)), Row(allowed=range(7, 5000, 50), top_k=3), Row(allowed=(4,), top_p=0.1)]
    ),
    "log-probabilities": Case([Row(tops=t) for t in (0, 1, 5, 20)] + [Row(tops=3, top_k=2, **PENALTIES)]),
    "log-probabilities of peaked rows": Case([Row(tops=5), Row(tops=20, temperature=0.2, top_p=0.5)], peaked),
}


def faults(case: Case) -> list[str]:
    from minisgl.kernels.sampling.resample_triton import Workspace, report_cuda, resample_cuda

    logits = case.logits(len(case.rows), case.vocabulary, case.dtype)
    allowed = expected_tokens(logits, case.rows)
    _, _, counts = make_batch(logits, case.rows).resampled()
    batch = make_batch(logits, case.rows)
    workspace = Workspace(len(case.rows), case.vocabulary, torch.device("cpu"))
    lists = any(row.listed for row in case.rows)
    resample_cuda(logits, batch.rows, batch.samples, batch.tables, workspace, lists=lists)
    wrong = []
    tokens = batch.samples.tokens
    for number, token in enumerate(tokens.tolist()):
        if token not in allowed[number]:
            wrong.append(f"row {number}: {token} instead of {allowed[number]}")
        if batch.samples.last_token[batch.rows.slots[number]] != token:
            wrong.append(f"row {number}: the next input")
    if not torch.equal(batch.tables.counts, counts):
        wrong.append("counts")
    reports = report_cuda(logits, batch.rows, tokens, workspace)
    most = (reports.shape[1] - 1) // 2
    for number, row in enumerate(case.rows):
        if row.tops >= 0:
            expected = report(logits[number : number + 1], tokens[number : number + 1], row.tops)[0]
            ours = torch.cat((reports[number, :1], reports[number, 1 + most : 1 + most + row.tops])).view(torch.float32)
            theirs = torch.cat((expected[:1], expected[1 + row.tops :])).view(torch.float32)
            ids = reports[number, 1 : 1 + row.tops].tolist()
            values = logits[number].float().log_softmax(0)[ids]
            if not torch.allclose(ours, theirs, atol=1e-5) or not torch.allclose(values, theirs[1:], atol=1e-5):
                wrong.append(f"row {number}: log-probabilities")
            if len(set(ids)) != len(ids):
                wrong.append(f"row {number}: a token twice")
    return wrong


def use_exact_functions() -> None:
    """Replace functions of CUDA's library, which the interpreter does not have."""
    import triton.language as tl
    from triton.language.extra.cuda import libdevice

    def fast_log2f(x: Any) -> Any:
        # Looked up in each call: the interpreter replaces it while a kernel runs.
        return tl.log2(x)

    libdevice.fast_log2f = fast_log2f
    libdevice.mul_rn = lambda x, y: x * y


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    use_exact_functions()
    torch.set_num_threads(1)
    print(json.dumps({name: faults(case) for name, case in CASES.items()}))
