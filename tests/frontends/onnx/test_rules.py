"""Every op against ONNX's own cases: shapes, dtypes and folded values; and the results computed by shards."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402

from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.frontends.onnx.rules import RULES  # noqa: E402
from pase.ir import simplify, verify  # noqa: E402
from pase.ir.names import dim_classes  # noqa: E402
from tests.frontends.onnx.cases import node_cases, read_case  # noqa: E402
from tests.local.programs import unsplit  # noqa: E402

# The output size depends on the data: pase takes the largest possible size.
UP_TO = {"Compress", "NonMaxSuppression", "NonZero", "Unique"}

# How many cases of each op.
MOST = [3, pytest.param(None, marks=pytest.mark.release)]

# Ops on text, decoded images and trees, and optimizers: models that are split over devices do not have them.
NOT_READ = {
    "ImageDecoder",
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
    "SequenceMap",
    "LinearAttention",
    "FlexAttention",
    "Adagrad",
    "Adam",
    "Momentum",
    "Gradient",
    "ArrayFeatureExtractor",
    "Binarizer",
    "LabelEncoder",
    "TreeEnsemble",
}


@pytest.mark.parametrize("most", MOST)
def test_shapes_dtypes_and_values(most: int | None) -> None:
    read, refused, ops = 0, Counter[str](), set()
    for case in node_cases(most):
        found = read_case(case)
        kinds = {n.op_type for n in case.model.graph.node}
        if found is None:
            refused.update(kinds)
            continue
        model, low = found
        verify(low.b.finish())
        verify(simplify(low.b.finish()))
        read += 1
        ops |= kinds
        for o, wanted in zip(model.graph.output, case.data_sets[0][1], strict=False):
            got = low.env[o.name]
            if not isinstance(wanted, np.ndarray):
                continue
            if kinds & UP_TO:
                assert got.elements >= wanted.size, case.name
                continue
            assert (got.shape, got.dtype) == (wanted.shape, str(wanted.dtype)), case.name
            if got.known is not None:
                np.testing.assert_allclose(
                    got.known.astype(float), wanted.astype(float), rtol=1e-5, err_msg=case.name
                )
    assert read > refused.total() and len(ops) > len(RULES) / 2
    of_opset = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
    assert of_opset - NOT_READ - set(RULES) - set(from_onnx.CONTROL) == set()


def test_graphs_say_what_ops_compute() -> None:
    """The results of ONNX's cases follow from their graphs alone, run in numpy, or the graph is refused.

    At most two cases of each op.
    """
    tried, ran = Counter[str](), Counter[str]()
    for case in node_cases():
        kind = case.model.graph.node[0].op_type
        plain = all(isinstance(a, np.ndarray) for a in case.data_sets[0][0])
        found = read_case(case) if plain and tried[kind] < 2 else None
        tried[kind] += 1
        if found is None:
            continue
        model, low = found
        given = {i.name: v for i, v in zip(model.graph.input, case.data_sets[0][0], strict=False)}
        given = {k: v.astype("float64") if v.dtype == "float32" else v for k, v in given.items()}
        for o, wanted in zip(model.graph.output, case.data_sets[0][1], strict=True):
            made = low.env[o.name].tensor
            floating = isinstance(wanted, np.ndarray) and wanted.dtype in (
                "float32",
                "bool",
                "int32",
                "int64",
            )
            if made is None or not floating:
                continue
            low.b.output(made)
            try:
                with np.errstate(all="ignore"):
                    value, _ = unsplit(low.b.finish([made]), given, made.name)
            except PaseError:
                continue
            ran[kind] += 1
            np.testing.assert_allclose(
                np.asarray(value, float), wanted.astype(float), rtol=1e-4, atol=1e-5, err_msg=case.name
            )
    assert ran.total() > 150 and len(ran) > 75


# The results of these ops depend on absolute positions, so halves of the input do not give halves of the output.
BY_POSITION = {"Trilu", "ScatterND", "Resize", "TensorScatter", "DequantizeLinear"}
SUMS = {"MatMul", "Gemm", "Einsum", "ReduceSum", "ReduceMean", "Conv"}


@pytest.mark.parametrize("most", MOST)
def test_shards_compute_the_result(most: int | None) -> None:
    """Halves of the inputs give halves of the outputs along parallel dims, and their results add up along sums.

    ONNX's reference implementation computes the results.
    """
    from onnx.reference import ReferenceEvaluator

    done: Counter[str] = Counter()
    for case in node_cases(most):
        ins, outs = case.data_sets[0]
        node = case.model.graph.node[0]
        causal = any(a.name in ("is_causal", "left_window_size", "right_window_size") for a in node.attribute)
        if len(case.model.graph.node) != 1 or not all(isinstance(a, np.ndarray) for a in (*ins, *outs)):
            continue
        if node.op_type in BY_POSITION or causal or "local_window" in case.name:
            continue
        found = read_case(case)
        if found is None:
            continue
        graph = found[1].b.finish()
        classes = dim_classes(graph)
        kinds: dict[int, set[str]] = defaultdict(set)
        walked: dict[str, list[tuple[int, ...]]] = {}
        windowed: set[int] = set()
        size = {}
        for n in graph.nodes:
            for d in n.space:
                kinds[classes[n.name, d.name]].add(d.kind)
                size[classes[n.name, d.name]] = d.size
            for op in n.ops:
                for a in (*op.reads, *op.writes):
                    walks = [tuple(classes[n.name, d] for d in w.dims) for w in a.map.walks]
                    walked.setdefault(a.tensor, walks)
                    windowed |= {classes[n.name, d] for w in a.map.walks if w.window for d in w.dims}
        tensors = {k: v.tensor.name for k, v in found[1].env.items() if v.tensor is not None}

        def axis(name: str, cls: int, tensors: Any = tensors, walked: Any = walked) -> int | None:
            """The dim of a value that only this class walks; -1 if there is none; None if it is unknown or partial."""
            walks = walked.get(tensors.get(name, ""))
            if walks is None:
                return None
            at = [i for i, w in enumerate(walks) if cls in w]
            return -1 if not at else at[0] if walks[at[0]] == (cls,) else None

        given = {i.name: a for i, a in zip(case.model.graph.input, ins, strict=False)}
        try:
            run = ReferenceEvaluator(case.model)
            whole = run.run(None, given)
        except (NotImplementedError, RuntimeError, TypeError, AttributeError):
            continue
        for cls, ks in kinds.items():
            if size[cls] % 2 or cls in windowed or not ks <= {"parallel", "reduction"}:
                continue
            at = {k: axis(k, cls) for k in given}
            unknown = [k for k, v in at.items() if v is None and k in tensors and given[k].size > 1]
            if unknown or all(v in (None, -1) for v in at.values()):
                continue
            halves = []
            try:
                for h in (0, 1):
                    part = {
                        k: a if at[k] in (None, -1) else np.split(a, 2, at[k])[h] for k, a in given.items()
                    }
                    halves.append(run.run(None, part))
            except (ValueError, IndexError, TypeError):
                continue  # an attribute or another input contains the size of the input
            for o, w, x, y in zip(case.model.graph.output, whole, *halves, strict=True):
                out = axis(o.name, cls)
                if out is None or not isinstance(w, np.ndarray) or w.dtype.kind not in "fiub":
                    continue
                if out >= 0 and ks == {"parallel"}:
                    got = np.concatenate([x, y], out)
                elif out == -1 and "reduction" in ks and node.op_type in SUMS and len(ins) < 3:
                    got = (x + y) / (2 if node.op_type == "ReduceMean" else 1)
                else:
                    continue
                np.testing.assert_allclose(
                    got.astype(float), w.astype(float), rtol=1e-3, atol=1e-4, err_msg=f"{case.name}: {o.name}"
                )
                done[node.op_type] += 1
    assert {"MatMul", "Einsum", "Softmax", "ReduceSum", "Gather", "Attention", "Concat"} <= set(done)


def test_the_coverage_table() -> None:
    """The table is derived from the rules: every op is listed under the loop nests that it becomes."""
    table = from_onnx.coverage()
    assert {op for ops in table.values() for op in ops} >= set(RULES)
    for nest, op in [
        ("contract", "MatMul"),
        ("contract", "LSTM"),
        ("conv", "ConvTranspose"),
        ("elementwise", "Relu"),
        ("elementwise", "Softmax"),
        ("reduce", "Softmax"),
        ("gather", "Gather"),
        ("scatter", "ScatterND"),
        ("reshape", "Flatten"),
        ("restrict", "Pad"),
        ("loop", "Loop"),
        ("no work", "Shape"),
    ]:
        assert op in table[nest], (nest, op)
    assert "Relu" not in table["no work"] and "Relu" not in table["contract"]
