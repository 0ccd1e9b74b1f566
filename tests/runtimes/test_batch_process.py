"""Continuous batching in a process of its own gives what it gives in this one, and its end is told in words."""

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leanfleet import batch_process, serve
from leanfleet.batch_process import BatchProcess, Result, State, _Worker
from leanfleet.batching import Over, Request
from leanfleet.export import export_decoder
from leanfleet.export.serving import add_serving
from leanfleet.grammar import Grammars
from leanfleet.ort_ops.serving import ContinuousBatch
from support import decoders, http_server

OPTIONS = dict(providers=["CPUExecutionProvider"], max_requests=4, step_tokens=32, cuda_graph=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = decoders.byte_tokenizer()
    sizes = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
        **sizes,
    )
    model, folder = LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("served")
    export_decoder(model, folder)
    add_serving(model, folder, block=8)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def batch(folder):
    batch = BatchProcess(folder, pages=30, **OPTIONS)
    yield batch
    batch.close()
    assert batch.process.returncode is not None


def run(batch):
    """All tokens by request, as step() gave them."""
    given = {}
    end = time.monotonic() + 60
    while not batch.idle:
        assert time.monotonic() < end
        for request, token in batch.step():
            given.setdefault(id(request), []).append(token)
    return given


def drawn(count):
    """[(prompt, options of add)]"""
    random = np.random.default_rng(3)
    shared = random.integers(0, 250, 20).tolist()
    found = []
    for i in range(count):
        options = {"max_new_tokens": int(random.integers(1, 25)), "stop_tokens": [7, 9] if i % 4 == 0 else ()}
        if i % 3 == 1:
            options |= {"temperature": 0.8, "seed": i, "top_k": 40}
        if i % 5 == 2:
            options |= {"repetition_penalty": 1.3, "top_logprobs": 3, "logit_bias": {5: 2.0}}
        found.append(((shared if i % 2 else []) + random.integers(0, 250, int(random.integers(1, 40))).tolist(), options))
    return found


def test_requests_come_and_go(folder, batch):
    """The tokens, log-probabilities and counts of a batch in this process; one that is cancelled gives no token any more."""
    here = ContinuousBatch(folder, pages=30, **OPTIONS)
    expected = [here.add(prompt, **options) for prompt, options in drawn(14)]
    here.run()
    requests = []
    for prompt, options in drawn(14):
        requests.append(batch.add(prompt, **options))
        batch.step()
    gone = batch.add([1, 2, 3], 200, stop_tokens=())
    while len(gone.tokens) < 2:
        batch.step()
    batch.cancel(gone)
    before = len(gone.tokens)
    run(batch)
    assert gone.done and len(gone.tokens) == before
    for found, right in zip(requests, expected, strict=True):
        assert found.done and found.error is None and found.tokens == right.tokens
        assert np.allclose(found.logprobs, right.logprobs, atol=1e-4)
        assert [[t for t, _ in top] for top in found.top_logprobs] == [[t for t, _ in top] for top in right.top_logprobs]
    assert batch.counts == (0, 0) and batch.idle and sum(r.shared for r in requests) == batch.shared_tokens > 0
    assert batch.pages == 30 and batch.capacity == here.capacity and batch.pool_bytes == here.pool_bytes
    assert batch.pages_in_use == 0
    gone = batch.add([1, 2, 3], 200, stop_tokens=())
    while not gone.tokens:
        batch.step()
    batch.cancel(gone)
    run(batch)
    assert batch.pages_in_use == 0


def test_a_constraint_is_made_again(folder, batch):
    tokenizer = decoders.byte_tokenizer()
    grammars = Grammars(tokenizer, batch.vocabulary, {tokenizer.eos_token_id})
    ends = [tokenizer.eos_token_id]
    requests = [batch.add([3, 4, 5], 30, ends, constraint=grammars.choice(["yes", "no"])) for _ in range(2)]
    requests.append(batch.add([3, 4], 30, ends, constraint=grammars.regex("a{5}")))
    run(batch)
    texts = [tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]
    assert {*texts[:2]} <= {"yes", "no"} and texts[2] == "aaaaa"
    with pytest.raises(ValueError, match="has to be one of leanfleet.grammar's"):
        batch.add([3], 3, constraint=SimpleNamespace(allowed=bytes, accept=int))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([],), "empty"),
        (([1, 99999],), "99999"),
        (([1] * 200, 100), "300 tokens are more than"),
        (([1], 0), "max_new_tokens"),
        (([1], 3, ("a",)), "stop"),
    ],
)
def test_wrong_requests_are_refused_here(batch, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        batch.add(*arguments)
    assert batch.idle


def test_what_opening_raises_comes_here(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="model.onnx does not exist"):
        BatchProcess(tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="max_requests"):
        BatchProcess(folder, **OPTIONS | {"max_requests": 0})


def test_a_process_that_is_killed_is_told(batch):
    request = batch.add([1, 2], 200, stop_tokens=())
    batch.step()
    os.kill(batch.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"has ended \(signal 9\)"):
        run(batch)
    assert "signal 9" in batch.over and not request.done
    with pytest.raises(RuntimeError, match="signal 9"):
        batch.add([1], 1)


def test_waking_ends_a_wait(batch):
    """Where no step runs that could."""
    batch.leaving.add(99)
    timer = threading.Timer(0.2, batch.wake)
    timer.start()
    assert batch.step() == []
    timer.join()
    batch.leaving.clear()


class Failing:
    """A batch whose steps fail."""

    def __init__(self):
        self.counts, self.cancelled, self.open = (0, 0), [], []
        self.pages_in_use = self.shared_tokens = self.guessed = self.guessed_right = self.preemptions = 0

    @property
    def idle(self):
        return not self.open

    def _take_in(self, request):
        if request.prompt == [0]:
            raise ValueError("not this one")
        self.open.append(request)

    def step(self):
        raise RuntimeError("out of memory")

    def cancel(self, request):
        self.open.remove(request)


def worked(orders):
    """What a worker over a batch whose steps fail says to orders, and the worker."""
    sent, said, orders = [], threading.Event(), list(orders)

    def recv():
        if orders:
            return orders.pop(0)
        assert said.wait(20)
        raise EOFError

    def send(result):
        sent.append(result)
        if result.error:
            said.set()

    worker = _Worker(Failing(), SimpleNamespace(recv=recv, send=send))
    worker.run()
    return sent, worker


FIELDS = dict(max_new_tokens=1, stop_tokens=set(), priority=0)


def test_a_step_that_fails_ends_all_requests():
    """And one that the graphs refuse ends alone. The process goes on."""
    orders = [("add", 1, {"prompt": [0], **FIELDS}, None), ("cancel", 77), ("add", 2, {"prompt": [1], **FIELDS}, None)]
    sent, worker = worked(orders)
    assert all(isinstance(result, Result) for result in sent)
    ended = {number: str(error) for result in sent for number, error in result.ended}
    assert ended == {1: "not this one", 77: "None", 2: "out of memory"}
    assert any(result.error == "out of memory" for result in sent) and worker.batch.idle and not worker.open


def test_tokens_before_a_failure_are_given(batch):
    """Of steps that are read together: the failure comes behind them, and the batch is not idle before."""
    first, second = (batch.add([1, 2, n], 100, stop_tokens=()) for n in (3, 4))
    results = [
        Result(State(), tokens=[(first.arrival, 5, -1.0, [])], ended=[(first.arrival, None)]),
        Result(State(), ended=[(second.arrival, RuntimeError("out of memory"))], error="out of memory"),
    ]
    real, (batch.connection, other) = batch.connection, Pipe()
    try:
        for result in results:
            other.send(result)
        assert batch.step() == [(first, 5)] and first.done and second.error and not batch.idle
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.step()
        assert batch.idle
    finally:
        batch.connection.close()
        batch.connection = real


def test_a_constraint_that_cannot_be_made_ends_its_request():
    """One that is cancelled while it is made is not begun."""
    ended = {}
    worker = _Worker(Failing(), None)
    worker._receive("add", 5, {"prompt": [1], **FIELDS}, ("choice", "[]", frozenset()))
    worker._receive("add", 6, {"prompt": [1], **FIELDS}, ("choice", "[]", frozenset()))
    worker._receive("cancel", 6)
    threading.Thread(target=worker.make_constraints, daemon=True).start()
    end = time.monotonic() + 20
    while len(ended) < 2 or worker.made:
        assert time.monotonic() < end
        while worker.orders:
            worker.orders.popleft()()
        ended |= dict(worker.ended)
        time.sleep(0.01)
    assert "tokenizer" in str(ended[5]) and not worker.open and not worker.batch.open
    request = Request([1], 1, set())
    request.constraint = object()
    worker._add(7, request)  # cancelled before its constraint was there
    assert not worker.batch.open


def test_options_that_cannot_be_sent():
    with pytest.raises(ValueError, match="cannot be sent"):
        BatchProcess("anywhere", session_options=threading.Lock())
    with pytest.raises(ValueError, match="leave rank out"):
        BatchProcess("anywhere", rank=0)


def test_foreign_modules_of_the_current_folder_are_left_alone(folder, tmp_path, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    batch = BatchProcess(folder, pages=30, **OPTIONS)
    batch.close()


def test_over_http(folder):
    """Clients at once get what the batch in this process gives them, and refusals are those of a server in one process."""
    bodies = [{"prompt": f"question {i}", "max_tokens": 9, "temperature": i % 2, "seed": i} for i in range(8)]
    bodies += [{"prompt": [], "max_tokens": 3}, {"prompt": "a", "structured_outputs": {"regex": "("}}]
    bodies += [{"prompt": "a", "max_tokens": 12, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}]

    def answers(own_process):
        running = http_server.Running(folder, None, serve.Limits(), 50, own_process, pages=60, max_requests=4, step_tokens=32)
        try:
            with ThreadPoolExecutor(len(bodies)) as pool:
                found = list(pool.map(partial(answer, running.port), bodies))
            gone = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
            gone.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 150, "stream": True}))
            gone.sock.recv(100)
            gone.sock.shutdown(socket.SHUT_RDWR)
            gone.close()
            running.settle()
        finally:
            running.close()
        return found

    here, there = answers(False), answers(True)
    assert there == here and [status for status, _ in here] == [200] * 8 + [400, 400, 200]


def answer(port, body):
    """(status, texts) of a completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, [choice["text"] for choice in found.get("choices", ())]


def test_closing(batch):
    """A batch that is closed takes nothing, and says so; a server over it may be ended twice."""
    batch.close()
    for call in (lambda: batch.add([1], 1), batch.step):
        with pytest.raises(Over, match="is closed"):
            call()
    assert batch.over == "" and batch.idle


def test_the_process_captures_its_steps_before_requests(monkeypatch):
    from leanfleet.ort_ops import serving

    asked = []

    def open_batch(folder, **options):
        asked.append((folder, options))
        raise ValueError("seen")

    monkeypatch.setattr(serving, "open_batch", open_batch)
    monkeypatch.setattr(batch_process.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(batch_process, "_end_with", lambda connection, opened: None)  # it would end this process
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    ours, theirs = batch_process.socket.socketpair()
    connection = batch_process.Connection(ours.detach())
    connection.send(("folder", {"pages": 3}))
    batch_process.main(str(theirs.detach()))
    assert isinstance(connection.recv(), ValueError) and asked == [("folder", {"ahead": True, "pages": 3})]
    connection.close()
