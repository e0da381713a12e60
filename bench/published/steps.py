"""Published training steps, priced in their own configurations.

    python -m bench published.steps FILE.csv [--json] [--only PREFIX] [-o bench/results/published_steps.json]

Nothing is fitted: cards are machine files (``bench/published/cards.py``), and frameworks are entries of
``pase.stated.program`` with their executors. Values missing from a row take the framework's defaults (``configured``).
A row that cannot be priced states why. JSON: {"rows": [{"id", "step_s", "predicted_s", "error", "why_not"}],
"median_error", "tau"}; median_error and tau are over the rows that have a step time and a price.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bench.cases import SHARED
from bench.published.cards import card
from bench.published.models import graph_of, head_width, is_gated
from bench.published.programs import is_old, program_of
from bench.published.rows import PublishedRow, read
from bench.runner import option, parser, save
from pase import costmodels
from pase.errors import Infeasible, PaseError
from pase.ir.precision import FP8
from pase.machine import Machine, load
from pase.stated.price import Priced, price_strategy
from pase.stated.program import Program
from pase.stated.strategy import Precision, Remat, Strategy

__all__ = ["PricedRun", "configured", "main", "price_row", "program_of", "report", "summary"]


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A row and its price, or the reason why it has none."""

    row: PublishedRow
    priced: Priced | None
    why_not: str | None

    @property
    def step_s(self) -> float | None:
        try:
            return self.row.number("step_s") or None
        except PaseError:
            return None

    @property
    def error(self) -> float | None:
        if self.priced is None or self.step_s is None:
            return None
        return self.priced.step_s / self.step_s - 1

    @property
    def inside(self) -> bool | None:
        """Whether the run took a time within the price's error bar; None without a time or a bar."""
        bar = None if self.priced is None else self.priced.bar
        return None if bar is None or self.step_s is None else bar.low_s <= self.step_s <= bar.high_s

    @property
    def rate_error(self) -> float | None:
        """The error of TFLOP/s, for a run that states these and no time."""
        counted = counted_flops(self.row) if self.step_s is None and self.priced is not None else None
        if counted is None or self.priced is None:
            return None
        rate, gpus = self.row.number("tflops_per_gpu"), self.row.whole("gpus")
        return counted / (self.priced.step_s * gpus) / (rate * 1e12) - 1 if rate and gpus else None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.row.id,
            "step_s": self.step_s,
            "predicted_s": None if self.priced is None else self.priced.step_s,
            "error": self.error,
            "why_not": self.why_not,
        }


_ZERO = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3, "fsdp": 3}
_NODE = 8


def configured(row: PublishedRow, program: Program) -> tuple[Strategy, int]:
    """Returns (the row's strategy, its batch). Raises Infeasible if the layout is not stated.

    Defaults for what is not stated: no recomputation unless the row's TFLOP/s count it, or, if that does not fit, the
    least recomputation that fits (``price_row``; the row did run). ZeRO is 1 under Megatron (its distributed optimizer)
    and 3 elsewhere. The micro-batch is the largest that fits, or one example with pipeline stages. Sequence parallelism
    is on if tensor parallelism is.
    """
    gpus, batch = row.whole("gpus"), row.whole("global_batch")
    if not gpus:
        raise Infeasible("gpus is not told")
    tp, pp, cp = (row.whole(k) for k in ("tp", "pp", "cp"))
    if tp is None and pp is None and row.whole("dp") is None:
        raise Infeasible("the layout is not told")
    tp, pp, cp = tp or 1, pp or 1, cp or 1
    rest = tp * pp * cp
    if gpus % rest:
        raise Infeasible(f"{gpus} devices are no whole number of groups of {rest}")
    ranks = gpus // rest
    if not batch:
        raise Infeasible("global_batch is not told")
    if "offloaded" in row.notes:
        raise Infeasible("its recomputation keeps results in the host's memory, which has no price here")
    if batch % ranks:
        raise Infeasible(f"a batch of {batch} does not divide by {ranks} data-parallel ranks")
    kind = (row.text("dp_type") or "").lower()
    if kind == "ddp" and row.source in ("mbr", "bwl"):
        kind = "zero1"  # the page's term for no FSDP; the recipes' optimizer is distributed
    zero = _ZERO.get(kind, 1 if program.name.startswith("megatron") else 3) if ranks * cp > 1 else 0
    data = ranks if zero == 0 else _replicas(row, ranks) if kind == "hsdp" else 1
    own = batch // ranks
    chunks = _chunks(row, pp)
    micro = _micro_batch(row, own)
    # Aleph Alpha's sheets with a column for sequence parallelism are in data/seqpara: earlier sweeps did not use it.
    told_otherwise = "no" if row.source == "aal" else "yes"
    if row.text("precision") is None and FP8 in card(row.text("gpu") or "?").device.peak_flops:
        raise Infeasible("the precision is not told, and the device has products in eight bits, too")
    precision = (row.text("precision") or "BF16").upper()
    remat = (row.text("act_ckpt") or ("full" if counts_recomputation(row) else "none")).lower()
    expert = row.whole("ep") or 1
    precision_name: Precision = "nvfp4" if "FP4" in precision else "fp8" if "FP8" in precision else "bf16"
    s = Strategy(
        data=data,
        shard=ranks // data,
        zero=zero,  # type: ignore[arg-type]
        tensor=tp,
        sequence=tp > 1 and (row.text("sp") or told_otherwise).lower() == "yes",
        context=cp,
        heads=cp > 1 and row.text("cp_comm") == "a2a",
        expert=math.gcd(ranks, expert),
        pipeline=pp,
        chunks=chunks,
        micro=micro if own % micro == 0 else 1,
        remat=remat if remat in ("none", "selective", "full") else "none",  # type: ignore[arg-type]
        precision=precision_name,
        asynchronous=tp > 1 and overlaps_tensor(row, precision_name),
        offload=_offloaded(row),
    )
    return s, batch


def _micro_batch(row: PublishedRow, own: int) -> int:
    """Returns the examples of a micro-batch on a data-parallel rank that has ``own`` examples."""
    stages, told = row.whole("pp") or 1, row.whole("micro_batch")
    if (
        told and row.source == "mxt"
    ):  # MaxText's per_device_batch_size: of a chip, not of a data-parallel rank
        return told * (row.whole("tp") or 1) * (row.whole("cp") or 1)
    if told or stages == 1:
        return told or own
    return max(own // stages, 1) if row.source == "ttn" else 1  # torchtitan: a micro-batch for each stage


_BRIDGE_OFFLOADS: Mapping[tuple[str, str, str], int] = {
    ("llama-3 70b", "GB300", "BF16"): 30,
    ("llama-3 70b", "GB300", "FP8"): 20,
    ("llama-3 70b", "GB200", "BF16"): 20,
    ("llama-3 70b", "GB200", "FP8"): 40,
    ("llama-3 70b", "B200", "FP8"): 5,
    ("llama-3.1 405b", "GB300", "BF16"): 40,
    ("llama-3.1 405b", "B300", "BF16"): 40,
}
"""(Model, card, precision) -> how many layers' activations the recipe with FSDP keeps in the host's memory:
cpu_offloading_num_layers in Megatron-Bridge, scripts/performance/configs/llama3 of v0.2.2 (container 25.11) and
perf_recipes/llama of August 2026."""


def _offloaded(row: PublishedRow) -> int:
    """Returns how many blocks' activations the row keeps in the host's memory."""
    if row.source not in ("mbr", "bwl") or "fsdp=" not in row.notes:
        return 0
    gpu = (row.text("gpu") or "").partition("-")[0]
    recipe = ((row.text("model") or "").lower(), gpu, (row.text("precision") or "").upper())
    return _BRIDGE_OFFLOADS.get(recipe, 0)


def overlaps_tensor(row: PublishedRow, precision: Precision) -> bool:
    """Returns whether collectives of tensor parallelism overlap with the products that they feed.

    They do if the notes say so (torchtitan's async TP, Megatron-LM's README), and by recipe: Megatron-Bridge's for
    Llama 3 (scripts/performance/configs/llama: llama31_llm_pretrain.py has userbuffers for 405B, but not with NVFP4;
    llama3_llm_finetune.py: tp_comm_overlap if TP is above 1; qwen3_llm_pretrain.py switches it off where Qwen3 has TP
    on H100), and NeMo's for GPT-3 175B (NeMo-Framework-Launcher, 175b_fp8_performance.yaml: ub_tp_comm_overlap; it is
    off in llama2_70b.yaml).
    """
    notes, model = row.notes, (row.text("model") or "").lower()
    if ("async" in notes and "vanilla" not in notes) or "tp and pp communication overlapped" in notes:
        return True
    if row.source in ("mbr", "bwl"):
        return model.startswith("llama-3") and precision != "nvfp4"
    return row.source == "nem" and model.startswith("gpt-3 175b")


def counts_recomputation(row: PublishedRow) -> bool:
    """Returns whether a Megatron row's TFLOP/s and step time multiply to four passes over its layers.

    Its counter at that time was 96·B·s·l·h²(1 + s/6h) + 6·B·s·h·V, with recomputation (Narayanan et al. 2021, 5.1).
    """
    if not is_old(row) or row.text("tflops_kind") != "given" or row.text("step_kind") != "given":
        return False
    rate, step, gpus = (row.number(k) for k in ("tflops_per_gpu", "step_s", "gpus"))
    counted = _with_recomputation(row)
    if not (rate and step and gpus and counted):
        return False
    return abs(rate * 1e12 * step * gpus / counted - 1) < 0.01


def _with_recomputation(row: PublishedRow) -> float | None:
    """Returns the FLOPs of a step by Megatron's counter of 2021; None if the row's shape is not that of a GPT."""
    known = [row.number(k) for k in ("global_batch", "seq", "layers", "hidden", "vocab", "ffn")]
    batch, seq, layers, h, vocab, ffn = (x or 0.0 for x in known)
    if not all(known) or ffn != 4 * h:
        return None
    tokens = batch * seq
    return 96 * tokens * layers * h * h * (1 + seq / (6 * h)) + 6 * tokens * h * vocab


def counted_flops(row: PublishedRow) -> float | None:
    """Returns the FLOPs of a step as the row's TFLOP/s count them; None if their convention is unknown.

    Alpa's count recomputation (its notes say so). MaxText's are six per token and weight of the products, plus the
    whole attention, not its causal half.
    """
    if "counts recomputation" in row.notes:
        return _with_recomputation(row)
    if row.source != "mxt":
        return None
    known = [row.whole(k) for k in ("layers", "hidden", "heads", "ffn", "vocab", "seq", "global_batch")]
    layers, h, heads, ffn, vocab, seq, batch = (x or 0 for x in known)
    if not all(known):
        return None
    wide, kv = head_width(row), row.whole("kv_heads") or heads
    weights = layers * (2 * h * wide * (heads + kv) + (3 if is_gated(row) else 2) * h * ffn) + vocab * h
    return float(batch * seq * (6 * weights + 12 * layers * seq * wide * heads))


def _replicas(row: PublishedRow, ranks: int) -> int:
    """Returns the number of groups of an HSDP run: TPU slices if the notes name them ("4x v4-128"), else nodes of 8."""
    slices = re.search(r"(\d+)x v\d\w*-\d+", row.notes)
    groups = int(slices.group(1)) if slices else ranks // _NODE
    return groups if groups and ranks % groups == 0 else 1


def _chunks(row: PublishedRow, stages: int) -> int:
    """Returns the number of chunks of layers per stage. Megatron overlaps sends between stages with compute only in its
    interleaved schedule: a run that does so without stating a number has one block per chunk. torchtitan's schedule has
    two chunks (torchtitan/parallelisms/pipelining_utils.py)."""
    told = row.whole("vp")
    if told is None and row.source == "ttn" and stages > 1 and "interleaved" in row.notes:
        return 2
    if told is None and stages > 1 and "pp communication overlapped" in row.notes:
        return max((row.whole("layers") or 1) // stages, 1)
    return told or 1


def price_row(row: PublishedRow, machine: Machine | None = None) -> PricedRun:
    """Returns a row's price on its card, or on this machine. Problems are reported in the result, never raised: rows
    are external input."""
    try:
        why_not = row.text("why_not")
        if why_not:
            raise Infeasible(why_not)
        program = program_of(row)
        s, batch = configured(row, program)
        model = costmodels.get("analytic", machine or card(row.text("gpu") or "?"))
        tries = [s]
        if row.text("micro_batch") is None and s.pipeline == 1:  # not stated: the largest that fits
            tries = [replace(s, micro=k) for k in range(s.micro or 1, 0, -1) if (s.micro or 1) % k == 0]
        # Not stated: the least recomputation that fits, as the run did. Recipes that offload recompute nothing.
        if row.text("act_ckpt") is None and not s.offload:
            least = get_args(Remat).index(s.remat or "none")
            tries = [replace(t, remat=how) for how in get_args(Remat)[least:] for t in tries]
        for t in tries:
            at_once = (t.micro or 1) * t.ranks
            samples = max(at_once, 2)
            graph = graph_of(row, samples, t.tensor, written_out=is_old(row))
            priced = price_strategy(graph, t, program, model, batch, doubled=at_once == 1)
            if priced.fits:
                return PricedRun(row=row, priced=priced, why_not=None)
        return PricedRun(row=row, priced=priced, why_not=None)
    except PaseError as e:
        return PricedRun(row=row, priced=None, why_not=str(e))


def summary(answers: list[PricedRun]) -> dict[str, Any]:
    """Returns the median absolute error and Kendall's tau over rows with both a time and a price; None without any.

    barred: of these rows, those whose price has an error bar; inside: the fraction of them that took a time within it,
    0.8 if the bars are right.
    """
    from scipy.stats import kendalltau

    known = [a for a in answers if a.error is not None]
    measured = [a.step_s for a in known]
    predicted = [a.priced.step_s for a in known if a.priced is not None]
    within = [a.inside for a in known if a.inside is not None]
    return {
        "rows": len(known),
        "median_error": float(np.median([abs(a.error or 0.0) for a in known])) if known else None,
        "mean_error": float(np.mean([a.error or 0.0 for a in known])) if known else None,
        "tau": float(kendalltau(measured, predicted).statistic) if len(known) > 1 else None,
        "barred": len(within),
        "inside": float(np.mean(within)) if within else None,
    }


def _groups(answers: list[PricedRun]) -> Iterator[tuple[str, list[PricedRun]]]:
    yield "all", answers
    yield "without pipeline", [a for a in answers if not a.row.pipelined]
    yield "with pipeline", [a for a in answers if a.row.pipelined]
    for source in dict.fromkeys(a.row.source for a in answers):
        yield source, [a for a in answers if a.row.source == source]


def main() -> None:
    """Prints a row for each run of the file, predicted and measured, as text or JSON; with -o, writes their summary."""
    report(__doc__, read, SHARED / "published_steps" / "given.csv")


def report(doc: str | None, read: Callable[[str], list[PublishedRow]], default: Path) -> None:
    """The command of a table of steps. doc: its help. default: the table without an argument."""
    args = parser(
        doc,
        "",
        option("file", nargs="?", default=str(default)),
        option("-o", "--out", help="write the errors and the order by kind of run here, without the rows"),
        option("--json", action="store_true"),
        option("--only", default="", help="the rows whose id begins with this"),
        option("--machine", metavar="NAME", help="price every row by this machine, a name or a .toml file"),
    ).parse_args()
    try:
        machine = None if args.machine is None else load(args.machine)
        rows = [r for r in read(args.file) if r.id.startswith(args.only)]
    except PaseError as e:
        print(f"Error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    answers = [price_row(r, machine) for r in rows]
    whole = summary(answers)
    record = {
        "rows": [a.to_json() for a in answers],
        "median_error": whole["median_error"],
        "tau": whole["tau"],
    }
    found = digest(answers)
    if args.out:
        save(found, args.out)
    if args.json:
        json.dump(record, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    for a in answers:
        print(_line(a))
    print()
    for name, group in found["groups"].items():
        tau = "" if group["tau"] is None else f"  tau {group['tau']:.3f}"
        errors = f"median {group['median_error']:.1%}  mean {group['mean_error']:+.1%}"
        bars = (
            ""
            if group["inside"] is None
            else f"  {group['inside']:.0%} of {group['barred']} within their bar"
        )
        print(f"{name:18s} {group['rows']:4d} rows  {errors}{tau}{bars}")
    for gpu, group in found["by_rate"].items():
        errors = f"median {group['median_error']:.1%}  mean {group['mean_error']:+.1%}"
        print(f"TFLOP/s, {gpu:9s} {group['rows']:4d} rows  {errors}")
    if found["memory_rows"]:
        print(f"memory: {found['memory_rows']} rows, median {found['memory_median_error']:.1%}")
    print(f"do not fit: {', '.join(found['do_not_fit']) or 'none'}")


def digest(answers: list[PricedRun]) -> dict[str, Any]:
    """Returns errors and order by kind of run, and the runs that do not fit by the price, without the rows."""
    groups = {name: summary(group) for name, group in _groups(answers)}
    priced = [(a.row, a.priced) for a in answers if a.priced is not None]
    memory = [
        abs((p.memory.arrays if row.memory_is_allocated else p.memory.total) / row.memory_bytes - 1)
        for row, p in priced
        if row.memory_bytes
    ]
    return {
        "runs": len(answers),
        "priced": len(priced),
        "groups": {name: found for name, found in groups.items() if found["rows"]},
        "by_rate": _by_rate(answers),
        "memory_rows": len(memory),
        "memory_median_error": float(np.median(memory)) if memory else None,
        "do_not_fit": [row.id for row, p in priced if not p.fits],
    }


def _by_rate(answers: list[PricedRun]) -> dict[str, dict[str, float]]:
    """Returns the errors of predicted TFLOP/s by kind of device, for runs that state these and no time."""
    found: dict[str, list[float]] = {}
    for a in answers:
        if a.rate_error is not None:
            found.setdefault(a.row.text("gpu") or "?", []).append(a.rate_error)
    return {
        gpu: {
            "rows": len(errors),
            "median_error": float(np.median(np.abs(errors))),
            "mean_error": float(np.mean(errors)),
        }
        for gpu, errors in found.items()
    }


def _line(a: PricedRun) -> str:
    model, gpu, gpus = (a.row.text(k) or "?" for k in ("model", "gpu", "gpus"))
    head = f"{a.row.id:8s} {model:18s} {gpu:10s} x{gpus:6s}"
    if a.priced is None:
        return f"{head} not priced: {a.why_not}"
    p = a.priced
    against = "" if a.error is None else f" measured {a.step_s:8.3f} s  {a.error:+7.1%}"
    if a.rate_error is not None:
        against = f" TFLOP/s told {a.row.text('tflops_per_gpu'):>6s}  {a.rate_error:+7.1%}"
    memory = f"  {p.memory.total / 2**30:6.1f} GiB" + ("" if p.fits else " (too much)")
    told = f" (told {a.row.memory_bytes / 2**30:.1f})" if a.row.memory_bytes else ""
    return f"{head} {p.step_s:8.3f} s{against}{memory}{told}  {p.program} {p.strategy}"
