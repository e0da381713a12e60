"""Models with PyTorch's higher-order ops, and a single layer."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def attends():
    """A class with attention. PyTorch is imported only inside of this function."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Attends(torch.nn.Module):
        """kind: "fused" for PyTorch's attention; otherwise flex_attention with a causal mask ("causal"), a bias by
        position ("biased", or "trained" with a parameter), or a mask by documents."""

        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            self.w = torch.nn.Linear(64, 192, bias=False)
            self.slopes = torch.nn.Parameter(torch.zeros(4), requires_grad=kind == "trained")

        def forward(self, x, documents):
            b, n, _ = x.shape
            q, k, v = self.w(x).view(b, n, 3, 4, 16).permute(2, 0, 3, 1, 4)
            if self.kind == "fused":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()
            mask = create_block_mask(self.visible(documents), None, None, n, n, device="cpu")
            score = self.biased if self.kind in ("biased", "trained") else None
            return flex_attention(q, k, v, score_mod=score, block_mask=mask).sum()

        def visible(self, documents):
            if self.kind == "documents":
                return lambda b, h, q, k: documents[q] == documents[k]
            return lambda b, h, q, k: q >= k

        def biased(self, score, b, h, q, k):
            slope = self.slopes[h] if self.kind == "trained" else 0.5
            return score + slope * (k - q)

    return Attends


@cache
def models():
    """The classes of this module. PyTorch is imported only inside of this function."""
    import torch
    from torch._higher_order_ops import scan, while_loop
    from torch._higher_order_ops.map import map as map_over

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Linear(64, 64, bias=False)

    class Scans(Linear):
        def forward(self, x):
            def body(c, x):
                h = torch.tanh(self.w(x) + c)
                return h, h * 2

            c, ys = scan(body, torch.zeros(32, 64), x, dim=0)
            return ys.sum() + c.sum()

    class Maps(Linear):
        def forward(self, x):
            return map_over(lambda x: torch.tanh(self.w(x)), x).sum()

    class Branches(Linear):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: torch.tanh(self.w(x)), torch.tanh, (x,)).sum()

    class Turns(Linear):
        def forward(self, x):
            zero = torch.zeros((), dtype=torch.int64)
            return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.w(x)), (zero, x))[1].sum()

    return SimpleNamespace(Branches=Branches, Maps=Maps, Scans=Scans, Turns=Turns, Attends=attends())


def linear() -> Any:
    import torch

    return torch.nn.Linear(4, 4)
