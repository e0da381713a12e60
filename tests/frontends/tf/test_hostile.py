"""Hostile and broken graphs: each gives a PaseError, without a traceback or a hang."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace
from pase.frontends.tf.rules import RULES
from pase.ir import simplify, verify
from tests.frontends.tf.graphs import frozen

OPS = sorted({*RULES, "While", "PartitionedCall", "Merge", "Switch", "Enter", "Nonsense"})


def _mutated(g: Any, rng: random.Random) -> None:
    """Change the graph as a broken exporter or an attacker might."""
    bodies = [g.node, *(f.node_def for f in g.library.function)]
    nodes = rng.choice([b for b in bodies if len(b)])
    n = rng.choice(nodes)
    match rng.randrange(9):
        case 0:
            n.op = rng.choice(OPS)
        case 1 if n.input:
            n.input[rng.randrange(len(n.input))] = rng.choice(nodes).name + rng.choice(
                ["", ":0", ":1", ":out:0"]
            )
        case 2 if n.input:
            del n.input[rng.randrange(len(n.input))]
        case 3 if n.attr:
            del n.attr[rng.choice(sorted(n.attr))]
        case 4:
            consts = [m for m in nodes if m.op == "Const" and m.attr["value"].tensor.dtype == 3]
            if consts:
                tensor = rng.choice(consts).attr["value"].tensor
                sizes = [d.size for d in tensor.tensor_shape.dim]
                if all(0 <= s < 100 for s in sizes):
                    values = [rng.choice([-1, 0, 1, 2, 7, 2**30]) for _ in range(max(sizes, default=1))]
                    tensor.CopyFrom(tf.make_tensor_proto(values, "int32"))
        case 5:
            for key in sorted(n.attr):
                value = n.attr[key]
                if value.HasField("shape") or key == "value":
                    shape = value.shape if value.HasField("shape") else value.tensor.tensor_shape
                    if shape.dim:
                        rng.choice(shape.dim).size = rng.choice([0, -1, 1, 3, 2**40, 2**62])
        case 6:
            for key in sorted(n.attr):
                value = n.attr[key]
                if value.list.i:
                    value.list.i[rng.randrange(len(value.list.i))] = rng.choice([-3, 0, 1, 5, 2**40])
                elif value.HasField("i"):
                    value.i = rng.choice([-3, 0, 1, 5, 2**40])
                elif value.HasField("s") and key != "shared_name":
                    value.s = rng.choice([b"SAME", b"VALID", b"NCHW", b"", b"\xff", b"ab,bc->ac", b"ii->i"])
        case 7:
            calls = [v for v in n.attr.values() if v.HasField("func")]
            if calls and g.library.function:
                rng.choice(calls).func.name = rng.choice(g.library.function).signature.name
        case 8:
            n.attr[rng.choice(["T", "dtype", "DstT", "axis"])].type = rng.choice(
                [0, 1, 3, 7, 10, 20, 21, 99, 101]
            )


@settings(max_examples=60)
@given(st.sampled_from(["lstm", "lstm v1", "transformer", "convnet"]), st.randoms(use_true_random=False))
def test_mutated_graphs(name: str, rng: random.Random) -> None:
    """A mutated graph is either read as a sound graph, or refused with a message."""
    g = tf.compat.v1.GraphDef()
    g.CopyFrom(frozen(name))
    for _ in range(rng.randrange(1, 4)):
        _mutated(g, rng)
    try:
        traced = trace(g, dims={"batch": 4}, unknown=rng.choice(["error", "replicate"]))
    except PaseError as e:
        assert str(e)
    else:
        verify(simplify(traced.graph))
