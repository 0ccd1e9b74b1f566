"""Proves the stress test: plants faults in a copy of the code, one by one, and says which are found, and how soon.

python -m stress.faults [--seconds S] [--seed N] [--only WORD] [--cuda] [--build FOLDER]

--cuda plants those of CUDA kernels, which are built for this machine's GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support.ort_models import tool
from support.paths import ROOT

BUILD = ROOT / "build" / "faults"  # or another folder, see main

# (what is wrong, file of csrc or Python file of the package, the text there, the text in its place, operator, kind of file or act)
FAULTS = [
    ("the mask lets a token see the next key", "lean_attention/cpu_kernel.cpp", "keys_before(tile, seen.end);", "keys_before(tile, seen.end + 1);", "LeanAttention"),
    ("the window is one key too long", "lean_attention/cpu_kernel.cpp", "keys_before(tile, seen.begin);", "keys_before(tile, seen.begin - 1);", "LeanAttention"),
    ("the last column of a width that is no whole vector is lost", "lean_attention/cpu_kernel.cpp", "for (; i < n; ++i) out[i] = from_float<T>(factor * in[i]);", "for (; i + 1 < n; ++i) out[i] = from_float<T>(factor * in[i]);", "LeanAttention"),
    ("values are found with the keys' stride", "lean_attention/cpu_kernel.cpp", "cache_bytes(args.value_scales, args.value_strides.token, sizeof(T))", "cache_bytes(args.value_scales, args.key_strides.token, sizeof(T))", "LeanAttention"),
    ("positions beyond the rotary table take the row behind it", "lean_attention/cpu_kernel.cpp", "min32(position, args.rotary_positions - 1)", "min32(position, args.rotary_positions)", "LeanAttention"),
    ("partial sums are joined without their factors", "lean_attention/cpu_kernel.cpp", "total += factor * args.partial_sum[row];", "total += args.partial_sum[row];", "LeanAttention"),
    ("all heads of a group take the first one's sink", "lean_attention/cpu_kernel.cpp", "args.sinks[unit.head * args.group + row % args.group]", "args.sinks[unit.head * args.group]", "LeanAttention"),
    ("padding is left unwritten", "lean_attention/cpu_kernel.cpp", "if (segment.index == 0) write_padding", "if (segment.index == 1) write_padding", "LeanAttention"),
    ("appended rows of pages land a slot late", "lean_attention/cpu_kernel.cpp", "token = position % args.block;", "token = (position + 1) % args.block;", "LeanAttention"),
    ("scales of appended tokens are largest / 128", "lean_attention/schedule.h", "? 127.0f", "? 128.0f", "LeanAttention"),
    ("of two int4 the odd column is read first", "core/narrow_numbers.h", "(i % 2 * 4)", "(4 - i % 2 * 4)", "LeanAttention"),
    ("appended fp8 goes beyond 448, into NaN", "lean_attention/cpu_forms.h", "held(x, -448.0f, 448.0f)", "held(x, -512.0f, 512.0f)", "LeanAttention"),
    ("appended rows take the first head's scales of columns", "lean_attention/cpu_kernel.cpp", "scales.in + head * n : scales.in;", "scales.in : scales.in;", "LeanAttention"),
    ("the last of an odd number of values in pairs is lost", "lean_attention/cpu_kernel.cpp", "dv, (n + 1) / 2, scratch.output", "dv, n / 2, scratch.output", "LeanAttention"),
    ("threads share the scratch of the first", "lean_attention/op.cpp", "kernel(args, work, ranges, range, scratch + task * stride);", "kernel(args, work, ranges, range, scratch);", "LeanAttention"),
    ("the new tokens of a request may be more than its keys", "lean_attention/op.cpp", "if (tokens > keys && !no_share) return too_many(at(", "if (tokens < 0) return too_many(at(", "LeanAttention"),
    ("the state gives a token too old", "causal_conv/cpu_kernel.cpp", "piece.state + (i + j) * width + c", "piece.state + j * width + c", "CausalConv"),
    ("the last row of padding is left unwritten", "causal_conv/op.cpp", "static_cast<size_t>(args.tokens - own.end) * row_bytes", "static_cast<size_t>(args.tokens - own.end - (args.tokens > own.end)) * row_bytes", "CausalConv"),
    ("pool rows that nobody names are not kept", "core/requests.cpp", "if (!named[row])", "if (named[row] > 1)", "CausalConv"),
    ("tokens of no request are left unwritten", "core/requests.cpp", "return covered == tokens;", "return covered <= tokens;", "CausalConv"),
    ("two requests may name one state", "core/requests.cpp", "if (twin < i)", "if (twin > i)", "CausalLinearDecay"),
    ("a decay of nan or above 0 is taken", "core/requests.cpp", "right &= values[i] <= 0.0f;", "right &= values[i] == values[i];", "CausalLinearDecay"),
    ("a state row of another request is taken", "causal_linear_decay/cpu_kernel.cpp", "plan.args.state_index[item.piece.request] : item.piece.request;", "item.piece.request : item.piece.request;", "CausalLinearDecay"),
    ("a small negative denominator is held at plus eps", "causal_linear_decay/cpu_kernel.cpp", "(d < 0.0f ? -eps : eps)", "eps", "CausalLinearDecay"),
    ("an odd vector of a key's length is lost", "gated_delta_rule/cpu_kernel.cpp", "if (i < n) total = fma(load(a + i), load(b + i), total);", "", "GatedDeltaRule"),
    ("later rows do not count for a decay's gradient", "gated_delta_rule/cpu_kernel.cpp", "later = later + load(s.rows + t * s.pitch + c);", "later = load(s.rows + t * s.pitch + c);", "GatedDeltaRuleGrad"),
    ("the system turned is solved in blocks alone", "gated_delta_rule/cpu_kernel.cpp", "if (behind < n)", "if (behind > n)", "GatedDeltaRuleGrad"),
    ("the gradient of a query's length has the scale in it", "gated_delta_rule/cpu_kernel.cpp", "dot(row, grad, pitch) / factor;", "dot(row, grad, pitch);", "GatedDeltaRuleGrad"),
    ("a key's gradient is that of its first state", "gated_delta_rule/cpu_kernel.cpp", "for (int64_t i = 0; i < group; ++i) {", "for (int64_t i = 0; i < 1; ++i) {", "GatedDeltaRuleGrad"),
    ("query heads are shared out in turn", "gated_delta_rule/cpu_kernel.cpp", "(item.first_head + h) / (args.heads / args.q_heads);", "(item.first_head + h) % args.q_heads;", "GatedDeltaRule"),
    ("the state of a request without tokens is lost", "gated_delta_rule/cpu_kernel.cpp", "if (tokens == 0 && item.to != nullptr && item.to != item.from)", "if (tokens < 0)", "GatedDeltaRule"),
    ("a count of tokens before is off by one", "normalized_linear_attention/cpu_kernel.cpp", "x[width] * static_cast<float>(tokens_before);", "x[width] * static_cast<float>(tokens_before - 1);", "NormalizedLinearAttention"),
    ("gradients of unit rows keep what lies along them", "normalized_linear_attention/cpu_kernel.cpp", "if (norm > kUnitRowEps)\n", "if (norm < kUnitRowEps)\n", "NormalizedLinearAttentionGrad"),
    ("min_p leaves out what is exactly at the limit", "sample_tokens/cpu_kernel.cpp", "weights &= weights >= least;", "weights &= weights > least;", "SampleTokens"),
    ("a NaN does not make log-probabilities NaN", "sample_tokens/cpu_kernel.cpp", "*has_nan = any(nan);", "*has_nan = false;", "SampleTokens"),
    ("int4 count from 7 below", "block_linear/cpu_kernel.cpp", "kFour ? 8.0f : 128.0f", "kFour ? 7.0f : 128.0f", "BlockLinear"),
    ("the shift is multiplied by the integers' sum without their step", "block_linear/cpu_kernel.cpp", "args.sums[c] = rounded.step * sum(total);", "args.sums[c] = sum(total);", "BlockLinear"),
    ("the tail of a row takes the values for the gate", "gated_activation/cpu_kernel.cpp", "rest[0][k - i] = gate[k]", "rest[0][k - i] = up[k]", "GatedActivation"),
    ("sizes that must be equal are not compared", "core/op.cpp", "if (a == b) return {};", "return {};", "LeanAttention"),
    ("an axis of another size is not refused", "core/op.cpp", "} else if (bound != value) {", "} else if (bound > value) {", "CausalConv"),
    ("the type of a cache is not looked at", "core/op.cpp", "if (tensor.dtype == expected && !integer) return {};", "if (!integer) return {};", "LeanAttention"),
    ("ONNX Runtime's library leaves scratch out", "ort/ort_library.cpp", "context, needed.sync_bytes() + needed.scratch_bytes()", "context, needed.sync_bytes() + needed.scratch_bytes() / 2", "LeanAttention"),
    ("outputs that nobody reads have memory for one byte", "ort/ort_library.cpp", "ws.scratch<char>(output.elements() * element_size(output.dtype))", "ws.scratch<char>(1)", "CausalLinearDecay"),
    ("a type of metadata that there is not is not expected", "leanfleet/gguf_file.py", "UnicodeDecodeError, KeyError, OverflowError", "UnicodeDecodeError, OverflowError", "gguf"),
    ("weights begin right behind the header", "leanfleet/gguf_file.py", "start = -(-reader.at // alignment) * alignment", "start = reader.at", "gguf"),
    ("stop tokens may be anything", "leanfleet/decoder_contract.py", "lambda v: isinstance(v, list) and all(_number(t, -1) for t in v)", "lambda v: True", "decoder"),
    ("what a tokenizer raises comes out as it is", "leanfleet/files.py", "except (OSError, ImportError, MemoryError):", "except Exception:", "tokenizer"),
    ("an input that is absent counts as connected", "leanfleet/trt_plugins/__init__.py", "for t, name in zip(tensors, names) if name]", "for t, name in zip(tensors, names)]", "prepared"),
    ("text that is no UTF-8 is rewritten", "leanfleet/export/rewrite.py", "rewrite_check.text_fault(proto) or rewrite", "rewrite", "rewrite"),
    ("what a model's damaged bytes say is not decoded", "leanfleet/ort_ops/sessions.py", "if isinstance(error, UnicodeDecodeError):", "if error is None:", "node"),
    ("a body without a length has no limit", "leanfleet/serve.py", "if len(found) > self.limits.body:", "if len(found) < 0:", "llama"),
    ("any key will do", "leanfleet/serve.py", "if self.key is not None and not right:", "if self.key is None and not right:", "llama"),
    ("all answers of a request have one seed", "leanfleet/serve.py", '"seed": seed + index,', '"seed": seed,', "llama"),
    ("what may begin a stop text is told at once", "leanfleet/generation.py", "keep = next((n for n in range(most, 0, -1)", "keep = next((n for n in range(0, 0, -1)", "llama"),
    ("a known page that is read again may be given away", "leanfleet/pages.py", "            self._idle.pop(page, None)\n            pages.append(page)", "            pages.append(page)", "llama"),
    ("a page is known by its own tokens alone", "leanfleet/pages.py", "key = before, tuple(tokens)", "key = ROOT, tuple(tokens)", "llama"),
    ("an answer is of whoever asked first", "leanfleet/serve.py", "mail.send(pieces, (index, piece))", "mail.send(pieces, (0, piece))", "llama"),
    ("a lack of memory is told to be success", "capi/guarded.h", 'nothing is known of its outputs", what);', 'nothing is known of its outputs", what);\n    return 0;', "memory"),
    ("a thread that cannot be made ends the process", "core/thread_pool.cpp", "} catch (const std::exception&) {  // a limit", "} catch (const int&) {  // a limit", "memory"),
    ("a forked child takes its parent's threads for its own", "core/thread_pool.cpp", "[] { shared.store(nullptr); }", "[] {}", "fork"),
    ("calls of two threads share the pool at once", "core/thread_pool.cpp", "std::lock_guard<std::mutex> turn(turn_);", "", "come_and_go"),
    ("a dropped session leaves its kernel", "ort/ort_library.cpp", "delete static_cast<Kernel*>(kernel);", "(void)kernel;", "sessions"),
    ("a session's lack of memory goes on as an exception", "ort/ort_common.h", "} catch (const std::bad_alloc&) {", "} catch (const std::bad_alloc&) {\n    throw;", "session_memory"),
]  # fmt: skip

# The same of CUDA kernels, but for the last: what else a search needs.
RACE = ["--sanitizer", "racecheck"]
CUDA_FAULTS = [
    ("the last column of a merged row is lost", "core/merge_parts.cu", "for (int64_t i = lane; i < args.width;", "for (int64_t i = lane; i + 1 < args.width;", "MergeAttention", []),
    ("parts are merged without the sum of weights", "core/merge_parts.cu", "weights.of(lse)", "expf(lse - weights.largest)", "MergeAttention", []),
    ("rows that are no whole chunks are read in chunks", "gated_activation/kernel.cu", "bool wide = args.width / args.heads % kChunk == 0 && args.gate_pitch % kChunk == 0;", "bool wide = true;", "GatedActivation", []),
    ("a token before the request is taken from the input", "causal_conv/kernel.cu", "if (from >= back) load(", "if (from + 1 >= back) load(", "CausalConv", []),
    ("the tile's request is looked for from the first on", "causal_conv/kernel.cu", "while (q + 1 < args.requests && offset(args, q + 1) <= row) ++q;", "if (q + 1 < args.requests && offset(args, q + 1) < row) ++q;", "CausalConv", []),
    ("the last rows of padding are left unwritten", "causal_conv/kernel.cu", "for (; row < end; ++row)", "for (; row + 1 < end; ++row)", "CausalConv", []),
    ("partial outputs are added up before they are there", "causal_linear_decay/decode.cu", "    __syncthreads();\n    for (int i = threadIdx.x; i < group * tokens", "    for (int i = threadIdx.x; i < group * tokens", "CausalLinearDecay", []),
    ("the state of a pool's row of another request is read", "causal_linear_decay/decode.cu", "const int64_t row = named(), at", "const int64_t row = request, at", "CausalLinearDecay", []),
    ("rows beyond a key's width count for its length", "normalized_linear_attention/step.cu", "x[i] = i * 32 + lane < D ? static", "x[i] = i * 32 + lane < (D + 31) / 32 * 32 ? static", "NormalizedLinearAttention", []),
    ("queries are read before they are there", "normalized_linear_attention/step.cu", "  __syncthreads();\n  const float count", "  const float count", "NormalizedLinearAttention", RACE),
    ("sums of weights lose their carries", "sample_tokens/kernel.cu", "if (before + weight < before) atomicAdd(high + at, 1u);", "", "SampleTokens", []),
    ("a float32 token sees the next key", "lean_attention/kernel.cu", "j >= bounds[r].end", "j > bounds[r].end", "LeanAttention", []),
    ("a tile is overwritten while it is read", "lean_attention/kernel.cu", "      __syncthreads();  // the buffer has been read", "", "LeanAttention", RACE),
    ("a tile's copies are not waited for", "lean_attention/kernel.cu", "cp.async.wait_group 1;", "cp.async.wait_group 2;", "LeanAttention", RACE),
    ("interleaved pairs are turned as halves", "lean_attention/rotate.cu", "args.rotary_half % 8 == 0 && !args.rotary_interleaved && aligned(16)", "args.rotary_half % 8 == 0 && aligned(16)", "LeanAttention", []),
    ("appended rows take the first head's scales of columns", "lean_attention/append_narrow.cu", "scales.in[static_cast<int64_t>(head) * width + column + c]", "scales.in[column + c]", "LeanAttention", []),
    ("values are appended with the keys' strides", "lean_attention/append_narrow.cu", "value ? args.value_strides : args.key_strides, request", "args.key_strides, request", "LeanAttention", []),
]  # fmt: skip


def build():
    """Raises CalledProcessError with what the compiler says."""
    subprocess.run([tool("cmake"), "--build", BUILD, "-j", str(os.cpu_count())], check=True, capture_output=True, text=True)


def copy(source, target):
    """Leaves files alone that are the same, and gives others, such as one with a fault of a run that was stopped, a new time: the
    build goes by times."""
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if not (source / path.name).exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in source.iterdir():
        if path.is_dir():
            copy(path, target / path.name)
        elif not (target / path.name).exists() or (target / path.name).read_bytes() != path.read_bytes():
            shutil.copyfile(path, target / path.name)


def prepare(cuda):
    """A copy of csrc and a build of it, with CUDA kernels for this machine's GPU or without, and a copy of the package."""
    for name in ("csrc", "leanfleet"):
        copy(ROOT / name, BUILD / name)
    # An editable installation puts its own finder before the path.
    (BUILD / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
    )
    command = [tool("cmake"), "-G", "Ninja", "-S", BUILD / "csrc", "-B", BUILD]
    if cuda:
        import torch

        number = "".join(map(str, torch.cuda.get_device_capability()))
        # The C interface's library is all that cases of runtime cuda call.
        command += [
            "-DLEANFLEET_CUDA=ON",
            f"-DLEANFLEET_CUDA_ARCHS={number}-real",
            "-DLEANFLEET_ORT=OFF",
            "-DLEANFLEET_TRT=OFF",
        ]
    else:
        command.append("-DLEANFLEET_CUDA=OFF")
    command += ["-DCMAKE_CXX_FLAGS=-w", "-DCMAKE_CUDA_FLAGS=-w"]  # a fault may leave a variable unused
    subprocess.run([*command, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"], check=True, capture_output=True)
    build()


def search(op, seed, seconds, more=()):
    """(seconds that it took, what was found, None: nothing)."""
    started = time.monotonic()
    command = [sys.executable, "-m", "stress", "--first", "--jobs", "1", "--seed", str(seed), "--seconds", str(seconds)]
    hidden = {} if "cuda" in more else {"CUDA_VISIBLE_DEVICES": ""}  # of which this build knows nothing
    paths = [str(BUILD), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [*command, "--op", op, *more],
        env={**os.environ, "LEANFLEET_LIBRARY_DIR": str(BUILD), "PYTHONPATH": os.pathsep.join(paths)} | hidden,
        capture_output=True,
        text=True,
        cwd=BUILD,
    )
    found = re.search(r"^FOUND \S+ (.*)$", result.stdout, re.MULTILINE)
    if not found and result.returncode:
        raise RuntimeError(result.stdout + result.stderr)
    cases = re.search(r"^(\d+) cases", result.stdout, re.MULTILINE)
    return time.monotonic() - started, int(cases[1]), found[1] if found else None


def path_of(file, tree):
    """The file of a fault in a copy, or in the repository."""
    return tree / file if file.endswith(".py") else tree / "csrc" / file


def main():
    parser = argparse.ArgumentParser(prog="python -m stress.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long a fault is looked for; 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults with this in their words or file")
    parser.add_argument("--cuda", action="store_true", help="those of CUDA kernels")
    parser.add_argument("--build", type=Path, help="where the copy is built; build/faults")
    args = parser.parse_args()
    global BUILD  # which the functions above go by
    BUILD = args.build.absolute() if args.build else BUILD
    prepare(args.cuda)
    missed, faults = [], [(*f, ()) for f in FAULTS]
    if args.cuda:
        faults = [(*f, ["--runtime", "cuda", *more]) for *f, more in CUDA_FAULTS]
    for words, file, old, new, op, more in faults:
        if args.only not in words + file:
            continue
        path = path_of(file, BUILD)
        right = path.read_text()
        assert right.count(old) == 1, f"{file} has '{old}' {right.count(old)} times"
        path.write_text(right.replace(old, new))
        try:
            build()  # also what an earlier fault left
            seconds, cases, found = search(op, args.seed, args.seconds, more)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{words}: {error.stdout}") from error
        finally:
            path.write_text(right)
        missed += [] if found else [words]
        print(f"{'found' if found else 'MISSED':6} {seconds:4.0f} s {cases:5} cases  {words}: {found or ''}"[:220], flush=True)
    print(f"{len(missed)} missed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
