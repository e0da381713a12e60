"""Typed view of a compiled HLO module: computations, instructions, shapes and device groups.

It reads XLA's serialized form (HloProto). HLO text is first parsed by XLA itself, which needs jaxlib. Only the fields
that are needed to count collectives and to follow data are read.
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

# Names of xla.PrimitiveType, in the order of their numbers. (openxla/xla, xla/xla_data.proto)
_NAMES = (
    "none pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 "
    "f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer "
    "f6e3m2fn f6e2m3fn"
)
_TYPES = _NAMES.split()
_NO_DATA = ("none", "tuple", "opaque", "token")


class XlaProgram(Protocol):
    """A compiled program, such as ``jax.jit(f).lower(*args).compile()``."""

    def runtime_executable(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The type of a value: an array's element type and dims, or the parts of a tuple."""

    dtype: str
    dims: tuple[int, ...] = ()
    parts: tuple[Shape, ...] = ()

    def arrays(self) -> Iterator[Shape]:
        """Yields the arrays it consists of, in order."""
        if self.dtype != "tuple":
            yield self
        for part in self.parts:
            yield from part.arrays()

    @property
    def nbytes(self) -> int:
        """The total bytes of its arrays. Sub-byte types are counted as packed; tokens have no data.

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
        raise PaseError(f"unknown HLO element type '{dtype}'", fix="add it to pase/hlo/module.py")
    return int(found[1])


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One op. ``operands`` and ``waits_for`` are instruction ids within its computation; ``called`` computation ids."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    waits_for: tuple[int, ...]
    called: tuple[int, ...]
    groups: Groups
    """Device groups of a collective; empty if it spans all devices."""
    pairs: Groups
    """(source, target) pairs of a permute."""
    index: int
    """The number of a parameter, or the element of a get-tuple-element."""
    constant: int | None
    """The value of a constant that is a single integer."""
    direction: str
    """The direction of a comparison: "LT", "LE", …"""
    in_place: bool
    """Whether this is a permute of slices that writes into its second operand."""
    custom_call_target: str
    op_name: str
    """The framework's name of the source op ("jit(f)/dot_general"), or ""."""
    backend_config: str
    source: str = ""
    """The user's line ("model.py:12") from which the op comes, or ""."""
    contracted: tuple[int, ...] = ()
    """The dims of a dot's first factor over which it sums."""
    out_features: tuple[int, int] = (0, 0)
    """The dims of a convolution's filter and output that count the output's features."""

    def noted(self, key: str) -> Any:
        """Returns the value of a key in the backend config, at any depth; None if the config does not have it."""
        if f'"{key}"' not in self.backend_config:
            return None
        try:
            return _found(json.loads(self.backend_config), key)
        except ValueError:  # a custom call's config need not be JSON
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
    """By id. If the module has a schedule, they are in the order in which they run."""
    root: Instruction

    def operands(self, i: Instruction) -> list[Instruction]:
        return [self.instructions[o] for o in i.operands]


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    computations: Mapping[int, Computation]
    entry: Computation
    text: Callable[[], str] | None = None
    """Returns the module's text, if XLA has the module in memory."""

    def called(self, i: Instruction) -> list[Computation]:
        """Returns the computations that an instruction calls: a loop's body and condition, a conditional's branches."""
        return [self.computations[c] for c in i.called]

    @cached_property
    def devices(self) -> int:
        """Replicas × partitions. The first line of the text has them; the serialized form does not."""
        if self.text is None:
            raise PaseError(
                "the module does not record its number of devices", where=f"HLO module '{self.name}'"
            )
        header = self.text().partition("\n")[0]
        return math.prod(int(n) for n in re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header))


def modules(compiled: str | XlaProgram) -> list[Module]:
    """Returns the modules of a compiled program or of its text, in order.

    Raises PaseError if the text is not HLO (for example StableHLO, before compilation) or XLA cannot parse it.
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
    """Parses HLO text into XLA's own module objects."""
    parts = [p for p in re.split(r"^(?=HloModule )", text, flags=re.M) if p.startswith("HloModule ")]
    if not parts:
        mlir = "stablehlo" in text or "func.func" in text
        hint = "this looks like StableHLO: call .compile() first" if mlir else ""
        raise PaseError(
            f"expected compiled HLO text that starts with 'HloModule', got '{text[:60]!s}…'",
            where="HLO text",
            fix=hint or "pass the text of .compile().as_text()",
        )
    _hlo = needed("jaxlib._hlo", "HLO text", "jax")  # no public module has XLA's parser

    try:
        return [_hlo.hlo_module_from_text(p) for p in parts]
    except Exception as e:  # XlaRuntimeError, whose module moves between versions
        raise PaseError(
            f"XLA cannot parse it: {str(e)[:600]}", where="HLO text", fix="check whether the text is complete"
        ) from e


def read(data: bytes, where: str) -> Module:
    """Reads a serialized HloProto. Raises PaseError if the bytes are not one, or it has no entry computation."""
    return _module(parse("HloProto", data, where).hlo_module, where)


def _module(message: Message, where: str, text: Callable[[], str] | None = None) -> Module:
    scheduled = message.schedule.sequences
    lines = _lines(message.stack_frame_index)
    found = {
        c.id: _computation(
            c, list(scheduled[c.id].instruction_ids) if c.id in scheduled else [], where, lines
        )
        for c in message.computations
    }
    if message.entry_computation_id not in found:
        raise PaseError("the HLO module names no entry computation", where=where)
    for c in found.values():
        for i in c.instructions.values():
            if not found.keys() >= {*i.called}:
                raise PaseError(
                    f"HLO op '{i.name}' calls a computation that is not in the module", where=where
                )
    return Module(name=message.name, computations=found, entry=found[message.entry_computation_id], text=text)


def _lines(index: Message) -> dict[int, str]:
    """Returns the source line of each stack frame. Numbers in the index count from 1."""
    out: dict[int, str] = {}
    for number, frame in enumerate(index.stack_frames, 1):
        if 0 < frame.file_location_id <= len(index.file_locations):
            place = index.file_locations[frame.file_location_id - 1]
            if 0 < place.file_name_id <= len(index.file_names):
                out[number] = f"{index.file_names[place.file_name_id - 1]}:{place.line}"
    return out


def _computation(message: Message, order: list[int], where: str, lines: Mapping[int, str]) -> Computation:
    found = {i.id: _instruction(i, lines) for i in message.instructions}
    for i in found.values():
        if not found.keys() >= {*i.operands, *i.waits_for}:
            raise PaseError(f"HLO op '{i.name}' reads an op that is not in its computation", where=where)
    if not found.keys() >= {message.root_id, *order}:
        raise PaseError(f"HLO computation '{message.name}' lacks its root or a scheduled op", where=where)
    return Computation(
        id=message.id,
        name=message.name,
        instructions={i: found[i] for i in order or found},
        root=found[message.root_id],
    )


def _instruction(i: Message, lines: Mapping[int, str]) -> Instruction:
    stated = f"{i.metadata.source_file}:{i.metadata.source_line}" if i.metadata.source_file else ""
    convolution = i.convolution_dimension_numbers
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
        source=stated or lines.get(i.metadata.stack_frame_id, ""),
        contracted=tuple(i.dot_dimension_numbers.lhs_contracting_dimensions),
        out_features=(convolution.kernel_output_feature_dimension, convolution.output_feature_dimension),
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
