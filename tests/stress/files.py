"""Files that were changed: folders of decoders, also for serving, and of transformers, models, rewritten and prepared ones,
tokenizers, GGUF files, fields of TensorRT's plugins. What reads them must work and give the right result, or end with one clear
error of its own.

A case says which folder is changed and how: stress.trees. Each runs in a process of its own, forked from one that has imported
everything, with limits on time and memory.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import onnx

from leanfleet import cli, gguf_file, native, parity, spec, trial, trt_plugins, variants
from stress import runtimes, trees

SECONDS, CPU_SECONDS = 60, 40  # longer is a hang
MEMORY = 4 << 30  # beside what the process has already
NEW_TOKENS = 6
PROMPT = "Hi, \u00e9!"


class Wrong(Exception):
    """What was read is not what it should be, or was refused in another way than it should be."""


@dataclasses.dataclass(frozen=True)
class Case:
    """kind: of KINDS. base: which of its folders. changes: [file, *a change of stress.trees] each."""

    kind: str
    base: str
    changes: tuple = ()

    op = property(lambda self: self.kind)
    runtime = "files"

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text):
        fields = json.loads(text)
        return Case(fields["kind"], fields["base"], tuple(fields.get("changes", ())))


# Drawing


def place(index):
    """(kind, "files") of the case with this index: those that this machine can run, the cheap ones more often."""
    return ORDER[index % len(ORDER)], Case.runtime


PACKAGES = ("gguf", "torch", "transformers")  # that files are made with


def missing():
    """Kinds that this machine cannot run."""
    return set() if runtimes.has_plugins() else {"fields"}


def draw(seed, index):
    source = random.Random(f"{seed}:files:{index}")
    kind = place(index)[0]
    while True:
        with MAKING:
            base = source.choice(KINDS[kind].bases())
            content = contents(kind, base)
        changes = []
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            name = source.choice([n for n in content for _ in range(KINDS[kind].weights.get(n, 1))])
            change = draw_change(source, name, content[name])
            if change is not None:
                changes.append([name, *change])
        case = Case(kind, base, tuple(changes))
        with contextlib.suppress(trees.Impossible):
            changed = mutated(case)
            if any(changed[name] != content[name] for name in content):
                return Case.from_json(case.to_json())


def draw_change(source, name, data):
    suffix = name[name.rfind(".") :]
    if suffix not in trees.FORMATS or (suffix != ".fields" and source.random() < 0.25):
        return trees.draw_bytes_change(source, data)
    return trees.draw_change(source, tree_of(suffix, data), suffix in (".json", ".safetensors", ".fields"))


@functools.lru_cache(64)
def tree_of(suffix, data):
    return trees.FORMATS[suffix][0](data)


def simpler(case):
    """Cases with one change less."""
    if len(case.changes) > 1:
        for i in range(len(case.changes)):
            yield dataclasses.replace(case, changes=case.changes[:i] + case.changes[i + 1 :])


def mutated(case):
    """{name: bytes, None where the file is gone}. Raises trees.Impossible."""
    content = dict(contents(case.kind, case.base))
    for name in {c[0] for c in case.changes}:
        content[name] = trees.applied(name, content[name], [c[1:] for c in case.changes if c[0] == name])
    return content


# The folders that are changed: made once a run, whoever needs them first


@functools.cache
def store():
    """The folder of all bases; processes that this one starts take the same."""
    if (told := os.environ.get("LEANFLEET_STRESS_FILES")) is None:
        folder = tempfile.TemporaryDirectory(prefix="leanfleet-stress-")
        os.environ["LEANFLEET_STRESS_FILES"] = folder.name
        store.owned = folder  # removed with this process
        return Path(folder.name)
    return Path(told)


MAKING = threading.Lock()  # of models: torch exports for one thread at a time, and a run draws in several


@functools.cache
def contents(kind, base):
    """{name: bytes} of a base."""
    folder = store() / f"{kind}-{base}".replace("/", "-")
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=store()))
        KINDS[kind].make(base, part)
        with contextlib.suppress(OSError):  # another process was faster
            part.rename(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@dataclasses.dataclass(frozen=True)
class Kind:
    """bases: names. make(base, folder): writes one. check(folder, case): raises Wrong, or what must not be raised, and returns
    a word for how it ended. weights: of files, how often they are changed."""

    bases: object
    make: object
    check: object
    weights: dict = dataclasses.field(default_factory=dict)


# How something may end


def is_ours(error):
    """Whether an error is of a type that documents promise. Subclasses tell that nobody expected it: UnicodeDecodeError is a
    ValueError, RecursionError a RuntimeError."""
    kind = type(error)
    return (
        kind in (ValueError, RuntimeError, ImportError, ModuleNotFoundError)
        or isinstance(error, OSError)
        or kind.__module__.startswith(("leanfleet", "onnxruntime"))
    )


def refuse_error(error):
    """Raises Wrong for an error that is not ours."""
    if not is_ours(error):
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        raise Wrong(f"{type(error).__name__} at {at}: {str(error)[:300]}") from error
    if not str(error).strip() or len(str(error)) > 3000:
        raise Wrong(f"{type(error).__name__} with {len(str(error))} characters: {str(error)[:200]}") from error


def attempt(function, *args, **kwargs):
    """(its result, None) or (None, the error), which is one of ours."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        refuse_error(error)
        return None, error


def command(*argv):
    """(exit code, what it printed) of leanfleet's command line. Raises Wrong where it does not end as its document says."""
    caught = []
    explain = cli._explanation

    def explained(error, name):
        caught.append(error)
        return explain(error, name)

    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(cli, "_explanation", explained),
        ):
            code = cli.main([str(a) for a in argv])
    except BaseException as error:
        raise Wrong(f"leanfleet {argv[0]} ends with {type(error).__name__}: {str(error)[:300]}") from error
    for error in caught:
        refuse_error(error)
    if code not in (0, 2):
        raise Wrong(f"leanfleet {argv[0]} ends with {code}: {err.getvalue()[:500]}")
    line = err.getvalue()
    if code == 2 and (not line.startswith(f"leanfleet {argv[0]}: ") or line.count("\n") != 1 or len(line) > 3000):
        raise Wrong(f"leanfleet {argv[0]} prints no single line: {line[:500]}")
    return code, out.getvalue()


def differ(found, expected, tolerance):
    """What is different about two arrays, or None."""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} in place of {list(expected.shape)}"
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not finite.all():
        return None  # what operators make of such numbers is for the calls to judge
    worst = float(np.abs(a - b).max(initial=0.0)) if np.isfinite(a).all() else float("inf")
    return f"off by {worst:.3g}" if worst > tolerance * max(1.0, float(np.abs(b).max(initial=0.0))) else None


def plain_session(model):
    """Of ONNX Runtime alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


# Decoder folders: leanfleet generate


def make_decoder(base, folder):
    import torch
    import transformers

    from leanfleet.export import export_decoder
    from support.decoders import byte_tokenizer

    torch.manual_seed(3)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=260)
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=100, eos_token_id=256)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    export_decoder(model, folder, byte_tokenizer(), cache="int8" if base == "int8" else None)
    proto = onnx.load(folder / "model.onnx")
    (folder / "model.onnx").unlink()
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=256)


def tokens_of(folder, library=True):
    from leanfleet import generation
    from leanfleet.ort_ops import generate, load_decoder

    decoder = load_decoder(folder, providers=["CPUExecutionProvider"], library=library)
    prompt = generation.encode(decoder.tokenizer, PROMPT)
    return prompt, generate(decoder, [prompt], max_new_tokens=NEW_TOKENS)[0][0]


def check_decoder(folder, case):
    code, _ = command("generate", folder, PROMPT, "--max-tokens", NEW_TOKENS, "--provider", "cpu")
    found, error = attempt(tokens_of, folder)
    if (error is None) != (code == 0):
        raise Wrong(f"leanfleet generate ends with {code}, and load_decoder with {error!r}"[:600])
    if code:
        return "refused"
    prompt, tokens = found
    names = {c[0] for c in case.changes}
    if not {"model.onnx", "model.onnx.data"} & names:
        with tempfile.TemporaryDirectory() as whole:  # the same model with facts that tell no end
            for name, data in contents(case.kind, case.base).items():
                (Path(whole) / name).write_bytes(data)
            for name in names - {"leanfleet.json"}:
                (Path(whole) / name).unlink(missing_ok=True)
                if (folder / name).exists():
                    shutil.copy(folder / name, whole)
            expected = tokens_of(whole)
        if prompt != expected[0] or tokens != expected[1][: len(tokens)]:
            raise Wrong(f"other facts, other tokens: {prompt} {tokens} in place of {expected}")
        return "right"
    return compare_with_bodies(folder, prompt)


def compare_with_bodies(folder, prompt):
    """Logits of the prompt by our kernels and by function bodies made anew."""
    from leanfleet.export import function_bodies
    from leanfleet.ort_ops import make_session

    path = folder / "model.onnx"
    try:
        import onnx_ir

        anew = folder / "anew.onnx"
        onnx_ir.save(function_bodies.attach(onnx_ir.load(path)), anew)
        judge = plain_session(str(anew))
    except Exception:  # what nobody else can run cannot be compared
        return "works"
    session = make_session(str(path), providers=["CPUExecutionProvider"])
    feed = {}
    for value in session.get_inputs():
        shape = [n if isinstance(n, int) else {"batch": 1, "tokens": len(prompt)}.get(n, len(prompt) + 2) for n in value.shape]
        if value.name == "input_ids":
            feed[value.name] = np.array([prompt], np.int64)
        elif value.name in ("seq_lens", "query_lens"):
            feed[value.name] = np.array([len(prompt)], np.int32)
        else:
            kinds = {"tensor(float)": np.float32, "tensor(int8)": np.int8}
            feed[value.name] = np.zeros(shape, kinds[value.type])
    try:
        expected = judge.run(["logits"], feed)[0]
    except Exception:
        return "works"
    if (words := differ(session.run(["logits"], feed)[0], expected, 1e-3)) is not None:
        raise Wrong(f"kernels and function bodies differ: logits are {words}")
    return "right"


# The same with a graph for continuous batching


def make_serving(base, folder):
    import torch
    import transformers

    from leanfleet.export import export_decoder
    from leanfleet.export.serving import add_serving

    torch.manual_seed(3)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=260)
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=100, eos_token_id=256)
    model = transformers.LlamaForCausalLM(config).eval()
    export_decoder(model, folder)
    add_serving(model, folder)


def served(folder):
    from leanfleet.ort_ops.serving import ContinuousBatch

    batch = ContinuousBatch(folder, pages=8, max_requests=2, step_tokens=32, providers=["CPUExecutionProvider"])
    requests = [batch.add([1, 2, 3], max_new_tokens=NEW_TOKENS), batch.add([4, 5], max_new_tokens=2)]
    batch.run()
    return [r.tokens for r in requests]


def check_serving(folder, case):
    found, error = attempt(served, folder)
    if error is not None:
        return "refused"
    if {c[0] for c in case.changes} <= {"leanfleet.json"}:
        with tempfile.TemporaryDirectory() as whole:
            for name, data in contents(case.kind, case.base).items():
                (Path(whole) / name).write_bytes(data)
            expected = served(whole)
        if any(f != e[: len(f)] for f, e in zip(found, expected, strict=True)):
            raise Wrong(f"other facts, other tokens: {found} in place of {expected}")
        return "right"
    return "works"


# Models of one node: sessions


@functools.cache
def calls_of(op):
    return [(ranks, attrs) for ranks, attrs in variants.calls(spec.all_specs()[op])]


def node_bases():
    return [f"{op} {i}" for op in spec.all_specs() for i in range(len(calls_of(op)))]


def node_of(base):
    name, number = base.split()
    op = spec.all_specs()[name]
    ranks, attrs = calls_of(name)[int(number)]
    return variants.node_model(op, variants.input_shapes(op, ranks, attrs, 1), attrs)


def make_node(base, folder):
    (folder / "model.onnx").write_bytes(node_of(base).SerializeToString())


def check_node(folder, case):
    import onnx_ir
    import onnxruntime

    from leanfleet.export import function_bodies
    from leanfleet.ort_ops import make_session

    path = folder / "model.onnx"
    feed = parity.make_inputs(node_of(case.base), seed=1)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session, error = attempt(make_session, path, ["CPUExecutionProvider"], options)
    if error is not None:
        return "refused"
    feed = {i.name: feed[i.name] for i in session.get_inputs() if i.name in feed}
    found, error = attempt(trial.run_session, session, feed)
    if error is not None:
        return "refused"
    try:
        model = onnx.load(path)
        ours = {(n.op_type, n.name) for n in trial.all_leanfleet_nodes(model)}
        judge = plain_session(onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model))).SerializeToString())
        expected = trial.run_session(judge, feed)
    except Exception:  # what nobody else can run cannot be compared
        return "works"
    for name, array in expected.items():
        if (words := differ(found[name], array, 1e-2)) is not None:
            raise Wrong(f"{ours}: {name} is {words} beside the function body's")
    return "right"


# leanfleet rewrite


@functools.cache
def rewrite_sources():
    from support.rewrite_models import sources

    return sources()


def make_rewrite(base, folder):
    (folder / "model.onnx").write_bytes(rewrite_sources()[base][0].SerializeToString())


def check_rewrite(folder, case):
    from leanfleet.export import rewrite_check

    to, target = rewrite_sources()[case.base][1], folder / "out.onnx"
    code, _ = command("rewrite", folder / "model.onnx", "-o", target, "--to", to)
    if target.exists() != (code == 0):
        raise Wrong(f"leanfleet rewrite ends with {code}, and there is {'a' if target.exists() else 'no'} file")
    if code:
        return "refused"
    if fault := rewrite_check.structural_fault(onnx.load(target, load_external_data=False), folder):
        raise Wrong(f"the rewritten model is damaged: {fault}")
    return "right"  # the command itself ran both and compared


# leanfleet engine prepare


def make_prepared(base, folder):
    from leanfleet.trt_plugins import prepare

    name, number, state = base.split()
    model = node_of(f"{name} {number}")
    (folder / "model.onnx").write_bytes((prepare(model) if state == "prepared" else model).SerializeToString())


def prepared_bases():
    return [f"{base} {state}" for base in node_bases() for state in ("plain", "prepared")]


def check_prepared(folder, case):
    target = folder / "out.onnx"
    with mock.patch.object(trt_plugins, "get_plugin_path", lambda: "libleanfleet_trt.so"):  # which may be missing
        code, _ = command("engine", "prepare", folder / "model.onnx", target)
    if target.exists() != (code == 0):
        raise Wrong(f"leanfleet engine prepare ends with {code}, and there is {'a' if target.exists() else 'no'} file")
    if code:
        return "refused"
    before, after = (onnx.load(path, load_external_data=False) for path in (folder / "model.onnx", target))
    for old, new in zip(before.graph.node, after.graph.node):  # others, as one whose domain is damaged, stay
        if old.domain != spec.DOMAIN:
            continue
        op = spec.all_specs().get(old.op_type)
        if op is None:
            raise Wrong(f"a node of leanfleet's domain that is no operator was prepared: {old.op_type}")
        for key, tensors, given, kept in (
            ("connected_inputs", op.inputs, old.input, new.input),
            ("connected_outputs", op.outputs, old.output, new.output),
        ):
            names = [a.s.decode().split(",") for a in new.attribute if a.name == key]
            expected = [(t.name, name) for t, name in zip(tensors, given) if name]
            if len(given) > len(tensors):
                raise Wrong(f"a node with {len(given)} {key} was prepared; {op.name} has {len(tensors)}")
            if names != [[name for name, _ in expected] or [""]] or list(kept) != [name for _, name in expected]:
                raise Wrong(f"{key} are {names} of {list(kept)}; expected {expected}")
    return "right"


# Tokenizers


def make_tokenizer(base, folder):
    from support.decoders import byte_tokenizer

    byte_tokenizer(chat=base == "chat").save_pretrained(folder)


def text_of(tokenizer, ids):
    from leanfleet.generation import TextStream

    stream = TextStream(tokenizer)
    return "".join(map(stream.add, ids)) + stream.finish()


def check_tokenizer(folder, case):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from leanfleet import generation

    tokenizer, error = attempt(generation.load_tokenizer, folder)
    if error is not None:
        return "refused"
    for chat in (None, False):
        ids, error = attempt(generation.encode, tokenizer, PROMPT, chat)
        if error is not None:
            continue
        attempt(text_of, tokenizer, ids)
        if chat is False:
            if (folder / "tokenizer_config.json").exists():
                judge = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            else:
                judge = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            if ids != judge(PROMPT)["input_ids"]:
                raise Wrong(f"tokens are {ids}; transformers has {judge(PROMPT)['input_ids']}")
    return "right"


# Folders of transformers


def make_model(base, folder):
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=260)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=32, **sizes)).save_pretrained(folder)
    make_tokenizer("chat", folder)


def check_model(folder, case):
    from leanfleet import generate

    _, error = attempt(generate.load_pretrained, folder)
    return "works" if error is None else "refused"


# GGUF files

GGUF = {"llama": {}, "kinds": dict(kinds=("Q4_K", "Q6_K", "Q8_0", "F32")), "qwen2": dict(architecture="qwen2", tied=False)}


def make_gguf(base, folder):
    from support import gguf_files

    gguf_files.write(folder / "model.gguf", **GGUF[base])


def check_gguf(folder, case):
    from gguf import GGUFReader

    from leanfleet.export import gguf_model

    path = folder / "model.gguf"
    read, error = attempt(gguf_file.read, path)
    if error is not None:
        return "refused"
    try:
        judge = {t.name: np.array(t.data).tobytes() for t in GGUFReader(path).tensors}
    except Exception:  # the other reader trusts what it reads, and falls over in its own ways
        judge = {}
    for name, data in judge.items():
        if name not in read.tensors or read.tensors[name].data.tobytes() != data:
            raise Wrong(f"{name} has other bytes than the package gguf reads")
    from leanfleet import generate

    generate.quieten_transformers()
    found, error = attempt(generate.load_pretrained, path, keep=True)
    if error is not None:
        return "refused"
    _, error = attempt(gguf_model.described, path, found[0])
    if error is not None:
        raise Wrong(f"the model can be read and not described: {error}")
    return "works"


# Fields of TensorRT's plugins

PLANNED = 0x1234, 256  # bytes that an engine plans for a layer
TYPES = {"FLOAT32": 1, "INT32": 5, "CHAR": 6, "INT64": 10}  # nvinfer1::PluginFieldType


def make_fields(base, folder):
    """What a prepared node says where an engine is built, or what an engine holds."""
    name, phase = base.split()
    op = spec.all_specs()[name]

    def field(name, kind, data):
        width = {"CHAR": 1, "INT64": 8}.get(kind, 4)
        return {"name": name, "type": TYPES[kind], "length": len(data) // width, "data": data.hex()}

    def of_attribute(a):
        if a.type == "string":
            return field(a.name, "CHAR", a.default.encode() + b"\0")
        if a.type == "float":
            return field(a.name, "FLOAT32", struct.pack("<f", a.default))
        return field(a.name, "INT64", struct.pack("<q", a.default))

    fields = [of_attribute(a) for a in op.attrs]
    connected = ",".join(t.name for t in op.inputs if not t.optional)
    fields.append(field("connected_inputs", "CHAR", connected.encode() + b"\0"))
    if phase == "runtime":
        fields.append(field("node", "CHAR", b"layers.3\0"))
        fields.append(field("planned", "INT64", struct.pack("<qq", *PLANNED)))
    (folder / "plugin.fields").write_text(json.dumps({"fields": fields}))


def _word(name):
    return "-" if not name else name.encode().hex()


def _bytes_word(data):
    """Bytes in hexadecimal, of which Python takes blanks too."""
    return "-" if data is None else bytes.fromhex(data).hex() or "00"


def check_fields(folder, case):
    fields = json.loads((folder / "plugin.fields").read_bytes())["fields"]
    lines = [f"{case.base.split()[0]} {int(case.base.endswith('runtime'))}"]
    lines += [f"{_word(f['name'])} {f['type']} {f['length']} {_bytes_word(f['data'])}" for f in fields]
    (folder / "fields").write_text("\n".join(lines) + "\n")
    _, program = runtimes.plugin_driver()
    command = [program, native.library_path("leanfleet_trt"), folder / "fields", "--fields"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    if result.returncode:
        raise Wrong(f"the plugin's driver ends with {result.returncode}: {result.stdout[-300:]}{result.stderr[-300:]}")
    head, _, rest = result.stdout.partition("\n")
    op = spec.all_specs()[case.base.split()[0]]
    if head.startswith("refused"):
        if not head.startswith((f"refused {op.name} '", f"refused {op.name}: ")):  # the second where the layer has no name
            raise Wrong(f"fields are refused without the operator's name: {head[:300]}")
        return "refused"
    compare_fields(op, fields, rest.splitlines(), case.base.endswith("runtime"))
    return "right"


def compare_fields(op, fields, lines, from_engine):
    """What the plugin holds is what the fields said."""
    known = {a.name: a for a in op.attrs}
    names = [f["name"] for f in fields]
    if from_engine and (missing := {*known, "planned"} - set(names)):
        raise Wrong(f"an engine's layer without {min(missing)} was taken")
    if twice := [n for n in names if n in known and names.count(n) > 1]:
        raise Wrong(f"{twice[0]} was told twice and taken")
    made = {}
    for line in lines:
        name, *rest = line.split(" ")
        made[bytes.fromhex(name).decode()] = bytes.fromhex(rest[2])
    for f in fields:
        data = bytes.fromhex(f["data"] or "")
        if f["name"] not in known or f["length"] < 1 or f["data"] is None:
            continue
        attr = known[f["name"]]
        size = {TYPES["CHAR"]: f["length"], TYPES["INT64"]: 8}.get(f["type"], 4)
        data = (data * size)[:size] if data else bytes(size)
        if attr.type == "string":
            said, kept = data.partition(b"\0")[0], made[attr.name].partition(b"\0")[0]
        else:
            form = {TYPES["INT32"]: "<i", TYPES["INT64"]: "<q", TYPES["FLOAT32"]: "<f"}.get(f["type"])
            if form is None:
                raise Wrong(f"{attr.name} of type {f['type']} was taken")
            (said,) = struct.unpack(form, data)
            (kept,) = struct.unpack("<f" if attr.type == "float" else "<q", made[attr.name])
            said = float(np.float32(said)) if attr.type == "float" else said
        if said != kept:
            raise Wrong(f"{attr.name} is {kept!r}; the field says {said!r}")


def field_bases():
    return [f"{op} {phase}" for op in spec.all_specs() for phase in ("build", "runtime")]


KINDS = {
    "decoder": Kind(lambda: ["float32", "int8"], make_decoder, check_decoder, {"leanfleet.json": 4, "model.onnx": 3}),
    "serving": Kind(lambda: ["llama"], make_serving, check_serving, {"leanfleet.json": 6}),
    "node": Kind(node_bases, make_node, check_node),
    "rewrite": Kind(lambda: list(rewrite_sources()), make_rewrite, check_rewrite),
    "prepared": Kind(prepared_bases, make_prepared, check_prepared),
    "tokenizer": Kind(lambda: ["chat", "plain"], make_tokenizer, check_tokenizer, {"tokenizer.json": 2}),
    "model": Kind(lambda: ["llama"], make_model, check_model, {"config.json": 2}),
    "gguf": Kind(lambda: list(GGUF), make_gguf, check_gguf),
    "fields": Kind(field_bases, make_fields, check_fields),
}
ORDER = (
    *("decoder", "node", "rewrite", "fields", "tokenizer", "prepared"),
    *("gguf", "node", "model", "serving", "tokenizer", "fields"),
)


# A process for each


def check(case):
    """Raises Wrong; returns how it ended. Never called in a process that has run something before: see alone."""
    with tempfile.TemporaryDirectory(prefix="leanfleet-") as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        for name, data in mutated(case).items():
            if data is not None:
                (folder / name).write_bytes(data)
        warnings.simplefilter("ignore")
        return KINDS[case.kind].check(folder, case)


def prepare(case):
    """Does once what forks of this process then need not do: imports, and the driver of plugins."""
    import_everything()
    if case.kind == "fields":
        runtimes.plugin_driver()


@functools.cache
def import_everything():
    import gguf  # noqa: F401
    import torch
    import transformers
    import transformers.integrations.gguf  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from leanfleet import generate
    from leanfleet.export import export_decoder, gguf_model, rewrite, rewrite_check  # noqa: F401
    from leanfleet.ort_ops import generate as _  # noqa: F401
    from support import decoders, rewrite_models  # noqa: F401

    torch.set_num_threads(1)
    generate.quieten_transformers()


def alone(case, function=None):
    """What is wrong, or None: the case in a process of its own, a fork of this one."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.close(reader)
            _in_the_child(case, function or check, writer, said)
        os.close(writer)
        answer = _wait(child, reader)
        os.close(reader)
        if isinstance(answer, list):
            return answer[0]
        said.seek(0)
        return f"{answer}: {said.read()[-1000:].decode(errors='replace').strip()}"


def _in_the_child(case, function, writer, said):
    faulthandler.disable()  # of a pytest that forked: the signal says enough
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY, own + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 1
    try:
        try:
            function(case)
            answer = [None]
        except BaseException as error:
            answer = [f"{type(error).__name__}: {error}"[:2000]]
        os.write(writer, json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)  # without what the parent registered for its end


def _wait(child, reader):
    """[what is wrong or None], or words for a process that did not tell."""
    end, data = time.monotonic() + SECONDS, b""
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 65536)
        data += part
        if not part:
            break
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"no end in {SECONDS} s"
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process ended with {signal.Signals(os.WTERMSIG(status)).name}"
    return json.loads(data) if data else f"the process ended with {os.WEXITSTATUS(status)}"
