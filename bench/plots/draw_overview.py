"""Draws how a PyTorch module reaches the kernels: one ONNX node, three runtimes, the same kernels.

python -m bench.plots.draw_overview [-o docs/pictures/overview.svg]
"""

import argparse
from pathlib import Path

from bench.plots.diagram import across, arrow, box, document, text
from leanfleet.plotting import BLUE, CARD, MUTED, PALE_AMBER, PALE_BLUE, PALE_GREY

RUNTIMES = (
    ("PyTorch", "trains and runs", 64),
    ("ONNX Runtime", "CPU and CUDA", 138),
    ("TensorRT", "CUDA, and TensorRT-RTX", 212),
)


def draw():
    parts = [*module(), *model(), *runtimes(), *kernels(), *links()]
    return document(830, 340, ['<g transform="translate(0 -23)">', *parts, "</g>"])


def module():
    yield box(16, 124, 172, 76, PALE_GREY)
    yield text(102, 150, "PyTorch module", weight="bold", size=13)
    yield text(102, 168, "yours, or a decoder", MUTED, 11)
    yield text(102, 184, "of transformers", MUTED, 11)


def model():
    yield box(246, 100, 218, 248, CARD)
    yield text(355, 122, "model.onnx", weight="bold", size=13)
    yield box(262, 136, 186, 74, PALE_AMBER)
    yield text(355, 160, "leanfleet::LeanAttention", weight="bold")
    yield text(355, 178, "one node", MUTED, 11)
    yield text(355, 194, "for each attention", MUTED, 11)
    yield box(262, 262, 186, 70, CARD, dashed=True)
    yield text(355, 284, "its function body", weight="bold")
    yield text(355, 302, "the same computation", MUTED, 11)
    yield text(355, 318, "in standard ONNX operators", MUTED, 11)
    yield arrow("M355 210L355 260", dashed=True)


def runtimes():
    for name, note, y in RUNTIMES:
        yield box(522, y - 26, 156, 52, PALE_BLUE)
        yield text(600, y - 3, name, weight="bold", size=13)
        yield text(600, y + 14, note, MUTED, 10.5)
    yield box(522, 271, 292, 52, CARD, dashed=True)
    yield text(668, 294, "any ONNX runtime", weight="bold", size=13)
    yield text(668, 311, "runs it without leanfleet, as plain operators", MUTED, 10.5)


def kernels():
    yield box(726, 38, 88, 200, PALE_AMBER)
    for line, y in (("the same", 116), ("kernels", 134)):
        yield text(770, y, line, weight="bold", size=13)
    yield text(770, 156, "CUDA", BLUE, 12, "bold")
    yield text(770, 174, "CPU", BLUE, 12, "bold")


def links():
    (_, _, pytorch), *others = RUNTIMES
    yield arrow(f"M102 124C102 {pytorch - 20} 200 {pytorch} 520 {pytorch}")
    yield text(330, pytorch - 8, "one call in PyTorch", MUTED, 11)
    yield arrow("M188 162L244 162")
    yield text(216, 154, "export", MUTED, 11)
    for _, _, y in others:
        yield arrow(across(448, 173, 520, y))
    yield arrow(across(448, 297, 520, 297), dashed=True)
    for _, _, y in RUNTIMES:
        yield arrow(f"M678 {y}L724 {y}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/pictures/overview.svg"))
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(draw())


if __name__ == "__main__":
    main()
