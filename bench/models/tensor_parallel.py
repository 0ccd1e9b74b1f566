"""Decode steps and continuous batching of a decoder on one GPU and, tensor or context parallel, on several.

    python -m bench.models.tensor_parallel STEM [--shape llama-3.2-1b] [--layers N] [--gpus 2] [--context 1024] [--batches 1,16]
        [--dtype float16] [--share heads|context] [--serve] [--work FOLDER]

Random weights, made here; needs as many GPUs, onnxruntime-gpu and the extras export and models. Two minutes at most with 16
cores for the smallest shape. What is timed has weights that share their bytes on disk, as many as the largest has, and each its
own place on the GPU; a shape that one GPU has no room for is timed on several alone.

First a decoder of two layers of the smallest shape in float32, without TF32: the tokens of all prompts have to be the same on
one GPU and on several. Then steps of one token a request behind `context` tokens, captured as CUDA graphs: 20 to warm up, 100
timed one by one, with the copy of the logits to the host (step) and without (graph). Medians and 90th percentiles, µs; and
joules a token of all GPUs over 300 graphs, by NVML's counters.
--serve: ContinuousBatch too, with the requests of bench.models.vllm, 256 at once and 64 running, answer tokens a second, the
better of two rounds after one to warm up; and its tokens in float32. Writes STEM.json and STEM.md.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from bench.models.end_to_end import energy_counter
from bench.models.serving import BLOCK, SHAPES, config_of, requests
from bench.models.vllm import SERVING
from leanfleet import driver, ranks
from leanfleet.decoder_contract import WORLD

CHECKED = dict(shape="llama-3.2-1b", layers=2, dtype="float32", new=24)  # the decoder whose tokens are compared
CHECKED_REQUESTS = dict(requests=24, prompt=120, answer=24, running=8, step_tokens=256)
SERVED = 2  # timed rounds
WARM, TIMED = 20, 100
COUNTED = 300  # steps whose energy is counted
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, as data sheets have it
MEMORY = 80 << 30  # bytes of a GPU
ROOM = 0.8  # of it that weights may take
STEPS = 2 * (WARM + TIMED) + 8
PIECE = 4096  # tokens of the context that are read together: what layers compute for them takes memory


NAMES = {"llama-3.2-1b": "Llama-3.2-1B", "llama-3-8b": "Llama-3-8B", "llama-3-70b": "Llama-3-70B"}
VOCABULARY = SHAPES["llama-3.2-1b"]["vocab_size"]  # of all of them
OPTIONS = {"heads": "tensor_parallel", "context": "context_parallel"}  # of export_decoder, by what is shared out


class Thin:
    """Stands in for what export_decoder writes with: weights that are all the same bytes of one file."""

    LARGE = 1 << 20  # bytes
    DRAWN = 1 << 24  # bytes that are drawn; the file repeats them

    def __init__(self, decoder, dtype):
        self._made, self._first, self._dtype = decoder.made, None, dtype
        decoder.made, decoder.save = self.made, self.save

    def made(self, *arguments):
        """Ranks with equal shares have equal graphs, traced once."""
        self._first = self._first or self._made(*arguments)
        return self._first

    def save(self, model, path):
        import onnx_ir
        import torch

        large = [v for v in model.graph.initializers.values() if v.const_value.nbytes >= self.LARGE]
        weights = path.parent / "weights.data"
        if not weights.exists():
            most = max(v.const_value.nbytes for v in large)
            some = 0.02 * torch.randn(self.DRAWN * 8 // torch.finfo(self._dtype).bits, dtype=self._dtype)
            with open(weights, "wb") as file:
                for _ in range(-(-most // self.DRAWN)):
                    file.write(some.view(torch.uint8).numpy())
        for v in large:
            old = v.const_value
            v.const_value = onnx_ir.ExternalTensor(
                weights.name, 0, old.nbytes, old.dtype, shape=old.shape, name=v.name, base_dir=path.parent
            )
        onnx_ir.save(model, path)


def untouched(config, dtype):
    """A model of a configuration whose weights are memory that nobody has written yet, and so takes none; norms are ones."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedModel

    for layer in (torch.nn.Linear, torch.nn.Embedding):
        layer.reset_parameters = lambda self: None
    PreTrainedModel.init_weights = lambda self: self.tie_weights()
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def export_thin(shape, folder, layers, dtype, world, positions, share):
    """A process of its own."""
    import torch

    from leanfleet.export import decoder

    config = config_of(shape, layers)
    config.max_position_embeddings = positions
    if world > 1 and share == "heads" and config.num_key_value_heads % world:
        raise SystemExit(f"{config.num_key_value_heads} heads of keys and values do not divide by {world} ranks")
    Thin(decoder, getattr(torch, dtype))
    decoder.export_decoder(untouched(config, dtype), folder, verify=False, **({} if world == 1 else {OPTIONS[share]: world}))


def export(shape, folder, layers, dtype, world, positions, share, serve):
    """A process of its own. All make the same weights: from one seed, on the same GPU."""
    if layers != CHECKED["layers"] and not serve:
        return export_thin(shape, folder, layers, dtype, world, positions, share)
    import torch
    from transformers import AutoModelForCausalLM

    from leanfleet.export import export_decoder
    from leanfleet.export.serving import add_serving

    torch.manual_seed(0)
    config = config_of(shape, layers)
    config.max_position_embeddings = positions
    there = "cuda" if torch.cuda.is_available() else "cpu"  # billions of random numbers take the CPU long
    with torch.device(there):
        torch.set_default_dtype(getattr(torch, dtype))
        model = AutoModelForCausalLM.from_config(config).to("cpu").eval()
        torch.set_default_dtype(torch.float32)
    torch.cuda.empty_cache()  # the other exports' models need it
    export_decoder(model, folder, verify=False, **({} if world == 1 else {OPTIONS[share]: world}))
    if serve:
        add_serving(model, folder, block=BLOCK, verify=False)


def in_process(*arguments):
    """Runs this module again, as one process. Raises ranks.RankError."""
    ranks.launch(ranks.python("-m", "bench.models.tensor_parallel", *map(str, arguments)), 1)


def export_unless_there(job):
    """In a process of its own; the folder says beside it what it was made of."""
    made = job[1].with_suffix(".made")
    if made.exists() and made.read_text() == repr(job):
        return
    made.unlink(missing_ok=True)
    in_process("export", *job)
    made.write_text(repr(job))


def join():
    """(device, rank or None, communicator or None) of this process."""
    here = ranks.place()
    if here is None or here.world == 1:
        return "cuda:0", None, None
    return f"cuda:{here.local}", here.rank, ranks.join(WORLD, "nccl", here.local)


def load(folder, options):
    """(decoder, its communicator or None) of this process's rank."""
    from leanfleet.ort_ops import load_decoder
    from leanfleet.ort_ops.sessions import CUDA

    device, rank, joined = join()
    graph = options.get("enable_cuda_graph") == "1"
    return load_decoder(folder, [(CUDA, options)], cuda_graph=graph, device=device, rank=rank), joined


def tokens(folder, out):
    """Writes the tokens of a few prompts."""
    from leanfleet.ort_ops import generate

    decoder, joined = load(folder, {"use_tf32": "0"})
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCABULARY, n).tolist() for n in (1, 9, 40, 300)]
    found, _ = generate(decoder, prompts, CHECKED["new"], stop_tokens=[])
    finish(out, found, joined)


def steps(folder, out, batches, context):
    """Writes the seconds of captured steps, by batch."""
    decoder, joined = load(folder, {"enable_cuda_graph": "1"})
    found = {batch: measured(decoder, batch, context) for batch in batches}
    finish(out, {"steps": found, "weights": weights_of(folder)}, joined)


def weights_of(folder):
    """Bytes of the weights that a rank holds."""
    import onnx

    model = onnx.load(min(Path(folder).glob("*.onnx")), load_external_data=False)
    each = {t.data_type: onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize for t in model.graph.initializer}
    return sum(each[t.data_type] * int(np.prod(t.dims)) for t in model.graph.initializer)


def serve(folder, out, checked):
    """Writes {"tokens": of all requests, "seconds": of each timed round} of continuous batching with captured steps."""
    from leanfleet.ort_ops.serving import ContinuousBatch
    from leanfleet.ort_ops.sessions import CUDA
    from leanfleet.together import together

    sizes = CHECKED_REQUESTS if checked else SERVING
    work = requests(sizes["requests"], sizes["prompt"], sizes["answer"], VOCABULARY)
    pages = sum(sorted((-(-(len(p) + a) // BLOCK) for p, a in work), reverse=True)[: sizes["running"]])
    device, rank, joined = join()
    providers = [(CUDA, {"use_tf32": "0"} if checked else {})]
    limits = pages, sizes["running"], sizes["step_tokens"]
    batch = ContinuousBatch(folder, *limits, providers, cuda_graph=True, share=False, device=device, rank=rank)
    found = {"seconds": []}
    with nullcontext(True) if joined is None else together(batch) as leads:
        for turn in range(1 if checked else 1 + SERVED):
            if not leads:
                break
            begin = time.perf_counter()
            asked = [batch.add(prompt, count, stop_tokens=()) for prompt, count in work]
            batch.run()
            if turn or checked:
                found["seconds"].append(time.perf_counter() - begin)
            found["tokens"] = [list(map(int, r.tokens)) for r in asked] if checked else sum(len(r.tokens) for r in asked)
    finish(out, found, joined)


def finish(out, found, joined):
    if joined is None or joined.rank == 0:
        Path(out).write_text(json.dumps(found))
    if joined is not None:
        joined.close()


def measured(decoder, batch, context):
    """{what: seconds of each of TIMED steps}: "step" with the logits on the host, "graph" without; "joules" a token of the
    GPUs that ranks have."""
    runner = decoder.steps(batch, context + STEPS)
    random, lens = np.random.default_rng(1), np.zeros(batch, np.int32)
    for begin in range(0, context, PIECE):
        new = np.full(batch, min(PIECE, context - begin), np.int32)
        lens = lens + new
        runner.run(random.integers(3, VOCABULARY, (batch, int(new[0]))), lens, new)
    one, new = np.ones((batch, 1), np.int64), np.ones(batch, np.int32)
    for _ in range(WARM):
        lens = lens + 1
        runner.run(one, lens, new, capture=True)
    found = {"step": [], "graph": []}
    for _ in range(TIMED):
        lens = lens + 1
        start = time.perf_counter()
        runner.run(one, lens, new, capture=True)
        found["step"].append(time.perf_counter() - start)
    binding, options = runner.graphs[0]
    for _ in range(TIMED):
        start = time.perf_counter()
        decoder.session.run_with_iobinding(binding, options)
        binding.synchronize_outputs()
        found["graph"].append(time.perf_counter() - start)
    joules = energy_counter(1 if (here := ranks.place()) is None else here.world)
    before = joules()
    for _ in range(COUNTED):
        decoder.session.run_with_iobinding(binding, options)
    binding.synchronize_outputs()
    found["joules"] = (joules() - before) / (COUNTED * batch)
    return found


def table(report):
    gpus = report["gpus"]
    shared = ", whose tokens are shared out" if report.get("share") == "context" else ""
    shape = NAMES[report.get("shape", "llama-3.2-1b")]
    one_too = "one_us" in report["rows"][0]
    lines = [
        f"{report['layers']} layers of {shape}'s shape, {report['dtype']}, {report['context']} tokens of context{shared}, "
        f"{report['gpu']}. Tokens of two layers of Llama-3.2-1B's in float32 on {gpus} GPUs "
        f"{'equal' if report['tokens_equal'] else 'DIFFER FROM'} one's.",
        "",
        f"| batch | | one GPU, µs | {gpus} GPUs, µs | speed-up |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        one, several = row.get("one_us"), row["several_us"]
        of_one = f"{one:.0f} | {several:.0f} | {one / several:.2f}" if one_too else f" | {several:.0f} | "
        lines.append(f"| {row['batch']} | {row['what']} | {of_one} |")
    if joules := report.get("joules"):
        bandwidth = next((b for name, b in BANDWIDTH.items() if name in report["gpu"]), None)
        for name, of_batch in joules.items():
            told = ", ".join(f"{j:.2f} at batch {batch}" for batch, j in of_batch.items())
            held = report["weights"][name]
            read = f", {1e6 * held / bandwidth:.0f} µs to read at the data sheet's bandwidth" if bandwidth else ""
            who = "One GPU holds" if name == "one" else f"Each of {gpus} GPUs holds"
            lines += ["", f"{who} {held / 2**30:.1f} GiB of weights{read}. Joules a token: {told}."]
    if (served := report.get("serving")) is not None:
        one, several = served["one"], served["several"]
        same = "equal" if served["tokens_equal"] else "DIFFER FROM"
        lines += [
            "",
            f"Continuous batching, {SERVING['requests']} requests at once and {SERVING['running']} running: {one:.0f} answer "
            f"tokens a second on one GPU, {several:.0f} on {gpus} ({several / one:.2f}). Tokens in float32 {same} one's.",
        ]
    return "\n".join(lines) + "\n"


def parameters_of_shape(shape, layers):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(shape, layers)).parameters())


def summary(samples):
    return 1e6 * statistics.median(samples), 1e6 * float(np.quantile(samples, 0.9))


def measure(arguments, work):
    """The report."""
    batches, several, shape = arguments.batches, arguments.gpus, arguments.shape
    layers = arguments.layers or SHAPES[shape]["num_hidden_layers"]
    jobs = [("check", CHECKED["shape"], CHECKED["layers"], CHECKED["dtype"]), ("timed", shape, layers, arguments.dtype)]
    positions = max(8192, arguments.context + STEPS)
    alone = arguments.serve or 2 * parameters_of_shape(shape, layers) < ROOM * MEMORY
    exports = [
        (whose, work / f"{name}{world}", deep, dtype, world, positions, arguments.share, int(arguments.serve))
        for name, whose, deep, dtype in jobs
        for world in (1, several)
        if world > 1 or alone or name == "check"
    ]
    begun = time.monotonic()
    with ThreadPoolExecutor(len(exports)) as pool:
        list(pool.map(export_unless_there, exports))
    exported = time.monotonic() - begun
    if arguments.export_only:
        return None
    actions = [("tokens", "check", []), ("steps", "timed", [",".join(map(str, batches)), arguments.context])]
    if arguments.serve:
        actions += [("serve", "check", [1]), ("serve", "timed", [0])]
    for world in (1, several):
        for action, name, more in actions:
            if not (work / f"{name}{world}").exists():
                continue
            result = work / f"{action}_{name}{world}.json"
            command = ["-m", "bench.models.tensor_parallel", action, work / f"{name}{world}", result, *more]
            ranks.launch(ranks.python(*map(str, command)), world, seconds=arguments.seconds)
    read = {path.stem: json.loads(path.read_text()) for path in work.glob("*.json")}
    timed = {name: read[f"steps_timed{n}"] for name, n in (("one", 1), ("several", several)) if f"steps_timed{n}" in read}
    rows = []
    for batch in batches:
        for what in ("graph", "step"):
            row = {"batch": batch, "what": what}
            for name, found in timed.items():
                row[f"{name}_us"], row[f"{name}_p90_us"] = summary(found["steps"][str(batch)][what])
            rows.append(row)
    joules = {name: {batch: found["steps"][batch]["joules"] for batch in found["steps"]} for name, found in timed.items()}
    served = {}
    if arguments.serve:
        one, other = (read[f"serve_timed{world}"] for world in (1, several))
        checked = [read[f"serve_check{world}"]["tokens"] for world in (1, several)]
        served["serving"] = {
            "one": one["tokens"] / min(one["seconds"]),
            "several": other["tokens"] / min(other["seconds"]),
            "tokens_equal": checked[0] == checked[1],
            "tokens_compared": sum(map(len, checked[0])),
        }
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": driver.gpus()[0].name,
        "gpus": several,
        "cores": os.cpu_count(),
        "shape": shape,
        "layers": layers,
        "dtype": arguments.dtype,
        "context": arguments.context,
        "share": arguments.share,
        "export_s": exported,
        "tokens_equal": read["tokens_check1"] == read[f"tokens_check{several}"],
        "tokens_compared": sum(map(len, read["tokens_check1"])),
        "rows": rows,
        "joules": joules,
        "weights": {name: found["weights"] for name, found in timed.items()},
        **served,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", metavar="STEM")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=NAMES, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="(default: the shape's)")
    parser.add_argument("--serve", action="store_true", help="continuous batching too")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--share", choices=OPTIONS, default="heads", help="what ranks share (default: %(default)s)")
    parser.add_argument("--work", help="a folder that keeps exported decoders for the next run (default: removed)")
    parser.add_argument("--export-only", action="store_true", help="into --work, for the next run")
    parser.add_argument("--seconds", type=float, default=60.0, help="that ranks may take before they are ended")
    arguments = parser.parse_args()
    if arguments.serve and arguments.share == "context":
        parser.error("--serve is for --share heads")
    if not arguments.export_only and ((problem := driver.why_no_gpu()) or len(driver.gpus()) < arguments.gpus):
        raise SystemExit(f"{arguments.gpus} GPUs are needed: {problem or len(driver.gpus())}")
    with tempfile.TemporaryDirectory() as made:
        work = Path(arguments.work or made)
        work.mkdir(parents=True, exist_ok=True)
        report = measure(arguments, work)
    if report is None:
        return
    Path(f"{arguments.stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    Path(f"{arguments.stem}.md").write_text(table(report))
    print(table(report), end="")


def worker(action, *given):
    """What the processes of measure do."""
    ranks.end_with_parent()
    if action == "export":
        shape, folder, layers, dtype, world, positions, share, served = given
        export(shape, folder, int(layers), dtype, int(world), int(positions), share, served == "1")
    elif action == "tokens":
        tokens(*given)
    elif action == "serve":
        folder, out, checked = given
        serve(folder, out, checked == "1")
    else:
        folder, out, batches, context = given
        steps(folder, out, [int(n) for n in batches.split(",")], int(context))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("export", "tokens", "steps", "serve"):
        worker(*sys.argv[1:])
    else:
        main()
