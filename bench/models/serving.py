"""Continuous batching against batches padded to their longest request, in ONNX Runtime.

    python -m bench.models.serving export DIR [--model HF_FOLDER | --shape llama-1b] [--dtype float16] [--weightless]
    python -m bench.models.serving run DIR [--provider CUDA] [--requests 64] [--batch 16] [--energy] [--graphs]
                                [--ways continuous] [--out F.json]
    python -m bench.models.serving export DIR --shape llama-3-8b --dtype float16 --gpus 4

`export` writes both graphs of one model: a transformers model, or one of a shape with random weights. With --weightless the
weights stay out of the files, and `run` makes random ones on its own device, the same for both graphs. --thin writes a folder
for bench.models.vllm alone and takes no memory for weights: bench.models.thin makes them where it runs. So does --gpus N, a
tensor parallel folder whose large weights are all the same bytes.

Requests have prompts and answers of lognormal lengths (sigma 1), all there at the start. The padded way takes them in their
order, `batch` at a time, each batch running until its longest answer is through. Continuous batching has as many places, and
a finished request's goes to the next one at once. Answers are cut at each request's own length, so that both ways make the
same tokens, which are compared with each other (in float16 two near likelihoods may change places, and the rest of that
answer with them); useful tokens a second are prompt and answer tokens over wall time. --graphs: steps of one token a request
as CUDA graphs, in both ways. --energy adds joules a useful token, by NVML's counter.
"""

import argparse
import datetime
import json
import time
from pathlib import Path

import numpy as np
import onnxruntime

from bench.models import thin
from bench.models.weightless import fill, parameters_of, strip, with_experts
from leanfleet import native
from leanfleet.decoder_contract import CACHES
from leanfleet.ort_ops.generation import generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch

BLOCK = 64  # tokens of a page, as export_for_serving has them by default
GRAPHS = {"padded": "decoder", "continuous": "serving"}  # folders of the two ways
SHAPES = {
    "smollm2": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "llama-1b": dict(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}
SHAPES["llama-3.2-1b"] = SHAPES["llama-1b"] | {"vocab_size": 128256}
SHAPES["llama-3-8b"] = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
SHAPES["llama-3-70b"] = SHAPES["llama-3-8b"] | dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
)
SHAPES["qwen2.5-7b"] = dict(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
SHAPES["gemma-2-9b"] = dict(
    model_type="gemma2",
    vocab_size=256000,
    hidden_size=3584,
    intermediate_size=14336,
    num_hidden_layers=42,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
)
# Hybrids: attention and Mamba-2 in each layer; the gated delta rule in three layers of four (OLMo's keys of 96, values of 192),
# with 512 experts in Qwen3-Next; the first layers of Nemotron-H, Mamba-2 with 8 groups of 128 heads.
SHAPES["falcon-h1-1.5b"] = dict(
    model_type="falcon_h1",
    vocab_size=65537,
    hidden_size=2048,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    mamba_d_ssm=3072,
    mamba_n_heads=48,
    mamba_d_head=64,
    mamba_d_state=256,
)
SHAPES["qwen3.5-0.8b"] = dict(
    model_type="qwen3_5_text",
    vocab_size=248320,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
)
SHAPES["qwen3-next-12-layers"] = dict(model_type="qwen3_next", num_hidden_layers=12)
SHAPES["nemotron-h-8b-13-layers"] = dict(
    model_type="nemotron_h",
    num_hidden_layers=13,
    layer_types=[{"M": "linear_attention", "-": "mlp", "*": "full_attention"}[kind] for kind in "M-M-M-M*-M-M-"],
    tie_word_embeddings=False,
)
SHAPES["olmo-hybrid-7b-8-layers"] = dict(model_type="olmo_hybrid", vocab_size=100352, num_hidden_layers=8)
POSITIONS = 32768


def config_of(shape, layers=None):
    """The transformers configuration of a shape. layers: how many, in place of its own number."""
    from transformers import AutoConfig

    sizes = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": POSITIONS} | SHAPES[shape]
    return AutoConfig.for_model(**sizes | ({"num_hidden_layers": layers} if layers else {}))


def command_export(args):
    import torch
    from transformers import AutoModelForCausalLM

    from leanfleet.export import export_decoder
    from leanfleet.export.serving import export_for_serving

    if args.gpus > 1 or args.thin:
        return export_thin(args)
    dtype = getattr(torch, args.dtype)
    if args.model:
        gguf = next(args.model.glob("*.gguf"), None)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **({"gguf_file": gguf.name} if gguf else {}))
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(args.shape, args.layers), dtype=dtype)
    # Random weights that only the other machine has cannot be verified here.
    options = {"verify": not args.weightless, "narrow_states": args.narrow_states, "cache": args.cache}
    for name in args.ways:
        if name == "padded":
            export_decoder(model, args.folder / GRAPHS[name], **options)
        else:
            export_for_serving(model, args.folder / GRAPHS[name], block=BLOCK, **options)
    facts = {
        "model": args.model.name if args.model else args.shape,
        "dtype": args.dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "narrow_states": args.narrow_states,
        "cache": args.cache,
    }
    if args.weightless:
        for name in args.ways:
            strip(args.folder / GRAPHS[name], parameters_of(model))
        facts["random"] = {name: list(p.shape) for name, p in model.named_parameters()}
    (args.folder / "bench.json").write_text(json.dumps(facts) + "\n")


def export_thin(args):
    """A folder for serving, tensor parallel with several GPUs, whose weights bench.models.thin makes where it runs."""
    from leanfleet.export import export_decoder
    from leanfleet.export.serving import add_serving, export_for_serving

    model = thin.untouched(config_of(args.shape, args.layers), args.dtype)
    options = {"verify": False, "narrow_states": args.narrow_states, "cache": args.cache}
    with thin.Thin():
        if args.gpus > 1:
            export_decoder(model, args.folder / GRAPHS["continuous"], tensor_parallel=args.gpus, **options)
            add_serving(model, args.folder / GRAPHS["continuous"], block=BLOCK, **options)
        else:
            export_for_serving(model, args.folder / GRAPHS["continuous"], block=BLOCK, **options)
    facts = {"model": args.shape, "dtype": args.dtype, "gpus": args.gpus, "cache": args.cache}
    facts |= {"parameters": sum(p.numel() for p in model.parameters()), "narrow_states": args.narrow_states}
    (args.folder / "bench.json").write_text(json.dumps(facts) + "\n")


def random_parameters(facts, device):
    """The weights that --weightless left out: normal, of standard deviation 0.02."""
    import torch

    random = torch.Generator(device).manual_seed(0)
    return with_experts(
        {
            name: 0.02 * torch.randn(shape, generator=random, device=device, dtype=getattr(torch, facts["dtype"]))
            for name, shape in facts.pop("random").items()
        }
    )


def fill_randomly(folder, facts, device, ways):
    parameters = random_parameters(facts, device)
    for name in ways:
        fill(folder / GRAPHS[name], parameters)


def requests(count, mean_prompt, mean_answer, vocabulary, seed=0):
    """[(prompt, length of the answer)]."""
    random = np.random.default_rng(seed)

    def lengths(mean, most):
        draws = random.lognormal(0.0, 1.0, count)
        return np.clip(draws / draws.mean() * mean, 1, most).astype(int)

    pairs = zip(lengths(mean_prompt, 8 * mean_prompt), lengths(mean_answer, 8 * mean_answer))
    return [(random.integers(0, vocabulary, p).tolist(), int(a)) for p, a in pairs]


def padded(decoder, work, batch):
    """(answers, forward calls) of batches one after the other."""
    answers, calls = [], 0
    for i in range(0, len(work), batch):
        group = work[i : i + batch]
        longest = max(a for _, a in group)
        tokens, _ = generate(decoder, [p for p, _ in group], longest, stop_tokens=())
        answers += [t[:a] for t, (_, a) in zip(tokens, group)]
        calls += longest
    return answers, calls


def continuous(server, work):
    added = [server.add(p, a, stop_tokens=()) for p, a in work]
    before = server.steps
    server.run()
    return [r.tokens for r in added], server.steps - before


def equal_share(first, second):
    """Share of tokens before an answer's first difference."""
    same = sum(next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in zip(first, second))
    return same / sum(map(len, first))


def command_run(args):
    provider = [f"{args.provider}ExecutionProvider"]
    facts = json.loads((args.folder / "bench.json").read_text())
    if "random" in facts and not all((args.folder / GRAPHS[way] / "model.onnx.data").exists() for way in args.ways):
        fill_randomly(args.folder, facts, "cuda" if args.provider == "CUDA" else "cpu", args.ways)
    facts.pop("random", None)
    vocabulary = json.loads((args.folder / GRAPHS["continuous"] / "leanfleet.json").read_text())["vocabulary"]
    work = requests(args.requests, args.prompt, args.answer, vocabulary)
    pages = sum(sorted((-(-(len(p) + a) // BLOCK) for p, a in work), reverse=True)[: args.batch])
    server = ContinuousBatch(
        args.folder / "serving", pages, args.batch, args.step_tokens, provider, cuda_graph=args.graphs, share=False
    )
    useful = sum(len(p) + a for p, a in work)
    ways = {"continuous": lambda w: continuous(server, w)}
    if "padded" in args.ways:
        decoder = load_decoder(args.folder / "decoder", provider, cuda_graph=args.graphs)
        ways = {"padded": lambda w: padded(decoder, w, args.batch)} | ways
    joules = None
    if args.energy:
        from bench.models.end_to_end import energy_counter

        joules = energy_counter()
    report, answers = {}, {}
    for name, way in ways.items():
        way(work if args.provider == "CUDA" else work[:2])  # a GPU loads the kernels of each new shape when it comes
        energy = joules and joules()
        start = time.perf_counter()
        answers[name], calls = way(work)
        seconds = time.perf_counter() - start
        report[name] = {
            "seconds": seconds,
            "calls": calls,
            "useful_tokens_per_second": useful / seconds,
            "answer_tokens_per_second": sum(a for _, a in work) / seconds,
        }
        line = f"{name:11} {seconds:8.2f} s {calls:6} calls {useful / seconds:10.0f} tokens/s"
        if joules:
            report[name]["joules_per_useful_token"] = (joules() - energy) / useful
            line += f" {report[name]['joules_per_useful_token']:8.4f} J/token"
        print(line, flush=True)
    compared = {}
    if len(answers) == 2:
        same, share = sum(a == b for a, b in zip(*answers.values())), equal_share(*answers.values())
        speed_up = report["padded"]["seconds"] / report["continuous"]["seconds"]
        print(
            f"{same} of {len(work)} answers equal, {share:.3f} of the tokens before a difference; continuous batching is "
            f"{speed_up:.2f} times as fast"
        )
        compared = {"answers_equal": same, "tokens_before_a_difference": share, "speed_up": speed_up}
    result = {
        "date": datetime.date.today().isoformat(),
        "provider": args.provider,
        "kernels": native.build_info(),
        "onnxruntime": onnxruntime.__version__,
        **facts,
        "requests": args.requests,
        "batch": args.batch,
        "mean_prompt": args.prompt,
        "mean_answer": args.answer,
        "step_tokens": args.step_tokens,
        "cuda_graphs": args.graphs,
        "useful_tokens": useful,
        **compared,
        **report,
    }
    if args.provider == "CUDA":
        import torch

        result["device"] = torch.cuda.get_device_name()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    export = commands.add_parser("export")
    export.add_argument("folder", type=Path)
    export.add_argument("--model", type=Path, help="folder of a transformers model or a GGUF file; default: random weights")
    export.add_argument("--shape", choices=list(SHAPES), default="smollm2", help="of the model with random weights")
    export.add_argument("--layers", type=int, help="of the model with random weights")
    export.add_argument("--dtype", default="float32")
    export.add_argument("--narrow-states", action="store_true", help="states of 16 bits, of shapes whose layers have some")
    export.add_argument("--cache", choices=CACHES, help="the type of quantised caches; default: none")
    export.add_argument("--gpus", type=int, default=1, help="a tensor parallel folder for bench.models.vllm alone")
    export.add_argument("--thin", action="store_true", help="a folder for bench.models.vllm alone, made without its weights")
    export.add_argument("--weightless", action="store_true", help="leave the weights to `run`, which makes random ones")
    export.set_defaults(command=command_export)
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--provider", default="CPU")
    run.add_argument("--requests", type=int, default=64)
    run.add_argument("--batch", type=int, default=16)
    run.add_argument("--prompt", type=int, default=128, help="mean length of a prompt")
    run.add_argument("--answer", type=int, default=64, help="mean length of an answer")
    run.add_argument("--step-tokens", type=int, default=256)
    run.add_argument("--graphs", action="store_true", help="CUDA graphs for steps of one token a request")
    run.add_argument("--energy", action="store_true", help="joules a useful token too")
    run.add_argument("--out", type=Path)
    run.set_defaults(command=command_run)
    for command in (export, run):
        command.add_argument(
            "--ways", nargs="+", choices=list(GRAPHS), default=list(GRAPHS), help="continuous alone: without the comparison"
        )
    args = parser.parse_args()
    if (getattr(args, "gpus", 1) > 1 or getattr(args, "thin", False)) and args.model:
        parser.error("--gpus and --thin take a --shape, whose weights are made where it runs")
    if getattr(args, "graphs", False) and args.provider != "CUDA":
        parser.error("--graphs needs --provider CUDA")
    args.command(args)


if __name__ == "__main__":
    main()
