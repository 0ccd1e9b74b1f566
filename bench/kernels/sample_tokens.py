"""Times SampleTokens on CUDA beside FlashInfer's sampling and torch.argmax, and writes JSON and a table.

    python -m bench.kernels.sample_tokens OUT [--seed N] [--random 20] [--rounds 50] [--no-flashinfer]

writes OUT.json and OUT.md. Every number is the median over rounds of a CUDA graph's replay between two events, with all
contenders of a line in turn and the L2 cache flushed by reading before each. The floor is the logits read once at
4.25 TB/s, what an H200 reaches when it copies. Logits are normal with a standard deviation of 2.5. FlashInfer takes
float32 logits or probabilities: what its calls need before them, a conversion and a softmax with the temperature, counts.
A line is left out for a contender that refuses the shape, and the log says so. The random lines are drawn from --seed.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

import torch

from bench.kernels.timing import Launches, captured, times

COPY_BYTES_PER_US = 4.25e6
HALF = torch.float16
# (batch, vocabulary, type)
SHAPES = [(1, 128_256, HALF), (16, 128_256, HALF), (64, 128_256, HALF), (256, 128_256, HALF), (64, 151_936, torch.bfloat16)]
SHAPES += [(64, 32_000, HALF), (64, 128_256, torch.float32)]
MODES = ("greedy", "temperature", "top_k", "top_p", "top_k_top_p", "min_p", "penalties", "logprobs")


def node(batch, vocabulary, dtype, mode):
    """The operator with the settings of a mode on every request."""

    def full(value, kind=torch.float32):
        return torch.full((batch,), value, dtype=kind, device="cuda")

    inputs = {"logits": (2.5 * torch.randn(batch, vocabulary, device="cuda")).to(dtype)}
    attrs = {}
    if mode not in ("greedy", "logprobs"):
        inputs |= {"temperature": full(0.8), "seed": torch.arange(batch, device="cuda"), "position": full(7, torch.int32)}
    if mode.startswith("top_k"):
        inputs["top_k"] = full(50, torch.int32)
    if mode.endswith("top_p"):
        inputs["top_p"] = full(0.95)
    if mode == "min_p":
        inputs["min_p"] = full(0.05)
    if mode == "penalties":
        counts = torch.randint(0, 200, (batch, vocabulary), device="cuda", dtype=torch.int32)
        inputs["token_counts"] = torch.where(counts < 2, counts, 0).int()
        inputs |= {"repetition_penalty": full(1.1), "frequency_penalty": full(0.1)}
        attrs["count_tokens"] = 1
    if mode == "logprobs":
        attrs |= {"logprob": 1, "num_logprobs": 20}
    return Launches("SampleTokens", inputs, attrs, in_place=True)


def rivals(launches, mode, flashinfer):
    """{name: call} of what others have for the mode."""
    logits = launches.inputs["logits"]
    calls = {}
    if mode == "greedy":
        calls["torch.argmax"] = lambda: torch.argmax(logits, dim=-1)
    if not flashinfer or mode not in ("temperature", "top_k", "top_p", "top_k_top_p", "min_p"):
        return calls
    from flashinfer import sampling

    def probabilities():
        return torch.softmax(logits.float() / 0.8, dim=-1)

    if mode == "temperature":
        calls["sampling_from_logits"] = lambda: sampling.sampling_from_logits(logits.float() / 0.8)
        calls["sampling_from_probs"] = lambda: sampling.sampling_from_probs(probabilities())
    if mode == "top_k":
        calls["top_k_sampling_from_probs"] = lambda: sampling.top_k_sampling_from_probs(probabilities(), 50)
    if mode == "top_p":
        calls["top_p_sampling_from_probs"] = lambda: sampling.top_p_sampling_from_probs(probabilities(), 0.95)
    if mode == "top_k_top_p":
        calls["top_k_top_p_sampling_from_logits"] = lambda: sampling.top_k_top_p_sampling_from_logits(
            logits.float() / 0.8, 50, 0.95
        )
    if mode == "min_p":
        calls["min_p_sampling_from_probs"] = lambda: sampling.min_p_sampling_from_probs(probabilities(), 0.05)
    if hasattr(sampling, "softmax") and mode in ("top_k", "top_p", "min_p"):
        name = f"{mode}_sampling_from_probs"
        last = {"top_k": 50, "top_p": 0.95, "min_p": 0.05}[mode]
        calls[f"softmax + {name}"] = lambda: getattr(sampling, name)(sampling.softmax(logits.float(), temperature=0.8), last)
    return calls


def line(batch, vocabulary, dtype, mode, section, arguments):
    launches = node(batch, vocabulary, dtype, mode)
    graphs = {"ours": launches.capture()}
    for name, call in rivals(launches, mode, not arguments.no_flashinfer).items():
        try:
            graphs[name] = captured(call)
        except Exception as error:  # a rival that lacks a shape is left out, and the log says so
            torch.cuda.synchronize()
            print(f"  {name}: {type(error).__name__}: {error}".replace("\n", " ")[:160], flush=True)
    medians = {name: statistics.median(t) for name, t in times(graphs, arguments.rounds).items()}
    others = {name: t for name, t in medians.items() if name != "ours"}
    row = {
        "section": section,
        "batch": batch,
        "vocabulary": vocabulary,
        "type": str(dtype).removeprefix("torch."),
        "mode": mode,
        "floor_us": batch * vocabulary * dtype.itemsize / COPY_BYTES_PER_US,
        "us": medians,
        "ratio": min(others.values()) / medians["ours"] if others else None,
    }
    best = f", others {min(others.values()):.1f} ({min(others, key=others.get)})" if others else ""
    print(f"{mode} {batch} x {vocabulary} {row['type']}: {medians['ours']:.1f} us{best}", flush=True)
    return row


def random_lines(seed, count):
    """Shapes and modes drawn from a seed."""
    draw = random.Random(seed)
    for _ in range(count):
        vocabulary = int(2 ** draw.uniform(10, 18)) // 2 * 2 + draw.choice((0, 0, 0, 1))
        yield (
            draw.choice((1, 2, 4, 8, 16, 32, 48, 64, 100, 128, 256)),
            vocabulary,
            draw.choice((HALF, torch.bfloat16)),
            draw.choice(MODES),
        )


def table(rows):
    lines = ["| section | mode | batch | vocabulary | type | floor µs | ours µs | fastest other µs | which | other / ours |"]
    lines.append("|---" * 10 + "|")
    for row in rows:
        others = {name: t for name, t in row["us"].items() if name != "ours"}
        which = min(others, key=others.get) if others else ""
        cells = [row["section"], row["mode"], row["batch"], row["vocabulary"], row["type"], f"{row['floor_us']:.1f}"]
        cells += [f"{row['us']['ours']:.1f}", f"{others[which]:.1f}" if others else "", which]
        cells.append(f"{row['ratio']:.2f}" if others else "")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="of the random lines, hexadecimal")
    parser.add_argument("--random", type=int, default=20, help="lines of random shapes")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--no-flashinfer", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    chosen = [(*shape, mode, "shapes") for shape in SHAPES for mode in MODES]
    chosen += [(*shape, "random") for shape in random_lines(arguments.seed, arguments.random)]
    rows = [line(*entry, arguments) for entry in chosen]
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not arguments.no_flashinfer:
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    text = json.dumps({"versions": versions, "seed": f"{arguments.seed:x}", "rows": rows}, indent=1)
    arguments.out.with_suffix(".json").write_text(text + "\n")
    arguments.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
