"""An exported decoder beside vLLM, or onnxruntime-genai's engine, on the same shapes, requests and GPU, by wall clock as a user
sees it.

    python -m bench.models.serving export DIR --shape llama-3.2-1b --dtype float16 --thin
    python -m bench.models.vllm ours DIR OURS.json [--seed HEX] [--drawn N | --kernels]
    python -m bench.models.vllm vllm DIR VLLM.json [--seed HEX] [--drawn N | --kernels]
    python -m bench.models.vllm genai DIR GENAI.json [--seed HEX] [--drawn N]
    python -m bench.models.vllm ours DIR OURS.json --lines 1x8000,16x8000 --drawn 0 --no-serving
    python -m bench.models.vllm table OUT --ours OURS.json ... [--vllm VLLM.json ...] [--genai GENAI.json ...]

`table` writes OUT.json, lines {"kind", "model", "batch", "context", "ours", "vllm", "ratio"}, and OUT.md; of
onnxruntime-genai's engine "genai" and "genai_ratio". A ratio above 1 means that ours is faster. Weights are random on all
sides, drawn from the same distribution: vLLM's dummy weights, norms too, are within 1e-3, so that gates give zeros in float16,
and a GPU that its power holds back multiplies zeros faster. Answers end at their length. Files are written after each line, so
that a run that is stopped leaves what it has; a table has the lines of ours that a peer has too.

--kernels times nothing and says in which kernels two lines spend the time of prompts and steps, by torch's profiler.

step      milliseconds a token of a batch: (time of 1 + STEPS new tokens - time of 1) / STEPS
prompt    milliseconds until every request of a batch has its first token
serving   answer tokens a second, 256 requests at once, at most 64 running, 2,048 tokens a step; lengths lognormal
rate      --rates 2 8: other requests, drawn alike, coming at random (a Poisson process of so many a second), once, in
          both engines' own loop of steps, without HTTP: "first token" milliseconds from a request's coming to its first token,
          "next token" between its tokens, medians and p99; and answer tokens a second. Requests are handed over between steps:
          vLLM's core, another process, may by then have begun the next one without them; ours tells tokens a step late

Hybrids: states are float32 on both sides; of 16 bits, lines of the section "narrow states", where ours was exported and vLLM
is run with --narrow-states. That is vLLM's default.

Lines of the section "8-bit caches" are of a folder exported with --cache int8, or another of 8 bits, beside vLLM with
--fp8-cache, in bfloat16, as its kernels for these want it.

Several GPUs: DIR is of `bench.models.serving export --gpus N`. Ours then starts a process a GPU, vLLM has
tensor_parallel_size=N, and lines are of the section "N GPUs". vLLM's sums over NVLink multicast are off, which can put a host's
GPUs out of service for others; its own kernels through peers' memory are on.

Ours is ContinuousBatch with CUDA graphs, vLLM its LLM class with CUDA graphs and without prefix caching, onnxruntime-genai its
Engine over PagedAttention, which has no CUDA graphs. All have run each shape once before. The random lines are drawn from
--seed. Medians of ROUNDS.
"""

import argparse
import gc
import gzip
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.models import thin
from bench.models.genai_engine import Genai
from bench.models.serving import BLOCK, config_of, fill_randomly, requests
from leanfleet import ranks
from leanfleet.decoder_contract import WORLD

STEPS, ROUNDS = 256, 2
MOST_TOKENS = 8192  # of a step with prompts, vLLM's default
SERVING = dict(requests=256, prompt=802, answer=168, running=64, step_tokens=2048)
RATED = "serving at a rate"
NARROW, QUANTISED = "narrow states", "8-bit caches"
LINES = [(1, 2000), (16, 2000), (64, 1000), (1, 30_000), (16, 8000)]  # (batch, context)
PROFILED, PROFILED_STEPS = [(16, 2000), (1, 30_000)], 16
NAMED = 10  # kernels of a line in the table
# Of each peer: its name, and the names of its facts in results
NAMES = {"vllm": "vLLM", "genai": "onnxruntime-genai"}
RATIOS = {"vllm": "ratio", "genai": "genai_ratio"}
MEANS = {"vllm": "geometric_means", "genai": "genai_geometric_means"}
VERSIONS = {"vllm": "vllm", "genai": "onnxruntime_genai"}


def shapes(seed, count=8, fixed=LINES):
    """Fixed shapes, and some drawn from a seed: batches of 1 to 256, at most 150,000 tokens in all."""
    draw, drawn = random.Random(seed), []
    while len(drawn) < count:
        batch, context = draw.choice((1, 2, 4, 8, 12, 24, 32, 48, 100, 128, 256)), int(2 ** draw.uniform(6, 14.9))
        if batch * context <= 150_000:
            drawn.append((batch, context))
    return [(*line, "shapes") for line in fixed] + [(*line, "random") for line in drawn]


class Ours:
    leads = True  # of several ranks the one that takes requests and writes results

    def __init__(self, folder):
        import torch

        facts = json.loads((folder / "bench.json").read_text())
        if "random" in facts and not (folder / "serving" / "model.onnx.data").exists():
            fill_randomly(folder, facts, "cuda", ["continuous"])
        else:
            thin.complete_apart(folder / "serving")
        torch.cuda.empty_cache()
        self.folder, self.batch, self.names = folder / "serving", None, {}

    def open(self, running, step_tokens):
        """For so many requests at once, with a pool of ContinuousBatch's default size."""
        from leanfleet.ort_ops.serving import ContinuousBatch

        self.batch = None
        gc.collect()
        self.batch = ContinuousBatch(self.folder, None, running, max(step_tokens, running), cuda_graph=True, share=False)

    def prepare(self):
        """For requests of any length and at any time, as a server starts."""
        self.batch.capture_steps()

    def close(self):
        pass

    def run(self, prompts, answers):
        for prompt, count in zip(prompts, answers, strict=True):
            self.batch.add(prompt, count, stop_tokens=())
        self.batch.run()

    def add(self, name, prompt, count):
        self.names[self.batch.add(prompt, count, stop_tokens=())] = name

    def step(self):
        """[the name of a request, for each new token]"""
        if self.batch.idle:
            raise RuntimeError("a request ended before its tokens were there: its logits are not finite")
        return [self.names[request] for request, _ in self.batch.step()]

    def end(self):
        """What is queued behind the last tokens."""
        self.batch.run()
        self.names = {}

    def profile(self, folder, prompts, answers):
        """Runs requests and leaves a trace in the folder."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run(prompts, answers)
            torch.cuda.synchronize()
        profile.export_chrome_trace(f"{folder}/trace.json")

    versions = staticmethod(lambda: {"onnxruntime": __import__("onnxruntime").__version__})


class OursOverRanks(Ours):
    """One of the processes that `ranks.launch` has started. The others than the first go through the same lines: in open() they
    make the steps that the first one makes, until it opens the next batch or closes this one."""

    def __init__(self, folder, pages, device="cuda"):
        """pages: of the pool, the same on all ranks. device: or "cpu", for tests."""
        self.folder, self.pages, self.batch, self.opened = folder / "serving", pages, None, ExitStack()
        self.here, self.on_gpu, self.device = ranks.place(), device == "cuda", device
        if self.on_gpu:
            self.device = f"cuda:{self.here.local}"
        engine = ("nccl", self.here.local) if self.on_gpu else ("shared_memory",)
        self.world = ranks.join(WORLD, *engine)

    def open(self, running, step_tokens):
        from leanfleet.ort_ops.serving import ContinuousBatch
        from leanfleet.together import together

        self.opened.close()
        self.batch = None
        gc.collect()
        tokens = max(step_tokens, running)
        options = {"cuda_graph": self.on_gpu, "share": False, "device": self.device, "rank": self.here.rank}
        self.batch = ContinuousBatch(self.folder, self.pages, running, tokens, **options)
        self.leads = self.opened.enter_context(together(self.batch))

    def prepare(self):
        """Steps are captured as they come: the other ranks wait for this one's calls."""

    def run(self, prompts, answers):
        if self.leads:
            super().run(prompts, answers)

    def close(self):
        self.opened.close()
        self.batch = None
        gc.collect()
        self.world.close()


def most_pages(lines, serving):
    """That the requests of a line take at once."""
    counts = [batch * -(-(context + 1 + STEPS) // BLOCK) for batch, context, _ in lines]
    if serving:
        work = requests(SERVING["requests"], SERVING["prompt"], SERVING["answer"], 2)
        counts.append(sum(sorted((-(-(len(p) + a) // BLOCK) for p, a in work), reverse=True)[: SERVING["running"]]))
    return max(counts)


def write_config(folder, model, dtype="float16"):
    """The folder that vLLM reads: the configuration of a shape."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = config_of(model)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = dtype
    config.save_pretrained(folder / "vllm")
    return folder / "vllm"


def draw_weights(model):
    """In vLLM's worker: weights as ours, matrices drawn by bench.models.serving and norms of an untrained model."""
    import torch

    torch.manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point() and p.dim() > 1:
            p.data.normal_(0.0, 0.02)
    for module in model.modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        if kind.endswith("Norm") and isinstance(weight, torch.Tensor):
            weight.data.fill_(0.0 if kind.startswith("Gemma") else 1.0)  # Gemma adds 1


class Vllm:
    leads = True

    def prepare(self):
        """It is: graphs are captured when the engine starts."""

    def __init__(self, folder, model, narrow_states, fp8_cache, gpus=1):
        # Its kernels for fp8 caches write bfloat16.
        self.model = write_config(folder, model, "bfloat16" if fp8_cache else "float16")
        self.engine, self.opened, self.traces, self.states = None, None, None, "auto" if narrow_states else "float32"
        self.cache, self.gpus = "fp8" if fp8_cache else "auto", gpus
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for draw_weights, which goes to the workers
        if gpus > 1:
            os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")

    def close(self):
        pass

    def open(self, running, step_tokens):
        from vllm import LLM

        wanted = max(running, 256), step_tokens
        if self.opened == wanted:
            return
        self.engine = None
        gc.collect()
        self.opened = wanted
        profiler = {"profiler": "torch", "torch_profiler_dir": self.traces, "torch_profiler_with_stack": False}
        self.engine = LLM(
            model=str(self.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=running if step_tokens == SERVING["step_tokens"] else wanted[0],
            max_num_batched_tokens=step_tokens,
            gpu_memory_utilization=0.6,
            disable_log_stats=True,
            mamba_ssm_cache_dtype=self.states,
            kv_cache_dtype=self.cache,
            tensor_parallel_size=self.gpus,
            **({"profiler_config": profiler} if self.traces else {}),
        )
        self.engine.apply_model(draw_weights)

    def run(self, prompts, answers):
        from vllm import SamplingParams

        settings = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in answers]
        self.engine.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)

    def add(self, name, prompt, count):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self.engine.llm_engine.add_request(str(name), {"prompt_token_ids": prompt}, settings)

    def step(self):
        if not self.engine.llm_engine.has_unfinished_requests():
            raise RuntimeError("a request ended before its tokens were there")
        return [int(told.request_id) for told in self.engine.llm_engine.step() for _ in told.outputs[0].token_ids]

    def end(self):
        pass

    def profile(self, folder, prompts, answers):
        """Runs requests and leaves a trace in the folder."""
        before = set(Path(self.traces).iterdir())
        self.engine.start_profile()
        self.run(prompts, answers)
        self.engine.stop_profile()
        for path in set(Path(self.traces).iterdir()) - before:
            path.rename(Path(folder) / path.name)

    versions = staticmethod(lambda: {"vllm": __import__("vllm").__version__})


def timed(engine, prompts, answers):
    times = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        engine.run(prompts, answers)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def at_rate(engine, work, rate, seed):
    """({"first", "next": {"median", "p99"} milliseconds}, answer tokens a second) of requests that come `rate` a second."""
    comes = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(work)))
    times = [[] for _ in work]
    added, wanted, begun = 0, 0, time.perf_counter()  # wanted: tokens of those added that are still to come
    while wanted or added < len(work):
        now = time.perf_counter() - begun
        while added < len(work) and comes[added] <= now:
            engine.add(added, *work[added])
            wanted += work[added][1]
            added += 1
        if not wanted:
            time.sleep(max(comes[added] - now, 0))
            continue
        names = engine.step()
        now = time.perf_counter() - begun
        for name in names:
            times[name].append(now)
        wanted -= len(names)
    engine.end()
    first = [told[0] - come for told, come in zip(times, comes, strict=True)]
    gaps = np.concatenate([np.diff(told) for told in times])
    spreads = {
        name: {"median": 1e3 * float(np.median(found)), "p99": 1e3 * float(np.percentile(found, 99))}
        for name, found in (("first", first), ("next", gaps))
    }
    return spreads, sum(count for _, count in work) / now


def rates(engine, model, wanted):
    """Rows of requests by rate, for the engine as `timings` has opened it for serving."""
    for rate in wanted:
        work = requests(SERVING["requests"], SERVING["prompt"], SERVING["answer"], config_of(model).vocab_size, seed=1)
        spreads, tokens = at_rate(engine, work, rate, seed=2)
        place = {"model": model, "batch": SERVING["running"], "context": SERVING["prompt"], "section": f"{rate:g} a second"}
        values = {f"{name} token, {what}": value for name, found in spreads.items() for what, value in found.items()}
        print(f"{rate:g} a second: {values}, {tokens:.0f} tokens a second", flush=True)
        for kind, value in values.items():
            yield {"kind": kind, **place, "value": value}
        yield {"kind": RATED, **place, "value": tokens}


def kernels(engine, prompts, answer):
    """Milliseconds and launches by a kernel's name, copies included, of requests that run once."""
    times, launches = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        engine.profile(folder, prompts, [answer] * len(prompts))
        for path in Path(folder).rglob("*.json*"):
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                for event in json.load(file)["traceEvents"]:
                    if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                        times[event["name"]] += event["dur"] / 1e3
                        launches[event["name"]] += 1
    return times, launches


def profiled(engine, place, prompts):
    """Rows of the kernels of a batch's prompts, and of a step behind them."""
    counts = 1, 1 + PROFILED_STEPS, 1 + 2 * PROFILED_STEPS
    for count in counts:  # a first run captures graphs
        engine.run(prompts, [count] * len(prompts))
    first, some, more = (kernels(engine, prompts, count) for count in counts)
    step = [Counter({k: (a[k] - b[k]) / PROFILED_STEPS for k in a}) for a, b in zip(more, some)]
    for kind, (times, launches) in (("prompt", first), ("step", step)):
        named = [{"name": name, "launches": launches[name], "ms": ms} for name, ms in times.most_common(3 * NAMED)]
        yield {"kind": kind, **place, "ms": sum(times.values()), "kernels": named}


def timings(engine, model, lines, serving, wanted_rates=()):
    """Rows of the lines, and one of serving, and those of rates."""
    draw, vocabulary = np.random.default_rng(0), config_of(model).vocab_size
    section_of_serving = next((section for *_, section in lines if section.endswith("GPUs")), "shapes")
    for batch, context, section in lines:
        engine.open(batch, MOST_TOKENS)
        prompts = [draw.integers(0, vocabulary, context).tolist() for _ in range(batch)]
        first, whole = (timed(engine, prompts, [count] * batch) for count in (1, 1 + STEPS))
        place = {"model": model, "batch": batch, "context": context, "section": section}
        step, prompt = 1e3 * (whole - first) / STEPS, 1e3 * first
        print(f"{batch} x {context}: {step:.3f} ms a step, {prompt:.1f} ms prompts", flush=True)
        yield {"kind": "step", **place, "value": step}
        yield {"kind": "prompt", **place, "value": prompt}
    if serving:
        work = requests(SERVING["requests"], SERVING["prompt"], SERVING["answer"], vocabulary)
        engine.open(SERVING["running"], SERVING["step_tokens"])
        engine.prepare()
        seconds = timed(engine, [p for p, _ in work], [a for _, a in work])
        rate = sum(a for _, a in work) / seconds
        place = {"model": model, "batch": SERVING["running"], "context": SERVING["prompt"], "section": section_of_serving}
        print(f"serving: {rate:.0f} tokens a second", flush=True)
        yield {"kind": "serving", **place, "value": rate}
        yield from rates(engine, model, wanted_rates)


def traced(engine, model):
    """Rows of the kernels of PROFILED."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as engine.traces:
        for batch, context in PROFILED:
            engine.open(batch, MOST_TOKENS)
            prompts = [draw.integers(0, config_of(model).vocab_size, context).tolist() for _ in range(batch)]
            for row in profiled(engine, {"model": model, "batch": batch, "context": context}, prompts):
                print(f"{batch} x {context}: kernels of {row['ms']:.3f} ms of a {row['kind']}", flush=True)
                yield row


def measure(arguments):
    import torch

    facts = json.loads((arguments.folder / "bench.json").read_text())
    model, ours = facts["model"], arguments.side == "ours"
    narrow = facts.get("narrow_states", False) if ours else arguments.narrow_states
    quantised = facts.get("cache") is not None if ours else arguments.fp8_cache
    gpus, serving = facts.get("gpus", 1), not arguments.no_serving
    if gpus > 1 and (arguments.side == "genai" or arguments.kernels or arguments.rates):
        raise SystemExit(f"{arguments.folder} is for {gpus} GPUs: no --kernels, no --rates, and nothing of genai")
    if gpus > 1 and ours and ranks.place() is None:
        thin.complete(arguments.folder / "serving")
        ranks.launch(ranks.python("-m", "bench.models.vllm", *sys.argv[1:]), gpus)
        return
    ranks.end_with_parent()
    own = NARROW if narrow else QUANTISED if quantised else f"{gpus} GPUs" if gpus > 1 else None
    fixed = arguments.lines or LINES
    lines = [(*line, own or section) for *line, section in shapes(arguments.seed, arguments.drawn, fixed)]
    sides = {
        "ours": lambda: OursOverRanks(arguments.folder, most_pages(lines, serving)) if gpus > 1 else Ours(arguments.folder),
        "vllm": lambda: Vllm(arguments.folder, model, narrow, quantised, gpus),
        "genai": lambda: Genai(arguments.folder, model),
    }
    engine = sides[arguments.side]()
    name = "kernels" if arguments.kernels else "rows"
    rows = traced(engine, model) if arguments.kernels else timings(engine, model, lines, serving, arguments.rates)
    result = {
        "seed": f"{arguments.seed:x}",
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        **engine.versions(),
        name: [],
    }
    for row in rows:
        result[name].append(row)
        if engine.leads:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    engine.close()


def compared(ours, peers):
    """Lines of the table from the sides' results, one of a model each. peers: {"vllm" or "genai": results}."""
    sides = [*ours, *(side for results in peers.values() for side in results)]
    if len(devices := {side["device"] for side in sides}) > 1:
        raise SystemExit(f"these results are of several devices, {', '.join(sorted(devices))}; compare those of one")
    places = ("kind", "model", "batch", "context", "section")
    values = {
        (peer, *(row[k] for k in places)): row["value"]
        for peer, results in peers.items()
        for side in results
        for row in side.get("rows", ())
    }
    for row in (row for side in ours for row in side.get("rows", ())):
        place, found = {k: row[k] for k in places}, {}
        for peer in peers:
            if (their := values.get((peer, *place.values()))) is not None:
                ratio = row["value"] / their if row["kind"] in ("serving", RATED) else their / row["value"]
                found |= {peer: their, RATIOS[peer]: ratio}
        if found:
            yield {**place, "ours": row["value"], **found}


def table(arguments):
    named = {"ours": arguments.ours, "vllm": arguments.vllm, "genai": arguments.genai}
    results = {name: [json.loads(path.read_text()) for path in paths] for name, paths in named.items() if paths}
    everyone = [(name, side) for name, sides in results.items() for side in sides]
    facts = {k: v for _, side in reversed(everyone) for k, v in side.items() if k not in ("rows", "kernels")}
    peers = {name: sides for name, sides in results.items() if name != "ours"}
    lines = list(compared(results["ours"], peers))
    means = {
        peer: {
            kind: statistics.geometric_mean(line[RATIOS[peer]] for line in lines if line["kind"] == kind and peer in line)
            for kind in dict.fromkeys(line["kind"] for line in lines if peer in line)
        }
        for peer in peers
    }
    traced = [{"side": name, **row} for name, side in everyone for row in side.get("kernels", ())]
    told = {MEANS[peer]: found for peer, found in means.items()}
    report = {**facts, **told, "lines": lines, "kernels": traced}
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(text(report))


def text(report):
    """The tables in Markdown."""
    peers = [peer for peer in NAMES if MEANS[peer] in report]
    versions = "".join(f", {NAMES[peer]} {report[VERSIONS[peer]]}" for peer in peers)
    title = f"# Beside {' and '.join(NAMES[p] for p in peers)}\n\n{report['device']}, {report['date']}"
    title += f", onnxruntime {report['onnxruntime']}{versions}"
    note = f"\n{report['note']}\n" if "note" in report else ""
    lines = line_table(report, peers) if report["lines"] else ".\n"
    return title + lines + note + "".join(map(kernel_table, report.get("kernels", ())))


def line_table(report, peers):
    heads = "".join(f" {NAMES[peer]} | ratio |" for peer in peers)
    lines = [
        f", random lines of seed {report['seed']}. Steps and prompts in milliseconds, serving in answer tokens a second.\n",
        f"| kind | model | batch | context | section | ours |{heads}\n" + "|---" * (6 + 2 * len(peers)) + "|",
    ]
    for line in report["lines"]:
        cells = [f"{line[peer]:.2f} | {line[RATIOS[peer]]:.2f}" if peer in line else " | " for peer in peers]
        place = f"{line['kind']} | {line['model']} | {line['batch']} | {line['context']} | {line['section']}"
        lines.append(f"| {place} | {line['ours']:.2f} | {' | '.join(cells)} |")
    for peer in peers:
        means = ", ".join(f"{kind} {mean:.3f}" for kind, mean in report[MEANS[peer]].items())
        beside = f" beside {NAMES[peer]}" if len(peers) > 1 else ""
        lines.append(f"\nGeometric means{beside}: {means}; above 1, ours is faster.")
    return "\n".join(lines) + "\n"


def kernel_table(row):
    side = {"ours": "ours", **NAMES}[row["side"]]
    lines = [
        f"\n## {side}: {row['kind']} of {row['model']}, {row['batch']} x {row['context']}\n",
        f"Kernels and copies take {row['ms']:.3f} ms.\n\n| ms | launches | kernel |\n|---|---|---|",
    ]
    for kernel in row["kernels"][:NAMED]:
        lines.append(f"| {kernel['ms']:.3f} | {kernel['launches']:g} | `{kernel['name'].replace('|', ' ')[:120]}` |")
    return "\n".join(lines) + "\n"


def pairs(text):
    """[(batch, context)] of "1x8000,16x8000"."""
    return [tuple(map(int, pair.split("x"))) for pair in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for side in ("ours", "vllm", "genai"):
        command = commands.add_parser(side)
        command.add_argument("folder", type=Path)
        command.add_argument("out", type=Path)
        command.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="of the random lines, hexadecimal")
        command.add_argument("--drawn", type=int, default=8, help="random lines")
        command.add_argument("--lines", type=pairs, help="BATCHxCONTEXT,... in place of the fixed ones")
        command.add_argument("--narrow-states", action="store_true", help="vLLM's of hybrids; ours are as they were exported")
        command.add_argument("--fp8-cache", action="store_true", help="vLLM's; ours are as they were exported")
        command.add_argument("--no-serving", action="store_true", help="steps and prompts alone")
        command.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second, after serving")
        command.add_argument("--kernels", action="store_true", help="where two lines' time goes, in place of timings")
        command.set_defaults(run=measure, side=side)
    command = commands.add_parser("table")
    command.add_argument("out", type=Path)
    command.add_argument("--ours", type=Path, nargs="+", required=True)
    for name in ("--vllm", "--genai"):
        command.add_argument(name, type=Path, nargs="+", default=[])
    command.set_defaults(run=table)
    arguments = parser.parse_args()
    if arguments.run is table and not (arguments.vllm or arguments.genai):
        parser.error("a table needs a peer: --vllm or --genai")
    if getattr(arguments, "kernels", False) and arguments.side == "genai":
        parser.error("--kernels is of ours and vLLM's")
    if getattr(arguments, "rates", []) and (arguments.no_serving or arguments.kernels):
        parser.error("--rates follow serving: leave --no-serving and --kernels out")
    arguments.run(arguments)


if __name__ == "__main__":
    main()
