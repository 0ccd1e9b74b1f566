"""Continuous batching: requests that join and leave get what they would get alone."""

import copy
import functools
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from leanfleet import batching, parity
from leanfleet.decoder_contract import SERVING, SESSION_TYPES, is_state
from leanfleet.driver import Device
from leanfleet.export import decoder, reference
from leanfleet.export import serving as export_serving
from leanfleet.export.decoder import export_decoder
from leanfleet.export.serving import export_for_serving
from leanfleet.export.verification import VerificationError
from leanfleet.lookup import Lookup
from leanfleet.ort_ops import serving
from leanfleet.ort_ops.generation import generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from support import decoders
from support.cpu_time import rest_slow
from support.sampling_cases import Rule

BLOCK = 8


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
    ).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    export_for_serving(model, folder, block=BLOCK)
    return folder


def prompts(count, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 97, n).tolist() for n in random.integers(1, 60, count)]


def alone(model, prompt, new):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "limits", [{"pages": 200, "max_requests": 16, "step_tokens": 256}, {"pages": 23, "max_requests": 3, "step_tokens": 7}]
)
def test_requests_join_and_leave(model, folder, limits):
    """Every request gets the tokens of a generation of its own; all pages come back."""
    batch = ContinuousBatch(folder, providers=["CPUExecutionProvider"], **limits)
    wanted, requests, random = prompts(12), [], np.random.default_rng(1)
    sizes = []
    for prompt in wanted:
        requests.append(batch.add(prompt, int(random.integers(1, 20)), stop_tokens=()))
        for _ in range(random.integers(0, 3)):
            batch.step()
            sizes.append(len(batch.running))
    batch.run()
    assert max(sizes) > 1 and batch.idle
    for prompt, request in zip(wanted, requests):
        assert request.done and request.tokens == alone(model, prompt, request.max_new_tokens)
    assert batch.pool.in_use == 0
    if not batch.preemptions:
        assert batch.processed_tokens == sum(len(r.prompt) + len(r.tokens) - 1 - r.shared for r in requests)


def test_captured_steps(model, folder, monkeypatch):
    """What CUDA graphs replay, on the CPU: steps of one token each have a size of their own, a power of two or the limit, as
    have steps with pieces of prompts; rows without a request change nothing."""
    batch = ContinuousBatch(folder, pages=60, max_requests=5, step_tokens=32, providers=["CPUExecutionProvider"])
    batch.captured = {}
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    monkeypatch.setattr(serving, "LEAST_TABLE", 2)
    monkeypatch.setattr(serving, "MIXED_TABLE", 8)
    wanted, requests, random = prompts(9), [], np.random.default_rng(4)
    for pool in batch.pools:
        pool.update_inplace(np.full(pool.shape(), np.nan, np.float32))
    for prompt in wanted:
        requests.append(batch.add(prompt, int(random.integers(1, 25)), stop_tokens=()))
    batch.run()
    steps = {(tokens, rows) for tokens, rows, *_ in batch.captured}
    assert {(n, n) for n in (1, 2, 4, 5)} <= steps and {tokens for tokens, rows in steps if tokens > rows} >= {16, 32}
    assert {pages for n, rows, _, pages in batch.captured if n == rows} == {2, 4, 8, 16}
    assert {pages for n, rows, _, pages in batch.captured if n > rows} <= {8, 16}
    assert all(rows == 5 for n, rows in steps if n > rows)
    for prompt, request in zip(wanted, requests):
        assert request.tokens == alone(model, prompt, request.max_new_tokens)


def paced_batch(monkeypatch, folder, **limits):
    """(a batch as on a GPU, [(tokens of answers, whether requests wait, tokens in all) of each step])"""
    batch = ContinuousBatch(folder, pages=200, providers=["CPUExecutionProvider"], **limits)
    assert not batch.paced  # a CPU gains nothing by it
    batch.paced = True
    monkeypatch.setattr(batching, "PIECE_TOKENS", 8)
    steps, launch = [], batch._launch

    def counted(chosen):
        answers = sum(count for request, count in chosen if request.tokens)
        steps.append((answers, batch.full, sum(count for _, count in chosen)))
        return launch(chosen)

    monkeypatch.setattr(batch, "_launch", counted)
    return batch, steps


def test_answers_keep_pieces_of_prompts_short(model, folder, monkeypatch):
    """As on a GPU: beside answers in the making a step has few tokens of prompts while requests wait for a place, and a half of
    all prompts' once none does."""
    batch, steps = paced_batch(monkeypatch, folder, max_requests=6, step_tokens=128)
    asked = [random_prompt(n, n) for n in (60, 64, 62, 50, 55, 33, 48, 57, 61, 39)]
    requests = [batch.add(prompt, 14, stop_tokens=()) for prompt in asked]
    batch.run()
    first = [total for answers, _, total in steps if not answers]
    crowded = [total for answers, waiting, total in steps if answers >= 3 and waiting]
    others = [total for answers, waiting, total in steps if answers and not (answers >= 3 and waiting)]
    assert max(first) == 128 and max(crowded) == 16 and crowded.count(16) > 4 and 32 <= max(others) < 128
    for prompt, request in zip(asked, requests, strict=True):
        assert request.tokens == alone(model, prompt, 14)
    assert [batching.step_room(64, n, 99, True) for n in (0, 1, 8, 9, 60)] == [64, 16, 16, 24, 64]
    assert [batching.step_room(64, 5, n, False) for n in (0, 39, 40, 70, 500)] == [40, 48, 40, 40, 64]


def test_requests_that_wait_for_anothers_page_are_no_crowd(folder, monkeypatch):
    """The first of several with one beginning reads it for all: while places are free, it is not kept short for them."""
    batch, steps = paced_batch(monkeypatch, folder, max_requests=16, step_tokens=128)
    others = [batch.add(random_prompt(3, seed), 60, stop_tokens=()) for seed in range(8)]
    while not all(request.tokens for request in others):
        batch.step()
    beginning = random_prompt(160, 99)
    shared = [batch.add([*beginning, seed], 3, stop_tokens=()) for seed in range(6)]
    had = len(steps)
    while not all(request.tokens for request in shared):
        batch.step()
    assert len(batch.queue) == 0 and batch.shared_tokens >= 5 * 144 and len(steps) - had < 10


LEAST = {"PIECE_TOKENS": 8, "LEAST_TABLE": 1, "MIXED_TABLE": 4}


@pytest.mark.parametrize("kind", ("paged", "linear"))
def test_steps_captured_ahead(model, folder, linear_folder, monkeypatch, kind):
    """Before there are requests: pools stay as they are, no step is captured once requests are there, and their tokens are the
    same."""
    source = folder if kind == "paged" else linear_folder
    batch = ContinuousBatch(source, pages=60, max_requests=5, step_tokens=32, providers=["CPUExecutionProvider"])
    assert batch.capture_steps() == 0
    batch.captured = {}
    for name, value in LEAST.items():
        monkeypatch.setattr(serving, name, value)
    began = [pool.numpy().copy() for pool in batch.pools]
    for pool, was in zip(batch.pools, began, strict=True):
        pool.update_inplace(np.full_like(was, 7.0))
    made = batch.capture_steps(16 * BLOCK)
    assert all((pool.numpy() == 7.0).all() for pool in batch.pools)
    for name, pool, was in zip(batch.pool_names, batch.pools, began, strict=True):
        pool.update_inplace(was if is_state(name) else np.full_like(was, np.nan))
    keys, tables = set(batch.captured), (1, 2, 4, 8, 16) if batch.paged else (1,)
    mixed = {max(table, 4) for table in tables}
    assert keys == {(n, n, n, pages) for n in (1, 2, 4, 5) for pages in tables} | {
        (n, 5, 5, pages) for n in (8, 16, 24, 32) for pages in mixed
    }
    assert made == len(keys)
    asked = prompts(9)
    requests = [batch.add(prompt, 12, stop_tokens=()) for prompt in asked]
    batch.run()
    assert set(batch.captured) == keys and batch.capture_steps(16 * BLOCK) == made
    for prompt, request in zip(asked, requests):
        assert request.tokens == (alone(model, prompt, 12) if kind == "paged" else alone_by_generate(linear_folder, request))


@pytest.mark.parametrize("places, step_tokens", ((1, 40), (5, 40), (8, 8), (9, 64), (40, 64), (100, 100)))
def test_any_step_is_among_those_captured_ahead(folder, monkeypatch, places, step_tokens):
    options = dict(max_requests=places, step_tokens=step_tokens)
    batch = ContinuousBatch(folder, pages=37, providers=["CPUExecutionProvider"], **options)
    for name, value in LEAST.items():
        monkeypatch.setattr(serving, name, value)
    keys = batch._usual_keys(20 * BLOCK)
    for rows in range(1, places + 1):
        for tokens in range(rows, step_tokens + 1):
            assert {batch._step_key(tokens, rows, rows, table) for table in range(1, 21)} <= keys
    assert len(batch._usual_keys(10**9)) < 100  # no more than the model's positions


def test_a_step_that_cannot_be_captured_ahead(folder, monkeypatch):
    """Goes without graphs where nobody asked for them, with a warning; else says which options help."""
    ahead = []

    def captured(self, *key, ahead=False):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(serving, "_Captured", captured)
    batch = ContinuousBatch(folder, pages=9, max_requests=3, step_tokens=16, providers=["CPUExecutionProvider"])
    batch.captured = {}
    with pytest.raises(
        RuntimeError, match=r"step of 16 tokens of 3 requests .* out of memory\. Fewer step_tokens.*--no-cuda-graph"
    ):
        batch.capture_steps()
    batch.leader = object()
    with pytest.raises(RuntimeError, match="before leanfleet.together"):
        batch.capture_steps()

    class Fails:
        pool = SimpleNamespace(count=9)

        def __init__(self, folder, cuda_graph, **options):
            ahead.append((cuda_graph, options))

        def try_capture(self):
            pass

        def capture_steps(self):
            raise RuntimeError("no memory")

    monkeypatch.setattr(serving, "ContinuousBatch", Fails)
    with pytest.warns(RuntimeWarning, match="not captured as CUDA graphs: no memory"):
        serving.open_batch(folder, ahead=True, max_requests=3)
    assert ahead == [(True, {"max_requests": 3}), (False, {"max_requests": 3, "pages": 9})]
    serving.open_batch(folder, max_requests=3)
    with pytest.raises(RuntimeError, match="no memory"):
        serving.open_batch(folder, ahead=True, cuda_graph=True)


@pytest.mark.parametrize("captured", (False, True))
def test_pages_that_are_shared_and_run_out(model, folder, monkeypatch, captured):
    """Requests that begin alike, cancelled at random, in a pool too small for those that run: the tokens are those of a request
    alone, and no page that is written is one that another request has."""
    batch = ContinuousBatch(folder, pages=17, max_requests=6, step_tokens=20, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    for pool in batch.pools:
        pool.update_inplace(np.full(pool.shape(), np.nan, np.float32))
    launch = batch._launch

    def checked(chosen):
        had = [page for request in batch.running for page in request.pages]
        for request, count in chosen:
            written = request.pages[request.cached // BLOCK : -(-(request.cached + count) // BLOCK)]
            assert len(written) == -(-(request.cached + count) // BLOCK) - request.cached // BLOCK
            assert all(had.count(page) == 1 for page in written), "two requests have a page that is written"
        return launch(chosen)

    monkeypatch.setattr(batch, "_launch", checked)
    random, beginnings = np.random.default_rng(7), [random_prompt(40, seed) for seed in range(3)]
    requests, cancelled = [], []
    for i in range(24):
        prompt = beginnings[i % 3][: int(random.integers(1, 41))] + random_prompt(int(random.integers(1, 20)), 100 + i)
        requests.append(batch.add(prompt, int(random.integers(1, 40)), stop_tokens=(), priority=int(random.integers(0, 2))))
        for _ in range(random.integers(0, 4)):
            batch.step()
        if i % 5 == 4:
            cancelled.append(requests[int(random.integers(0, len(requests)))])
            batch.cancel(cancelled[-1])
    batch.run()
    assert batch.pool.in_use == 0 and batch.preemptions > 3 and batch.shared_tokens > 100
    for request in requests:
        expected = alone(model, request.prompt, request.max_new_tokens)
        assert (
            request.done and request.tokens == expected[: len(request.tokens)] and len(request.logprobs) == len(request.tokens)
        )
        assert len(request.tokens) == request.max_new_tokens or request in cancelled


ONE = {"model.onnx", "model.onnx.data", "leanfleet.json"}


def test_pages_that_run_out_in_half_precision(model, tmp_path):
    """Preempted requests that are computed again get the same tokens up to near ties: what was read token by token is read in
    one piece then, and rounded at other places. Where tokens part, the two likeliest lie within a few roundings."""
    export_for_serving(copy.deepcopy(model).half(), tmp_path, block=BLOCK, verify=False)
    asked = [random_prompt(n, n) for n in (30, 12, 25, 7, 33, 18)]
    batch = ContinuousBatch(tmp_path, pages=11, max_requests=4, step_tokens=19, providers=["CPUExecutionProvider"])
    poisoned(batch)
    requests = [batch.add(prompt, 24, stop_tokens=()) for prompt in asked]
    batch.run()
    assert batch.preemptions > 2 and batch.pool.in_use == 0
    room = ContinuousBatch(tmp_path, pages=60, max_requests=4, providers=["CPUExecutionProvider"])
    parted = 0
    for prompt, request in zip(asked, requests, strict=True):
        alone = room.add(prompt, 24, stop_tokens=(), top_logprobs=2)
        room.run()
        assert request.error is None and len(request.tokens) == len(alone.tokens) == 24
        at = next((i for i, (a, b) in enumerate(zip(request.tokens, alone.tokens)) if a != b), None)
        if at is not None:
            (_, first), (second, less) = alone.top_logprobs[at]
            assert request.tokens[at] == second and first - less < 16 * 2**-11 * abs(first)
            parted += 1
    assert parted < len(asked) // 2


@pytest.mark.slow
def test_one_folder(model, tmp_path, monkeypatch):
    """serving.onnx beside model.onnx, with its weights; what goes wrong leaves the folder as it was."""
    monkeypatch.setattr(decoder, "INSIDE", 1000)
    export_decoder(model, tmp_path)
    with pytest.raises(ValueError, match="kind decoder; this needs one from .*, or leanfleet export --serve"):
        ContinuousBatch(tmp_path, pages=20)
    with monkeypatch.context() as patch:
        patch.setattr(export_serving.verification, "verify", lambda *a: (_ for _ in ()).throw(VerificationError("no")))
        with pytest.raises(VerificationError):
            export_serving.add_serving(model, tmp_path)
    assert not (tmp_path / "serving.onnx").exists()
    export_serving.add_serving(model, tmp_path, block=BLOCK)
    assert {f.name for f in tmp_path.iterdir()} == {*ONE, "serving.onnx", "sampler.onnx"}
    assert (tmp_path / "serving.onnx").stat().st_size < 120_000  # the head, which the other graph has transposed
    weights = [i for i in onnx.load(tmp_path / "serving.onnx", load_external_data=False).graph.initializer if i.external_data]
    assert len(weights) > 10 and all(i.external_data[0].value == "model.onnx.data" for i in weights)
    facts = json.loads((tmp_path / "leanfleet.json").read_text())["serving"]
    assert facts["block"] == BLOCK and facts["verified"]["largest_difference"] <= facts["verified"]["bound"]
    batch, prompt = ContinuousBatch(tmp_path, pages=20, providers=["CPUExecutionProvider"]), random_prompt(20, 1)
    request = batch.add(prompt, 6, stop_tokens=())
    batch.run()
    assert request.tokens == alone(model, prompt, 6)
    tokens, _ = generate(load_decoder(tmp_path, providers=["CPUExecutionProvider"]), [prompt], 6, stop_tokens=())
    assert tokens == [request.tokens]
    (tmp_path / "serving.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="serving.onnx does not exist, though .*leanfleet.json names it"):
        ContinuousBatch(tmp_path, pages=20)
    (tmp_path / "serving.onnx").touch()
    export_decoder(model, tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == ONE


@pytest.mark.slow
def test_weights_of_its_own(model, tmp_path, monkeypatch):
    """Of another model they are no references."""
    monkeypatch.setattr(decoder, "INSIDE", 1000)
    monkeypatch.setattr(export_serving, "INSIDE", 1000)
    export_decoder(model, tmp_path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.neg_()
    export_serving.add_serving(other, tmp_path, block=BLOCK)
    changed, head = 48 * 64 * 4, 97 * 48 * 4
    assert changed + head <= (tmp_path / "serving.onnx.data").stat().st_size < changed + head + 5000  # places are aligned
    batch, prompt = ContinuousBatch(tmp_path, pages=20, providers=["CPUExecutionProvider"]), random_prompt(20, 1)
    request = batch.add(prompt, 6, stop_tokens=())
    batch.run()
    assert request.tokens == alone(other, prompt, 6) != alone(model, prompt, 6)


def random_prompt(size, seed):
    return np.random.default_rng(seed).integers(0, 97, size).tolist()


@pytest.mark.parametrize("late", (False, True))
def test_a_failure_behind_a_running_step(model, folder, monkeypatch, late):
    """A call that fails before or after it has run, while the tokens of the one before are not read: nothing is lost."""
    batch = ContinuousBatch(folder, pages=60, max_requests=5, step_tokens=32, providers=["CPUExecutionProvider"])
    batch.captured = {}
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    wanted = prompts(5, seed=5)
    requests = [batch.add(p, 9, stop_tokens=()) for p in wanted]
    run, calls, told = batch._run, [], []

    def failing(*arguments):
        calls.append(1)
        if late or len(calls) % 3:
            run(*arguments)
        if not len(calls) % 3:
            raise RuntimeError("no")

    monkeypatch.setattr(batch, "_run", failing)
    while not batch.idle:
        try:
            told += batch.step()
        except RuntimeError:
            pass
    told += batch.late
    assert [r.tokens for r in requests] == [alone(model, p, 9) for p in wanted]
    assert [[t for r, t in told if r is request] for request in requests] == [r.tokens for r in requests]


def test_equal_prompts_are_read_once(model, folder):
    """Also where they come at the same time: the others wait for the first one's pages."""
    prompt, batch = random_prompt(50, 3), ContinuousBatch(folder, pages=60, providers=["CPUExecutionProvider"])
    requests = [batch.add(prompt, 4, stop_tokens=(), temperature=1.5, seed=i) for i in range(4)]
    batch.run()
    assert [r.shared for r in requests] == [0, 48, 48, 48] and len({tuple(r.tokens) for r in requests}) > 1
    assert batch.processed_tokens == 50 + 3 * 2 + 4 * 3
    apart = ContinuousBatch(folder, pages=60, providers=["CPUExecutionProvider"], share=False)
    others = [apart.add(prompt, 4, stop_tokens=(), temperature=1.5, seed=i) for i in range(4)]
    apart.run()
    assert [r.tokens for r in others] == [r.tokens for r in requests] and apart.processed_tokens == 4 * 53
    assert np.allclose([r.logprobs for r in others], [r.logprobs for r in requests], atol=1e-4)


def test_priorities(folder):
    """Who has more comes first, and is the last to give pages back."""
    batch = ContinuousBatch(folder, pages=8, max_requests=2, providers=["CPUExecutionProvider"])
    low, high, first = (batch.add(random_prompt(20, i), 20, stop_tokens=(), priority=p) for i, p in enumerate((0, 1, 2)))
    ended = []
    while not batch.idle:
        batch.step()
        ended += [r for r in (low, high, first) if r.done and r not in ended]
    assert ended[0] is first and ended[-1] is low
    with pytest.raises(ValueError, match="priority is 'high'"):
        batch.add([1], 1, priority="high")


def test_nobody_waits_for_ever(folder, monkeypatch):
    """More requests of a greater priority come in every step than there is room for. The one below them goes in front of those
    that came so many steps later, and of none before."""
    monkeypatch.setattr(batching, "PATIENCE", 12)
    batch = ContinuousBatch(folder, pages=40, max_requests=2, providers=["CPUExecutionProvider"])
    came, begun = {}, []
    for step in range(60):
        for priority in (1, 1, *[0, -1] * (step == 3)):
            came[batch.add([1, 2], 3, stop_tokens=(), priority=priority)] = step, priority
        batch.step()
        begun += [r for r in came if r.tokens and r not in begun]
    low, lowest = (next(r for r, (_, p) in came.items() if p == priority) for priority in (0, -1))
    while not lowest.done:
        batch.step()
        begun += [r for r in came if r.tokens and r not in begun]
    for request, steps in ((low, 12), (lowest, 24)):
        before = [came[r][0] for r in begun[: begun.index(request)] if came[r][1] == 1]
        assert set(before) == set(range(3 + steps))
    for request in list(batch.queue):
        batch.cancel(request)


def as_format_3(folder, target):
    """A copy of a served folder with the inputs that folders of format 3 have."""
    shutil.copytree(folder, target)
    loaded = onnx.load(target / "model.onnx", load_external_data=False)
    loaded.graph.input.remove(next(i for i in loaded.graph.input if i.name == "state_index"))
    for node in loaded.graph.node:
        if node.op_type == "SampleTokens":
            node.input[6] = "seq_lens"
    onnx.save(loaded, target / "model.onnx")
    facts = json.loads((target / "leanfleet.json").read_text())
    (target / "leanfleet.json").write_text(json.dumps(facts | {"format": 3}))


def as_format_2(folder, target):
    """A copy of a served folder with the inputs that folders of format 2 have."""
    as_format_3(folder, target)
    loaded = onnx.load(target / "model.onnx", load_external_data=False)
    new = ("token_index", "temperature", "top_k", "top_p", "min_p", "seed")
    for entry in [i for i in loaded.graph.input if i.name in new]:
        loaded.graph.input.remove(entry)
    for node in loaded.graph.node:
        if node.op_type == "Gather" and node.input[0] == "input_ids":
            node.CopyFrom(onnx.helper.make_node("Identity", ["input_ids"], list(node.output)))
        if node.input and node.input[0] == "token_index":
            node.input[0] = "positions"  # of the same shape: nothing reads it
        if node.op_type == "SampleTokens":
            del node.input[1:]
    onnx.save(loaded, target / "model.onnx")
    facts = json.loads((target / "leanfleet.json").read_text())
    (target / "leanfleet.json").write_text(json.dumps(facts | {"format": 2}))


def as_format_1(folder, target):
    """A copy of a served folder with the inputs and outputs that folders of format 1 have."""
    as_format_2(folder, target)
    loaded = onnx.load(target / "model.onnx", load_external_data=False)
    graph, value = loaded.graph, onnx.helper.make_tensor_value_info
    inputs = {i.name: i for i in graph.input}
    inputs["cu_query_lens"].CopyFrom(value("query_lens", onnx.TensorProto.INT32, ["batch"]))
    graph.input.extend(
        [value("slots", onnx.TensorProto.INT64, ["batch", "longest"]), value("rows", onnx.TensorProto.INT64, ["tokens"])]
    )
    del graph.output[1:3]
    for name, array in (("zero", [0]), ("first", 0)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(array, np.int32), name))
    sums = onnx.helper.make_node("CumSum", ["query_lens", "first"], ["sums"])
    joined = onnx.helper.make_node("Concat", ["zero", "sums"], ["cu_query_lens"], axis=0)
    for node in (joined, sums):
        graph.node.insert(0, node)
    onnx.save(loaded, target / "model.onnx")
    facts = json.loads((target / "leanfleet.json").read_text())
    (target / "leanfleet.json").write_text(json.dumps(facts | {"format": 1}))


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("older", (as_format_1, as_format_2, as_format_3))
def test_folders_of_older_formats(model, folder, tmp_path, older, captured):
    """They run as before, and a token that the host draws from logits is the one that the graph draws."""
    older(folder, tmp_path / "old")
    options = dict(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, stop_tokens=())
    drawn = []
    for source in (folder, tmp_path / "old"):
        batch = ContinuousBatch(source, pages=60, max_requests=5, step_tokens=32, providers=["CPUExecutionProvider"])
        batch.captured = {} if captured else None
        requests = [batch.add(p, 9, seed=i, **options) for i, p in enumerate(prompts(7))]
        batch.run()
        drawn.append([r.tokens for r in requests])
    assert drawn[0] == drawn[1] and drawn[0] != [alone(model, p, 9) for p in prompts(7)]
    batch = ContinuousBatch(tmp_path / "old", pages=60, max_requests=5, step_tokens=32, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    wanted = prompts(7)
    requests = [batch.add(prompt, 9, stop_tokens=()) for prompt in wanted]
    batch.run()
    for prompt, request in zip(wanted, requests):
        assert request.tokens == alone(model, prompt, request.max_new_tokens)
    assert not captured or batch.captured
    assert not captured or older is not as_format_1 or all(tokens == rows for tokens, rows, *_ in batch.captured)


def test_tokens_of_another_type_are_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    loaded = onnx.load(tmp_path / "other" / "model.onnx", load_external_data=False)
    tokens = next(o for o in loaded.graph.output if o.name == "next_tokens")
    cast = onnx.helper.make_node("Cast", ["chosen"], ["next_tokens"], to=onnx.TensorProto.INT32)
    for node in loaded.graph.node:
        node.output[:] = ["chosen" if name == "next_tokens" else name for name in node.output]
    loaded.graph.node.append(cast)
    tokens.type.tensor_type.elem_type = onnx.TensorProto.INT32
    onnx.save(loaded, tmp_path / "other" / "model.onnx")
    with pytest.raises(ValueError, match=r"next_tokens is a tensor\(int32\), not a tensor\(int64\)"):
        ContinuousBatch(tmp_path / "other", pages=4, providers=["CPUExecutionProvider"])


def test_pages_are_reused_with_old_contents(model, folder):
    """A pool that is full of another request's keys, or of NaN, changes nothing."""
    batch = ContinuousBatch(folder, pages=12, providers=["CPUExecutionProvider"])
    for pool in batch.pools:
        pool.update_inplace(np.full(pool.shape(), np.nan, np.float32))
    for prompt in prompts(4, seed=3):
        request = batch.add(prompt, 9, stop_tokens=())
        batch.run()
        assert request.tokens == alone(model, prompt, 9)


def test_stop_tokens_and_cancel(model, folder):
    batch = ContinuousBatch(folder, pages=40, providers=["CPUExecutionProvider"])
    first, second = prompts(2, seed=5)
    expected = alone(model, first, 12)
    stop = expected[4]
    stopped = batch.add(first, 12, stop_tokens=[stop])
    cancelled = batch.add(second, 30, stop_tokens=())
    batch.step()
    batch.cancel(cancelled)
    batch.run()
    assert stopped.tokens == expected[: expected.index(stop) + 1]
    assert cancelled.done and len(cancelled.tokens) <= 1
    assert batch.pool.in_use == 0
    equal = [batch.add(first, 3, stop_tokens=()) for _ in range(2)]
    batch.cancel(equal[1])
    batch.run()
    assert [len(r.tokens) for r in equal] == [3, 0] and all(r.done for r in equal)


def test_sampling_depends_on_the_request_alone(folder):
    prompt = prompts(1)[0]
    options = {"temperature": 1.3, "top_k": 20, "seed": 7, "stop_tokens": ()}
    lone = ContinuousBatch(folder, pages=40, providers=["CPUExecutionProvider"])
    expected = lone.add(prompt, 10, **options)
    lone.run()
    busy = ContinuousBatch(folder, pages=99, step_tokens=32, providers=["CPUExecutionProvider"])
    for other in prompts(5, seed=8):
        busy.add(other, 12)
    found = busy.add(prompt, 10, **options)
    busy.run()
    assert found.tokens == expected.tokens


def test_without_the_library(model, folder):
    """The function bodies give the same tokens."""
    batch = ContinuousBatch(folder, pages=20, max_requests=3, step_tokens=16, providers=["CPUExecutionProvider"], library=False)
    wanted = [p[:20] for p in prompts(3, seed=2)]
    requests = [batch.add(p, 4, stop_tokens=()) for p in wanted]
    batch.run()
    assert [r.tokens for r in requests] == [alone(model, p, 4) for p in wanted]


def test_nodes(folder):
    """Attention reads the projection as it comes: nothing spreads, gathers or rotates outside."""
    nodes = parity._load(folder / "model.onnx").graph.node
    attentions = [n for n in nodes if n.op_type == "LeanAttention"]
    assert len(attentions) == 2 and all(len([name for name in n.input if name]) == 8 for n in attentions)
    makers = {name: n for n in nodes for name in n.output}
    for attention in attentions:
        assert makers[makers[attention.input[0]].input[0]].op_type == "MatMul", "one tensor of queries, keys and values"
    assert (
        sum(n.op_type == "Gather" for n in nodes) == 5
    )  # tokens, the embedding, the request, and rows and positions of the last tokens
    assert not {"RotaryEmbedding", "Transpose", "Cos"} & {n.op_type for n in nodes}


SMALL = dict(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)
GROUPED = dict(SMALL, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=256)


@pytest.mark.parametrize("fuse", rest_slow((True, False)))
@pytest.mark.parametrize(
    "config",
    rest_slow(
        [
            Qwen2Config(**GROUPED),
            Qwen3Config(**GROUPED, head_dim=16),
            PhiConfig(**GROUPED, partial_rotary_factor=0.5),
            PhiConfig(**GROUPED, qk_layernorm=True),
            GPTNeoXConfig(**SMALL, intermediate_size=64, max_position_embeddings=256, rotary_pct=0.5),
            Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=9),
            GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2),
        ],
        quick=3,
    ),
    ids=lambda c: f"{c.model_type}{'-norms' * getattr(c, 'qk_layernorm', False)}" if hasattr(c, "model_type") else c,
)
def test_other_models(config, fuse, tmp_path):
    """Projections with biases, norms before and after heads come first, rotary encodings of a part, and none."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    export_for_serving(model, tmp_path, block=BLOCK, fuse=fuse, verify=False)  # the tokens below are the check
    nodes = parity._load(tmp_path / "model.onnx").graph.node
    assert ("com.microsoft" in {n.domain for n in nodes}) == fuse
    packed = [a.i for n in nodes if n.op_type == "LeanAttention" for a in n.attribute if a.name == "packed_qkv"]
    assert (
        packed == [int(fuse and config.model_type in ("qwen2", "qwen3", "gemma3_text", "gpt2"))] * 2
    )  # others have something in between
    batch = ContinuousBatch(tmp_path, pages=60, max_requests=3, step_tokens=24, providers=["CPUExecutionProvider"])
    wanted = prompts(5, seed=4)
    requests = [batch.add(p, 6, stop_tokens=()) for p in wanted]
    batch.run()
    assert [r.tokens for r in requests] == [alone(model, p, 6) for p in wanted]


def test_longrope(tmp_path):
    """Short factors up to the original length: a request's tokens do not depend on its neighbours, and more is refused."""
    torch.manual_seed(1)
    half = 48 // 4 // 2
    config = Phi3Config(
        **GROUPED,
        pad_token_id=0,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [4.0 + i for i in range(half)],
            "short_factor": [1.0] * half,
            "original_max_position_embeddings": 64,
        },
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    export_for_serving(model, tmp_path, block=BLOCK)
    attentions = [n for n in parity._load(tmp_path / "model.onnx").graph.node if n.op_type == "LeanAttention"]
    assert len(attentions) == 2 and all(len(n.input) > 10 for n in attentions)  # angles are tables by position
    batch = ContinuousBatch(tmp_path, pages=60, max_requests=3, providers=["CPUExecutionProvider"])
    wanted = [p[:40] for p in prompts(3, seed=6)]
    requests = [batch.add(p, 6, stop_tokens=()) for p in wanted]
    batch.run()
    assert [r.tokens for r in requests] == [alone(model, p, 6) for p in wanted]
    with pytest.raises(ValueError, match="65 tokens are more than the 64 positions"):
        batch.add([5] * 60, 5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([], 3), "a prompt is empty"),
        (([1], 0), "max_new_tokens is 0"),
        (("text", 3), "is the text 'text'"),
        (([1.5], 3), "no list of"),
        (([5, 97], 3), "token ids lie in 0 .. 96; found 5 .. 97"),
        (([1] * 250, 10), "260 tokens are more than the 256 positions"),
        (([1] * 60, 30), "need 12 pages of 8; the pool has 10"),
    ],
)
def test_refused_requests(folder, arguments, message):
    batch = ContinuousBatch(folder, pages=10, providers=["CPUExecutionProvider"])
    with pytest.raises(ValueError, match=message):
        batch.add(*arguments)
    assert batch.idle


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0},
        {"top_p": float("nan")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": 2**63},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"temperature": float("inf")},
        {"seed": -1},
        {"seed": 1.5},
        {"top_k": -3},
        {"top_k": None},
        {"stop_tokens": 5},
        {"stop_tokens": "a"},
        {"max_new_tokens": 2.5},
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(folder, options):
    batch = ContinuousBatch(folder, pages=10, providers=["CPUExecutionProvider"])
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; (expected|it must be)") as error:
        batch.add([1, 2], **({"temperature": 1.0} | options))
    assert "\n" not in str(error.value) and batch.idle and batch.pool.in_use == 0


def test_default_of_new_tokens_is_what_fits(folder):
    batch = ContinuousBatch(folder, pages=10, providers=["CPUExecutionProvider"])
    assert [batch.add([1] * n).max_new_tokens for n in (1, 60)] == [79, 20]
    batch = ContinuousBatch(folder, pages=100, providers=["CPUExecutionProvider"])
    assert [batch.add([1] * n).max_new_tokens for n in (1, 200)] == [128, 56]


@pytest.mark.parametrize("temperature", (0.0, 0.7))
def test_one_bad_request_harms_no_other(model, folder, monkeypatch, temperature):
    """Logits that are not numbers end the request that has them, in its second step; all others get their tokens."""
    batch = ContinuousBatch(folder, pages=40, providers=["CPUExecutionProvider"])
    wanted = prompts(3, seed=5)
    requests = [batch.add(p, 6, stop_tokens=(), temperature=t) for p, t in zip(wanted, (0.0, temperature, 0.0))]
    read, step = batch._chosen_tokens, 0

    def spoiled(launched):
        tokens, logprobs = read(launched)
        logprobs = logprobs.copy()
        if step == 2:
            logprobs[1] = np.nan
        return tokens, logprobs

    monkeypatch.setattr(batch, "_chosen_tokens", spoiled)
    step = 1
    batch.step()
    step = 2
    found = batch.step()
    step = 3
    bad = requests[1]
    assert [r for r, _ in found] == [requests[0], requests[2]] and len(bad.tokens) == 1
    assert bad.done and "logits are not finite" in str(bad.error) and bad not in batch.running and bad.pages == []
    batch.run()
    assert batch.idle and batch.pool.in_use == 0
    for i in (0, 2):
        assert requests[i].tokens == alone(model, wanted[i], 6) and requests[i].error is None


def test_a_failing_call_changes_nothing(model, folder, monkeypatch):
    batch = ContinuousBatch(folder, pages=40, providers=["CPUExecutionProvider"])
    requests = [batch.add(p, 5, stop_tokens=()) for p in prompts(2, seed=5)]
    batch.step()
    before = [(list(r.tokens), r.cached) for r in requests], batch.steps
    with monkeypatch.context() as patch:
        patch.setattr(batch, "binding", None)  # what onnxruntime raises for it is not the point
        with pytest.raises(Exception):  # noqa: B017
            batch.step()
    assert ([(list(r.tokens), r.cached) for r in requests], batch.steps) == before
    batch.run()
    assert [r.tokens for r in requests] == [alone(model, r.prompt, 5) for r in requests]


def test_refused_folders(model, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="export_for_serving"):
        ContinuousBatch(tmp_path, pages=10)
    export_decoder(model, tmp_path / "plain")
    with pytest.raises(ValueError, match="kind decoder; this needs one from leanfleet.export.serving"):
        ContinuousBatch(tmp_path / "plain", pages=10)
    with pytest.raises(ValueError, match="cuda_graph needs the library"):
        ContinuousBatch(folder, pages=10, library=False, cuda_graph=True)
    with pytest.raises(ValueError, match="step_tokens 4 is less than max_requests 16"):
        ContinuousBatch(folder, pages=10, step_tokens=4)
    with pytest.raises(ValueError, match="at least one; found 0"):
        ContinuousBatch(folder, pages=10, max_requests=0)


def adjusted(model, prompt, count, temperature=0.0, seed=0, constraint=None, **adjustments):
    """(tokens, logits) of a request by the reference of SampleTokens, over the model's own logits."""
    bias = torch.zeros(1, 97)
    for token, value in (adjustments.pop("logit_bias", None) or {}).items():
        bias[0, token] = value
    counts = torch.zeros(1, 97, dtype=torch.int32)
    counts[0, list(set(prompt))] = 1 << 30
    tokens, seen = [], []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[:, -1]
        seen.append(logits[0])
        settings = dict(temperature=torch.tensor([temperature]), seed=torch.tensor([seed]))
        settings["position"] = torch.tensor([len(prompt) + len(tokens)], dtype=torch.int32)
        if constraint is not None:
            settings["allowed_tokens"] = torch.from_numpy(constraint.allowed()[None])
        penalties = {name: torch.tensor([value]) for name, value in adjustments.items()}
        (token, *_) = reference.sample_tokens(logits, **settings, token_counts=counts, **penalties, logit_bias=bias)
        tokens.append(int(token))
        counts[0, tokens[-1]] += 1
        if constraint is not None:
            constraint.accept(tokens[-1])
    return tokens, seen


ADJUSTMENTS = (
    {"frequency_penalty": 1.5},
    {"presence_penalty": 4.0, "temperature": 1.1, "seed": 3},
    {"repetition_penalty": 1.8},
    {"logit_bias": {5: 3.5, 96: -100.0, 0: 2.0}, "temperature": 0.9, "seed": 4},
    {"logit_bias": {7: 100.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 1.0}},
)


@pytest.mark.parametrize("captured", (False, True))
def test_penalties_biases_and_most_likely_tokens(model, folder, monkeypatch, captured):
    """Beside requests without, which come and go, are cancelled and computed again: each as the reference has it alone."""
    batch = ContinuousBatch(folder, pages=17, max_requests=4, step_tokens=20, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    random, requests = np.random.default_rng(5), []
    for i in range(18):
        options = ADJUSTMENTS[i % 9] if i % 9 < len(ADJUSTMENTS) else {}
        prompt, top = random_prompt(int(random.integers(1, 40)), 40 + i), int(random.integers(0, 3)) * 7
        request = batch.add(prompt, int(random.integers(5, 25)), stop_tokens=(), top_logprobs=top, **options)
        requests.append((request, options))
        for _ in range(random.integers(0, 4)):
            batch.step()
    batch.cancel(requests[3][0])
    batch.run()
    assert batch.preemptions and len(batch.sampler.free) == 4 and not any(r.place is not None for r, _ in requests)
    for request, options in requests:
        tokens, logits = adjusted(model, request.prompt, len(request.tokens), **options)
        assert request.tokens == tokens and (len(tokens) == request.max_new_tokens or request is requests[3][0])
        top = request.adjustments.top_logprobs
        for i, found in enumerate(request.top_logprobs):
            values, ids = logits[i].log_softmax(-1).topk(top)
            assert [t for t, _ in found] == ids.tolist() and np.allclose([p for _, p in found], values, atol=1e-4)
        assert len(request.top_logprobs) == (len(tokens) if top else 0)


@pytest.mark.parametrize("captured", (False, True))
def test_constraints(model, folder, monkeypatch, captured):
    """Beside requests without, with penalties, drawn and computed again: each request has its tokens, and no other's rule."""
    batch = ContinuousBatch(folder, pages=13, max_requests=4, step_tokens=20, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    random, requests = np.random.default_rng(8), []
    for i in range(18):
        options = {"temperature": 1.2, "seed": i} if i % 4 == 1 else ADJUSTMENTS[i % 6] if i % 4 == 3 else {}
        rule = Rule(i) if i % 3 else None
        prompt = random_prompt(int(random.integers(1, 40)), 70 + i)
        count = int(random.integers(5, 25))
        requests.append((batch.add(prompt, count, stop_tokens=(), constraint=rule, **options), options, rule))
        for _ in range(random.integers(0, 4)):
            batch.step()
    batch.cancel(requests[4][0])
    batch.run()
    assert batch.preemptions and len(batch.sampler.free) == 4 and batch.pool.in_use == 0
    for i, (request, options, rule) in enumerate(requests):
        tokens, _ = adjusted(model, request.prompt, len(request.tokens), constraint=rule and Rule(i), **options)
        assert request.tokens == tokens and request.error is None
        assert len(tokens) == request.max_new_tokens or i == 4
        if rule is not None and i != 4:
            assert rule.said == tokens[:-1]  # nobody asks what may follow the last


class Broken(Rule):
    def __init__(self, what):
        super().__init__(1)
        self.what = what

    def allowed(self):
        return {"none": np.zeros(4, np.int32), "short": np.full(3, -1, np.int32), "floats": np.ones(4, np.float32)}.get(
            self.what if len(self.said) == 2 or self.what.endswith("first") else "", super().allowed()
        )

    def accept(self, token):
        super().accept(token)
        if self.what == "raises" and len(self.said) == 2:
            raise RuntimeError("a bug of somebody else's")


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize(
    "what, words", [("none", "allows no token"), ("short", r"int32 \[3\]; expected int32 \[4\]"), ("floats", "float32 \\[4"),
                    ("raises", "a bug of somebody")]
)  # fmt: skip
def test_a_constraint_that_fails_ends_its_own_request(model, folder, what, words, captured):
    batch = ContinuousBatch(folder, pages=40, max_requests=3, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    others = [batch.add([1, 2, 3], 9, stop_tokens=()), batch.add([4], 9, stop_tokens=(), constraint=Rule(2))]
    broken = batch.add([1, 2, 3], 9, stop_tokens=(), constraint=Broken(what))
    batch.run()
    assert broken.done and re.search(words, str(broken.error)) and len(broken.tokens) == 2
    assert others[0].tokens == alone(model, [1, 2, 3], 9) and others[1].tokens == adjusted(model, [4], 9, constraint=Rule(2))[0]
    assert batch.pool.in_use == 0 and len(batch.sampler.free) == 3


def test_refused_constraints(model, folder, tmp_path):
    batch = ContinuousBatch(folder, pages=10, providers=["CPUExecutionProvider"])
    bits = np.zeros(4, np.int32)
    bits[3] = 2  # of token 97, which there is none
    for allowed, words in ((bits, "allows no token"), (bits[:2], "expected int32"), (bytes(12), "expected int32")):
        with pytest.raises(ValueError, match=words):
            batch.add([1], constraint=SimpleNamespace(allowed=lambda allowed=allowed: allowed, accept=print))
    for wrong in ({"type": "object"}, "[a-z]+"):
        with pytest.raises(ValueError, match=r"expected an object with allowed\(\) and accept\(\): leanfleet.grammar makes "):
            batch.add([1], constraint=wrong)
    first = batch.add([1], 3, stop_tokens=(), constraint=(rule := Rule(0)))
    with pytest.raises(ValueError, match="it is another request's, which has not ended: give each request one of its own"):
        batch.add([2], constraint=rule)
    batch.run()
    assert first.tokens == adjusted(model, [1], 3, constraint=Rule(0))[0]
    batch.leader = SimpleNamespace()
    with pytest.raises(ValueError, match="of several ranks only the first would know it"):
        batch.add([1], constraint=Rule(0))
    assert batch.idle
    shutil.copytree(folder, tmp_path / "old")
    old = ir.load(tmp_path / "old" / "sampler.onnx")
    gone = next(v for v in old.graph.inputs if v.name == "allowed_tokens")
    (gather,) = gone.consumers()
    for use in list(gather.outputs[0].uses()):
        use.node.replace_input_with(use.idx, None)
    old.graph.remove(gather, safe=True)
    old.graph.inputs.remove(gone)
    ir.save(old, tmp_path / "old" / "sampler.onnx")
    batch = ContinuousBatch(tmp_path / "old", pages=10, providers=["CPUExecutionProvider"])
    with pytest.raises(ValueError, match="sampler.onnx is of an earlier version, which had no constraints: export it again"):
        batch.add([1], constraint=Rule(0))
    request = batch.add([1, 2], 5, stop_tokens=(), presence_penalty=4.0)
    batch.run()
    assert request.tokens == adjusted(model, [1, 2], 5, presence_penalty=4.0)[0]


def test_adjustments_of_an_older_format(model, folder, tmp_path):
    """Its sampler.onnx is as it is now."""
    as_format_3(folder, tmp_path / "old")
    batch = ContinuousBatch(tmp_path / "old", pages=40, max_requests=6, step_tokens=24, providers=["CPUExecutionProvider"])
    requests = [batch.add(random_prompt(5 + i, i), 12, stop_tokens=(), **options) for i, options in enumerate(ADJUSTMENTS)]
    batch.run()
    assert [r.tokens for r in requests] == [adjusted(model, r.prompt, 12, **o)[0] for r, o in zip(requests, ADJUSTMENTS)]


@pytest.mark.parametrize(
    "options",
    (
        {"repetition_penalty": 0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": "a"},
        {"logit_bias": {97: 1.0}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": [1]},
        {"top_logprobs": 21},
        {"top_logprobs": 1.5},
    ),
    ids=str,
)
def test_wrong_adjustments(folder, options):
    batch = ContinuousBatch(folder, pages=10, providers=["CPUExecutionProvider"])
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; expected"):
        batch.add([1, 2], **options)
    assert batch.idle and batch.sampler is None


def test_adjustments_need_their_graph(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "without")
    (tmp_path / "without" / "sampler.onnx").unlink()
    batch = ContinuousBatch(tmp_path / "without", pages=10, providers=["CPUExecutionProvider"])
    with pytest.raises(
        ValueError, match="has no sampler.onnx, which penalties, logit_bias, top_logprobs and constraints need: export it"
    ):
        batch.add([1, 2], presence_penalty=1.0)
    batch.add([1, 2], 2)
    batch.run()


@pytest.fixture(scope="module", params=rest_slow(["minimax", "retnet", "transnormer", "qwen3.5", "falcon-h1"]))
def linear_folder(request, tmp_path_factory):
    """A decoder whose layers carry states, exported both ways; minimax has softmax layers too."""
    torch.manual_seed(2)
    model, folder = decoders.MODELS[request.param]().eval(), tmp_path_factory.mktemp(request.param)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)
    export_decoder(model, folder, verify=False)
    export_serving.add_serving(model, folder, block=BLOCK)
    return folder


def poisoned(batch):
    """Whoever had a page or a state before may have left anything there."""
    for name, pool in zip(batch.pool_names, batch.pools):
        held = np.full(pool.shape(), np.nan, np.float16 if "float16" in pool.data_type() else np.float32)
        if is_state(name):
            held[batching.EMPTY] = 0
        pool.update_inplace(held)


@functools.lru_cache(1)
def loaded(folder):
    return load_decoder(folder, providers=["CPUExecutionProvider"])


def alone_by_generate(folder, request):
    s = request.sampling
    options = dict(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed)
    return generate(loaded(folder), [request.prompt], request.max_new_tokens, stop_tokens=(), **options)[0][0]


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("seed", rest_slow(range(3)))
def test_states_come_and_go(linear_folder, monkeypatch, captured, seed):
    """Requests that join, are cut in pieces, cancelled, preempted and drawn by settings of their own get the tokens of a
    generation of their own, whatever was in the pools before."""
    batch = ContinuousBatch(linear_folder, pages=15, max_requests=4, step_tokens=19, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    poisoned(batch)
    random, requests, cancelled, most = np.random.default_rng(seed), [], [], 0
    for i in range(12):
        settings = dict(temperature=float(random.choice([0, 0.9])), top_k=int(random.integers(0, 30)), seed=i)
        prompt = random.integers(3, decoders.VOCABULARY, random.integers(1, 60)).tolist()
        requests.append(batch.add(prompt, int(random.integers(1, 30)), stop_tokens=(), **settings))
        for _ in range(random.integers(0, 6)):
            batch.step()
            states = [r.state for r in batch.running]
            assert len({*states, batching.EMPTY}) == len(states) + 1, "two requests have a state"
            most = max(most, len(states))
        if i % 4 == 3:
            cancelled.append(requests[int(random.integers(0, len(requests)))])
            batch.cancel(cancelled[-1])
    batch.run()
    assert most > 2 and batch.pool.in_use == 0 and sorted(batch.free_states) == [1, 2, 3, 4]
    assert batch.paged == bool(batch.preemptions)
    for request in requests:
        expected = alone_by_generate(linear_folder, request)
        assert request.tokens == expected[: len(request.tokens)] and request.error is None
        assert len(request.tokens) == request.max_new_tokens or request in cancelled


@pytest.mark.parametrize("name", ("retnet", "falcon-h1"))
def test_narrow_states(name, tmp_path, monkeypatch):
    """States of 16 bits are those of the request that they are of: cut in pieces, preempted and beside others its tokens are
    those it has alone, up to near ties of what is rounded at other places."""
    torch.manual_seed(2)
    model = decoders.MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)
    export_serving.export_for_serving(model.half(), tmp_path, block=BLOCK, narrow_states=True)
    batch = ContinuousBatch(tmp_path, pages=30, max_requests=4, step_tokens=19, providers=["CPUExecutionProvider"])
    states = [pool for n, pool in zip(batch.pool_names, batch.pools) if n.endswith("recurrent_state")]
    assert len(states) == 2 and all(pool.data_type() == "tensor(float16)" for pool in states)
    poisoned(batch)
    asked = [random_prompt(n, n) for n in (1, 40, 17, 5, 60, 2)]
    requests = [batch.add(prompt, 12, stop_tokens=()) for prompt in asked]
    batch.run()
    same = 0
    for prompt, request in zip(asked, requests, strict=True):
        alone = ContinuousBatch(tmp_path, pages=30, max_requests=1, step_tokens=19, providers=["CPUExecutionProvider"])
        poisoned(alone)
        one = alone.add(prompt, 12, stop_tokens=())
        alone.run()
        assert request.error is None and len(request.tokens) == len(one.tokens) == 12
        same += request.tokens[:4] == one.tokens[:4]
    assert same >= len(asked) - 1


def test_states_of_function_bodies(linear_folder):
    batch = ContinuousBatch(
        linear_folder, pages=60, max_requests=2, step_tokens=16, providers=["CPUExecutionProvider"], library=False
    )
    requests = [batch.add(random_prompt(n, n), 4, stop_tokens=()) for n in (30, 5, 1)]
    batch.run()
    assert [r.tokens for r in requests] == [alone_by_generate(linear_folder, r) for r in requests]


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
def test_states_after_failed_calls(linear_folder, monkeypatch, captured, error):
    """A call that fails, or is interrupted, once layers have changed their states: its requests are computed again, and get
    the same tokens."""
    batch = ContinuousBatch(linear_folder, pages=60, max_requests=5, step_tokens=32, providers=["CPUExecutionProvider"])
    batch.captured = {} if captured else None
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    requests = [batch.add(random_prompt(12 * i + 1, i), 7, stop_tokens=()) for i in range(5)]
    run, calls = batch._run, []

    def failing(*arguments):
        run(*arguments)
        calls.append(1)
        if len(calls) in (2, 5, 9):
            raise error("no")

    monkeypatch.setattr(batch, "_run", failing)
    while not batch.idle:
        try:
            batch.step()
        except error:
            assert len(batch.running) < 5
    assert len(calls) > 9 and [r.tokens for r in requests] == [alone_by_generate(linear_folder, r) for r in requests]


def test_a_bad_request_leaves_no_state_behind(linear_folder):
    """Its state is not finite; who takes its row starts from zeros."""
    batch = ContinuousBatch(linear_folder, pages=60, max_requests=1, providers=["CPUExecutionProvider"])
    bad = batch.add([5, 6, 7], 20, stop_tokens=())
    batch.step()
    held = np.array(batch.pools[0].numpy())
    held[bad.state] = np.nan
    batch.pools[0].update_inplace(held)
    good = batch.add([8, 9], 5, stop_tokens=())
    batch.run()
    assert "not finite" in str(bad.error) and good.tokens == alone_by_generate(linear_folder, good) and good.error is None


def test_no_pages_without_softmax_layers(linear_folder):
    """Texts of any length fit where no layer has pages."""
    batch = ContinuousBatch(linear_folder, pages=2, providers=["CPUExecutionProvider"])
    if batch.paged:
        with pytest.raises(ValueError, match="the pool has 2"):
            batch.add([5] * 40, 3)
        return
    request = batch.add([5] * 40, 3, stop_tokens=())
    batch.run()
    assert request.tokens == alone_by_generate(linear_folder, request) and batch.pool_bytes == batch.state_bytes > 0


def test_other_carried_caches_are_refused(tmp_path, monkeypatch):
    model = decoders.MODELS["retnet"]()
    shapes = model.cache_shapes() | {"0.token_shift": (torch.float32, ("batch", 96))}
    monkeypatch.setattr(model, "cache_shapes", lambda: shapes)
    with pytest.raises(ValueError, match="LinearDecoder: it carries 0.token_shift from call to call; .* Use export_decoder"):
        export_for_serving(model, tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("captured", (False, True))
def test_snapshots_count_tokens(linear_folder, monkeypatch, captured):
    """What each request reads of a beginning that others have too, and the tokens with and without sharing."""
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    common = random_prompt(40, 1)
    wanted = [[*common, *random_prompt(13, 10 + i)] for i in range(4)]

    def run(texts, **options):
        batch = ContinuousBatch(linear_folder, pages=80, max_requests=3, providers=["CPUExecutionProvider"], **options)
        batch.captured = {} if captured else None
        poisoned(batch)
        before, requests = 0, []
        for text in texts:
            requests.append(batch.add(text, 4, stop_tokens=()))
            batch.run()
            requests[-1].computed, before = batch.processed_tokens - before, batch.processed_tokens
        return requests

    shared, apart = run([*wanted, wanted[0]]), run([*wanted, wanted[0]], share=False)
    # The second one shows where texts part, and the third goes on there. The first one's own end, at 48, made room since.
    assert [r.shared for r in shared] == [0, 0, 40, 40, 40]
    assert [r.computed for r in shared] == [53 + 3 - r.shared for r in shared]
    assert [r.computed for r in apart] == [53 + 3] * 5 and [r.shared for r in apart] == [0] * 5
    assert [r.tokens for r in shared] == [r.tokens for r in apart] == [alone_by_generate(linear_folder, r) for r in shared]


def test_equal_prompts_wait_for_the_snapshot(linear_folder):
    """Also where they come at the same time."""
    prompt = random_prompt(50, 3)
    batch = ContinuousBatch(linear_folder, pages=80, providers=["CPUExecutionProvider"])
    requests = [batch.add(prompt, 4, stop_tokens=(), temperature=1.5, seed=i) for i in range(4)]
    batch.run()
    assert [r.shared for r in requests] == [0, 48, 48, 48] and batch.processed_tokens == 50 + 3 * 2 + 4 * 3
    assert [r.tokens for r in requests] == [alone_by_generate(linear_folder, r) for r in requests]


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("seed", rest_slow(range(3)))
def test_snapshots_come_and_go(linear_folder, monkeypatch, captured, seed):
    """Drawn requests of few beginnings, with few snapshots, failed calls, cancelled and preempted requests."""
    batch = ContinuousBatch(
        linear_folder, pages=17, max_requests=4, step_tokens=19, providers=["CPUExecutionProvider"], snapshots=3
    )
    batch.captured = {} if captured else None
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    poisoned(batch)
    run, calls = batch._run, []

    def failing(*arguments):
        run(*arguments)
        calls.append(1)
        if not len(calls) % 23:
            raise RuntimeError("no")

    def step():
        try:
            batch.step()
        except RuntimeError:
            pass

    monkeypatch.setattr(batch, "_run", failing)
    random, beginnings = np.random.default_rng(seed), [random_prompt(40, n) for n in range(3)]
    requests, cancelled = [], []
    for i in range(16):
        prompt = beginnings[random.integers(0, 3)][: random.integers(8, 41)] + random_prompt(random.integers(1, 12), 100 + i)
        requests.append(batch.add(prompt, int(random.integers(1, 20)), stop_tokens=(), temperature=float(i % 2), seed=i))
        for _ in range(random.integers(0, 5)):
            step()
        if i % 5 == 4:
            cancelled.append(requests[int(random.integers(0, len(requests)))])
            batch.cancel(cancelled[-1])
    while not batch.idle:
        step()
    assert batch.pool.in_use == 0 and sorted(batch.free_states) == [1, 2, 3, 4] and batch.shared_tokens > 20
    for request in requests:
        expected = alone_by_generate(linear_folder, request)
        assert request.tokens == expected[: len(request.tokens)] and request.error is None and not request.marks
        assert len(request.tokens) == request.max_new_tokens or request in cancelled


def test_wrong_snapshots(folder):
    with pytest.raises(ValueError, match="snapshots is -1; expected how many"):
        ContinuousBatch(folder, pages=10, snapshots=-1)


@pytest.mark.parametrize("seed", range(4))
def test_lookup(seed):
    """As a search of the whole text finds it: behind the latest earlier place of the ending, of three tokens or of two."""
    random, text, lookup = np.random.default_rng(seed), [], Lookup()
    for _ in range(150):
        new = random.integers(0, 4, random.integers(0, 4)).tolist()
        text += new
        lookup.extend(new)
        count, expected = int(random.integers(1, 7)), []
        for size in (3, 2):
            ends = [i + size for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
            if ends:
                while len(expected) < count:
                    expected.append([*text, *expected][ends[-1] + len(expected)])
                break
        assert lookup.guess(count) == expected


def repeating(random, size):
    """A prompt that says things twice, so that there is something to guess from."""
    part = random.integers(0, 97, 7).tolist()
    return [*part, *random.integers(0, 97, size).tolist(), *part][: max(1, size)]


def check_guesses(folder, monkeypatch, captured, seed):
    """Greedy and drawn requests that come, go, end at stop tokens, share beginnings and are preempted: with guesses, right and
    wrong ones, they get the tokens that they get without, and pages, states and lengths are right at every step."""
    right = {}  # of a request: the tokens that it will get, which some guesses are made of, so that many are right

    def guess(self, count):
        answer, random = right.get(tuple(self.text[:1])), np.random.default_rng(len(self.text))
        at = len(self.text)
        if answer is None or random.random() < 0.2:
            return random.integers(0, 97, count).tolist()
        found = answer[at : at + count]
        if found and random.random() < 0.5:
            found[int(random.integers(0, len(found)))] = 5
        return found

    random = np.random.default_rng(seed)
    settings = [dict(temperature=float(i % 3 == 2) * 0.8, seed=i) for i in range(14)]
    wanted = [[i, *repeating(random, int(random.integers(1, 40)))] for i in range(14)]
    lengths = [int(random.integers(1, 30)) for _ in wanted]
    plain = ContinuousBatch(folder, pages=200, max_requests=4, providers=["CPUExecutionProvider"])
    alone_tokens = []
    for prompt, length, options in zip(wanted, lengths, settings):
        request = plain.add(prompt, length, stop_tokens=[3], **options)
        plain.run()
        alone_tokens.append(request)
        right[prompt[0],] = prompt + request.tokens
    monkeypatch.setattr(Lookup, "guess", guess)
    monkeypatch.setattr(serving, "PIECE_TOKENS", 8)
    batch = ContinuousBatch(folder, pages=17, max_requests=4, step_tokens=20, providers=["CPUExecutionProvider"], speculate=5)
    batch.captured = {} if captured else None
    poisoned(batch)
    requests, told = [], {}
    for i, (prompt, length, options) in enumerate(zip(wanted, lengths, settings)):
        requests.append(batch.add(prompt, length, stop_tokens=[3], **options))
        while not batch.idle if i == len(wanted) - 1 else random.random() < 0.6:
            for request, token in batch.step():
                told.setdefault(id(request), []).append(token)
            for request in batch.running:
                assert request.coming == 0 and request.cached <= len(request.prompt) + len(request.tokens) - 1
                assert not batch.paged or len(request.pages) == -(-request.cached // BLOCK) or request.waiting > 1
                assert len(request.chain) * BLOCK <= request.cached
            assert batch.paged or batch.pool.in_use == 0
            rows = [row for r in batch.running for row in (r.state, r.spare) if batch.linear]
            assert len({*rows, batching.EMPTY}) == len(rows) + 1, "two requests have a state"
    assert batch.guessed_right > 30 and batch.guessed > batch.guessed_right + 20 and batch.pool.in_use == 0
    assert len(batch.free_states) == 8  # two for each
    for request, other in zip(requests, alone_tokens):
        assert request.tokens == other.tokens == told[id(request)] and len(request.logprobs) == len(request.tokens)
        assert np.allclose(request.logprobs, other.logprobs, atol=1e-4)
    assert batch.steps < sum(len(r.tokens) for r in requests)


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("seed", range(6))
def test_guesses_change_no_token(folder, monkeypatch, captured, seed):
    check_guesses(folder, monkeypatch, captured, seed)


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("seed", rest_slow(range(6)))
def test_wrong_guesses_leave_states_as_they_were(linear_folder, monkeypatch, captured, seed):
    check_guesses(linear_folder, monkeypatch, captured, seed)


def test_guesses_where_no_layer_has_pages(linear_folder, monkeypatch):
    """A text longer than a pool that nobody needs."""
    monkeypatch.setattr(Lookup, "guess", lambda self, count: [5] * count)
    batch = ContinuousBatch(linear_folder, pages=20, providers=["CPUExecutionProvider"], speculate=2)
    if batch.paged:
        pytest.skip("its softmax layers have pages")
    request = batch.add(random_prompt(300, 1), 4, stop_tokens=())
    batch.run()
    assert request.tokens == alone_by_generate(linear_folder, request) and batch.guessed


def test_what_a_wrong_guess_costs_a_state(linear_folder, monkeypatch):
    """What a state gave up is read again with the next token. A guess may follow it until it is longer than a guess."""
    plain = ContinuousBatch(linear_folder, pages=20, providers=["CPUExecutionProvider"])
    expected = plain.add(random_prompt(20, 1), 24, stop_tokens=())
    plain.run()
    answer = [*expected.prompt, *expected.tokens]
    monkeypatch.setattr(Lookup, "guess", lambda self, count: [(answer[len(self.text)] + 1) % 90][:count])
    batch = ContinuousBatch(linear_folder, pages=20, providers=["CPUExecutionProvider"], speculate=2)
    request = batch.add(random_prompt(20, 1), 24, stop_tokens=())
    sizes, before = [], 0
    while not batch.idle:
        batch.step()
        sizes.append(batch.processed_tokens - before)
        before = batch.processed_tokens
    # The prompt in two pieces; then one token and a guess, two and a guess, three and a guess, and four without.
    assert request.tokens == expected.tokens and sizes[:10] == [16, 4, 2, 3, 4, 4, 2, 3, 4, 4] and batch.guessed_right == 0


def test_guesses_save_steps(model, folder, monkeypatch):
    """A text that is known to come takes a step for each N + 1 tokens; what follows nothing is guessed at all."""
    prompt = random_prompt(20, 1)
    answer = alone(model, prompt, 24)
    monkeypatch.setattr(Lookup, "guess", lambda self, count: [*prompt, *answer][len(self.text) :][:count])
    batch = ContinuousBatch(folder, pages=20, providers=["CPUExecutionProvider"], speculate=3)
    request = batch.add(prompt, 24, stop_tokens=())
    batch.run()
    assert request.tokens == answer and batch.steps == 1 + 6  # 1 of the prompt's, then 4, 4, 4, 4, 4 and 3
    assert (batch.guessed, batch.guessed_right, batch.processed_tokens) == (17, 17, 20 + 23)
    monkeypatch.setattr(Lookup, "guess", lambda self, count: [])
    batch = ContinuousBatch(folder, pages=20, providers=["CPUExecutionProvider"], speculate=3)
    request = batch.add(prompt, 24, stop_tokens=())
    batch.run()
    assert request.tokens == answer and batch.steps == 24 and batch.guessed == 0


def test_adjusted_requests_are_not_guessed(model, folder, monkeypatch):
    """Penalties count what was said: steps with such a request go without guesses, and those behind have them again."""
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9, 7, 8, 9, 7]]
    batch = ContinuousBatch(folder, pages=40, providers=["CPUExecutionProvider"], speculate=3)
    penalised = batch.add(prompts[0], 6, stop_tokens=(), frequency_penalty=1.5, top_logprobs=3, constraint=Rule(5))
    plain = batch.add(prompts[1], 30, stop_tokens=())
    monkeypatch.setattr(Lookup, "guess", lambda self, count: [0] * count)
    while not penalised.done:
        batch.step()
        assert batch.guessed == 0
    batch.run()
    assert batch.guessed > 0 and plain.tokens == alone(model, prompts[1], 30)
    expected = adjusted(model, prompts[0], 6, frequency_penalty=1.5, constraint=Rule(5))[0]
    assert penalised.tokens == expected and len(penalised.top_logprobs) == 6


def test_where_nothing_is_guessed(folder, tmp_path):
    with pytest.raises(ValueError, match="speculate is -1; expected how many tokens"):
        ContinuousBatch(folder, pages=10, speculate=-1)
    as_format_3(folder, tmp_path / "old")
    with pytest.raises(ValueError, match="gives one token of a request a step, .*: export it again"):
        ContinuousBatch(tmp_path / "old", pages=10, speculate=2)


def test_pools_by_a_gpus_memory(monkeypatch):
    """Three quarters of what is free, less the states, and no more than all requests can fill; others: 4096 tokens a request."""

    def node(name, *shape, of="float16"):
        return SimpleNamespace(name=SERVING.past + name, shape=["rows", *shape], type=SESSION_TYPES[of])

    gpu, cpu, asked = Device("cuda", 1), Device("cpu"), []
    monkeypatch.setattr(serving, "free_memory", lambda device: asked.append(device) or 1_000_000)
    limits = batching.Limits(1, 4, 64)

    def pages(caches, device, positions=None, ranks=False):
        return serving._default_pages(caches, {"block": 16, "max_positions": positions}, limits, device, ranks)

    paged, page = [node(f"0.{part}", 2, 16, 64) for part in ("key", "value")], 2 * 2 * 16 * 64 * 2
    assert pages(paged, gpu) == 750_000 // page and asked == [gpu]
    assert pages(paged, gpu, 64) == 4 * 4 and pages(paged, gpu, 100_000) == 750_000 // page
    quantised = [node("0.key", 2, 16, 64, of="int8"), node("0.value", 2, 16, 32, of="uint8")]
    assert pages(quantised, gpu) == 750_000 // (2 * 16 * 64 + 2 * 16 * 32)
    state = node("1.recurrent_state", 3, 8, 8, of="float32")
    bytes_of_states = limits.state_rows(True) * 3 * 8 * 8 * 4
    assert is_state(state.name) and pages([*paged, state], gpu) == (750_000 - bytes_of_states) // page
    for caches, device, ranks in ((paged, cpu, False), (paged, gpu, True), ([state], gpu, False)):
        assert pages(caches, device, None, ranks) == 4 * 4096 // 16 and pages(caches, device, 100, ranks) == 4 * 7
    large = node("1.recurrent_state", 300, 30, 30, of="float32")
    with pytest.raises(
        ValueError, match=r"cuda:1 has 0.00 GB .* in 75% of it for pages of 0.01 MB and 0.01 GB of states: fewer"
    ):
        pages([*paged, large], gpu)
    with pytest.raises(ValueError, match=r"no room in 75% of it for 0.01 GB of states: fewer max_requests and snapshots"):
        pages([large], gpu)


def test_captured_steps_are_a_threads_own(folder):
    batch = ContinuousBatch(folder, 4, 1, 12, providers=["CPUExecutionProvider"])
    first = batch._captured_here()
    first["a step"] = None
    assert batch._captured_here() is first
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(batch._captured_here).result()
        assert theirs == {} and batch.captured is theirs and other.submit(batch._captured_here).result() is theirs
        again = batch._captured_here()
        assert again == {} and again is not first and other.submit(batch._captured_here).result() is not theirs


@pytest.mark.parametrize("cache", (None, "int8", "fp8", "int4"))
def test_pools_as_on_a_gpu(model, tmp_path, monkeypatch, cache):
    """Bound by their address: the same tokens; and what is said where memory runs out."""
    export_for_serving(model, tmp_path, block=BLOCK, cache=cache)

    def batch():
        return ContinuousBatch(tmp_path, 30, 3, 12, providers=["CPUExecutionProvider"])

    def tokens(batch):
        request = batch.add(list(range(20)), 9, stop_tokens=())
        batch.run()
        return request.tokens

    bound, cpu = batch(), Device("cpu")
    shapes, caches = (
        [pool.shape() for pool in bound.pools],
        [i for i in bound.session.get_inputs() if i.name in bound.pool_names],
    )
    bound._copier, bound.device = bound.exchange, Device("cuda")
    bound.pools = [bound._make_pool(shape, i) for shape, i in zip(shapes, caches, strict=True)]
    assert all(isinstance(pool, serving._Pool) for pool in bound.pools)

    def refuse(size):
        raise RuntimeError("cuMemAlloc_v2 failed: out of memory (2)")

    monkeypatch.setattr(bound.exchange, "allocate", refuse)
    monkeypatch.setattr(serving, "free_memory", lambda device: 5_000_000)
    words = (
        rf"cuda has 0.01 GB left where {caches[0].name}, one of {len(caches)} pools, needs 0.00 \(cuMem.* \(2\)\): fewer pages"
    )
    with pytest.raises(RuntimeError, match=words.replace("cuda has", "cuda:0 has")):
        bound._make_pool(shapes[0], caches[0])
    bound.device = cpu
    bound.bind_pools(bound.binding)
    plain = batch()
    assert tokens(bound) == tokens(plain) and bound.pool_bytes == plain.pool_bytes


def test_a_pool_of_its_own_size(folder):
    batch = ContinuousBatch(folder, max_requests=3, step_tokens=12, providers=["CPUExecutionProvider"])
    assert batch.pool.count == 3 * 256 // BLOCK  # the model's positions
    request = batch.add([1, 2, 3], 4)
    batch.run()
    assert request.done and len(request.tokens) == 4
    batch.try_capture()
    assert batch.idle and batch.captured is None
