"""One rank's program of a step as a ``torch.fx.GraphModule``.

The walk over the exported graph (``pase.backends.torch.spmd.interpreter``) runs once on fake tensors, and what it calls
is recorded (``spmd/record.py``) and tidied (``spmd/tidy.py``), parts that backward keeps are copied
(``spmd/parts.py``), its constants are computed (``spmd/folded.py``), parameters are gathered ahead of their use
(``spmd/gathers.py``), and those that backward gathers again are freed (``spmd/freed.py``). Every step then runs the
recorded program. Loops are unrolled in it. A program with branches that depend on data is not recorded: its steps walk
the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.folded import folded
from pase.backends.torch.spmd.freed import freed_after_reading
from pase.backends.torch.spmd.gathers import gathered_ahead
from pase.backends.torch.spmd.interpreter import Body, RankWalk
from pase.backends.torch.spmd.parts import SavedTensors
from pase.backends.torch.spmd.record import Recording
from pase.backends.torch.spmd.tidy import tidied
from pase.frontends.common.values import Value

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

__all__ = ["RecordedProgram", "RecordedPrograms", "can_record", "recorded"]


def can_record(walk: RankWalk) -> bool:
    """Whether the program of a walk can be recorded. Branches are taken by values that only a step has."""
    return not any(s.kind == "branch" for op in walk.program.ops for s in op.op.scope)


@dataclass(frozen=True, kw_only=True)
class RecordedProgram:
    """A recorded program.

    seeded: whether its first argument is the seed of the step.
    """

    module: GraphModule
    seeded: bool

    def __call__(self, body: Body) -> Sequence[Tensor]:
        """Run it on the inputs in a body, which must have the form of the body that it was recorded with."""
        seeds = [body.seed] if self.seeded else []
        made: Sequence[Tensor] = self.module(*seeds, *_arrays(body))
        return made


@dataclass(kw_only=True)
class RecordedPrograms:
    """The recorded programs of a walk, by what they were recorded for. They are recorded when they are first run."""

    walk: RankWalk
    made: dict[object, RecordedProgram] = field(default_factory=dict)

    def run(self, body: Body, finish: Callable[[Body], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run the walk's program. finish: computes the results from the body after the walk."""
        import torch

        watched = torch.is_grad_enabled()
        key = (watched, tuple(x.requires_grad and watched for x in _arrays(body)))
        if key not in self.made:
            self.made[key] = recorded(self.walk, body, finish)
        return self.made[key](body)


def _arrays(body: Body) -> list[Tensor]:
    """The inputs of a walk, in the order in which its program takes them."""
    values = body.values.values()
    return [
        *(v.array for v in values),
        *(v.gradient_carrier for v in values if v.gradient_carrier is not None),
        *body.kept.received.values(),
        *(x for n, x in body.kept.made.items() if n not in body.kept.received),
        *body.constants.buffers.values(),
    ]


def _names(walk: RankWalk) -> dict[str, str]:
    """Tensor -> its name in the program: a parameter's or a buffer's path in the module, or the name of an input."""
    program, found = walk.traced.program, walk.traced.scope.values
    paths = {**program.parameters, **program.buffers}
    leaves = ((n, found.get(n)) for n in walk.traced.scope.nodes if n.op == "placeholder")
    return {
        v.tensor.name: paths.get(n.name, n.name)
        for n, v in leaves
        if isinstance(v, Value) and v.tensor is not None
    }


def recorded(walk: RankWalk, body: Body, finish: Callable[[Body], Sequence[Tensor]]) -> RecordedProgram:
    """Record the program of a walk. body: its inputs, of which only shapes, strides and dtypes matter."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import Graph
    from torch.utils._python_dispatch import _disable_current_modes

    constants = body.constants
    into = Recording(graph=Graph(), base=body.seed, device=constants.device)
    watched = torch.is_grad_enabled()
    _ = walk.known_masks  # computed before, because a recording has no real tensors
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):

        def fake(name: str, x: Tensor) -> Tensor:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            made.requires_grad_(x.requires_grad and watched)
            name = re.sub(r"\W", "_", name)
            into.enter(name if name.isidentifier() else f"module_{name}", made)
            return made

        names = _names(walk)
        values = {t: replace(v, array=fake(names.get(t, t), v.array)) for t, v in body.values.items()}
        for t, v in values.items():
            if v.gradient_carrier is not None:
                carrier = fake(f"gradient_of_{names.get(t, t)}", v.gradient_carrier)
                values[t] = replace(v, gradient_carrier=carrier)
        received = {n: fake(f"received_{n}", x) for n, x in body.kept.received.items()}
        kept = {n: fake(f"received_{n}", x) for n, x in body.kept.made.items() if n not in body.kept.received}
        buffers = {n: fake(n, x) for n, x in constants.buffers.items()}
        mine = Body(
            constants=replace(constants, buffers=buffers, made={}),
            kept=type(body.kept)(watched=watched),
            seed=body.seed,
            values=values,
        )
        mine.kept.receive(received)
        mine.kept.made.update(kept)
        saved = SavedTensors()
        with into.running(), saved.noted(), walk.gathered_again.giving(None):
            walk.run(mine)
            into.returned(*finish(mine))
        tidied(into.graph, hooks=walk.only is None)
        saved.copy_parts(into.graph)
        into.held = folded(into.graph, into.held)
        if walk.only is None:
            gathered_ahead(into.graph, walk.program, walk.groups, walk.gathers)
            freed_after_reading(into.graph)
        for node in into.graph.nodes:
            node.meta.pop("val", None)
    return RecordedProgram(module=into.module("RecordedProgram"), seeded=into.seed is not None)
