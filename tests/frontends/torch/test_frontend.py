"""PyTorch modules: FLOPs, parameters and ties against PyTorch's own, costs against the same model in JAX; errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.audit.torch_coverage import products
from pase import compile
from pase.baselines import Baseline, baselines
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.registry import Traced
from pase.frontends.torch.export.module import faked
from pase.frontends.torch.hf import build
from pase.ir import Graph, Op, simplify, verify
from tests.frontends.torch.bodies import linear

pytestmark = pytest.mark.torch

SMALL = {
    "llama": "hf:LlamaForCausalLM?num_hidden_layers=2&hidden_size=64&intermediate_size=96&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=120&batch=2&sequence=16",
    "gpt2": "hf:GPT2LMHeadModel?n_layer=2&n_embd=64&n_head=4&vocab_size=120&batch=2&sequence=16",
    "bert": "hf:BertForMaskedLM?num_hidden_layers=2&hidden_size=64&intermediate_size=96&num_attention_heads=4"
    "&vocab_size=120&batch=2&sequence=16",
    "resnet": "hf:ResNetForImageClassification?embedding_size=8&hidden_sizes=[8,16]&depths=[1,2]&batch=2",
}


@cache
def traced(name: str) -> Traced:
    return registry.trace(SMALL[name])


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_that_pytorch_counts(name: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    module, (batch,) = build(SMALL[name])
    with (
        faked(module) as fake,
        next(module.parameters()).fake_mode,
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        module(**{k: fake(t) for k, t in batch.items()})
    assert products(traced(name).graph) == counter.get_total_flops()


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_the_modules(name: str) -> None:
    """All parameters by path, with their exact bytes, tied ones once. The graph is sound, even when simplified."""
    module, _ = build(SMALL[name])
    theirs = {
        path: (tuple(p.shape), p.nelement() * p.element_size()) for path, p in module.named_parameters()
    }
    graph = traced(name).graph
    ours = {t.path: (t.shape, t.nbytes) for t in graph.parameters}
    unread = {p for p in theirs if "pooler" in p}
    assert ours == {k: v for k, v in theirs.items() if k not in unread}
    assert traced(name).param_paths == tuple(k for k in theirs if k not in unread)
    verify(graph)
    verify(simplify(graph))


def test_no_op_is_opaque() -> None:
    for name in SMALL:
        assert {op.name for n in traced(name).graph.nodes for op in n.ops if op.kind == "opaque"} == set()


# --- the same model from JAX


B, S, D, H, F, V = 8, 32, 48, 4, 96, 120


def torch_mlp() -> tuple[Any, tuple[Any, ...]]:
    from torch import nn, zeros

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(D, F), nn.Linear(F, V)

        def forward(self, x: Any) -> Any:
            return self.down(self.up(x).relu()).mean()

    return Mlp(), (zeros(B, S, D),)


def jax_mlp() -> tuple[Any, ...]:
    def loss(p: Any, x: Any) -> Any:
        y = jax.nn.relu(jnp.einsum("bsd,fd->bsf", x, p["up"]["w"]) + p["up"]["b"])
        return jnp.mean(jnp.einsum("bsf,vf->bsv", y, p["down"]["w"]) + p["down"]["b"])

    return loss, {"up": {"w": f32(F, D), "b": f32(F)}, "down": {"w": f32(V, F), "b": f32(V)}}, f32(B, S, D)


def torch_block() -> tuple[Any, tuple[Any, ...]]:
    from torch import nn, zeros
    from torch.nn.functional import scaled_dot_product_attention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            q, k, v = (m(y).view(B, S, H, D // H).transpose(1, 2) for m in (self.q, self.k, self.v))
            y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
            x = x + self.o(y.transpose(1, 2).reshape(B, S, D))
            return (x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))).mean()

    return Block(), (zeros(B, S, D),)


def jax_block() -> tuple[Any, ...]:
    def loss(p: Any, x: Any) -> Any:
        y = x - jnp.mean(x, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]
        q, k, v = (jnp.einsum("bsd,ed->bse", y, p[n]).reshape(B, S, H, D // H) for n in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=1.0, implementation="cudnn")
        x = x + jnp.einsum("bse,de->bsd", y.reshape(B, S, D), p["o"])
        y = jax.nn.gelu(jnp.einsum("bsd,fd->bsf", x, p["up"]) + p["up_b"], approximate=True)
        return jnp.mean(x + (jnp.einsum("bsf,df->bsd", y, p["down"]) + p["down_b"]))

    square = {n: f32(D, D) for n in "qkvo"}
    rest = {"up": f32(F, D), "up_b": f32(F), "down": f32(D, F), "down_b": f32(D)}
    return loss, square | rest | {"scale": f32(D), "shift": f32(D)}, f32(B, S, D)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mlp": (torch_mlp, jax_mlp),
    "block": (torch_block, jax_block),
}


def with_pytorch_s_attention(graph: Graph) -> Graph:
    """The graph with fused attention that keeps all bits of float32: cuDNN, which the JAX model names, has no kernel
    for float32."""

    def precise(op: Op) -> Op:
        return replace(op, precision="highest") if op.kind == "attention" else op

    nodes = (replace(n, ops=tuple(map(precise, n.ops))) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_model_costs_the_same_from_jax(name: str) -> None:
    """Every baseline strategy costs the same in both frameworks, run by the same kernels in the same precision."""
    ours, theirs = PAIRS[name]
    module, batch = ours()
    costs = []
    for args in ((module, *batch), theirs()):
        with jax.default_matmul_precision("highest"):  # PyTorch's default
            graph = registry.trace(*args).graph
        graph = replace(graph, facts=replace(graph.facts, eager=True))  # XLA's norms are more kernels
        graph = with_pytorch_s_attention(graph)
        p = SplitProblem.of(graph, 4, None, "analytic", "adam")
        made = baselines(p.graph, p.devices, p.machine, p.model, tables_of=p.tables)
        costs.append({b.name: b.cost for b in made if isinstance(b, Baseline)})
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)
    assert "data_parallel" in costs[0]


# --- properties of the module


def test_tied_weights_are_one_parameter() -> None:
    graph = traced("gpt2").graph
    paths = [t.path for t in graph.parameters]
    assert "transformer.wte.weight" in paths and "lm_head.weight" not in paths


def test_compile_takes_a_loss_and_a_function(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    module, x, y = torch.nn.Linear(64, 32), torch.zeros(16, 64), torch.zeros(16, 32)
    plan = compile(module, x, y, devices=4, loss=lambda m, a, b: torch.nn.functional.mse_loss(m(a), b))
    source = """
import torch

def model():
    x, y = torch.zeros(16, 64), torch.zeros(16, 32)
    return torch.nn.Linear(64, 32), (x, y), lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])
"""
    (tmp_path / "named_torch_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    named = compile("named_torch_model:model", devices=4)
    assert named.cost == plan.cost
    plan.save(tmp_path / "layout.json")


# --- errors


def test_errors_say_what_and_where() -> None:
    import torch

    class Item(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.inner(x)
            return y.sum() if y.sum().item() > 0 else y.mean()

    x = torch.zeros(2, 4)
    # (call, where, a word of what is wrong, a word of what to do)
    cases: list[tuple[Callable[[], Any], str, str, str]] = [
        (lambda: registry.trace(linear()), "Linear", "batch", "pase.compile(module, batch"),
        (lambda: registry.trace(linear(), x), "Linear", "[2, 4]", "loss=lambda"),
        (lambda: registry.trace(Item(), x), "test_frontend.py:", "cannot export Item", "torch.where"),
        (lambda: registry.trace("hf:LlamaForCasualLM"), "", "'LlamaForCausalLM'", "hf:LlamaForCausalLM?"),
    ]
    for query, word, fix in (
        ("LlamaForCausalLM?layers=2", "'layers'", ""),
        ("LlamaModel?num_hidden_layers=1", "labels", "ForCausalLM"),
        ("LlamaForCausalLM?dtype=int64", "dtype=int64", "bfloat16"),
        ("LlamaForCausalLM?num_hidden_layers=none", "transformers", ""),
        ("GPT2LMHeadModel?batch=0", "batch=0", ""),
    ):
        cases.append((lambda name=f"hf:{query}": registry.trace(name), f"hf:{query}", word, fix))  # type: ignore[misc]
    for call, where, word, fix in cases:
        with pytest.raises(PaseError) as e:
            call()
        assert where in e.value.where and word in e.value.what and fix in e.value.fix, str(e.value)
    with pytest.raises(PaseError, match="PyTorch"):
        compile(lambda p, x: 0.0, x, devices=2, loss=lambda m, b: b)


def test_an_input_that_is_called_as_a_parameter_gets_a_name_of_its_own() -> None:
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.x).square().mean()

    found = registry.trace(Scaled(), {"x": torch.ones(4, 8)})
    assert (found.param_paths, found.input_paths) == (("x",), ("batch.x",))


def test_the_batch_has_the_names_of_the_arguments() -> None:
    import torch

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(6, 4)

        def forward(self, x: Any, more: Any = None, *others: Any) -> Any:
            return (
                self.one(x).square().mean()
                + (0 if more is None else more["u"].sum())
                + sum(map(torch.sum, others))
            )

    x = torch.randn(8, 6)
    called = [
        ((x,), ("x",)),
        (((x,),), ("x",)),
        (({"x": x},), ("x",)),
        ((x, {"u": x}, x), ("x", "more.u", "others.0")),
    ]
    for batch, names in called:
        assert registry.trace(Reads(), *batch).input_paths == names

    def loss(module: Any, images: Any, labels: Any) -> Any:
        return (module(images) + labels.sum()).mean()

    assert registry.trace(Reads(), x, x, loss=loss).input_paths == ("images", "labels")
