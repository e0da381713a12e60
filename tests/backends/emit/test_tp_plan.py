"""A plan as a tp_plan: PyTorch's own styles, applied as written, give the unsharded step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.backends.registry import emit
from tests.backends.emit.torch_plans import plan_of
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


def test_a_tp_plan_as_written_is_the_unsharded_step(tmp_path: Path) -> None:
    """The plan is applied by PyTorch's parallelize_module, whose styles transformers uses."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    c, path = case("tower", RANKS), tmp_path / "tp.json"
    emit(plan_of("tower", "megatron/megatron_1x4"), "tp-plan", path)
    styles = json.loads(path.read_text())
    assert styles == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def on_rank(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (RANKS,))
        made = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        module = parallelize_module(copy.deepcopy(c.module), mesh, {k: made[v]() for k, v in styles.items()})
        module(*c.batch).backward()
        grads = {k: p.grad for k, p in module.named_parameters()}
        return {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items()}

    for gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(gradients, c.gradients)


def test_the_plan_for_llama_is_that_of_transformers(tmp_path: Path) -> None:
    """Compiled for tensor parallelism, every layer is split as transformers' own plan splits it."""
    import transformers

    model = (
        "hf:LlamaForCausalLM?batch=8&sequence=32&hidden_size=64&num_hidden_layers=3&num_attention_heads=4"
        "&num_key_value_heads=2&intermediate_size=128&vocab_size=256"
    )
    path = tmp_path / "tp.json"
    plan = pase.compile(model, devices=8, mesh="data=4,model=2", target="tp-plan", baselines=False)
    emit(plan, "tp-plan", path)
    own = {f"model.{k}": style for k, style in transformers.LlamaConfig.base_model_tp_plan.items()}
    own |= transformers.LlamaForCausalLM._tp_plan
    found = json.loads(path.read_text())
    # transformers keeps the embedding whole; pase splits it by rows.
    assert found.pop("model.embed_tokens") == "embedding_rowwise"
    assert found == own
