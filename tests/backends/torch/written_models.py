"""Small PyTorch models with ops that pase writes in other ops, and their batches."""

from __future__ import annotations

from typing import Any


def lstm() -> tuple[Any, tuple[Any, ...]]:
    """Two bidirectional layers with initial states of zero. The last states are read, too."""
    import torch
    from torch import nn

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            y, (h, c) = self.over(x)
            return self.out(y).square().mean() + (h * c).mean()

    return Lstm(), (torch.randn(8, 2, 8),)


def cells() -> tuple[Any, tuple[Any, ...]]:
    """A GRU with a trained initial state, an RNN without biases, and an LSTM with projected outputs."""
    import torch
    from torch import nn

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.state = nn.GRU(4, 8, batch_first=True), nn.Parameter(torch.randn(1, 1, 8))
            self.rnn = nn.RNN(8, 8, nonlinearity="relu", bias=False)
            self.lstm = nn.LSTM(8, 8, proj_size=4)

        def forward(self, x: Any) -> Any:
            y, _ = self.gru(x, self.state.expand(1, x.shape[0], 8).contiguous())
            y, _ = self.lstm(self.rnn(y.transpose(0, 1))[0])
            return y.square().mean()

    return Cells(), (torch.randn(8, 2, 4),)


def bags() -> tuple[Any, tuple[Any, ...]]:
    """Weighted bags of equal size, and bags of several sizes, one of them empty; some rows are ignored."""
    import torch
    from torch import nn

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums, self.means = nn.EmbeddingBag(12, 8, mode="sum"), nn.EmbeddingBag(12, 8, padding_idx=1)
            self.most = nn.EmbeddingBag(12, 8, mode="max")

        def forward(self, ids: Any, weights: Any, many: Any, ends: Any) -> Any:
            even = self.sums(ids, per_sample_weights=weights) + self.means(ids) * self.most(ids)
            uneven = self.sums(many, ends) * self.means(many, ends) + self.most(many, ends)
            return (even * uneven).square().mean()

    ends = torch.tensor([0, 2, 2, 7, 9, 12, 14, 15])
    return Bags(), (torch.randint(12, (8, 4)), torch.randn(8, 4), torch.randint(12, (16,)), ends)


def masks() -> tuple[Any, tuple[Any, ...]]:
    """The elements that a mask selects are set to a number, to a row, and to the elements of a vector in order."""
    import torch
    from torch import nn

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.row = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: Any, new: Any) -> Any:
            y, rows = self.inside(x), x.sum(-1) > 0
            z = y.clone()
            z[x > 1] = 0.5
            z[rows] = self.row
            z = z.masked_scatter(x < -1, new)
            return (y * z).square().mean()

    return Masks(), (torch.randn(8, 4, 8), torch.randn(8, 4, 8))


def waves() -> tuple[Any, tuple[Any, ...]]:
    """Pairs of numbers rotated as complex numbers, and a transform over positions and channels, of which the low
    frequencies are written into zeros."""
    import torch
    from torch import nn

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.angle = nn.Linear(8, 8), nn.Parameter(torch.randn(4))

        def forward(self, x: Any) -> Any:
            y = self.inside(x)
            turned = torch.view_as_complex(y.view(8, 4, 4, 2)) * torch.polar(
                torch.ones_like(self.angle), self.angle
            )
            y = y + torch.view_as_real(turned).flatten(-2)
            every = torch.fft.fftn(y, dim=(1, 2))
            low = torch.zeros_like(every)
            low[:, :, :4] = every[..., :4] * torch.view_as_complex(self.angle.view(2, 2))[0]
            low[:, 0] = every[:, 1].conj()
            return every.real.square().mean() + low.abs().square().mean()

    return Waves(), (torch.randn(8, 4, 8),)


def rows() -> tuple[Any, tuple[Any, ...]]:
    """Elements that each example picks and writes by ids of its own, and elements of other examples."""
    import torch
    from torch import nn

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def forward(self, x: Any, i: Any, j: Any) -> Any:
            y, each = self.inside(x), torch.arange(8)
            own = y[each, i, j] * y[each, -1 - i, 2]
            wide = y[each[:, None], i[:, None], torch.arange(8)] - y[each // 2, i, j][:, None]
            put = torch.zeros_like(y).index_put((each[:, None], i[:, None], torch.arange(8)), wide)
            put = put.index_put((each // 2, i, j), own, accumulate=True)
            put[each, j, i] = own
            return (put * y).square().mean() + (own[:, None] * wide).mean()

    ids = (torch.randint(4, (8,)), torch.randint(4, (8,)))
    return Rows(), (torch.randn(8, 4, 8), *ids)


def places() -> tuple[Any, tuple[Any, ...]]:
    """Pooling whose places are read (windows overlap and reach over the edge), unpooling, and sampling from a grid."""
    import torch
    from torch import nn
    from torch.nn import functional as f

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
            self.where = nn.Linear(16, 6)

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            pooled, at = self.pool(y)
            y = y + self.unpool(self.last(pooled), at)
            wide, far = f.max_pool2d(y, (3, 2), (2, 1), (1, 0), (1, 2), return_indices=True)
            grid = f.affine_grid(self.where(pooled[:, 0].flatten(1)).view(-1, 2, 3), list(x.shape), False)
            y = f.grid_sample(y, grid, padding_mode="border", align_corners=False)
            return y.square().mean() + (wide * far).square().mean() * 1e-3

    return Places(), (torch.randn(8, 3, 8, 8),)


def instances() -> tuple[Any, tuple[Any, ...]]:
    """Instance norms: by each image's statistics, and by the running ones."""
    import torch
    from torch import nn

    class Instances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.own, self.kept = (
                nn.InstanceNorm2d(8, affine=True, track_running_stats=tracked) for tracked in (False, True)
            )
            self.kept.running_mean, self.kept.running_var = torch.randn(8), torch.rand(8) + 0.5
            self.kept.eval()

        def forward(self, x: Any) -> Any:
            return self.kept(self.two(self.own(self.one(x)).relu())).square().mean()

    return Instances().double(), (torch.randn(8, 2, 8, 8).double(),)


def averages() -> tuple[Any, tuple[Any, ...]]:
    """Average pools whose sums are resharded before they are divided: windows that overlap, that are padded, and that
    do neither."""
    import torch
    from torch import nn
    from torch.nn import functional as f

    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (
                nn.Conv2d(4, 8, 3, padding=1),
                nn.Conv2d(8, 8, 1),
                nn.Conv1d(8, 8, 1),
            )

        def forward(self, x: Any) -> Any:
            y = self.two(f.avg_pool2d(self.one(x), 3, 1, 1))
            y = f.avg_pool2d(y, (2, 3), (2, 1), (0, 1))
            return self.three(f.avg_pool1d(y.flatten(2), 4)).square().mean()

    return Averages(), (torch.randn(8, 4, 8, 8),)


def selves() -> tuple[Any, tuple[Any, ...]]:
    """Attentions in which one tensor is several operands: all three, queries and keys, keys and values under a mask."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention as attention

    class Selves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.two, self.value, self.query = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Any) -> Any:
            y = self.heads(self.all(x))
            x = x + attention(y, y, y).transpose(1, 2).reshape(x.shape)
            y, z = self.heads(self.two(x)), self.heads(self.value(x))
            x = x + attention(y, y, z, is_causal=True).transpose(1, 2).reshape(x.shape)
            mask = x.mean(-1)[:, None, None] * torch.ones(1, 1, 8, 1, dtype=x.dtype)
            return attention(self.heads(self.query(x)), z, z, attn_mask=mask).square().mean()

        def heads(self, x: Any) -> Any:
            return x.view(2, 8, 4, 4).transpose(1, 2)

    return Selves(), (torch.randn(2, 8, 16),)
