"""Random exchanges between GPUs for compute-sanitizer, whose kernels write into each other's memory:

    PYTHONPATH=tests compute-sanitizer --target-processes all --tool memcheck --kernel-name kns=leanfleet \\
        python tests/operators/sanitize_ranks.py --gpus 2 --calls 40 --seed 1

starts a process a GPU. Calls: AllReduce, AllGather and LeanAttention over the keys of all ranks, of every type, of sizes up to
what a window holds and over it, eager and in CUDA graphs; results are checked. Each rank prints how many ran and how many went
through windows. --device cpu: over shared memory, to try it.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

import torch

from leanfleet import communicators
from leanfleet.export import all_gather, all_reduce, lean_attention, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def twice(function, graph):
    """Results of an eager call, and of a captured one."""
    found = [function()]
    if graph:
        replay = torch.cuda.CUDAGraph()
        with torch.cuda.graph(replay):
            found.append(function())
        for _ in range(3):
            replay.replay()
        torch.cuda.synchronize()
    return [f.cpu().double() for f in found]


def exchange(draw, rank, world, dtype, device):
    """A sum or a gathering. Returns (words on it, whether it is right)."""
    count, what = draw.choice((1, 3, 8, 77, 4096, 65_537, 262_144, 300_001)), draw.choice(("sum", "gather"))
    seed, graph = draw.randrange(1 << 20), device == "cuda" and draw.random() < 0.5
    parts = [normal(seed + r, count).to(dtype) for r in range(world)]
    x = parts[rank].to(device)
    found = twice((lambda: all_reduce(x)) if what == "sum" else (lambda: all_gather(x, world=world)), graph)
    if what == "gather":
        right = all(torch.equal(f, torch.cat(parts).double()) for f in found)
    else:
        exact, size = (sum(f(p.double()) for p in parts) for f in (lambda p: p, torch.abs))
        right = all(((f - exact).abs() <= world * torch.finfo(dtype).eps * size + 1e-12).all() for f in found)
    return f"{what} of {count}, graph {graph}", bool(right)


def attention(draw, rank, world, dtype, device):
    """One token over keys of which each rank has a share, some of them none."""
    batch, heads, group, width = draw.choice((1, 3)), draw.choice((1, 2, 8)), draw.choice((1, 3, 4)), draw.choice((64, 80, 128))
    share, seed = draw.choice((8, 64, 700)), draw.randrange(1 << 20)
    lens = [[draw.choice((0, 1, share)) for _ in range(batch)] for _ in range(world)]
    lens[0] = [max(n, 1) for n in lens[0]]
    query = normal(seed, batch, heads * group, 1, width).to(dtype)
    caches = [normal(seed + 1 + i, world, batch, heads, share, width).to(dtype) for i in range(2)]
    graph = device == "cuda" and draw.random() < 0.5
    given = [
        x.to(device) for x in (query, *(c[rank].contiguous() for c in caches), torch.tensor(lens[rank], dtype=torch.int32))
    ]
    found = twice(lambda: lean_attention(*given, causal=False, world=world)[0], graph)
    right = True
    for b in range(batch):
        key, value = (torch.cat([c[r, b, :, : lens[r][b]] for r in range(world)], 1)[None].double() for c in caches)
        exact = reference.lean_attention(query[b : b + 1].double(), key, value, causal=0)[0]
        allowed = 8 * torch.finfo(dtype).eps * (1 + value.abs().max())
        right &= all(bool(((f[b : b + 1] - exact).abs() <= allowed).all()) for f in found)
    return f"attention of {batch} x {heads}x{group} of {width} over {share} a rank, graph {graph}", right


def work(rank, folder, arguments):
    draw, world, device = random.Random(arguments.seed), arguments.gpus, arguments.device  # the same calls on all ranks
    torch.set_num_threads(1)
    engine, own = ("nccl", {"device": rank}) if device == "cuda" else ("shared_memory", {})
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    id = communicators.exchange_id(Path(folder, "id"), rank, engine)
    with communicators.create("world", rank, world, id=id, engine=engine, timeout=300, **own) as made:
        for i in range(arguments.calls):
            dtype = draw.choice(DTYPES)
            words, right = draw.choice((exchange, attention))(draw, rank, world, dtype, device)
            if rank == 0:
                print(f"{i}: {dtype}, {words}", flush=True)
            assert right, f"rank {rank}, call {i}: {words}, {dtype}"
        direct = made.direct
    print(f"rank {rank}: {arguments.calls} calls ran, {direct} exchanges went through windows", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, arguments), nprocs=arguments.gpus)


if __name__ == "__main__":
    main()
