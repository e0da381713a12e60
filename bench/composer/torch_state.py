"""Layers with state, without gradients, or with custom derivatives, in PyTorch: what a graph of ops may lose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.composer.torch_maker import TorchApply, TorchEnv, TorchMaker, torch_layer
from bench.composer.torch_weights import RoundedThrough, SwishOwnBackward


class GradientReversed(torch.autograd.Function):
    """Passes values on, and gradients with the opposite sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * g, None


class LinearOwnBackward(torch.autograd.Function):
    """A product with two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.flatten(0, -2).T @ g.flatten(0, -2)


def _in_regions(how: str, own: Any, x: Tensor, env: TorchEnv) -> Tensor:
    match how:
        case "view":
            v = own.a(x).transpose(1, 2)
            with torch.no_grad():
                t = v.sin()
            return x + (v * t).transpose(1, 2)
        case "inside":
            with torch.no_grad():
                t = own.a(x).softmax(-1)
                with torch.enable_grad():
                    y = own.b(x)
            return x + t * y
        case "inference":
            with torch.inference_mode():
                t = own.a(x)
            return x + own.a(x) * t.clone()
        case "twice":
            with torch.set_grad_enabled(False):
                size = own.a(x).norm(dim=-1, keepdim=True)
            env.terms.append(0.1 * (own.a(x) / (1 + size)).square().mean())
            return x + own.b(x) / (1 + size)
    y = own.a(x)
    return x + 0.5 * y + 0.5 * y.square().detach()


@torch_layer(2)
def without_gradient(m: TorchMaker) -> TorchApply:
    """Values under no_grad and similar, which other readers use with a gradient, before or after."""
    d, own = m.shape[2], m.own
    how = m.choose(
        "before",
        "after",
        "detach",
        "data",
        "set",
        "decorated",
        "view",
        "half",
        "inside",
        "inference",
        "twice",
    )
    own.a, own.b = m.linear(d, d), m.linear(d, d)

    @torch.no_grad()
    def decorated(own: Any, x: Tensor) -> Tensor:
        return own.a(x).softmax(-1)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        match how:
            case "before":
                with torch.no_grad():
                    t = own.a(x).softmax(-1)
                return x + own.b(own.a(x)) * t
            case "after":
                y = own.a(x)
                with torch.no_grad():
                    t = torch.sigmoid(own.b(y))
                return x + own.b(y) * t
            case "detach":
                y = own.a(x)
                return x + own.b(y.detach()) + y * y.detach().tanh()
            case "data":
                y = own.a(x)
                return x + y * own.b(y.data).sigmoid()
            case "set":
                torch.set_grad_enabled(False)
                t = own.a(x).tanh()
                torch.set_grad_enabled(True)
                return x + own.a(x) * t
            case "decorated":
                return x + own.b(x) * decorated(own, x)
        return _in_regions(how, own, x, env)

    return run


@torch_layer(2)
def moving_average(m: TorchMaker) -> TorchApply:
    """Buffers that the step writes: means, maxima, counters, a teacher's weights."""
    d, own = m.shape[2], m.own
    how = m.choose(
        "mean", "variance", "counter", "scale", "overwritten", "assigned", "teacher", "max", "lerp", "window"
    )
    own.lin = m.linear(d, d)
    own.register_buffer("mean", torch.zeros(d))
    own.register_buffer("var", torch.ones(d))
    own.register_buffer("steps", torch.tensor(0))
    own.register_buffer("teacher", m.normal(d, d, scale=d**-0.5))
    own.register_buffer("seen", torch.zeros(3, d))
    own.w = m.param(d, d, scale=d**-0.5)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        still = y.detach()
        match how:
            case "mean":
                own.mean.mul_(0.9).add_(still.mean((0, 1)), alpha=0.1)
                return x + y - own.mean
            case "variance":
                with torch.no_grad():
                    own.var.lerp_(still.var((0, 1)), 0.1)
                return x + y / (own.var + 0.1).sqrt()
            case "counter":
                own.steps += 1
                return x + y / own.steps
            case "scale":
                own.var.copy_(torch.maximum(own.var, still.abs().amax((0, 1))))
                return x + y / own.var
            case "overwritten":
                own.mean.copy_(still[0].mean(0) + still[-1, 0])
            case "assigned":
                own.mean = 0.5 * own.mean + 0.5 * still.mean((0, 1))
                return x + y * own.mean
            case "teacher":
                with torch.no_grad():
                    t = x @ own.teacher
                    own.teacher.mul_(0.9).add_(own.w, alpha=0.1)
                env.terms.append(F.mse_loss(x @ own.w, t))
            case "max":
                own.mean[0] = still.max()
                return x + y * own.mean[0].clone()
            case "lerp":
                own.mean = torch.lerp(own.mean, still.mean((0, 1)), 0.2)
                env.terms.append((y.mean((0, 1)) - own.mean).square().mean())
            case _:
                own.seen = torch.cat([own.seen[1:], still.mean((0, 1))[None]])
                return x + y * own.seen.mean(0)
        return x + y

    return run


@torch_layer(1.5)
def codebook(m: TorchMaker) -> TorchApply:
    """Vector quantization: the nearest code, straight through, with a commitment loss. Codes are trained by gradients
    or by a moving average."""
    d, own, n = m.shape[2], m.own, 6
    how, near = (
        m.choose("gradient", "average", "buffer", "gumbel-free"),
        m.choose("cdist", "written", "matmul"),
    )
    own.lin = m.linear(d, d)
    book = m.normal(n, d)
    if how in ("gradient", "gumbel-free"):
        own.book = nn.Parameter(book)
    else:
        own.register_buffer("book", book)
        own.register_buffer("count", torch.ones(n))

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        flat = y.reshape(-1, d)
        if near == "cdist":
            apart = torch.cdist(flat.detach(), own.book.detach())
        elif near == "written":
            apart = (flat.detach()[:, None] - own.book.detach()).square().sum(-1)
        else:
            apart = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ own.book.t() + own.book.pow(2).sum(1)
        if how == "gumbel-free":
            return x + ((-apart).softmax(-1) @ own.book).view_as(x)
        at = apart.argmin(1)
        code = (F.embedding(at, own.book) if how == "gradient" else own.book[at]).view_as(x)
        env.terms.append(0.25 * F.mse_loss(y, code.detach()))
        if how == "gradient":
            env.terms.append(F.mse_loss(code, y.detach()))
        if how == "average":
            with torch.no_grad():
                ours = F.one_hot(at, n).to(x.dtype)
                own.count.mul_(0.9).add_(ours.sum(0), alpha=0.1)
                own.book.mul_(0.9).add_((ours.T @ flat) / (own.count[:, None] + 1e-3), alpha=0.1)
        # Tokens of one code would be equal up to rounding, and a maximum over them ambiguous.
        return x + y + (code - y).detach()

    return run


@torch_layer(1.5)
def own_derivative(m: TorchMaker) -> TorchApply:
    """A torch.autograd.Function."""
    d, own = m.shape[2], m.own
    how = m.choose("rounded", "reversed", "swish", "linear", "loop")
    own.a, own.b = m.linear(d, d), m.weight(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.a(x)
        if how == "rounded":
            return x + RoundedThrough.apply(y) @ own.b()
        if how == "reversed":
            env.terms.append(GradientReversed.apply(y, 0.3).square().mean())
            return x + y
        if how == "swish":
            return x + SwishOwnBackward.apply(y)
        if how == "linear":
            return x + LinearOwnBackward.apply(y, own.b())
        for factor in (0.5, 0.25):
            y = GradientReversed.apply(SwishOwnBackward.apply(y), factor)
        return x + y

    return run


@torch_layer(1.5)
def checkpointed(m: TorchMaker) -> TorchApply:
    """torch.utils.checkpoint of a module or a function, which may be a closure."""
    d, own = m.shape[2], m.own
    how, old = m.choose("module", "closure", "two", "nested", "sequential", "no_grad"), m.chance(0.2)
    own.net, own.w = nn.Sequential(m.linear(d, 2 * d), nn.GELU(), m.linear(2 * d, d)), m.weight(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        w = own.w()
        match how:
            case "module":
                return x + checkpoint(own.net, x, use_reentrant=old)
            case "closure":
                return x + checkpoint(lambda t: (own.net(t) @ w).tanh(), x, use_reentrant=False)
            case "two":
                a, b = checkpoint(lambda t, u: (own.net(t), t @ u), x, w, use_reentrant=False)
                return x + a * b
            case "nested":
                inner = lambda t: checkpoint(own.net, t, use_reentrant=False).sin()  # noqa: E731
                return x + checkpoint(inner, x, use_reentrant=False)
            case "sequential":
                y = x
                for layer in own.net:
                    y = checkpoint(layer, y, use_reentrant=False)
                return x + y
        with torch.no_grad():
            t = own.net(x)
        return x + checkpoint(lambda u: own.net(u) * t, x, use_reentrant=False)

    return run


@torch_layer()
def hooked(m: TorchMaker) -> TorchApply:
    """Hooks of modules that change their outputs; hooks on gradients, which must be refused."""
    d, own = m.shape[2], m.own
    how = m.choose("forward", "pre", "kwargs", "hidden", "gradient") if m.chance(0.9) else "gradient"
    own.a, own.b = m.linear(d, d), m.linear(d, d)
    if how == "forward":
        own.a.register_forward_hook(lambda module, given, out: out.tanh() + 1)
    elif how == "pre":
        own.a.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    elif how == "kwargs":
        own.b.register_forward_hook(lambda module, given, kw, out: out * 0.5, with_kwargs=True)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        kept = []
        handle = (
            own.a.register_forward_hook(lambda module, given, out: kept.append(out))
            if how == "hidden"
            else None
        )
        y = own.a(x)
        if handle is not None:
            handle.remove()
            env.terms.append(0.1 * kept[0].square().mean())
        if how == "gradient":
            y.register_hook(lambda g: 2 * g)
        return x + own.b(y)

    return run


@torch_layer(1.5)
def chosen_module(m: TorchMaker) -> TorchApply:
    """ModuleDict, ParameterDict, nested modules, a module called twice, frozen and unused ones, tied weights."""
    d, own = m.shape[2], m.own
    how = m.choose(
        "dict", "twice", "frozen", "unused", "tied", "transposed", "parameters", "nested", "frozen norm"
    )
    own.all = nn.ModuleDict({"a": m.linear(d, d), "b": nn.Sequential(m.linear(d, d), nn.Tanh())})
    own.scales = nn.ParameterDict({"x": m.param(d), "y": m.param(d)})
    if how == "frozen":
        own.all["a"].requires_grad_(False)
    if how in ("tied", "transposed"):
        own.first, own.second = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        own.second.weight = own.first.weight
    if how == "nested":
        own.deep = nn.ModuleDict({"into": nn.ModuleList([nn.ModuleDict({"w": m.linear(d, d)})])})
    if how == "frozen norm":
        own.norm = nn.LayerNorm(d).requires_grad_(False)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        match how:
            case "dict":
                return x + sum(own.all[k](x) * own.scales[w] for k, w in (("a", "x"), ("b", "y")))
            case "twice":
                return x + own.all["b"](own.all["b"](x))
            case "tied":
                return x + own.second(own.first(x).relu())
            case "transposed":
                return x + F.linear(own.first(x).relu(), own.first.weight.t())
            case "parameters":
                return x * own.scales["x"].exp() + own.scales["y"]
            case "nested":
                return x + own.deep["into"][0]["w"](x)
            case "frozen norm":
                return own.all["a"](own.norm(x))
        return x + own.all["a"](x).tanh()

    return run


@torch_layer(1.5)
def written_in_place(m: TorchMaker) -> TorchApply:
    """Activations that are changed in place, parts of them, and views of them."""
    _b, s, d = m.shape
    own = m.own
    how = m.choose("relu_", "slice", "view", "fill", "add_", "zeros", "column", "masked", "list", "index")
    own.lin = m.linear(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        match how:
            case "relu_":
                return x + F.relu(y, inplace=True)
            case "slice":
                y[:, 0] = x[:, -1] * 0.5
            case "view":
                y.view(-1, d)[:, 0].mul_(2)
            case "fill":
                y[:, :, 0].fill_(0.3)
            case "add_":
                y += x
                y.mul_(0.5).sub_(0.1)
            case "zeros":
                z = torch.zeros_like(y)
                z[:, 1:] = y[:, :-1]
                return x + z
            case "column":
                y[..., :2] += x[..., -2:]
            case "masked":
                y[y > 1] = 1.0
            case "index":
                y[:, torch.tensor([0, s - 1])] = x[:, :1]
            case _:
                z = x.new_empty(x.shape)
                for t in range(s):
                    z[:, t] = y[:, t] * (t + 1)
                return x + z
        return x + y

    return run


@torch_layer(1.5)
def transformed_function(m: TorchMaker) -> TorchApply:
    """torch.func: vmap, functional_call, a gradient inside the step."""
    _b, _s, d = m.shape
    own, how = (
        m.own,
        m.choose("vmap", "vmap weights", "functional_call", "jvp", "grad", "inner step", "penalty"),
    )
    own.net, own.each = m.linear(d, d), m.param(3, d, d, scale=d**-0.5)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        match how:
            case "vmap":
                return x + torch.func.vmap(lambda t: own.net(t).tanh().cumsum(0))(x)
            case "vmap weights":
                return x + torch.func.vmap(lambda w: (x @ w).tanh())(own.each).mean(0)
            case "functional_call":
                held = {k: v * 0.5 for k, v in own.net.named_parameters()}
                return x + torch.func.functional_call(own.net, held, (x,))
            case "jvp":
                return x + torch.func.jvp(lambda t: own.net(t).tanh(), (x,), (torch.ones_like(x),))[1]
            case "grad":
                return x + torch.func.grad(lambda t: own.net(t).tanh().sum())(x)
            case "inner step":
                w = own.each[0]
                slope = torch.func.grad(lambda w: ((x @ w).tanh() ** 2).mean())(w)
                return x + x @ (w - 0.1 * slope)
        y = x + 0 * own.net(x)
        (g,) = torch.autograd.grad(own.net(y).tanh().sum(), y, create_graph=True)
        env.terms.append(0.1 * g.square().mean())
        return x + own.net(x)

    return run


@torch_layer(1.5, whole=True)
def random_numbers(m: TorchMaker) -> TorchApply:
    """Dropout, noise, stochastic depth. They are compared with the step of the same plan on one device, because pase
    generates random numbers in another way than PyTorch."""
    _b, _s, d = m.shape
    own, how = (
        m.own,
        m.choose("dropout", "channels", "noise", "depth", "gumbel", "bernoulli", "feature", "alpha"),
    )
    own.lin = m.linear(d, d)
    m.drops = True

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        match how:
            case "dropout":
                return x + F.dropout(y, 0.2)
            case "channels":
                return x + F.dropout1d(y, 0.3)
            case "noise":
                return x + (0.3 * y).exp() * torch.randn_like(y)
            case "depth":
                keep = torch.rand(len(x), 1, 1, dtype=x.dtype) < 0.7
                return x + y * keep / 0.7
            case "gumbel":
                return x + F.gumbel_softmax(y, tau=0.7)
            case "bernoulli":
                return x + y * torch.bernoulli(torch.full_like(y, 0.8))
            case "feature":
                return x + F.feature_alpha_dropout(y, 0.2)
        return x + F.alpha_dropout(y, 0.1)

    return run
