"""Measures the committed JSON of bench/results/ again, each file with its own script and arguments, and says what moved.

python -m bench again [--only TEXT] [--cpu] [--out FOLDER] [--list]
python -m bench compare OLD.json NEW.json

A row of the old file is compared with the row of the new one that has the same labels: case, shape, batch and the like. A
number has moved where the two differ by more than both their spreads together: from the median to the 10th or 90th percentile,
whichever is further, or what the row tells as its spread. Where the files tell none it is ASSUMED, a share. The exit code is 1
where a number moved or a row is gone.

MEASUREMENTS is the list of what measures which file, LEFT of the files that no command measures again, with the reason.
"""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plots.pictures import RESULTS
from leanfleet.tables import print_table

ASSUMED = 0.05  # of a number whose file tells no spread
GPU, CPU = "GPU", "CPU"


@dataclass(frozen=True)
class Measurement:
    """name: of the JSON. commands: modules of bench and their arguments, run one after the other. OUT: the JSON to write, STEM:
    the same without .json, WORK: a folder that all commands share, SEED: of drawn shapes, as the committed file tells it.
    lacks: words of places that came into the file in another way."""

    name: str
    device: str
    commands: tuple[str, ...]
    lacks: tuple[str, ...] = ()


def serving(shape: str, batch: int, graphs: bool) -> Measurement:
    more = {16: "", 64: " --requests 256 --batch 64 --prompt 512 --answer 128 --step-tokens 512"}[batch]
    flag, tag = (" --graphs", "_graphs") if graphs else ("", "")
    return Measurement(
        f"serving_{shape}_{batch}{tag}_h200",
        GPU,
        (
            f"models.serving export WORK/{shape} --shape {shape} --dtype float16",
            f"models.serving run WORK/{shape} --provider CUDA --energy{more}{flag} --out OUT",
        ),
    )


def linear_decoder(kind: str, layers: int) -> Measurement:
    commands = f"export WORK/{kind} --kind {kind} --layers {layers}", f"run WORK/{kind} --out OUT"
    return Measurement(f"end_to_end_{kind}_h200", GPU, tuple(f"models.end_to_end_linear {c}" for c in commands))


MEASUREMENTS = (
    Measurement("causal_conv_h200", GPU, ("kernels.causal_conv STEM --drawn 20",)),
    Measurement("decay_gates_h200", GPU, ("kernels.decay_gates STEM --drawn 20 --rounds 15",)),
    Measurement("dependent_launch_h200", GPU, ("kernels.dependent_launch STEM",)),
    Measurement("linear_h200", GPU, ("kernels.linear STEM --drawn 30",)),
    Measurement("rms_norm_h200", GPU, ("kernels.rms_norm STEM --drawn 20",)),
    Measurement("gated_activation_h200", GPU, ("kernels.gated_activation STEM",)),
    Measurement("gated_delta_rule_h200", GPU, ("kernels.gated_delta_rule STEM --peers fla --only named --rounds 15",)),
    Measurement(
        "gated_delta_rule_drawn_h200", GPU, ("kernels.gated_delta_rule STEM --peers fla --only drawn --drawn 30 --rounds 15",)
    ),
    Measurement(
        "quantised_caches_h200",
        GPU,
        ("kernels.lean_attention OUT --only quantised,drawn_quantised --peers xqa --rounds 15 --seed SEED",),
    ),
    Measurement("quantised_prompts_h200", GPU, ("kernels.lean_attention OUT --only quantised_prompts --rounds 9",)),
    Measurement(
        "lean_attention_h200",
        GPU,
        (
            "kernels.lean_attention OUT --only decode,step,ragged,paged,tokens,prompt,splits,balance "
            "--peers sdpa,fa3,flashinfer --rounds 15",
        ),
    ),
    Measurement("lean_attention_mixed_h200", GPU, ("kernels.lean_attention OUT --only mixed",)),
    Measurement(
        "lean_attention_prompts_h200",
        GPU,
        ("kernels.lean_attention OUT --only prompt,drawn_prompts --peers sdpa,cudnn,fa3 --seed SEED",),
    ),
    Measurement("linear_attention_h200", GPU, ("kernels.linear_attention STEM",), ("in full float32",)),
    Measurement("linear_sweeps_h200", GPU, ("kernels.linear_attention STEM --only heads,lengths,short",)),
    Measurement("linear_attention_auto_h200", GPU, ("kernels.linear_attention STEM --only auto",)),
    Measurement("one_segment_h200", GPU, ("kernels.one_segment OUT --seed SEED",)),
    Measurement("one_segment_fit_h200", GPU, ("kernels.one_segment OUT --seed SEED --shapes 220",)),
    Measurement("one_segment_fit_many_rows_h200", GPU, ("kernels.one_segment OUT --seed SEED --shapes 140 --many-rows",)),
    Measurement(
        "one_segment_fit_quantised_h200", GPU, ("kernels.one_segment OUT --seed SEED --shapes 80 --rounds 5 --quantised",)
    ),
    Measurement("ort_cuda_h200", GPU, ("kernels.ort_cuda --out OUT",)),
    Measurement("ort_cuda_quantised_h200", GPU, ("kernels.ort_cuda --quantised --out OUT",)),
    Measurement("sample_tokens_h200", GPU, ("kernels.sample_tokens STEM --rounds 20 --random 0",), ("beside FlashInfer",)),
    Measurement(
        "decoder_methods_h200",
        GPU,
        ("models.decoder_methods --device cuda --load bench/kernels/triton_baselines.py --limit 12 --out OUT",),
    ),
    Measurement(
        "hybrids_h200",
        GPU,
        ("models.hybrids export WORK/hybrids --dtype float16 --thin", "models.hybrids run WORK/hybrids OUT"),
    ),
    Measurement(
        "hybrids_nemotron_h200",
        GPU,
        (
            "models.hybrids export WORK/hybrids_nemotron --shape nemotron-h-8b-13-layers --thin",
            "models.hybrids run WORK/hybrids_nemotron OUT",
        ),
    ),
    Measurement("end_to_end_h200", GPU, ("models.end_to_end --energy --out OUT",)),
    linear_decoder("retnet", 24),
    linear_decoder("minimax", 2),
    Measurement("generate_h200", GPU, ("models.generate --provider CUDA --dtype float16 --work WORK/generate --out OUT",)),
    *(serving(s, b, g) for s, b in (("llama-1b", 16), ("llama-1b", 64), ("smollm2", 16)) for g in (False, True)),
    Measurement("block_linear_h200", GPU, ("kernels.block_linear STEM --cuda --seed SEED --rounds 11",)),
    Measurement("block_linear_cpu", CPU, ("kernels.block_linear STEM --seed SEED --rounds 7",)),
    Measurement("cpu_avx2", CPU, ("kernels.cpu --isa avx2 --threads 2 --out OUT",)),
    Measurement("cpu_avx512", CPU, ("kernels.cpu --isa avx512 --threads 2 --out OUT",)),
    Measurement("decoder_methods_cpu", CPU, ("models.decoder_methods --device cpu --batches 1 --out OUT",)),
    Measurement("gated_delta_rule_accuracy_cpu", CPU, ("kernels.delta_rule_accuracy --out OUT",)),
    Measurement("generate_cpu", CPU, ("models.generate --work WORK/generate --out OUT",)),
    Measurement("host_cost_cpu", CPU, ("kernels.host_cost --out OUT",)),
    Measurement(
        "hybrids_cpu",
        CPU,
        (
            "models.hybrids export WORK/hybrids",
            "models.hybrids run WORK/hybrids OUT --device cpu --prompts 512,2048 --batches 1,4,16 --context 512",
        ),
    ),
    Measurement("linearise_cpu", CPU, ("models.linearise --out OUT",)),
    Measurement("quantised_caches_cpu", CPU, ("models.quantised_caches --tokens 4096 --out OUT",)),
    Measurement("quantised_weights_cpu", CPU, ("models.quantised_weights OUT --windows 8",)),
)
LEFT = {
    "host_cost_cpu_epyc": "of an AMD EPYC: kernels.host_cost --out OUT",
    "host_cost_h200": "after python -m leanfleet.export.torch_autograd: kernels.host_cost --device cuda --out OUT",
    "linear_moved_h100": "of an H100: kernels.linear_attention STEM --only moved",
    "collectives_h100": "needs four GPUs: kernels.collectives OUT --gpus 4",
    "collectives_h200": "needs two GPUs: kernels.collectives OUT --rounds 20",
    "context_parallel_h100": "needs two GPUs: kernels.context_parallel OUT --seed 262946552 --rounds 31",
    "context_parallel_4_h100": "needs four GPUs: kernels.context_parallel OUT --gpus 4 --seed 262946552 --rounds 31",
    "collectives_4_h200": "needs four GPUs: kernels.collectives OUT --gpus 4 --rounds 20",
    "context_parallel_4_h200": (
        "needs four GPUs: kernels.context_parallel OUT --only llama,figure9,drawn,heads,batches --seed "
        "2065202294 --rounds 21 --gpus 4"
    ),
    "token_shards_h200": "needs two GPUs: kernels.token_shards OUT",
    "context_parallel_1m_h200": (
        "needs four GPUs: models.tensor_parallel OUT --gpus 4 --share context --context 1048576 --batches 1 --fill"
    ),
    "context_parallel_h200": (
        "needs two GPUs: kernels.context_parallel OUT --only llama,figure9,drawn,heads,batches --seed 181487108 --rounds 21"
    ),
    "tensor_parallel_8b_2_h200": "needs two GPUs: models.tensor_parallel OUT --shape llama-3-8b --context 8192",
    "tensor_parallel_8b_h200": "needs four GPUs: models.tensor_parallel OUT --gpus 4 --shape llama-3-8b --context 8192",
    "tensor_parallel_70b_h200": ("needs four GPUs: models.tensor_parallel OUT --gpus 4 --shape llama-3-70b --context 8192"),
    "vllm_8b_2_h200": "needs two GPUs and vLLM: models.vllm ours, vllm, table, of models.serving export --gpus 2",
    "tensor_parallel_h100": "needs four GPUs: models.tensor_parallel OUT --gpus 4 --serve --seconds 200",
    "tensor_parallel_8b_h100": "needs four GPUs: models.tensor_parallel OUT --gpus 4 --shape llama-3-8b --context 8192",
    "tensor_parallel_70b_h100": "needs four GPUs: models.tensor_parallel OUT --gpus 4 --shape llama-3-70b --context 8192",
    "context_parallel_decoder_h100": (
        "needs two GPUs: models.tensor_parallel --share context --context 131072 --batches 1 --layers 8"
    ),
    "cpu_avx2_epyc": "of an AMD EPYC: kernels.cpu --isa avx2 --threads 2 --out OUT",
    "cpu_avx512_epyc": "of an AMD EPYC: kernels.cpu --isa avx512 --threads 2 --out OUT",
    "int8_caches_cpu": "12,288 tokens, kept as an earlier form of models.quantised_caches wrote it",
    "continuous_llama-3.2-1b_64_graphs_h200": "lengths of one comparison with vLLM: models.serving run --energy",
    "end_to_end_answers_h200": "a run for each length of the prompt: models.end_to_end --answers",
    "linear_methods_decay_h200": "leanfleet bench --load bench/kernels/triton_baselines.py, minutes a method",
    "linear_methods_none_h200": "the same",
    "llama_cpp_cpu": "needs llama-cpp-python and a folder that leanfleet export wrote: models.llama_cpp",
    "serve_1b_h200": "needs a folder of models.serving export --shape llama-3.2-1b: models.serve --system 1000",
    "serve_falcon_h200": "the same of falcon-h1-1.5b",
    "serve_8b_h200": "the same of llama-3-8b",
    "steps_h200": "minutes of steps: PYTHONPATH=.:tests python -m stress.steps --out OUT.json",
    "serve_soak_cpu": "five minutes of clients: PYTHONPATH=.:tests python -m stress.soak --out OUT.json",
    "serve_cpu": "needs a folder that leanfleet export --serve wrote: models.serve",
    "speculate_cpu": "needs a folder that leanfleet export --serve wrote: models.speculate",
    "train_parity_h200": "an hour of training: models.train_parity train",
    "train_parity_onnxruntime_h200": "needs the checkpoint of that training: models.train_parity validate",
    "train_speed_h200": (
        "after python -m leanfleet.export.torch_autograd: models.train_parity speed --out OUT --graph --profile --rounds 5"
    ),
    "train_scale_h200": (
        "needs two GPUs: models.train_scale train OUT --ways ours,softmax,fla --gpus 2 --batch-tokens 131072, then validate; "
        "then the same with --ways ours-gated,simple-gla --like OUT, and add"
    ),
    "train_scale_speed_4_h200": (
        "needs four GPUs: models.train_scale speed OUT --gpus 4 --contexts 8192 --ways ours,softmax,fla"
    ),
    "train_scale_speed_h200": "needs two GPUs: models.train_scale speed OUT --gpus 2 --warm 4 --timed 8",
    "genai_h200": "needs onnxruntime-genai-cuda: models.vllm genai",
    "vllm_h200": "needs vLLM in an environment of its own: models.vllm",
    "vllm_8b_h200": "the same",
    "vllm_h100": "the same",
    "vllm_quantised_h200": "needs vLLM, and a folder exported with --cache int8: models.vllm ours, vllm --fp8-cache, table",
    "falcon_h1_ours_h200": "our side of Falcon-H1's lines, states of 32 and 16 bits: models.vllm ours --drawn 0 --no-serving",
    "attention_drawn_h200": "FlashInfer has kernels to compile first: kernels.attention_drawn OUT --compile, --seed 4f4e2212",
}


# What moved


@dataclass(frozen=True)
class Moved:
    """One number of two files. allowed: by how much it may differ, as a share of the old one."""

    place: str
    old: float
    new: float
    allowed: float

    @property
    def share(self) -> float:
        return self.new / self.old - 1 if self.old else math.inf


@dataclass
class Report:
    """compared: how many numbers. gone: places of the old file that the new one lacks; new: the other way round."""

    name: str
    compared: int = 0
    moved: list[Moved] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not self.moved and not self.gone


LABELS = (
    "section case line implementation kind model method operator batch context lengths shape heads kv_heads widths head_size "
    "dtype type mode vocabulary special packed tokens prompt prompts answer requests speculate share rate attention bits rank "
    "layers parts tokens_a_part direction fla algorithm key_bytes N B H D call way"
).split()


def label_of(row: dict[str, Any]) -> str:
    """What tells a row from the others of its list: settings, which no run measures."""
    return " ".join(f"{k}={_short(row[k])}" for k in LABELS if k in row and not _is_measured(k, row[k]))


def _is_measured(name: str, value: Any) -> bool:
    """Shares are, and lists of answers' tokens."""
    return (isinstance(value, float) and name != "rate") or (name == "tokens" and isinstance(value, list))


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """(place, number, its lowest and highest likely value or None) of everything that a report measures."""
    if isinstance(value, dict):
        if "median" in value and "p10" in value:
            yield place, float(value["median"]), (value["p10"], value["p90"])
            return
        for key, part in value.items():
            if _is_number(part) and key not in LABELS and not _is_aside(key):
                yield f"{place}/{key}", float(part), _spread(value, key, float(part))
            elif isinstance(part, (dict, list)) and key not in LABELS and not _is_aside(key):
                yield from numbers(part, f"{place}/{key}")
    elif isinstance(value, list) and all(isinstance(row, dict) for row in value):
        seen: dict[str, int] = {}
        for row in value:
            label = label_of(row)
            seen[label] = seen.get(label, 0) + 1
            yield from numbers(row, f"{place}[{label}]" + (f"#{seen[label]}" if seen[label] > 1 else ""))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_aside(key: str) -> bool:
    """Spreads, floors and facts about the machine or the run: no figures."""
    words = (
        "spread",
        "p10",
        "p90",
        "floor",
        "round",
        "seed",
        "load_average",
        "took",
        "machine",
        "settings",
        "versions",
        "facts",
    )
    return any(word in key for word in words) or key in ("names", "graph names", "parameters", "errors", "error")


def _spread(row: dict[str, Any], key: str, value: float) -> tuple[float, float] | None:
    names = [f"{key}_spread", f"{key} spread"]
    names += ["graph_spread", "graph spread"] if key.startswith("graph") else []
    names += ["spread"] if key in ("run", "seconds", "step") else []
    for name in names:
        if _is_number(row.get(name)):
            return value - row[name], value + row[name]
    if isinstance(rounds := row.get("rounds"), list) and rounds and all(map(_is_number, rounds)):
        return min(rounds), max(rounds)
    return None


def compared(old: Any, new: Any, name: str = "") -> Report:
    """What moved between two reports of one script."""
    report = Report(name)
    before, after = ({place: (n, spread) for place, n, spread in numbers(r)} for r in (old, new))
    report.gone = [place for place in before if place not in after]
    report.new = [place for place in after if place not in before]
    for place, (was, spread) in before.items():
        if place not in after:
            continue
        now, own = after[place]
        report.compared += 1
        allowed = _allowed(was, spread, now, own)
        if not abs(now - was) <= allowed:
            report.moved.append(Moved(place, was, now, allowed / abs(was) if was else 0.0))
    report.moved.sort(key=lambda m: -abs(m.share))
    return report


def _allowed(was: float, spread: tuple[float, float] | None, now: float, own: tuple[float, float] | None) -> float:
    if spread is None and own is None:
        return ASSUMED * abs(was)
    sides = [
        max(number - low, high - number) for number, (low, high) in ((was, spread or (was, was)), (now, own or (now, now)))
    ]
    return sum(sides)


def report(old: Path, new: Path, lacks: tuple[str, ...] = ()) -> Report:
    """lacks: words of places that the new file need not have. Raises OSError, and ValueError for files that are no JSON or hold
    no figures."""
    found = []
    for path in (old, new):
        try:
            found.append(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path} holds no JSON ({error}); give two files that one script of bench/ wrote") from None
    result = compared(*found, old.stem)
    result.gone = [place for place in result.gone if not any(words in place for words in lacks)]
    if not result.compared:
        raise ValueError(f"{old} and {new} have no figure in common; give two files that one script of bench/ wrote")
    return result


def tell(reports: list[Report]) -> int:
    """Prints reports; the exit code."""
    for r in reports:
        print(f"\n{r.name}: {r.compared} figures, {len(r.moved)} moved by more than their spread")
        rows = [
            (f"  {m.place.lstrip('/')}", f"{m.old:.4g}", f"{m.new:.4g}", f"{m.share:+.1%}", f"{m.allowed:.1%}") for m in r.moved
        ]
        if rows:
            print_table([("  where", "was", "is", "moved", "allowed"), *rows])
        for words, places in (("gone", r.gone), ("new", r.new)):
            for place in places[:10]:
                print(f"  {words}: {place.lstrip('/')}")
            if len(places) > 10:
                print(f"  {words}: {len(places) - 10} more")
    return int(not all(r.same for r in reports))


# Measuring


def chosen(only: str, device: str) -> list[Measurement]:
    """Raises ValueError where nothing fits."""
    found = [m for m in MEASUREMENTS if m.device == device and only in m.name]
    if not found:
        reasons = [f"{name}: {why}" for name, why in LEFT.items() if only in name]
        names = ", ".join(m.name for m in MEASUREMENTS if m.device == device)
        raise ValueError(f"nothing of the {device} is named '{only}' ({'; '.join(reasons[:3]) or f'there are {names}'})")
    return found


def lines_of(m: Measurement, out: Path) -> list[list[str]]:
    """The command lines of a measurement."""
    words = {"OUT": str(out / f"{m.name}.json"), "STEM": str(out / m.name), "WORK": str(out / "work"), "SEED": _seed(m.name)}
    lines = []
    for command in m.commands:
        module, *arguments = shlex.split(command)
        filled = [str(Path(words["WORK"]) / a[5:]) if a.startswith("WORK/") else words.get(a, a) for a in arguments]
        lines.append([sys.executable, "-m", f"bench.{module}", *filled])
    return lines


def _seed(name: str) -> str:
    """Of the drawn rows of a committed file; "0" where it has none."""
    rows = json.loads((RESULTS / f"{name}.json").read_text()).get("rows", ())
    return next((row["seed"] for row in rows if "seed" in row), "0")


def run(only: str, cpu: bool, out: Path, show: bool) -> int:
    """Raises RuntimeError where there is no GPU and one is needed, or a script fails."""
    measurements = chosen(only, CPU if cpu else GPU)
    if show:
        for m in measurements:
            print("\n".join(f"{m.name}: {shlex.join(line[1:])}" for line in lines_of(m, out)))
        print("\n".join(f"{name}: left out: {why}" for name, why in LEFT.items() if only in name))
        return 0
    if not cpu:
        refuse_without_gpu()
    out.mkdir(parents=True, exist_ok=True)
    reports = []
    for m in measurements:
        for line in lines_of(m, out):
            print(f"\n{shlex.join(line[1:])}", flush=True)
            if code := subprocess.run(line).returncode:
                raise RuntimeError(f"{shlex.join(line[1:])} ended with {code}: what it printed says why")
        reports.append(report(RESULTS / f"{m.name}.json", out / f"{m.name}.json", m.lacks))
        tell(reports[-1:])
    print("\nAll together:")
    return tell(reports)


def refuse_without_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "there is no CUDA GPU here, on which these files were measured (one NVIDIA H200): run it on one, or give --cpu for "
            "those of the CPU"
        )
    print(f"{torch.cuda.get_device_name()}; the committed files are of an NVIDIA H200")
