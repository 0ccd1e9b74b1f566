"""Processes that are the ranks of communicators on this host, and what they do in tests. Imported without torch: a rank starts
in a part of a second."""

import ctypes
import hashlib
import itertools
import multiprocessing
import os
import queue
import signal
import time

import ml_dtypes
import numpy as np

from leanfleet import communicators, native

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SECONDS = 60  # more than any test's ranks take


def _rank(function, rank, results, arguments):
    try:
        results.put((rank, None, function(rank, *arguments)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}", None))
    results.close()
    results.join_thread()


def run_ranks(function, world, *arguments, dying=()):
    """function(rank, *arguments) in `world` spawned processes: their results by rank. A rank that raised gives its error's text;
    one of `dying`, which gives none, None."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(function, r, results, arguments)) for r in range(world)]
    for process in processes:
        process.start()
    found = [None] * world
    try:
        for _ in range(world - len(dying)):
            rank, error, value = results.get(timeout=SECONDS)
            found[rank] = error if error is not None else value
    except queue.Empty:
        raise AssertionError(f"ranks hang; so far {found}") from None
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return found


def shared_file_is_there(own):
    """Of the communicator with this id, as csrc/core/board.cpp names it: other tests have theirs."""
    number = 0xCBF29CE484222325
    for byte in own:
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return os.path.exists(f"/dev/shm/leanfleet-{number:016x}")


def call(op, x, attrs, outputs_of=1, in_place=False, device="cpu"):
    """A node on a numpy array through the C interface; outputs_of: how often the first axis repeats. device: "cuda" with the
    library of a simulated GPU."""
    x = np.ascontiguousarray(x)
    shape = (x.shape[0] * outputs_of, *x.shape[1:])
    output = x if in_place else np.frombuffer(b"\x7f" * (x.nbytes * outputs_of), x.dtype).reshape(shape).copy()
    name = x.dtype.name
    native.Call(op, [(x.ctypes.data, x.shape, name)], [(output.ctypes.data, shape, name)], attrs, device, node="layers.3").run()
    return output


def contribution(rank, count, name):
    """What a rank gives: numbers whose sum rounds."""
    return (np.random.default_rng(rank).standard_normal(count) * (1 + rank)).astype(TYPES[name])


def error_of_sum(found, parts, name):
    """The largest error of a sum, in units of the type's rounding."""
    exact, size = (sum(f(p.astype(np.float64)) for p in parts) for f in (np.array, np.abs))
    eps = float(ml_dtypes.finfo(TYPES[name]).eps)
    return float((np.abs(found.astype(np.float64) - exact) / (eps * np.abs(exact) + 2e-7 * size + 1e-7)).max())


def digest(x):
    return hashlib.sha256(x.tobytes()).hexdigest()


def exchange(rank, world, ids):
    """Sums and gatherings of every type and of sizes around those of a piece, over two communicators in turn. Returns the largest
    error of a sum in units of the type's rounding, and digests of all sums."""
    worst, sums = 0.0, []
    with (
        communicators.create("world", rank, world, id=ids[0], timeout=30),
        communicators.create("reversed", world - 1 - rank, world, id=ids[1], timeout=30),
    ):
        for name in TYPES:
            for count in (1, 7, 65, 131072, 300001):
                parts = [contribution(r, count, name) for r in range(world)]
                for in_place in (False, True):
                    found = call("AllReduce", parts[rank].copy(), {}, in_place=in_place)
                    worst = max(worst, error_of_sum(found, parts, name))
                    sums.append(digest(found))
                gathered = call("AllGather", parts[rank].reshape(1, -1), {"world": world}, world)
                assert [digest(row) for row in gathered] == [digest(p) for p in parts]
                backwards = call("AllGather", parts[rank].reshape(1, -1), {"world": world, "communicator": "reversed"}, world)
                assert [digest(row) for row in backwards] == [digest(p) for p in parts[::-1]]
    return worst, sums


def runtimes(rank, world, port):
    """The same nodes in PyTorch, and in ONNX Runtime as a model of two: a sum, and a gathering of it. The environment is that
    which torchrun makes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    import onnx
    import torch

    from leanfleet import spec
    from leanfleet.export import all_gather, all_reduce
    from support import ort_models
    from support.linear_cases import session_of

    torch.set_num_threads(1)
    results = {}
    with communicators.world_from_torchrun("tp", engine="shared_memory") as made:
        assert (made.name, made.rank, made.world) == ("tp", rank, world)
        for name in TYPES:
            x = torch.from_numpy(np.stack([contribution(rank, 40, name)] * 3).astype(np.float32)).to(getattr(torch, name))
            total = all_reduce(x, communicator="tp")
            both = all_gather(total[:, :8].contiguous(), communicator="tp", world=world)
            assert both.shape == (3 * world, 8) and torch.equal(both, total[:, :8].repeat(world, 1))
            op = spec.all_specs()["AllReduce"]
            node = onnx.helper.make_node("AllReduce", ["input"], ["total"], "n0", domain="leanfleet", communicator="tp")
            more = onnx.helper.make_node(
                "AllGather", ["total"], ["output"], "n1", domain="leanfleet", communicator="tp", world=world
            )
            kind = ort_models.onnx_type(op.inputs[0], name, (), None)
            info = onnx.helper.make_tensor_value_info
            graph = onnx.helper.make_graph([node, more], "g", [info("input", kind, ["n", 40])], [info("output", kind, None)])
            opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("leanfleet", 1)]
            model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
            session = session_of(model, library=True)
            output = torch.full((3 * world, 40), float("nan")).to(x.dtype)
            session.run_with_iobinding(ort_models.bound(session, {"input": x}, {"output": output}))
            assert torch.equal(output, total.repeat(world, 1)), name
            results[name] = digest(total.float().numpy())
    return results


def dies(rank, world, id, victim, how):
    """Rank `victim` ends in the middle of a run; the others say what they were told, and after how many seconds."""
    made = communicators.create("world", rank, world, id=id, timeout=30)
    x = np.ones(1000, np.float32)
    call("AllReduce", x, {})
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        made.close()
        return None
    begin = time.monotonic()
    try:
        while True:
            call("AllReduce", x, {})
    except native.LeanfleetError as error:
        text, took = str(error), time.monotonic() - begin
    try:
        call("AllReduce", x, {})
    except native.LeanfleetError as error:
        assert str(error) == text  # the failure is final
    try:
        made.check()
    except native.LeanfleetError as error:
        assert str(error) in text
        return text, took
    raise AssertionError("check says nothing")


def differs(rank, world, ids, what):
    """Ranks that do not do the same."""
    communicators.create("start", rank, world, id=ids[0], timeout=30)  # from here on all are there
    number = 2 + rank if what == "world" else world
    with communicators.create("world", rank, number, id=ids[1], timeout=1 if what == "late" else 30):
        count = 10 + (rank if what == "size" else 0)
        kind = np.float16 if what == "type" and rank else np.float32
        if what == "late" and rank:
            time.sleep(2)
            call("AllReduce", np.ones(count, kind), {})  # the data of the other rank are there
        if what == "kind" and rank:
            return digest(call("AllGather", np.ones((count, 1), kind), {"world": world}, world))
        return digest(call("AllReduce", np.ones(count, kind), {}))


def exchange_on_gpus(rank, world, id):
    """Sums and gatherings of every type on this rank's GPU, through windows and NCCL; the number of right results, and of
    exchanges that went through windows."""
    import torch

    from leanfleet.export import all_gather, all_reduce

    torch.cuda.set_device(rank)
    right = 0
    with communicators.create("world", rank, world, id=id, engine="nccl", device=rank, timeout=60) as made:
        for name, count in itertools.product(TYPES, (5, 100_003, 300_001)):
            dtype = getattr(torch, name)
            parts = [torch.from_numpy(contribution(r, count, name).astype(np.float32)).to(dtype) for r in range(world)]
            exact = sum(p.double() for p in parts)
            x = parts[rank].cuda()
            found = [(all_reduce(x), all_gather(x, world=world))]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = all_reduce(x), all_gather(x, world=world)
            x.copy_(parts[rank])
            graph.replay()
            done = torch.cuda.Event()
            done.record()
            made.wait(done.query, timeout=60)
            for total, gathered in (*found, captured):
                error = (total.cpu().double() - exact).abs()
                assert (error <= world * torch.finfo(dtype).eps * (1 + sum(p.double().abs() for p in parts))).all(), name
                assert torch.equal(gathered.cpu(), torch.cat(parts)), name
                right += 2
        return right, made.direct


def dies_on_gpu(rank, world, id, graph):
    """Rank 1 ends while rank 0 waits for it, in a launch or in a replay; what rank 0 is told, and after how many seconds."""
    import torch

    from leanfleet.export import all_reduce

    torch.cuda.set_device(rank)
    made = communicators.create("world", rank, world, id=id, engine="nccl", device=rank, timeout=60)
    x = torch.ones(1000, device="cuda")
    all_reduce(x)
    replay = torch.cuda.CUDAGraph()
    with torch.cuda.graph(replay):
        all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(0.5)
        os._exit(1)
    begin, done = time.monotonic(), torch.cuda.Event()
    try:
        replay.replay() if graph else all_reduce(x)
        done.record()
        made.wait(done.query, timeout=60)
        time.sleep(2)  # the last exchange may have come through
        replay.replay() if graph else all_reduce(x)
        done.record()
        made.wait(done.query, timeout=60)
    except native.LeanfleetError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("nothing is noticed")


def life_with_nccl(rank, world, id, library, how):
    """A communicator of tests/cpp/fake_nccl.cpp, to its end: (what was said, seconds, aborted, destroyed)."""
    fake = ctypes.CDLL(library)
    if how == "hang":
        os.environ["FAKE_NCCL"] = "hang"
    text, begin = None, time.monotonic()
    try:
        timeout = 1 if how == "hang" else 30
        with communicators.create("world", rank, world, id=id, engine="nccl", library=library, timeout=timeout) as made:
            if how == "dies" and rank == 1:
                time.sleep(0.5)
                os._exit(1)
            if how == "error":
                os.environ["FAKE_NCCL"] = "error"
            if how == "late":
                made.wait(lambda: False, timeout=0.5)
            begin = time.monotonic()
            while how != "good" and time.monotonic() - begin < SECONDS:
                made.check()
                time.sleep(0.02)
            made.wait(lambda: True)
    except native.LeanfleetError as error:
        text = str(error)
    return text, time.monotonic() - begin, fake.fake_aborts(), fake.fake_destroys()


def by_windows(rank, world, id, library, folder, seed):
    """Exchanges on the simulated GPU of this process, through windows of shared memory: (how many more went so than were called
    for, the largest error of a sum in units of the type's rounding, digests of the sums)."""
    os.environ |= {"LEANFLEET_LIBRARY_DIR": folder, "LEANFLEET_SIMULATED_SEED": str(seed + rank)}
    draw, worst, alike, calls = np.random.default_rng(seed), 0.0, [], 0
    with communicators.create("world", rank, world, id=id, engine="nccl", library=library, timeout=30) as made:
        for turn in range(60):  # numbers of exchanges begin anew on the way, and slots are cleared
            name = list(TYPES)[turn % 3]
            count = int(draw.choice((1, 3, 4, 7, 64, 129, 1000))) if turn % 30 else 32768 // np.dtype(TYPES[name]).itemsize
            parts = [contribution(r + 10 * turn, count, name) for r in range(world)]
            if turn % 3 or turn < 15:
                found = call("AllReduce", parts[rank].copy(), {}, in_place=turn % 2 == 0, device="cuda")
                worst, calls = max(worst, error_of_sum(found, parts, name)), calls + 1
                alike.append(digest(found))
            if turn % 3 == 0:
                found = call("AllGather", parts[rank].reshape(1, -1), {"world": world}, world, device="cuda")
                assert [digest(row) for row in found] == [digest(p) for p in parts], (turn, name, count)
                calls += 1
        return made.direct - calls, worst, alike


def without_windows(rank, world, ids, library, folder, how):
    """Rank 1 cannot reach the others' memory, or does not want to: how many exchanges went through windows, for each of several
    communicators."""
    os.environ["LEANFLEET_LIBRARY_DIR"] = folder
    if rank == 1:
        os.environ |= {"cannot": {"LEANFLEET_SIMULATED_NO_PEERS": "1"}, "unwilling": {"LEANFLEET_DIRECT": "0"}}[how]
    found, place = [], os.environ["FAKE_NCCL_FOLDER"]
    for number, id in enumerate(ids):
        os.environ["FAKE_NCCL_FOLDER"] = f"{place}/{number}"
        with communicators.create("world", rank, world, id=id, engine="nccl", library=library, timeout=30) as made:
            call("AllReduce", np.ones(5, np.float32), {}, device="cuda")
            found.append(made.direct)
    return found


def ends_while_windows_wait(rank, world, id, library, folder):
    """Rank 1 ends while rank 0's kernel waits for its lines: what rank 0 is told by the next calls, and after how long."""
    os.environ["LEANFLEET_LIBRARY_DIR"] = folder
    communicators.create("world", rank, world, id=id, engine="nccl", library=library, timeout=120)
    x = np.ones(1000, np.float32)
    call("AllReduce", x, {}, device="cuda")
    if rank == 1:
        os._exit(1)
    begin, texts = time.monotonic(), []
    while len(texts) < 2 and time.monotonic() - begin < SECONDS:
        try:
            call("AllReduce", x, {}, device="cuda")
        except native.LeanfleetError as error:
            texts.append(str(error))
    return texts, time.monotonic() - begin


def attention_over_ranks(rank, world, id, library, folder, device, seed):
    """LeanAttention over keys that ranks share, against one call over all of them in float64: the largest error in units of what
    the type's rounding allows."""
    import torch

    from leanfleet import spec
    from leanfleet.export import reference
    from support.kernels import run_kernel

    if folder is not None:
        os.environ |= {"LEANFLEET_LIBRARY_DIR": folder, "LEANFLEET_SIMULATED_SEED": str(seed + rank)}
    simulated = device == "cuda" and folder is not None
    if device == "cuda" and not simulated:
        torch.cuda.set_device(rank)
    assert "world" in [a.name for a in spec.all_specs()["LeanAttention"].attrs]
    torch.set_num_threads(1)
    draw, worst, merges = torch.Generator().manual_seed(seed), 0.0, 0
    engine = "nccl" if device == "cuda" else "shared_memory"
    given = {} if library is None else {"library": library}
    with communicators.create("world", rank, world, id=id, engine=engine, timeout=30, **given) as made:

        def pick(*choices):
            return choices[int(torch.randint(len(choices), (), generator=draw))]

        for turn in range(12 if simulated else 30):
            dtype = (torch.float32, torch.float16, torch.bfloat16)[turn % 3]
            batch, kv_heads, group, width = (
                pick(1, 3),
                pick(1, 2),
                pick(1, 3, 4),
                pick(64, 128) if simulated else pick(16, 64, 128),
            )
            capacity, layout, tokens = world * pick(8, 40), pick("bhnd", "bnhd"), pick(1, 1, 4)
            query = torch.randn(batch, kv_heads * group, tokens, width, generator=draw)
            key, value = torch.randn(2, batch, kv_heads, capacity, width, generator=draw)
            sinks = torch.randn(kv_heads * group, generator=draw) if pick(True, False) else None
            # Of each rank the first so many of its share; some have none.
            share = capacity // world
            lens = torch.randint(tokens, share + 1, (world, batch), generator=draw, dtype=torch.int32)
            lens *= torch.randint(0, 2, (world, batch), generator=draw, dtype=torch.int32)
            lens[:, 0] *= pick(0, 1)  # a request of which nobody has a key
            query, key, value = (x.to(dtype) for x in (query, key, value))
            if simulated:  # which has the kernels of quantised caches alone
                kept = [(x.float() * 30).round().clamp(-128, 127).to(torch.int8) for x in (key, value)]
                key, value = (x.double() / 30 for x in kept)
            seen = torch.arange(share) < lens.T[:, :, None]  # [batch,world,share]
            order = torch.argsort(~seen.reshape(batch, -1), dim=1, stable=True)[:, None, :, None]
            whole = [x.double().gather(2, order.expand(x.shape)) for x in (key, value)]
            exact, exact_lse = reference.lean_attention(
                query.double(),
                *whole,
                lens.sum(0, dtype=torch.int32),
                sinks=None if sinks is None else sinks.double(),
                causal=0,
            )
            size, _ = reference.lean_attention(
                query.double(), whole[0], whole[1].abs(), lens.sum(0, dtype=torch.int32), causal=0
            )
            swap = (lambda x: x.transpose(1, 2).contiguous()) if layout == "bnhd" else (lambda x: x)
            caches = kept if simulated else (key, value)
            own = [x[:, :, rank * share : (rank + 1) * share].contiguous() for x in caches]
            inputs = {"query": swap(query), "key_cache": own[0], "value_cache": own[1], "seq_lens": lens[rank].contiguous()}
            inputs |= {"sinks": sinks} | (
                dict.fromkeys(("key_scale", "value_scale"), torch.tensor([1 / 30])) if simulated else {}
            )
            if device == "cuda" and not simulated:
                inputs = {n: None if x is None else x.cuda() for n, x in inputs.items()}
            attrs = {"world": world, "causal": 0, "layout": layout}
            found = run_kernel("LeanAttention", inputs, attrs, simulated=simulated)
            output, lse = (swap(found[n].cpu()) for n in ("output", "lse"))
            eps = torch.finfo(dtype).eps
            allowed = 4 * eps * (size + exact.abs()) + 1e-5
            assert torch.equal(torch.isinf(lse), torch.isinf(exact_lse)) and not output.isnan().any()
            finite = ~torch.isinf(exact_lse)
            assert (lse.double() - exact_lse)[finite].abs().le(1e-4 + 4 * eps * (dtype != torch.float32)).all()
            worst, merges = max(worst, float(((output.double() - exact).abs() / allowed).max())), merges + 1
        return worst, merges, made.direct


def token_shards(rank, world, id, seed, device="cpu"):
    """The largest errors of linear attention over a text that ranks share by tokens, outputs and gradients, against one scan of
    all of it in float64, in units of what the type's rounding allows; and how many calls there were."""
    import torch

    from leanfleet.export import all_reduce, decay_over_ranks, normalized_over_ranks, reference

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    draw, worst, calls = torch.Generator().manual_seed(seed), 0.0, 0
    least = {"cpu": 1e-6, "cuda": 2e-5}[device]  # float32 is rounded to three parts of 16 bits on tensor cores
    engine = {"cpu": "shared_memory", "cuda": "nccl"}[device]
    with communicators.create("world", rank, world, id=id, engine=engine, timeout=30):

        def pick(*choices):
            return choices[int(torch.randint(len(choices), (), generator=draw))]

        def normal(*shape):
            return torch.randn(*shape, generator=draw)

        def whole(pieces, axis):
            return torch.cat([piece.double() for piece in pieces], axis)

        for turn in range(24):
            dtype = (torch.float32, torch.bfloat16, torch.float16)[turn % 3]
            batch, heads, group, width, wide = pick(1, 2), pick(1, 2), pick(1, 3), pick(8, 24), pick(8, 16)
            lens = [pick(1, 7, 40) for _ in range(world)]
            layout, kind = pick("bhnd", "bnhd"), pick("none", "head", "token", "resets", "normalized")
            if kind == "normalized":
                layout = "bhnd"
            axis = 2 if layout == "bhnd" else 1

            queries, values = heads * group, heads if kind == "normalized" else heads * group
            # The last one is the gradient of the output.
            sizes = ((queries, width), (heads, width), (values, wide), (queries, 1), (queries, wide))
            drawn = [[normal(batch, count, n, columns).to(dtype) for n in lens] for count, columns in sizes]
            if layout == "bnhd":
                drawn = [[x.transpose(1, 2).contiguous() for x in pieces] for pieces in drawn]
            query, key, value, each, outer = drawn
            decays = None
            if kind == "head":
                decays = [-normal(queries).abs()] * world
            elif kind in ("token", "resets"):
                decays = [-x[..., 0].float().abs() for x in each]
            if kind == "resets":  # now and then what was before counts for nothing
                decays = [x.masked_fill(x < -1.5, -torch.inf) for x in decays]
            asked = [query, key, value, *([decays] if decays else [])]
            exact = [whole(pieces, axis) for pieces in asked[:3]]
            if decays:
                exact.append(decays[0].double() if kind == "head" else whole(decays, axis))
            exact = [x.requires_grad_() for x in exact]
            own = [pieces[rank].to(device, copy=True).requires_grad_() for pieces in asked]
            apart = []  # outputs whose gradients are not looked at
            if kind == "normalized":
                expected = reference.normalized_linear_attention(*exact, normalize_qk=1)[0]
                found = normalized_over_ranks(*own)
                with torch.no_grad():  # another way
                    apart.append(normalized_over_ranks(*own))
            else:
                decay = exact[3] if decays else None
                expected, end = reference.causal_linear_decay(*exact[:3], decay, return_state=1, scale=0.3, layout=layout)[:2]
                given, options = (*own[:3], own[3] if decays else None), dict(scale=0.3, layout=layout)
                found, state = decay_over_ranks(*given, **options, return_state=True)
                apart.append(found.detach())
                found = decay_over_ranks(*given, **options)  # in 16 bits another way
                worst = max(worst, float((state.cpu() - end).detach().abs().max() / (1e-5 + 1e-5 * end.detach().abs().max())))
            expected.backward(whole(outer, axis))
            found.backward(outer[rank].to(device))
            begin = sum(lens[:rank])
            eps, checked = torch.finfo(dtype).eps, [(x, expected.detach()) for x in (found.detach(), *apart)]
            checked += [(x.grad, y.grad) for x, y in zip(own[:3], exact[:3])]
            if kind == "token":
                checked.append((own[3].grad, exact[3].grad))
            for ours, right in checked:
                ours, right = ours.cpu(), right.narrow(axis, begin, lens[rank])
                size = max(float(right.abs().max()), 1.0)
                worst = max(worst, float((ours.double() - right).abs().max()) / (4 * max(eps, least) * size))
                assert ours.shape == right.shape and not ours.isnan().any()
            if kind == "head":  # ranks' parts of one sum
                total = all_reduce(own[3].grad.contiguous()).cpu()
                right = exact[3].grad
                worst = max(
                    worst, float((total - right).abs().max() / (16 * max(eps, least) * max(1.0, float(right.abs().max()))))
                )
            calls += 1
    return worst, calls


def long_token_shards(rank, world, id, seed):
    """The largest error of gradients of normalized_over_ranks over a text of some thousand tokens with small gradients and values
    that have a mean, in units of twice what the operator over all of it loses and four roundings of the largest number."""
    import torch

    from leanfleet.export import normalized_linear_attention, normalized_over_ranks, reference

    torch.set_num_threads(1)
    draw, worst = torch.Generator().manual_seed(seed), 0.0
    with communicators.create("world", rank, world, id=id, engine="shared_memory", timeout=60):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            shapes = (2, 8), (1, 8), (1, 8), (2, 8)
            query, key, value, outer = (torch.randn(1, heads, 1200 * world, width, generator=draw) for heads, width in shapes)
            given, outer = [x.to(dtype) for x in (query, key + 1, value + 1)], (1e-2 * outer).to(dtype)
            exact, whole = ([x.to(t, copy=True).requires_grad_() for x in given] for t in (torch.float64, dtype))
            own = [x.chunk(world, 2)[rank].clone().requires_grad_() for x in given]
            reference.normalized_linear_attention(*exact, normalize_qk=1)[0].backward(outer.double())
            normalized_linear_attention(*whole, normalize_qk=1)[0].backward(outer)
            normalized_over_ranks(*own).backward(outer.chunk(world, 2)[rank])
            for ours, plain, right in zip(own, whole, exact, strict=True):
                eps, lost = max(torch.finfo(dtype).eps, 1e-6), float((plain.grad - right.grad).abs().max())
                right = right.grad.chunk(world, 2)[rank]
                allowed = 2 * lost + 4 * eps * float(right.abs().max())
                worst = max(worst, float((ours.grad - right).abs().max()) / allowed)
    return worst


def token_shards_as_nodes(rank, world, id, folder):
    """Exported layers over a text that ranks share, one file for all, in ONNX Runtime: the largest difference to PyTorch's over
    all of it, in 16 bits over the type's precision."""
    import onnxruntime
    import torch

    from leanfleet import ort_ops
    from leanfleet.export import (
        causal_linear_decay,
        decay_over_ranks,
        export,
        normalized_linear_attention,
        normalized_over_ranks,
    )

    torch.manual_seed(3)
    query, key, value = torch.randn(3, 1, 2, 9 * world, 8)
    decay = torch.tensor([-0.2, -0.01])

    class Layer(torch.nn.Module):
        def forward(self, query, key, value, decay, rank):
            whose = dict(rank=rank, world=world)
            halves = decay_over_ranks(query.half(), key.half(), value.half(), decay, **whose)
            normalized = normalized_over_ranks(query, key, value, **whose)
            return decay_over_ranks(query, key, value, decay, **whose), normalized, halves.float()

    own = [x[:, :, 9 * rank : 9 * rank + 9].contiguous() for x in (query, key, value)]
    path = f"{folder}/layer.onnx"
    with communicators.create("world", rank, world, id=id, engine="shared_memory", timeout=30):
        names = ["query", "key", "value", "decay", "rank"]
        given = (*own, decay, torch.tensor([rank]))
        if rank == 0:
            export(Layer().eval(), given, path, input_names=names)
            open(f"{folder}/done", "w").close()
        while not os.path.exists(f"{folder}/done"):
            time.sleep(0.05)
        settings = onnxruntime.SessionOptions()
        ort_ops.register(settings)
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        found = session.run(None, {n: x.numpy() for n, x in zip(names, given)})
    decayed = causal_linear_decay(query, key, value, decay)
    right = decayed, normalized_linear_attention(query, key, value, normalize_qk=True)[0], decayed
    off = [
        float((torch.from_numpy(x) - y[:, :, 9 * rank : 9 * rank + 9]).abs().max()) for x, y in zip(found, right, strict=True)
    ]
    return max(*off[:2], off[2] * 2.0**-8 / float(decayed.abs().max()))
