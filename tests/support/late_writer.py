"""Calls behind a kernel that lets the launch behind it begin at once, and writes what the call reads long after: one that does not
wait reads what was there before. For GPUs from 9.0 on."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from support.attention_cases import same_bits
from support.kernels import Launches

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


def check_behind_late_writes(op, cases, attrs, constant=()):
    """The calls of an operator with these inputs, of equal shapes, one after the other in a graph and in the same tensors, give
    what each gives alone, whichever tensor is written right before each. constant: inputs that all have alike."""
    given = [{name: t if t is None else t.cuda() for name, t in inputs.items()} for inputs in cases]
    copy = lambda inputs: {name: t if t is None else t.clone() for name, t in inputs.items()}  # noqa: E731
    held, right = copy(given[0]), []
    launches = Launches(op, held, attrs, in_place=True)
    for inputs in given:
        alone = Launches(op, copy(inputs), attrs, in_place=True)
        alone.run()
        torch.cuda.synchronize()
        right.append(alone.outputs)
    for late in (name for name, t in held.items() if t is not None and name not in constant):
        write_late(held[late], given[0][late])  # compiled
        kept, graph = [], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs in given:
                for name, t in inputs.items():
                    if t is not None and name != late:
                        held[name].copy_(t)
                write_late(held[late], inputs[late])
                launches.run()
                kept.append({name: t.clone() for name, t in launches.outputs.items()})
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            for turn, outputs in enumerate(kept):
                for name, t in outputs.items():
                    assert same_bits(t.cpu(), right[turn][name].cpu()), (late, turn, name)
