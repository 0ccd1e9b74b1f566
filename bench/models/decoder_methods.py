"""Whole linear decoders, prompt by prompt, with each method of LeetDecoding in the place of their attention, in PyTorch.

    python -m bench.models.decoder_methods [--device cuda] [--models transnormer-7b,retnet-1.3b] [--layers 2] [--tokens 8192]
        [--batches 1,2] [--dtype float32] [--methods auto,...] [--load FILE.py] [--limit 60] [--seconds S] [--rounds 7]
        --out F.json

After LeetDecoding's tables 7 and 8: TransNormerLLM-7B (hidden 4096, 32 heads of 128, feed-forward 11008, as its released
config.json has them) and a RetNet of 1.3B (2048, 8 heads, keys of 256, values of 512, feed-forward 4096), of which, as in its
appendix A.1, the first two layers run, in float32, on prompts of 8,192 tokens at batch 1 and 2. On a CPU, by default: a
TransNormerLLM of 1B (2048, 16 heads, 5632) and the RetNet, one layer, 2,048 tokens. Weights and prompts are
random. The model's code is LinearDecoder's for every method; its attention goes through causal_linear_decoder with tensors
[B,H,N,D], and logits are the last token's.

Before it is timed a method's logits are compared with those of attention in float64: it may have 16 times the error that the
plain chunked form has in the model's type (2 times, in 16 bits). Methods take turns, in another order each round: the call
before moves a time. Seconds of a prompt are medians, spreads the median distances from them. Memory: the most that PyTorch
allocated on the GPU during a call beyond what was there before.

--limit: seconds for a method with one model and batch. One whose call is expected to take more, by calls on the first tokens,
is left out; one that has no time for three rounds is timed by its first call alone, others have as many rounds as fit.
--seconds: for everything; what has not begun by then is left out, and the rounds end. The JSON, and with its name and .md a
table, are written after each method, so that a run that is cut off leaves what it had.
"""

import argparse
import datetime
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.models.end_to_end_linear import SHAPES, VOCABULARY
from leanfleet import bench, files
from leanfleet.driver import Device
from leanfleet.export import LinearDecoder, LinearDecoderConfig, linear_decoder, reference

MODELS = {
    "transnormer-7b": dict(hidden_size=4096, num_attention_heads=32, feed_forward_size=11008, layers=30),
    "transnormer-1b": SHAPES["transnormer"],
    "retnet-1.3b": SHAPES["retnet"],
}
DEFAULTS = {
    "cuda": dict(models=["transnormer-7b", "retnet-1.3b"], layers=2, tokens=8192, rounds=7),
    "cpu": dict(models=["transnormer-1b", "retnet-1.3b"], layers=1, tokens=2048, rounds=7),
}
PLAIN = "lightning_torch"  # whose error in the model's type says what is allowed
PROBE_TOKENS = 64  # of the first call that tells how long a method will take
FEWEST = 3  # rounds
Attention = Callable[..., torch.Tensor]


def build(name: str, layers: int, device: str, dtype: str) -> LinearDecoder:
    """A model of the shape `name` with random weights and so many layers."""
    sizes = {key: value for key, value in MODELS[name].items() if key != "layers"}
    torch.manual_seed(0)
    with torch.device(device):
        model = LinearDecoder(LinearDecoderConfig(name.partition("-")[0], VOCABULARY, num_hidden_layers=layers, **sizes))
    return model.to(bench.DTYPES[dtype]).eval()


@contextmanager
def attending(attend: Attention) -> Iterator[None]:
    """LinearDecoders attend by attend(query, key, value, log_decay) over tensors [B,H,N,D]."""
    before = linear_decoder.decayed_attention

    def over(cache, layer, query, key, value, log_decay, scale=1.0):
        query, key, value = (t.transpose(1, 2).contiguous() for t in (query * scale, key, value))
        return attend(query, key, value, log_decay).transpose(1, 2)

    linear_decoder.decayed_attention = over
    try:
        yield
    finally:
        linear_decoder.decayed_attention = before


@torch.no_grad()
def logits(model: LinearDecoder, prompts: torch.Tensor, attend: Attention) -> torch.Tensor:
    """[B,V] of the prompts' last tokens."""
    hook = model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, -1:],))
    try:
        with attending(attend):
            return model(prompts).logits[:, -1]
    finally:
        hook.remove()


def in_float64(query, key, value, log_decay):
    wide = (t.double() for t in (query, key, value))
    return reference.causal_linear_decay(*wide, log_decay.double())[0].to(query.dtype)


def by_method(name: str) -> Attention:
    return lambda q, k, v, g: bench.causal_linear_decoder(q, k, v, g, attn_method=name)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def beyond(call: Callable[[], Any], device: str) -> int | None:
    """Bytes that PyTorch allocated on the GPU during a call, at most, beyond those before it."""
    if device != "cuda":
        call()
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Budget:
    """limit: seconds for a method with one model and batch. total: for everything, from now on."""

    def __init__(self, limit: float = math.inf, total: float = math.inf):
        self.limit, self.total, self.until = limit, total, time.monotonic() + total

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    @property
    def left(self) -> float:
        """Seconds that a method may still take."""
        return min(self.limit, self.until - time.monotonic())


def call_of(name: str, model: LinearDecoder, prompts: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: logits(model, prompts, by_method(name))


def expected_seconds(name: str, model: LinearDecoder, prompts: torch.Tensor, device: str, left: float) -> float:
    """Of a call, by calls on the first tokens; 0 where it is below `left` for sure."""
    clock, tokens, before, n = bench._Clock(device), prompts.shape[1], None, PROBE_TOKENS
    while n < tokens:
        call = call_of(name, model, prompts[:, :n])
        seconds = min(clock.seconds(call) for _ in range(2))  # the first may load and compile things
        if seconds * (tokens / n) ** 2 <= left:  # no method takes more than the square
            return 0.0
        if (total := bench._extrapolated(before, (n, seconds), tokens)) > left:
            return total
        n, before = 4 * n, (n, seconds)
    return 0.0


def why_not(name: str, model: LinearDecoder, prompts: torch.Tensor, device: str, budget: Budget) -> dict[str, str]:
    """What a row says of a method that is not even called; empty for one that is."""
    method, heads = bench._method(name, "causal_linear_decay"), model.config.num_attention_heads
    sizes = model.config.all_keys(0) // heads, model.config.all_values() // heads
    shape = bench.Shape(len(prompts), heads, heads, prompts.shape[1], *sizes)
    if budget.over:
        return {"status": "left out", "reason": f"not begun: the {budget.total:g} s for everything were over"}
    if device not in method.devices:
        return {"status": "refused", "reason": f"it runs on {' and '.join(method.devices)} only"}
    if method.memory is not None and (needed := method.memory(shape)) > (free := bench._free_memory(device)):
        return {"status": "refused", "reason": f"it needs {needed >> 20} MiB, {free >> 20} are free"}
    left = budget.left
    if (seconds := expected_seconds(name, model, prompts, device, left)) > left:
        return {"status": "left out", "reason": f"about {seconds:.0f} s a call are expected, {left:.0f} s are left to it"}
    return {}


def emptied(device: str):
    """Gives memory back that PyTorch keeps: it is free for the next method, whose peak is then its own."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def checked(
    name: str,
    model: LinearDecoder,
    prompts: torch.Tensor,
    expected: torch.Tensor,
    row: dict[str, Any],
    device: str,
    budget: Budget,
):
    """Fills a method's row: its status, its error, and the memory and seconds of a first call."""
    emptied(device)
    clock, found, seconds = bench._Clock(device), [], []
    call = call_of(name, model, prompts)
    try:
        if told := why_not(name, model, prompts, device, budget):
            row |= told
            return
        row["peak_bytes"] = beyond(lambda: seconds.append(clock.seconds(lambda: found.append(call()))), device)
    except Exception as error:
        status = "refused" if isinstance(error, bench.REFUSALS) else "failed"
        row |= {"status": status, "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
        return
    error = error_of(found[0], expected)
    row["error"] = error if math.isfinite(error) else None
    if not error <= row["tolerance"]:
        row |= {"status": "wrong", "reason": f"its error is {error:.1e}, {row['tolerance']:.1e} are allowed"}
        return
    row["status"] = "ok"
    note(row, seconds, len(prompts))


def note(row: dict[str, Any], samples: list[float], batch: int):
    """The samples' median into a row."""
    found = [s / batch for s in samples]
    middle = statistics.median(found)
    spread = statistics.median(abs(s - middle) for s in found)
    row |= {"seconds": middle, "spread": spread, "samples": len(found)}


def rounds_of(first: float, left: float, rounds: int) -> int:
    """How many rounds a method has whose first call took so long; 0: that call is all."""
    fit = int(min(rounds, max(left, 0) / max(first, 1e-9)))
    return fit if fit >= min(FEWEST, rounds) else 0


def order(names: list[str], turn: int) -> list[str]:
    """Of a round: each has another one."""
    return random.Random(turn).sample(names, len(names))


def measure(
    model: LinearDecoder,
    prompts: torch.Tensor,
    names: list[str],
    dtype: str,
    device: str,
    budget: Budget,
    rounds: int,
    rows: list[dict[str, Any]],
    save: Callable[[], None],
):
    """Fills `rows`, one for each method's name, on prompts [B,N]. save: called whenever a row has become more."""
    tolerance = None
    if not budget.over:
        expected = logits(model, prompts, in_float64)
        tolerance = bench._tolerance(dtype, error_of(logits(model, prompts, by_method(PLAIN)), expected))
    turns = {}
    for name, row in zip(names, rows, strict=True):
        began = time.monotonic()
        if tolerance is None:
            row |= why_not(name, model, prompts, device, budget)
        else:
            row["tolerance"] = tolerance
            checked(name, model, prompts, expected, row, device, budget)
        save()
        print(json.dumps(row), flush=True)
        if row["status"] == "ok":
            turns[name] = rounds_of(row["seconds"] * len(prompts), budget.limit - (time.monotonic() - began), rounds)
    emptied(device)
    clock, samples, row_of = bench._Clock(device), {name: [] for name in turns}, dict(zip(names, rows))
    for turn in range(rounds):
        for name in order([name for name, count in turns.items() if turn < count], turn):
            if budget.over:
                break
            try:
                samples[name].append(clock.seconds(call_of(name, model, prompts)))
            except torch.OutOfMemoryError:  # its first call had the memory to itself
                emptied(device)
                turns[name] = 0
            else:
                note(row_of[name], samples[name], len(prompts))
        save()


def cell(row: dict[str, Any], column: str) -> str:
    if row["status"] != "ok":
        return row["status"]
    if column == "seconds":
        return f"{row['seconds']:.4g} " + ("(one call)" if row["samples"] == 1 else f"± {row['spread']:.2g}")
    return f"{row['peak_bytes'] / 2**30:.2f}"


def reasons(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of what has no figures."""
    found = {}
    for row in rows:
        if "reason" in row:
            found.setdefault((row["method"], row["reason"]), []).append(f"batch {row['batch']}")
    if found:
        yield from ("", "Without figures:", "")
        yield from (f"- {name}, {' and '.join(batches)}: {why}" for (name, why), batches in found.items())


def table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    lines = [f"{report['date']}, {machine['device']}{threads}, torch {machine['torch']}."]
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["model"] == model]
        batches = sorted({row["batch"] for row in rows})
        columns = [("seconds", "s a prompt")] + [("peak_bytes", "GiB")] * any(row.get("peak_bytes") for row in rows)
        heads = [f"{words}, batch {b}" for _, words in columns for b in batches]
        depth = f"{report['layers']} of {MODELS[model]['layers']} layers"
        lines += ["", f"## {model}, {depth}, {report['dtype']}, prompts of {report['tokens']:,} tokens", ""]
        lines += [f"| method | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        for name in dict.fromkeys(row["method"] for row in rows):
            at = {row["batch"]: row for row in rows if row["method"] == name}
            cells = [cell(at[b], c) if b in at else "" for c, _ in columns for b in batches]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += reasons(rows)
    return "\n".join(lines) + "\n"


def main():
    words = lambda joined: joined.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DEFAULTS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=words)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--batches", type=lambda joined: [int(n) for n in words(joined)], default=[1, 2])
    parser.add_argument("--dtype", choices=list(bench.DTYPES), default="float32")
    parser.add_argument("--methods", type=words)
    parser.add_argument("--load", action="append", default=[], help="a file with more methods, as of leanfleet bench")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a method with one model and batch")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    budget = Budget(args.limit, args.seconds)
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    for path in args.load:
        bench.load_file(path)
    report = {"date": datetime.date.today().isoformat(), "machine": bench._machine(Device.named(args.device))}
    report |= {name: getattr(args, name) for name in ("dtype", "layers", "tokens")} | {"rows": []}

    def save():
        for path, text in ((args.out, json.dumps(report, indent=1) + "\n"), (args.out.with_suffix(".md"), table(report))):
            with files.new_file(path) as new:
                new.write_text(text)

    names = args.methods or bench.methods()
    for name in args.models:
        model = build(name, args.layers, args.device, args.dtype)
        for batch in args.batches:
            prompts = torch.randint(VOCABULARY, (batch, args.tokens), generator=torch.Generator().manual_seed(batch))
            rows = [{"model": name, "batch": batch, "method": method, "status": "not begun"} for method in names]
            report["rows"] += rows
            measure(model, prompts.to(args.device), names, args.dtype, args.device, budget, args.rounds, rows, save)
        del model
        emptied(args.device)
    print(table(report), end="")


if __name__ == "__main__":
    main()
