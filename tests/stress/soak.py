"""One server under clients for minutes: does it keep its memory, its pages and its connections?

    PYTHONPATH=.:tests python -m stress.soak [--base llama] [--seconds 300] [--clients 200] [--seed N] [--out F.json]

Starts `leanfleet serve` as its users do, with a pool too small for those that run, and keeps so many clients of
stress.clients at it: one that ends is followed by another. Each that asks rightly has to get the text that it would get alone, or
a refusal because too many wait. Looks at the server's memory, open files and metrics every second. Ends with an error where an
answer is wrong or missing, where memory or open files of the second half exceed those of the first by more than GROWTH or FILES,
or where anything is left when all have gone.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

from stress import clients
from support.benchmarks import script

GROWTH = 1.05, 8 << 20  # of the most memory in a half: a factor, and bytes beside it, of which each is allowed
FILES = 20  # more open at once than in the first half: connections come and go
OPTIONS = {"--cache-tokens": 480, "--max-requests": 8, "--max-waiting": 150, "--step-tokens": 64}
WAITING, SAMPLED = 150, 40
# Of requests that draw, with up to three answers of 40 tokens: logits that are added up in another order may move a probability
# past a random number. Streams that broke characters in two parted two in a hundred.
PARTED = 0.001


def serving(base):
    """(process, port) of a server."""
    limits = {"--provider": "cpu", "--max-body": clients.BODY, "--timeout": clients.SECONDS}
    options = [x for pair in (limits | OPTIONS).items() for x in pair]
    process, _, address = script("models.serve").serving(clients.folder_of(base), True, options, clients.KEY)
    return process, urlsplit(address).port


def state(process):
    """(bytes in memory, open files) of a process and the one that it runs its batch in."""
    own = Path(f"/proc/{process.pid}")
    places = [own, *(Path(f"/proc/{child}") for child in (own / f"task/{process.pid}/children").read_text().split())]
    resident = sum(int((place / "statm").read_text().split()[1]) for place in places) * os.sysconf("SC_PAGE_SIZE")
    return resident, sum(len(list((place / "fd").iterdir())) for place in places)


async def gauges(port):
    async with clients.Connection(port) as connection:
        await connection.send(clients.head("/metrics", method="GET"))
        _, body = await connection.answer()
    return {name: float(value) for name, value in re.findall(r"^leanfleet_(\w+) (\S+)$", body.decode(), re.M)}


async def keep_at_it(port, base, source, until, found):
    """One client after the other."""
    await asyncio.sleep(source.random())
    while time.monotonic() < until:
        client = clients.draw_client(source)
        if client["does"] == "sampled":  # few different ones, as what they get alone is computed here, beside the server
            client |= {"seed": client["seed"] % 3, "tokens": SAMPLED}
        try:
            if client["does"] in clients.RIGHT:
                what = await clients.ask(client, port, base, WAITING)
            else:
                what = await clients.misbehave(client, port, base)
        except clients.Wrong as error:
            if client["does"] != "sampled" or not str(error).startswith("another text"):
                raise clients.Wrong(f"{error} ({client})") from None
            what = "parted"
        found[what] += 1
        found["drawn"] += what == "right" and client["does"] == "sampled"


async def watch(process, port, until, seen):
    while time.monotonic() < until:
        begun = time.monotonic()
        told = await gauges(port)
        seen.append((begun, *state(process), told["waiting_requests"], told["pages_in_use"], time.monotonic() - begun))
        await asyncio.sleep(1)


async def settled(port):
    """The gauges once nothing runs any more."""
    for _ in range(100):
        told = await gauges(port)
        if not told["running_requests"] and not told["waiting_requests"]:
            return told
        await asyncio.sleep(0.1)
    raise clients.Wrong(f"requests are left: {told}")


def growth(seen, middle):
    """The most memory and open files before a moment and after it. Raises clients.Wrong where they grew."""
    halves = [[row for row in seen if (row[0] < middle) == early] for early in (True, False)]
    (memory, files), (later, more) = ((max(r[1] for r in half), max(r[2] for r in half)) for half in halves)
    if later > GROWTH[0] * memory + GROWTH[1]:
        raise clients.Wrong(f"memory grew from {memory / 2**20:.0f} to {later / 2**20:.0f} MiB")
    if more > files + FILES:
        raise clients.Wrong(f"open files grew from {files} to {more}")
    return {
        "memory_mib": {"first half": memory / 2**20, "second half": later / 2**20},
        "open_files": {"first half": files, "second half": more},
    }


async def soak(process, port, base, seconds, count, seed):
    """What happened, as a dict. Raises clients.Wrong."""
    found, seen, begun = collections.Counter(), [], time.monotonic()
    until = begun + seconds
    sources = [random.Random(f"{seed}:soak:{i}") for i in range(count)]
    async with asyncio.TaskGroup() as group:
        group.create_task(watch(process, port, until, seen))
        for source in sources:
            group.create_task(keep_at_it(port, base, source, until, found))
    told = await settled(port)
    if found["parted"] > 1 + found["drawn"] * PARTED:
        raise clients.Wrong(f"{found['parted']} drawn answers are others than alone, beside {found['drawn']} right ones")
    if told["pages_in_use"]:
        raise clients.Wrong(f"{told['pages_in_use']:.0f} pages are left in use")
    grown = growth(seen, begun + seconds / 2)
    resident, left = state(process)
    return {
        "seconds": seconds,
        "clients": count,
        "seed": seed,
        "requests": sum(found.values()) - found["drawn"],
        **found,
        "preemptions": told["preemptions"],
        "shared_prompt_tokens": told["shared_prompt_tokens"],
        "most_waiting": max(r[3] for r in seen),
        "most_pages_in_use": max(r[4] for r in seen),
        "slowest_metrics_seconds": max(r[5] for r in seen),
        "memory_mib": grown["memory_mib"] | {"end": resident / 2**20},
        "open_files": grown["open_files"] | {"end": left},
    }


def expected(base):
    """Computes all that clients may ask for alone, before the server needs the processor."""
    for text in range(12):
        for does in ("whole", "chat"):
            clients.expected_of(base).text({"does": does, "text": text, "tokens": clients.MOST_TOKENS})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", choices=clients.BASES, default="llama")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    expected(arguments.base)
    process, port = serving(arguments.base)
    try:
        found = asyncio.run(soak(process, port, arguments.base, arguments.seconds, arguments.clients, arguments.seed))
    finally:
        process.terminate()
        process.wait()
    found = {"date": time.strftime("%Y-%m-%d"), "base": arguments.base, "options": OPTIONS} | found
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
