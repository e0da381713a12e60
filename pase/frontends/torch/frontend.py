"""Reads PyTorch modules into graphs by ``torch.export`` on fake tensors. Nothing is run and no weight is read.

``pase.frontends.torch.export.module`` exports, ``lower`` walks the exported graph, ``rules*`` has the rules for single
ops, and ``hf`` builds models of the transformers library by name. Every node of the exported graph gets a stable path:
its index among the nodes that the step depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError, install_line
from pase.frontends import registry
from pase.frontends.common.values import Value
from pase.frontends.registry import DimSizes, Unknown, by_nest, check_dims, type_names
from pase.frontends.torch import hf
from pase.frontends.torch.constants import constant_bytes
from pase.frontends.torch.control import CONTROL
from pase.frontends.torch.derivatives import check_linear
from pase.frontends.torch.dtypes import precision_of_products
from pase.frontends.torch.export.aliases import check_aliases
from pase.frontends.torch.export.module import TorchProgram, marked_blocks, program_of
from pase.frontends.torch.lower import TorchLowering, contents_of, live, reads_op
from pase.frontends.torch.places import check_places
from pase.frontends.torch.rules import RULES
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchScope
from pase.frontends.torch.written import WRITTEN
from pase.garbage import uncollected
from pase.ir import Graph, Tensor
from pase.ir.blocks import Block, rematerialised
from pase.ir.two_batches import FullGraph
from pase.ops import GraphBuilder
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

__all__ = ["TracedTorch", "coverage", "lowered", "reads", "trace"]


@dataclass(frozen=True, kw_only=True)
class TracedTorch(registry.Traced):
    """A module's graph, the exported program that it was read from, and what each node was lowered to."""

    program: TorchProgram = field(repr=False, compare=False)
    scope: TorchScope = field(repr=False, compare=False)
    module: Any = field(repr=False, compare=False)
    batch: tuple[Tree, ...] = field(repr=False, compare=False)
    loss: Callable[..., Tree] | None = field(default=None, repr=False, compare=False)
    unknown: Unknown = "error"
    marked: tuple[Block, ...] = ()
    """Runs of nodes that the model itself recomputes in backward (``torch.utils.checkpoint``)."""

    @cached_property
    def full(self) -> FullGraph:
        made = lowered(self.program, self.graph.name, self.unknown, folds=False)
        return FullGraph(graph=made.graph, contents=made.contents, attributes=made.attributes)


def reads(model: object) -> bool:
    """Whether the model is a torch.nn.Module, or the name of a transformers model: ``hf:CLASS?setting=value&…``."""
    if isinstance(model, str):
        return model.startswith(hf.PREFIX)
    return "torch.nn.modules.module.Module" in type_names(model)


def coverage() -> dict[str, list[str]]:
    """Loop nest -> the ops that are lowered to it, for ``pase ops``."""
    return by_nest(RULES, CONTROL) | {"written out in other ops": sorted(WRITTEN)}


def trace(
    model: Module,
    *batch: Tree,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
    loss: Callable[..., Tree] | None = None,
) -> TracedTorch:
    """Read a module's training step: ``loss(model, *batch)``, or the model's own result if no ``loss`` is given.

    model: a torch.nn.Module whose tensors may be on any device, including meta and fake tensors; or a name
        ``hf:CLASS?setting=value&…``.
    batch: example tensors. Only their shapes and dtypes matter. A single dict is passed on as keyword arguments. If the
        last argument is a function, it is the loss.

    Raises PaseError if PyTorch cannot export the model or the model has no scalar loss. Raises UnknownOp for an op that
    has neither a rule nor a decomposition, unless ``unknown`` is "replicate".
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise PaseError(
            "reading a PyTorch model needs PyTorch", fix=f"run: {install_line('torch')}"
        ) from None
    if isinstance(model, str):
        if batch or loss is not None:
            raise PaseError(
                "a model given by name has its own batch and loss",
                where=model,
                fix="give no arguments after the name",
            )
        name = name or model
        model, batch = hf.build(model)
    if batch and loss is None and callable(batch[-1]) and not _is_tensor(batch[-1]):
        *examples, loss = batch
        batch = tuple(examples)
    name = name or type(model).__name__
    check_dims(dims, (), name)
    if not batch:
        raise PaseError(
            "there is no example batch",
            where=name,
            fix="give one after the module: pase.compile(module, batch, devices=…)",
        )
    check_aliases(model, name)
    with uncollected():
        made = lowered(program_of(model, batch, loss, reads_op), name, unknown)
    check_places(made.scope, _held(made.program, model), name)
    return replace(made, module=model, batch=batch, loss=loss)


def _held(program: TorchProgram, module: Module) -> dict[str, torch.Tensor]:
    """Placeholder -> the tensor that the model holds there, of those that no step writes and no optimizer updates."""
    own = dict(module.named_buffers(remove_duplicate=False)) | dict(program.constants)
    written = {*program.mutated.values(), *program.counters.values()}
    return {n: own[path] for n, path in program.buffers.items() if path in own and path not in written}


def _is_tensor(x: object) -> bool:
    return "torch.Tensor" in type_names(x)


def lowered(program: TorchProgram, name: str, unknown: Unknown, *, folds: bool = True) -> TracedTorch:
    """The graph of an exported step, without the module. Raises PaseError as ``trace`` does.

    folds: see ``TorchLowering``.
    """
    b = GraphBuilder(name=name, precision=precision_of_products())
    low = TorchLowering(b=b, model=name, unknown=unknown, folds=folds)
    made: dict[str, Value] = {}
    written = set(program.mutated.values())
    placeholders = {n.name: n for n in program.graph.graph.nodes if n.op == "placeholder"}
    # A buffer that is written but never read needs a layout too.
    leaves = [n for n, path in program.buffers.items() if path in written]
    nodes = live(program.graph.graph, (*program.losses, *program.mutated, *leaves))
    check_linear(nodes, name)
    used = {n.name for n in nodes}
    for placeholder, path in {**program.parameters, **program.buffers}.items():
        if placeholder not in used:
            continue
        node = placeholders[placeholder]
        if path in made:  # a tied weight: one tensor under several names
            low.env[node] = made[path]
            continue
        stored = placeholder in program.parameters
        make = (
            _parameter(b, path, path in program.frozen)
            if stored
            else _buffer(b, path, path in written, program.constants.get(path))
        )
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
        return lowered(program.without_data(free), name, unknown, folds=folds)
    for _, old, new in pairs:
        if old is not None and new is not None:
            b.thread(old, new)
    for t in outs:
        b.output(t)
    found = {t.path for t in b.tensors.values() if t.role == "parameter"}
    marked = marked_blocks(nodes)
    scope = TorchScope(nodes=nodes, values=low.env, inner=low.inner, module=program.graph)
    graph = b.finish(outs, frontend="torch", eager=True)
    read_only = {n for n, path in program.buffers.items() if n in used and path not in written}
    constants = constant_bytes(graph, scope, _of_data(b), read_only) if folds else 0
    graph = _said(graph, constants)
    return TracedTorch(
        graph=rematerialised(graph, marked),
        contents=b.contents,
        attributes=b.attributes,
        param_paths=tuple(p for p in program.order if p in found),
        input_paths=tuple(t.path for t in b.tensors.values() if t.role == "input"),
        program=program,
        scope=scope,
        module=None,
        batch=(),
        unknown=unknown,
        marked=marked,
    )


def _said(graph: Graph, constants: int) -> Graph:
    """The graph with the bytes of the whole program's constants."""
    return replace(graph, facts=replace(graph.facts, constant_bytes=constants))


def _parameter(b: GraphBuilder, path: str, frozen: bool) -> Callable[[tuple[int, ...], str], Tensor]:
    def make(shape: tuple[int, ...], dtype: str) -> Tensor:
        # The parameter is made when something first reads it, and b.frozen then describes that reader.
        before, b.frozen = b.frozen, frozen
        try:
            return b.parameter(path, shape, dtype)
        finally:
            b.frozen = before

    return make


def _buffer(
    b: GraphBuilder, path: str, written: bool, held: torch.Tensor | None
) -> Callable[[tuple[int, ...], str], Tensor]:
    """How to make a buffer: an input if the step writes it (state for the next step), otherwise a constant.

    held: the tensor, if the model keeps it outside its buffers: its path then says nothing about its contents.
    """
    contents = (None if held is None else contents_of(held)) or path
    return lambda shape, dtype: (
        b.input(path, shape, dtype) if written else b.constant(shape, dtype, contents=contents)
    )


def _tensor(value: Value) -> Tensor | None:
    """The value's tensor. A view that nothing has read yet is made now. None if the value holds no data."""
    if value.tensor is None and value.make is not None:
        value.tensor = value.make()
    return value.tensor


def _of_data(b: GraphBuilder) -> set[str]:
    """Names of the tensors that depend on a parameter or on an input."""
    found: set[str] = set()
    for n in b.nodes:
        for op in n.ops:
            if op.kind in ("parameter", "input") or any(a.tensor in found for a in op.reads):
                found |= {a.tensor for a in op.writes}
    return found


def _outputs(low: TorchLowering, nodes: list[FxNode], name: str) -> list[Tensor]:
    made = (_tensor(v) for v in (low.env[n] for n in nodes) if isinstance(v, Value))
    outs = [t for t in made if t is not None]
    low.b.settle_gradients()
    if not any(low.b.tensors[t.name].needs_grad for t in outs):
        raise PaseError(
            "the loss does not depend on any parameter that needs a gradient, so there is nothing to train",
            where=name,
            fix="set requires_grad on the parameters to train, and do not detach the loss",
        )
    return outs


registry.FRONTENDS.add(
    "torch",
    registry.Frontend(
        reads=reads,
        trace=trace,
        coverage=coverage,
        modules=True,
        fused_attention="Call torch.nn.functional.scaled_dot_product_attention; a model of transformers takes "
        "attn_implementation='sdpa'",
        fewer_bits="torch.set_float32_matmul_precision('high') asks for it, and for convolutions "
        "torch.backends.cudnn.allow_tf32 = True, PyTorch's default",
    ),
)
