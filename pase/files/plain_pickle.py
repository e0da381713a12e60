"""Reads a pickle that holds plain values only: numbers, text, bytes, lists, tuples and dicts.

Python's own reader can import and call anything that a pickle names. This one knows no instruction that does: it stops
at the first of them with an error. Everything that it makes is bounded by the size of the file. Instructions: Python's
Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from pase.errors import PaseError

__all__ = ["PlainValue", "plain_values"]

PlainValue = object
"""None, a bool, int, float, str or bytes, or a list, tuple or dict of them."""

_MARK = object()
_LONGEST = 255
"""Bytes of an integer."""
_FIXED: dict[int, tuple[int, Callable[[bytes], PlainValue]]] = {
    ord("J"): (4, lambda b: int.from_bytes(b, "little", signed=True)),
    ord("K"): (1, lambda b: b[0]),
    ord("M"): (2, lambda b: int.from_bytes(b, "little")),
    ord("G"): (8, lambda b: struct.unpack(">d", b)[0]),
    ord("N"): (0, lambda _: None),
    ord("]"): (0, lambda _: []),
    ord("}"): (0, lambda _: {}),
    ord(")"): (0, lambda _: ()),
    0x88: (0, lambda _: True),
    0x89: (0, lambda _: False),
}
"""Instruction → bytes of its argument, and the value that it pushes."""
_SIZED: dict[int, tuple[int, Callable[[bytes], PlainValue]]] = {
    0x8C: (1, lambda b: b.decode("utf-8", "surrogatepass")),
    ord("X"): (4, lambda b: b.decode("utf-8", "surrogatepass")),
    0x8D: (8, lambda b: b.decode("utf-8", "surrogatepass")),
    ord("C"): (1, bytes),
    ord("B"): (4, bytes),
    0x8E: (8, bytes),
    0x8A: (1, lambda b: int.from_bytes(b, "little", signed=True)),
    0x8B: (4, lambda b: int.from_bytes(b[: _LONGEST + 1], "little", signed=True)),
}
"""Instruction → bytes of the length before its argument, and the value that it pushes."""
_CODE = {
    ord(c): "names something to import or to call"
    for c in ("c", "i", "o", "R", "b", "\x81", "\x92", "\x93", "\x82", "\x83", "\x84", "P", "Q")
}


def plain_values(data: bytes, where: str) -> PlainValue:
    """Returns the value of a pickle of protocol 2 or later. where: the file, for errors.

    Raises PaseError if it holds anything else than plain values, or is damaged.
    """
    try:
        return _PickleReader(data, where).value()
    except (IndexError, struct.error, TypeError, ValueError, KeyError) as e:
        raise PaseError(f"it is a damaged pickle ({type(e).__name__}: {e})", where=where) from e


class _PickleReader:
    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def value(self) -> PlainValue:
        stack, data = self.stack, self.data
        while True:
            code = data[self.at]
            self.at += 1
            if code in _FIXED:
                n, make = _FIXED[code]
                stack.append(make(self._take(n)))
            elif code in _SIZED:
                n, make = _SIZED[code]
                stack.append(make(self._take(int.from_bytes(self._take(n), "little"))))
            elif code == 0x94:  # memoize
                self.memo[len(self.memo)] = stack[-1]
            elif code in (0x71, 0x72):  # put
                self.memo[int.from_bytes(self._take(1 if code == 0x71 else 4), "little")] = stack[-1]
            elif code in (0x68, 0x6A):  # get
                stack.append(self.memo[int.from_bytes(self._take(1 if code == 0x68 else 4), "little")])
            elif code == ord("("):
                stack.append(_MARK)
            elif code == ord("."):
                if len(stack) != 1 or stack[0] is _MARK:
                    raise ValueError(f"{len(stack)} values at its end")
                return stack[0]
            else:
                self._container(code)

    def _container(self, code: int) -> None:
        stack = self.stack
        if code == ord("u"):
            items = self._since_mark()
            self._dict(stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif code == ord("e"):
            items = self._since_mark()
            self._list(stack[-1]).extend(items)
        elif code == ord("a"):
            last = self._pop()
            self._list(stack[-1]).append(last)
        elif code == ord("s"):
            last, key = self._pop(), self._pop()
            self._dict(stack[-1])[_key(key)] = last
        elif code in (0x85, 0x86, 0x87):
            n = code - 0x84
            items = [self._pop() for _ in range(n)]
            stack.append(tuple(reversed(items)))
        elif code == ord("t"):
            stack.append(tuple(self._since_mark()))
        elif code == ord("l"):
            stack.append(self._since_mark())
        elif code == 0x80:
            self._take(1)
        elif code == 0x95:
            self._take(8)  # a frame is only a hint for reading
        elif code in _CODE:
            raise PaseError(
                f"its byte {self.at - 1} {_CODE[code]}, and only plain values are read",
                where=self.where,
                fix="give a file that you made yourself by a function that writes plain values "
                "(torch.cuda.memory._dump_snapshot)",
            )
        else:
            raise ValueError(f"instruction {code:#x} at byte {self.at - 1}")

    def _take(self, n: int) -> bytes:
        out = self.data[self.at : self.at + n]
        if len(out) != n:
            raise ValueError("it ends within a value")
        self.at += n
        return out

    def _pop(self) -> object:
        out = self.stack.pop()
        if out is _MARK:
            raise ValueError("a mark where a value must be")
        return out

    def _since_mark(self) -> list[object]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("there is no mark")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    @staticmethod
    def _dict(x: object) -> dict[object, object]:
        if not isinstance(x, dict):
            raise ValueError(f"items for a {type(x).__name__}")
        return x

    @staticmethod
    def _list(x: object) -> list[object]:
        if not isinstance(x, list):
            raise ValueError(f"elements for a {type(x).__name__}")
        return x


def _key(x: object) -> object:
    """A key of a dict. The hash of a tuple that holds itself many times over would take for ever."""
    if not isinstance(x, str | bytes | int | float | None):
        raise ValueError(f"a {type(x).__name__} as a key")
    return x
