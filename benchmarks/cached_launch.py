"""Launches of a Triton kernel that look up the compiled kernel with less work on the host than `kernel[grid](...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INT32 = (1 << 31) - 1


class CachedLaunch:
    """Launches of one kernel whose constants come last among its parameters. The first launch with each combination of
    types, alignments and constants goes through Triton, later ones directly to the compiled kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._constants = [param.name for param in kernel.params if param.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, grid: tuple[int, int, int], *args: torch.Tensor | int | float, **constants: Any) -> None:
        key: list[Any] = [*constants.values()]
        values: list[int | float] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                key.append((arg.dtype, address % 16 == 0))
                values.append(address)
            elif isinstance(arg, int):
                key.append((arg == 1, arg % 16 == 0, -_INT32 <= arg <= _INT32))
                values.append(arg)
            else:
                values.append(arg)
        launch = self._compiled.get(tuple(key))
        if launch is not None:
            launch(grid, values)
            return
        compiled = self._kernel[grid](*args, **constants)
        if compiled is not None:
            self._compiled[tuple(key)] = _launcher(compiled, [constants[name] for name in self._constants])


def _launcher(compiled: Any, constants: list[Any]) -> Callable[..., None]:
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    device, stream_of = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream

    def launch(grid: tuple[int, int, int], values: list[int | float]) -> None:
        run(*grid, stream_of(device), function, metadata, None, None, None, *values, *constants)

    return launch
