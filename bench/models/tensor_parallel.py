"""Decode steps of Llama-3.2-1B's shape on one GPU and, tensor or context parallel, on several.

    python -m bench.models.tensor_parallel STEM [--gpus 2] [--layers 16] [--context 1024] [--batches 1,16] [--dtype float16]
        [--share heads|context]

Random weights, made here; needs as many GPUs, onnxruntime-gpu and the extras export and models. Two minutes at most with 16
cores. First a decoder of two such layers in float32, without TF32: the tokens of all prompts have to be the same on one GPU and
on several. Then steps of one token a request behind `context` tokens, captured as CUDA graphs: 20 to warm up, 100 timed one by
one, with the copy of the logits to the host (step) and without (graph). Medians and 90th percentiles, µs. Writes STEM.json and
STEM.md.
"""

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from leanfleet import driver, ranks
from leanfleet.decoder_contract import WORLD

SHAPE = dict(
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
CHECKED = dict(layers=2, dtype="float32", new=24)  # the decoder whose tokens are compared
WARM, TIMED = 20, 100
STEPS = 2 * (WARM + TIMED) + 8
PIECE = 4096  # tokens of the context that are read together: what layers compute for them takes memory


OPTIONS = {"heads": "tensor_parallel", "context": "context_parallel"}  # of export_decoder, by what is shared out


def export(folder, layers, dtype, world, positions, share):
    """A process of its own. All make the same weights: from one seed, on the same GPU."""
    import torch
    import transformers

    from leanfleet.export import export_decoder

    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=positions, **SHAPE)
    there = "cuda" if torch.cuda.is_available() else "cpu"  # billions of random numbers take the CPU long
    with torch.device(there):
        torch.set_default_dtype(getattr(torch, dtype))
        model = transformers.AutoModelForCausalLM.from_config(config).to("cpu").eval()
        torch.set_default_dtype(torch.float32)
    export_decoder(model, folder, verify=False, **({} if world == 1 else {OPTIONS[share]: world}))


def in_process(*arguments):
    """Runs this module again, as one process. Raises ranks.RankError."""
    ranks.launch(ranks.python("-m", "bench.models.tensor_parallel", *map(str, arguments)), 1)


def load(folder, options):
    """(decoder, its communicator or None) of this process's rank."""
    from leanfleet.ort_ops import load_decoder
    from leanfleet.ort_ops.sessions import CUDA

    here = ranks.place()
    parallel = here is not None and here.world > 1
    joined = ranks.join(WORLD, "nccl", here.local) if parallel else None
    device, rank = (f"cuda:{here.local}", here.rank) if parallel else ("cuda:0", None)
    graph = options.get("enable_cuda_graph") == "1"
    return load_decoder(folder, [(CUDA, options)], cuda_graph=graph, device=device, rank=rank), joined


def tokens(folder, out):
    """Writes the tokens of a few prompts."""
    from leanfleet.ort_ops import generate

    decoder, joined = load(folder, {"use_tf32": "0"})
    random = np.random.default_rng(0)
    prompts = [random.integers(3, SHAPE["vocab_size"], n).tolist() for n in (1, 9, 40, 300)]
    found, _ = generate(decoder, prompts, CHECKED["new"], stop_tokens=[])
    finish(out, found, joined)


def steps(folder, out, batches, context):
    """Writes the seconds of captured steps, by batch."""
    decoder, joined = load(folder, {"enable_cuda_graph": "1"})
    found = {batch: measured(decoder, batch, context) for batch in batches}
    finish(out, found, joined)


def finish(out, found, joined):
    if joined is None or joined.rank == 0:
        Path(out).write_text(json.dumps(found))
    if joined is not None:
        joined.close()


def measured(decoder, batch, context):
    """{what: seconds of each of TIMED steps}: "step" with the logits on the host, "graph" without."""
    runner = decoder.steps(batch, context + STEPS)
    random, lens = np.random.default_rng(1), np.zeros(batch, np.int32)
    for begin in range(0, context, PIECE):
        new = np.full(batch, min(PIECE, context - begin), np.int32)
        lens = lens + new
        runner.run(random.integers(3, SHAPE["vocab_size"], (batch, int(new[0]))), lens, new)
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
    return found


def table(report):
    gpus = report["gpus"]
    shared = ", whose tokens are shared out" if report.get("share") == "context" else ""
    lines = [
        f"{report['layers']} layers of Llama-3.2-1B's shape, {report['dtype']}, {report['context']} tokens of context{shared}, "
        f"{report['gpu']}. Tokens in float32 on {gpus} GPUs {'equal' if report['tokens_equal'] else 'DIFFER FROM'} one's.",
        "",
        f"| batch | | one GPU, µs | {gpus} GPUs, µs | speed-up |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        one, several = row["one_us"], row["several_us"]
        lines.append(f"| {row['batch']} | {row['what']} | {one:.0f} | {several:.0f} | {one / several:.2f} |")
    return "\n".join(lines) + "\n"


def summary(samples):
    return 1e6 * statistics.median(samples), 1e6 * float(np.quantile(samples, 0.9))


def measure(arguments, work):
    """The report."""
    batches, several = arguments.batches, arguments.gpus
    jobs = [("check", CHECKED["layers"], CHECKED["dtype"]), ("timed", arguments.layers, arguments.dtype)]
    positions = max(8192, arguments.context + STEPS)
    exports = [
        (work / f"{name}{world}", layers, dtype, world, positions, arguments.share)
        for name, layers, dtype in jobs
        for world in (1, several)
    ]
    begun = time.monotonic()
    with ThreadPoolExecutor(len(exports)) as pool:
        list(pool.map(lambda job: in_process("export", *job), exports))
    exported = time.monotonic() - begun
    for world in (1, several):
        for action, folder, more in (
            ("tokens", work / f"check{world}", []),
            ("steps", work / f"timed{world}", [",".join(map(str, batches)), arguments.context]),
        ):
            command = ["-m", "bench.models.tensor_parallel", action, folder, work / f"{action}{world}.json", *more]
            ranks.launch(ranks.python(*map(str, command)), world, seconds=arguments.seconds)
    read = {path.stem: json.loads(path.read_text()) for path in work.glob("*.json")}
    rows = []
    for batch in batches:
        for what in ("graph", "step"):
            row = {"batch": batch, "what": what}
            for name, world in (("one", 1), ("several", several)):
                row[f"{name}_us"], row[f"{name}_p90_us"] = summary(read[f"steps{world}"][str(batch)][what])
            rows.append(row)
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": driver.gpus()[0].name,
        "gpus": several,
        "cores": os.cpu_count(),
        "layers": arguments.layers,
        "dtype": arguments.dtype,
        "context": arguments.context,
        "share": arguments.share,
        "export_s": exported,
        "tokens_equal": read["tokens1"] == read[f"tokens{several}"],
        "tokens_compared": sum(map(len, read["tokens1"])),
        "rows": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", metavar="STEM")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--share", choices=OPTIONS, default="heads", help="what ranks share (default: %(default)s)")
    parser.add_argument("--work", help="a folder for the exported decoders (default: one that is removed)")
    parser.add_argument("--seconds", type=float, default=60.0, help="that ranks may take before they are ended")
    arguments = parser.parse_args()
    if (problem := driver.why_no_gpu()) or len(driver.gpus()) < arguments.gpus:
        raise SystemExit(f"{arguments.gpus} GPUs are needed: {problem or len(driver.gpus())}")
    with tempfile.TemporaryDirectory() as made:
        work = Path(arguments.work or made)
        work.mkdir(parents=True, exist_ok=True)
        report = measure(arguments, work)
    Path(f"{arguments.stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    Path(f"{arguments.stem}.md").write_text(table(report))
    print(table(report), end="")


def worker(action, *given):
    """What the processes of measure do."""
    ranks.end_with_parent()
    if action == "export":
        folder, layers, dtype, world, positions, share = given
        export(folder, int(layers), dtype, int(world), int(positions), share)
    elif action == "tokens":
        tokens(*given)
    else:
        folder, out, batches, context = given
        steps(folder, out, [int(n) for n in batches.split(",")], int(context))


if __name__ == "__main__":
    import sys

    if sys.argv[1:2] and sys.argv[1] in ("export", "tokens", "steps"):
        worker(*sys.argv[1:])
    else:
        main()
