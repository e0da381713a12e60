"""Losses of many kinds of x [batch, sequence, width], in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.composer.torch_maker import TOKENS, TorchApply, TorchEnv, TorchMaker, torch_loss


@torch_loss(2)
def mean_square(m: TorchMaker) -> TorchApply:
    """The mean square, written in three ways."""
    target, how = m.input("target", m.normal(*m.shape)), m.choose("mse", "written", "module")

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = env.batch[target]
        return ((x - y) ** 2).mean() if how == "written" else F.mse_loss(x, y)

    return run


@torch_loss()
def robust(m: TorchMaker) -> TorchApply:
    """A loss of an error: smooth L1, Huber, absolute, log-cosh; summed or weighted."""
    target = m.input("target", m.normal(*m.shape))
    how = m.choose("smooth", "huber", "l1", "logcosh", "sum", "weights", "none", "rows")
    weights = m.input("weights", m.normal(m.shape[0], m.shape[1]).abs()) if how == "weights" else ""

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y = env.batch[target]
        match how:
            case "smooth":
                return F.smooth_l1_loss(x, y, beta=0.5)
            case "huber":
                return F.huber_loss(x, y, delta=0.7)
            case "l1":
                return F.l1_loss(x, y)
            case "logcosh":
                return torch.log(torch.cosh(x - y)).mean()
            case "sum":
                return F.mse_loss(x, y, reduction="sum") / 100
            case "weights":
                return (F.mse_loss(x, y, reduction="none").mean(-1) * env.batch[weights]).mean()
            case "none":
                return F.smooth_l1_loss(x, y, reduction="none").sum((1, 2)).mean() / 8
        return (x - y).norm(dim=-1).mean()

    return run


@torch_loss(4)
def cross_entropy(m: TorchMaker) -> TorchApply:
    """Cross entropy of labels: smoothed, weighted, some ignored; the head may be the embedding."""
    b, s, d = m.shape
    own = m.own
    how = m.choose(
        "flat", "dim 1", "smooth", "weights", "ignore", "sum", "nll", "gather", "soft", "z", "none", "focal"
    )
    if m.chance(0.4):
        own.table = m.common("embedding", TOKENS, d, scale=0.7)
        head = lambda own, x: F.linear(x, own.table)  # noqa: E731
    else:
        own.head = m.linear(d, TOKENS)
        head = lambda own, x: own.head(x)  # noqa: E731
    right = m.integers(TOKENS, b, s)
    if how == "ignore":
        right[:, 0] = -100
        right[0] = -100
    labels = m.input("labels", right)
    own.register_buffer("weight", m.normal(TOKENS).abs() + 0.1)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        z, y = head(own, x), env.batch[labels]
        match how:
            case "dim 1":
                return F.cross_entropy(z.transpose(1, 2), y)
            case "smooth":
                return F.cross_entropy(z.view(-1, TOKENS), y.view(-1), label_smoothing=0.1)
            case "weights":
                return F.cross_entropy(z.view(-1, TOKENS), y.view(-1), weight=own.weight)
            case "sum":
                return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / 50
            case "nll":
                return F.nll_loss(F.log_softmax(z, -1).mT, y)
            case "gather":
                return -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()
            case "soft":
                return F.cross_entropy(z.mT, F.one_hot(y, TOKENS).to(z.dtype).mT * 0.9 + 0.1 / TOKENS)
            case "z":
                return F.cross_entropy(z.mT, y) + 1e-2 * z.logsumexp(-1).square().mean()
            case "none":
                return F.cross_entropy(z.mT, y, reduction="none").mean(1).mean()
            case "focal":
                each = F.cross_entropy(z.mT, y, reduction="none")
                return ((1 - torch.exp(-each)) ** 2 * each).mean()
        return F.cross_entropy(z.view(-1, TOKENS), y.view(-1))

    return run


@torch_loss(1.5)
def binary(m: TorchMaker) -> TorchApply:
    """Losses of binary labels."""
    b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("logits", "pos_weight", "weight", "plain", "soft margin", "hinge", "dice", "multilabel"),
    )
    own.head = m.linear(d, 3)
    on = (m.normal(b, s, 3) > 0).double()
    target = m.input("target", on)
    own.register_buffer("weight", m.normal(3).abs() + 0.1)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        z, y = own.head(x), env.batch[target]
        match how:
            case "pos_weight":
                return F.binary_cross_entropy_with_logits(z, y, pos_weight=own.weight)
            case "weight":
                return F.binary_cross_entropy_with_logits(z, y, weight=own.weight)
            case "plain":
                return F.binary_cross_entropy(z.sigmoid(), y)
            case "soft margin":
                return F.soft_margin_loss(z, 2 * y - 1)
            case "hinge":
                return F.hinge_embedding_loss(z, 2 * y - 1)
            case "dice":
                p = z.sigmoid()
                return (1 - (2 * (p * y).sum((1, 2)) + 1) / (p.sum((1, 2)) + y.sum((1, 2)) + 1)).mean()
            case "multilabel":
                return F.multilabel_soft_margin_loss(z.flatten(0, 1), y.flatten(0, 1))
        return F.binary_cross_entropy_with_logits(z, y)

    return run


@torch_loss(1.5)
def divergence(m: TorchMaker) -> TorchApply:
    """A divergence between distributions: a teacher's without a gradient, given ones, or Gaussians."""
    b, s, d = m.shape
    own, how = m.own, m.choose("kl", "log", "sum", "written", "gaussian", "poisson", "vae", "entropy")
    own.student, own.teacher = m.linear(d, TOKENS), m.linear(d, TOKENS)
    own.teacher.requires_grad_(not m.chance(0.5))
    target = m.input("target", m.normal(b, s, TOKENS))

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        mine = own.student(x).log_softmax(-1)
        with torch.no_grad():
            aim = (own.teacher(x) / 0.5).softmax(-1)
        y = env.batch[target]
        match how:
            case "kl":
                return F.kl_div(mine.flatten(0, 1), aim.flatten(0, 1), reduction="batchmean")
            case "log":
                return F.kl_div(mine, y.log_softmax(-1), log_target=True, reduction="mean")
            case "sum":
                return F.kl_div(mine, y.softmax(-1), reduction="sum") / 50
            case "gaussian":
                spread = own.teacher(x).exp() + 0.1
                return 0.5 * (spread.log() + (own.student(x) - y) ** 2 / spread).mean()
            case "poisson":
                return F.poisson_nll_loss(own.student(x), y.square())
            case "vae":
                mean, log = own.student(x), own.teacher(x) * 0.3
                return -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(-1).mean() + F.mse_loss(mean, y)
            case "entropy":
                return torch.special.entr(mine.exp()).sum(-1).mean() + (mine * aim).mean()
        return (aim * (aim.log() - mine)).sum(-1).mean()

    return run


@torch_loss(1.5)
def embeddings(m: TorchMaker) -> TorchApply:
    """Losses between vectors of the same example."""
    b, _s, d = m.shape
    own = m.own
    how = m.choose(
        "cosine", "similarity", "triplet", "ranking", "margin", "distance", "triplet distance", "multi"
    )
    own.lin = m.linear(d, d)
    other = m.input("other", m.normal(b, d))
    sign = m.input("sign", m.normal(b).sign())
    label = m.input("label", m.integers(d, b))

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        a, c, y = own.lin(x).mean(1), env.batch[other], env.batch[sign]
        match how:
            case "cosine":
                return F.cosine_embedding_loss(a, c, y, margin=0.1)
            case "similarity":
                return 1 - F.cosine_similarity(a, c, dim=-1).mean()
            case "triplet":
                return F.triplet_margin_loss(a, c, x[:, 0], margin=2.0)
            case "triplet distance":
                return F.triplet_margin_with_distance_loss(a, c, x[:, 0])
            case "ranking":
                return F.margin_ranking_loss(a[:, 0], c[:, 0], y, margin=0.5)
            case "margin":
                return F.multi_margin_loss(a, env.batch[label])
            case "distance":
                return F.pairwise_distance(a, c).mean()
        return F.multi_margin_loss(a, env.batch[label], p=2, margin=0.5)

    return run


@torch_loss(1.5, whole=True)
def contrastive(m: TorchMaker) -> TorchApply:
    """All pairs of examples: InfoNCE, CLIP's, SigLIP's, decorrelation; with a learned temperature."""
    b, _s, d = m.shape
    own, how = (
        m.own,
        m.choose("softmax", "clip", "sigmoid", "barlow", "vicreg", "ntxent", "cdist", "supervised"),
    )
    own.a, own.b, own.scale = m.linear(d, d), m.linear(d, d, False), m.param(scale=0.3)
    label = m.input("label", m.integers(3, b))

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        u, v = own.a(x).mean(1), own.b(x[:, 0])
        n, at = len(x), torch.arange(len(x))
        if how == "barlow":
            u, v = ((t - t.mean(0)) / (t.std(0) + 0.1) for t in (u, v))
            c = u.T @ v / n
            return (c.diagonal() - 1).pow(2).sum() + 0.1 * (c - torch.diag(c.diagonal())).pow(2).sum()
        if how == "vicreg":
            std, cov = torch.sqrt(u.var(0) + 1e-2), torch.cov(u.T)
            return F.relu(1 - std).mean() + F.mse_loss(u, v) + (cov - cov.diag().diag()).square().sum() / d
        if how == "cdist":
            return torch.cdist(u, v).softmax(-1).diagonal().mean()
        u, v = F.normalize(u, dim=-1), F.normalize(v, dim=-1)
        if how == "ntxent":
            z = torch.cat([u, v])
            pairs = (z @ z.T * own.scale.exp()).fill_diagonal_(float("-inf"))
            return F.cross_entropy(pairs, torch.cat([at + n, at]))
        pairs = u @ v.T * own.scale.exp()
        if how == "clip":
            return (F.cross_entropy(pairs, at) + F.cross_entropy(pairs.T, at)) / 2
        if how == "sigmoid":
            return -F.logsigmoid(pairs * (2 * torch.eye(n, dtype=pairs.dtype) - 1)).mean()
        if how == "supervised":
            same = (env.batch[label][:, None] == env.batch[label]).to(pairs.dtype)
            return -((pairs.log_softmax(-1) * same).sum(-1) / same.sum(-1)).mean()
        return F.cross_entropy(pairs, at)

    return run


@torch_loss(1.5)
def bootstrapped(m: TorchMaker) -> TorchApply:
    """Losses against values without a gradient: pseudo labels, TD targets, BYOL's and PPO's. They are computed before
    or after the values with a gradient."""
    b, s, d = m.shape
    own, how = (
        m.own,
        m.choose("pseudo", "td", "byol", "ppo", "after", "dino", "inference", "hard", "advantage"),
    )
    own.net = nn.Sequential(m.linear(d, d), nn.ReLU(), m.linear(d, 6))
    own.predict = m.linear(6, 6)
    reward = m.input("reward", m.normal(b, s))
    action = m.input("action", m.integers(6, b, s))
    old = m.input("old", m.normal(b, s, scale=0.3) - 1.5)

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        r, a = env.batch[reward], env.batch[action].unsqueeze(-1)
        if how in ("after", "advantage"):
            y = own.net(x)
            with torch.no_grad():
                t = own.net(x.flip(1)).softmax(-1)
            if how == "advantage":
                value = y[..., 0]
                gain = (r - value).detach()
                return (
                    -(own.predict(y).log_softmax(-1).gather(-1, a).squeeze(-1) * gain).mean()
                    + (r - value).square().mean()
                )
            return -(t * own.predict(y).log_softmax(-1)).sum(-1).mean()
        if how == "inference":
            with torch.inference_mode():
                t = own.net(x).softmax(-1)
            return -(t.clone() * own.net(x).log_softmax(-1)).sum(-1).mean()
        with torch.no_grad():
            t = own.net(x)
        y = own.net(x)
        match how:
            case "td":
                aim = r + 0.9 * t.roll(-1, 1).max(-1).values
                return F.smooth_l1_loss(y.gather(-1, a).squeeze(-1), aim)
            case "byol":
                return 2 - 2 * (F.normalize(own.predict(y), dim=-1) * F.normalize(t, dim=-1)).sum(-1).mean()
            case "ppo":
                new = y.log_softmax(-1).gather(-1, a).squeeze(-1)
                ratio = (new - env.batch[old]).exp()
                return -torch.min(ratio * r, ratio.clamp(0.8, 1.2) * r).mean()
            case "dino":
                centre = t.mean((0, 1), keepdim=True)
                return -(((t - centre) / 0.5).softmax(-1) * own.predict(y).log_softmax(-1)).sum(-1).mean()
            case "hard":
                sure, label = t.softmax(-1).max(-1)
                each = F.cross_entropy(own.predict(y).mT, label, reduction="none")
                return (each * (sure > 0.25)).mean()
        return -((t / 0.7).softmax(-1) * own.predict(y).log_softmax(-1)).sum(-1).mean()

    return run


@torch_loss(whole=True)
def masked_tokens(m: TorchMaker) -> TorchApply:
    """The mean over the tokens that a mask of the batch selects."""
    b, s, d = m.shape
    own, how = m.own, m.choose("divide", "ignore", "nanmean", "top")
    own.head = m.linear(d, TOKENS)
    labels, weights = (
        m.input("labels", m.integers(TOKENS, b, s)),
        m.input("weights", (m.normal(b, s) > 0).double()),
    )

    def run(own: Any, x: Tensor, env: TorchEnv) -> Tensor:
        y, w = env.batch[labels], env.batch[weights]
        if how == "ignore":
            return F.cross_entropy(own.head(x).mT, y.masked_fill(w == 0, -100))
        each = F.cross_entropy(own.head(x).mT, y, reduction="none")
        if how == "top":
            return each.view(-1).topk(each.numel() // 2).values.mean()
        if how == "nanmean":
            return torch.where(w > 0, each, float("nan")).nanmean()
        return (each * w).sum() / w.sum().clamp(min=1)

    return run
