"""The commands `leanfleet export` and `leanfleet generate`. Importing this module needs only the standard library."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanfleet import decoder_contract, driver, files, progress, ranks
from leanfleet.decoder_contract import DECODER

if TYPE_CHECKING:
    from onnxruntime import SessionOptions
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from leanfleet.generation import Batching, Decoder, Statistics
    from leanfleet.ort_ops.serving import ContinuousBatch

MOST_LAYERS = 10_000
DEVICE_HELP = "cpu, cuda or, of several GPUs, cuda:1 (default: the first)"
CALIBRATION_ROW = 2048  # tokens of a text that are calibrated on together
STEP_TOKENS = 2048  # of prompts that are read together, at most
HUB_SECONDS = 10  # to find out whether the hub has a model, and whether there is a hub


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Adds both to argparse's subcommands."""
    export = commands.add_parser(
        "export",
        help="a transformers model to a folder that `leanfleet generate` runs",
        description="Exports a causal language model of transformers to ONNX with leanfleet nodes, and checks the file against "
        "the model. Exit code 1, and nothing written, when they differ. Needs the extras export, models and ort.",
    )
    export.add_argument(
        "model",
        help="a GGUF file, a folder with a model and its tokenizer (safetensors or one GGUF file), or a name on the Hugging "
        "Face hub",
    )
    export.add_argument("folder", help="the folder to write")
    export.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16"),
        help="of weights and caches (default: %(default)s)",
    )
    export.add_argument(
        "--weights",
        choices=("keep", "expand", "int4", "int8"),
        help="int4, int8: round the weights to so many bits. keep, expand: leave a GGUF file's quantised matrices as they are, "
        "or make floating point of them (default: keep with --dtype float32, expand for the types of GPUs and with --no-fuse)",
    )
    export.add_argument(
        "--no-fuse",
        dest="fuse",
        action="store_false",
        help="standard operators and leanfleet's alone, "
        "none of ONNX Runtime's own (experts as MoE nodes, sums and norms in one, fused rotary encodings)",
    )
    export.add_argument(
        "--cache",
        choices=decoder_contract.CACHES,
        metavar="TYPE",
        help="the type of key/value caches, each token with scales of its own: int8, fp8, int4, or two of "
        "them, of keys and of values: int8/fp8; TensorRT takes int8 and fp8 alone (default: the model's type)",
    )
    export.add_argument(
        "--narrow-states",
        action="store_true",
        help="with --dtype float16 or bfloat16: states of Mamba-2 and of linear attention with decay in that type, half their "
        "memory and rounded once a step (default: float32)",
    )
    export.add_argument(
        "--calibrate",
        metavar="FILE",
        help="with --cache: text, in UTF-8, like what the model will read; scales are then found on it and constants of the "
        "graph, in place of one for each token",
    )
    export.add_argument(
        "--scales",
        choices=decoder_contract.CACHE_SCALES,
        help="with --calibrate: a scale for each channel of each head (the default), or one for all keys of a layer and one "
        "for all values",
    )
    export.add_argument(
        "--serve",
        action="store_true",
        help="also write serving.onnx, the graph for `leanfleet serve` and ContinuousBatch, which has the same weights; "
        "`leanfleet generate` is faster with it on a GPU",
    )
    export.add_argument(
        "--page",
        type=int,
        metavar="TOKENS",
        help="with --serve: tokens of a page of keys and values (default: 64); fewer waste less room, and prompts take longer "
        "on a GPU",
    )
    export.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="W",
        help="share the model out to W processes, with a GPU each: heads, feed-forward layers and experts; W at most the query "
        "heads. Run it with leanfleet generate --gpus W",
    )
    export.add_argument(
        "--whole-experts",
        action="store_true",
        help="with --tensor-parallel, of a mixture of experts: give each process some experts, whole, not columns of all",
    )
    export.add_argument(
        "--context-parallel",
        type=int,
        metavar="W",
        help="share the tokens in the caches out to W processes, with a GPU each, which all have the whole model: for long "
        "contexts. Run it with leanfleet generate --gpus W",
    )
    export.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not run the exported file and compare it with the model before it gets its place",
    )
    export.add_argument(
        "--rope",
        default="short",
        choices=("short", "long"),
        help="for models with longrope: right up to original_max_position_embeddings (short, the default), or "
        "as the model computes requests longer than that, at every length (long)",
    )
    export.set_defaults(run=export_command)

    generate = commands.add_parser(
        "generate",
        help="text from a model that `leanfleet export` wrote",
        description="Streams what a model answers. The prompt goes through the model's chat template where it has one. "
        "Several prompts are answered in one batch. Where the folder has serving.onnx, that graph runs: it chooses the tokens, "
        "and no logits come to the host. Speeds go to stderr.",
    )
    generate.add_argument("folder", help="written by leanfleet export or leanfleet.export.export_decoder, with its tokenizer")
    generate.add_argument("prompt", nargs="+", help="what to answer or to continue; - reads it from stdin")
    generate.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="new tokens at most (default: 128, or as many as the model has positions for)",
    )
    generate.add_argument(
        "--temperature",
        type=float,
        help="0, the default: always the likeliest token; with --top-k, --top-p or --min-p the default is 1",
    )
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (0: all)")
    generate.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the fewest tokens whose probabilities reach P (default: %(default)s)",
    )
    generate.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="sample among tokens at least P times as likely as the likeliest"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    generate.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a token that ends an answer, beside the model's own; may be given again",
    )
    generate.add_argument("--system", metavar="TEXT", help="the system's turn of the chat")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--capacity", type=int, metavar="N", help="slots of the caches (default: what is needed)")
    generate.add_argument("--provider", choices=("cpu", "cuda"), help="default: cuda where it works, else cpu")
    generate.add_argument("--device", metavar="DEVICE", help=DEVICE_HELP)
    generate.add_argument("--cuda-graph", action="store_true", help="capture decode steps as CUDA graphs")
    add_ranks(generate, "--tensor-parallel W or --context-parallel W")
    generate.set_defaults(run=generate_command)


def locate(model: str | Path) -> dict[str, Any]:
    """Options of from_pretrained for a model: a folder, also one with a single GGUF file, or a name on the hub. For a GGUF
    file, by its own path or its folder's, {"gguf_file": its name}.

    Asks the hub once, for HUB_SECONDS at most: transformers would ask again and again for a mistyped path. Raises OSError for
    what is neither, ValueError for a folder with several GGUF files or none.
    """
    folder = Path(model)
    if folder.is_dir():
        if (folder / "config.json").exists():
            return {}
        found = sorted(folder.glob("*.gguf"))
        if len(found) != 1:
            what = f"{len(found)} GGUF files" if found else "neither config.json nor a GGUF file"
            raise ValueError(f"{folder} holds {what}; give a folder with one transformers model")
        return {"gguf_file": found[0].name}
    if folder.suffix == ".gguf" and folder.is_file():
        return {"gguf_file": folder.name}
    if folder.exists():
        raise NotADirectoryError(f"{model} is no GGUF file; give one, or the folder that the model lies in")
    if folder.suffix == ".gguf":
        raise FileNotFoundError(f"{model} does not exist")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is there

    neither = f"{model} is neither a folder here nor a model on the Hugging Face hub"
    try:
        validate_repo_id(str(model))
    except HFValidationError:
        raise FileNotFoundError(f"{neither}, whose names are OWNER/NAME") from None
    try:
        HfApi().model_info(str(model), timeout=HUB_SECONDS)
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"{neither}, or one for those alone who log in with `hf auth login`: {error}") from None
    except Exception as error:  # of the library that huggingface_hub speaks HTTP with, which changes from version to version
        if isinstance(try_to_load_from_cache(str(model), "config.json"), str):
            return {"local_files_only": True}
        raise FileNotFoundError(f"{model} is no folder here, and the Hugging Face hub does not answer: {error}") from None
    return {}


def quieten_transformers() -> None:
    """Its errors come as exceptions."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_pretrained(
    model: str | Path, dtype: str = "float32", keep: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(transformers model in eval mode, its tokenizer). model: a GGUF file, a folder, also one with a single GGUF file, or a
    hub name. keep: a GGUF file's quantised matrices stay as they are (leanfleet.export.gguf_model).

    Raises OSError for what is no model, ValueError for a folder with several GGUF files and for damaged files.

    Example:
        from leanfleet.generate import load_pretrained

        model, tokenizer = load_pretrained("llama")         # a folder, or a name on the Hugging Face hub
    """
    options = locate(model)
    if "gguf_file" in options:
        return _load_gguf(Path(model), options["gguf_file"], dtype, keep)
    options |= files.NO_CODE
    if keep:
        raise ValueError(f"--weights keep is for GGUF files, and {model} is another model: leave it out")
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quieten_transformers()
    _check_layers(Path(model) / "config.json")
    with files.reading(f"the model {model}"):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype=getattr(torch, dtype), **options, **_attention_of(model, options)
            )
        except SafetensorError:
            _check_weights(Path(model))
            raise
    with files.reading(f"the tokenizer of {model}"):
        return loaded.eval(), AutoTokenizer.from_pretrained(model, **options)


def _check_layers(config: Path) -> None:
    """Raises ValueError for a number of layers that transformers would make lists of for hours. It says itself what else is
    wrong with the file."""
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    parts = [content, *(v for v in content.values() if isinstance(v, dict))] if isinstance(content, dict) else []
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        for part in parts:
            if isinstance(found := part.get(name), (int, float)) and found > MOST_LAYERS:
                raise ValueError(f"{config} is damaged: {name} is {found}; models have at most {MOST_LAYERS} layers")


def _attention_of(model: str | Path, options: dict[str, Any]) -> dict[str, str]:
    """from_pretrained's option for a model that ran with register_transformers()'s attention, as its configuration notes."""
    from transformers import AutoConfig

    from leanfleet.export.linear_attention import register_transformers
    from leanfleet.export.support import LINEAR, REMEMBERED

    config = AutoConfig.from_pretrained(model, **options)
    parts = config, config.get_text_config(decoder=True)
    for asked in (getattr(c, "_attn_implementation", None) for c in parts):
        if asked and "/" in asked:  # transformers would fetch it and run it
            raise ValueError(
                f"config.json asks for attention {asked[:100]}, code on the hub, which is not run: take attn_implementation out"
            )
    noted = {getattr(c, REMEMBERED, None) for c in parts}
    return {"attn_implementation": register_transformers()} if LINEAR in noted else {}


def _load_gguf(model: Path, name: str, dtype: str, keep: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from leanfleet.export import gguf_model

    quieten_transformers()
    path = model / name if model.is_dir() else model
    with files.reading(f"the model {path}"):
        return gguf_model.load(path, dtype, keep)


def _check_weights(folder: Path) -> None:
    """Raises ValueError for the first file of weights that safetensors cannot read."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not whole: {error}") from None


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Prints what leanfleet warns of, each once and in a line, and not what torch's exporter says of its own deprecations."""
    from leanfleet.export.function_bodies import ExportWarning

    told = set()

    def tell(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if str(message) not in told:
            told.add(str(message))
            print(f"leanfleet export: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ExportWarning)
        warnings.showwarning = tell
        yield


def export_command(arguments: argparse.Namespace) -> int:
    from leanfleet.export.verification import VerificationError

    files.check_folder(arguments.folder)
    served = Path(arguments.folder) / decoder_contract.SERVING_FILE
    was_there = served.exists()
    try:
        with _own_warnings():
            check_export(arguments)
            with progress.stage("exporting"):
                _export(arguments)
    except VerificationError as error:
        print(f"leanfleet export: {error}", file=sys.stderr)
        return 1
    folder = Path(arguments.folder)
    facts = decoder_contract.read_facts(folder, DECODER, parallel=True)
    if was_there and not served.exists():
        print(f"leanfleet export: {served.name} of an earlier export is gone; leanfleet serve needs --serve", file=sys.stderr)
    print(describe_fusions(facts.get("fusions")), file=sys.stderr)
    print(describe_verification(facts.get("verified")), file=sys.stderr)
    size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6
    parallel = decoder_contract.parallel_of(facts)
    world = None if parallel is None else parallel.world
    then = next_step(folder, arguments.dtype, world, arguments.serve)
    print(f"wrote {folder} ({size:.0f} MB); next: {then}", file=sys.stderr)
    return 0


def add_ranks(command: argparse.ArgumentParser, folders: str) -> None:
    """Options of commands that may run as several processes. folders: options of leanfleet export that write such folders."""
    command.add_argument("--gpus", type=int, metavar="W", help=f"run a folder of {folders} on W GPUs, a process each")
    command.add_argument(
        "--ranks", type=int, metavar="W", help="the same, W processes; with --provider cpu on the CPU, to try it without GPUs"
    )


def check_export(arguments: argparse.Namespace) -> None:
    """Raises ValueError or FileNotFoundError where the options of leanfleet export contradict each other."""
    if arguments.tensor_parallel is not None and arguments.context_parallel is not None:
        raise ValueError("--tensor-parallel shares out heads, --context-parallel the tokens in the caches: give one of the two")
    if arguments.whole_experts and arguments.tensor_parallel is None:
        raise ValueError("--whole-experts says how --tensor-parallel shares a mixture out: give both")
    if arguments.weights not in (None, "expand") and not arguments.fuse:
        raise ValueError(
            f"--weights {arguments.weights} needs ONNX Runtime's own operators, which --no-fuse leaves out: give one of the two"
        )
    if arguments.calibrate is None and arguments.scales is not None:
        raise ValueError("--scales goes with --calibrate FILE, whose text scales are found on")
    if arguments.page is not None and not arguments.serve:
        raise ValueError("--page is the size of pages for serving: it goes with --serve")
    if arguments.page is not None and arguments.page < 1:
        raise ValueError(f"--page is {arguments.page}; a page has 1 token or more")
    if arguments.calibrate is not None and arguments.cache is None:
        raise ValueError("--calibrate finds scales of quantised caches: say which, such as --cache fp8")
    if arguments.calibrate is not None and not Path(arguments.calibrate).is_file():
        raise FileNotFoundError(f"--calibrate {arguments.calibrate}: there is no such file")


def calibration_rows(path: str, model: Any, tokenizer: Any) -> list[list[int]]:
    """Token ids of a file's text, in rows of CALIBRATION_ROW or as many as the model has positions for.

    Raises OSError for a file that cannot be read, ValueError for one that is no UTF-8 or has no token.
    """
    if tokenizer is None:
        raise ValueError("--calibrate needs the model's tokenizer, and the model comes without one")
    try:
        ids = tokenizer(Path(path).read_text(encoding="utf-8")).input_ids
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    if not ids:
        raise ValueError(f"{path} has no token to calibrate on; give text like what the model will read")
    config = model.config.get_text_config(decoder=True)
    row = min(CALIBRATION_ROW, getattr(config, "max_position_embeddings", None) or CALIBRATION_ROW)
    return [ids[at : at + row] for at in range(0, len(ids), row)]


def _export(arguments: argparse.Namespace) -> None:
    from leanfleet.export import calibrate, export_decoder, verification
    from leanfleet.export.serving import add_serving

    def say(line: str) -> None:
        progress.clear()
        print(line, file=sys.stderr, flush=True)

    say(f"loading {arguments.model} ...")
    is_gguf = "gguf_file" in locate(arguments.model)
    by_itself = is_gguf and arguments.fuse and arguments.dtype == "float32" and arguments.tensor_parallel is None
    keep = arguments.weights == "keep" or (arguments.weights is None and by_itself)
    model, tokenizer = load_pretrained(arguments.model, arguments.dtype, keep)
    if is_gguf and keep:
        from leanfleet.export import gguf_model

        path = Path(arguments.model)
        say(gguf_model.described(path / locate(path)["gguf_file"] if path.is_dir() else path, model))
    if arguments.weights in ("int4", "int8"):
        from leanfleet.export import quantise

        say(str(quantise(model, int(arguments.weights[3:]))))
    say(f"exporting {type(model).__name__} ({model.config._attn_implementation or 'eager'}: softmax attention) ...")
    cache = arguments.cache
    if arguments.calibrate is not None:
        rows = calibration_rows(arguments.calibrate, model, tokenizer)
        say(f"calibrating {cache} caches on {sum(map(len, rows)):,} tokens of {arguments.calibrate} ...")
        cache = calibrate(model, rows, cache, arguments.scales or "channel")
    options = {name: getattr(arguments, name) for name in ("fuse", "verify", "rope", "narrow_states")} | {"cache": cache}
    with files.new_folder(arguments.folder, decoder_contract.OPTIONAL_FILES) as new, verification.once():
        shared = {name: getattr(arguments, name) for name in decoder_contract.PARALLEL_KINDS}
        export_decoder(model, new, tokenizer, whole_experts=arguments.whole_experts, **shared, **options)
        if arguments.serve:
            say("exporting it for serving ...")
            add_serving(model, new, **({} if arguments.page is None else {"block": arguments.page}), **options)


def describe_verification(verified: dict[str, Any] | None) -> str:
    """One line about leanfleet.json's entry of that name."""
    if verified is None:
        return "not verified: --no-verify"
    if "skipped" in verified:
        return f"not verified: {verified['skipped']}"
    return (
        f"verified: logits of prompts and decode steps, alone and in a batch, differ from PyTorch's by "
        f"{verified['largest_difference']:.1e} at most ({verified['bound']:.1e} allowed)"
    )


def describe_fusions(fusions: dict[str, int] | None) -> str:
    """One line about leanfleet.json's entry of that name."""
    if fusions is None:
        return "not fused: --no-fuse"
    applied = [f"{name} {count}x" for name, count in fusions.items() if count]
    left = [name for name, count in fusions.items() if not count]
    return f"fused: {', '.join(applied) or 'nothing'}" + (f" (not found: {', '.join(left)})" if left else "")


def next_step(folder: str | Path, dtype: str, world: int | None = None, serve: bool = False) -> str:
    """What to do with an exported folder. world: the ranks that it is for. serve: whether a server can take it."""
    over = "" if world is None else f" --gpus {world}"
    on_gpu = world is None and dtype == "bfloat16"
    command = f'leanfleet generate {folder} "Hello"{over}' + " --provider cuda, or leanfleet engine build" * on_gpu
    if serve:
        command += f", or leanfleet serve {folder}{over}"
    if not on_gpu:
        return command
    return (
        f"{command}. bfloat16 needs a GPU: ONNX Runtime's CPU provider has no kernels for it; for CPUs export with --dtype "
        "float32"
    )


def generate_command(arguments: argparse.Namespace) -> int:
    from leanfleet.sampling import check_sampling

    if arguments.system is not None and arguments.raw:
        raise ValueError("--system is a turn of the chat, which --raw leaves out: give one of the two")
    check_device(arguments)
    temperature = arguments.temperature
    if temperature is None:
        temperature = 1.0 if arguments.top_k or arguments.top_p < 1 or arguments.min_p else 0.0
    check_sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed, arguments.min_p)
    ranks.end_with_parent()
    world, here = world_of(arguments, DECODER), ranks.place()
    if world is None:
        return _generate(arguments, temperature)
    if here is None:
        stdin = sys.stdin.read() if "-" in arguments.prompt else None
        return launch_ranks(arguments, world, stdin=stdin, passed_on=(130, 141))
    with joined(arguments, here, world) as device:
        return _generate(arguments, temperature, here, device)


@contextmanager
def joined(arguments: argparse.Namespace, here: ranks.Place, world: int) -> Iterator[driver.Device]:
    """Where this rank runs, while it is one of so many. Raises ValueError where another number was started."""
    if here.world != world:
        raise ValueError(f"{arguments.folder} was exported for {world} ranks, and {here.world} were started: start {world}")
    device = rank_device(arguments, here.local)
    engine = "shared_memory" if device.kind == "cpu" else "nccl"
    with ranks.join(decoder_contract.WORLD, engine, None if device.kind == "cpu" else device.index):
        yield device


def world_of(arguments: argparse.Namespace, interface: decoder_contract.Interface) -> int | None:
    """How many ranks --gpus, --ranks, and where neither is given torchrun's environment, ask for; None: this process alone.

    Raises ValueError where the folder was exported for another number.
    """
    asked = {name: getattr(arguments, name) for name in ("gpus", "ranks") if getattr(arguments, name) is not None}
    if len(asked) == 2:
        raise ValueError("--gpus and --ranks both say how many processes run: give one of the two")
    if not asked and ranks.place() is None:
        return None
    parallel = decoder_contract.parallel_of(decoder_contract.read_facts(arguments.folder, interface, parallel=True))
    if parallel is None and not asked:
        return None
    for name, count in asked.items():
        if parallel is None:
            served = " --serve" * (interface is decoder_contract.SERVING)
            raise ValueError(
                f"--{name} {count}: {arguments.folder} was exported for one process; export the model with "
                f"leanfleet export --tensor-parallel {count}{served}, or --context-parallel {count}{served}"
            )
        if count != parallel.world:
            raise ValueError(
                f"--{name} {count}: {arguments.folder} was exported for {parallel.world} ranks, no more and no less"
            )
    if arguments.device is not None and arguments.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {arguments.device}: each of several ranks has a GPU of its own, the first cuda:0")
    return None if parallel is None else parallel.world


def rank_device(arguments: argparse.Namespace, local: int) -> driver.Device:
    """Where a rank runs: the GPU of its number, or the CPU where that is asked for, or nothing is and there is no CUDA."""
    from leanfleet import ort_library
    from leanfleet.ort_ops.sessions import CUDA, default_providers

    cuda = arguments.gpus is not None or "cuda" in (arguments.provider, arguments.device) or arguments.cuda_graph
    if "cpu" in (arguments.provider, arguments.device):
        if arguments.gpus is not None:
            raise ValueError("--gpus runs on GPUs: on the CPU it is --ranks, with --provider cpu")
        return driver.Device("cpu")
    if cuda or CUDA in default_providers(ort_library.onnxruntime().get_available_providers()):
        return driver.Device.named(f"cuda:{local}")
    return driver.Device("cpu")


def options_of_rank(world: int, device: driver.Device | None) -> SessionOptions | None:
    """Of a session on the CPU that shares it with the other ranks' sessions; None elsewhere: the usual ones."""
    if device is None or device.kind != "cpu":
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, (os.cpu_count() or 1) // world)
    return options


def launch_ranks(arguments: argparse.Namespace, world: int, **options: Any) -> int:
    """Runs this command again, as so many ranks; rank 0 prints. options: of ranks.launch. Raises ValueError where there are not
    as many GPUs."""
    if rank_device(arguments, 0).kind == "cuda":
        problem = driver.why_no_gpu()
        if problem or len(driver.gpus()) < world:
            found = problem or f"this process sees {len(driver.gpus())}"
            raise ValueError(f"{world} ranks need a GPU each, and {found}: --ranks {world} --provider cpu runs them on the CPU")
    return ranks.launch(ranks.python("-m", "leanfleet", *arguments.argv), world, **options)


def _generate(
    arguments: argparse.Namespace, temperature: float, here: ranks.Place | None = None, device: driver.Device | None = None
) -> int:
    """Answers; of several ranks the first prints."""
    from leanfleet import generation

    providers: Any = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider"], None: None}[arguments.provider]
    options = {"providers": providers, "cuda_graph": arguments.cuda_graph, "device": device or arguments.device}
    new_tokens, capacity = arguments.max_tokens, arguments.capacity
    if here is not None:
        options |= dict(session_options=options_of_rank(here.world, device), rank=here.rank)
    decoder: Decoder | Batching
    if here is None and decoder_contract.has_serving(arguments.folder):
        decoder, prompts, new_tokens = _open_batch(arguments, options)
        capacity = None  # its pages are that
    else:
        from leanfleet.ort_ops.generation import load_decoder

        with progress.stage(f"loading {arguments.folder}"):
            decoder = load_decoder(arguments.folder, **options)
        prompts = read_prompts(arguments, decoder.tokenizer)
    statistics = generation.Statistics()
    steps = generation.stream(
        decoder,
        prompts,
        new_tokens,
        capacity=capacity,
        temperature=temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop_tokens=stop_tokens(decoder, decoder.tokenizer, arguments.stop),
        statistics=statistics,
    )
    if here is not None and here.rank:  # the same tokens, which rank 0 tells
        for _ in steps:
            pass
        return 0
    try:
        print_stream(steps, decoder.tokenizer, len(prompts))
    except KeyboardInterrupt:
        print()
        raise
    print(describe(statistics), file=sys.stderr)
    return 0


def read_prompts(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of each prompt."""
    from leanfleet import generation

    quieten_transformers()
    texts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    return [generation.encode(tokenizer, text, False if arguments.raw else None, arguments.system) for text in texts]


def _open_batch(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[ContinuousBatch, list[list[int]], int]:
    """(a batch with room for all prompts and their answers at once, the prompts, new tokens of each at most)"""
    from leanfleet import generation
    from leanfleet.ort_ops.serving import ContinuousBatch

    facts = decoder_contract.read_facts(arguments.folder, decoder_contract.SERVING)
    prompts = read_prompts(arguments, generation.load_tokenizer(arguments.folder))
    lengths = [len(prompt) for prompt in prompts]
    new, capacity = generation.new_tokens(max(lengths), arguments.max_tokens, arguments.capacity, facts["max_positions"])
    slots = [capacity if arguments.capacity else length + new for length in lengths]
    pages = sum(-(-count // facts["block"]) for count in slots)
    step_tokens = max(min(sum(lengths), STEP_TOKENS), len(prompts))
    with progress.stage(f"loading {arguments.folder}"):
        batch = ContinuousBatch(arguments.folder, pages, len(prompts), step_tokens, share=False, **options)
    return batch, prompts, new


def check_device(arguments: argparse.Namespace) -> None:
    """Raises ValueError where --cuda-graph, --provider and --device contradict each other."""
    for option in ("provider", "device"):
        if arguments.cuda_graph and getattr(arguments, option) == "cpu":
            raise ValueError(f"--cuda-graph needs the CUDA provider: leave --{option} cpu out")


def stop_tokens(decoder: Decoder | Batching, tokenizer: PreTrainedTokenizerBase, extra: Iterable[str] = ()) -> list[int]:
    """Ids of the tokens that end an answer: the model's, the tokenizer's end of text, and those of the given names."""
    stop = set(decoder.stop_tokens)
    if tokenizer.eos_token_id is not None:
        stop.add(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    for name in extra:
        if name not in vocabulary:
            raise ValueError(f"--stop {name}: no single token of this model's vocabulary has that name")
        stop.add(vocabulary[name])
    return sorted(stop)


def print_stream(steps: Iterable[list[int | None]], tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Prints the tokens of `count` requests as they come: the first unfinished request live, the others after it."""
    from leanfleet.generation import TextStream

    streams = [TextStream(tokenizer) for _ in range(count)]
    waiting, done, live = [""] * count, [False] * count, 0

    def show() -> None:
        nonlocal live
        while live < count:
            print(waiting[live], end="", flush=True)
            waiting[live] = ""
            if not done[live]:
                return
            live += 1
            print(f"\n[{live + 1}] " if live < count else "\n", end="", flush=True)

    if count > 1:
        print("[1] ", end="")
    for new in steps:
        for row, token in enumerate(new):
            if token is None:
                done[row] = True
                waiting[row] += streams[row].finish()
            else:
                waiting[row] += streams[row].add(token)
        show()
    done[:] = [True] * count
    waiting[:] = [text + stream.finish() for text, stream in zip(waiting, streams, strict=True)]
    show()


def describe(statistics: Statistics) -> str:
    """One line about a generation's speed."""
    text = (
        f"prompt: {statistics.prefill_tokens} tokens, {statistics.prefill_tokens_per_second:.1f} tokens/s; generated: "
        f"{sum(map(len, statistics.tokens))} tokens"
    )
    return text + (f", {statistics.tokens_per_second:.1f} tokens/s" if statistics.decode_tokens else "")
