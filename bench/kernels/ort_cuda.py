"""Inside ONNX Runtime's CUDA provider: our nodes against GroupQueryAttention and LinearAttention.

    python -m bench.kernels.ort_cuda [--out FILE.json] [--only TEXT]

Decode steps: one-node float16 models that append one token to dense caches bound in place. A line gives, for each, the wall
time of a session run (medians; each run waits for the GPU, as onnxruntime does), the time of its kernels on the GPU
(CUPTI, through torch.profiler), and the difference, which is the runtime's and the operator's own overhead; then the same
with the step captured in a CUDA graph. Results are compared with the float64 reference before anything is timed.

Prompts of CausalLinearDecay: the wall time of a run beside that of com.microsoft.LinearAttention, which is given no decay
(linear) or one for each head and token (gated); all give the state too.
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import onnxruntime
import torch
from onnx import TensorProto, helper

from leanfleet import ort_ops, spec
from leanfleet.export import reference

SHAPES = [
    (1, 32, 8, 128, 1024),
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 65536),
    (8, 32, 8, 128, 4096),
    (16, 40, 10, 128, 8192),
    (64, 9, 3, 64, 2048),
]
LINEAR_SHAPES = [(1, 32, 2048, 128), (1, 32, 8192, 128), (16, 32, 2048, 128)]  # B, H, N, D
RUNS = 200


def model(op_type, domain, inputs, outputs, attributes):
    """A model of one node; inputs: {name: (ONNX type, shape) or None}; outputs: {name: shape}."""
    node = helper.make_node(op_type, [n if v else "" for n, v in inputs.items()], list(outputs), domain=domain, **attributes)
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, *v) for n, v in inputs.items() if v],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT if n in ("lse", "final_state") else half, s)
            for n, s in outputs.items()
        ],
    )
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid(spec.DOMAIN, spec.OPSET_VERSION),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def bound(session, inputs, outputs):
    binding = session.io_binding()
    types = {torch.float16: TensorProto.FLOAT16, torch.float32: TensorProto.FLOAT, torch.int32: TensorProto.INT32}
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for name, t in tensors.items():
            getattr(binding, f"bind_{kind}")(name, t.device.type, 0, types[t.dtype], tuple(t.shape), t.data_ptr())
    return binding


def ours(b, h, hkv, d, s, tensors, options):
    half, i32 = TensorProto.FLOAT16, TensorProto.INT32
    inputs = {
        "query": (half, [b, 1, h, d]),
        "key_cache": (half, [b, hkv, s, d]),
        "value_cache": (half, [b, hkv, s, d]),
        "seq_lens": (i32, [b]),
        "query_lens": None,
        "new_key": (half, [b, 1, hkv, d]),
        "new_value": (half, [b, 1, hkv, d]),
    }
    outputs = {"output": [b, 1, h, d], "lse": [b, 1, h], "key_cache_out": [b, hkv, s, d], "value_cache_out": [b, hkv, s, d]}
    graph = model("LeanAttention", spec.DOMAIN, inputs, outputs, {"append": 1, "layout": "bnhd"})
    session = ort_ops.make_session(graph, [("CUDAExecutionProvider", options)])
    feed = {
        "query": tensors["query"].view(b, 1, h, d),
        "key_cache": tensors["key"],
        "value_cache": tensors["value"],
        "seq_lens": tensors["lengths"],
        "new_key": tensors["new_key"].view(b, 1, hkv, d),
        "new_value": tensors["new_value"].view(b, 1, hkv, d),
    }
    result, lse = torch.empty_like(feed["query"]), torch.empty(b, 1, h, device="cuda")
    binding = bound(
        session, feed, {"output": result, "lse": lse, "key_cache_out": tensors["key"], "value_cache_out": tensors["value"]}
    )
    return session, binding, result.view(b, h, d), (feed, lse)


def group_query_attention(b, h, hkv, d, s, tensors, options):
    half, i32 = TensorProto.FLOAT16, TensorProto.INT32
    inputs = {
        "query": (half, [b, 1, h * d]),
        "key": (half, [b, 1, hkv * d]),
        "value": (half, [b, 1, hkv * d]),
        "past_key": (half, [b, hkv, s, d]),
        "past_value": (half, [b, hkv, s, d]),
        "seqlens_k": (i32, [b]),
        "total": (i32, [1]),
    }
    outputs = {"output": [b, 1, h * d], "present_key": [b, hkv, s, d], "present_value": [b, hkv, s, d]}
    graph = model("GroupQueryAttention", "com.microsoft", inputs, outputs, {"num_heads": h, "kv_num_heads": hkv})
    session = onnxruntime.InferenceSession(graph, providers=[("CUDAExecutionProvider", options)])
    feed = {
        "query": tensors["query"].view(b, 1, h * d),
        "key": tensors["new_key"].view(b, 1, hkv * d),
        "value": tensors["new_value"].view(b, 1, hkv * d),
        "past_key": tensors["key"],
        "past_value": tensors["value"],
        "seqlens_k": tensors["lengths"] - 1,
        "total": torch.tensor([s], dtype=torch.int32),
    }
    result = torch.empty_like(feed["query"])
    binding = bound(session, feed, {"output": result, "present_key": tensors["key"], "present_value": tensors["value"]})
    return session, binding, result.view(b, h, d), (feed, result)


def wall(session, binding, runs=RUNS, warm_up=20):
    """(median, half the distance of the quartiles) of a run in seconds."""
    samples = []
    for _ in range(runs + warm_up):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        samples.append(time.perf_counter() - start)
    quartiles = statistics.quantiles(samples[warm_up:], n=4)
    return quartiles[1], (quartiles[2] - quartiles[0]) / 2


def kernel_time(session, binding, runs=50):
    """(seconds on the GPU of one run, names of what ran there)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            session.run_with_iobinding(binding)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time_total for e in events) / runs * 1e-6, sorted({e.name.split("(")[0][:80] for e in events})


def line(b, h, hkv, d, s):
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda").half()

    tensors = {
        "query": random(b, h, d),
        "key": random(b, hkv, s, d),
        "value": random(b, hkv, s, d),
        "new_key": random(b, hkv, d),
        "new_value": random(b, hkv, d),
        "lengths": torch.full((b,), s, dtype=torch.int32, device="cuda"),
    }
    some = slice(0, min(b, 2))  # the reference of whole large batches would take long
    judge = reference.lean_attention(
        tensors["query"][some].double()[:, :, None],
        tensors["key"][some].double(),
        tensors["value"][some].double(),
        tensors["lengths"][some],
        new_key=tensors["new_key"][some].double()[:, :, None],
        new_value=tensors["new_value"][some].double()[:, :, None],
        append=1,
    )[0][:, :, 0]
    row = {"batch": b, "heads": h, "kv_heads": hkv, "head_size": d, "tokens": s}
    for name, build in (("leanfleet", ours), ("GroupQueryAttention", group_query_attention)):
        found = {}
        for graph in (False, True):
            session, binding, result, keep = build(b, h, hkv, d, s, tensors, {"enable_cuda_graph": "1"} if graph else {})
            result.fill_(float("nan"))
            torch.cuda.synchronize()
            try:
                session.run_with_iobinding(binding)
                torch.cuda.synchronize()
                error = float((result[some].double() - judge).norm() / judge.norm())
                if not error < 5e-3:
                    raise RuntimeError(f"relative error {error:.1e} against the float64 reference")
                median, spread = wall(session, binding)
                found["graph " * graph + "run"], found["graph " * graph + "spread"] = median, spread
                found["graph " * graph + "kernels"], found["graph " * graph + "names"] = kernel_time(session, binding)
            except Exception as refused:
                found["graph " * graph + "refused"] = str(refused).splitlines()[0][:300]
            del session, binding, keep
        row[name] = found
    return row


def linear_model(op_type, b, h, n, d, log_decay):
    """(session, binding, output, state, tensors to keep) of a node over operands of a fixed seed. log_decay: [H] or None."""
    torch.manual_seed(0)
    theirs = op_type == "LinearAttention"
    q, k, v = (torch.randn(b, n, h, d, device="cuda").half() for _ in range(3))
    feed = {"query": q, "key": (k.float() / d**0.5).half(), "value": v}
    result = torch.empty_like(q)
    state = torch.empty(b, h, d, d, device="cuda", dtype=torch.float16 if theirs else torch.float32)
    if theirs:
        feed = {name: t.view(b, n, h * d) for name, t in feed.items()}
        feed["past_state"] = torch.zeros_like(state)
        if log_decay is not None:
            feed["decay"] = log_decay.half().expand(b, n, h).contiguous()
        rule = "gated" if "decay" in feed else "linear"
        attributes = {"q_num_heads": h, "kv_num_heads": h, "update_rule": rule, "scale": 1.0}
        outputs = {"output": [b, n, h * d], "present_state": [b, h, d, d]}
    else:
        if log_decay is not None:
            feed["log_decay"] = log_decay
        attributes = {"layout": "bnhd", "return_state": 1}
        outputs = {"output": [b, n, h, d], "final_state": [b, h, d, d]}
    types = {torch.float16: TensorProto.FLOAT16, torch.float32: TensorProto.FLOAT}
    graph = model(
        op_type,
        "com.microsoft" if theirs else spec.DOMAIN,
        {n: (types[t.dtype], t.shape) for n, t in feed.items()},
        outputs,
        attributes,
    )
    make = onnxruntime.InferenceSession if theirs else ort_ops.make_session
    session = make(graph, providers=["CUDAExecutionProvider"])
    found = {name: t.view(shape) for (name, shape), t in zip(outputs.items(), (result, state))}
    return session, bound(session, feed, found), result, state, feed


def linear_line(b, h, n, d):
    slopes = torch.log1p(-torch.exp2(-5 - torch.arange(h, device="cuda") * 3 / h)).float()
    row = {"batch": b, "heads": h, "tokens": n, "head_size": d}
    for kind, log_decay in (("linear", None), ("gated", slopes)):
        found, outputs = {}, {}
        for op_type in ("CausalLinearDecay", "LinearAttention"):
            session, binding, result, _, keep = linear_model(op_type, b, h, n, d, log_decay)
            session.run_with_iobinding(binding)
            torch.cuda.synchronize()
            outputs[op_type] = result[:1].double().clone()
            found[op_type], found[op_type + " spread"] = wall(session, binding, 20, 3)
            del session, binding, result, keep
        difference = outputs["CausalLinearDecay"] - outputs["LinearAttention"]
        found["difference"] = float(difference.norm() / outputs["CausalLinearDecay"].norm())
        row[kind] = found
    return row


def linear_text(rows):
    out = [
        "",
        "| batch, heads, tokens | CausalLinearDecay, no decay | LinearAttention, linear | ratio | CausalLinearDecay | "
        "LinearAttention, gated | ratio | outputs differ by |",
        "|---" * 8 + "|",
    ]
    for r in rows:
        cells = [f"B{r['batch']} H{r['heads']}x{r['head_size']} {r['tokens']}"]
        for kind in ("linear", "gated"):
            ours, theirs = (r[kind][n] * 1e6 for n in ("CausalLinearDecay", "LinearAttention"))
            cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.0f}"]
        out.append(f"| {' | '.join([*cells, ', '.join(format(r[k]['difference'], '.1e') for k in ('linear', 'gated'))])} |")
    return "\n".join(out)


def text(facts, rows):
    head = "| batch, heads, tokens | | run | kernels | overhead | run in a graph | kernels | overhead |\n" + "|---" * 8 + "|"
    out = [f"{facts['device']}, onnxruntime {facts['onnxruntime']}, float16, µs, medians.", "", head]
    for r in rows:
        for name in ("leanfleet", "GroupQueryAttention"):
            cells = [f"B{r['batch']} {r['heads']}/{r['kv_heads']}x{r['head_size']} {r['tokens']}", name]
            for prefix in ("", "graph "):
                if prefix + "run" in r[name]:
                    run, kernels = r[name][prefix + "run"] * 1e6, r[name][prefix + "kernels"] * 1e6
                    cells += [f"{run:.1f}", f"{kernels:.1f}", f"{run - kernels:.1f}"]
                else:
                    cells += ["refused", "", ""]
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write; the table goes beside it as .md")
    parser.add_argument("--only", default="", help="lines whose shape contains this")
    args = parser.parse_args()
    facts = {
        "device": torch.cuda.get_device_name(),
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    rows = []
    for shape in SHAPES:
        if args.only in "x".join(map(str, shape)):
            rows.append(line(*shape))
            print(json.dumps(rows[-1]), flush=True)
    linear = [linear_line(*shape) for shape in LINEAR_SHAPES if args.only in "linear" + "x".join(map(str, shape))]
    report = text(facts, rows) + "\n" + linear_text(linear)
    print(report)
    if args.out:
        args.out.write_text(json.dumps({**facts, "rows": rows, "linear": linear}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(f"{facts['date']}. {report}\n")


if __name__ == "__main__":
    main()
