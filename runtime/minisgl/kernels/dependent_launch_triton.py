# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs, so that its launch
and its reads of weights cost no time of their own (CUDA C++ Programming Guide, "Programmatic Dependent Launch").

What every kernel with a `PDL` flag keeps to:

- Before `wait_for_previous` it reads nothing but parameters, which nobody writes once they are loaded, and what was
  there before the last ordinary launch: a step has one, the embedding, between its tables and its first layer. It
  writes nothing at all: memory that it writes may still be read by an earlier kernel.
- It may read what the kernel before has waited for, where that one lets it start only after its own wait, but not from
  the L1 cache, which may hold what was there earlier.
- Every program of it waits, whether or not it has work. To wait is to wait for the one kernel before, complete and
  flushed; only because that one has waited as well are all earlier ones over, too.
- `start_next` comes after its own early reads are under way: those of the next kernel queue up behind them.

An ordinary launch, such as torch's and cuBLAS's, begins when all before it is over. CUDA graphs keep all of this.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the programs of the next kernel start, as soon as all of this one have."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Go on when the kernel before is over and what it wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The arguments by which a kernel on `device` is launched that way; on GPUs before Hopper in the ordinary way."""
    if _has_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
