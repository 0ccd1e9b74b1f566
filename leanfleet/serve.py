"""An HTTP server over continuous batching that speaks OpenAI's interface: `leanfleet serve`. Needs the extra `serve`.

    POST /v1/chat/completions, /v1/completions    streamed or whole, n answers at once, with usage
    GET  /v1/models, /health, /metrics            metrics in Prometheus's text format

A request is refused, with OpenAI's form of an error, before anything runs for it: 400 for what is wrong or not served, 401,
404, 413 for bodies above the limit, 429 while too many requests wait, 503 while the server ends or the runtime fails.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import math
import os
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import onnxruntime
import prometheus_client as prometheus
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from leanfleet import driver, generation, grammar
from leanfleet.batch_process import SWITCH, BatchProcess
from leanfleet.batching import Batch, Over
from leanfleet.decoder_contract import SERVING, TOP, read_facts
from leanfleet.driver import Device
from leanfleet.engine import CANCELLED, FAILED, Answer, Closed, Engine, Full, Piece
from leanfleet.ort_ops.generation import load_tokenizer
from leanfleet.ort_ops.serving import open_batch
from leanfleet.ort_ops.sessions import CUDA, default_providers, on_device
from leanfleet.ranks import RankError

Pieces = asyncio.Queue[tuple[int, Piece]]  # of an HTTP request: the answer's number, and what a step gave it
MOST_ERRORS = 50  # in a body that are worth a list
Told = tuple[int, float, tuple[tuple[int, float], ...]]  # a token, its log-probability, and those of the likeliest tokens
TOO_LATE = Piece("")  # comes where an answer takes longer than it may
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # of histograms


@dataclass(frozen=True)
class Limits:
    """What one server takes. body: bytes of a request. answers: `n` times prompts of a request. seconds: of a request."""

    body: int = 4 << 20
    answers: int = 32
    seconds: float = 600.0


class Refusal(Exception):
    """An answer with an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.parameter = status, message, parameter

    def response(self) -> JSONResponse:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.parameter, "code": None}
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return JSONResponse({"error": error}, self.status, headers)


Numbers = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=16)]
Harmless = Any  # fields that change no answer


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class ObjectFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_object"]


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")
    content: dict[str, Any] | bool = Field(alias="schema")
    name: Harmless = None
    description: Harmless = None
    strict: Harmless = None  # answers always follow it


class SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: Schema


class StructuredOutputs(BaseModel):
    """As vLLM has them, one of these."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None

    @model_validator(mode="after")
    def one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("structured_outputs takes one of json, json_object, regex, choice and grammar")
        return self


class Asked(BaseModel):
    """What both kinds of completions have. Fields that we do not serve are taken with the value that leaves them off."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Texts | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    ignore_eos: bool = False
    priority: Literal[0] = 0  # a client's own would be the greatest
    stream: bool = False
    stream_options: StreamOptions | None = None
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = Field(None, discriminator="type")
    structured_outputs: StructuredOutputs | None = None
    user: Harmless = None
    metadata: Harmless = None
    store: Harmless = None
    service_tier: Harmless = None

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def most_likely(self) -> int:
        """Of how many tokens log-probabilities are wanted beside the chosen one's."""
        return 0

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """null stands for what a field is without."""
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    def constraint(self) -> tuple[str, Any] | None:
        """The method of Grammars that the answers follow, and what it takes."""
        form, outputs = self.response_format, self.structured_outputs
        if isinstance(form, ObjectFormat) or (outputs and outputs.json_object):
            return "json_schema", grammar.ANY_JSON
        if isinstance(form, SchemaFormat):
            return "json_schema", form.json_schema.content
        if outputs is None:
            return None
        given = {"json_schema": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
        return next((name, value) for name, value in given.items() if value is not None)

    @model_validator(mode="after")
    def one_constraint(self) -> Self:
        constrained = self.constraint() is not None
        if constrained and self.ignore_eos:
            raise ValueError("ignore_eos goes on where a constraint ends: leave one of the two out")
        if self.structured_outputs is not None and self.response_format not in (None, TextFormat(type="text")):
            raise ValueError("response_format and structured_outputs both say what answers are: leave one of the two out")
        return self

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Asked):
    """The body of /v1/completions."""

    prompt: str | Numbers | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Numbers], Field(fail_fast=True)]
    echo: Literal[False] = False
    suffix: None = None
    best_of: Literal[1] | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def most_likely(self) -> int:
        return self.logprobs or 0

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: Harmless = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {
            "role": role,
            "content": self.content if isinstance(self.content, str) else "".join(p.text for p in self.content),
        }


class Chat(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=TOP)
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Harmless = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def most_likely(self) -> int:
        return self.top_logprobs or 0

    @model_validator(mode="after")
    def consistent(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class Metrics:
    """Prometheus's counters of a server."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        self.prompt = prometheus.Counter("leanfleet_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generated = prometheus.Counter("leanfleet_generated_tokens", "Tokens of answers", registry=registry)
        self.answers = prometheus.Counter("leanfleet_answers", "Answers by how they ended", ["reason"], registry=registry)
        self.refused = prometheus.Counter("leanfleet_refused_requests", "Requests by status", ["status"], registry=registry)
        texts = {"first_token": "Time to the first token", "next_token": "Time between tokens", "request": "Time of an answer"}
        self.seconds = {
            name: prometheus.Histogram(f"leanfleet_{name}_seconds", text, buckets=SECONDS, registry=registry)
            for name, text in texts.items()
        }
        for name, text, value in (
            ("waiting_requests", "Requests without a place in the batch", lambda: engine().waiting),
            ("running_requests", "Requests in the batch", lambda: engine().running),
            ("places", "Requests that may run at once", lambda: engine().batch.max_requests),
            ("pool_bytes", "Memory of pages and states", lambda: engine().batch.pool_bytes),
            ("state_bytes", "Memory of states, which linear layers have", lambda: engine().batch.state_bytes),
            ("states", "States that this memory holds", lambda: engine().batch.state_rows if engine().batch.linear else 0),
            ("page_tokens", "Tokens of a page", lambda: engine().batch.block),
            ("pages", "Pages of the pool", lambda: engine().batch.pages),
            ("pages_in_use", "Pages that requests have", lambda: engine().batch.pages_in_use),
            ("shared_prompt_tokens", "Tokens of prompts found in the pool, so far", lambda: engine().batch.shared_tokens),
            ("guessed_tokens", "Tokens that were guessed, so far", lambda: engine().batch.guessed),
            ("rightly_guessed_tokens", "Guesses that were right, so far", lambda: engine().batch.guessed_right),
            ("preemptions", "Requests that gave their pages back, so far", lambda: engine().batch.preemptions),
        ):
            prometheus.Gauge(f"leanfleet_{name}", text, registry=registry).set_function(value)


class Server:
    """The application. batch: a ContinuousBatch or a BatchProcess, run in a thread while the application lives. tokenizers: two
    of the same, as one does not decode while it encodes. name: of the model, for clients. key: an API key that requests must
    bring, or None."""

    def __init__(
        self,
        batch: Any,
        tokenizers: tuple[Any, Any],
        name: str,
        key: str | None = None,
        limits: Limits = Limits(),
        max_waiting: int = 256,
    ) -> None:
        self.batch, self.name, self.key, self.limits = batch, name, key, limits
        self.encoder, self.decoder = tokenizers
        self.encoding, self.compiling = asyncio.Lock(), asyncio.Lock()
        self.mail: Mail | None = None
        self.grammars: grammar.Grammars | None = None  # made for the first request that needs them
        self.max_waiting, self.started = max_waiting, int(time.time())
        self.metrics = Metrics(lambda: self.engine)
        routes = [
            Route("/v1/chat/completions", self.guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self.guarded(self.complete), methods=["POST"]),
            Route("/v1/models", self.guarded(self.models)),
            Route("/v1/models/{name:path}", self.guarded(self.models)),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        handlers: Any = {
            404: lambda request, error: self.refuse(Refusal(404, f"there is nothing at {request.url.path}")),
            405: lambda request, error: self.refuse(Refusal(405, f"{request.url.path} does not take {request.method}")),
            Exception: lambda request, error: self.refuse(Refusal(500, "the server failed; its log says why")),
        }
        self.word = functools.lru_cache(1 << 16)(lambda token: self.decoder.decode([token]))
        self.application = Starlette(routes=routes, lifespan=self.lifespan, exception_handlers=handlers)

    @asynccontextmanager
    async def lifespan(self, application: Starlette) -> AsyncIterator[None]:
        def observe(name: str, seconds: float) -> None:
            self.metrics.seconds[name].observe(seconds)

        self.engine = Engine(self.batch, self.decoder, self.max_waiting, observe)
        yield
        await asyncio.to_thread(self.engine.close)

    def close(self) -> None:
        """Ends the engine, where it runs still, and what answers are left, and the batch's process if it has one."""
        if (engine := vars(self).get("engine")) is not None:
            engine.close()
        self.batch.close()

    def refuse(self, refusal: Refusal) -> JSONResponse:
        self.metrics.refused.labels(str(refusal.status)).inc()
        return refusal.response()

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """With the key checked, and refusals as responses."""

        async def guarded(request: Request) -> Response:
            try:
                scheme, _, given = request.headers.get("authorization", "").partition(" ")
                right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), (self.key or "").encode())
                if self.key is not None and not right:
                    raise Refusal(401, "this server wants its API key: Authorization: Bearer KEY")
                return await handler(request)
            except Refusal as refusal:
                return self.refuse(refusal)
            except ClientDisconnect:
                return Response(status_code=400)

        return guarded

    async def health(self, request: Request) -> Response:
        works = self.engine.works
        return PlainTextResponse("ok" if works else "the runtime fails", 200 if works else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(prometheus.generate_latest(self.metrics.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        one = {"id": self.name, "object": "model", "created": self.started, "owned_by": "leanfleet"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [one]})
        self.check_model(name)
        return JSONResponse(one)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise Refusal(404, f"there is no model {name[:100]!r} here, but {self.name!r}", "model")

    async def chat(self, request: Request) -> Response:
        body = self.parsed(Chat, await self.body(request))
        turns = [turn.plain() for turn in body.messages]
        prompt = await self.encoded(lambda: generation.encode_chat(self.encoder, turns))
        return await self.respond(request, body, [prompt], "chat.completion")

    async def complete(self, request: Request) -> Response:
        body = self.parsed(Completion, await self.body(request))
        given = body.prompts()
        if not given:
            raise Refusal(400, "prompt is empty; give a text, a list of token ids, or several of these", "prompt")
        if len(given) * body.n > self.limits.answers:
            raise Refusal(400, f"{len(given)} prompts of n={body.n} answers are more than {self.limits.answers}", "n")
        prompts = [
            p if isinstance(p, list) else await self.encoded(functools.partial(generation.encode, self.encoder, p, chat=False))
            for p in given
        ]
        if body.max_tokens is None:
            body.max_tokens = 16  # as OpenAI has it
        return await self.respond(request, body, prompts, "text_completion")

    async def body(self, request: Request) -> bytes:
        """All of it. Raises Refusal above the limit, without reading on, and for one that does not come."""
        found = b""
        too_large = Refusal(413, f"a body may have {self.limits.body} bytes")
        if int(request.headers.get("content-length") or 0) > self.limits.body:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for piece in request.stream():
                    found += piece
                    if len(found) > self.limits.body:
                        raise too_large
        except TimeoutError:
            raise Refusal(408, f"the body was not whole within {self.limits.seconds:g} seconds") from None
        return found

    def parsed(self, kind: type[Any], body: bytes) -> Any:
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            if error.error_count() > MOST_ERRORS:  # a list of them would be larger than the body
                raise Refusal(400, f"the body has {error.error_count()} fields or elements of the wrong kind") from None
            found = error.errors(include_url=False, include_input=False, include_context=False)
            first = max(found, key=lambda e: len(e["loc"]))  # of the ways that a field may be given, the one that fits furthest
            place = ".".join(str(p) for p in first["loc"]) or "the body"
            unserved = first["type"] in ("extra_forbidden", "too_long", "none_required", "literal_error")
            what = f"this server does not serve it ({first['msg']})" if unserved else first["msg"]
            raise Refusal(400, f"{place}: {what}", place) from None

    async def encoded(self, encode: Callable[[], list[int]]) -> list[int]:
        try:
            async with self.encoding:
                return await asyncio.to_thread(encode)
        except ValueError as error:
            raise Refusal(400, str(error)) from None

    async def respond(self, request: Request, body: Asked, prompts: list[list[int]], kind: str) -> Response:
        """Hands the prompts in, `n` times each, and answers with what comes."""
        self.check_model(body.model)
        room = min((n for n in (self.batch.max_positions, self.batch.capacity) if n), default=None)
        if room and (long := [len(p) for p in prompts if len(p) >= room]):  # before anybody looks at all of it
            raise Refusal(
                400, f"a prompt has {long[0]} tokens, and the model and its caches have positions for {room}", "prompt"
            )
        if len(prompts) * body.n > self.limits.answers:
            raise Refusal(400, f"n is {body.n}; a request may ask for {self.limits.answers} answers", "n")
        if len(prompts) * body.n > self.max_waiting:
            raise Refusal(400, f"{len(prompts) * body.n} answers are more than the {self.max_waiting} that may wait", "n")
        pieces: Pieces = asyncio.Queue()
        mail = self.mail_to(asyncio.get_running_loop())
        answers: list[Answer] = []
        options = self.options(body)
        constraints = await self.constraints(body, len(prompts) * body.n)
        seed = uuid.uuid4().int % 2**62 if body.seed is None else body.seed % 2**62
        try:
            for index in range(len(prompts) * body.n):

                def tell(piece: Piece, index: int = index) -> None:
                    mail.send(pieces, (index, piece))

                prompt = prompts[index // body.n]
                count = body.max_tokens or (room - len(prompt) if room else None)  # as far as the model goes
                own = options | {"max_new_tokens": count, "seed": seed + index, "constraint": constraints[index]}
                answers.append(self.engine.submit(prompt, tell, body.stops(), **own))
            for answer in answers:
                await asyncio.wrap_future(answer.accepted)
        except BaseException as error:
            self.cancel(answers)
            if isinstance(error, Full):
                raise Refusal(429, f"{self.max_waiting} requests wait already; try again later") from None
            if isinstance(error, Closed | Over | RankError):
                raise Refusal(503, "the server ends") from None
            if isinstance(error, ValueError):
                raise Refusal(400, str(error)) from None
            raise
        self.metrics.prompt.inc(sum(map(len, prompts)))
        reply = Reply(self, kind, body, answers, pieces)
        if body.stream:
            return Stream(reply, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await reply.whole(request)

    async def constraints(self, body: Asked, count: int) -> list[grammar.Grammar | None]:
        """One for each of so many answers."""
        asked = body.constraint()
        if asked is None:
            return [None] * count

        def make() -> list[grammar.Grammar | None]:
            if self.grammars is None:
                self.grammars = grammar.Grammars(self.encoder, self.batch.vocabulary, self.ends())
            method, given = asked
            return [getattr(self.grammars, method)(given) for _ in range(count)]

        try:
            async with self.compiling:
                return await asyncio.to_thread(make)
        except ValueError as error:
            raise Refusal(
                400, str(error), "response_format" if body.structured_outputs is None else "structured_outputs"
            ) from None
        except ImportError as error:
            raise Refusal(400, f"this server does not serve it ({error})", "response_format") from None

    def ends(self) -> set[int]:
        """Tokens that end answers by themselves."""
        end = self.encoder.eos_token_id
        return self.batch.stop_tokens | (set() if end is None else {end})

    def options(self, body: Asked) -> dict[str, Any]:
        """Of ContinuousBatch.add."""
        stop = (set() if body.ignore_eos else self.ends()) | set(body.stop_token_ids or ())
        return {
            "stop_tokens": stop,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": max(body.top_k, 0),
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": body.logit_bias,
            "top_logprobs": body.most_likely,
        }

    def mail_to(self, loop: asyncio.AbstractEventLoop) -> Mail:
        if self.mail is None or self.mail.loop is not loop:
            self.mail = Mail(loop)
        return self.mail

    def cancel(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.engine.cancel(answer)


class Mail:
    """Brings what the engine's thread sends to queues of an event loop, with one wake-up for all that came since the last: a
    step gives a token to each of many answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sent: deque[tuple[Pieces, tuple[int, Piece]]] = deque()
        self.comes = False  # whether the loop will look; it says that it no longer will before it looks

    def send(self, to: Pieces, what: tuple[int, Piece]) -> None:
        """From any thread."""
        self.sent.append((to, what))
        if not self.comes:
            self.comes = True
            self.loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        self.comes = False
        while self.sent:
            to, what = self.sent.popleft()
            to.put_nowait(what)


def waiting_in(pieces: Pieces) -> Iterator[tuple[int, Piece]]:
    """What is in the queue now."""
    while not pieces.empty():
        yield pieces.get_nowait()


def joined(pieces: Iterable[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    """Pieces of each answer as one, for readers that are behind; failures stay pieces of their own."""
    found: list[tuple[int, Piece]] = []
    place: dict[int, int] = {}  # of an answer's last piece
    for index, piece in pieces:
        if index not in place or piece.reason in (FAILED, CANCELLED):
            place[index] = len(found)
            found.append((index, piece))
            continue
        before = found[place[index]][1]
        found[place[index]] = (
            index,
            piece._replace(
                text=before.text + piece.text,
                tokens=before.tokens + piece.tokens,
                logprobs=before.logprobs + piece.logprobs,
                likeliest=before.likeliest + piece.likeliest,
            ),
        )
    return found


class Stream(StreamingResponse):
    """The events of a reply, whose answers end with it however it ends."""

    def __init__(self, reply: Reply, **options: Any) -> None:
        super().__init__(reply.events(), **options)
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reply.server.cancel(self.reply.answers)


class Reply:
    """The answers of one HTTP request, as they come."""

    def __init__(self, server: Server, kind: str, body: Asked, answers: list[Answer], pieces: Pieces) -> None:
        self.server, self.kind, self.body, self.answers, self.pieces = server, kind, body, answers, pieces
        self.head = {
            "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": server.name,
        }
        self.tokens = 0
        self.deadline = time.monotonic() + server.limits.seconds

    async def come(self) -> AsyncIterator[tuple[int, Piece]]:
        """(answer, piece) until all have ended. Raises Refusal where one fails or the time is up; then all are cancelled."""
        left = len(self.answers)
        # One timer, not one for each piece: that would be a tenth of what a piece costs.
        timer = asyncio.get_running_loop().call_later(
            max(self.deadline - time.monotonic(), 0), self.pieces.put_nowait, (len(self.answers), TOO_LATE)
        )
        try:
            while left:
                first = await self.pieces.get()
                for index, piece in joined([first, *waiting_in(self.pieces)]):
                    if piece is TOO_LATE:
                        if not left:  # the last piece came before
                            break
                        raise Refusal(504, f"no answer within {self.server.limits.seconds:g} seconds")
                    if piece.reason == FAILED:
                        left -= 1
                        self.server.metrics.answers.labels(FAILED).inc()
                        raise Refusal(503, piece.message.splitlines()[0][:300] if piece.message else "the runtime failed")
                    if piece.reason == CANCELLED:
                        raise Refusal(503, "the server ended before the answer did")
                    self.tokens += len(piece.tokens)
                    self.server.metrics.generated.inc(len(piece.tokens))
                    if piece.reason:
                        left -= 1
                        self.server.metrics.answers.labels(piece.reason).inc()
                    yield index, piece
        finally:
            timer.cancel()
            if left:
                self.server.metrics.answers.labels(CANCELLED).inc(left)
                self.server.cancel(self.answers)

    def usage(self) -> dict[str, Any]:
        requests = [a.request for a in self.answers if a.request is not None]
        prompts = [r for i, r in enumerate(requests) if i % self.body.n == 0]
        size = sum(len(r.prompt) for r in prompts)
        return {
            "prompt_tokens": size,
            "completion_tokens": self.tokens,
            "total_tokens": size + self.tokens,
            "prompt_tokens_details": {"cached_tokens": sum(r.shared or 0 for r in prompts)},
        }

    @property
    def chat(self) -> bool:
        return self.kind == "chat.completion"

    async def whole(self, request: Request) -> Response:
        """All at once. A client that goes away ends its answers."""
        texts, reasons = [""] * len(self.answers), [""] * len(self.answers)
        logprobs: list[list[Told]] = [[] for _ in self.answers]

        async def collect() -> None:
            async for index, piece in self.come():
                texts[index] += piece.text
                reasons[index] = piece.reason or ""
                logprobs[index] += zip(piece.tokens, piece.logprobs, piece.likeliest, strict=True)

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        work, watch = asyncio.create_task(collect()), asyncio.create_task(gone())
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the server ends first
            watch.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
        if work.cancelled():
            return Response(status_code=400)
        work.result()
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            told = await asyncio.to_thread(self.told, logprobs[index])
            choices.append({"index": index, **content, "logprobs": told, "finish_reason": reason})
        return JSONResponse({**self.head, "object": self.kind, "choices": choices, "usage": self.usage()})

    def told(self, logprobs: list[Told]) -> dict[str, Any] | None:
        """Log-probabilities as the interface has them, or None where nobody asked."""
        if not self.body.wants_logprobs:
            return None

        word = self.server.word

        def entry(token: int, value: float) -> dict[str, Any]:
            text = word(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        if self.chat:
            content = [{**entry(t, p), "top_logprobs": [entry(*pair) for pair in top]} for t, p, top in logprobs]
            return {"content": content, "refusal": None}
        likeliest = [{word(t): p for t, p in top} for *_, top in logprobs] if self.body.most_likely else None
        tokens, values = [word(t) for t, *_ in logprobs], [p for _, p, _ in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": None}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. An answer that fails ends with an error and without [DONE]."""

        kind = "chat.completion.chunk" if self.chat else self.kind
        head = b"data: " + to_json({**self.head, "object": kind})[:-1] + b","  # the same in all events

        def event(**content: Any) -> bytes:
            return head + to_json(content)[1:] + b"\n\n"

        wants_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        more = {"usage": None} if wants_usage else {}
        if self.chat:
            for index in range(len(self.answers)):
                choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield event(choices=[choice], **more)
        try:
            async for index, piece in self.come():
                if not (piece.text or piece.reason or self.body.wants_logprobs):
                    continue
                content = {"delta": {"content": piece.text} if piece.text else {}} if self.chat else {"text": piece.text}
                logprobs = self.told(list(zip(piece.tokens, piece.logprobs, piece.likeliest, strict=True)))
                choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": piece.reason}
                yield event(choices=[choice], **more)
        except Refusal as refusal:
            yield b"data: " + bytes(self.server.refuse(refusal).body) + b"\n\n"
            return
        if wants_usage:
            yield event(choices=[], usage=self.usage())
        yield b"data: [DONE]\n\n"


def load_server(
    folder: str | Path,
    name: str | None = None,
    key: str | None = None,
    limits: Limits = Limits(),
    max_waiting: int = 256,
    *,
    providers: Sequence[str] | None = None,
    cache_tokens: int | None = None,
    max_requests: int | None = None,
    step_tokens: int | None = None,
    cuda_graph: bool | None = None,
    device: str | Device | None = None,
    rank: int | None = None,
    own_process: bool = False,
    **options: Any,
) -> Server:
    """The server of an exported folder, as `leanfleet serve` runs it. `application` of what it returns is an ASGI application,
    for any server of those.

    folder: with serving.onnx and a tokenizer, as `leanfleet export --serve` writes it. name: the model's, for clients; default:
    the folder's. providers: ONNX Runtime's; default: CUDA where it works, else CPU. cache_tokens: that the pages hold;
    default: ContinuousBatch's, by a GPU's memory. max_requests: default 64 on a GPU, else 16, as over ranks. step_tokens:
    default 2048 on CUDA, else 128. cuda_graph: whether steps are captured; default: on a GPU, if a first answer, which is
    tried, can be. device: "cpu", "cuda" or "cuda:1". rank: of a folder for several ranks, as ContinuousBatch takes it.
    own_process: whether the batch runs in a process of its own (leanfleet.batch_process), as it does in `leanfleet serve` where
    there are no ranks: steps do not wait for events that are written then. options: others of ContinuousBatch, such as share,
    snapshots and speculate.

    Raises FileNotFoundError for a folder that lacks a file, ValueError for options that do not fit.

    Example:
        from leanfleet.serve import load_server

        server = load_server("serving", max_requests=8)
        # now for example uvicorn.run(server.application, port=8000)
    """
    folder = Path(folder)
    facts = read_facts(folder, SERVING, parallel=rank is not None)
    if device is None and providers is None:
        providers = default_providers(onnxruntime.get_available_providers())
    chosen = on_device(providers, device) or ()
    first = next(iter(chosen), "")
    on_cuda = CUDA in (first, *first[:1])  # with or without options; ONNX Runtime runs what it can on the first one
    max_requests = max_requests or (64 if on_cuda and rank is None else 16)
    step_tokens = max(step_tokens or (2048 if on_cuda else 128), max_requests)
    tokenizers = load_tokenizer(folder), load_tokenizer(folder)
    pages = None if cache_tokens is None else -(-cache_tokens // facts["block"])
    options |= {"pages": pages, "max_requests": max_requests, "step_tokens": step_tokens, "providers": chosen}
    captures = on_cuda and rank is None and options.get("library", True) and not options.get("speculate")
    if cuda_graph is None and not (captures and driver.why_no_gpu() is None):
        cuda_graph = False
    options |= {"cuda_graph": cuda_graph, "rank": rank}
    batch: Batch | BatchProcess = (BatchProcess if own_process else open_batch)(folder, **options)
    return Server(batch, tokenizers, name or folder.resolve().name, key, limits, max_waiting)


def run(server: Server, host: str, port: int, grace: float, started: Callable[[str], object]) -> None:
    """Serves until SIGINT or SIGTERM, and then for `grace` seconds at most what has begun. started: called with the address.

    Raises OSError where the address cannot be had.
    """
    bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/v1"
    config = uvicorn.Config(
        server.application, log_level="warning", access_log=False, timeout_graceful_shutdown=math.ceil(grace), lifespan="on"
    )

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                started(address)

        async def on_tick(self, counter: int) -> bool:
            return bool(server.batch.over) or await super().on_tick(counter)

    # A step's tokens are decoded in tens of microseconds: threads of the tokenizer's own would take the cores from everyone.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The engine's thread gets the interpreter back this soon from the loop's, which is busy with many streams.
    sys.setswitchinterval(SWITCH)
    Announced(config).run([bound])
