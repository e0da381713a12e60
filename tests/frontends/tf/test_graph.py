"""Broken graphs are refused: cycles, missing nodes, functions that explode."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf

from pase.frontends.tf.frontend import trace
from tests.frontends.tf.graphs import graph, refused

PRODUCT = ("y", "MatMul", ["x", "w"], {"T": tf.float32})


def test_cycles() -> None:
    refused(
        graph(("y", "Add", ["x", "z"], {}), ("z", "MatMul", ["y", "w"], {}), ("o", "Exp", ["z"], {})), "cycle"
    )


def test_missing_and_doubled_nodes() -> None:
    refused(graph(("y", "MatMul", ["x", "gone"], {})), "'gone'", "does not exist")
    refused(graph(PRODUCT, PRODUCT), "two nodes", "'y'")
    refused(graph(("y", "MatMul", ["x:3", "w"], {})), "'x:3'", "no such output")
    refused(graph(("y", "MatMul", ["x"], {})), "1 operands")
    refused(tf.compat.v1.GraphDef(), "no result")


def _library(calls: dict[str, list[str]]) -> Any:
    """A graph that calls f0. Each function passes its argument through the functions listed for it."""
    g = graph(
        ("y", "PartitionedCall", ["x"], {"f": tf.compat.v1.AttrValue(func={"name": "f0"})}),
        ("o", "MatMul", ["y", "w"], {}),
    )
    for name, inner in calls.items():
        f = g.library.function.add()
        f.signature.name = name
        f.signature.input_arg.add(name="a", type=1)
        f.signature.output_arg.add(name="r", type=1)
        last = "a"
        for k, callee in enumerate(inner):
            n = f.node_def.add(name=f"c{k}", op="PartitionedCall", input=[last])
            n.attr["f"].func.name = callee
            n.attr["Tout"].list.type.append(1)
            last = f"c{k}:output:0"
        f.ret["r"] = last
    return g


def test_functions_that_explode() -> None:
    refused(_library({"f0": ["f0"]}), "'f0'", "calls itself")
    refused(_library({"f0": ["f1"], "f1": ["f0"]}), "calls itself")
    refused(_library({"f0": ["gone"]}), "'gone'")
    bomb = {f"f{k}": [f"f{k + 1}"] * 2 for k in range(40)} | {"f40": []}
    refused(_library(bomb), "nodes, but pase reads at most")
    deep = {f"f{k}": [f"f{k + 1}"] for k in range(400)} | {"f400": []}
    refused(_library(deep), "100 levels deep")
    fine = {f"f{k}": [f"f{k + 1}"] * 2 for k in range(6)} | {"f6": []}
    assert trace(_library(fine)).param_paths == ("w",)
