"""A plot of attention over keys that GPUs share, from reports of bench.kernels.context_parallel."""

from bench.kernels.context_parallel import growth
from leanfleet import plotting

SHOWN = ("figure 9", "Llama-3-70B")  # names of shapes; of the latter with one request
WORDS = {"figure 9": "256 heads of 64, four requests", "Llama-3-70B": "64 heads of 128 over 8, one request"}


def scaling(reports, out):
    """How much faster do GPUs become, over the context? The form of LeanAttention's figure 9."""
    predicted = 8
    rows, _ = growth(reports, predicted)
    gpus = sorted(r["gpus"] for r in reports)
    with plotting.page(out, _title(rows, gpus), _note(reports, predicted), 3.4) as figure:
        for axes, name in zip(figure.subplots(1, len(SHOWN)), SHOWN, strict=True):
            of = [r for r in rows if r["shape"][0] == name and 1 in r["us"]]
            series = {f"{n} GPUs": [(r["context"], r["us"][1] / r["us"][n]) for r in of if n in r["us"]] for n in gpus}
            series[f"{predicted}, predicted"] = [
                (r["context"], r["us"][1] / r["model_us"][predicted]) for r in of if predicted in r["model_us"]
            ]
            plotting.lines(axes, series)
            plotting.token_axis(axes, [r["context"] for r in of], "tokens of context")
            plotting.ratio_axis(axes.yaxis, [y for points in series.values() for _, y in points])
            axes.set_title(WORDS[name], size=plotting.LABEL_POINTS)
            axes.set_ylabel("speed beside one GPU")


def _title(rows, gpus):
    last = [r for r in rows if r["shape"][0] == "Llama-3-70B" and r["context"] == 1 << 20][0]["us"]
    found = " and ".join(f"{plotting.times(last[1] / last[n])} as fast on {n} GPUs" for n in gpus)
    return f"Attention of one token over 1M tokens is {found}"


def _note(reports, predicted):
    last = reports[-1]
    return (
        f"{last['gpu']}, {last['date']}, float16. Each GPU has a share of the keys. {predicted} GPUs: by a model of the "
        "shares' times and the exchange, not measured."
    )
