"""A decoder folder of leanfleet.export.export_decoder as one that onnxruntime-genai loads. Needs onnx-ir.

onnxruntime-genai (0.18 is tested) feeds a decoder `input_ids` [B,N], padded on the right, and `attention_mask` [B,total],
where our graph takes lengths: seq_lens is the mask's sum, and query_lens the smaller of that and N. Its caches of
max_length slots are bound to inputs and outputs alike (past_present_share_buffer), which LeanAttention appends to in
place. Quantised ones need scales that are constants of the graph: it has no place for a scale of each token. A recurrent layer
has two states there, so one without a conv_state gets one of a single number beside its recurrent_state. It loads custom
operators from the model's own folder alone, so the folder gets a copy of the library.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
from google.protobuf.message import DecodeError

from leanfleet.decoder_contract import (
    CONV_STATE,
    DECODER,
    INPUT_IDS,
    KEY,
    KEY_SUM,
    LOGITS,
    MODEL_FILE,
    QUERY_LENS,
    SEQ_LENS,
    STATE,
    VALUE,
    Facts,
    cache_name,
    is_part,
    layer_of,
    cache_forms,
    read_facts,
)
from leanfleet.files import new_folder
from leanfleet.ort_library import get_library_path

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "added_tokens.json")
DEFAULT_CONTEXT = 4096  # where the decoder says nothing
MASK = "attention_mask"  # of onnxruntime-genai alone


def bundle(folder: str | Path, target: str | Path) -> Path:
    """Writes to `target` model.onnx, genai_config.json, the library and the tokenizer's files; returns its path.

    folder: what export_decoder wrote. Generation is greedy until told otherwise (search options of genai_config.json).
    Without the tokenizer's files (export_decoder's tokenizer) onnxruntime-genai generates from token ids alone.
    Raises FileNotFoundError where a file is missing, ValueError for damaged files, another kind of model, one whose caches
    onnxruntime-genai has no place for, or where target is folder, OSError where target cannot be written; target is then as it
    was.

    Example:
        from leanfleet.ort_ops.genai import bundle

        bundle("decoder", "bundled")                        # then onnxruntime_genai.Model("bundled")
    """
    folder, target = Path(folder), Path(target)
    facts = read_facts(folder, DECODER)
    _check_caches(folder, facts)
    if folder.resolve() == target.resolve():
        raise ValueError(f"the bundle goes to a folder of its own; {target} holds the decoder")
    library = Path(get_library_path())
    with new_folder(target) as new:
        try:
            model = ir.load(folder / MODEL_FILE)
        except DecodeError as error:
            raise ValueError(f"{folder / MODEL_FILE} is no ONNX model: {error}") from None
        caches = _adapt(model.graph, folder)
        config = _config(facts, caches, library.name, _special_tokens(folder, facts["stop_tokens"]))
        external = any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
        ir.save(model, new / MODEL_FILE, external_data=f"{MODEL_FILE}.data" if external else None)
        for pattern in TOKENIZER_FILES:
            for path in folder.glob(pattern):
                shutil.copy(path, new)
        shutil.copy(library, new)
        (new / "genai_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def _check_caches(folder: Path, facts: Facts) -> None:
    """Raises ValueError for quantised caches that onnxruntime-genai has no place for: scales for each token, which are caches
    beside the caches, and two types, since it makes all caches of the first one's."""
    cache = facts.get("cache")
    if cache is None:
        return
    key, value = cache_forms(cache)
    other = "leanfleet.ort_ops.generate runs it"
    if key != value:
        raise ValueError(
            f"{folder} was exported with {cache} caches, and onnxruntime-genai has caches of one type alone. {other}; for the "
            f"bundle export with --cache {cache.partition('/')[0]} --calibrate TEXT"
        )
    if facts.get("cache_scales") is None:
        raise ValueError(
            f"{folder} was exported with {cache} caches that have a scale for each token, and onnxruntime-genai has no place "
            f"for caches of scales. {other}; for it export with scales found beforehand: --cache {cache} --calibrate TEXT"
        )


def _adapt(graph: ir.Graph, folder: Path) -> dict[str, ir.Value]:
    """Puts attention_mask in the place of seq_lens and query_lens, and gives logits the token axis that genai expects.
    Returns the inputs that are caches or states, by name."""
    inputs = {v.name or "": v for v in graph.inputs}
    logits = next((v for v in graph.outputs if v.name == LOGITS), None)
    if {n for n in inputs if not DECODER.is_cache(n)} != {t.name for t in DECODER.inputs} or logits is None:
        raise ValueError(
            f"{folder / MODEL_FILE} is no decoder of {DECODER.writer}: its inputs are {', '.join(list(inputs)[:4])}, ..."
        )
    batch, _ = _shape(inputs[INPUT_IDS])
    mask = ir.Value(name=MASK, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([batch, "total"]))
    tape = ir.tape.Tape()
    axis = tape.op("Constant", [], {"value_ints": [1]})
    seq_lens = tape.op("Cast", [tape.op("ReduceSum", [mask, axis], {"keepdims": 0})], {"to": ir.DataType.INT32})
    new = tape.op("Cast", [tape.op("Shape", [inputs[INPUT_IDS]], {"start": 1})], {"to": ir.DataType.INT32})
    query_lens = tape.op("Min", [seq_lens, new])
    for node in tape.nodes:
        node.outputs[0].name = node.name = f"genai/{node.op_type}_{tape.nodes.index(node)}"
    graph.insert_before(graph[0], tape.nodes)
    inputs[SEQ_LENS].replace_all_uses_with(seq_lens)
    inputs[QUERY_LENS].replace_all_uses_with(query_lens)
    kept = [v for v in graph.inputs if v.name not in (SEQ_LENS, QUERY_LENS)]
    graph.inputs.clear()
    graph.inputs.extend([kept[0], mask, *kept[1:]])
    if len(_shape(logits)) == 2:  # of the last token alone
        axes = ir.node("Constant", [], {"value_ints": [1]})
        wider = ir.node("Unsqueeze", [logits, axes.outputs[0]])
        axes.outputs[0].name, wider.name, axes.name = "genai/logits_axis", "genai/logits", "genai/logits_axis"
        graph.extend([axes, wider])
        output = wider.outputs[0]
        output.type, output.shape = logits.type, ir.Shape([batch, 1, _shape(logits)[1]])
        logits.name, output.name = "genai/last_logits", LOGITS
        graph.outputs[list(graph.outputs).index(logits)] = output
    caches = {name: v for name, v in inputs.items() if DECODER.is_cache(name)}
    if summed := [name for name in caches if is_part(name, KEY_SUM)]:
        raise ValueError(
            f"{folder / MODEL_FILE}: layer {layer_of(summed[0])} carries sums of keys and values, which onnxruntime-genai has "
            "no place for; leanfleet.ort_ops.generate runs it"
        )
    for name in [name for name in caches if is_part(name, STATE)]:
        layer = layer_of(name)
        conv_state = DECODER.past + cache_name(layer, CONV_STATE)
        if conv_state in caches:
            continue
        past = ir.Value(name=conv_state, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([batch, 1, 1]))
        present = ir.node("Identity", [past], name=f"genai/conv_state_{layer}")
        value = present.outputs[0]
        value.name, value.type, value.shape = DECODER.output_of(conv_state), past.type, past.shape
        graph.inputs.append(past)
        graph.append(present)
        graph.outputs.append(value)
    return caches


def _shape(value: ir.Value) -> ir.Shape:
    """The shape of an input or output of the graph. Raises ValueError where the file declares none."""
    if value.shape is None:
        raise ValueError(f"the model declares no shape of {value.name}: export it again")
    return value.shape


def _special_tokens(folder: Path, stop: list[int]) -> dict[str, int]:
    """{"bos_token": id, "pad_token": id}, of those that the tokenizer has.

    In a batch onnxruntime-genai masks every token that equals the padding, also inside a prompt: where the tokenizer pads
    with a token that prompts hold, its last special token is taken, which hardly any text has.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists() or not (folder / "tokenizer.json").exists():
        return {}
    try:
        named = json.loads(path.read_text())
        added = json.loads((folder / "tokenizer.json").read_text()).get("added_tokens", [])
    except (ValueError, AttributeError) as error:
        raise ValueError(f"the tokenizer in {folder} is damaged: {error}") from None
    ids = {t["content"]: t["id"] for t in added}
    texts = {name: named.get(name) for name in ("bos_token", "pad_token")}
    texts = {name: t["content"] if isinstance(t, dict) else t for name, t in texts.items()}
    found = {name: ids[t] for name, t in texts.items() if t in ids}
    spare = [t["id"] for t in added if t.get("special") and t["id"] not in (*stop, found.get("bos_token"))]
    if spare and found.get("pad_token") in (None, *stop, found.get("bos_token")):
        found["pad_token"] = spare[-1]
    return found


def _config(facts: Facts, caches: dict[str, ir.Value], library: str, special: dict[str, int]) -> dict[str, Any]:
    kept = {name: _shape(v) for name, v in caches.items() if is_part(name, KEY) or is_part(name, VALUE)}
    heads, _, size = next(iter(kept.values()))[1:] if kept else (1, 1, 1)  # read where there are caches alone
    if other := [name for name, shape in kept.items() if (shape[1], shape[3]) != (heads, size)]:
        found = kept[other[0]]
        raise ValueError(
            f"{other[0]} has {found[1]} heads of {found[3]}, {next(iter(kept))} has {heads} of {size}; "
            "onnxruntime-genai has caches of one size alone. leanfleet.ort_ops.generate runs it"
        )
    layers = 1 + max(layer_of(name) for name in caches)
    stop = facts["stop_tokens"]
    context = facts.get("max_positions") or DEFAULT_CONTEXT
    inputs, outputs = (
        {f"{word}_{part}_names": prefix + cache_name("%d", part) for part in (KEY, VALUE)}
        for prefix, word in ((DECODER.past, "past"), (DECODER.present, "present"))
    )
    model = {
        "type": "llama",  # genai's word for a decoder of this interface, whatever the architecture
        "vocab_size": facts["vocabulary"],
        "context_length": context,
        "bos_token_id": special.get("bos_token", stop[0] if stop else 0),
        "eos_token_id": stop,
        "pad_token_id": special.get("pad_token", stop[0] if stop else 0),
        "decoder": {
            "session_options": {"log_id": "onnxruntime-genai", "custom_ops_library": library, "provider_options": []},
            "filename": MODEL_FILE,
            "head_size": size,
            "num_hidden_layers": layers,
            "num_key_value_heads": heads,
            "num_attention_heads": heads,
            "hidden_size": heads * size,
            "inputs": {"input_ids": INPUT_IDS, "attention_mask": MASK, **inputs},
            "outputs": {"logits": LOGITS, **outputs},
        },
    }
    return {
        "model": model,
        "search": {
            "do_sample": False,
            "num_beams": 1,
            "num_return_sequences": 1,
            "min_length": 0,
            "max_length": context,
            "past_present_share_buffer": True,
        },
    }
