"""`as_stored` for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def as_stored(x, inverse_scale, pool):
    """`x` as the memory behind the pointers `pool` stores it, see `stored_kv.as_stored`."""
    dtype: tl.constexpr = pool.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * inverse_scale, -448.0), 448.0)
    return x.to(dtype)
