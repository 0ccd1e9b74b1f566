"""Trains one small language model three times over and compares: our kernels in bfloat16 and float32, and PyTorch.

    python -m bench.models.train_parity train --out DIR     on a GPU: curves.json, model.pt (our float32 kernels, first seed)
    python -m bench.models.train_parity speed --out F.json  tokens a second against flash SDPA and flash-linear-attention
    python -m bench.models.train_parity export CKPT DIR     windows.onnx (logits of windows), model.onnx (leanfleet generate)
    python -m bench.models.train_parity validate CKPT DIR --providers CPU,CUDA  losses and a continuation in both runtimes

The model follows Pythia (parallel residual, rotary encoding, GELU) with linear attention: 4 layers, hidden size 256, 4 heads
of 64, context 2048, over bytes. The text is the Python documentation's topics and the standard library's modules, which
every Python has. Each run of a seed starts from the same weights and sees the same data. plot_training.py draws the results.

speed --graph also times all attentions with a whole step, optimizer and all, as one CUDA graph, which leaves the host out; the
last losses of both stand in the rows. --profile adds the seconds of a step's kernels, by torch.profiler, to those of a step by
the clock, of which the rest is the host's.
"""

import argparse
import datetime
import hashlib
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, normalize, scaled_dot_product_attention

from bench.kernels.timing import FLA_TUNING, quick_tuning
from leanfleet.export import LinearAttention, reference
from leanfleet.export.linear_attention import one_type, rotary_tables, rotate

HIDDEN, HEADS, LAYERS, CONTEXT, BATCH, VOCABULARY = 256, 4, 4, 2048, 8, 256
TEXT_BYTES = 8 << 20
VALIDATION_WINDOWS = 32
RUNS = {
    "leanfleet bfloat16": ("leanfleet", True),
    "leanfleet float32": ("leanfleet", False),
    "PyTorch float32": ("pytorch", False),
}


def corpus():
    """Bytes of the text as an int64 tensor, the last tenth being for validation; and what identifies it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}
    files = sorted(p for p in folder.rglob("*.py") if not skipped & set(p.relative_to(folder).parts))
    topics = [p for p in files if p.name == "topics.py"]
    text = b"".join(p.read_bytes() for p in topics + [p for p in files if p not in topics])[:TEXT_BYTES]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], {"bytes": len(data), "sha256": hashlib.sha256(text).hexdigest()}


def bigram_loss(train, validation):
    """Nats a byte of a bigram model with add-one smoothing."""
    counts = torch.ones(VOCABULARY, VOCABULARY, dtype=torch.float64)
    counts.index_put_((train[:-1], train[1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    table = (counts / counts.sum(1, keepdim=True)).log()
    return -table[validation[:-1], validation[1:]].mean().item()


def chunked_pytorch(query, key, value, chunk=128):
    """NormalizedLinearAttention (causal, unit rows, a = b = 1) in PyTorch, float32, differentiated by autograd."""
    dtype = query.dtype
    q, k, v = (normalize(t.float(), dim=-1) if i < 2 else t.float() for i, t in enumerate((query, key, value)))
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b, h, n // chunk, chunk, d) for t in (q, k, v))
    states = k.mT @ v
    before = states.cumsum(2) - states
    scores = (q @ k.mT).tril()
    f = scores @ v + q @ before + v.reshape(b, h, n, d).cumsum(2).view_as(v)
    key_sum = k.reshape(b, h, n, d).cumsum(2).view_as(k)
    g = torch.arange(1, n + 1, device=q.device).view(n // chunk, chunk) + (q * key_sum).sum(-1)
    return (f / g.unsqueeze(-1)).reshape(b, h, n, d).to(dtype)


def flash_linear_attention(query, key, value):
    """fla's normalised chunk_linear_attn on unit rows (without the constant a, which it does not have)."""
    from fla.ops.linear_attn import chunk_linear_attn

    rows = (normalize(query, dim=-1).to(value.dtype), normalize(key, dim=-1).to(value.dtype), value)
    q, k, v = (t.transpose(1, 2).contiguous() for t in rows)
    return chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0].transpose(1, 2)


MIXERS = {
    "pytorch": chunked_pytorch,
    "fla": flash_linear_attention,
    "flash SDPA": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
}


ATTENTIONS = ("leanfleet", "flash SDPA", "fla", "pytorch")  # whose speeds are compared
GRAPH = "CUDA graph"  # the mode of rows whose steps are


class PeerAttention(LinearAttention):
    """LinearAttention with another implementation of what stands between the projections."""

    mixer = None

    def forward(self, hidden, state=None, positions=None):
        q, k, v = (
            p(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        tables = rotary_tables(positions, self.head_dim, self.rotary_base)
        q, k, v = one_type(rotate(q, *tables), rotate(k, *tables), v)
        return self.o_proj(type(self).mixer(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention(HIDDEN, HEADS)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x, state=None, valid=None):
        mixed = self.attention(self.norm1(x)) if state is None else self.attention(self.norm1(x), state, valid=valid)
        mixed, state = mixed if state is not None else (mixed, None)
        x = x + mixed + self.down(gelu(self.up(self.norm2(x))))
        return x if state is None else (x, state)


class Model(nn.Module):
    """ids int64 [B,N] to logits float32 [B,N,256]; with states (a list, a state a layer) also the new states."""

    def __init__(self, attention=LinearAttention):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, states=None, valid=None):
        x = self.embedding(ids)
        new = []
        for i, block in enumerate(self.blocks):
            if states is None:
                x = block(x)
            else:
                x, state = block(x, states[i], valid)
                new.append(state)
        logits = self.head(self.norm(x)).float()
        return logits if states is None else (logits, new)


def build(mixer):
    """A model whose attention is "leanfleet" or one of MIXERS."""
    if mixer == "leanfleet":
        return Model()
    return Model(type("Attention", (PeerAttention,), {"mixer": staticmethod(MIXERS[mixer])}))


def windows(data, count, generator):
    starts = torch.randint(0, len(data) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])


def validation_windows(validation):
    stride = (len(validation) - CONTEXT - 1) // VALIDATION_WINDOWS
    return torch.stack([validation[i * stride : i * stride + CONTEXT + 1] for i in range(VALIDATION_WINDOWS)])


@torch.no_grad()
def validation_loss(model, data, device):
    """Mean nats a byte in float32."""
    total = sum(
        cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()).double().item() for w in data.to(device).split(8)
    )
    return total / (len(data) // 8)


def learning_rate(step, steps, peak=1e-3, least=5e-5, warmup=100):
    if step < warmup:
        return peak * (step + 1) / warmup
    return least + (peak - least) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


class Steps:
    """A model and its optimizer steps; graph: each is one CUDA graph (on the CPU the same without one)."""

    def __init__(self, mixer, autocast, seed, device, graph=False):
        torch.manual_seed(seed)
        self.model, self.autocast, self.device, self.graph = build(mixer).to(device), autocast, device, graph
        on_gpu = device.type == "cuda"
        rate = torch.tensor(1e-3, device=device) if graph else 1e-3  # a graph reads it
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu, capturable=graph and on_gpu
        )
        self.captured = None

    def plain(self, batch):
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def back_to_start(self, weights):
        for parameter, weight in zip(self.model.parameters(), weights):
            parameter.copy_(weight)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def capture(self, batch):
        """A call that takes a step on a batch, by replaying one. Everything is as before afterwards."""
        weights, kept = [p.detach().clone() for p in self.model.parameters()], batch.clone()
        if self.device.type != "cuda":
            for _ in range(2):
                self.plain(kept)
            self.back_to_start(weights)
            return self.plain
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.plain(kept)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.plain(kept)
        self.back_to_start(weights)

        def replayed(batch):
            kept.copy_(batch)
            graph.replay()
            return loss.clone()

        return replayed

    def __call__(self, batch, rate):
        """The loss of a step on a batch int64 [B,N+1], on the device."""
        if self.graph and self.captured is None:
            self.captured = self.capture(batch)
        for group in self.optimizer.param_groups:
            if self.graph:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return (self.captured or self.plain)(batch)


def batches_of(train, seed, steps, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([windows(train, BATCH, generator) for _ in range(steps)]).to(torch.uint8).to(device)


def train_one(mixer, autocast, seed, steps, train, validation, device, graph=False):
    """Trains one model; returns (model, losses of all steps, validation loss, tokens a second)."""
    take = Steps(mixer, autocast, seed, device, graph)
    batches, losses, started = batches_of(train, seed, steps, device), [], None
    for step in range(steps):
        if step == min(10, steps - 1):
            synchronize(device)
            started = time.perf_counter(), step
        losses.append(take(batches[step].long(), learning_rate(step, steps)))
    synchronize(device)
    speed = (steps - started[1]) * BATCH * CONTEXT / (time.perf_counter() - started[0])
    return take.model, torch.stack(losses).tolist(), validation_loss(take.model, validation, device), speed


def kernel_seconds(events):
    """Of a profile's events, those of the GPU."""
    return sum(e.self_device_time_total for e in events if e.device_type == torch.autograd.DeviceType.CUDA) / 1e6


def busy_seconds(mixer, train, device, graph=False, warm=5, steps=10):
    """Seconds of a training step in which the GPU runs kernels or copies, one after the other; None on the CPU."""
    if device.type != "cuda":
        return None
    take, batches = Steps(mixer, True, 0, device, graph), batches_of(train, 0, warm + steps, device)
    for batch in batches[:warm]:
        take(batch.long(), 1e-3)
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in batches[warm:]:
            take(batch.long(), 1e-3)
        synchronize(device)
    return kernel_seconds(profile.events()) / steps


def busy_or_why(*args):
    """busy_seconds, or None, after its reason is printed: speeds are not lost for it."""
    try:
        return busy_seconds(*args)
    except Exception as error:
        print(f"no profile: {type(error).__name__}: {error}"[:300], flush=True)
        return None


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def check_pytorch(device):
    """The PyTorch implementation against the float64 reference."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 256, 64, device=device) for _ in range(3))
    judge = reference.normalized_linear_attention(q.double(), k.double(), v.double(), normalize_qk=1)[0]
    error = ((chunked_pytorch(q, k, v).double() - judge).norm() / judge.norm()).item()
    if not error < 1e-5:
        raise SystemExit(f"the PyTorch implementation is off the float64 reference by {error:.1e}; nothing was trained")
    return error


def agreement(curves, warmup=100, width=25):
    """For each of our runs: distance of its mean curve from PyTorch's, over the noise between seeds.

    Curves are averaged over `width` steps first. noise: standard deviation between seeds of the PyTorch runs, as a root mean
    square over the steps after the warm-up; the distance is the same mean of the difference of the two means over seeds;
    paired: of the difference between runs that share a seed.
    """
    smooth = {
        n: torch.tensor(c, dtype=torch.float64).unfold(1, width, width).mean(-1)[:, warmup // width :]
        for n, c in curves.items()
    }
    judge = smooth["PyTorch float32"]
    noise = judge.std(0).square().mean().sqrt().item()
    result = {"noise": noise}
    for name, found in smooth.items():
        if name != "PyTorch float32":
            result[name] = {
                "distance": (found.mean(0) - judge.mean(0)).square().mean().sqrt().item(),
                "paired": (found - judge).square().mean().sqrt().item(),
                "largest": (found.mean(0) - judge.mean(0)).abs().max().item(),
            }
    return result


def facts(device):
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"date": datetime.date.today().isoformat(), "device": name, "torch": torch.__version__}


def command_train(args):
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32, in the projections too
    train, validation, text = corpus()
    validation = validation_windows(validation)
    result = {
        **facts(device),
        "text": text,
        "steps": args.steps,
        "batch": BATCH,
        "context": CONTEXT,
        "pytorch_error": check_pytorch(device),
        "bigram_loss": bigram_loss(train, corpus()[1]),
        "runs": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name, (mixer, autocast) in RUNS.items():
            model, losses, final, speed = train_one(mixer, autocast, seed, args.steps, train, validation, device)
            run = result["runs"].setdefault(name, {"losses": [], "validation": [], "tokens_per_second": []})
            run["losses"].append([round(x, 5) for x in losses])
            run["validation"].append(final)
            run["tokens_per_second"].append(speed)
            print(
                f"{name:20} seed {seed}: last losses {sum(losses[-50:]) / len(losses[-50:]):.4f}, "
                f"validation {final:.4f}, {speed / 1e6:.2f} M tokens/s",
                flush=True,
            )
            if name == "leanfleet float32" and seed == 0:
                torch.save(model.state_dict(), args.out / "model.pt")
            (args.out / "curves.json").write_text(json.dumps(result) + "\n")
    if args.seeds > 1 and args.steps >= 150:  # the warm-up is left out
        result["agreement"] = agreement({n: r["losses"] for n, r in result["runs"].items()})
        print(json.dumps(result["agreement"], indent=1))
    print(f"bigram model: {result['bigram_loss']:.4f} nats a byte")
    (args.out / "curves.json").write_text(json.dumps(result) + "\n")


def command_speed(args):
    """Tokens a second of the training run, bfloat16, against the same model with other attentions: medians over rounds, in
    which they take turns, after one that does not count."""
    with quick_tuning():
        compare_speeds(args)


def compare_speeds(args):
    global BATCH, CONTEXT
    device = torch.device(args.device)
    train, validation, _ = corpus()
    rows = []
    for context in args.contexts:
        BATCH, CONTEXT = max(1, 16384 // context), context
        windows_ = validation_windows(validation)[:8]
        ways = [(m, graph) for graph in ([False, True] if args.graph else [False]) for m in ATTENTIONS]
        speeds, losses, refused = {way: [] for way in ways}, {}, {}
        for _ in range(args.rounds + 1):
            for way in [way for way in ways if way not in refused]:
                try:
                    found = train_one(way[0], True, 0, args.steps, train, windows_, device, graph=way[1])
                except Exception as error:
                    refused[way] = f"{type(error).__name__}: {error}"[:300]
                    continue
                speeds[way].append(found[3])
                losses[way] = statistics.fmean(found[1][-10:])
                del found
        for way, found in speeds.items():
            row = {"context": context, "attention": way[0]} | ({"mode": GRAPH} if way[1] else {})
            text = refused.get(way)
            if text:
                row["refused"] = text
            else:
                row |= {"tokens_per_second": statistics.median(found[1:]), "rounds": found[1:], "loss": losses[way]}
                text = f"{row['tokens_per_second'] / 1e6:7.3f} M tokens/s, loss {row['loss']:.4f}"
                if args.profile and (busy := busy_or_why(way[0], train, device, way[1])) is not None:
                    row |= {"step_seconds": BATCH * CONTEXT / row["tokens_per_second"], "gpu_seconds": busy}
                    text += f", a step {1e3 * row['step_seconds']:.2f} ms, of which the GPU is busy {1e3 * busy:.2f}"
            rows.append(row)
            print(f"context {context:6} {way[0]:12} {GRAPH if way[1] else '':10} {text}", flush=True)
        args.out.write_text(
            json.dumps({**facts(device), "steps": args.steps, "fla_tuning": FLA_TUNING, "rows": rows}, indent=1) + "\n"
        )


def load(path, device="cpu"):
    model = Model()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval().to(device)


class Generator(nn.Module):
    """A trained Model as export_decoder takes it: with carried states by name and padded rows."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=None, eos_token_id=None)

    def get_output_embeddings(self):
        return self.model.head

    def cache_shapes(self):
        d = HIDDEN // HEADS
        sizes = {"state": (d, d), "key_sum": (d,), "value_sum": (d,)}
        return {f"{i}.{name}": (torch.float32, ("batch", HEADS, *size)) for i in range(LAYERS) for name, size in sizes.items()}

    def forward(self, input_ids, position_ids, leanfleet_cache, use_cache=False):
        cache, names = leanfleet_cache, ("state", "key_sum", "value_sum")
        valid = torch.arange(input_ids.shape[1], device=input_ids.device) < cache.query_lens.unsqueeze(1)
        states = [(*(cache.tensors[f"{i}.{n}"] for n in names), cache.seq_lens - cache.query_lens) for i in range(LAYERS)]
        logits, states = self.model(input_ids, states, valid)
        for i, state in enumerate(states):
            for name, tensor in zip(names, state):
                cache.update(f"{i}.{name}", tensor)
        return SimpleNamespace(logits=logits)


def byte_tokenizer():
    """A transformers tokenizer whose ids are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel's letters: printable bytes stand for themselves, the others for code points from 256 on, in order.
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    letters = {byte: chr(byte if byte in own else next(rest)) for byte in range(256)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def command_export(args):
    from leanfleet.export import export, export_decoder

    model = load(args.checkpoint)
    args.out.mkdir(parents=True, exist_ok=True)
    export_decoder(Generator(model).eval(), args.out, byte_tokenizer())
    batch, tokens = (torch.export.Dim(n, min=1) for n in ("batch", "tokens"))
    with torch.no_grad():
        export(
            model,
            (torch.ones(2, 5, dtype=torch.int64),),
            args.out / "windows.onnx",
            input_names=["ids"],
            output_names=["logits"],
            dynamic_shapes={"ids": {0: batch, 1: tokens}},
        )


@torch.no_grad()
def greedy(model, prompt, count):
    """`count` greedy bytes after a prompt, each from a run over everything before it."""
    ids = prompt.unsqueeze(0)
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def command_validate(args):
    import numpy as np

    from leanfleet import ort_ops
    from leanfleet.ort_ops.generation import generate, load_decoder

    _, validation, _ = corpus()
    data = validation_windows(validation)
    result = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result[f"PyTorch {device.type}"] = validation_loss(load(args.checkpoint, device), data, device)
    for provider in args.providers.split(","):
        options = [(f"{provider}ExecutionProvider", {"use_tf32": "0"} if provider == "CUDA" else {})]
        session = ort_ops.make_session(args.folder / "windows.onnx", options)
        total = 0.0
        for window in data.split(8):
            logits = session.run(None, {"ids": np.ascontiguousarray(window[:, :-1].numpy())})[0]
            total += cross_entropy(torch.from_numpy(logits).flatten(0, 1), window[:, 1:].flatten()).double().item()
        result[f"onnxruntime {provider}"] = total / (len(data) // 8)
    prompt = validation[:200]
    expected = greedy(load(args.checkpoint), prompt, 100)
    continuations = {}
    for provider in args.providers.split(","):
        decoder = load_decoder(args.folder, [(f"{provider}ExecutionProvider", {"use_tf32": "0"} if provider == "CUDA" else {})])
        continuations[provider] = generate(decoder, [prompt.tolist()], 100)[0][0] == expected
    print(json.dumps(result, indent=1))
    print(bytes(prompt[-60:].tolist() + expected).decode(errors="replace"))
    print(f"100 bytes generated token by token equal PyTorch's: {continuations}")
    if args.out:
        args.out.write_text(json.dumps({"losses": result, "same_continuation": continuations}, indent=1) + "\n")
    if not all(continuations.values()):
        raise SystemExit("the continuations differ")
    if max(result.values()) - min(result.values()) > 5e-5:
        raise SystemExit("the losses differ in the fourth digit")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--steps", type=int, default=1000)
    train.add_argument("--seeds", type=int, default=3)
    train.add_argument("--device", default="cuda")
    train.set_defaults(command=command_train)
    speed = commands.add_parser("speed")
    speed.add_argument("--out", type=Path, required=True)
    speed.add_argument("--steps", type=int, default=60)
    speed.add_argument("--rounds", type=int, default=3)
    speed.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192])
    speed.add_argument("--device", default="cuda")
    speed.add_argument("--graph", action="store_true", help="time steps as CUDA graphs too, all attentions alike")
    speed.add_argument("--profile", action="store_true", help="also the time in which the GPU is busy, by torch.profiler")
    speed.set_defaults(command=command_speed)
    export = commands.add_parser("export")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("out", type=Path)
    export.set_defaults(command=command_export)
    validate = commands.add_parser("validate")
    validate.add_argument("checkpoint", type=Path)
    validate.add_argument("folder", type=Path)
    validate.add_argument("--providers", default="CPU")
    validate.add_argument("--out", type=Path)
    validate.set_defaults(command=command_validate)
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
