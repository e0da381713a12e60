"""vTrain's measured step times of GPTs on 8 A100, predicted.

    python -m bench published.vtrain

The rows are Megatron-DeepSpeed GPTs on one node, with and without pipeline stages. Nothing is fitted to them. The
machine is a100x8 with the NCCL all-reduce times that vTrain measured on the same node (its own inputs, in the same
folder) in place of the formulas; the strategy is the Megatron baseline (or data parallelism) at the row's degrees; the
program is Megatron of 2021 and 2022 on the eager executor of ``pase.plan.step``, whose optimizer passes over gradients
and parameters besides Adam. Micro-batches, float16 parameters with float32 copies, no
recomputation: with it, 8 samples of width 2048 would run at 89% of the peak. Rows with stages are 1F1B of equal stages
(``pase.stated``) on the same executor. Writes bench/results/vtrain.json.

    python -m bench published.vtrain --multi ground_truth_multi.csv

also predicts the rows without pipeline of vTrain's other table (VIA-Research/vTrain, data/), which was first looked at
after all code was written: 64 and 256 A100 over 800 Gb/s per node, full recomputation, Megatron's optimizer.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from bench.cases import SHARED
from bench.published.megatron_gpt import gpt
from bench.runner import option, parser, save, wanted
from pase import costmodels, machine
from pase.baselines import Baseline, baselines
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import CollectiveCurve, CostModel, Curve, Machine, Mesh, mesh_from
from pase.plan.step import EAGER, Executor, StepTime, step_time
from pase.stated.price import Priced, price_strategy
from pase.stated.program import PROGRAMS
from pase.stated.strategy import Strategy
from pase.stated.timeline import pipelined as one_f_one_b

DATA = SHARED / "traces" / "vtrain"
_MEGATRON = PROGRAMS["megatron_2021"]
STAGES = replace(EAGER, update_bytes=_MEGATRON.executor.update_bytes, traffic=_MEGATRON.executor.traffic)
"""The executor of rows with stages, whose whole passes ``pase.stated`` counts."""
MEGATRON = replace(
    STAGES, update_bytes=STAGES.update_bytes + _MEGATRON.whole_passes * _MEGATRON.bytes.gradient
)
"""The executor of rows without stages."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One measured configuration."""

    gpus: int
    batch: int
    micro_batch: int
    d: int
    heads: int
    layers: int
    seq: int
    tensor: int
    data: int
    pipeline: int
    measured_s: float

    @property
    def micro_batches(self) -> int:
        return self.batch // self.data // self.micro_batch


def rows(folder: Path = DATA) -> list[MeasuredRow]:
    """Returns all measured rows of the single node, including pipelines."""
    with open(folder / "ground_truth_single.csv") as f:
        return _rows([r for r in csv.reader(f) if not r[0].startswith("#")])


def rows_of_many_nodes(path: Path) -> list[MeasuredRow]:
    """Returns the rows of the other table without a pipeline and with tensor parallelism within a node."""
    with open(path, encoding="utf-8-sig") as f:
        found = _rows([r[1:] for r in csv.reader(f) if r and not r[0].startswith("Param")])
    return [r for r in found if r.pipeline == 1 and r.tensor <= 8]


def _rows(found: list[list[str]]) -> list[MeasuredRow]:
    names = [n for n in MeasuredRow.__dataclass_fields__ if n != "measured_s"]
    return [
        MeasuredRow(**dict(zip(names, map(int, r[:10]), strict=True)), measured_s=float(r[10]) / 1e3)
        for r in found
    ]


def with_measured_all_reduce(base: Machine, gpu: str, folder: Path = DATA) -> Machine:
    """Returns the machine with vTrain's NCCL tables: sizes of powers of two, in-place times, made monotonic."""
    curves = []
    for ways in (2, 4, 6, 8):
        with open(folder / f"{gpu}_AR_GPU{ways}_1M_1024M_LUT.csv") as f:
            table = [(float(r[0]), float(r[5]) * 1e-9) for r in list(csv.reader(f))[1:]]
        kept = [(n, s) for n, s in table if float(n / 2**20).is_integer() and (int(n) >> 20).bit_count() == 1]
        seconds = np.maximum.accumulate([s for _, s in kept])
        curve = Curve(nbytes=tuple(n for n, _ in kept), seconds=tuple(map(float, seconds)))
        curves.append(CollectiveCurve(kind="all_reduce", ways=(ways, 1), curve=curve))
    return replace(base, collectives=(*base.collectives, *curves))


def vocabulary(tensor: int) -> int:
    """Returns the rows of the embedding, which vTrain divides without padding (src/model/gpt_modeling.py).

    >>> vocabulary(8) / 8
    6282.0
    """
    return 50257 // tensor * tensor


@cache
def graph_of(batch: int, seq: int, layers: int, d: int, heads: int, vocab: int, **how: Any) -> Graph:
    """Returns the simplified graph of a Megatron GPT for a batch over all data-parallel devices."""
    loss_fn, params, data = gpt(batch=batch, seq=seq, layers=layers, d=d, heads=heads, vocab=vocab, **how)
    return named(simplify(trace(loss_fn, params, data).graph))


def strategy(
    graph: Graph, data: int, tensor: int, m: Machine, model: CostModel, *, by_sequence: bool = False
) -> Baseline:
    """Returns Megatron's own strategy at these degrees."""
    kind = "megatron_sp" if by_sequence else "megatron"
    name = f"{kind}_{data}x{tensor}" if tensor > 1 else "data_parallel"
    if data * tensor == 1:
        mesh = Mesh(names=("data",), sizes=(1,))
        configs = {n.name: np.full(1, -1, np.int8) for n in graph.nodes}
        return Baseline(name="alone", mesh=mesh, strategy=configs, cost=0.0)
    (found,) = baselines(graph, data * tensor, m, model, only=(name,))
    assert isinstance(found, Baseline), found
    return found


def predict(
    row: MeasuredRow, m: Machine, model: CostModel, executor: Executor = MEGATRON, recompute: str = "none"
) -> StepTime:
    """Predicts the row's step without a pipeline."""
    assert row.pipeline == 1
    vocab = vocabulary(row.tensor)
    graph = graph_of(
        row.micro_batch * row.data, row.seq, row.layers, row.d, row.heads, vocab, recompute=recompute
    )
    s = strategy(graph, row.data, row.tensor, m, model)
    return step_time(
        graph,
        s.mesh,
        s.strategy,
        model,
        executor=executor,
        micro_batches=row.micro_batches,
        optimizer="adam_master",
    )


def composed_s(
    row: MeasuredRow, whole: StepTime, m: Machine, model: CostModel, executor: Executor = MEGATRON
) -> float:
    """Returns the seconds of a row's step as vTrain composes them: of the profile of one layer and of that of the rest.

    In a step, a host that is late with one layer catches up while the device computes the logits. A sum of profiles
    counts the longer of the two in each profile of each pass.
    """
    one, two = (predict(replace(row, layers=n), m, model, executor).passes for n in (1, 2))
    seconds = 0.0
    for a, b in zip(one, two, strict=True):
        layer = np.array([b.busy_s - a.busy_s, b.host_s - a.host_s])
        rest = np.array([a.busy_s, a.host_s]) - layer
        seconds += row.layers * float(layer.max()) + float(rest.max())
    return whole.total_s + whole.micro_batches * (seconds - whole.micro_batch_s)


def predict_pipelined(row: MeasuredRow, model: CostModel) -> Priced:
    """Predicts the row's step with stages (1F1B), by the same executor and optimizer; one transfer at a time."""
    at_once = row.micro_batch * row.data
    samples = max(at_once, 2)  # a batch of one has no dim
    vocab = vocabulary(row.tensor)
    graph = graph_of(samples, row.seq, row.layers, row.d, row.heads, vocab, recompute="none")
    s = Strategy(
        data=row.data,
        tensor=row.tensor,
        pipeline=row.pipeline,
        micro=row.micro_batch,
        remat="none",
        schedule="1f1b",
    )
    program = replace(_MEGATRON, executor=STAGES)
    return price_strategy(graph, s, program, model, row.batch, doubled=at_once == 1)


def accuracy(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """Returns errors of predictions (mean, median, and after removing one common factor), and Kendall's tau."""
    m, p = np.array(measured), np.array(predicted)
    error = p / m - 1
    # The error after one common factor is removed measures the order and the proportions.
    shape = p / m / np.median(p / m) - 1
    return {
        "rows": len(m),
        "mape": float(np.abs(error).mean()),
        "mean_error": float(error.mean()),
        "median_absolute_error": float(np.median(np.abs(error))),
        "mape_but_for_one_factor": float(np.abs(shape).mean()),
        "kendall_tau": float(kendalltau(m, p).statistic) if len(m) > 1 else None,
    }


def summary(found: list[tuple[MeasuredRow, StepTime]]) -> dict[str, Any]:
    """Returns ``accuracy``, and the share of rows that are host-bound."""
    measured, predicted = [r.measured_s for r, _ in found], [t.total_s for _, t in found]
    error = np.array(predicted) / np.array(measured) - 1
    host = np.array([t.host_bound for _, t in found])
    return {
        **accuracy(measured, predicted),
        "host_bound_rows": int(host.sum()),
        "mape_host_bound": float(np.abs(error[host]).mean()) if host.any() else None,
        "mape_device_bound": float(np.abs(error[~host]).mean()) if (~host).any() else None,
    }


def by(found: list[tuple[MeasuredRow, StepTime]], *fields: str) -> dict[str, Any]:
    """Returns summaries of the rows that agree in these fields."""
    keys = sorted({tuple(getattr(r, f) for f in fields) for r, _ in found})
    return {
        ",".join(f"{f}={v}" for f, v in zip(fields, key, strict=True)): summary(
            [(r, t) for r, t in found if tuple(getattr(r, f) for f in fields) == key]
        )
        for key in keys
    }


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The components whose sums are the measured rows of one width and tensor parallelism without stages, as far as the
    rows determine them."""

    layer_s: dict[int, float]
    """Micro-batch → seconds of a layer for one micro-batch."""
    rest_s: dict[int, float]
    """Micro-batch → all other seconds of one micro-batch."""
    once_s: dict[tuple[int, int], float]
    """(layers, data parallelism) → seconds of what a step does once."""
    deviation: float
    """The largest relative difference of a row from its sum."""
    rows_left_over: int
    """The number of rows that could contradict the profile."""


def profile(mine: list[MeasuredRow]) -> StepProfile:
    """Fits a profile, with two unknowns for each micro-batch (a layer, and everything else), and one for each number of
    layers and data parallelism (what a step does once)."""
    micro = sorted({r.micro_batch for r in mine})
    once = sorted({(r.layers, r.data) for r in mine})
    a = np.zeros((len(mine), 2 * len(micro) + len(once)))
    for i, r in enumerate(mine):
        at = 2 * micro.index(r.micro_batch)
        a[i, at : at + 2] = r.micro_batches * r.layers, r.micro_batches
        a[i, 2 * len(micro) + once.index((r.layers, r.data))] = 1
    y = np.array([r.measured_s for r in mine])
    x, _, rank, _ = np.linalg.lstsq(a, y, rcond=None)
    # An unknown is determined if all solutions agree on it.
    told = np.isclose(np.diag(np.linalg.pinv(a) @ a), 1.0, atol=1e-9)
    named = dict(
        zip([*((k, n) for n in micro for k in ("layer", "rest")), *once], range(len(x)), strict=True)
    )
    known = {key: float(x[i]) for key, i in named.items() if told[i]}
    return StepProfile(
        layer_s={n: known["layer", n] for n in micro if ("layer", n) in known},
        rest_s={n: known["rest", n] for n in micro if ("rest", n) in known},
        once_s={k: known[k] for k in once if k in known},
        deviation=float(np.abs(a @ x / y - 1).max()),
        rows_left_over=len(mine) - int(rank),
    )


def composed(found: list[MeasuredRow]) -> dict[str, Any]:
    """Returns how well the rows are sums of a few profiles, one for each width, tensor parallelism and micro-batch: the
    number of rows that could contradict that, and the largest difference."""
    keys = sorted({(r.d, r.tensor, r.micro_batch) for r in found})
    made = [profile([r for r in found if (r.d, r.tensor, r.micro_batch) == k]) for k in keys]
    return {
        "rows": len(found),
        "profiles": len(made),
        "rows_left_over": sum(p.rows_left_over for p in made),
        "largest_deviation": max(p.deviation for p in made),
    }


def from_profile(row: MeasuredRow, p: StepProfile, model: CostModel) -> float | None:
    """Returns the seconds of a row with stages, composed from the components of measured rows without stages.

    Stages are equal. Everything else in a micro-batch (nearly all of it logits and loss) belongs to the last stage. A
    third of a layer is forward. The once-per-step work is that for a stage's layers. None if the rows do not determine
    all of these.
    """
    of_layers = sorted((n, s) for (n, data), s in p.once_s.items() if data == row.data)
    if row.micro_batch not in p.layer_s.keys() & p.rest_s.keys() or len(of_layers) < 2:
        return None
    slope, base = np.polyfit([k for k, _ in of_layers], [s for _, s in of_layers], 1)
    n = row.layers / row.pipeline
    stages = [n * p.layer_s[row.micro_batch]] * row.pipeline
    stages[-1] += p.rest_s[row.micro_batch]
    mesh = mesh_from(f"stage={row.pipeline},inner={row.data * row.tensor}", row.gpus)
    send_s = float(model.collective("permute", mesh, 1, 2.0 * row.micro_batch * row.seq * row.d))
    forward, backward = [s / 3 for s in stages], [2 * s / 3 for s in stages]
    pipe = one_f_one_b(forward, backward, row.micro_batches, 1, send_s, "1f1b", sends_overlap=False)
    return pipe.step_s + max(float(base + slope * n), 0.0)


def from_other_degrees(found: list[tuple[MeasuredRow, StepTime]]) -> dict[str, Any]:
    """Returns the accuracy of rows predicted from rows of the same model and micro-batch at another degree: their
    measured time multiplied by the ratio of the two predictions. A what-if of a traced run scales by the same prices if
    no kernel was measured."""
    pairs: dict[str, list[tuple[float, float]]] = {"tensor": [], "data": []}
    for r, t in found:
        for o, u in found:
            if (r.d, r.heads, r.layers, r.seq, r.micro_batch) != (
                o.d,
                o.heads,
                o.layers,
                o.seq,
                o.micro_batch,
            ):
                continue
            if r.tensor != o.tensor:
                pairs["tensor"].append((r.measured_s, o.measured_s * t.total_s / u.total_s))
            elif r.data != o.data:
                pairs["data"].append((r.measured_s, o.measured_s * t.total_s / u.total_s))
    return {k: accuracy(*zip(*v, strict=True)) for k, v in pairs.items() if v}


def pipelined(found: list[MeasuredRow], predicted: list[float]) -> dict[str, Any]:
    """Returns the ``accuracy`` of rows with stages: all, and by stages and tensor parallelism."""
    groups: dict[str, list[int]] = {"all": list(range(len(found)))}
    for i, r in enumerate(found):
        groups.setdefault(f"pipeline={r.pipeline},tensor={r.tensor}", []).append(i)
    return {
        k: accuracy([found[i].measured_s for i in at], [predicted[i] for i in at])
        for k, at in sorted(groups.items())
        if at
    }


def staged_rows(
    staged: list[MeasuredRow], plain: list[MeasuredRow], model: CostModel
) -> dict[str, list[tuple[MeasuredRow, float]]]:
    """Returns rows with stages and their predicted times: by the cost model, and from measured rows without stages."""
    keys = {(r.d, r.tensor) for r in plain}
    known = {k: profile([r for r in plain if (r.d, r.tensor) == k]) for k in keys}
    measured = []
    for r in staged:
        p = known.get((r.d, r.tensor))
        seconds = from_profile(r, p, model) if p else None
        if seconds is not None:
            measured.append((r, seconds))
    priced = [(r, predict_pipelined(r, model).step_s) for r in staged]
    return {"pipelined": priced, "pipelined, from rows without": measured}


def main() -> None:
    """Writes bench/results/vtrain.json: predicted and measured steps, by measured and computed collectives."""
    args = parser(
        __doc__,
        "vtrain",
        option("--multi", type=Path, help="vTrain's data/ground_truth_multi.csv"),
        option("--only", action="append", metavar="TEXT", help="the rows with this in their name"),
    ).parse_args()
    base = machine.load("a100x8")
    tables = with_measured_all_reduce(base, "a100")
    every = rows()
    names = [f"{r.d} wide, {r.tensor} tensor, {r.micro_batch} micro" for r in every]
    texts = wanted(names, args.only or ())
    chosen = [r for name, r in zip(names, every, strict=True) if name in texts]
    measured = [r for r in chosen if r.pipeline == 1]
    staged = [r for r in chosen if r.pipeline > 1]
    out: dict[str, Any] = {"composed": composed(measured)}
    for label, m in (("measured all-reduce", tables), ("formulas alone", base)):
        model = costmodels.get("analytic", m)
        found = [(r, predict(r, m, model)) for r in measured]
        out[label] = {
            "all": summary(found),
            "from other degrees": from_other_degrees(found),
            "by_tensor": by(found, "tensor"),
            "by_micro_batch": by(found, "micro_batch"),
            "by_width_tensor_micro_batch": by(found, "d", "tensor", "micro_batch"),
        }
        if m is tables:
            sums = [composed_s(r, t, m, model) for r, t in found]
            out["as sums of profiles"] = accuracy([r.measured_s for r in measured], sums)
    for label, answers in staged_rows(staged, measured, costmodels.get("analytic", tables)).items():
        out[label] = pipelined([r for r, _ in answers], [s for _, s in answers])
    if args.multi:
        node = replace(base.levels[1], bandwidth_bytes_per_s=800e9 / 8 / 8)
        m = replace(base, levels=(base.levels[0], node))
        model = costmodels.get("analytic", m)
        found = [(r, predict(r, m, model, recompute="full")) for r in rows_of_many_nodes(args.multi)]
        out["many nodes"] = {"all": summary(found), "by_tensor": by(found, "d", "tensor")}
    print(json.dumps(out, indent=1))
    save({"executor": f"{EAGER.source}. {_MEGATRON.source}", **out}, args.out)
