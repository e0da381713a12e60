"""Models exported from PyTorch, and the same models in JAX. PyTorch is optional and is imported inside of functions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["gpt2", "pair", "recurrent", "resnet"]


def export(model: nn.Module, *args: Any, **options: Any) -> Any:
    """The ModelProto of a module, with random weights: the exporter merges equal initializers."""
    import torch
    from torch import nn

    for p in model.parameters():
        nn.init.normal_(p)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(model.eval(), args, dynamo=True, verbose=False, **options).model_proto
    finally:
        logging.disable(logging.NOTSET)


def _mlp() -> nn.Module:
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(256, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 128)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(torch.relu(x) if i else x)
            return (x**2).mean()

    return Mlp()


_CONVS = ((3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3))


def _alexnet() -> nn.Module:
    import torch
    from torch import nn

    class AlexNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.ModuleList(
                [nn.Conv2d(i, o, k, 4 if k == 11 else 1, 0 if k == 11 else k // 2) for i, o, k in _CONVS]
            )
            self.f = nn.ModuleList([nn.Linear(9216, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, c in enumerate(self.c):
                x = torch.relu(c(x))
                x = nn.functional.max_pool2d(x, 3, 2) if i in (0, 1, 4) else x
            x = x.flatten(1)
            for i, f in enumerate(self.f):
                x = f(torch.relu(x) if i else x)
            return (x**2).mean()

    return AlexNet()


_D, _H, _F, _V = 256, 4, 1024, 2048


def _transformer() -> nn.Module:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(_V, _D)
            self.blocks = nn.ModuleList([self._block() for _ in range(2)])
            self.h = nn.Linear(_D, _V, bias=False)

        @staticmethod
        def _block() -> nn.ModuleDict:
            square = {n: nn.Linear(_D, _D) for n in "qkvo"}
            norms = {n: nn.LayerNorm(_D) for n in ("n1", "n2")}
            return nn.ModuleDict({**square, **norms, "u": nn.Linear(_D, _F), "d": nn.Linear(_F, _D)})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.e(ids)
            b, t, _ = x.shape
            for p in self.blocks:
                y = p["n1"](x)
                q, k, v = (p[n](y).reshape(b, t, _H, _D // _H).transpose(1, 2) for n in "qkv")
                a = torch.softmax(q @ k.transpose(-1, -2) * (_D // _H) ** -0.5, -1) @ v
                x = x + p["o"](a.transpose(1, 2).reshape(b, t, _D))
                x = x + p["d"](torch.relu(p["u"](p["n2"](x))))
            return (self.h(x) ** 2).mean()

    return Transformer()


@cache
def pair(name: str) -> tuple[Any, Callable[..., Any], Any, Any]:
    """One architecture as a ModelProto, and as a JAX loss with parameters and batch."""
    import jax
    import jax.numpy as jnp
    import torch

    def s(*shape: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def linear(i: int, o: int) -> Any:
        return {"w": s(i, o), "b": s(o)}

    def apply(x: Any, p: Any) -> Any:
        return x @ p["w"] + p["b"]

    def mlp(params: Any, x: Any) -> Any:
        for i, p in enumerate(params):
            x = apply(jax.nn.relu(x) if i else x, p)
        return jnp.mean(x**2)

    def alexnet(params: Any, x: Any) -> Any:
        for i, (w, b) in enumerate(params["c"]):
            pad = 0 if i == 0 else w.shape[-1] // 2
            stride = 4 if i == 0 else 1
            x = jax.lax.conv_general_dilated(x, w, (stride, stride), [(pad, pad)] * 2)
            x = jax.nn.relu(x + b[:, None, None])
            if i in (0, 1, 4):
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID")
        return mlp(params["f"], x.reshape(x.shape[0], -1))

    def norm(x: Any, p: Any) -> Any:
        y = x - jnp.mean(x, -1, keepdims=True)
        return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * p["w"] + p["b"]

    def transformer(params: Any, ids: Any) -> Any:
        x = jnp.take(params["e"], ids, axis=0, mode="clip")
        b, t, _ = x.shape
        for p in params["blocks"]:
            y = norm(x, p["n1"])
            q, k, v = (apply(y, p[n]).reshape(b, t, _H, _D // _H).transpose(0, 2, 1, 3) for n in "qkv")
            a = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * (_D // _H) ** -0.5, -1) @ v
            x = x + apply(a.transpose(0, 2, 1, 3).reshape(b, t, _D), p["o"])
            x = x + apply(jax.nn.relu(apply(norm(x, p["n2"]), p["u"])), p["d"])
        return jnp.mean((x @ params["h"]) ** 2)

    if name == "mlp":
        layers = [linear(256, 1024), linear(1024, 1024), linear(1024, 128)]
        return export(_mlp(), torch.zeros(64, 256)), mlp, layers, s(64, 256)
    if name == "alexnet":
        image = (32, 3, 227, 227)
        params = {
            "c": [(s(o, i, k, k), s(o)) for i, o, k in _CONVS],
            "f": [linear(9216, 4096), linear(4096, 4096), linear(4096, 1000)],
        }
        return export(_alexnet(), torch.zeros(image)), alexnet, params, s(*image)
    affine = {"w": s(_D), "b": s(_D)}
    block = {
        **{n: linear(_D, _D) for n in "qkvo"},
        "n1": affine,
        "n2": affine,
        "u": linear(_D, _F),
        "d": linear(_F, _D),
    }
    params = {"e": s(_V, _D), "blocks": [block] * 2, "h": s(_D, _V)}
    tokens = torch.zeros(8, 64, dtype=torch.long)
    return export(_transformer(), tokens), transformer, params, s(8, 64, dtype="int32")


def _resnet() -> nn.Module:
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, i: int, o: int, stride: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1, bias=False)
            self.n, self.m = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
            self.short = nn.Conv2d(i, o, 1, stride, bias=False) if stride > 1 else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.m(self.b(torch.relu(self.n(self.a(x))))) + self.short(x))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Residual(16, 16, 1), Residual(16, 32, 2)
            )
            self.f = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.f(self.body(x).mean((2, 3)))

    return ResNet()


def resnet() -> Any:
    """A ResNet with a symbolic batch size."""
    import torch

    return export(_resnet(), torch.zeros(4, 3, 32, 32), dynamic_shapes=({0: "batch"},))


def _recurrent(kind: str) -> nn.Module:
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = kind == "GRU"
            self.e = nn.Embedding(100, 32)
            self.r = getattr(nn, kind)(32, 48, num_layers=2, batch_first=True, bidirectional=both)
            self.o = nn.Linear(96 if both else 48, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o(self.r(self.e(x))[0])

    return Recurrent()


def recurrent(kind: str) -> tuple[Any, list[tuple[int, ...]]]:
    """A model with recurrent layers, and the shapes of the layers' matrices."""
    import torch

    model = _recurrent(kind)
    return export(model, torch.zeros(4, 10, dtype=torch.long)), [
        tuple(p.shape) for p in model.r.parameters() if p.dim() > 1
    ]


def gpt2(layers: int) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=512, n_positions=64, use_cache=False)
    return export(GPT2LMHeadModel(config), torch.zeros(2, 16, dtype=torch.long))
