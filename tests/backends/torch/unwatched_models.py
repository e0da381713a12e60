"""Models some of whose values have no gradient, or whose derivatives are not those of the forward computation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

KINDS: tuple[str, ...] = (
    *("pseudo labels", "set_grad_enabled", "inference_mode", "enabled inside", "decorated", "view first"),
    *(
        "in autocast",
        "checkpoint",
        "data",
        "straight through",
        "straight through, held",
        "two results",
        "maximum",
    ),
)


def self_trained(self: Any, x: Any, kind: str) -> Any:
    """The loss against the model's own targets; None if ``kind`` is of another model."""
    import torch
    from torch.nn.functional import relu
    from torch.utils.checkpoint import checkpoint

    net: Any = self.net
    match kind:
        case "pseudo labels" | "checkpoint":
            with torch.no_grad():
                t = self.target(x)
            if kind == "checkpoint":
                net = partial(checkpoint, net, use_reentrant=False)
        case "set_grad_enabled":  # PyTorch traces the graph again if a buffer is written
            torch.set_grad_enabled(False)
            t = self.target(x)
            self.mean.mul_(0.9).add_(t.mean(0))
            torch.set_grad_enabled(True)
        case "inference_mode":
            with torch.inference_mode():
                t = self.target(x)
            t = t.clone()
        case "enabled inside":
            with torch.no_grad():
                t = self.target(x)
                with torch.enable_grad():
                    y = net(x).log_softmax(-1)
                self.mean.add_(t.mean(0))
            return -(t * y).sum(-1).mean()
        case "decorated":
            t = torch.no_grad()(self.target)(x)
        case "in autocast":
            with torch.autocast("cpu", enabled=False):
                h = self.enc(x)
                with torch.no_grad():
                    t = self.head(h).softmax(-1)
                return -(t * self.head(relu(h)).log_softmax(-1)).sum(-1).mean()
        case _:
            return None
    return -(t * net(x).log_softmax(-1)).sum(-1).mean()


def derived(self: Any, x: Any, kind: str) -> Any:
    """The loss of a view that is first read without a gradient, or of user-defined derivatives."""
    import torch
    from torch.nn.functional import relu

    match kind:
        case "view first":
            v = self.enc(x).reshape(16, 4, 8).transpose(1, 2)
            with torch.no_grad():
                t = v.sin()
            return (v * t).mean()
        case "data":
            h = relu(self.enc(x))
            return (h @ self.w * (h.data @ self.w.data)).mean()
        case "maximum":
            y = self.net(x)
            return (y * y.max() - y.detach().min()).mean() * (y > 9).any().logical_not()
        case "straight through, held":  # ``apply`` was looked up before pase traces the model
            return (self.rounded(self.net(x), 0.5) * x[:, :8]).square().mean()
        case "straight through":
            return (rounded().apply(self.net(x), 0.5) * x[:, :8]).square().mean()
        case _:
            y, z = both().apply(self.enc(x), self.w)
            return y.square().mean() + z.square().mean()


def rounded() -> Any:
    """A Function whose backward passes gradients straight through, within bounds."""
    import torch

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, factor: float) -> Any:
            ctx.save_for_backward(x)
            ctx.factor = factor
            return x.round()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return ctx.factor * g * (ctx.saved_tensors[0].abs() < 1), None

    return Rounded


def both() -> Any:
    """A Function of two operands and two results."""
    import torch

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(x: Any, w: Any) -> Any:
            return x @ w, x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Any, h: Any) -> Any:
            x, w = ctx.saved_tensors
            return g @ w.T + 3 * h, x.T @ g / 2

    return Both


def unwatched(kind: str) -> Any:
    """The model; its batch is [16, 16]."""
    import torch
    from torch import nn
    from torch.nn.functional import relu

    class Unwatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.head = nn.Linear(16, 32), nn.Linear(32, 8)
            self.w = nn.Parameter(torch.randn(32, 8) / 4)
            self.register_buffer("mean", torch.zeros(8))
            self.rounded = rounded().apply

        def net(self, x: Any) -> Any:
            return self.head(relu(self.enc(x)))

        def target(self, x: Any) -> Any:
            return (2 * self.net(x)).softmax(-1)

        def forward(self, x: Any) -> Any:
            found = self_trained(self, x, kind)
            return derived(self, x, kind) if found is None else found

    return Unwatched()


BUFFERS: tuple[str, ...] = (
    *(
        "overwritten",
        "assigned",
        "assigned and read",
        "of one element",
        "previous",
        "counter",
        "codebook",
        "queue",
    ),
    *("in place", "shared", "booleans", "saved for backward", "data of a buffer"),
    *("momentum by data", "momentum in place", "momentum assigned", "a frozen layer decays"),
)


def buffers(kind: str) -> Any:
    """A model that writes its buffers; its batch is [16, 16]."""
    import torch
    from torch import nn

    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Linear(16, 8)
            self.register_buffer("code", torch.randn(8))
            self.register_buffer("before", torch.randn(8))
            self.register_buffer("one", torch.zeros(()))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
            self.register_buffer("book", torch.randn(12, 8))
            self.register_buffer("count", torch.ones(12))
            self.register_buffer("flags", torch.zeros(8, dtype=torch.bool))
            self.register_buffer("nothing", None)
            self.slow = nn.Linear(16, 8)  # a momentum encoder: its weights follow those of the other
            self.slow.requires_grad_(False)
            if kind == "shared":
                self.sub = nn.Module()
                self.sub.register_buffer("again", self.code)

        def forward(self, x: Any) -> Any:
            z = self.enc(x)
            found = written(self, z, z.detach(), kind)
            found = follows(self, x, z, kind) if found is None else found
            return (z**2).mean() + (0.0 if found is None else found)

    return Buffers()


def written(self: Any, z: Any, d: Any, kind: str) -> Any:
    """Write buffers. z: activations. d: the same without a gradient. Returns a term of the loss."""
    import torch
    from torch.nn.functional import one_hot

    def ema(held: Any, new: Any) -> None:
        held.mul_(0.9).add_(new, alpha=0.1)

    match kind:
        case "overwritten":
            self.code.copy_(d.mean(0))
        case "assigned":
            self.code = d.mean(0)
        case "assigned and read":
            self.code = 0.9 * self.code + 0.1 * d.mean(0)
            return (z * self.code).mean()
        case "of one element":
            ema(self.one, (d**2).mean())
            return z.mean() * self.one
        case "previous":  # the old value of one buffer is the new one of another, as a view
            self.before, self.code = self.code.view(2, 4).view(8), d.mean(0)
            return (z * self.before).mean()
        case "counter":
            self.steps.add_(1)
            ema(self.code, d.mean(0))
            return ((z - self.code / (1 - 0.9**self.steps)) ** 2).mean()
        case "codebook":
            near = ((d[:, None] - self.book) ** 2).sum(-1).argmin(-1)
            ours = one_hot(near, 12).to(d.dtype)
            ema(self.count, ours.sum(0))
            ema(self.book, (ours.T @ d) / self.count[:, None])
            q = self.book[near]
            return ((z - q) ** 2).mean() + (z + (q - z).detach()).square().mean()
        case "queue":
            loss = (z @ self.book.T).logsumexp(-1).mean()
            self.book = torch.roll(self.book, 4, 0)
            self.book[:4] = d[:4]
            return loss
        case "in place":
            self.code[2:5] = d.mean(0)[2:5]
            self.code.copy_(torch.maximum(self.code, d.amax(0)))
            return (z * self.code).mean()
        case "shared":
            self.code.add_(d.mean(0))
            return (z * self.sub.again).mean()
        case "booleans":
            self.flags.copy_(d.mean(0) > 0)
            return (z * self.flags).mean()
        case "data of a buffer":
            self.code.data = 0.9 * self.code.data + 0.1 * z.data.mean(0)
            return (z * self.code).mean()
        case "saved for backward":
            ema(self.code, self.code * d.mean(0))
            return (z * self.code).mean()


def follows(self: Any, x: Any, z: Any, kind: str) -> Any:
    """Write parameters that are not trained. x: the batch. z: activations. Returns a term of the loss."""
    import torch
    from torch import nn

    pairs = list(zip(self.slow.parameters(), self.enc.parameters(), strict=True))
    match kind:
        case "momentum by data":
            for slow, fast in pairs:
                slow.data = slow.data * 0.9 + fast.data * 0.1
        case "momentum in place":
            with torch.no_grad():
                for slow, fast in pairs:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        case "momentum assigned":
            self.slow.weight = nn.Parameter(torch.lerp(*(p.detach() for p in pairs[0]), 0.1), False)
        case "a frozen layer decays":
            for slow, _ in pairs:
                slow.data.mul_(0.9)
        case _:
            return None
    return (z - self.slow(x)).abs().mean()


def clipped() -> Any:
    """A Function whose backward is not linear."""
    import torch

    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g.clamp(-1e-3, 1e-3)

    return Clipped


def rewritten() -> tuple[Any, ...]:
    """Linear layers that write their own weight, in place and by assignment, and one that writes its result."""
    import torch
    from torch import nn

    class Clamps(nn.Linear):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class Normalizes(nn.Linear):
        def forward(self, x: Any) -> Any:
            self.weight.data = nn.functional.normalize(self.weight.data, dim=1)
            return super().forward(x)

    class Rounds(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            y.data = y.data.round()
            return y

    return Clamps(16, 8), Normalizes(16, 8), Rounds(16, 8)


def penalized(module: Any, x: Any) -> Any:
    """A gradient penalty."""
    import torch

    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(module(x).tanh().sum(), x, create_graph=True)
    return module(x).mean() + (g.norm(dim=1) - 1).square().mean()


def sensitive(module: Any, x: Any) -> Any:
    """A loss of per-example derivatives."""
    import torch

    return torch.func.vmap(torch.func.grad(lambda one: module(one).tanh().sum()))(x).square().mean()


def refused() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """What a step cannot do: regex of the message -> (module, loss), each for a batch of [16, 16]."""
    import torch
    from torch import nn

    class Counts(nn.Linear):
        steps = 0

        def forward(self, x: Any) -> Any:
            self.steps = self.steps + 1
            return super().forward(x) * self.steps

    class Resizes(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.register_buffer("held", torch.zeros(8))

        def forward(self, x: Any) -> Any:
            self.held = x.detach().mean(0)
            return super().forward(x)

    def squared(module: Any, x: Any) -> Any:
        return module(x).square().mean()

    def hooked(module: Any, x: Any) -> Any:
        y = module(x)
        y.register_hook(lambda g: 2 * g)
        return y.square().mean()

    class Hooked(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.register_full_backward_hook(lambda m, gi, go: None)

    clamps, normalizes, rounds = rewritten()
    return {
        r"'Clipped' at .*unwatched_models.py:\d+ is not linear": (
            nn.Linear(16, 8),
            lambda m, x: clipped().apply(m(x)).square().mean(),
        ),
        r"unwatched_models.py:\d+: .* takes a derivative": (nn.Linear(16, 8), penalized),
        r"unwatched_models.py:\d+: .* takes a derivative .*; write": (
            nn.Linear(16, 8),
            sensitive,
        ),
        r"Python state \('steps'\) that the next step reads": (Counts(16, 8), squared),
        r"weight: the step writes a parameter": (clamps, squared),
        r"weight: the step writes a parameter .*; write": (normalizes, squared),
        r"assigns .data of a tensor": (rounds, squared),
        r"'held', torch.float32 \[8\], by .*torch.float32 \[16\]": (
            Resizes(16, 8),
            squared,
        ),
        r"unwatched_models.py:\d+: a hook on the gradient": (nn.Linear(16, 8), hooked),
        r"'Hooked' has a backward hook": (Hooked(16, 8), squared),
    }
