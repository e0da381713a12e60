"""Dtypes: whatever eager PyTorch refuses to run is refused, and nothing else is. PyTorch itself is the oracle."""

from __future__ import annotations

from typing import Any

import pytest

import pase
from pase.errors import PaseError
from pase.frontends.registry import trace
from pase.ir import Graph
from pase.ir.precision import HIGHEST
from pase.ir.text import digest
from pase.ir.types import PRODUCTS
from pase.questions.explain import explain
from pase.questions.report import report_page

pytestmark = pytest.mark.torch


def calls() -> dict[str, Any]:
    """Name -> f(w, x): w is bfloat16 [8 8], x is float32 [16 8]."""
    import torch
    from torch.nn import functional as F

    bf, places = torch.bfloat16, torch.arange(8)

    def narrow(w: Any, x: Any) -> Any:
        return x.to(bf) @ w

    def autocast(w: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=bf):
            return F.linear(x, w)

    def written(w: Any, x: Any) -> Any:
        y = narrow(w, x).clone()
        y[:, 0], y[x > 0], y[places, 1] = x[:, 0], 0.0, 2.5
        return y

    return {
        "matmul": lambda w, x: x @ w,
        "matmul of three dims": lambda w, x: x.view(2, 8, 8) @ w,
        "linear": lambda w, x: F.linear(x, w),
        "linear's bias": lambda w, x: F.linear(x, w.float(), w[0]),
        "bmm": lambda w, x: torch.bmm(x.view(2, 8, 8), w.expand(2, 8, 8)),
        "einsum": lambda w, x: torch.einsum("bd,de->be", x, w),
        "addmm": lambda w, x: torch.addmm(w[0], x, x.T @ x),
        "mv": lambda w, x: torch.mv(x, w[0]),
        "conv1d": lambda w, x: F.conv1d(x.view(2, 8, 8), w.view(8, 8, 1)),
        "conv1d's bias": lambda w, x: F.conv1d(x.view(2, 8, 8), w.float().view(8, 8, 1), w[0]),
        "conv_transpose1d": lambda w, x: F.conv_transpose1d(x.view(2, 8, 8), w.view(8, 8, 1)),
        "bilinear": lambda w, x: F.bilinear(x, x, w.expand(3, 8, 8)),
        "layer_norm": lambda w, x: F.layer_norm(x, (8,), w[0], w[1]),
        "layer_norm of a narrower input": lambda w, x: F.layer_norm(narrow(w, x), (8,), w[0].float(), x[0]),
        "group_norm": lambda w, x: F.group_norm(x, 2, w[0], w[1]),
        "batch_norm": lambda w, x: F.batch_norm(x, None, None, w[0], w[1], training=True),
        "index_put": lambda w, x: x.index_put((places,), w),
        "index_add": lambda w, x: x.index_add(0, places, w),
        "scatter": lambda w, x: x.scatter(0, torch.zeros(8, 8, dtype=torch.long), w),
        "embedding_bag": lambda w, x: F.embedding_bag(
            torch.zeros(4, 4, dtype=torch.long), w, per_sample_weights=x[:2].view(4, 4), mode="sum"
        ),
        "cdist": lambda w, x: torch.cdist(x, w),
        "softmax of integers": lambda w, x: narrow(w, torch.softmax(x.long(), 0)),
        "labels of 32 bits": lambda w, x: F.cross_entropy(narrow(w, x), torch.zeros(16, dtype=torch.int32)),
        "weights of labels": lambda w, x: F.cross_entropy(
            narrow(w, x), torch.zeros(16, dtype=torch.long), weight=x[0].detach()
        ),
        "probabilities": lambda w, x: F.cross_entropy(narrow(w, x), x.softmax(-1)),
        "sum": lambda w, x: x[:8] + w,
        "cat": lambda w, x: torch.cat([x, w]),
        "where": lambda w, x: torch.where(x[:8] > 0, x[:8], w),
        "mse_loss": lambda w, x: F.mse_loss(narrow(w, x), x),
        "softmax to float32": lambda w, x: F.softmax(narrow(w, x), -1, dtype=torch.float32),
        "autocast": autocast,
        "written in place": written,
    }


def test_what_eager_pytorch_refuses_is_refused_with_the_line_and_what_to_do() -> None:
    import torch

    refused = 0
    for name, call in calls().items():

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))

            def forward(self, x: Any, call: Any = call) -> Any:
                return call(self.w, x).float().square().mean()

        module, x = Model(), torch.randn(16, 8)
        try:
            module(x)
        except (RuntimeError, NotImplementedError):
            refused += 1
            with pytest.raises(PaseError) as e:
                trace(module, x)
            assert "test_dtypes.py:" in str(e.value), name
        else:
            assert trace(module, x).graph.nodes, name
    assert 0 < refused < len(calls())  # the list has both kinds


def test_layers_that_differ_are_named() -> None:
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16())
    with pytest.raises(PaseError, match=r"'1' at.*'input' is float32, 'weight' is bfloat16.*; convert one"):
        trace(module, torch.randn(4, 8), lambda m, x: m(x).float().mean())


def test_products_of_float32_have_the_precision_that_pytorch_is_set_to() -> None:
    """Its default rounds the factors of convolutions, not those of matrices. Neither changes what a layout is for."""
    import torch

    def read(module: Any, x: Any) -> Graph:
        return trace(module, x, lambda m, x: m(x).float().mean()).graph

    def precisions(graph: Graph) -> set[str | None]:
        return {op.precision for n in graph.nodes for op in n.ops if op.kind in PRODUCTS}

    class Attends(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    linear, conv, x = torch.nn.Linear(8, 8), torch.nn.Conv1d(8, 8, 1), torch.randn(4, 8, 8)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        exact = read(linear, x)
        assert (precisions(exact), precisions(read(conv, x))) == ({"highest"}, {None})
        torch.set_float32_matmul_precision("high")
        rounded = read(linear, x)
        assert precisions(rounded) == {None} and digest(rounded) == digest(exact)
        both = torch.nn.Sequential(linear, Attends())
        assert precisions(read(both, x)) == {None, "highest"}  # attention rounds nothing, whatever is set
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_plan_says_what_rounded_factors_would_save() -> None:
    import torch

    plan = pase.compile(
        torch.nn.Linear(4096, 4096),
        torch.randn(4096, 4096),
        loss=lambda m, x: m(x).mean(),
        devices=1,
        machine="h100x8",
        baselines=False,
    )
    (remark,) = [r for r in plan.noted if "all bits" in r.what]
    assert "torch.set_float32_matmul_precision('high') asks for it" in remark.what


def test_no_work_of_a_plan_is_above_its_peak() -> None:
    """Fused attention of float32 is faster than the vector units, which run the products beside it."""
    import torch

    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: Any) -> Any:
            x = x * self.scale
            return torch.nn.functional.scaled_dot_product_attention(x, x, x).mean()

    plan = pase.compile(Attends(), torch.zeros(4, 8, 4096, 128), devices=1, machine="h100x8", baselines=False)
    layers = (explain(plan, n.name).layer for n in plan.nodes if any(w.kind == "attention" for w in n.work))
    work = [w for layer in layers if layer is not None for w in layer.work if w.kind == "attention"]
    assert {w.dtype for w in work} == {HIGHEST}
    assert all(w.achieved_flops is not None and 0.3 < w.achieved_flops < 1 for w in work)
    assert plan.throughput is not None and plan.throughput.mfu < 1
    page = report_page(explain(plan))
    assert "peak of float32, all bits in attention" in page and HIGHEST not in page
