"""The composer of PyTorch programs: each pattern makes a program that PyTorch runs; programs of some seeds agree."""

from __future__ import annotations

import pytest

from bench.composer.runner import ended
from bench.composer.spec import parse

pytestmark = pytest.mark.torch

FOUND = [
    # max() over all elements, whose parts nothing joined
    "12,4,8 moving_average.40580! | mean_square.0! @ default/eager/sgd",
    # a torch.autograd.Function called by a name of the program's own, whose backward was lost
    "8,4,16 views.45972 | mean_square.0! @ random23@2/eager/adam",
    # a batch norm in eval mode within a module in training mode, which was put into training mode
    "8,4,8 batch_norm.2090! | mean_square.0! @ ours@2x2/eager/adam",
    # randn_like of an activation
    "8,4,8 random_numbers.21! | mean_square.0! @ random1@2x2/eager/sgd",
    # fill_diagonal_, which becomes as_strided
    "8,4,8 | contrastive.45261! @ random1@2x2/eager/sgd",
    # a variance of a split dim, called with unbiased=False
    "8,4,16 mixed_types.12365 | mean_square.23662! @ random776@2x2/eager/adamw",
    # stages cut between regions that PyTorch computes again, of which one op of the graph has two
    "8,4,8 embedding.48042 repeated.50927 | embeddings.26478 @ staged/eager/adam",
    # x[torch.arange(b)[:, None], ids] += y
    "8,3,8 picked.42382! | mean_square.0! @ default/eager/sgd",
]
"""Programs that were wrong or refused."""


@pytest.mark.parametrize("line", FOUND)
def test_programs_that_failed_agree(line: str) -> None:
    from bench.composer.torch_runs import attempt

    row = attempt(parse(line))
    assert ended(row) == "agrees", row


def test_every_pattern_is_a_program() -> None:
    """Each layer, loss and transform of weights, called by PyTorch alone: its loss is finite and can be trained."""
    import torch

    from bench.composer.spec import ProgramPart, Spec
    from bench.composer.torch_maker import TORCH_LAYERS, TORCH_LOSSES, TORCH_TRANSFORMS, TorchMaker
    from bench.composer.torch_programs import program_of

    end = ProgramPart(pattern="mean_square", seed=0, plain=True)
    for of in (TORCH_LAYERS, TORCH_LOSSES):
        for name in of:
            part = ProgramPart(pattern=name, seed=3)
            layers, loss = ((part,), end) if of is TORCH_LAYERS else ((), part)
            program = program_of(Spec(shape=(8, 4, 8), parts=layers, loss=loss))
            value = program.module()(**program.batch)
            value.backward()
            assert value.isfinite() and value.dtype == torch.float64, name
    for name, transform in TORCH_TRANSFORMS.items():
        for shape in ((8, 8), (8,)):
            if transform.fits(shape):
                m = TorchMaker(part=end, name="w", shape=(8, 4, 8), batch={}, shared={})
                made = m.transformed(shape, 1.0, name).double()()
                assert tuple(made.shape) == shape and made.requires_grad, name
