"""Sizes of the tests of GPU kernels. Under a sanitizer, which looks at each access to memory, they are small."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final, TypeVar
from unittest import mock

import torch

SMALL: Final = os.environ.get("MINISGL_SMALL_GPU_TESTS") == "1"
_MULTIPROCESSORS: Final = 4

T = TypeVar("T")


def sized(usual: T, small: T) -> T:
    """The size, or the cases, to test. `small` ones must launch all kernels of the `usual` ones, compiled for the same
    constants, and reach beyond the first tile and end within one."""
    return small if SMALL else usual


@contextmanager
def sized_device() -> Iterator[None]:
    """With small sizes the GPU claims to have few multiprocessors. So kernels that divide their work among all of them
    still have several blocks for each program."""
    if not SMALL:
        yield
        return
    major, minor = torch.cuda.get_device_capability()
    few = SimpleNamespace(major=major, minor=minor, multi_processor_count=_MULTIPROCESSORS)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: few):
        yield
