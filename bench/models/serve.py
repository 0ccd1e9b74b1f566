"""`leanfleet serve` as its clients see it: time to the first token and between tokens, tokens a second, by rate of requests.

    python -m bench.models.serve FOLDER [--rates 1,2,4,inf] [--requests 48] [--seed HEX] [--out F.json] [--options="..."]

The server runs in a process of its own; the clients are OpenAI's, streaming, in this one. Requests come at random times (a
Poisson process of so many a second; inf: all at once), with prompts and answers of lognormal lengths. All of them begin with
the same system prompt of --system words; each rate is measured with shared beginnings and with --no-share, on the same
requests. --options: of the server.
"""

import argparse
import asyncio
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import time

import numpy as np
import openai

from leanfleet import native
from leanfleet.ort_ops.generation import load_tokenizer

KEY = "bench"


def drawn_requests(tokenizer, count, system, seed):
    """[(prompt, tokens of the answer)] with the system prompt in front."""
    random = np.random.default_rng(seed)
    words = [w for w in tokenizer.get_vocab() if w.isascii() and w.lstrip("Ġ▁").isalpha() and len(w) > 4]
    words = sorted(w.lstrip("Ġ▁") for w in words)
    shared = " ".join(random.choice(words, system))
    prompts = np.clip(random.lognormal(4.0, 0.8, count), 4, 600).astype(int)
    answers = np.clip(random.lognormal(3.5, 0.6, count), 4, 200).astype(int)
    return [(f"{shared} {' '.join(random.choice(words, n))}", int(m)) for n, m in zip(prompts, answers, strict=True)]


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
    raise SystemExit(f"the server did not start: {' '.join(map(str, command))}")


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
    seed, tokenizer = int(args.seed, 16), load_tokenizer(args.folder)
    requests = drawn_requests(tokenizer, args.requests, args.system, seed)
    sizes = [len(tokenizer(prompt)["input_ids"]) for prompt, _ in requests]
    print(f"prompts of {np.mean(sizes):.0f} tokens, answers of {np.mean([n for _, n in requests]):.0f} on average")
    lines = []
    for share in (True, False):
        for rate in map(float, args.rates.split(",")):
            process, model, address = serving(args.folder, [*args.options, *([] if share else ["--no-share"])])
            try:
                asyncio.run(measure(address, model, drawn_requests(tokenizer, 4, 5, seed + 1), np.inf, seed))  # warms it up
                line = asyncio.run(measure(address, model, requests, rate, seed))
            finally:
                process.terminate()
                process.wait()
            lines.append({"share": share} | line)
            first, between = line["first_token_seconds"], line["next_token_seconds"]
            print(
                f"{'shared' if share else 'apart ':6} {line['rate']!s:>11}: {line['tokens_per_second']:7.1f} tokens/s, "
                f"first token {first['median']:.3f} s (p99 {first['p99']:.3f}), "
                f"next {1e3 * between['median']:.1f} ms (p99 {1e3 * between['p99']:.1f})",
                flush=True,
            )
    if args.out:
        facts = {
            "date": datetime.date.today().isoformat(),
            "device": native.build_info(),
            "folder": os.path.basename(os.path.normpath(args.folder)),
            "seed": args.seed,
            "prompt_tokens": sum(sizes),
            "system_words": args.system,
            "options": args.options,
        }
        with open(args.out, "w") as file:
            json.dump({"facts": facts, "lines": lines}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
