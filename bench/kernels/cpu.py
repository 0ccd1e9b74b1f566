"""CPU speed of the operators against their peers: python -m bench.kernels.cpu [--only TEXT] [--out FILE.json] [--threads N]
[--isa avx2].

Every implementation of a line runs in this process, on the same random inputs, in turns, out of a cold last-level
cache: enough input sets are cycled through that none is in the cache when its turn comes. Like is compared with like:
our operator called from PyTorch with PyTorch's peers, our node in an ONNX Runtime session with ONNX Runtime's, both
sessions on bound buffers. What our operator returns to PyTorch is checked against the float64 reference before a line
is timed, and so is what GroupQueryAttention returns. Times are medians; the spread is half the distance between the
quartiles. The floor is the larger of the bytes that must move over the best measured read bandwidth and the operations
over the best measured rate of a float32 matrix product.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path

import onnx_ir
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch.nn.functional import scaled_dot_product_attention

from leanfleet import native, ort_ops, spec
from leanfleet.export import function_bodies, reference, torch_ops

LAST_LEVEL_CACHE = 128 << 20  # bytes; the inputs cycled through are at least this, four times that of the machines measured
BUDGET = 1.0  # seconds of timing for each implementation of a line
TURNS = 5  # that an implementation's budget is spread over
IN_PYTORCH, IN_ORT = "leanfleet in PyTorch", "leanfleet in ORT"
PEER_ERROR = 2e-5  # of a peer in float32, relative
ORT_PEERS = ("ORT GroupQueryAttention", "ORT LinearAttention", "function body in ORT")
ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
}
FLOAT32_CACHES = "leanfleet, float32 caches"


def machine(threads):
    """Name, threads, read bandwidth (bytes/s, a torch sum), float32 peak (operations/s, a torch matrix product): at best."""
    data = torch.randn(1 << 27)
    matrix = torch.randn(1536, 1536)
    name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    bandwidth = data.numel() * 4 / fastest(lambda: data.sum(), 15)
    peak = 2 * 1536**3 / fastest(lambda: matrix @ matrix, 40)
    return {
        "cpu": name,
        "threads": threads,
        "kernels": native.build_info(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "read_bandwidth": bandwidth,
        "matrix_peak": peak,
    }


def fastest(call, repeats):
    """The shortest of some calls, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def timed(runs):
    """{name: (median, spread)} in seconds of calling the functions of each list in turn; the lists take turns as well."""
    samples = {name: [] for name in runs}
    for turn in range(TURNS):
        for name, calls in runs.items():
            mine = samples[name]
            for i in range(2 if turn else 3):
                calls[(len(mine) - 1 - i) % len(calls)]()
            end, least = time.perf_counter() + BUDGET / TURNS, len(mine) + 2
            while time.perf_counter() < end or len(mine) < least:
                call = calls[len(mine) % len(calls)]
                start = time.perf_counter()
                call()
                mine.append(time.perf_counter() - start)
    quartiles = {name: statistics.quantiles(times, n=4) for name, times in samples.items()}
    return {name: (q[1], (q[2] - q[0]) / 2) for name, q in quartiles.items()}


def session_calls(op_type, domain, sets, outputs, attributes, library=False, body=False):
    """A call per set of inputs of an onnxruntime session of one node.

    sets: [{input name in the operator's order: tensor, or None where it is left out}]. outputs: {name: the tensors to
    write, one a set; None for one that the runtime allocates}. library: ours is registered. body: the node carries the
    function of ONNX's own operators that stands for it where no library is.
    """
    first = sets[0]
    kind = ONNX_TYPES[next(iter(first.values())).dtype]
    names = [n if t is not None else "" for n, t in first.items()]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op_type, names, list(outputs), domain=domain, **attributes)
    values = [helper.make_tensor_value_info(n, ONNX_TYPES[t.dtype], t.shape) for n, t in first.items() if t is not None]
    results = [
        helper.make_tensor_value_info(n, ONNX_TYPES[o[0].dtype] if o else kind, o[0].shape if o else None)
        for n, o in outputs.items()
    ]
    model = helper.make_model(
        helper.make_graph([node], "g", values, results),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)],
    )
    if body:
        model = onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    if library:
        ort_ops.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    calls = []
    for i, tensors in enumerate(sets):
        binding = session.io_binding()
        kept = {n: t.contiguous() for n, t in tensors.items() if t is not None}
        for n, t in kept.items():
            binding.bind_input(n, "cpu", 0, ONNX_TYPES[t.dtype], tuple(t.shape), t.data_ptr())
        for n, given in outputs.items():
            if given:
                binding.bind_output(n, "cpu", 0, ONNX_TYPES[given[i].dtype], tuple(given[i].shape), given[i].data_ptr())
            else:
                binding.bind_output(n, "cpu")

        def call(binding=binding, kept=(kept, outputs)):  # a binding knows addresses alone
            session.run_with_iobinding(binding)

        calls.append(call)
    return calls


def our_calls(name, sets, attributes=None, outputs=None, body=False):
    """session_calls for one of our operators; sets hold the present inputs, outputs those not to be allocated by ORT or
    that attributes ask for.
    """
    op = spec.all_specs()[name]
    ordered = [{t.name: tensors.get(t.name) for t in op.inputs} for tensors in sets]
    outputs = {t.name: (outputs or {}).get(t.name) for t in op.active_outputs(attributes or {})}
    return session_calls(name, spec.DOMAIN, ordered, outputs, attributes or {}, library=not body, body=body)


def copies(make, size):
    """As many sets of inputs as the cache-cold cycle needs; size: bytes of one set."""
    return [make() for _ in range(max(2, min(64, math.ceil(LAST_LEVEL_CACHE / size))))]


def attention_line(b, h, hkv, d, lengths, dtype=torch.float32, queries=1, capacity=None):
    """Decode (queries 1) or a prompt. lengths: one for all requests, or a list."""
    lens = [lengths] * b if isinstance(lengths, int) else lengths
    capacity = capacity or max(lens)

    def make():
        kv = [torch.randn(b, hkv, capacity, d).to(dtype) for _ in range(2)]
        return (torch.randn(b, h, queries, d).to(dtype), *kv)

    seq = torch.tensor(lens, dtype=torch.int32)
    element = torch.finfo(dtype).bits // 8
    floor_bytes = 2 * sum(lens) * hkv * d * element
    operations = 4 * h * d * sum(queries * n - (queries * (queries - 1)) // 2 for n in lens)
    sets = copies(make, 2 * b * hkv * capacity * d * element)

    def ours(q, k, v):
        return torch_ops.lean_attention(q, k, v, seq)[0]

    def sdpa(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=queries > 1 and queries == capacity, enable_gqa=True)

    expected = reference.lean_attention(*[t.double() for t in sets[0]], seq)[0]
    runs = {IN_PYTORCH: [lambda s=s: ours(*s) for s in sets]}
    equal = len(set(lens)) == 1 and lens[0] == capacity
    if dtype == torch.float32:
        runs[IN_ORT] = our_calls(
            "LeanAttention",
            [dict(zip(("query", "key_cache", "value_cache", "seq_lens"), (*s, seq), strict=True)) for s in sets],
        )
    if equal and (queries == 1 or queries == capacity):
        runs["torch SDPA"] = [lambda s=s: sdpa(*s) for s in sets]
    if equal and dtype == torch.float32 and queries == 1:
        runs["ORT GroupQueryAttention"] = group_query_attention(sets, h, hkv, d, capacity, expected)
    return runs, ours(*sets[0]), expected, floor_bytes, operations


def quantised_attention_line(form, b, h, hkv, d, n, queries=1, per_token=True):
    """The same over caches of n slots of int8 or int4, whose scales are of tokens or of channels, beside our own float32 caches
    and, with scales of channels, GroupQueryAttention."""
    seq = torch.full((b,), n, dtype=torch.int32)
    largest, width = (127, d) if form == "int8" else (7, d // 2)

    def make():
        kv = [torch.randint(-largest, largest + 1, (b, hkv, n, d), dtype=torch.int8) for _ in range(2)]
        if form == "int4":
            kv = [(x[..., ::2] + 8).byte() | (x[..., 1::2] + 8).byte() << 4 for x in kv]
        size = 0.635 / largest
        scales = [size * (1 + 4 * torch.rand((b, hkv, n) if per_token else (hkv, 1, d))) for _ in range(2)]
        return (torch.randn(b, h, queries, d), *kv, *scales)

    names = ("query", "key_cache", "value_cache", "key_scale", "value_scale")
    attributes = {"key_per_token": 1, "value_per_token": 1} if per_token else {}
    bytes_of = 2 * b * hkv * n * (width + 4 * per_token)
    sets = copies(make, bytes_of)
    feeds = [{**dict(zip(names, s, strict=True)), "seq_lens": seq} for s in sets]
    wide = copies(
        lambda: tuple(torch.randn(b, heads, slots, d) for heads, slots in ((h, queries), (hkv, n), (hkv, n))),
        8 * b * hkv * n * d,
    )

    def ours(feed):
        return torch_ops.lean_attention(**feed, **attributes)[0]

    exact = {n: t.double() if t.is_floating_point() else t for n, t in feeds[0].items()}
    expected = reference.lean_attention(**exact, **attributes)[0]
    runs = {
        IN_PYTORCH: [lambda f=f: ours(f) for f in feeds],
        FLOAT32_CACHES: [lambda s=s: torch_ops.lean_attention(*s, seq)[0] for s in wide],
        IN_ORT: our_calls("LeanAttention", feeds, attributes),
    }
    if queries == 1 and not per_token:
        runs["ORT GroupQueryAttention"] = group_query_attention(sets, h, hkv, d, n, expected)
    operations = 4 * h * d * b * (queries * n - (queries * (queries - 1)) // 2)
    return runs, ours(feeds[0]), expected, bytes_of, operations


def group_query_attention(sets, h, hkv, d, slots, expected):
    """com.microsoft.GroupQueryAttention with the cache shared between past and present; the last slot is written, again as it
    is. Sets with scales have caches of int8, or of uint8 with two int4 each. expected: [B,h,1,d] of the first set; raises
    SystemExit where the output is another one."""
    b = sets[0][0].shape[0]

    def scales(given):
        absent = dict.fromkeys(("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink"))
        return absent | dict(zip(("k_scale", "v_scale"), given, strict=True)) if given else {}

    def last(cache, given):
        row = reference.numbers_of(cache[:, :, -1:])
        return (row * given[0] if given else row).reshape(b, 1, -1).float()

    feeds = [
        {
            "query": q.transpose(1, 2).reshape(b, 1, h * d),
            "key": last(k, given[:1]),
            "value": last(v, given[1:]),
            "past_key": k,
            "past_value": v,
            "seqlens_k": torch.full((b,), slots - 1, dtype=torch.int32),
            "total": torch.tensor([slots], dtype=torch.int32),
            **scales(given),
        }
        for q, k, v, *given in sets
    ]
    written = [torch.full((b, 1, h * d), torch.nan) for _ in sets]
    outputs = {"output": written, "present_key": [s[1] for s in sets], "present_value": [s[2] for s in sets]}
    attributes = {"num_heads": h, "kv_num_heads": hkv}
    if len(sets[0]) > 3:
        bits = 4 if sets[0][1].dtype == torch.uint8 else 8
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": bits}
    calls = session_calls("GroupQueryAttention", "com.microsoft", feeds, outputs, attributes)
    calls[0]()
    error = float((written[0].reshape(b, h, 1, d).double() - expected).norm() / expected.norm())
    if not error < PEER_ERROR:
        raise SystemExit(f"GroupQueryAttention: relative error {error:.1e} against the float64 reference; not timed")
    return calls


def decay_line(b, h, n, r, dv, dtype=torch.float32, gradient=False):
    """CausalLinearDecay forward (N > 1), one decode step in place (N = 1), or its gradients; decay per head."""
    decay = -torch.exp2(-torch.linspace(1, 8, h))

    def make():
        state = torch.randn(b, h, r, dv) if n == 1 else None
        return (*[(torch.randn(b, h, n, w) / w**0.5).to(dtype) for w in (r, r, dv)], state)

    element = torch.finfo(dtype).bits // 8
    token_bytes = (2 * r + 2 * dv) * element * b * h * n
    state_bytes = 4 * b * h * r * dv
    sets = copies(make, token_bytes + state_bytes * (n == 1))

    def ours(q, k, v, s):
        if gradient:
            return torch_ops.causal_linear_decay_grad(q, k, v, decay, grad_output=v, grad_decay=True)[0]
        if s is not None:
            return torch_ops.causal_linear_decay_(q, k, v, decay, s)
        return torch_ops.causal_linear_decay(q, k, v, decay)

    names = ("query", "key", "value", "log_decay", "initial_state")
    feeds = [{n: t for n, t in zip(names, (*s[:3], decay, s[3]), strict=True) if t is not None} for s in sets]
    state_out = {"final_state": [s[3] for s in sets]} if n == 1 else None
    attributes = {"return_state": 1} if n == 1 else {}
    runs = {IN_PYTORCH: [lambda s=s: ours(*s) for s in sets]}
    if not gradient:
        runs["chunked PyTorch"] = [lambda s=s: chunked(*s[:3], decay, s[3]) for s in sets]
    if not gradient and dtype == torch.float32:
        runs[IN_ORT] = our_calls("CausalLinearDecay", feeds, attributes, state_out)
        runs["ORT LinearAttention"] = microsoft_linear_attention(sets, decay)
        runs["function body in ORT"] = our_calls(
            "CausalLinearDecay",
            feeds,
            attributes,
            state_out and {"final_state": [torch.empty_like(s[3]) for s in sets]},
            body=True,
        )
    elif gradient:
        names = ("query", "key", "value", "log_decay", "grad_output")
        feeds = [dict(zip(names, (*s[:3], decay, s[2]), strict=True)) for s in sets]
        for implementation, body in ((IN_ORT, False), ("function body in ORT", True)):
            runs[implementation] = our_calls("CausalLinearDecayGrad", feeds, {"grad_decay": 1}, body=body)
    first = [t.clone() if t is not None else None for t in sets[0]]
    doubled = [t.double() if t is not None else None for t in first]
    if gradient:
        expected = reference.causal_linear_decay_grad(*doubled[:3], decay.double(), grad_output=doubled[2], grad_decay=1)[0]
    else:
        expected = reference.causal_linear_decay(*doubled[:3], decay.double(), doubled[3])[0]
    passes = 3 if gradient else 1
    floor_bytes = token_bytes * (2 if gradient else 1) + (2 * state_bytes if n == 1 else 0)
    return runs, ours(*first), expected, floor_bytes, passes * 4 * b * h * n * r * dv


def chunked(q, k, v, log_decay, state=None, chunk=64):
    """The plain chunked loop in PyTorch: what one writes without a kernel."""
    b, h, n, r = q.shape
    state = torch.zeros(b, h, r, v.shape[-1]) if state is None else state
    steps = torch.arange(chunk)
    mask = torch.exp(log_decay[:, None, None] * (steps[:, None] - steps)).tril()
    head = torch.exp(log_decay[:, None] * (steps + 1)).unsqueeze(-1)
    tail = torch.exp(log_decay[:, None] * (chunk - 1 - steps)).unsqueeze(-1)
    outputs = []
    for i in range(0, n, chunk):
        qi, ki, vi = q[:, :, i : i + chunk].float(), k[:, :, i : i + chunk].float(), v[:, :, i : i + chunk].float()
        m = qi.shape[2]
        outputs.append((qi @ ki.mT * mask[:, :m, :m]) @ vi + head[:, :m] * (qi @ state))
        state = head[:, m - 1 : m] * state + (ki * tail[:, chunk - m :]).mT @ vi
    return torch.cat(outputs, 2).to(q.dtype)


def microsoft_linear_attention(sets, decay):
    """com.microsoft.LinearAttention, gated, with a decay per head and token."""
    b, h, n, r = sets[0][0].shape
    dv = sets[0][2].shape[-1]
    feeds = []
    for q, k, v, state in sets:
        feed = {name: t.transpose(1, 2).reshape(b, n, -1) for name, t in (("query", q), ("key", k), ("value", v))}
        feed["past_state"] = torch.zeros(b, h, r, dv) if state is None else state.clone()
        feeds.append({**feed, "decay": decay.expand(b, n, h)})
    outputs = {"output": None, "present_state": [torch.empty(b, h, r, dv) for _ in sets]}
    return session_calls(
        "LinearAttention",
        "com.microsoft",
        feeds,
        outputs,
        {"q_num_heads": h, "kv_num_heads": h, "update_rule": "gated", "scale": 1.0},
    )


def delta_line(b, h, n, d, strongest=1 / 8):
    """GatedDeltaRule with a log decay of each token down to -strongest, beside com.microsoft.LinearAttention's gated_delta;
    states are returned. Models have heads with decays of -11: what they multiply to is subnormal."""
    names = ("query", "key", "value", "log_decay", "beta", "initial_state")

    def make():
        query, key, value = (torch.randn(b, h, n, d) for _ in range(3))
        key = key / key.norm(dim=-1, keepdim=True)
        gates = -strongest * torch.rand(b, h, n), torch.rand(b, h, n)
        return dict(zip(names, (query, key, value, *gates, torch.randn(b, h, d, d)), strict=True))

    state_bytes, token_bytes = 8 * b * h * d * d, 4 * b * h * n * (4 * d + 2)
    sets = copies(make, token_bytes + state_bytes)
    attributes, state = {"return_state": 1}, (b, h, d, d)
    peers = [
        {
            **{name: s[name].transpose(1, 2).reshape(b, n, -1) for name in names[:3]},
            "past_state": s["initial_state"],
            "decay": s["log_decay"].transpose(1, 2),
            "beta": s["beta"].transpose(1, 2),
        }
        for s in sets
    ]
    runs = {
        IN_PYTORCH: [lambda s=s: torch_ops.gated_delta_rule(**s, return_state=True) for s in sets],
        IN_ORT: our_calls("GatedDeltaRule", sets, attributes, {"final_state": [torch.empty(state) for _ in sets]}),
        "ORT LinearAttention": session_calls(
            "LinearAttention",
            "com.microsoft",
            peers,
            {"output": None, "present_state": [torch.empty(state) for _ in sets]},
            {"q_num_heads": h, "kv_num_heads": h, "update_rule": "gated_delta", "scale": d**-0.5},
        ),
    }
    expected = reference.gated_delta_rule(**{name: t.double() for name, t in sets[0].items()})[0]
    found = torch_ops.gated_delta_rule(**sets[0])
    return runs, found, expected, token_bytes + state_bytes, 6 * b * h * n * d * d


def delta_grad_line(b, h, n, d):
    """GatedDeltaRuleGrad with all gradients, beside autograd through transformers' chunked form in PyTorch, whose forward is
    done before; ours computes what it needs of the forward again."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    names = ("query", "key", "value", "log_decay", "beta")

    def make():
        tensors = (torch.randn(b, h, n, d) for _ in range(3))
        gates = -torch.rand(b, h, n) / 8, torch.rand(b, h, n)
        return dict(zip(names, (*tensors, *gates), strict=True)) | {"grad_output": torch.randn(b, h, n, d)}

    bytes_moved = 4 * b * h * n * (7 * d + 4)
    sets = copies(make, bytes_moved)
    attributes = {"normalize_qk": 1, "grad_decay": 1}

    def peer(s):
        given = [s[name].transpose(1, 2).contiguous().requires_grad_() for name in names]
        output, _ = torch_chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)
        grad = s["grad_output"].transpose(1, 2).contiguous()
        return lambda: torch.autograd.grad(output, given, grad, retain_graph=True)

    runs = {
        IN_PYTORCH: [lambda s=s: torch_ops.gated_delta_rule_grad(**s, normalize_qk=True, grad_decay=True) for s in sets],
        IN_ORT: our_calls("GatedDeltaRuleGrad", sets, attributes),
        "autograd of chunked PyTorch": [peer(s) for s in sets],
    }
    expected = reference.gated_delta_rule_grad(**{name: t.double() for name, t in sets[0].items()}, **attributes)[0]
    found = torch_ops.gated_delta_rule_grad(**sets[0], normalize_qk=True, grad_decay=True)[0]
    return runs, found, expected, bytes_moved, 22 * b * h * n * d * d


def conv_line(b, n, c, taps=4):
    """CausalConv with SiLU and its state, beside com.microsoft.CausalConvWithState over channels last and over channels
    first, for which its input is turned before it is timed."""

    def make():
        return dict(input=torch.randn(b, n, c), weight=torch.randn(taps, c), initial_state=torch.randn(b, taps - 1, c))

    moved = 4 * b * c * (2 * n + 2 * (taps - 1))
    sets = copies(make, moved)
    attributes, state = {"activation": "silu", "return_state": 1}, (b, taps - 1, c)

    def peers(turned):
        return [
            {
                "input": turned(s["input"]),
                "weight": s["weight"].t().reshape(c, 1, taps),
                "bias": None,
                "past_state": turned(s["initial_state"]),
            }
            for s in sets
        ]

    def theirs(turned, **options):
        states = [turned(torch.empty(state)).contiguous() for _ in sets]
        outputs = {"output": None, "present_state": states}
        return session_calls("CausalConvWithState", "com.microsoft", peers(turned), outputs, {"activation": "silu", **options})

    runs = {
        IN_PYTORCH: [lambda s=s: torch_ops.causal_conv(**s, activation="silu", return_state=True) for s in sets],
        IN_ORT: our_calls("CausalConv", sets, attributes, {"final_state": [torch.empty(state) for _ in sets]}),
        "ORT CausalConvWithState": theirs(lambda x: x.transpose(1, 2)),
    }
    if n > 1:
        runs["ORT CausalConvWithState, channels last"] = theirs(lambda x: x, channels_last=1)
    exact = {name: t.double() for name, t in sets[0].items()}
    expected = reference.causal_conv(**exact, activation="silu")[0]
    return runs, torch_ops.causal_conv(**sets[0], activation="silu"), expected, moved, 2 * taps * b * n * c


def normalized_line(b, h, n, d, gradient=False):
    """NormalizedLinearAttention, causal, or its gradients."""

    def make():
        return [torch.rand(b, h, n, d) / d**0.5, torch.rand(b, h, n, d) / d**0.5, torch.randn(b, h, n, d)]

    sets = copies(make, 16 * b * h * n * d)
    extra = [torch_ops.normalized_linear_attention(*s) for s in sets] if gradient else [None] * len(sets)

    def ours(q, k, v, saved=None):
        if gradient:
            return torch_ops.normalized_linear_attention_grad(q, k, v, output=saved[0], normalizer=saved[1], grad_output=v)[0]
        return torch_ops.normalized_linear_attention(q, k, v)[0]

    runs = {IN_PYTORCH: [lambda s=s, e=e: ours(*s, e) for s, e in zip(sets, extra, strict=True)]}
    name, names = "NormalizedLinearAttention", ("query", "key", "value")
    feeds = [dict(zip(names, s, strict=True)) for s in sets]
    if gradient:
        name = "NormalizedLinearAttentionGrad"
        feeds = [f | {"output": e[0], "normalizer": e[1], "grad_output": f["value"]} for f, e in zip(feeds, extra, strict=True)]
    else:
        runs["chunked PyTorch"] = [lambda s=s: chunked_normalized(*s) for s in sets]
    for implementation, body in ((IN_ORT, False), ("function body in ORT", True)):
        runs[implementation] = our_calls(name, feeds, body=body)
    doubled = [t.double() for t in sets[0]]
    if gradient:
        expected = reference.normalized_linear_attention_grad(
            *doubled, output=extra[0][0].double(), normalizer=extra[0][1].double(), grad_output=doubled[2]
        )[0]
    else:
        expected = reference.normalized_linear_attention(*doubled)[0]
    operations = (3 if gradient else 1) * 4 * b * h * n * d * d
    return runs, ours(*sets[0], extra[0]), expected, 16 * b * h * n * d * (2 if gradient else 1), operations


def normalized_step_line(b, h, hkv, d, in_place=True):
    """One token of NormalizedLinearAttention over a state; not in place it writes another state than it reads."""

    def make():
        token = [torch.rand(b, heads, 1, d) / d**0.5 for heads in (h, hkv, hkv)]
        sums = [torch.rand(b, hkv, *shape) for shape in ((d, d), (d,), (d,))]
        return (*token, None, *sums, torch.full((b,), 100, dtype=torch.int32))

    state_bytes = 4 * b * hkv * d * (d + 2)
    sets = copies(make, 2 * state_bytes)
    names = [t.name for t in spec.all_specs()["NormalizedLinearAttention"].inputs]
    feeds = [{n: t for n, t in zip(names, s, strict=True) if t is not None} for s in sets]
    carried = ("state", "key_sum", "value_sum", "count")
    results = {
        f"final_{c}": [f[f"initial_{c}"] if in_place else torch.empty_like(f[f"initial_{c}"]) for f in feeds] for c in carried
    }

    def ours(feed):
        if in_place:
            return torch_ops.normalized_linear_attention_(**feed)[0]
        return torch_ops.normalized_linear_attention(**feed, return_state=True)[0]

    others = {n: [torch.empty_like(t) for t in ts] for n, ts in results.items()}
    runs = {
        IN_PYTORCH: [lambda f=f: ours(f) for f in feeds],
        IN_ORT: our_calls("NormalizedLinearAttention", feeds, {"return_state": 1}, results),
        "function body in ORT": our_calls("NormalizedLinearAttention", feeds, {"return_state": 1}, others, body=True),
    }
    first = {n: t.clone() for n, t in feeds[0].items()}
    expected = reference.normalized_linear_attention(
        **{n: t.double() if t.is_floating_point() else t for n, t in first.items()}
    )[0]
    return runs, ours(first), expected, 2 * state_bytes, 4 * b * h * d * d


def chunked_normalized(q, k, v):
    ones = torch.ones_like(v[..., :1])
    numerator = chunked(q, k, torch.cat([v, ones], -1), torch.zeros(q.shape[1]))
    f = numerator[..., :-1] + v.cumsum(2)
    return f / (numerator[..., -1:] + torch.arange(1, q.shape[2] + 1).view(1, 1, -1, 1))


def lines():
    """(name, what builds it) of all lines, each to be built when its turn comes."""
    f16, bf16 = torch.float16, torch.bfloat16
    for n in (512, 4096, 8192):
        yield f"decode B1 9/3x64 {n}", lambda n=n: attention_line(1, 9, 3, 64, n)
    yield "decode B1 32/8x128 8192", lambda: attention_line(1, 32, 8, 128, 8192)
    yield "decode B1 32/8x128 8192 float16", lambda: attention_line(1, 32, 8, 128, 8192, f16)
    yield "decode B1 32/8x128 8192 bfloat16", lambda: attention_line(1, 32, 8, 128, 8192, bf16)
    yield "decode B1 1/1x64 65536", lambda: attention_line(1, 1, 1, 64, 65536)
    yield "decode B8 9/3x64 equal 2048", lambda: attention_line(8, 9, 3, 64, 2048, capacity=8192)
    yield (
        "decode B8 9/3x64 ragged",
        lambda: attention_line(8, 9, 3, 64, [8192, 64, 128, 256, 512, 1024, 2048, 4160], capacity=8192),
    )
    yield "prompt B1 9/3x64 2048", lambda: attention_line(1, 9, 3, 64, 2048, queries=2048)
    yield "prompt B1 32/8x128 2048", lambda: attention_line(1, 32, 8, 128, 2048, queries=2048)
    for heads, n in (((32, 8, 128), 8192), ((32, 8, 128), 65536), ((9, 3, 64), 8192), ((9, 3, 64), 65536)):
        shape = f"{heads[0]}/{heads[1]}x{heads[2]} {n}"
        for form, per_token in product(("int8", "int4"), (True, False)):
            yield (
                f"{form} decode B1 {shape}{'' if per_token else ' per channel'}",
                partial(quantised_attention_line, form, 1, *heads, n, per_token=per_token),
            )
    yield "int8 prompt B1 9/3x64 2048", lambda: quantised_attention_line("int8", 1, 9, 3, 64, 2048, queries=2048)
    yield "int8 prompt B1 32/8x128 2048", lambda: quantised_attention_line("int8", 1, 32, 8, 128, 2048, queries=2048)
    yield "decay B1 H8 N2048 64x64", lambda: decay_line(1, 8, 2048, 64, 64)
    yield "decay B1 H16 N4096 128x128", lambda: decay_line(1, 16, 4096, 128, 128)
    yield "decay B1 H16 N4096 128x128 bfloat16", lambda: decay_line(1, 16, 4096, 128, 128, bf16)
    yield "decay B1 H1 N8192 64x64", lambda: decay_line(1, 1, 8192, 64, 64)
    yield "decay step B8 H16 128x128", lambda: decay_line(8, 16, 1, 128, 128)
    yield "decay grad B1 H8 N2048 64x64", lambda: decay_line(1, 8, 2048, 64, 64, gradient=True)
    yield "normalized B1 H8 N2048 D64", lambda: normalized_line(1, 8, 2048, 64)
    yield "normalized B1 H16 N4096 D128", lambda: normalized_line(1, 16, 4096, 128)
    yield "delta B1 H16 N1024 128x128", lambda: delta_line(1, 16, 1024, 128)
    yield "delta B1 H16 N1024 128x128 strong decays", lambda: delta_line(1, 16, 1024, 128, strongest=11.0)
    yield "delta B1 H32 N16 128x128", lambda: delta_line(1, 32, 16, 128)
    yield "delta grad B1 H8 N2048 128x128", lambda: delta_grad_line(1, 8, 2048, 128)
    yield "delta step B8 H32 128x128", lambda: delta_line(8, 32, 1, 128)
    yield "conv B1 N2048 C4096", lambda: conv_line(1, 2048, 4096)
    yield "conv step B8 C8192", lambda: conv_line(8, 1, 8192)
    yield "normalized step B8 16/16x128", lambda: normalized_step_line(8, 16, 16, 128)
    yield "normalized step B8 16/16x128 copied", lambda: normalized_step_line(8, 16, 16, 128, in_place=False)
    yield "normalized step B8 64/16x128", lambda: normalized_step_line(8, 64, 16, 128)
    yield "normalized grad B1 H8 N2048 D64", lambda: normalized_line(1, 8, 2048, 64, gradient=True)


def measure(only, threads):
    facts = machine(threads)
    rows = []
    for name, build in lines():
        if only and only not in name:
            continue
        torch.manual_seed(0)
        runs, found, expected, floor_bytes, operations = build()
        error = float((found.double() - expected).norm() / expected.norm())
        if not error < (2e-5 if found.dtype == torch.float32 else 2e-2):
            raise SystemExit(f"{name}: relative error {error:.1e} against the float64 reference; not timed")
        floor = max(floor_bytes / facts["read_bandwidth"], operations / facts["matrix_peak"])
        for implementation, (median, spread) in timed(runs).items():
            rows.append(
                {
                    "line": name,
                    "implementation": implementation,
                    "seconds": median,
                    "spread": spread,
                    "floor": floor,
                    "bytes": floor_bytes,
                    "operations": operations,
                    "error": error,
                }
            )
            print(
                f"{name:38} {implementation:24} {median * 1e3:9.3f} ms  ± {spread * 1e3:6.3f}  {median / floor:6.2f} x floor",
                flush=True,
            )
    return facts, rows


def table(facts, rows):
    """A Markdown table: a line a shape, ours beside the peers; the last three columns are ratios."""
    present = list(dict.fromkeys(r["implementation"] for r in rows))
    columns = [c for c in (IN_PYTORCH, IN_ORT) if c in present] + [c for c in present if c not in (IN_PYTORCH, IN_ORT)]
    text = [
        f"{facts['cpu']}, {facts['threads']} threads, {facts['kernels']}; "
        f"read bandwidth {facts['read_bandwidth'] / 1e9:.1f} GB/s, "
        f"matrix peak {facts['matrix_peak'] / 1e9:.0f} GFLOP/s; torch {facts['torch']}, "
        f"onnxruntime {facts['onnxruntime']}; milliseconds, medians.",
        "",
        "like for like: the fastest peer of PyTorch over ours there, or the fastest of ONNX Runtime over ours there, "
        "whichever peer is the faster. overall: the fastest peer over the faster of ours.",
        "",
        f"| | {' | '.join(columns)} | like for like | overall | times the floor |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for line in dict.fromkeys(r["line"] for r in rows):
        times = {r["implementation"]: r["seconds"] for r in rows if r["line"] == line}
        floor = next(r["floor"] for r in rows if r["line"] == line)
        ours = min(times[c] for c in (IN_PYTORCH, IN_ORT) if c in times)
        peers = {c: t for c, t in times.items() if c not in (IN_PYTORCH, IN_ORT, FLOAT32_CACHES)}
        like = overall = ""
        if peers:
            best = min(peers, key=peers.get)
            like = f"{peers[best] / times[IN_ORT if best in ORT_PEERS else IN_PYTORCH]:.2f}"
            overall = f"{peers[best] / ours:.2f}"
        cells = " | ".join(f"{times[c] * 1e3:.3f}" if c in times else "" for c in columns)
        text.append(f"| {line} | {cells} | {like} | {overall} | {ours / floor:.2f} |")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON to write; the table goes beside it as .md")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--isa",
        choices=["baseline", "avx2", "avx512"],
        help="instructions that our kernels are held to; the peers use what the machine has",
    )
    args = parser.parse_args()
    if args.isa:
        os.environ["LEANFLEET_CPU"] = args.isa
    torch.set_num_threads(args.threads)
    facts, rows = measure(args.only, args.threads)
    text = table(facts, rows)
    print("\n" + text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        date = datetime.date.today().isoformat()
        args.out.write_text(json.dumps({"date": date, "machine": facts, "rows": rows}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(f"{date}. {text}\n")


if __name__ == "__main__":
    main()
