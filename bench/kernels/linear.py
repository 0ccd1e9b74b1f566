"""Times Linear on CUDA beside cuBLAS, and a decoder's layers made of either, and writes JSON and tables.

    python -m bench.kernels.linear OUT [--rounds 15] [--drawn 20]

writes OUT.json and OUT.md. Medians of a CUDA graph's replay between two events, all contenders of a line in turn, float16.

A product: microseconds a call, of calls after each other, each with a weight of its own, so that weights come from memory;
cuBLAS by PyTorch, and behind a gated product our GatedActivation; Linear without the promise of a constant weight, which waits
for the launch before, and with it. floor: the weight read once at 4.25 TB/s, what an H200 reaches in copies. --drawn adds
products that are drawn from a seed, of 1 to 48 rows.

A layer: microseconds of one of several of Llama's shapes, with norms, attention over pages and the feed-forward layer, whose
products are cuBLAS's or Linear's; all else is ours and the same.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from bench.kernels.dependent_launch import PAGE, WIDTH, pages_of, step_inputs
from bench.kernels.timing import COPY_BYTES_PER_US, Launches, captured, times

SEED = 20261130
# (rows, depth, columns, gated): products of Llama-3-8B and 1B, and of more rows, which are cuBLAS's in both.
SHAPES = [
    (rows, *shape)
    for shape in ((4096, 6144, 0), (4096, 4096, 0), (4096, 14336, 1), (14336, 4096, 0), (2048, 3072, 0), (2048, 8192, 1))
    for rows in (1, 8, 16, 32, 64)
] + [(2048, 4096, 6144, 0), (2048, 4096, 14336, 1)]
# (name, hidden, heads, kv heads, feed-forward width), heads of 128; (requests, context).
LAYERS = [("llama-3-8b", 4096, 32, 8, 14336), ("llama-3.2-1b", 2048, 16, 4, 8192)]
LINES = [(1, 2000), (8, 2000), (16, 2000), (32, 1000), (64, 1000)]
MOST_BYTES, MOST_CALLS = 2 << 30, 16  # of weights of a line


def drawn(count):
    draw = random.Random(SEED)
    sizes = lambda low, high: 64 * round(2 ** draw.uniform(low, high))  # noqa: E731
    return [(round(2 ** draw.uniform(0, 5.6)), sizes(3, 8), sizes(3, 9), draw.choice((0, 0, 1))) for _ in range(count)]


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def product(shape, rounds):
    rows, depth, columns, gated = shape
    each = depth * columns * (1 + gated) * 2
    x = normal(1, rows, depth)
    weights = [normal(depth, columns * (1 + gated)) / depth**0.5 for _ in range(max(2, min(MOST_CALLS, MOST_BYTES // each)))]
    y = torch.empty(1, rows, columns * (1 + gated), device="cuda", dtype=torch.float16)
    seen = [w.view(depth, 2, columns) if gated else w for w in weights]
    attributes = {"gated": gated, "activation": "silu"}
    activation = Launches("GatedActivation", {"gate_up": y.view(1, rows, 2, columns)}, {}) if gated else None
    ours = {
        name: [Launches("Linear", {"input": x, "weight": w}, attributes | {"constant_weight": constant}) for w in seen]
        for name, constant in (("waits", 0), ("ours", 1))
    }

    def cublas():
        for w in weights:
            torch.mm(x[0], w, out=y[0])
            if activation is not None:
                activation.run()
        return y if activation is None else activation.outputs["output"]

    exact = (x[0].double() @ weights[-1].double()).unflatten(-1, (1 + gated, columns))
    exact = torch.nn.functional.silu(exact[:, 0]) * exact[:, 1] if gated else exact[:, 0]
    graphs = {"cublas": captured(cublas)} | {n: captured(lambda c=calls: [c_.run() for c_ in c]) for n, calls in ours.items()}
    for graph in graphs.values():
        graph.replay()
    for found in (cublas(), *(calls[-1].outputs["output"] for calls in ours.values())):
        torch.testing.assert_close(found[0].double(), exact, rtol=4e-3, atol=4e-3, msg=f"{shape}")
    medians = {n: statistics.median(t) / len(weights) for n, t in times(graphs, rounds).items()}
    return {"shape": shape, "type": "float16", "floor_us": each / COPY_BYTES_PER_US, "us": medians}


class Layer:
    """A layer between two norms, whose products are those of Linear or of cuBLAS. x: what the last norm gave; stream: the
    residual stream."""

    def __init__(self, weights, caches, shared, x, stream, linear):
        ((qkv, out, up, down), norms), self.linear = weights, linear
        batch, heads = x.shape[1], qkv.shape[1] // WIDTH
        self.qkv = self.product(x, qkv)
        packed = self.qkv[1].view(batch, heads, WIDTH)
        inputs = {"query": packed, **caches, **shared}
        self.attention = Launches("LeanAttention", inputs, {"append": 1, "packed_qkv": 1, "layout": "bnhd"}, in_place=True)
        attended = self.attention.outputs["output"].view(1, batch, -1)
        self.out = self.product(attended, out)
        self.first = self.norm(stream, self.out[1], norms[0])
        self.up = self.product(self.first.outputs["output"], up, gated=True)
        hidden = self.up[1]
        self.activation = None
        if not linear:
            self.activation = Launches("GatedActivation", {"gate_up": hidden.view(1, batch, 2, -1)}, {})
            hidden = self.activation.outputs["output"]
        self.down = self.product(hidden, down)
        self.second = self.norm(self.first.outputs["sum"], self.down[1], norms[1])

    def product(self, x, weight, gated=False):
        """(what runs it, its output)."""
        if not self.linear:
            y = torch.empty(1, x.shape[1], weight.shape[1], device="cuda", dtype=torch.float16)
            return (lambda: torch.mm(x[0], weight, out=y[0])), y
        seen = weight.view(weight.shape[0], 2, -1) if gated else weight
        launches = Launches("Linear", {"input": x, "weight": seen}, {"gated": int(gated), "constant_weight": 1})
        return launches.run, launches.outputs["output"]

    def norm(self, stream, addend, weight):
        inputs = {"input": stream, "weight": weight, "addend": addend}
        return Launches("RmsNorm", inputs, {"return_sum": 1, "epsilon": 1e-5})

    def run(self):
        self.qkv[0]()
        self.attention.run()
        self.out[0]()
        self.first.run()
        self.up[0]()
        if self.activation is not None:
            self.activation.run()
        self.down[0]()
        self.second.run()


def layers(name, hidden, heads, kv_heads, width, batch, context, rounds):
    count = 16 if hidden <= 2048 else 8
    shared = step_inputs(batch, context)
    sizes = ((hidden, (heads + 2 * kv_heads) * WIDTH), (heads * WIDTH, hidden), (hidden, 2 * width), (width, hidden))
    weights = [
        ([normal(*s) / s[0] ** 0.5 for s in sizes], [torch.ones(hidden, device="cuda") for _ in range(2)]) for _ in range(count)
    ]
    pages = batch * pages_of(context)
    caches = [{n: normal(pages, PAGE, kv_heads, WIDTH) for n in ("key_cache", "value_cache")} for _ in range(count)]
    x, stream = normal(1, batch, hidden), normal(1, batch, hidden)
    chains = {}
    for kind, linear in (("cublas", False), ("ours", True)):
        chain, at, sums = [], x, stream
        for own, cache in zip(weights, caches, strict=True):
            chain.append(Layer(own, cache, shared, at, sums, linear))
            at, sums = chain[-1].second.outputs["output"], chain[-1].second.outputs["sum"]
        chains[kind] = chain
    graphs = {kind: captured(lambda c=chain: [layer.run() for layer in c]) for kind, chain in chains.items()}
    for graph in graphs.values():
        graph.replay()
    found = [chain[-1].second.outputs["output"].float() for chain in chains.values()]
    apart = ((found[0] - found[1]).norm() / found[0].norm()).item()
    assert apart < 2e-2, f"{name}, {batch} x {context}: outputs are {apart:.1e} apart"
    medians = {n: statistics.median(t) / count for n, t in times(graphs, rounds).items()}
    moved = sum(a * b * 2 for a, b in sizes) + 2 * 2 * batch * context * kv_heads * WIDTH
    return {"layer": name, "line": f"{batch} x {context}", "apart": apart, "floor_us": moved / COPY_BYTES_PER_US, "us": medians}


def table(report):
    lines = [f"{report['gpu']}, {report['date']}, float16.", ""]
    if report["layers"]:
        lines += ["| layer | requests x context | floor µs | cuBLAS µs | Linear µs | |", "|---|---|---|---|---|---|"]
        for row in report["layers"]:
            a, b = row["us"]["cublas"], row["us"]["ours"]
            lines.append(f"| {row['layer']} | {row['line']} | {row['floor_us']:.1f} | {a:.1f} | {b:.1f} | {a / b:.3f}x |")
        lines.append("")
    lines += ["| rows, depth, columns, gated | floor µs | cuBLAS µs | Linear, waits µs | Linear µs | |", "|---" * 6 + "|"]
    for row in report["products"]:
        a, b, c = (row["us"][n] for n in ("cublas", "waits", "ours"))
        shape = ", ".join(map(str, row["shape"]))
        lines.append(f"| {shape} | {row['floor_us']:.1f} | {a:.2f} | {b:.2f} | {c:.2f} | {a / c:.3f}x |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--drawn", type=int, default=20)
    arguments = parser.parse_args()
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    report |= {"layers": [], "products": []}

    def keep(part, row):
        report[part].append(row)
        print({name: x for name, x in row.items() if name != "type"}, flush=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(table(report))
        torch.cuda.empty_cache()

    for layer in LAYERS:
        for line in LINES:
            keep("layers", layers(*layer, *line, arguments.rounds))
    for shape in [*SHAPES, *drawn(arguments.drawn)]:
        keep("products", product(shape, arguments.rounds))


if __name__ == "__main__":
    main()
