"""Times GatedDeltaRule and GatedDeltaRuleGrad on CUDA, prompts and steps, and writes JSON and a table.

    python -m bench.kernels.gated_delta_rule OUT [--rounds 30] [--peers fla,flashinfer,flashqla] [--only named,drawn]
        [--drawn 30] [--seconds 0] [--part 0/1] [--once] [--full-tuning]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, all contenders of a line in turn, with the L2
cache flushed by reading before each. The floor is inputs, outputs and states moved once at 4.25 TB/s, what an H200 reaches in
copies. Heads are 16 of queries and keys and 48 of values, 128 wide, but where 32 of each stand, as Kimi-Linear has them, and in
the shapes that --drawn adds, which are drawn from a seed, each with a decay of each token and with one of each key dimension.
"Steep" decays are 40 times as fast as others.

Peers, for the calls that they take, which are of 16 bits. A peer whose results differ from ours by more than AGREES is left
out.
fla         fla-core (`pip install fla-core`): chunk_gated_delta_rule or chunk_kda, below 64 tokens the fused_recurrent_ ones.
            Where it takes no more value heads than key heads, it gets repeated ones, which are made outside of what is timed.
            Its kernels tune themselves over few configurations (bench.kernels.timing.quick_tuning) unless --full-tuning
flashinfer  FlashInfer's gdn_prefill and, for one token, gdn_decode, which works its gates out itself: heads of 128, a decay of
            each token. Its states are [V,K] always
flashqla    FlashQLA's chunk_gated_delta_rule, heads of 128. Where it is installed fla-core calls it too: measure it alone
A peer's time for gradients is that of both passes less that of the forward; ours starts from the inputs.

What matters most comes first, and each line is written as it ends; after --seconds no other begins. --part I/N: every Nth line,
from the Ith on. --once: each call once, without timing, as processes beside each other fill the cache of Triton's compiler.
"""

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, FLA_TUNING, Launches, captured, quick_tuning, times

SEED = 20261123
LONGEST = 16384
AGREES = 0.05  # of the norm of what is compared
OPERANDS = "query", "key", "value", "log_decay", "beta"


class Shape(NamedTuple):
    lengths: tuple[int, ...]  # of requests, all alike unless they are packed
    dtype: str = "bfloat16"
    special: str = ""  # "key": a decay of each key dimension, "v_first": the order of the state, "grad": all gradients
    heads: tuple[int, int] = (16, 48)  # of queries and keys, of values
    widths: tuple[int, int] = (128, 128)
    packed: bool = False


SHAPES = [
    Shape((2048,)),
    Shape((8192,)),
    Shape((2048,) * 4),
    Shape((2048,) * 16),
    Shape((1,)),
    Shape((1,) * 16),
    Shape((1,) * 64),
    Shape((8192,), special="grad"),
    Shape((2048,) * 4, special="grad"),
    Shape((2048,), special="key", heads=(32, 32)),
    Shape((8192,), special="key", heads=(32, 32)),
    Shape((8192,), "float16"),
    Shape((1,) * 43),
    Shape((512,)),
    Shape((512,) * 16),
    Shape((4,) * 43),
    Shape((300, 5000, 64, 1500, 1328), packed=True),
    Shape((2048,), special="grad"),
    Shape((2048,) * 4, special="key", heads=(32, 32)),
    Shape((8192,), special="steep key", heads=(32, 32)),
    Shape((8192,), heads=(8, 8), widths=(256, 256)),
    Shape((512,), special="key", heads=(32, 32)),
    Shape((8192,), "float16", special="key", heads=(32, 32)),
    Shape((2048,), special="key"),
    Shape((1,), special="v_first"),
    Shape((1,) * 43, special="v_first"),
    Shape((1,) * 43, special="key"),
    Shape((2048,), special="grad key"),
    Shape((2048,), "float32"),
]


def drawn(count):
    """Heads and groups of them, widths from 32 to 256, lengths from 64 to 16k, half of them packed."""
    draw = random.Random(SEED)
    shapes = []
    for i in range(count):
        keys, packed = 2 ** draw.randrange(5), i % 2 == 1
        heads, widths = (keys, keys * draw.choice((1, 2, 3, 4))), (8 * draw.randint(4, 32), 8 * draw.randint(4, 32))
        requests = draw.randint(1, 8)
        longest = LONGEST // requests
        lengths = [round(math.exp(draw.uniform(math.log(64), math.log(longest)))) for _ in range(requests)]
        lengths = tuple(lengths) if packed else (lengths[0],) * requests
        dtype = draw.choice(("float16", "bfloat16"))
        shapes += [Shape(lengths, dtype, special, heads, widths, packed) for special in ("", "key")]
    return shapes


def inputs_of(shape):
    kind, (keys, values), (K, V) = getattr(torch, shape.dtype), shape.heads, shape.widths
    requests = len(shape.lengths)
    batch, tokens = (1, sum(shape.lengths)) if shape.packed else (requests, shape.lengths[0])

    def tensor(heads, *width):
        return torch.randn(batch, heads, tokens, *width, device="cuda")

    inputs = {"query": tensor(keys, K).to(kind), "key": tensor(keys, K).to(kind), "value": tensor(values, V).to(kind)}
    inputs["log_decay"] = -tensor(values, *[K] * ("key" in shape.special)).abs() * (5 if "steep" in shape.special else 1 / 8)
    inputs["beta"] = torch.rand(batch, values, tokens, device="cuda")
    width = (V, K) if shape.special == "v_first" else (K, V)
    inputs["initial_state"] = torch.randn(requests, values, *width, device="cuda")
    if shape.packed:
        offsets = [sum(shape.lengths[:i]) for i in range(requests + 1)]
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    return inputs


def launches_of(shape):
    inputs = inputs_of(shape)
    if "grad" in shape.special:
        inputs["grad_output"] = torch.randn_like(inputs["value"])
        inputs["grad_final_state"] = torch.randn_like(inputs["initial_state"])
        launches = Launches("GatedDeltaRuleGrad", inputs, {"normalize_qk": 1, "grad_decay": 1, "grad_state": 1})
    else:
        attributes = {"normalize_qk": 1, "return_state": 1, "state_v_first": int(shape.special == "v_first")}
        launches = Launches("GatedDeltaRule", inputs, attributes, in_place=True)
    moved = [*inputs.values(), *launches.outputs.values()]
    return launches, sum(t.numel() * t.element_size() for t in moved)


def by_token(tensor):
    return tensor.transpose(1, 2).contiguous()


def gradients_of(rule, given, inputs):
    """A call of both passes of a rule over the tensors by name."""
    tensors = [given[name].requires_grad_() for name in OPERANDS]
    grads = by_token(inputs["grad_output"]), inputs["grad_final_state"]
    return lambda: torch.autograd.grad(rule(), tensors, grads)


def chunked(rule, shape, inputs, repeats=1, **options):
    """{row's entry: call} of a rule with the arguments of fla-core's: the forward, and for gradients both passes too."""
    given = {name: by_token(inputs[name]) for name in OPERANDS}
    for name in ("query", "key"):
        given[name] = given[name].repeat_interleave(repeats, 2)
    state = inputs["initial_state"].clone()
    if "cu_seqlens" in inputs:
        options["cu_seqlens"] = inputs["cu_seqlens"].long()  # made once: what is worked out from it is kept by its identity

    def forward():
        return rule(
            given["query"],
            given["key"],
            given["value"],
            g=given["log_decay"],
            beta=given["beta"],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **options,
        )

    if "grad" not in shape.special:
        return {"": torch.no_grad()(forward)}
    return {"forward_": torch.no_grad()(forward), "both_": gradients_of(forward, given, inputs)}


def fla_calls(shape, inputs, repeats):
    from fla.ops import gated_delta_rule, kda

    short, per_key = max(shape.lengths) < 64, "key" in shape.special
    if per_key:
        rule = kda.fused_recurrent_kda if short else kda.chunk_kda
    else:
        rule = gated_delta_rule.fused_recurrent_gated_delta_rule if short else gated_delta_rule.chunk_gated_delta_rule
    return chunked(rule, shape, inputs, repeats, **({"state_v_first": True} if shape.special == "v_first" else {}))


def flashqla_calls(shape, inputs, repeats):
    import flash_qla

    options = {"state_v_first": True} if shape.special == "v_first" else {}
    return chunked(flash_qla.chunk_gated_delta_rule, shape, inputs, **options)


def flashinfer_calls(shape, inputs, repeats):
    query, key, value = (by_token(inputs[name]) for name in ("query", "key", "value"))
    state = inputs["initial_state"].clone()
    if shape.special != "v_first":
        state = state.mT.contiguous()
    if shape.lengths[0] == 1:
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

        # Gates that come out as these: log_decay = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
        a, b = torch.log(torch.expm1(-by_token(inputs["log_decay"]))), torch.logit(by_token(inputs["beta"]), 1e-6)
        zeros = torch.zeros(shape.heads[1], device="cuda")
        output = torch.empty_like(value)
        gates = {"A_log": zeros, "a": a.to(value.dtype), "dt_bias": zeros, "b": b.to(value.dtype)}
        return {"": lambda: gated_delta_rule_decode_pretranspose(query, key, value, state, **gates, output=output)}
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    tokens = [t.flatten(0, 1) for t in (query, key, value, by_token(inputs["log_decay"]).exp(), by_token(inputs["beta"]))]
    offsets = [sum(shape.lengths[:i]) for i in range(len(shape.lengths) + 1)]
    options = {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device="cuda"), "max_seqlen": max(shape.lengths)}
    options |= {"output": torch.empty_like(tokens[2]), "output_state": torch.empty_like(state)}
    options |= {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return {"": lambda: chunk_gated_delta_rule(*tokens, **options)}


def fla_takes(shape):
    return min(shape.lengths) >= 64 or max(shape.lengths) < 64


def flashqla_takes(shape):
    return shape.widths == (128, 128) and "key" not in shape.special and min(shape.lengths) >= 64


def flashinfer_takes(shape):
    one_token = set(shape.lengths) == {1} and not shape.packed
    return "grad" not in shape.special and flashqla_takes(shape._replace(lengths=(64,)) if one_token else shape)


# {name: (calls, whether it takes a shape of 16 bits)}
PEERS = {
    "fla": (fla_calls, fla_takes),
    "flashinfer": (flashinfer_calls, flashinfer_takes),
    "flashqla": (flashqla_calls, flashqla_takes),
}


def compared(found, backward):
    """What is compared of a call's results, as ours has it: the output, or the gradient of values."""
    return found[2] if backward else found[0] if isinstance(found, tuple) else found


def peer_graphs(name, shape, inputs, expected, captures=True):
    """{row's entry: graph} of a peer's kernels for the same call; {} where it does not take it. expected: our results."""
    calls_of, takes = PEERS[name]
    if shape.dtype == "float32" or not takes(shape):
        return {}
    ratio = max(shape.heads[1] // shape.heads[0], 1)
    for repeats in dict.fromkeys((1, ratio)):  # versions differ in what they take, and in what they raise
        try:
            calls = calls_of(shape, inputs, repeats)
            entry = list(calls)[-1]
            found = compared(calls[entry](), entry == "both_").reshape(expected.transpose(1, 2).shape).transpose(1, 2).double()
            error = float((found - expected).norm() / expected.norm())
            if not error <= AGREES:
                raise ValueError(f"its result is {error:.1e} of ours off")
            return {f"{name}_{entry}us": captured(call) if captures else None for entry, call in calls.items()}
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  {name}: {type(error).__name__}: {error}"[:300], flush=True)
    return {}


def line(shape, rounds, peers):
    """A row of the JSON; None where no rounds are wanted."""
    launches, moved = launches_of(shape)
    state = launches.inputs["initial_state"].clone()  # ours are in place
    found = launches.run()
    expected = found["grad_value" if "grad" in shape.special else "output"].double()
    launches.inputs["initial_state"].copy_(state)
    graphs = {"us": launches.capture()}
    for peer in peers:
        graphs |= peer_graphs(peer, shape, launches.inputs, expected, rounds > 0)
    if not rounds:
        return None
    found = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    for peer in peers:
        if f"{peer}_both_us" in found:
            found[f"{peer}_us"] = found[f"{peer}_both_us"] - found[f"{peer}_forward_us"]
    print(shape, {name: round(t, 2) for name, t in found.items()}, flush=True)
    return {**shape._asdict(), "floor_us": moved / COPY_BYTES_PER_US, **found}


def requests_of(row):
    lengths = row["lengths"]
    return " + ".join(map(str, lengths)) if row["packed"] else f"{len(lengths)} x {lengths[0]}"


def ratio(row):
    """What the fastest peer takes over what we take; None without a peer."""
    peers = [row[f"{name}_us"] for name in PEERS if f"{name}_us" in row]
    return min(peers) / row["us"] if peers else None


def table(report):
    about = [f"{report['gpu']}, {report['date']}.", report.get("note")]
    peers = [name for name in PEERS if any(f"{name}_us" in row for row in report["rows"])]
    if "fla" in peers and "tuning" in report:
        about.append(f"fla's kernels were tuned over {report['tuning']}.")
    ratios = [r for row in report["rows"] if row.get("drawn") and (r := ratio(row)) is not None]
    if ratios:
        about.append(
            f"{len(ratios)} drawn shapes have a peer: the fastest takes {statistics.geometric_mean(ratios):.2f} times as "
            f"long in geometric mean, {min(ratios):.2f} at least; {sum(r < 0.9 for r in ratios)} are below 0.9."
        )
    last = "fla / ours" if peers == ["fla"] else "fastest peer / ours"
    titles = ["requests x tokens", "heads", "K, V", "type", "", "floor µs", "ours µs", *(f"{name} µs" for name in peers), last]
    lines = [" ".join(filter(None, about)), "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in report["rows"]:
        cells = [requests_of(row), "/".join(map(str, row["heads"])), ", ".join(map(str, row["widths"])), row["dtype"]]
        cells += [row["special"], f"{row['floor_us']:.1f}", f"{row['us']:.1f}"]
        cells += [f"{row[f'{name}_us']:.1f}" if f"{name}_us" in row else "" for name in peers]
        cells.append("" if ratio(row) is None else f"{ratio(row):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}, which have to be installed")
    parser.add_argument("--only", default="named,drawn")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="no line begins after so many; 0: all do")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth line from the Ith on")
    parser.add_argument("--once", action="store_true", help="run each call once; nothing is written")
    parser.add_argument("--full-tuning", action="store_true", help="fla's kernels over all of their configurations")
    arguments = parser.parse_args()
    begin, only = time.monotonic(), arguments.only.split(",")
    peers = [name for name in arguments.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers {', '.join(sorted(unknown))}; expected some of {', '.join(PEERS)}")
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": []}
    quick = "fla" in peers and not arguments.full_tuning
    if quick:
        report["tuning"] = FLA_TUNING
    wanted = [(shape, {}) for shape in SHAPES] if "named" in only else []
    wanted += [(shape, {"drawn": True}) for shape in drawn(arguments.drawn)] if "drawn" in only else []
    first, step = map(int, arguments.part.split("/"))
    wanted = wanted[first::step]
    with quick_tuning(quick):
        for shape, more in wanted:
            if arguments.seconds and time.monotonic() - begin > arguments.seconds:
                print(f"{len(report['rows'])} of {len(wanted)} lines in {arguments.seconds:g} s", flush=True)
                break
            row = line(shape, 0 if arguments.once else arguments.rounds, peers)
            if row is None:
                continue
            report["rows"].append(row | more)
            arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
