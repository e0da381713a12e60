"""Reads and writes the messages of a local program as lines of its text.

    message back network of 0.0[0+512] 3.0[0+1024]
    message there network after up of 5.0[512+512]

A chunk is TRANSFER.STAGE[FIRST BYTE+BYTES]. ``after``: the message does not start before that node has begun. If
gradients are applied in later steps, a line before the nodes gives the period and its updates, in training steps
(FIRST-LAST@APPLIED). A message then names its update and how many steps late it is sent, and a chunk of a transfer in a
loop names the iteration, TRANSFER@ITERATION:

    updates every 3 0-0@1 1-2@3
    message back network update 1 late 1 of 0@2.0[0+512]
"""

from __future__ import annotations

import re

from pase.ir.text import TextLine, word_text
from pase.local.types import LocalMessage, LocalProgram, MessageChunk, TransferDirection
from pase.schedule.plan import Update

__all__ = ["message_text", "read_message", "read_updates", "updates_text"]

_CHUNK = re.compile(r"\d{1,9}(?:@\d{1,9})?\.\d{1,9}\[\d{1,18}\+\d{1,18}\]")
_UPDATE = re.compile(r"\d{1,9}-\d{1,9}@\d{1,9}")
_COUNT = re.compile(r"\d{1,9}(?![\w.])", re.ASCII)


def updates_text(program: LocalProgram) -> str:
    """The line with the period and its updates."""
    each = " ".join(f"{u.first}-{u.last}@{u.at}" for u in program.updates)
    return f"updates every {program.period} {each}"


def read_updates(line: TextLine) -> tuple[int, tuple[Update, ...]]:
    """Reads (period, updates), after the line's first word. Raises PaseError with line and column if it cannot."""
    line.expect("every")
    period, updates = _count(line, "how many steps"), list[Update]()
    while not line.at_end():
        if (found := line.match(_UPDATE)) is None:
            line.fail(f"expected FIRST-LAST@APPLIED, found {line.next_shown()}")
        first, last, at = map(int, re.findall(r"\d+", found))
        updates.append(Update(first=first, last=last, at=at))
    return period, tuple(updates)


def message_text(m: LocalMessage) -> str:
    """The line of a message."""
    after = f" after {word_text(m.after)}" if m.after else ""
    when = f" update {m.update} late {m.late}" if m.update or m.late else ""
    return f"message {m.way} {word_text(m.link)}{after}{when} of {' '.join(map(_chunk, m.chunks))}"


def _chunk(p: MessageChunk) -> str:
    iteration = "" if p.iteration is None else f"@{p.iteration}"
    return f"{p.transfer}{iteration}.{p.stage}[{p.begin}+{p.nbytes}]"


def read_message(line: TextLine) -> LocalMessage:
    """Reads a message, after the line's first word. Raises PaseError with line and column if it cannot."""
    way, link, chunks, update, late = (
        line.choice(TransferDirection, "a direction"),
        line.word("a link"),
        [],
        0,
        0,
    )
    after = line.word("a node") if line.accept("after ") else ""
    if line.accept("update "):
        update = _count(line, "an update's number")
        line.expect("late")
        late = _count(line, "how many steps later")
    line.expect("of")
    while not line.at_end():
        if (found := line.match(_CHUNK)) is None:
            line.fail(f"expected TRANSFER.STAGE[FIRST+BYTES], found {line.next_shown()}")
        stage, begin, nbytes = map(int, re.findall(r"\d+", found[found.index(".") :]))
        transfer, _, iteration = found[: found.index(".")].partition("@")
        chunks.append(
            MessageChunk(
                transfer=int(transfer),
                stage=stage,
                begin=begin,
                nbytes=nbytes,
                iteration=int(iteration) if iteration else None,
            )
        )
    return LocalMessage(way=way, link=link, chunks=tuple(chunks), after=after, update=update, late=late)


def _count(line: TextLine, what: str) -> int:
    found = line.match(_COUNT)
    if found is None:
        line.fail(f"expected {what}, found {line.next_shown()}")
    return int(found)
