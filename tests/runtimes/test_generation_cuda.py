"""Generation on the CUDA provider: caches and states on the device, decode steps with and without CUDA graphs.

Run it on a machine with a GPU, onnxruntime-gpu and a leanfleet built with CUDA: there it fails rather than skips.
"""

import threading

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from leanfleet.driver import Device, free_memory
from leanfleet.export import LinearDecoder, LinearDecoderConfig, export_decoder
from leanfleet.export.serving import export_for_serving
from leanfleet.lookup import Lookup
from leanfleet.ort_ops.generation import _Steps, generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from support import decoders

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCABULARY = 211
CUDA = ["CUDAExecutionProvider"]
EXACT = [("CUDAExecutionProvider", {"use_tf32": "0"})]  # for requests that draw: TF32 moves the borders between tokens


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=384,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=VOCABULARY,
            intermediate_size=128,
            max_position_embeddings=2048,
            eos_token_id=2,
        )
    )


def minimax():
    return transformers.AutoModelForCausalLM.from_config(
        transformers.MiniMaxConfig(
            hidden_size=384,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=VOCABULARY,
            intermediate_size=64,
            max_position_embeddings=2048,
            pad_token_id=0,
            num_local_experts=2,
            num_experts_per_tok=2,  # both, or a near tie of two experts would turn a rounding into another answer
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    )


def retnet():
    return LinearDecoder(
        LinearDecoderConfig(
            "retnet",
            VOCABULARY,
            hidden_size=384,
            num_hidden_layers=2,
            num_attention_heads=6,
            feed_forward_size=128,
            eos_token_id=2,
        )
    )


MODELS = {"llama": llama, "minimax": minimax, "retnet": retnet}


def made(kind):
    """A model with weights that tell its tokens apart; of a mixture every token takes all experts, or a near tie of two would turn
    a rounding into another answer."""
    if kind not in decoders.HYBRIDS:
        model = MODELS.get(kind, llama)().eval()
    else:
        experts = {"num_experts_per_tok": 4} if "num_experts_per_tok" in decoders.HYBRIDS[kind][1] else {}
        model = decoders.hybrid(kind, **experts).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)
    return model


@pytest.fixture(scope="module", params=(*MODELS, *decoders.HYBRIDS, "int8"))
def folder(request, tmp_path_factory):
    assert CUDA[0] in onnxruntime.get_available_providers(), "install onnxruntime-gpu to test on this GPU"
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp(request.param)
    export_decoder(made(request.param), folder, cache="int8" if request.param == "int8" else None)
    return folder


def prompts(*lengths):
    generator = np.random.default_rng(1)
    return [generator.integers(3, VOCABULARY, n).tolist() for n in lengths]


def run(folder, asked, count=24, **options):
    """(tokens, logits of each step [steps,B,vocabulary])."""
    seen = []
    decoder = load_decoder(folder, **options)
    tokens, _ = generate(decoder, asked, count, stop_tokens=[], on_logits=lambda x: seen.append(x.copy()))
    return tokens, np.stack(seen), decoder


def assert_same(found, expected):
    """Logits of a step agree while the tokens so far do. TF32 and another order of sums cost a few thousandths."""
    for row in range(found[1].shape[1]):
        for step in range(len(found[1])):
            a, b = found[1][step, row], expected[1][step, row]
            assert np.abs(a - b).max() <= 2e-2 * np.abs(b).max(), (row, step, np.abs(a - b).max())
            if found[0][row][step] != expected[0][row][step]:
                best = np.sort(b)[-2:]
                assert best[1] - best[0] <= 4e-2 * np.abs(b).max(), "another token, and not a near tie"
                break


def test_cuda_gives_what_the_cpu_gives(folder):
    asked = prompts(1, 65, 17, 200)
    assert_same(run(folder, asked, providers=CUDA), run(folder, asked, providers=["CPUExecutionProvider"]))


def test_caches_stay_on_the_device_and_in_place(folder):
    decoder = load_decoder(folder, providers=CUDA)
    steps = _Steps(decoder, 2, 64)
    assert all(v.device_name() == "cuda" for values in steps.buffers for v in values)
    assert [len(values) for values in steps.buffers] == [1] * len(decoder.caches)
    addresses = [values[0].data_ptr() for values in steps.buffers]
    lens = np.array([3, 1], np.int32)
    steps.run(np.full((2, 3), 5), lens, lens)
    outputs = {o.data_ptr() for o in steps.bindings[0].get_outputs()[:-1]}
    assert outputs == set(addresses)


def test_graphs_replay_what_plain_steps_give(folder):
    """Token for token and bit for bit nearly: the captured step is the same kernels. States are double-buffered, so that the
    runs before the capture, which repeat a step, leave no trace; a second batch of the same size uses the same graphs."""
    asked = prompts(9, 70, 33)
    plain = run(folder, asked, 40, providers=CUDA)
    tokens, logits, decoder = run(folder, asked, 40, cuda_graph=True)
    assert decoder.captured, "no step was captured"
    assert tokens == plain[0] and np.abs(logits - plain[1]).max() <= 1e-4 * np.abs(plain[1]).max()
    steps = next(iter(decoder.captured.values()))
    for cache, values in zip(decoder.caches, steps.buffers, strict=True):
        assert len(values) == (1 if "capacity" in cache.shape else 2)
    again, _ = generate(decoder, asked, 40, stop_tokens=[])
    assert again == tokens and len(decoder.captured) == 1
    other = prompts(5, 6)
    assert generate(decoder, other, 30, stop_tokens=[])[0] == run(folder, other, 30, providers=CUDA)[0]
    assert len(decoder.captured) == 2
    assert generate(decoder, asked, 40, stop_tokens=[])[0] == tokens, "graphs of two batches disturb each other"


def test_a_graph_serves_requests_that_stop(folder):
    asked = prompts(4, 12)
    free = run(folder, asked, 20, providers=CUDA)[0]
    stop = free[0][5]
    found, _ = generate(load_decoder(folder, cuda_graph=True), asked, 20, stop_tokens=[stop])
    expected, _ = generate(load_decoder(folder, providers=CUDA), asked, 20, stop_tokens=[stop])
    assert found == expected and len(found[0]) <= 6


def test_half_precision(tmp_path):
    """float16 weights and caches: logits of the float32 model within what rounding weights and activations costs."""
    torch.manual_seed(5)
    model = llama().eval()
    export_decoder(model, tmp_path / "float32")
    export_decoder(model.half(), tmp_path / "float16")
    asked = prompts(100)
    expected, found = run(tmp_path / "float32", asked, 1, providers=CUDA), run(tmp_path / "float16", asked, 8, cuda_graph=True)
    assert np.abs(found[1][0] - expected[1][0]).max() <= 2e-2 * np.abs(expected[1][0]).max()


@pytest.mark.parametrize("bias", (False, True))
def test_rounds_of_captured_steps_in_half_precision(tmp_path, bias):
    """Products of few rows count parts of their sums in words that are zero between launches. Pieces of prompts are captured
    before steps of answers ask for theirs: each round overwrites what the provider's memory has had free since."""
    torch.manual_seed(5)
    model = llama()
    if bias:
        config = transformers.Qwen2Config(**{k: v for k, v in model.config.to_dict().items() if k != "model_type"})
        model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)  # tokens are told apart
    export_for_serving(model.half(), tmp_path)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.node]
    assert kinds.count("Linear") == 8 and "MatMul" not in kinds
    asked = prompts(70, 190, 130, 33)
    options = {"pages": 60, "max_requests": 4, "step_tokens": 64}
    plain, captured = (
        ContinuousBatch(tmp_path, providers=CUDA, **options),
        ContinuousBatch(tmp_path, cuda_graph=True, **options),
    )
    for _ in range(4):
        found = []
        for batch in (plain, captured):
            requests = [batch.add(prompt, 30, stop_tokens=()) for prompt in asked]
            batch.run()
            found.append([request.tokens for request in requests])
        assert found[0] == found[1] and all(len(tokens) == 30 for tokens in found[0])
    assert len(captured.captured) > 2, "no step was captured"


@pytest.mark.parametrize("speculate", (0, 3))
@pytest.mark.parametrize("kind", (*MODELS, *decoders.HYBRIDS, "int8"))
def test_continuous_batch_in_graphs(tmp_path, monkeypatch, kind, speculate):
    """Captured steps and others take turns over the same pools of pages and states, which hold anything at first, and give what
    plain steps give; so do guesses, and requests that begin alike."""
    torch.manual_seed(5)
    export_for_serving(made(kind), tmp_path, cache="int8" if kind == "int8" else None)
    asked, answers = prompts(9, 70, 33, 1, 140, 18), [30, 12, 40, 5, 21, 33]
    asked += [[*asked[4][:100], *asked[0]], [*asked[4][:100], *asked[2]], [*asked[4][:100], *asked[3]]]
    answers += [9, 12, 20]
    found, texts = [], []

    def guess(lookup, count):  # what is right, and at each third place something else
        answer = next((text for text in texts if text[: len(lookup.text)] == lookup.text), [])[len(lookup.text) :][:count]
        return [token if (len(lookup.text) + i) % 3 else 5 for i, token in enumerate(answer)]

    monkeypatch.setattr(Lookup, "guess", guess)
    for options in ({"providers": EXACT}, {"providers": EXACT, "cuda_graph": True, "speculate": speculate}):
        batch = ContinuousBatch(tmp_path, pages=60, max_requests=4, step_tokens=64, **options)
        requests = [
            batch.add(prompt, answer, stop_tokens=(), temperature=0.5 * (i % 2), seed=i)
            for i, (prompt, answer) in enumerate(zip(asked, answers))
        ]
        batch.run()
        found.append([r.tokens for r in requests])
        texts += [prompt + request.tokens for prompt, request in zip(asked, requests)]
    assert found[0] == found[1] and [len(t) for t in found[1]] == answers
    assert speculate or {rows for _, rows, *_ in batch.captured} >= {1, 4}, "no step was captured"
    assert batch.captured and batch.shared_tokens >= 90
    assert not speculate or batch.guessed > batch.guessed_right > 20


@pytest.mark.parametrize("kind", (*MODELS, "qwen3.5", "falcon-h1"))
def test_a_batch_as_the_server_opens_it(tmp_path, kind):
    """Tried in one thread and run in another, for which ONNX Runtime captures anew; with pages by the memory that is there."""
    torch.manual_seed(5)
    export_for_serving(made(kind), tmp_path)
    asked, found = prompts(9, 70, 33), []
    free = free_memory(Device("cuda"))
    for options in ({"pages": 60, "providers": CUDA}, {"cuda_graph": True}):
        batch = ContinuousBatch(tmp_path, max_requests=4, step_tokens=64, **options)
        if "cuda_graph" in options:
            batch.try_capture()
            tried = batch.captured
            assert tried and batch.pool.count == 4 * -(-batch.max_positions // batch.block)
            assert batch.pool_bytes <= 0.75 * free and free_memory(Device("cuda")) >= 0.2 * free
        requests = [batch.add(prompt, 12, stop_tokens=()) for prompt in asked]
        thread = threading.Thread(target=batch.run)
        thread.start()
        thread.join()
        found.append([r.tokens for r in requests])
    assert batch.captured and batch.captured is not tried
    assert found[0] == found[1] and all(len(tokens) == 12 for tokens in found[0])
