"""`leanfleet serve`: OpenAI's own client, streams, limits, clients that go away, and load."""

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leanfleet import cli, driver, engine, generation, serve
from leanfleet.export import export_decoder
from leanfleet.export.serving import add_serving
from leanfleet.lookup import Lookup
from leanfleet.ort_ops import serving
from leanfleet.ort_ops.generation import generate, load_decoder, load_tokenizer
from leanfleet.ort_ops.serving import ContinuousBatch
from support import http_server
from support.decoders import byte_tokenizer, minimax, ours
from support.paths import ROOT

KEY = "a key"
BLOCK, PAGES, LIMITS = 16, 30, serve.Limits(body=20_000, answers=8, seconds=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    sizes = dict(vocab_size=260, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None)
    models = tmp_path_factory.mktemp("models")
    LlamaForCausalLM(config).save_pretrained(models / "llama")
    byte_tokenizer().save_pretrained(models / "llama")
    assert cli.main(["export", str(models / "llama"), str(models / "tiny"), "--serve", "--page", str(BLOCK)]) == 0
    return models / "tiny"


def test_pieces_that_wait_are_told_as_one():
    """Of each answer, in order, with how it ended; a failure stays one of its own. Senders are many, and wake the loop once."""
    piece = engine.Piece
    waiting = [
        (0, piece("a", (1,), (-0.5,), ((),))),
        (1, piece("x", (7,), (-1.0,), (((7, -1.0),),))),
        (0, piece("b", (2,), (-0.25,), ((),), engine.LENGTH)),
        (1, piece("", reason=engine.FAILED, message="no")),
    ]
    first, second, failure = serve.joined(waiting)
    assert first == (0, piece("ab", (1, 2), (-0.5, -0.25), ((), ()), engine.LENGTH))
    assert (second, failure) == (waiting[1], waiting[3])

    async def receive(senders, count):
        loop, queues, wakes = asyncio.get_running_loop(), [asyncio.Queue() for _ in range(senders)], 0
        mail = serve.Mail(loop)
        deliver, seen = mail.deliver, [[] for _ in queues]

        def counted():
            nonlocal wakes
            wakes += 1
            deliver()

        mail.deliver = counted

        def send(number):
            for i in range(count):
                mail.send(queues[number], (number, i))

        threads = [threading.Thread(target=send, args=(n,)) for n in range(senders)]
        for thread in threads:
            thread.start()
        for number, queue in enumerate(queues):
            while len(seen[number]) < count:
                seen[number].append((await asyncio.wait_for(queue.get(), 30))[1])
        return seen, wakes

    seen, wakes = asyncio.run(receive(4, 2000))
    assert all(numbers == list(range(2000)) for numbers in seen) and wakes < 8000


class Running(http_server.Running):
    """A server in a thread, and OpenAI's client of it."""

    def __init__(self, folder, key=KEY, limits=LIMITS, max_waiting=400, **options):
        options = {"pages": PAGES, "max_requests": 8, "step_tokens": 64} | options
        super().__init__(folder, key, limits, max_waiting, **options)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key or "none", max_retries=0)

    def raw(self, method, path, body=None, headers=None, key=KEY):
        """(status, body) of a request that no client makes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, {"Authorization": f"Bearer {key}", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, name):
        return float(re.search(rf"^{name} (\S+)$", self.raw("GET", "/metrics")[1], re.M)[1])


@pytest.fixture(scope="module")
def running(folder):
    running = Running(folder)
    yield running
    running.settle()
    running.close()


@pytest.fixture(scope="module")
def alone(folder):
    """The text that a prompt of tokens gets in a batch of its own."""
    tokenizer = load_tokenizer(folder)

    def run(prompt, count, **options):
        batch = ContinuousBatch(folder, pages=PAGES, providers=["CPUExecutionProvider"])
        request = batch.add(prompt, count, **{"stop_tokens": [tokenizer.eos_token_id]} | options)
        batch.run()
        return tokenizer.decode(request.tokens, skip_special_tokens=True)

    return run


def texts(count, seed=0):
    random = np.random.default_rng(seed)
    return ["".join(chr(c) for c in random.integers(97, 123, n)) for n in random.integers(3, 90, count)]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


def test_chat(running, folder, alone):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    prompt = generation.encode_chat(load_tokenizer(folder), turns)
    answer = running.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, logprobs=True
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == alone(prompt, 20)
    assert choice.finish_reason == "length" and len(choice.logprobs.content) == 20
    assert all(t.logprob <= 0 for t in choice.logprobs.content)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 20)
    assert answer.object == "chat.completion" and answer.model == "tiny"
    again = running.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK  # its pages are still there


def test_streams_are_the_same_text(running):
    """Characters of several bytes and stop strings that cross tokens included: the model's bytes are random."""
    options = dict(model="tiny", messages=MESSAGES, max_tokens=60, temperature=1.0, n=3, seed=5, stop=["a", "\u00e9", "zz"])
    whole = running.client.chat.completions.create(**options)
    parts, reasons = [""] * 3, [None] * 3
    stream = running.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert parts == [c.message.content for c in whole.choices] and reasons == [c.finish_reason for c in whole.choices]
    assert len(set(parts)) == 3 and usage.total_tokens == whole.usage.total_tokens > usage.prompt_tokens
    assert not any(stop in part for part in parts for stop in options["stop"])


def test_completions(running, folder, alone):
    tokenizer = load_tokenizer(folder)
    prompts = texts(4)
    ids = [tokenizer(p)["input_ids"] for p in prompts]
    expected = [alone(i, 16) for i in ids]  # OpenAI's default
    for given in (prompts, ids):
        answer = running.client.completions.create(model="tiny", prompt=given, temperature=0)
        assert [c.text for c in answer.choices] == expected and [c.index for c in answer.choices] == [0, 1, 2, 3]
    drawn = dict(max_tokens=9, temperature=1.3, top_p=0.9, seed=11)
    answer = running.client.completions.create(
        model="tiny", prompt=ids[0], n=2, **drawn, logprobs=0, extra_body={"top_k": 50, "min_p": 0.01, "ignore_eos": True}
    )
    rest = dict(temperature=1.3, top_p=0.9, top_k=50, min_p=0.01, stop_tokens=())
    assert [c.text for c in answer.choices] == [alone(ids[0], 9, seed=11 + i, **rest) for i in range(2)]
    assert len(answer.choices[0].logprobs.token_logprobs) == 9


def test_penalties_biases_and_most_likely_tokens(running, folder):
    tokenizer = load_tokenizer(folder)
    ids, options = tokenizer("again and again")["input_ids"], dict(presence_penalty=1.0, frequency_penalty=0.5)
    batch = ContinuousBatch(folder, pages=PAGES, providers=["CPUExecutionProvider"])
    request = batch.add(ids, 12, stop_tokens=(), **options, logit_bias={70: 4.0}, repetition_penalty=1.2, top_logprobs=3)
    batch.run()
    extra = {"ignore_eos": True, "repetition_penalty": 1.2}
    answer = running.client.completions.create(
        model="tiny", prompt=ids, max_tokens=12, temperature=0, logprobs=3, logit_bias={"70": 4}, **options, extra_body=extra
    )
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(request.tokens) and choice.logprobs.token_logprobs == pytest.approx(request.logprobs)
    assert [list(top.values()) for top in choice.logprobs.top_logprobs] == [
        list({tokenizer.decode([t]): p for t, p in top}.values()) for top in request.top_logprobs
    ]
    answer = running.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    for token in answer.choices[0].logprobs.content:
        assert token.top_logprobs[0].logprob == token.logprob >= token.top_logprobs[1].logprob


SHAPE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"enum": [1, 20]}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def follows_shape(text):
    found = json.loads(text)
    return (
        set(found) == {"name", "ages"} and len(found["name"]) <= 6 and set(found["ages"]) <= {1, 20} and len(found["ages"]) <= 3
    )


def test_answers_that_follow_a_schema(running):
    """Random weights say nothing by themselves that is JSON; streamed or not, many at once, beside others."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SHAPE, "strict": True}}
    free = running.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=120)
    assert not free.choices[0].message.content.startswith("{")

    def ask(seed):
        options = dict(model="tiny", messages=MESSAGES, max_tokens=200, temperature=1.5, seed=seed, response_format=form)
        if seed % 2:
            return [c.message.content for c in running.client.chat.completions.create(n=2, **options).choices]
        with running.client.chat.completions.create(stream=True, **options) as stream:
            return ["".join(chunk.choices[0].delta.content or "" for chunk in stream)]

    with ThreadPoolExecutor(6) as pool:
        answers = [text for found in pool.map(ask, range(8)) for text in found]
    assert all(map(follows_shape, answers)) and len(set(answers)) > 6
    anything = running.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, response_format={"type": "json_object"}
    )
    assert anything.choices[0].message.content.startswith("{")
    parsed = running.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, response_format={"type": "text"}, temperature=0
    )
    assert parsed.choices[0].message.content


@pytest.mark.parametrize(
    "outputs, fits",
    [
        ({"regex": "(ab|cd){2,5}x"}, lambda text: re.fullmatch("(ab|cd){2,5}x", text)),
        ({"choice": ["yes", "no", "\u00fcber \\"]}, lambda text: text in ("yes", "no", "\u00fcber \\")),
        ({"json": json.dumps(SHAPE)}, follows_shape),
        ({"json": SHAPE}, follows_shape),
        ({"grammar": 'start: item ("," item)~1..3\nitem: /[0-9]{2}/'}, lambda text: re.fullmatch(r"\d\d(,\d\d){1,3}", text)),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, lambda text: re.fullmatch(r"\(*x\)*", text)),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_structured_outputs(running, outputs, fits):
    """As clients of vLLM ask for them. An answer that max_tokens cuts is the beginning of one."""
    for seed in range(4):
        answer = running.client.completions.create(
            model="tiny", prompt="x", max_tokens=150, seed=seed, temperature=1.0, extra_body={"structured_outputs": outputs}
        ).choices[0]
        assert answer.finish_reason == "length" or fits(answer.text), answer


def test_forms_that_cost_too_much(running):
    """They are refused, or end their own answer, in seconds, and the server goes on."""
    deep = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    for outputs in (
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "(a|aa)*" * 1500 + "b"},
        {"json": '{"properties": {"a": ' * 700 + "{}" + "}}" * 700},
        {"json": {"$ref": "#"}},
        {"json": deep},
        {"grammar": "start: a\na: b\nb: a"},
    ):
        begin = time.monotonic()
        try:
            running.client.completions.create(
                model="tiny", prompt="x", max_tokens=9, extra_body={"structured_outputs": outputs}
            )
        except openai.APIStatusError as error:
            assert error.status_code in (400, 503) and "\n" not in error.message, error
        assert time.monotonic() - begin < 60 and running.raw("GET", "/health", key="") == (200, "ok")
    assert running.client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens == 3


def test_stop_token_ids(running, folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("stop there")["input_ids"]
    batch = ContinuousBatch(folder, pages=PAGES, providers=["CPUExecutionProvider"])
    request = batch.add(ids, 12)
    batch.run()
    stop = request.tokens[5]
    answer = running.client.completions.create(
        model="tiny", prompt=ids, max_tokens=12, temperature=0, extra_body={"stop_token_ids": [stop]}
    )
    kept = request.tokens[: request.tokens.index(stop)]
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].text == tokenizer.decode(kept)


def test_models_health_and_metrics(running):
    assert [m.id for m in running.client.models.list()] == ["tiny"]
    assert running.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here, but 'tiny'"):
        running.client.models.retrieve("other")
    assert running.raw("GET", "/health", key="") == (200, "ok")
    before = running.metric("leanfleet_generated_tokens_total")
    running.client.completions.create(
        model="tiny", prompt="count", max_tokens=7, temperature=0, extra_body={"ignore_eos": True}
    )
    assert running.metric("leanfleet_generated_tokens_total") == before + 7
    assert running.metric("leanfleet_pages") == PAGES and running.metric("leanfleet_first_token_seconds_count") >= 1
    assert running.metric("leanfleet_next_token_seconds_count") >= 6


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat/completions", CHAT | {"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ("chat/completions", CHAT | {"presence_penalty": 1000}, 400, "presence_penalty: Input should be less than or equal"),
        ("chat/completions", CHAT | {"logit_bias": {"1000": 1}}, 400, "logit_bias is {1000: 1.0}; expected {token id in"),
        ("chat/completions", CHAT | {"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools: this server does not serve it"),
        ("chat/completions", CHAT | {"nonsense": 1}, 400, "nonsense: this server does not serve it"),
        ("chat/completions", CHAT | {"model": "gpt"}, 404, "there is no model 'gpt' here, but 'tiny'"),
        ("chat/completions", CHAT | {"n": 9}, 400, "n is 9; a request may ask for 8 answers"),
        ("chat/completions", CHAT | {"max_tokens": 100000}, 400, "more than the 256 positions"),
        ("chat/completions", CHAT | {"top_p": 0}, 400, "top_p"),
        ("chat/completions", CHAT | {"stop": ["x"] * 20}, 400, "stop"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url|text"),
        ("completions", {"prompt": ""}, 400, "the prompt is empty"),
        ("completions", {"prompt": []}, 400, "prompt is empty"),
        ("completions", {"prompt": [5, 100000]}, 400, "token ids lie in 0 .. 259"),
        ("completions", {"prompt": "x" * 300, "max_tokens": 5}, 400, "positions"),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo: this server does not serve it"),
        ("completions", {"prompt": ["a", "b", "c"], "n": 3}, 400, "3 prompts of n=3 answers are more than 8"),
        ("completions", "{not json", 400, "Invalid JSON"),
        ("completions", "[" * 10000, 400, "Invalid JSON"),
        ("completions", b"\xff\xfe", 400, "Invalid JSON|the body"),
        ("completions", {"prompt": "y" * 30000}, 413, "20000 bytes"),
        ("completions", {"prompt": [1.5] * 2000}, 400, "prompt.*valid integer"),
        ("completions", {"prompt": "x"} | {f"field {i}": 1 for i in range(1000)}, 400, "the body has 1000 fields or elements"),
        ("completions", {"prompt": "x", "priority": 5}, 400, "priority: this server does not serve it"),
        ("completions", {"prompt": [5] * 256}, 400, "a prompt has 256 tokens, and the model and its caches have positions for"),
        ("completions", {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format: .*'json_object'"),
        ("completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "json_schema: Field required"),
        ("completions", {"prompt": "x", "structured_outputs": {}}, 400, "takes one of json, json_object, regex, choice and"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "takes one of json"),
        ("completions", {"prompt": "x", "structured_outputs": {"choice": []}}, 400, "choice"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "(a"}}, 400, "regex: .*invalid regex"),
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"grammar": "start: foo"}},
            400,
            'grammar: .*unknown name: "foo"',
        ),
        ("completions", {"prompt": "x", "structured_outputs": {"json": {"type": 5}}}, 400, "json_schema: type must be"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "ignore_eos goes on"),
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            400,
            "both say what answers are",
        ),
        ("nothing", {}, 404, "there is nothing at /v1/nothing"),
    ],
    ids=str,
)
def test_refused(running, path, body, status, words):
    sent = body if isinstance(body, (str, bytes)) else json.dumps(body)
    found, text = running.raw("POST", f"/v1/{path}", sent)
    error = json.loads(text)["error"]
    assert found == status and re.search(words, error["message"]), text
    assert "\n" not in error["message"] and len(error["message"]) < 500 and error["type"]


def test_keys(running):
    for key in ("", "another", KEY + "x", "\u00fc"):
        status, text = running.raw("GET", "/v1/models", key=key)
        assert status == 401 and "API key" in text
    assert running.raw("GET", "/v1/chat/completions")[0] == 405


def slowly(running, body, seconds):
    """A client that sends its body piece by piece."""
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        for i in range(0, len(body), 16):
            connection.sendall(body[i : i + 16])
            time.sleep(seconds)
        return connection.recv(65536)


def test_clients_that_go_away(running, monkeypatch):
    """Their requests end, streamed or not, and the pages come back; a slow sender holds nobody up."""
    step = running.batch.step
    monkeypatch.setattr(running.batch, "step", lambda: time.sleep(0.005) or step())
    body = json.dumps({"prompt": "never read", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    for sent in (body, body.replace(b'"stream": true', b'"stream": false'), body[:30]):
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + sent)
            time.sleep(0.1)
    assert b"200 OK" in slowly(running, json.dumps({"prompt": "slow", "max_tokens": 3}).encode(), 0.01)
    running.settle()
    assert running.metric('leanfleet_answers_total{reason="cancelled"}') >= 1


def test_a_slow_reader_holds_nobody_up(running, folder, alone):
    ids = load_tokenizer(folder)("slow")["input_ids"]
    stream = running.client.completions.create(
        model="tiny", prompt=ids, max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    text = next(chunks).choices[0].text
    for _ in range(3):
        running.client.completions.create(model="tiny", prompt="quick", max_tokens=5)
    running.settle()  # all its tokens are made, though nobody has read them
    text += "".join(chunk.choices[0].text for chunk in chunks)  # how many events they are is up to the threads
    assert text == alone(ids, 150, stop_tokens=())


@pytest.mark.slow
def test_load(folder, alone):
    """Hundreds of clients at once over a pool that is too small for those that run: everyone gets an answer or a refusal, the
    answers are those of a request alone, and nothing is left behind."""
    running = Running(folder, max_waiting=100, pages=20)
    tokenizer, wanted = load_tokenizer(folder), texts(40, seed=9)
    wanted = [("The same beginning of every text, " if i % 2 else "") + text for i, text in enumerate(wanted)]
    ids = [tokenizer(text)["input_ids"] for text in wanted]
    counts = [int(n) for n in np.random.default_rng(2).integers(1, 90, len(ids))]
    expected = [alone(i, n) for i, n in zip(ids, counts)]

    def ask(i):
        row = i % len(ids)
        client = running.client.with_options(timeout=60)
        try:
            if i % 3:
                answer = client.completions.create(model="tiny", prompt=ids[row], max_tokens=counts[row], temperature=0)
                return answer.choices[0].text == expected[row]
            parts = client.completions.create(model="tiny", prompt=ids[row], max_tokens=counts[row], temperature=0, stream=True)
            return "".join(p.choices[0].text for p in parts) == expected[row]
        except openai.RateLimitError:
            return None

    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(ask, range(300)))
    assert found.count(False) == 0 and found.count(True) >= 100
    running.settle()
    assert running.batch.preemptions > 0 and running.batch.shared_tokens > 0
    assert found.count(None) == 0 or running.metric('leanfleet_refused_requests_total{status="429"}') == found.count(None)
    running.close()


def test_a_failing_runtime(folder, monkeypatch):
    running = Running(folder)
    step = running.batch.step
    monkeypatch.setattr(running.batch, "step", lambda: (_ for _ in ()).throw(RuntimeError("the device is gone")))
    monkeypatch.setattr(engine, "RECOVERY", 60.0)
    with pytest.raises(openai.InternalServerError, match="the device is gone"):
        running.client.completions.create(model="tiny", prompt="x", max_tokens=3)
    assert running.raw("GET", "/health")[0] == 503
    monkeypatch.setattr(engine, "RECOVERY", 0.0)  # long ago: those who ask for health first may come again
    assert running.raw("GET", "/health")[0] == 200
    monkeypatch.setattr(running.batch, "step", step)
    assert running.client.completions.create(model="tiny", prompt="x", max_tokens=3).choices
    assert running.raw("GET", "/health")[0] == 200
    running.settle()
    running.close()


def test_what_fails_in_the_thread_harms_nobody_else(running, monkeypatch):
    """A tokenizer that fails, a listener that is gone, a caller that gave up: the others get their answers."""
    texts, told = running.server.engine, []
    honest = generation.decode_each
    bad = texts.submit([1, 2], lambda piece: told.append(piece) or 1 / 0, max_new_tokens=5)
    given_up = texts.submit([1, 2], told.append, max_new_tokens=5)
    given_up.accepted.cancel()
    failing = []
    monkeypatch.setattr(generation, "decode_each", lambda *a: 1 / 0 if failing else honest(*a))
    assert running.client.completions.create(model="tiny", prompt="x", max_tokens=3).choices
    failing.append(True)
    with pytest.raises(openai.InternalServerError, match="division by zero"):
        running.client.completions.create(model="tiny", prompt="x", max_tokens=3)
    failing.clear()
    assert running.client.completions.create(model="tiny", prompt="x", max_tokens=3).choices
    assert bad.accepted.result() is None and bad.reason and texts.works
    running.settle()


def test_a_text_that_cannot_be_decoded(running, monkeypatch):
    """The texts of a step are decoded together; where one of them fails, it alone ends."""
    honest = generation.decode_each

    def decode(tokenizer, texts):
        if any(stream in text for text in texts for stream in marked):
            raise ValueError("cannot be decoded")
        return honest(tokenizer, texts)

    marked, found, ended = [], {}, threading.Event()

    def tell(name):
        def told(piece):
            found.setdefault(name, []).append(piece)
            if len(found) == 2 and all(pieces[-1].reason for pieces in found.values()):
                ended.set()

        return told

    monkeypatch.setattr(generation, "decode_each", decode)
    texts = running.server.engine
    for name, bias in (("good", 65), ("bad", 66)):  # each says one letter all the time
        texts.submit([1, 2], tell(name), max_new_tokens=9, stop_tokens=(), logit_bias={bias: 100.0})
    marked.append(66)
    assert ended.wait(60)
    assert found["bad"][-1].reason == engine.FAILED and "cannot be decoded" in found["bad"][-1].message
    assert found["good"][-1].reason == engine.LENGTH and sum(len(p.tokens) for p in found["good"]) == 9
    running.settle()


def test_an_engine_that_ends(folder):
    """Whoever asks while it ends gets an answer or a refusal, and nobody waits for ever."""
    for round in range(5):
        batch = ContinuousBatch(folder, pages=PAGES, providers=["CPUExecutionProvider"])
        texts, pieces, answers, refused = engine.Engine(batch, load_tokenizer(folder), 10**6), [], [], []

        def ask(texts=texts, pieces=pieces, answers=answers, refused=refused):
            while not refused:
                try:
                    answers.append(texts.submit([1, 2, 3], pieces.append, max_new_tokens=30))
                except engine.Closed:
                    refused.append(1)
                time.sleep(1e-4)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * round)
        texts.close(0.05 * (round % 2))
        for thread in threads:
            thread.join()
        assert refused and all(a.accepted.done() for a in answers)
        assert len([p for p in pieces if p.reason]) == len(answers) and batch.pool.in_use == 0 and not texts.works


def test_nulls(running):
    """As many clients send them, for what they leave out."""
    names = ("temperature", "top_p", "n", "stream", "presence_penalty", "logprobs", "seed", "stop", "user", "max_tokens")
    status, text = running.raw("POST", "/v1/chat/completions", json.dumps(CHAT | dict.fromkeys(names)))
    assert status == 200, text


def test_time_limit(folder):
    running = Running(folder, limits=serve.Limits(seconds=0.05), key=None)
    with pytest.raises(openai.InternalServerError, match="no answer within 0.05 seconds"):
        running.client.completions.create(model="tiny", prompt="x", max_tokens=240, extra_body={"ignore_eos": True})
    running.settle()
    running.close()


def test_time_is_up_behind_the_last_piece(running):
    """A client that reads slowly gets the end of an answer that came in time."""

    async def read():
        pieces, found = asyncio.Queue(), []
        server = SimpleNamespace(
            name="m", limits=serve.Limits(seconds=0.05), metrics=running.server.metrics, cancel=lambda answers: None
        )
        reply = serve.Reply(server, "text_completion", SimpleNamespace(n=1), [None], pieces)
        pieces.put_nowait((0, engine.Piece("a", (1,), (0.0,), ((),))))
        async for _, piece in reply.come():
            found.append(piece)
            if piece.reason is None:
                pieces.put_nowait((0, engine.Piece("b", (2,), (0.0,), ((),), engine.STOP)))
                await asyncio.sleep(0.1)
        return found

    assert [(piece.text, piece.reason) for piece in asyncio.run(read())] == [("a", None), ("b", engine.STOP)]


def test_a_body_that_does_not_come(folder):
    running = Running(folder, limits=serve.Limits(seconds=0.5))
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt"')
        assert b" 408 " in connection.recv(65536).splitlines()[0]
    running.close()


@pytest.mark.slow
def test_the_command(folder):
    """It says where it serves, prints no prompt, and at SIGTERM ends once what has begun is through."""
    environment = {**os.environ, "LEANFLEET_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "leanfleet", "serve", folder, "--port", "0", "--provider", "cpu", "--cache-tokens", "512"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    # A slow machine says what it is at before.
    line = next(line for line in process.stderr if not re.match(r" +\d+ s  ", line))
    address = re.fullmatch(
        r"serving tiny at (http://127\.0\.0\.1:\d+/v1) \(32 pages of 16 tokens, .* with an API key\)\n", line
    )
    assert address, line
    client = openai.OpenAI(base_url=address[1], api_key=KEY, max_retries=0)
    stream = client.completions.create(
        model="tiny",
        prompt="a secret",
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    parts = [next(stream)]  # on a busy machine with all the text
    process.send_signal(signal.SIGTERM)
    *parts, usage = [*parts, *stream]
    assert parts[-1].choices[0].finish_reason == "length" and usage.usage.completion_tokens == 200
    assert process.wait(20) == -signal.SIGTERM and "secret" not in process.stderr.read()
    refused = subprocess.run(
        [sys.executable, "-m", "leanfleet", "serve", folder.parent], capture_output=True, text=True, env=environment
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="README asks with curl")
def test_serving_as_readme_says(folder, tmp_path):
    """Its commands as they stand, but for the model's place and the port."""
    blocks = re.findall(r"^```\n(leanfleet (?:export|serve).*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    lines = [line.replace("path/to/model", str(folder.parent / "llama")).replace("8000", port) for line in lines]
    assert [line.split()[:2] for line in lines] == [
        ["leanfleet", "export"],
        ["leanfleet", "generate"],
        ["leanfleet", "serve"],
        ["curl", f"http://127.0.0.1:{port}/v1/chat/completions"],
    ]
    begin, *rest = lines[2].split(" exported")
    lines[2] = f"{begin} exported --port {port}{''.join(rest)}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment.pop("LEANFLEET_API_KEY", None)
    told = dict(cwd=tmp_path, env=environment, text=True)
    for line in lines[:2]:
        subprocess.run(["bash", "-c", line], check=True, capture_output=True, **told)
    server = subprocess.Popen(["bash", "-c", f"exec {lines[2]}"], stderr=subprocess.PIPE, **told)
    try:
        assert any(f"at http://127.0.0.1:{port}/v1" in line for line in server.stderr)
        found = subprocess.run(["bash", "-c", lines[3]], check=True, capture_output=True, **told)
    finally:
        server.terminate()
        server.wait(60)
    assert json.loads(found.stdout)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory):
    """MiniMax: a linear layer, a softmax layer and another linear one."""
    torch.manual_seed(4)
    model = minimax(vocab_size=260)
    models = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(models / "minimax")
    byte_tokenizer().save_pretrained(models / "minimax")
    assert cli.main(["export", str(models / "minimax"), str(models / "tiny"), "--serve"]) == 0
    return models / "tiny"


@pytest.mark.slow
def test_a_decoder_with_linear_layers(hybrid_folder):
    """Streams of several clients over carried states, one of whom goes away: each gets what `generate` makes of it alone."""
    running = Running(hybrid_folder, pages=20, max_requests=3, step_tokens=16)
    decoder, tokenizer = load_decoder(hybrid_folder, providers=["CPUExecutionProvider"]), load_tokenizer(hybrid_folder)

    def ask(prompt, leave=False):
        given = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        stream, text = running.client.completions.create(stream=True, **given), ""
        for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            if leave:
                stream.close()
                return None
        return text

    try:
        wanted = texts(8, seed=9)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, wanted, [i == 3 for i in range(8)]))
        for i, (prompt, answer) in enumerate(zip(wanted, answers)):
            tokens, _ = generate(decoder, [generation.encode(tokenizer, prompt, chat=False)], 12, stop_tokens=())
            assert i == 3 or answer == tokenizer.decode(tokens[0], skip_special_tokens=True)
        running.settle()
        assert len(running.batch.free_states) == 3
    finally:
        running.close()


@pytest.mark.slow
def test_a_decoder_without_pages(tmp_path):
    """Where every layer carries a state, prompts and answers may be longer than what the pool's pages would hold."""
    torch.manual_seed(5)
    model = ours("retnet", vocab_size=260).eval()
    export_decoder(model, tmp_path, verify=False)
    add_serving(model, tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    decoder, tokenizer = load_decoder(tmp_path, providers=["CPUExecutionProvider"]), load_tokenizer(tmp_path)
    running = Running(tmp_path, pages=2, max_requests=2, step_tokens=16)
    try:
        assert running.batch.capacity is None
        prompt = "".join(texts(3, seed=1))
        answer = running.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
        )
        tokens, _ = generate(decoder, [generation.encode(tokenizer, prompt, chat=False)], 40, stop_tokens=())
        assert answer.choices[0].text == tokenizer.decode(tokens[0], skip_special_tokens=True)
        assert answer.usage.prompt_tokens > 2 * BLOCK and answer.usage.completion_tokens == 40
        ended = running.client.completions.create(model="tiny", prompt=prompt, temperature=0)  # as far as its own end
        assert ended.choices[0].finish_reason in ("stop", "length")
        running.settle()
    finally:
        running.close()


def test_several_tokens_a_step(folder, alone, monkeypatch):
    """Right guesses come as pieces of one token each, with their own log-probabilities, and end where a stop text does."""
    prompt = list(range(97, 107))
    batch = ContinuousBatch(folder, pages=PAGES, providers=["CPUExecutionProvider"])
    known = batch.add(prompt, 30, stop_tokens=())
    batch.run()
    whole = [*prompt, *known.tokens]
    monkeypatch.setattr(Lookup, "guess", lambda self, count: whole[len(self.text) :][:count])
    running = Running(folder, speculate=4)
    try:
        given = {"model": "tiny", "prompt": prompt, "temperature": 0, "extra_body": {"ignore_eos": True}}
        answer = running.client.completions.create(max_tokens=30, logprobs=0, **given).choices[0]
        assert answer.text == alone(prompt, 30, stop_tokens=()) and answer.finish_reason == "length"
        assert np.allclose(answer.logprobs.token_logprobs, known.logprobs, atol=1e-4) and len(answer.logprobs.tokens) == 30
        assert running.batch.guessed_right >= 20 and running.batch.steps < 15
        assert running.metric("leanfleet_rightly_guessed_tokens") == running.batch.guessed_right
        stop = answer.text[9:11]
        short = running.client.completions.create(max_tokens=30, stop=stop, **given).choices[0]
        assert short.text == answer.text[: answer.text.index(stop)] and short.finish_reason == "stop"
        chosen = running.client.completions.create(max_tokens=9, logprobs=2, **given).choices[0]
        assert chosen.text == alone(prompt, 9, stop_tokens=()) and len(chosen.logprobs.top_logprobs) == 9
        running.settle()
    finally:
        running.close()


def test_defaults_by_device(folder, monkeypatch):
    """On a GPU more requests, and steps as CUDA graphs where a first answer shows that they can be."""
    made = []

    class Batch:
        def __init__(self, path, **options):
            made.append(options)
            self.pool = SimpleNamespace(count=options["pages"] or 4321)
            if options["cuda_graph"] and made[-1]["step_tokens"] == 77:
                self.problem = RuntimeError("cannot be captured")

        def try_capture(self):
            if hasattr(self, "problem"):
                raise self.problem

    monkeypatch.setattr(driver, "why_no_gpu", lambda: None)
    monkeypatch.setattr(serving, "ContinuousBatch", Batch)
    monkeypatch.setattr(serve, "Server", lambda batch, *rest: batch)

    def asked(*names, **options):
        made.clear()
        serve.load_server(folder, **options)
        return [tuple(options.get(name) for name in names) for options in made]

    sizes = "pages", "max_requests", "step_tokens", "cuda_graph"
    cpu, cuda = {"providers": ["CPUExecutionProvider"]}, {"providers": ["CUDAExecutionProvider"]}
    assert asked(*sizes, **cpu) == [(None, 16, 128, False)]
    assert asked(*sizes, **cuda) == [(None, 64, 2048, True)]
    assert asked(*sizes, **cuda, rank=1) == [(None, 16, 2048, False)]
    assert asked("cuda_graph", **cuda, library=False) == [(False,)]
    assert asked("cuda_graph", providers=cpu["providers"] + cuda["providers"]) == [(False,)]
    assert asked("cuda_graph", "speculate", **cuda, speculate=3) == [(False, 3)]
    assert asked("cuda_graph", **cuda, cuda_graph=False) == [(False,)] and asked("cuda_graph", **cuda, cuda_graph=True) == [
        (True,)
    ]
    assert asked(*sizes, **cuda, cache_tokens=100, max_requests=90) == [(7, 90, 2048, True)]
    with pytest.warns(RuntimeWarning, match="steps are not captured as CUDA graphs: cannot be captured"):
        assert asked(*sizes, **cuda, step_tokens=77) == [(None, 64, 77, True), (4321, 64, 77, False)]
    monkeypatch.setattr(driver, "why_no_gpu", lambda: "there is no NVIDIA driver here")
    assert asked("cuda_graph", **cuda) == [(False,)]  # ONNX Runtime says what is missing
    with pytest.raises(ValueError, match="cuda_graph needs a GPU, and there is no NVIDIA driver here"):
        ContinuousBatch(folder, cuda_graph=True)
