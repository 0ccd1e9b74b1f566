"""Launches on a GPU in unusual ways: a captured graph replayed thousands of times while lengths, pages and indices change beneath
it; calls on two streams or two GPUs at once, from one thread or two. Every result must have the bits of a quiet call.
"""

import dataclasses
import json
import random
import threading

import torch

from leanfleet import native
from stress import draw as calls
from stress import runtimes, values
from support.kernels import Launches, run_kernel

KINDS = ("graph", "streams", "graph", "devices")  # in turn; devices: two GPUs, where there are two
ALIKE = 4  # calls of the same shapes with other numbers


class Wrong(AssertionError):
    """Other bits than those of a quiet call."""


@dataclasses.dataclass(frozen=True)
class Case:
    """launches: one of KINDS. calls: JSON of a calls.Case each, of streams and devices one each. rounds: launches of each.
    threads: whether each stream has a thread of its own. seed: of the order in which numbers come."""

    launches: str
    calls: list
    rounds: int
    threads: bool = False
    seed: int = 0

    op = property(lambda self: self.launches)
    runtime = "launches"

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text):
        return Case(**json.loads(text))


def place(index):
    return KINDS[index % len(KINDS)], Case.runtime


def draw(seed, index):
    source, kind = random.Random(f"{seed}:launches:{index}"), place(index)[0]
    drawn = []
    while len(drawn) < (1 if kind == "graph" else 2):
        op = calls.OPS[source.choice(list(calls.OPS))]
        call = calls._drawn(source, op, "cuda")
        if call is not None and call.wrong is None:
            drawn.append(json.loads(dataclasses.replace(call, strided=False, checked=False, exponents={}).to_json()))
    rounds = source.choice((300, 1000, 3000))
    return Case(kind, drawn, rounds, kind != "graph" and source.random() < 0.5, source.randrange(2**20))


def simpler(case):
    """With fewer rounds, one thread, simpler calls."""
    for rounds in dict.fromkeys((10, case.rounds // 4)):
        if rounds < case.rounds:
            yield dataclasses.replace(case, rounds=rounds)
    if case.threads:
        yield dataclasses.replace(case, threads=False)
    for i, call in enumerate(case.calls):
        for other in calls.simpler(calls.Case.from_json(json.dumps(call))):
            yield dataclasses.replace(case, calls=[*case.calls[:i], json.loads(other.to_json()), *case.calls[i + 1 :]])


def bits(tensor):
    """Its bytes, as a view."""
    flat = tensor.view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


class Node:
    """A call on the current GPU with fixed addresses, numbers to put there, and the bits that are right for each."""

    def __init__(self, call):
        self.call, op = call, calls.OPS[call.op]
        sets = [values.make(dataclasses.replace(call, seed=call.seed + i))[1] for i in range(ALIKE)]
        self.sets = [{name: t.contiguous().cuda() for name, t in inputs.items()} for inputs in sets]
        copies = [{name: t.clone() for name, t in inputs.items()} for inputs in self.sets]
        self.expected = [run_kernel(call.op, inputs, call.attrs, 0, call.in_place) for inputs in copies]
        active = {t.name for t in op.active_outputs(call.attrs)}
        self.launches = Launches(call.op, {n: t.clone() for n, t in self.sets[0].items()}, call.attrs, call.in_place)
        self.outputs = {n: t for n, t in self.launches.outputs.items() if n in active}
        self.taken = {t.takes for t in op.outputs} if call.in_place else set()
        self.wrong = torch.zeros((), dtype=torch.bool, device="cuda")
        torch.cuda.synchronize()

    def put(self, number):
        """Queues the copies of a set of numbers, and poison."""
        for name, t in self.launches.inputs.items():
            bits(t).copy_(bits(self.sets[number][name]))
        for t in self.outputs.values():
            if not any(t is self.launches.inputs.get(name) for name in self.taken):
                bits(t).fill_(0xFF)

    def compare(self, number):
        """Queues the comparison."""
        for name, t in self.outputs.items():
            self.wrong |= bits(t).ne(bits(self.expected[number][name])).any()


def check(case):
    """Whether anything was launched: not where the kernels leave a call to the CPU, or two streams would share a communicator.
    Raises Wrong."""
    drawn = [calls.Case.from_json(json.dumps(call)) for call in case.calls]
    names = set().union(*map(calls.names, drawn))
    if len(names) > 1 or (case.launches != "graph" and names):
        return False  # a communicator belongs to one stream
    devices = [0, 1 % torch.cuda.device_count()] if case.launches == "devices" else [0, 0]
    with runtimes.settings(drawn[0], False):
        nodes = []
        for call, device in zip(drawn, devices, strict=False):
            with torch.cuda.device(device):
                try:
                    nodes.append((Node(call), device))
                except native.UnsupportedError:
                    return False
        if case.launches == "graph":
            check_graph(nodes[0][0], case)
        else:
            check_streams(nodes, case)
    return True


def check_graph(node, case):
    graph, source = node.launches.capture(), random.Random(case.seed)
    for i in range(case.rounds):
        number = source.randrange(ALIKE)
        node.put(number)
        graph.replay()
        node.compare(number)
        if i % 100 == 99 and node.wrong:
            raise Wrong(f"one of {i + 1} replays gives other bits than a call")
    if node.wrong:
        raise Wrong(f"one of {case.rounds} replays gives other bits than a call")


def check_streams(nodes, case):
    streams = [torch.cuda.Stream(device) for _, device in nodes]
    sources = [random.Random(case.seed + i) for i in range(len(nodes))]
    faults = []

    def launch(i, rounds):
        """So many launches of one node on its stream."""
        (node, device), stream = nodes[i], streams[i]
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for _ in range(rounds):
                    number = sources[i].randrange(ALIKE)
                    node.put(number)
                    node.launches.run()
                    node.compare(number)
        except Exception as error:
            faults.append(error)

    if case.threads:
        threads = [threading.Thread(target=launch, args=(i, case.rounds)) for i in range(len(nodes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for _ in range(case.rounds):
            for i in range(len(nodes)):
                if not faults:
                    launch(i, 1)
    for stream in streams:
        stream.synchronize()
    if faults:
        raise faults[0]
    for (node, device), call in zip(nodes, case.calls, strict=True):
        if node.wrong:
            raise Wrong(f"{call['op']} on GPU {device} gives other bits beside {[c['op'] for c in case.calls]}")
