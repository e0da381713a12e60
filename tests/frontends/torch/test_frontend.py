"""PyTorch modules: FLOPs, parameters and ties against PyTorch's own, costs against the same model in JAX; errors."""

from __future__ import annotations

from collections.abc import Callable
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
from pase.frontends.registry import Traced, UnknownOp
from pase.frontends.torch.export.module import faked
from pase.frontends.torch.hf import build
from pase.ir import simplify, verify

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
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=1.0)
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


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_model_costs_the_same_from_jax(name: str) -> None:
    """Every baseline strategy costs the same in both frameworks."""
    ours, theirs = PAIRS[name]
    module, batch = ours()
    costs = []
    for args in ((module, *batch), theirs()):
        p = SplitProblem.of(registry.trace(*args).graph, 4, None, "analytic", "adam")
        made = baselines(p.graph, p.devices, p.machine, p.model, tables_of=p.tables)
        costs.append({b.name: b.cost for b in made if isinstance(b, Baseline)})
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)
    assert "data_parallel" in costs[0]


# --- properties of the module


def test_tied_weights_are_one_parameter() -> None:
    graph = traced("gpt2").graph
    paths = [t.path for t in graph.parameters]
    assert "transformer.wte.weight" in paths and "lm_head.weight" not in paths


def test_no_gradient_passes_no_grad_and_detach() -> None:
    import torch

    class Stopped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
            self.c.requires_grad_(False)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = self.a(x)
            return self.c(self.b(x) + y).mean() + self.a(x).detach().sum()

    graph = registry.trace(Stopped(), torch.zeros(4, 8)).graph
    made = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    by_weight = {
        graph.tensors[r.tensor].path: graph.tensors[op.writes[0].tensor].needs_grad
        for op in made.values()
        if op.kind == "matmul"
        for r in op.reads
        if graph.tensors[r.tensor].role == "parameter" and op.writes
    }
    assert by_weight["b.weight"] and by_weight["c.weight"]
    assert {t.path: t.needs_grad for t in graph.parameters}["c.weight"] is False
    frozen = [op for op in made.values() if op.kind == "matmul" and not op.differentiable]
    assert len(frozen) == 1


def test_tensors_of_the_module_stay_its_own() -> None:
    import torch

    module = torch.nn.Linear(4, 4)
    before = dict(module.named_parameters())
    traced = registry.trace(module, torch.zeros(2, 4), loss=lambda m, x: m(x).sum())
    assert all(p is before[k] for k, p in module.named_parameters())
    assert traced.param_paths == ("weight", "bias")


def test_no_memory_for_the_largest_model() -> None:
    module, _ = build("hf:LlamaForCausalLM?hidden_size=16384&num_hidden_layers=1&vocab_size=128256")
    assert sum(p.nelement() for p in module.parameters()) > 4e9


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


@pytest.mark.parametrize("criterion", ["cross_entropy", "CrossEntropyLoss", "of outputs", "of one"])
def test_a_criterion_given_as_a_loss_is_refused(criterion: str) -> None:
    """The message says how a loss is called. An error inside of a real loss is reported as it is."""
    import torch
    from torch.nn.functional import cross_entropy

    given: Any = {
        "cross_entropy": cross_entropy,
        "CrossEntropyLoss": torch.nn.CrossEntropyLoss(),
        "of outputs": lambda made, y: cross_entropy(made, y),
        "of one": lambda made, x, y: made.reshape(-1).sum(),
    }[criterion]
    x, y = torch.zeros(16, 4), torch.zeros(16, dtype=torch.long)
    with pytest.raises(PaseError, match=r"loss\(module, \*batch\), here with Linear") as e:
        registry.trace(linear(), x, y, loss=given)
    assert e.value.where == "loss" and "lambda module" in e.value.fix
    with pytest.raises(PaseError, match=r"cannot export Linear.*TypeError: relu"):
        registry.trace(linear(), x, y, loss=lambda m, x, y: torch.relu(m(x), y, y, y).sum())


def test_a_module_named_by_a_keyword_is_refused():
    """PyTorch writes self.layers.in when it runs its decompositions, and cannot parse it."""
    import torch

    from pase.frontends.torch.reasons import why

    parts = torch.nn.ModuleList([torch.nn.ModuleDict({"in": torch.nn.ModuleList([linear()])})])
    e = why("Model", SyntaxError("invalid syntax"), [], parts)
    assert e.where == "Model" and "keyword" in e.what and "0.in" in e.what and "name" in e.fix


def linear() -> Any:
    import torch

    return torch.nn.Linear(4, 4)


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


def test_an_op_without_rule_is_decomposed_or_named() -> None:
    """An op that PyTorch can decompose is decomposed. A custom op is named with its layer and line, or is not split."""
    import torch

    lib = torch.library.Library("pase_test", "FRAGMENT")
    lib.define("mystery(Tensor x) -> Tensor")
    lib.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("pase_test::mystery", lambda x: torch.empty_like(x), lib=lib)

    class Mystery(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.ops.pase_test.mystery(torch.addcmul(self.inner(x), x, x)).sum()

    x = torch.zeros(2, 4)
    with pytest.raises(UnknownOp, match=r"test_frontend.py:\d+: ") as e:
        registry.trace(Mystery(), x)
    assert e.value.where.startswith("Mystery: pase_test.mystery.default") and "replicate" in e.value.fix
    graph = registry.trace(Mystery(), x, unknown="replicate").graph
    assert any(op.kind == "opaque" for n in graph.nodes for op in n.ops)


def test_a_product_by_groups_is_as_much_work_as_its_rows() -> None:
    """A device with half of the groups does half of the work. Each group is a product of its own rows."""
    import numpy as np
    import torch

    from pase.machine import mesh_from
    from pase.tables.work import node_work

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.ones(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, x: Any, ends: Any) -> Any:
            return torch.nn.functional.grouped_mm(x, self.up, offs=ends).float().mean()

    batch = (torch.ones(64, 16, dtype=torch.bfloat16), torch.full((4,), 8, dtype=torch.int32))
    graph = registry.trace(Experts(), *batch).graph
    (node,) = (n for n in graph.nodes if n.kind == "matmul")
    assert node.main.einsum == "m k, g k n, e -> m n"
    kinds = {d.name: d.kind for d in node.space}
    assert (kinds["m"], kinds["g"], kinds["e"]) == ("parallel", "reduction", "replicated")
    names = [d.name for d in node.space]
    configs = np.array([[-1], [names.index("g")], [names.index("m")]], dtype=np.int8)
    forward, *backward = (w for w in node_work(graph, node, configs, mesh_from("2", 2)) if w.kind == "matmul")
    assert forward.flops.tolist() == [2 * 64 * 16 * 32, 64 * 16 * 32, 64 * 16 * 32]
    assert forward.mnk is not None
    assert [x.tolist() for x in np.broadcast_arrays(*forward.mnk)] == [[16, 16, 8], [32] * 3, [16] * 3]
    assert len(backward) == 1  # the gradient of the weights; the rows need none


def test_a_product_of_other_groups_is_refused() -> None:
    import torch

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.ones(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, x: Any, y: Any) -> Any:
            return torch.nn.functional.grouped_mm(x, self.up).float().mean()

    x = torch.ones(4, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(PaseError, match=r"\[4, 8, 16\] and \[4, 16, 32\]"):
        registry.trace(Experts(), x, x)


def test_every_place_that_depends_on_the_data_is_listed() -> None:
    """With real tensors. The model, its batch, the random state and the log levels stay unchanged."""
    import logging

    import torch

    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.seen.add_(1)
            y = self.inner(x.mul_(2)) + torch.rand_like(x)
            if y.sum() > 0:
                y = y * 2
            first = int(x.abs().sum().item())
            return y[:first].sum()

    module, batch, state = Asks(), torch.ones(4, 4), torch.get_rng_state()
    with pytest.raises(PaseError) as told:
        registry.trace(module, batch)
    assert batch.eq(1).all() and torch.get_rng_state().equal(state)
    text = told.value.what
    assert "cannot export Asks" in text and "There are 2 such places:" in text
    assert "test_frontend.py:" in told.value.where and "torch.where" in told.value.fix
    assert "test_frontend.py" in text and "if y.sum() > 0:" in text and "int(x.abs().sum().item())" in text
    assert (
        float(module.seen) == 0.0 and logging.getLogger("torch.export._draft_export").level == logging.NOTSET
    )
    with torch.device("meta"), pytest.raises(PaseError, match=r"cannot export Asks.* torch.where"):
        registry.trace(Asks(), torch.ones(4, 4))


def test_an_example_is_as_long_as_the_positions_allow() -> None:
    _, (batch,) = build("hf:WhisperForConditionalGeneration?encoder_layers=1&decoder_layers=1&batch=2")
    assert batch["labels"].shape == (2, 448)
