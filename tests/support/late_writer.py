"""A kernel that lets the launch behind it begin at once, and writes long after: whoever does not wait for it reads what was there
before. For GPUs from 9.0 on."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

BLOCK = 4096
TURNS = 8192  # some 15 microseconds


@triton.jit
def _write_late(to, source, count, turns, block: tl.constexpr):
    gdc_launch_dependents()
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(source + at, at < count)
    passed = 0.0
    for _ in range(turns):
        passed = passed * 0.5 + 1.0
    tl.store(to + at, tl.where(passed < 0, 0, x), at < count)


def write_late(to, source):
    """Copies a tensor's bytes, on torch's current stream."""
    to, source = (t.view(-1).view(torch.int8) for t in (to, source))
    _write_late[(-(-to.numel() // BLOCK),)](to, source, to.numel(), TURNS, block=BLOCK)
