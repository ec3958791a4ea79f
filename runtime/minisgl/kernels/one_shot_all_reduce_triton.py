"""All-reduce in one step: every rank writes its message into the memory of all ranks, and each adds up what it
received. Short messages are bound by latency, and one write has the least; NCCL takes two or three.

A program sends one block of the message to the same program on the other ranks, signals it by a flag, and waits for
theirs. Blocks alternate between two buffers: when a program sends for the third time, every rank has begun its second
turn, so it has read the first. Programs of one launch do not depend on each other, and a launch of fewer programs
leaves the turns of the others unchanged. The programs of a long message need not all fit on the device at once: they
start in the order of their numbers on every rank.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

_BLOCK_BYTES = 4096
_FLAG_BYTES = 4
_WARPS = 4
_TIMEOUT = tl.constexpr(120_000_000_000)
"""Nanoseconds to wait for the other ranks; then the kernel fails, and the host's next call with it. A host that waits
for a kernel that never ends could not be interrupted."""


@triton.jit
def _fail_when_late(begin):
    """Fail after the time limit. `begin`: tensor of the time at which the wait began."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .s64 waited;
        .reg .pred late;
        mov.u64 waited, %globaltimer;
        sub.s64 waited, waited, $1;
        setp.gt.s64 late, waited, $2;
        @late trap;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,l",
        [begin, begin * 0 + _TIMEOUT],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rank"])
def _all_reduce(
    message, memories, turns, num_elements, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, FLAGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`memories` [RANKS]: addresses of the memory of each rank: flags, int32 [programs, RANKS] in FLAGS bytes, then
    blocks, [2, RANKS, CAPACITY] elements."""
    program = tl.program_id(0)
    elements = program * BLOCK + tl.arange(0, BLOCK)
    mask = elements < num_elements
    ranks = tl.arange(0, RANKS)
    element = message.dtype.element_ty
    start_next(PDL)
    wait_for_previous(PDL)
    turn = tl.load(turns + program) + 1
    place = (turn & 1) * RANKS
    own = tl.load(message + elements, mask, other=0.0)
    for peer in tl.static_range(RANKS):
        blocks = tl.multiple_of((tl.load(memories + peer) + FLAGS).to(tl.pointer_type(element)), 16)
        tl.store(blocks + (place + rank) * CAPACITY + elements, own, mask)
    # All threads write before one of them sets the flag, and the release orders their writes before it.
    tl.debug_barrier()
    flags = tl.load(memories + ranks).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
    tl.atomic_xchg(flags, turn + ranks * 0, sem="release", scope="sys")
    memory = tl.load(memories + rank)
    told = memory.to(tl.pointer_type(tl.int32)) + program * RANKS + ranks
    begin = ranks.to(tl.int64) * 0 + tl.extra.cuda.globaltimer()
    # A rank that is one turn ahead has also finished this one. The difference is correct even if turns overflow.
    while tl.min(tl.atomic_add(told, ranks * 0, sem="acquire", scope="sys") - turn, 0) < 0:
        _fail_when_late(begin)
    tl.debug_barrier()
    blocks = tl.multiple_of((memory + FLAGS).to(tl.pointer_type(element)), 16)
    total = tl.zeros((BLOCK,), tl.float32)
    # In rank order, so that all ranks get the same bits. Bypass L1, which does not see writes of other ranks.
    for peer in tl.static_range(RANKS):
        total += tl.load(blocks + (place + peer) * CAPACITY + elements, mask, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
    tl.store(message + elements, total.to(element), mask)
    tl.store(turns + program, turn)


def num_programs(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES)


def flag_bytes(capacity_bytes: int, ranks: int) -> int:
    return num_programs(capacity_bytes) * ranks * _FLAG_BYTES


def memory_bytes(capacity_bytes: int, ranks: int) -> int:
    """Bytes of memory per rank for messages of up to `capacity_bytes`; initially zeros."""
    return flag_bytes(capacity_bytes, ranks) + 2 * ranks * capacity_bytes


def one_shot_all_reduce(
    message: torch.Tensor, memories: torch.Tensor, turns: torch.Tensor, rank: int, capacity_bytes: int
) -> None:
    """Sum `message`, a multiple of 16 bytes and at most `capacity_bytes`, over the ranks in place. `memories`: int64
    [ranks], addresses of the `memory_bytes` of each rank; the number of ranks is a power of two. `turns`: int32
    [num_programs(capacity_bytes)], initially zeros. All ranks call it with the same sizes in the same order."""
    ranks = len(memories)
    assert message.is_contiguous() and message.nbytes <= capacity_bytes and capacity_bytes % _BLOCK_BYTES == 0
    _all_reduce[(num_programs(message.nbytes),)](
        message, memories, turns, message.numel(), rank, RANKS=ranks, BLOCK=_BLOCK_BYTES // message.itemsize,
        CAPACITY=capacity_bytes // message.itemsize, FLAGS=flag_bytes(capacity_bytes, ranks), num_warps=_WARPS,
        **dependent_launch(message.device),
    )  # fmt: skip
