"""Sends the messages of a local program in JAX (``pase.local.messages``).

In each body (the model, a loop's iteration, a recomputed region), the gradients of all parameters meet in one function
with its own derivative, which sends them message by message. A message starts from the result of the message before it
on its link. So the compiler can neither reorder nor combine messages, but it can overlap them with compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.spmd.collectives import after, there_and_back
from pase.backends.jax.spmd.values import DeviceValue, NotManual
from pase.errors import PaseError
from pase.local.messages import Sending, messages_among
from pase.local.types import Extents, LocalMessage, LocalProgram, TransferPart

if TYPE_CHECKING:
    from jax import Array

__all__ = ["BodyMessages", "DeviceSending"]


@dataclass(kw_only=True)
class DeviceSending(Sending["Array"]):
    """The state of sending parts of some transfers from one device.

    begun: node -> a value that it reads. last: (link, how often its messages run) -> the result of its last message.
    """

    arrays: JaxArrays = field(init=False)
    begun: Mapping[str, Array] = field(default_factory=dict)
    last: dict[tuple[str, float], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrays = JaxArrays(self.program.mesh)

    def send(self) -> None:
        import jax

        message = self.messages[0]
        names = ", ".join(dict.fromkeys(self.program.transfers[p.transfer].tensor for p in message.chunks))
        try:
            with jax.named_scope(f"message {message.way} of {names}"):
                super().send()
        except NotManual:
            raise
        except PaseError as e:
            raise NotManual(f"it cannot be sent manually: {e}", where=f"the message with '{names}'") from None

    def run(self, message: LocalMessage, x: Array, collective: Callable[[Array], Array]) -> Array:
        """It waits until its link is free and the node that it waits for has begun.

        Messages that run differently often do not wait for each other: a message that waits for one that backward runs
        again would run again, too.
        """
        often = self.program.runs(message.chunks[0].transfer, message.way)
        queue = message.link, 0.0 if self.program.delayed else often
        for earlier in (self.last.get(queue), self.begun.get(message.after)):
            x = x if earlier is None else after(x, earlier)
        self.last[queue] = made = collective(x)
        return made


@dataclass(kw_only=True)
class BodyMessages:
    """The messages of one body.

    given: number of a transfer -> the value that it starts from, for all transfers that messages carry in this body.
    begun: node -> a value that it reads, for the nodes that have run so far.
    """

    program: LocalProgram
    given: Mapping[int, DeviceValue]
    begun: Mapping[str, Array]

    def arrived(self, transfer: int) -> Array:
        """The value of a transfer as it is read; messages take its gradient back."""
        value = self._there.finished((transfer, None))
        if transfer not in self._gradients:
            return value
        return there_and_back(value, self._gradients[transfer], lambda x: x, lambda g: g)

    @cached_property
    def _there(self) -> DeviceSending:
        import jax

        start: dict[TransferPart, Array] = {
            (k, None): jax.lax.stop_gradient(h.array) for k, h in self.given.items()
        }
        messages = messages_among(self.program, "there", self.given)
        return DeviceSending(
            program=self.program, way="there", values=start, messages=messages, begun=self.begun
        )

    @cached_property
    def _gradients(self) -> dict[int, Array]:
        """Transfer -> zeros that receive the gradient of its readers; their derivative sends the messages back."""
        import jax
        import jax.numpy as jnp

        trained = {
            k: h.array if h.gradient_carrier is None else h.gradient_carrier
            for k, h in self.given.items()
            if self.program.transfers[k].backward is not None
        }

        def zeros(xs: Mapping[int, Array]) -> dict[int, Array]:
            return {k: jnp.zeros(self._left(k), x.dtype) for k, x in xs.items()}

        def back(_: None, gradients: dict[int, Array]) -> tuple[dict[int, Array]]:
            sending = DeviceSending(
                program=self.program,
                way="back",
                values={(k, None): g for k, g in gradients.items()},
                messages=messages_among(self.program, "back", self.given),
            )
            return ({k: sending.finished((k, None)) for k in gradients},)

        joined = jax.custom_vjp(zeros)
        joined.defvjp(lambda xs: (zeros(xs), None), back)
        return joined(trained)  # type: ignore[no-any-return]

    def _left(self, transfer: int) -> Extents:
        """The local shape in which the gradient leaves its readers."""
        reader = self.program.readers[transfer][0]
        operand = next(o for o in reader.operands if o.transfer == transfer)
        return operand.gradient.local_shape(operand.shape, self.program.mesh)
