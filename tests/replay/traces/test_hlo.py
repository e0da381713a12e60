"""Facts about a module's thunks from its HLO: order, data flow, and collectives' bytes and groups."""

from __future__ import annotations

from typing import Any

import pytest

from pase.replay.traces.hlo import HloFacts, read_hlo, with_updates
from tests.replay.traces.compiled import varint

TEXT = """\
HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%scattered (q: f32[8]) -> f32[4] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %rs = f32[4]{{0}} reduce-scatter(%q), replica_groups={groups}, dimensions={{0}}, to_apply=%add
}}

ENTRY %main (p: f32[8]) -> (f32[8], f32[4], f32[16]) {{
  %p = f32[8]{{0}} parameter(0)
  %begun = ((f32[8]{{0}}), f32[4]{{0}}) async-start(%p), calls=%scattered
  %beside = f32[8]{{0}} multiply(%p, %p)
  %ended = f32[4]{{0}} async-done(%begun), calls=%scattered
  %after = f32[8]{{0}} negate(%p)
  %all = f32[16]{{0}} all-gather(%after), replica_groups={groups}, dimensions={{0}}
  ROOT %out = (f32[8]{{0}}, f32[4]{{0}}, f32[16]{{0}}) tuple(%beside, %ended, %all)
}}
"""


@pytest.mark.parametrize("groups", ["{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "mesh['a'=2,'b'=2] {'a'}"])
def test_thunks_of_a_module(groups):
    hlo = pytest.importorskip("jaxlib._hlo")
    module = hlo.hlo_module_from_text(TEXT.format(groups=groups)).as_serialized_hlo_module_proto()
    facts = read_hlo(b"\x0a" + varint(len(module)) + module, "text")  # a HloProto: field 1 is the module
    assert facts.module == "step"
    assert facts.order == ("p", "rs", "beside", "ended", "after", "all", "out")
    # The done op launches nothing, and the op after it waits for it.
    assert facts.reads == {"rs": (), "beside": (), "after": ("rs",), "all": ("after",)}
    assert facts.nbytes == {"rs": 32, "all": 64}
    assert facts.groups == dict.fromkeys(("rs", "all"), ((0, 2), (1, 3)))
    assert facts.asynchronous == {"rs"}


def test_the_optimizer_in_a_program_of_its_own_is_the_optimizer() -> None:
    """Neither an evaluation nor a program that only changes inputs is one."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def facts_of(f: Any, *args: Any) -> HloFacts:
        compiled = jax.jit(f).lower(*args).compile()
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        return read_hlo(b"\x0a" + varint(len(module)) + module, "here")

    w, m, x = jnp.ones((16, 16)), jnp.ones((16, 16)), jnp.ones((8, 16))

    def loss(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w).sum()

    def momentum(w: Any, m: Any, g: Any) -> Any:
        return w - 0.1 * (0.9 * m + g), 0.9 * m + g

    programs = {
        "gradient": facts_of(jax.grad(loss), w, x),
        "update": facts_of(momentum, w, m, w),
        "evaluation": facts_of(loss, w, x),
        "inputs": facts_of(lambda x: 2 * x + 1, x),
    }
    updating = {
        n for n, p in with_updates(programs).items() if any(op.work == "optimizer" for op in p.ops.values())
    }
    assert updating == {"update"}
    assert "optimizer" not in {op.work for op in with_updates({"a": programs["update"]})["a"].ops.values()}
