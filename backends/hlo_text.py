"""Compiled HLO text as computations, instructions and device groups; nothing about cost.

The text is what ``jax.jit(f).lower(*args).compile().as_text()`` returns. Only what counting
collectives needs is read: names, types, opcodes, operands and attributes.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from pase.errors import PaseError

__all__ = [
    "Computation",
    "Instruction",
    "Module",
    "parse_groups",
    "parse_modules",
    "parse_pairs",
    "type_bytes",
]

Groups = tuple[tuple[int, ...], ...]

# Bits per element. Types that hold no data (token, opaque) count nothing.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16, "s1": 1, "u1": 1}

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=\s]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation. ``attributes`` is the text after the operands' closing bracket."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    literal: str
    """The text between the operand brackets: the value of a constant, the number of a parameter."""
    attributes: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """The text of one attribute up to its end (brackets balanced), or None.

        >>> i = Instruction(name="a", opcode="while", type="f32[]", operands=(), literal="", root=False,
        ...                 attributes=", condition=%c, body=%b, x={{0,1},{2,3}}, y=1")
        >>> i.attribute("body"), i.attribute("x"), i.attribute("z")
        ('%b', '{{0,1},{2,3}}', None)
        """
        found = re.search(rf"(?:^|[,\s]){name}=", self.attributes)
        if found is None:
            return None
        start = found.end()
        return self.attributes[start : _end(self.attributes, start)].strip()


@dataclass(frozen=True, kw_only=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        for instruction in self.instructions.values():
            if instruction.root:
                return instruction
        return list(self.instructions.values())[-1]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One HLO module. ``devices`` = replicas × partitions."""

    name: str
    devices: int
    computations: dict[str, Computation]
    entry: str


def _end(text: str, start: int) -> int:
    """Index of the first comma or the end of text outside of any bracket and quotation, from start."""
    depth = 0
    quoted = False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        if c in "([{":
            depth += 1
        elif c in ")]}":
            if depth == 0:
                return i
            depth -= 1
        elif c == "," and depth == 0:
            return i
    return len(text)


def _closing(text: str, start: int) -> int:
    """Index just past the bracket that closes the one at ``start``; quotations are skipped."""
    depth = 0
    quoted = False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i + 1
    raise PaseError(f"this is no HLO that I can read: brackets do not close in '{text[:120]}'")


def split(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets.

    >>> split("f32[8,4]{1,0} %a, %b")
    ['f32[8,4]{1,0} %a', '%b']
    """
    parts, at = [], 0
    while at < len(text):
        end = _end(text, at)
        parts.append(text[at:end].strip())
        at = end + 1
    return [p for p in parts if p]


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    rest = line[found.end() :]
    type_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode_end = rest.index("(", type_end)
    operands_end = _closing(rest, opcode_end)
    opcode = rest[type_end:opcode_end].strip()
    inside = rest[opcode_end + 1 : operands_end - 1]
    # "%x", or with its type before it: the name is the last word.
    named = opcode not in ("constant", "parameter")
    operands = tuple(p.split()[-1].lstrip("%") for p in split(_COMMENT.sub("", inside))) if named else ()
    return Instruction(
        name=found[2],
        opcode=opcode,
        type=rest[:type_end],
        operands=operands,
        literal=inside,
        attributes=rest[operands_end:],
        root=found[1] is not None,
    )


def parse_modules(text: str) -> list[Module]:
    """The modules of compiled HLO text, in order.

    Raises PaseError where the text is not HLO (StableHLO of an uncompiled program, say).
    """
    if not re.search(r"^HloModule ", text, re.M):
        hint = (
            " This looks like StableHLO: call .compile() first."
            if "stablehlo" in text or "func.func" in text
            else ""
        )
        raise PaseError(
            f"expected compiled HLO text that starts with 'HloModule', got '{text[:60]!s}…'.{hint}"
        )
    return [
        _module(part)
        for part in re.split(r"^(?=HloModule )", text, flags=re.M)
        if part.startswith("HloModule")
    ]


def _module(text: str) -> Module:
    header, _, body = text.partition("\n")
    sizes = [re.search(rf"\b{key}=(\d+)", header) for key in ("replica_count", "num_partitions")]
    computations: dict[str, Computation] = {}
    entry = ""
    name = ""
    instructions: dict[str, Instruction] = {}
    for line in body.splitlines():
        if not name:
            found = _HEADER.match(line) if line.endswith("{") else None
            if found is not None:
                name, instructions = found[2], {}
                entry = name if found[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name=name, instructions=instructions)
            name = ""
        else:
            instruction = _instruction(line)
            if instruction is not None:
                instructions[instruction.name] = instruction
    if not computations or not entry:
        raise PaseError(f"no entry computation in the HLO module '{header[:80]}'; was the text cut?")
    return Module(
        name=header.split()[1].rstrip(","),
        devices=math.prod(int(s[1]) for s in sizes if s),
        computations=computations,
        entry=entry,
    )


def type_bytes(type_text: str) -> int:
    """Bytes of an HLO type, a tuple's parts summed. Sub-byte types are counted packed.

    >>> [type_bytes(t) for t in ("f32[8,4]{1,0:T(8,128)}", "(bf16[3]{0}, /*index=1*/s32[])", "s4[3]")]
    [128, 10, 2]
    """
    total = 0
    for dtype, dims in _ARRAY.findall(_COMMENT.sub("", type_text)):
        elements = math.prod(int(d.strip().lstrip("<=")) for d in dims.split(",") if d.strip())
        total += -(-elements * _bits(dtype) // 8)
    return total


def dtypes(type_text: str) -> tuple[str, ...]:
    """The element types in an HLO type, each once, in order.

    >>> dtypes("(bf16[3]{0}, f32[], bf16[2])")
    ('bf16', 'f32')
    """
    return tuple(dict.fromkeys(dtype for dtype, _ in _ARRAY.findall(_COMMENT.sub("", type_text))))


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[suf](\d+)", dtype)
    if found is None:
        raise PaseError(f"unknown HLO element type '{dtype}'; add its width to pase/backends/hlo_text.py")
    return int(found[1])


def parse_groups(text: str, devices: int) -> Groups:
    """Replica groups in any of their three textual forms; ``{}`` is one group of all devices.

    >>> parse_groups("{{0,1},{2,3}}", 4)
    ((0, 1), (2, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    """
    text = text.strip()
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("["):
        return _tuples(_iota(text))
    if not re.fullmatch(r"\{[\d,{}\s]*\}", text):
        raise PaseError(f"replica groups in a form that I do not know: '{text[:120]}'")
    found = tuple(tuple(int(i) for i in g.split(",")) for g in re.findall(r"\{([\d,\s]+)\}", text))
    return found or (tuple(range(devices)),)


def parse_pairs(text: str) -> Groups:
    """``{{0,1},{1,0}}``: the (source, target) pairs of a collective-permute."""
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text))


def _ints(text: str) -> list[int]:
    return [int(i) for i in text.split(",") if i.strip()]


def _iota(text: str) -> np.ndarray:
    """``[shape]<=[dims]T(perm)``: count up over dims, transpose, reshape (dims and perm may be absent)."""
    found = re.fullmatch(r"\[([\d,\s]+)\](?:<=\[([\d,\s]+)\])?(?:T\(([\d,\s]+)\))?", text.strip())
    if found is None:
        raise PaseError(f"a device list in a form that I do not know: '{text[:120]}'")
    shape = _ints(found[1])
    ids = np.arange(math.prod(shape)).reshape(_ints(found[2]) if found[2] else shape)
    if found[3]:
        ids = ids.transpose(_ints(found[3]))
    return ids.reshape(shape) if found[2] else ids


def _mesh_groups(text: str) -> Groups:
    """``mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y','x':(2)2}``: groups along the named axes.

    ``'x':(p)s`` is a part of axis x: x is seen as p × s × rest, and the part is the middle.
    """
    found = re.fullmatch(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*)\))?\s*\{([^}]*)\}", text)
    if found is None:
        raise PaseError(f"replica groups over a mesh in a form that I do not know: '{text[:120]}'")
    named = [
        (name.strip(" '\""), int(size)) for name, size in (a.rsplit("=", 1) for a in found[1].split(",") if a)
    ]
    axes = {name: i for i, (name, _) in enumerate(named)}
    sizes = [size for _, size in named]
    listed = found[2]
    if listed is None:
        ids = np.arange(math.prod(sizes))
    elif listed.lstrip().startswith("["):
        ids = _iota(listed).reshape(-1)
    else:
        ids = np.array(_ints(listed.strip("{} ")))
    # Split every axis that is used in parts into all of its parts, so that a part is a dim of its own.
    used: list[tuple[int, int, int]] = []
    for ref in split(found[3]):
        name, _, part = ref.partition(":")
        axis = axes[name.strip(" '\"")]
        sub = re.fullmatch(r"\((\d+)\)(\d+)", part)
        used.append((axis, int(sub[1]), int(sub[2])) if sub else (axis, 1, sizes[axis]))
    dims: list[int] = []
    place: dict[tuple[int, int], list[int]] = {}
    for axis, size in enumerate(sizes):
        cuts = sorted({1, size, *(c for a, pre, s in used if a == axis for c in (pre, pre * s))})
        for before, after in itertools.pairwise(cuts):
            place.setdefault((axis, before), []).append(len(dims))
            dims.append(after // before)
    grid = ids.reshape(dims)
    walked = [
        d
        for axis, pre, s in used
        for (a, b), ds in place.items()
        if a == axis and pre <= b < pre * s
        for d in ds
    ]
    others = [d for d in range(len(dims)) if d not in walked]
    ways = math.prod(dims[d] for d in walked)
    return _tuples(grid.transpose([*others, *walked]).reshape(-1, ways))


def _tuples(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)
