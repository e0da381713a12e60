"""What device ops are for: the user's names, shapes, FLOPs and bytes."""

from __future__ import annotations

import ast
import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pase.replay.measurement.origins import Origin, origins
from pase.replay.measurement.spending import file_dtype
from pase.replay.traces.ingest import load
from pase.replay.types import CPU, CompiledOp, Event, from_events
from tests.needs import SHARED
from tests.replay.traces.files import trace_file

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"


def span(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def launched(tmp_path: Path, kernel: str, *around: dict[str, Any]) -> Origin:
    """The origin of a kernel whose launch is inside of these events."""
    call = span("cuda_runtime", "cudaLaunchKernel", 50.0, 1.0, correlation=1)
    op = {**span("kernel", kernel, 60.0, 20.0, correlation=1, stream=7, device=0), "tid": 7}
    t = load(trace_file(tmp_path, [*around, call, op]))
    (found,) = origins(t, 0).of.values()
    return found


def test_a_product_has_its_module_shapes_flops_and_bytes(tmp_path: Path) -> None:
    o = launched(
        tmp_path,
        GEMM,
        span("python_function", "nn.Module: Encoder_0", 0, 100),
        span("python_function", "nn.Module: Linear_12", 10, 80),
        span("python_function", "torch/nn/modules/linear.py(114): forward", 11, 78),
        span("cpu_op", "aten::linear", 20, 60, **{"Input Dims": [[8, 64], [32, 64]]}),
        span(
            "cpu_op",
            "aten::addmm",
            30,
            40,
            **{"Input Dims": [[32], [8, 64], [64, 32]], "Input type": ["c10::BFloat16"] * 3},
        ),
    )
    assert (o.kind, o.name, o.where) == ("product bf16", "aten::addmm", "Encoder.Linear")
    assert o.flops == 2 * 8 * 64 * 32
    assert o.nbytes == 2 * (32 + 8 * 64 + 64 * 32 + 8 * 32)


def test_a_size_is_one_of_rows_if_a_result_has_such_rows(tmp_path: Path) -> None:
    """A batch of 788 rows of 768 elements has no rows of 788; scores of 197 keys have rows of 197."""
    events = []
    for k, (a, b) in enumerate(
        (((788, 768), (768, 3072)), ((48, 197, 64), (48, 64, 197)), ((197, 788), (788, 64)))
    ):
        at = 100.0 * k
        name = "aten::mm" if len(a) == 2 else "aten::bmm"
        events.append(
            span("cpu_op", name, at, 60, **{"Input Dims": [a, b], "Input type": ["c10::BFloat16"] * 2})
        )
        events.append(span("cuda_runtime", "cudaLaunchKernel", at + 10, 1.0, correlation=k))
        args = {"correlation": k, "stream": 7, "device": 0}
        events.append({**span("kernel", GEMM, at + 20, 20.0, **args), "tid": 7})
    found = origins(load(trace_file(tmp_path, events)), 0).of.values()
    assert [o.rows for o in found] == [(3072,), (64, 197), (64, 197)]


def test_without_modules_an_op_has_the_users_line(tmp_path: Path) -> None:
    o = launched(
        tmp_path,
        "void at::native::vectorized_elementwise_kernel<4, Gelu>",
        span("python_function", "/home/me/model.py(7): forward", 0, 100),
        span("python_function", "torch/nn/functional.py(9): gelu", 5, 90),
        span("cpu_op", "aten::gelu", 30, 40, **{"Input Dims": [[8, 64]]}),
    )
    assert (o.kind, o.name, o.where, o.operands) == (
        "elementwise",
        "aten::gelu",
        "model.py:7 forward",
        ((8, 64),),
    )


def test_without_a_line_of_the_user_an_op_has_the_frameworks(tmp_path: Path) -> None:
    """DDP's thread broadcasts buffers: nothing of the user's is around that."""
    o = launched(
        tmp_path,
        "Memcpy DtoD (Device -> Device)",
        span("python_function", "torch/nn/parallel/distributed.py(2174): _sync_module_buffers", 0, 100),
        span("cpu_op", "aten::copy_", 30, 40),
    )
    assert (o.name, o.where) == ("aten::copy_", "distributed.py:2174 _sync_module_buffers")
    o = launched(
        tmp_path,
        "Memcpy DtoD (Device -> Device)",
        span("cpu_op", "torch.distributed.ddp.reducer::copy_bucket_to_grad", 0, 100),
        span("cpu_op", "aten::copy_", 30, 40),
    )
    assert (o.name, o.where) == ("aten::copy_", "torch.distributed.ddp.reducer::copy_bucket_to_grad")


def test_what_xla_adds_has_the_name_of_the_users_op_beside_it() -> None:
    def shown(op_name: str, source: str = "") -> tuple[str, str]:
        op = CompiledOp(part="update", operands=(), work="copy", op_name=op_name, source=source)
        t = from_events(
            [Event(rank=0, lane="s", device=True, kind="kernel", name="c.1", start_ns=0, duration_ns=5)]
        )
        (o,) = origins(replace(t, compiled={"c.1": op}), 0).of.values()
        return o.name, o.where

    assert shown("copy of params['head']['w']") == ("copy", "params['head']['w']")
    assert shown("params['head']['w']") == ("copy", "params['head']['w']")
    assert shown("copy of jit(f)/dot", "a/m.py:7") == ("copy of dot", "m.py:7")
    assert shown("for jit(f)/scatter", "a/m.py:7") == ("copy for scatter", "m.py:7")
    assert shown("") == ("c", "")


def test_a_kernel_that_sums_in_float32_is_one_of_its_operands_precision(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {"Input Dims": [[2, 8, 9, 9], [8, 8, 3, 3]]}
    for dtype, kind in (("c10::BFloat16", "convolution 16-bit"), ("float", "convolution fp32")):
        around = span("cpu_op", "aten::miopen_convolution", 30, 40, **shapes, **{"Input type": [dtype] * 2})
        assert launched(tmp_path, "implicit_convolve_sgemm<float, 1024, 5>", around).kind == kind


def test_a_product_of_bytes_whose_kernel_does_not_say_more_is_of_8_bits(tmp_path: Path) -> None:
    """They may be fp8 or int8. The card runs both at one rate."""
    args = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["unsigned char", "unsigned char"]}
    o = launched(tmp_path, "gemm_kernel", span("cpu_op", "aten::_int_mm", 49.0, 5.0, **args))
    assert (o.kind, o.precision) == ("product 8-bit", "8-bit")
    assert [file_dtype(p) for p in ("8-bit", "16-bit", "int8")] == ["float8_e4m3fn", "bfloat16", "int8"]


def test_kernels_of_the_optimizer_are_the_optimizers(tmp_path: Path) -> None:
    o = launched(
        tmp_path,
        "void at::native::vectorized_elementwise_kernel<4, Add>",
        span("user_annotation", "Optimizer.step#AdamW.step", 0, 100),
        span("cpu_op", "aten::add_", 30, 40),
    )
    assert o.kind == "optimizer"


def test_a_convolution_that_runs_as_a_product_is_one(tmp_path: Path) -> None:
    kernel = "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd"
    assert (
        launched(tmp_path, kernel, span("cpu_op", "aten::convolution_backward", 30, 40)).kind == "convolution"
    )


def test_a_dispatch_is_communication(tmp_path: Path) -> None:
    o = launched(tmp_path, "void deep_ep::internode::dispatch<false, 8>(int4*)")
    assert (o.kind, o.name) == ("dispatch", "dispatch")


def test_an_unknown_kernel_is_other_by_its_name(tmp_path: Path) -> None:
    o = launched(tmp_path, "void mine<int>(float*)")
    assert (o.kind, o.name) == ("other", "mine")


def test_an_op_of_a_compiled_program_and_its_kernels_are_one_call() -> None:
    compiled = CompiledOp(
        part="backward",
        operands=((8, 64), (64, 32)),
        product=((8, 64), (64, 32), (8, 32)),
        work="product",
        flops=2 * 8 * 64 * 32,
        nbytes=100,
        dtype="f32",
        op_name="jit(f)/transpose(jvp(Layer))/dot_general",
        source="/home/me/model.py:7",
        kernel="sm90_xmma_gemm_f32f32_tf32f32_f32",
    )
    names = ("dot.1", "dot.1", "add.1", "dot.1")
    device: dict[str, Any] = {"rank": 0, "lane": "Stream", "device": True, "kind": "kernel", "duration_ns": 5}
    t = from_events([Event(name=n, start_ns=10 * i, **device) for i, n in enumerate(names)])
    t = type(t)(**{**vars(t), "compiled": {"dot.1": compiled}})
    found = origins(t, 0)
    o = found.of[0]
    assert (o.kind, o.name, o.where, o.flops) == (
        "product tf32",
        "dot_general, backward",
        "model.py:7",
        compiled.flops,
    )
    assert [found.call[i] for i in range(4)] == [0, 0, 2, 3]


def test_the_product_of_two_vectors_is_a_number_without_rows() -> None:
    compiled = CompiledOp(part="forward", operands=((64,), (64,)), product=((64,), (64,), ()), work="product")
    event = Event(rank=0, lane="Stream", device=True, kind="kernel", name="dot.1", start_ns=0, duration_ns=5)
    t = replace(from_events([event]), compiled={"dot.1": compiled})
    assert origins(t, 0).of[0].rows == (64,)


@pytest.mark.data("measured/tracelens")
def test_flops_and_bytes_of_products_are_those_of_tracelens(tmp_path: Path) -> None:
    """TraceLens counts one FLOP more for each element to which a bias is added; all else is equal to the digit."""
    files = sorted((SHARED / "measured/tracelens").glob("*GEMM.csv"))
    rows = [r for f in files for r in csv.DictReader(f.open())]
    with_bias = 0
    for r in rows:
        shapes, types = ast.literal_eval(r["Input Dims_first"]), ast.literal_eval(r["Input type_first"])
        o = launched(
            tmp_path,
            GEMM,
            span(
                "cpu_op",
                r["name"],
                40.0,
                20.0,
                **{"Input Dims": list(map(list, shapes)), "Input type": list(types)},
            ),
        )
        bias = math.prod(o.product[2]) if r["param: bias"] == "True" else 0
        with_bias += bias > 0
        assert o.flops + bias == pytest.approx(float(r["GFLOPS_first"]) * 1e9, rel=1e-12)
        assert o.nbytes == pytest.approx(float(r["Data Moved (MB)_first"]) * 2**20, rel=1e-12)
    assert len(rows) == 32 and with_bias == 22


def test_an_op_of_a_compiled_program_has_the_users_module() -> None:
    """The line alone is one of the library of layers: all of its layers share it."""
    compiled = CompiledOp(
        part="forward",
        operands=((8, 64), (64, 5003)),
        product=((8, 64), (64, 5003), (8, 5003)),
        work="product",
        dtype="bf16",
        op_name="jit(step)/jvp(LM)/block_1/Dense_0/dot_general",
        source="/usr/lib/site-packages/flax/linen/linear.py:287",
    )
    event = Event(rank=0, lane="Stream", device=True, kind="kernel", name="dot.1", start_ns=0, duration_ns=5)
    t = replace(from_events([event]), compiled={"dot.1": compiled})
    o = origins(t, 0).of[0]
    assert (o.name, o.where, o.rows) == ("dot_general", "block.Dense, linear.py:287", (64, 5003))
    # A CPU has no matrix units, for which rows should be aligned.
    assert origins(replace(t, devices={0: CPU}), 0).of[0].rows == ()
