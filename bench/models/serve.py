"""`leanfleet serve`, or vLLM's server, as its clients see it: time to the first token and between tokens, tokens a second, by
rate of requests.

    python -m bench.models.serve FOLDER [--server vllm] [--rates 1,2,4,inf] [--requests 48] [--seed HEX] [--out F.json]
        [--options="..."]

The server runs in a process of its own, and its clients, which stream, in others that only count events: a client that parses
them would be what is measured. Requests come at random times (a Poisson process of so many a second; inf: all at once), with
prompts and answers of lognormal lengths. All of them begin with the same system prompt of --system words; one server with
shared beginnings and one with --no-share get the same requests, at each rate others. --options: of the server.

next_token_seconds: of each request, from its first token to its last over the tokens between. pause_seconds: between two events
of a request; tokens that wait while an event is written are one. floor_seconds: see `floor`.

FOLDER may be one that `bench.models.serving export --ways continuous` wrote: random weights are made here then, on the GPU if
there is one, and where there is no tokenizer the folder gets one of made-up words, as many as the model has tokens. vLLM needs
such a folder: it makes random weights of its own and reads the same tokenizer.
"""

import argparse
import asyncio
import datetime
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import socket
import string
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx

import leanfleet
from bench.models.serving import GRAPHS, fill_randomly
from leanfleet import native
from leanfleet.decoder_contract import MODEL_FILE, SERVING_FILE
from leanfleet.ort_ops.generation import load_tokenizer

KEY = "bench"
LETTERS = 5  # of a made-up word
MACHINES = {"NVIDIA H200": (4.6e12, 790e12)}  # bytes a second of a pure read, operations a second of 16-bit products
WEIGHT_BYTES = 2


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


async def ask(address, body, at):
    """(seconds to the first token, [seconds between events], when it ended) of a request that is sent at this time."""
    where = urlsplit(address)
    await asyncio.sleep(max(at - time.perf_counter(), 0))
    asked, times = time.perf_counter(), []
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    data = json.dumps(body).encode()
    head = f"POST {where.path}/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    if b" 200 " not in (status := await reader.readline()):
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()[-300:]}")
    last = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            last = line
    writer.close()
    made = json.loads(last[6:])["usage"]["completion_tokens"]
    if made != body["max_tokens"]:
        raise RuntimeError(f"{made} tokens came where {body['max_tokens']} were asked for")
    times.pop()  # of the usage
    return times[0] - asked, np.diff(times).tolist(), times[-1]


def ask_all(pipe, address, work):
    """What `ask` tells of each (body, time) of `work`, in a process of its own."""

    async def asked():
        return await asyncio.gather(*(ask(address, body, at) for body, at in work))

    try:
        pipe.send(asyncio.run(asked()))
    except Exception as error:
        pipe.send(error)


def measure(address, model, requests, rate, seed, clients):
    """One line of results. clients: processes that the requests are dealt to: one could not read all that a GPU writes."""
    gaps = np.random.default_rng(seed).exponential(1, len(requests))
    times = np.cumsum(gaps) / rate if np.isfinite(rate) else np.zeros(len(requests))
    start = time.perf_counter() + 1 + clients / 4  # the clock of all processes of a machine; they start first
    settings = {"temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    work = [
        ({"model": model, "prompt": p, "max_tokens": n} | settings, start + t)
        for (p, n), t in zip(requests, times, strict=True)
    ]
    pipes = []
    for i in range(clients):
        ours, theirs = multiprocessing.Pipe()
        work_of_it = theirs, address, work[i::clients]
        multiprocessing.get_context("fork").Process(target=ask_all, args=work_of_it, daemon=True).start()
        theirs.close()  # or nobody would see that a client has died
        pipes.append(ours)
    found = []
    for pipe in pipes:
        told = pipe.recv()
        if isinstance(told, Exception):
            raise told
        found += told
    counts = [n for i in range(clients) for _, n in requests[i::clients]]
    seconds = max(end for *_, end in found) - start

    def spread(values):
        return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))}

    pauses = [pause for _, own, _ in found for pause in own]
    return {
        "rate": rate if np.isfinite(rate) else "all at once",
        "requests": len(requests),
        "seconds": seconds,
        "tokens_per_second": sum(counts) / seconds,
        "first_token_seconds": spread([first for first, *_ in found]),
        "next_token_seconds": spread([sum(own) / (n - 1) for (_, own, _), n in zip(found, counts, strict=True)]),
        "pause_seconds": spread(pauses),
    }


def memory(address, folder):
    """Requests that run at once, and bytes: of the weights, of those that each token of a prompt is multiplied by, of a token's
    keys and values, and of a request's states."""
    where = urlsplit(address)
    call = urllib.request.Request(f"http://{where.netloc}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(call) as answer:
        told = dict(re.findall(r"^leanfleet_(\w+) (\S+)$", answer.read().decode(), re.M))
    places, pages, tokens, pools, states, rows = (
        float(told[name]) for name in ("places", "pages", "page_tokens", "pool_bytes", "state_bytes", "states")
    )
    return {
        "places": places,
        "weights": sum(path.stat().st_size for path in folder.glob("*.data")),
        "products": products(folder),
        "token": (pools - states) / (pages * tokens),
        "state": states / rows if rows else 0,
    }


def products(folder):
    """Bytes of the matrices in a graph's products, but for the head, which prompts need for one row each."""
    facts = json.loads((folder / "leanfleet.json").read_text())
    path = next(p for p in (folder / SERVING_FILE, folder / MODEL_FILE) if p.exists())
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    used = {name for node in graph.node if node.op_type in ("MatMul", "Gemm", "FusedMatMul", "Linear") for name in node.input}
    return WEIGHT_BYTES * sum(math.prod(shapes[n]) for n in used & shapes.keys() if facts["vocabulary"] not in shapes[n])


def floor(sizes, shared, held, bandwidth, flops):
    """Fewer seconds than any such machine needs for requests that are all there: the longer of reading and multiplying.

    It reads the weights for each step of as many answers as have a place, and keys, values and states for each token; it
    multiplies the tokens of prompts. sizes: [(tokens of the prompt, of the answer)]. shared: those tokens of prompts that only
    one has to read."""
    steps = [(size, n - 1) for size, n in sizes]  # behind the prompt, whose last token gives the first of the answer
    answers = sum(n for _, n in steps)
    seen = sum(n * size + n * (n + 1) / 2 for size, n in steps)
    moved = max(answers / held["places"], max(n for _, n in steps)) * held["weights"]
    moved += seen * held["token"] + 2 * answers * held["state"]
    read = sum(size for size, _ in sizes) - shared * (len(sizes) - 1)
    return max(moved / bandwidth, 2 * read * held["products"] / WEIGHT_BYTES / flops)


def serving(folder, share, options, key=KEY):
    """(process, model's name, address) of a server. share: the beginnings of prompts."""
    command = [sys.executable, "-m", "leanfleet", "serve", folder, "--port", "0", *options, *([] if share else ["--no-share"])]
    environment = {**os.environ, "LEANFLEET_API_KEY": key}
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if found := re.match(r"serving (\S+) at (\S+) ", line):
            # It warns of requests that are none, and would wait for a reader.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1], found[2]
        print(line, end="", file=sys.stderr)
    raise SystemExit(f"the server did not start: {' '.join(map(str, command))}")


def vllm_serving(folder, share, options):
    """The same of vLLM, over the configuration beside `folder` and its tokenizer."""
    from bench.models.vllm import write_config

    if not (folder.parent / "bench.json").exists():
        raise SystemExit(f"{folder} is not of bench.models.serving export, which says what model vLLM is to make up")
    own = write_config(folder.parent, json.loads((folder.parent / "bench.json").read_text())["model"])
    for path in folder.glob("tokenizer*.json"):
        shutil.copy(path, own)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", own, "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", port, "--api-key", KEY, "--served-model-name", own.parent.name]
    command += ["--enable-prefix-caching" if share else "--no-enable-prefix-caching", *options]
    log = own / "log.txt"
    with log.open("w") as told:
        process = subprocess.Popen(list(map(str, command)), stdout=told, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                return process, own.parent.name, f"http://127.0.0.1:{port}/v1"
            except OSError:
                time.sleep(0.5)
    except BaseException:  # an interrupt
        process.terminate()
        raise
    raise SystemExit(f"vLLM did not start:\n{log.read_text()[-4000:]}")


SERVERS = {"leanfleet": serving, "vllm": vllm_serving}


def version(server):
    """The server and its version: of leanfleet also where it is a checkout that was not installed."""
    return f"{server} {leanfleet.__version__ if server == 'leanfleet' else importlib.metadata.version(server)}"


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
        f"next {1e3 * between['median']:.1f} ms (p99 {1e3 * between['p99']:.1f}), "
        f"pauses up to {1e3 * line['pause_seconds']['p99']:.1f} ms (p99)"
        + (f", {line['floor_seconds'] / line['seconds']:.2f} of the floor" if "floor_seconds" in line else ""),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--server", choices=("leanfleet", "vllm"), default="leanfleet")
    parser.add_argument("--rates", default="1,2,4,inf")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--system", type=int, default=200, help="words of the system prompt")
    parser.add_argument("--seed", default="0", help="hexadecimal")
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 4)), help="processes that ask")
    parser.add_argument("--out")
    parser.add_argument("--options", type=shlex.split, default=[], help="of the server, in quotes")
    args = parser.parse_args()
    seed, folder = int(args.seed, 16), prepared(Path(args.folder))
    tokenizer, rates = load_tokenizer(folder), [float(rate) for rate in args.rates.split(",")]
    work = [drawn_requests(tokenizer, args.requests, args.system, seed, n) for n in range(len(rates) + 1)]
    sizes = [[(len(tokenizer(prompt)["input_ids"]), n) for prompt, n in requests] for requests in work]
    means = np.mean(np.concatenate(sizes[1:]), 0)
    print(f"prompts of {means[0]:.0f} tokens, answers of {means[1]:.0f} on average")
    report = {
        "facts": {
            "date": datetime.date.today().isoformat(),
            "device": device(),
            "folder": os.path.basename(os.path.normpath(args.folder)),
            "seed": args.seed,
            "mean_prompt": means[0],
            "mean_answer": means[1],
            "system_words": args.system,
            "options": args.options,
            "server": version(args.server),
        },
        "lines": [],
    }
    for share in (True, False):
        begun = time.perf_counter()
        process, model, address = SERVERS[args.server](folder, share, args.options)
        ready = time.perf_counter() - begun
        try:
            held = memory(address, folder) if args.server == "leanfleet" else None
            report["facts"] |= {"bytes": held} if held else {}
            measure(address, model, work[0], np.inf, seed, args.clients)  # warms it up
            for rate, requests, counts in zip(rates, work[1:], sizes[1:], strict=True):
                line = measure(address, model, requests, rate, seed, args.clients)
                if np.isinf(rate) and held and (limits := MACHINES.get(device())):
                    line["floor_seconds"] = floor(counts, share * args.system, held, *limits)
                report["lines"].append({"share": share, "ready_seconds": ready} | line)
                tell(share, line)
                if args.out:  # a run that is stopped leaves what it has
                    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
