"""Models of the zoo and of PyTorch are priced under stated strategies."""

from __future__ import annotations

import json

import pytest

import pase
from pase.errors import Infeasible, PaseError
from pase.stated.strategy import Strategy
from tests.command import printed

SMALL = "zoo:llama3_8b?batch=64&seq=512&layers=4&attention=fused&remat=0"


def test_api_and_command_say_the_same():
    p = pase.price(SMALL, devices=8, strategy="fsdp=8,micro=4,remat=selective", executor="eager")
    assert p.micro_batches == 2 and p.strategy == Strategy(shard=8, zero=3, micro=4, remat="selective")
    args = ["price", SMALL, "--devices", "8", "--as", "fsdp=8,micro=4,remat=selective", "--executor", "eager"]
    shown = printed(*args)
    assert "MFU" in shown and "fsdp=8,micro=4" in shown
    assert json.loads(printed(*args, "--json"))["step_s"] == p.step_s
    with pytest.raises(PaseError, match="no executor 'lazy'"):
        pase.price(SMALL, devices=8, strategy="", executor="lazy")
    with pytest.raises(Infeasible, match="no equal blocks"):
        pase.price("zoo:alexnet", devices=8, strategy="dp=8")
    with pytest.raises(Infeasible, match="5 data-parallel ranks") as e:
        pase.price(SMALL, devices=5, strategy="dp=5")
    assert e.value.where == "dp=5"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("text", "executor"),
    [
        ("fsdp=8,remat=none", "eager"),
        ("fsdp=8,remat=selective", "eager"),
        ("fsdp=4,tp=2,sp,remat=selective", "compiled"),
        ("fsdp=8,remat=full", "xla"),
        ("dp=2,zero=1,tp=2,sp,pp=2,micro=1,remat=full", "megatron"),
    ],
)
def test_layers_written_out_cost_what_a_loop_over_them_does(text, executor):
    """This holds whether the model marks them or not, except for the norms at the ends, which equal runs share."""
    shape = "zoo:llama3_8b?batch=16&seq=512&layers=6&vocab=4096&attention=fused"
    loop, out, marked = (
        pase.price(f"{shape}&scan={scan}&remat={remat}", devices=8, strategy=text, executor=executor)
        for scan, remat in ((1, 0), (0, 0), (0, 1))
    )
    for p in (out, marked):
        assert p.step_s == pytest.approx(loop.step_s, rel=0.01)
        assert p.memory.total == pytest.approx(loop.memory.total, rel=0.01)
        assert p.memory.activations == pytest.approx(loop.memory.activations, rel=0.1)
    assert sum(out.collectives_s.values()) == pytest.approx(sum(loop.collectives_s.values()), rel=0.02)


@pytest.mark.torch
def test_a_pytorch_module_is_priced():
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(256)
            self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x):  # type: ignore[no-untyped-def]
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    batch = torch.zeros(32, 16, 256)
    whole, micro = (
        pase.price(Model(), batch, devices=4, strategy=f"fsdp=4,micro={m}", executor="eager") for m in (8, 4)
    )
    elements = 6 * (2 * 256 * 1024 + 1024 + 256 + 2 * 256)
    assert whole.memory.optimizer == pytest.approx(8 * elements / 4, rel=0.01)
    assert micro.micro_batches == 2 and micro.memory.activations < whole.memory.activations
    staged = pase.price(Model(), batch, devices=4, strategy="pp=2,dp=2,micro=4", executor="eager")
    assert staged.pipeline is not None and staged.memory.optimizer == pytest.approx(
        8 * elements / 2, rel=0.01
    )


def test_what_the_model_marks_runs_again_unless_stated_otherwise():
    marked = SMALL.replace("remat=0", "remat=1")
    assert pase.price(marked, devices=8, strategy="fsdp=8").strategy.remat == "full"
    told = pase.price(marked, devices=8, strategy="fsdp=8,remat=none")
    assert told.step_s == pytest.approx(pase.price(SMALL, devices=8, strategy="fsdp=8").step_s)


def test_one_example_on_one_rank_is_read_as_two_of_half():
    """A dim of one is not a dim. One example takes half as long as two together, apart from work once per step."""
    two, one = (
        pase.price(
            SMALL.replace("batch=64", f"batch={b}"), devices=8, strategy="tp=8,sp,micro=1", executor="xla"
        )
        for b in (4, 2)
    )
    assert two.micro_batches == 4 and one.micro_batches == 2
    once = two.seconds["update"]
    assert two.step_s - once == pytest.approx(2 * (one.step_s - once), rel=0.02)
