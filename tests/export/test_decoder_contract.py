"""The decoder's contract: leanfleet.json's format, and that nothing else spells its names."""

import ast
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import leanfleet
from leanfleet import decoder_contract, export, ort_ops, trt_plugins
from leanfleet.decoder_contract import CONTEXT, DECODER, PADDED_SERVING, SERVING, packed, read_facts, write_facts

FACTS = {"vocabulary": 9, "stop_tokens": [2], "max_positions": None}


def folder_of(tmp_path, facts):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "leanfleet.json").write_text(json.dumps(facts))
    return tmp_path


def test_what_is_written_is_read(tmp_path):
    folder = folder_of(tmp_path, {})
    write_facts(folder, FACTS | {"kind": "serving", "block": 4})
    assert json.loads((folder / "leanfleet.json").read_text())["format"] == 4
    assert read_facts(folder, SERVING) == FACTS | {"kind": "serving", "block": 4, "format": 4}
    with pytest.raises(ValueError, match="holds a model of kind serving; this needs one from leanfleet.export.export_decoder"):
        read_facts(folder, DECODER)
    write_facts(folder, FACTS)
    assert read_facts(folder, DECODER) == FACTS | {"format": 1}, "decoders are as they were"


def test_a_file_without_a_format_is_of_the_first(tmp_path):
    assert read_facts(folder_of(tmp_path, FACTS), DECODER) == FACTS


def test_an_unknown_format_is_one_error(tmp_path):
    """Before anything else: what a newer version writes may not have today's entries."""
    folder = folder_of(tmp_path, {"format": 8, "kind": "something new"})
    with pytest.raises(ValueError) as error:
        read_facts(folder, DECODER)
    assert str(error.value) == (
        f"{folder / 'leanfleet.json'} has format 8, and leanfleet {leanfleet.__version__} knows formats up to 7: update leanfleet, "
        "or export the model again with leanfleet.export.export_decoder of this version"
    )


def ranked(tmp_path, parallel, count=2):
    for rank in range(count):
        (tmp_path / decoder_contract.rank_file(rank)).write_bytes(b"")
    (tmp_path / "leanfleet.json").write_text(json.dumps(FACTS | {"format": 5} | parallel))
    return tmp_path


def test_folders_for_several_ranks(tmp_path):
    parallel = {"tensor_parallel": {"world": 2, "files": ["model.rank0.onnx", "model.rank1.onnx"]}}
    folder = ranked(tmp_path, {})
    write_facts(folder, FACTS | parallel)
    assert read_facts(folder, DECODER, parallel=True) == FACTS | parallel | {"format": 5}
    with pytest.raises(
        ValueError, match="exported for 2 ranks .tensor_parallel., which run together: leanfleet generate .*--gpus 2"
    ):
        read_facts(folder, DECODER)
    (folder / "model.rank1.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="model.rank1.onnx does not exist, though .*leanfleet.json names it"):
        read_facts(folder, DECODER, parallel=True)
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="is of a tensor parallel folder, and .*model.onnx is not"):
        read_facts(folder, DECODER)


@pytest.mark.parametrize(
    "said",
    [None, 2, {}, {"world": 2}, {"world": 1, "files": ["model.rank0.onnx"]}, {"world": 2, "files": ["../a", "/etc/passwd"]}]
    + [{"world": 10**6, "files": []}, {"world": "2", "files": ["model.rank0.onnx", "model.rank1.onnx"]}],
    ids=str,
)
def test_ranks_that_make_no_sense(tmp_path, said):
    folder = ranked(tmp_path, {} if said is None else {"tensor_parallel": said})
    for parallel in (True, False):
        with pytest.raises(ValueError, match="tensor_parallel is .*; expected a world of 2 or more ranks, and their files"):
            read_facts(folder, DECODER, parallel=parallel)


def test_folders_whose_context_ranks_share(tmp_path):
    folder = folder_of(tmp_path, {})
    context = {"context_parallel": {"world": 3, "block": 64}}
    write_facts(folder, FACTS | context)
    assert read_facts(folder, DECODER, parallel=True) == FACTS | context | {"format": 6}
    assert decoder_contract.parallel_of(FACTS | context) == decoder_contract.Parallel("context_parallel", 3)
    assert decoder_contract.decoder_interface(FACTS | context) is decoder_contract.CONTEXT
    with pytest.raises(
        ValueError, match="exported for 3 ranks .context_parallel., which run together: leanfleet generate .*--gpus 3"
    ):
        read_facts(folder, DECODER)
    (folder / "model.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="model.onnx does not exist"):
        read_facts(folder, DECODER, parallel=True)


@pytest.mark.parametrize(
    "said",
    [2, {}, {"world": 2}, {"world": 1, "block": 64}, {"world": 65, "block": 64}, {"world": 2, "block": 0}, [2, 64]]
    + [{"world": 2, "block": 1 << 20}, {"world": "2", "block": 64}, {"world": 2, "block": 64.0}],
    ids=str,
)
def test_shares_of_a_context_that_make_no_sense(tmp_path, said):
    folder = folder_of(tmp_path, FACTS | {"format": 6, "context_parallel": said})
    for parallel in (True, False):
        with pytest.raises(ValueError, match="context_parallel is .*; expected a world of 2 to 64 ranks, and a block"):
            read_facts(folder, DECODER, parallel=parallel)


def test_heads_and_context_are_not_shared_out_together(tmp_path):
    both = {
        "tensor_parallel": {"world": 2, "files": ["model.rank0.onnx", "model.rank1.onnx"]},
        "context_parallel": {"world": 2, "block": 64},
    }
    with pytest.raises(ValueError, match="has context_parallel, and the folder is tensor parallel; it cannot be both"):
        read_facts(ranked(tmp_path, both), DECODER, parallel=True)
    assert read_facts(folder_of(tmp_path / "one", FACTS | {"context_parallel": None}), DECODER)["vocabulary"] == 9


@pytest.mark.parametrize("value", ["1", 1.5, 0, -1, True, None, [1]], ids=str)
def test_a_format_that_is_no_number(tmp_path, value):
    with pytest.raises(ValueError, match="leanfleet.json: format is .*; expected a positive number: export the model again"):
        read_facts(folder_of(tmp_path, FACTS | {"format": value}), DECODER)


def test_packed_inputs():
    feed = packed([[5, 6, 7], np.array([8])], [2, 4], [[9, 1], [3]])
    expected = {
        "input_ids": [5, 6, 7, 8],
        "token_index": [0, 1, 2, 3],
        "positions": [2, 3, 4, 4],
        "last": [2, 3],
        "seq_lens": [5, 5],
        "cu_query_lens": [0, 3, 4],
        "block_table": [[9, 1], [3, 0]],
        "state_index": [-1, -1],
        "temperature": [0.0, 0.0],
        "top_k": [0, 0],
        "top_p": [1.0, 1.0],
        "min_p": [0.0, 0.0],
        "seed": [0, 0],
    }
    assert {name: array.tolist() for name, array in feed.items()} == expected and list(feed) == list(expected)
    assert [str(array.dtype) for array in feed.values()] == [t.type for t in SERVING.inputs]
    before = packed([[5, 6, 7], np.array([8])], [2, 4], [[9, 1], [3]], PADDED_SERVING)
    expected |= {"slots": [[0, 1, 2], [3, 0, 0]], "rows": [0, 1, 2, 3], "query_lens": [3, 1]}
    assert {name: array.tolist() for name, array in before.items()} == {
        n: v
        for n, v in expected.items()
        if n not in ("cu_query_lens", "token_index", "state_index", *decoder_contract.SETTINGS)
    }
    assert [(n, str(array.dtype)) for n, array in before.items()] == [(t.name, t.type) for t in PADDED_SERVING.inputs]
    chosen = [decoder_contract.Sampling(0.5, 3, 0.25, 0.125, 9), decoder_contract.Sampling()]
    feed = packed([[-2], [7, 8]], [4, 0], [[1], [2]], sampling=chosen, earlier=3)  # the first one's token is the earlier call's
    assert feed["input_ids"].tolist() == [0, 0, 0, 0, 7, 8] and feed["token_index"].tolist() == [1, 4, 5]
    assert [feed[n].tolist() for n in decoder_contract.SETTINGS] == [[0.5, 0], [3, 0], [0.25, 1], [0.125, 0], [9, 0]]
    feed = packed([[5, 6, 7], [8]], [2, 4], [[9, 1], [3]], sampling=chosen, states=[4, 2], wanted=[2, 1])
    assert feed["last"].tolist() == [1, 2, 3] and feed["seed"].tolist() == [9, 9, 0] and feed["state_index"].tolist() == [4, 2]


def test_the_modules_that_are_traced_take_the_inputs_in_their_order():
    from leanfleet.export.decoder import Decoder
    from leanfleet.export.serving import PackedDecoder

    for module, interface in ((Decoder, DECODER), (PackedDecoder, SERVING)):
        assert list(inspect.signature(module.forward).parameters)[1:-1] == [t.name for t in interface.inputs]


def test_names_stand_in_the_contract_alone():
    names = {t.name for interface in (DECODER, CONTEXT, SERVING) for t in interface.inputs}
    names |= {"logits", "recurrent_state", "leanfleet.json", "model.onnx", DECODER.writer, SERVING.writer}
    prefixes = tuple(prefix for interface in (DECODER, SERVING) for prefix in (interface.past, interface.present))
    others = {
        "ort_ops/genai.py": {"input_ids", "logits"},  # keys of genai_config.json
        "leanfleet/generation.py": {"input_ids"},  # what tokenizers call their answer
        "export/verification.py": {"token_index"},  # the end of names in a model's configuration
    }
    exporters = [
        Path(export.__file__).with_name(f"{name}.py")
        for name in ("cache", "decoder", "serving", "verification", "scheduled_calls", "linear_decoder", "context_parallel")
    ]
    runtimes = [path for package in (ort_ops, trt_plugins) for path in Path(package.__file__).parent.glob("*.py")]
    commands = [Path(leanfleet.__file__).with_name(f"{name}.py") for name in ("generate", "generation")]
    found = []
    for path in exporters + runtimes + commands:
        place = f"{path.parent.name}/{path.name}"
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if text in names - others.get(place, set()) or text.startswith(prefixes):
                found.append(f"{place}:{node.lineno}: {text}")
    assert len(runtimes) >= 7 and not found, found
