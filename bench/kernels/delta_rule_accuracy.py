"""How far GatedDeltaRule's CPU kernel is from the float64 recurrence over long prompts: python -m
bench.kernels.delta_rule_accuracy [--tokens N] [--out FILE.json].

Each case of CASES is a head of one call, so that all of them are walked at once. Errors are root mean squares over WINDOW
tokens of the output, over that of the exact output: of the kernel, of the plain recurrence in float32, and of the exact
recurrence itself when query, key and value are rounded to the type first, which no kernel can mend. With keys as they come, and
with normalize_qk. Nothing is timed.
"""

import argparse
import datetime
import json
from pathlib import Path

import numpy as np
import torch

from leanfleet import machine
from leanfleet.export import gated_delta_rule, reference

WIDTH, WINDOW = 32, 500  # of keys and values; tokens behind which an error is taken
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDED, WORDS = ("query", "key", "value"), ("as they come", "normalize_qk")
GROWN = 1e6  # an exact output that is larger by so much than what is written

# log_decay, beta (None: the sigmoid of a normal number), length of keys, how far they are from parallel (None: any direction).
CASES = {
    "decays of 0.9 to 1": (-0.1, None, 1.0, None),
    "decay 0.99999": (-1e-5, None, 1.0, None),
    "no decay": (0.0, None, 1.0, None),
    "no decay, beta 0": (0.0, 0.0, 1.0, None),
    "no decay, beta 1, keys nearly parallel": (0.0, 1.0, 1.0, 1e-3),
    "no decay, beta 2": (0.0, 2.0, 1.0, None),
    "no decay, beta 2, keys nearly parallel": (0.0, 2.0, 1.0, 1e-3),
    "decay 0.99999, beta 2, keys nearly parallel": (-1e-5, 2.0, 1.0, 1e-3),
    "decay 0.99, beta 2, keys nearly parallel": (-1e-2, 2.0, 1.0, 1e-3),
    "keys of length 1.4, beta 1": (0.0, 1.0, 1.4, None),
    "keys of length 1.5, beta 1": (0.0, 1.0, 1.5, None),
    "keys of length 1.5, beta 1, decay 0.75": (-0.29, 1.0, 1.5, None),
    "keys of length 3, beta 1": (0.0, 1.0, 3.0, None),
}


def make(tokens):
    """Inputs [1,len(CASES),N,..] in float32, keys from float64."""
    g = torch.Generator().manual_seed(0)
    rows = {name: [] for name in ("key", "log_decay", "beta")}
    for decay, beta, length, apart in CASES.values():
        key = torch.randn(tokens, WIDTH, generator=g, dtype=torch.float64)
        if apart is not None:
            key = key[:1] / key[0].norm() + apart * key / WIDTH**0.5
        rows["key"].append(length * key / key.norm(dim=-1, keepdim=True))
        drawn = torch.rand(tokens, generator=g) if decay == -0.1 else torch.ones(tokens)
        rows["log_decay"].append(decay * drawn)
        own = torch.randn(tokens, generator=g).sigmoid()
        rows["beta"].append(own if beta is None else torch.full((tokens,), beta))
    inputs = {name: torch.stack(x).float().unsqueeze(0) for name, x in rows.items()}
    for name in ("query", "value"):
        inputs[name] = torch.randn(1, len(CASES), tokens, WIDTH, generator=g)
    inputs["initial_state"] = torch.randn(1, len(CASES), WIDTH, WIDTH, generator=g)
    return inputs


def recurrence(inputs, normalize, dtype, places):
    """{place: the WINDOW of output [.., WINDOW, Dv] before that token} of the plain recurrence in `dtype` of NumPy. inputs: by
    name, float32 [..,N,D] and [..,N]."""
    rows = {name: np.moveaxis(x.numpy(), inputs["beta"].dim() - 1, 0) for name, x in inputs.items() if name != "initial_state"}
    state, windows = inputs["initial_state"].numpy().astype(dtype), {at: [] for at in places}
    scale = dtype(WIDTH**-0.5)
    for token in range(max(places)):
        query, key, value, decay, beta = (
            rows[name][token].astype(dtype) for name in ("query", "key", "value", "log_decay", "beta")
        )
        if normalize:
            query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + dtype(reference.DELTA_ROW_EPS)) for x in (query, key))
        state *= np.exp(decay)[..., None, None]
        missing = beta[..., None] * (value - (key[..., None, :] @ state)[..., 0, :])
        state += key[..., :, None] * missing[..., None, :]
        for at, window in windows.items():
            if at - WINDOW <= token < at:
                window.append(scale * (query[..., None, :] @ state)[..., 0, :])
    return {at: torch.from_numpy(np.stack(window, -2)).double() for at, window in windows.items()}


def errors(found, exact):
    """{case: error, or None where the exact output has outgrown what is written}; both [len(CASES),WINDOW,Dv]."""
    sizes = exact.square().mean((1, 2)).sqrt()
    rates = ((found - exact).square().mean((1, 2)).sqrt() / sizes).tolist()
    kept = (sizes.isfinite() & (sizes < GROWN)).tolist()
    return {name: rate if keep else None for name, rate, keep in zip(CASES, rates, kept, strict=True)}


def measured(tokens):
    """{case: {of WORDS: {type: {"kernel", "plain" or "inputs": {token: error}}}}} at powers of ten up to `tokens`."""
    inputs = make(tokens)
    places = [n for n in (1000, 10_000, 100_000) if n < tokens] + [tokens]
    given = [{n: x.to(t) if n in ROUNDED else x for n, x in inputs.items()} for t in DTYPES.values()]
    together = {name: torch.cat([of[name].float() for of in given]) for name in inputs}
    result: dict = {name: {word: {} for word in WORDS} for name in CASES}
    for normalize, word in enumerate(WORDS):
        exact, plain = (recurrence(together, normalize, dtype, places) for dtype in (np.float64, np.float32))
        for number, (name, dtype) in enumerate(DTYPES.items()):
            (kernel,) = gated_delta_rule(**given[number], normalize_qk=bool(normalize))
            for at in places:
                right = exact[at][number]
                rows = {
                    "kernel": errors(kernel[:, at - WINDOW : at].double(), right),
                    "plain": errors(plain[at][number].to(dtype).double(), right),
                    "inputs": errors(right, exact[at][0]),
                }
                for kind, of_cases in rows.items():
                    for case, error in of_cases.items():
                        result[case][word].setdefault(name, {}).setdefault(kind, {})[str(at)] = error
        print(f"keys {word}: done", flush=True)
    return result


def shown(error):
    if error is None:
        return "grows"
    return "lost" if not error < 1 else "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def table(report):
    """As Markdown: the errors at the end, in float32 on the way too."""
    last = str(report["tokens"])
    places = [at for at in next(iter(report["cases"].values()))["as they come"]["float32"]["kernel"] if at != last]
    lines = []
    for word in WORDS:
        heads = [f"float32, {int(at):,}" for at in places] + ["float32", "plain float32"]
        heads += [f"{name}{part}" for name in ("float16", "bfloat16") for part in ("", ", of its inputs")]
        lines += [f"| keys {word} | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
        for case, both in report["cases"].items():
            row = both[word]
            cells = [row["float32"]["kernel"][at] for at in [*places, last]] + [row["float32"]["plain"][last]]
            cells += [row[name][kind][last] for name in ("float16", "bfloat16") for kind in ("kernel", "inputs")]
            lines += [f"| {case} | " + " | ".join(map(shown, cells)) + " |"]
        lines.append("")
    size = f"{report['width']} by {report['width']}"
    lines.append(
        f"Relative errors of the last {report['window']} of {report['tokens']:,} tokens, or of as many as a column says; a "
        f"head of {size}. grows: the exact output has passed {GROWN:g}; lost: the error is as large as the output. "
        f"{report['machine']}, {report['date']}."
    )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.tokens < WINDOW:
        parser.error(f"--tokens is {arguments.tokens}; expected {WINDOW} or more, over which an error is taken")
    with torch.no_grad(), np.errstate(over="ignore", invalid="ignore"):  # what grows
        cases = measured(arguments.tokens)
    report = {"tokens": arguments.tokens, "window": WINDOW, "width": WIDTH, "date": datetime.date.today().isoformat()}
    report |= {"machine": machine.cpu()[0], "cases": cases}
    print(table(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
