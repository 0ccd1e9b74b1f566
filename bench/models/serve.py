"""`leanfleet serve` as its clients see it: time to the first token and between tokens, tokens a second, by rate of requests.

    python -m bench.models.serve FOLDER [--rates 1,2,4,inf] [--requests 48] [--seed HEX] [--out F.json] [--options="..."]

The server runs in a process of its own; the clients are OpenAI's, streaming, in this one. Requests come at random times (a
Poisson process of so many a second; inf: all at once), with prompts and answers of lognormal lengths. All of them begin with
the same system prompt of --system words; one server with shared beginnings and one with --no-share get the same requests, at
each rate others. --options: of the server.

FOLDER may be one that `bench.models.serving export --ways continuous` wrote: random weights are made here then, on the GPU if
there is one, and where there is no tokenizer the folder gets one of made-up words, as many as the model has tokens.
"""

import argparse
import asyncio
import datetime
import itertools
import json
import os
import re
import shlex
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openai

from bench.models.serving import GRAPHS, fill_randomly
from leanfleet import native
from leanfleet.ort_ops.generation import load_tokenizer

KEY = "bench"
LETTERS = 5  # of a made-up word


def prepared(folder):
    """The folder to serve: the given one, or what `bench.models.serving export` wrote into it, made ready."""
    if not (folder / "bench.json").exists():
        return folder
    facts, inside = json.loads((folder / "bench.json").read_text()), folder / GRAPHS["continuous"]
    if "random" in facts and not (inside / "model.onnx.data").exists():
        import torch

        fill_randomly(folder, facts, "cuda" if torch.cuda.is_available() else "cpu", ["continuous"])
        torch.cuda.empty_cache()
    if not (inside / "tokenizer.json").exists():
        write_words(inside, json.loads((inside / "leanfleet.json").read_text())["vocabulary"])
    return inside


def write_words(folder, count):
    """A tokenizer of so many words of five letters, each a token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = map("".join, itertools.product(string.ascii_lowercase, repeat=LETTERS))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(count))), unk_token="aaaaa"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def drawn_requests(tokenizer, count, system, seed, number=0):
    """[(prompt, tokens of the answer)] with the seed's system prompt in front; others for another number."""
    random, own = np.random.default_rng(seed), np.random.default_rng([number, seed])
    words = [w for w in tokenizer.get_vocab() if w.isascii() and w.lstrip("Ġ▁").isalpha() and len(w) > 4]
    words = sorted(w.lstrip("Ġ▁") for w in words)
    shared = " ".join(random.choice(words, system))
    prompts = np.clip(own.lognormal(4.0, 0.8, count), 4, 600).astype(int)
    answers = np.clip(own.lognormal(3.5, 0.6, count), 4, 200).astype(int)
    return [(f"{shared} {' '.join(own.choice(words, n))}", int(m)) for n, m in zip(prompts, answers, strict=True)]


async def ask(client, model, prompt, count, at, start):
    """(seconds to the first token, [seconds between tokens], when it ended)."""
    await asyncio.sleep(max(start + at - time.perf_counter(), 0))
    asked, times = time.perf_counter(), []
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        times.append(time.perf_counter())
    return times[0] - asked, np.diff(times).tolist(), times[-1]


async def measure(address, model, requests, rate, seed):
    """One line of results."""
    client = openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=600)
    gaps = np.random.default_rng(seed).exponential(1, len(requests))
    times = np.cumsum(gaps) / rate if np.isfinite(rate) else np.zeros(len(requests))
    start = time.perf_counter()
    async with client:
        found = await asyncio.gather(*(ask(client, model, p, n, t, start) for (p, n), t in zip(requests, times, strict=True)))
    seconds = max(end for *_, end in found) - start
    first, between = [f for f, *_ in found], [d for _, gaps, _ in found for d in gaps]

    def spread(values):
        return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))}

    return {
        "rate": rate if np.isfinite(rate) else "all at once",
        "requests": len(requests),
        "seconds": seconds,
        "tokens_per_second": sum(n for _, n in requests) / seconds,
        "first_token_seconds": spread(first),
        "next_token_seconds": spread(between),
    }


def serving(folder, options):
    """(process, address) of a server."""
    command = [sys.executable, "-m", "leanfleet", "serve", folder, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "LEANFLEET_API_KEY": KEY})
    for line in process.stderr:
        if found := re.match(r"serving (\S+) at (\S+) ", line):
            return process, found[1], found[2]
        print(line, end="", file=sys.stderr)
    raise SystemExit(f"the server did not start: {' '.join(map(str, command))}")


def device():
    """The GPU's name, or what the kernels use of this processor."""
    try:
        import torch
    except ImportError:
        return native.build_info()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else native.build_info()


def tell(share, line):
    first, between = line["first_token_seconds"], line["next_token_seconds"]
    print(
        f"{'shared' if share else 'apart ':6} {line['rate']!s:>11}: {line['tokens_per_second']:7.1f} tokens/s, "
        f"first token {first['median']:.3f} s (p99 {first['p99']:.3f}), "
        f"next {1e3 * between['median']:.1f} ms (p99 {1e3 * between['p99']:.1f})",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--rates", default="1,2,4,inf")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--system", type=int, default=200, help="words of the system prompt")
    parser.add_argument("--seed", default="0", help="hexadecimal")
    parser.add_argument("--out")
    parser.add_argument("--options", type=shlex.split, default=[], help="of leanfleet serve, in quotes")
    args = parser.parse_args()
    seed, folder = int(args.seed, 16), prepared(Path(args.folder))
    tokenizer, rates = load_tokenizer(folder), [float(rate) for rate in args.rates.split(",")]
    work = [drawn_requests(tokenizer, args.requests, args.system, seed, n) for n in range(len(rates) + 1)]
    sizes = [len(tokenizer(prompt)["input_ids"]) for requests in work[1:] for prompt, _ in requests]
    answers = [n for requests in work[1:] for _, n in requests]
    print(f"prompts of {np.mean(sizes):.0f} tokens, answers of {np.mean(answers):.0f} on average")
    lines = []
    for share in (True, False):
        begun = time.perf_counter()
        process, model, address = serving(folder, [*args.options, *([] if share else ["--no-share"])])
        ready = time.perf_counter() - begun
        try:
            asyncio.run(measure(address, model, work[0], np.inf, seed))  # warms it up
            for rate, requests in zip(rates, work[1:], strict=True):
                line = asyncio.run(measure(address, model, requests, rate, seed))
                lines.append({"share": share, "ready_seconds": ready} | line)
                tell(share, line)
        finally:
            process.terminate()
            process.wait()
    if args.out:
        facts = {
            "date": datetime.date.today().isoformat(),
            "device": device(),
            "folder": os.path.basename(os.path.normpath(args.folder)),
            "seed": args.seed,
            "prompt_tokens": sum(sizes) / len(rates),
            "system_words": args.system,
            "options": args.options,
        }
        with open(args.out, "w") as file:
            json.dump({"facts": facts, "lines": lines}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
