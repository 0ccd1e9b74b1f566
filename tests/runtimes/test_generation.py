"""Text from exported folders: the commands `leanfleet export` and `leanfleet generate`, sampling, streaming, errors."""

import io
import json
import math
import re
import shutil
import time

import numpy as np
import pytest
import torch
import transformers
from tokenizers.models import BPE

from leanfleet import cli, decoder_contract
from leanfleet import generate as generate_commands
from leanfleet import progress
from leanfleet.decoder_contract import Sampling
from leanfleet.export import export_decoder, verification
from leanfleet.export.fusions import PASSES
from leanfleet.export.serving import add_serving
from leanfleet.export.verification import VerificationError
from leanfleet.generate import load_pretrained, next_step
from leanfleet.generation import StopStrings
from leanfleet import generation as streams_of_text
from leanfleet.ort_ops import generation
from leanfleet.ort_ops.serving import ContinuousBatch
from leanfleet.sampling import problem, sample
from support.decoders import byte_tokenizer


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder as transformers writes it: a small Llama with random weights, and its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=260,
        intermediate_size=64,
        max_position_embeddings=200,
        eos_token_id=256,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[(), ("--serve",)], ids=["model", "serving"])
def folder(request, pretrained, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    assert cli.main(["export", str(pretrained), str(out), *request.param]) == 0
    return out


def run(capsys, *arguments):
    capsys.readouterr()
    code = cli.main(["generate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def expected_text(pretrained, prompt, count):
    model, tokenizer = load_pretrained(pretrained)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=256, pad_token_id=0
    )[0, len(prompt) :]
    return tokenizer.decode(made, skip_special_tokens=True)


def test_long_prompts_show_that_they_are_read(folder, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG", (0.001, 0.001))

    def slowly(call):
        def slow(*arguments, **options):
            time.sleep(0.05)
            return call(*arguments, **options)

        return slow

    monkeypatch.setattr(generation._Steps, "run", slowly(generation._Steps.run))
    monkeypatch.setattr(ContinuousBatch, "_run", slowly(ContinuousBatch._run))
    code, out, err = run(capsys, folder, "Hello", "Good morning", "--max-tokens", "2", "--raw")
    assert code == 0 and re.search(r" 0 s  reading 17 tokens of the prompts\n", err) and "reading" not in out, err
    assert err.splitlines()[-1].startswith("prompt: 17 tokens")


def test_greedy_chat_is_what_transformers_gives(folder, pretrained, capsys):
    tokenizer = byte_tokenizer()
    prompt = tokenizer("<user>Hello<end><assistant>")["input_ids"]
    code, out, err = run(capsys, folder, "Hello", "--max-tokens", 20)
    assert code == 0 and out.rstrip("\n") == expected_text(pretrained, prompt, 20)
    assert f"prompt: {len(prompt)} tokens" in err and "tokens/s; generated: " in err


def test_raw_and_system_prompts(folder, pretrained, capsys):
    tokenizer = byte_tokenizer()
    _, raw, _ = run(capsys, folder, "Hello", "--raw", "--max-tokens", 12)
    assert raw.rstrip("\n") == expected_text(pretrained, tokenizer("Hello")["input_ids"], 12)
    _, system, _ = run(capsys, folder, "Hello", "--system", "Be brief", "--max-tokens", 12)
    prompt = tokenizer("<system>Be brief<end><user>Hello<end><assistant>")["input_ids"]
    assert system.rstrip("\n") == expected_text(pretrained, prompt, 12)


def test_several_prompts_are_each_answered(folder, capsys):
    """One ragged batch gives what each prompt gives alone; each answer has its number."""
    texts = ["Hi", "What is a lighthouse?", "abc"]
    alone = [run(capsys, folder, text, "--max-tokens", 10)[1] for text in texts]
    code, out, _ = run(capsys, folder, *texts, "--max-tokens", 10)
    assert code == 0 and out == "".join(f"[{i}] {text}" for i, text in enumerate(alone, 1))


def test_stdin_and_stop_token(folder, capsys, monkeypatch):
    _, free, _ = run(capsys, folder, "Hello", "--max-tokens", 20)
    stop = next(c for c in free if c.isascii() and c.isalnum())
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    code, out, _ = run(capsys, folder, "-", "--max-tokens", 20, "--stop", stop)
    assert code == 0 and out.rstrip("\n") == free[: free.index(stop) + 1]


def test_sampling_options(folder, capsys):
    """Seeds repeat; --top-k alone samples; one candidate is greedy."""

    def text(*options):
        return run(capsys, folder, "Hello", "--max-tokens", 16, *options)[1]

    greedy = text()
    assert text("--top-k", 1) == greedy and text("--top-p", 1e-6) == greedy
    assert text("--top-k", 50, "--temperature", 3, "--seed", 1) == text("--top-k", 50, "--temperature", 3, "--seed", 1)
    assert len({text("--temperature", 3, "--seed", seed) for seed in range(4)}) > 1


def test_sampled_tokens_have_their_probabilities():
    """Frequencies of many draws against softmax, cut to top_k and top_p: within 5 standard deviations, and nothing else."""
    logits = np.log(np.array([0.4, 0.05, 0.3, 0.15, 0.1]))
    for temperature, top_k, top_p, kept in (
        (1.0, 0, 1.0, [0, 1, 2, 3, 4]),
        (0.5, 0, 1.0, [0, 1, 2, 3, 4]),
        (1.0, 3, 1.0, [0, 2, 3]),
        (1.0, 0, 0.65, [0, 2]),
        (1.0, 4, 0.9, [0, 2, 3, 4]),
    ):
        draws = 4000
        requests = [Sampling(temperature, top_k, top_p, seed=i) for i in range(draws)]
        found, logprobs = sample(np.tile(logits, (draws, 1)), requests, np.full(draws, 3))
        assert np.allclose(logprobs, logits[found], atol=1e-6)
        p = np.zeros(5)
        p[kept] = np.exp(logits[kept] / temperature)
        p /= p.sum()
        counts = np.bincount(found, minlength=5)
        assert (np.abs(counts - draws * p) <= 5 * np.sqrt(draws * p * (1 - p))).all(), (
            temperature,
            top_k,
            top_p,
            counts / draws,
        )


def test_text_stream_gives_whole_characters():
    tokenizer = byte_tokenizer()
    text = "naïve 猫 🙂 end"
    tokens = tokenizer(text)["input_ids"]
    stream = generation.TextStream(tokenizer)
    pieces = [stream.add(t) for t in tokens]
    assert "".join(pieces) == text and len(tokens) > len(text)
    assert not any("\ufffd" in piece for piece in pieces) and pieces.count("") == len(tokens) - len(text)


def test_text_stream_gives_all_bytes():
    """Of a character that is not finished, and of bytes that are none, at the end or when as many wait as may."""
    tokenizer, random = byte_tokenizer(), np.random.default_rng(0)
    for size in (1, 2, 30, 300):
        tokens = random.integers(0, 256, size).tolist()
        stream = generation.TextStream(tokenizer)
        told = "".join(stream.add(t) for t in tokens)
        assert told + stream.finish() == tokenizer.decode(tokens) and stream.finish() == ""
        assert len(told) > size / 4 or size < 30


@pytest.mark.parametrize("size, count", ((40, 3000), (300, 300)))
def test_text_streams_of_noise(size, count):
    """Characters that stand among many bytes that are none come whole: a stream tells the text of all its tokens."""
    tokenizer, random, told = byte_tokenizer(), np.random.default_rng(size), 0
    for _ in range(count):
        tokens = random.integers(0, 256, size)
        tokens[random.random(size) < 0.5] |= 128  # more that begin or go on
        stream = streams_of_text.TextStream(tokenizer)
        pieces = [stream.add(token) for token in tokens.tolist()]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens.tolist())
        told += sum(map(len, pieces))
        assert len(stream.tokens) - stream._to <= 2 * streams_of_text.MOST_PENDING
    assert told > 0.5 * size * count


@pytest.mark.parametrize("clean_up", (False, True))
def test_streams_together(monkeypatch, clean_up):
    """Tokens of several texts, decoded by one call of the tokenizer beneath where it does nothing else, are those of each alone."""
    tokenizer, random, calls = byte_tokenizer(), np.random.default_rng(3), []
    tokenizer.clean_up_tokenization_spaces = clean_up
    decode = type(tokenizer).decode
    monkeypatch.setattr(type(tokenizer), "decode", lambda *a, **o: calls.append(1) or decode(*a, **o))
    texts = [random.integers(0, tokenizer.vocab_size, n).tolist() for n in (1, 40, 40, 7, 90)]
    texts[2][::3] = [tokenizer.eos_token_id] * 14
    streams, found = [generation.TextStream(tokenizer) for _ in texts], [""] * len(texts)
    for step in range(90):
        some = [i for i, tokens in enumerate(texts) if step < len(tokens)]
        for i, text in zip(some, streams_of_text.add_each([streams[i] for i in some], [texts[i][step] for i in some])):
            found[i] += text
    # transformers leaves texts of byte-pair encodings as they are, whatever this says.
    spared = getattr(tokenizer, streams_of_text.CLEANED_UP, True) is False and type(tokenizer.backend_tokenizer.model) is BPE
    assert bool(calls) == (clean_up and not spared)
    whole = [text + stream.finish() for text, stream in zip(found, streams)]
    assert whole == [decode(tokenizer, tokens, skip_special_tokens=True) for tokens in texts]
    assert streams_of_text.add_each([], []) == []


def test_text_stream_of_tokens_without_text(monkeypatch):
    """Such as a model's own marks, thousands of them: they are not decoded again and again."""
    tokenizer, seen, decode = byte_tokenizer(), [], streams_of_text.decode_each
    end = tokenizer.eos_token_id
    monkeypatch.setattr(streams_of_text, "decode_each", lambda by, texts: seen.extend(map(len, texts)) or decode(by, texts))
    stream = generation.TextStream(tokenizer)
    tokens = [*tokenizer("a b")["input_ids"], *[end] * 500, *tokenizer(" énd")["input_ids"], end]
    assert "".join(stream.add(t) for t in tokens) + stream.finish() == "a b énd" and max(seen) < 30


def test_text_stream_costs_the_same_for_every_token():
    class Counting:
        def decode(self, tokens, **options):
            seen.append(len(tokens))
            return "".join(f" {t}" for t in tokens)

    seen = []
    stream = generation.TextStream(Counting())
    assert "".join(stream.add(t) for t in range(500)) == "".join(f" {t}" for t in range(500)) and max(seen) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_in_any_pieces(seed):
    random = np.random.default_rng(seed)
    for _ in range(200):
        text = "".join(random.choice(list("ab"), int(random.integers(1, 30))))
        strings = ["".join(random.choice(list("ab"), int(random.integers(1, 5)))) for _ in range(random.integers(0, 4))]
        cuts = sorted(random.integers(0, len(text) + 1, 6).tolist())
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        stops = StopStrings(strings)
        told = [stops.add(piece) for piece in pieces]
        whole = StopStrings(strings)
        assert "".join(told) + stops.finish() == whole.add(text) + whole.finish() and stops.found == whole.found
        places = [text.find(s) for s in strings if s in text]
        assert stops.found == bool(places) and (not places or not any(s in "".join(told) for s in strings))


def test_default_of_new_tokens_is_what_fits(folder, capsys):
    """200 positions: 128 new tokens where they fit, else what is left; a wish that does not fit is refused."""
    decoder = generation.load_decoder(folder, providers=["CPUExecutionProvider"])
    for length, count in ((1, 128), (190, 10), (199, 1)):
        assert len(generation.generate(decoder, [[5] * length], stop_tokens=[])[0][0]) == count
    assert len(generation.generate(decoder, [[5] * 7], capacity=9, stop_tokens=[])[0][0]) == 2
    with pytest.raises(ValueError, match="318 tokens, 190 of them a prompt's, are more than the 200 positions"):
        generation.generate(decoder, [[5] * 190], 128)
    code, _, err = run(capsys, folder, "x" * 190, "--raw", "--stop", "<user>")
    assert code == 0 and "prompt: 190 tokens" in err


def test_texts_from_python(folder, capsys):
    """As the command answers them, with the folder's tokenizer; also mixed with token ids."""
    decoder = generation.load_decoder(folder, providers=["CPUExecutionProvider"])
    tokens, _ = generation.generate(decoder, ["Hello"], 12)
    assert decoder.tokenizer.decode(tokens[0]) + "\n" == run(capsys, folder, "Hello", "--max-tokens", 12)[1]
    raw, _ = generation.generate(decoder, ["Hello"], 12, chat=False)
    assert raw != tokens and raw == generation.generate(decoder, [decoder.tokenizer("Hello")["input_ids"]], 12)[0]
    assert generation.generate(decoder, ["Hello", [5, 6]], 12)[0] == [*tokens, *generation.generate(decoder, [[5, 6]], 12)[0]]


def test_prompts_that_are_none(folder, tmp_path):
    decoder = generation.load_decoder(folder, providers=["CPUExecutionProvider"])
    for prompts, message in (
        ([], "there is no prompt"),
        ([[]], "a prompt is empty"),
        ("Hi", "one text; give a list"),
        ([""], "is empty"),
        ([[1.5]], "no list of token ids"),
        ([[260]], "token ids lie in 0 .. 259"),
        ([5], "no list of token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            generation.generate(decoder, prompts)
    decoder = generation.load_decoder(without(folder, tmp_path / "a", "tokenizer.json", "tokenizer_config.json"))
    assert generation.generate(decoder, [[5]], 1)[0]
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        generation.generate(decoder, ["Hi"])


def test_logits_that_are_not_finite():
    for value in (math.nan, math.inf):
        logits = np.zeros((2, 5), np.float32)
        logits[1, 3] = value
        for temperature in (0.0, 1.0):
            _, logprobs = sample(logits, [Sampling(temperature)] * 2, np.zeros(2))
            assert problem(logprobs[0]) is None and "logits are not finite" in str(problem(logprobs[1]))


def test_stream_is_lazy(folder):
    """The first token is there before the second is computed."""
    decoder = generation.load_decoder(folder, providers=["CPUExecutionProvider"])
    statistics = generation.Statistics()
    steps = generation.stream(decoder, [[5, 6], [7]], 4, stop_tokens=[], statistics=statistics)
    first = next(steps)
    assert statistics.decode_tokens == 0 and [len(t) for t in statistics.tokens] == [1, 1] and None not in first
    assert len(list(steps)) == 3 and statistics.decode_tokens == 6 and statistics.prefill_tokens == 3


@pytest.fixture(scope="module")
def served(pretrained, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    assert cli.main(["export", str(pretrained), str(out), "--serve", "--page", "16"]) == 0
    return out


CPU = ["CPUExecutionProvider"]


@pytest.mark.parametrize("places, speculate", [(9, 0), (2, 0), (3, 4)], ids=["all at once", "by turns", "with guesses"])
@pytest.mark.parametrize("options", [{}, dict(temperature=2.0, top_p=0.9, seed=2**63 - 4)], ids=["greedy", "drawn"])
def test_a_batch_gives_the_tokens_of_a_decoder(served, options, places, speculate):
    """Answers of all lengths to prompts of all lengths, with less room than they need together, too."""
    draw, stop = np.random.default_rng(places), range(0, 260, 13)
    prompts = [draw.integers(0, 256, n).tolist() for n in (1, 40, 7, 100, 16, 3, 64, 65, 2)]
    expected, counted = generation.generate(generation.load_decoder(served, CPU), prompts, 50, stop_tokens=stop, **options)
    assert len({len(tokens) for tokens in expected}) > 2
    batch = ContinuousBatch(served, pages=12 * places, max_requests=places, step_tokens=48, providers=CPU, speculate=speculate)
    steps = list(
        generation.stream(batch, prompts, 50, stop_tokens=stop, statistics=(found := generation.Statistics()), **options)
    )
    assert found.tokens == expected
    for row, tokens in enumerate(expected):
        assert [step[row] for step in steps] == tokens + [None] * (len(steps) - len(tokens))
    assert (found.prefill_tokens, found.decode_tokens) == (counted.prefill_tokens, counted.decode_tokens)
    assert min(found.prefill_seconds, found.decode_seconds) > 0
    assert (
        generation.generate(batch, ["Hello"], 5)[0]
        == generation.generate(generation.load_decoder(served, CPU), ["Hello"], 5)[0]
    )


def test_a_batch_that_nobody_listens_to_has_its_pages_back(served):
    batch = ContinuousBatch(served, pages=30, max_requests=2, providers=CPU, share=False)
    other = batch.add([9, 8, 7], 20, stop_tokens=())
    for rounds in (1, 3):
        steps = generation.stream(batch, [[1, 2, 3], [4] * 50, [5]], 20, stop_tokens=[])
        for _ in range(rounds):
            next(steps)
        steps.close()
        assert not batch.queue and batch.running in ([other], [])
    batch.run()
    assert other.tokens == generation.generate(generation.load_decoder(served, CPU), [[9, 8, 7]], 20, stop_tokens=[])[0][0]
    assert batch.pool.available == batch.pool.count


def test_what_a_batch_cannot_have(served):
    batch = ContinuousBatch(served, pages=4, max_requests=2, providers=CPU)
    for options, message in (
        (dict(capacity=50), "capacity is for a decoder of load_decoder"),
        (dict(on_logits=print), "on_logits is for a decoder of load_decoder"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(max_new_tokens=80), "the pool has 4"),
    ):
        with pytest.raises(ValueError, match=message):
            generation.generate(batch, [[1], [2] * 5], **options)
        assert batch.idle
    assert len(generation.generate(batch, [[1], [2] * 5], stop_tokens=[])[0][1]) == 4 * 16 - 5


def test_a_batch_with_logits_that_are_not_finite(pretrained, tmp_path):
    model, tokenizer = load_pretrained(pretrained)
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = math.nan
    export_decoder(model, tmp_path, tokenizer, verify=False)
    add_serving(model, tmp_path, verify=False)
    batch = ContinuousBatch(tmp_path, pages=20, max_requests=2, providers=CPU)
    with pytest.raises(ValueError, match="logits are not finite"):
        generation.generate(batch, [[5, 6], [7, 77]], 10, stop_tokens=[])
    assert batch.idle and batch.pool.available == batch.pool.count


def test_api_from_the_package(folder):
    from leanfleet import ort_ops

    decoder = ort_ops.load_decoder(folder, providers=["CPUExecutionProvider"])
    tokens, statistics = ort_ops.generate(decoder, [[5, 6]], 3, stop_tokens=[])
    assert len(tokens[0]) == 3 and statistics.tokens == tokens
    assert math.isnan(ort_ops.generation.Statistics().tokens_per_second)


def without(folder, target, *names):
    shutil.copytree(folder, target)
    for name in names:
        (target / name).unlink()
    return target


def test_errors_are_one_line(folder, pretrained, tmp_path, capsys, monkeypatch):
    no_tokenizer = without(folder, tmp_path / "a", "tokenizer.json", "tokenizer_config.json")
    no_facts = without(folder, tmp_path / "b", "leanfleet.json")
    no_template = without(folder, tmp_path / "c", "chat_template.jinja")
    graph = "serving.onnx" if (folder / "serving.onnx").exists() else "model.onnx"
    broken = without(folder, tmp_path / "d", graph)
    (broken / graph).write_bytes(b"not a model")
    other = without(folder, tmp_path / "e")
    larger = byte_tokenizer()
    larger.add_tokens(["Hi"])
    larger.save_pretrained(other)
    for arguments, message in [
        ([folder, ""], "the prompt is empty"),
        ([folder, "Hi", "  "], "the prompt is empty"),
        ([folder, "Hi", "--max-tokens", 0], "max_new_tokens is 0; it must be a whole number, at least 1"),
        ([folder, "Hi", "--capacity", 10, "--max-tokens", 9], "cache slots; the caches have 10. Raise capacity, or ask for"),
        ([folder, "Hi", "--capacity", 3], "need 6 cache slots; the caches have 3. Raise capacity"),
        ([folder, "x" * 180, "--max-tokens", 128], "positions that the model was trained for"),
        ([folder, "x" * 200], "positions that the model was trained for"),
        ([folder, "Hi", "--temperature", -1], "temperature is -1.0; expected 0 (the likeliest) or a positive number"),
        ([folder, "Hi", "--temperature", "nan"], "temperature is nan; expected"),
        ([folder, "Hi", "--seed", -1], "seed is -1; expected a whole number from 0 on"),
        ([folder, "Hi", "--top-p", 0], "top_p is 0.0; expected a number above 0"),
        ([folder, "Hi", "--stop", "blub"], "--stop blub: no single token"),
        ([folder, "Hi", "--raw", "--system", "x"], "give one of the two"),
        ([folder, "Hi", "--cuda-graph", "--provider", "cpu"], "--cuda-graph needs the CUDA provider"),
        ([tmp_path / "nowhere", "Hi"], "is not a folder"),
        ([pretrained, "Hi"], "it holds a transformers model that is not exported yet: leanfleet export"),
        ([no_facts, "Hi"], "leanfleet.json does not exist; write the folder with leanfleet.export.export_decoder"),
        ([no_tokenizer, "Hi"], "holds no tokenizer (tokenizer.json)"),
        ([no_template, "Hi", "--system", "x"], "has no chat template"),
        ([broken, "Hi"], graph),
        ([other, "Hi"], "Is this the model's own tokenizer?"),
    ]:
        code, out, err = run(capsys, *arguments)
        assert code == 2 and message in err and out == "" and err.count("\n") == 1, (arguments, err)
    monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(tmp_path))
    code, _, err = run(capsys, folder, "Hi")
    assert code == 2 and "libleanfleet_ort.so" in err and err.count("\n") == 1


def test_export_errors_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "neither config.json nor a GGUF file" in capsys.readouterr().err
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "empty" / name).touch()
    assert cli.main(["export", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "holds 2 GGUF files" in capsys.readouterr().err
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=260))
    bloom.save_pretrained(tmp_path / "bloom")
    byte_tokenizer().save_pretrained(tmp_path / "bloom")
    assert cli.main(["export", str(tmp_path / "bloom"), str(tmp_path / "out")]) == 2
    assert "ALiBi" in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_export_says_what_it_fused_and_verified(folder, pretrained, tmp_path, capsys, monkeypatch):
    facts = json.loads((folder / "leanfleet.json").read_text())
    verified, fusions = facts["verified"], facts["fusions"]
    assert list(fusions) == [each.__name__ for each in PASSES] and fusions["pack_projections"] >= 2  # layers
    told = generate_commands.describe_fusions(fusions)
    assert told.startswith("fused: ") and f"pack_projections {fusions['pack_projections']}x" in told
    assert all((f"{name} " in told.partition(" (not found")[0]) == (count > 0) for name, count in fusions.items()), told
    assert 0 < verified["largest_difference"] < verified["bound"]
    assert generate_commands.describe_verification(verified).startswith(
        f"verified: logits of prompts and decode steps, alone and in a batch, differ from PyTorch's by "
        f"{verified['largest_difference']:.1e} at most"
    )

    def wrong(*arguments, **options):
        raise VerificationError("LlamaForCausalLM: the exported file is wrong")

    monkeypatch.setattr("leanfleet.export.verification.verify", wrong)
    capsys.readouterr()
    assert cli.main(["export", str(pretrained), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "leanfleet export: LlamaForCausalLM: the exported file is wrong"
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", str(pretrained), str(tmp_path / "out"), "--no-verify"]) == 0
    told = capsys.readouterr().err
    assert "not verified: --no-verify" in told and "\nfused: " in told
    assert cli.main(["export", str(pretrained), str(tmp_path / "plain"), "--no-verify", "--no-fuse"]) == 0
    assert "not fused: --no-fuse" in capsys.readouterr().err
    assert "fusions" not in json.loads((tmp_path / "plain" / "leanfleet.json").read_text())


def test_a_model_is_asked_once_what_its_files_should_say(pretrained, tmp_path, monkeypatch):
    asked, computed = [], verification._computed
    monkeypatch.setattr(verification, "_computed", lambda *arguments: asked.append(1) or computed(*arguments))
    assert cli.main(["export", str(pretrained), str(tmp_path / "both"), "--serve"]) == 0 and len(asked) == 1
    model, _ = load_pretrained(pretrained)
    export_decoder(model, tmp_path / "alone")
    assert len(asked) == 2  # anew: who calls it may have changed the weights


def test_bfloat16_says_that_it_needs_a_gpu(pretrained, tmp_path, capsys):
    assert cli.main(["export", str(pretrained), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    error = capsys.readouterr().err
    assert "verified: " in error and "bfloat16 needs a GPU: ONNX Runtime's CPU provider has no kernels for it" in error
    assert f'leanfleet generate {tmp_path / "out"} "Hello" --provider cuda' in error
    assert next_step("a", "bfloat16", serve=True).startswith(
        'leanfleet generate a "Hello" --provider cuda, or leanfleet engine build, or leanfleet serve a. bfloat16 needs a GPU'
    )
    assert next_step("a", "bfloat16", 2, True) == 'leanfleet generate a "Hello" --gpus 2, or leanfleet serve a --gpus 2'
    assert next_step("a", "float32", serve=True) == 'leanfleet generate a "Hello", or leanfleet serve a'


def test_what_an_export_warns_of_is_a_line(pretrained, tmp_path, capsys):
    command = ["export", str(pretrained), str(tmp_path / "out"), "--cache", "int4", "--serve", "--no-verify"]
    assert cli.main(command) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "arning" in line]
    assert len(lines) == 1 and lines[0].startswith("leanfleet export: warning: cache is 'int4': keys of int4 change")


def test_an_export_says_what_is_gone(pretrained, tmp_path, capsys):
    command = ["export", str(pretrained), str(tmp_path / "out"), "--no-verify"]
    assert cli.main([*command, "--serve"]) == 0 and "is gone" not in capsys.readouterr().err
    assert cli.main(command) == 0
    assert "serving.onnx of an earlier export is gone; leanfleet serve needs --serve" in capsys.readouterr().err
    assert not (tmp_path / "out" / "serving.onnx").exists()


def test_a_server_of_a_model_that_is_not_exported(pretrained):
    with pytest.raises(FileNotFoundError, match="leanfleet export .* NEW_FOLDER --serve$"):
        decoder_contract.read_facts(pretrained, decoder_contract.SERVING)
