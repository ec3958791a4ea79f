"""Words of four FP8 weights to float32 or bfloat16, and of the four inputs that they are multiplied with, in registers.

A loop keeps words in registers: single FP8 numbers would each take one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def four_floats(words):
    """Four FP8 numbers in each of `words` (int32) to float32: four tensors of the shape of `words`."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 lows, highs;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 lows, low;
            cvt.rn.f16x2.e4m3x2 highs, high;
            mov.b32 {a, b}, lows;
            mov.b32 {c, d}, highs;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
        }
        """,
        "=f,=f,=f,=f,r",
        [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def four_bfloat16(words):
    """As `four_floats`, to bfloat16; NaN becomes 480."""
    # The bits of e4m3 in those of bfloat16 are a number that is too small by 2^120; so are numbers below the smallest
    # normal one.
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 t, u, m;
            mov.b32 m, 0x7B807B80;
            prmt.b32 t, $4, 0, 0x1404;
            and.b32 u, t, 0x7F007F00;
            shr.u32 u, u, 4;
            lop3.b32 t, t, 0x80008000, u, 0xEA;
            mul.rn.bf16x2 t, t, m;
            mov.b32 {$0, $1}, t;
            prmt.b32 t, $4, 0, 0x3424;
            and.b32 u, t, 0x7F007F00;
            shr.u32 u, u, 4;
            lop3.b32 t, t, 0x80008000, u, 0xEA;
            mul.rn.bf16x2 t, t, m;
            mov.b32 {$2, $3}, t;
        }
        """,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.bfloat16,) * 4,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _float_of_bfloat16(low_half):
    return (low_half << 16).to(gl.float32, bitcast=True)


@gluon.jit
def four_inputs(row, word, there):
    """Load four bfloat16 numbers of each of the words: four tensors in float32; zeros unless `there`."""
    pairs = gl.load(row.to(gl.pointer_type(gl.int64), bitcast=True) + word, there, other=0)
    low = pairs.to(gl.int32)
    high = (pairs >> 32).to(gl.int32)
    second = (low & -65536).to(gl.float32, bitcast=True)
    return _float_of_bfloat16(low), second, _float_of_bfloat16(high), (high & -65536).to(gl.float32, bitcast=True)
