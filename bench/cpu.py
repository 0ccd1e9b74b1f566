"""CPU speed of the operators against their peers: python bench/cpu.py [--only TEXT] [--out FILE.json] [--threads N].

Every implementation of a line runs in this process, on the same random inputs, interleaved, out of a cold last-level
cache: enough input sets are cycled through that none is in the cache when its turn comes. A line's result is checked
against the float64 reference before it is timed. Times are medians; the spread is half the distance between the quartiles.
The floor is the larger of the bytes that must move over the measured read bandwidth and the operations over the measured
peak of a float32 matrix product.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch.nn.functional import scaled_dot_product_attention

from leanfleet import native
from leanfleet.export import reference, torch_ops

LAST_LEVEL_CACHE = 128 << 20  # bytes; the inputs cycled through are at least this, four times that of the machines measured
BUDGET = 1.5  # seconds of timing for each implementation of a line


def machine(threads):
    """Name, threads, read bandwidth (bytes/s, a torch sum) and float32 peak (operations/s, a torch matrix product)."""
    data = torch.randn(1 << 27)
    matrix = torch.randn(1536, 1536)
    name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    bandwidth = data.numel() * 4 / timed([lambda: data.sum()], repeats=9)[0]
    peak = 2 * 1536**3 / timed([lambda: matrix @ matrix], repeats=25)[0]
    return {"cpu": name, "threads": threads, "kernels": native.build_info(), "torch": torch.__version__,
            "onnxruntime": onnxruntime.__version__, "read_bandwidth": bandwidth, "matrix_peak": peak}


def timed(calls, repeats=None):
    """(median, spread) in seconds of calling the functions of a list in turn."""
    for call in calls[:3]:
        call()
    samples, end = [], time.perf_counter() + BUDGET
    while len(samples) < (repeats or 400) and (repeats or time.perf_counter() < end or len(samples) < 7):
        call = calls[len(samples) % len(calls)]
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    quartiles = statistics.quantiles(samples, n=4)
    return statistics.median(samples), (quartiles[2] - quartiles[0]) / 2


def session(op_type, domain, inputs, outputs, attributes, threads, opset=21):
    """An onnxruntime session of one node. inputs: {name: (ONNX type, shape) or None}; outputs: names."""
    node = helper.make_node(op_type, [n if v else "" for n, v in inputs.items()], outputs, domain=domain, **attributes)
    values = [helper.make_tensor_value_info(n, *v) for n, v in inputs.items() if v]
    results = [helper.make_tensor_value_info(n, values[0].type.tensor_type.elem_type, None) for n in outputs if n]
    graph = helper.make_graph([node], "g", values, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
                              ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def copies(make, size):
    """As many sets of inputs as the cache-cold cycle needs; size: bytes of one set."""
    return [make() for _ in range(max(2, min(64, math.ceil(LAST_LEVEL_CACHE / size))))]


def attention_line(name, b, h, hkv, d, lengths, dtype=torch.float32, queries=1, capacity=None):
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

    runs = {"leanfleet": [lambda s=s: ours(*s) for s in sets]}
    equal = len(set(lens)) == 1 and lens[0] == capacity
    if equal and (queries == 1 or queries == capacity):
        runs["torch SDPA"] = [lambda s=s: sdpa(*s) for s in sets]
    if equal and dtype == torch.float32 and queries == 1:
        runs["ORT GroupQueryAttention"] = group_query_attention(sets, h, hkv, d, capacity)
    expected = reference.lean_attention(*[t.double() for t in sets[0]], seq)[0]
    return name, runs, ours(*sets[0]), expected, floor_bytes, operations


def group_query_attention(sets, h, hkv, d, slots):
    """com.microsoft.GroupQueryAttention with the cache shared between past and present; the last slot is written."""
    b, threads = sets[0][0].shape[0], torch.get_num_threads()
    f, i = TensorProto.FLOAT, TensorProto.INT32
    run = session("GroupQueryAttention", "com.microsoft", {
        "query": (f, [b, 1, h * d]), "key": (f, [b, 1, hkv * d]), "value": (f, [b, 1, hkv * d]),
        "past_key": (f, [b, hkv, slots, d]), "past_value": (f, [b, hkv, slots, d]), "seqlens_k": (i, [b]), "total": (i, [1])},
        ["output", "present_key", "present_value"], {"num_heads": h, "kv_num_heads": hkv}, threads)
    calls = []
    for q, k, v in sets:
        binding = run.io_binding()
        feed = {"query": q.transpose(1, 2).reshape(b, 1, h * d).numpy(), "key": k[:, :, -1].reshape(b, 1, -1).numpy().copy(),
                "value": v[:, :, -1].reshape(b, 1, -1).numpy().copy(), "seqlens_k": np.full(b, slots - 1, np.int32),
                "total": np.array([slots], np.int32)}
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for cache, tensor in (("key", k), ("value", v)):
            for kind in ("input", "output"):
                getattr(binding, f"bind_{kind}")(f"{'past' if kind == 'input' else 'present'}_{cache}", "cpu", 0, np.float32,
                                                 tuple(tensor.shape), tensor.data_ptr())
        binding.bind_output("output")
        calls.append(lambda binding=binding, feed=feed: run.run_with_iobinding(binding))
    calls[0]()
    return calls


def decay_line(name, b, h, n, r, dv, dtype=torch.float32, gradient=False):
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
            return torch_ops.causal_linear_decay_(q, k, v, decay, s)[0]
        return torch_ops.causal_linear_decay(q, k, v, decay)[0]

    runs = {"leanfleet": [lambda s=s: ours(*s) for s in sets]}
    if not gradient:
        runs["chunked PyTorch"] = [lambda s=s: chunked(*s[:3], decay, s[3]) for s in sets]
        if dtype == torch.float32:
            runs["ORT LinearAttention"] = microsoft_linear_attention(sets, decay)
    first = [t.clone() if t is not None else None for t in sets[0]]
    doubled = [t.double() if t is not None else None for t in first]
    if gradient:
        expected = reference.causal_linear_decay_grad(*doubled[:3], decay.double(), grad_output=doubled[2], grad_decay=1)[0]
    else:
        expected = reference.causal_linear_decay(*doubled[:3], decay.double(), doubled[3])[0]
    passes = 3 if gradient else 1
    floor_bytes = token_bytes * (2 if gradient else 1) + (2 * state_bytes if n == 1 else 0)
    return name, runs, ours(*first), expected, floor_bytes, passes * 4 * b * h * n * r * dv


def chunked(q, k, v, log_decay, state=None, chunk=64):
    """The plain chunked loop in PyTorch: what one writes without a kernel."""
    b, h, n, r = q.shape
    state = q.new_zeros(b, h, r, v.shape[-1]) if state is None else state
    steps = torch.arange(chunk)
    mask = torch.exp(log_decay[:, None, None] * (steps[:, None] - steps)).tril()
    head = torch.exp(log_decay[:, None] * (steps + 1)).unsqueeze(-1)
    tail = torch.exp(log_decay[:, None] * (chunk - 1 - steps)).unsqueeze(-1)
    outputs = []
    for i in range(0, n, chunk):
        qi, ki, vi = q[:, :, i:i + chunk].float(), k[:, :, i:i + chunk].float(), v[:, :, i:i + chunk].float()
        m = qi.shape[2]
        outputs.append((qi @ ki.mT * mask[:, :m, :m]) @ vi + head[:, :m] * (qi @ state))
        state = head[:, m - 1:m] * state + (ki * tail[:, chunk - m:]).mT @ vi
    return torch.cat(outputs, 2).to(q.dtype)


def microsoft_linear_attention(sets, decay):
    """com.microsoft.LinearAttention, gated, with a decay per head and token."""
    q, _, v, state = sets[0]
    b, h, n, r = q.shape
    dv, f = v.shape[-1], TensorProto.FLOAT
    run = session("LinearAttention", "com.microsoft", {
        "query": (f, [b, n, h * r]), "key": (f, [b, n, h * r]), "value": (f, [b, n, h * dv]),
        "past_state": (f, [b, h, r, dv]), "decay": (f, [b, n, h])}, ["output", "present_state"],
        {"q_num_heads": h, "kv_num_heads": h, "update_rule": "gated", "scale": 1.0}, torch.get_num_threads())
    calls = []
    for q, k, v, state in sets:
        state = torch.zeros(b, h, r, dv) if state is None else state.clone()
        feed = {name: t.transpose(1, 2).reshape(b, n, -1).contiguous().numpy() for name, t in
                (("query", q), ("key", k), ("value", v))}
        feed |= {"past_state": state.numpy(), "decay": decay.expand(b, n, h).contiguous().numpy()}
        calls.append(lambda feed=feed: run.run(None, feed))
    return calls


def normalized_line(name, b, h, n, d, gradient=False):
    """NormalizedLinearAttention, causal, or its gradients."""
    def make():
        return [torch.rand(b, h, n, d) / d**0.5 for _ in range(3)]

    sets = copies(make, 16 * b * h * n * d)
    extra = [torch_ops.normalized_linear_attention(*s) for s in sets] if gradient else [None] * len(sets)

    def ours(q, k, v, saved=None):
        if gradient:
            return torch_ops.normalized_linear_attention_grad(q, k, v, output=saved[0], normalizer=saved[1], grad_output=v)[0]
        return torch_ops.normalized_linear_attention(q, k, v)[0]

    runs = {"leanfleet": [lambda s=s, e=e: ours(*s, e) for s, e in zip(sets, extra, strict=True)]}
    if not gradient:
        runs["chunked PyTorch"] = [lambda s=s: chunked_normalized(*s) for s in sets]
    doubled = [t.double() for t in sets[0]]
    if gradient:
        expected = reference.normalized_linear_attention_grad(
            *doubled, output=extra[0][0].double(), normalizer=extra[0][1].double(), grad_output=doubled[2])[0]
    else:
        expected = reference.normalized_linear_attention(*doubled)[0]
    operations = (3 if gradient else 1) * 4 * b * h * n * d * d
    return name, runs, ours(*sets[0], extra[0]), expected, 16 * b * h * n * d * (2 if gradient else 1), operations


def chunked_normalized(q, k, v):
    ones = torch.ones_like(v[..., :1])
    numerator = chunked(q, k, torch.cat([v, ones], -1), torch.zeros(q.shape[1]))
    f = numerator[..., :-1] + v.cumsum(2)
    return f / (numerator[..., -1:] + torch.arange(1, q.shape[2] + 1).view(1, 1, -1, 1))


def lines():
    """All lines, each built when its turn comes."""
    f16, bf16 = torch.float16, torch.bfloat16
    for n in (512, 4096, 8192):
        yield f"decode B1 9/3x64 {n}", lambda name, n=n: attention_line(name, 1, 9, 3, 64, n)
    yield "decode B1 32/8x128 8192", lambda name: attention_line(name, 1, 32, 8, 128, 8192)
    yield "decode B1 32/8x128 8192 float16", lambda name: attention_line(name, 1, 32, 8, 128, 8192, f16)
    yield "decode B1 32/8x128 8192 bfloat16", lambda name: attention_line(name, 1, 32, 8, 128, 8192, bf16)
    yield "decode B1 1/1x64 65536", lambda name: attention_line(name, 1, 1, 1, 64, 65536)
    yield "decode B8 9/3x64 equal 2048", lambda name: attention_line(name, 8, 9, 3, 64, 2048, capacity=8192)
    yield "decode B8 9/3x64 ragged", lambda name: attention_line(
        name, 8, 9, 3, 64, [8192, 64, 128, 256, 512, 1024, 2048, 4160], capacity=8192)
    yield "prompt B1 9/3x64 2048", lambda name: attention_line(name, 1, 9, 3, 64, 2048, queries=2048)
    yield "prompt B1 32/8x128 2048", lambda name: attention_line(name, 1, 32, 8, 128, 2048, queries=2048)
    yield "decay B1 H8 N2048 64x64", lambda name: decay_line(name, 1, 8, 2048, 64, 64)
    yield "decay B1 H16 N4096 128x128", lambda name: decay_line(name, 1, 16, 4096, 128, 128)
    yield "decay B1 H16 N4096 128x128 bfloat16", lambda name: decay_line(name, 1, 16, 4096, 128, 128, bf16)
    yield "decay B1 H1 N8192 64x64", lambda name: decay_line(name, 1, 1, 8192, 64, 64)
    yield "decay step B8 H16 128x128", lambda name: decay_line(name, 8, 16, 1, 128, 128)
    yield "decay grad B1 H8 N2048 64x64", lambda name: decay_line(name, 1, 8, 2048, 64, 64, gradient=True)
    yield "normalized B1 H8 N2048 D64", lambda name: normalized_line(name, 1, 8, 2048, 64)
    yield "normalized B1 H16 N4096 D128", lambda name: normalized_line(name, 1, 16, 4096, 128)
    yield "normalized grad B1 H8 N2048 D64", lambda name: normalized_line(name, 1, 8, 2048, 64, gradient=True)


def measure(only, threads):
    facts = machine(threads)
    rows = []
    for name, build in lines():
        if only and only not in name:
            continue
        torch.manual_seed(0)
        name, runs, found, expected, floor_bytes, operations = build(name)
        error = float((found.double() - expected).norm() / expected.norm())
        if not error < (2e-5 if found.dtype == torch.float32 else 2e-2):
            raise SystemExit(f"{name}: relative error {error:.1e} against the float64 reference; not timed")
        floor = max(floor_bytes / facts["read_bandwidth"], operations / facts["matrix_peak"])
        for implementation, calls in runs.items():
            median, spread = timed(calls)
            rows.append({"line": name, "implementation": implementation, "seconds": median, "spread": spread,
                         "floor": floor, "bytes": floor_bytes, "operations": operations, "error": error})
            print(f"{name:38} {implementation:24} {median * 1e3:9.3f} ms  ± {spread * 1e3:6.3f}  {median / floor:6.2f} x floor",
                  flush=True)
    return facts, rows


def table(facts, rows):
    """A Markdown table: one line a shape, the peers beside ours, and ours against the best of them and the floor."""
    peers = list(dict.fromkeys(r["implementation"] for r in rows if r["implementation"] != "leanfleet"))
    text = [f"{facts['cpu']}, {facts['threads']} threads, {facts['kernels']}; "
            f"read bandwidth {facts['read_bandwidth'] / 1e9:.1f} GB/s, "
            f"matrix peak {facts['matrix_peak'] / 1e9:.0f} GFLOP/s; milliseconds, medians.", "",
            f"| | leanfleet | {' | '.join(peers)} | times the best peer | times the floor |", "|---" * (len(peers) + 4) + "|"]
    for line in dict.fromkeys(r["line"] for r in rows):
        times = {r["implementation"]: r for r in rows if r["line"] == line}
        ours = times["leanfleet"]
        others = [times[p]["seconds"] for p in peers if p in times]
        cells = [f"{times[p]['seconds'] * 1e3:.3f}" if p in times else "" for p in peers]
        speed = f"{min(others) / ours['seconds']:.2f}" if others else ""
        over_floor = f"{ours['seconds'] / ours['floor']:.2f}"
        text.append(f"| {line} | {ours['seconds'] * 1e3:.3f} | {' | '.join(cells)} | {speed} | {over_floor} |")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON to write; the table goes beside it as .md")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
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
