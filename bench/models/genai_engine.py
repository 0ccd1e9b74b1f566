"""onnxruntime-genai's continuous-batching engine, as bench.models.vllm runs it beside ours. Needs onnxruntime-genai-cuda.

Its builder writes the graph, with PagedAttention, from a model of random weights that is made here.
"""

import gc
import json
import subprocess
import sys
import time

import numpy as np

from bench.models.serving import config_of

PATIENCE = 30  # seconds without a token after which the engine counts as stuck
EVENTS = 4096  # that one step may give


class Genai:
    leads = True

    def __init__(self, folder, model):
        self.folder, self.engine, self.opened = folder / "genai", None, None
        if not (self.folder / "genai_config.json").exists():
            build(folder / "transformers", self.folder, model)

    def prepare(self):
        """It has nothing to capture."""

    def open(self, running, step_tokens):
        """For so many requests at once; the engine sizes its pool by itself."""
        import onnxruntime_genai

        # Prompts of a shape run several times: none may be found in the pool.
        wanted = {"max_batch_size": running, "max_scheduled_tokens": max(step_tokens, running), "prefix_caching": False}
        if self.opened == wanted:
            return
        self.engine = None
        gc.collect()
        path = self.folder / "genai_config.json"
        config = json.loads(path.read_text())
        config["engine"]["dynamic_batching"] |= wanted
        path.write_text(json.dumps(config, indent=1) + "\n")
        self.engine, self.opened = onnxruntime_genai.Engine(onnxruntime_genai.Model(str(self.folder))), wanted
        self.events, self.names = self.engine.create_event_buffer(EVENTS), {}

    def run(self, prompts, answers):
        for name, (prompt, count) in enumerate(zip(prompts, answers, strict=True)):
            self.add(name, prompt, count)
        while self.names:
            self.step()

    def add(self, name, prompt, count):
        import onnxruntime_genai

        request = self.engine.create_request()
        turn = onnxruntime_genai.TurnOptions(request)
        turn.set_do_sample(False)
        turn.set_min_generated_tokens(count)
        turn.set_max_generated_tokens(count)
        request.begin_turn(np.array(prompt, np.int32), turn)
        self.names[request] = name

    def step(self):
        """[the name of a request, for each new token]. A request that has ended gives its pages back."""
        from onnxruntime_genai import EngineEventFlags as flags

        given, begun = [], time.perf_counter()
        while self.names and not given:
            for event in self.engine.run(self.events):
                told = int(event.flags)
                if told & int(flags.FAILED):
                    raise RuntimeError(f"request {self.names[event.request]} failed: {event.error_code}")
                if told & int(flags.TOKEN):
                    given.append(self.names[event.request])
                if told & int(flags.TURN_FINISHED):
                    del self.names[event.request]
                    event.request.close()
            if time.perf_counter() - begun > PATIENCE:
                raise RuntimeError(f"no token came in {PATIENCE} s, with {len(self.names)} requests that wait")
        return given

    def end(self):
        pass

    def close(self):
        pass

    versions = staticmethod(lambda: {"onnxruntime_genai": __import__("onnxruntime_genai").__version__})


def build(source, target, model):
    """Makes random weights in `source`, and the graph for the engine in `target`."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.models.serve import write_words

    torch.manual_seed(0)
    config = config_of(model)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    made.save_pretrained(source)
    write_words(source, config.vocab_size)
    del made
    torch.cuda.empty_cache()
    options = ["use_paged_attention=true", "prune_lm_head=true"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
    command += ["-p", "fp16", "-e", "cuda", "-c", target.with_name("cache"), "--extra_options", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
