"""Times GatedDeltaRule and GatedDeltaRuleGrad on CUDA, prompts and steps, and writes JSON and a table.

    python -m bench.kernels.gated_delta_rule OUT [--rounds 30] [--peers fla] [--drawn 20]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, with the L2 cache flushed by reading before
each. The floor is inputs, outputs and states moved once at 4.25 TB/s, what an H200 reaches in copies. Heads are 16 of queries
and keys and 48 of values, 128 wide, but where 32 of each stand, as Kimi-Linear has them, and in the shapes that --drawn adds,
which are drawn from a seed, each with a decay of each token and with one of each key dimension. "Steep" decays are 40 times as
fast as others. The peer is fla-core
(`pip install fla-core`), its chunk_gated_delta_rule or chunk_kda, for calls that it takes: 16-bit, 64 tokens and more. Where it
takes no more value heads than key heads, it gets repeated ones, which are made outside of what is timed. Its time for gradients
is that of both passes less that of the forward; ours starts from the inputs.
"""

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, Launches, captured, times

SEED = 20261123
LONGEST = 16384


class Shape(NamedTuple):
    lengths: tuple[int, ...]  # of requests, all alike unless they are packed
    dtype: str = "bfloat16"
    special: str = ""  # "key": a decay of each key dimension, "v_first": the order of the state, "grad": all gradients
    heads: tuple[int, int] = (16, 48)  # of queries and keys, of values
    widths: tuple[int, int] = (128, 128)
    packed: bool = False


SHAPES = [
    Shape((2048,)),
    Shape((8192,)),
    Shape((2048,) * 4),
    Shape((8192,), "float16"),
    Shape((512,)),
    Shape((512,) * 16),
    Shape((2048,), "float32"),
    Shape((2048,), special="key"),
    Shape((2048,), special="key", heads=(32, 32)),
    Shape((8192,), special="key", heads=(32, 32)),
    Shape((8192,), "float16", special="key", heads=(32, 32)),
    Shape((2048,) * 4, special="key", heads=(32, 32)),
    Shape((512,), special="key", heads=(32, 32)),
    Shape((8192,), special="steep key", heads=(32, 32)),
    Shape((8192,), heads=(8, 8), widths=(256, 256)),
    Shape((1,)),
    Shape((1,), special="v_first"),
    Shape((1,) * 43),
    Shape((1,) * 43, special="v_first"),
    Shape((1,) * 43, special="key"),
    Shape((4,) * 43),
    Shape((2048,), special="grad"),
    Shape((8192,), special="grad"),
    Shape((2048,) * 4, special="grad"),
    Shape((2048,), special="grad key"),
]


def drawn(count):
    """Heads and groups of them, widths from 32 to 256, lengths from 64 to 16k, half of them packed."""
    draw = random.Random(SEED)
    shapes = []
    for i in range(count):
        keys, packed = 2 ** draw.randrange(5), i % 2 == 1
        heads, widths = (keys, keys * draw.choice((1, 2, 3, 4))), (8 * draw.randint(4, 32), 8 * draw.randint(4, 32))
        requests = draw.randint(1, 8)
        longest = LONGEST // requests
        lengths = [round(math.exp(draw.uniform(math.log(64), math.log(longest)))) for _ in range(requests)]
        lengths = tuple(lengths) if packed else (lengths[0],) * requests
        dtype = draw.choice(("float16", "bfloat16"))
        shapes += [Shape(lengths, dtype, special, heads, widths, packed) for special in ("", "key")]
    return shapes


def inputs_of(shape):
    kind, (keys, values), (K, V) = getattr(torch, shape.dtype), shape.heads, shape.widths
    requests = len(shape.lengths)
    batch, tokens = (1, sum(shape.lengths)) if shape.packed else (requests, shape.lengths[0])

    def tensor(heads, *width):
        return torch.randn(batch, heads, tokens, *width, device="cuda")

    inputs = {"query": tensor(keys, K).to(kind), "key": tensor(keys, K).to(kind), "value": tensor(values, V).to(kind)}
    inputs["log_decay"] = -tensor(values, *[K] * ("key" in shape.special)).abs() * (5 if "steep" in shape.special else 1 / 8)
    inputs["beta"] = torch.rand(batch, values, tokens, device="cuda")
    width = (V, K) if shape.special == "v_first" else (K, V)
    inputs["initial_state"] = torch.randn(requests, values, *width, device="cuda")
    if shape.packed:
        offsets = [sum(shape.lengths[:i]) for i in range(requests + 1)]
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    return inputs


def launches_of(shape):
    inputs = inputs_of(shape)
    if "grad" in shape.special:
        inputs["grad_output"] = torch.randn_like(inputs["value"])
        inputs["grad_final_state"] = torch.randn_like(inputs["initial_state"])
        launches = Launches("GatedDeltaRuleGrad", inputs, {"normalize_qk": 1, "grad_decay": 1, "grad_state": 1})
    else:
        attributes = {"normalize_qk": 1, "return_state": 1, "state_v_first": int(shape.special == "v_first")}
        launches = Launches("GatedDeltaRule", inputs, attributes, in_place=True)
    moved = [*inputs.values(), *launches.outputs.values()]
    return launches, sum(t.numel() * t.element_size() for t in moved)


def fla_call(shape, inputs, repeats, backward):
    """A call of fla-core's kernels with keys and queries repeated so many times; with backward, of its gradients too."""
    if "key" in shape.special:
        from fla.ops.kda import chunk_kda as rule
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    given = {name: inputs[name].transpose(1, 2).contiguous() for name in ("query", "key", "value", "log_decay", "beta")}
    for name in ("query", "key"):
        given[name] = given[name].repeat_interleave(repeats, 2)
    given["initial_state"], offsets = inputs["initial_state"].clone(), inputs.get("cu_seqlens")

    def forward():
        return rule(
            given["query"],
            given["key"],
            given["value"],
            g=given["log_decay"],
            beta=given["beta"],
            initial_state=given["initial_state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **({} if offsets is None else {"cu_seqlens": offsets.long()}),
        )

    if not backward:
        return torch.no_grad()(forward)
    grads = inputs["grad_output"].transpose(1, 2).contiguous(), inputs["grad_final_state"]
    for tensor in given.values():
        tensor.requires_grad_()
    return lambda: torch.autograd.grad(forward(), list(given.values()), grads)


def fla_graphs(shape, inputs):
    """{name: graph} of fla-core's kernels for the same call: the forward, and for gradients both passes too. {} where it does
    not take the call."""
    if shape.dtype == "float32" or shape.special == "v_first" or min(shape.lengths) < 64:
        return {}
    wanted = {"fla_us": False} if "grad" not in shape.special else {"fla_forward_us": False, "fla_both_us": True}
    for repeats in (1, shape.heads[1] // shape.heads[0]):  # versions differ in what they take, and in what they raise
        try:
            return {name: captured(fla_call(shape, inputs, repeats, backward)) for name, backward in wanted.items()}
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  fla: {type(error).__name__}: {error}"[:160])
    return {}


def line(shape, rounds, peers):
    launches, moved = launches_of(shape)
    graphs = {"us": launches.capture()}
    if "fla" in peers:
        graphs |= fla_graphs(shape, launches.inputs)
    found = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    if "fla_both_us" in found:
        found["fla_us"] = found["fla_both_us"] - found["fla_forward_us"]
    print(shape, {name: round(t, 2) for name, t in found.items()}, flush=True)
    return {**shape._asdict(), "floor_us": moved / COPY_BYTES_PER_US, **found}


def requests_of(row):
    lengths = row["lengths"]
    return " + ".join(map(str, lengths)) if row["packed"] else f"{len(lengths)} x {lengths[0]}"


def table(report):
    lines = [
        " ".join(filter(None, (f"{report['gpu']}, {report['date']}.", report.get("note")))),
        "",
        "| requests x tokens | heads | K, V | type | | floor µs | ours µs | fla µs | fla / ours |",
        "|---" * 9 + "|",
    ]
    for row in report["rows"]:
        cells = [requests_of(row), "/".join(map(str, row["heads"])), ", ".join(map(str, row["widths"])), row["dtype"]]
        cells += [row["special"], f"{row['floor_us']:.1f}", f"{row['us']:.1f}"]
        fla = row.get("fla_us")
        cells += ["", ""] if fla is None else [f"{fla:.1f}", f"{fla / row['us']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peers", default="", help="fla, which has to be installed")
    parser.add_argument("--drawn", type=int, default=0)
    arguments = parser.parse_args()
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": []}
    for shape in [*SHAPES, *drawn(arguments.drawn)]:  # what is measured is kept where the rest is not
        report["rows"].append(line(shape, arguments.rounds, arguments.peers.split(",")))
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
