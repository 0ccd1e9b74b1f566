"""Trains Pythia's shapes over bytes on several GPUs, by softmax, our linear attention and flash-linear-attention (fla).

    python -m bench.models.train_scale train OUT.json --shape pythia-160m --ways ours,softmax,fla --gpus 4 --tokens 100e6
    python -m bench.models.train_scale speed OUT.json --shapes pythia-160m,pythia-410m,pythia-1.4b --gpus 4
    python -m bench.models.train_scale validate DIR --providers CPU,CUDA --into OUT.json    after train ... --checkpoint-to DIR
    python -m bench.models.train_scale add OUT.json MORE.json    ways that were trained later, over the same text, on their own

The shapes are Pythia's (parallel residual, rotary encoding of a quarter of each head, GELU, biases, head not tied), but for the
vocabulary: bytes, 256 of them, so that pythia-160m has 85 million parameters, without the 77 million of Pythia's two tables of
words. Ways differ in the attention between the projections alone: the same weights at the start, the same text in the same
order, bfloat16 autocast over float32 weights, DistributedDataParallel with one process a GPU (started here, or by torchrun).

ours: NormalizedLinearAttention. softmax: PyTorch's, with the faster of its flash and cuDNN kernels, timed at the start. fla:
chunk_linear_attn, normalised, of elu(x) + 1, the positive features of fla's own layer. fla-unit: the same of unit rows, as
train_parity times it, whose sums of scores may be 0: not for curves. ours-gated: CausalLinearDecay, whose decays come from the
hidden states, one a head and token as in Mamba-2, and a norm of heads; simple-gla: fla's chunk_simple_gla in its place. gla:
fla's chunk_gla, a gate a column, and the norm. pytorch: ours in plain float32 PyTorch. fla's kernels are tuned over few
configurations (bench.kernels.timing.quick_tuning).

Text: sources and texts of the interpreter's standard library, CUDA's headers and installed packages, each content once; one
file of 50 is held out. The JSON names both by hash: other machines have other texts.

Clocks start with a way's model. setup_seconds is until its first step: weights, compilers, two steps that are forgotten.
seconds are without validation. tokens_per_second: from the first step to the end; steady_tokens_per_second: by the median step.
peak_bytes: PyTorch's allocator, the fullest GPU. OUT.json is written as it goes, with a table in OUT.md, so that a run that is
cut off leaves what it had: a way's curves and figures until its last validation. --limit-seconds ends everything cleanly. A way
that does not run is left out with the reason; a rank that fails later ends all.

The order of the text does not depend on how many GPUs share a batch, so that ways may be trained one by one: train ... --like
OUT.json stops before it trains where the text, the order or the settings are not those of a report. add puts such rows into it.
They say which run they are of; the plot has their losses, and sets neither their speeds nor their clock beside the others'.
plot_training.py draws the results.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import site
import socket
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, elu, gelu, logsigmoid, rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from bench.kernels.timing import FLA_TUNING, quick_tuning
from bench.models import train_parity
from leanfleet import files, ranks
from leanfleet.export import causal_linear_decay, normalized_linear_attention, torch_ops
from leanfleet.export.linear_attention import rotary_tables, rotate

VOCABULARY = 256  # bytes
SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".cuh", ".md", ".rst", ".txt", ".json")
MOST_FILE_BYTES = 1 << 20  # larger ones are tables
HELD_OUT = 50  # one file of so many is for validation
READERS = 32  # threads
GATE_RANK = 16  # of gla's gates
GATE_DIVISOR = 16  # of the logarithms of gates, as in fla's layer
BEGUN = "TRAIN_SCALE_BEGUN"  # tells ranks when their parent started, in seconds as of time.time
WARM = 10  # steps of a training run that its steady speed leaves out


@dataclass(frozen=True)
class Shape:
    """rate: the peak learning rate, Pythia's. micro_tokens: what a GPU of 80 GB takes at once; in bytes a token keeps about
    33 x hidden x layers for the backward by ours, and up to half as much again by fla."""

    layers: int
    hidden: int
    heads: int
    rate: float
    micro_tokens: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "pythia-160m": Shape(12, 768, 12, 6e-4, 65536),
    "pythia-410m": Shape(24, 1024, 16, 3e-4, 32768),
    "pythia-1.4b": Shape(24, 2048, 16, 2e-4, 16384),
    "tiny": Shape(2, 64, 2, 3e-3, 1024),  # for tests
}


# Attentions: query, key, value [B,N,H,D] of one type, and logarithms of gates [B,N,H,D] or [B,N,H,1]; output [B,N,H,D]


def ours(query, key, value, gate):
    return normalized_linear_attention(query, key, value, normalize_qk=True, layout="bnhd")[0]


def softmax(query, key, value, gate):
    rows = (t.transpose(1, 2) for t in (query, key, value))
    return scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)


def fla(query, key, value, gate):
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(elu(query) + 1, elu(key) + 1, value, scale=1.0, normalize=True)[0]


def heads_first(mixer):
    """A mixer of train_parity, which takes [B,H,N,D], as one of these."""
    return lambda query, key, value, gate: mixer(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)


def with_heads_normalised(attend):
    def normalised(query, key, value, gate):
        output = attend(query, key, value, gate)
        return rms_norm(output, output.shape[-1:])

    return normalised


def ours_gated(query, key, value, gate):
    scale = query.shape[-1] ** -0.5
    return causal_linear_decay(query, key, value, gate.squeeze(-1), scale=scale, layout="bnhd")


def simple_gla(query, key, value, gate):
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(query, key, value, gate.squeeze(-1))[0]


def gla(query, key, value, gate):
    from fla.ops.gla import chunk_gla

    return chunk_gla(query, key, value, gate)[0]


@dataclass(frozen=True)
class Way:
    """gates: None, "heads" (one a head) or "columns"."""

    attend: Callable
    says: str
    needs_fla: bool = False
    gates: str | None = None


WAYS = {
    "ours": Way(ours, "leanfleet NormalizedLinearAttention, unit rows"),
    "softmax": Way(softmax, "scaled_dot_product_attention"),
    "fla": Way(fla, "flash-linear-attention chunk_linear_attn, normalised, elu(x) + 1", True),
    "fla-unit": Way(
        heads_first(train_parity.MIXERS["fla"]), "flash-linear-attention chunk_linear_attn, normalised, unit rows", True
    ),
    "ours-gated": Way(
        with_heads_normalised(ours_gated), "leanfleet CausalLinearDecay, a gate a head, heads normalised", gates="heads"
    ),
    "simple-gla": Way(
        with_heads_normalised(simple_gla),
        "flash-linear-attention chunk_simple_gla, a gate a head, heads normalised",
        True,
        "heads",
    ),
    "gla": Way(
        with_heads_normalised(gla), "flash-linear-attention chunk_gla, gates of rank 16, heads normalised", True, "columns"
    ),
    "pytorch": Way(heads_first(train_parity.MIXERS["pytorch"]), "the function of ours in float32 PyTorch, in chunks"),
}


# The model


def narrow(x):
    """In autocast's type where it is on: a norm's float32 output is converted once, not by each layer that reads it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def turned(x, cos, sin):
    """Heads whose first columns are rotated."""
    width = 2 * cos.shape[-1]
    return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], -1)


def before_attention(block, x, cos, sin):
    """(query, key, value, gates or None, the MLP's output)"""
    h = narrow(block.norm1(x))
    query, key, value = (p(h).unflatten(-1, (-1, block.head_dim)) for p in (block.query, block.key, block.value))
    gate = None
    if block.gate is not None:
        gate = (logsigmoid(block.gate(h).float()) / GATE_DIVISOR).unflatten(-1, (query.shape[2], -1))
    fed = block.down(gelu(block.up(narrow(block.norm2(x)))))
    return turned(query, cos, sin), turned(key, cos, sin), value, gate, fed


def after_attention(block, x, mixed, fed):
    return x + block.out(mixed.flatten(2)) + fed


class Block(nn.Module):
    def __init__(self, shape, way, compiled):
        super().__init__()
        hidden = shape.hidden
        self.head_dim, self.attend = shape.head_dim, WAYS[way].attend
        self.before, self.after = outside_attention(compiled)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.gate = None
        if WAYS[way].gates == "columns":
            self.gate = nn.Sequential(nn.Linear(hidden, GATE_RANK, bias=False), nn.Linear(GATE_RANK, hidden))
        elif WAYS[way].gates == "heads":
            self.gate = nn.Linear(hidden, shape.heads)

    def forward(self, x, cos, sin):
        query, key, value, gate, fed = self.before(self, x, cos, sin)
        return self.after(self, x, self.attend(query, key, value, gate).to(value.dtype), fed)


@functools.cache
def outside_attention(compiled):
    """What comes before and after attention, also compiled: the same code for all ways and layers."""
    both = before_attention, after_attention
    return tuple(torch.compile(f, dynamic=False) for f in both) if compiled else both


class Model(nn.Module):
    """ids int64 [B,N] to logits float32 [B,N,256]."""

    def __init__(self, shape, way, compiled=False, checkpointed=False):
        super().__init__()
        self.rotated, self.checkpointed = shape.head_dim // 4, checkpointed
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, way, compiled) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        tables = rotary_tables(torch.arange(ids.shape[1], device=ids.device), self.rotated, layout="bnhd")
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, *tables, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, *tables)
        return self.head(narrow(self.norm(x))).float()


@torch.no_grad()
def initialise(model, shape, seed):
    """Pythia's start. Each weight is drawn by its name, so that ways with more weights share the others'."""
    wide, into_residual = math.sqrt(2 / (5 * shape.hidden)), 2 / shape.layers / math.sqrt(shape.hidden)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        generator = torch.Generator(weight.device).manual_seed(seed + zlib.crc32(name.encode()))
        weight.normal_(0, into_residual if ".out." in name or ".down." in name else wide, generator=generator)


# Ranks


@dataclass(frozen=True)
class Team:
    """This process among all. begun: time.time() of the start of everything."""

    rank: int
    world: int
    device: torch.device
    begun: float

    def say(self, text):
        if self.rank == 0:
            print(f"[{time.time() - self.begun:5.0f} s] {text}", flush=True)

    def reduced(self, tensor, how="SUM"):
        """Over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
        return tensor

    def shared(self, value):
        """Rank 0's value, for all."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def agreed(self, problem):
        """The first rank's problem, told to all; None: no rank has one. All ranks must call it."""
        flag = torch.tensor([problem is not None], dtype=torch.int32, device=self.device)
        if not self.reduced(flag, "MAX").item():
            return None
        told = [problem]
        if self.world > 1:
            told = [None] * self.world
            dist.all_gather_object(told, problem)
        return next(p for p in told if p is not None)

    def late(self, seconds):
        """Whether rank 0 finds that so many seconds have gone since the start of everything. All ranks must call it."""
        return seconds is not None and self.shared(time.time() - self.begun > seconds)


@contextlib.contextmanager
def joined(args):
    place = ranks.place() or ranks.Place(0, 1, 0)
    device = torch.device(args.device, place.local) if args.device == "cuda" else torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world))
    team = Team(place.rank, place.world, device, float(os.environ.get(BEGUN, time.time())))
    if place.world == 1:
        yield team
        return
    more = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(rank=place.rank, world_size=place.world, timeout=timedelta(seconds=300), **more)
    yield team
    dist.barrier()  # rank 0 writes files while the others are through
    dist.destroy_process_group()


def on_all(args, argv, work):
    """Runs work(args, team) on all ranks: in processes that are started here, unless this is one of them."""
    if args.device == "cuda" and torch.cuda.device_count() < args.gpus:
        raise SystemExit(f"train_scale: {args.gpus} GPUs are needed; there are {torch.cuda.device_count()}")
    if ranks.place() is None and args.gpus > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), BEGUN: str(time.time())}
        seconds = None if args.limit_seconds is None else args.limit_seconds + 90  # it ends itself; this is for ranks that hang
        try:
            ranks.launch(
                ranks.python("-m", "bench.models.train_scale", *argv), args.gpus, environment=environment, seconds=seconds
            )
        except ranks.RankError as error:
            raise SystemExit(f"train_scale: {error}") from None
        return
    ranks.end_with_parent()
    with joined(args) as team:
        work(args, team)


# The text


def text_roots():
    """Folders with text, in order."""
    paths = sysconfig.get_paths()
    packages = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [Path(p) for p in (paths["stdlib"], "/usr/local/cuda/include", *packages) if Path(p).is_dir()]


def text_files(roots):
    """Files of text below the roots: root by root, sorted."""
    tops = list(dict.fromkeys(os.path.realpath(root) for root in roots))
    found = []
    for top in tops:
        here = []
        for folder, folders, names in os.walk(top):
            # Packages may be installed below the standard library.
            folders[:] = [n for n in folders if n != "__pycache__" and f"{folder}/{n}" not in tops]
            here += [f"{folder}/{n}" for n in names if n.endswith(SUFFIXES)]
        found += sorted(here)
    return found


def read_file(path):
    """(content, hash), or None for what is no text of a fair size."""
    try:
        if not 0 < os.path.getsize(path) <= MOST_FILE_BYTES:
            return None
        content = Path(path).read_bytes()
    except OSError:
        return None
    return content, hashlib.sha256(content).digest()


def read_text(roots, limit):
    """(training text, validation text, uint8 tensors; what identifies them)"""
    began, seen, size = time.perf_counter(), set(), 0
    parts = {"training": [], "validation": []}
    paths = text_files(roots)
    with ThreadPoolExecutor(READERS) as pool:
        for begin in range(0, len(paths), 512):
            for found in pool.map(read_file, paths[begin : begin + 512]):
                if found is None or found[1] in seen or size >= limit:
                    continue
                content, digest = found
                seen.add(digest)
                size += len(content)
                held_out = int.from_bytes(digest[:4], "big") % HELD_OUT == 0
                parts["validation" if held_out else "training"].append(content)
            if size >= limit:
                break
    facts, tensors = {}, []
    for name, contents in parts.items():
        joined_text = bytearray(b"\0".join(contents))
        digest = hashlib.sha256(joined_text).hexdigest()
        facts[name] = {"files": len(contents), "bytes": len(joined_text), "sha256": digest}
        tensors.append(torch.frombuffer(joined_text, dtype=torch.uint8) if joined_text else torch.zeros(0, dtype=torch.uint8))
    return *tensors, {**facts, "read_seconds": round(time.perf_counter() - began, 2)}


def text_of_all(args, team):
    """Rank 0's text on all ranks: (training text on the device, validation windows, facts)."""
    context = args.context
    if team.rank == 0:
        train, validation, facts = read_text([Path(p) for p in args.text] or text_roots(), int(args.text_bytes))
        found = {name: max(0, (len(t) - 1) // context) for name, t in (("training", train), ("validation", validation))}
        if not all(found.values()):
            raise SystemExit(f"train_scale: too little text: {found} windows of {context} bytes")
        count = min(args.validation_windows, found["validation"])
        stride = (len(validation) - context - 1) // count
        windows = torch.stack([validation[i * stride : i * stride + context + 1] for i in range(count)])
        facts["validation"]["windows"] = count
        tensors = [train.to(team.device), windows.to(team.device)]
    else:
        tensors, facts = [], None
    sizes, facts = team.shared(([t.shape for t in tensors], facts))
    if team.rank:
        tensors = [torch.empty(size, dtype=torch.uint8, device=team.device) for size in sizes]
    if team.world > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
    return *tensors, facts


def order_of(windows, count, seed):
    """Numbers of `count` windows: all in an order drawn anew each time round."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(windows, generator=generator) for _ in range(-(-count // windows))]
    return torch.cat(rounds)[:count]


def batch_of(text, order, context):
    """int64 [B,context + 1]"""
    places = order.unsqueeze(1) * context + torch.arange(context + 1, device=text.device)
    return text[places].long()


# Training


def fastest_sdpa(args, team, shape, sequences, context):
    """(SDPBackend or None, its name, {name: milliseconds of a forward and backward or why not}); all ranks choose the same."""
    if team.device.type != "cuda" or args.dtype == "float32":
        return None, "PyTorch's choice", {}
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    times, told = torch.full((2,), math.inf, device=team.device), {}
    size = (sequences, context, shape.heads, shape.head_dim)
    rows = [torch.randn(size, device=team.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(size, device=team.device, dtype=torch.bfloat16)
    for i, backend in enumerate(backends):
        name = backend.name.removesuffix("_ATTENTION").lower()
        try:
            with sdpa_kernel(backend):
                marks = []
                for _ in range(8):
                    torch.autograd.grad(softmax(*rows, None), rows, gradient)
                    marks.append(mark(team.device))
            torch.cuda.synchronize()
            times[i] = 1000 * statistics.median(between(*pair) for pair in itertools.pairwise(marks[2:]))
            told[name] = round(times[i].item(), 3)
        except Exception as error:
            told[name] = said(error)
    times = team.reduced(times, "MAX").tolist()
    best = times.index(min(times))
    if math.isinf(times[best]):
        raise RuntimeError(f"neither of PyTorch's fused softmax attentions runs: {told}")
    return backends[best], backends[best].name.removesuffix("_ATTENTION").lower(), told


def said(error):
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def mark(device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first, second):
    """Seconds; events of a GPU that is through."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


class Training:
    """A way's model with what trains it, on this rank."""

    def __init__(self, args, team, shape, way, micro):
        self.args, self.team, self.shape, self.micro = args, team, shape, micro
        with torch.device("meta"):
            model = Model(shape, way, args.compile, args.checkpoint)
        self.model = model.to_empty(device=team.device)
        initialise(model, shape, args.seed)
        self.parallel = model
        if team.world > 1:
            ids = [team.device.index] if team.device.type == "cuda" else None
            self.parallel = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, shape.rate, betas=(0.9, 0.95), fused=team.device.type == "cuda")

    def autocast(self):
        return torch.autocast(self.team.device.type, dtype=torch.bfloat16, enabled=self.args.dtype == "bfloat16")

    def step(self, batch, rate, together=True):
        """This rank's mean loss, on the device. together: with the other ranks' gradients."""
        parts = batch.split(self.micro)
        total = torch.zeros((), device=batch.device)
        for i, part in enumerate(parts):
            alone = self.team.world > 1 and not (together and i == len(parts) - 1)
            with self.parallel.no_sync() if alone else contextlib.nullcontext():
                with self.autocast():
                    logits = self.parallel(part[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / len(parts)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def rehearse(self, batch):
        """Two steps on this rank alone, after which everything is as before: kernels are compiled, and memory is asked for as
        in training. What does not run fails here, where no other rank waits for it."""
        for _ in range(2):
            self.step(batch, self.shape.rate, together=False)
        train_parity.synchronize(self.team.device)
        self.optimizer.state.clear()
        initialise(self.model, self.shape, self.args.seed)

    @torch.no_grad()
    def validation_loss(self, windows):
        """Mean nats a byte over windows, of which each rank takes its share."""
        sums = torch.zeros(2, dtype=torch.float64, device=windows.device)
        for part in windows[self.team.rank :: self.team.world].split(self.micro):
            if not len(part):  # fewer windows than ranks
                continue
            part = part.long()
            with self.autocast():
                logits = self.model(part[:, :-1])
            sums[0] += cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            sums[1] += part[:, 1:].numel()
        total, count = self.team.reduced(sums).tolist()
        return total / count


@contextlib.contextmanager
def prepared(args, team, shape, way, size, batch):
    """(Training after its rehearsal, facts), or (None, facts with the reason under "refused"), the same on all ranks.

    size: sequences at once, and their tokens; batch: makes the rehearsal's."""
    facts = {"attention": WAYS[way].says}
    training, problem, backend = None, None, None
    try:
        if WAYS[way].needs_fla and team.device.type != "cuda":
            raise RuntimeError("flash-linear-attention's kernels need a GPU")
        if way == "softmax":
            backend, name, times = fastest_sdpa(args, team, shape, *size)
            facts |= {"attention": f"{WAYS[way].says}, {name}", "attention_ms": times}
    except Exception as error:
        problem = said(error)
    chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
    with chosen, quick_tuning(WAYS[way].needs_fla):
        if (problem := team.agreed(problem)) is None:
            try:
                training = Training(args, team, shape, way, size[0])
            except Exception as error:
                problem = said(error)
            problem = team.agreed(problem)
        # Triton's kernels are compiled by one rank, and then found on disk by the others.
        for turn in [team.rank == 0, team.rank > 0] if WAYS[way].needs_fla else [True]:
            if problem is None:
                try:
                    if turn:
                        training.rehearse(batch())
                except Exception as error:
                    problem = said(error)
                problem = team.agreed(problem)
        if problem is None:
            facts["parameters"] = sum(p.numel() for p in training.model.parameters())
            yield training, facts
        else:
            training = None
            yield None, {**facts, "refused": problem}
    training = None


def emptied(team):
    """What a way leaves behind is given back, so that the next one's peak is its own."""
    gc.collect()
    if team.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(team):
    """Of the fullest GPU; None on the CPU."""
    if team.device.type != "cuda":
        return None
    return int(team.reduced(torch.tensor(torch.cuda.max_memory_allocated(), device=team.device), "MAX").item())


def train_way(args, team, way, text, windows, order, row, save):
    """Fills a row of the report, which save() writes out in between."""
    begun = time.perf_counter()
    shape = SHAPES[args.shape]
    own = args.batch // team.world
    steps = len(order) // args.batch
    warmup = min(100, max(1, steps // 10))

    def batch(step):
        first = step * args.batch + team.rank * own
        return batch_of(text, order[first : first + own], args.context)

    size = args.micro_batch, args.context
    with prepared(args, team, shape, way, size, lambda: batch(0)) as (training, facts):
        row |= facts
        if training is None:
            del row["unfinished"]
            return
        train_parity.synchronize(team.device)
        if team.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row |= {"setup_seconds": time.perf_counter() - begun, "steps": 0, "tokens": 0}
        row |= {"train": {"step": [], "seconds": [], "loss": []}, "validation": {"step": [], "seconds": [], "loss": []}}
        validated, durations, losses = 0.0, [], []
        checks = {steps * i // args.validations for i in range(args.validations)}

        def validate(step):
            nonlocal validated, marks
            train_parity.synchronize(team.device)
            start = time.perf_counter()
            found = training.validation_loss(windows)
            train_parity.synchronize(team.device)
            seconds = start - begun - validated
            record(row["validation"], step, seconds, found)
            if step:
                row.update(summary(args, team, row, durations, validated, seconds))
            save()
            validated += time.perf_counter() - start
            marks = [mark(team.device)]
            team.say(f"{way:9} step {step:5} of {steps}  {seconds:6.1f} s  validation {found:.4f}")

        marks = [mark(team.device)]
        for step in range(steps):
            if step in checks:
                read_marks(team, marks, durations)
                validate(step)
            rate = train_parity.learning_rate(step, steps, args.rate, args.rate / 10, warmup)
            losses.append(training.step(batch(step), rate))
            marks.append(mark(team.device))
            if step and (step + 1) % args.read_every and step + 1 < steps:
                continue
            spent = time.time() - team.begun, (time.perf_counter() - begun - validated) / 60
            over = any(most is not None and now > most for now, most in zip(spent, (args.limit_seconds, args.minutes)))
            *found, over = team.reduced(torch.stack([*losses, losses[0].new_tensor(float(over))])).div(team.world).tolist()
            train_parity.synchronize(team.device)
            record(row["train"], step + 1, time.perf_counter() - begun - validated, statistics.fmean(found))
            row |= {"steps": step + 1, "tokens": (step + 1) * args.batch * args.context}
            losses = []
            marks = read_marks(team, marks, durations)
            if not all(map(math.isfinite, found)):
                row["stopped"] = f"the loss was no number by step {step + 1}"
            elif over and step + 1 < steps:
                row["stopped"] = f"the time was up after step {step + 1} of {steps}"
            if "stopped" in row:
                break
        validate(row["steps"])
        row["validation_seconds"] = validated
        del row["unfinished"]
        if args.checkpoint_to and team.rank == 0:
            torch.save({n: t.cpu() for n, t in training.model.state_dict().items()}, args.checkpoint_to / f"{way}.pt")


def summary(args, team, row, durations, validated, seconds):
    """A way's figures at a validation, so many seconds after its start without earlier ones."""
    steps = row["validation"]["step"][-1]
    tokens = steps * args.batch * args.context
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds,
        "warmup_seconds": sum(durations[:WARM]),
        "validation_seconds": validated,
        "tokens_per_second": tokens / (seconds - row["setup_seconds"]),
        "steady_tokens_per_second": args.batch * args.context / statistics.median(durations[WARM:] or durations),
        "peak_bytes": peak_bytes(team),
        "final_validation": row["validation"]["loss"][-1],
    }


def read_marks(team, marks, durations):
    """Adds the seconds between marks to durations; what is left of the marks."""
    train_parity.synchronize(team.device)
    durations += [between(*pair) for pair in itertools.pairwise(marks)]
    return marks[-1:]


def record(series, step, seconds, loss):
    series["step"].append(step)
    series["seconds"].append(round(seconds, 3))
    series["loss"].append(round(loss, 5) if math.isfinite(loss) else None)


# Commands


def facts_of(args, team):
    versions = {"triton": None, "flash-linear-attention": None, "fla-core": None}
    for name in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        **train_parity.facts(team.device),
        "gpus": team.world,
        "versions": {n: v for n, v in versions.items() if v},
        "leanfleet_torch": torch_ops.way(),
        "fla_tuning": FLA_TUNING,
        "vocabulary": VOCABULARY,
        "tokens_are": "bytes",
        "arithmetic": f"{args.dtype} autocast over float32 weights" if args.dtype != "float32" else "float32",
        "compiled_outside_attention": args.compile,
        "checkpointed": args.checkpoint,
        "settings": {"seed": args.seed},
    }


def write(path, report, text):
    """The report, a row a line, and its table beside it."""
    head = json.dumps({**report, "rows": []}, indent=1)
    rows = ",\n  ".join(json.dumps(row) for row in report["rows"])
    for target, content in ((path, head.replace('"rows": []', f'"rows": [\n  {rows}\n ]', 1)), (path.with_suffix(".md"), text)):
        with files.new_file(target) as new:
            new.write_text(content.rstrip() + "\n")


def work_train(args, team):
    shape = SHAPES[args.shape]
    args.rate = args.rate or shape.rate
    batch_tokens, per_step = int(args.batch_tokens), args.context * team.world
    args.batch = batch_tokens // args.context
    if not args.batch or batch_tokens % per_step:
        raise SystemExit(
            f"train_scale: a batch of {batch_tokens} tokens is not a multiple of {per_step}: a sequence of {args.context} for "
            f"each of {team.world} processes"
        )
    own = args.batch // team.world
    args.micro_batch = min(args.micro_batch or max(1, shape.micro_tokens // args.context), own)
    if own % args.micro_batch:
        raise SystemExit(f"train_scale: {own} sequences a process are not a multiple of --micro-batch {args.micro_batch}")
    text, windows, facts = text_of_all(args, team)
    team.say(f"{facts['training']['bytes'] / 1e6:.0f} MB of text, read in {facts['read_seconds']:.1f} s")
    steps = max(1, int(args.tokens) // batch_tokens)
    per_epoch = (len(text) - 1) // args.context
    order = order_of(per_epoch, steps * args.batch, args.seed)
    report = {
        **facts_of(args, team),
        "shape": args.shape,
        "context": args.context,
        "batch_tokens": batch_tokens,
        "micro_batch": args.micro_batch,
        "steps_planned": steps,
        "epochs": round(steps * args.batch / per_epoch, 3),
        "learning_rate": args.rate,
        "text": facts,
        "order_sha256": hashlib.sha256(order.numpy().tobytes()).hexdigest(),
        "rows": [],
    }
    if args.like:
        refuse_unlike(json.loads(args.like.read_text()), report, args.like)
    order = order.to(team.device)
    if args.checkpoint_to and team.rank == 0:
        args.checkpoint_to.mkdir(parents=True, exist_ok=True)
        kept = {"shape": args.shape, "context": args.context, "text": facts}
        (args.checkpoint_to / "run.json").write_text(json.dumps(kept, indent=1) + "\n")
        torch.save(windows.cpu(), args.checkpoint_to / "validation.pt")

    def save():
        if team.rank == 0:
            write(args.out, report, table(report))

    for way in args.ways:
        row = {"way": way, "unfinished": True}
        report["rows"].append(row)
        if team.late(args.limit_seconds):
            report["rows"][-1] = {"way": way, "refused": f"not begun: the {args.limit_seconds:g} s for everything were over"}
        else:
            emptied(team)
            train_way(args, team, way, text, windows, order, row, save)
        emptied(team)
        save()
    team.say("done")
    if team.rank == 0:
        print(table(report), end="")


# What reports must share so that their rows can stand in one table, and what a row says of a run of its own
SHARED = "shape context batch_tokens steps_planned learning_rate arithmetic vocabulary settings order_sha256".split()
OF_A_RUN = "date device gpus torch versions leanfleet_torch micro_batch compiled_outside_attention checkpointed".split()


def unlike(report, other):
    """Words on what two training reports do not share: settings, text, order."""
    for name in SHARED:
        if report[name] != other[name]:
            yield f"{name.replace('_', ' ')} {other[name]} for {report[name]}"
    for name, text in report["text"].items():
        if isinstance(text, dict) and text != other["text"][name]:
            yield f"{name} text of {other['text'][name]['bytes']} bytes in {other['text'][name]['files']} files, another one"


def refuse_unlike(report, other, path):
    if found := list(unlike(report, other)):
        raise SystemExit(f"train_scale: this run is not like {path}: it has {'; '.join(found)}")


def command_add(args, argv):
    report, more = (json.loads(path.read_text()) for path in (args.into, args.more))
    refuse_unlike(report, more, args.into)
    there = {row["way"] for row in report["rows"]}
    if known := [row["way"] for row in more["rows"] if row["way"] in there]:
        raise SystemExit(f"train_scale: {args.into} has {', '.join(known)} already")
    run = {name: more[name] for name in OF_A_RUN}
    report["rows"] += [{"way": row["way"], "run": run} | row for row in more["rows"]]
    write(args.into, report, table(report))
    print(table(report), end="")


def run_words(row):
    """Of a row of another run than the report's: which one."""
    return f"{row['run']['gpus']} x {row['run']['device']}, {row['run']['date']}" if "run" in row else ""


def work_speed(args, team):
    report = {**facts_of(args, team), "steps": {"warm": args.warm, "timed": args.timed}, "rows": []}
    for name, context, way in itertools.product(args.shapes, args.contexts, args.ways):
        shape = SHAPES[name]
        sequences = args.micro_batch or max(1, (args.micro_tokens or shape.micro_tokens) // context)
        row = {"shape": name, "context": context, "way": way, "sequences_a_gpu": sequences}
        if team.late(args.limit_seconds):
            row["refused"] = f"not begun: the {args.limit_seconds:g} s for everything were over"
        else:
            emptied(team)
            speed_of(args, team, shape, way, (sequences, context), row)
        emptied(team)
        report["rows"].append(row)
        if team.rank == 0:
            write(args.out, report, speed_table(report))
        team.say(json.dumps(row))
    if team.rank == 0:
        print(speed_table(report), end="")


def speed_of(args, team, shape, way, size, row):
    """size: sequences that a GPU takes, and their tokens."""
    sequences, context = size
    batch = torch.randint(VOCABULARY, (sequences, context + 1), device=team.device)
    with prepared(args, team, shape, way, size, lambda: batch) as (training, facts):
        row |= facts
        if training is None:
            return
        marks, durations = [], []
        if team.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(args.warm + args.timed):
            if step == args.warm:
                train_parity.synchronize(team.device)
                marks = [mark(team.device)]
            training.step(batch, shape.rate)
            marks.append(mark(team.device))
        read_marks(team, marks[-args.timed - 1 :], durations)
        tokens = team.world * sequences * context
        speeds = sorted(tokens / d for d in durations)
        row["tokens_per_second"] = statistics.median(speeds)
        row["tokens_per_second_spread"] = (speeds[-1 - len(speeds) // 10] - speeds[len(speeds) // 10]) / 2
        row["peak_bytes"] = peak_bytes(team)


def head_of(report):
    gpus = f"{report['gpus']} x {report['device']}" if report["device"] != "CPU" else f"CPU, {report['gpus']} processes"
    return f"{report['date']}, {gpus}, torch {report['torch']}, {report['arithmetic']}"


def gigabytes(row):
    return f"{row['peak_bytes'] / 2**30:.1f}" if row.get("peak_bytes") else ""


def table(report):
    text = report["text"]["training"]
    lines = [
        f"{head_of(report)}. {report['shape']}'s shape over bytes, context {report['context']}, {report['batch_tokens']} "
        f"tokens a step, {report['steps_planned']} steps, {report['epochs']:.2f} times over {text['bytes'] / 1e6:.0f} MB. "
        "Seconds are without validation and set-up; the loss is of validation, nats a byte.",
        "",
        "| way | attention | parameters | steps | seconds | set-up, s | tokens/s | of the median step | GiB | loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        way = row["way"] + (f" ({run_words(row)})" if "run" in row else "")
        if "tokens_per_second" not in row:
            lines.append(f"| {way} | {row.get('refused') or 'unfinished'} | | | | | | | | |")
            continue
        cells = [way, row["attention"], f"{row['parameters'] / 1e6:.1f}M", row["steps"]]
        cells += [f"{row['seconds'] - row['setup_seconds']:.1f}", f"{row['setup_seconds']:.1f}"]
        cells += [f"{row[n]:,.0f}" for n in ("tokens_per_second", "steady_tokens_per_second")]
        loss = "" if row["final_validation"] is None else f"{row['final_validation']:.4f}"
        ended = f"cut off after step {row['steps']}" if "unfinished" in row else row.get("stopped")
        cells += [gigabytes(row), f"{loss} ({ended})" if ended else loss]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if checked := report.get("onnxruntime"):
        found = ", ".join(f"{name} {loss:.6f}" for name, loss in checked["losses"].items())
        lines += ["", f"The trained model of {checked['way']}, float32, over {checked['windows']} windows: {found}."]
    return "\n".join(lines) + "\n"


def speed_table(report):
    lines = [
        f"{head_of(report)}. Shapes over bytes; training steps, medians of {report['steps']['timed']}.",
        "",
        "| shape | context | sequences a GPU | way | attention | tokens/s | GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = [row["shape"], row["context"], row["sequences_a_gpu"], row["way"]]
        if "refused" in row:
            cells += [row["refused"], "", ""]
        else:
            cells += [row["attention"], f"{row['tokens_per_second']:,.0f}", gigabytes(row)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def command_validate(args, argv):
    """The trained model's loss in float32, by PyTorch and by ONNX Runtime."""
    import numpy as np

    from leanfleet import ort_ops
    from leanfleet.export import export

    if args.way != "ours":
        raise SystemExit(f"train_scale: only ours is exported with its attention as one operator; '{args.way}' is not")
    for name in ("run.json", f"{args.way}.pt", "validation.pt"):
        if not (args.folder / name).exists():
            raise SystemExit(f"train_scale: {args.folder / name} is missing: train ... --checkpoint-to {args.folder} writes it")
    run = json.loads((args.folder / "run.json").read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(SHAPES[run["shape"]], args.way)
    model.load_state_dict(torch.load(args.folder / f"{args.way}.pt", map_location="cpu", weights_only=True))
    windows = torch.load(args.folder / "validation.pt", weights_only=True)[: args.windows].long()
    batch, tokens = (torch.export.Dim(n, min=1) for n in ("batch", "tokens"))
    path = args.folder / f"{args.way}.onnx"
    export(
        model.eval(),
        (torch.ones(2, 5, dtype=torch.int64),),
        path,
        input_names=["ids"],
        output_names=["logits"],
        dynamic_shapes={"ids": {0: batch, 1: tokens}},
    )

    def loss(logits_of):
        pairs = ((logits_of(w[None, :-1]), w[1:]) for w in windows)
        return statistics.fmean(cross_entropy(found[0].double(), target).item() for found, target in pairs)

    model.to(device)
    losses = {f"PyTorch {device.type}": loss(lambda ids: model(ids.to(device)).cpu())}
    for provider in args.providers.split(","):
        options = [(f"{provider}ExecutionProvider", {"use_tf32": "0"} if provider == "CUDA" else {})]
        session = ort_ops.make_session(path, options)

        def by_session(ids, session=session):
            return torch.from_numpy(session.run(None, {"ids": np.ascontiguousarray(ids.numpy())})[0])

        losses[f"onnxruntime {provider}"] = loss(by_session)
    result = {"way": args.way, "windows": len(windows), "context": run["context"], "losses": losses}
    print(json.dumps(result, indent=1))
    if args.into:
        report = json.loads(args.into.read_text()) if args.into.exists() else None
        if report is None:
            args.into.write_text(json.dumps({"onnxruntime": result}, indent=1) + "\n")
        else:
            report["onnxruntime"] = result
            write(args.into, report, table(report))
    if not max(losses.values()) - min(losses.values()) <= 5e-5:
        raise SystemExit("train_scale: the losses differ in the fourth digit")


def names_of(known):
    def parse(text):
        names = text.split(",")
        if unknown := [n for n in names if n not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="losses by token and by second")
    train.add_argument("out", type=Path, metavar="OUT.json")
    train.add_argument("--shape", choices=SHAPES, default="pythia-160m")
    train.add_argument("--context", type=int, default=8192)
    train.add_argument("--tokens", type=float, default=100e6, help="of a way (default: %(default).0f)")
    train.add_argument("--batch-tokens", type=float, default=262144, help="of a step, all processes (default: %(default)d)")
    train.add_argument("--rate", type=float, help="peak learning rate (default: the shape's)")
    train.add_argument("--minutes", type=float, help="that a way may train, its set-up included")
    train.add_argument("--text", action="append", default=[], metavar="FOLDER", help="in place of this Python's own folders")
    train.add_argument("--text-bytes", type=float, default=200e6, help="at most (default: %(default).0f)")
    train.add_argument("--validations", type=int, default=20, help="times (default: %(default)s)")
    train.add_argument("--validation-windows", type=int, default=32, help="of the context's length (default: %(default)s)")
    train.add_argument("--read-every", type=int, default=10, help="steps between readings of the loss (default: %(default)s)")
    train.add_argument("--like", type=Path, metavar="OTHER.json", help="stop at once where text, order or settings are not its")
    train.add_argument("--checkpoint-to", type=Path, metavar="DIR", help="each way's weights, and the validation windows")
    train.set_defaults(command=lambda args, argv: on_all(args, argv, work_train))
    speed = commands.add_parser("speed", help="tokens a second and memory of a few steps")
    speed.add_argument("out", type=Path, metavar="OUT.json")
    speed.add_argument("--shapes", type=names_of(SHAPES), default=["pythia-160m", "pythia-410m", "pythia-1.4b"])
    speed.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[2048, 8192])
    speed.add_argument("--micro-tokens", type=int, help="of a GPU and step (default: the shape's)")
    speed.add_argument("--warm", type=int, default=10, help="steps before those that are timed (default: %(default)s)")
    speed.add_argument("--timed", type=int, default=20, help="steps (default: %(default)s)")
    speed.set_defaults(command=lambda args, argv: on_all(args, argv, work_speed))
    for command in (train, speed):
        command.add_argument("--ways", type=names_of(WAYS), default=["ours", "softmax", "fla"], help=f"of {', '.join(WAYS)}")
        command.add_argument("--gpus", type=int, default=1, help="processes (default: %(default)s)")
        command.add_argument("--micro-batch", type=int, help="sequences that a GPU takes at once (default: by the shape)")
        command.add_argument("--limit-seconds", type=float, help="for everything: it stops cleanly, and says so")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
        command.add_argument("--compile", action="store_true", help="torch.compile for what is outside attention")
        command.add_argument("--checkpoint", action="store_true", help="compute layers again in the backward, for memory")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    validate = commands.add_parser("validate", help="a trained model's loss in ONNX Runtime")
    validate.add_argument("folder", type=Path, metavar="DIR")
    validate.add_argument("--way", choices=WAYS, default="ours")
    validate.add_argument("--windows", type=int, default=4)
    validate.add_argument("--providers", default="CPU")
    validate.add_argument("--into", type=Path, metavar="OUT.json", help="where the losses go, such as train's report")
    validate.set_defaults(command=command_validate)
    add = commands.add_parser("add", help="rows of ways that were trained on their own, over the same text")
    add.add_argument("into", type=Path, metavar="OUT.json")
    add.add_argument("more", type=Path, metavar="MORE.json")
    add.set_defaults(command=command_add)
    args = parser.parse_args(argv)
    args.command(args, argv)


if __name__ == "__main__":
    main()
