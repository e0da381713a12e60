"""If pase itself fails while it lowers a step manually, the step still runs, and a warning asks for a report."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from bench.cases.plans import case_of
from pase.api import Plan
from pase.backends.jax.one_program import OneProgramPlan
from pase.backends.jax.spmd.call import MANUAL_RULES
from pase.backends.jax.spmd.values import LoweringFault, NotManual
from pase.errors import PaseError
from pase.local.types import LocalProgram
from pase.schedule.plan import Update

PARAMS = {"w": jnp.eye(16) + 0.1, "v": jnp.eye(16) * 2}
X = jax.random.normal(jax.random.key(0), (8, 16))
OPTIMIZER = optax.sgd(0.1)
ASKS = r"'sin' at .*test_faults\.py:\d+.*KeyError: 't99'"


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.sin(x @ p["w"]) @ p["v"]) ** 2)


WANTED, GRADS = jax.value_and_grad(loss)(PARAMS, X)


def refuses(error: BaseException) -> Any:
    def rule(*_: Any) -> Any:
        raise error

    return rule


@contextmanager
def planting(error: BaseException) -> Iterator[None]:
    """Gives the rule of sin a fault."""
    MANUAL_RULES.add("sin", refuses(error))
    try:
        yield
    finally:
        MANUAL_RULES.remove("sin")


@pytest.fixture
def planted() -> Iterator[None]:
    with planting(KeyError("t99")):
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = case_of(loss, PARAMS, X).plan("random1@2x4")
    assert made is not None
    return made


def test_the_step_runs_annotated_and_the_warning_names_the_line(planted: None, plan: Plan) -> None:
    step = plan.jax.train_step(OPTIMIZER, donate=False)
    with pytest.warns(UserWarning, match=ASKS + ".*please report.* left to XLA"):
        params, _, value = step(
            *(placed := plan.jax.device_put(PARAMS, X))[:1], OPTIMIZER.init(PARAMS), placed[1]
        )
    np.testing.assert_allclose(float(value), float(WANTED), rtol=1e-5)
    np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.1 * GRADS["w"], atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # later calls do not warn again
        step(placed[0], OPTIMIZER.init(PARAMS), placed[1])
    with pytest.raises(LoweringFault, match=ASKS) as raised:
        plan.jax.train_step(OPTIMIZER, lowering="manual")(placed[0], OPTIMIZER.init(PARAMS), placed[1])
    assert "lowering='annotated'" in raised.value.fix and "please report" in raised.value.fix
    assert isinstance(raised.value.__cause__, KeyError)


def test_value_and_grad_and_loss(planted: None, plan: Plan) -> None:
    with pytest.warns(UserWarning, match=ASKS):
        value, grads = plan.jax.value_and_grad()(PARAMS, X)
    np.testing.assert_allclose(float(value), float(WANTED), rtol=1e-5)
    np.testing.assert_allclose(grads["v"], GRADS["v"], atol=1e-5)
    with pytest.raises(LoweringFault, match=ASKS):
        plan.jax.loss(lowering="manual")(PARAMS, X)


@pytest.mark.parametrize("once", ["none", "all"])
def test_micro_batches(planted: None, once: str) -> None:
    plan = pase.compile(
        loss, PARAMS, X, devices=8, mesh="2x4", accumulate=2, once=once, baselines=False, remat="none"
    )
    said = ASKS + (".*, which sends in each micro-batch" if plan.once != "none" else "")
    with pytest.warns(UserWarning, match=said):
        value, grads = plan.jax.value_and_grad()(PARAMS, X)
    np.testing.assert_allclose(float(value), float(WANTED), rtol=1e-5)
    np.testing.assert_allclose(grads["v"], GRADS["v"], atol=1e-5)


def test_inference(planted: None) -> None:
    def model(p: Any, x: Any) -> Any:
        return jnp.sin(x @ p["w"])

    plan = pase.compile(model, PARAMS, X, devices=8, mesh="2x4", mode="inference", baselines=False)
    with pytest.warns(UserWarning, match=ASKS):
        made = plan.jax.apply(PARAMS, X)
    np.testing.assert_allclose(made, model(PARAMS, X), atol=1e-5)


def test_the_programs_of_a_generation(planted: None) -> None:
    def prefill(p: Any, x: Any) -> Any:
        h = jnp.sin(x @ p["w"])
        return jnp.argmax(h @ p["v"], -1), h

    def decode(p: Any, token: Any, h: Any) -> Any:
        return prefill(p, h + token[:, None])

    two = pase.Generation(prefill=prefill, decode=decode, tokens=2)
    plan = pase.compile(two, PARAMS, X, devices=8, mesh="8", baselines=False)
    with pytest.warns(UserWarning, match=ASKS):
        token, held = plan.jax.prefill(PARAMS, X)
    with pytest.warns(UserWarning, match=ASKS):
        after, _ = plan.jax.decode(PARAMS, token, held)
    np.testing.assert_array_equal(after, decode(PARAMS, *prefill(PARAMS, X))[0])


@pytest.mark.parametrize("where", ["rule", "program"])
def test_delayed_updates(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that applies its own gradients runs instead."""
    from tests.backends.jax.steps.test_delayed import scheduled

    plain = case_of(loss, PARAMS, X).plan("data_parallel")
    plan = scheduled(plain, 1, (Update(first=0, last=0, at=1),))
    held, x = plan.jax.device_put(PARAMS, X)
    with ExitStack() as faults, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if where == "rule":
            faults.enter_context(planting(KeyError("t99")))
        else:
            faults.callback(monkeypatch.undo)
            monkeypatch.setattr(OneProgramPlan, "program", property(refuses(KeyError("t99"))))
        params, _, _ = plan.jax.train_step(OPTIMIZER)(held, OPTIMIZER.init(held), x)
    assert any("KeyError: 't99'" in (s := str(w.message)) and "applies its own gradients" in s for w in said)
    np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.1 * GRADS["w"], atol=1e-5)


def test_a_fault_in_backward_knows_its_line(plan: Plan) -> None:
    @jax.custom_vjp
    def sin(x: Any) -> Any:
        return jnp.sin(x)

    sin.defvjp(lambda x: (sin(x), None), refuses(IndexError("7")))
    MANUAL_RULES.add("sin", lambda call, ins: [sin(*ins)])
    said = r"gradient of .*test_faults\.py:\d+ \(loss\).*IndexError: 7"
    try:
        with pytest.warns(UserWarning, match=said):
            value, _ = plan.jax.value_and_grad()(PARAMS, X)
    finally:
        MANUAL_RULES.remove("sin")
    np.testing.assert_allclose(float(value), float(WANTED), rtol=1e-5)


def test_a_fault_before_any_equation(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalProgram, "result", refuses(TypeError("before")))
    with pytest.warns(UserWarning, match="TypeError: before"):
        value, _ = plan.jax.value_and_grad()(PARAMS, X)
    np.testing.assert_allclose(float(value), float(WANTED), rtol=1e-5)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: of 8 GB")]
)
def test_what_is_no_fault_goes_on(plan: Plan, error: BaseException) -> None:
    with planting(error), pytest.raises(type(error)):
        plan.jax.value_and_grad()(PARAMS, X)


def test_an_error_of_the_annotated_step_names_its_equation(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pase.backends.jax.gspmd.evaluate", refuses(KeyError("t99")))
    with pytest.raises(KeyError) as raised:
        plan.jax.value_and_grad(lowering="annotated")(PARAMS, X)
    (note,) = (n for n in raised.value.__notes__ if "pase" in n)
    assert re.match(r"pase was at 'dot_general' at .*test_faults.py:\d+", note)


def test_errors_of_the_user_are_the_users(plan: Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PaseError, match=r"\(4, 16\)") as raised:
            plan.jax.value_and_grad()(PARAMS, X[:4])
        assert not isinstance(raised.value, NotManual)
