"""Typed files: a tree of JSON or TOML becomes a form, or one clear error that says what is wrong and where.

A form is a ``msgspec.Struct`` or a frozen dataclass. Its annotations contain the limits
(``Annotated[int, Meta(ge=1)]``). The JSON Schema that is published for a file is derived from its form.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, inspect, structs

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.unreadable import unreadable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "AtLeastOne",
    "Count",
    "NotNegative",
    "Positive",
    "Share",
    "convert",
    "form_of",
    "json_schema",
    "parse_json",
    "read_json",
    "refuse_control",
    "to_builtins",
    "to_tree",
    "value_of",
]

T = TypeVar("T")
FormType = TypeVar("FormType", bound=Struct)
ValueType = TypeVar("ValueType", bound="DataclassInstance")
KeyPath = tuple["str | int", ...]

Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
"""Limits that several forms use."""

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]|(\[\.\.\.\])")
_SHOWN = 80
# For JSON and TOML; tabs and line breaks are allowed. An even number of backslashes in front escapes nothing.
_CONTROL = re.compile(
    r"(?<!\\)(?:\\\\)*\\(?:[bf]|u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])|U000000(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f]))"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]",
    re.IGNORECASE,
)


def read_json(path: str | Path, what: str, most_bytes: int) -> Any:
    """Reads the tree of a JSON file. what: the kind of file, for messages ("a layout").

    Raises PaseError if the file is missing, not text, not JSON, or larger than ``most_bytes``.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise PaseError(f"it has {size} bytes, but {what} has at most {most_bytes}", where=str(path))
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise unreadable(path, e, what) from e
    except UnicodeDecodeError as e:
        raise PaseError(f"it is not text, but {what} is JSON in UTF-8", where=str(path)) from e
    return parse_json(text, str(path), "write it again, if it was cut off")


def parse_json(text: str | bytes, where: str, hint: str = "") -> Any:
    """Parses an untrusted JSON text. hint: what to do if it is not JSON; the ``fix`` of the error.

    Raises PaseError, which names ``where`` and the place in it, if the text is not text, is not JSON, is nested too
    deep for Python, has a number too long for Python, or contains characters that would control a terminal when
    printed.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        refuse_control(text, where)
        return json.loads(text)
    except UnicodeDecodeError as e:
        raise PaseError(
            f"it is not JSON: not text at byte {e.start}; JSON is UTF-8", where=where, fix=hint
        ) from None
    except json.JSONDecodeError as e:
        raise PaseError(
            f"it is not JSON at line {e.lineno}, column {e.colno}: {e.msg}", where=where, fix=hint
        ) from None
    except RecursionError:
        raise PaseError("it is not readable JSON: its brackets are nested too deep", where=where) from None
    except ValueError as e:  # Python refuses integers of thousands of digits
        raise PaseError(f"it is not readable JSON: {str(e).partition(';')[0]}", where=where) from None


def refuse_control(text: str, where: str) -> None:
    """Raises PaseError if a JSON or TOML text contains, raw or escaped, a character that controls a terminal."""
    if "\\" not in text and text.isascii() and "\x7f" not in text:
        return  # the parsers themselves refuse other raw characters; files of gigabytes return here
    found = _CONTROL.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise PaseError(
            f"a control character ({found[0]!a}), which no name of a model may contain",
            where=f"{where}, line {line}",
            fix="remove it",
        )


def to_builtins(value: object) -> Any:
    """Turns a form into dicts, lists, tuples and Python's own numbers, which ``json.dumps`` accepts."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be written to a file")


def to_tree(value: object) -> Any:
    """Turns a form into the tree that JSON would give back, with tuples as lists."""
    return json.loads(json.dumps(to_builtins(value)))


def form_of(value: DataclassInstance, form: type[FormType], **given: object) -> FormType:
    """The form with the fields of a value, by name. given: fields that the value does not have, or has in other terms.

    A field that a file may lack (its default is UNSET) is left out if the value has the default of its class.
    """
    defaults = _defaults(type(value))
    for name, optional in _optional(form):
        if name not in given and name in defaults:
            content = getattr(value, name)
            if not (optional and content == defaults[name]):
                given[name] = dict(content) if isinstance(content, Mapping) else content
    return form(**given)


def value_of(form: Struct, cls: type[ValueType], **given: object) -> ValueType:
    """The value with the fields of a form, by name: the reverse of ``form_of``. A field that the file lacks has the
    default of the class."""
    for name in _defaults(cls).keys() & {*form.__struct_fields__} - given.keys():
        given[name] = getattr(form, name)
    return cls(**{name: content for name, content in given.items() if content is not UNSET})


@cache
def _defaults(cls: type[DataclassInstance]) -> dict[str, object]:
    """Field of a dataclass -> its default; MISSING if it has none."""
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(cls)
        if f.init
    }


@cache
def _optional(form: type[Struct]) -> tuple[tuple[str, bool], ...]:
    """The fields of a form, and for each whether a file may lack it."""
    return tuple((f.name, f.default is UNSET) for f in structs.fields(form))


def convert(tree: object, form: type[T], where: str, *, closed: bool = False) -> T:
    """Turns a tree into a form. Types are checked and nothing is guessed. PaseError names ``where`` and the place in
    it.

    closed: also refuse keys that the form does not have and numbers that are not finite, whatever nested forms allow.
    """
    if closed:
        for problem in _unknown_or_infinite(tree, list(_types_at(form, ())), ()):
            raise PaseError(problem, where=where)
    try:
        return msgspec.convert(tree, form, str_keys=True)
    except msgspec.ValidationError as e:
        raise PaseError(_explain(tree, form, str(e)), where=where) from e


def json_schema(form: type, title: str, *, closed: bool = False) -> JsonObject:
    """The JSON Schema of a form (draft 2020-12). closed: as in ``convert``."""
    made = msgspec.json.schema(form)
    definitions = made.pop("$defs", {})
    if closed:
        for definition in definitions.values():
            definition["additionalProperties"] = False
    name = made.pop("$ref", "").rpartition("/")[2]
    body = {k: v for k, v in definitions.pop(name, made).items() if k != "title"}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": title, **body, "$defs": definitions}


def _unknown_or_infinite(tree: object, types: list[inspect.Type], path: KeyPath) -> Iterator[str]:
    """Yields what a closed form refuses although its types would accept it. types: the types allowed at ``path``."""

    def below(step: str | int) -> list[inspect.Type]:
        return [t for outer in types for info in _inner(outer, step) for t in _unwrapped(info)]

    if isinstance(tree, float) and not math.isfinite(tree):
        yield f"at {_text(path)}: must be finite, got {tree}"
    elif isinstance(tree, Mapping):
        known = list(_fields(types))
        for key, value in tree.items():
            if known and key not in known:
                yield _unknown(known, path, key)
            yield from _unknown_or_infinite(value, below(key), (*path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _unknown_or_infinite(value, below(i), (*path, i))


def _unknown(known: list[str], path: KeyPath, key: str) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"at {_text((*path, key))}: is not known; {hint}{_text(path)} takes: {', '.join(known)}"


def _explain(tree: object, form: type, message: str) -> str:
    """msgspec's message, with the keys that lead to the place, the value there, and what is allowed there."""
    said, _, place = message.partition(" - at ")
    path: KeyPath = ()
    for field, index, some_key in _STEP.findall(place):
        path += (field,) if field else (int(index),) if index else (_culprit(tree, form, path, message),)
        assert field or index or some_key
    if found := re.fullmatch(r"Object missing required field `(.*)`", said):
        return f"at {_text((*path, found[1]))}: is missing"
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", said):
        return _unknown(list(_fields(_types_at(form, path))), path, found[1])
    if place.startswith("`key`"):
        keys = (
            k
            for t in _types_at(form, path)
            if isinstance(t, inspect.DictType)
            for k in _unwrapped(t.key_type)
        )
        return (
            f"at {_text(path)}: each key {_wanted(keys, said)}, got {_culprit(tree, form, path, message)!r}"
        )
    return f"at {_text(path)}: {_wanted(_types_at(form, path), said)}, got {_shown(_value_at(tree, path))}"


def _wanted(types: Iterable[inspect.Type], said: str) -> str:
    """msgspec's message in words. types: the types allowed at the place."""
    if said.startswith("Invalid enum value"):
        values = (str(v) for t in types if isinstance(t, inspect.LiteralType) for v in t.values)
        return f"must be one of {', '.join(values)}"
    if found := re.fullmatch(r"Expected `\w+` (of length )?(>=|>|<=|<) (\S+)", said):
        bound = f"{_BOUNDS[found[2]]} {float(found[3]):g}"
        entries = "entry" if found[3] == "1" else "entries"
        return f"must have {bound} {entries}" if found[1] else f"must be {bound}"
    if found := re.match(r"Expected `([\w |]+)`", said):
        return f"must be {' or '.join(_WORDS.get(t, t) for t in found[1].split(' | '))}"
    return said


def _culprit(tree: object, form: type, path: KeyPath, message: str) -> str:
    """The key of the mapping at ``path`` whose value is the first to cause this message, found by bisection."""
    items = list(_value_at(tree, path).items())
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            msgspec.convert(_replaced(tree, path, dict(items[:middle])), form, str_keys=True)
            low = middle
        except msgspec.ValidationError as e:
            low, high = (low, middle) if str(e) == message else (middle, high)
    return str(items[high - 1][0])


def _value_at(tree: Any, path: KeyPath) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _replaced(tree: Any, path: KeyPath, value: object) -> Any:
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return copy


_type_info = cache(inspect.type_info)


def _types_at(form: type, path: KeyPath) -> Iterator[inspect.Type]:
    """msgspec's descriptions of the types allowed at ``path``."""
    found = [_type_info(form)]
    for step in path:
        found = [t for outer in found for t in _inner(outer, step)]
    for info in found:
        yield from _unwrapped(info)


def _unwrapped(info: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(info, inspect.Metadata):
        yield from _unwrapped(info.type)
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _unwrapped(member)
    else:
        yield info


def _inner(info: inspect.Type, step: str | int) -> Iterator[inspect.Type]:
    for t in _unwrapped(info):
        if isinstance(t, inspect.StructType | inspect.DataclassType):
            yield from (f.type for f in t.fields if f.encode_name == step)
        elif isinstance(t, inspect.DictType):
            yield t.value_type
        elif isinstance(t, inspect.ListType | inspect.VarTupleType):
            yield t.item_type
        elif isinstance(t, inspect.TupleType):
            yield t.item_types[int(step)]


def _fields(types: Iterable[inspect.Type]) -> Iterator[str]:
    for t in types:
        if isinstance(t, inspect.StructType | inspect.DataclassType):
            yield from (f.encode_name for f in t.fields)


def _text(path: KeyPath) -> str:
    return "/".join(map(str, path)) or "the top level"


def _shown(value: object) -> str:
    text = f"{{{len(value)} entries}}" if isinstance(value, Mapping) and value else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
