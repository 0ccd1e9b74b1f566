"""Draws one layer of an exported decoder: its nodes, in the order in which they run, and the shapes between them.

    python bench/draw_layer.py FOLDER [--layer 1] [-o bench/results/decoder_layer.svg]

FOLDER: written by leanfleet export. Layer 0 cannot be drawn: what all layers share (positions, rotary tables) runs before it.
A layer begins with the node that adds the last layer's result to the residual stream and takes the norm of the sum. The nodes
of another norm, which ONNX Runtime runs as one kernel, are one box.
"""

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

import onnx_ir as ir

WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 44, 26, 34
SUMS = {"SkipSimplifiedLayerNormalization": "sum, RMS norm", "SkipLayerNormalization": "sum, norm"}
FILLS = {"leanfleet": "#ffd9a8", "com.microsoft": "#dce8f7", "": "#eef0f2", "input": "#ffffff", "output": "#ffffff"}


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
        reads = list(dict.fromkeys(v for n in group for v in n.inputs if v is not None and not constant(v)
                                   and v.producer() not in group and not sizes(n, v)))
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
        title = value.name if value.is_graph_input() else (
            "residual stream" if value.producer().op_type in SUMS else "last layer's result")
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
    at = {box: (12 + c * (WIDTH + GAP_X), 40 + r * (HEIGHT + GAP_Y)) for box, (c, r) in place(made).items()}
    width = max(x for x, _ in at.values()) + WIDTH + 12
    height = max(y for _, y in at.values()) + HEIGHT + 12
    writer = {v: box for box in made for v in box.writes}
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
             f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="#ffffff"/>',
             '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
             '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
             f'<text x="12" y="22" font-weight="bold">{escape(caption)}</text>']
    for box in made:
        for source in dict.fromkeys(writer[v] for v in box.reads):
            (x1, y1), (x2, y2) = at[source], at[box]
            x1, y1, x2 = x1 + WIDTH / 2, y1 + HEIGHT, x2 + WIDTH / 2
            bend = (y2 - y1) / 2
            if y2 - y1 > 2 * HEIGHT and abs(x1 - x2) < WIDTH:  # around the boxes between
                side = min(x1, x2) - WIDTH * 0.8
                path = f"M{x1:.0f} {y1:.0f}C{side:.0f} {y1 + 40:.0f} {side:.0f} {y2 - 40:.0f} {x2:.0f} {y2:.0f}"
            else:
                path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
            parts.append(f'<path d="{path}" fill="none" stroke="#667" stroke-width="1.2" marker-end="url(#a)"/>')
    for box, (x, y) in at.items():
        dash = ' stroke-dasharray="4 3"' if box.kind in ("input", "output") else ""
        weight = ' font-weight="bold"' if box.kind == "leanfleet" else ""
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{FILLS[box.kind]}" '
                     f'stroke="#445"{dash}/>')
        parts.append(f'<text x="{x + WIDTH / 2:.0f}" y="{y + 18:.0f}" text-anchor="middle"{weight}>{escape(box.title)}</text>')
        parts.append(f'<text x="{x + WIDTH / 2:.0f}" y="{y + 35:.0f}" text-anchor="middle" fill="#556" font-size="10.5">'
                     f'{escape(box.note)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--name", help="of the model, for the caption (default: the folder's)")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench/results/decoder_layer.svg"))
    args = parser.parse_args()
    model = ir.load(args.folder / "model.onnx")
    made = boxes(layer_nodes(model, args.layer))
    caption = f"{args.name or args.folder.name}: layer {args.layer} as exported; shapes are those of outputs and weights"
    args.output.write_text(draw(made, caption))
    print(f"wrote {args.output}: {len(made)} boxes")


if __name__ == "__main__":
    main()
