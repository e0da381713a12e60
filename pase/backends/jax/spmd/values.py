"""Values on one device, which a walk over a jaxpr passes from equation to equation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.versions import line_of_error
from pase.local.types import Layout, LocalTransfer
from pase.pytree import Tree

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
    """A program that cannot be lowered by hand. why: which equation cannot, and for what reason."""

    def __init__(self, why: str, more: str = "") -> None:
        super().__init__(f"{why}. {more}Use lowering='annotated', which leaves it to XLA")
        self.why = why

    @property
    def left(self) -> str:
        """What a warning says where XLA splits the program instead."""
        return f"{self.why}; so all of it is left to XLA, led by constraints"


_REPORT = "This is a fault of pase: please report it, with this message"


class LoweringFault(NotManual):
    """A defect of pase, met while lowering by hand. where: the equation and its line, or another part of the step.

    It is raised from the error itself, its ``__cause__``.
    """

    def __init__(self, where: str, error: Exception) -> None:
        said = str(error).strip().partition("\n")[0]
        why = f"lowering {where} by hand failed with {type(error).__name__}{said and ': '}{said}"
        super().__init__(why, f"{_REPORT}. ")

    @property
    def left(self) -> str:
        """What a warning says where XLA splits the program instead."""
        return f"{super().left}. {_REPORT}"


@contextmanager
def faults_at(where: Callable[[Exception], str]) -> Iterator[None]:
    """What fails inside becomes a ``LoweringFault``. Refusals, warnings made errors and lack of memory stay as they
    are.
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
    """Where an error was raised that no equation's lowering raised: in the backward pass of one, or outside of all."""
    line = line_of_error(error)
    return f"the gradient of what is at {line}" if line else "the step's arguments and results"


@dataclass(frozen=True, kw_only=True)
class DeviceValue:
    """A value on one device. tensor: its name in the traced graph, None for a number.

    layout: None if all devices hold the whole value, which does not depend on data. gradient_carrier: the array that
    receives its gradient, if the gradient has another layout.
    """

    array: Array
    tensor: str | None = None
    layout: Layout | None = None
    gradient_carrier: Array | None = None


@dataclass(kw_only=True)
class Cache:
    """What a walk knows in the body of one loop, branch or rematerialised region, or of the model.

    body: its path; None for bodies in which no messages are sent. arrived: number of a transfer -> its result so far.
    values: tensor -> what the body was given of it. begun: node -> a value that it reads, of the nodes so far.
    messages: those of the body, once a reader has asked for one.
    """

    body: str | None = None
    arrived: dict[int, Array] = field(default_factory=dict)
    values: dict[str, DeviceValue] = field(default_factory=dict)
    begun: dict[str, Array] = field(default_factory=dict)
    messages: BodyMessages | None = None


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Parameters in the form that their readers need, in a step that gathers them once, or whose gradients wait for
    later steps. One walk finds them; later walks are given them. Keys are numbers of transfers. Those of a loop are in
    a mapping under the loop's path, stacked over its turns.

    numbers: the transfers that bring them. given: None in the walk that finds them. wide: for each one found, the dtype
    in which its gradients are added, empty if it has none. barred: the construct that this walk is inside of, if
    nothing can be gathered outside of it. begins: three arrays of each are found: the parameter as it is read, what
    takes its gradient, and the parameter before it is moved there.
    """

    numbers: frozenset[int] = frozenset()
    given: Mapping[str, Tree] | None = None
    found: dict[str, Tree] = field(default_factory=dict)
    wide: dict[str, Tree] = field(default_factory=dict)
    barred: str = ""
    begins: bool = False

    def of(
        self,
        key: str,
        transfer: LocalTransfer,
        stored: str,
        make: Callable[[], Tree],
        value: DeviceValue,
    ) -> Tree:
        """The gathered parameter. stored: the dtype in which it is stored. make: gathers it. value: what it is gathered
        from."""
        if self.barred:
            raise PaseError(
                f"'{transfer.tensor}' is read in {self.barred}, out of which it cannot be gathered once a step: "
                f"compile with once='none'"
            )
        if self.given is not None:
            return self.given[key]
        if key not in self.found:
            takes = value.array if value.gradient_carrier is None else value.gradient_carrier
            self.found[key] = (make(), takes, value.array) if self.begins else make()
            self.wide[key] = "" if transfer.backward is None else stored
        return self.found[key][0] if self.begins else self.found[key]

    def iteration(self, given: Mapping[str, Tree]) -> Arrivals:
        """The arrivals of one turn of a loop. given: those of this turn, if arrivals are given."""
        given_here = None if self.given is None else given
        return replace(self, given=given_here, found={}, wide={})

    def stacked(self, loop: str) -> Mapping[str, Tree]:
        """The given arrivals of a loop, stacked over its turns."""
        return {} if self.given is None else self.given.get(loop, {})

    def leave(self, loop: str, iteration: Arrivals, found: Mapping[str, Tree]) -> None:
        """Store what was found in a loop. iteration: the arrivals of its last turn. found: the same, stacked."""
        if found:
            self.found[loop], self.wide[loop] = found, iteration.wide


def packed(values: Sequence[DeviceValue]) -> list[Tree]:
    """The values' arrays and shadows, as a pytree."""
    return [(h.array, h.gradient_carrier) for h in values]


def unpacked(values: Sequence[DeviceValue], arrays: Sequence[Tree]) -> list[DeviceValue]:
    """The values with these arrays."""
    return [replace(h, array=a, gradient_carrier=s) for h, (a, s) in zip(values, arrays, strict=True)]
