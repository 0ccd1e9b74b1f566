"""Decoders with linear attention in ONNX Runtime's CUDA provider, against their function bodies and PyTorch with fla.

    python bench/end_to_end_linear.py export DIR [--kind retnet] [--layers 24]   anywhere: the graph, without its weights
    python bench/end_to_end_linear.py run DIR [--prompts 2048 8192 100000] [--out F.json]   on a GPU

RetNet-1.3B's shape (hidden 2048, 8 heads, keys 256, values 512, feed-forward 4096, 24 layers) or TransNormerLLM-1B's (2048, 16
heads of 128, feed-forward 5632, 16 layers), float16, random weights that `run` makes. For each prompt: seconds of the prompt,
milliseconds of a decode step after it, and peak memory of the GPU beyond the weights. The bodies run in the same onnxruntime
without our library; PyTorch runs the same modules with fla's chunk_simple_gla and fused recurrent kernels. Greedy tokens of all
are compared.
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import torch

from leanfleet.export import LinearDecoder, LinearDecoderConfig

SHAPES = {"retnet": dict(hidden_size=2048, num_attention_heads=8, feed_forward_size=4096, layers=24),
          "transnormer": dict(hidden_size=2048, num_attention_heads=16, feed_forward_size=5632, layers=16)}
VOCABULARY = 32000
DATA = "model.onnx.data"


def build(kind, layers, device="cpu", seed=0):
    sizes = {k: v for k, v in SHAPES[kind].items() if k != "layers"}
    with torch.device(device):
        torch.manual_seed(seed)
        return LinearDecoder(LinearDecoderConfig(kind, VOCABULARY, num_hidden_layers=layers, **sizes)).half().eval()


def parts_of(module, arrays):
    """{name: [[parameter, transposed], ...]}: what each of the exported arrays holds, several parts side by side.

    The exporter renames weights, transposes those of products and packs products of one input: the first row finds them.
    """
    starts = {}
    for name, p in module.named_parameters():
        rows = p.detach().reshape(-1, p.shape[-1])
        starts[rows[0, :32].numpy().tobytes()] = name, False
        if p.dim() == 2:
            starts[rows[:32, 0].contiguous().numpy().tobytes()] = name, True
    parameters, found = dict(module.named_parameters()), {}
    for array_name, array in arrays.items():
        row, column, parts = array.reshape(array.shape[0] if array.ndim == 2 else 1, -1)[0], 0, []
        while column < len(row):
            name, turned = starts[row[column:column + 32].tobytes()]
            column += parameters[name].shape[0 if turned else -1]
            parts.append([name, turned])
        whole = [parameters[n].detach().mT if turned else parameters[n].detach() for n, turned in parts]
        if not np.array_equal(torch.cat(whole, -1).numpy().reshape(array.shape), array):
            raise RuntimeError(f"{array_name} is not made of parameters {parts}")
        found[array_name] = parts
    return found


def command_export(args):
    """Exports the whole model and throws the weights' file away; the graph remembers where each weight belongs."""
    from leanfleet.export import export_decoder

    layers = args.layers or SHAPES[args.kind]["layers"]
    module = build(args.kind, layers)
    export_decoder(module, args.folder)
    path = args.folder / "model.onnx"
    model = onnx.load(path)
    path.unlink()
    large = [t for t in model.graph.initializer if len(t.raw_data) >= 4096]
    weights = parts_of(module, {t.name: onnx.numpy_helper.to_array(t).copy() for t in large})
    onnx.save(model, path, save_as_external_data=True, location=DATA, size_threshold=4096)
    (args.folder / DATA).unlink()
    (args.folder / "bench.json").write_text(json.dumps({"kind": args.kind, "layers": layers, "weights": weights}) + "\n")
    print(f"{len(weights)} weights left out of {path}, {path.stat().st_size >> 10} KiB")


def restore(folder, facts):
    """Writes the weights' file of a seeded model; returns the model, on the GPU."""
    model = build(facts["kind"], facts["layers"], "cuda")
    values = dict(model.named_parameters())
    with open(folder / DATA, "wb") as file:
        for t in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer:
            if t.data_location != onnx.TensorProto.EXTERNAL:
                continue
            parts = [values[n].detach().mT if turned else values[n].detach() for n, turned in facts["weights"][t.name]]
            value = torch.cat(parts, -1)
            file.seek(int(next(e.value for e in t.external_data if e.key == "offset")))
            file.write(value.contiguous().cpu().numpy().tobytes())
    return model


class Fla:
    """The model in PyTorch with flash-linear-attention between the projections; states by layer."""

    def __init__(self, model):
        from leanfleet.export import linear_decoder

        self.model, self.states = model, {}
        linear_decoder.decayed_attention = self.attend

    def attend(self, cache, layer, query, key, value, log_decay, scale=1.0):
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

        run = fused_recurrent_simple_gla if query.shape[2] == 1 else chunk_simple_gla
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        gates = log_decay.expand(*q.shape[:2], -1).contiguous()
        output, self.states[layer] = run(q, k, v, gates, scale=scale, initial_state=self.states.get(layer),
                                         output_final_state=True)
        return output.transpose(1, 2)

    @torch.no_grad()
    def step(self, ids, start):
        positions = start + torch.arange(ids.shape[1], device="cuda").unsqueeze(0)
        hidden = {}
        hook = self.model.head.register_forward_pre_hook(lambda m, a: (a[0][:, -1:],))
        hidden = self.model(ids, positions, leanfleet_cache=object()).logits
        hook.remove()
        return hidden[:, -1].float()


def fla_runner(model):
    fla = Fla(model)

    def reset():
        fla.states.clear()
        torch.cuda.empty_cache()

    return lambda ids, start: fla.step(torch.from_numpy(ids).cuda(), start).cpu().numpy(), reset


def ort_runner(folder, library):
    """(function of ids and the tokens before them, function that starts anew) of a session on the GPU."""
    from leanfleet.ort_ops.generation import _Steps, load_decoder

    providers = ["CUDAExecutionProvider"] if library else ["CUDAExecutionProvider", "CPUExecutionProvider"]
    steps = _Steps(load_decoder(folder, providers, library=library), 1, 1)

    def run(ids, start):
        lens = np.array([ids.shape[1]], np.int32)
        return steps.run(ids, lens + np.int32(start), lens)

    return run, steps.reset


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(step, prompt, steps=20):
    """step(ids [1,N] int64 on the CPU, tokens before): logits. Returns seconds of the prompt, of a step, and the tokens."""
    tokens, samples = [], []
    start = time.perf_counter()
    logits = step(prompt, 0)
    tokens.append(int(logits.argmax()))
    prompt_seconds = time.perf_counter() - start
    for i in range(steps):
        start = time.perf_counter()
        logits = step(np.array([[tokens[-1]]]), prompt.shape[1] + i)
        tokens.append(int(logits.argmax()))
        samples.append(time.perf_counter() - start)
    return prompt_seconds, statistics.median(samples), tokens


def command_run(args):
    import onnxruntime

    facts = json.loads((args.folder / "bench.json").read_text())
    model = restore(args.folder, facts)
    del facts["weights"]
    rows = []
    for kind in ("leanfleet", "PyTorch with fla", "function bodies"):
        if args.only in kind:
            run, reset = fla_runner(model) if kind == "PyTorch with fla" else ort_runner(args.folder, kind == "leanfleet")
            idle = used()
            for length in args.prompts:
                row = {**facts, "implementation": kind, "prompt": length}
                rows.append(row)
                if kind == "function bodies" and length > args.body_limit:
                    row["refused"] = f"not tried: prompts above {args.body_limit}"
                    continue
                prompt = np.random.default_rng(length).integers(0, VOCABULARY, (1, length))
                try:
                    for _ in range(2):  # the first one warms up
                        reset()
                        row["prompt_seconds"], row["step_seconds"], row["tokens"] = measure(run, prompt)
                    row["peak_bytes"] = used() - idle
                except Exception as error:
                    row["refused"] = f"{type(error).__name__}: {error}"[:300]
                print(json.dumps(row), flush=True)
            del run, reset
            torch.cuda.empty_cache()
    for length in args.prompts:
        found = {r["implementation"]: r.get("tokens") for r in rows if r["prompt"] == length}
        ours = found.pop("leanfleet", None)
        for name, tokens in found.items():
            if tokens and ours:
                same = next((i for i, (a, b) in enumerate(zip(ours, tokens)) if a != b), len(ours))
                print(f"prompt {length}: {same} of {len(ours)} first greedy tokens equal those of {name}")
    result = {"date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(),
              "onnxruntime": onnxruntime.__version__, "torch": torch.__version__, **facts, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    export = commands.add_parser("export")
    export.add_argument("folder", type=Path)
    export.add_argument("--kind", choices=list(SHAPES), default="retnet")
    export.add_argument("--layers", type=int)
    export.set_defaults(command=command_export)
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192, 100000])
    run.add_argument("--body-limit", type=int, default=8192, help="longest prompt for the function bodies")
    run.add_argument("--only", default="", help="implementations whose name contains this")
    run.add_argument("--out", type=Path)
    run.set_defaults(command=command_run)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
