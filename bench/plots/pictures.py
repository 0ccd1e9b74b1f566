"""Draws all plots of bench/results/ again, from the JSON that stands there.

python -m bench.plots.pictures [FOLDER]       FOLDER: where they go (default: bench/results)
"""

import json
import sys
from pathlib import Path

from bench.plots import plot_context_parallel, plot_end_to_end, plot_lean_attention, plot_linear_attention, plot_training

RESULTS = Path(__file__).resolve().parents[1] / "results"


def read(*patterns: str) -> list[dict]:
    """The results in the files of these names."""
    return [json.loads(path.read_text()) for pattern in patterns for path in sorted(RESULTS.glob(pattern))]


def whole_models() -> dict:
    """The reports of whole models on the H200, by script."""
    return plot_end_to_end.by_script(read("end_to_end*_h200.json", "generate_h200.json", "serving_*_h200.json"))


def shared_contexts(gpu: str) -> list[dict]:
    """The reports of keys that two and four GPUs of a kind share."""
    return read(f"context_parallel_{gpu}.json", f"context_parallel_4_{gpu}.json")


def draw(folder: Path) -> list[Path]:
    """Draws all into a folder; returns the files."""
    made = []
    for name, module in (("lean_attention", plot_lean_attention), ("linear_attention", plot_linear_attention)):
        (report,) = read(f"{name}_h200.json")
        for picture, make in module.PICTURES.items():
            made.append(folder / f"{picture}_h200.svg")
            make(report, made[-1])
    for name, tag in (("linear_sweeps_h200", "h200"), ("linear_moved_h100", "h100")):
        (report,) = read(f"{name}.json")
        made += plot_linear_attention.draw(report, folder, tag)
    for name, make in (
        ("train_parity_h200", plot_training.parity),
        ("train_speed_h200", plot_training.speed),
        ("train_scale_h200", plot_training.scale),
        ("train_scale_speed_h200", plot_training.scale_speed),
    ):
        (report,) = read(f"{name}.json")
        made.append(folder / f"{name}.svg")
        make(report, made[-1])
    for gpu in ("h100", "h200"):
        made.append(folder / f"context_parallel_growth_{gpu}.svg")
        plot_context_parallel.scaling(shared_contexts(gpu), made[-1])
    made += plot_end_to_end.plot(whole_models(), folder)
    return made + plot_end_to_end.plot(plot_end_to_end.by_script(read("generate_cpu.json")), folder, "cpu")


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(path)
