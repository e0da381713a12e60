"""PyTorch is changed while a model is traced, and only then."""

from __future__ import annotations

import pytest

from pase.frontends.torch.export.traceable import traceable

pytestmark = pytest.mark.torch


def test_inference_mode_only_stops_gradients_within() -> None:
    """PyTorch's own would give tensors that no graph records. Nested regions are left one by one."""
    import torch

    w = torch.ones(2, requires_grad=True)
    with traceable("step.py"):
        with torch.inference_mode():
            y = 2 * w
            with torch.inference_mode(False):
                assert torch.is_grad_enabled()
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() and not y.requires_grad and not y.is_inference()
        assert not w.data.requires_grad
    with torch.inference_mode():
        assert (2 * w).is_inference()


def test_a_checkpoint_runs_its_function_once_and_keeps_its_gradient() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    ran: list[None] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        ran.append(None)
        return x.square()

    for reentrant in (False, True):
        ran.clear()
        w = torch.full((2,), 3.0, requires_grad=True)
        with traceable("step.py"):
            y = checkpoint(block, w, use_reentrant=reentrant)
        y.sum().backward()
        assert len(ran) == 1 and w.grad is not None and w.grad.tolist() == [6, 6]
    with traceable("step.py"):  # as in PyTorch, a re-entrant block of operands without gradients has none
        assert not checkpoint(lambda x: w * x, torch.ones(2), use_reentrant=True).requires_grad
    ran.clear()
    checkpoint(block, w, use_reentrant=False).sum().backward()
    assert len(ran) == 2


def test_an_encoders_mask_is_applied_without_being_read() -> None:
    """PyTorch compares the mask with a causal one, which no trace can; the numbers are the same either way."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 4, 8)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder
            self.register_buffer("mask", mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, mask=self.mask)

    with traceable("step.py"):
        program = torch.export.export(Model(), (x,), strict=False)
    torch.testing.assert_close(program.module(check_guards=False)(x), encoder(x, mask=mask))
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Model(), (x,), strict=False)
