"""Tells apart the programs of one run: a training loop may execute several, and their ops have the same names.

XLA names ops by number within a program, so "fusion.3" of the gradient and of the update are different ops. While a
profile is read, the name of an op carries its program (``of_program``). In the end, ``told_apart`` gives plain names to
the ops of the main program, and adds the program to a name that another one has, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pase.replay.traces.hlo import HloFacts
from pase.replay.types import Timeline

__all__ = ["of_program", "program_of", "told_apart"]

_SEPARATOR = "\x1f"


def of_program(op: str, program: str) -> str:
    """Returns the name that an op has until ``told_apart``.

    >>> program_of(of_program("fusion.3", "jit_step(7)")), program_of("Memset")
    (('fusion.3', 'jit_step(7)'), ('Memset', ''))
    """
    # Long names are cut at their end, which must not be the program.
    return f"{program}{_SEPARATOR}{op}" if program else op


def program_of(name: str) -> tuple[str, str]:
    """Returns the op and the program of a name; the program is "" if the profiler recorded none."""
    program, found, op = name.partition(_SEPARATOR)
    return (op, program) if found else (name, "")


def told_apart(
    t: Timeline, facts: Mapping[str, HloFacts], main: str, kernels: Mapping[str, str]
) -> tuple[Timeline, HloFacts | None, dict[str, str]]:
    """Returns the timeline with one name for each op, and the facts and kernels of all programs by these names.

    facts: program → its facts, if the profile has them. main: the program whose ops keep their names, and whose data
    flow is known. kernels: name with the program → the kernel that runs the op.
    """
    users: dict[str, set[str]] = defaultdict(set)
    labels: dict[str, set[str]] = defaultdict(set)
    for op, program in map(program_of, t.names):
        users[op].add(program)
        labels[program.partition("(")[0]].add(program)
    for op in facts[main].ops if main in facts else ():
        users[op].add(main)

    def final(op: str, program: str) -> str:
        if program in ("", main) or len(users[op]) == 1:
            return op
        label = program.partition("(")[0]
        return f"{op} ({label if len(labels[label]) == 1 else program})"

    known = HloFacts(
        module=main, order=(), reads={}, kinds={}, nbytes={}, groups={}, asynchronous=frozenset(), ops={}
    )
    known = facts.get(main, known)
    kinds, nbytes, groups, ops = (dict(known.kinds), dict(known.nbytes), dict(known.groups), dict(known.ops))
    numbers: dict[str, int] = {}
    place = np.zeros(len(t.names), dtype=np.int32)
    for k, (op, program) in enumerate(map(program_of, t.names)):
        name = final(op, program)
        place[k] = numbers.setdefault(name, len(numbers))
        if program == main or program not in facts:
            continue
        own = facts[program]
        if op in own.ops:
            ops[name] = own.ops[op]
        if op in own.kinds:
            kinds[name], nbytes[name], groups[name] = own.kinds[op], own.nbytes[op], own.groups[op]
    t = replace(t, columns={**t.columns, "name": place[t["name"]]}, names=tuple(numbers))
    found = replace(known, kinds=kinds, nbytes=nbytes, groups=groups, ops=ops) if facts else None
    return t, found, {final(*program_of(n)): kernel for n, kernel in kernels.items()}
