"""Times DecayGates on CUDA beside PyTorch, eager and compiled, and writes JSON and a table.

    python -m bench.kernels.decay_gates OUT [--rounds 30] [--drawn 20]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, all contenders of a line in turn, with the
L2 cache flushed by reading before each. The floor is inputs and outputs moved once at 4.25 TB/s, what an H200 reaches in
copies. Lines with D are of a decay for each key dimension. --drawn adds shapes that are drawn from a seed.
"""

import random
import statistics

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, Launches, captured, shape_table, time_shapes, times

SEED = 20261128
# (B, N, H, D or None): heads of Falcon-H1 1.5B, Qwen3-Next, Nemotron-H and Kimi-Linear, in prompts and steps.
SHAPES = [(16, 2048, 24, None), (1, 8192, 32, None), (1, 8192, 128, None), (1, 8192, 32, 128)]
SHAPES += [(1, 1, 24, None), (64, 1, 32, None), (64, 1, 128, None), (64, 1, 32, 128)]


def drawn(count):
    """B from 1 to 64, N from 1 to 16k with at most 2^16 tokens together, H from 1 to 128, a third with D from 16 to 256."""
    draw, shapes = random.Random(SEED), []
    while len(shapes) < count:
        batch, tokens, heads = round(2 ** draw.uniform(0, 6)), round(2 ** draw.uniform(0, 14)), round(2 ** draw.uniform(0, 7))
        width = None if draw.random() < 2 / 3 else 8 * draw.randint(2, 32)
        if batch * tokens <= 1 << 16 and batch * tokens * heads * (width or 1) <= 1 << 27:
            shapes.append((batch, tokens, heads, width))
    return shapes


def gates(raw, rate, bias, beta_input):
    step = torch.nn.functional.softplus(raw.float() + bias)
    return (rate.unsqueeze(-1) if raw.dim() == 4 else rate) * step, step, beta_input.float().sigmoid()


def line(shape, rounds):
    B, N, H, D = shape
    heads = (H,) if D is None else (H, D)
    raw = torch.randn(B, N, *heads, device="cuda", dtype=torch.bfloat16)
    rate, bias = -torch.rand(H, device="cuda"), torch.randn(heads, device="cuda")
    beta_input = torch.randn(B, N, H, device="cuda", dtype=torch.bfloat16)
    inputs = {"input": raw, "rate": rate, "bias": bias, "beta_input": beta_input}
    attributes = {"per_key": int(D is not None), "return_step": 1, "return_beta": 1}
    torch.compiler.reset()  # each shape is compiled for itself
    launches, compiled = Launches("DecayGates", inputs, attributes), torch.compile(gates, dynamic=False)
    calls = {"torch": lambda: gates(*inputs.values()), "torch.compile": lambda: compiled(*inputs.values())}
    found = list(launches.run().values())
    for name, call in calls.items():
        for x, y in zip(found, call(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=f"{shape}: apart from {name}")
    graphs = {"ours": launches.capture()} | {name: captured(call) for name, call in calls.items()}
    medians = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    moved = sum(x.numel() * x.element_size() for x in (*inputs.values(), *found))
    return {"shape": shape, "type": "bfloat16", "floor_us": moved / COPY_BYTES_PER_US, "us": medians}


def table(report):
    return shape_table(report, "B, N, H, D")


def main():
    time_shapes(__doc__, SHAPES, drawn, line, table)


if __name__ == "__main__":
    main()
