"""Which ways of cutting short contexts are fastest, and the constants by which csrc/lean_attention/one_segment.h foresees it.

    python -m bench.kernels.one_segment OUT --seed HEX [--shapes 200] [--rounds 7] [--many-rows | --quantised]
    python -m bench.kernels.one_segment --fit FILE ...

The first writes OUT.json: LeanAttention's decode on shapes drawn as in attention_drawn.py, of up to 128 rows, 40,000 keys and
600 MB, with --many-rows of 17 rows and more, each by every way of one_segment.h and by the other kernels (-1). Every output is
compared with float64. Times are medians of CUDA graphs' replays, all ways in turn, behind a read that flushes the L2 cache.
Ways of more than 8,192 CTAs in clusters, or of less than 64 keys a CTA, are left out. With --quantised caches are of int8 with
scales per token, of heads and rows that these ways take.

The second prints the constants that predict such files best, near the fastest ways above all, and how the ways that they choose
compare with the fastest. `one_segment` and `scheduled` are the header's estimates: a change of one is a change of the other.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from unittest import mock

WAYS = (
    (True, 1),
    (False, 1),
    (False, 2),
    (False, 4),
    (False, 8),
    (True, 4),
    (True, 8),
    (True, 16),
    (False, 0),
    (True, 0),
)  # small CTAs; CTAs of a unit, 0: as many as run at once
MOST_ROWS, MOST_KEYS, MOST_BYTES, MOST_CTAS, LEAST_KEYS, MOST_PARTS = 128, 40_000, 600e6, 8192, 64, 64
SMS, NEARLY, MOST_ROUNDS, MOST_WIDE_ROUNDS = 132, 0.9, 8.0, 32.0
MEAN_OF_WHOLE, MEAN_OF_CUT = 0.6, 0.4
ONE_SEGMENT = {
    "start": [9.08, 9.02, 9.86, 9.82, 11.01, 10.95, 11.65, 14.21, 12.84, 12.5],
    "round": [1.59, 1.35, 2.0, 1.19, 1.14, 1.67],  # of large CTAs, of small ones
    "next_cta": [3.88, 5.16],
    "many_rows": [1.54],
    "again": [15.3],
}
SCHEDULED = {
    "start": [13.88, 16.49, 22.87, 22.06, 28.75],
    "tile": [0.23, 0.02, 0.38, 0.34, 0.51],
    "read": [19.0],
    "next_unit": [6.63, 5.37],
    "unknown": [6.4],
}
# The same of quantised caches, with small CTAs alone.
QUANTISED_ONE_SEGMENT = {
    "start": [8.04, 9.36, 10.33, 10.28, 11.53, 9.43, 9.26, 10.16, 12.0, 12.53],
    "round": [1.5, 1.2, 1.83, 1.04, 2.22, 1.85],
    "next_cta": [4.13, 4.25],
    "many_rows": [1.54],
    "again": [15.3],
}
QUANTISED_SCHEDULED = {
    "start": [11.48, 18.49, 23.3, 15.28, 28.75],
    "tile": [0.26, 0.02, 0.4, 0.34, 0.55],
    "read": [6.23],
    "next_unit": [4.7, 0.03],
    "unknown": [3.79],
}
QUANTISED_HEADS = {64: 16, 128: 16, 256: 8}  # and rows, at most


def shapes(seed, count, many_rows, quantised):
    from bench.kernels.attention_drawn import drawn

    for shape in drawn(seed):
        rows, longest = shape["group"] * shape["new"], max(shape["lens"])
        read = 2 * sum(shape["lens"]) * shape["kv_heads"] * (shape["key_width"] + shape["value_width"])
        if quantised:
            width = shape["key_width"]
            taken = width == shape["value_width"] and rows <= QUANTISED_HEADS.get(width, 0)
        else:
            taken = rows > 16 or not many_rows
        if rows <= MOST_ROWS and longest <= MOST_KEYS and read <= MOST_BYTES and taken:
            yield shape | {"quantised": True} if quantised else shape
            count -= 1
        if count == 0:
            return


def measure(shape, seed, rounds):
    """A shape's row: microseconds by way."""
    import torch

    from bench.kernels.attention_drawn import Case
    from bench.kernels.timing import captured, times

    case, graphs, calls = quantised_case(shape, seed) if shape.get("quantised") else Case(shape, seed), {}, {}
    row = {k: v for k, v in shape.items() if k != "lens"} | {"keys": sum(shape["lens"]), "longest": max(shape["lens"])}
    for way in [-1, *Short(row).ways()]:
        with mock.patch.dict("os.environ", LEANFLEET_ONE_SEGMENT=str(way)):
            calls[way] = case.ours()
            if wrong := case.check(calls[way]()):
                raise SystemExit(f"way {way} of {shape}: {wrong}")
            torch.cuda.synchronize()
            graphs[str(way)] = captured(calls[way])
    us = {way: round(statistics.median(t), 2) for way, t in times(graphs, rounds).items()}
    return {**row, "us": us}


def quantised_case(shape, seed):
    """A case whose keys and values are int8 and their scales per token, multiplied in `case.keys` and `case.values`."""
    import torch

    from bench.kernels.attention_drawn import Case
    from bench.kernels.lean_attention import Node, quantised_inputs
    from leanfleet.export.reference import numbers_of

    case = Case(shape, seed)
    caches, attrs = quantised_inputs({"key": case.keys, "value": case.values}, (torch.int8, torch.int8), "token")
    case.keys, case.values = (
        numbers_of(caches[f"{role}_cache"]).float() * caches[f"{role}_scale"].unsqueeze(-1) for role in ("key", "value")
    )
    table = {"block_table": case.table} if case.block else {}
    case.ours = lambda: Node({"query": case.query, "seq_lens": case.seq_lens, **caches, **table}, attrs)
    return case


class Short:
    """What one_segment.h takes of a row's call."""

    def __init__(self, row):
        width = max(row["key_width"], row["value_width"])
        self.kind = 0 if width <= 64 else 1 if width <= 128 else 2
        self.rows, self.units = row["group"] * row["new"], row["batch"] * row["kv_heads"]
        self.keys = -(-row["longest"] // row["block"]) * row["block"] if row["block"] else row["longest"]
        self.known = row["lengths"] == "equal" and not row["block"]
        self.narrow = row.get("quantised", False)
        self.megabytes = self.units * self.keys * (1e-6 if self.narrow else 2e-6) * (row["key_width"] + row["value_width"])
        self.row_tile = 8 if self.rows <= 8 or self.kind == 2 or self.narrow else 16
        self.row_tiles = -(-self.rows // self.row_tile)

    def ways(self):
        """Those that may be taken."""
        few = min(MOST_CTAS // self.units, self.keys // LEAST_KEYS)
        fits = [way for way, (small, parts) in enumerate(WAYS) if (small if self.narrow else not (small and parts == 0))]
        return [way for way in fits if WAYS[way][1] == 1 or 1 < self.parts(way) <= few]

    def parts(self, way):
        small, parts = WAYS[way]
        at_once = SMS * self.per_sm(small) // (self.units * self.row_tiles)
        return parts or max(min(at_once, self.keys // LEAST_KEYS, MOST_PARTS), 1)

    def per_sm(self, small):
        return 1 if not small else 2 if self.kind == 2 else 3

    def rounds(self, way):
        small, parts = WAYS[way][0], self.parts(way)
        warps = 4 if small else 8 if self.kind == 2 else 12
        return max(self.keys / (parts * warps * (32 if self.kind <= self.narrow else 16)), 1.0)


def one_segment(c, call, way):
    small, parts, per_sm = WAYS[way][0], call.parts(way), call.per_sm(WAYS[way][0])
    slots = SMS * per_sm if WAYS[way][1] < 2 else 16 * per_sm // parts * parts * (SMS // 18)
    waves, rounds = call.units * call.row_tiles * parts / slots, call.rounds(way)
    mean = 1.0 if call.known else MEAN_OF_WHOLE
    each = c["round"][call.kind + 3 * small] * (c["many_rows"][0] if call.row_tile > 8 else 1.0)
    next_cta = c["next_cta"][small]
    through = (waves + math.ceil(waves)) / 2 * (max(rounds * mean, 1.0) * each + next_cta) - next_cta if waves > 1 else 0.0
    us = c["start"][way] + max(rounds * each, through)
    return max(us, call.megabytes * mean * (call.row_tiles - 1) / c["again"][0])


def scheduled(c, call):
    mean = 1.0 if call.known else MEAN_OF_CUT
    few = call.rows <= 8
    kind = (3 if few else 4) if call.kind == 2 else 0 if few else 1 if call.rows <= 16 else 2
    row_tiles = max(call.rows / 64, 1.0) if kind in (2, 4) else 1.0
    tiles, units = call.units * call.keys * mean / 64 / SMS * row_tiles, call.units / SMS
    us = c["start"][kind] + max(call.megabytes * mean / c["read"][0], tiles * c["tile"][kind])
    return us + max(units - 1, 0) * c["next_unit"][kind > 1] + (0.0 if call.known else c["unknown"][0])


def chosen(ways, others, call):
    """The way that the header takes with these constants, or -1."""
    expected = {-1: NEARLY * scheduled(others, call)}
    most = MOST_WIDE_ROUNDS if call.narrow and call.kind == 2 and call.rows > call.row_tile else MOST_ROUNDS
    expected |= {way: one_segment(ways, call, way) for way in call.ways() if call.rounds(way) <= most}
    return min(expected, key=lambda way: expected[way])


def descend(loss, constants):
    """Constants of a smaller loss, one after the other up and down by steps that shrink."""
    least, step = loss(constants), 0.3
    while step > 0.005:
        before = least
        for name, i in [(n, i) for n, values in constants.items() for i in range(len(values))]:
            for by in (1 + step, 1 / (1 + step)):
                tried = {n: list(values) for n, values in constants.items()}
                tried[name][i] *= by
                if (found := loss(tried)) < least:
                    least, constants = found, tried
        if least > before * 0.999:
            step /= 2
    return constants, math.sqrt(least)


def fit(rows):
    calls = [(Short(row), row["us"], min(row["us"].values())) for row in rows]

    def loss_of_ways(c):
        errors = [
            (best / t) ** 3 * math.log(one_segment(c, call, int(way)) / t) ** 2
            for call, us, best in calls
            for way, t in us.items()
            if way != "-1"
        ]
        return statistics.fmean(errors)

    def loss_of_scheduled(c):
        return statistics.fmean(
            (best / us["-1"]) ** 2 * math.log(scheduled(c, call) / us["-1"]) ** 2 for call, us, best in calls
        )

    quantised = rows[0].get("quantised", False)
    ways = descend(loss_of_ways, QUANTISED_ONE_SEGMENT if quantised else ONE_SEGMENT)
    others = descend(loss_of_scheduled, QUANTISED_SCHEDULED if quantised else SCHEDULED)
    for name, (constants, error) in {"one_segment_us": ways, "scheduled_us": others}.items():
        print(f"{name}: errors of {error:.1%}", {n: [round(x, 2) for x in values] for n, values in constants.items()})
    over, gains = [], []
    for call, us, best in calls:
        taken = us[str(chosen(ways[0], others[0], call))]
        over.append(taken / best)
        gains.append(us["-1"] / taken)
    print(f"{len(rows)} shapes: chosen over fastest {statistics.geometric_mean(over):.3f}, at worst {max(over):.2f}")
    print(f"other kernels over chosen {statistics.geometric_mean(gains):.3f}, at worst {min(gains):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="hexadecimal")
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--many-rows", action="store_true")
    parser.add_argument("--quantised", action="store_true")
    parser.add_argument("--fit", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.fit:
        return fit([row for path in arguments.fit for row in json.loads(path.read_text())["rows"]])
    if arguments.out is None:
        parser.error("OUT or --fit FILE ... is missing")
    import torch

    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    rows = []
    for i, shape in enumerate(shapes(arguments.seed, arguments.shapes, arguments.many_rows, arguments.quantised)):
        rows.append(measure(shape, i, arguments.rounds))
        if i % 16 == 0:
            torch.cuda.empty_cache()
    report = {**facts, "seed": f"{arguments.seed:x}", "rounds": arguments.rounds, "rows": rows}
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    best = [row["us"]["-1"] / min(row["us"].values()) for row in rows]
    print(f"{len(rows)} shapes: the fastest way is {statistics.geometric_mean(best):.2f}x as fast as the other kernels")


if __name__ == "__main__":
    main()
