"""FLOPs of PyTorch's convolutions and attention."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pase.replay.measurement.origins import origins
from pase.replay.traces.ingest import load
from pase.replay.traces.stated_flops import stated_flops
from pase.replay.traces.timeline_io import load_timeline, save_timeline
from tests.needs import SHARED
from tests.replay.measurement.test_origins import span
from tests.replay.traces.files import trace_file

TABLES = SHARED / "measured" / "tracelens"


def rows() -> Iterator[tuple[str, Any, Any, float]]:
    """Yields the op, operands, arguments and GFLOPs of each row of TraceLens's tables."""
    for path in sorted(TABLES.glob("*CONV_fwd.csv")) + sorted(TABLES.glob("*SDPA_fwd.csv")):
        with path.open() as f:
            for row in csv.DictReader(f):
                dims = ast.literal_eval(row["Input Dims_first"])
                operands = tuple(tuple(d) if all(isinstance(x, int) for x in d) else () for d in dims)
                stated = ast.literal_eval(row["Concrete Inputs_first"])
                yield row["name"], operands, stated, float(row["GFLOPS_first"])


@pytest.mark.data(
    "measured/tracelens/tests__traces__h100__Wan-AI_Wan2.1-T2V-1.3B-Diffusers__1016009_perf_report_csvs__CONV_fwd.csv"
)
def test_tracelens_has_the_same_flops() -> None:
    compared = [(stated_flops(op, operands, stated), gflops * 1e9) for op, operands, stated, gflops in rows()]
    assert len(compared) >= 19
    assert all(ours == round(theirs) > 0 for ours, theirs in compared)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_a_convolution_and_its_gradients_have_the_flops_of_their_definition(
    groups: int, turned: bool
) -> None:
    """Each weight is multiplied once for each element that it reaches; the two gradients do the same again."""
    batch, inner, outer, size, k, stride, pad, dilation = 2, 8, 12, 9, 3, 2, 1, 2
    weight = (inner, outer // groups, k, k) if turned else (outer, inner // groups, k, k)
    result = (
        (size - 1) * stride - 2 * pad + dilation * (k - 1) + 1
        if turned
        else len(range(0, size + 2 * pad - dilation * (k - 1), stride))
    )
    image, grad = (batch, inner, size, size), (batch, outer, result, result)
    places = size if turned else result  # the weights are applied once at each
    multiplied = batch * places**2 * inner * outer // groups * k**2
    args = [
        f"[{stride}, {stride}]",
        f"[{pad}, {pad}]",
        f"[{dilation}, {dilation}]",
        str(turned),
        "[0, 0]",
        str(groups),
    ]
    assert (
        stated_flops("aten::convolution", (image, weight, *((),) * 7), ["", "", "", *args]) == 2 * multiplied
    )
    for mask, gradients in (("[True, True, False]", 2), ("[False, True, False]", 1)):
        stated = ["", "", "", "[0]", *args, mask]
        operands = (grad, image, weight, *((),) * 8)
        assert stated_flops("aten::convolution_backward", operands, stated) == 2 * gradients * multiplied


@pytest.mark.parametrize("causal", [False, True])
def test_attention_has_two_products_and_five_backward(causal: bool) -> None:
    q, k, v = (2, 4, 32, 16), (2, 4, 48, 16), (2, 4, 48, 24)
    scores, mixed = 2 * 2 * 4 * 32 * 48 * 16, 2 * 2 * 4 * 32 * 48 * 24
    half = 2 if causal else 1
    operands = (q, k, v, (), (), (), ())
    stated = ["", "", "", "0.", str(causal), "False", ""]
    assert (
        stated_flops("aten::_scaled_dot_product_flash_attention", operands, stated)
        == (scores + mixed) // half
    )
    swapped = tuple((b, n, h, d) for b, h, n, d in (q, q, k, v))  # gradient, query, key, value
    stated = [""] * 11 + [str(causal), ""]
    backward = stated_flops("aten::_flash_attention_backward", (*swapped, *((),) * 9), stated)
    assert backward == (3 * scores + 2 * mixed) // half


@pytest.mark.parametrize(
    "stated",
    [
        [],
        ["", "", "", "[0, 0]", "[0, 0]", "[1, 1]", "False", "", ""],
        ["", "", "", "[1]", "[0, 0]", "[1, 1]", "False", "", ""],
        ["", "", "", "[1, 1]", "[0, 0]", "[99, 99]", "False", "", ""],
        ["", "", "", "[1, 1]", "__import__('os')", "[1, 1]", "False", "", ""],
        ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", 7, "", ""],
    ],
)
def test_arguments_that_make_no_sense_state_nothing(stated: list[Any]) -> None:
    operands = ((2, 8, 9, 9), (8, 8, 3, 3), *((),) * 7)
    assert stated_flops("aten::convolution", operands, stated) == 0


def test_a_trace_has_them_after_it_was_saved_and_read(tmp_path: Path) -> None:
    """Kernels of one call whose names have the precision, and others, share it: FLOPs are not counted twice."""
    dims, types = [[2, 8, 9, 9], [8, 8, 3, 3]] + [[]] * 7, ["c10::BFloat16"] * 2 + [""] * 7
    stated = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    events = [
        span(
            "cpu_op",
            "aten::convolution",
            0,
            90,
            **{"Input Dims": dims, "Input type": types, "Concrete Inputs": stated},
        ),
        *(span("cuda_runtime", "cudaLaunchKernel", 10.0 + n, 1.0, correlation=n) for n in (1, 2)),
        *(
            {**span("kernel", name, 60.0 + 20 * n, 9.0, correlation=n, stream=7, device=0), "tid": 7}
            for n, name in ((1, "bf16_fprop"), (2, "conv_split"))
        ),
    ]
    t = load(trace_file(tmp_path, events))
    save_timeline(t, tmp_path / "t.json", chrome=False)
    for read in (t, load_timeline(tmp_path / "t.json")):
        found = set(origins(read, 0).of.values())
        assert [(o.kind, o.flops) for o in found] == [("convolution bf16", 2 * 2 * 81 * 8 * 8 * 9)]
