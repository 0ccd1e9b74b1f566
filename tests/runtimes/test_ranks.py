"""Several processes that run one decoder: how they start and end, and that their tokens are one process's."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import onnx
import openai
import pytest
import torch
import transformers

from leanfleet import cli, driver, ranks
from leanfleet.export import export_decoder, quantise
from leanfleet.export.serving import add_serving
from leanfleet.generation import encode
from leanfleet.ort_ops import generate, generation, load_decoder, stream
from leanfleet.ort_ops.serving import ContinuousBatch
from support.decoders import HYBRIDS, SIZES, byte_tokenizer, hybrid, make, minimax, ours

PROGRAM = """
import os, sys, time
from leanfleet import ranks
ranks.end_with_parent()
rank = os.environ["RANK"]
open(os.path.join(sys.argv[1], "pid" + rank), "w").write(str(os.getpid()))
"""


def launched(tmp_path, program, **options):
    return ranks.launch(ranks.python("-c", PROGRAM + program, str(tmp_path)), 2, **options)


def alive(pid):
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(tmp_path, count=2):
    deadline = time.monotonic() + 60
    while len(found := [p for p in tmp_path.glob("pid*") if p.read_text()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(p.read_text()) for p in sorted(found)]


def nobody_left(tmp_path):
    """Whether none runs of those that said who they are; one that was ended early may have said nothing."""
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids(tmp_path, 1)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids(tmp_path, 1))


def test_only_the_first_rank_is_heard(tmp_path, capfd):
    program = "print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], sys.stdin.read(), ranks.place())"
    assert launched(tmp_path, program, stdin="a prompt") == 0
    assert capfd.readouterr().out == "0 2 0 a prompt Place(rank=0, world=2, local=0)\n"


def test_a_rank_that_fails_is_named_with_what_it_said(tmp_path):
    program = "time.sleep(60 * (rank == '0')); print('one line'); sys.exit('the reason')"
    with pytest.raises(ranks.RankError, match="^rank 1 failed with exit code 1: the reason; the other ranks were ended$"):
        launched(tmp_path, program)
    assert nobody_left(tmp_path)


def test_a_rank_that_is_killed_is_named(tmp_path):
    program = """
if rank == "1":
    os.kill(os.getpid(), 9)
other = os.path.join(sys.argv[1], "pid1")
while not os.path.exists(other) or not open(other).read() or "Z" not in open(f"/proc/{open(other).read()}/stat").read():
    time.sleep(0.001)
sys.exit(3)  # as one does whose peer is gone
"""
    with pytest.raises(ranks.RankError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL; the other ranks were ended$"):
        launched(tmp_path, program)
    assert nobody_left(tmp_path)


def test_ranks_that_take_too_long_are_ended_even_if_they_ignore_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE", 0.3)
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); rank == '1' and time.sleep(60)"
    monkeypatch.setattr(ranks, "_FINISH", 0.5)
    with pytest.raises(ranks.RankError, match="^rank 1 did not end within 0.5 s of the others; it was ended$"):
        launched(tmp_path, program)
    assert nobody_left(tmp_path)
    with pytest.raises(ranks.RankError, match="^rank 0 was not through after 1 s; all ranks were ended$"):
        launched(tmp_path, "time.sleep(60)", seconds=1.0)
    assert nobody_left(tmp_path)


def test_exit_codes_of_the_first_rank_that_are_no_failure(tmp_path):
    assert launched(tmp_path, "sys.exit(141) if rank == '0' else time.sleep(60)", passed_on=(141,)) == 141
    assert nobody_left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux alone")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_parent(tmp_path, how):
    # A shell's background jobs, and so what runs there, ignore SIGINT.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from leanfleet import ranks; ranks.launch(ranks.python('-c', {PROGRAM + 'time.sleep(60)'!r}, {str(tmp_path)!r}), 2)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as parent:
        started = pids(tmp_path)
        assert all(map(alive, started))
        parent.send_signal(how)
        parent.wait(10)
    assert nobody_left(tmp_path)


def test_places(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.place() is None
    with pytest.raises(ValueError, match="this process is no rank: start it with leanfleet generate --gpus, or with torchrun"):
        ranks.join("world", "shared_memory")
    monkeypatch.setenv("RANK", "3")
    assert ranks.place() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.place() == ranks.Place(3, 4, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks.place() == ranks.Place(3, 4, 1)
    for wrong in ("4", "-1", "x", ""):
        monkeypatch.setenv("RANK", wrong)
        with pytest.raises(ValueError, match="expected numbers, RANK from 0 to WORLD_SIZE - 1"):
            ranks.place()


# Decoders


UNEVEN = dict(num_attention_heads=6, num_key_value_heads=3, attention_bias=True, num_hidden_layers=1)  # groups: two, one


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{name: (model, folder for two ranks)}, and under "one" the first model's folder for one process."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}
    for name, sizes in (("even", {"num_hidden_layers": 1}), ("uneven", UNEVEN)):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "vocab_size": 260, **sizes})).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3) if p.dim() > 1 else p.add_(torch.randn_like(p) / 8)
        export_decoder(model, folder / name, byte_tokenizer(), tensor_parallel=2, verify=name == "uneven")
        found[name] = model, folder / name
    export_decoder(found["even"][0], folder / "one", byte_tokenizer(), verify=False)
    for name in ("even", "one"):
        add_serving(found["even"][0], folder / name, block=8, verify=name == "even")
    return {**found, "one": (found["even"][0], folder / "one")}


LINEAR = {
    "minimax": lambda: minimax(260, hidden_size=144, num_attention_heads=9, num_key_value_heads=3),
    "transnormer": lambda: ours("transnormer", vocab_size=260, num_attention_heads=3),
}


@pytest.fixture(scope="module", params=("qwen3.5", "falcon-h1", "bamba", *LINEAR))
def recurrent(request, tmp_path_factory):
    """(model, folder for two ranks, folder for one process) of hybrids: softmax attention between layers of the gated delta rule,
    whose three key heads are two and one, beside scans, whose three heads are, or between scans with a norm over all heads; and
    of linear attention, alone and with softmax attention."""
    torch.manual_seed(3)
    if request.param in LINEAR:
        model = LINEAR[request.param]().eval()
    else:
        kind, sizes = HYBRIDS[request.param]
        if request.param != "bamba":
            sizes = sizes | dict(linear_num_key_heads=3, linear_num_value_heads=6, mamba_n_heads=3, mamba_d_ssm=72)
        config = getattr(transformers, kind)(**{**SIZES, "vocab_size": 260, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.dim() > 1 else p.add_(torch.randn_like(p) / 8)
    folder = tmp_path_factory.mktemp("recurrent")
    for name, world in (("two", 2), ("one", None)):
        export_decoder(model, folder / name, byte_tokenizer(), tensor_parallel=world, verify=world is not None)
        add_serving(model, folder / name, block=8, verify=world is not None)
    return model, folder / "two", folder / "one"


@pytest.fixture(scope="module")
def shared(exported, tmp_path_factory):
    """{ranks: (model, folder)} of decoders whose context is shared out: that of "one", and one with sinks and windows."""
    folder, found = tmp_path_factory.mktemp("shared"), {}
    for world, model in ((2, exported["one"][0]), (3, make("gpt-oss"))):
        export_decoder(model, folder / f"{world}", byte_tokenizer(), context_parallel=world)
        found[world] = model, folder / f"{world}"
    return found


RUN = """
import json, os, signal, sys
import numpy as np
from leanfleet import ranks
from leanfleet.ort_ops import generation, load_decoder, stream
PIECES
ranks.end_with_parent()
here, (folder, out, asked, killed) = ranks.place(), sys.argv[1:]
with ranks.join("world", "shared_memory"):
    decoder, said = load_decoder(folder, device="cpu", rank=here.rank), []
    for options in ({}, dict(temperature=1.5, top_p=0.9, seed=4)):
        for step, new in enumerate(stream(decoder, json.loads(asked), 12, stop_tokens=[], **options)):
            said.append(new)
            if killed == f"{here.rank}" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    generation.PIECE = 24
    np.save(f"{out}/pieces{here.rank}.npy", in_pieces(decoder))
    open(f"{out}/said{here.rank}", "w").write(json.dumps(said))
"""


def in_pieces(decoder):
    """Logits of calls that go on with their caches, some of them bound as CUDA graphs are. Ranks cut them into smaller ones."""
    steps, random = generation._Steps(decoder, 3, 200, cuda_graph=True), np.random.default_rng(0)
    seen, found = np.zeros(3, np.int32), []
    for new in ([3, 70, 0], [1, 1, 1], [64, 0, 63], [1, 1, 1], [0, 60, 1], [1, 1, 1]):
        new = np.array(new, np.int32)
        seen = seen + new
        ids = random.integers(3, decoder.vocabulary, (3, new.max()))
        logits = steps.run(ids, seen, new, capture=new.max() == 1)
        found.append(np.where(new[:, None] > 0, logits, 0))
    return np.stack(found)


ASKED = [[5], [7, 8, 9, 10, 11, 12, 13], [20, 21]]


def said(folder, tmp_path, killed="nobody", asked=ASKED, world=2):
    """What each rank gives: [steps of the greedy tokens, steps of the sampled ones]."""
    program = RUN.replace("PIECES", inspect.getsource(in_pieces))
    ranks.launch(ranks.python("-c", program, str(folder), str(tmp_path), json.dumps(asked), killed), world, seconds=300)
    return [json.loads((tmp_path / f"said{rank}").read_text()) for rank in range(world)]


def of_one_process(folder, asked=ASKED):
    decoder, found = load_decoder(folder, device="cpu"), []
    for options in ({}, dict(temperature=1.5, top_p=0.9, seed=4)):
        found += stream(decoder, asked, 12, stop_tokens=[], **options)
    return found


def are_the_models(steps, asked, model):
    """Whether these are the likeliest tokens of a PyTorch model, one step after the other."""
    rows = [list(prompt) for prompt in asked]
    for step in steps:
        for row, token in zip(rows, step, strict=True):
            with torch.no_grad():
                expected = int(model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax())
            if token != expected:
                return False
            row.append(token)
    return True


def test_tokens_of_two_ranks_are_one_processs(exported, tmp_path):
    found = said(exported["even"][1], tmp_path)
    assert found[0] == found[1] == of_one_process(exported["one"][1])


def cached_heads(folder, world):
    """Of each rank's caches, by name of the cache."""
    graphs = [onnx.load(folder / f"model.rank{rank}.onnx", load_external_data=False).graph for rank in range(world)]
    return [{i.name: i.type.tensor_type.shape.dim[1].dim_value for i in g.input if i.name.startswith("past")} for g in graphs]


def test_heads_that_do_not_divide(exported, tmp_path):
    model, folder = exported["uneven"]
    assert [set(heads.values()) for heads in cached_heads(folder, 2)] == [{2}, {1}]
    found = said(folder, tmp_path)
    assert found[0] == found[1] and are_the_models(found[0][:12], ASKED, model)


def test_more_ranks_than_heads_of_keys(tmp_path):
    """SmolLM2's 9 query heads over 3: two of four ranks have a copy of the first head of keys."""
    torch.manual_seed(3)
    sizes = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=144, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "vocab_size": 260, **sizes})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    export_decoder(model, tmp_path / "four", byte_tokenizer(), tensor_parallel=4, verify=False)
    assert [set(heads.values()) for heads in cached_heads(tmp_path / "four", 4)] == [{1}] * 4
    found = said(tmp_path / "four", tmp_path, world=4)
    assert found == [found[0]] * 4 and are_the_models(found[0][:12], ASKED, model)


def mixture(kind="MixtralConfig", **sizes):
    usual = dict(num_local_experts=4, num_experts_per_tok=2, num_attention_heads=3, num_key_value_heads=3, sliding_window=None)
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**{**SIZES, "vocab_size": 260, **usual, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.dim() > 1 else p.add_(torch.randn_like(p) / 8)
    return model


@pytest.mark.filterwarnings("ignore::leanfleet.export.experts.ExpertsWarning")
def test_whole_experts_over_three_ranks(tmp_path):
    """Two experts on the first rank and one on the others, where a token chooses two."""
    model, folder = mixture(num_hidden_layers=1), tmp_path / "three"
    export_decoder(model, folder, byte_tokenizer(), tensor_parallel=3, whole_experts=True, verify=False)
    assert json.loads((folder / "leanfleet.json").read_text())["whole_experts"] is True
    for rank, own in enumerate((2, 1, 1)):
        graph = onnx.load(folder / f"model.rank{rank}.onnx").graph
        node = next(n for n in graph.node if n.op_type == "MoE")
        assert sum(n.op_type == "MoE" for n in graph.node) == 1
        assert next(list(i.dims) for i in graph.initializer if i.name == node.input[4]) == [own, 96, 128]
        assert {a.name: a.i for a in node.attribute}["k"] == min(own, 2)
    found = said(folder, tmp_path, world=3)
    assert found == [found[0]] * 3 and are_the_models(found[0][:12], ASKED, model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leanfleet.export.experts.ExpertsWarning")
@pytest.mark.parametrize("kind", ["MixtralConfig", "GptOssConfig"])
def test_a_batch_with_whole_experts(kind, tmp_path):
    """Experts of gpt-oss have biases and another activation; where nothing is fused they are standard operators."""
    model = mixture(kind, num_local_experts=5, num_experts_per_tok=3, sliding_window=5)
    for fuse in (True, False):
        several, one = tmp_path / f"several{fuse}", tmp_path / f"one{fuse}"
        export_decoder(model, several, byte_tokenizer(), tensor_parallel=2, whole_experts=True, fuse=fuse)
        add_serving(model, several, block=8, fuse=fuse)
        export_decoder(model, one, byte_tokenizer(), verify=False, fuse=fuse)
        add_serving(model, one, block=8, verify=False, fuse=fuse)
        assert said(several, tmp_path) == [of_one_process(one)] * 2
        assert_same(driven(several, tmp_path), drive(ContinuousBatch(one, device="cpu", **SMALL)))


@pytest.mark.slow
@pytest.mark.parametrize("kind, world", [("llama", 3), ("qwen3.5", 3), ("falcon-h1", 4)])
def test_a_batch_with_copies_of_heads(kind, world, tmp_path):
    """Softmax attention, layers of the gated delta rule with two key heads, and scans of two groups."""
    torch.manual_seed(3)
    name, sizes = HYBRIDS.get(kind, ("LlamaConfig", {}))
    more = dict(mamba_n_groups=2, mamba_rms_norm=True) if kind == "falcon-h1" else {}
    config = getattr(transformers, name)(**{**SIZES, "vocab_size": 260, **sizes, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.dim() > 1 else p.add_(torch.randn_like(p) / 8)
    for folder, ranks_of in (("several", world), ("one", None)):
        export_decoder(model, tmp_path / folder, byte_tokenizer(), tensor_parallel=ranks_of, verify=ranks_of is not None)
        add_serving(model, tmp_path / folder, block=8, verify=ranks_of is not None)
    found = said(tmp_path / "several", tmp_path, world=world)
    assert found == [of_one_process(tmp_path / "one")] * world
    one = drive(ContinuousBatch(tmp_path / "one", device="cpu", **SMALL))
    assert_same(driven(tmp_path / "several", tmp_path, world=world), one)


@pytest.mark.slow
def test_two_ranks_of_a_hybrid(recurrent, tmp_path):
    """Steps, and a batch whose states and pages are given back and taken again."""
    model, two, one = recurrent
    found = said(two, tmp_path)
    assert found[0] == found[1] == of_one_process(one) and are_the_models(found[0][:12], ASKED, model)
    assert_same(driven(two, tmp_path), drive(ContinuousBatch(one, device="cpu", **SMALL)))


# A rank's blocks are of 64 tokens: prompts of less than one, which grow over its border, of one, and of more than a round.
LONG = [
    [5],
    *([int(t) for t in torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n))] for n in (58, 64, 150)),
]


@pytest.mark.slow
def test_tokens_of_a_shared_context_are_one_processs(exported, shared, tmp_path):
    found, one = said(shared[2][1], tmp_path, asked=LONG), exported["one"][1]
    assert found[0] == found[1] == of_one_process(one, LONG)
    expected = in_pieces(load_decoder(one, device="cpu"))
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"pieces{rank}.npy"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_context_with_sinks_and_windows_over_three_ranks(shared, tmp_path):
    model, folder = shared[3]
    found = said(folder, tmp_path, asked=LONG, world=3)
    assert found[0] == found[1] == found[2] and are_the_models(found[0][:12], LONG, model)


@pytest.mark.slow
def test_a_folder_of_a_shared_context(shared):
    """One graph and one file of weights for all ranks; a cache of a rank holds its share."""
    folder = shared[3][1]
    facts = json.loads((folder / "leanfleet.json").read_text())
    assert facts["format"] == 6 and facts["context_parallel"] == {"world": 3, "block": 64}
    assert facts["verified"]["largest_difference"] <= facts["verified"]["bound"]
    assert [p.name for p in folder.glob("*.onnx*")] == ["model.onnx"]
    fusions = json.loads((shared[2][1] / "leanfleet.json").read_text())["fusions"]
    assert fusions["drop_transposes"] == 1 and fusions["rotate_inside"] == 0, "pages do not stand in the order of positions"
    decoder = load_decoder(folder, device="cpu", rank=2)
    with pytest.raises(ValueError, match="rank is 3, and .* was exported for 3 ranks: 0 to 2"):
        load_decoder(folder, rank=3)
    buffers = decoder.steps(2, 400).buffers
    assert {tuple(values[0].shape()) for values in buffers} == {(2 * 3, 64, 2, 16)}  # of 7 blocks a request


@pytest.mark.slow
def test_blocks_of_another_size_are_refused(shared, tmp_path):
    shutil.copytree(shared[2][1], folder := tmp_path / "copy")
    facts = json.loads((folder / "leanfleet.json").read_text())
    (folder / "leanfleet.json").write_text(json.dumps(facts | {"context_parallel": {"world": 2, "block": 128}}))
    with pytest.raises(ValueError, match="past_key_values.0.key has blocks of 64 tokens, where leanfleet.json has 128: export"):
        load_decoder(folder, device="cpu", rank=0)


@pytest.mark.slow
def test_a_rank_of_a_shared_context_killed(shared, tmp_path):
    with pytest.raises(ranks.RankError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL; the other ranks were ended$"):
        said(shared[2][1], tmp_path, killed="1", asked=LONG)
    assert not list(tmp_path.glob("said*"))


def test_folders_say_what_they_are_for(exported):
    folder = exported["uneven"][1]
    facts = json.loads((folder / "leanfleet.json").read_text())
    assert facts["format"] == 5
    assert facts["tensor_parallel"] == {"world": 2, "files": ["model.rank0.onnx", "model.rank1.onnx"]}
    assert facts["verified"]["largest_difference"] <= facts["verified"]["bound"]
    assert not (folder / "model.onnx").exists()


def test_a_rank_killed_in_the_middle(exported, tmp_path):
    begun = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL; the other ranks were ended$"):
        said(exported["even"][1], tmp_path, killed="1")
    assert time.monotonic() - begun < 60 and not list(tmp_path.glob("said*"))


@pytest.mark.slow
def test_the_command_starts_the_ranks_and_prints_one_answer(exported, capfd):
    options = ["Hello", "--max-tokens", "9", "--raw"]
    assert cli.main(["generate", str(exported["one"][1]), *options, "--device", "cpu"]) == 0
    expected = capfd.readouterr().out
    assert cli.main(["generate", str(exported["even"][1]), *options, "--ranks", "2", "--provider", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert out == expected and err.count("generated: 9 tokens") == 1


# Continuous batching


def drive(batch):
    """[(tokens, log-probabilities, likeliest tokens)] of requests that come and go in a pool too small for all of them: drawn
    and greedy ones, some with penalties, biases and priorities, some cancelled, some with a beginning that others have."""
    random, requests = np.random.default_rng(5), []
    for i in range(14):
        prompt = random.integers(3, 200, random.integers(1, 40)).tolist()
        if i % 3 == 1:
            prompt = requests[-1].prompt[:17] + prompt[:5]
        options = dict(temperature=float(random.choice([0, 0.9])), top_k=int(random.integers(0, 30)), seed=i, priority=i % 2)
        if i % 4 == 1:
            options |= dict(repetition_penalty=1.3, logit_bias={7: 2.0}, top_logprobs=3)
        requests.append(batch.add(prompt, random.integers(1, 25), stop_tokens=[], **options))
        for _ in range(random.integers(0, 5)):
            batch.step()
        if i % 5 == 3:
            batch.cancel(requests[random.integers(0, len(requests))])
    batch.run()
    pages = any(name.endswith(".key") for name in batch.pool_names)
    assert bool(batch.preemptions) == pages and batch.pool.in_use == 0
    assert batch.shared_tokens or batch.linear  # states are shared from a beginning's third text on; here two have it
    return [[r.tokens, r.logprobs, [[token for token, _ in row] for row in r.top_logprobs]] for r in requests]


DRIVE = """
import json, os, signal, sys
import numpy as np
from leanfleet import ranks
from leanfleet.ort_ops.serving import ContinuousBatch
from leanfleet.together import together
SOURCE
ranks.end_with_parent()
here, (folder, out, options, how) = ranks.place(), sys.argv[1:]
options = json.loads(options)
others = options.pop("others", {})
with ranks.join("world", "shared_memory"):
    batch = ContinuousBatch(folder, device="cpu", rank=here.rank, **options | (others if here.rank else {}))
    run = batch._run
    if how == "killed" and here.rank == 1:
        batch._run = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if batch.steps == 12 else run(*a)
    if how == "differs" and here.rank == 1:
        batch.said = 1
    if how == "fails" and here.rank == 0:
        def fails(*a):
            if batch.steps == 5:
                raise MemoryError("none left")
            run(*a)
        batch._run = fails
    with together(batch) as leads:
        if leads:
            json.dump(drive(batch), open(f"{out}/driven", "w"))
    assert batch.idle and batch.pool.in_use == 0
"""
SMALL = dict(pages=9, max_requests=4, step_tokens=24)


def driven(folder, tmp_path, how="well", world=2, **options):
    program, options = DRIVE.replace("SOURCE", inspect.getsource(drive)), json.dumps(SMALL | options)
    ranks.launch(ranks.python("-c", program, str(folder), str(tmp_path), options, how), world, seconds=300)
    return json.loads((tmp_path / "driven").read_text())


def assert_same(found, expected):
    assert [(tokens, top) for tokens, _, top in found] == [(tokens, top) for tokens, _, top in expected]
    for (_, one, _), (_, other, _) in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_batch_of_two_ranks_gives_one_processs_tokens(exported, tmp_path):
    found = driven(exported["even"][1], tmp_path)
    assert_same(found, drive(ContinuousBatch(exported["one"][1], device="cpu", **SMALL)))


@pytest.fixture(scope="module")
def shared_batch(exported):
    """(folder of two ranks that share out the context, with a serving graph, and one for one process) of the same model."""
    model, one = exported["one"]
    folder = one.parent / "context"
    export_decoder(model, folder, byte_tokenizer(), context_parallel=2, verify=False)
    add_serving(model, folder, block=4, verify=False)
    return folder, one


def test_a_batch_over_a_shared_context_gives_one_processs_tokens(shared_batch, tmp_path):
    """A page is 8 tokens, 4 on each rank."""
    folder, one = shared_batch
    facts = json.loads((folder / "leanfleet.json").read_text())["serving"]
    assert (facts["block"], facts["format"]) == (8, 7)
    batch = ContinuousBatch(folder, device="cpu", rank=1, **SMALL)
    assert {tuple(pool.shape()[:2]) for pool in batch.pools} == {(SMALL["pages"], 4)}
    shutil.copytree(folder, tmp_path / "copy")
    said = json.loads((folder / "leanfleet.json").read_text())
    said["serving"]["block"] = 16
    (tmp_path / "copy" / "leanfleet.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="has blocks of 4 tokens on each of 2 ranks, where leanfleet.json has pages of 16"):
        ContinuousBatch(tmp_path / "copy", device="cpu", rank=1, **SMALL)
    assert_same(driven(folder, tmp_path), drive(ContinuousBatch(one, device="cpu", **SMALL)))


@pytest.mark.slow
def test_a_batch_over_a_shared_context_that_guesses(shared_batch, tmp_path):
    folder, one = shared_batch
    assert_same(driven(folder, tmp_path, speculate=3), drive(ContinuousBatch(one, device="cpu", **SMALL, speculate=3)))


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_batch_with_sinks_and_windows_over_three_ranks(cache, tmp_path):
    model = make("gpt-oss")
    export_decoder(model, tmp_path / "three", byte_tokenizer(), context_parallel=3, cache=cache, verify=False)
    add_serving(model, tmp_path / "three", block=4, cache=cache)
    verified = json.loads((tmp_path / "three" / "leanfleet.json").read_text())["serving"]["verified"]
    assert verified["largest_difference"] <= verified["bound"]
    export_decoder(model, tmp_path / "one", byte_tokenizer(), cache=cache, verify=False)
    add_serving(model, tmp_path / "one", block=12, cache=cache, verify=False)
    one = drive(ContinuousBatch(tmp_path / "one", device="cpu", **SMALL))
    assert_same(driven(tmp_path / "three", tmp_path, world=3), one)


@pytest.mark.slow
def test_a_batch_of_two_ranks_that_guesses(exported, tmp_path):
    found = driven(exported["even"][1], tmp_path, speculate=3)
    assert_same(found, drive(ContinuousBatch(exported["one"][1], device="cpu", **SMALL, speculate=3)))


@pytest.mark.slow
def test_a_batch_under_torchrun(exported, tmp_path):
    program, options = DRIVE.replace("SOURCE", inspect.getsource(drive)), json.dumps(SMALL)
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "program.py"]
    subprocess.run([*command, exported["even"][1], tmp_path, options, "well"], check=True, timeout=300)
    found = json.loads((tmp_path / "driven").read_text())
    assert_same(found, drive(ContinuousBatch(exported["one"][1], device="cpu", **SMALL)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, others, message",
    [
        ("killed", {}, r"rank 1 \(process \d+\) was killed by SIGKILL; the other ranks were ended\n"),
        ("differs", {}, r"RankError: rank 1 has other tokens than rank 0, after 0 steps"),
        ("fails", {}, r"MemoryError: none left"),
        ("well", {"pages": 8}, r"ValueError: rank 1 has a batch of .*'pages': 8.* rank 0 one of .*'pages': 9"),
    ],
    ids=["killed", "differs", "fails", "sizes"],
)
def test_a_batch_that_ends_early(exported, tmp_path, how, others, message, capfd):
    """The reason is in the error, or in what rank 0 prints, whichever rank is the first to end."""
    begun = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"^rank [01] (failed with exit code 1|\(process \d+\) was killed)") as caught:
        driven(exported["even"][1], tmp_path, how, others=others)
    assert re.search(message, f"{caught.value}\n{capfd.readouterr().err}")
    assert time.monotonic() - begun < 60 and not (tmp_path / "driven").exists()


def test_a_served_folder_of_two_ranks(exported, tmp_path):
    """Each rank has a graph for it; errors say what is missing."""
    folder = exported["even"][1]
    facts = json.loads((folder / "leanfleet.json").read_text())
    assert facts["serving"]["verified"]["largest_difference"] <= facts["serving"]["verified"]["bound"]
    assert {p.name for p in folder.glob("*.onnx")} == {
        *(f"{name}.rank{rank}.onnx" for name in ("model", "serving") for rank in range(2)),
        "sampler.onnx",
    }
    with pytest.raises(ValueError, match=r"for 2 ranks \(tensor_parallel\), which run together: leanfleet serve .* --gpus 2$"):
        ContinuousBatch(folder, pages=4)
    with pytest.raises(ValueError, match="rank is 2, and .* was exported for 2 ranks: 0 to 1"):
        ContinuousBatch(folder, pages=4, rank=2)
    with pytest.raises(ValueError, match="library=False is for one process"):
        ContinuousBatch(folder, pages=4, rank=0, library=False)
    with pytest.raises(ValueError, match="was exported for one process: leave the rank out"):
        ContinuousBatch(exported["one"][1], pages=4, rank=0)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "serving.rank1.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="serving.rank1.onnx does not exist, though .* names it"):
        ContinuousBatch(tmp_path / "copy", pages=4, rank=0)


@contextmanager
def serving(folder, tmp_path):
    """(the command, a client) of a server of two ranks."""
    options = ["--port", "0", "--provider", "cpu", "--ranks", "2", "--cache-tokens", "512"]
    # A shell's background jobs, and so what runs there, ignore SIGINT.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from leanfleet.__main__ import main; sys.exit(main())"
    command, environment = [sys.executable, "-P", "-c", code, "serve", str(folder), *options], {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **environment}
    ) as process:
        try:
            line = next((line for line in process.stderr if line.startswith("serving ")), None)
            assert line, process.wait(10)
            yield process, openai.OpenAI(base_url=re.search(r"http://\S+", line)[0], api_key="none", max_retries=0)
        finally:
            process.kill()
    assert not list(tmp_path.glob("leanfleet-ranks-*"))


ANSWER = dict(model="even", prompt="a prompt", max_tokens=100, temperature=0, extra_body={"ignore_eos": True})


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT, "all"])
def test_the_command_serves_with_two_ranks(exported, tmp_path, ends):
    """Streams; asked to end, it does so once what has begun is through, and leaves nothing."""
    one = load_decoder(exported["one"][1], device="cpu")
    prompt = encode(one.tokenizer, "a prompt", chat=False)
    expected = one.tokenizer.decode(generate(one, [prompt], 100, stop_tokens=())[0][0], skip_special_tokens=True)
    with serving(exported["even"][1], tmp_path) as (process, client):
        assert client.completions.create(**ANSWER).choices[0].text == expected
        parts = iter(client.completions.create(stream=True, **ANSWER))
        text = next(parts).choices[0].text
        if ends == signal.SIGTERM:
            process.send_signal(ends)
        else:  # to every process, as a terminal does, or who stops a service
            os.killpg(process.pid, signal.SIGTERM if ends == "all" else ends)
        assert text + "".join(part.choices[0].text for part in parts if part.choices) == expected
        ended = 130 if ends == signal.SIGINT else -signal.SIGTERM  # as one process does
        assert process.wait(30) == ended, process.stderr.read()


@pytest.mark.slow
def test_a_server_one_of_whose_ranks_is_killed(exported, tmp_path):
    with serving(exported["even"][1], tmp_path) as (process, client):
        parts = iter(client.completions.create(stream=True, **ANSWER))
        next(parts)
        children = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        (first,) = [pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(first, signal.SIGKILL)
        with suppress(Exception):  # whichever way the answer breaks off
            list(parts)
        assert process.wait(60) == 2
        said = process.stderr.read()
        assert re.search(r"leanfleet serve: rank (1 \(process \d+\) was killed by SIGKILL|0 failed)", said), said


@pytest.mark.slow
def test_a_server_that_ends_while_it_loads(exported, tmp_path):
    command = ["serve", str(exported["even"][1]), "--port", "0", "--provider", "cpu", "--ranks", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-m", "leanfleet", *command], stderr=subprocess.PIPE, env=environment) as process:
        while not list(tmp_path.glob("leanfleet-ranks-*/rank1.txt")):
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM and b"failed" not in process.stderr.read()
    assert not list(tmp_path.glob("leanfleet-ranks-*"))


@pytest.mark.slow
def test_the_command_runs_a_shared_context(exported, shared, capfd):
    options = ["Hello, " * 12, "--max-tokens", "9", "--raw"]
    assert cli.main(["generate", str(exported["one"][1]), *options, "--device", "cpu"]) == 0
    expected = capfd.readouterr().out
    assert cli.main(["generate", str(shared[2][1]), *options, "--ranks", "2", "--provider", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert out == expected and err.count("generated: 9 tokens") == 1
    assert "was exported for 2 ranks (context_parallel), which run together" in refused(
        capfd, "generate", shared[2][1], "Hello"
    )
    assert "was exported for 2 ranks, no more and no less" in refused(capfd, "generate", shared[2][1], "Hello", "--ranks", "3")


def refused(capfd, *arguments):
    code = cli.main([str(a) for a in arguments])
    out, err = capfd.readouterr()
    assert code == 2 and not out and err.count("\n") == 1, err
    return err


def test_commands_that_do_not_fit(exported, tmp_path, capfd, monkeypatch):
    two, one = exported["even"][1], exported["one"][1]
    run = "generate", two, "Hello"
    assert "was exported for 2 ranks, no more and no less" in refused(capfd, *run, "--ranks", "3", "--provider", "cpu")
    assert "was exported for 2 ranks (tensor_parallel), which run together" in refused(capfd, *run)
    assert "give one of the two" in refused(capfd, *run, "--ranks", "2", "--gpus", "2")
    assert "--whole-experts says how" in refused(capfd, "export", "MODEL", tmp_path / "new", "--whole-experts")
    assert "on the CPU it is --ranks" in refused(capfd, *run, "--gpus", "2", "--provider", "cpu")
    assert "each of several ranks has a GPU of its own" in refused(capfd, *run, "--ranks", "2", "--device", "cuda:1")
    assert (
        "was exported for one process; export the model with leanfleet export --tensor-parallel 2, or --context-parallel 2"
        in refused(capfd, "generate", one, "Hello", "--ranks", "2")
    )
    monkeypatch.setattr(driver, "why_no_gpu", lambda: None)
    monkeypatch.setattr(driver, "gpus", lambda: [driver.Gpu("a GPU", "9.0")])
    assert "2 ranks need a GPU each, and this process sees 1" in refused(capfd, *run, "--gpus", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "was exported for 2 ranks, and 3 were started: start 2" in refused(capfd, *run)
    monkeypatch.delenv("RANK")
    assert "export the model with leanfleet export --tensor-parallel 2 --serve" in refused(capfd, "serve", one, "--ranks", "2")
    assert "which run together: leanfleet serve" in refused(capfd, "serve", two)
    both = "--tensor-parallel", "2", "--context-parallel", "2"
    assert "shares out heads, --context-parallel the tokens" in refused(capfd, "export", "model", tmp_path / "x", *both)


def test_ranks_of_a_folder(exported):
    two, one = exported["even"][1], exported["one"][1]
    with pytest.raises(ValueError, match="rank is 2, and .* was exported for 2 ranks: 0 to 1"):
        load_decoder(two, rank=2)
    with pytest.raises(ValueError, match="was exported for one process: leave the rank out"):
        load_decoder(one, rank=0)
    with pytest.raises(ValueError, match="library=False is for one process"):
        load_decoder(two, rank=0, library=False)
    with pytest.raises(ValueError, match="exported for 2 ranks .tensor_parallel., which run together: leanfleet generate"):
        load_decoder(two)


def one_key_head():
    kind, sizes = HYBRIDS["qwen3-next"]
    config = getattr(transformers, kind)(**{**SIZES, **sizes, "linear_num_key_heads": 1})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_models_that_are_not_shared_out(tmp_path):
    def refusal(model, world=2, option="tensor_parallel"):
        with pytest.raises(ValueError) as error:
            export_decoder(model, tmp_path / "new", **{option: world})
        assert not (tmp_path / "new").exists()
        return str(error.value)

    llama = make("llama")
    assert "tensor_parallel is 7, and its attention has 6 query heads, none of which is cut: at most 6 ranks" in refusal(
        llama, 7
    )
    for wrong in (1, 0, -2, 2.0, "2", True):
        assert "expected a number of ranks, 2 or more" in refusal(llama, wrong)
    shared = "context_parallel"
    assert f"{shared} is for transformers' decoders with softmax attention" in refusal(ours("retnet"), option=shared)
    assert f"layer 0 carries a state, and {shared} shares out" in refusal(minimax(), option=shared)
    assert "tensor_parallel is 7, and its layers have 6 heads, none of which is cut" in refusal(ours("retnet"), 7)
    for wrong in (1, 65, 2.0, "2", True):
        assert "expected a number of ranks, 2 or more, at most 64" in refusal(llama, wrong, "context_parallel")
    with pytest.raises(
        ValueError, match="tensor_parallel shares out heads, context_parallel the tokens in the caches: give one"
    ):
        export_decoder(llama, tmp_path / "new", tensor_parallel=2, context_parallel=2)
    with pytest.raises(ValueError, match="whole_experts says how tensor_parallel shares a mixture out: give both"):
        export_decoder(mixture(), tmp_path / "new", whole_experts=True)
    for few, world, message in ((llama, 2, "it has none that tensor_parallel knows"), (mixture(), 5, "at most 4 ranks")):
        with pytest.raises(ValueError, match=f"whole_experts.*{message}|{message}.*whole_experts"):
            export_decoder(few, tmp_path / "new", tensor_parallel=world, whole_experts=True)
    quantise(llama, 8)
    assert "its q_proj is a" in refusal(llama) and "not quantised" in refusal(llama)
    assert "tensor_parallel is 5, and layer 0 (Qwen3NextGatedDeltaNet) has 4 value heads" in refusal(one_key_head(), 5)
    assert "layer 0 carries a state, and context_parallel" in refusal(one_key_head(), option="context_parallel")
    assert "layer 0 carries a state, and tensor_parallel shares out softmax attention, MiniMax" in refusal(hybrid("nemotron-h"))
    cohere = transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, use_qk_norm=True)).eval()
    assert "q_norm.weight is [6, 16], which tensor_parallel cannot share out by heads" in refusal(cohere)
