"""Generates docs/evidence/communication.md from the rows of ``bench/audit/communication.py``, with the causes of
errors."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

__all__ = ["NOTED", "error", "manual_lines", "page", "reason", "summary"]

KINDS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "permute",
}
NOTED = 0.10
IDLE = (
    "On 32 devices this small model is best run on only a few of them. In the products, the other mesh axes are "
    "idle and split only the storage of parameters and gradients. The plan first slices a gradient over the idle "
    "axes and then sums the slice. XLA sums the whole gradient of a convolution and slices it afterwards (for "
    "alexnet, vgg19 and the patches; 2 to 4 times the bytes). It also splits other products over the idle axes, "
    "so that less is summed, and permutes or gathers what it split."
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
        "Inside its loops, this strategy gathers the recurrent weights in every iteration, although no iteration "
        "changes them. XLA moves the gather out of the loop.",
    ),
    (
        "bert_base",
        "*",
        "all_gather",
        "One gather (512 bytes, 2,048 for a batch of 32) of the gradient of the masked tokens' scores. The loss is "
        "computed whole on each device, so its gradient is whole on each device too, and the plan slices it at no "
        "cost. XLA computes the negation in front of it in slices, since slices are needed next. It then gathers them, "
        "because the previous layout was whole, and slices again.",
    ),
    (
        "bert_base",
        "ours@*",
        "permute",
        "The pooled first tokens of the next-sentence loss, 256 bytes: the plan moves them along the axes in seven "
        "steps, while XLA gathers and slices them.",
    ),
    (
        "transformer",
        "ours@*",
        "all_to_all",
        "The sines and cosines of the positions are concatenated along a dim that is split. XLA writes the halves in "
        "another layout and then moves them, 512 to 1,024 bytes each.",
    ),
    (
        "vit_l16",
        "ours@*",
        "*",
        "The logits, 512 bytes: the plan moves them in two steps, XLA in one gather over a part of both axes.",
    ),
    *(
        (
            model,
            "ours@*",
            "*",
            "Gradients inside batch norms: XLA lays out the gradients of mean and variance (a dozen to 200 bytes "
            "each), and the sums formed from them, with the axes in the other order. At our constraint it moves "
            "the sums, 100 to 3,136 bytes each, with a permute and an all-to-all. All collectives of the plan are "
            "present; these are additional.",
        )
        for model in ("inception_v3", "resnet101")
    ),
    (
        "densenet121",
        "ours@*",
        "permute",
        "The gradient of an average pool is a sum over windows of a padded array. XLA splits that array evenly (5 "
        "rows over 2 devices: 3 and 2) and not along its windows, and has to send one row (640 bytes) to correct this.",
    ),
    (
        "*",
        "random*",
        "*",
        "A randomly chosen strategy. Our own moves are constrained one at a time. But if an op itself (a scatter, a "
        "sum over windows, a concatenation) has a layout for which XLA's partitioner has no rule, XLA moves its "
        "operands in its own way. These differences were not traced line by line.",
    ),
]
"""(model, strategy, kind, reason): the first pattern that matches explains a row with an error above NOTED."""


def manual_lines(rows: list[dict[str, Any]], annotated: list[dict[str, Any]]) -> list[str]:
    """Returns the section on the manual lowering, compared with the annotated steps of the same plans."""
    if not rows:
        return []
    done = [r for r in rows if "collectives" in r]
    pairs = [(r, k, b) for r in done for k, b in r["collectives"].items()]
    exact = sum(b["predicted"] == b["compiled"] for _, _, b in pairs)
    more = sum(b["compiled"] > b["predicted"] for _, _, b in pairs)
    worst = max((r["differences"]["gradients"] for r in done if "differences" in r), default=0.0)
    out = [
        "## The manual lowering",
        "",
        "Here the same plans are lowered with `lowering='manual'` (`docs/explanation/local.md`). Each collective",
        "is that of the plan, including reduce-scatters, and the prediction is not adjusted for the habits of XLA",
        "listed above. The models are " + ", ".join(dict.fromkeys(r["model"] for r in rows)) + ".",
        f"{exact} of {len(pairs)} (plan, kind) pairs agree to the byte, and {more} send more than the plan. The",
        "others send less: the compiler runs one collective for two readers that need the same layout, it does",
        "not gather values that it knows to be equal, and JAX hoists what no iteration changes out of a loop",
        "(`docs/explanation/local.md` says how each was traced). The largest difference of a gradient from that",
        f"of the unsharded step is {worst:.0e}. The table lists the pairs that differ in either lowering.",
        "",
        "| model | strategy | devices | kind | plan | manual | annotated, as on CPU → compiled |",
        "|---|---|--:|---|--:|--:|--:|",
    ]
    beside = {(r["model"], r["strategy"], r.get("devices", 8)): r["collectives"] for r in annotated}
    for r, kind, b in pairs:
        a = beside.get((r["model"], r["strategy"], r["devices"]), {}).get(kind)
        if b["predicted"] == b["compiled"] and (a is None or a["on_cpu"] == a["compiled"]):
            continue
        theirs = "" if a is None else f"{a['on_cpu']:,} → {a['compiled']:,}"
        by_hand = "exact" if b["predicted"] == b["compiled"] else f"{b['compiled']:,}"
        for passes, found in r.get("without", {}).items():
            if kind in found:
                again = "exact" if found[kind] == b["predicted"] else f"{found[kind]:,}"
                by_hand += f"; {again} without {passes}"
        out.append(
            f"| {r['model']} | {r['strategy'].split('/')[-1]} | {r['devices']} | {KINDS.get(kind, kind)} "
            f"| {b['predicted']:,} | {by_hand} | {theirs} |"
        )
    out += [f"\n{r['model']}, {r['strategy']}: {r['refused']}" for r in rows if "refused" in r]
    return [*out, ""]


def error(bytes_: dict[str, int]) -> float:
    """Returns the relative error of the predicted bytes."""
    return (bytes_["on_cpu"] - bytes_["compiled"]) / max(bytes_["compiled"], 1)


def reason(model: str, strategy: str, kind: str) -> str:
    """Returns the reason why prediction and program differ, from REASONS."""
    for m, s, k, why in REASONS:
        if fnmatch(model, m) and fnmatch(strategy, s) and fnmatch(kind, k):
            return why
    return "not explained yet"


BASELINES = {
    "data parallel": "data_parallel",
    "FSDP": "fsdp",
    "one weird trick": "owt",
    "Megatron": "megatron/*",
    "ours, split by force": "ours@*",
    "ours": "ours",
}


def summary(cells: list[tuple[dict[str, Any], str, dict[str, int]]]) -> list[str]:
    """Returns a table by strategy and number of devices: the number of pairs and their errors."""
    out = [
        "| method | devices | models | pairs | to the byte | within 1% | median error | largest | of all bytes |"
    ]
    out.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for method, pattern in BASELINES.items():
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
    """Returns the text of docs/evidence/communication.md."""
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
        "Every plan predicts the collectives of a training step. Here the same plans are emitted as JAX shardings and",
        f"compiled by XLA (JAX {result['jax']}) for {result['devices']} and for 32 host devices, and the bytes of the",
        "collectives in the compiled program are compared with the prediction. The models are the zoo's in their",
        "reduced sizes. `bench/audit/communication.py` makes this page. On 8 devices it also runs the step and",
        f"compares it with the unsharded step: over all {len(run)} rows, the largest difference of a gradient is",
        f"{worst:.0e} of the largest gradient.",
        "",
        f"Of {len(cells)} (plan, kind of collective) pairs, {exact} agree to the byte and {near} are within "
        f"{NOTED:.0%}; a note explains each of the others. The "
        f"median error is {errors[len(errors) // 2]:.1%}.",
        "",
        *summary(cells),
        "",
        "Bytes are those of the larger local buffer on one device, times the number of times that a step sends it.",
        "*As on CPU* is the prediction for the collectives that XLA's CPU pipeline forms. It has no reduce-scatter",
        "(it uses an all-reduce and a slice), reduces the gradients of a tensor's readers separately, and reduces a",
        "sum over two split dims one dim at a time. `ours@2x4` is the search's answer on that mesh under a cost",
        "model in which compute is expensive, so that these small models are split at all. `random` strategies",
        "choose every node's split at random. They test the numbers, and how closely XLA follows layouts that",
        "nobody would choose.",
        "",
    ]
    lines += manual_lines(list(by_hand), result["rows"])
    for model in dict.fromkeys(r["model"] for r in result["rows"]):
        lines += _model_lines(result, model)
    return "\n".join(lines).rstrip() + "\n"


def _model_lines(result: dict[str, Any], model: str) -> list[str]:
    """Returns a model's table, with the reasons for rows that differ."""
    same = [n for n, m in result["alike"].items() if m == model]
    lines = [f"## {model}", ""]
    lines += [f"In reduced size, {', '.join(same)} are the same model.", ""] if same else []
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
