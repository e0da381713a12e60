"""Layers of products in PyTorch: perceptrons, gates, norms, attention, convolutions, recurrences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.composer.maker import divisors
from bench.composer.torch_maker import TorchApply, TorchEnv, TorchMaker, torch_layer


@torch_layer(2)
def mlp(m: TorchMaker) -> TorchApply:
    """Two linear layers around a nonlinearity."""
    d, own = m.shape[2], m.own
    own.up, own.down = m.linear(d, 2 * d, m.chance(0.7)), m.linear(2 * d, d)
    of, residual = (
        m.choose(F.relu, F.gelu, F.silu, torch.tanh, F.mish, lambda x: F.relu(x).square()),
        m.chance(0.7),
    )

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.down(of(own.up(x)))
        return x + y if residual else y

    return run


@torch_layer()
def sequential(m: TorchMaker) -> TorchApply:
    """nn.Sequential, with activations that have parameters, and parts that do nothing."""
    d, own = m.shape[2], m.own
    last = m.choose(nn.PReLU(d), nn.PReLU(), nn.Hardtanh(), nn.Softplus(), nn.Identity(), nn.Dropout(0.0))
    if isinstance(last, nn.PReLU) and last.num_parameters > 1:
        last = nn.PReLU()
    own.net = nn.Sequential(nn.LayerNorm(d), m.linear(d, d), nn.ELU(), nn.Sequential(m.linear(d, d), last))
    return lambda own, x, env: x + own.net(x)


@torch_layer(1.5)
def glu(m: TorchMaker) -> TorchApply:
    """A gated linear unit, in the forms that models use."""
    d, own = m.shape[2], m.own
    how = m.choose("swiglu", "geglu", "glu", "chunk", "bilinear")
    if how in ("glu", "chunk"):
        own.up = m.linear(d, 4 * d, False)
    else:
        own.up, own.gate = m.linear(d, 2 * d, False), m.linear(d, 2 * d, False)
    own.down = m.linear(2 * d, d, False)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "glu":
            return x + own.down(F.glu(own.up(x)))
        if how == "chunk":
            a, b = own.up(x).chunk(2, dim=-1)
            return x + own.down(F.silu(a) * b)
        of = {"swiglu": F.silu, "geglu": F.gelu, "bilinear": lambda t: t}[how]
        return x + own.down(of(own.gate(x)) * own.up(x))

    return run


@torch_layer(1.5)
def norm(m: TorchMaker) -> TorchApply:
    """A norm of each token, by PyTorch's modules or written out."""
    d, own = m.shape[2], m.own
    how = m.choose("layer", "rms", "written", "group", "plain", "both", "gemma", "instance")
    own.layer, own.rms, own.group = nn.LayerNorm(d), nn.RMSNorm(d, eps=1e-5), nn.GroupNorm(divisors(d)[0], d)
    own.gain, own.instance = m.vector(d, 1.0), nn.InstanceNorm1d(d, affine=m.chance(0.5))
    kept = {"group": ["group"], "instance": ["instance"], "layer": ["layer"], "rms": ["rms"]}
    for name in {"layer", "rms", "group", "instance"} - set(kept.get(how, ["layer"])):
        delattr(own, name)
    if how not in ("written", "gemma"):
        del own.gain

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "layer":
            return own.layer(x)
        if how == "rms":
            return own.rms(x)
        if how == "written":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * own.gain()
        if how == "gemma":
            y = x.float()
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * (1 + own.gain())
        if how == "group":
            return own.group(x.transpose(1, 2)).transpose(1, 2)
        if how == "instance":
            return own.instance(x.mT).mT
        if how == "plain":
            return F.layer_norm(x, x.shape[1:])
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return own.layer(x) + (x - mean) / (std + 0.1)

    if how == "gemma":
        m.epsilon = max(m.epsilon, 2.0**-23)
    return run


@torch_layer(1.5, whole=True)
def batch_norm(m: TorchMaker) -> TorchApply:
    """Batch norm in training, with running statistics; with one or two dims after the channels; in eval; or without
    statistics."""
    _b, s, d = m.shape
    own, how = m.own, m.choose("1d", "flat", "2d", "eval", "untracked", "cumulative")
    if how == "2d":
        own.norm = nn.BatchNorm2d(s)
    else:
        own.norm = nn.BatchNorm1d(
            d, track_running_stats=how != "untracked", momentum=None if how == "cumulative" else 0.1
        )
    own.lin = m.linear(d, d)
    if how == "eval":
        own.norm.eval()

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        if how == "2d":
            return x + own.norm(y.unsqueeze(-1)).squeeze(-1)
        if how == "flat":
            return x + own.norm(y.reshape(-1, d)).view_as(y)
        return x + own.norm(y.transpose(1, 2)).transpose(1, 2)

    return run


@torch_layer(2)
def attention(m: TorchMaker) -> TorchApply:
    """Attention, fused or written out; causal, masked, grouped-query, rotary, biased, or linear."""
    _b, s, d = m.shape
    h, own = divisors(d)[0], m.own
    how = m.choose(
        "sdpa", "causal", "mask", "written", "grouped", "rotary", "alibi", "linear", "sigmoid", "qk norm"
    )
    own.qkv, own.out = m.linear(d, 3 * d), m.linear(d, d)
    own.register_buffer("bias", m.normal(h, s, s))
    own.register_buffer("near", torch.ones(s, s, dtype=torch.bool).tril().triu(-2))
    angle = torch.outer(torch.arange(s, dtype=torch.float64), 10.0 ** -torch.arange(d // h // 2 or 1))
    own.register_buffer("cos", angle.cos(), persistent=False)
    own.register_buffer("sin", angle.sin(), persistent=False)

    def rotated(own: Any, x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * own.cos - b * own.sin, a * own.sin + b * own.cos], -1).flatten(-2)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, h, d // h).transpose(1, 2) for t in own.qkv(x).split(d, dim=-1))
        if how == "grouped":
            k, v = (t[:, :1].expand(-1, h, -1, -1) for t in (k, v))
        if how == "rotary" and d // h % 2 == 0:
            q, k = rotated(own, q), rotated(own, k)
        if how == "qk norm":
            q, k = F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1)
        if how in ("sdpa", "grouped", "rotary"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=how == "rotary")
        elif how == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        elif how == "mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=own.near)
        elif how == "alibi":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=own.bias)
        elif how == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            y = (q @ (k.mT @ v)) / (q @ k.sum(-2, keepdim=True).mT)
        else:
            scores = q @ k.mT / math.sqrt(d // h)
            scores = scores.masked_fill(~own.near, float("-inf"))
            y = (scores.sigmoid() if how == "sigmoid" else scores.softmax(-1)) @ v
        return x + own.out(y.transpose(1, 2).reshape(b, s, d))

    return run


@torch_layer(1.5)
def multihead_attention(m: TorchMaker) -> TorchApply:
    """nn.MultiheadAttention."""
    b, s, d = m.shape
    how, own = m.choose("self", "weights", "causal", "padding", "cross", "sequence first", "bias_k"), m.own
    own.attn = nn.MultiheadAttention(
        d, divisors(d)[0], batch_first=how != "sequence first", add_bias_kv=how == "bias_k"
    )
    own.register_buffer("mask", torch.ones(s, s, dtype=torch.bool).triu(1))
    own.memory = m.param(3, d)
    pad = torch.zeros(b, s, dtype=torch.bool)
    pad[::2, -1] = True
    padding = m.input("padding", pad) if how == "padding" else ""

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "weights":
            y, share = own.attn(x, x, x)
            return x + y * (1 + share.amax(-1, keepdim=True))
        if how == "causal":
            return x + own.attn(x, x, x, attn_mask=own.mask, need_weights=False, is_causal=True)[0]
        if how == "padding":
            return x + own.attn(x, x, x, key_padding_mask=env.batch[padding], need_weights=False)[0]
        if how == "cross":
            memory = own.memory.expand(len(x), -1, -1)
            return x + own.attn(x, memory, memory, need_weights=False)[0]
        if how == "sequence first":
            y = x.transpose(0, 1)
            return x + own.attn(y, y, y, need_weights=False)[0].transpose(0, 1)
        return x + own.attn(x, x, x, need_weights=False)[0]

    return run


@torch_layer()
def transformer_layer(m: TorchMaker) -> TorchApply:
    """nn.TransformerEncoderLayer or a decoder's, without dropout."""
    _b, s, d = m.shape
    own, decodes, first = m.own, m.chance(0.3), m.chance(0.5)
    of = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
    own.layer = of(
        d,
        divisors(d)[0],
        2 * d,
        dropout=0.0,
        batch_first=True,
        norm_first=first,
        activation=m.choose("relu", "gelu"),
    )
    own.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(s).double())

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if decodes:
            return own.layer(x, x.flip(1), tgt_mask=own.mask)
        return own.layer(x, src_mask=own.mask)

    return run


@torch_layer(1.5)
def convolution(m: TorchMaker) -> TorchApply:
    """A convolution along the sequence, or over sequence and width as an image."""
    _b, s, d = m.shape
    how, own = (
        m.choose("1d", "depthwise", "dilated", "causal", "2d", "image", "circular", "separable", "up"),
        m.own,
    )
    if how == "1d":
        own.conv = nn.Conv1d(d, d, 3, padding=1)
    elif how == "depthwise":
        own.conv = nn.Conv1d(d, d, 3, padding="same", groups=d)
    elif how == "dilated":
        own.conv = nn.Conv1d(d, d, 3, padding=2, dilation=2, groups=2)
    elif how == "causal":
        own.conv = nn.Conv1d(d, d, 3)
    elif how == "2d":
        own.conv = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, (3, 1), padding=(1, 0))
        )
    elif how == "image":
        own.conv = nn.Conv2d(s, s, (1, 3), padding=(0, 1), padding_mode="reflect")
    elif how == "circular":
        own.conv = nn.Conv1d(d, d, 3, padding=1, padding_mode="circular")
    elif how == "separable":
        own.conv = nn.Sequential(nn.Conv1d(d, 2 * d, 3, padding=1, groups=d), nn.Conv1d(2 * d, d, 1))
    else:
        own.conv = nn.Sequential(
            nn.Conv1d(d, d, 2, stride=2), nn.GELU(), nn.ConvTranspose1d(d, d, 2, stride=2)
        )
    if isinstance(own.conv, nn.Conv1d) and not m.part.plain and m.transforms.random() < 0.5:
        own.conv = m.parametrized(own.conv)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "2d":
            return x + own.conv(x.unsqueeze(1)).squeeze(1)
        if how == "image":
            return x + own.conv(x.unsqueeze(2)).squeeze(2)
        y = x.transpose(1, 2)
        if how == "causal":
            y = F.pad(y, (2, 0))
        z = own.conv(y)
        if how == "up":
            z = F.pad(z, (0, y.shape[-1] - z.shape[-1]))
        return x + z.transpose(1, 2)

    return run


@torch_layer()
def pooling(m: TorchMaker) -> TorchApply:
    """Pooling along the sequence, and its inverse."""
    _b, s, d = m.shape
    how, own = m.choose("avg", "max", "adaptive", "squeeze", "interpolate", "lp", "shuffle"), m.own
    own.lin = m.linear(d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = own.lin(x)
        if how == "avg":
            return x + F.avg_pool1d(y.mT, 3, 1, 1).mT
        if how == "max":
            return x + F.max_pool1d(y.mT, 3, stride=1, padding=1).mT
        if how == "adaptive":
            return x + F.adaptive_avg_pool1d(y.mT, 1).mT
        if how == "squeeze":
            return x * torch.sigmoid(own.lin(x.mean(1, keepdim=True)))
        if how == "interpolate":
            return x + F.interpolate(y.mT, scale_factor=2.0, mode="nearest")[..., ::2].mT
        if how == "lp":
            return x + F.lp_pool1d(y.mT.square() + 0.1, 2.0, 1).mT
        return (
            x + F.pixel_unshuffle(F.pixel_shuffle(y.view(len(y), -1, 2, d // 2 // 2 * 2)[:, :4], 2), 2).mean()
        )

    if how == "shuffle" and (s * d) % 16:
        how = "avg"
    return run


@torch_layer(1.5)
def recurrence(m: TorchMaker) -> TorchApply:
    """nn.LSTM, nn.GRU, nn.RNN."""
    _b, _s, d = m.shape
    own, both, of = m.own, m.chance(0.3) and d % 2 == 0, m.choose(nn.LSTM, nn.GRU, nn.RNN)
    first = m.chance(0.7)
    own.rnn = of(d, d // 2 if both else d, m.choose(1, 1, 2), batch_first=first, bidirectional=both)
    last = m.chance(0.3)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y, state = own.rnn(x if first else x.transpose(0, 1))
        y = y if first else y.transpose(0, 1)
        if last:
            h = state[0] if isinstance(state, tuple) else state
            return x + y * torch.sigmoid(h[-1].mean(-1))[:, None, None]
        return x + y

    return run


@torch_layer(1.5)
def cells(m: TorchMaker) -> TorchApply:
    """A Python loop over a cell, or over the steps of a state-space model."""
    _b, _s, d = m.shape
    own, how = m.own, m.choose("gru", "lstm", "rnn", "ssm", "leaky", "attention")
    own.cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}.get(how, nn.Linear)(d, d)
    own.a_log, own.start, own.out = m.vector(d), m.param(d, scale=0.3), m.linear(d, d)
    if how in ("gru", "lstm", "rnn"):
        del own.a_log

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        h = own.start.expand(len(x), d)
        state, out = (h, torch.zeros_like(h)), []
        for t in range(x.shape[1]):
            if how == "lstm":
                state = own.cell(x[:, t], state)
                h = state[0]
            elif how == "ssm":
                h = h * torch.exp(-own.a_log().exp()) + own.cell(x[:, t])
            elif how == "leaky":
                h = torch.lerp(h, torch.tanh(own.cell(x[:, t])), torch.sigmoid(own.a_log()))
            elif how == "attention":
                seen = x[:, : t + 1]
                share = torch.einsum("bd,bsd->bs", own.cell(h) * own.a_log(), seen).softmax(-1)
                h = (share.unsqueeze(-1) * seen).sum(1)
            else:
                h = own.cell(x[:, t], h)
            out.append(own.out(h))
        return x + torch.stack(out, dim=1)

    return run


@torch_layer(2, loops=True)
def repeated(m: TorchMaker) -> TorchApply:
    """Four or five equal layers in a ModuleList, plain or under torch.utils.checkpoint."""
    d, own = m.shape[2], m.own
    kind, how = m.choose("mlp", "block", "gated", "moe"), m.choose("plain", "plain", "checkpoint", "list")
    h = divisors(d)[0]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
            if kind == "block":
                self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
            if kind == "gated":
                self.a_log, self.gate = nn.Parameter(torch.randn(d) / 3), nn.Linear(d, 2 * d, bias=False)
            if kind == "moe":
                self.router = nn.Linear(d, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            if kind == "block":
                q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
                z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + self.out(z.transpose(1, 2).flatten(-2))
            if kind == "gated":
                x = x * torch.exp(-self.a_log.exp())
                return x + self.down(F.silu(self.gate(y)) * self.up(y))
            if kind == "moe":
                share = self.router(y).softmax(-1)
                return x + sum(
                    share[..., i : i + 1] * self.down(self.up(y).roll(i, -1).relu()) for i in range(3)
                )
            return x + self.down(F.gelu(self.up(y)))

    own.layers = nn.ModuleList(Layer() for _ in range(m.choose(4, 4, 5)))

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        every = []
        for layer in own.layers:
            x = checkpoint(layer, x, use_reentrant=False) if how == "checkpoint" else layer(x)
            every.append(x)
        return sum(every) / len(every) if how == "list" else x  # type: ignore[return-value]

    return run


@torch_layer()
def experts(m: TorchMaker) -> TorchApply:
    """A mixture of all experts or of the top ones, in a ModuleList or as one stacked parameter."""
    d, own, n = m.shape[2], m.own, 4
    how, k = m.choose("list", "bmm", "top", "one_hot"), m.choose(1, 2)
    own.router = m.linear(d, n, False)
    own.list = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
    own.stacked = m.weight(n, d, d, scale=d**-0.5)
    if how in ("list", "one_hot"):
        del own.stacked
    else:
        del own.list

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        share = own.router(x).softmax(-1)
        if how != "list":
            top, at = share.topk(k, dim=-1)
            picked = (
                F.one_hot(at, n).to(x.dtype)
                if how == "one_hot"
                else torch.zeros_like(share).scatter(-1, at, top)
            )
            share = (
                (picked * top.unsqueeze(-1)).sum(-2)
                if how == "one_hot"
                else picked / picked.sum(-1, keepdim=True)
            )
            env.terms.append(0.01 * (share.mean((0, 1)) ** 2).sum())
        if how in ("list", "one_hot"):
            return x + sum(share[..., i, None] * F.relu(e(x)) for i, e in enumerate(own.list))  # type: ignore[return-value]
        each = torch.einsum("bsd,ndk->bsnk", x, own.stacked())
        return x + torch.einsum("bsn,bsnk->bsk", share, each.relu())

    return run


@torch_layer()
def mixer(m: TorchMaker) -> TorchApply:
    """Products along the sequence: a transposed linear layer, an einsum, a bilinear form."""
    _b, s, d = m.shape
    own, how = m.own, m.choose("transposed", "einsum", "outer", "bilinear", "tensordot")
    own.a, own.b = m.weight(s, s), m.weight(d, d)
    own.lin, own.bilinear = m.linear(s, s), nn.Bilinear(d, d, d)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        if how == "transposed":
            return x + own.lin(x.mT).mT
        if how == "einsum":
            return x + torch.einsum("bsd,st,de->bte", x, own.a(), own.b()).tanh()
        if how == "outer":
            pairs = torch.einsum("bsd,btd->bst", x, x) / d
            return x + pairs.softmax(-1) @ x @ own.b()
        if how == "bilinear":
            return x + own.bilinear(x, x.flip(1))
        return x + torch.tensordot(x, own.b(), dims=([2], [0])) * own.a().mean()

    return run
