"""Gates of recurrent states, from what layers project, in float32, and how checkpoints of the states are rounded."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)) as torch has it: x itself where the difference is below the last bit. Small results by their
    series, since 1 + exp(x) would round them off."""
    power = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(power < 1e-3, power - 0.5 * power * power, tl.log(1.0 + power)))


@triton.jit
def delta_gates(decay, step, log_decay, bias):
    """Decay, a logarithm, and step of the gated delta rule."""
    return -tl.exp(log_decay) * softplus(decay.to(tl.float32) + bias), tl.sigmoid(step.to(tl.float32))


@triton.jit
def since(total, token):
    """What is left of the state of each token when another one reads it."""
    earlier = token[:, None] >= token[None, :]
    return tl.where(earlier, tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def saturated(x, dtype: tl.constexpr):
    """Numbers of `dtype`; beyond the range of float16, its largest one."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)
