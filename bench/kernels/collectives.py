"""Checks AllReduce, AllGather and MergeAttention on GPUs of one host, and times the exchanges beside torch.distributed's.

    python -m bench.kernels.collectives OUT [--gpus 2] [--rounds 50]

starts a process a GPU and writes OUT.json and OUT.md. Every time is that of one exchange in a CUDA graph of 20, the median over
replays of the slowest rank; torch.distributed's loop of 20 is captured too. Ours go through the GPUs' memory up to 512 KiB a
rank, and through NCCL in the columns that say so, as torch.distributed's do; its one-shot sum, where it has one here, is that
of symmetric memory. At the end the last rank dies while the others wait for it: `dead_rank` says what they are told, and after
how many seconds. NVLink multicast (NVLS) stays off unless NCCL_NVLS_ENABLE says otherwise.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.kernels.timing import captured
from leanfleet import communicators, native
from leanfleet.export import all_gather, all_reduce, lean_attention, merge_attention, reference

KILOBYTES = (8, 16, 33, 65, 130, 260, 512, 1024)  # of each rank
ROWS = ((32, 128), (64, 128), (16 * 32, 128), (16 * 64, 128), (4 * 256, 64))  # of merged attention: rows, columns
IN_A_GRAPH = 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numbers(rank: int, count: int, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, generator=generator).to(dtype)


def check(rank: int, world: int) -> int:
    """Sums and gatherings of every type, eager and in replays with new numbers, and merged parts; the number of checks."""
    checks = 0
    for dtype in DTYPES:
        eps = torch.finfo(dtype).eps
        for count in (1, 77, 65_536, 1_000_003):
            x = numbers(rank, count, dtype).cuda()
            run = {"sum": lambda x=x: all_reduce(x), "gather": lambda x=x: all_gather(x, world=world)}
            found = {name: f() for name, f in run.items()}
            graphs, outputs = {}, {}
            for name, f in run.items():
                graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[name]):
                    outputs[name] = f()
            for step in range(3):
                if step:
                    x.copy_(numbers(rank, count, dtype, step))
                    for name, graph in graphs.items():
                        graph.replay()
                        found[name] = outputs[name]
                parts = [numbers(r, count, dtype, step).double() for r in range(world)]
                exact, size = sum(parts), sum(p.abs() for p in parts)
                error = (found["sum"].cpu().double() - exact).abs()
                assert (error <= world * eps * size).all(), (dtype, count, step, error.max())
                assert torch.equal(found["gather"].cpu().double(), torch.cat(parts)), (dtype, count, step)
                checks += 2
        lse = torch.randn(world, 2, 8, 3)
        lse[0, 0] = -torch.inf
        inputs = [torch.randn(world, 2, 8, 3, 64).to(dtype), lse]
        merged, total = merge_attention(*(t.cuda() for t in inputs))
        exact, exact_lse = reference.merge_attention(inputs[0].double(), lse)
        size, _ = reference.merge_attention(inputs[0].double().abs(), lse)  # weights are computed in float32
        assert ((merged.cpu().double() - exact).abs() <= (eps + 8 * 2.0**-24) * size).all(), (dtype, "merged")
        assert torch.allclose(total.cpu().double(), exact_lse, atol=1e-5)
        checks += 1
    return checks


def median_us(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Of one exchange of the graph, on the slowest rank."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    graph.replay()
    for begin, end in events:
        torch.distributed.barrier()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    own = statistics.median(begin.elapsed_time(end) for begin, end in events) * 1000 / IN_A_GRAPH
    slowest = torch.tensor(own, device="cuda")
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return float(slowest)


def time_exchanges(rank: int, world: int, rounds: int) -> list[dict]:
    rows = []
    for kilobytes in KILOBYTES:
        x = numbers(rank, kilobytes * 512, torch.float16).cuda()
        gathered, summed = torch.empty(world * x.numel(), dtype=x.dtype, device="cuda"), torch.zeros_like(x)
        contenders = {
            "AllGather": lambda x=x: all_gather(x, world=world),
            "AllGather, NCCL": lambda x=x: all_gather(x, world=world, communicator="nccl"),
            "torch all_gather": lambda x=x, to=gathered: torch.distributed.all_gather_into_tensor(to, x),
            "AllReduce": lambda x=x: all_reduce(x),
            "AllReduce, NCCL": lambda x=x: all_reduce(x, communicator="nccl"),
            "torch all_reduce": lambda to=summed: torch.distributed.all_reduce(to),
        }
        if (one_shot := symmetric_sum(x)) is not None:
            contenders["torch one-shot"] = one_shot
        us = {name: median_us(captured(f, IN_A_GRAPH), rounds) for name, f in contenders.items()}
        rows.append({"kilobytes": kilobytes, "us": us})
        if rank == 0:
            print(f"{kilobytes} KB a rank:", {name: round(t, 2) for name, t in us.items()}, flush=True)
    return rows


def symmetric_sum(x: torch.Tensor):
    """torch's one-shot sum over symmetric memory, or None where this torch or machine has none: rank 0 says why."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        group = torch.distributed.group.WORLD.group_name
        own = symmetric.empty(x.numel(), dtype=x.dtype, device="cuda")
        symmetric.rendezvous(own, group)
        own.copy_(x)
        torch.ops.symm_mem.one_shot_all_reduce(own, "sum", group)
        torch.cuda.synchronize()
    except (ImportError, AttributeError, RuntimeError) as error:
        if torch.distributed.get_rank() == 0:
            print(f"no one-shot sum of torch: {error}".splitlines()[0], flush=True)
        return None
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(own, "sum", group)


def time_merges(world: int, rounds: int) -> list[dict]:
    """Attention over eight keys a rank, with and without the merge over ranks: its cost beside the attention."""
    rows = []
    for count, width in ROWS:
        query = torch.randn(1, count, 1, width, dtype=torch.float16, device="cuda")
        cache = [torch.randn(1, count, 8, width, dtype=torch.float16, device="cuda") for _ in range(2)]

        def attend(query=query, cache=cache, **options):
            return lean_attention(query, *cache, causal=False, **options)

        ways = {
            "alone": attend,
            "merged": lambda attend=attend: attend(world=world),
            "merged, NCCL": lambda attend=attend: attend(world=world, communicator="nccl"),
        }
        us = {name: median_us(captured(f, IN_A_GRAPH), rounds) for name, f in ways.items()}
        rows.append({"rows": count, "width": width, "us": us})
        if torch.distributed.get_rank() == 0:
            print(f"{count} rows of {width}:", {name: round(t, 2) for name, t in us.items()}, flush=True)
    return rows


def lose_a_rank(rank: int, world: int, one: communicators.Communicator) -> dict:
    """The last rank ends without a word while replays of the others wait for it."""
    x = torch.ones(1 << 16, device="cuda")
    graph = captured(lambda: all_reduce(x), 4)
    graph.replay()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    torch.cuda.synchronize()
    if rank == world - 1:
        os._exit(0)
    begin = time.monotonic()
    done = torch.cuda.Event()
    graph.replay()
    done.record()
    try:
        one.wait(done.query, timeout=20)
    except native.LeanfleetError as error:
        return {"error": str(error), "seconds": time.monotonic() - begin}
    return {"error": None, "seconds": time.monotonic() - begin}


def work(rank: int, world: int, folder: str, rounds: int) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    begin = time.monotonic()
    id = communicators.exchange_id(Path(folder, "id"), rank, "nccl")
    one = communicators.create("world", rank, world, id=id, engine="nccl", device=rank, timeout=30)
    created = time.monotonic() - begin
    os.environ["LEANFLEET_DIRECT"] = "0"
    slow = communicators.create(
        "nccl", rank, world, id=_second_id(folder, rank, "nccl"), engine="nccl", device=rank, timeout=30
    )
    checks = check(rank, world)
    assert one.direct > 0, "nothing went through the GPUs' memory"
    if rank == 0:
        print(f"created in {created:.2f} s; {checks} results are right", flush=True)
    rows, merges = time_exchanges(rank, world, rounds), time_merges(world, rounds)
    assert slow.direct == 0
    slow.close()
    with communicators.create("other", rank, world, id=_second_id(folder, rank, "other"), engine="nccl", device=rank) as other:
        assert all_reduce(torch.ones(3, device="cuda"), communicator="other").tolist() == [world] * 3
        torch.cuda.synchronize()
        other.check()
    lost = lose_a_rank(rank, world, one)
    if rank == 0:
        print("a rank dies:", lost, flush=True)
        report = {
            "gpu": torch.cuda.get_device_name(),
            "gpus": world,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "date": time.strftime("%Y-%m-%d"),
            "checks": checks,
            "created_s": created,
            "rows": rows,
            "merges": merges,
            "dead_rank": lost,
        }
        Path(folder, "report.json").write_text(json.dumps(report, indent=1) + "\n")
    os._exit(0)  # torch's process group would wait for the rank that is gone


def _second_id(folder: str, rank: int, name: str) -> bytes:
    return communicators.exchange_id(Path(folder, name), rank, "nccl")


def table(report: dict) -> str:
    names = list(report["rows"][0]["us"])
    lines = [f"| KB a rank | {' µs | '.join(names)} µs |", "|---" * (1 + len(names)) + "|"]
    for row in report["rows"]:
        lines.append("| " + " | ".join([str(row["kilobytes"]), *(f"{row['us'][n]:.1f}" for n in names)]) + " |")
    names = list(report["merges"][0]["us"])
    lines += ["", f"| attention, rows x columns | {' µs | '.join(names)} µs |", "|---" * (1 + len(names)) + "|"]
    for row in report["merges"]:
        lines.append(f"| {row['rows']} x {row['width']} | " + " | ".join(f"{row['us'][n]:.1f}" for n in names) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    if (there := torch.cuda.device_count()) < arguments.gpus:
        parser.error(f"--gpus is {arguments.gpus}; this machine has {there}")
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(r, arguments.gpus, folder, arguments.rounds)) for r in range(arguments.gpus)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        made = Path(folder, "report.json")
        if not made.exists():
            raise SystemExit(f"no report: the ranks ended with {[p.exitcode for p in processes]}")
        report = json.loads(made.read_text())
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
