"""The graph as text: people read it, tests compare it, and the parser reads it back exactly.

    graph mlp
    meta frontend jax
    tensor t1 float32[64, 256] parameter "layers.0.w" grad
    tensor t2 bfloat16[b, {2*s}] input "batch.x"
    outputs t9

    node layers.0.w:dot (b=b, s={2*s}, d=64 reduction, h=256)
      matmul dot_general t2[b s d], t1[d h] -> t3[b s h] | flops=2.0 eqn=3.1 times=12 scope=loop3. remat

There is one line per tensor, one per node, and below the node one per op. An op's line has its kind, its name, its
reads, ``->`` and its writes. Each read or write is a tensor and its access map. It may be preceded by ``sparse`` (few
elements are used), ``recompute`` (backward gathers it a second time) or ``gradient`` (its gradient is handed back).
Then come the fields that differ from the default: ``fn`` (the function, if neither kind nor name implies it), ``flops``
(per point), ``over`` (dims), ``times``, ``chance``, ``scope`` (one per enclosing loop), ``remat``, ``backward``,
``nodiff``, ``as``, ``precision``, ``literals`` (the operands that are numbers; ``_`` for one that is read, ``?`` if
they are not known), ``parameters``, ``eqn``, ``source``, ``call``. A size is an integer, a symbol, or an expression in
braces. A name with characters other than letters, digits and ``_.@:~/<>+*-`` is a JSON string. ``#`` starts a comment
line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, get_args

from pase.errors import PaseError
from pase.files.terminal import printable
from pase.ir.facts import read_facts
from pase.ir.functions import BY_KIND, FUNCTIONS, Function
from pase.ir.literals import Literals, Number, literals_text, read_literals
from pase.ir.parameters import Parameters, parameters_text, read_parameters
from pase.ir.places import NOWHERE, Place, Scope, SourceLine
from pase.ir.remarks import Remark, RemarkKind
from pase.ir.sizes import Size, parse_size
from pase.ir.types import (
    LEAF,
    Access,
    AccessMap,
    Dim,
    DimKind,
    FactorPrecision,
    Graph,
    IterationSpace,
    Node,
    Op,
    OpKind,
    Role,
    Tensor,
)
from pase.ir.verify import wrong_operands

__all__ = [
    "MAX_CHARACTERS",
    "MAX_LINE",
    "TextLine",
    "digest",
    "from_text",
    "op_text",
    "read_op",
    "to_text",
    "word_text",
]

_BARE = re.compile(r"[\w.@:~/<>+*\-]+", re.ASCII)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_INTEGER = re.compile(r"\d{1,18}(?![\w.])", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FLOAT = re.compile(r"\d+(?:\.\d*)?(?:e[+-]?\d{1,3})?", re.ASCII)
_LITERAL = re.compile(r"[\w.+\-]+", re.ASCII)
_PARAMETERS = re.compile(r"[a-z]+\([^()]*\)", re.ASCII)

MAX_CHARACTERS = 1 << 28
MAX_LINE = 1 << 18


def digest(graph: Graph, *, remarks: bool = False) -> str:
    """The sha256 of the graph's text, in hex. The text is without source lines, so that equal models agree wherever
    their files are, and without functions, literals, parameters, a step's loss and the bytes of constants, which are
    implied or were not in older texts, and without the precision of products, which changes a price but no layout.
    Flags have their first names in it. So digests in files of older versions stay valid.

    remarks: whether they are part of the text, as in the first versions.
    """
    graph = replace(graph, facts=replace(graph.facts, loss="", constant_bytes=0))
    text = to_text(graph, sources=False, functions=False)
    if remarks:
        head = to_text(replace(graph, tensors={}, nodes=(), outputs=()), sources=False, functions=False)
        told = word_text("\n".join(map(str, graph.remarks)))
        text = f"{head}meta remarks {told}\n{text.removeprefix(head)}"
    for mark, former in _FORMER_MARKS.items():
        text = re.sub(rf"(?<![^ (]){mark}(?= +[^\[ ]+\[)", former, text)
    return hashlib.sha256(text.encode()).hexdigest()


def to_text(graph: Graph, *, sources: bool = True, functions: bool = True) -> str:
    """Returns the graph's text, from which ``from_text`` reads an equal graph. ``sources`` and ``functions`` say
    whether the text contains these; ``functions`` includes literals and parameters."""
    out = [f"graph {word_text(graph.name)}"]
    out += [f"meta {word_text(k)} {word_text(v)}" for k, v in graph.meta.items()]
    if sources:
        out += [f"remark {r.kind} {json.dumps(r.what)} {json.dumps(r.where)}" for r in graph.remarks]
    for key, t in graph.tensors.items():
        if key != t.name:
            raise PaseError(f"tensor {t.name} is stored under the key '{key}'", where=f"graph '{graph.name}'")
        line = f"tensor {word_text(t.name)} {word_text(t.dtype)}[{', '.join(map(_size, t.shape))}] {t.role}"
        line += (f" {json.dumps(t.path)}" if t.path else "") + (" grad" if t.needs_grad else "")
        if functions and t.number is not None:
            line += f" number={literals_text((t.number,))[1:-1]}"
        out.append(line + (f" copy={word_text(t.copy_of)}" if t.copy_of else ""))
    if graph.outputs:
        out.append("outputs " + " ".join(map(word_text, graph.outputs)))
    for n in graph.nodes:
        dims = ", ".join(
            f"{d.name}={_size(d.size)}" + (f" {d.kind}" if d.kind != "parallel" else "") for d in n.space
        )
        out += ["", f"node {word_text(n.name)} ({dims})"]
        out += [f"  {op_text(op, sources=sources, functions=functions)}" for op in n.ops]
    return "\n".join(out) + "\n"


def word_text(text: str) -> str:
    """A name in the form that ``TextLine.word`` reads."""
    return text if _BARE.fullmatch(text) and text != "->" else json.dumps(text)


def _size(size: Size) -> str:
    text = str(size)
    return text if _INTEGER.fullmatch(text) or _SYMBOL.fullmatch(text) else f"{{{text}}}"


_MARKS = ("sparse", "recompute", "gradient")
"""Flags of an access, written in front of it."""

_FORMER_MARKS = {"recompute": "again"}
"""The names of flags in texts that older versions wrote. They are still read."""


def _access(a: Access) -> str:
    return "".join(f"{mark} " for mark in _MARKS if getattr(a, mark)) + f"{word_text(a.tensor)}[{a.map}]"


def _implied(kind: str, name: str) -> Function | None:
    """The function of an op whose line does not name it."""
    return BY_KIND.get(kind) or FUNCTIONS.get(name)


def op_text(op: Op, *, sources: bool = True, functions: bool = True) -> str:
    """An op as one line, which ``read_op`` reads."""
    reads, writes = (", ".join(map(_access, x)) for x in (op.reads, op.writes))
    more = []
    if functions and op.function != _implied(op.kind, op.name):
        if FUNCTIONS.get(op.function.name) != op.function:
            raise PaseError(
                f"its function '{op.function.name}' is not registered",
                where=f"op '{op.name}'",
                fix="add it to pase.ir.functions.FUNCTIONS",
            )
        more.append(f"fn={word_text(op.function.name)}")
    if op.flops_per_point != 1:
        more.append(f"flops={float(op.flops_per_point)!r}")
    if op.over is not None:
        more.append(f"over=({' '.join(op.over)})")
    if op.times != 1:
        more.append(f"times={_size(op.times)}")
    if op.chance != 1:
        more.append(f"chance={float(op.chance)!r}")
    more += [f"scope={word_text(str(s))}" for s in op.scope]
    more += ["remat"] * op.remat + ["backward"] * op.backward + ["nodiff"] * (not op.differentiable)
    if functions and op.literals != ():
        more.append(f"literals={literals_text(op.literals)}")
    if functions and op.parameters is not None:
        more.append(f"parameters={parameters_text(op.parameters)}")
    if functions and op.precision is not None:
        more.append(f"precision={op.precision}")
    if op.product_dtype is not None:
        more.append(f"as={word_text(op.product_dtype)}")
    if op.eqn:
        more.append(f"eqn={word_text(str(op.eqn))}")
    if op.source and sources:
        more.append(f"source={json.dumps(str(op.source))}")
    if op.source.call and sources:
        more.append(f"call={word_text(op.source.call)}")
    head = f"{op.kind} {word_text(op.name)} {reads}{' ' if reads else ''}->{' ' if writes else ''}{writes}"
    return head + (f" | {' '.join(more)}" if more else "")


def from_text(text: str) -> Graph:
    """Reads the text that ``to_text`` writes. A PaseError names the line and column of what cannot be read.

    Only the syntax is checked here; ``pase.ir.verify`` checks the graph.
    """
    if len(text) > MAX_CHARACTERS:
        raise PaseError(
            f"the text has {len(text)} characters; at most {MAX_CHARACTERS} are read", where="graph text"
        )
    name: str | None = None
    facts: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    outputs: tuple[str, ...] = ()
    remarks: tuple[Remark, ...] = ()
    nodes: list[tuple[str, IterationSpace, list[Op]]] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = TextLine(raw, number)
        if line.at_end() or raw.lstrip().startswith("#"):
            continue
        if len(raw) > MAX_LINE:
            line.fail(f"the line has {len(raw)} characters; at most {MAX_LINE} are read")
        if raw[0] == " ":
            if not nodes:
                line.fail("there is an op before the first node", 0)
            nodes[-1][2].append(read_op(line))
            line.end()
            continue
        start = line.position
        keyword = line.word("'graph', 'meta', 'remark', 'tensor', 'outputs' or 'node'")
        if name is None and keyword != "graph":
            line.fail(f"the first line must be 'graph NAME', not '{keyword}'", start)
        if keyword == "graph":
            if name is not None:
                line.fail("there is a second 'graph' line", start)
            name = line.word("the graph's name")
        elif keyword == "meta":
            at = line.position
            key = line.word("a key")
            facts[key] = line.word("a value")
            try:
                read_facts(facts)
            except PaseError as e:
                line.fail(str(e), at)
        elif keyword == "remark":
            kind: RemarkKind = "trip_count"
            if not line.accept("turns"):  # the word for it in texts of earlier versions
                kind = line.choice(RemarkKind, "a kind of remark")
            remarks += (Remark(kind, line.word("what it says"), line.word("where")),)
        elif keyword == "tensor":
            tensor = _read_tensor(line)
            if tensor.name in tensors:
                line.fail(f"tensor {tensor.name} is declared twice", start)
            tensors[tensor.name] = tensor
        elif keyword == "outputs":
            while not line.at_end():
                outputs = (*outputs, line.word("a tensor"))
        elif keyword == "node":
            nodes.append((line.word("the node's name"), _read_space(line), []))
        else:
            line.fail(f"'{keyword}' is none of 'graph', 'meta', 'remark', 'tensor', 'outputs', 'node'", start)
        line.end()
    if name is None:
        raise PaseError(
            "the text is empty", where="graph text line 1, column 1", fix="begin with the line 'graph NAME'"
        )
    built = tuple(Node(name=n, space=space, ops=tuple(ops)) for n, space, ops in nodes)
    return Graph(
        name=name, tensors=tensors, nodes=built, outputs=outputs, facts=read_facts(facts), remarks=remarks
    )


@dataclass
class TextLine:
    """A cursor over one line. of: what the text is, for error messages."""

    text: str
    number: int
    position: int = 0
    of: str = "graph text"

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        column = (self.position if at is None else at) + 1
        raise PaseError(printable(what), where=f"{self.of} line {self.number}, column {column}")

    def at_end(self) -> bool:
        while self.position < len(self.text) and self.text[self.position] in " \r":
            self.position += 1
        return self.position == len(self.text)

    def end(self) -> None:
        if not self.at_end():
            self.fail(f"expected the end of the line, found '{self.text[self.position :][:20]}'")

    def accept(self, literal: str) -> bool:
        if not self.at_end() and self.text.startswith(literal, self.position):
            self.position += len(literal)
            return True
        return False

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            self.fail(f"expected '{literal}', found {self.next_shown()}")

    def next_shown(self) -> str:
        return f"'{self.text[self.position :][:20]}'" if not self.at_end() else "the end of the line"

    def match(self, pattern: re.Pattern[str]) -> str | None:
        if self.at_end() or (m := pattern.match(self.text, self.position)) is None:
            return None
        self.position = m.end()
        return m[0]

    def word(self, what: str) -> str:
        """Reads a bare word or a JSON string."""
        self.at_end()
        start = self.position
        if (quoted := self.match(_STRING)) is not None:
            try:
                return str(json.loads(quoted))
            except ValueError:
                self.fail(f"{quoted} is not a JSON string", start)
        bare = self.match(_BARE)
        if bare is None or bare == "->":
            self.position = start
            self.fail(f"expected {what}, found {self.next_shown()}")
        return bare

    def choice(self, kind: object, what: str) -> Any:
        self.at_end()
        start = self.position
        word, known = self.word(what), get_args(kind)
        if word not in known:
            self.fail(f"'{word}' is not {what}; known are {', '.join(known)}", start)
        return word

    def size(self) -> Size:
        self.at_end()
        start = self.position
        if self.accept("{"):
            stop = self.text.find("}", self.position)
            if stop < 0:
                self.fail("'{' is not closed", start)
            body, self.position = self.text[self.position : stop], stop + 1
        else:
            found = self.match(_INTEGER) or self.match(_SYMBOL)
            if found is None:
                self.fail(
                    f"expected a size (an integer, a symbol or {{expression}}), found {self.next_shown()}"
                )
            body = found
        try:
            return parse_size(body)
        except PaseError as e:
            self.fail(str(e), start)

    def map(self) -> AccessMap:
        self.expect("[")
        start = self.position
        stop = self.text.find("]", start)
        if stop < 0:
            self.fail("'[' is not closed", start - 1)
        self.position = stop + 1
        try:
            return AccessMap.parse(self.text[start:stop])
        except PaseError as e:
            self.fail(str(e), start)

    def names(self) -> tuple[str, ...]:
        """Reads dim names in parentheses."""
        self.expect("(")
        out: list[str] = []
        while not self.accept(")"):
            name = self.match(_SYMBOL)
            if name is None:
                self.fail(f"expected a dim or ')', found {self.next_shown()}")
            out.append(name)
        return tuple(out)


def _read_tensor(line: TextLine) -> Tensor:
    name, dtype = line.word("the tensor's name"), line.word("a dtype")
    line.expect("[")
    shape: list[Size] = []
    while not line.accept("]"):
        if shape:
            line.expect(",")
        shape.append(line.size())
    role = line.choice(Role, "a role")
    line.at_end()
    path = line.word("a path") if line.text.startswith('"', line.position) else ""
    grad = line.accept("grad")
    number = _read_number_of(line) if line.accept("number=") else None
    copy_of = line.word("a tensor") if line.accept("copy=") else ""
    return Tensor(
        name=name,
        shape=tuple(shape),
        dtype=dtype,
        role=role,
        path=path,
        needs_grad=grad,
        number=number,
        copy_of=copy_of,
    )


def _read_number_of(line: TextLine) -> Number | None:
    at = line.position
    try:
        (number,) = read_literals([line.match(_LITERAL) or ""]) or (None,)
    except PaseError as e:
        line.fail(str(e), at)
    return number


def _read_space(line: TextLine) -> IterationSpace:
    line.expect("(")
    dims: list[Dim] = []
    while not line.accept(")"):
        if dims:
            line.expect(",")
        name = line.match(_SYMBOL)
        if name is None:
            line.fail(f"expected a dim, found {line.next_shown()}")
        line.expect("=")
        size = line.size()
        plain = line.at_end() or line.text[line.position] in ",)"
        dims.append(
            Dim(
                name=name,
                size=size,
                kind="parallel" if plain else line.choice(DimKind, "a dim's kind"),
            )
        )
    return IterationSpace(tuple(dims))


def read_op(line: TextLine) -> Op:
    """Reads the rest of a line as an op. A PaseError says where it cannot be read."""
    start = line.position
    kind, name = line.choice(OpKind, "an op's kind"), line.word("the op's name")
    reads = _read_accesses(line, lambda: line.accept("->"))
    writes = _read_accesses(line, lambda: line.at_end() or line.text[line.position] == "|")
    more = _read_more(line, kind) if line.accept("|") else {}
    function = more.pop("function", None) or _implied(kind, name)
    if function is None:
        line.fail(f"'{name}' is not a known function, so the line needs fn=", start)
    if "literals" not in more and wrong_operands(function, (), len(reads), kind == "elementwise"):
        more["literals"] = None  # a text of an earlier version, which has no literals
    return Op(kind=kind, name=name, function=function, reads=reads, writes=writes, **more)


def _read_accesses(line: TextLine, ended: Callable[[], bool]) -> tuple[Access, ...]:
    found: list[Access] = []
    while not ended():
        if found:
            line.expect(",")
        found.append(_read_access(line))
    return tuple(found)


def _read_more(line: TextLine, kind: OpKind) -> dict[str, Any]:
    """Reads what follows an op's accesses, as fields of ``Op``."""
    readers: dict[str, tuple[str, Callable[[], Any]]] = {
        "flops": ("flops_per_point", lambda: _read_number(line)),
        "chance": ("chance", lambda: _read_number(line)),
        "over": ("over", line.names),
        "times": ("times", line.size),
        "fn": ("function", lambda: _read_function(line)),
        "literals": ("literals", lambda: _read_literals(line)),
        "parameters": ("parameters", lambda: _read_parameters(line)),
        "as": ("product_dtype", lambda: line.word("a type")),
        "precision": ("precision", lambda: line.choice(FactorPrecision, "a precision")),
        "eqn": ("eqn", lambda: (Place if kind in LEAF else Place.parse)(line.word("a value"))),
        "source": ("source", lambda: SourceLine.parse(line.word("a value"))),
        "call": ("call", lambda: line.word("a name")),
        "scope": ("scope", lambda: _read_scope(line)),
    }
    marks = {"remat": ("remat", True), "backward": ("backward", True), "nodiff": ("differentiable", False)}
    more: dict[str, Any] = {}
    while not line.at_end():
        at = line.position
        key = line.match(_SYMBOL) or ""
        field, value = marks.get(key) or (readers[key][0] if key in readers else "", None)
        if field in more and key != "scope":
            line.fail(f"'{key}' occurs twice", at)
        if key in readers:
            line.expect("=")
            value = readers[key][1]()
            more[field] = (*more.get(field, ()), value) if key == "scope" else value
        elif field:
            more[field] = value
        else:
            line.fail(
                f"expected fn=, flops=, over=, times=, chance=, scope=, as=, precision=, literals=, parameters=, eqn=, "
                f"source=, call=, remat or nodiff; "
                f"found '{line.text[at:][:20]}'",
                at,
            )
    if call := more.pop("call", ""):
        more["source"] = replace(more.get("source", NOWHERE), call=call)
    return more


def _read_number(line: TextLine) -> float:
    found = line.match(_FLOAT)
    if found is None:
        line.fail(f"expected a number, found {line.next_shown()}")
    return float(found)


def _read_literals(line: TextLine) -> Literals:
    at = line.position
    if line.accept("?"):
        return None
    line.expect("(")
    words: list[str] = []
    while not line.accept(")"):
        word = line.match(_LITERAL)
        if word is None:
            line.fail(f"expected a number, '_' or ')', found {line.next_shown()}")
        words.append(word)
    try:
        return read_literals(words)
    except PaseError as e:
        line.fail(str(e), at)


def _read_parameters(line: TextLine) -> Parameters:
    at = line.position
    found = line.match(_PARAMETERS)
    try:
        return read_parameters(found or line.next_shown())
    except PaseError as e:
        line.fail(str(e), at)


def _read_function(line: TextLine) -> Function:
    at = line.position
    if (word := line.word("a function")) not in FUNCTIONS:
        line.fail(f"'{word}' is not a known function", at)
    return FUNCTIONS[word]


def _read_scope(line: TextLine) -> Scope:
    at = line.position
    try:
        return Scope.parse(line.word("a scope"))
    except PaseError as e:
        line.fail(str(e), at)


def _read_access(line: TextLine) -> Access:
    marks = {}
    for mark in _MARKS:
        line.at_end()
        words = f"{mark}|{_FORMER_MARKS[mark]}" if mark in _FORMER_MARKS else mark
        found = re.compile(rf"(?:{words})(?= +[^\[ ])").match(line.text, line.position)
        marks[mark] = found is not None
        if found is not None:
            line.position = found.end()
    return Access(line.word("a tensor"), line.map(), **marks)
