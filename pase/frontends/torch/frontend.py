"""PyTorch modules to graphs, by way of ``torch.export`` on fake tensors: nothing is run, no weight is read.

Exporting is in ``pase.frontends.torch.export.module``, the traversal in ``lower``, the rules for single ops in
``rules*``, models of transformers by name in ``hf``. Every node of the exported graph gets a stable path: its number
among the nodes on which the step depends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError, install_line
from pase.frontends import registry
from pase.frontends.common.values import Value
from pase.frontends.registry import DimSizes, Unknown, by_nest, check_dims, type_names
from pase.frontends.torch import hf
from pase.frontends.torch.control import CONTROL
from pase.frontends.torch.derivatives import check_linear
from pase.frontends.torch.export.module import TorchProgram, marked_blocks, program_of
from pase.frontends.torch.lower import TorchLowering, live, reads_op
from pase.frontends.torch.rules import RULES
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchScope
from pase.frontends.torch.written import WRITTEN
from pase.garbage import uncollected
from pase.ir import Tensor
from pase.ir.blocks import Block, rematerialised
from pase.ops import GraphBuilder
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["TracedTorch", "coverage", "lowered", "reads", "trace"]


@dataclass(frozen=True, kw_only=True)
class TracedTorch(registry.Traced):
    """A module's graph, the exported program that it was read from, and what each node of the program became."""

    program: TorchProgram = field(repr=False, compare=False)
    scope: TorchScope = field(repr=False, compare=False)
    module: Any = field(repr=False, compare=False)
    batch: tuple[Tree, ...] = field(repr=False, compare=False)
    loss: Callable[..., Tree] | None = field(default=None, repr=False, compare=False)
    unknown: Unknown = "error"
    marked: tuple[Block, ...] = ()
    """Nodes that the model itself computes again in backward (``torch.utils.checkpoint``)."""


def reads(model: object) -> bool:
    """A torch.nn.Module, or the name of a transformers model: hf:CLASS?setting=value&…"""
    if isinstance(model, str):
        return model.startswith(hf.PREFIX)
    return "torch.nn.modules.module.Module" in type_names(model)


def coverage() -> dict[str, list[str]]:
    """loop nest -> ops, for ``pase ops``."""
    return by_nest(RULES, CONTROL) | {"written out in other ops": sorted(WRITTEN)}


def trace(
    model: Module,
    *batch: Tree,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
    loss: Callable[..., Tree] | None = None,
) -> TracedTorch:
    """Read a module's step: ``loss(model, *batch)``, else what the model returns on the batch, which is its loss.

    model: a torch.nn.Module, its tensors on any device, meta and fake tensors too; or hf:CLASS?setting=value&….
    batch: example tensors, of which shapes and dtypes count; one dict is passed on as keywords. A function behind them
        is the loss.

    Raises PaseError for a model that PyTorch cannot export and for one without a scalar loss, and (UnknownOp) for an op
    that has neither a rule nor a decomposition, unless ``unknown`` is "replicate".
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise PaseError(f"reading a PyTorch model needs PyTorch: {install_line('torch')}") from None
    if isinstance(model, str):
        if batch or loss is not None:
            raise PaseError(f"'{model}' contains its batch and its loss: give no arguments after it")
        name = name or model
        model, batch = hf.build(model)
    if batch and loss is None and callable(batch[-1]) and not _is_tensor(batch[-1]):
        *examples, loss = batch
        batch = tuple(examples)
    name = name or type(model).__name__
    check_dims(dims, (), name)
    if not batch:
        raise PaseError("give an example batch after the module: pase.compile(module, batch, devices=…)")
    with uncollected():
        made = lowered(program_of(model, batch, loss, reads_op), name, unknown)
    return replace(made, module=model, batch=batch, loss=loss)


def _is_tensor(x: object) -> bool:
    return "torch.Tensor" in type_names(x)


def lowered(program: TorchProgram, name: str, unknown: Unknown) -> TracedTorch:
    """The graph of an exported step, without its module. Raises PaseError as ``trace`` does."""
    b = GraphBuilder(name=name)
    low = TorchLowering(b=b, model=name, unknown=unknown)
    made: dict[str, Value] = {}
    written = set(program.mutated.values())
    placeholders = {n.name: n for n in program.graph.graph.nodes if n.op == "placeholder"}
    leaves = [
        n for n, path in program.buffers.items() if path in written
    ]  # one that is only written has a layout too
    nodes = live(program.graph.graph, (*program.losses, *program.mutated, *leaves))
    check_linear(nodes, name)
    used = {n.name for n in nodes}
    for placeholder, path in {**program.parameters, **program.buffers}.items():
        if placeholder not in used:
            continue
        node = placeholders[placeholder]
        if path in made:  # tied: one tensor, whatever it is called
            low.env[node] = made[path]
            continue
        stored = placeholder in program.parameters
        make = _parameter(b, path, path in program.frozen) if stored else _buffer(b, path, path in written)
        made[path] = low.leaf(node, make)
    for placeholder, path in program.inputs.items():
        if placeholder in used:
            low.leaf(placeholders[placeholder], partial(b.input, path))
    low.nodes(nodes)
    by_name = {n.name: n for n in nodes}
    outs = _outputs(low, [by_name[n] for n in program.losses], name)
    next_values = [(n, made[path], low.env[by_name[n]]) for n, path in program.mutated.items()]
    pairs = [(n, _tensor(leaf), _tensor(v) if isinstance(v, Value) else None) for n, leaf, v in next_values]
    reached = _of_data(b)
    if free := {n for n, _, new in pairs if new is None or new.name not in reached}:
        return lowered(program.without_data(free), name, unknown)
    for _, old, new in pairs:
        if old is not None and new is not None:
            b.thread(old, new)
    for t in outs:
        b.output(t)
    found = {t.path for t in b.tensors.values() if t.role == "parameter"}
    marked = marked_blocks(nodes)
    return TracedTorch(
        graph=rematerialised(b.finish(outs, frontend="torch"), marked),
        param_paths=tuple(p for p in program.order if p in found),
        input_paths=tuple(t.path for t in b.tensors.values() if t.role == "input"),
        program=program,
        scope=TorchScope(nodes=nodes, values=low.env, inner=low.inner, module=program.graph),
        module=None,
        batch=(),
        unknown=unknown,
        marked=marked,
    )


def _parameter(b: GraphBuilder, path: str, frozen: bool) -> Callable[[tuple[int, ...], str], Tensor]:
    def make(shape: tuple[int, ...], dtype: str) -> Tensor:
        before, b.frozen = b.frozen, frozen  # whatever reads it first
        try:
            return b.parameter(path, shape, dtype)
        finally:
            b.frozen = before

    return make


def _buffer(b: GraphBuilder, path: str, written: bool) -> Callable[[tuple[int, ...], str], Tensor]:
    """State that the step writes is passed to the next step; state that it only reads is constant on every device."""
    return lambda shape, dtype: b.input(path, shape, dtype) if written else b.constant(shape, dtype)


def _tensor(value: Value) -> Tensor | None:
    """The value's tensor, made now if it is a view that nothing has read yet; None if it is no data."""
    if value.tensor is None and value.make is not None:
        value.tensor = value.make()
    return value.tensor


def _of_data(b: GraphBuilder) -> set[str]:
    """The tensors that depend on data."""
    found: set[str] = set()
    for n in b.nodes:
        for op in n.ops:
            if op.kind in ("parameter", "input") or any(a.tensor in found for a in op.reads):
                found |= {a.tensor for a in op.writes}
    return found


def _outputs(low: TorchLowering, nodes: list[FxNode], name: str) -> list[Tensor]:
    made = (_tensor(v) for v in (low.env[n] for n in nodes) if isinstance(v, Value))
    outs = [t for t in made if t is not None]
    if not any(low.b.tensors[t.name].needs_grad for t in outs):
        raise PaseError(
            f"{name}'s loss does not depend on any parameter that needs a gradient: there is nothing to train"
        )
    return outs


registry.FRONTENDS.add("torch", registry.Frontend(reads=reads, trace=trace, coverage=coverage, modules=True))
