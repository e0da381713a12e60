"""A compiled HLO module, typed: computations, instructions, shapes and device groups; nothing about cost.

There is one reader, of XLA's own serialized form (HloProto). Text is parsed by XLA itself first, so that it needs
jaxlib. Only what counting collectives and following data needs is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from pase.errors import PaseError, needed
from pase.hlo.groups import Groups, groups_of, pairs_of
from pase.hlo.protos import parse

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["Computation", "Instruction", "Module", "Shape", "XlaProgram", "modules", "read"]

# Names of xla.PrimitiveType by number. (openxla/xla, xla/xla_data.proto)
_NAMES = (
    "none pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 "
    "f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer "
    "f6e3m2fn f6e2m3fn"
)
_TYPES = _NAMES.split()
_NO_DATA = ("none", "tuple", "opaque", "token")


class XlaProgram(Protocol):
    """``jax.jit(f).lower(*args).compile()``."""

    def runtime_executable(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The type of a value: an array's element type and extents, or the parts of a tuple."""

    dtype: str
    dims: tuple[int, ...] = ()
    parts: tuple[Shape, ...] = ()

    def arrays(self) -> Iterator[Shape]:
        """The arrays in it, in order."""
        if self.dtype != "tuple":
            yield self
        for part in self.parts:
            yield from part.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in it. Types of less than a byte are counted packed; tokens hold no data.

        >>> s4 = Shape(dtype="s4", dims=(3,))
        >>> s4.nbytes, Shape(dtype="tuple", parts=(Shape(dtype="bf16", dims=(3,)), s4)).nbytes
        (2, 8)
        """
        return sum(-(-math.prod(a.dims) * _bits(a.dtype) // 8) for a in self.arrays())


def _bits(dtype: str) -> int:
    if dtype in _NO_DATA:
        return 0
    found = re.match(r"[a-z]+(\d+)", dtype)  # f8e4m3fn has 8
    if dtype == "pred":
        return 8
    if found is None:
        raise PaseError(f"unknown HLO element type '{dtype}'; add it to pase/hlo/module.py")
    return int(found[1])


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One op. Operands, and what it waits for, are ids within its computation; ``called`` are computations' ids."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    waits_for: tuple[int, ...]
    called: tuple[int, ...]
    groups: Groups
    """Devices that a collective joins; none: all of them."""
    pairs: Groups
    """(source, target) of a permute."""
    index: int
    """Of a parameter: which it is. Of a get-tuple-element: which element."""
    constant: int | None
    """The value of a constant that is one whole number."""
    direction: str
    """Of a comparison: "LT", "LE", …"""
    in_place: bool
    """A permute of slices, into a buffer that is its second operand."""
    custom_call_target: str
    op_name: str
    """The framework's name for where it comes from ("jit(f)/dot_general"), or ""."""
    backend_config: str

    def noted(self, key: str) -> Any:
        """What the compiler's backend noted under a key, however deep in its notes; None where it did not."""
        if f'"{key}"' not in self.backend_config:
            return None
        try:
            return _found(json.loads(self.backend_config), key)
        except ValueError:  # a custom call's own words
            return None


def _found(notes: Any, key: str) -> Any:
    if isinstance(notes, dict):
        if key in notes:
            return notes[key]
        notes = list(notes.values())
    if isinstance(notes, list):
        return next((f for f in (_found(n, key) for n in notes) if f is not None), None)
    return None


@dataclass(frozen=True, kw_only=True)
class Computation:
    id: int
    name: str
    instructions: Mapping[int, Instruction]
    """By id, in the order in which they run where the module has a schedule."""
    root: Instruction

    def operands(self, i: Instruction) -> list[Instruction]:
        return [self.instructions[o] for o in i.operands]


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    computations: Mapping[int, Computation]
    entry: Computation
    text: Callable[[], str] | None = None
    """Prints it, where XLA has it in memory."""

    def called(self, i: Instruction) -> list[Computation]:
        """What an instruction calls: of a loop its body and its condition, of a conditional its branches."""
        return [self.computations[c] for c in i.called]

    @cached_property
    def devices(self) -> int:
        """Replicas × partitions. The serialized form does not hold them, the text's first line does."""
        if self.text is None:
            raise PaseError(f"HLO module '{self.name}' does not say for how many devices it is")
        header = self.text().partition("\n")[0]
        return math.prod(int(n) for n in re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header))


def modules(compiled: str | XlaProgram) -> list[Module]:
    """The modules of a compiled program, or of its text, in order.

    Raises PaseError where the text is not HLO (StableHLO of an uncompiled program, say) or XLA cannot parse it.
    """
    if isinstance(compiled, str):
        found = _parsed(compiled)
    else:
        found = compiled.runtime_executable().hlo_modules()
    return [
        _module(parse("HloModuleProto", m.as_serialized_hlo_module_proto(), m.name), m.name, m.to_string)
        for m in found
    ]


def _parsed(text: str) -> list[Message]:
    """XLA's own modules of HLO text."""
    parts = [p for p in re.split(r"^(?=HloModule )", text, flags=re.M) if p.startswith("HloModule ")]
    if not parts:
        mlir = "stablehlo" in text or "func.func" in text
        hint = " This looks like StableHLO: call .compile() first." if mlir else ""
        raise PaseError(
            f"expected compiled HLO text that starts with 'HloModule', got '{text[:60]!s}…'.{hint}"
        )
    _hlo = needed("jaxlib._hlo", "HLO text", "jax")  # no public module has XLA's parser

    try:
        return [_hlo.hlo_module_from_text(p) for p in parts]
    except Exception as e:  # XlaRuntimeError, whose module moves between versions
        raise PaseError(f"XLA cannot parse this HLO text; was it cut? {str(e)[:600]}") from e


def read(data: bytes, where: str) -> Module:
    """The module of a serialized HloProto. PaseError where it is not one, or has no entry computation."""
    return _module(parse("HloProto", data, where).hlo_module, where)


def _module(message: Message, where: str, text: Callable[[], str] | None = None) -> Module:
    scheduled = message.schedule.sequences
    found = {
        c.id: _computation(c, list(scheduled[c.id].instruction_ids) if c.id in scheduled else [], where)
        for c in message.computations
    }
    if message.entry_computation_id not in found:
        raise PaseError(f"{where}: the HLO module names no entry computation")
    for c in found.values():
        for i in c.instructions.values():
            if not found.keys() >= {*i.called}:
                raise PaseError(f"{where}: HLO op '{i.name}' calls what the module does not have")
    return Module(name=message.name, computations=found, entry=found[message.entry_computation_id], text=text)


def _computation(message: Message, order: list[int], where: str) -> Computation:
    found = {i.id: _instruction(i) for i in message.instructions}
    for i in found.values():
        if not found.keys() >= {*i.operands, *i.waits_for}:
            raise PaseError(f"{where}: HLO op '{i.name}' reads what its computation does not have")
    if not found.keys() >= {message.root_id, *order}:
        raise PaseError(f"{where}: HLO computation '{message.name}' lacks its root, or an op of its schedule")
    return Computation(
        id=message.id,
        name=message.name,
        instructions={i: found[i] for i in order or found},
        root=found[message.root_id],
    )


def _instruction(i: Message) -> Instruction:
    return Instruction(
        id=i.id,
        name=i.name,
        opcode=i.opcode,
        shape=_shape(i.shape),
        operands=tuple(i.operand_ids),
        waits_for=tuple(i.control_predecessor_ids),
        called=tuple(i.called_computation_ids),
        groups=groups_of(i),
        pairs=pairs_of(i),
        index=i.parameter_number if i.opcode == "parameter" else i.tuple_index,
        constant=_constant(i.literal) if i.opcode == "constant" else None,
        direction=i.comparison_direction,
        in_place=bool(i.dynamic_slice_sizes),
        custom_call_target=i.custom_call_target,
        op_name=i.metadata.op_name,
        backend_config=i.backend_config.decode(errors="replace"),
    )


def _shape(s: Message) -> Shape:
    known = s.element_type < len(_TYPES)
    return Shape(
        dtype=_TYPES[s.element_type] if known else f"#{s.element_type}",
        dims=tuple(s.dimensions),
        parts=tuple(map(_shape, s.tuple_shapes)),
    )


def _constant(literal: Message) -> int | None:
    whole = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
    return whole[0] if len(whole) == 1 else None
