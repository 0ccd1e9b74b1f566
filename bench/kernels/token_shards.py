"""Linear attention over one long text, cut by tokens over GPUs of one host, beside one GPU.

    python -m bench.kernels.token_shards STEM [--gpus 2] [--tokens 1048576] [--heads 32] [--size 128] [--rounds 5]

starts a process a GPU and writes STEM.json and STEM.md, after each line too. Lines: CausalLinearDecay with a decay a head over
`tokens`, NormalizedLinearAttention over a quarter of them (with gradients over ranks it runs in float32), forward, and forward
with gradients, in bfloat16, one text. Ways: one GPU with the operator itself, and decay_over_ranks or normalized_over_ranks on
2, 4, ... GPUs, up to --gpus. Calls of PyTorch with autograd, as in training, timed by events behind an exchange that lines the
ranks up; of ROUNDS the median of the slowest rank, ms; MiB that the call takes at most on a GPU beside its arguments. A way
that does not fit is left out. First a short text is compared with the operator over all of it. --device cpu: over shared
memory, to try it.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from leanfleet import communicators
from leanfleet.export import causal_linear_decay, decay_over_ranks, normalized_linear_attention, normalized_over_ranks

WARM = 2  # calls before those that are timed
SHORT = 1024  # tokens a rank of the text that is compared
ALLOWED = 0.04  # difference beside the largest number: a part's result is rounded once more
NORMALIZED = 4  # so many times fewer tokens
OPERATORS = ("CausalLinearDecay", "NormalizedLinearAttention")


class Device:
    """What differs between GPUs and a CPU."""

    def __init__(self, name, rank):
        self.cuda = name == "cuda"
        self.where = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.engine, self.backend = ("nccl", "nccl") if self.cuda else ("shared_memory", "gloo")
        if self.cuda:
            torch.cuda.set_device(rank)

    def settle(self):
        if self.cuda:
            torch.cuda.synchronize()

    def ms(self, call, line_up):
        """Of one call."""
        if not self.cuda:
            line_up()
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        line_up()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def beside(self, call):
        """MiB that a call takes at most beside what is there."""
        if not self.cuda:
            call()
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def texts(rank, heads, tokens, size, where, grads):
    """(query, key, value, the output's gradient) of a rank's tokens."""
    draw = torch.Generator(where).manual_seed(100 + rank)
    # bfloat16 at once: float32 numbers beside them would take twice the memory of all.
    made = [torch.randn(1, heads, tokens, size, generator=draw, device=where, dtype=torch.bfloat16) for _ in range(4)]
    made[1] /= size**0.5
    for x in made[:3]:
        x.requires_grad_(grads)
    return made


def decays(heads, where):
    return -torch.linspace(1e-4, 0.1, heads, device=where)


def by_ranks(operator, communicator):
    """f(query, key, value) over a communicator."""
    if operator == "CausalLinearDecay":
        return lambda q, k, v: decay_over_ranks(q, k, v, decays(q.shape[1], q.device), communicator=communicator)
    return lambda q, k, v: normalized_over_ranks(q, k, v, communicator=communicator)


def alone(operator):
    if operator == "CausalLinearDecay":
        return lambda q, k, v: causal_linear_decay(q, k, v, decays(q.shape[1], q.device))
    return lambda q, k, v: normalized_linear_attention(q, k, v, normalize_qk=1)


def first_of(found):
    return found if isinstance(found, torch.Tensor) else found[0]


def check(rank, world, communicator, sizes, device):
    """Asserts that a rank's outputs of a short text are those of one call over all of it."""
    for operator in OPERATORS:
        parts = [texts(r, *sizes, device.where, False)[:3] for r in range(world)]
        right = first_of(alone(operator)(*(torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))))
        right = right[:, :, rank * sizes[1] : (rank + 1) * sizes[1]].float()
        found = by_ranks(operator, communicator)(*parts[rank]).float()
        error = float((found - right).abs().max() / right.abs().max())
        assert error <= ALLOWED, f"{operator} on {world}: rank {rank} is off by {error:.2e} of the largest number"


def timed(function, given, grads, rounds, device, line_up):
    """({"ms": of each round, "MiB": beside the arguments}, or None where it does not fit)."""
    *rows, outer = given

    def call():
        output = first_of(function(*rows))
        if grads:
            output.backward(outer)
            for x in rows:
                x.grad = None

    with contextlib.nullcontext() if grads else torch.no_grad():
        memory = device.beside(call)
        for _ in range(WARM - 1):
            call()
        device.settle()
        return {"ms": [device.ms(call, line_up) for _ in range(rounds)], "MiB": memory}


def slowest(found, group, where):
    """The same of all ranks: each round's slowest, and the most memory."""
    numbers = torch.tensor([*found["ms"], found["MiB"] or 0.0], device=where)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=group)
    *ms, memory = numbers.tolist()
    return {"ms": statistics.median(ms), "MiB": memory}


def line(rank, operator, grads, tokens, arguments, worlds, device):
    """{GPUs: {"ms", "MiB"}} of one operator and direction. worlds: {GPUs: (communicator, torch's group or None)}."""
    ways, one = {}, torch.zeros(1, device=device.where)
    for world, (communicator, group) in worlds.items():
        torch.distributed.barrier()
        if rank >= world:
            continue
        function = alone(operator) if world == 1 else by_ranks(operator, communicator)
        line_up = (lambda: None) if world == 1 else lambda group=group: torch.distributed.all_reduce(one, group=group)
        given = texts(rank, arguments.heads, tokens // world, arguments.size, device.where, grads)
        try:
            found = timed(function, given, grads, arguments.rounds, device, line_up)
        except torch.cuda.OutOfMemoryError:
            if world > 1:
                raise  # the others wait for this rank
            found = None
        del given
        if device.cuda:
            torch.cuda.empty_cache()
        if found is not None:
            ways[str(world)] = slowest(found, group, device.where)
    torch.distributed.barrier()
    return ways


def work(rank, folder, arguments):
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device, count = Device(arguments.device, rank), arguments.gpus
    if not device.cuda:
        torch.set_num_threads(1)
    more = {"device_id": device.where} if device.cuda else {}
    torch.distributed.init_process_group(
        device.backend, init_method=f"file://{folder}/store", rank=rank, world_size=count, **more
    )
    worlds, open_ones = {}, []
    for world in (n for n in (1, 2, 4, 8, 16) if n <= count):
        group = torch.distributed.new_group(list(range(world)))
        name = f"of{world}"
        if rank < world and world > 1:
            id = communicators.exchange_id(Path(folder, name), rank, device.engine)
            own = {"device": rank} if device.cuda else {}
            open_ones.append(communicators.create(name, rank, world, id=id, engine=device.engine, **own))
            check(rank, world, name, (4, min(SHORT, arguments.tokens), arguments.size), device)
        worlds[world] = name, group
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if device.cuda else "CPU",
        "torch": torch.__version__,
        "heads": arguments.heads,
        "head_size": arguments.size,
        "rows": [],
    }
    for operator in OPERATORS:
        for grads in (False, True):
            tokens = arguments.tokens // (NORMALIZED if operator == "NormalizedLinearAttention" else 1)
            ways = line(rank, operator, grads, tokens, arguments, worlds, device)
            if rank == 0:
                row = {"operator": operator, "direction": "forward and gradients" if grads else "forward", "tokens": tokens}
                report["rows"].append({**row, "gpus": ways})
                print(report["rows"][-1], flush=True)
                Path(f"{arguments.stem}.json").write_text(json.dumps(report, indent=1) + "\n")
                Path(f"{arguments.stem}.md").write_text(table(report))
    torch.distributed.barrier()
    device.settle()
    for communicator in open_ones:
        communicator.close()
    torch.distributed.destroy_process_group()


def table(report):
    counts = list(dict.fromkeys(n for row in report["rows"] for n in row["gpus"]))
    titles = [f"{n} GPU{'s' * (n != '1')}" for n in counts]
    lines = [
        f"One text cut by tokens, {report['heads']} heads of {report['head_size']}, bfloat16, {report['gpu']}: milliseconds "
        "(million tokens a second; GiB on a GPU beside the arguments).",
        "",
        f"| operator | | tokens | {' | '.join(titles)} | most / one |",
        "|---" * (4 + len(counts)) + "|",
    ]
    for row in report["rows"]:
        cells = [row["operator"], row["direction"], f"{row['tokens'] >> 10}k"]
        for n in counts:
            found = row["gpus"].get(n)
            cells.append(
                f"{found['ms']:.1f} ({row['tokens'] / found['ms'] / 1e3:.1f}; {found['MiB'] / 1024:.1f})" if found else ""
            )
        several = [row["gpus"][n]["ms"] for n in counts if n != "1" and n in row["gpus"]]
        speed = f"{row['gpus']['1']['ms'] / several[-1]:.2f}" if "1" in row["gpus"] and several else ""
        lines.append("| " + " | ".join([*cells, speed]) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", metavar="STEM")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and (there := torch.cuda.device_count()) < arguments.gpus:
        parser.error(f"--gpus is {arguments.gpus}; this machine has {there}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, arguments), nprocs=arguments.gpus)
    print(table(json.loads(Path(f"{arguments.stem}.json").read_text())), end="")


if __name__ == "__main__":
    main()
