"""Derivatives defined by the user's code, which an exported graph does not contain.

Calls of ``torch.autograd.Function`` are traced with their backward. Hooks on gradients are refused.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.torch.passed import passed_op
from pase.frontends.torch.reasons import of_pytorch
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchOperand

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["check_linear", "derivatives_traced", "refuse_module_hooks"]

_COTANGENT = "pase_cotangent"
"""Mark of a node that stands for the cotangent of a Function's result. Its value names the Function and its place."""
_OWN: ContextVar[bool] = ContextVar("pase_own_derivative", default=False)
"""Whether the derivative that is being taken is this module's own, not one of the user's step."""


@contextlib.contextmanager
def derivatives_traced() -> Iterator[None]:
    """Within, a call of the user's ``torch.autograd.Function`` is traced with the backward that it defines.

    The backward B is linear in the cotangent g of the result y. With L = Bᵀ, the graph of
    ``passed(y, L(x))`` has the value y and the derivative B, and L consists of ordinary ops.

    A hook on the gradient of a tensor is refused. So is a derivative that the step itself takes (a gradient penalty):
    an exported graph does not contain it, and whatever is computed from it would become a constant.
    """
    import torch

    autograd = {name: getattr(torch.autograd, name) for name in ("grad", "backward")}
    usual, hook = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook
    inner, under_vmap = (
        torch.autograd.function._SingleLevelFunction,
        torch.autograd.function.custom_function_call,
    )

    def apply(cls: TorchOperand, *args: TorchOperand, **kwargs: TorchOperand) -> TorchOperand:
        if cls.__module__.partition(".")[0] == "torch":
            return usual.__func__(cls, *args, **kwargs)
        return _Call(of=cls, place=_users_line(), args=args).traced()

    def apply_held(cls: TorchOperand, *args: TorchOperand) -> TorchOperand:
        """Replaces what the usual ``apply`` calls, because programs keep ``apply`` itself (``f = Rounded.apply``)."""
        if cls.__module__.partition(".")[0] == "torch":
            return super(inner, cls).apply(*args)
        return _Call(of=cls, place=_users_line(), args=args).traced()

    def apply_under_vmap(cls: TorchOperand, *args: TorchOperand) -> TorchOperand:
        """Replaces what the usual ``apply`` calls inside the transforms of ``torch.func``."""
        if cls.__module__.partition(".")[0] == "torch":
            return under_vmap(cls, *args)
        return _Call(of=cls, place=_users_line(), args=args).traced()

    def register_hook(self: Tensor, hook: object) -> object:
        raise PaseError(
            "a hook on the gradient of a tensor runs Python code in backward, which an exported graph does not contain",
            where=_users_line(),
            fix="write a torch.autograd.Function whose backward does the same, or remove the hook",
        )

    def taken(name: str) -> Callable[..., TorchOperand]:
        def call(*args: TorchOperand, **kwargs: TorchOperand) -> TorchOperand:
            if _OWN.get() or _of_a_body():
                return autograd[name](*args, **kwargs)
            raise PaseError(
                "the step itself takes a derivative (torch.autograd.grad, backward or torch.func), which PyTorch's "
                "export does not record",
                where=_users_line(),
                fix="write the derivative out as tensor operations, or write the model in JAX, where pase reads "
                "jax.grad inside of a loss",
            )

        return call

    for name in autograd:
        setattr(torch.autograd, name, taken(name))
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    inner.apply = classmethod(apply_held)  # type: ignore[attr-defined]
    torch.autograd.function.custom_function_call = apply_under_vmap  # type: ignore[assignment]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for name, function in autograd.items():
            setattr(torch.autograd, name, function)
        torch.autograd.Function.apply = usual  # type: ignore[method-assign]
        del inner.apply  # type: ignore[attr-defined]  # the parent class's method becomes visible again
        torch.autograd.function.custom_function_call = under_vmap
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]


def refuse_module_hooks(module: Module) -> None:
    """PaseError if a module has hooks that run in backward."""
    for path, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise PaseError(
                f"module '{path or type(m).__name__}' has a backward hook, which runs Python code in backward that an "
                f"exported graph does not contain",
                where=type(module).__name__,
                fix="remove the hook before compiling",
            )


def check_linear(nodes: Iterable[FxNode], model: str) -> None:
    """PaseError if the backward of a Function is not linear in the gradient that it receives."""
    for n in nodes:
        told = (n.meta.get("custom") or {}).get(_COTANGENT)
        if told is not None:
            raise PaseError(
                f"the backward of {told} is not linear in the gradient that it receives (for example, it clips or "
                f"normalises it), so partial gradients would not add up",
                where=model,
                fix="do this to the gradients of the parameters, after backward",
            )


def _of_a_body() -> bool:
    """Whether PyTorch itself takes the derivative, as it does when it traces the body of a loop or a branch."""
    return any("/torch/_higher_order_ops/" in f.f_code.co_filename for f, _ in traceback.walk_stack(None))


def _users_line() -> str:
    frames = [f for f in traceback.extract_stack() if not of_pytorch(f.filename)]
    own = [f for f in frames if "/pase/" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown line"


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a user's ``torch.autograd.Function``."""

    of: TorchOperand
    place: str
    args: Sequence[TorchOperand]

    def traced(self) -> TorchOperand:
        """The call's result, with the derivative that the Function's backward defines."""
        import torch

        watched = [
            isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled() for x in self.args
        ]
        ctx = _Context(needs_input_grad=tuple(watched))
        with torch.no_grad():
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in self.args]
            if self.of.setup_context is torch.autograd.Function.setup_context:
                made = self.of.forward(ctx, *given)
            else:
                made = self.of.forward(*given)
                self.of.setup_context(ctx, tuple(given), made)
        if ctx.dirty:
            raise self.fails("it writes its operands in place (mark_dirty)", "return new tensors instead")
        if not any(watched):
            return made
        outs = made if isinstance(made, tuple) else (made,)
        with torch.enable_grad():
            found = self.with_derivative(ctx, outs, watched)
        return found if isinstance(made, tuple) else found[0]

    def with_derivative(
        self, ctx: _Context, outs: Sequence[TorchOperand], watched: Sequence[bool]
    ) -> tuple[TorchOperand, ...]:
        import torch
        from torch.fx.traceback import annotate

        floating = [isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()) for y in outs]
        given: list[TorchOperand] = []
        for y, f in zip(outs, floating, strict=True):
            with annotate({_COTANGENT: f"torch.autograd.Function '{self.of.__name__}' at {self.place}"}):
                g = torch.zeros_like(y) if isinstance(y, torch.Tensor) else None
            given.append(g.requires_grad_() if f and g is not None else g)
        backward = getattr(self.of.backward, "__wrapped__", self.of.backward)  # undo @once_differentiable
        back = backward(ctx, *given)
        back = back if isinstance(back, tuple) else (back,)
        pairs = [
            (x, b)
            for x, b, w in zip(self.args, back, watched, strict=False)
            if w and b is not None and b.requires_grad
        ]
        ends = [g for g, f in zip(given, floating, strict=True) if f]
        every: Sequence[Tensor | None] = [None] * len(ends)
        if pairs:
            for x, b in pairs:
                if x.shape != b.shape:
                    raise self.fails(
                        f"its backward returns a gradient of shape {list(b.shape)} for an operand of shape "
                        f"{list(x.shape)}",
                        "return a gradient of the operand's shape",
                    )
            own = _OWN.set(True)
            every = torch.autograd.grad(
                [b for _, b in pairs],
                ends,
                [x.to(b.dtype) for x, b in pairs],
                create_graph=True,
                allow_unused=True,
            )
            _OWN.reset(own)
        linear = iter(every)
        return tuple(
            y if not f or (t := next(linear)) is None else passed_op()(y.detach(), t.to(y.dtype))
            for y, f in zip(outs, floating, strict=True)
        )

    def fails(self, what: str, fix: str) -> PaseError:
        return PaseError(what, where=f"torch.autograd.Function '{self.of.__name__}' at {self.place}", fix=fix)


@dataclass(kw_only=True)
class _Context:
    """The ``ctx`` argument of a Function's forward and backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[TorchOperand, ...] = ()
    dirty: bool = False
    materialize_grads: bool = True

    def save_for_backward(self, *tensors: TorchOperand) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: TorchOperand) -> None:
        self.dirty = True

    def mark_non_differentiable(self, *tensors: TorchOperand) -> None:
        """Does nothing: a result without a gradient receives none anyway."""

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value
