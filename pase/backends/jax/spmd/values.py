"""The values on one device that a walk over a jaxpr passes from equation to equation, and the errors of a walk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.versions import line_of_error
from pase.local.types import LocalTransfer
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax.spmd.messages import BodyMessages

__all__ = [
    "Arrivals",
    "Cache",
    "DeviceValue",
    "LoweringFault",
    "NotManual",
    "besides_equations",
    "faults_at",
    "packed",
    "unpacked",
]


class NotManual(PaseError):
    """A program cannot be lowered manually. why: where it cannot and for what reason, without the fix."""

    def __init__(
        self, what: str, *, where: str = "", fix: str = "use lowering='annotated', which leaves it to XLA"
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.why = f"{where}{where and ': '}{what}"

    @property
    def left(self) -> str:
        """The text of the warning if XLA's partitioner splits the program instead."""
        return f"{self.why}; the whole program is left to XLA"


_REPORT = "please report this fault of pase, with this message"


class LoweringFault(NotManual):
    """A defect of pase that was found while lowering manually.

    where: the equation and its line, or another part of the step. The original error is its ``__cause__``.
    """

    def __init__(self, where: str, error: Exception) -> None:
        said = str(error).strip().partition("\n")[0]
        why = f"lowering it manually failed with {type(error).__name__}{said and ': '}{said}"
        super().__init__(why, where=where, fix=f"use lowering='annotated', and {_REPORT}")

    @property
    def left(self) -> str:
        """The text of the warning if XLA's partitioner splits the program instead."""
        return f"{self.why} ({_REPORT}); the whole program is left to XLA"


@contextmanager
def faults_at(where: Callable[[Exception], str]) -> Iterator[None]:
    """Turns an exception inside the context into a ``LoweringFault``.

    Refusals, warnings that were turned into errors, and lack of memory pass unchanged. where: from the error, the part
    of the program that failed.
    """
    try:
        yield
    except (PaseError, Warning, MemoryError):
        raise
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            raise
        raise LoweringFault(where(e), e) from e


def besides_equations(error: Exception) -> str:
    """Where an error was raised that comes from no equation's lowering: in the backward pass of one, or outside of all
    equations."""
    line = line_of_error(error)
    return f"the gradient of the equation at {line}" if line else "the step's arguments and results"


@dataclass(frozen=True, kw_only=True)
class DeviceValue:
    """A value on one device.

    tensor: its name in the traced graph; None for a literal. layout: None if the value does not depend on data, so that
    all devices hold the whole of it. gradient_carrier: the array that receives the gradient, if the gradient has
    another layout than the value.
    """

    array: Array
    tensor: str | None = None
    layout: AxisLayout | None = None
    gradient_carrier: Array | None = None


@dataclass(kw_only=True)
class Cache:
    """The state of a walk in the body of one loop, branch or recomputed region, or of the model.

    body: its path; None for bodies in which no messages are sent. arrived: number of a transfer -> its result, for
    those that have been sent so far. values: tensor -> the value that was passed into the body. begun: node -> a value
    that it reads, for the nodes that have run so far. messages: the messages of the body, from the first use on.
    """

    body: str | None = None
    arrived: dict[int, Array] = field(default_factory=dict)
    values: dict[str, DeviceValue] = field(default_factory=dict)
    begun: dict[str, Array] = field(default_factory=dict)
    messages: BodyMessages | None = None


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Parameters in the form that their readers need, for a step that hoists gathers out of the loop over
    micro-batches, or whose gradients wait for later steps.

    One walk finds them, and later walks receive them. Keys are numbers of transfers. Arrivals of a loop are in a
    mapping under the loop's path, stacked over its iterations.

    numbers: the transfers that bring the parameters. given: the arrivals; None in the walk that finds them. found: the
    arrivals that this walk has found. wide: for each one found, the dtype in which its gradients are accumulated; "" if
    it has no gradient. barred: the surrounding construct out of which nothing can be hoisted; "" if there is none.
    optional: a parameter that is read where nothing can be hoisted is gathered there; otherwise it is refused.
    begins: find three arrays for each: the parameter as it is read, the array that receives its gradient, and the
    parameter before it is resharded for its reader.
    """

    numbers: frozenset[int] = frozenset()
    given: Mapping[str, Tree] | None = None
    found: dict[str, Tree] = field(default_factory=dict)
    wide: dict[str, Tree] = field(default_factory=dict)
    barred: str = ""
    optional: bool = False
    begins: bool = False

    def of(
        self,
        key: str,
        transfer: LocalTransfer,
        stored: str,
        make: Callable[[], Tree],
        value: DeviceValue,
    ) -> Tree:
        """The gathered parameter.

        stored: the dtype in which the parameter is stored. make: gathers it. value: the value that it is gathered from.
        """
        if self.barred and self.optional:
            return make()
        if self.barred:
            raise PaseError(
                f"the parameter '{transfer.tensor}' is read here, so it cannot be gathered once per step",
                where=self.barred,
                fix="compile with once='none'",
            )
        if self.given is not None:
            return self.given[key]
        if key not in self.found:
            takes = value.array if value.gradient_carrier is None else value.gradient_carrier
            self.found[key] = (make(), takes, value.array) if self.begins else make()
            self.wide[key] = "" if transfer.backward is None else stored
        return self.found[key][0] if self.begins else self.found[key]

    def iteration(self, given: Mapping[str, Tree]) -> Arrivals:
        """The arrivals of one iteration of a loop. given: those of this iteration, if this walk receives arrivals."""
        given_here = None if self.given is None else given
        return replace(self, given=given_here, found={}, wide={})

    def stacked(self, loop: str) -> Mapping[str, Tree]:
        """The given arrivals of a loop, stacked over its iterations."""
        return {} if self.given is None else self.given.get(loop, {})

    def leave(self, loop: str, iteration: Arrivals, found: Mapping[str, Tree]) -> None:
        """Store what was found in a loop.

        iteration: the arrivals of the loop's last iteration. found: the same, stacked over all iterations.
        """
        if found:
            self.found[loop], self.wide[loop] = found, iteration.wide


def packed(values: Sequence[DeviceValue]) -> list[Tree]:
    """The arrays and gradient carriers of the values, as a pytree."""
    return [(h.array, h.gradient_carrier) for h in values]


def unpacked(values: Sequence[DeviceValue], arrays: Sequence[Tree]) -> list[DeviceValue]:
    """The values with other arrays. arrays: as ``packed`` returns them."""
    return [replace(h, array=a, gradient_carrier=s) for h, (a, s) in zip(values, arrays, strict=True)]
