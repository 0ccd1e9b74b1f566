"""A server of `leanfleet serve` in a thread of this process."""

import socket
import threading
import time

import uvicorn

from leanfleet import serve
from leanfleet.batch_process import BatchProcess
from leanfleet.ort_ops.generation import load_tokenizer
from leanfleet.ort_ops.serving import ContinuousBatch


class Running:
    """The server of a folder at `port`. own_process: of its batch. options: of ContinuousBatch."""

    def __init__(self, folder, key, limits, max_waiting, own_process=False, **options):
        given = {"providers": ["CPUExecutionProvider"], "cuda_graph": False, **options}
        self.batch = (BatchProcess if own_process else ContinuousBatch)(folder, **given)
        tokenizers = load_tokenizer(folder), load_tokenizer(folder)
        self.server = serve.Server(self.batch, tokenizers, "tiny", key, limits, max_waiting)
        bound = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(self.server.application, log_level="error", timeout_graceful_shutdown=10)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([bound],))
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)

    def settle(self):
        """Waits until nothing runs; nothing may be left in the pool's use then."""
        end = time.monotonic() + 20
        engine = self.server.engine  # it takes answers off its list behind the batch's last step
        while (not self.batch.idle or engine.waiting or engine._answers) and time.monotonic() < end:
            time.sleep(0.02)
        assert self.batch.idle, "requests run though nobody waits for an answer"
        assert self.batch.pages_in_use == 0, f"{self.batch.pages_in_use} pages are in use though nothing runs"
        assert not engine._answers, f"{len(engine._answers)} answers are kept though nothing runs"

    def close(self):
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server does not end"
        assert not self.server.engine._thread.is_alive(), "the engine does not end"
        self.server.close()
