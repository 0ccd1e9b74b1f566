"""Inside ONNX Runtime's CUDA provider: our nodes against GroupQueryAttention and LinearAttention.

    python -m bench.kernels.ort_cuda [--out FILE.json] [--only TEXT] [--quantised | --delta]

Decode steps: one-node float16 models that append one token to dense caches bound in place. A line gives, for each, the wall
time of a session run (medians; each run waits for the GPU, as onnxruntime does), the time of its kernels on the GPU
(CUPTI, through torch.profiler), and the difference, which is the runtime's and the operator's own overhead; then the same
with the step captured in a CUDA graph. Results are compared with the float64 reference before anything is timed. The same over
caches of int8 and fp8, with one scale for all of a cache; "per token" are our nodes with a scale for each token and head.

--delta: GatedDeltaRule beside com.microsoft.GatedDeltaNet and LinearAttention, prompts and steps of 16 heads of queries, keys
and 48 of values, 128 wide, a decay of each token, states [V,K] (LinearAttention's [K,V], of the type of all else), read and
written to another place. Keys and queries get unit length in the node, for LinearAttention outside of what is timed. The
difference is that from GatedDeltaNet's output.

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
QUANTISED_SHAPES = [
    (1, 32, 8, 128, 1024),
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 131072),
    (16, 32, 8, 128, 8192),
    (64, 32, 8, 64, 2048),
    (8, 28, 4, 128, 4096),
]
FORMS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LINEAR_SHAPES = [(1, 32, 2048, 128), (1, 32, 8192, 128), (16, 32, 2048, 128)]  # B, H, N, D
DELTA_SHAPES = [(1, 2048), (1, 8192), (4, 2048), (1, 1), (16, 1), (64, 1)]  # B, N
DELTA_HEADS, DELTA_STATES, DELTA_WIDTH = 16, 48, 128
DELTA_OPERATORS = "GatedDeltaRule", "GatedDeltaNet", "LinearAttention"
RUNS = 200


TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.int32: TensorProto.INT32,
    torch.int8: TensorProto.INT8,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}


def model(op_type, domain, inputs, outputs, attributes):
    """A model of one node; inputs: {name: tensor or None, which is left out}; outputs: {name: tensor}."""
    node = helper.make_node(
        op_type, [n if t is not None else "" for n, t in inputs.items()], list(outputs), "node", domain=domain, **attributes
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, TYPES[t.dtype], t.shape) for n, t in inputs.items() if t is not None],
        [helper.make_tensor_value_info(n, TYPES[t.dtype], t.shape) for n, t in outputs.items()],
    )
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid(spec.DOMAIN, spec.OPSET_VERSION),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def bound(session, inputs, outputs):
    binding = session.io_binding()
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for name, t in tensors.items():
            if t is not None:
                getattr(binding, f"bind_{kind}")(name, t.device.type, 0, TYPES[t.dtype], tuple(t.shape), t.data_ptr())
    return binding


def ours(b, h, hkv, d, s, tensors, options):
    feed = dict.fromkeys(i.name for i in spec.all_specs()["LeanAttention"].inputs) | {
        "query": tensors["query"].view(b, 1, h, d),
        "key_cache": tensors["key"],
        "value_cache": tensors["value"],
        "seq_lens": tensors["lengths"],
        "new_key": tensors["new_key"].view(b, 1, hkv, d),
        "new_value": tensors["new_value"].view(b, 1, hkv, d),
    }
    result, lse = torch.empty_like(feed["query"]), torch.empty(b, 1, h, device="cuda")
    outputs = {"output": result, "lse": lse, "key_cache_out": tensors["key"], "value_cache_out": tensors["value"]}
    attributes = {"append": 1, "layout": "bnhd"}
    for role in ("key", "value"):
        scale = feed[f"{role}_scale"] = tensors.get(f"{role}_scale")
        if scale is not None and scale.dim() == 3:
            attributes[f"{role}_per_token"], outputs[f"{role}_scale_out"] = 1, scale
    graph = model("LeanAttention", spec.DOMAIN, feed, outputs, attributes)
    session = ort_ops.make_session(graph, [("CUDAExecutionProvider", options)])
    return session, bound(session, feed, outputs), result.view(b, h, d), (feed, outputs)


def group_query_attention(b, h, hkv, d, s, tensors, options):
    feed = {
        "query": tensors["query"].view(b, 1, h * d),
        "key": tensors["new_key"].view(b, 1, hkv * d),
        "value": tensors["new_value"].view(b, 1, hkv * d),
        "past_key": tensors["key"],
        "past_value": tensors["value"],
        "seqlens_k": tensors["lengths"] - 1,
        "total": torch.tensor([s], dtype=torch.int32),
    }
    attributes = {"num_heads": h, "kv_num_heads": hkv}
    if "key_scale" in tensors:
        feed |= dict.fromkeys(("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink"))
        feed |= {"k_scale": tensors["key_scale"], "v_scale": tensors["value_scale"]}
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    result = torch.empty_like(feed["query"])
    outputs = {"output": result, "present_key": tensors["key"], "present_value": tensors["value"]}
    graph = model("GroupQueryAttention", "com.microsoft", feed, outputs, attributes)
    session = onnxruntime.InferenceSession(graph, providers=[("CUDAExecutionProvider", options)])
    return session, bound(session, feed, outputs), result.view(b, h, d), (feed, outputs)


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


def tensors_of(b, h, hkv, d, s):
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda").half()

    return {
        "query": random(b, h, d),
        "key": random(b, hkv, s, d),
        "value": random(b, hkv, s, d),
        "new_key": random(b, hkv, d),
        "new_value": random(b, hkv, d),
        "lengths": torch.full((b,), s, dtype=torch.int32, device="cuda"),
    }


def quantised_tensors(tensors, form, per_token):
    """The same with caches of this type and their scales, [B,Hkv,S] per token, else [1]."""
    found = dict(tensors)
    for role in ("key", "value"):
        scale = reference.row_scales(tensors[role], form)
        scale = scale if per_token else scale.max()
        found[role] = reference.quantised(tensors[role], scale, form)
        found[f"{role}_scale"] = scale.squeeze(-1) if per_token else scale.view(1)
    return found


def judged(tensors, some):
    """The output [B,H,D] of these requests by the float64 reference."""

    def exact(name):
        tensor = tensors[name][some]
        return tensor.double() if tensor.dtype == torch.float16 else tensor

    scales = {n: t if t.dim() == 1 else t[some] for n, t in tensors.items() if n.endswith("_scale")}
    per_token = {f"{n[:-6]}_per_token": int(t.dim() == 3) for n, t in scales.items()}
    return reference.lean_attention(
        exact("query")[:, :, None],
        exact("key"),
        exact("value"),
        tensors["lengths"][some],
        new_key=exact("new_key")[:, :, None],
        new_value=exact("new_value")[:, :, None],
        append=1,
        **scales,
        **per_token,
    )[0][:, :, 0]


def measured(build, shape, tensors):
    """A contender's times by what they are, without and with a CUDA graph, or why it refuses. Weights that are rounded to fp8
    before they meet the values are 0.03 off at most; none of ours are."""
    some = slice(0, min(shape[0], 2))  # the reference of whole large batches would take long
    judge, found = judged(tensors, some), {}
    for graph in (False, True):
        prefix = "graph " * graph
        try:
            session, binding, result, keep = build(*shape, tensors, {"enable_cuda_graph": "1"} if graph else {})
            result.fill_(float("nan"))
            torch.cuda.synchronize()
            session.run_with_iobinding(binding)
            torch.cuda.synchronize()
            error = float((result[some].double() - judge).norm() / judge.norm())
            if not error < (3e-2 if build is group_query_attention and "key_scale" in tensors else 5e-3):
                raise RuntimeError(f"relative error {error:.1e} against the float64 reference")
            found[prefix + "error"] = error
            found[prefix + "run"], found[prefix + "spread"] = wall(session, binding)
            found[prefix + "kernels"], found[prefix + "names"] = kernel_time(session, binding)
            del session, binding, keep
        except Exception as refused:
            found[prefix + "refused"] = str(refused).splitlines()[0][:300]
    return found


def line(*shape):
    tensors = tensors_of(*shape)
    return {
        **dict(zip(("batch", "heads", "kv_heads", "head_size", "tokens"), shape, strict=True)),
        "leanfleet": measured(ours, shape, tensors),
        "GroupQueryAttention": measured(group_query_attention, shape, tensors),
    }


def quantised_line(*shape):
    tensors = tensors_of(*shape)
    row = dict(zip(("batch", "heads", "kv_heads", "head_size", "tokens"), shape, strict=True))
    for name, form in FORMS.items():
        one = quantised_tensors(tensors, form, per_token=False)
        row[f"leanfleet {name}"] = measured(ours, shape, one)
        row[f"GroupQueryAttention {name}"] = measured(group_query_attention, shape, one)
        row[f"leanfleet {name} per token"] = measured(ours, shape, quantised_tensors(tensors, form, per_token=True))
    row["leanfleet float16"] = measured(ours, shape, tensors)
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
    found = {name: t.view(shape) for (name, shape), t in zip(outputs.items(), (result, state))}
    graph = model(op_type, "com.microsoft" if theirs else spec.DOMAIN, feed, found, attributes)
    make = onnxruntime.InferenceSession if theirs else ort_ops.make_session
    session = make(graph, providers=["CUDAExecutionProvider"])
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


def delta_operands(b, n):
    """The tensors of a call by name, of a fixed seed; states [V,K]."""
    torch.manual_seed(0)
    rows = (b, n, DELTA_HEADS, DELTA_WIDTH), (b, n, DELTA_HEADS, DELTA_WIDTH), (b, n, DELTA_STATES, DELTA_WIDTH)
    tensors = {name: torch.randn(shape, device="cuda").half() for name, shape in zip(("query", "key", "value"), rows)}
    tensors["decay"] = -torch.rand(b, n, DELTA_STATES, device="cuda") / 8
    tensors["beta"] = torch.rand(b, n, DELTA_STATES, device="cuda")
    tensors["state"] = torch.randn(b, DELTA_STATES, DELTA_WIDTH, DELTA_WIDTH, device="cuda")
    return tensors


def delta_model(op_type, tensors, options):
    """(session, binding, output, tensors to keep) of a node over the operands."""
    t, (b, n) = tensors, tensors["query"].shape[:2]
    feed = {"query": t["query"], "key": t["key"], "value": t["value"]}
    state, result = torch.empty_like(t["state"]), torch.empty_like(t["value"])
    outputs = {"output": result, "final_state": state}
    if op_type == "GatedDeltaRule":
        feed |= {"log_decay": t["decay"], "beta": t["beta"], "initial_state": t["state"]}
        attributes = {"layout": "bnhd", "return_state": 1, "state_v_first": 1, "normalize_qk": 1}
    elif op_type == "GatedDeltaNet":
        feed |= {"cu_seqlens": None, "decay": t["decay"], "beta": t["beta"], "initial_state": t["state"]}
        attributes = {"update_rule": "gated_delta", "qk_l2_norm": 1}
    else:
        for name in ("query", "key"):
            feed[name] = torch.nn.functional.normalize(t[name].float(), dim=-1).half()
        feed = {name: value.view(b, n, -1) for name, value in feed.items()}
        feed |= {"past_state": t["state"].mT.contiguous().half(), "decay": t["decay"].half(), "beta": t["beta"].half()}
        outputs = {"output": result.view(b, n, -1), "final_state": torch.empty_like(feed["past_state"])}
        attributes = {"q_num_heads": DELTA_HEADS, "kv_num_heads": DELTA_STATES, "update_rule": "gated_delta", "scale": 0.0}
    ours = op_type == "GatedDeltaRule"
    graph = model(op_type, spec.DOMAIN if ours else "com.microsoft", feed, outputs, attributes)
    make = ort_ops.make_session if ours else onnxruntime.InferenceSession
    session = make(graph, providers=[("CUDAExecutionProvider", options)])
    return session, bound(session, feed, outputs), result, (feed, outputs)


def delta_line(b, n):
    """{operator: its times, without and with a CUDA graph, or why it refuses}."""
    tensors, row, results = delta_operands(b, n), {"batch": b, "tokens": n}, {}
    runs, warm_up = (RUNS, 20) if n == 1 else (10, 2)
    for op_type in DELTA_OPERATORS:
        row[op_type] = {}
        for graph in (False, True):
            prefix = "graph " * graph
            try:
                session, binding, result, keep = delta_model(op_type, tensors, {"enable_cuda_graph": "1"} if graph else {})
                result.fill_(float("nan"))
                torch.cuda.synchronize()
                session.run_with_iobinding(binding)
                torch.cuda.synchronize()
                results[op_type] = result.double().clone()
                row[op_type][prefix + "run"], row[op_type][prefix + "spread"] = wall(session, binding, runs, warm_up)
                row[op_type][prefix + "kernels"], row[op_type][prefix + "names"] = kernel_time(session, binding, runs // 4)
                del session, binding, keep
            except Exception as refused:
                row[op_type][prefix + "refused"] = str(refused).splitlines()[0][:300]
    for op_type, found in results.items():
        if "GatedDeltaNet" in results:
            other = results["GatedDeltaNet"]
            row[op_type]["difference"] = float((found - other).norm() / other.norm())
    return row


def delta_text(facts, rows):
    head = (
        "| requests x tokens | | run | kernels | overhead | run in a graph | kernels | overhead | differs by |\n"
        + "|---" * 9
        + "|"
    )
    out = [f"{facts['device']}, onnxruntime {facts['onnxruntime']}, float16, µs, medians.", "", head]
    for row in rows:
        case = f"{row['batch']} x {row['tokens']}"
        for name in DELTA_OPERATORS:
            far = row[name].get("difference")
            out.append(f"{times_line(case, name, row[name])} {'' if far is None else f'{far:.0e}'} |")
    return "\n".join(out)


def times_line(case, name, found):
    """The table's line of a contender."""
    cells = [case, name]
    for prefix in ("", "graph "):
        if prefix + "run" in found:
            run, kernels = found[prefix + "run"] * 1e6, found[prefix + "kernels"] * 1e6
            cells += [f"{run:.1f}", f"{kernels:.1f}", f"{run - kernels:.1f}"]
        else:
            cells += ["refused", "", ""]
    return f"| {' | '.join(cells)} |"


def lines_of(row):
    """The table's lines of a row's contenders."""
    case = f"B{row['batch']} {row['heads']}/{row['kv_heads']}x{row['head_size']} {row['tokens']}"
    return [times_line(case, name, found) for name, found in row.items() if isinstance(found, dict)]


def text(facts, rows):
    head = "| batch, heads, tokens | | run | kernels | overhead | run in a graph | kernels | overhead |\n" + "|---" * 8 + "|"
    out = [f"{facts['device']}, onnxruntime {facts['onnxruntime']}, float16, µs, medians.", "", head]
    return "\n".join(out + [line for row in rows for line in lines_of(row)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write; the table goes beside it as .md")
    parser.add_argument("--only", default="", help="lines whose shape contains this")
    parser.add_argument("--quantised", action="store_true", help="the lines over quantised caches alone")
    parser.add_argument("--delta", action="store_true", help="the lines of the gated delta rule alone")
    args = parser.parse_args()
    facts = {
        "device": torch.cuda.get_device_name(),
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    rows = []
    shapes, line_of = (DELTA_SHAPES, delta_line) if args.delta else (QUANTISED_SHAPES, quantised_line)
    if not args.delta and not args.quantised:
        shapes, line_of = SHAPES, line
    for shape in shapes:
        if args.only in "x".join(map(str, shape)):
            rows.append(line_of(*shape))
            print(json.dumps(rows[-1]), flush=True)
    wanted = [] if args.quantised or args.delta else LINEAR_SHAPES
    linear = [linear_line(*shape) for shape in wanted if args.only in "linear" + "x".join(map(str, shape))]
    report = (delta_text if args.delta else text)(facts, rows) + ("\n" + linear_text(linear) if linear else "")
    print(report)
    if args.out:
        args.out.write_text(json.dumps({**facts, "rows": rows, "linear": linear}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(f"{facts['date']}. {report}\n")


if __name__ == "__main__":
    main()
