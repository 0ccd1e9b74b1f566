"""An exported decoder beside vLLM on the same shapes, requests and GPU, by wall clock as a user of either sees it.

    python -m bench.models.serving export DIR --shape llama-3.2-1b --dtype float16 --weightless --ways continuous
    python -m bench.models.vllm ours DIR OURS.json [--seed HEX]
    python -m bench.models.vllm vllm DIR VLLM.json [--seed HEX]
    python -m bench.models.vllm table OURS.json VLLM.json OUT

`table` writes OUT.json, lines {"kind", "model", "batch", "context", "ours", "vllm", "ratio"}, and OUT.md. ratio above 1 means
that ours is faster. Weights are random on both sides (vLLM's load_format="dummy"), answers end at their length.

step      milliseconds a token of a batch: (time of 1 + STEPS new tokens - time of 1) / STEPS
prompt    milliseconds until every request of a batch has its first token
serving   answer tokens a second, 256 requests at once, at most 64 running, 2,048 tokens a step; lengths lognormal

Ours is ContinuousBatch with CUDA graphs, vLLM its LLM class with CUDA graphs and without prefix caching. Both have run each
shape once before. The random lines are drawn from --seed. Medians of ROUNDS.
"""

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np

from bench.models.serving import SHAPES, fill_randomly, requests

STEPS, ROUNDS, BLOCK = 256, 2, 16
MOST_TOKENS = 8192  # of a step with prompts, vLLM's default
SERVING = dict(requests=256, prompt=802, answer=168, running=64, step_tokens=2048)
LINES = [(1, 2000), (16, 2000), (64, 1000), (1, 30_000), (16, 8000)]  # (batch, context)


def shapes(seed):
    """The fixed shapes, and some drawn from a seed: batches of 1 to 256, at most 150,000 tokens in all."""
    draw, drawn = random.Random(seed), []
    while len(drawn) < 8:
        batch, context = draw.choice((1, 2, 4, 8, 12, 24, 32, 48, 100, 128, 256)), int(2 ** draw.uniform(6, 14.9))
        if batch * context <= 150_000:
            drawn.append((batch, context))
    return [(*line, "shapes") for line in LINES] + [(*line, "random") for line in drawn]


class Ours:
    def __init__(self, folder, model):
        import torch

        facts = json.loads((folder / "bench.json").read_text())
        if "random" in facts:
            fill_randomly(folder, facts, "cuda", ["continuous"])
            torch.cuda.empty_cache()
        self.folder, self.batch = folder / "serving", None

    def open(self, running, tokens, step_tokens):
        """Room for so many requests of so many tokens each."""
        from leanfleet.ort_ops.serving import ContinuousBatch

        self.batch = None
        gc.collect()
        pages = running * -(-tokens // BLOCK)
        self.batch = ContinuousBatch(self.folder, pages, running, max(step_tokens, running), cuda_graph=True, share=False)

    def run(self, prompts, answers):
        for prompt, count in zip(prompts, answers, strict=True):
            self.batch.add(prompt, count, stop_tokens=())
        self.batch.run()

    versions = staticmethod(lambda: {"onnxruntime": __import__("onnxruntime").__version__})


class Vllm:
    def __init__(self, folder, model):
        self.model = folder / "vllm"
        self.model.mkdir(exist_ok=True)
        sizes = SHAPES[model]
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
        config |= {"hidden_act": "silu", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "torch_dtype": "float16"}
        config |= {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"], "rope_theta": 10_000.0, "vocab_size": 1}
        (self.model / "config.json").write_text(json.dumps(config | sizes))
        self.engine, self.opened = None, None

    def open(self, running, tokens, step_tokens):
        from vllm import LLM

        wanted = max(running, 256), step_tokens
        if self.opened == wanted:
            return
        self.engine = None
        gc.collect()
        self.opened = wanted
        self.engine = LLM(
            model=str(self.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=running if step_tokens == SERVING["step_tokens"] else wanted[0],
            max_num_batched_tokens=step_tokens,
            gpu_memory_utilization=0.6,
            disable_log_stats=True,
        )

    def run(self, prompts, answers):
        from vllm import SamplingParams

        settings = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in answers]
        self.engine.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)

    versions = staticmethod(lambda: {"vllm": __import__("vllm").__version__})


def timed(engine, prompts, answers):
    times = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        engine.run(prompts, answers)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(arguments):
    model = json.loads((arguments.folder / "bench.json").read_text())["model"]
    engine = {"ours": Ours, "vllm": Vllm}[arguments.side](arguments.folder, model)
    vocabulary, rows = SHAPES[model]["vocab_size"], []
    draw = np.random.default_rng(0)
    for batch, context, section in shapes(arguments.seed):
        engine.open(batch, context + STEPS + 1, MOST_TOKENS)
        prompts = [draw.integers(0, vocabulary, context).tolist() for _ in range(batch)]
        first, whole = (timed(engine, prompts, [count] * batch) for count in (1, 1 + STEPS))
        place = {"model": model, "batch": batch, "context": context, "section": section}
        rows.append({"kind": "step", **place, "value": 1e3 * (whole - first) / STEPS})
        rows.append({"kind": "prompt", **place, "value": 1e3 * first})
        print(f"{batch} x {context}: {rows[-2]['value']:.3f} ms a step, {rows[-1]['value']:.1f} ms prompts", flush=True)
    work = requests(SERVING["requests"], SERVING["prompt"], SERVING["answer"], vocabulary)
    engine.open(SERVING["running"], max(len(p) + a for p, a in work), SERVING["step_tokens"])
    seconds = timed(engine, [p for p, _ in work], [a for _, a in work])
    rate = sum(a for _, a in work) / seconds
    place = {"model": model, "batch": SERVING["running"], "context": SERVING["prompt"], "section": "shapes"}
    rows.append({"kind": "serving", **place, "value": rate})
    print(f"serving: {rate:.0f} tokens a second", flush=True)
    import torch

    result = {"seed": f"{arguments.seed:x}", "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    arguments.out.write_text(json.dumps({**result, **engine.versions(), "rows": rows}, indent=1) + "\n")


def table(arguments):
    ours, theirs = (json.loads(path.read_text()) for path in (arguments.ours, arguments.theirs))
    lines, facts = [], {k: v for side in (ours, theirs) for k, v in side.items() if k != "rows"}
    for a, b in zip(ours["rows"], theirs["rows"], strict=True):
        place = {k: a[k] for k in ("kind", "model", "batch", "context", "section")}
        if place != {k: b[k] for k in place} or ours["device"] != theirs["device"]:
            raise SystemExit(f"{arguments.ours} and {arguments.theirs} are not of the same lines and device: {place}")
        ratio = a["value"] / b["value"] if a["kind"] == "serving" else b["value"] / a["value"]
        lines.append({**place, "ours": a["value"], "vllm": b["value"], "ratio": ratio})
    means = {
        kind: statistics.geometric_mean(line["ratio"] for line in lines if line["kind"] == kind)
        for kind in dict.fromkeys(line["kind"] for line in lines)
    }
    report = {**facts, "geometric_means": means, "lines": lines}
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(text(report))


def text(report):
    """The table in Markdown."""
    lines = [
        f"# Beside vLLM\n\n{report['device']}, {report['date']}, onnxruntime {report['onnxruntime']}, vLLM {report['vllm']}, "
        f"random lines of seed {report['seed']}. Steps and prompts in milliseconds, serving in answer tokens a second.\n"
    ]
    lines.append("| kind | model | batch | context | section | ours | vLLM | ratio |\n" + "|---" * 8 + "|")
    for line in report["lines"]:
        values = f"{line['ours']:.2f} | {line['vllm']:.2f} | {line['ratio']:.2f}"
        place = f"{line['kind']} | {line['model']} | {line['batch']} | {line['context']} | {line['section']}"
        lines.append(f"| {place} | {values} |")
    means = ", ".join(f"{kind} {mean:.3f}" for kind, mean in report["geometric_means"].items())
    return "\n".join([*lines, f"\nGeometric means: {means}; above 1, ours is faster."]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for side in ("ours", "vllm"):
        command = commands.add_parser(side)
        command.add_argument("folder", type=Path)
        command.add_argument("out", type=Path)
        command.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="of the random lines, hexadecimal")
        command.set_defaults(run=measure, side=side)
    command = commands.add_parser("table")
    for name in ("ours", "theirs", "out"):
        command.add_argument(name, type=Path)
    command.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
