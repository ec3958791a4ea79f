"""A kernel compiled for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

_BITS = {"fp8e4nv": 8, "bf16": 16, "i16": 16, "fp32": 32}


def map_type(kind: str, rows: int, columns: int, *, swizzle: int = 128) -> str:
    """Type of a tensor map of tiles; `swizzle` 0: they stay in their order."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=_BITS[kind], rank=2)
    return f"tensordesc<{kind}[{rows}, {columns}],{layout!r}>"


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    default: str = "*i32",
    aligned: Collection[str] = (),
    architecture: int = 90,
    options: Mapping[str, int] | None = None,
) -> Any:
    """`kernel` with these constants; its other arguments are of `types`, those that are not named of the `default`.

    Pointers `aligned` are to multiples of 16 bytes, without which nothing is copied asynchronously.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, default) for name in names}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return compile(
        source(
            kernel,
            signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", architecture, 32),
        options=dict(options or {}),
    )
