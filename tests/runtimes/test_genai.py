"""Decoder folders bundled for onnxruntime-genai: it loads our library and generates what transformers does."""

import json

import numpy as np
import onnx
import onnxruntime_genai
import pytest
import torch

from leanfleet import cli
from leanfleet.export import calibrate, export_decoder
from leanfleet.ort_ops.genai import _special_tokens, bundle
from leanfleet.ort_ops.generation import generate, load_decoder
from support.cpu_time import rest_slow
from support.decoders import MODELS, make, prompts

COUNT = 8
PAD = 2  # of models without a tokenizer: the stop token
ARCHITECTURES = {
    "llama": lambda: make("llama"),
    "minimax": MODELS["minimax"],
    "retnet": MODELS["retnet"],
    **{name: MODELS[name] for name in ("qwen3.5", "qwen3-next", "mamba2", "granite", "falcon-h1")},
}


def generated(model, rows, count=COUNT):
    """Greedy tokens after each row of int32 [B,N], padded on the right."""
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=rows.shape[1] + count, batch_size=len(rows), do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(rows)
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(t) for t in generator.get_sequence(i)[rows.shape[1] :]] for i in range(len(rows))]


def padded(asked):
    return np.array([p + [PAD] * (max(map(len, asked)) - len(p)) for p in asked], np.int32)


@pytest.fixture(scope="module", params=rest_slow(ARCHITECTURES))
def bundled(request, tmp_path_factory):
    """(PyTorch model, genai model, its folder)"""
    model = ARCHITECTURES[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    export_decoder(model, folder / "decoder")
    target = folder / "genai"
    assert cli.main(["bundle", str(folder / "decoder"), "--genai", str(target)]) == 0
    config = json.loads((target / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": 1}  # idle threads would spin beside PyTorch's
    (target / "genai_config.json").write_text(json.dumps(config))
    return model, onnxruntime_genai.Model(str(target)), target


def assert_greedy(model, prompt, tokens):
    """Each token is the one that the model likes best behind those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def test_tokens_are_those_of_the_model_alone_and_in_a_ragged_batch(bundled):
    model, genai, folder = bundled
    stop = json.loads((folder / "genai_config.json").read_text())["model"]["eos_token_id"]

    def before_stop(tokens):
        """genai leaves the stop token out, and fills rows of a batch up with padding."""
        return next((tokens[:i] for i, token in enumerate(tokens) if token in stop), tokens)

    asked = prompts(3, 11, 1, 7)
    alone = [before_stop(generated(genai, padded([p]))[0]) for p in asked]
    for prompt, tokens in zip(asked, alone, strict=True):
        assert_greedy(model, prompt, tokens)
        if len(tokens) < COUNT:
            with torch.no_grad():
                assert int(model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].argmax()) in stop
    assert [before_stop(tokens) for tokens in generated(genai, padded(asked))] == alone


def test_a_conversation_goes_on_where_it_was(bundled):
    """Tokens appended later see those before."""
    model, genai, _ = bundled
    first, second = prompts(5, 4)
    parameters = onnxruntime_genai.GeneratorParams(genai)
    parameters.set_search_options(max_length=64, do_sample=False)
    generator = onnxruntime_genai.Generator(genai, parameters)
    generator.append_tokens(np.array(first, np.int32))
    generator.append_tokens(np.array(second, np.int32))
    generator.generate_next_token()
    assert_greedy(model, first + second, [int(generator.get_sequence(0)[-1])])


def test_graph(bundled):
    _, _, folder = bundled
    onnx.checker.check_model(folder / "model.onnx")
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    assert [v.name for v in graph.input][:2] == ["input_ids", "attention_mask"]
    assert not {"seq_lens", "query_lens"} & {v.name for v in graph.input}
    (logits,) = (v for v in graph.output if v.name == "logits")
    assert [d.dim_value for d in logits.type.tensor_type.shape.dim][1] == 1
    assert (folder / "libleanfleet_ort.so").is_file()


@pytest.mark.parametrize("pad, expected", [("<pad>", 0), ("<end>", 7), (None, 7), ("<start>", 7)])
def test_padding_is_no_token_of_prompts(tmp_path, pad, expected):
    """A tokenizer that pads with its end of text, or with nothing, gets its last special token."""
    contents = ["<pad>", "<start>", "<end>"]
    added = [{"id": i, "content": c, "special": True} for i, c in [*enumerate(contents), (7, "<spare>")]]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [*added, {"id": 9, "content": "word", "special": False}]})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<start>"}, "pad_token": pad}))
    assert _special_tokens(tmp_path, [2]) == {"bos_token": 1, "pad_token": expected}


@pytest.mark.parametrize("form, scales", (("int8", "channel"), *rest_slow((("fp8", "tensor"), ("int4", "channel")), quick=0)))
def test_quantised_caches_with_scales_found_beforehand(tmp_path, form, scales):
    """A ragged batch, and a second piece behind it; what our own loop says over the same caches."""
    model = make("llama")
    text = torch.randint(3, model.config.vocab_size, (1, 60), generator=torch.manual_seed(1)).tolist()
    export_decoder(model, tmp_path / "decoder", cache=calibrate(model, text, form, scales), verify=False)
    bundle(tmp_path / "decoder", tmp_path / "genai")
    graph = onnx.load(tmp_path / "genai" / "model.onnx", load_external_data=False).graph
    types = {v.type.tensor_type.elem_type for v in graph.input if v.name.startswith("past_key_values.")}
    of = {"int8": onnx.TensorProto.INT8, "fp8": onnx.TensorProto.FLOAT8E4M3FN, "int4": onnx.TensorProto.UINT8}
    assert types == {of[form]}
    asked = prompts(3, 11, 1, 7)
    decoder = load_decoder(tmp_path / "decoder", providers=["CPUExecutionProvider"])
    expected, _ = generate(decoder, asked, COUNT, stop_tokens=[])
    stop = json.loads((tmp_path / "genai" / "genai_config.json").read_text())["model"]["eos_token_id"]
    found = generated(onnxruntime_genai.Model(str(tmp_path / "genai")), padded(asked))
    for tokens, right in zip(found, expected, strict=True):
        count = next((i for i, token in enumerate(right) if token in stop), COUNT)
        assert count and tokens[:count] == right[:count]


def test_quantised_caches_with_a_scale_for_each_token_are_refused(tmp_path, capsys):
    export_decoder(make("llama"), tmp_path / "decoder", cache="int8", verify=False)
    assert cli.main(["bundle", str(tmp_path / "decoder"), "--genai", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "a scale for each token" in told and "--cache int8 --calibrate TEXT" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_caches_of_several_sizes_are_refused(tmp_path, capsys):
    """Kimi-Linear's keys are longer than its values."""
    export_decoder(MODELS["kimi-linear"](), tmp_path / "decoder")
    assert cli.main(["bundle", str(tmp_path / "decoder"), "--genai", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "past_key_values.1.value has 6 heads of 16, past_key_values.1.key has 6 of 24" in told and "alone" in told
    assert not (tmp_path / "out").exists()


def test_errors(tmp_path, capsys):
    assert cli.main(["bundle", str(tmp_path), "--genai", str(tmp_path / "out")]) == 2
    assert "model.onnx does not exist; write the folder with leanfleet.export.export_decoder" in capsys.readouterr().err
    (tmp_path / "leanfleet.json").write_text('{"vocabulary": 9, "stop_tokens": [], "max_positions": null}')
    onnx.save(
        onnx.helper.make_model(
            onnx.helper.make_graph(
                [onnx.helper.make_node("Neg", ["x"], ["y"])],
                "g",
                [onnx.helper.make_tensor_value_info("x", 1, [1])],
                [onnx.helper.make_tensor_value_info("y", 1, [1])],
            )
        ),
        tmp_path / "model.onnx",
    )
    with pytest.raises(ValueError, match="is no decoder of leanfleet.export.export_decoder: its inputs are x"):
        bundle(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="a folder of its own"):
        bundle(tmp_path, tmp_path)
