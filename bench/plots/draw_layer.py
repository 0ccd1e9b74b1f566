"""Draws one layer of an exported decoder: its nodes, in the order in which they run, and the shapes between them.

    python -m bench.plots.draw_layer FOLDER [--layer 1] [-o bench/results/decoder_layer.svg]

FOLDER: written by leanfleet export. Layer 0 cannot be drawn: what all layers share (positions, rotary tables) runs before it.
A layer begins with the node that adds the last layer's result to the residual stream and takes the norm of the sum. The nodes
of another norm, which ONNX Runtime runs as one kernel, are one box.
"""

import argparse
from pathlib import Path

import onnx_ir as ir

from bench.plots import diagram
from leanfleet.plotting import CARD, MUTED, PALE_AMBER, PALE_BLUE, PALE_GREY

WIDTH, HEIGHT, GAP_X, GAP_Y = 158, 44, 16, 30
SUMS = {"RmsNorm": "sum, RMS norm", "SkipSimplifiedLayerNormalization": "sum, RMS norm", "SkipLayerNormalization": "sum, norm"}
FILLS = {"leanfleet": PALE_AMBER, "com.microsoft": PALE_BLUE, "": PALE_GREY, "input": CARD, "output": CARD}
LEGEND = (
    ("leanfleet", "leanfleet"),
    ("com.microsoft", "ONNX Runtime's own operators"),
    ("", "standard ONNX operators"),
    ("input", "values that enter and leave"),
)


def ancestors(node):
    """The nodes that a node's inputs need."""
    found, todo = set(), [v.producer() for v in node.inputs if v is not None]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [v.producer() for v in node.inputs if v is not None]
    return found


def layer_nodes(model, layer):
    """The nodes of a layer, in order."""
    order = list(model.graph)
    attentions = [n for n in order if n.domain == "leanfleet"]
    if not 0 < layer < len(attentions) - 1:
        raise SystemExit(f"layer {layer} cannot be drawn; the model's layers 1 .. {len(attentions) - 2} can")

    def start(attention):
        """The sum and norm that an attention's layer begins with."""
        before = ancestors(attention)
        sums = [n for n in order if n in before and n.op_type in SUMS]
        if not sums:
            raise SystemExit("no node of this model joins sums and norms; export it with fuse=True")
        return sums[-1]

    first, last = start(attentions[layer]), start(attentions[layer + 1])
    inside = ancestors(last) - ancestors(first)
    return [n for n in order if n in inside and n.op_type != "Constant"]


def text(value):
    shape = value.shape
    return "" if shape is None else "[" + ", ".join(str(d.value) if hasattr(d, "value") else str(d) for d in shape) + "]"


class Box:
    """A box of the picture: title, second line, the values it reads and writes."""

    def __init__(self, title, note, kind, reads, writes):
        self.title, self.note, self.kind, self.reads, self.writes = title, note, kind, reads, writes


def constant(value):
    return value.is_initializer() or (value.producer() is not None and value.producer().op_type == "Constant")


def sizes(node, value):
    """Whether a value only says what shape a Reshape gives."""
    return node.op_type == "Reshape" and value is node.inputs[1]


def parts(values):
    """The parts of a Split: their sizes along the axis that it cuts alone."""
    sizes = zip(*(text(v).strip("[]").split(", ") for v in values), strict=True)
    return next(along for along in sizes if len(set(along)) > 1)


def boxes(nodes):
    """One box a node, norms folded into one, with boxes for what comes from outside and for the caches that leave."""
    done, made = set(), []
    for node in nodes:
        if node in done:
            continue
        group = [node]
        if node.op_type == "Pow":  # x^2, mean, + eps, sqrt, x / it, * weight
            while group[-1].op_type != "Div":
                group.append(next(iter(group[-1].outputs[0].uses())).node)
            group.append(next(iter(group[-1].outputs[0].uses())).node)
        done |= set(group)
        last = group[-1]
        reads = list(
            dict.fromkeys(
                v
                for n in group
                for v in n.inputs
                if v is not None and not constant(v) and v.producer() not in group and not sizes(n, v)
            )
        )
        title = SUMS.get(node.op_type, node.op_type) if len(group) == 1 else "RMS norm"
        if node.op_type == "MatMul" and constant(node.inputs[1]):
            title += f" {text(node.inputs[1])}"
        used = [v for v in last.outputs if v.name and (v.uses() or v.is_graph_output())]
        shapes = list(dict.fromkeys(text(v) for v in (used[:1] if node.domain == "leanfleet" else used)))
        note = shapes[0] if len(shapes) == 1 else ", ".join(parts(used))
        made.append(Box(title, note, node.domain, reads, used))
    written = {v for box in made for v in box.writes}
    outside = dict.fromkeys(v for box in made for v in box.reads if v not in written)
    for value in outside:
        title = (
            value.name
            if value.is_graph_input()
            else ("residual stream" if value.producer().op_type in SUMS else "last layer's result")
        )
        made.insert(0, Box(title, text(value), "input", [], [value]))
    for box in list(made):
        for value in box.writes:
            if value.is_graph_output():
                made.append(Box(value.name, text(value), "output", [value], []))
    return made


def place(made):
    """{box: (column, row)}: a row below the lowest it reads from; what comes from outside stands above its first reader."""
    writer = {v: box for box in made for v in box.writes}
    row = {}
    for box in made:
        row[box] = 1 + max((row[writer[v]] for v in box.reads), default=-1)
    for box in made:
        if box.kind == "input":
            row[box] = min(row[b] for b in made if set(b.reads) & set(box.writes)) - 1
    lowest = min(row.values())
    column, taken = {}, {}
    for box in sorted(made, key=lambda b: (row[b], b.kind in ("input", "output"))):
        sources = [column[writer[v]] for v in box.reads if writer[v] in column]
        wanted = sum(sources) / len(sources) if sources and box.kind != "output" else 0.0 if not sources else max(sources) + 1
        used = taken.setdefault(row[box], [])
        free = sorted((abs(c / 2 - wanted), c / 2) for c in range(-8, 13) if all(abs(c / 2 - u) >= 1 for u in used))
        column[box] = free[0][1]
        used.append(column[box])
    left = min(column.values())
    return {box: (column[box] - left, row[box] - lowest) for box in made}


def draw(made, caption):
    top = 72
    at = {box: (12 + c * (WIDTH + GAP_X), top + r * (HEIGHT + GAP_Y)) for box, (c, r) in place(made).items()}
    width = max(x for x, _ in at.values()) + WIDTH + 12
    height = max(y for _, y in at.values()) + HEIGHT + 12
    return diagram.document(
        width,
        height,
        [
            diagram.text(12, 24, caption, size=15, weight="bold", anchor="start"),
            *legend(),
            *arrows(made, at),
            *(part for box, (x, y) in at.items() for part in drawn(box, x, y)),
        ],
    )


def legend():
    x = 12
    for kind, meaning in LEGEND:
        yield diagram.box(x, 36, 18, 14, FILLS[kind], kind == "input")
        yield diagram.text(x + 25, 47, meaning, MUTED, anchor="start")
        x += 45 + 7.2 * len(meaning)


def arrows(made, at):
    """Curves to the next rows; around the boxes between where there are some, left of them or, where that is taken, right."""
    writer = {v: box for box in made for v in box.writes}
    lanes = []
    for reader in made:
        for source in dict.fromkeys(writer[v] for v in reader.reads):
            (x1, y1), (x2, y2) = at[source], at[reader]
            if y2 - y1 > 2 * HEIGHT and abs(x1 - x2) < WIDTH:
                taken = any(x == x1 and y1 < low and high < y2 for x, high, low in lanes)
                lanes.append((x1, y1, y2))
                edges = (x1 + WIDTH, x2 + WIDTH) if taken else (x1, x2)
                lane = edges[0] + (1 if taken else -1) * GAP_X / 2
                yield diagram.arrow(f"M{edges[0]:.0f} {y1 + HEIGHT / 2:.0f}H{lane:.0f}V{y2 + HEIGHT / 2:.0f}H{edges[1]:.0f}")
            else:
                yield diagram.arrow(diagram.down(x1 + WIDTH / 2, y1 + HEIGHT, x2 + WIDTH / 2, y2))


def drawn(box, x, y):
    yield diagram.box(x, y, WIDTH, HEIGHT, FILLS[box.kind], box.kind in ("input", "output"))
    yield diagram.text(x + WIDTH / 2, y + 18, box.title, size=11, weight="bold" if box.kind == "leanfleet" else "normal")
    yield diagram.text(x + WIDTH / 2, y + 35, box.note, MUTED, 10)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--name", help="of the model, for the caption (default: the folder's)")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench/results/decoder_layer.svg"))
    args = parser.parse_args()
    model = ir.load(args.folder / "model.onnx")
    made = boxes(layer_nodes(model, args.layer))
    caption = f"A decoder layer of {args.name or args.folder.name} as exported, with the shapes of outputs and weights"
    args.output.write_text(draw(made, caption))
    print(f"wrote {args.output}: {len(made)} boxes")


if __name__ == "__main__":
    main()
