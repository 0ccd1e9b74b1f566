"""Continuous batching by several ranks: rank 0 takes the requests, and the others make the same calls on batches of their own.

Every rank has the whole schedule and its share of the model. Logits are the same on all ranks, so tokens are too, and nothing
but the calls themselves has to travel: a line of JSON a step, over a socket. Standard library only.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from leanfleet import communicators, ranks

if TYPE_CHECKING:
    from leanfleet.batching import Batch, Request

SECONDS = 600.0  # that ranks wait for the one that is the last to load its share
_HELLO, _LAST_WORDS = 10.0, 1.0  # that a connection may take to say who it is, and why it ends
_MOST = 4096  # bytes of a hello, or of last words
_uses = itertools.count()  # of together in this process: all ranks have the same number


@contextmanager
def together(batch: Batch, seconds: float = SECONDS) -> Iterator[bool]:
    """Joins the batches of all ranks, each over its share of one folder for several. On rank 0 it gives True: calls of add,
    cancel, step and run are made by all. On the others it returns once rank 0 has left the block, and gives False.

    seconds: to wait for all ranks to come. A call that fails on a rank ends what they have in common: rank 0's calls raise
    leanfleet.ranks.RankError from then on, with the reason. Raises ValueError outside of ranks.launch and torchrun and for
    batches of unlike sizes, TimeoutError where a rank does not come, RankError where rank 0 ends early, or has other tokens
    than this one.

    Example:
        # torchrun --nproc-per-node 2 program.py, for a folder of leanfleet export --tensor-parallel 2 --serve
        from leanfleet import ranks
        from leanfleet.ort_ops.serving import ContinuousBatch
        from leanfleet.together import together

        here = ranks.place()
        with ranks.join("world", "shared_memory"):
            batch = ContinuousBatch("exported", pages=64, device="cpu", rank=here.rank)
            with together(batch) as leads:
                if leads:
                    request = batch.add([1, 2, 3], max_new_tokens=8)
                    batch.run()
                    print(request.tokens)
    """
    here = ranks.place()
    if here is None:
        raise ValueError("this process is no rank: start it with leanfleet serve --gpus, or with torchrun")
    if here.rank:
        with _connected(here, seconds) as connection, connection.makefile("rb") as lines:
            try:
                _follow(batch, iter(lines), here)
            except Exception as error:
                with suppress(OSError):  # rank 0 knows by it why its own call fails, or the next one
                    connection.sendall(f"{_in_a_line(error)}\n".encode())
                raise
        yield False
        return
    leader = Leader(here, seconds)
    try:
        leader.tell("sizes", **_sizes(batch))
        batch.leader = leader
        yield True
        leader.tell("end")
    except BaseException as error:
        leader.fail(error)
        raise
    finally:
        batch.leader = None
        leader.close()


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def _sizes(batch: Batch) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    return {
        "pages": batch.pool.count,
        "max_requests": batch.max_requests,
        "step_tokens": batch.step_tokens,
        "paced": batch.paced,
        "speculate": batch.speculate,
        "state_rows": batch.state_rows,
        "share": batch.pool.share,
        "cuda_graph": batch.a_step_behind,
        "requests": batch.arrivals,
    }


class Leader:
    """Rank 0's connections to the others."""

    def __init__(self, here: ranks.Place, seconds: float) -> None:
        self.others: dict[int, socket.socket] = {}
        self.over = ""  # why nothing can be told any more; other threads read it
        self.telling = False
        host, key = ranks.host(), secrets.token_hex(16)
        family = socket.getaddrinfo(host, None)[0][0]
        deadline = time.monotonic() + seconds
        with socket.create_server((host, 0), family=family, backlog=here.world) as server:
            ranks.publish(f"batch{next(_uses)}", f"{server.getsockname()[1]} {key}")
            while len(self.others) < here.world - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    self._welcome(server.accept()[0], key, here.world)
                except TimeoutError:
                    self.close()
                    late = next(rank for rank in range(1, here.world) if rank not in self.others)
                    raise TimeoutError(f"rank {late} did not come within {seconds:g} s") from None

    def _welcome(self, connection: socket.socket, key: str, world: int) -> None:
        """Takes in who knows the key; others, which are no rank of ours, are left alone."""
        connection.settimeout(_HELLO)
        try:
            with connection.makefile("rb") as said:
                rank, _, given = said.readline(_MOST).decode("ascii", "replace").strip().partition(" ")
        except OSError:
            connection.close()
            return
        known = rank.isdigit() and 0 < int(rank) < world and hmac.compare_digest(given.encode(), key.encode())
        if not known or int(rank) in self.others:
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.others[int(rank)] = connection

    def tell(self, call: str, **arguments: Any) -> None:
        """Tells the others a call that this rank is about to make. Raises RankError where a rank is gone, and after a call
        that failed."""
        if self.telling:
            self.over = self.over or "a call was interrupted while ranks were told of it: start all of them again"
        if self.over:
            raise ranks.RankError(self.over)
        line = json.dumps([call, arguments]).encode() + b"\n"
        self.telling = True  # an interrupt leaves it so: some ranks may know of the call, some not
        for rank, connection in self.others.items():
            try:
                connection.sendall(line)
            except OSError as error:
                self.over = self._reason() or f"rank {rank} has ended ({error})"
                if call == "cancel":  # needs nobody else: the next call says it
                    return
                raise ranks.RankError(self.over) from error
        self.telling = False

    def fail(self, error: BaseException) -> None:
        """Tells the others that a call has failed here. Their batches may have gone on, so that nothing follows. Raises
        RankError where it failed because another rank did."""
        if self.over:
            return
        why = f"a call failed on rank 0: {_in_a_line(error)}"
        with suppress(ranks.RankError):
            self.tell("failed", why=why)
        theirs = self.over or self._reason()
        if theirs.endswith(why):  # they only say it again
            theirs = ""
        self.over = theirs or f"{why}; the ranks are no longer the same: start all of them again"
        if theirs:
            raise ranks.RankError(theirs) from error

    def check(self) -> None:
        """Raises leanfleet.native.LeanfleetError where an exchange has failed."""
        communicators.check()

    def _reason(self) -> str:
        """Why another rank has ended, as far as one says so."""
        for rank, connection in self.others.items():
            connection.settimeout(_LAST_WORDS)
            with suppress(OSError), connection.makefile("rb") as said:
                if line := said.readline(_MOST).decode(errors="replace").strip():
                    return f"rank {rank} failed: {line}"
        return ""

    def close(self) -> None:
        for connection in self.others.values():
            connection.close()


@contextmanager
def _connected(here: ranks.Place, seconds: float) -> Iterator[socket.socket]:
    """The connection to rank 0, which knows who this is."""
    deadline = time.monotonic() + seconds
    port, _, key = ranks.published(f"batch{next(_uses)}", seconds).partition(" ")
    with socket.create_connection((ranks.host(), int(port)), timeout=max(deadline - time.monotonic(), 0.001)) as connection:
        connection.sendall(f"{here.rank} {key}\n".encode())
        connection.settimeout(None)
        yield connection


def _follow(batch: Batch, lines: Iterator[bytes], here: ranks.Place) -> None:
    """Makes the calls that rank 0 makes."""
    requests: dict[int, Request] = {request.arrival: request for request in (*batch.running, *batch.queue)}
    try:
        for line in lines:
            call, arguments = json.loads(line)
            if call == "end":
                return
            if call == "sizes" and arguments != _sizes(batch):
                raise ValueError(f"rank {here.rank} has a batch of {_sizes(batch)}, and rank 0 one of {arguments}")
            if call == "failed":
                raise ranks.RankError(arguments["why"])
            if call == "add":
                request = batch.add(**arguments | {"logit_bias": dict(arguments["logit_bias"])})
                requests[request.arrival] = request
            if call == "cancel":
                batch.cancel(requests.pop(arguments["arrival"]))
            if call == "step":
                if arguments["said"] != batch.said:
                    raise ranks.RankError(f"rank {here.rank} has other tokens than rank 0, after {batch.steps} steps")
                batch.step()
                communicators.check()
                requests = {arrival: request for arrival, request in requests.items() if not request.done}
    except ConnectionError as error:
        raise ranks.RankError(f"rank 0 has ended ({error})") from error
    raise ranks.RankError("rank 0 has ended, and left its batch in the middle")
