"""Clients of `leanfleet serve`, dozens to hundreds at once: plain ones, slow ones, some that go away, and some that send what is
wrong. Each that asks rightly gets the text that it would get alone, or a refusal because too many wait; the others get an error
that says so, or no answer where they sent no request. When all have ended, nothing of theirs is left in the server.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
import tempfile
import time
from pathlib import Path

from stress import files, trees

PACKAGES = ("torch", "transformers", "starlette", "uvicorn", "pydantic", "prometheus_client")
SECONDS = 90  # for all clients of a case; longer is a hang
KEY = "a key"
TEXT = "The same beginning of every text, and then "
# Blocks of 16 tokens, bytes here, that are the same behind others are still other ones.
BEGINNINGS = ("", TEXT, "sixteen letters " + TEXT[:32], "other beginnings" + TEXT[:32])
BODY, MOST_TOKENS = 20_000, 60  # limits of a request's body and of an asked answer
BASES = ("llama", "llama-int8", "minimax")
RIGHT = ("whole", "whole", "stream", "stream", "chat", "sampled", "stopped", "slow_reader", "slow_sender")
WRONG = ("changed", "changed", "huge", "endless", "key", "path", "noise", "leaves", "leaves", "silent", "too_long")


class Wrong(Exception):
    """What a client got is not what it should have got."""


@dataclasses.dataclass(frozen=True)
class Case:
    """base: of BASES. options: of ContinuousBatch and of the engine. clients: {"does", "at" (seconds), ...} each."""

    base: str
    options: dict
    clients: tuple = ()

    op = property(lambda self: self.base)
    runtime = "clients"

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text):
        fields = json.loads(text)
        return Case(fields["base"], fields["options"], tuple(fields["clients"]))


def place(index):
    return BASES[index % len(BASES)], Case.runtime


def draw(seed, index):
    source, base = random.Random(f"{seed}:clients:{index}"), place(index)[0]
    folder_of(base)  # made here, all workers take the same
    requests = source.choice((1, 3, 8))
    options = {
        "pages": source.choice((14, 20, 60)),
        "max_requests": requests,
        "step_tokens": source.choice((8, 16, 64, 200)),
        "share": source.random() < 0.7,
        "speculate": source.choice((0, 0, 3)),
        "max_waiting": source.choice((4, 50, 400, 400)),
    }
    spread = source.choice((0.0, 0.5, 3.0))
    clients = [draw_client(source) | {"at": round(source.uniform(0, spread), 3)} for _ in range(source.choice((1, 8, 40, 150)))]
    return Case(base, options, tuple(clients))


def draw_client(source):
    does = source.choice(RIGHT if source.random() < 0.6 else WRONG)
    client = {"does": does, "text": source.randrange(12), "tokens": source.randint(1, MOST_TOKENS)}
    if does == "sampled":
        client |= {"temperature": source.choice((0.3, 1.0, 2.0)), "top_p": source.choice((1.0, 0.8))}
        client |= {"seed": source.randrange(99), "answers": source.choice((1, 3))}
    if does in ("changed", "noise", "leaves", "path", "endless"):
        client["number"] = source.randrange(1 << 30)
    return client


def simpler(case):
    """With fewer clients, then with plainer options."""
    half = len(case.clients) // 2
    if half:
        yield dataclasses.replace(case, clients=case.clients[:half])
        yield dataclasses.replace(case, clients=case.clients[half:])
    if 1 < len(case.clients) <= 8:
        for i in range(len(case.clients)):
            yield dataclasses.replace(case, clients=case.clients[:i] + case.clients[i + 1 :])
    for name, plain in (("speculate", 0), ("share", False), ("max_waiting", 400), ("pages", 60)):
        if case.options[name] != plain:
            yield dataclasses.replace(case, options=case.options | {name: plain})


# What is right


@functools.cache
def folder_of(base):
    """An exported folder with a serving graph, made once a run."""
    with files.MAKING:
        folder = files.store() / f"clients-{base}"
        if not folder.exists():
            part = Path(tempfile.mkdtemp(dir=files.store()))
            make(base, part)
            with contextlib.suppress(OSError):  # another process was faster
                part.rename(folder)
    return folder


def make(base, folder):
    import torch
    import transformers

    from leanfleet.export import export_decoder
    from leanfleet.export.serving import add_serving
    from support.decoders import byte_tokenizer, minimax

    torch.manual_seed(3)
    if base == "minimax":
        model = minimax(vocab_size=260).eval()
    else:
        sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=260)
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, max_position_embeddings=256, initializer_range=0.3)
        model = transformers.LlamaForCausalLM(config).eval()
    cache = "int8" if base.endswith("int8") else None
    export_decoder(model, folder, byte_tokenizer(), cache=cache)
    add_serving(model, folder, cache=cache)


def text_of(client):
    source = random.Random(client["text"])
    words = "".join(source.choice("abcdefgh ") for _ in range(source.randint(1, 60)))
    return BEGINNINGS[client["text"] % 4] + words + ("\u00e9\U0001f600" if client["text"] % 3 == 0 else "")


class Expected:
    """The texts that requests get alone."""

    def __init__(self, base):
        from leanfleet.ort_ops.generation import load_tokenizer
        from leanfleet.ort_ops.serving import ContinuousBatch

        folder = folder_of(base)
        self.tokenizer = load_tokenizer(folder)
        self.batch = ContinuousBatch(folder, pages=20, max_requests=1, providers=["CPUExecutionProvider"], share=False)
        self.tokens = functools.cache(self._tokens)

    def _tokens(self, text, chat, count, **options):
        from leanfleet import generation

        turns = [{"role": "user", "content": text}]
        prompt = generation.encode_chat(self.tokenizer, turns) if chat else generation.encode(self.tokenizer, text, chat=False)
        request = self.batch.add(prompt, count, stop_tokens=(), **options)
        self.batch.run()
        return request.tokens

    def text(self, client, number=0):
        """Of the answer with this number; greedy ones are beginnings of one another."""
        sampled = {k: client[k] for k in ("temperature", "top_p", "seed") if k in client}
        if sampled:
            sampled["seed"] += number
        count = client["tokens"] if sampled else MOST_TOKENS
        tokens = self.tokens(text_of(client), client["does"] == "chat", count, **sampled)[: client["tokens"]]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text[: text.index(stop)] if (stop := stop_of(text)) and client["does"] == "stopped" else text


expected_of = functools.cache(Expected)


def stop_of(text):
    """A text to stop at that an answer has, if it has plain characters."""
    return next((text[i : i + 2] for i in range(len(text) // 2, len(text) - 1) if text[i : i + 2].isascii()), None)


def body_of(client, base):
    body = {"max_tokens": client["tokens"], "temperature": 0, "ignore_eos": True}
    if client["does"] == "chat":
        body["messages"] = [{"role": "user", "content": text_of(client)}]
    else:
        body["prompt"] = text_of(client)
    body |= {k: client[k] for k in ("temperature", "top_p", "seed") if k in client}
    if client["does"] in ("stream", "chat", "slow_reader", "leaves"):
        body["stream"] = True
    if "answers" in client:
        body["n"] = client["answers"]
    if client["does"] == "stopped" and (stop := stop_of(expected_of(base).text(client | {"does": "whole"}))):
        body["stop"] = [stop, "never said"]
    if client["does"] == "too_long":
        body["prompt"] = (body["prompt"] * 300)[:2000]  # the models have 256 positions
    return json.dumps(body).encode()


# Clients


class Connection:
    """One HTTP/1.1 request by hand."""

    def __init__(self, port):
        self.port = port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        return self

    async def __aexit__(self, *_):
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data, piece=None):
        """piece: so many bytes at a time, slowly. A server that has answered already may close meanwhile."""
        with contextlib.suppress(ConnectionError):
            for i in range(0, len(data), piece or len(data) or 1):
                self.writer.write(data[i : i + (piece or len(data))])
                await self.writer.drain()
                if piece:
                    await asyncio.sleep(0.002)

    async def answer(self, pause=0.0):
        """(status, body), or None where the server closed without an answer. pause: seconds between reads."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(300 if pause else 1 << 16):
                found += data
                await asyncio.sleep(pause)
        if not found:
            return None
        head, _, body = found.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = unchunked(body)
        elif "content-length" in headers and len(body) != int(headers["content-length"]):
            raise Wrong(f"a body of {len(body)} bytes was announced with {headers['content-length']}")
        return int(first.split()[1]), body


def unchunked(data):
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            return whole
        whole, data = whole + data[: int(size, 16)], data[int(size, 16) + 2 :]
    raise Wrong(f"a stream ends without its end: {whole[-200:]}")


def head(path="/v1/completions", length=0, key=KEY, method="POST", more=""):
    length = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = f"Host: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n{length}\r\n{more}\r\n"
    return f"{method} {path} HTTP/1.1\r\n{lines}".encode()


def texts_of(client, body):
    """The texts of the answers of a body that came with 200."""
    if b'"error"' in body[:12] or b'data: {"error"' in body:
        raise Wrong(f"an answer ended with an error: {body[-300:]}")
    if b"data: " not in body[:6]:
        choices = json.loads(body)["choices"]
        return [c["text"] for c in sorted(choices, key=lambda c: c["index"])]
    events = [line[6:] for line in body.decode().split("\n\n") if line]
    if events[-1] != "[DONE]":
        raise Wrong(f"a stream ends with {events[-1][:200]}")
    choices = [json.loads(e)["choices"][0] for e in events[:-1]]
    return ["".join(c["delta"].get("content", "") if client["does"] == "chat" else c["text"] for c in choices)]


async def ask(client, port, base, most_waiting):
    """A client that asks rightly."""
    body, does = body_of(client, base), client["does"]
    async with Connection(port) as connection:
        path = "/v1/chat/completions" if does == "chat" else "/v1/completions"
        await connection.send(head(path, len(body)) + body, 40 if does == "slow_sender" else None)
        found = await connection.answer(0.01 if does == "slow_reader" else 0.0)
    if found is None:
        raise Wrong("a right request got no answer")
    status, said = found
    if status == 429 and most_waiting < 400:
        return "refused"
    if status != 200:
        raise Wrong(f"a right request got {status}: {said[:300]}")
    for number, text in enumerate(texts_of(client, said)):
        if text != (right := expected_of(base).text(client, number)):
            raise Wrong(f"another text than alone: {text!r} in place of {right!r}")
    return "right"


async def misbehave(client, port, base):
    """A client that does something wrong, or ends too early."""
    body, does, source = body_of(client, base), client["does"], random.Random(client.get("number"))
    statuses = {
        "changed": {200, 400, 404, 413, 429},
        "huge": {413},
        "endless": {413},
        "key": {401},
        "path": {404, 405},
        "noise": {400, 404, 405},
        "too_long": {400},
    }
    async with Connection(port) as connection:
        if does == "changed":
            body = changed(source, body)
            await connection.send(head(length=len(body)) + body)
        elif does == "huge":
            await connection.send(head(length=BODY + 1) + b" " * (BODY + 1))
        elif does == "endless":  # in chunks, whose sum nobody announces
            await connection.send(head(length=None))
            for _ in range(BODY // 4000 + 2):
                await connection.send(b"fa0\r\n" + b" " * 4000 + b"\r\n")
        elif does == "key":
            await connection.send(head(length=len(body), key="another") + body)
        elif does == "path":
            path, method = source.choice(
                (("/v1/completions", "GET"), ("/v1/nothing", "POST"), ("/../v1/models", "GET"), ("/v1/models", "PUT"))
            )
            await connection.send(head(path, len(body), method=method) + body)
        elif does == "noise":
            sent = source.randbytes(source.choice((1, 20, 3000)))
            await connection.send(source.choice((sent, sent + b"\r\n\r\n", b"GET /" + sent + b" HTTP/1.1\r\n\r\n")))
            connection.writer.write_eof()
        elif does == "leaves":
            sent = head(length=len(body)) + body
            await connection.send(sent[: source.choice((len(sent), len(sent), source.randrange(len(sent))))])
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(connection.reader.read(source.choice((1, 500))), source.choice((0.0, 0.02, 0.3)))
            return "left"
        elif does == "silent":
            await connection.send(head(length=len(body)) + body[:-1])
            await asyncio.sleep(0.5)
            return "left"
        else:
            await connection.send(head(length=len(body)) + body)
        found = await connection.answer()
    if found is None:
        if does in ("noise", "huge", "endless"):  # no request, or reset while it was sent
            return "closed"
        raise Wrong("the connection was closed without an answer")
    status, said = found
    if status not in statuses[does]:
        raise Wrong(f"a request that is wrong got {status}: {said[:300]}")
    if status != 200 and does != "noise" and not json.loads(said)["error"]["message"]:
        raise Wrong(f"an error without a message: {said[:300]}")
    return "refused"


def changed(source, body):
    """The body with a change or two that know JSON, or not."""
    for _ in range(source.choice((1, 1, 2))):
        with contextlib.suppress(trees.Impossible):
            if source.random() < 0.6:
                tree = json.loads(body)
                body = json.dumps(trees.changed(tree, trees.draw_change(source, tree, True))).encode()
            else:
                body = trees.changed_bytes(body, trees.draw_bytes_change(source, body)) or b""
        with contextlib.suppress(ValueError):
            json.loads(body)
            continue
        break
    return body


async def watch(port, done):
    """Somebody who looks at the server all the time; it answers however many others there are."""
    while not done.is_set():
        for path, key in (("/health", KEY), ("/metrics", KEY), ("/v1/models", KEY)):
            async with Connection(port) as connection:
                started = time.monotonic()
                await connection.send(head(path, method="GET", key=key))
                found = await connection.answer()
            if found is None or found[0] != 200:
                raise Wrong(f"{path} gave {found}")
            if (seconds := time.monotonic() - started) > 20:
                raise Wrong(f"{path} took {seconds:.0f} s")
        await asyncio.sleep(0.1)


async def all_of(case, port):
    """Runs all clients; what each got."""
    done = asyncio.Event()

    async def one(client):
        await asyncio.sleep(client["at"])
        try:
            if client["does"] in RIGHT:
                return await ask(client, port, case.base, case.options["max_waiting"])
            return await misbehave(client, port, case.base)
        except Wrong as error:
            raise Wrong(f"{error} ({client})") from None

    watching = asyncio.create_task(watch(port, done))
    try:
        async with asyncio.timeout(SECONDS):
            found = await asyncio.gather(*map(one, case.clients))
    except TimeoutError:
        raise Wrong(f"not all clients have an answer after {SECONDS} s") from None
    finally:
        done.set()
        await asyncio.wait([watching], timeout=30)
    if not watching.done():
        watching.cancel()
        raise Wrong("the server stopped answering who looks at it")
    watching.result()
    return found


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def check(case):
    """Raises Wrong. Returns what the clients got."""
    from leanfleet import serve
    from support.http_server import Running

    for client in case.clients:  # before the server runs
        if client["does"] in RIGHT:
            for number in range(client.get("answers", 1)):
                expected_of(case.base).text(client, number)
    limits = serve.Limits(body=BODY, answers=8, seconds=SECONDS)
    running = Running(folder_of(case.base), KEY, limits, **case.options)
    try:
        # Whoever comes first opens what stays open.
        asyncio.run(
            all_of(dataclasses.replace(case, clients=({"does": "whole", "at": 0, "text": 0, "tokens": 2},)), running.port)
        )
        running.settle()
        before = open_files()
        found = asyncio.run(all_of(case, running.port))
        running.settle()
        asyncio.run(
            all_of(dataclasses.replace(case, clients=({"does": "whole", "at": 0, "text": 1, "tokens": 9},)), running.port)
        )
        end = time.monotonic() + 10
        while open_files() > before and time.monotonic() < end:
            time.sleep(0.05)
        if (left := open_files() - before) > 0:
            raise Wrong(f"{left} files or connections stay open")
    finally:
        running.close()
    return found
