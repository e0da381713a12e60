"""Stacks of layers that are equal, nearly equal, or do something that makes folding them wrong."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from types import SimpleNamespace

KEPT = []
"""Tensors that layers keep outside of their results."""


def odd(layer, x, y, mask):
    """(the value to continue with, None), or (_, the layer's result)."""
    import torch

    if layer.kind == "exp":
        return y * math.exp(-0.3 * layer.place), None
    if layer.kind == "type":
        return y * 2 if type(layer.place) is int else y, None
    if layer.kind == "vmap":
        return torch.vmap(lambda row: layer.norm(row).mul_(2))(y), None
    if layer.kind == "sibling":
        return y + layer.box[0].norm(x), None
    if layer.kind == "is" and mask is x:
        return y, layer.down(layer.up(y))
    if layer.kind == "view":
        return y, x.view(x.shape)
    if layer.kind == "weight":
        return y, (x + layer.scale, layer.scale)
    if layer.kind == "once more":
        z = x + layer.down(layer.up(y))
        return y, (z, z.view(z.shape))
    if layer.kind == "third":
        KEPT.append(None)
        return y * 2 if len(KEPT) == 2 else y, None
    if layer.kind == "list":
        layer.box[0].append(y.mean())
    return y, None


def oddly(kind, i, layer, x):
    """A call of a layer with unusual arguments, or with an unusual use of its result."""
    import torch

    if kind == "half":
        with torch.autocast("cpu", torch.bfloat16 if i < 3 else torch.float16):
            return layer(x)
    if kind == "cond":
        return torch.cond(x.sum() > 0, lambda x: layer(x), lambda x: x * 1, (x,))
    if kind == "is":
        return layer(x, x if i % 2 else x.abs())
    if kind == "view":
        x = x * 1
        y = layer(x)
        y.mul_(2)
        return x + y
    if kind == "weight":
        x, scale = layer(x)
        return x + scale
    if kind == "once more":
        x, y = layer(x)
        y.mul_(2)
        return x + 1
    return layer(x)


def left(stack):
    """The sum of the tensors that the layers kept outside of their results."""
    if stack.kind == "list":
        (kept,) = stack.layers[0].box
        out = sum(kept) + kept[6]
        kept.clear()
        return out
    if stack.kind == "gathers":
        return KEPT[4]
    if stack.kind == "leaks to the model":
        return sum(KEPT)
    return sum(layer.kept for layer in stack.layers) if stack.kind == "leaks" else 0


@cache
def block():
    """The class of a layer. PyTorch is imported only inside of this function."""
    import torch
    from torch.nn import functional as F

    class Block(torch.nn.Module):
        """A small transformer layer. kind: what else it does."""

        def __init__(self, place, kind):
            super().__init__()
            self.place, self.kind = place, kind
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False)
            self.norm = torch.nn.LayerNorm(8)
            self.drop = torch.nn.Dropout(0.1)
            self.register_buffer("scale", torch.full((8,), 2.0))
            self.kept = None

        def forward(self, x, mask=None, *, turns=1):
            y, out = odd(self, x, self.norm(x), mask)
            if out is not None:
                return out
            if self.kind == "place":
                y = y * (self.place + 1)
            elif self.kind == "compares":
                y = y * 2 if self.place > 1 else y
            elif self.kind == "format":
                y = y * len(f"{self.place}")
            elif self.kind == "no_grad":
                with torch.no_grad():
                    y = y + self.scale.mean()
            elif self.kind == "writes":
                x += y
            elif self.kind == "buffer":
                self.scale.mul_(0.5)
            elif self.kind == "constant":
                y = y + torch.tensor([1.0, 2.0]).sum()
            for _ in range(turns):
                y = self.drop(self.down(F.gelu(self.up(y))) * self.scale)
            if self.kind == "own writes":
                y = y.clone().masked_fill_(y > 1, 0.0) + torch.zeros(4, 8).add_(1.0)
            elif self.kind == "leaks":
                self.kept = y.square().mean()
            elif self.kind in ("leaks to the model", "gathers"):
                KEPT.append(y.square().mean())
            if mask is not None:
                y = y * mask
            return (x + y, None, mask, 1.5) if self.kind == "tuple" else x + y

    return Block


@cache
def models():
    """The classes of a layer and of a stack of layers."""
    import torch

    Block = block()

    class Stack(torch.nn.Module):
        """A sequence of layers. kind: how they are called, or what they do."""

        def __init__(self, kind, layers=7):
            super().__init__()
            self.kind = kind
            self.first = torch.nn.Linear(8, 8)
            self.layers = torch.nn.ModuleList(Block(i, kind) for i in range(layers))
            if kind == "tied inside":
                for layer in self.layers:
                    layer.down.weight = self.layers[0].down.weight
            elif kind == "tied outside":
                self.last = torch.nn.Linear(16, 8)
                self.last.weight = self.layers[2].down.weight
            elif kind == "frozen":
                self.layers[1].up.requires_grad_(False)
            elif kind == "eval":
                self.layers[3].drop.eval()
            elif kind == "width":
                self.layers[2].up, self.layers[2].down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
            elif kind in ("sibling", "list"):
                box = [self.layers[0] if kind == "sibling" else []]
                for layer in self.layers:
                    layer.box = box
            elif kind == "same":
                self.layers = torch.nn.ModuleList([self.layers[0]] * layers)

        def forward(self, x):
            x = self.first(x)
            KEPT.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "autocast"):
                for i, layer in enumerate(self.layers):
                    if self.kind == "checkpoint":
                        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                    elif self.kind == "turns":
                        x = layer(x, turns=2 if i == 2 else 1)
                    elif self.kind == "shapes":
                        x = layer(x[:2] if i == 3 else x)
                    elif self.kind == "outer no_grad":
                        with torch.no_grad() if i < 2 else contextlib.nullcontext():
                            x = layer(x)
                    elif self.kind == "mask":
                        x = layer(x, mask=(x > 0).float() if i > 1 else None)
                    elif self.kind == "tuple":
                        x, _, mask, number = layer(x, x.abs())
                        x = x + mask * number
                    else:
                        x = oddly(self.kind, i, layer, x)
            loss = x.float().square().mean()
            return loss + left(self)

    return SimpleNamespace(Block=Block, Stack=Stack)


def written(program):
    """The program in a form to compare: operands by number, leaves by name, shapes, layers, lines and marks."""
    import torch

    number, out, marks = {}, [], {}
    for n in program.graph.graph.nodes:
        if n.op == "placeholder":
            number[n] = program.parameters.get(n.name) or program.buffers.get(n.name) or n.name
            number[n] = "constant" if ".lifted" in f".{number[n]}" else number[n]
            continue
        if n.op == "get_attr" and not n.users:  # a region that has been inlined
            continue
        number[n] = f"%{len(out)}"
        made = n.meta.get("val")
        every = made if isinstance(made, (tuple, list)) else [made]
        kinds = [(tuple(t.shape), t.stride(), t.dtype) for t in every if isinstance(t, torch.Tensor)]
        args = torch.fx.map_arg((n.args, dict(n.kwargs)), lambda m: number[m])
        layers = [path for path, _ in (n.meta.get("nn_module_stack") or {}).values()]
        own = {
            k: marks.setdefault((k, v), len(marks))
            for k, v in (n.meta.get("custom") or {}).items()
            if k.startswith("pase")
        }
        out.append((str(n.target), repr(args), kinds, layers, (n.meta.get("stack_trace") or "")[-150:], own))
    return out
