"""Tables of methods by length, as the papers print them, from what `leanfleet bench --out` wrote.

    leanfleet bench --device cuda --dtype bfloat16 --decay head --load bench/kernels/triton_baselines.py --out decay.json \\
        --shapes 1x16x1000x128x128,1x16x10000x128x128,1x16x100000x128x128,16x16x1000x128x128,16x16x10000x128x128
    python -m bench.kernels.methods_table decay.json none.json ... > tables.md

A table for each file and each set of sizes but the length (FleetAttention, tables 3 to 6): milliseconds, a method a row, a
length a column.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from leanfleet.bench import Shape


def tables(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report's tables in Markdown."""
    settings, machine = report["settings"], report["machine"]
    decay = {"none": "without decay", "head": "a decay for each head", "token": "a decay for each token"}
    groups = {}
    for row in report["rows"]:
        groups.setdefault(tuple(n for key, n in row["shape"].items() if key != "tokens"), []).append(row)
    for rows in groups.values():
        lengths = sorted({r["shape"]["tokens"] for r in rows})
        sizes = " ".join(w for w in str(Shape(**rows[0]["shape"])).split() if not w.startswith("N"))
        yield from (
            f"## {settings['operator']}, {sizes}, {settings['dtype']}, {decay[settings['log_decay']]}",
            "",
            f"{report['date']}, {machine['device']}, torch {machine['torch']}; milliseconds, forward"
            f"{' and backward' if settings['grad'] else ''}.",
            "",
            f"| method | {' | '.join(map(str, lengths))} |",
            "|---" * (len(lengths) + 1) + "|",
        )
        for method in dict.fromkeys(r["method"] for r in rows):
            found = {r["shape"]["tokens"]: r for r in rows if r["method"] == method}
            cells = [f"{found[n]['seconds'] * 1e3:.3f}" if found[n]["status"] == "ok" else found[n]["status"] for n in lengths]
            yield f"| {method} | {' | '.join(cells)} |"
        yield ""


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path) as file:
            print("\n".join(tables(json.load(file))))
