"""Times the CUDA kernels of the linear attention operators beside flash-linear-attention (fla) and writes JSON and a table.

    python -m bench.kernels.linear_attention OUT [--only forward,backward,...] [--no-fla]

writes OUT.json and OUT.md. Every number is the median over rounds of a CUDA graph's replay between two events, with all
contenders of a line in turn and the L2 cache flushed by reading before each. The floor is every input read and every output
written once at 4.25 TB/s, what an H200 reaches when it copies. fla's backward is its graph of forward and backward less its
graph of the forward. fla's float32 products are TF32, as Triton's are unless TRITON_F32_DEFAULT=ieee is set: the errors are
not ours.

`crossing` sets NormalizedLinearAttention beside torch's flash SDPA; `memory` is what a training step's call allocates, by
torch's count; `moved` are the bytes of device memory that a call moves, counted by ncu, which must be on the path.
`auto` times the algorithms on 200 random shapes from a fixed seed; tests/cpp/test_choose.py judges the cost model by them.
"""

import argparse
import datetime
import json
import math
import os
import random
import statistics
from pathlib import Path

import torch

from bench.kernels.timing import Launches, captured, counted, times

COPY_BYTES_PER_US = 4.25e6
ALGORITHMS = ("causal_dot_product", "fleet", "lightning")
# (B, H, N, D)
LINES = [
    (1, 32, 2048, 128),
    (1, 32, 8192, 128),
    (1, 32, 32768, 128),
    (1, 32, 131072, 128),
    (16, 32, 2048, 128),
    (1, 8, 8192, 128),
    (1, 8, 32768, 128),
    (4, 16, 65536, 128),
    (1, 32, 8192, 64),
    (16, 32, 2048, 64),
]
FLOAT32 = [(1, 32, 2048, 128), (1, 32, 8192, 128), (16, 32, 2048, 128)]
NORMALIZED = [(1, 32, 2048, 128), (1, 32, 8192, 128), (1, 32, 32768, 128), (16, 32, 2048, 128)]
# The paper's shape of NormalizedLinearAttention (004, figures 1 to 4).
NORMALIZED32 = [(4, 16, N, 128) for N in (1000, 3000, 10000, 30000, 100000, 300000)]
CROSSING = [(4, 16, N, 128) for N in (512, 1024, 1536, 2048, 3000, 4096, 8192, 16384, 32768)]
MOVED = [(4, 16, N, 128) for N in (2048, 8192, 32768)]
# (B, H, Hkv, tokens)
MAMBA = "8/8/128"  # of queries, keys and states
STEPS = [(1, 32, 32, 1), (4, 32, 32, 1), (16, 32, 32, 1), (64, 32, 32, 1), (64, 32, 8, 1), (16, 32, 32, 4), (16, 32, 32, 16)]
RANDOM_SHAPES = 200


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def operands(B, H, N, D, dtype):
    q, k, v, g = (normal(B, H, N, D, dtype=dtype) for _ in range(4))
    return q, k / math.sqrt(D), v, g


def slopes(H):
    """ln γ of the heads, from 1 - 2^-5 to nearly 1 - 2^-8."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(H, device="cuda") * 3 / H)).float()


def contiguous(*tensors):
    """As [B,N,H,D], which is how fla takes them."""
    return [t.transpose(1, 2).contiguous() for t in tensors]


def fla_calls(q, k, v, log_decay, grad=None):
    """{name: call} of fla's forward or, with grad, of its forward and backward."""
    from fla.ops.retention import chunk_retention
    from fla.ops.simple_gla import chunk_simple_gla, fused_chunk_simple_gla

    q, k, v, *rest = contiguous(q, k, v, *([] if grad is None else [grad]))
    functions = {
        "simple_gla": lambda: chunk_simple_gla(q, k, v, g_gamma=log_decay, scale=1.0)[0],
        "fused_chunk": lambda: fused_chunk_simple_gla(q, k, v, g_gamma=log_decay, scale=1.0)[0],
        "retention": lambda: chunk_retention(q, k, v, scale=1.0)[0],
    }
    return with_backward(functions, (q, k, v), rest)


def with_backward(functions, inputs, grad):
    if not grad:
        return functions
    for x in inputs:
        x.requires_grad_()
    return {name: lambda f=f: torch.autograd.grad(f(), inputs, grad[0]) for name, f in functions.items()}


def fla_normalized(q, k, v, grad=None):
    from fla.ops.linear_attn import chunk_linear_attn

    q, k, v, *rest = contiguous(q, k, v, *([] if grad is None else [grad]))
    return with_backward({"linear_attn": lambda: chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0]}, (q, k, v), rest)


def fla_steps(q, k, v, log_decay, state):
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    q, k, v = contiguous(q, k, v)
    return {
        "fused_recurrent": lambda: fused_recurrent_simple_gla(
            q, k, v, g_gamma=log_decay, scale=1.0, initial_state=state, output_final_state=True
        )[0]
    }


def fastest_fla(calls, rounds):
    """(name, µs) of the fastest of fla's forms that work on these shapes; (None, None) if none does."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except Exception as error:  # a form that lacks a shape is left out, and the log says so
            torch.cuda.synchronize()
            print(f"  fla {name}: {type(error).__name__}: {error}".replace("\n", " ")[:160], flush=True)
    if not graphs:
        return None, None
    medians = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    return min(medians.items(), key=lambda item: item[1])


def bytes_of(node):
    tensors = [t for t in (*node.inputs.values(), *node.outputs.values()) if t is not None]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def line(section, title, nodes, rounds, fla=None, floor_bytes=None):
    """One line of the table. nodes: {name: Launches}; fla: (name, µs)."""
    medians = {n: statistics.median(t) for n, t in times({n: node.capture() for n, node in nodes.items()}, rounds).items()}
    first = next(iter(nodes.values()))
    # A tensor that is read and written in place counts once in bytes_of.
    floor = (floor_bytes or bytes_of(first)) / COPY_BYTES_PER_US
    row = {
        "section": section,
        "case": title,
        "floor_us": floor,
        "us": medians,
        "extra_bytes": {n: node.workspace[1] for n, node in nodes.items()},
        "io_bytes": bytes_of(first),
    }
    if fla and fla[1]:
        row |= {"fla": fla[0], "fla_us": fla[1]}
    best = medians[next(iter(nodes))]
    beside = f"  fla[{fla[0]}] {fla[1]:8.1f} x {fla[1] / best:5.2f}" if fla and fla[1] else ""
    print(
        f"{section:10} {title:34} floor {floor:8.1f}  "
        + "  ".join(f"{n} {t:8.1f}" for n, t in medians.items())
        + f"  x floor {best / floor:5.2f}{beside}  extra {first.workspace[1] / row['io_bytes']:.3f} io",
        flush=True,
    )
    return row


def title_of(B, H, N, D):
    return f"B{B} H{H} N{N} D{D}"


def forward_line(section, shape, dtype, algorithms, args):
    B, H, N, D = shape
    q, k, v, _ = operands(*shape, dtype)
    inputs = {"query": q, "key": k, "value": v, "log_decay": slopes(H)}
    nodes = {a: Launches("CausalLinearDecay", inputs, {"algorithm": a}) for a in algorithms}
    fla = fastest_fla(fla_calls(q, k, v, inputs["log_decay"]), args.rounds) if args.fla else None
    return line(section, title_of(*shape), nodes, args.rounds, fla)


def mamba(N, **attrs):
    """Launches of Mamba-2's shape, 8 groups of keys and queries for 128 states, and the bytes that it must move."""
    q, k, v = normal(1, 8, N, 128), normal(1, 8, N, 128), normal(1, 128, N, 64)
    inputs = {"query": q, "key": k, "value": v, "log_decay": -torch.rand(1, 128, N, device="cuda") / 8}
    if attrs:
        inputs["initial_state"] = normal(1, 128, 128, 64, dtype=torch.float32)
    state = 2 * 4 * inputs["initial_state"].numel() if attrs else 0
    return Launches("CausalLinearDecay", inputs, attrs, in_place=bool(attrs)), state + 2 * (
        q.numel() + k.numel() + 2 * v.numel()
    )


def forward(args):
    for shape in LINES:
        yield forward_line("forward", shape, torch.bfloat16, ("auto", "lightning"), args)
    node, floor = mamba(2048)
    yield line("forward", f"Mamba-2, {MAMBA} heads, 1 x 2048", {"auto": node}, args.rounds, None, floor)


def float32(args):
    for shape in FLOAT32:
        yield forward_line("float32", shape, torch.float32, ("auto", "lightning"), args)


def recurrence(args):
    for dtype in (torch.float32, torch.bfloat16):
        row = forward_line(
            "recurrence",
            (1, 32, 8192, 128),
            dtype,
            ("causal_dot_product", "fleet"),
            argparse.Namespace(rounds=args.rounds, fla=False),
        )
        row["case"] += f" {str(dtype)[6:]}"
        yield row
    for shape in ((1, 32, 8192, 1), (1, 32, 8192, 8), (1, 32, 8192, 16)):
        B, H, N, R = shape
        q, k = normal(B, H, N, R), normal(B, H, N, R)
        inputs = {"query": q, "key": k, "value": normal(B, H, N, 128), "log_decay": slopes(H)}
        nodes = {a: Launches("CausalLinearDecay", inputs, {"algorithm": a}) for a in ("auto", *ALGORITHMS)}
        yield line("recurrence", f"B{B} H{H} N{N} R{R} Dv128 bfloat16", nodes, args.rounds)


def minus(both, alone):
    return (both[0], both[1] - alone[1]) if both[1] and alone[1] else None


def backward(args):
    for shape in LINES:
        q, k, v, grad = operands(*shape, torch.bfloat16)
        log_decay = slopes(shape[1])
        inputs = {"query": q, "key": k, "value": v, "log_decay": log_decay, "grad_output": grad}
        nodes = {
            "grad": Launches("CausalLinearDecayGrad", inputs, {}),
            "with grad_decay": Launches("CausalLinearDecayGrad", inputs, {"grad_decay": 1}),
        }
        fla = None
        if args.fla:
            alone = fastest_fla(fla_calls(q, k, v, log_decay), args.rounds)
            fla = minus(fastest_fla(fla_calls(q, k, v, log_decay, grad), args.rounds), alone)
        yield line("backward", title_of(*shape), nodes, args.rounds, fla)
        torch.cuda.empty_cache()


def normalized_nodes(q, k, v, grad):
    """(forward, backward without and with gradients of the coefficients) of NormalizedLinearAttention; the forward has run."""
    inputs = {"query": q, "key": k, "value": v}
    forward = Launches("NormalizedLinearAttention", inputs, {})
    forward.run()
    saved = {n: forward.outputs[n] for n in ("output", "normalizer")}
    inputs = inputs | saved | {"grad_output": grad}
    return forward, *(Launches("NormalizedLinearAttentionGrad", inputs, {"grad_coefficients": wanted}) for wanted in (0, 1))


def positive_operands(shape, dtype):
    q, k, v, grad = operands(*shape, dtype)
    return q.abs(), k.abs(), v, grad


def normalized_lines(section, shapes, dtype, args):
    for shape in shapes:
        q, k, v, grad = positive_operands(shape, dtype)
        forward, backward, with_coefficients = normalized_nodes(q, k, v, grad)
        alone = fastest_fla(fla_normalized(q, k, v), args.rounds) if args.fla else None
        yield line(section, title_of(*shape) + " forward", {"ours": forward}, args.rounds, alone)
        fla = minus(fastest_fla(fla_normalized(q, k, v, grad), args.rounds), alone) if args.fla else None
        yield line(
            section,
            title_of(*shape) + " backward",
            {"ours": backward, "with grad_coefficients": with_coefficients},
            args.rounds,
            fla,
        )
        del q, k, v, grad, forward, backward, with_coefficients  # the next shape needs the memory
        torch.cuda.empty_cache()


def normalized(args):
    yield from normalized_lines("normalized", NORMALIZED, torch.bfloat16, args)


def normalized32(args):
    yield from normalized_lines("normalized32", NORMALIZED32, torch.float32, args)


def flash(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def both(function, q, k, v, grad):
    """The call of a function's forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def crossing_graphs(q, k, v, grad):
    forward, backward, _ = normalized_nodes(q, k, v, grad)
    return {
        "forward": forward.capture(),
        "backward": backward.capture(),
        "flash forward": captured(lambda: flash(q, k, v)),
        "flash both": captured(both(flash, q, k, v, grad)),
    }, (forward, backward)


def crossing(args):
    """Forward and backward beside causal flash SDPA, bfloat16: from which length on ours is faster."""
    for shape in CROSSING:
        graphs, nodes = crossing_graphs(*positive_operands(shape, torch.bfloat16))
        us = {n: statistics.median(t) for n, t in times(graphs, args.rounds).items()}
        us["flash backward"] = us.pop("flash both") - us["flash forward"]
        print("crossing", title_of(*shape), {n: round(t, 1) for n, t in us.items()}, flush=True)
        yield {"section": "crossing", "case": title_of(*shape), "tokens": shape[2], "us": us}
        del graphs, nodes
        torch.cuda.empty_cache()


def peak(call):
    """Bytes that are allocated at once at most during a call, its results among them."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def memory(args):
    """What forward and backward allocate through PyTorch's autograd, beside query, key, value and grad_output."""
    from leanfleet.export import torch_ops

    for shape in CROSSING[3:]:
        q, k, v, grad = positive_operands(shape, torch.bfloat16)
        calls = {
            "ours": both(lambda *x: torch_ops.normalized_linear_attention(*x)[0], q, k, v, grad),
            "flash": both(flash, q, k, v, grad),
        }
        if args.fla:
            calls |= fla_normalized(q, k, v, grad)
        row = {
            "section": "memory",
            "case": title_of(*shape),
            "tokens": shape[2],
            "tensor_bytes": q.numel() * q.element_size(),
            "bytes": {n: peak(call) for n, call in calls.items()},
        }
        print(row["case"], {n: f"{b / row['tensor_bytes']:.2f} tensors" for n, b in row["bytes"].items()}, flush=True)
        yield row
        del calls
        torch.cuda.empty_cache()


def once(case):
    """What `moved` has ncu watch. case: forward or backward, and the sizes."""
    which, *shape = case.split("x")
    forward, backward, _ = normalized_nodes(*positive_operands(tuple(map(int, shape)), torch.bfloat16))
    torch.cuda.synchronize()
    node = forward if which == "forward" else backward
    torch.cuda.profiler.start()
    node.run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print("io_bytes", bytes_of(node))


def moved(args):
    """Bytes of device memory that a call moves over those of its inputs and outputs (004, figure 4)."""
    units = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    for shape in MOVED:
        row = {"section": "moved", "case": title_of(*shape), "tokens": shape[2], "dram_bytes": {}, "io_bytes": {}}
        for which in ("forward", "backward"):
            found, lines = counted(
                "bench.kernels.linear_attention",
                ["dram__bytes_read.sum", "dram__bytes_write.sum"],
                "x".join(map(str, (which, *shape))),
            )
            row["io_bytes"][which] = next(int(n.split()[1]) for n in lines if n.startswith("io_bytes"))
            row["dram_bytes"][which] = sum(r["Metric Value"] * units[r["Metric Unit"]] for r in found)
        print(row["case"], {n: f"{b / row['io_bytes'][n]:.2f} times" for n, b in row["dram_bytes"].items()}, flush=True)
        yield row


def steps(args):
    for B, H, Hkv, N in STEPS:
        D, P = 128, 2 * B
        q, k, v = normal(B, H, N, D), normal(B, Hkv, N, D), normal(B, Hkv, N, D)
        pool = normal(P, Hkv, D, D, dtype=torch.float32)
        inputs = {
            "query": q,
            "key": k,
            "value": v,
            "log_decay": slopes(Hkv),
            "initial_state": pool,
            "state_index": torch.randperm(P, device="cuda")[:B].int(),
        }
        node = Launches("CausalLinearDecay", inputs, {"return_state": 1}, in_place=True)
        states = 2 * B * Hkv * D * D * 4
        floor = states + (q.numel() * 2 + k.numel() * 2) * 2
        fla = None
        if args.fla and H == Hkv:
            fla = fastest_fla(fla_steps(q, k, v, inputs["log_decay"], pool[:B].clone()), args.rounds)
        yield line("steps", f"{B * Hkv} states, {H}/{Hkv} heads, {N} tokens", {"auto": node}, args.rounds, fla, floor)
    node, floor = mamba(1, return_state=1)
    yield line("steps", f"Mamba-2, {MAMBA} heads, 1 token", {"auto": node}, args.rounds, None, floor)
    D = 128
    for B, H in ((16, 32), (64, 32)):
        inputs = {
            "query": normal(B, H, 1, D).abs(),
            "key": normal(B, H, 1, D).abs(),
            "value": normal(B, H, 1, D),
            "initial_state": normal(B, H, D, D, dtype=torch.float32),
            "initial_key_sum": torch.rand(B, H, D, device="cuda"),
            "initial_value_sum": normal(B, H, D, dtype=torch.float32),
            "initial_count": torch.ones(B, dtype=torch.int32, device="cuda"),
        }
        node = Launches("NormalizedLinearAttention", inputs, {"return_state": 1}, in_place=True)
        yield line("steps", f"normalised, {B * H} states, 1 token", {"auto": node}, args.rounds, None, 2 * B * H * D * D * 4)


def random_shape(source):
    """A call that takes at most some milliseconds with every algorithm."""
    while True:
        Hkv, group = source.choice((1, 2, 4, 8, 16, 32)), source.choice((1, 1, 1, 2, 4, 8))
        B, N = source.choice((1, 1, 2, 4, 16, 64)), round(2 ** source.uniform(0, 15))
        R, Dv = source.choice((1, 4, 8, 16, 32, 64, 96, 128, 192, 256)), source.choice((32, 64, 96, 128, 192, 256))
        dtype = source.choice(("float32", "float16", "bfloat16"))
        if B * Hkv * group * N * (R + Dv) <= 3e8 and B * Hkv * group * N * R * Dv <= 6e9 and N * group <= 65536:
            return B, Hkv * group, Hkv, N, R, Dv, dtype


def auto(args):
    """The algorithms and which of them auto took: its bits say so."""
    source, penalties = random.Random(0), []
    for _ in range(RANDOM_SHAPES):
        B, H, Hkv, N, R, Dv, dtype = shape = random_shape(source)
        if R <= args.auto_keys:
            continue
        T = getattr(torch, dtype)
        inputs = {
            "query": normal(B, H, N, R, dtype=T),
            "key": normal(B, Hkv, N, R, dtype=T) / R**0.5,
            "value": normal(B, Hkv, N, Dv, dtype=T),
            "log_decay": slopes(Hkv),
        }
        nodes = {a: Launches("CausalLinearDecay", inputs, {"algorithm": a, "return_state": 1}) for a in ("auto", *ALGORITHMS)}
        graphs = {a: node.capture() for a, node in nodes.items()}
        medians = {a: statistics.median(t) for a, t in times({a: graphs[a] for a in ALGORITHMS}, args.auto_rounds).items()}
        graphs["auto"].replay()
        torch.cuda.synchronize()
        same = [a for a in ALGORITHMS if all(torch.equal(t, nodes[a].outputs[n]) for n, t in nodes["auto"].outputs.items())]
        chosen = min(same, key=medians.get)  # of two names of one kernel, timed twice
        penalties.append(medians[chosen] / min(medians.values()))
        yield {"section": "auto", "shape": shape, "us": medians, "auto": chosen}
    worst = max(penalties)
    print(
        f"auto over the fastest, {len(penalties)} shapes: geometric mean {statistics.geometric_mean(penalties):.3f}, "
        f"worst {worst:.2f}",
        flush=True,
    )


def crossing_table(rows):
    yield from (
        "## Beside causal flash SDPA, bfloat16, NormalizedLinearAttention",
        "",
        "| case | forward | flash | ratio | backward | flash | ratio |",
        "|---|---|---|---|---|---|---|",
    )
    for r in rows:
        us = r["us"]
        yield (
            f"| {r['case']} | "
            + " | ".join(
                f"{us[n]:.1f} | {us['flash ' + n]:.1f} | {us['flash ' + n] / us[n]:.2f}" for n in ("forward", "backward")
            )
            + " |"
        )


def memory_table(rows):
    names = list(rows[0]["bytes"])
    yield from (
        "## Allocated by forward and backward, in tensors of [B,H,N,D], bfloat16",
        "",
        "| case | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    )
    for r in rows:
        yield f"| {r['case']} | " + " | ".join(f"{r['bytes'][n] / r['tensor_bytes']:.2f}" for n in names) + " |"


def moved_table(rows):
    yield from (
        "## Device memory moved over the tensors once, by ncu, NormalizedLinearAttention, bfloat16",
        "",
        "| case | forward | backward |",
        "|---|---|---|",
    )
    for r in rows:
        yield f"| {r['case']} | " + " | ".join(f"{r['dram_bytes'][n] / r['io_bytes'][n]:.2f}" for n in r["io_bytes"]) + " |"


PARTS = {"crossing": crossing_table, "memory": memory_table, "moved": moved_table}


def table(report):
    """The lines as markdown; the worst are shown as the best are."""
    lines = [
        f"{report['device']}, torch {report['torch']}, CUDA {report['cuda']}. Medians of {report['rounds']} graph replays "
        f"in µs, L2 flushed; a graph of one tiny node takes {report['empty_graph_us']:.1f}. The floor: bytes that must "
        "move at 4.25 TB/s.",
        "",
    ]
    lines += [report["note"], ""] if "note" in report else []  # written by hand, of what the figures do not say
    for section in dict.fromkeys(r["section"] for r in report["rows"]):
        rows = [r for r in report["rows"] if r["section"] == section]
        if section == "auto":
            penalties = [r["us"][r["auto"]] / min(r["us"].values()) for r in rows]
            lines += [
                "## auto",
                "",
                f"Over the fastest of three algorithms on {len(rows)} random shapes: geometric mean "
                f"{statistics.geometric_mean(penalties):.3f}, worst {max(penalties):.2f}.",
                "",
            ]
            continue
        if section in ("crossing", "memory", "moved"):
            lines += [*PARTS[section](rows), ""]
            continue
        names = list(dict.fromkeys(n for r in rows for n in r["us"]))
        lines += [
            f"## {section}",
            "",
            "| case | floor | " + " | ".join(names) + " | first over floor | fla | fla over first | extra memory over io |",
            "|---" * (len(names) + 6) + "|",
        ]
        for r in rows:
            first = next(iter(r["us"].values()))
            cells = [
                r["case"],
                f"{r['floor_us']:.1f}",
                *(f"{r['us'][n]:.1f}" if n in r["us"] else "" for n in names),
                f"{first / r['floor_us']:.2f}",
                f"{r['fla_us']:.1f} ({r['fla']})" if "fla" in r else "",
                f"{r['fla_us'] / first:.2f}" if "fla" in r else "",
                f"{next(iter(r['extra_bytes'].values())) / r['io_bytes']:.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        speeds = [r["fla_us"] / next(iter(r["us"].values())) for r in rows if "fla" in r]
        if speeds:
            lines += ["", f"Geometric mean over fla: {statistics.geometric_mean(speeds):.2f}."]
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument(
        "--only", default="forward,backward,float32,normalized,normalized32,crossing,memory,moved,recurrence,steps,auto"
    )
    parser.add_argument("--no-fla", dest="fla", action="store_false")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--auto-rounds", type=int, default=9)
    parser.add_argument("--auto-keys", type=int, default=0, help="auto: of the shapes those with more key columns alone")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.once:
        return once(args.once)
    word = torch.zeros(1, device="cuda")
    empty = statistics.median(times({"empty": captured(lambda: word.zero_())}, args.rounds)["empty"])
    report = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rounds": args.rounds,
        "empty_graph_us": empty,
        "copy_bytes_per_us": COPY_BYTES_PER_US,
        "fla_float32_products": os.environ.get("TRITON_F32_DEFAULT", "tf32"),
        "rows": [],
    }
    for name in args.only.split(","):
        for row in globals()[name](args):
            report["rows"].append(row)
            torch.cuda.empty_cache()
        Path(args.out).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        Path(args.out).with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
