"""The positions of the encoder-decoder transformer, and its published size."""

from __future__ import annotations

import numpy as np
import pytest

from pase import zoo
from pase.zoo.seq2seq import positions
from tests.zoo.helpers import close


def test_sinusoids() -> None:
    table = positions(6, 8)
    for position in range(6):
        for i in range(4):
            angle = position / 10_000 ** (2 * i / 8)
            close(table[position, i], np.sin(angle))
            close(table[position, i + 4], np.cos(angle))


def test_transformer_at_the_papers_vocabulary() -> None:
    """Vaswani et al. 2017, table 3: 65 million for the base model with about 37,000 shared tokens."""
    assert zoo.get("transformer?vocab=37000").parameters == pytest.approx(65e6, rel=0.04)
