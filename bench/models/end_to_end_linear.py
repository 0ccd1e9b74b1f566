"""Decoders with linear attention in ONNX Runtime's CUDA provider, against their function bodies and PyTorch with fla.

    python -m bench.models.end_to_end_linear export DIR [--kind retnet] [--layers 24]   anywhere: the graph, without its weights
    python -m bench.models.end_to_end_linear run DIR [--prompts 2048 8192 100000] [--out F.json]   on a GPU

RetNet-1.3B's shape (hidden 2048, 8 heads, keys 256, values 512, feed-forward 4096, 24 layers), TransNormerLLM-1B's (2048, 16
heads of 128, feed-forward 5632, 16 layers) or MiniMax-Text-01's (hidden 6144, 64 heads of 128, 2 experts a token; of its 80
layers two with lightning attention, of its 32 experts of 9216 four), float16, random weights that `run` makes. For each
prompt: seconds of the prompt, milliseconds of a decode step after it, and peak memory of the GPU beyond the weights. The
bodies run in the same onnxruntime without our library; PyTorch runs the same modules with fla's chunk_simple_gla and fused
recurrent kernels. Greedy tokens of all are compared.
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from bench.models.weightless import DATA, fill, parameters_of, strip
from leanfleet.export import LinearDecoder, LinearDecoderConfig

SHAPES = {
    "retnet": dict(hidden_size=2048, num_attention_heads=8, feed_forward_size=4096, layers=24),
    "transnormer": dict(hidden_size=2048, num_attention_heads=16, feed_forward_size=5632, layers=16),
    "minimax": dict(
        hidden_size=6144,
        num_attention_heads=64,
        head_dim=128,
        num_key_value_heads=8,
        intermediate_size=9216,
        num_local_experts=4,
        num_experts_per_tok=2,
        layers=2,
    ),
}
VOCABULARY = 32000


def build(kind, layers, device="cpu", seed=0):
    sizes = {k: v for k, v in SHAPES[kind].items() if k != "layers"}
    with torch.device(device):
        torch.manual_seed(seed)
        if kind == "minimax":
            from transformers import AutoModelForCausalLM, MiniMaxConfig

            config = MiniMaxConfig(
                **sizes,
                num_hidden_layers=layers,
                vocab_size=VOCABULARY,
                max_position_embeddings=1 << 20,
                layer_types=["linear_attention"] * layers,
            )
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
            for layer in model.model.layers:  # random weights as they come make sums beyond float16
                layer.self_attn.qkv_proj.weight.data *= 0.25
            return model
        return LinearDecoder(LinearDecoderConfig(kind, VOCABULARY, num_hidden_layers=layers, **sizes)).half().eval()


def command_export(args):
    """Exports the whole model and throws the weights' file away; the graph remembers where each weight belongs."""
    from leanfleet.export import export_decoder

    layers = args.layers or SHAPES[args.kind]["layers"]
    module = build(args.kind, layers)
    export_decoder(module, args.folder)
    count = strip(args.folder, parameters_of(module))
    (args.folder / "bench.json").write_text(json.dumps({"kind": args.kind, "layers": layers}) + "\n")
    path = args.folder / "model.onnx"
    print(f"{count} weights left out of {path}, {path.stat().st_size >> 10} KiB")


class Fla:
    """The model in PyTorch with flash-linear-attention between the projections; states by layer."""

    def __init__(self, model):
        from leanfleet.export import decoder, linear_decoder

        self.model, self.states = model, {}
        linear_decoder.decayed_attention = decoder.decayed_attention = self.attend
        self.transformers = not isinstance(model, LinearDecoder)
        if self.transformers:
            self.layers = decoder.traceable(model, fuse=False)  # MiniMax's attention through decayed_attention, no masks
            self.layers.__enter__()
            model.set_experts_implementation("grouped_mm")

    def attend(self, cache, layer, query, key, value, log_decay, scale=1.0):
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

        run = fused_recurrent_simple_gla if query.shape[1] == 1 else chunk_simple_gla
        q, k, v = (t.contiguous() for t in (query, key, value))
        output, self.states[layer] = run(
            q, k, v, g_gamma=log_decay.contiguous(), scale=scale, initial_state=self.states.get(layer), output_final_state=True
        )
        return output

    @torch.no_grad()
    def step(self, ids, start):
        positions = start + torch.arange(ids.shape[1], device="cuda").unsqueeze(0)
        options = {"use_cache": False} if self.transformers else {"leanfleet_cache": object()}
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda m, a: (a[0][:, -1:],))
        logits = self.model(input_ids=ids, position_ids=positions, **options).logits
        hook.remove()
        return logits[:, -1].float()


def fla_runner(model):
    fla = Fla(model)

    def reset():
        fla.states.clear()
        torch.cuda.empty_cache()

    return lambda ids, start: fla.step(torch.from_numpy(ids).cuda(), start).cpu().numpy(), reset


def ort_runner(folder, library, memory_patterns):
    """(function of ids and the tokens before them, function that starts anew) of a session on the GPU."""
    import onnxruntime

    from leanfleet.ort_ops.generation import _Steps, load_decoder

    # The arena would otherwise grow by powers of two.
    providers = [("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]
    providers += [] if library else ["CPUExecutionProvider"]
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = memory_patterns
    steps = _Steps(load_decoder(folder, providers, options, library=library), 1, 1)

    def run(ids, start):
        lens = np.array([ids.shape[1]], np.int32)
        return steps.run(ids, lens + np.int32(start), lens)

    return run, steps.reset


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def print_kernels(run, prompt, most=14):
    """Prints the GPU's kernels of a prompt, by their time; returns their seconds in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(prompt, 0)
        torch.cuda.synchronize()
    totals = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, time_ = totals.get(event.name, (0, 0.0))
            totals[event.name] = count + 1, time_ + event.device_time_total
    seconds = sum(t for _, t in totals.values()) / 1e6
    print(f"  {seconds * 1e3:9.2f} ms in all")
    for name, (count, time_) in sorted(totals.items(), key=lambda item: -item[1][1])[:most]:
        print(f"  {time_ / 1e3:9.2f} ms {count:5} x {name[:110]}")
    return seconds


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
    model = build(**facts, device="cuda")
    fill(args.folder, parameters_of(model))
    rows = []
    for kind in ("leanfleet", "PyTorch with fla", "function bodies"):
        if args.only in kind:
            torch.cuda.empty_cache()
            before = used()  # PyTorch's weights are there, a session brings its own
            if kind == "PyTorch with fla":
                run, reset = fla_runner(model)
            else:
                run, reset = ort_runner(args.folder, kind == "leanfleet", args.memory_patterns)
                before += (args.folder / DATA).stat().st_size
            for length in args.prompts:
                row = {**facts, "implementation": kind, "prompt": length}
                rows.append(row)
                if kind == "function bodies" and length > args.body_limit:
                    row["refused"] = f"not tried: prompts above {args.body_limit}"
                    continue
                prompt = np.random.default_rng(length).integers(0, VOCABULARY, (1, length))
                try:
                    # Two warm up: in the second run of a shape onnxruntime allocates its memory anew, in one block.
                    for _ in range(3):
                        reset()
                        row["prompt_seconds"], row["step_seconds"], row["tokens"] = measure(run, prompt)
                    row["peak_bytes"] = used() - before
                    if args.kernels:
                        reset()
                        row["kernel_seconds"] = print_kernels(run, prompt)
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
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
        "memory_patterns": args.memory_patterns,
        **facts,
        "rows": rows,
    }
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
    run.add_argument(
        "--memory-patterns",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="onnxruntime's enable_mem_pattern, which load_decoder switches off on CUDA",
    )
    run.add_argument("--kernels", action="store_true", help="print which kernels a prompt's time goes to")
    run.add_argument("--out", type=Path)
    run.set_defaults(command=command_run)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
