"""Formulas with ops that PyTorch decomposes, that pase writes in other ops, or that only their batch splits."""

from __future__ import annotations

from typing import Any

from tests.backends.torch.trained import agrees


def _mixture(m: Any, x: Any) -> Any:
    """The scale is a number, which is broadcast to locations that depend on data."""
    import torch

    D = torch.distributions
    parts = D.Independent(D.Normal(m.w.view(16, 4, 4), 1.5), 1)
    return -D.MixtureSameFamily(D.Categorical(logits=x[:, :4]), parts).log_prob(x[:, 4:8]).mean()


def _positive(m: Any) -> Any:
    import torch

    return m.w @ m.w.T + 16 * torch.eye(16, dtype=m.w.dtype)


def _edges(m: Any, x: Any) -> Any:
    """Rows of zeros: the derivatives of roots and logarithms are infinite there, those of PyTorch's ops are not."""
    import torch
    from torch.nn import functional as F

    z = (m.w + x) * (x[:, :1] > 0)
    norms = sum(z.norm(p, dim=-1).mean() for p in (0.5, 1.5, 2, 3, -1)) + z[0].norm() + z.new_zeros(()).norm()
    distances = (
        torch.cdist(z, z).mean() + torch.cdist(z, z, 3.0).mean() + F.pdist(z).mean() + torch.dist(z, z)
    )
    whole = torch.linalg.matrix_norm(z - z) + F.normalize(z, dim=-1).square().mean() + torch.sinc(z).mean()
    entropy = F.binary_cross_entropy(z.clamp(0, 1), (x > 0).to(z.dtype)) * 1e-12
    return norms + distances + whole + entropy + F.cosine_similarity(z, x).mean()


def _sorted_places(m: Any, x: Any) -> Any:
    """In rows of their own, in one row for all, and in a row in whose order another tensor is."""
    import torch

    rows, order = x.sort(-1)
    own = torch.searchsorted(rows, m.w.detach(), right=True)
    one = torch.searchsorted(rows[0], x) + torch.searchsorted(x, m.w.detach(), sorter=order)
    grid = torch.bucketize(m.w, torch.linspace(-1, 1, 5, dtype=x.dtype))
    return (m.w.gather(1, own.clamp(max=15)) + m.w[0][one % 16] + grid * m.w).square().mean()


def _grids(m: Any, x: Any) -> Any:
    """Rounded to one grid for all elements, to one that depends on the data, and to one for each row or column."""
    import torch

    y, scales, zeros = (
        (m.w * x).float(),
        torch.linspace(0.05, 0.2, 16),
        torch.zeros(16, dtype=torch.int32),
    )
    one = torch.fake_quantize_per_tensor_affine(y, 0.1, 3, -8, 7)
    widest = torch.fake_quantize_per_tensor_affine(y, x.abs().max().float() / 8, zeros[0], -8, 7)
    rows, columns = (torch.fake_quantize_per_channel_affine(y, scales, zeros, i, -8, 7) for i in range(2))
    return (one.double() @ widest.double() + rows.double() @ columns.double()).square().mean()


def _like_another(m: Any, x: Any) -> Any:
    """Constants that take the shape or the dtype of data."""
    import torch

    y, n = m.w * x, torch.arange(256)
    y = y + n[:16].type_as(x) * n.view_as(x) + n.reshape_as(m.w)
    rows = (n[:16] % 4)[:, None].expand_as(x)
    return y.scatter_add(0, rows, y).gather(1, rows).square().mean() / 1e9


def _chosen(m: Any, x: Any) -> Any:
    """One element of each row, or column, by its order."""
    of_rows = (m.w * x).kthvalue(3, 1)[0] + (m.w - x).nanmedian(1)[0] + (m.w * x).mode(1)[0]
    return (of_rows + (m.w + x).median(0)[0] * (m.w + x).kthvalue(2, 0, keepdim=True)[0]).square().mean()


def _frames(m: Any, x: Any) -> Any:
    """Windows that overlap and windows that do not, along either dim, and strides into each row."""
    import torch

    y = (m.w * x).contiguous()
    windows = y.unfold(1, 6, 3).square().mean() + (y.unfold(0, 4, 4) * torch.arange(4)).square().mean()
    strided = y.as_strided((16, 3, 4), (16, 4, 2), 1) * torch.arange(4)
    waves = torch.stft(y, 8, 3, window=x[0, :8].abs(), return_complex=True).abs()
    return windows + strided.square().mean() + waves.mean()


def _diagonals(m: Any, x: Any) -> Any:
    import torch

    y = m.w * x
    y.diagonal(2).add_(x[0, :14])
    y.fill_diagonal_(3.0)
    tall = torch.diagonal_scatter(m.w[:, :12] + x[:, :12], x[1, :12], -4)
    return y.square().mean() + tall.square().mean()


def _reduced(m: Any, x: Any) -> Any:
    import torch

    y, rows, to = m.w * x, torch.arange(16) % 4, torch.ones(5, 16, dtype=x.dtype)
    every = [
        to.index_reduce(0, rows, y, how, include_self=own).square().mean()
        for how in ("amax", "mean", "prod")
        for own in (True, False)
    ]
    return sum(every) + to.T.index_reduce(1, rows, y, "amin").mean()


def _filled(m: Any, x: Any) -> Any:
    """Rows and columns that become a trained number, some of them named twice; elements that become others."""
    import torch

    columns, rows = torch.tensor([1, 1, 2]), torch.tensor(3)
    y = (m.w * x).index_fill(1, columns, m.w[0, 0]).index_fill(0, rows, m.w[1, 1])
    return y.square().mean() + x[0].masked_scatter(x > 0, m.w.flatten()).square().mean()


def _joined(m: Any, x: Any) -> Any:
    """Parts without elements, of data and of constants."""
    import torch

    y = m.w * x
    return torch.cat(
        [torch.zeros(16, 0, dtype=x.dtype), y[:, :0], y, torch.ones(16, 2, dtype=x.dtype)], 1
    ).var()


def _counts(m: Any, x: Any) -> Any:
    """How many examples choose each of as many classes as another tensor has."""
    import torch

    shares, many = (m.w * x).softmax(-1), torch.bincount(x.argmax(-1), minlength=16)
    return (shares.mean(0) * many / many.sum()).sum() + (shares * x).square().mean()


def _extremes(m: Any, x: Any) -> Any:
    """Extremes and products over all elements, which several readers or the loss itself combine."""
    y = m.w * x
    scaled = (y / y.abs().max()).square().mean() + (y / (y.aminmax()[1] - y.aminmax()[0])).square().mean()
    products = (y + 1).prod(1).mean() / 1e9 + (0.1 * y + 1).prod(0).mean() + (0.1 * m.w + 1).prod()
    return scaled + products + y.amax() + (m.w + x).min()


def _windows(m: Any, x: Any) -> Any:
    """Convolutions whose padding is named, with equal and with different ends, and pools to a given size."""
    from torch.nn import functional as F

    y = (m.w * x).view(4, 4, 16)
    even, odd = m.w[:8].reshape(8, 4, 4), m.w[8:, :12].reshape(8, 4, 3)
    made = F.conv1d(y, even, padding="same") * F.conv1d(y, odd, padding="same", dilation=2)
    image = F.conv2d(y[:, None], m.w[:2, :6].view(2, 1, 2, 3), padding="same")
    pooled = F.adaptive_max_pool2d(image, (2, 8)).mean() + F.adaptive_max_pool1d(y, 4).mean()
    return made.square().mean() + F.conv1d(y, odd, padding="valid").mean() + pooled


def _filters(m: Any, x: Any) -> Any:
    """Filters of four elements, which may be split themselves."""
    from torch.nn import functional as F

    y = (m.w * x).view(4, 4, 16)
    wide, deep = m.w[:8].reshape(8, 4, 4), m.w[:1].reshape(4, 1, 4)
    made = F.conv1d(y, wide, m.w[0, :8], padding=3, dilation=2).square().mean()
    made = made + F.conv1d(y, deep, padding=3, groups=4).square().mean()
    image = F.conv2d(y.reshape(4, 4, 4, 4), m.w.view(4, 4, 4, 4), stride=2, padding=1)
    back = F.conv_transpose1d(y, wide.reshape(4, 8, 4), stride=2, padding=1)
    return made + image.square().mean() + back.square().mean()


def formulas() -> dict[str, Any]:
    """Name -> f(the module, x [16, 16]) -> its loss."""
    import torch
    from torch.nn import functional as F

    linalg = torch.linalg

    return {
        "extremes": _extremes,
        "windows": _windows,
        "filters": _filters,
        "filled": _filled,
        "counts": _counts,
        "joined": _joined,
        "like another": _like_another,
        "chosen": _chosen,
        "frames": _frames,
        "diagonals": _diagonals,
        "index reduce": _reduced,
        "addbmm": lambda m, x: (
            torch.addbmm(x[:4, :4], (m.w + x).view(16, 4, 4), (m.w * x).view(16, 4, 4), beta=0.5, alpha=0.1)
            .square()
            .mean()
        ),
        "bessel": lambda m, x: (
            torch.polygamma(1, m.w.abs() + 1) + torch.i0(m.w) + torch.special.i1e(x * m.w)
        ).mean(),
        "sorted places": _sorted_places,
        "grids": _grids,
        "edges": _edges,
        "GRUCell": lambda m, x: m.gru(x, m.gru(x, m.w)).square().mean(),
        "LSTMCell": lambda m, x: torch.stack(m.lstm(x)).square().mean(),
        "RNNCell": lambda m, x: m.rnn(x, m.w).square().mean(),
        "cdist": lambda m, x: torch.cdist(x, m.w).mean() + torch.cdist(x, m.w, 1.0).mean(),
        "pdist": lambda m, x: F.pdist(m.w).mean(),
        "cosine": lambda m, x: F.cosine_embedding_loss(x, m.w, torch.ones(16, dtype=x.dtype)),
        "ranking": lambda m, x: F.margin_ranking_loss(x[:, 0], m.w[:, 0], torch.ones(16, dtype=x.dtype)),
        "diagonal": lambda m, x: m.w.diagonal(2).square().sum() + m.w.trace(),
        "median": lambda m, x: m.w.median() + (m.w * x).mean(),
        "svdvals": lambda m, x: linalg.svdvals(m.w + x).sum(),
        "eigh": lambda m, x: linalg.eigh(_positive(m))[0].log().sum(),
        "qr": lambda m, x: linalg.qr(m.w + x)[1].abs().sum(),
        "cholesky": lambda m, x: linalg.cholesky(_positive(m)).sum() / 9,
        "solve": lambda m, x: linalg.solve(_positive(m), x).square().mean(),
        "slogdet": lambda m, x: linalg.slogdet(_positive(m))[1] / 9,
        "mixture": _mixture,
        "mesh grid": lambda m, x: torch.mul(
            *torch.meshgrid(m.w[0] + x[0], torch.arange(4.0).double(), indexing="ij")
        ).mean(),
        "interleaved": lambda m, x: (x.repeat_interleave(2) * m.w.repeat(2, 1).flatten()).square().mean(),
        "interleaved labels": lambda m, x: F.cross_entropy(
            torch.stack([m.gru(x), x @ m.w], 1).flatten(0, 1), x.argmax(1).repeat_interleave(2)
        ),
        "of a batch": lambda m, x: linalg.inv(_positive(m) + x[:4, None, :1].square()).square().mean(),
    }


def assert_unsharded(kind: str) -> None:
    """Steps with this formula are those of one process without pase."""
    import torch
    from torch import nn

    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16))
            self.gru, self.lstm, self.rnn = nn.GRUCell(16, 16), nn.LSTMCell(16, 16), nn.RNNCell(16, 16)

        def forward(self, x: Any) -> Any:
            return formulas()[kind](self, x)

    torch.manual_seed(1)
    agrees(Formula(), 2)
