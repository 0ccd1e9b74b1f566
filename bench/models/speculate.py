"""Continuous batching with tokens guessed from a request's own text (speculate=N), against none, in ONNX Runtime.

    python -m bench.models.speculate FOLDER [--provider CPU] [--guesses 0 2 4 8] [--requests 1 4] [--new 96] [--out F.json]

FOLDER: an instruction-tuned model with its tokenizer, as `leanfleet export --serve` writes it. Two kinds of prompts: some that
ask for a text of the prompt again (copied, corrected), and some that ask for something new. Each way runs `--rounds` times in
turn with the others; the best round counts, of the steps behind the prompts. Tokens are compared with those of no guesses.
"""

import argparse
import json
import time

from leanfleet.ort_ops.generation import encode_chat, load_tokenizer
from leanfleet.ort_ops.serving import ContinuousBatch

TEXT = (
    "The harbour of Port Ellery was built in 1874, when the railway came to the valley. Its two piers are four "
    "hundred metres long. In winter, when storms come from the north, fishing boats stay inside the piers for weeks. "
    "The lighthouse at the end of the northern pier was lit by gas until 1931. Today it is run by three volunteers, "
    "who paint it every second summer."
)
PROMPTS = {
    "repeats": [
        f"Repeat this text word for word:\n\n{TEXT}",
        f"Copy the following paragraph exactly as it is:\n\n{TEXT}",
        f"Proofread this text. Give the whole text again, with every mistake corrected:\n\n{TEXT}",
        f"Summarise this text with its own sentences, as many of them as you can:\n\n{TEXT}",
    ],
    "ordinary": [
        "Write a short story about a dragon who is afraid of heights.",
        "Explain to a child why the sky is blue.",
        "Give me some advice about learning to play the piano as an adult.",
        "What should I think about before I buy a used bicycle?",
    ],
}


def measure(batch, prompts, new):
    """What a group of prompts gives, from the step on in which all of them are through."""
    requests = [batch.add(prompt, new) for prompt in prompts]
    while not all(r.tokens or r.done for r in requests):
        batch.step()
    had = sum(len(r.tokens) for r in requests)
    steps, guessed, right = batch.steps, batch.guessed, batch.guessed_right
    start = time.perf_counter()
    batch.run()
    seconds = time.perf_counter() - start
    made = sum(len(r.tokens) for r in requests) - had
    return {
        "answers": [r.tokens for r in requests],
        "tokens_per_second": made / seconds,
        "tokens_per_step": made / (batch.steps - steps),
        "guessed": batch.guessed - guessed,
        "right": batch.guessed_right - right,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--provider", default="CPU", choices=("CPU", "CUDA"))
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.folder)
    guesses = sorted({0, *args.guesses})
    batches = {
        n: ContinuousBatch(
            args.folder, 400, 16, 256, [f"{args.provider}ExecutionProvider"], cuda_graph=args.graphs, speculate=n
        )
        for n in guesses
    }
    found = []
    for kind, texts in PROMPTS.items():
        prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        for size in args.requests:
            groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
            for group in groups:
                rounds = {n: [] for n in guesses}
                for _ in range(args.rounds):
                    for n, batch in batches.items():
                        rounds[n].append(measure(batch, group, args.new))
                plain = rounds[0][0]["answers"]
                for n in guesses:
                    best = max(rounds[n], key=lambda r: r["tokens_per_second"])
                    same = sum(a == b for a, b in zip(best.pop("answers"), plain))
                    row = {"prompts": kind, "requests": size, "speculate": n, "same_answers": f"{same} of {size}", **best}
                    found.append(row)
                    print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"folder": args.folder, "provider": args.provider, "new": args.new, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
