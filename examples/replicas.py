"""Several servers of one exported folder behind Ray Serve, which spreads requests over them and replaces those that die.

    python examples/replicas.py [FOLDER]

A tiny Llama with random weights is made on the spot; two replicas answer, and one of them is killed meanwhile. Needs the extras
export, models, ort and serve, and the packages openai and ray[serve].
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import ray
from ray import serve

from common import byte_tokenizer, run_in_folder, tiny_llama
from leanfleet.export import export_decoder
from leanfleet.export.serving import add_serving

REPLICAS, PORT, REQUESTS = 2, 8017, 120


# --8<-- [start:deployment]
def deployment(folder, replicas):
    """Each replica is a process with a batch of its own; with ray_actor_options={"num_gpus": 1} each has a GPU of its own."""

    def application():
        from leanfleet.serve import load_server

        return load_server(folder, "tiny", max_requests=8).application

    replica = serve.deployment(num_replicas=replicas, max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.5})
    return replica(serve.ingress(application)()).bind()


# --8<-- [end:deployment]


def replicas():
    """The process ids of those that run."""
    return [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if p.read_bytes().startswith(b"ray::ServeReplica")]


def main(folder):
    model = tiny_llama(vocab_size=260)
    export_decoder(model, folder, byte_tokenizer())
    add_serving(model, folder)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(deployment(os.path.abspath(folder), REPLICAS))
    killed = replicas()[0]
    # OpenAI's client asks again where a connection breaks and where the server answers with a status of 500 and above.
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=5)

    def ask(i):
        if i == REQUESTS // 3:
            os.kill(killed, signal.SIGKILL)
        options = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
        return client.completions.create(model="tiny", prompt=f"Request {i % 7}", **options).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    equal = all(answers[i] == answers[i % 7] for i in range(REQUESTS))
    end = time.monotonic() + 120
    while len(set(replicas()) - {killed}) < REPLICAS and time.monotonic() < end:
        time.sleep(0.5)
    there = len(set(replicas()) - {killed})
    print(f"one of {REPLICAS} replicas killed, {there} run; {len(answers)} of {REQUESTS} requests answered", end=", ")
    print(f"equal ones alike: {equal}")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    run_in_folder(main)
