"""Times CausalConv on CUDA beside PyTorch's depthwise convolution and causal-conv1d, and writes JSON and a table.

    python -m bench.kernels.causal_conv OUT [--rounds 30] [--drawn 20]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, all contenders of a line in turn, with the
L2 cache flushed by reading before each. The floor is input, output and states moved once at 4.25 TB/s, what an H200 reaches
in copies. Ours reads and writes the state; PyTorch's convolution, eager and compiled, has the tokens before joined to its
input, and SiLU behind it, and keeps no state. causal-conv1d (`pip install causal-conv1d`) takes part where it is installed.
PyTorch and causal-conv1d get channels first, as theirs lie best. --drawn adds shapes that are drawn from a seed.
"""

import importlib.util
import random
import statistics

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, Launches, captured, shape_table, time_shapes, times

SEED = 20261123
TAPS = 4
# (B, N, C): channels of Qwen3-Next, Nemotron-H and Falcon-H1 1.5B, in prompts and steps.
SHAPES = [(1, 2048, 8192), (1, 8192, 8192), (4, 2048, 10_240), (16, 512, 3840), (1, 1, 8192), (64, 1, 8192), (64, 1, 10_240)]


def drawn(count):
    """B from 1 to 64, N from 1 to 16k with at most 2^16 tokens together, C from 64 to 16k in steps of 8."""
    draw, shapes = random.Random(SEED), []
    while len(shapes) < count:
        batch, tokens = round(2 ** draw.uniform(0, 6)), round(2 ** draw.uniform(0, 14))
        channels = 8 * round(2 ** draw.uniform(3, 11))
        if batch * tokens <= 1 << 16:
            shapes.append((batch, tokens, channels))
    return shapes


def peers_of(x, weight, state):
    """{name: a call} over channels first."""
    turned = torch.cat([state.to(x.dtype), x], 1).transpose(1, 2).contiguous()
    kernel = weight.t().contiguous()[:, None]

    def convolved():
        return torch.nn.functional.silu(torch.nn.functional.conv1d(turned, kernel, groups=turned.shape[1]))

    torch.compiler.reset()  # each shape is compiled for itself
    calls = {"torch": convolved, "torch.compile": torch.compile(convolved, dynamic=False)}
    if importlib.util.find_spec("causal_conv1d"):
        from causal_conv1d import causal_conv1d_fn, causal_conv1d_update

        first, taps = x.transpose(1, 2).contiguous(), kernel[:, 0]
        before = torch.cat([torch.zeros_like(state[:, :1]), state], 1).to(x.dtype).transpose(1, 2).contiguous()
        if x.shape[1] == 1:
            calls["causal-conv1d"] = lambda: causal_conv1d_update(first, before, taps, activation="silu")
        else:
            calls["causal-conv1d"] = lambda: causal_conv1d_fn(first, taps, activation="silu")
    return calls


def line(shape, rounds):
    B, N, C = shape
    x = torch.randn(B, N, C, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(TAPS, C, device="cuda", dtype=torch.bfloat16)
    state = torch.randn(B, TAPS - 1, C, device="cuda")
    inputs = {"input": x, "weight": weight, "initial_state": state}
    calls = peers_of(x, weight, state.clone())
    launches = Launches("CausalConv", inputs, {"activation": "silu", "return_state": 1}, in_place=True)
    found, expected = launches.run()["output"].float(), calls["torch"]().transpose(1, 2).float()
    error = (found - expected).abs().max().item()
    assert error <= 2**-6 * expected.abs().max().item(), f"{shape}: {error} apart from PyTorch's"
    graphs = {"ours": launches.capture()} | {name: captured(call) for name, call in calls.items()}
    medians = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    moved = 2 * x.numel() * x.element_size() + 2 * state.numel() * state.element_size()
    return {"shape": shape, "type": "bfloat16", "floor_us": moved / COPY_BYTES_PER_US, "us": medians}


def table(report):
    return shape_table(report, "B, N, C")


def main():
    time_shapes(__doc__, SHAPES, drawn, line, table)


if __name__ == "__main__":
    main()
