"""Remarks of plans: each planted contradiction leads to a remark, and sound models have none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase import zoo
from pase.compiler.resolve import resolve
from pase.errors import PaseError
from pase.ir import Remark, from_text, to_text
from pase.machine.load import load
from pase.plan.layout import from_json, to_json
from pase.plan.remarks import of_graph, remarked
from pase.plan.types import PlanData
from tests.command import printed, reported, run

S = jax.ShapeDtypeStruct
W, X = S((64, 64), jnp.float32), S((32, 64), jnp.float32)
H100 = load("h100x8")


def compiled(fn: Any, *args: Any, **options: Any) -> PlanData:
    return pase.compile(fn, *args, devices=4, mesh="4", baselines=False, **options)


def kinds(plan: PlanData) -> list[str]:
    return [r.kind for r in plan.noted]


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) @ w)


def turning(w: Any, x: Any, n: Any) -> Any:
    fixed = jax.lax.stop_gradient(w)
    return jnp.mean(jax.lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ fixed), x) @ w)


# Sound models.


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "name", ["mlp", "rnnlm", "gpt2", "llama3_8b", "mixtral_8x7b", "vit_l16", "densenet121"]
)
def test_the_zoo_raises_no_doubt(name: str) -> None:
    m = zoo.reduced(name)
    plan = compiled(m.loss_fn, m.params, m.batch)
    assert plan.sound and not any(r.doubtful for r in plan.noted)


def test_a_published_size_raises_no_doubt() -> None:
    noted = pase.compile("zoo:gpt2?layers=2&batch=16", devices=8, mesh="8", baselines=False).noted
    assert not any(r.doubtful for r in noted)


# Contradictions.


@pytest.fixture(scope="module")
def plan() -> PlanData:
    """Data parallel: the parameter's gradient is summed."""
    made = compiled(loss, S((1024, 1024), jnp.float32), S((1 << 16, 1024), jnp.float32))
    assert made.collectives and made.noted == ()
    return made


def test_no_parameters() -> None:
    w = np.ones((64, 64), np.float32)
    plan = compiled(lambda p, x: jnp.mean(x @ w) + 0 * jnp.sum(x), {}, X, mode="inference")
    assert kinds(plan) == ["empty"] and not plan.sound
    assert "the model has no parameters" in plan.remarks[0]


def test_no_flops() -> None:
    plan = compiled(lambda p, x: p.T, W, X, mode="inference")
    assert "no op of the model computes anything" in " ".join(plan.remarks)


def test_more_activations_than_are_written(plan: PlanData) -> None:
    wrong = replace(plan, memory=replace(plan.memory, activations=1 << 40))
    (remark,) = remarked(wrong, plan.graph, H100).noted
    assert remark.kind == "activations" and "keep 1 TiB of activations, but forward writes" in remark.what


def test_a_step_shorter_than_its_work(plan: PlanData) -> None:
    assert plan.work is not None
    (remark,) = remarked(replace(plan, cost=plan.work.at_peak_s / 5), plan.graph, H100).noted
    assert remark.kind == "step" and "FLOPs take on 4 devices at their peak" in remark.what
    large = replace(plan, memory=replace(plan.memory, optimizer=1 << 40))
    (remark,) = remarked(large, plan.graph, H100).noted
    assert "parameters and optimizer state" in remark.what


def test_sums_that_nothing_sends(plan: PlanData) -> None:
    (remark,) = remarked(replace(plan, collectives=()), plan.graph, H100).noted
    assert remark.kind == "communication" and "nothing is sent, although" in remark.what
    assert "test_remarks.py" in remark.where


# Ops that are not priced by their own rule.


def test_a_loop_of_unknown_length() -> None:
    plan = compiled(turning, W, X, S((), jnp.int32))
    assert str(Path(__file__).parents[2]) not in json.dumps(to_json(plan))  # nothing of the maker's folders
    assert kinds(plan) == ["trip_count"] and "test_remarks.py" in plan.noted[0].where and not plan.sound
    assert compiled(turning, W, X, S((), jnp.int32), dims={"while0": 7}).sound


def test_a_branch_is_assumed() -> None:
    def fn(w: Any, x: Any, c: Any) -> Any:
        return jnp.mean(jax.lax.cond(c, lambda h: h @ w, lambda h: jnp.tanh(h), x))

    plan = compiled(fn, W, X, S((), jnp.bool_))
    assert kinds(plan) == ["assumed"] and plan.sound


def test_an_op_that_is_not_split() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.mean(jax.pure_callback(np.tanh, X, x @ w) @ w)

    assert "unknown" in kinds(compiled(fn, W, X, mode="inference"))
    text = """graph g
tensor t1 float32[8, 4] input "x"
tensor t2 float32[8] activation

node x (d0=8, d1=4)
  input input -> t1[d0 d1]

node odd (r0_0=8 replicated, r0_1=4 replicated, w0_0=8 replicated)
  opaque odd t1[r0_0 r0_1] -> t2[w0_0] | flops=3.0
"""
    found = [r for r in of_graph(from_text(text)) if r.kind == "opaque"]
    says = "'odd' is not split: every device does all of its 768 FLOPs"
    assert [r.what for r in found] == [says]
    again = text[text.index("node odd") :].replace("node odd", "node odd~2").replace("t2", "t3")
    twice = text.replace("activation\n", "activation\ntensor t3 float32[8] activation\n", 1)
    folded = [r.what for r in of_graph(from_text(twice + "\n" + again)) if r.kind == "opaque"]
    assert folded == [f"{says} (the first of 2 such calls)"]


def test_a_batch_of_an_op_without_a_rule_of_its_own_is_split() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.abs(jnp.fft.fft(x @ w)))

    plan = compiled(fn, W, S((1 << 16, 64), jnp.float32))
    (node,) = (n for n in plan.graph.nodes if any(op.name == "fft" for op in n.ops))
    assert plan.strategy[node.name] and kinds(plan) == []


def test_an_onnx_op_without_a_rule() -> None:
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["p"]),
        h.make_node("Odd", ["p"], ["y"], domain="mine", name="one"),
    ]
    value = h.make_tensor_value_info
    graph = h.make_graph(
        nodes,
        "g",
        [value("x", 1, [32, 64])],
        [value("y", 1, [32, 64])],
        [onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21), h.make_opsetid("mine", 1)])
    with pytest.raises(PaseError, match="mine:Odd"):
        pase.compile(model, devices=2)
    plan = pase.compile(model, devices=2, unknown="replicate")
    assert kinds(plan) == ["unknown"] and "no rule for 'mine:Odd'" in plan.remarks[0]


@pytest.mark.torch
def test_a_pytorch_op_without_a_rule() -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.airy_ai(self.w(x)).sum()

    plan = pase.compile(Model(), torch.zeros(4, 8, 8), devices=2, unknown="replicate")
    assert "unknown" in kinds(plan) and any("airy_ai" in r and "test_remarks.py" in r for r in plan.remarks)


# Where remarks are shown.

PROGRAM = """
import jax, jax.numpy as jnp

def loss(w, batch):
    x, n = batch
    fixed = jax.lax.stop_gradient(w)
    return jnp.mean(jax.lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ fixed), x) @ w)

def model():
    s = jax.ShapeDtypeStruct
    return loss, s((64, 64), jnp.float32), (s((32, 64), jnp.float32), s((), jnp.int32))
"""


def test_every_command_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turning_model.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    model, layout, page = "turning_model:model", tmp_path / "layout.json", tmp_path / "page.html"
    code, out, _ = run("compile", model, "--devices", 4, "-o", layout, "--strict")
    assert code == 1 and "the while loop 'while0'" in " ".join(out.split())
    assert run("compile", model, "--devices", 4, "--trips", "while0=3", "--strict")[0] == 0
    (told,) = reported("compile", model, "--devices", 4)["remarks"]
    assert told["kind"] == "trip_count" and "turning_model.py" in told["where"]
    for words in (
        ("compare", model, "--devices", 4),
        ("explain", layout, "--model", model),
        ("report", layout, "--model", model, "-o", page),
        ("emit", layout, "--to", "names", "-o", tmp_path / "names.py"),
    ):
        assert reported(*words)["remarks"] == [told], words
        code, out, err = run(*words, "--strict")
        assert code == 1 and "while0" in out + err, words
    assert "the while loop &#x27;while0&#x27;" in page.read_text()
    assert (
        "while0" in printed("explain", layout, "--model", model) + run("explain", layout, "--model", model)[2]
    )


def test_files(plan: PlanData) -> None:
    """A layout keeps remarks with their kinds; a layout of an earlier version has them as lines."""
    said = (Remark("trip_count", "priced as one turn", "a.py:3"), Remark("assumed", "taken"))
    tree = json.loads(json.dumps(to_json(replace(plan, noted=said))))
    assert from_json(tree).noted == said
    del tree["remarks"]
    tree["provenance"]["remarks"] = "priced as one turn\ntaken"
    assert from_json(tree).remarks == ("priced as one turn", "taken")


def test_a_graph_s_text_keeps_remarks() -> None:
    graph = replace(resolve("zoo:mlp").graph, remarks=(Remark("trip_count", 'said "so"', "a b.py:3"),))
    assert from_text(to_text(graph)) == graph
    with pytest.raises(PaseError, match="'odd' is not a kind of remark"):
        from_text(to_text(graph).replace("remark trip_count", "remark odd"))
