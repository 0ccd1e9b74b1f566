"""Times RmsNorm on CUDA beside PyTorch, eager and compiled, and writes JSON and a table.

    python -m bench.kernels.rms_norm OUT [--rounds 30] [--drawn 20]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, all contenders of a line in turn, with the
L2 cache flushed by reading before each. The floor is inputs and outputs moved once at 4.25 TB/s, what an H200 reaches in
copies. Lines with a sum are of a residual stream, those with a gate of a gate behind the norm. --drawn adds shapes that are
drawn from a seed.
"""

import random
import statistics

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, Launches, captured, shape_table, time_shapes, times

SEED = 20261130
# (B, N, C, group or 0, with what): residual streams of Llama-3-8B and 1B, queries of Qwen3-8B, Qwen3.5's gated norms.
SHAPES = [(1, 8192, 4096, 0, "sum"), (16, 2048, 2048, 0, "sum"), (1, 8192, 4096, 128, ""), (1, 8192, 2048, 128, "gate")]
SHAPES += [
    (1, 1, 4096, 0, "sum"),
    (64, 1, 4096, 0, "sum"),
    (1, 1, 4096, 128, ""),
    (64, 1, 4096, 128, ""),
    (16, 1, 2048, 128, "gate"),
]


def drawn(count):
    """B from 1 to 64, N from 1 to 16k with at most 2^16 tokens together, C from 64 to 16k, most in heads of 64 to 256."""
    draw, shapes = random.Random(SEED), []
    while len(shapes) < count:
        batch, tokens = round(2 ** draw.uniform(0, 6)), round(2 ** draw.uniform(0, 14))
        width = 64 * round(2 ** draw.uniform(0, 8))
        group = draw.choice((0, 64, 128, 256))
        if batch * tokens <= 1 << 16 and batch * tokens * width <= 1 << 28 and width % (group or 1) == 0:
            shapes.append((batch, tokens, width, group, draw.choice(("", "sum", "gate"))))
    return shapes


def norm(x, weight, addend=None, gate=None, group=0):
    total = x if addend is None else x + addend
    parts = total.float().unflatten(-1, (-1, group or x.shape[-1]))
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2) * weight
    if gate is not None:
        y = y * torch.nn.functional.silu(gate.float())
    return (y.to(x.dtype), total) if addend is not None else (y.to(x.dtype),)


def line(shape, rounds):
    B, N, C, group, kind = shape
    x, other = (torch.randn(B, N, C, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = {"input": x, "weight": torch.randn(C, device="cuda")} | {
        {"sum": "addend"}.get(kind, kind): other for _ in kind[:1]
    }
    attributes = {"group": group, "return_sum": int(kind == "sum")}
    arguments = {"x" if name == "input" else name: t for name, t in inputs.items()} | {"group": group}
    torch.compiler.reset()  # each shape is compiled for itself
    launches, compiled = Launches("RmsNorm", inputs, attributes), torch.compile(norm, dynamic=False)
    calls = {"torch": lambda: norm(**arguments), "torch.compile": lambda: compiled(**arguments)}
    found = list(launches.run().values())
    for name, call in calls.items():
        for y, z in zip(found, call(), strict=True):
            torch.testing.assert_close(y, z, rtol=1e-2, atol=1e-2, msg=f"{shape}: apart from {name}")
    graphs = {"ours": launches.capture()} | {name: captured(call) for name, call in calls.items()}
    medians = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    moved = sum(t.numel() * t.element_size() for t in (*inputs.values(), *found))
    return {"shape": shape, "type": "bfloat16", "floor_us": moved / COPY_BYTES_PER_US, "us": medians}


def table(report):
    return shape_table(report, "B, N, C, group, with")


def main():
    time_shapes(__doc__, SHAPES, drawn, line, table)


if __name__ == "__main__":
    main()
