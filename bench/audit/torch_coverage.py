"""Which PyTorch model classes can be read and searched.

    python -m bench audit.torch_coverage                       # each class without a row by the present reader
    python -m bench audit.torch_coverage --only Llama --again  # these again
    python -m bench audit.torch_coverage --sample 40           # some, spread evenly over the alphabet
    python -m bench audit.torch_coverage --failing             # those that torch.export takes and pase does not
    python -m bench audit.torch_coverage --list timm           # another list: huggingface, timm, torchvision

The lists are the causal language models of the installed transformers, and three from PyTorch's own benchmarks
(pytorch/pytorch, benchmarks/dynamo/*_models_list.txt, read 2026-11-22): the classes of transformers, the models of
timm, and those of torchbench that torchvision has (the others are not on any index). Each model is built on meta
tensors from its configuration's defaults, which are a published size; models of transformers get two layers if they can
be built so. Nothing is downloaded and no weight is made. A list whose package is not installed is left out. Each class
runs in its own process.

``exported``: pase traced it; if not, ``pase.frontends.torch.export.module`` says whether plain torch.export takes the
same step. ``lowered``: every op has a rule. ``searched``: the best strategy for 8 devices was found and proven.
``flops``: of products, convolutions and attention, and what PyTorch's FlopCounterMode counts for the same step.
``parameters_equal``: each parameter has the module's number of bytes, and gets a gradient if PyTorch's own backward
gives it one. ``reader``: a digest of the files that read a module; a row with another digest is measured again. Seconds
are CPU time. Writes bench/results/torch_coverage.json.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import sys
import time
from argparse import Namespace
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from bench.cases import csv_rows
from bench.processes import forks_of, row_apart
from bench.runner import Benchmark, option, wanted

PRELOADED = ("torch.export", "pase.compiler.compilation", "pase.frontends.torch.frontend")
OF_TRANSFORMERS = "transformers.models.mixtral.modeling_mixtral"
CPU_S, MEMORY = 120, 24 << 30
BATCH, SEQUENCE, LAYERS, DEVICES = 8, 64, 2, 8
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers", "encoder_layers")


def lists() -> dict[str, list[str]]:
    """Returns the rows of each list whose package is installed."""
    return {
        k: v
        for k, v in listed_names().items()
        if k in ("causal", "huggingface") or importlib.util.find_spec(k)
    }


def listed_names() -> dict[str, list[str]]:
    """Returns the rows of each list, including lists whose package is not installed."""
    listed = csv_rows(Path(__file__).with_suffix(".csv"))
    return {
        "causal": names(),
        "huggingface": [r["name"] for r in listed if r["list"] == "huggingface"],
        **{k: [f"{k}:{r['name']}" for r in listed if r["list"] == k] for k in ("timm", "torchvision")},
    }


def names() -> list[str]:
    """Returns the causal language models of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

    return sorted(set(MAPPING.values()))


def built(name: str) -> tuple[str, Any, tuple[Any, ...], Any]:
    """Returns (the model by name, module, batch, loss), on meta tensors."""
    from pase.errors import PaseError
    from pase.frontends.torch import hf

    package, _, model = name.rpartition(":")
    if not package:
        few, whole = settings(name)
        try:
            return few, *hf.build(few), None
        except PaseError:
            return whole, *hf.build(whole), None
    import torch

    # torchvision's own ops are not built for this PyTorch; its networks do not call them.
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor a, Tensor b, float c) -> Tensor")
    with torch.device("meta"):
        if package == "timm":
            import timm

            module = timm.create_model(model, pretrained=False)
            side = module.default_cfg["input_size"][-1]
        else:
            import torchvision

            module, side = torchvision.models.get_model(model, weights=None), 224
        batch = torch.empty(BATCH, 3, side, side), torch.zeros(BATCH, dtype=torch.int64)

    def loss(module: Any, x: Any, labels: Any) -> Any:
        made = module(x)
        return torch.nn.functional.cross_entropy(getattr(made, "logits", made), labels)

    return name, module.train(), batch, loss


def settings(name: str) -> tuple[str, str]:
    """Returns the settings of a class with few layers, as for ``hf:``, and with all of its layers, which the other
    defaults of some classes need. If the text model is a part of the class, the settings are those of the part."""
    import transformers

    config = getattr(transformers, name).config_class()
    inner = [k for k in getattr(config, "sub_configs", {}) if getattr(config, k, None) is not None]
    few = {k: LAYERS for k in _LAYERS if isinstance(getattr(config, k, None), int)}
    inside = {
        key: {k: LAYERS for k in _LAYERS if isinstance(getattr(getattr(config, key), k, None), int)}
        for key in inner
    }
    every = {**few, **{k: v for k, v in inside.items() if v}} if not few or not inside else inside or few
    sizes = f"batch={BATCH}&sequence={SEQUENCE}"
    return (
        f"hf:{name}?{''.join(f'{k}={json.dumps(v)}&' for k, v in every.items())}{sizes}",
        f"hf:{name}?{sizes}",
    )


def measured(name: str) -> dict[str, Any]:
    """Returns a class's row: how far it came, in how many seconds, and which ops have no rule."""
    from pase.errors import PaseError
    from pase.frontends.torch.export.module import program_of
    from pase.frontends.torch.frontend import lowered
    from pase.frontends.torch.lower import reads_op

    row: dict[str, Any] = {"exported": False, "lowered": False, "searched": False}
    began = time.process_time()

    def lap(what: str) -> None:
        nonlocal began
        row[what], began = round(time.process_time() - began, 2), time.process_time()

    try:
        row["model"], module, batch, loss = built(name)
    except Exception as e:
        return row | {"stage": "build", "error": f"{type(e).__name__}: {e}"[:1000]}
    lap("build_s")
    try:
        program = program_of(module, batch, loss, reads_op)
    except PaseError as e:
        taken = _by_torch_alone(module, batch, loss)
        return row | {"stage": "export", "torch_export": taken, "error": str(e)[:1000]}
    lap("export_s")
    row |= {"exported": True, "torch_export": True}
    try:
        traced = lowered(program, name, "replicate")
        row |= {"missing": _missing(traced.graph), "whole": _whole(traced.graph)}
        row |= {"lowered": not row["missing"], "equations": len(traced.graph.nodes)}
        lap("lower_s")
        row |= _searched(traced)
        lap("search_s")
        row |= _compared(traced.graph, module, batch, loss)
        lap("compare_s")
    except Exception as e:
        row |= {
            "stage": "compare" if row["searched"] else "search" if "missing" in row else "lower",
            "error": f"{type(e).__name__}: {e}"[:1000],
        }
    return row


def _searched(traced: Any) -> dict[str, Any]:
    from pase import machine
    from pase.compiler.meshes.search import search_meshes
    from pase.compiler.problem.problem import SplitProblem

    problem = SplitProblem.of(traced.graph, DEVICES, machine.load("h100x8"), "analytic", "adam")
    found = search_meshes(problem, problem.meshes(None, 3))
    proven = found.solution.optimal
    return {"nodes": len(problem.graph.nodes), "mesh": list(found.mesh.sizes), "searched": bool(proven)}


def _missing(graph: Any) -> dict[str, int]:
    """Returns the number of each op without a rule; such ops have PyTorch's names."""
    return dict(
        Counter(op.name for n in graph.nodes for op in n.ops if op.kind == "opaque" and "." in op.name)
    )


def _whole(graph: Any) -> dict[str, int]:
    """Returns the ops whose rule does not split them."""
    every = (op for n in graph.nodes for op in n.ops if op.kind == "opaque" and "." not in op.name)
    return dict(Counter(op.name for op in every))


def products(graph: Any) -> float:
    """Returns the FLOPs of matrix products, convolutions and attention."""
    return sum(
        op.flops_per_point * math.prod(float(n.space[d].size) for d in op.worked) * float(op.times)
        for n in graph.nodes
        for op in n.ops
        if op.kind in ("matmul", "conv", "attention")
    )


def _compared(graph: Any, module: Any, batch: Any, loss: Any) -> dict[str, Any]:
    """Returns the comparison with PyTorch's own step, forward and backward, on fake tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from pase.frontends.torch.export.module import faked, step_of

    with (
        faked(module) as fake,
        next(module.parameters()).fake_mode,
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        made = step_of(module, loss)(
            *torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: fake(t).detach(), tuple(batch))
        )
        counted = counter.get_total_flops()
        made.backward()
        theirs = {k: (p.nbytes, p.grad is not None) for k, p in module.named_parameters()}
    ours = {t.path: (t.nbytes, t.needs_grad) for t in graph.parameters}
    trained = {k for k, (_, gradient) in theirs.items() if gradient}
    return {
        "flops": [products(graph), counted],
        "parameter_bytes": sum(nbytes for nbytes, _ in ours.values()),
        "parameters_equal": all(theirs[k][0] == nbytes for k, (nbytes, _) in ours.items())
        and trained == {k for k, (_, gradient) in ours.items() if gradient},
    }


def _by_torch_alone(module: Any, batch: Any, loss: Any) -> bool:
    """Returns whether plain torch.export takes the step, on the same meta tensors."""
    import torch

    from pase.frontends.torch.export.module import step_of

    try:
        torch.export.export(step_of(module, loss), tuple(batch), strict=False).run_decompositions({})
    except Exception:
        return False
    return True


@cache
def reader() -> str:
    """Returns a digest of pase's files that read a module."""
    from pase.frontends.torch import frontend as from_torch

    from_torch.coverage()  # imports all rules
    files = [
        m.__file__
        for name, m in sorted(sys.modules.items())
        if name.startswith(("pase.frontends", "pase.ops"))
    ]
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files if f)).hexdigest()[:12]


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns counts over the rows, and the missing ops with the number of classes that need each.

    A row whose process failed counts as one that torch.export takes. This is unknown, and must not improve the share.
    """
    undecided = [r for r in rows.values() if "torch_export" not in r and r.get("stage") != "build"]
    taken = [r for r in rows.values() if r.get("torch_export")] + undecided
    reasons = Counter(op for r in rows.values() for op in r.get("missing", {}))
    done = [r for r in taken if r["lowered"] and r["searched"]]
    return {
        "classes": len(rows),
        "built": sum(r.get("stage") != "build" for r in rows.values()),
        "torch_export_takes": len(taken) - len(undecided),
        "undecided": len(undecided),
        "exported": sum(r["exported"] for r in rows.values()),
        "lowered": sum(r["lowered"] for r in rows.values()),
        "searched": sum(r["searched"] for r in rows.values()),
        "lowered_and_searched": len(done),
        "of_what_export_takes": round(len(done) / max(len(taken), 1), 4),
        "flops_equal": sum(r["flops"][0] == r["flops"][1] for r in rows.values() if "flops" in r),
        "parameters_equal": sum(r.get("parameters_equal", False) for r in rows.values()),
        "cpu_s": round(sum(r.get("cpu_s", 0.0) for r in rows.values()), 1),
        "missing_ops": dict(reasons.most_common()),
    }


def _some(every: list[str], count: int) -> list[str]:
    """Returns this many of them, spread evenly."""
    return [every[i * len(every) // count] for i in range(min(count, len(every)))]


def row(name: str, given: Namespace) -> dict[str, Any]:
    """Returns a class's row, measured in a process of its own."""
    blank = {"exported": False, "lowered": False, "searched": False}
    # torchvision and timm import transformers, without the ops that ``built`` defines.
    images = given.list in ("timm", "torchvision")
    processes = forks_of(PRELOADED if images else (*PRELOADED, OF_TRANSFORMERS))
    found = row_apart(processes, measured, name, cpu_s=CPU_S, memory=MEMORY)
    return blank | found | {"reader": reader()}


def chosen(given: Namespace) -> dict[str, str]:
    """Returns the classes of the list. SystemExit if there is no such list here."""
    every = lists()
    if given.list not in every:
        raise SystemExit(
            f"there is no list {given.list!r} here: {', '.join(every)}; is its package installed?"
        )
    found = every[given.list]
    if given.sample:
        found = _some(wanted(found, given.only), given.sample)
    if given.failing:
        given.resume = False
        rows = json.loads(given.out.read_text())["rows"]
        done = {k for k, r in rows.items() if r["lowered"] and r["searched"]}
        found = [n for n in found if n in rows and n not in done and rows[n].get("torch_export", True)]
    return {name: name for name in found}


def head(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the versions, and a summary of each list."""
    of = {k: {n: rows[n] for n in listed if n in rows} for k, listed in listed_names().items()}
    return {
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers")},
        "summary": {k: summary(r) for k, r in of.items() if r},
    }


BENCH = Benchmark(
    "torch_coverage",
    chosen,
    row,
    head=head,
    order=lambda name, _: name,
    line=lambda name, r: (
        f"{name:36} {'ok' if r['lowered'] and r['searched'] else r.get('stage', 'no'):7} "
        f"{r.get('cpu_s', '')} {r.get('missing') or ''} {r.get('error', '')}"
    ),
    options=[
        option("--list", default="causal", help="causal (by default), huggingface, timm or torchvision"),
        option("--sample", type=int, metavar="N", help="this many classes, spread evenly"),
        option("--failing", action="store_true", help="those that torch.export takes and pase does not"),
    ],
    resumes=True,
    current=lambda row: row.get("reader") == reader(),
)
