"""Small PyTorch models, their batches, and a step of them by PyTorch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.cases.plans import Case
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.frontends import registry
from tests.backends.torch.control_models import flexes, layers, mapped, recurrent, shares, taken, untaken
from tests.backends.torch.written_models import (
    averages,
    bags,
    cells,
    instances,
    lstm,
    masks,
    places,
    rows,
    selves,
    waves,
)


def block() -> tuple[Any, tuple[Any, ...]]:
    """A decoder's layer with its embedding and its loss."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(24, 16), nn.LayerNorm(16)
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=i == 3) for i in range(4))
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
            self.head = nn.Linear(16, 24, bias=False)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.table(ids)
            y = self.norm(x)
            q, k, v = (m(y).view(8, 8, 4, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(8, 8, 16))
            x = x + self.down(gelu(self.up(x)))
            return cross_entropy(self.head(x).view(-1, 24), labels.view(-1))

    return Block(), (torch.randint(24, (8, 8)), torch.randint(24, (8, 8)))


def circle() -> tuple[Any, tuple[Any, ...]]:
    """Attentions whose positions may be split, for queries and keys together. One is causal and has fewer heads of keys
    than of queries, one has neither property, and one has fewer queries than keys, whose heads are written out twice.
    """
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    class Circle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)
            self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Any, z: Any) -> Any:
            q, k = self.q(x).view(2, 32, 4, 4).transpose(1, 2), self.kv(x).view(2, 32, 2, 4).transpose(1, 2)
            x = x + self.o(
                self.heads(scaled_dot_product_attention(q, k, 2 * k, is_causal=True, enable_gqa=True))
            )
            q, k, v = (m(x).view(2, 32, 4, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
            y = self.heads(scaled_dot_product_attention(q, k, v))
            q, k = self.q(z).view(2, 16, 4, 4).transpose(1, 2), self.kv(x).view(2, 32, 2, 4).transpose(1, 2)
            k, v = k[:, :, None].expand(2, 2, 2, 32, 4).reshape(2, 4, 32, 4), (3 * k).repeat_interleave(2, 1)
            return y.square().mean() + self.heads(scaled_dot_product_attention(q, k, v)).square().mean()

        def heads(self, x: Any) -> Any:
            return x.transpose(1, 2).reshape(2, -1, 16)

    return Circle(), (torch.randn(2, 32, 16), torch.randn(2, 16, 16))


def tower() -> tuple[Any, tuple[Any, ...]]:
    """Equal layers of the kind that tensor parallelism was designed for."""
    return tower_of(3, marked=False)


def tower_of(layers: int, *, marked: bool) -> tuple[Any, tuple[Any, ...]]:
    """marked: whether the model itself requests that backward recomputes each layer."""
    import torch
    import torch.utils.checkpoint
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.up(x)))

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: Any, y: Any) -> Any:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if marked else layer(x)
            return nn.functional.mse_loss(x, y)

    return Tower(), (torch.randn(8, 4, 16), torch.randn(8, 4, 16))


def pixels() -> tuple[Any, tuple[Any, ...]]:
    """Convolutions, batch norm with its statistics, and a pool; a weight that is not trained, and one that is read
    twice, once through a view."""
    import torch
    from torch import nn

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Conv2d(4, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.one = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)

        def forward(self, x: Any, y: Any) -> Any:
            x = nn.functional.relu(self.norm(self.inside(x))).mean((2, 3))
            x = torch.tanh(self.one(x)) @ self.one.weight.t() * self.scale
            return nn.functional.mse_loss(x, y) + x.softmax(-1).amax(-1).mean()

    return Pixels(), (torch.randn(8, 4, 8, 8), torch.randn(8, 8))


def experts() -> tuple[Any, tuple[Any, ...]]:
    """A mixture of experts with rows sorted by their experts, as in transformers."""
    import torch
    import transformers.integrations.moe  # noqa: F401, defines the grouped product for float64
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4, bias=False)
            self.up, self.down = (nn.Parameter(torch.randn(4, 16, 32) / 4) for _ in range(2))

        def forward(self, x: Any) -> Any:
            product = torch.ops.transformers.grouped_mm_fallback
            x = x.reshape(-1, 16)
            share, expert = self.gate(x).softmax(-1).topk(2)
            expert, order = expert.reshape(-1).sort()
            ends = torch.histc(expert.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
            y = product(x[order // 2], self.up, ends).relu()
            y = product(y, self.down.transpose(-2, -1), ends) * share.reshape(-1)[order][:, None]
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
            return y[back].view(-1, 2, 16).sum(1).square().mean()

    return Experts(), (torch.randn(8, 4, 16),)


def peaks() -> tuple[Any, tuple[Any, ...]]:
    """A max pool whose first windows are partly in the padding, which must be smaller than every number."""
    import torch
    from torch import nn
    from torch.nn.functional import max_pool2d

    class Peaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.again = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Any) -> Any:
            return self.again(max_pool2d(self.inside(x), 3, 2, 1)).square().mean()

    return Peaks(), (torch.randn(8, 4, 16, 16),)


def pairs() -> tuple[Any, tuple[Any, ...]]:
    """Pairs of images and vectors, with constant labels some of which are ignored, and a pool to one element."""
    import torch
    from torch import nn
    from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.one, self.other = nn.Conv2d(4, 8, 1), nn.Linear(8, 16), nn.Linear(12, 16)

        def forward(self, x: Any, y: Any) -> Any:
            x = self.one(adaptive_avg_pool2d(self.inside(x), 1).flatten(1))
            scores = x @ self.other(y).t()
            labels = torch.arange(8)
            labels = torch.where(labels < 6, labels, -100)
            return cross_entropy(scores, labels) + cross_entropy(scores.t(), labels)

    return Pairs(), (torch.randn(8, 4, 8, 8), torch.randn(8, 12))


def of_transformers(name: str, config: str, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch
    import transformers

    made = getattr(transformers, config)(vocab_size=120, use_cache=False, **settings)
    module = getattr(transformers, name)(made).train()
    for m in module.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    return module, ({"input_ids": torch.randint(120, (8, 16)), "labels": torch.randint(120, (8, 16))},)


def llama() -> tuple[Any, tuple[Any, ...]]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return of_transformers("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=1, **sizes)


def gpt2() -> tuple[Any, tuple[Any, ...]]:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 16, "attn_pdrop": 0.0}
    return of_transformers("GPT2LMHeadModel", "GPT2Config", **sizes)


def bert() -> tuple[Any, tuple[Any, ...]]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    no_dropout = {"attention_probs_dropout_prob": 0.0}
    return of_transformers("BertForMaskedLM", "BertConfig", num_hidden_layers=1, **sizes, **no_dropout)


def t5() -> tuple[Any, tuple[Any, ...]]:
    """Encoder and decoder, with a mask that cuts the encoder's sequences."""
    import torch

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "dropout_rate": 0.0}
    begins = {"decoder_start_token_id": 0, "pad_token_id": 0}
    module, (batch,) = of_transformers("T5ForConditionalGeneration", "T5Config", **sizes, **begins)
    mask = (torch.arange(16)[None] < torch.randint(5, 17, (8, 1))).long()
    return module, ({**batch, "attention_mask": mask},)


MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    f.__name__: f for f in (block, circle, tower, pixels, peaks, pairs, experts, llama, gpt2, bert, t5)
} | {
    f.__name__: f
    for f in (
        layers,
        recurrent,
        mapped,
        taken,
        untaken,
        flexes,
        shares,
        lstm,
        cells,
        bags,
        masks,
        waves,
        rows,
        places,
        instances,
        averages,
        selves,
    )
}


@dataclass(frozen=True, kw_only=True)
class TorchCase:
    """A model in float64 and its step by PyTorch alone: loss, gradients, parameters and buffers after an update."""

    module: Any
    batch: tuple[Any, ...]
    case: Case
    loss: Any
    gradients: dict[str, Any]
    after: dict[str, Any]


def optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@cache
def case(name: str, devices: int) -> TorchCase:
    import torch
    from torch.utils._pytree import tree_map

    torch.manual_seed(0)
    module, batch = MODELS[name]()
    module.double()
    batch = tree_map(lambda t: t.double() if t.is_floating_point() else t, batch)
    traced = registry.trace(module, *batch)
    problem = SplitProblem.of(traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
    alone = copy.deepcopy(module)
    out = alone(**batch[0]).loss if isinstance(batch[0], dict) else alone(*batch)
    out.backward()
    gradients = {k: p.grad.clone() for k, p in alone.named_parameters() if p.grad is not None}
    optimizer(alone.parameters()).step()
    return TorchCase(
        module=module,
        batch=batch,
        case=Case(traced=traced, problem=problem),
        loss=out.detach(),
        gradients=gradients,
        after={k: t.detach().clone() for k, t in alone.state_dict().items()},
    )
