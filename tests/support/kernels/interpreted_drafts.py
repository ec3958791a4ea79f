"""The kernels of speculation in Triton's interpreter on a CPU, against the same functions in torch.

Run `python -m support.kernels.interpreted_drafts`. A process of its own, for whether kernels are interpreted is settled
when Triton is imported. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
import os

import torch

from support.kernels.drafts import CASES, Case, Step
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end

CPU = torch.device("cpu")


def agrees(case: Case) -> bool:
    from minisgl.kernels.speculation.place_drafts_triton import place_drafts_cuda
    from minisgl.kernels.speculation.verify_drafts_triton import verify_drafts_cuda

    ours, theirs = Step(case, CPU), Step(case, CPU)
    return ours.placed(place_drafts_cuda) == theirs.placed() and ours.verified(verify_drafts_cuda) == theirs.verified()


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: agrees(case) for name, case in CASES.items()}))
