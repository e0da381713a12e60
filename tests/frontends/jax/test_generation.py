"""A generation as one function of two programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.jax.generation import Generation, programs_of

W = jnp.eye(4) * 2
PROMPT = jnp.ones((3, 4))


def prefill(w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.argmax(h, -1), {"h": h}


def decode(w: Any, token: Any, cache: Any) -> Any:
    return prefill(w, cache["h"] + token[:, None])


def test_the_state_is_what_prefill_returns() -> None:
    token, cache = Generation(prefill=prefill, decode=decode, tokens=5).state(W, [PROMPT])
    assert token.shape == (3,) and {k: v.shape for k, v in cache.items()} == {"h": (3, 4)}


def test_both_programs_run_on_what_is_given() -> None:
    given = jnp.array([1, 2, 3]), {"h": PROMPT}
    made, stepped = Generation(prefill=prefill, decode=decode, tokens=5)(W, PROMPT, *given)
    for got, wanted in ((made, prefill(W, PROMPT)), (stepped, decode(W, *given))):
        np.testing.assert_array_equal(got[1]["h"], wanted[1]["h"])


def test_decode_runs_once_a_token() -> None:
    both = Generation(prefill=prefill, decode=decode, tokens=5)
    jaxpr = jax.make_jaxpr(both)(W, PROMPT, *both.state(W, [PROMPT]))
    assert programs_of(both, jaxpr) == {"0.": 1, "1.": 5} and both.__name__ == "decode"
    assert programs_of(prefill, jaxpr) == {}


def test_programs_that_compute_nothing_are_refused() -> None:
    idle = Generation(prefill=prefill, decode=lambda w, token, cache: (token, cache), tokens=5)
    jaxpr = jax.make_jaxpr(lambda w, x: x @ w)(W, PROMPT)
    with pytest.raises(PaseError, match="computes nothing from its arguments"):
        programs_of(idle, jaxpr)


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "3"])
def test_tokens_is_a_positive_whole_number(tokens: Any) -> None:
    with pytest.raises(PaseError) as e:
        Generation(prefill=prefill, decode=decode, tokens=tokens)
    assert e.value.where == "tokens" and repr(tokens) in e.value.what


@pytest.mark.parametrize("made", [lambda w, x: x, lambda w, x: (x, x, x)])
def test_prefill_returns_a_token_and_a_cache(made: Any) -> None:
    with pytest.raises(PaseError, match="returns") as e:
        Generation(prefill=made, decode=decode, tokens=1).state(W, [PROMPT])
    assert e.value.where == "prefill" and "(token, cache)" in e.value.fix
