"""Whole linear decoders, prompt by prompt, with each method of LeetDecoding in the place of their attention, in PyTorch.

    python -m bench.models.decoder_methods [--device cuda] [--models transnormer-7b,retnet-1.3b] [--layers 2] [--tokens 8192]
        [--batches 1,2] [--dtype float32] [--methods auto,...] [--load FILE.py] [--limit 60] [--rounds 7] --out F.json

After LeetDecoding's tables 7 and 8: TransNormerLLM-7B (hidden 4096, 32 heads of 128, feed-forward 11264) and a RetNet of 1.3B
(2048, 8 heads, keys of 256, values of 512, feed-forward 4096), of which, as in its appendix A.1, the first two layers run, in
float32, on prompts of 8,192 tokens at batch 1 and 2. On a CPU, by default: a TransNormerLLM of 1B (2048, 16 heads, 5632) and
the RetNet, one layer, 2,048 tokens, three rounds. Weights and prompts are random. The model's code is LinearDecoder's for every
method; its attention goes through causal_linear_decoder with tensors [B,H,N,D], and logits are the last token's.

Before it is timed a method's logits are compared with those of attention in float64: it may have 16 times the error that the
plain chunked form has in the model's type (2 times, in 16 bits). Methods take turns; seconds of a prompt are medians, spreads
the median distances from them. A method whose first call takes more than --limit seconds is timed by that call alone. Memory:
the most that PyTorch allocated on the GPU during a call beyond what was there before. Writes the JSON, and with its name and
.md a table.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.models.end_to_end_linear import SHAPES, VOCABULARY
from leanfleet import bench
from leanfleet.driver import Device
from leanfleet.export import LinearDecoder, LinearDecoderConfig, linear_decoder, reference

MODELS = {
    "transnormer-7b": dict(hidden_size=4096, num_attention_heads=32, feed_forward_size=11264, layers=30),
    "transnormer-1b": SHAPES["transnormer"],
    "retnet-1.3b": SHAPES["retnet"],
}
DEFAULTS = {
    "cuda": dict(models=["transnormer-7b", "retnet-1.3b"], layers=2, tokens=8192, rounds=7),
    "cpu": dict(models=["transnormer-1b", "retnet-1.3b"], layers=1, tokens=2048, rounds=3),
}
PLAIN = "lightning_torch"  # whose error in the model's type says what is allowed
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


def checked(name: str, model: LinearDecoder, prompts: torch.Tensor, expected: torch.Tensor, row: dict[str, Any], device: str):
    """Fills a method's row: its status, its error, and the memory and seconds of a first call."""
    method, heads = bench._method(name, "causal_linear_decay"), model.config.num_attention_heads
    sizes = model.config.all_keys(0) // heads, model.config.all_values() // heads
    shape = bench.Shape(len(prompts), heads, heads, prompts.shape[1], *sizes)
    if method.memory is not None and (needed := method.memory(shape)) > (free := bench._free_memory(device)):
        row |= {"status": "refused", "reason": f"it needs {needed >> 20} MiB, {free >> 20} are free"}
        return
    clock, found = bench._Clock(device), []
    try:
        call = lambda: found.append(logits(model, prompts, by_method(name)))  # noqa: E731
        row["peak_bytes"] = beyond(lambda: row.update(first_seconds=clock.seconds(call)), device)
    except bench.REFUSALS as error:
        row |= {"status": "refused", "reason": f"{type(error).__name__}: {error}"[:200]}
        return
    row["error"] = error_of(found[0], expected)
    row["status"] = "ok" if row["error"] <= row["tolerance"] else "wrong"


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, list[float]]:
    """{name: seconds of each round}; the names take turns."""
    clock, samples = bench._Clock(device), {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(clock.seconds(call))
    return samples


def measure(model: LinearDecoder, prompts: torch.Tensor, names: list[str], dtype: str, device: str, limit: float, rounds: int):
    """Rows of all methods on prompts [B,N]."""
    expected = logits(model, prompts, in_float64)
    plain = error_of(logits(model, prompts, by_method(PLAIN)), expected)
    rows = {name: {"method": name, "tolerance": bench._tolerance(dtype, plain)} for name in names}
    for name, row in rows.items():
        checked(name, model, prompts, expected, row, device)
    right = [name for name, row in rows.items() if row["status"] == "ok"]
    quick = {n: (lambda n=n: logits(model, prompts, by_method(n))) for n in right if rows[n]["first_seconds"] <= limit}
    samples = timed(quick, device, rounds)
    for name in right:
        found = [s / len(prompts) for s in samples.get(name, [rows[name]["first_seconds"]])]
        middle = statistics.median(found)
        spread = statistics.median(abs(s - middle) for s in found)
        rows[name] |= {"seconds": middle, "spread": spread, "samples": len(found)}
    return list(rows.values())


def cell(row: dict[str, Any], column: str) -> str:
    if row["status"] != "ok":
        return row["status"]
    if column == "seconds":
        return f"{row['seconds']:.4g}" + (" (one call)" if row["samples"] == 1 else "")
    return f"{row['peak_bytes'] / 2**30:.2f}"


def table(report: dict[str, Any]) -> str:
    lines = [f"{report['date']}, {report['machine']['device']}, torch {report['machine']['torch']}."]
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
            lines.append(f"| {name} | {' | '.join(cell(at[b], c) for c, _ in columns for b in batches)} |")
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
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    for path in args.load:
        bench.load_file(path)
    names, rows = args.methods or bench.methods(), []
    for name in args.models:
        model = build(name, args.layers, args.device, args.dtype)
        for batch in args.batches:
            prompts = torch.randint(VOCABULARY, (batch, args.tokens), generator=torch.Generator().manual_seed(batch))
            found = measure(model, prompts.to(args.device), names, args.dtype, args.device, args.limit, args.rounds)
            rows += [{"model": name, "batch": batch} | row for row in found]
            print("\n".join(json.dumps(row) for row in rows[-len(found) :]), flush=True)
        del model
    report = {"date": datetime.date.today().isoformat(), "machine": bench._machine(Device.named(args.device))}
    report |= {name: getattr(args, name) for name in ("dtype", "layers", "tokens")} | {"rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
