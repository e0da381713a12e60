"""docs/communication-truth.md, made of the rows that ``bench/comm_truth.py`` writes; and why rows are off."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

__all__ = ["NOTED", "by_hand_lines", "error", "page", "reason", "summary"]

KINDS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "permute",
}
NOTED = 0.10
IDLE = (
    "On 32 devices this small model is best left to a few of them: axes stand idle in the products and split only the "
    "storage of parameters and gradients. The plan slices a gradient for the idle axes first and sums the slice; XLA "
    "sums a convolution's whole and slices then (alexnet's, vgg19's and the patches': 2 to 4 times the bytes), and "
    "splits other products over the idle axes, so that less is summed, and what it split is permuted or gathered."
)
REASONS: list[tuple[str, str, str, str]] = [
    (
        "*",
        "ours",
        "*",
        IDLE,
    ),
    (
        "rnnlm",
        "*",
        "*",
        "Inside its loops this strategy gathers, at every turn, what no turn changes (the recurrent weights); XLA "
        "moves that out of the loop.",
    ),
    (
        "bert_base",
        "*",
        "all_gather",
        "One gather (512 bytes, 2,048 for a batch of 32) of the gradient of the masked tokens' scores. The loss is "
        "computed whole on each device, so that its gradient is there whole and the plan slices it for nothing; XLA "
        "computes the minus sign in front of it in slices, since slices are wanted next, gathers them because the "
        "layout before was whole, and slices again.",
    ),
    (
        "bert_base",
        "ours@*",
        "permute",
        "The pooled first tokens of the next-sentence loss, 256 bytes: the plan leads them along the axes in seven "
        "moves, XLA gathers them and slices.",
    ),
    (
        "transformer",
        "ours@*",
        "all_to_all",
        "Sines and cosines of the positions are concatenated along a dim that is split: XLA writes the halves in "
        "another layout and moves them, 512 to 1,024 bytes each.",
    ),
    (
        "vit_l16",
        "ours@*",
        "*",
        "The logits, 512 bytes: the plan moves them in two steps, XLA in one gather over part of both axes.",
    ),
    *(
        (
            model,
            "ours@*",
            "*",
            "Gradients inside of batch norms: XLA lays out those of mean and variance (a dozen to 200 bytes each) and "
            "what is added up of them in the other order of axes, and at our constraint moves the sum, 100 to 3,136 "
            "bytes each, by a permute and an all-to-all. All collectives of the plan are there; these come on top.",
        )
        for model in ("inception_v3", "resnet101")
    ),
    (
        "densenet121",
        "ours@*",
        "permute",
        "The gradient of an average pool is a sum over windows of a padded array. XLA splits that array evenly for "
        "itself (5 rows over 2 devices: 3 and 2), not as its windows lie, and sends a row (640 bytes) to "
        "make up for it.",
    ),
    (
        "*",
        "random*",
        "*",
        "A strategy picked blindly. Our own moves are led one at a time; but where an op itself (a scatter, a sum by "
        "window, a concatenation) stands in a layout that XLA's partitioner has no rule for, it moves operands as it "
        "likes. Not followed line by line.",
    ),
]
"""(model, strategy, kind, why): patterns, the first that matches explains a row that is off by more than NOTED."""


def by_hand_lines(rows: list[dict[str, Any]], annotated: list[dict[str, Any]]) -> list[str]:
    """The part of the page on steps lowered by hand, beside the annotated ones of the same plans."""
    if not rows:
        return []
    done = [r for r in rows if "collectives" in r]
    pairs = [(r, k, b) for r in done for k, b in r["collectives"].items()]
    exact = sum(b["predicted"] == b["compiled"] for _, _, b in pairs)
    more = sum(b["compiled"] > b["predicted"] for _, _, b in pairs)
    worst = max((r["differences"]["gradients"] for r in done if "differences" in r), default=0.0)
    out = [
        "## Lowered by hand",
        "",
        "The same plans lowered by hand (`docs/local.md`): each collective is the plan's own, and none of the habits",
        "above is allowed for; reduce-scatters are there, too. Of "
        + ", ".join(dict.fromkeys(r["model"] for r in rows))
        + f" {exact} of",
        f"{len(pairs)} (plan, kind) pairs agree to the byte; {more} send more than the plan, the others less: XLA does",
        "once what two readers of a tensor ask for alike. Largest difference of a gradient from the unsharded step's:",
        f"{worst:.0e}. In the table, pairs that are off in either way of lowering.",
        "",
        "| model | strategy | devices | kind | plan | by hand | annotated, as on CPU → compiled |",
        "|---|---|--:|---|--:|--:|--:|",
    ]
    beside = {(r["model"], r["strategy"], r.get("devices", 8)): r["collectives"] for r in annotated}
    for r, kind, b in pairs:
        a = beside.get((r["model"], r["strategy"], r["devices"]), {}).get(kind)
        if b["predicted"] == b["compiled"] and (a is None or a["on_cpu"] == a["compiled"]):
            continue
        theirs = "" if a is None else f"{a['on_cpu']:,} → {a['compiled']:,}"
        by_hand = "exact" if b["predicted"] == b["compiled"] else f"{b['compiled']:,}"
        out.append(
            f"| {r['model']} | {r['strategy'].split('/')[-1]} | {r['devices']} | {KINDS.get(kind, kind)} "
            f"| {b['predicted']:,} | {by_hand} | {theirs} |"
        )
    out += [f"\n{r['model']}, {r['strategy']}: {r['refused']}" for r in rows if "refused" in r]
    return [*out, ""]


def error(bytes_: dict[str, int]) -> float:
    """Relative error of the predicted bytes."""
    return (bytes_["on_cpu"] - bytes_["compiled"]) / max(bytes_["compiled"], 1)


def reason(model: str, strategy: str, kind: str) -> str:
    """Why prediction and program differ, from REASONS."""
    for m, s, k, why in REASONS:
        if fnmatch(model, m) and fnmatch(strategy, s) and fnmatch(kind, k):
            return why
    return "not explained yet"


METHODS = {
    "data parallel": "data_parallel",
    "FSDP": "fsdp",
    "one weird trick": "owt",
    "Megatron": "megatron/*",
    "ours, split by force": "ours@*",
    "ours": "ours",
}


def summary(cells: list[tuple[dict[str, Any], str, dict[str, int]]]) -> list[str]:
    """A table: by method and devices, how many pairs, and how far they are off."""
    out = [
        "| method | devices | models | pairs | to the byte | within 1% | median error | largest | of all bytes |"
    ]
    out.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for method, pattern in METHODS.items():
        for devices in (8, 32):
            mine = [
                (r, b)
                for r, _, b in cells
                if fnmatch(r["strategy"], pattern) and r.get("devices", 8) == devices
            ]
            if not mine:
                continue
            off = sorted(abs(error(b)) for _, b in mine)
            moved = sum(b["compiled"] for _, b in mine)
            wrong = sum(abs(b["on_cpu"] - b["compiled"]) for _, b in mine)
            exact, near = sum(o == 0 for o in off), sum(o <= 0.01 for o in off)
            middle, worst = off[len(off) // 2], off[-1]
            out.append(
                f"| {method} | {devices} | {len({r['model'] for r, _ in mine})} | {len(mine)} | {exact} | {near} "
                f"| {middle:.1%} | {worst:.1%} | {wrong / moved:.2%} |"
            )
    return out


def page(result: dict[str, Any], by_hand: Sequence[dict[str, Any]] = ()) -> str:
    """The text of docs/communication-truth.md."""
    searched = [r for r in result["rows"] if not r["strategy"].startswith("random")]
    cells = [(r, k, b) for r in searched for k, b in r["collectives"].items() if b["on_cpu"] or b["compiled"]]
    exact = sum(b["on_cpu"] == b["compiled"] for _, _, b in cells)
    near = sum(abs(error(b)) <= NOTED for _, _, b in cells)
    run = [r for r in result["rows"] if "differences" in r]
    worst = max((r["differences"]["gradients"] for r in run), default=0.0)
    errors = sorted(abs(error(b)) for _, _, b in cells)
    lines = [
        "# Communication truth",
        "",
        "Every plan predicts the collectives of a training step. Here the same plans are emitted as JAX shardings,",
        f"compiled by XLA (JAX {result['jax']}) for {result['devices']} and for 32 host devices, and the bytes",
        "of the collectives in the compiled program are set beside the prediction. The models are the zoo's in their",
        "reduced sizes; `bench/comm_truth.py` makes this page, and on 8 devices the step is run and compared with the",
        f"unsharded one on the way: over all {len(run)} rows, the largest difference of a gradient is {worst:.0e} of",
        "the largest gradient.",
        "",
        f"Of {len(cells)} (plan, kind of collective) pairs, {exact} agree to the byte and {near} within "
        f"{NOTED:.0%}; the others say why. The median error is {errors[len(errors) // 2]:.1%}.",
        "",
        *summary(cells),
        "",
        "Bytes are those of the larger local buffer on one device, times how often a step sends it.",
        "*as on CPU*: the prediction as XLA's CPU pipeline forms it, which knows no reduce-scatter (all-reduce and",
        "slice), reduces the gradients of a tensor's readers one by one, and a sum over two split dims one dim at a",
        "time. `ours@2x4` is the search's answer on that mesh under a cost model in which compute is expensive, so",
        "that these small models get split at all; `random` strategies pick every node's split blindly: a test of the",
        "numbers, and of how far XLA can be led through layouts that nobody would choose.",
        "",
    ]
    lines += by_hand_lines(list(by_hand), result["rows"])
    for model in dict.fromkeys(r["model"] for r in result["rows"]):
        lines += _model_lines(result, model)
    return "\n".join(lines).rstrip() + "\n"


def _model_lines(result: dict[str, Any], model: str) -> list[str]:
    """A model's table, with why rows are off."""
    same = [n for n, m in result["alike"].items() if m == model]
    lines = [f"## {model}", ""]
    lines += [f"In reduced size also {', '.join(same)}.", ""] if same else []
    lines += [
        "| strategy | mesh | collective | predicted | as on CPU | compiled | error |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    notes: dict[str, None] = {}
    for r in (r for r in result["rows"] if r["model"] == model):
        mesh = "×".join(map(str, r["mesh"]))
        for k, b in r["collectives"].items():
            if not (b["on_cpu"] or b["compiled"]):
                continue
            e = error(b)
            off = "none compiled" if not b["compiled"] else f"{e:+.1%}"
            if b["on_cpu"] == b["compiled"]:
                off = "exact"
            if abs(e) > NOTED:
                why = reason(model, r["strategy"], k)
                notes.setdefault(why)
                off += f" [{list(notes).index(why) + 1}]"
            lines.append(
                f"| {r['strategy'].split('/')[-1]} | {mesh} | {KINDS.get(k, k)} | {b['predicted']:,} "
                f"| {b['on_cpu']:,} | {b['compiled']:,} | {off} |"
            )
    return [*lines, "", *(f"[{i + 1}] {n}\n" for i, n in enumerate(notes))]
