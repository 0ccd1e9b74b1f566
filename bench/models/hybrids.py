"""Whole hybrid decoders in ONNX Runtime: their recurrent layers by leanfleet, and by ONNX Runtime's own operators.

    python -m bench.models.hybrids export DIR [--shape qwen3.5-0.8b] [--layers N] [--dtype float32] [--weightless | --thin]
    python -m bench.models.hybrids run DIR OUT.json [--device cuda] [--prompts 2048,8192,32768] [--batches 1,16]
        [--context 2048]

Two graphs with the same weights, random ones: the one that export_decoder writes, and the same with each GatedDeltaRule or
CausalLinearDecay in the form of ONNX Runtime's operators, by `leanfleet rewrite --to standard`: LinearAttention in float32,
GatedDeltaNet, which is for GPUs alone, in 16 bits, where CausalLinearDecay has no counterpart. GatedDeltaNet's states stay in
its own order from step to step, so that nothing turns them round. All else, attention and convolutions too, is leanfleet's in
both.
--weightless leaves the weights out, for a machine that `run` makes them on; --thin does so for models that do not fit here: all
their large weights are then the same numbers.

prompt         seconds of one request's prompt, from token ids to the next token's logits on the host.
step           seconds of a step of so many requests behind --context tokens each.
captured step  on a GPU, the same as a CUDA graph, as `leanfleet generate` runs steps.

One session at a time, ours, theirs, theirs and ours, each with a warm-up: of two at once the one loaded first is 10% slower
on a CPU. Medians. The logits must agree to within AGREES of the largest, or nothing is written. memory: bytes of
the GPU that a session held in the end. Ratios above 1: we are faster. A side that fails at a line is told as such.
"""

import argparse
import datetime
import gc
import json
import shutil
import statistics
import time
from pathlib import Path

import numpy as np

from bench.models import thin
from bench.models.end_to_end_linear import used
from bench.models.serving import SHAPES, config_of, random_parameters
from bench.models.weightless import DATA, fill, parameters_of, strip

OURS, THEIRS = "leanfleet", "onnxruntime"
RECURRENT = "leanfleet.GatedDeltaRule", "leanfleet.CausalLinearDecay"
AGREES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}  # of the largest logit
TURNS, STEPS = 3, 8  # of each line and side; steps that a turn's median is of


def command_export(args):
    import torch
    from transformers import AutoModelForCausalLM

    from leanfleet.export import export_decoder
    from leanfleet.export.rewrite import print_rows, rewrite_file

    torch.manual_seed(0)
    ours, theirs = args.folder / OURS, args.folder / THEIRS
    config = config_of(args.shape, args.layers)
    if args.thin:
        model = thin.untouched(config, args.dtype)
        with thin.Thin():
            export_decoder(model, ours, verify=False)
        thin.complete(ours)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
        export_decoder(model, ours, verify=False)
    facts = {"model": args.shape, "dtype": args.dtype, "layers": model.config.num_hidden_layers}
    facts |= {"vocabulary": model.config.vocab_size, "parameters": sum(p.numel() for p in model.parameters())}
    shutil.rmtree(theirs, ignore_errors=True)
    theirs.mkdir()
    rows = rewrite_file(ours / "model.onnx", ours / "theirs.onnx", "standard", operators=RECURRENT, verify=False)
    print_rows(rows)
    if left := [row for row in rows if row.into is None]:
        raise SystemExit(f"{left[0].operator} stays: {left[0].reason}")
    in_their_order(ours / "theirs.onnx")
    (ours / thin.WEIGHTS).unlink(missing_ok=True)
    (ours / "theirs.onnx").rename(theirs / "model.onnx")
    shutil.copy(ours / "leanfleet.json", theirs)
    if (ours / DATA).exists():  # small weights are in the graph
        shutil.copy(ours / DATA, theirs)  # onnx refuses files with two names
    if args.weightless:
        for folder in (ours, theirs):
            strip(folder, parameters_of(model))
        facts["random"] = {name: list(p.shape) for name, p in model.named_parameters()}
    facts["operators"] = sorted({row.into for row in rows})
    (args.folder / "bench.json").write_text(json.dumps(facts) + "\n")


def in_their_order(path):
    """GatedDeltaNet has states [V,K], and each stands between two nodes that turn it round. States begin as zeros and only the
    graph reads them: where both widths are the same, caches hold them as they come."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    caches = {t.name: [d.dim_value for d in t.type.tensor_type.shape.dim[-2:]] for t in model.graph.input}
    outputs = {t.name for t in model.graph.output}
    nets = [n for n in model.graph.node if n.op_type == "GatedDeltaNet"]
    makes, gone = {o: n for n in model.graph.node for o in n.output}, []
    for net in nets:
        before = makes[net.input[6]]
        after = next(n for n in model.graph.node if net.output[1] in n.input)
        widths = caches.get(before.input[0], [0, 1])
        if {before.op_type, after.op_type} != {"Transpose"} or after.output[0] not in outputs or widths[0] != widths[1]:
            raise SystemExit(f"{net.name}: its states are not those of a cache with one width")
        net.input[6], net.output[1] = before.input[0], after.output[0]
        gone += [before, after]
    for node in gone:
        model.graph.node.remove(node)
    if nets:
        onnx.save(model, path)


def timed(call):
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


class Side:
    """A session of one of the graphs. memory: what it holds on the GPU after a call."""

    def __init__(self, folder, device):
        from leanfleet.ort_ops.generation import load_decoder

        self.device, self.before = device, 0 if device == "cpu" else used()
        options = {"arena_extend_strategy": "kSameAsRequested"}
        self.decoder = load_decoder(
            folder,
            ["CPUExecutionProvider"] if device == "cpu" else [("CUDAExecutionProvider", options)],
            cuda_graph=device != "cpu",
        )

    def prompts(self, ids, turns):
        """(seconds of each turn but the first, the last logits) of prompts [B,N] from empty caches."""
        steps, lens, seconds = self.decoder.steps(*ids.shape), np.full(len(ids), ids.shape[1], np.int32), []
        for _ in range(turns):
            steps.reset()
            taken, logits = timed(lambda: steps.run(ids, lens, lens))
            seconds.append(taken)
        return seconds[1:], logits

    def steps_behind(self, ids, more, capture):
        """(seconds of each step but the first STEPS, the last logits) of the tokens `more` [B,M] behind prompts [B,N]."""
        steps = self.decoder.steps(len(ids), ids.shape[1] + more.shape[1])
        at, seconds = np.full(len(ids), ids.shape[1], np.int32), []
        steps.run(ids, at, at)
        for i in range(more.shape[1]):
            at = at + np.int32(1)
            taken, logits = timed(lambda i=i, at=at: steps.run(more[:, i : i + 1], at, np.ones_like(at), capture))
            seconds.append(taken)
        return seconds[STEPS:], logits

    def measure(self, line, vocabulary):
        random = np.random.default_rng(line["context"] + line["batch"])
        ids = random.integers(0, vocabulary, (line["batch"], line["context"]))
        if line["kind"] == "prompt":
            return self.prompts(ids, 1 + TURNS)
        more = random.integers(0, vocabulary, (line["batch"], (1 + TURNS) * STEPS))
        return self.steps_behind(ids, more, line["kind"] == "captured step")

    @property
    def memory(self):
        return 0 if self.device == "cpu" else used() - self.before


def row_of(line, seconds, logits, dtype):
    """A row of the JSON. seconds: of each side. Raises SystemExit where the logits are not the same."""
    if "failed" in line:
        return line | {name: statistics.median(s) for name, s in (("ours", seconds[OURS]), ("theirs", seconds[THEIRS])) if s}
    largest = np.abs(logits[OURS]).max()
    error = float(np.abs(logits[OURS] - logits[THEIRS]).max() / largest)
    if not error <= AGREES[dtype]:
        raise SystemExit(f"{line}: logits differ by {error:.1e} of the largest; {AGREES[dtype]:.0e} is allowed")
    ours, theirs = (statistics.median(seconds[name]) for name in (OURS, THEIRS))
    return line | {"ours": ours, "theirs": theirs, "ratio": theirs / ours, "error": error}


def command_run(args):
    import onnxruntime

    from leanfleet import bench
    from leanfleet.driver import Device

    facts = json.loads((args.folder / "bench.json").read_text())
    if "random" in facts:
        parameters = random_parameters(facts, args.device)
        for side in (OURS, THEIRS):
            fill(args.folder / side, parameters)
        del parameters
    for side in (OURS, THEIRS):
        thin.complete(args.folder / side)
    lines = [{"kind": "prompt", "batch": 1, "context": length} for length in args.prompts]
    for kind in ("step", "captured step")[: 1 if args.device == "cpu" else 2]:
        lines += [{"kind": kind, "batch": batch, "context": args.context} for batch in args.batches]
    seconds = [{OURS: [], THEIRS: []} for _ in lines]
    logits, memory = [{} for _ in lines], {OURS: 0, THEIRS: 0}
    for name in (OURS, THEIRS, THEIRS, OURS):
        side = Side(args.folder / name, args.device)
        for line, taken, last in zip(lines, seconds, logits):
            try:
                found, last[name] = side.measure(line, facts["vocabulary"])
            except RuntimeError as error:
                line |= {"failed": line.get("failed", {}) | {name: str(error)[:300]}}
                print(f"{name}: {line}", flush=True)
                continue
            taken[name] += found
            print(f"{name}: {line} {1e3 * statistics.median(found):.2f} ms", flush=True)
        memory[name] = max(memory[name], side.memory)
        del side
        gc.collect()
    report = {"date": datetime.date.today().isoformat(), "machine": bench._machine(Device.named(args.device))}
    report |= {"onnxruntime": onnxruntime.__version__, "memory": memory if args.device != "cpu" else None} | facts
    report["rows"] = [row_of(*line, facts["dtype"]) for line in zip(lines, seconds, logits)]
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(report))


def table(report):
    """A line a row of the JSON."""
    machine, operators = report["machine"], " and ".join(report["operators"])
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    text = [
        f"{report['date']}. {machine['device']}{threads}. {report['model']}, {report['layers']} layers, {report['dtype']}, "
        f"onnxruntime {report['onnxruntime']}: the recurrent layers by leanfleet, and by {operators}. Milliseconds, medians; "
        "above 1x leanfleet is faster.",
        "",
        "| | requests | tokens before | leanfleet | onnxruntime | |",
        "|---|---|---|---|---|---|",
    ]
    for r in report["rows"]:
        prompt = r["kind"] == "prompt"
        what, before = ("prompt of {:,}", "") if prompt else (r["kind"], "{:,}")
        ours, theirs = (f"{1e3 * r[name]:.2f}" if name in r else "failed" for name in ("ours", "theirs"))
        cells = [what.format(r["context"]), r["batch"], before.format(r["context"]), ours, theirs]
        cells.append(f"{r['ratio']:.2f}x" if "ratio" in r else "")
        text.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(text) + "\n"


def main():
    numbers = lambda text: [int(n) for n in text.split(",") if n]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    export = commands.add_parser("export")
    export.add_argument("folder", type=Path)
    export.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-0.8b")
    export.add_argument("--layers", type=int)
    export.add_argument("--dtype", choices=list(AGREES), default="float32")
    weights = export.add_mutually_exclusive_group()
    weights.add_argument("--weightless", action="store_true")
    weights.add_argument("--thin", action="store_true")
    export.set_defaults(command=command_export)
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("out", type=Path)
    run.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    run.add_argument("--prompts", type=numbers, default=[2048, 8192, 32768])
    run.add_argument("--batches", type=numbers, default=[1, 16])
    run.add_argument("--context", type=int, default=2048, help="tokens before a step")
    run.set_defaults(command=command_run)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
