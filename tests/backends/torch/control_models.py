"""Small PyTorch models with loops and branches, and their batches."""

from __future__ import annotations

from typing import Any


def layers() -> tuple[Any, tuple[Any, ...]]:
    """Layers as a loop over their stacked weights, with one counter that is constant and one that depends on data."""
    import torch
    from torch import nn
    from torch._higher_order_ops import scan

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 16, 32) / 4)
            self.down = nn.Parameter(torch.randn(3, 32, 16) / 4)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Any, y: Any) -> Any:
            def body(carry: Any, weights: Any) -> Any:
                x, turn = carry
                up, down, at = weights
                x = x + torch.tanh((x * self.scale) @ up) @ down / (turn + 1)
                return (x, turn + 1), (x.mean(-1) + at, turn * 2)

            start = (x, torch.zeros((), dtype=x.dtype))
            (x, turns), (means, twice) = scan(
                body, start, (self.up, self.down, torch.arange(3.0, dtype=x.dtype))
            )
            return nn.functional.mse_loss(x, y) + means.square().mean() + turns + twice.sum()

    return Layers(), (torch.randn(8, 6, 16), torch.randn(8, 6, 16))


def recurrent() -> tuple[Any, tuple[Any, ...]]:
    """A recurrent cell along the positions, from a trained state. Results are read with their dims in another order."""
    import torch
    from torch import nn
    from torch._higher_order_ops import scan

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.again = nn.Linear(12, 16), nn.Linear(16, 16, bias=False)
            self.state, self.out = nn.Parameter(torch.randn(16)), nn.Linear(16, 12)

        def forward(self, x: Any) -> Any:
            def body(h: Any, x: Any) -> Any:
                h = torch.tanh(self.inside(x) + self.again(h))
                return h, h.clone()

            _, hs = scan(body, self.state.expand(x.shape[0], 16).clone(), x.transpose(0, 1))
            return nn.functional.mse_loss(self.out(hs.transpose(0, 1))[:, :-1], x[:, 1:])

    return Recurrent(), (torch.randn(8, 6, 12),)


def mapped() -> tuple[Any, tuple[Any, ...]]:
    """A map over the examples, with a table that the body reads whole and a constant mask."""
    import torch
    from torch import nn
    from torch._higher_order_ops.map import map as map_over

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.one = nn.Embedding(24, 16), nn.Linear(16, 16)

        def forward(self, ids: Any) -> Any:
            mask = torch.ones(8, 8, dtype=torch.bool).tril()

            def body(row: Any) -> Any:
                x = self.table(row)
                scores = self.one(x) @ x.t()
                return torch.where(mask, scores, 0.0) @ x

            return map_over(body, ids).square().mean()

    return Mapped(), (torch.randint(24, (4, 8)),)


def branched(taken: bool) -> tuple[Any, tuple[Any, ...]]:
    """Branches that read different layers. One contains a loop, and one also returns a constant. Which one is taken
    depends on data."""
    import torch
    from torch import nn
    from torch._higher_order_ops import scan

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.other = (nn.Linear(16, 16) for _ in range(3))
            self.turns = nn.Parameter(torch.randn(3, 16) / 4)

        def forward(self, x: Any) -> Any:
            x = self.first(x)

            def long(x: Any) -> Any:
                def body(x: Any, w: Any) -> Any:
                    return torch.tanh(self.one(x) + w), x.sum()

                x, sums = scan(body, x, self.turns)
                return x, sums.mean()

            def short(x: Any) -> Any:
                return self.other(x), x.mean() * 2

            wanted = x.square().sum() > (0 if taken else 1e9)
            x, beside = torch.cond(wanted, long, short, (x,))
            return x.square().mean() + beside

    return Branched(), (torch.randn(8, 16),)


def taken() -> tuple[Any, tuple[Any, ...]]:
    return branched(True)


def untaken() -> tuple[Any, tuple[Any, ...]]:
    return branched(False)


def flexible(kv_heads: int) -> tuple[Any, tuple[Any, ...]]:
    """Attention with a bias by position and a window. Some queries see no key, by the bias or by the window. On a CPU,
    PyTorch runs ``flex_attention`` only forward, so the reference is written in other ops."""
    import torch
    from torch import nn
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
            self.k, self.v = (nn.Linear(16, 4 * kv_heads) for _ in range(2))

        def forward(self, x: Any) -> Any:
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=x.dtype)

            def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
                return (q >= k) & (q - k < 5) & (q + h > 1)

            def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
                return torch.where(q == 3, -torch.inf, score + slopes[h] * (k - q))

            q, k, v = (m(x).view(4, 8, -1, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
            if torch.compiler.is_exporting():
                mask = create_block_mask(seen, None, 4, 8, 8, device="cpu")
                y = flex_attention(q, k, v, score_mod=biased, block_mask=mask, enable_gqa=True)
            else:
                k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
                at = torch.arange(4)[:, None, None], torch.arange(8)[:, None], torch.arange(8)
                scores = biased(q @ k.transpose(-2, -1) / 2, 0, *at)
                y = scores.masked_fill(~seen(0, *at), -torch.inf).softmax(-1).nan_to_num() @ v
            return self.o(y.transpose(1, 2).reshape(4, 8, 16)).square().mean()

    return Flexible(), (torch.randn(4, 8, 16),)


def flexes() -> tuple[Any, tuple[Any, ...]]:
    return flexible(4)


def shares() -> tuple[Any, tuple[Any, ...]]:
    return flexible(2)
