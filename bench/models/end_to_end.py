"""Whole decoders in ONNX Runtime's CUDA provider: the same graph with LeanAttention and with GroupQueryAttention.

    python -m bench.models.end_to_end [--models phi3-medium,llama3-8b] [--out F.json] [--layers N] [--distinct] [--answers 8192]

Decoders of the named shapes in float16 with random weights: RMS norm, packed query/key/value product, attention with rotary
encoding over caches of fixed capacity bound in place, SiLU-gated feed-forward, head over the last token. Both attentions
get the packed product, their fastest form. All layers read the same weights unless --distinct: a layer's
are far larger than the L2 cache, so that a step moves the same bytes, and the model fits in little memory. Both models'
logits are compared before anything is timed.

A line gives milliseconds for one decode step (median of many runs of one session, all inputs and outputs bound, with and
without a CUDA graph), the share of the attention's kernels in it (CUPTI through torch.profiler), and for batches of 1 the
time of a prompt. Ragged batches have lengths from lognormal draws (sigma 1, the same mean). --energy adds joules a token, by
NVML's energy counter over a second of steps.

--answers are whole runs as a user sees them, of one session each: prompts of so many tokens, then greedy answers of an eighth
of that, each step a replay of a CUDA graph whose lengths grow on the device. They give seconds of the prompt and of the
answer, tokens of the answer a second over both, joules a token of the answer, and the memory that the session has taken in
the end, beside weights and caches; all of one run after a short one, so that of a second or less they tell little.
"""

import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from leanfleet import ort_ops, spec
from leanfleet.ort_ops import generation


@dataclass
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    layers: int
    vocabulary: int


MODELS = {
    "phi3-medium": Shape(5120, 40, 10, 128, 17920, 40, 32064),
    "llama3-8b": Shape(4096, 32, 8, 128, 14336, 32, 128256),
    "smollm2-135m": Shape(576, 9, 3, 64, 1536, 30, 49152),
    "tiny": Shape(256, 8, 2, 64, 512, 2, 1000),
}
CONTEXTS = (1024, 8192, 65536, 131072)
BATCHES = (1, 4, 16)
CACHE_LIMIT = 60 << 30  # bytes; larger batches of long contexts are left out and said so
HALF, I32, I64 = TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64
ATTENTION_KERNELS = (
    "LeanAttention",
    "mha",
    "sdpa",
    "flash",
    "attention",
    "UnpackRoPE",
    "GetSequenceLengths",
    "rotary",
    "Rotary",
)


def weights(shape, folder, layers):
    """Writes random weights; returns external initializers by name. layers: how many distinct ones."""
    h, kv, d, e, f = shape.heads, shape.kv_heads, shape.head_size, shape.hidden, shape.feed_forward
    sizes = {"embedding": (shape.vocabulary, e), "head": (e, shape.vocabulary)}
    for i in range(layers):
        sizes |= {
            f"{i}.qkv": (e, (h + 2 * kv) * d),
            f"{i}.out": (h * d, e),
            f"{i}.gate": (e, f),
            f"{i}.up": (e, f),
            f"{i}.down": (f, e),
        }
    generator = torch.Generator(device="cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    initializers, offset = {}, 0
    with open(folder / "weights.bin", "wb") as file:
        for name, size in sizes.items():
            w = torch.randn(size, generator=generator, device=generator.device) * size[0] ** -0.5
            data = w.half().cpu().numpy().tobytes()
            file.write(data)
            tensor = TensorProto(name=name, data_type=HALF, dims=size)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", offset), ("length", len(data))):
                tensor.external_data.add(key=key, value=str(value))
            initializers[name] = tensor
            offset += len(data)
    return initializers


def build(shape, attention, initializers, layers, distinct, positions):
    """The decoder's ModelProto. attention: "LeanAttention" or "GroupQueryAttention". positions: rows of the rotary table.

    Inputs: ids int64 [B,N], seq_lens int32 [B] (ours: length, theirs: length - 1), total int32 [1] (theirs), caches float16
    [B,Hkv,S,D]. Outputs: logits [B,1,vocabulary], caches.
    """
    h, kv, d = shape.heads, shape.kv_heads, shape.head_size
    ours = attention == "LeanAttention"
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    table = np.float32 if ours else np.float16
    constants = {
        "cos": np.cos(angles).astype(table),
        "sin": np.sin(angles).astype(table),
        "norm": np.ones(shape.hidden, np.float16),
        "last": np.array([-1], np.int64),
        "heads": np.array([0, 0, h + 2 * kv, d], np.int64),
        "flat": np.array([0, 0, h * d], np.int64),
    }
    nodes, cache_inputs, cache_outputs = [], [], []

    def node(op, inputs, outputs, domain="", **attributes):
        nodes.append(helper.make_node(op, inputs, outputs, domain=domain, name=outputs[0], **attributes))
        return outputs[0]

    x = node("Gather", ["embedding", "ids"], ["x0"])
    normed = node("SimplifiedLayerNormalization", [x, "norm"], ["n0"], axis=-1, epsilon=1e-5, stash_type=1)
    for i in range(layers):
        w = str(i if distinct else 0)
        caches = [f"past.{i}.key", f"past.{i}.value"]
        presents = [f"present.{i}.key", f"present.{i}.value"]
        cache_inputs += caches
        cache_outputs += presents
        qkv = node("MatMul", [normed, f"{w}.qkv"], [f"qkv{i}"])
        if ours:
            heads = node("Reshape", [qkv, "heads"], [f"h{i}"])
            node(
                "LeanAttention",
                [heads, *caches, "seq_lens", "", "", "", "", "", "", "cos", "sin"],
                [f"a{i}", f"lse{i}", *presents],
                spec.DOMAIN,
                append=1,
                packed_qkv=1,
                layout="bnhd",
            )
            mixed = node("Reshape", [f"a{i}", "flat"], [f"af{i}"])
        else:
            mixed = node(
                "GroupQueryAttention",
                [qkv, "", "", *caches, "seq_lens", "total", "cos", "sin"],
                [f"a{i}", *presents],
                "com.microsoft",
                num_heads=h,
                kv_num_heads=kv,
                do_rotary=1,
            )
        projected = node("MatMul", [mixed, f"{w}.out"], [f"o{i}"])
        node(
            "SkipSimplifiedLayerNormalization",
            [projected, x, "norm"],
            [f"m{i}", "", "", f"y{i}"],
            "com.microsoft",
            epsilon=1e-5,
        )
        gate = node("MatMul", [f"m{i}", f"{w}.gate"], [f"g{i}"])
        up = node("MatMul", [f"m{i}", f"{w}.up"], [f"u{i}"])
        act = node("QuickGelu", [gate], [f"s{i}"], "com.microsoft", alpha=1.0)  # x * sigmoid(x): SiLU in one kernel
        down = node("MatMul", [node("Mul", [act, up], [f"p{i}"]), f"{w}.down"], [f"d{i}"])
        x = f"x{i + 1}"
        normed = node(
            "SkipSimplifiedLayerNormalization", [down, f"y{i}", "norm"], [f"n{i + 1}", "", "", x], "com.microsoft", epsilon=1e-5
        )
    row = node("Gather", [normed, "last"], ["row"], axis=1)
    node("MatMul", [row, "head"], ["logits"])
    cache = ["B", kv, "S", d]
    inputs = [("ids", I64, ["B", "N"]), ("seq_lens", I32, ["B"])]
    inputs += [] if ours else [("total", I32, [1])]
    inputs += [(n, HALF, cache) for n in cache_inputs]
    outputs = [("logits", HALF, ["B", 1, shape.vocabulary])] + [(n, HALF, cache) for n in cache_outputs]
    used = {name for n in nodes for name in n.input}
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
        [numpy_helper.from_array(a, n) for n, a in constants.items() if n in used]
        + [t for n, t in initializers.items() if n in used],
    )
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid(spec.DOMAIN, spec.OPSET_VERSION),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@dataclass
class Bound:
    """Inputs and outputs of a session's runs, which stay in their places."""

    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    options: onnxruntime.RunOptions | None
    inputs: dict
    logits: torch.Tensor

    def run(self):
        self.session.run_with_iobinding(self.binding, self.options)


class Runner:
    """A session of one of the two models, and a binding of tensors on the device."""

    def __init__(self, path, attention, shape, layers, graph):
        provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"} if graph else {})
        options = generation._session_options([provider])
        options.log_severity_level = 3
        if attention == "LeanAttention":
            self.session = ort_ops.make_session(path, [provider], options)
        else:
            self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        self.ours, self.shape, self.layers = attention == "LeanAttention", shape, layers
        self.graph, self.captures = graph, 0

    def bind(self, ids, lengths, caches, most=None, captured=True):
        """ids [B,N] on the device; lengths int32 [B] with the new tokens; caches: 2 * layers tensors (may repeat).

        most: the greatest length that `lengths` may grow to while this binding is in use. captured: its runs become a CUDA
        graph, if the session can; each binding has one of its own.
        """
        batch = len(ids)
        feed = {"ids": ids, "seq_lens": lengths if self.ours else lengths - 1}
        if not self.ours:
            feed["total"] = torch.tensor([most or int(lengths.max())], dtype=torch.int32)
        logits = torch.full((batch, 1, self.shape.vocabulary), float("nan"), dtype=torch.float16, device="cuda")
        outputs = {"logits": logits}
        for i in range(self.layers):
            for part, cache in zip(("key", "value"), caches[2 * i : 2 * i + 2]):
                feed[f"past.{i}.{part}"] = outputs[f"present.{i}.{part}"] = cache
        types = {torch.float16: HALF, torch.int32: I32, torch.int64: I64}
        binding = self.session.io_binding()
        for kind, tensors in (("input", feed), ("output", outputs)):
            for name, t in tensors.items():
                getattr(binding, f"bind_{kind}")(name, t.device.type, 0, types[t.dtype], tuple(t.shape), t.data_ptr())
        options = None
        if self.graph:
            self.captures += captured
            options = onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(self.captures) if captured else "-1")
        self.bound = Bound(self.session, binding, options, feed, logits)
        torch.cuda.synchronize()
        return self.bound

    def run(self):
        self.bound.run()

    def timed(self, seconds=0.3, least=5, most=100):
        for _ in range(3):
            self.run()
        samples, end = [], time.perf_counter() + seconds
        while len(samples) < least or (time.perf_counter() < end and len(samples) < most):
            start = time.perf_counter()
            self.run()
            samples.append(time.perf_counter() - start)
        quartiles = statistics.quantiles(samples, n=4)
        return quartiles[1], (quartiles[2] - quartiles[0]) / 2

    def attention_seconds(self, runs=3):
        """Seconds of a run that attention's kernels take, and of all kernels."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(runs):
                self.run()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        attention = sum(e.device_time_total for e in events if any(k in e.name for k in ATTENTION_KERNELS))
        return attention / runs * 1e-6, sum(e.device_time_total for e in events) / runs * 1e-6


def energy_counter(gpus=1):
    """A function that reads the energy of the first GPUs that this process sees, in joules since the driver was loaded (NVML,
    no package needed)."""
    nvml, devices = ctypes.CDLL("libnvidia-ml.so.1"), [ctypes.c_void_p() for _ in range(gpus)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # of which NVML knows nothing
    numbers = list(map(int, visible)) if all(v.isdecimal() for v in visible) else list(range(gpus))
    if nvml.nvmlInit_v2() or any(nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(d)) for i, d in zip(numbers, devices)):
        raise RuntimeError("NVML does not start")

    def read():
        total, millijoules = 0, ctypes.c_ulonglong()
        for device in devices:
            if error := nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                raise RuntimeError(f"nvmlDeviceGetTotalEnergyConsumption returned {error}")
            total += millijoules.value
        return total / 1e3

    return read


def joules_a_token(runner, batch, seconds=1.0):
    read = energy_counter()
    runner.run()
    runs, before, end = 0, read(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        runner.run()
        runs += 1
    return (read() - before) / (runs * batch)


def ragged(batch, mean, seed=1):
    draws = np.random.default_rng(seed).lognormal(0.0, 1.0, batch)
    lengths = np.maximum(1, draws / draws.mean() * mean).astype(np.int64)
    return torch.tensor(lengths, dtype=torch.int32, device="cuda")


def random_caches(shape, layers, batch, capacity):
    """2 * layers caches; each layer has its own."""
    size = (batch, shape.kv_heads, capacity, shape.head_size)
    return [torch.randn(size, dtype=torch.float16, device="cuda") for _ in range(2 * layers)]


def compare(runners, shape, layers):
    """Greatest relative difference of the two models' logits, after a prompt and after a step on its caches."""
    torch.manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (2, 33), device="cuda")
    found = []
    for runner in runners:
        caches = [
            torch.zeros(2, shape.kv_heads, 64, shape.head_size, dtype=torch.float16, device="cuda") for _ in range(2 * layers)
        ]
        logits = []
        for tokens, length in ((ids[:, :32], 32), (ids[:, 32:], 33)):
            runner.bind(tokens.contiguous(), torch.full((2,), length, dtype=torch.int32, device="cuda"), caches)
            runner.run()
            torch.cuda.synchronize()
            logits.append(runner.bound.logits.double().clone())
        found.append(torch.stack(logits))
    return ((found[0] - found[1]).norm() / found[1].norm()).item()


def measure(name, shape, args, folder):
    layers = min(args.layers or shape.layers, shape.layers)
    initializers = weights(shape, folder, layers if args.distinct else 1)
    kinds = ("LeanAttention", "GroupQueryAttention")
    paths = {}
    for kind in kinds:
        paths[kind] = folder / f"{kind}.onnx"
        onnx.save(build(shape, kind, initializers, layers, args.distinct, max(CONTEXTS) + 1), paths[kind])
    rows = []
    plain = {k: Runner(paths[k], k, shape, layers, False) for k in kinds}
    difference = compare(plain.values(), shape, layers)
    print(f"{name}: logits differ by {difference:.1e}", flush=True)
    if not difference < 3e-2:
        raise SystemExit("the two models disagree; nothing was timed")
    if args.answers:
        del plain
        weight_bytes = (folder / "weights.bin").stat().st_size
        return [], answers(name, shape, paths, layers, args, weight_bytes)
    graphs = {k: Runner(paths[k], k, shape, layers, True) for k in kinds}
    for context in args.contexts:
        for batch, kind_of_batch, lengths in batches_of(context, args.batches):
            capacity = int(lengths.max())
            row = {"model": name, "batch": batch, "context": context, "lengths": kind_of_batch, "logits_differ": difference}
            if reason := left_out(shape, layers, batch, capacity):
                rows.append(row | {"left_out": reason})
                continue
            caches = random_caches(shape, layers, batch, capacity)
            ids = torch.randint(0, shape.vocabulary, (batch, 1), device="cuda")
            for kind in kinds:
                result = row[kind] = {}
                runner = plain[kind]
                runner.bind(ids, lengths, caches)
                result["step"], result["spread"] = runner.timed()
                result["attention"], result["kernels"] = runner.attention_seconds()
                captured = graphs[kind]
                captured.bind(ids, lengths, caches)
                try:
                    result["graph_step"], result["graph_spread"] = captured.timed()
                    if args.energy:
                        result["joules_a_token"] = joules_a_token(captured, batch)
                except Exception as refused:
                    result["graph_refused"] = str(refused).splitlines()[0][:200]
                if batch == 1 and context <= args.prompt_limit:
                    prompt = torch.randint(0, shape.vocabulary, (1, context), device="cuda")
                    runner.bind(prompt, lengths, caches)
                    result["prompt"], result["prompt_spread"] = runner.timed(least=3)
                    runner.bind(ids, lengths, caches)
            del caches
            torch.cuda.empty_cache()
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows, []


def answer(runner, shape, layers, lengths, steps):
    """Prompts of these lengths, int32 [B], and their answers: what they took, and the tokens [B, steps]. Prompts of one length
    are one run, others one each. A short answer comes before it, for first runs."""
    batch, longest = len(lengths), int(lengths.max())
    ids = torch.randint(0, shape.vocabulary, (batch, longest), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    caches = random_caches(shape, layers, batch, longest + steps)
    token = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    together = [slice(0, batch)] if bool((lengths == longest).all()) else [slice(b, b + 1) for b in range(batch)]
    prompts = [
        runner.bind(ids[s, : int(lengths[s].max())].contiguous(), lengths[s].clone(), [c[s] for c in caches], captured=False)
        for s in together
    ]
    one = runner.bind(token, lengths + 1, caches, most=longest + steps)
    first = one.inputs["seq_lens"].clone()
    read = energy_counter()

    def run(count):
        tokens = []
        one.inputs["seq_lens"].copy_(first)
        torch.cuda.synchronize()
        joules, begin = read(), time.perf_counter()
        for bound in prompts:
            bound.run()
        middle = time.perf_counter()
        logits = torch.cat([bound.logits for bound in prompts])
        for i in range(count):
            if i > 0:
                one.run()
                one.inputs["seq_lens"].add_(1)
                logits = one.logits
            tokens.append(logits[:, 0].argmax(-1, keepdim=True))
            token.copy_(tokens[-1])
            torch.cuda.synchronize()
        end = time.perf_counter()
        return {
            "prompt_seconds": middle - begin,
            "answer_seconds": end - middle,
            "tokens_per_second": batch * count / (end - begin),
            "joules_a_token": (read() - joules) / (batch * count),
        }, torch.cat(tokens, 1)

    run(4)
    return run(steps)


def others_memory():
    """Bytes of the device in use, but for those of torch's tensors."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def batches_of(context, batches):
    """(batch, "equal" or "ragged", lengths int32 [batch]) of the lines of a context."""
    for batch in batches:
        yield batch, "equal", torch.full((batch,), context, dtype=torch.int32, device="cuda")
        if batch > 1:
            yield batch, "ragged", ragged(batch, context)


def left_out(shape, layers, batch, longest):
    """Why a batch is not run; "" if it is."""
    size = 4 * batch * longest * shape.kv_heads * shape.head_size * layers
    wrong = size > CACHE_LIMIT or longest > max(CONTEXTS)
    return f"caches of {size / 2**30:.0f} GiB, longest request {longest}" if wrong else ""


def answers(name, shape, paths, layers, args, weight_bytes):
    rows = []
    for prompt in args.answers:
        for batch, kind_of_batch, lengths in batches_of(prompt, args.batches):
            steps = prompt // 8
            row = {"model": name, "batch": batch, "lengths": kind_of_batch, "prompt": prompt, "answer": steps}
            found = []
            if reason := left_out(shape, layers, batch, int(lengths.max()) + steps):
                rows.append(row | {"left_out": reason})
                continue
            for kind, path in paths.items():
                before = others_memory()
                runner = Runner(path, kind, shape, layers, True)
                row[kind], tokens = answer(runner, shape, layers, lengths, steps)
                row[kind]["bytes_beyond_weights_and_caches"] = others_memory() - before - weight_bytes
                found.append(tokens)
                del runner
            differs = (found[0] != found[1]).any(0).nonzero()
            row["tokens_before_a_difference"] = int(differs[0]) if len(differs) else steps
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def text(facts, rows):
    out = [
        f"{facts['device']}, onnxruntime {facts['onnxruntime']}, float16; milliseconds a decode step, medians; prompt for "
        "batch 1. Ours is LeanAttention, theirs GroupQueryAttention.",
        "",
        *([facts["note"], ""] if "note" in facts else []),
        "| model | batch | context | step, ours | theirs | in a graph, ours | theirs | speed-up | attention's share | "
        "J a token, ours | theirs | prompt, ours | theirs |",
        "|---" * 13 + "|",
    ]
    for r in rows:
        cells = [r["model"], f"{r['batch']} {r['lengths']}", str(r["context"])]
        if "left_out" in r:
            out.append(f"| {' | '.join([*cells, r['left_out'], *[''] * 9])} |")
            continue
        ours, theirs = r["LeanAttention"], r["GroupQueryAttention"]

        def ms(found, key):
            return f"{found[key] * 1e3:.3f}" if key in found else ("refused" if key.startswith("graph") else "")

        best = [min(x.get("graph_step", x["step"]), x["step"]) for x in (ours, theirs)]
        shares = " / ".join(f"{x['attention'] / x['kernels']:.2f}" for x in (ours, theirs))
        cells += [
            ms(ours, "step"),
            ms(theirs, "step"),
            ms(ours, "graph_step"),
            ms(theirs, "graph_step"),
            f"{best[1] / best[0]:.3f}",
            shares,
            *(f"{x['joules_a_token']:.3f}" if "joules_a_token" in x else "" for x in (ours, theirs)),
            ms(ours, "prompt"),
            ms(theirs, "prompt"),
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="phi3-medium,llama3-8b,smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--distinct", action="store_true", help="each layer has weights of its own")
    parser.add_argument("--prompt-limit", type=int, default=8192, help="longest prompt that is timed")
    parser.add_argument("--energy", action="store_true", help="joules a token too")
    parser.add_argument("--answers", type=int, nargs="+", help="whole runs after prompts of so many tokens, instead of steps")
    parser.add_argument("--out", type=Path, help="JSON to write; the table of steps goes beside it as .md")
    args = parser.parse_args()
    for prompt in args.answers or ():
        if prompt < 8 or prompt + prompt // 8 > max(CONTEXTS):
            parser.error(
                f"--answers {prompt}: a prompt has 8 tokens or more, so that its answer has one, and both together at "
                f"most {max(CONTEXTS)}"
            )
    facts = {
        "device": torch.cuda.get_device_name(),
        "onnxruntime": onnxruntime.__version__,
        "date": datetime.date.today().isoformat(),
        "layers": args.layers,
        "distinct_weights": args.distinct,
    }
    rows, runs = [], []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            of_steps, of_answers = measure(name, MODELS[name], args, Path(folder))
            rows += of_steps
            runs += of_answers
        if args.out:
            args.out.write_text(json.dumps({**facts, "answers": runs} if runs else {**facts, "rows": rows}, indent=1) + "\n")
            if rows:
                args.out.with_suffix(".md").write_text(f"{facts['date']}. {text(facts, rows)}\n")
    if rows:
        print(text(facts, rows))


if __name__ == "__main__":
    main()
