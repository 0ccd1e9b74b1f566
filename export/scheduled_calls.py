"""The calls of an exported decoder's file by which it is verified. Without PyTorch, which takes longer to import than they run:
ranks are a process each.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from leanfleet import model_file, ort_library, ranks, trial
from leanfleet.decoder_contract import (
    BATCH,
    CAPACITY,
    CONTEXT,
    CONTEXT_PARALLEL,
    CONTEXT_SERVING,
    DECODER,
    POOL,
    RANK,
    SERVING,
    SESSION_TYPES,
    WORLD,
    context_pages,
    context_table,
    decoder_interface,
    is_state,
    packed,
    serving_interface,
)

PROMPTS, STEPS = (1, 6, 17), 4


def run_rank(folder: str) -> None:
    """What a process of verification.verify_ranks does: the schedule with its rank's file; rank 0 writes the logits down."""
    ranks.end_with_parent()
    task, here = json.loads((Path(folder) / "task.json").read_text()), ranks.place()
    assert here is not None
    threads = max(1, (os.cpu_count() or 1) // here.world)
    with ranks.join(WORLD, "shared_memory"):
        session = open_session(Path(task["files"][here.rank]), threads)
        found = run_schedule(session, task["facts"], [np.array(t, np.int64) for t in task["tokens"]], here.rank)
    if here.rank == 0:
        places, logits = [place for *place, _ in found], np.stack([logits for *_, logits in found])
        with open(Path(folder) / "found.npz", "wb") as file:
            np.savez(file, np.array(json.dumps(places)), logits)


def prompts(facts: Any) -> tuple[int, int, int]:
    """Tokens of the requests' prompts. Where blocks of tokens are shared out one goes on into the next block, one has three.
    facts: decoder_contract.Facts."""
    if decoder_interface(facts) is not CONTEXT:
        return PROMPTS
    block = facts[CONTEXT_PARALLEL]["block"]
    return PROMPTS[0], block - STEPS // 2, 2 * block + PROMPTS[2]


def _schedule(prompts):
    """[(phase, [{request: new tokens}, ...])]: calls, one phase after the other, each over caches of its own."""
    first, second, third = prompts
    part = third // 2
    together = [
        {0: first, 2: part},
        {0: 1, 1: second, 2: third - part},
        {0: 1, 1: 1, 2: 1},
        {0: 1, 2: 1},
        {0: 1, 1: 1, 2: 1},
        {1: 1, 2: 1},
        {1: 1},
    ]
    return [("in a ragged batch", together), ("alone", [{2: third}] + [{2: 1}] * STEPS)]


def run_schedule(
    session: Any, facts: Any, tokens: Sequence[np.ndarray], rank: int = 0
) -> list[tuple[str, int, int, np.ndarray]]:
    """[(phase, request, position, logits)] of a session."""
    found = []
    for phase, calls in _schedule(prompts(facts)):
        kind = _Pages if facts.get("kind") == SERVING.kind else _Shares if decoder_interface(facts) is CONTEXT else _Batch
        caches = kind(session, facts, len(tokens), rank)
        seen = [0] * len(tokens)
        for call in calls:
            new = {request: tokens[request][seen[request] : seen[request] + count] for request, count in call.items()}
            new = {request: row for request, row in new.items() if len(row)}  # a model of few positions has shorter ones
            for request, logits in (caches.run(new, seen) if new else {}).items():
                seen[request] += len(new[request])
                found.append((phase, request, seen[request] - 1, logits))
    return found


def open_session(path: Path, threads: int = 0) -> Any:
    """A session on the CPU: with the library, or without where it is missing. threads: 0: as many as the machine has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with suppress(FileNotFoundError):
        ort_library.register(options)
        model_file.check(str(path))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class _Batch:
    """Calls of a graph of export_decoder over caches of a batch. Requests without new tokens are rows of padding."""

    def __init__(self, session, facts, batch, rank):
        self.session, self.batch, self.interface = session, batch, decoder_interface(facts)
        sizes = self.sizes(facts, max(prompts(facts)) + STEPS + 3)
        self.caches = {}
        for entry in session.get_inputs():
            if DECODER.is_cache(entry.name):
                shape, dtype = [sizes.get(n, n) for n in entry.shape], _NUMPY[entry.type]
                state = not {CAPACITY, POOL} & set(entry.shape) or dtype == np.int32
                self.caches[entry.name] = np.zeros(shape, dtype) if state else _unwritten(shape, dtype)

    def sizes(self, facts, capacity):
        """{dimension: size} of the caches."""
        return {BATCH: self.batch, CAPACITY: capacity}

    def more(self, tokens):
        """What a call of so many tokens takes beside tokens and lengths."""
        return ()

    def run(self, new, seen):
        """{request: logits of its last new token}. new: {request: tokens}; seen: how many tokens of each came before."""
        counts = np.array([len(new.get(r, ())) for r in range(self.batch)], np.int32)
        ids = np.zeros((self.batch, counts.max()), np.int64)
        for request, row in new.items():
            ids[request, : len(row)] = row
        lens = np.array(seen, np.int32) + counts
        feed = self.interface.feed(ids, lens, counts, *self.more(ids.shape[1])) | self.caches
        logits, *caches = trial.run_session(self.session, feed, widen=False).values()
        self.caches = dict(zip(self.caches, caches, strict=True))
        return {r: logits[r] if logits.ndim == 2 else logits[r, counts[r] - 1] for r in new}


class _Shares(_Batch):
    """The same of one rank of a context parallel decoder, over its pools."""

    def __init__(self, session, facts, batch, rank):
        self.rank = np.array([rank], np.int32)
        super().__init__(session, facts, batch, rank)

    def sizes(self, facts, capacity):
        shares = facts[CONTEXT_PARALLEL]
        self.block, self.pages = shares["block"], context_pages(capacity, **shares)
        return {POOL: self.batch * self.pages}

    def more(self, tokens):
        return context_table(self.batch, self.pages, tokens, self.block), self.rank


class _Pages:
    """Calls of a graph of export_for_serving over a pool of pages."""

    def __init__(self, session, facts, batch, rank):
        self.session, self.block = session, facts["block"]
        self.rank = {RANK: np.array([rank], np.int32)} if serving_interface(facts) is CONTEXT_SERVING else {}
        self.table = -(-(max(prompts(facts)) + STEPS) // self.block)
        self.order = np.random.default_rng(0).permutation(batch * self.table).reshape(batch, self.table).astype(np.int32)
        caches = [i for i in session.get_inputs() if SERVING.is_cache(i.name)]
        self.pools = {}
        for i in caches:
            state = is_state(i.name)  # one row more than there are requests, which nobody writes
            dtype = _NUMPY[i.type]
            if state:
                self.pools[i.name] = np.zeros([batch + 1, *i.shape[1:]], dtype)
            else:
                self.pools[i.name] = _unwritten([self.order.size, *i.shape[1:]], dtype)

    def run(self, new, seen):
        """As _Batch.run."""
        feed = packed(list(new.values()), [seen[r] for r in new], self.order[list(new)], states=list(new)) | self.rank
        logits, *others = trial.run_session(self.session, feed | self.pools, widen=False).values()
        self.pools = dict(zip(self.pools, others[len(SERVING.outputs) - 1 :], strict=True))
        return dict(zip(new, logits, strict=True))


def _unwritten(shape, dtype):
    """What a cache holds before tokens come: nothing that could be taken for numbers."""
    return np.full(shape, {np.dtype(np.int8): -128, np.dtype(np.uint8): 0}.get(dtype, np.nan), dtype)


_NUMPY = {SESSION_TYPES[name]: np.dtype(name) for name in ("float32", "float16", "int32", "int64", "int8", "uint8")}
_NUMPY[SESSION_TYPES["float8e4m3fn"]] = trial.FLOAT8
