"""Programmatic dependent launch: the programs of a kernel start while the previous kernel still runs, which hides its
launch and its reads of weights (CUDA C++ Programming Guide, "Programmatic Dependent Launch").

Rules for every kernel with a `PDL` flag:

- Before `wait_for_previous` it only reads parameters, which do not change after loading, and data from before the last
  ordinary launch: a step has one, the embedding, between its tables and its first layer. It writes nothing: an earlier
  kernel may still read the memory.
- It may read data that the previous kernel has waited for, if that kernel calls `start_next` only after its own wait,
  but not through the L1 cache, which may hold older values.
- Every program waits, whether or not it has work. Waiting is for completion and flush of the previous kernel only; all
  earlier kernels have finished because the previous one has waited too.
- `start_next` comes after its own early reads were issued: those of the next kernel queue up behind them.

An ordinary launch, such as torch's and cuBLAS's, begins when all previous work has finished. CUDA graphs preserve this.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the programs of the next kernel start once all programs of this one have called this."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has finished and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments for dependent launch on `device`; for an ordinary launch on GPUs before Hopper."""
    if _has_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
