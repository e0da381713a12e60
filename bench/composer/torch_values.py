"""Layers with few products, in PyTorch: indices, order, shapes, other dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.composer.torch_maker import TOKENS, TorchApply, TorchEnv, TorchMaker, torch_layer


@torch_layer(2)
def embedding(m: TorchMaker) -> TorchApply:
    """Rows of a table by the batch's tokens; another part may use the table as well."""
    b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("module", "functional", "index", "one_hot", "padding", "bag", "scaled", "select"),
    )
    tokens = m.input("tokens", m.integers(TOKENS, b, s))
    if m.chance(0.5) and how != "padding":
        own.table = nn.Embedding(TOKENS, d)
        own.table.weight = m.common("embedding", TOKENS, d, scale=0.7)
    else:
        own.table = nn.Embedding(TOKENS, d, padding_idx=0 if how == "padding" else None)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        at = env.batch[tokens]
        if how == "functional":
            return x + F.embedding(at, own.table.weight)
        if how == "index":
            return x + own.table.weight[at]
        if how == "one_hot":
            return x + F.one_hot(at, TOKENS).to(x.dtype) @ own.table.weight
        if how == "bag":
            return x + F.embedding_bag(at, own.table.weight, mode="sum").unsqueeze(1)
        if how == "select":
            return x + own.table.weight.index_select(0, at.reshape(-1)).view_as(x)
        return x + own.table(at) * (d**0.5 if how == "scaled" else 1)

    return run


@torch_layer()
def positions(m: TorchMaker) -> TorchApply:
    """Positions: learned, sliced from a longer table; fixed sinusoids; relative."""
    _b, s, d = m.shape
    own, how = m.own, m.choose("slice", "embedding", "waves", "relative", "buffer")
    own.table = m.weight(s + 3, d, scale=0.5)
    own.places = nn.Embedding(s, d)
    own.register_buffer("ids", torch.arange(s).expand(1, -1), persistent=False)
    if how != "embedding":
        del own.places
    else:
        del own.table

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "embedding":
            return x + own.places(own.ids)
        if how == "slice":
            return x + own.table()[: x.shape[1]]
        if how == "buffer":
            return x + own.table()[own.ids[:, 1:]].mean(1, keepdim=True)
        if how == "relative":
            at = (own.ids[0][None] - own.ids[0][:, None]).clamp(-1, s - 1) + 1
            return x + (own.table()[at] * x.unsqueeze(1)).mean(2)
        wave = torch.sin(torch.arange(s, dtype=x.dtype)[:, None] / 10 ** (torch.arange(d, dtype=x.dtype) / d))
        return x * (1 + own.table()[:s]) + wave

    return run


@torch_layer(2)
def picked(m: TorchMaker) -> TorchApply:
    """Elements by indices of the batch, changed and written back."""
    b, s, d = m.shape
    own, n = m.own, max(s // 2, 1)
    how = m.choose(
        "gather", "scatter", "scatter_add", "index_put", "reduce", "masked", "take", "select_scatter"
    )
    at = m.input("at", torch.stack([torch.tensor(m.values.permutation(s)[:n]) for _ in range(b)]))
    own.lin = m.linear(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        i = env.batch[at].unsqueeze(-1).expand(-1, -1, d)
        mine = own.lin(x.gather(1, i)).tanh()
        rows = torch.arange(len(x))[:, None]
        match how:
            case "gather":
                return x + mine.mean(1, keepdim=True)
            case "scatter":
                return x.scatter(1, i, mine)
            case "scatter_add":
                return x.scatter_add(1, i, mine)
            case "index_put":
                return x.index_put((rows, env.batch[at]), mine, accumulate=True)
            case "reduce":
                return x.scatter_reduce(1, i, mine, reduce="amax")
            case "masked":
                y = x.clone()
                y[rows, env.batch[at]] = mine
                return y
            case "take":
                return x + torch.take_along_dim(mine, mine.argsort(1), 1).mean(1, keepdim=True)
        return x.select_scatter(mine[:, 0], 1, 0)

    return run


@torch_layer(1.5, whole=True)
def graph(m: TorchMaker) -> TorchApply:
    """Messages along edges of a graph of examples."""
    b, _s, d = m.shape
    own, edges = m.own, m.integers(b, 2, 2 * b)
    source, to = m.input("from", edges[0]), m.input("to", edges[1])
    how = m.choose("index_add", "scatter_add", "reduce", "index_copy", "mean", "dense", "put")
    own.lin = m.linear(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        said = own.lin(x[env.batch[source]]).tanh()
        at, zero = env.batch[to], torch.zeros_like(x)
        match how:
            case "index_add":
                return x + zero.index_add(0, at, said)
            case "scatter_add":
                return x + zero.scatter_add(0, at.view(-1, 1, 1).expand_as(said), said)
            case "reduce":
                return x.scatter_reduce(0, at.view(-1, 1, 1).expand_as(said), said, "amax", include_self=True)
            case "mean":
                count = x.new_zeros(len(x)).index_add(0, at, torch.ones_like(at, dtype=x.dtype))
                return x + zero.index_add(0, at, said) / count.clamp(min=1)[:, None, None]
            case "dense":
                near = x.new_zeros(len(x), len(x)).index_put(
                    (at, env.batch[source]), x.new_ones(()), accumulate=True
                )
                return x + torch.einsum("ij,jsd->isd", near, own.lin(x))
            case "put":
                y = x.clone()
                y.index_add_(0, at, said, alpha=0.5)
                return y
        return x + own.lin(x.index_select(0, at[: len(x)]))

    return run


@torch_layer(1.5)
def ordered(m: TorchMaker) -> TorchApply:
    """Sorted along the sequence or by a score; the largest few; the median."""
    _b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("sort", "argsort", "topk", "median", "kthvalue", "max", "quantile", "unique", "search"),
    )
    own.gain, k = m.vector(d, 1.0), max(s // 2, 1)
    own.score = m.linear(d, 1)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "sort":
            return x + x.sort(dim=1, descending=True).values * own.gain()
        if how == "median":
            return x - x.median(dim=1, keepdim=True).values * own.gain()
        if how == "kthvalue":
            return x + x.kthvalue(k, dim=1, keepdim=True).values * own.gain()
        if how == "quantile":
            return x - torch.quantile(x, 0.3, dim=1, keepdim=True) * own.gain()
        score = own.score(x).squeeze(-1)
        if how == "argsort":
            order = score.argsort(1)
            return (x * score.sigmoid().unsqueeze(-1)).gather(1, order.unsqueeze(-1).expand_as(x))
        if how == "max":
            best, at = score.max(1)
            chosen = x[torch.arange(len(x)), at]
            return x + (chosen * best[:, None]).unsqueeze(1)
        if how == "search":
            edges = torch.linspace(-2, 2, 5, dtype=x.dtype)
            return x * (1 + 0.1 * torch.bucketize(x.detach(), edges))
        top, at = score.topk(k, dim=1)
        chosen = x.gather(1, at.unsqueeze(-1).expand(-1, -1, d)) * top.softmax(-1).unsqueeze(-1)
        return x + chosen.sum(1, keepdim=True) * own.gain()

    return run


@torch_layer(1.5)
def masking(m: TorchMaker) -> TorchApply:
    """Masks: by lengths, with infinities, by bounds."""
    b, s, d = m.shape
    own, how = m.own, m.choose("lengths", "fill", "where", "tril", "nan", "isin", "clip", "sign", "heaviside")
    lengths = m.input("lengths", m.integers(s, b) + 1)
    own.lin, own.fill = m.linear(d, d), m.param(d, scale=0.3)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        on = torch.arange(s)[None] < env.batch[lengths][:, None]
        match how:
            case "lengths":
                pooled = (y * on.unsqueeze(-1)).sum(1) / env.batch[lengths][:, None]
                return x + pooled.unsqueeze(1) + own.fill
            case "fill":
                return x + y.masked_fill(~on.unsqueeze(-1), -1.0)
            case "where":
                return x + torch.where(on[..., None], y, own.fill)
            case "tril":
                return x + torch.ones(s, s, dtype=x.dtype).tril() @ y / s
            case "nan":
                return x + torch.nan_to_num(torch.where(y > 2, float("inf"), y), posinf=2.0)
            case "isin":
                return x + y * torch.isin(env.batch[lengths], torch.tensor([1, 2]))[:, None, None]
            case "clip":
                return x + torch.clamp(y, min=own.fill - 0.5, max=own.fill + 0.5)
            case "sign":
                return x + y.abs() * x.sign() + torch.copysign(own.fill, y)
        return x + torch.heaviside(y.detach(), x.new_zeros(())) * own.fill

    return run


@torch_layer(1.5)
def accumulated(m: TorchMaker) -> TorchApply:
    """Sums along the sequence."""
    _b, s, d = m.shape
    own = m.own
    how = m.choose("cumsum", "cumprod", "logcumsumexp", "cummax", "mean so far", "diff", "flip", "decay")
    own.lin, own.a_log = m.linear(d, d), m.vector(d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        match how:
            case "cumsum":
                return x + y.cumsum(1) / s
            case "cumprod":
                return x + torch.cumprod(1 + 0.1 * y.tanh(), 1)
            case "logcumsumexp":
                return x + torch.logcumsumexp(y, 1)
            case "cummax":
                return x + torch.cummax(y, 1).values
            case "mean so far":
                return x + y.cumsum(1) / torch.arange(1, s + 1, dtype=x.dtype)[:, None]
            case "diff":
                return x + F.pad(torch.diff(y, dim=1), (0, 0, 1, 0))
            case "flip":
                return x + y.flip(1).cumsum(1).flip(1) * 0.2
        decay = torch.exp(-own.a_log().exp())
        at = torch.arange(s, dtype=x.dtype)
        share = decay ** (at[:, None] - at[None]).clamp(min=0).unsqueeze(-1)
        keep = (at[:, None] >= at[None]).unsqueeze(-1)
        return x + torch.einsum("std,bsd->btd", torch.where(keep, share, 0.0).transpose(0, 1), y)

    return run


@torch_layer(1.5)
def fourier(m: TorchMaker) -> TorchApply:
    """Fourier transforms along the sequence or the features."""
    _b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("fnet", "filter", "long conv", "real", "shift", "hfft", "stft-like", "complex filter"),
    )
    own.filter, own.lin = m.weight(s // 2 + 1, d, scale=0.5), m.linear(d, d)
    own.imaginary = m.param(s // 2 + 1, d, scale=0.3)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        match how:
            case "fnet":
                return x + torch.fft.fft2(y).real / s
            case "filter":
                return x + torch.fft.irfft(torch.fft.rfft(y, dim=1) * own.filter(), n=s, dim=1)
            case "complex filter":
                by = torch.complex(own.filter(), own.imaginary)
                return x + torch.fft.irfft(
                    torch.fft.rfft(y, dim=1, norm="ortho") * by, n=s, dim=1, norm="ortho"
                )
            case "long conv":
                k = torch.fft.rfft(own.filter(), n=2 * s, dim=0)
                return x + torch.fft.irfft(torch.fft.rfft(y, n=2 * s, dim=1) * k, n=2 * s, dim=1)[:, :s]
            case "real":
                return x + torch.view_as_real(torch.fft.rfft(y)).square().sum(-1).mean(-1, keepdim=True)
            case "shift":
                return x + torch.fft.ifft(torch.fft.fftshift(torch.fft.fft(y, dim=1), dim=1), dim=1).real
            case "hfft":
                return x + torch.fft.fft(y, dim=-1).abs() / d
        return x + torch.fft.rfft(F.pad(y, (0, 0, 1, 0)), dim=1).angle().cos().mean(1, keepdim=True)

    return run


@torch_layer(1.5)
def complex_numbers(m: TorchMaker) -> TorchApply:
    """Rotations, a diagonal state-space model, products of complex numbers."""
    _b, s, d = m.shape
    own, how = m.own, m.choose("rotary", "polar", "ssm", "matmul", "abs")
    half = d // 2
    own.phase, own.log = m.vector(half), m.vector(half)
    own.lin = m.linear(d, 2 * half)
    own.w = nn.Parameter(torch.complex(m.normal(half, half), m.normal(half, half)) / half**0.5)
    own.out = m.linear(2 * half, d)
    if how != "matmul":
        del own.w

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        z = torch.view_as_complex(own.lin(x).unflatten(-1, (half, 2)).contiguous())
        if how == "matmul":
            z = z @ own.w
        elif how == "polar":
            z = z * torch.polar(own.log().exp(), own.phase())
        elif how == "abs":
            return x + own.out(torch.cat([z.abs(), z.angle().cos()], -1))
        elif how == "ssm":
            decay = torch.exp(-own.log().exp() + 1j * own.phase())
            at, h = [], torch.zeros_like(z[:, 0])
            for t in range(s):
                h = h * decay + z[:, t]
                at.append(h)
            z = torch.stack(at, 1)
        else:
            turn = torch.outer(torch.arange(s, dtype=x.dtype), own.phase())
            z = z * torch.polar(torch.ones_like(turn), turn)
        return x + own.out(torch.view_as_real(z).flatten(-2))

    return run


@torch_layer(1.5)
def mixed_types(m: TorchMaker) -> TorchApply:
    """A part in a narrower type, integers from floats, a cast by autocast."""
    _b, _s, d = m.shape
    own, how = m.own, m.choose("float", "bfloat16", "autocast", "integers", "norm", "booleans", "half loss")
    own.lin = m.linear(d, d)
    m.epsilon = {
        "float": 2.0**-23,
        "norm": 2.0**-23,
        "bfloat16": 2.0**-8,
        "autocast": 2.0**-8,
        "half loss": 2.0**-8,
    }.get(how, m.epsilon)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        match how:
            case "float":
                return x + y.float().tanh().double()
            case "bfloat16":
                return x + y.to(torch.bfloat16).to(x.dtype)
            case "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    z = F.linear(y.float(), torch.eye(d))
                return x + z.to(x.dtype)
            case "integers":
                step = (y.detach() * 4).round().to(torch.int32)
                return x + y * (step % 3).to(x.dtype) + (step // 2).clamp(-1, 1)
            case "norm":
                return x + F.layer_norm(y.float(), (d,)).to(x)
            case "booleans":
                return x + y * ((y > 0) & (x > 0)).any(-1, keepdim=True) + (y > 1).sum(-1, keepdim=True)
        env.terms.append(y.to(torch.bfloat16).square().mean().double())
        return x + y

    return run


@torch_layer(2)
def views(m: TorchMaker) -> TorchApply:
    """Reshapes and their inverses; some merge the batch with another dim."""
    _b, s, d = m.shape
    own = m.own
    how = m.choose(
        "merged", "heads", "windows", "unfold", "roll", "permute", "as time", "split", "unbind", "tokens"
    )
    own.lin, own.time = m.linear(d, d), m.linear(s, s)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        b = len(x)
        match how:
            case "merged":
                return x + own.lin(x.view(b * s, d)).view(b, s, d)
            case "heads":
                h = x.view(b, s, 2, d // 2).transpose(1, 2).reshape(b * 2, s, d // 2) if d % 2 == 0 else x
                y = h.softmax(1)
                return x + own.lin(
                    y.view(b, -1, s, x.numel() // b // s // (len(h) // b)).transpose(1, 2).reshape(b, s, d)
                )
            case "windows":
                k = 2 if s % 2 == 0 else 1
                y = x.roll(1, 1).view(b, s // k, k, d).reshape(-1, k, d)
                y = (y @ y.mT).softmax(-1) @ y
                return x + own.lin(y).view(b, s, d).roll(-1, 1)
            case "unfold":
                y = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)
                return x + own.lin(y.mean(-1))
            case "roll":
                return x + own.lin(torch.cat([x[:, 1:], x[:, :1]], 1)) + x.roll((1, 2), (1, 2))
            case "permute":
                return x + own.lin(x.permute(2, 0, 1).contiguous().permute(1, 2, 0))
            case "as time":
                return x + own.time(x.transpose(1, 2).reshape(b * d, s)).view(b, d, s).transpose(1, 2)
            case "split":
                first, rest = x.tensor_split((1,), dim=1)
                return torch.cat([own.lin(first), rest + first], dim=1)
            case "unbind":
                return torch.stack(
                    [own.lin(t) if i % 2 else t.sin() for i, t in enumerate(x.unbind(1))], dim=1
                )
        y = own.lin(torch.cat([x.mean(1, keepdim=True).expand(-1, 2, -1), x], 1))
        return y[:, 2:] + y[:, :1]

    return run


@torch_layer(whole=True)
def across_the_batch(m: TorchMaker) -> TorchApply:
    """Ops that mix examples: mixup, comparison, normalization, halving, merging with another dim."""
    b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("mixup", "softmax", "halves", "whiten", "roll", "flip", "attention", "pairs", "sort"),
    )
    own.lin = m.linear(d, d)
    order = m.input("order", torch.tensor(m.values.permutation(b)))

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        b = len(x)
        match how:
            case "mixup":
                return 0.7 * x + 0.3 * y[env.batch[order]]
            case "softmax":
                return x + y.softmax(0)
            case "halves":
                a, c = y.chunk(2)
                return x + torch.cat([c, a * c])
            case "whiten":
                return (y - y.mean(0)) / (y.std(0, unbiased=False) + 0.1)
            case "roll":
                return x + y.roll(1, 0)
            case "flip":
                return x + y.flip(0)
            case "attention":
                z = y.reshape(b * s, d)
                return x + ((z @ z.T / d).softmax(-1) @ z).view_as(x)
            case "pairs":
                z = y.view(b // 2, 2, s, d)
                return x + (z.flip(1) * z.mean(1, keepdim=True)).view_as(x)
        return x + y.sort(0).values

    return run


@torch_layer()
def linear_algebra(m: TorchMaker) -> TorchApply:
    """Linear algebra of each example."""
    _b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("solve", "svdvals", "cholesky", "det", "cdist", "eigh", "matrix_exp", "cross", "norms"),
    )
    own.lin = m.linear(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x).tanh()
        gram = y @ y.mT + 2 * torch.eye(s, dtype=x.dtype)
        match how:
            case "solve":
                return x + torch.linalg.solve(gram, y)
            case "svdvals":
                return x + torch.linalg.svdvals(gram).unsqueeze(-1)
            case "cholesky":
                return x + torch.linalg.cholesky(gram) @ y
            case "det":
                return x + torch.logdet(gram)[:, None, None] * 0.1
            case "cdist":
                return x + torch.cdist(y, y + 1).softmax(-1) @ y
            case "eigh":
                return x + torch.linalg.eigvalsh(gram).unsqueeze(-1).log()
            case "matrix_exp":
                return x + torch.linalg.matrix_exp(gram / s / 4) @ y
            case "cross":
                return x + torch.linalg.cross(y[..., :3], x[..., :3]).mean(-1, keepdim=True)
        return x + torch.linalg.matrix_norm(y)[:, None, None] + torch.linalg.norm(y, dim=-1, keepdim=True)

    return run
