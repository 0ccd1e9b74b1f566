"""Decode steps and continuous batching of a decoder on one GPU and, tensor or context parallel, on several.

    python -m bench.models.tensor_parallel STEM [--shape llama-3.2-1b] [--layers N] [--gpus 2] [--context 1024] [--batches 1,16]
        [--dtype float16] [--share heads|context] [--fill] [--serve] [--work FOLDER]

Random weights, made here; needs as many GPUs, onnxruntime-gpu and the extras export and models. Two minutes at most with 16
cores for the smallest shape. What is timed has weights that share their bytes on disk, as many as the largest has, and each its
own place on the GPU (bench.models.thin); a shape that one GPU has no room for is timed on several alone. A --work folder keeps
what was exported, the tokens that were compared and the times of one GPU, for runs of other shapes and numbers of GPUs.
--export-only prepares it on a machine without GPUs; without files named weights.data it is small enough to be copied.

First a decoder of two layers of Llama-3.2-1B's shape in float32, without TF32: the tokens of all prompts have to be the same on
one GPU and on several. Then steps of one token a request behind `context` tokens, captured as CUDA graphs: 20 to warm up, 100
timed one by one, with the copy of the logits to the host (step) and without (graph). Medians and 90th percentiles, µs; and
joules a token of all GPUs over 300 graphs, by NVML's counters. --fill: caches are filled with random numbers in place of
prompts, whose cost grows with the square of the context.
--serve: ContinuousBatch too, with the requests of bench.models.vllm, 256 at once and 64 running, answer tokens a second, the
better of two rounds after one to warm up; and its tokens in float32. Writes STEM.json and STEM.md.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from bench.models import thin
from bench.models.end_to_end import energy_counter
from bench.models.serving import BLOCK, POSITIONS, SHAPES, config_of, requests
from bench.models.vllm import SERVING
from leanfleet import driver, ranks
from leanfleet.decoder_contract import FACTS_FILE, WORLD

CHECKED = dict(shape="llama-3.2-1b", layers=2, dtype="float32", new=24)  # the decoder whose tokens are compared
CHECKED_REQUESTS = dict(requests=24, prompt=120, answer=24, running=8, step_tokens=256)
SERVED = 2  # timed rounds
WARM, TIMED = 20, 100
COUNTED = 300  # steps whose energy is counted
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, as data sheets have it
MEMORY = 80 << 30  # bytes of a GPU, where none is there to be asked
ROOM = 0.8  # of it that weights may take
STEPS = 2 * (WARM + TIMED) + 8
PIECE = 4096  # tokens of the context that are read together: what layers compute for them takes memory

NAMES = {
    "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3-8b": "Llama-3-8B",
    "llama-3-70b": "Llama-3-70B",
    "smollm2": "SmolLM2-135M",
    "qwen2.5-7b": "Qwen2.5-7B",
}
OPTIONS = {"heads": "tensor_parallel", "context": "context_parallel"}  # of export_decoder, by what is shared out


def export_thin(shape, folder, layers, dtype, world, positions, share, serve=False):
    """A process of its own."""
    from leanfleet.export import decoder
    from leanfleet.export.serving import add_serving

    config = config_of(shape, layers)
    config.max_position_embeddings = positions
    model = thin.untouched(config, dtype)
    with thin.Thin():
        decoder.export_decoder(model, folder, verify=False, **({} if world == 1 else {OPTIONS[share]: world}))
        if serve:
            add_serving(model, folder, block=BLOCK, verify=False)


def export(shape, folder, layers, dtype, world, positions, share, serve):
    """A process of its own. All make the same weights: from one seed, on the same GPU."""
    if (shape, layers, dtype) != tuple(CHECKED[name] for name in ("shape", "layers", "dtype")):
        return export_thin(shape, folder, layers, dtype, world, positions, share, serve)
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
    """In a process of its own; beside the folder stands what it was made of."""
    shape, folder, *how, serving = job
    made = folder.with_name(f"{folder.name}.made")
    texts = [json.dumps([shape, *how, each]) for each in (serving, 1)]  # one that serves is good for steps too
    if not (made.exists() and made.read_text() in texts):
        made.unlink(missing_ok=True)
        for old in folder.parent.glob(f"*_{folder.name}.json"):  # results
            old.unlink()
        if folder.is_dir():
            shutil.rmtree(folder)
        in_process("export", *job)
        made.write_text(texts[0])


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
    prompts = [random.integers(3, decoder.vocabulary, n).tolist() for n in (1, 9, 40, 300)]
    found, _ = generate(decoder, prompts, CHECKED["new"], stop_tokens=[])
    finish(out, found, joined)


def steps(folder, out, batches, context, fill):
    """Writes the seconds of captured steps, by batch."""
    decoder, joined = load(folder, {"enable_cuda_graph": "1"})
    found = {batch: measured(decoder, batch, context, fill) for batch in batches}
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
    vocabulary = json.loads(Path(folder, FACTS_FILE).read_text())["vocabulary"]
    work = requests(sizes["requests"], sizes["prompt"], sizes["answer"], vocabulary)
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


def fill_caches(runner):
    """Writes numbers of deviation 1 into all caches."""
    numbers, whole = np.random.default_rng(2).standard_normal(1 << 22).astype(np.float16), None
    for values in runner.buffers:
        shape = tuple(values[0].shape())
        if whole is None or whole.shape != shape:
            whole = np.resize(numbers, shape)
        values[0].update_inplace(whole)


def measured(decoder, batch, context, fill=False):
    """{what: seconds of each of TIMED steps}: "step" with the logits on the host, "graph" without; "joules" a token of the
    GPUs that ranks have."""
    runner = decoder.steps(batch, context + STEPS)
    random, lens = np.random.default_rng(1), np.zeros(batch, np.int32)
    if fill:
        fill_caches(runner)
        lens = lens + np.int32(context)
    for begin in range(0, 0 if fill else context, PIECE):
        new = np.full(batch, min(PIECE, context - begin), np.int32)
        lens = lens + new
        runner.run(random.integers(3, decoder.vocabulary, (batch, int(new[0]))), lens, new)
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
    told = ""
    if "tokens_equal" in report:
        same = "equal" if report["tokens_equal"] else "DIFFER FROM"
        told = f" Tokens of two layers of Llama-3.2-1B's in float32 on {gpus} GPUs {same} one's."
    if report.get("filled"):
        told += " Caches are filled with random numbers, without prompts."
    lines = [
        f"{report['layers']} layers of {shape}'s shape, {report['dtype']}, {report['context']} tokens of context{shared}, "
        f"{report['gpu']}.{told}",
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


def memory():
    """Bytes of a GPU."""
    return MEMORY if driver.why_no_gpu() else driver.free_memory(driver.Device.named("cuda:0"))


def measure(arguments, work):
    """The report."""
    batches, several, shape = arguments.batches, arguments.gpus, arguments.shape
    layers = arguments.layers or SHAPES[shape]["num_hidden_layers"]
    timed = f"{shape}{f'-{arguments.layers}' if arguments.layers else ''}"
    jobs = [("check", CHECKED["shape"], CHECKED["layers"], CHECKED["dtype"]), (timed, shape, layers, arguments.dtype)]
    alone = not arguments.several_alone and 2 * parameters_of_shape(shape, layers) < ROOM * memory()

    def folder_of(name, world):
        return work / f"{name}-{'one' if world == 1 else f'{arguments.share}{world}'}"

    def share_of(world):
        return "heads" if world == 1 else arguments.share  # one decoder is good beside both

    exports = [
        (whose, folder_of(name, world), deep, dtype, world, positions, share_of(world), int(arguments.serve))
        for name, whose, deep, dtype in jobs
        for world in (1, several)
        if (name == "check" and not arguments.no_check) or (name == timed and (world > 1 or alone))
        for positions in [max(POSITIONS, arguments.context + STEPS if name == timed else 0)]
    ]
    begun = time.monotonic()
    with ThreadPoolExecutor(len(exports)) as pool:
        list(pool.map(export_unless_there, exports))
    exported = time.monotonic() - begun
    if arguments.export_only:
        return None
    actions = [("tokens", "check", []), ("steps", timed, [",".join(map(str, batches)), arguments.context, int(arguments.fill)])]
    if arguments.serve:
        actions += [("serve", "check", [1]), ("serve", timed, [0])]
    read, there = {}, {export[1] for export in exports}
    for world in (1, several):
        for action, name, more in actions:
            if (folder := folder_of(name, world)) not in there:
                continue
            # Tokens are the same in the next run; what one GPU takes stands beside several numbers of them.
            said = "-".join(map(str, more)) if action == "steps" else ""
            result = work / f"{action}{said}_{folder.name}.json"
            if not ((name == "check" or world == 1) and result.exists()):
                thin.complete(folder)
                command = ["-m", "bench.models.tensor_parallel", action, folder, result, *more]
                ranks.launch(ranks.python(*map(str, command)), world, seconds=arguments.seconds)
            read[action, name, world] = json.loads(result.read_text())
    found_of = {name: read["steps", timed, n] for name, n in (("one", 1), ("several", several)) if ("steps", timed, n) in read}
    rows = []
    for batch in batches:
        for what in ("graph", "step"):
            row = {"batch": batch, "what": what}
            for name, found in found_of.items():
                row[f"{name}_us"], row[f"{name}_p90_us"] = summary(found["steps"][str(batch)][what])
            rows.append(row)
    joules = {name: {batch: found["steps"][batch]["joules"] for batch in found["steps"]} for name, found in found_of.items()}
    checked_tokens, served = {}, {}
    if not arguments.no_check:
        tokens_of = [read["tokens", "check", world] for world in (1, several)]
        checked_tokens = {"tokens_equal": tokens_of[0] == tokens_of[1], "tokens_compared": sum(map(len, tokens_of[0]))}
    if arguments.serve:
        one, other = (read["serve", timed, world] for world in (1, several))
        checked = [read["serve", "check", world]["tokens"] for world in (1, several)]
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
        **checked_tokens,
        "rows": rows,
        "joules": joules,
        "weights": {name: found["weights"] for name, found in found_of.items()},
        **({"filled": True} if arguments.fill else {}),
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
    parser.add_argument("--fill", action="store_true", help="caches of random numbers in place of prompts")
    parser.add_argument("--several-alone", action="store_true", help="nothing of this shape on one GPU")
    parser.add_argument("--no-check", action="store_true", help="no tokens to compare: they were, in a run that is told")
    parser.add_argument("--share", choices=OPTIONS, default="heads", help="what ranks share (default: %(default)s)")
    parser.add_argument("--work", help="a folder that keeps exported decoders for the next run (default: removed)")
    parser.add_argument("--export-only", action="store_true", help="into --work, for the next run")
    parser.add_argument("--seconds", type=float, default=60.0, help="that ranks may take before they are ended")
    arguments = parser.parse_args()
    if arguments.fill and arguments.dtype != "float16":
        parser.error("--fill is for --dtype float16")
    if arguments.serve and arguments.no_check:
        parser.error("--serve compares tokens: leave --no-check out")
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
        folder, out, batches, context, fill = given
        steps(folder, out, [int(n) for n in batches.split(",")], int(context), fill == "1")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("export", "tokens", "steps", "serve"):
        worker(*sys.argv[1:])
    else:
        main()
