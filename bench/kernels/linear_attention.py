"""Times the CUDA kernels of the linear attention operators beside flash-linear-attention (fla) and writes JSON and a table.

    python -m bench.kernels.linear_attention OUT [--only forward,backward,...] [--no-fla] [--seconds S]

writes OUT.json and OUT.md. Every number is the median over rounds of a CUDA graph's replay between two events, with all
contenders of a line in turn and the L2 cache flushed by reading before each. The floor is every input read and every output
written once at 4.25 TB/s, what an H200 reaches when it copies. fla's backward is its graph of forward and backward less its
graph of the forward. fla's float32 products are TF32, as Triton's are unless TRITON_F32_DEFAULT=ieee is set: the errors are
not ours.

`crossing` sets NormalizedLinearAttention beside torch's flash SDPA; `memory` is what a training step's call allocates, by
torch's count; `moved` are the bytes of device memory that a call moves, ours and the peers', counted by ncu, which must be on
the path. `auto` times the algorithms on 200 random shapes from a fixed seed; tests/cpp/test_choose.py judges the cost model by
them.

`heads` and `lengths` are the sweeps of the papers' figures: head sizes from 32 to 256 at 4096 tokens (004, figures 2 and 3),
and lengths from 1k to 512k at 32 heads of 128 (003, figure 2). All contenders, ours among them, are calls of PyTorch, captured
forward ("forward") and forward and backward ("both"), whose difference is the backward; none gets gradients of its decays, but
chunk_gla, which has a decay of each key and gets that of the head repeated, computes them all the same. Outputs and gradients
are compared with float64 before anything is timed. Where a tensor is too large for all contenders to hold theirs at once, each
is alone. Their fla kernels are tuned over the configurations of 4 warps and 2 or 3 stages, unless --full-tuning is given, for
which Triton compiles hundreds of kernels for each head size and type. --seconds is how long a sweep may take before fla is left
out of its further lines. --sizes takes some lines of a sweep alone, so that several GPUs of one machine can share it; then

    python -m bench.kernels.linear_attention OUT --join ONE.json OTHER.json

puts what they measured into one report. `short` are prompts of 500 to 2,000 tokens beside torch's flash and cuDNN SDPA.
"""

import argparse
import datetime
import functools
import gc
import json
import math
import os
import random
import re
import statistics
import subprocess
import time
from pathlib import Path

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, FLA_TUNING, Launches, captured, counted, quick_tuning, times

DEVICE = "cuda"
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

# The sweeps' shapes. What is most wanted comes first, for fla may be left out of the last lines; lengths begin with a long one,
# for which its kernels are then tuned.
HEADS = [(4, 16, 4096, D) for D in (128, 64, 256, 32, 192, 96, 160)]
LENGTHS = [(1, 32, N, 128) for N in (16384, *(1024 << i for i in range(10) if i != 4))]
SWEPT = {"heads": HEADS, "lengths": LENGTHS}
# The paper's batch of short prompts (004) at several head sizes.
SHORT = [(8, 12, N, D) for D in (64, 96, 128) for N in (500, 1000, 2000)]
SWEPT_TYPES = ("bfloat16", "float32")
# {contender: (the order of its tensors' axes, the form of its scores x = q.k as `expected` reads it)}
CONTENDERS = {
    "NormalizedLinearAttention": ("bhnd", "1 + x normalised"),
    "NormalizedLinearAttention, unit rows": ("bhnd", "1 + x of unit rows normalised"),  # normalize_qk, as models train with it
    "CausalLinearDecay": ("bhnd", "x"),
    "CausalLinearDecay, decay": ("bhnd", "x decayed"),
    "chunk_linear_attn": ("bnhd", "x normalised"),
    "chunk_simple_gla": ("bnhd", "x"),
    "chunk_simple_gla, decay": ("bnhd", "x decayed"),
    "chunk_gla": ("bnhd", "x decayed"),
    "flash SDPA": ("bhnd", "softmax"),
}
SHORT_BESIDE = "NormalizedLinearAttention", "NormalizedLinearAttention, unit rows", "flash SDPA", "cuDNN SDPA"
FORMS = CONTENDERS | {"cuDNN SDPA": CONTENDERS["flash SDPA"]}  # which is beside short prompts alone
# (ours, a peer that computes the like)
PAIRS = [
    ("NormalizedLinearAttention", "chunk_linear_attn"),
    ("CausalLinearDecay", "chunk_simple_gla"),
    ("CausalLinearDecay, decay", "chunk_simple_gla, decay"),
    ("CausalLinearDecay, decay", "chunk_gla"),
    ("NormalizedLinearAttention", "flash SDPA"),
]
MOVED_BY = [n for n in CONTENDERS if n not in ("NormalizedLinearAttention, unit rows", "CausalLinearDecay", "chunk_simple_gla")]
FLASH_TOKENS = 65536  # beyond, forward and backward take seconds
TOGETHER = 2**28  # bytes of a tensor up to which all contenders' inputs, results and workspaces fit the GPU at once
CHECKED = 4096  # tokens of a head that are compared with float64
LINE_US = 1.5e6  # what the rounds of a line may take, where that leaves three
# Largest error over the largest value: of ours, of peers, whose float32 products are TF32 and who keep sums in 16 bits.
BOUNDS = {"bfloat16": (0.05, 0.25), "float32": (1e-3, 0.05)}


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def operands(B, H, N, D, dtype):
    q, k, v, g = (normal(B, H, N, D, dtype=dtype) for _ in range(4))
    return q, k / math.sqrt(D), v, g


def slopes(H):
    """ln γ of the heads, from 1 - 2^-5 to nearly 1 - 2^-8."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(H, device=DEVICE) * 3 / H)).float()


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


def softmax_by(backend):
    """Causal softmax attention by one of torch's kernels."""

    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


flash, cudnn = softmax_by("FLASH_ATTENTION"), softmax_by("CUDNN_ATTENTION")
SDPA = {"flash SDPA": flash, "cuDNN SDPA": cudnn}


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


# The sweeps


def is_fla(name):
    return name.startswith("chunk_")


def is_ours(name):
    return not is_fla(name) and name not in SDPA


def function_of(name, log_decay, gate):
    """A contender as a function of query, key and value. gate: log_decay at every key dimension, for chunk_gla."""
    if name in SDPA:
        return SDPA[name]
    if is_fla(name):
        from fla.ops.gla import chunk_gla
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla

        return {
            "chunk_linear_attn": lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0],
            "chunk_simple_gla": lambda q, k, v: chunk_simple_gla(q, k, v, scale=1.0)[0],
            "chunk_simple_gla, decay": lambda q, k, v: chunk_simple_gla(q, k, v, g_gamma=log_decay, scale=1.0)[0],
            "chunk_gla": lambda q, k, v: chunk_gla(q, k, v, gate, scale=1.0)[0],
        }[name]
    from leanfleet.export import torch_ops

    return {
        "NormalizedLinearAttention": lambda q, k, v: torch_ops.normalized_linear_attention(q, k, v)[0],
        "NormalizedLinearAttention, unit rows": lambda q, k, v: torch_ops.normalized_linear_attention(
            q, k, v, normalize_qk=True
        )[0],
        "CausalLinearDecay": lambda q, k, v: torch_ops.causal_linear_decay(q, k, v),
        "CausalLinearDecay, decay": lambda q, k, v: torch_ops.causal_linear_decay(q, k, v, log_decay),
    }[name]


def tensors_of(name, shape, dtype, drawn):
    """Query, key, value and gradient of the output in a contender's order of axes; drawn: those that others have, by order."""
    B, H, N, D = shape
    layout = FORMS[name][0]
    if layout not in drawn:
        drawn[layout] = positive_operands((B, H, N, D) if layout == "bhnd" else (B, N, H, D), dtype)
    return drawn[layout]


def bound_function(name, shape, dtype):
    """The contender's function at a shape, with the decays that it takes."""
    B, H, N, D = shape
    log_decay = slopes(H)
    gate = log_decay.to(dtype)[:, None].expand(B, N, H, D).contiguous() if name == "chunk_gla" else None
    return function_of(name, log_decay, gate)


def expected(form, q, k, v, log_decay):
    """The output by its definition, quadratic in the tokens; form: see CONTENDERS."""
    if form == "softmax":
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    if "unit" in form:
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    scores = q @ k.mT
    if "1 +" in form:
        scores = 1 + scores
    if "decayed" in form:
        at = torch.arange(q.shape[-2], device=q.device)
        scores = scores * torch.exp(log_decay * (at[:, None] - at).clamp_min(0))
    scores = scores.tril()
    if "normalised" in form:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores @ v


def error_of(name, tensors, found, log_decay):
    """Largest error over the largest value in the last head's first tokens. found: the output, or the gradients of query, key
    and value; those of key and value need all later tokens, and are looked at only where all are."""
    layout, form = FORMS[name]

    def head(tensor):
        return (tensor if layout == "bhnd" else tensor.transpose(1, 2))[-1:, -1:, :CHECKED].double()

    whole = tensors[0].shape[2 if layout == "bhnd" else 1] <= CHECKED
    leaves = [head(t).detach().requires_grad_() for t in tensors[:3]]
    right = expected(form, *leaves, log_decay.double())
    if isinstance(found, torch.Tensor):
        pairs = [(found, right.detach())]
    else:
        pairs = list(zip(found, torch.autograd.grad(right, leaves, head(tensors[3])), strict=True))[: 3 if whole else 1]
    return float(torch.stack([(head(a) - b).abs().max() / b.abs().max() for a, b in pairs]).max())  # NaN stays NaN


def call_of(name, way, tensors, function):
    """way: forward, or both for the gradients too."""
    q, k, v, grad = tensors
    return both(function, q, k, v, grad) if way == "both" else lambda: function(q, k, v)


def prepared(name, way, shape, dtype, drawn, row):
    """A call that was found right and whose memory stands in the row. Raises ValueError for one that is wrong."""
    tensors = tensors_of(name, shape, dtype, drawn)
    call = call_of(name, way, tensors, bound_function(name, shape, dtype))
    error = error_of(name, tensors, call(), slopes(shape[1])[-1])
    row["errors"].setdefault(name, {})[way] = error
    if not error <= BOUNDS[row["dtype"]][not is_ours(name)]:
        raise ValueError(f"{error:.2g} off float64")
    row["bytes"].setdefault(name, {})[way] = peak(call)
    return call


def reason(error):
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:120]


def measure(wanted, shape, dtype, row, rounds):
    """Adds to a row the times of contenders in turn, and why some have none. wanted: (contender, way)."""
    drawn, calls, graphs = {}, {}, {}  # a graph reads what its call holds
    for key in wanted:
        name, way = key
        try:
            calls[key] = prepared(name, way, shape, dtype, drawn, row)
            graphs[key] = captured(calls[key])
        except Exception as error:  # it is left out, and the table says why
            calls.pop(key, None)
            row["missing"].setdefault(name, {})[way] = reason(error)
        torch.cuda.empty_cache()
    if not graphs:
        return
    turn = sum(t[0] for t in times(graphs, 1).values())
    row["rounds"] = max(3, min(rounds, int(LINE_US / turn)))
    for (name, way), t in times(graphs, row["rounds"]).items():
        row["us"].setdefault(name, {})[way] = statistics.median(t)


def empty_row(section, shape, kind):
    """What `measure` fills."""
    size = math.prod(shape) * getattr(torch, kind).itemsize
    row = {"section": section, "case": title_of(*shape), "dtype": kind, "tokens": shape[2], "head_size": shape[3]}
    return row | {"tensor_bytes": size, "us": {}, "bytes": {}, "errors": {}, "missing": {}}


def sweep_line(section, shape, kind, fla, rounds):
    """One line of a sweep. kind: the type; fla: whether its kernels are timed too, or why not."""
    dtype, row = getattr(torch, kind), empty_row(section, shape, kind)
    size = row["tensor_bytes"]
    names = [n for n in CONTENDERS if n != "flash SDPA" or kind == "bfloat16" and shape[2] <= FLASH_TOKENS]
    if fla is not True:
        row["missing"] = {n: {"both": fla} for n in names if is_fla(n) and fla}
        names = [n for n in names if not is_fla(n)]
    wanted = [(n, way) for n in names for way in ("forward", "both")]
    for group in [wanted] if size <= TOGETHER else [[key] for key in wanted]:
        measure(group, shape, dtype, row, rounds)
        gc.collect()
        torch.cuda.empty_cache()
    print(section, row["case"], kind, {n: {w: round(t, 1) for w, t in us.items()} for n, us in row["us"].items()}, flush=True)
    for name, ways in row["missing"].items():
        print(f"  {name}: {ways}", flush=True)
    return row


def size_of(section, shape):
    """What a sweep's lines differ in."""
    return shape[3] if section == "heads" else shape[2]


def swept(section, sizes):
    """The shapes of a sweep; sizes: of those alone, None for all."""
    return [shape for shape in SWEPT[section] if sizes is None or size_of(section, shape) in sizes]


def sweep(section, args):
    until = time.monotonic() + args.seconds
    with quick_tuning(args.fla and not args.full_tuning):
        for shape in swept(section, args.sizes):
            for kind in SWEPT_TYPES:
                fla = args.fla and (time.monotonic() < until or "the sweep's seconds were up")
                yield sweep_line(section, shape, kind, fla, args.rounds)


def heads(args):
    yield from sweep("heads", args)


def lengths(args):
    yield from sweep("lengths", args)


def short(args):
    """Forward and backward of short prompts, bfloat16, beside the softmax kernels of torch."""
    for shape in SHORT:
        row = empty_row("short", shape, "bfloat16")
        measure([(n, way) for n in SHORT_BESIDE for way in ("forward", "both")], shape, torch.bfloat16, row, args.rounds)
        print("short", row["case"], row["us"], row["missing"], flush=True)
        yield row


# What moves


def moved_calls(name, shape):
    """[(forward or backward, its call, bytes of inputs and outputs)]; those bytes are of our nodes alone, else 0."""
    if name == "NormalizedLinearAttention":
        forward, backward, _ = normalized_nodes(*positive_operands(shape, torch.bfloat16))
        return [("forward", forward.run, bytes_of(forward)), ("backward", backward.run, bytes_of(backward))]
    q, k, v, grad = tensors_of(name, shape, torch.bfloat16, {})
    function = bound_function(name, shape, torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    output = function(*leaves)
    backward = functools.partial(torch.autograd.grad, output, leaves, grad, retain_graph=True)
    return [("forward", lambda: function(q, k, v), 0), ("backward", backward, 0)]


def once(name):
    """What `moved` has ncu watch: a contender's calls, after each a kernel that marks its end."""
    with quick_tuning(is_fla(name)):
        for shape in MOVED:
            for _, call, size in moved_calls(name, shape):
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                call()
                torch.cuda._sleep(1)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
                print("io_bytes", size)
            gc.collect()
            torch.cuda.empty_cache()


def sums_before_marks(rows):
    """Bytes of the kernels before each marking one, from what ncu counted."""
    units = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    sums, total, mark = [], 0, None
    for row in rows:
        if "spin_kernel" not in row["Kernel Name"]:
            total += row["Metric Value"] * units[row["Metric Unit"]]
        elif row["ID"] != mark:  # it has a row for each metric
            sums.append(total)
            total, mark = 0, row["ID"]
    return sums


def moved(args):
    """Bytes of device memory that calls move over those of our inputs and outputs (004, figure 4)."""
    ways = "forward", "backward"
    rows = [{"section": "moved", "case": title_of(*s), "tokens": s[2], "peers": {}, "missing": {}} for s in MOVED]
    for name in MOVED_BY:
        if is_fla(name) and not args.fla:
            continue
        try:
            metrics = ["dram__bytes_read.sum", "dram__bytes_write.sum"]
            found, lines = counted("bench.kernels.linear_attention", metrics, name)
        except subprocess.CalledProcessError as error:
            if name == MOVED_BY[0]:
                raise  # there is nothing to set the others beside
            said = (error.stdout + error.stderr).strip().splitlines() or [f"ended with {error.returncode}"]
            for row in rows:
                row["missing"][name] = said[-1][:120]
            continue
        sums = sums_before_marks(found)
        sizes = [int(n.split()[1]) for n in lines if n.startswith("io_bytes")]
        for i, row in enumerate(rows):
            pair = dict(zip(ways, sums[2 * i : 2 * i + 2], strict=True))
            if name == MOVED_BY[0]:
                row |= {"dram_bytes": pair, "io_bytes": dict(zip(ways, sizes[2 * i : 2 * i + 2], strict=True))}
            else:
                row["peers"][name] = pair
            print(row["case"], name, {w: f"{b / row['io_bytes'][w]:.2f} times" for w, b in pair.items()}, flush=True)
    yield from rows


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
    peers = list(dict.fromkeys(n for r in rows for n in r.get("peers", ())))
    yield from (
        "## Device memory moved over the tensors once, by ncu, NormalizedLinearAttention, bfloat16",
        "",
        "| case | forward | backward |" + "".join(f" {n}, forward | backward |" for n in peers),
        "|---" * (3 + 2 * len(peers)) + "|",
    )
    for r in rows:
        pairs = [r["dram_bytes"], *(r["peers"].get(n) for n in peers)]
        cells = [f"{p[w] / r['io_bytes'][w]:.2f}" if p else "" for p in pairs for w in r["io_bytes"]]
        yield f"| {r['case']} | " + " | ".join(cells) + " |"
    yield from left_out({r["case"]: {n: {"both": why} for n, why in r.get("missing", {}).items()} for r in rows})


def part(row, name, way):
    """µs of a contender's forward or backward in a line of a sweep; None: it has none."""
    us = row["us"].get(name, {})
    if way == "forward" or len(us) < 2:
        return us.get(way)
    return us["both"] - us["forward"]


def left_out(missing):
    """Lines of what has no figures. missing: {line: {contender: {way: reason}}}."""
    found = {}
    for label, names in missing.items():
        for name, ways in names.items():
            for way, why in ways.items():
                found.setdefault((f"{name}{' forward' * (way == 'forward')}", why), []).append(label)
    if found:
        yield from ("", "Without figures:", "")
        yield from (f"- {name}: {', '.join(labels)} ({why})" for (name, why), labels in found.items())


def short_table(rows):
    head = f"| case | {' | '.join(SHORT_BESIDE)} | fastest peer over {SHORT_BESIDE[0]} |"
    for number, way in enumerate(("forward", "backward")):
        yield from [""] * min(number, 1)
        yield from (f"## Short prompts, {rows[0]['dtype']}, {way}", "", head, "|---" * (2 + len(SHORT_BESIDE)) + "|")
        for r in rows:
            us = {n: part(r, n, way) for n in SHORT_BESIDE}
            fastest, own = min((t for n, t in us.items() if n in SDPA and t), default=None), us[SHORT_BESIDE[0]]
            cells = [r["case"], *("" if t is None else f"{t:.1f}" for t in us.values())]
            yield "| " + " | ".join([*cells, f"{fastest / own:.2f}" if own and fastest else ""]) + " |"
    yield from left_out({r["case"]: r["missing"] for r in rows})


def sweep_table(rows):
    """A sweep's lines by type: times forward and backward, how they compare, and memory."""
    section = rows[0]["section"]
    size, word = ("head_size", "head size") if section == "heads" else ("tokens", "tokens")
    where = re.sub(r" ?\bD\d+" if section == "heads" else r" ?\bN\d+", "", rows[0]["case"])
    for number, kind in enumerate(dict.fromkeys(r["dtype"] for r in rows)):
        yield from [""] * min(number, 1)
        lines = sorted((r for r in rows if r["dtype"] == kind), key=lambda r: r[size])
        names = [n for n in CONTENDERS if any(n in r["us"] for r in lines)]
        head = [f"| {word} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for way in ("forward", "backward"):
            yield from (f"## {section}: {where}, {kind}, {way}", "", *head)
            for r in lines:
                us = [part(r, n, way) for n in names]
                yield f"| {r[size]} | " + " | ".join("" if t is None else f"{t:.1f}" for t in us) + " |"
            ratios = {
                f"{peer} / {ours}": [
                    part(r, peer, way) / part(r, ours, way) for r in lines if part(r, peer, way) and part(r, ours, way)
                ]
                for ours, peer in PAIRS
            }
            told = [f"{n} {min(t):.2f} to {max(t):.2f}" for n, t in ratios.items() if t]
            yield from ("", f"Times of peers over ours: {'; '.join(told)}.", "") if told else ("",)
        yield from (f"## {section}: {where}, {kind}, allocated by forward and backward, in tensors of [B,H,N,D]", "", *head)
        for r in lines:
            tensors = [r["bytes"].get(n, {}).get("both") for n in names]
            yield f"| {r[size]} | " + " | ".join("" if b is None else f"{b / r['tensor_bytes']:.2f}" for b in tensors) + " |"
        yield from left_out({str(r[size]): r["missing"] for r in lines})
        there = {r["case"] for r in lines}
        absent = [title_of(*s) for s in SWEPT[section] if title_of(*s) not in there]
        yield from ("", f"Not measured: {', '.join(absent)}.") if absent else ()


PARTS = {
    "crossing": crossing_table,
    "memory": memory_table,
    "moved": moved_table,
    "short": short_table,
    "heads": sweep_table,
    "lengths": sweep_table,
}


def table(report):
    """The lines as markdown; the worst are shown as the best are."""
    floor = " The floor: bytes that must move at 4.25 TB/s." if any("floor_us" in r for r in report["rows"]) else ""
    fewest = min((r["rounds"] for r in report["rows"] if "rounds" in r), default=report["rounds"])
    rounds = report["rounds"] if fewest == report["rounds"] else f"{fewest} to {report['rounds']}"
    lines = [
        f"{report['device']}, torch {report['torch']}, CUDA {report['cuda']}. Medians of {rounds} graph replays "
        f"in µs, L2 flushed; a graph of one tiny node takes {report['empty_graph_us']:.1f}.{floor}",
        "",
    ]
    if any(r["section"] in SWEPT for r in report["rows"]):
        products, tuning = report["fla_float32_products"], report["fla_tuning_of_sweeps"]
        lines += [f"In the sweeps fla's kernels are tuned over {tuning}; their float32 products are {products}.", ""]
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
        if section in PARTS:
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


FACTS = "device", "torch", "cuda", "rounds", "fla_float32_products", "fla_tuning_of_sweeps"  # the same in reports to be joined


def joined(reports):
    """One report of those that GPUs of one machine measured at once: their rows, the lines of each sweep in its order."""
    first, *others = reports
    for other in others:
        if found := [f"{n} {other[n]!r} for {first[n]!r}" for n in FACTS if other[n] != first[n]]:
            raise SystemExit(f"linear_attention: these reports do not belong together: {'; '.join(found)}")
    rows = [row for report in reports for row in report["rows"]]
    names = [(r["section"], r["case"], r.get("dtype")) for r in rows]
    if twice := sorted({" ".join(filter(None, n)) for n in names if names.count(n) > 1}):
        raise SystemExit(f"linear_attention: these lines are there twice: {'; '.join(twice)}")
    sections = [*SWEPT, *(n for n in dict.fromkeys(r["section"] for r in rows) if n not in SWEPT)]

    def place(row):
        cases = [title_of(*shape) for shape in SWEPT.get(row["section"], ())]
        return sections.index(row["section"]), cases.index(row["case"]) if cases else 0

    return first | {"rows": sorted(rows, key=place)}


def write(out, report):
    Path(out).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    Path(out).with_suffix(".md").write_text(table(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument(
        "--only", default="forward,backward,float32,normalized,normalized32,crossing,memory,moved,recurrence,steps,auto"
    )
    parser.add_argument("--no-fla", dest="fla", action="store_false")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="a sweep's, after which fla is left out of its lines")
    parser.add_argument(
        "--sizes", type=lambda text: {int(n) for n in text.split(",")}, help="heads, lengths: head sizes or tokens; others not"
    )
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="measure nothing; put these reports together")
    parser.add_argument("--add", action="store_true", help="keeps the other sections that OUT.json has")
    parser.add_argument("--full-tuning", action="store_true", help="heads, lengths: of fla's kernels, which takes an hour")
    parser.add_argument("--auto-rounds", type=int, default=9)
    parser.add_argument("--auto-keys", type=int, default=0, help="auto: of the shapes those with more key columns alone")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.once:
        return once(args.once)
    if args.join:
        return write(args.out, joined([json.loads(path.read_text()) for path in args.join]))
    word = torch.zeros(1, device=DEVICE)
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
        "fla_tuning_of_sweeps": "all configurations" if args.full_tuning else FLA_TUNING,
        "rows": [],
    }
    wanted = args.only.split(",")
    if args.add:
        before = json.loads(Path(args.out).with_suffix(".json").read_text())["rows"]
        report["rows"] = [r for r in before if r["section"] not in wanted]
    for name in wanted:
        for row in globals()[name](args):  # what is measured is kept where the rest is not
            report["rows"].append(row)
            torch.cuda.empty_cache()
            write(args.out, report)


if __name__ == "__main__":
    main()
