"""Exports a PyTorch module as a graph of ATen ops, by ``torch.export`` on fake tensors (shapes without data).

Composite ops (linear, attention, norms, losses) stay whole. Only the forward pass with its loss is traced; the cost of
the gradient follows from the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.registry import distinct_paths
from pase.frontends.signature import argument_names
from pase.frontends.torch.derivatives import refuse_module_hooks
from pase.frontends.torch.export.buffers import assignments_in_place, data_written, left_behind, refuse_state
from pase.frontends.torch.export.equal import PythonState
from pase.frontends.torch.export.folded import Folding, folding
from pase.frontends.torch.export.functional import (
    bodies_of,
    inline_regions,
    is_functional,
    recorded_autocast,
    refuse_autocast,
    refuse_idle_autocast,
    unwatch,
    watch_views,
)
from pase.frontends.torch.export.settings import ReadNames, ReadSettings, reads_noted
from pase.frontends.torch.export.traceable import CHECKPOINTED, traceable
from pase.frontends.torch.export.unfolded import unfolded
from pase.frontends.torch.export.writes import keep_gradients_past_writes
from pase.frontends.torch.reasons import real_places, why
from pase.frontends.torch.types import FxNode
from pase.ir.blocks import Block
from pase.pytree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import GraphModule
    from torch.nn import Module

__all__ = ["STEP_FILE", "TorchProgram", "faked", "marked_blocks", "program_of", "step_of"]

STEP_FILE = __file__
"""The file that defines the step which calls the user's module. Its lines are never reported as the user's."""
_INSIDE = "module."
"""The prefix of the user module's paths in the exported module, which contains the user's module."""


@dataclass(frozen=True, kw_only=True)
class TorchProgram:
    """An exported step.

    graph: a functional graph of ATen ops. Its placeholders are the parameters, buffers and inputs.
    parameters, buffers: placeholder -> path in the user's module. Tied tensors go by the first of their paths in the
        module's order. A parameter that needs no gradient and is written by the step counts as a buffer.
    frozen: paths of the parameters that need no gradient.
    mutated: name of a node -> path of the buffer whose next value it computes, if that value depends on data.
    counters: the same for next values that do not depend on data.
    constants: path of a tensor that the model keeps outside its buffers -> that tensor.
    inputs: placeholder -> the user's name, one for each leaf of the batch, in order.
    losses: names of the nodes that the step returns.
    order: the paths of all parameters that are read, in the module's order, each tensor once.
    settings: what the step reads of the module's Python state.
    """

    graph: GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    frozen: frozenset[str]
    mutated: Mapping[str, str]
    counters: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, str]
    losses: tuple[str, ...]
    order: tuple[str, ...]
    settings: ReadSettings

    def without_data(self, nodes: Collection[str]) -> TorchProgram:
        """The same program, with the buffers that these nodes write as ``counters`` instead of ``mutated``."""
        counters_now = {n: path for n, path in self.mutated.items() if n in nodes}
        still_mutated = {n: path for n, path in self.mutated.items() if n not in nodes}
        return replace(self, mutated=still_mutated, counters={**self.counters, **counters_now})


def program_of(
    module: Module, batch: Sequence[Tree], loss: Callable[..., Tree] | None, reads: Callable[[str], bool]
) -> TorchProgram:
    """Export a step: ``loss(module, *batch)``, or the module's own result if ``loss`` is None.

    batch: containers of tensors, which may be real, fake or on the meta device. reads: tells whether an op has a rule.
    Raises PaseError if PyTorch cannot export the step.
    """
    refuse_autocast(f"{type(module).__name__} is read")
    refuse_module_hooks(module)
    first = _first_paths(module)
    noted: ReadNames = {}
    try:
        paths = {path: known for path, (known, _) in first.items()}
        exported = _exported(module, batch, loss, reads, paths, noted)
    except PaseError:
        raise
    except Exception as e:
        if loss is not None and isinstance(e, (TypeError, AttributeError)) and not _asks(loss, module, batch):
            raise _miscalled(loss, module, batch, e) from e
        places = real_places(module, tuple(batch), lambda copy: step_of(copy, loss))
        raise why(type(module).__name__, e, places, module) from e
    return _described(exported, first, _argument_names(module, batch, loss), ReadSettings.of(module, noted))


def _exported(
    module: Module,
    batch: Sequence[Tree],
    loss: Callable[..., Tree] | None,
    reads: Callable[[str], bool],
    paths: Mapping[str, str],
    noted: ReadNames,
) -> ExportedProgram:
    """The step, exported with the module's present Python state. The state is put back afterwards.

    noted: the attributes that the step reads are added to it. Raises PaseError if the step changes Python state that it
    reads, because the next step would then be a different program.
    """
    state_before = PythonState.by(module)
    changed: list[str] = []
    try:
        exported = _exported_folded(
            module,
            batch,
            loss,
            reads,
            paths,
            state_before,
            lambda: changed.extend(left_behind(module, state_before)),
            noted,
        )
        if changed:
            state_before.put_back()
            refuse_state(
                module, state_before, lambda end: _traced(module, batch, loss, reads, end, {}), paths, changed
            )
        return exported
    finally:
        state_before.put_back()


def _exported_folded(
    module: Module,
    batch: Sequence[Tree],
    loss: Callable[..., Tree] | None,
    reads: Callable[[str], bool],
    paths: Mapping[str, str],
    state_before: PythonState,
    at_end: Callable[[], None],
    noted: ReadNames,
) -> ExportedProgram:
    """Export the step, tracing only three of a set of equal layers (``export.folded``).

    If that fails (the layers differ after all, or PyTorch cannot trace the rest), the Python state is put back and each
    layer is traced. Errors are those of this second attempt. at_end: called when the step has been traced.
    state_before: the Python state to put back.
    """
    fold: Folding | None = None
    try:
        with folding(module, paths, True) as fold:
            exported = _traced(module, batch, loss, reads, at_end, noted)
            if unfolded(exported, fold, _INSIDE):
                return exported
    except Exception:
        if fold is None or not fold.layers:
            raise
    state_before.put_back()
    with folding(module, paths, False):
        return _traced(module, batch, loss, reads, at_end, noted)


def _traced(
    module: Module,
    batch: Sequence[Tree],
    loss: Callable[..., Tree] | None,
    reads: Callable[[str], bool],
    at_end: Callable[[], None],
    noted: ReadNames,
) -> ExportedProgram:
    """Export the step once, on fake tensors, as a functional graph."""
    import torch

    with faked(module) as fake:
        # A tensor that occurs twice in the batch (as ids and as labels) is two inputs: detach makes the second one.
        args = torch.utils._pytree.tree_map(
            lambda t: fake(t).detach() if isinstance(t, torch.Tensor) else t, tuple(batch)
        )
        with traceable(STEP_FILE), recorded_autocast(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*_flat_weights.* assigned during export")
            # PyTorch copies its own graph, and then warns of its own pytrees.
            warnings.filterwarnings(
                "ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning
            )
            trained = {
                f"{_INSIDE}{path}"
                for path, p in module.named_parameters(remove_duplicate=False)
                if p.requires_grad
            }
            exported = torch.export.export(step_of(module, loss, at_end, noted), args, strict=False)
            if is_functional(exported.graph_module, reads):
                inline_regions(exported.graph_module)
                return exported
            refuse_idle_autocast(exported.graph_module, type(module).__name__)
            named = exported.graph_signature.inputs_to_parameters.items()
            keep_gradients_past_writes(
                exported.graph_module, {n for n, path in named if path in trained}, type(module).__name__
            )
            _by_node(exported.graph_module)
            # PyTorch refuses placeholders whose marks differ in the second trace.
            for n in exported.graph.nodes:
                if n.op == "placeholder":
                    n.meta.pop("custom", None)
            decomposed = exported.run_decompositions({})
            watch_views(decomposed.graph_module)
            return decomposed


def _first_paths(module: Module) -> dict[str, tuple[str, bool]]:
    """Path of a parameter or buffer -> (the first path of the same tensor, whether it needs a gradient).

    Tied weights are one object under several paths.
    """
    seen: dict[int, str] = {}
    out: dict[str, tuple[str, bool]] = {}
    for pairs in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for path, t in pairs:
            out[path] = (seen.setdefault(id(t), path), bool(t.requires_grad))
    return out


@contextlib.contextmanager
def faked(module: Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within, the module has fake tensors for its parameters and buffers, whatever device they are on. Ties are kept.

    Yields the function that makes the fake of a tensor. Afterwards the module has its own tensors again.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # holds the tensor too, so that its id is not reused

    def fake(t: Tensor) -> Any:
        if id(t) not in made:
            with mode:
                f = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
            if isinstance(t, torch.nn.Parameter):
                f = torch.nn.Parameter(f, requires_grad=t.requires_grad)
            made[id(t)] = (t, f)
        return made[id(t)][1]

    holders = [d for m in module.modules() for d in (m._parameters, m._buffers)]
    recurrent = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    saved = [dict(d) for d in holders]
    try:
        for d in holders:
            d.update({k: fake(t) for k, t in d.items() if t is not None})
        yield fake
    finally:
        for d, before in zip(holders, saved, strict=True):
            d.update(before)  # type: ignore[arg-type]
        for m in recurrent:  # recurrent layers hold a second list of their parameters
            m._init_flat_weights()


def step_of(
    module: Module,
    loss: Callable[..., Tree] | None,
    at_end: Callable[[], None] = lambda: None,
    noted: ReadNames | None = None,
) -> Module:
    """A module whose forward is the step and returns a scalar loss.

    at_end: called when the loss has been computed. noted: the attributes of the module's Python state that the step
    reads are added to it.
    """
    import torch

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.training = module.training  # submodules keep their own modes: a frozen norm is in eval mode

        def forward(self, *batch: Tree) -> Tensor:
            noting = contextlib.nullcontext() if noted is None else reads_noted(noted, self.module)
            with assignments_in_place(self.module), noting:
                made = self.loss(*batch)
            at_end()
            return made

        def loss(self, *batch: Tree) -> Tensor:
            if loss is not None:
                return _scalar(loss(self.module, *batch), "loss(module, *batch)")
            (one,) = batch if len(batch) == 1 else (batch,)
            if isinstance(one, Mapping):
                out = self.module(**one)
            else:
                out = self.module(*one) if isinstance(one, (tuple, list)) else self.module(one)
            return _scalar(out, type(module).__name__)

    return Step()


def _miscalled(loss: Callable[..., Tree], module: Module, batch: Sequence[Tree], e: Exception) -> PaseError:
    """Why a loss that raised before it asked the module for anything cannot be called so, and how it can."""
    given = ", ".join(type(a).__name__ for a in (module, *batch))
    fix = "give loss=lambda module, *batch: criterion(module(…), …)"
    if len(batch) == 1 and isinstance(batch[0], (tuple, list)):
        try:
            inspect.signature(loss).bind(module, *batch[0])
            fix = "give the elements of the batch one by one, as in (module, x, y, loss) for (module, (x, y), loss)"
        except (TypeError, ValueError):  # its signature is another, or it has none
            pass
    return PaseError(
        f"it is called as loss(module, *batch), here with ({given}), and must call the module itself, but raised "
        f"{type(e).__name__}: {textwrap.shorten(str(e), 400, placeholder=' …')}",
        where="loss",
        fix=fix,
    )


def _asks(loss: Callable[..., Tree], module: Module, batch: Sequence[Tree]) -> bool:
    """Whether a loss calls its first argument or reads one of the module's attributes. A criterion does neither."""

    class Asked(Exception):
        pass

    class Probe:
        def __call__(self, *given: object, **named: object) -> object:
            raise Asked

        def __getattr__(self, name: str) -> object:
            getattr(module, name)
            raise Asked

    try:
        loss(Probe(), *batch)
    except Asked:
        return True
    except Exception:
        return False
    return True


def _scalar(out: Tree, what: str) -> Tensor:
    """The scalar loss in a module's result: the result, its first element, or its ``loss`` (transformers).

    what: names the module or the loss function in the message.
    """
    import torch

    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(out).__name__
    raise PaseError(
        f"it returns {kind}, but pase needs a scalar loss",
        where=what,
        fix="give one with pase.compile(module, batch, loss=lambda module, batch: …), or let the module return it "
        "(transformers models do so if the batch has 'labels')",
    )


def marked_blocks(nodes: Iterable[FxNode]) -> tuple[Block, ...]:
    """The runs of nodes that the model executes under ``torch.utils.checkpoint``."""
    out: list[Block] = []
    before: object = None
    for i, n in enumerate(nodes):
        mark = (n.meta.get("custom") or {}).get(CHECKPOINTED)
        if mark is None and n.target is operator.getitem:
            mark = before
        if mark is not None and mark == before:
            out[-1] = Block(prefix="", start=out[-1].start, stop=i + 1)
        elif mark is not None:
            out.append(Block(prefix="", start=i, stop=i + 1))
        before = mark
    return tuple(out)


def _by_node(graph_module: GraphModule, grad_enabled: bool = True) -> None:
    """Make regions (no_grad, autocast) run node by node when they are inlined, so that lines, layers and marks survive.

    grad_enabled: whether gradients are enabled around the region. PyTorch's decomposition forgets where they were
    disabled, and parameters would get gradients that they do not have. Therefore such nodes are marked.
    """
    import torch

    ops = torch.ops.higher_order
    region_argument = {ops.wrap_with_set_grad_enabled: 1, ops.wrap_with_autocast: 4}
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        for body in bodies_of(node):
            _by_node(body, grad_enabled)
        if not grad_enabled:
            unwatch(node)
        region_index = region_argument.get(node.target)
        if region_index is not None:
            region = getattr(graph_module, node.args[region_index].target)
            sets_grad = node.target is ops.wrap_with_set_grad_enabled
            _by_node(region, bool(node.args[0]) if sets_grad else grad_enabled)
            region.forward = torch.fx.Interpreter(region).run


def _argument_names(
    module: Module, batch: Sequence[Tree], loss: Callable[..., Tree] | None
) -> dict[str, str]:
    """How torch.export calls each argument of the step, ``step_of(module, loss)`` -> its name; "" for a mapping that is
    the whole batch, whose keys are names themselves."""
    if loss is not None:
        return {f"batch_{i}": name for i, name in enumerate(argument_names(loss, 1 + len(batch))[1:])}
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        return {"batch_0": ""}
    inside = len(batch) == 1 and isinstance(batch[0], (tuple, list))
    names = argument_names(module.forward, len(batch[0] if inside else batch))
    return {f"batch_0_{i}" if inside else f"batch_{i}": name for i, name in enumerate(names)}


def _input_path(leaf: str, arguments: Mapping[str, str]) -> str:
    """The path of a leaf of the batch, as torch.export calls it."""
    for called, name in arguments.items():
        if leaf == called or leaf.startswith(f"{called}_"):
            return ".".join(filter(None, (name, leaf[len(called) + 1 :])))
    return leaf


def _writes_trained(path: str, writer: FxNode) -> PaseError:
    """The error about a trained parameter that forward writes. writer: the node whose value it gets."""
    if "renorm" in str(writer.target):
        return PaseError(
            "max_norm of an embedding writes the table, which is trained, in forward",
            where=path,
            fix="leave max_norm out, and bound the rows after the optimizer's update: table.mul_((max_norm / "
            "table.norm(dim=1, keepdim=True)).clamp(max=1)) under torch.no_grad()",
        )
    return PaseError(
        "the step writes a parameter that is trained",
        where=path,
        fix="write it after the optimizer's update, outside of forward",
    )


def _described(
    exported: ExportedProgram,
    first: Mapping[str, tuple[str, bool]],
    arguments: Mapping[str, str],
    settings: ReadSettings,
) -> TorchProgram:
    """The exported step as a TorchProgram. first: as ``_first_paths`` returns it. arguments: as ``_argument_names``."""
    from torch.export.graph_signature import InputKind, OutputKind

    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    inputs: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        path = (spec.target or "").removeprefix(_INSIDE)
        if spec.kind is InputKind.PARAMETER:
            parameters[name] = first[path][0]
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            buffers[name] = first.get(path, (path, False))[0]
            if spec.kind is InputKind.CONSTANT_TENSOR:
                constants[path] = exported.constants[spec.target]
        elif spec.kind is InputKind.USER_INPUT:
            inputs[name] = _input_path(name, arguments)
    inputs = dict(zip(inputs, distinct_paths(list(inputs.values()), first), strict=True))
    written: dict[str, str] = {}
    losses: list[str] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind in (OutputKind.PARAMETER_MUTATION, OutputKind.BUFFER_MUTATION):
            path = (spec.target or "").removeprefix(_INSIDE)
            path, trained = first.get(path, (path, False))
            if trained:
                raise _writes_trained(path, next(n for n in exported.graph.nodes if n.name == spec.arg.name))
            written[spec.arg.name] = path
        elif spec.kind is OutputKind.USER_OUTPUT:
            losses.append(spec.arg.name)
    state = {name: path for name, path in parameters.items() if path in set(written.values())}
    parameters = {name: path for name, path in parameters.items() if name not in state}
    buffers |= state  # parameters that are written and not trained, such as the weights of a momentum encoder
    data_dependent = data_written(exported.graph, written, buffers, (*parameters, *inputs))
    read = set(parameters.values())
    return TorchProgram(
        graph=exported.graph_module,
        parameters=parameters,
        buffers=buffers,
        frozen=frozenset(path for path, needs in first.values() if not needs),
        mutated={n: path for n, path in written.items() if n in data_dependent},
        counters={n: path for n, path in written.items() if n not in data_dependent},
        constants=constants,
        inputs=inputs,
        losses=tuple(losses),
        order=tuple(dict.fromkeys(path for path, _ in first.values() if path in read)),
        settings=settings,
    )
