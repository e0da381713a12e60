"""Why PyTorch cannot export a model: what its code does, where, and what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

import pase
from pase.errors import PaseError
from pase.frontends import registry
from tests.frontends.torch.bodies import linear

pytestmark = pytest.mark.torch


def test_a_module_named_by_a_keyword_is_refused():
    """PyTorch writes self.layers.in when it runs its decompositions, and cannot parse it."""
    import torch

    from pase.frontends.torch.reasons import why

    parts = torch.nn.ModuleList([torch.nn.ModuleDict({"in": torch.nn.ModuleList([linear()])})])
    e = why("Model", SyntaxError("invalid syntax"), [], parts)
    assert e.where == "Model" and "keyword" in e.what and "0.in" in e.what and "name" in e.fix


def test_every_place_that_depends_on_the_data_is_listed(capfd: pytest.CaptureFixture[str]) -> None:
    """With real tensors. The model, its batch, the random state and the log levels stay unchanged, and PyTorch prints
    no graphs."""
    import logging

    import torch

    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.seen.add_(1)
            y = self.inner(x.mul_(2)) + torch.rand_like(x)
            if y.sum() > 0:
                y = y * 2
            first = int(x.abs().sum().item())
            return y[:first].sum()

    module, batch, state = Asks(), torch.ones(4, 4), torch.get_rng_state()
    with pytest.raises(PaseError) as told:
        registry.trace(module, batch)
    assert batch.eq(1).all() and torch.get_rng_state().equal(state)
    assert "def forward(" not in capfd.readouterr().err
    text = told.value.what
    assert "TORCH_LOGS" not in text
    assert "cannot export Asks" in text and "There are 2 such places:" in text
    assert "test_reasons.py:" in told.value.where and "torch.where" in told.value.fix
    assert "test_reasons.py" in text and "if y.sum() > 0:" in text and "int(x.abs().sum().item())" in text
    assert (
        float(module.seen) == 0.0 and logging.getLogger("torch.export._draft_export").level == logging.NOTSET
    )
    with torch.device("meta"), pytest.raises(PaseError, match=r"cannot export Asks.* torch.where"):
        registry.trace(Asks(), torch.ones(4, 4))


def test_why_a_cumulative_average_is_not_read() -> None:
    import torch

    norm = torch.nn.BatchNorm1d(4, momentum=None)
    with pytest.raises(PaseError, match="momentum=None divides by the number of batches") as e:
        registry.trace(norm, torch.ones(8, 4), loss=lambda norm, x: norm(x).square().mean())
    assert "test_reasons.py" in e.value.where and "0.1" in e.value.fix


def test_why_ctc_loss_is_not_read() -> None:
    import torch

    def loss(m: Any, x: Any) -> Any:
        found = m(x).log_softmax(-1)[:, None].expand(16, 4, 8)
        long, few = torch.full((4,), 16), torch.full((4,), 3)
        return torch.nn.functional.ctc_loss(found, torch.ones(4, 3, dtype=torch.int64), long, few)

    with pytest.raises(PaseError, match="ctc_loss") as e:
        pase.compile(torch.nn.Linear(16, 8), torch.randn(16, 16), devices=2, loss=loss)
    assert "scan" in e.value.fix


def test_an_op_that_fails_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch logs the stack of an op that fails on fake tensors, in front of our error."""
    import torch

    with pytest.raises(PaseError, match="same reduction dim"):
        registry.trace(torch.nn.Linear(8, 8), torch.ones(4, 8), lambda m, x: (m(x) @ torch.ones(4, 4)).mean())
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err and "fake_tensor" not in err


def test_code_of_pytorch_itself_that_reads_values_is_named() -> None:
    """Its author cannot change it, so the fix is another than for the user's own code."""
    import torch

    def adaptive(module: Any, x: Any) -> Any:
        return rest(module(x), torch.zeros(4, dtype=torch.long)).loss

    def checked(module: Any, x: Any) -> Any:
        return torch.distributions.Normal(module(x), 1.0, validate_args=True).log_prob(x).mean()

    rest = torch.nn.AdaptiveLogSoftmaxWithLoss(4, 40, [10])
    for loss, place, fix in (
        (adaptive, "nn/modules/adaptive.py", "tensor operations"),
        (checked, "distributions/normal.py", "validate_args"),
        (lambda module, x: module(x).sum() if torch.equal(x, x + 1) else module(x).mean(), "", "torch.where"),
    ):
        with pytest.raises(PaseError) as told:
            registry.trace(torch.nn.Linear(4, 4), torch.randn(4, 4), loss=loss)
        assert place in told.value.what and fix in told.value.fix
        assert "test_reasons.py" in told.value.where


@pytest.mark.parametrize(
    ("read", "word", "fix"),
    [
        (lambda y: y * y.abs().max().item(), "value", "detach"),
        (lambda y: y * y[0].tolist()[0], "value", "detach"),
        (lambda y: y * float(y.mean() if y.mean() else 0.0), "value", "torch.where"),
        (lambda y: y * y.detach().numpy().mean(), "NumPy", "PyTorch's functions"),
        (lambda y: y[y[:, 0].nonzero()[:, 0]], "depends on the data", "torch.where"),
        (lambda y: y * y.unique().sum(), "depends on the data", "torch.where"),
    ],
)
@pytest.mark.parametrize("unknown", ["error", "replicate"])
def test_code_that_reads_values_is_told_what_to_do(read: Any, word: str, fix: str, unknown: Any) -> None:
    """Its author can write no rule for it, and it cannot be left whole either."""
    import torch

    with pytest.raises(PaseError) as told:
        registry.trace(
            torch.nn.Linear(4, 4), torch.ones(4, 4), lambda m, x: read(m(x)).sum(), unknown=unknown
        )
    assert word in told.value.what and fix in told.value.fix and "rule" not in told.value.fix
    assert "test_reasons.py" in told.value.where
