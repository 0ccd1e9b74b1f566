"""Makes every table and plot again from the JSON in bench/results/, where they are committed.

python -m bench figures [FOLDER]       FOLDER: where they go (default: their places in the checkout)

TABLES is the list of what makes which table. One picture is left: bench/results/decoder_layer.svg shows a model, not numbers,
and is drawn from an exported folder by bench.plots.draw_layer.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from bench.kernels import (
    attention_drawn,
    block_linear,
    causal_conv,
    collectives,
    context_parallel,
    cpu,
    decay_gates,
    delta_rule_accuracy,
    dependent_launch,
    gated_activation,
    gated_delta_rule,
    host_cost,
    linear,
    linear_attention,
    methods_table,
    ort_cuda,
    rms_norm,
    sample_tokens,
    token_shards,
)
from bench.models import (
    decoder_methods,
    end_to_end,
    hybrids,
    linearise,
    quantised_caches,
    quantised_weights,
    tensor_parallel,
    train_scale,
    vllm,
)
from bench.plots import draw_overview, pictures, plot_end_to_end, plot_lean_attention

OVERVIEW = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "overview.svg"


def one(name: str) -> dict:
    (report,) = pictures.read(f"{name}.json")
    return report


def of(name: str, table: Callable) -> Callable[[], str]:
    """A maker of the table that the script itself writes of one report."""
    return lambda: table(one(name))


def dated(name: str, text: Callable) -> Callable[[], str]:
    """Likewise, with the report's date before it, as these scripts write it."""

    def made() -> str:
        report = one(name)
        return f"{report['date']}. {text(report)}\n"

    return made


def ort_cuda_text(report: dict) -> str:
    return f"{ort_cuda.text(report, report['rows'])}\n{ort_cuda.linear_text(report['linear'])}"


def methods() -> str:
    return "\n".join(line for report in pictures.read("linear_methods_*_h200.json") for line in methods_table.tables(report))


TABLES: dict[str, Callable[[], str]] = {
    "attention_drawn_h200": of("attention_drawn_h200", attention_drawn.table),
    "causal_conv_h200": of("causal_conv_h200", causal_conv.table),
    "collectives_h100": of("collectives_h100", collectives.table),
    "collectives_h200": of("collectives_h200", collectives.table),
    "context_parallel_h100": of("context_parallel_h100", context_parallel.table),
    "context_parallel_4_h100": of("context_parallel_4_h100", context_parallel.table),
    "context_parallel_growth_h100": lambda: context_parallel.growth_table(pictures.shared_contexts("h100")),
    "collectives_4_h200": of("collectives_4_h200", collectives.table),
    "context_parallel_4_h200": of("context_parallel_4_h200", context_parallel.table),
    "token_shards_h200": of("token_shards_h200", token_shards.table),
    "context_parallel_1m_h200": of("context_parallel_1m_h200", tensor_parallel.table),
    "context_parallel_h200": of("context_parallel_h200", context_parallel.table),
    "tensor_parallel_8b_2_h200": of("tensor_parallel_8b_2_h200", tensor_parallel.table),
    "tensor_parallel_8b_h200": of("tensor_parallel_8b_h200", tensor_parallel.table),
    "tensor_parallel_70b_h200": of("tensor_parallel_70b_h200", tensor_parallel.table),
    "vllm_8b_2_h200": of("vllm_8b_2_h200", vllm.text),
    "context_parallel_growth_h200": lambda: context_parallel.growth_table(pictures.shared_contexts("h200")),
    "block_linear_cpu": of("block_linear_cpu", block_linear.table),
    "block_linear_h200": of("block_linear_h200", block_linear.table),
    "cpu_avx2": dated("cpu_avx2", lambda r: cpu.table(r["machine"], r["rows"])),
    "cpu_avx512": dated("cpu_avx512", lambda r: cpu.table(r["machine"], r["rows"])),
    "cpu_avx2_epyc": dated("cpu_avx2_epyc", lambda r: cpu.table(r["machine"], r["rows"])),
    "cpu_avx512_epyc": dated("cpu_avx512_epyc", lambda r: cpu.table(r["machine"], r["rows"])),
    "decay_gates_h200": of("decay_gates_h200", decay_gates.table),
    "decoder_methods_cpu": of("decoder_methods_cpu", decoder_methods.table),
    "decoder_methods_h200": of("decoder_methods_h200", decoder_methods.table),
    "end_to_end_h200": dated("end_to_end_h200", lambda r: end_to_end.text(r, r["rows"])),
    "dependent_launch_h200": of("dependent_launch_h200", dependent_launch.table),
    "linear_h200": of("linear_h200", linear.table),
    "rms_norm_h200": of("rms_norm_h200", rms_norm.table),
    "gated_activation_h200": of("gated_activation_h200", lambda r: gated_activation.table(r["rows"])),
    "gated_delta_rule_accuracy_cpu": of("gated_delta_rule_accuracy_cpu", delta_rule_accuracy.table),
    "gated_delta_rule_h200": of("gated_delta_rule_h200", gated_delta_rule.table),
    "gated_delta_rule_drawn_h200": of("gated_delta_rule_drawn_h200", gated_delta_rule.table),
    "lean_attention_h200": of("lean_attention_h200", plot_lean_attention.table),
    "linear_attention_h200": of("linear_attention_h200", linear_attention.table),
    "linear_methods_h200": methods,
    "linear_moved_h100": of("linear_moved_h100", linear_attention.table),
    "linear_sweeps_h200": of("linear_sweeps_h200", linear_attention.table),
    "host_cost_cpu": of("host_cost_cpu", host_cost.table),
    "host_cost_cpu_epyc": of("host_cost_cpu_epyc", host_cost.table),
    "host_cost_h200": of("host_cost_h200", host_cost.table),
    "hybrids_cpu": of("hybrids_cpu", hybrids.table),
    "hybrids_nemotron_h200": of("hybrids_nemotron_h200", hybrids.table),
    "hybrids_h200": of("hybrids_h200", hybrids.table),
    "linearise_cpu": of("linearise_cpu", linearise.table),
    "tensor_parallel_h100": of("tensor_parallel_h100", tensor_parallel.table),
    "tensor_parallel_8b_h100": of("tensor_parallel_8b_h100", tensor_parallel.table),
    "tensor_parallel_70b_h100": of("tensor_parallel_70b_h100", tensor_parallel.table),
    "context_parallel_decoder_h100": of("context_parallel_decoder_h100", tensor_parallel.table),
    "ort_cuda_h200": dated("ort_cuda_h200", ort_cuda_text),
    "ort_cuda_quantised_h200": dated("ort_cuda_quantised_h200", lambda r: ort_cuda.text(r, r["rows"])),
    "quantised_caches_h200": of("quantised_caches_h200", plot_lean_attention.quantised_table),
    "quantised_prompts_h200": of("quantised_prompts_h200", plot_lean_attention.quantised_prompts_table),
    "quantised_caches_cpu": of("quantised_caches_cpu", quantised_caches.table),
    "quantised_weights_cpu": of("quantised_weights_cpu", quantised_weights.table),
    "sample_tokens_h200": of("sample_tokens_h200", lambda r: sample_tokens.table(r["rows"])),
    "train_scale_h200": of("train_scale_h200", train_scale.table),
    "train_scale_speed_h200": of("train_scale_speed_h200", train_scale.speed_table),
    "train_scale_speed_4_h200": of("train_scale_speed_4_h200", train_scale.speed_table),
    "genai_h200": of("genai_h200", vllm.text),
    "vllm_h200": of("vllm_h200", vllm.text),
    "vllm_8b_h200": of("vllm_8b_h200", vllm.text),
    "vllm_quantised_h200": of("vllm_quantised_h200", vllm.text),
    "vllm_h100": of("vllm_h100", vllm.text),
    "whole_models_h200": lambda: plot_end_to_end.text(pictures.whole_models()),
}


@functools.cache
def table(name: str) -> str:
    return TABLES[name]().strip() + "\n"


def make(folder: Path | None = None) -> list[Path]:
    """Writes all of them; returns the files. folder: None for their places in the checkout."""
    made = []
    results = folder or pictures.RESULTS
    results.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        made.append(results / f"{name}.md")
        made[-1].write_text(table(name))
    made += pictures.draw(results)
    made.append(folder / OVERVIEW.name if folder else OVERVIEW)
    made[-1].write_text(draw_overview.draw())
    return made
