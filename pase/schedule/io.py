"""Reads and writes problems and bucket plans as versioned JSON. The published schemas are made from these forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from pase.errors import PaseError
from pase.files.codec import AtLeastOne, Count, NotNegative, convert, form_of, json_schema, to_tree, value_of
from pase.files.json_values import Json, JsonObject
from pase.schedule.plan import BucketPlan, Message, Piece, Update, check_plan
from pase.schedule.types import (
    AxisGroup,
    BlockPhase,
    ComputeBlock,
    Link,
    ScheduleProblem,
    SendTime,
    Transfer,
    problem_from_times,
)

__all__ = [
    "PLAN_SCHEMA",
    "PROBLEM_SCHEMA",
    "links_from_json",
    "made_schema",
    "plan_from_json",
    "plan_to_json",
    "problem_from_json",
    "problem_to_json",
    "schema",
]

ProblemVersion = Literal["pase.schedule.problem/1"]
PlanVersion = Literal["pase.schedule.bucket_plan/1"]
PROBLEM_SCHEMA: ProblemVersion = "pase.schedule.problem/1"
PLAN_SCHEMA: PlanVersion = "pase.schedule.bucket_plan/1"

T = TypeVar("T")


class Closed(Struct, forbid_unknown_fields=True):
    """A form that refuses unknown keys. People also write these files, and a typing error must be reported."""


class CurveForm(Closed, kw_only=True, rename={"bytes_": "bytes"}):
    """Seconds of a message by its bytes: either alpha_s and beta_s_per_byte, or a table of bytes and seconds.

    tail_s_per_byte: seconds for each byte beyond the table.
    """

    alpha_s: NotNegative | UnsetType = UNSET
    beta_s_per_byte: NotNegative | UnsetType = UNSET
    bytes_: Annotated[tuple[NotNegative, ...], Meta(min_length=1)] | UnsetType = UNSET
    seconds: Annotated[tuple[NotNegative, ...], Meta(min_length=1)] | UnsetType = UNSET
    tail_s_per_byte: NotNegative | UnsetType = UNSET


class LinkForm(Closed, kw_only=True):
    """A link, which carries one message at a time.

    by_axes: other curves for groups of axes. axes: the groups of axes that the link carries.
    """

    name: str
    curve: CurveForm
    by_axes: dict[str, CurveForm] = {}
    axes: tuple[str, ...] | None = None


class BlockForm(Closed, kw_only=True):
    """A block of compute. after: the blocks that it waits for, if the problem is a dataflow."""

    name: str | UnsetType = UNSET
    phase: BlockPhase
    seconds: NotNegative
    after: tuple[Count, ...] | UnsetType = UNSET


class TransferForm(Closed, kw_only=True, rename={"nbytes": "bytes"}):
    """A tensor that is sent once per iteration, given by blocks (ready_after, needed_before) or by times (ready_s,
    next_use_s)."""

    name: str
    nbytes: AtLeastOne
    ready_after: Count | None = None
    needed_before: Count | None = None
    ready_s: NotNegative | UnsetType = UNSET
    next_use_s: NotNegative | UnsetType = UNSET
    lag: Literal[0, 1] = 1
    axes: str = ""
    kind: str = "all_reduce"
    dtype: str = "float32"
    follows: tuple[Count, ...] | UnsetType = UNSET


class ProblemForm(Closed, kw_only=True):
    """A communication scheduling problem: either blocks, or forward_s and backward_s with tensors given by times."""

    schema: ProblemVersion
    name: str
    source: str = ""
    dataflow: bool = False
    forward_s: NotNegative | UnsetType = UNSET
    backward_s: NotNegative | UnsetType = UNSET
    blocks: Annotated[tuple[BlockForm, ...], Meta(min_length=1)] | UnsetType = UNSET
    tensors: tuple[TransferForm, ...]
    links: Annotated[tuple[LinkForm, ...], Meta(min_length=1)]


class PieceForm(Closed, kw_only=True, rename={"nbytes": "bytes"}):
    """A contiguous range of a tensor's bytes."""

    tensor: str
    offset: Count
    nbytes: AtLeastOne


class MessageForm(Closed, kw_only=True, rename={"nbytes": "bytes"}):
    """Pieces that are sent in one collective."""

    link: str
    nbytes: AtLeastOne | UnsetType = UNSET
    update: Count = 0
    pieces: Annotated[tuple[PieceForm, ...], Meta(min_length=1)]
    hold_s: NotNegative | UnsetType = UNSET
    iteration: Count | UnsetType = UNSET
    phase: BlockPhase | UnsetType | None = UNSET
    start_s: float | UnsetType = UNSET


class UpdateForm(Closed, kw_only=True):
    """The gradients of iterations first to last, applied after iteration at."""

    first: int
    last: int
    at: int


class PlanForm(Closed, kw_only=True):
    """A bucket plan: messages in the order in which all ranks issue them.

    link_costs: the links that the plan was made for, as in a problem.
    """

    schema: PlanVersion
    problem: str
    policy: str
    dispatch: Literal["sequence", "priority"]
    credit_bytes: AtLeastOne = 1
    barrier: bool = False
    links: Annotated[tuple[str, ...], Meta(min_length=1)]
    period: AtLeastOne
    updates: Annotated[tuple[UpdateForm, ...], Meta(min_length=1)]
    messages: tuple[MessageForm, ...]
    detail: JsonObject = {}
    evaluation: JsonObject | UnsetType = UNSET
    link_costs: Annotated[tuple[LinkForm, ...], Meta(min_length=1)] | UnsetType = UNSET


_FORMS: Mapping[str, Callable[[], JsonObject]] = {
    "problem": lambda: json_schema(ProblemForm, f"{PROBLEM_SCHEMA}: what is to be sent, and when"),
    "bucket_plan": lambda: json_schema(PlanForm, f"{PLAN_SCHEMA}: in which messages it is sent"),
}


def made_schema(name: str) -> JsonObject:
    """Make the JSON Schema called "problem" or "bucket_plan" from its form. The committed file must be equal to it."""
    return _FORMS[name]()


@cache
def schema(name: str) -> JsonObject:
    """The published JSON Schema called "problem" or "bucket_plan"."""
    loaded: JsonObject = json.loads((Path(__file__).parent / "schemas" / f"{name}.schema.json").read_text())
    return loaded


def _read(data: Json, form: type[T], version: str, where: str) -> T:
    if not isinstance(data, dict):
        raise PaseError(
            f"expected a JSON object, got {type(data).__name__}", where=where, fix=f"write schema {version!r}"
        )
    if data.get("schema") != version:
        raise PaseError(
            f"schema is {data.get('schema')!r}, but this version of pase reads {version!r}",
            where=where,
            fix="use the version of pase that wrote it, or write it again",
        )
    return convert(data, form, where)


def _curve_form(c: SendTime) -> CurveForm:
    if len(c.bytes_) == 1 and c.bytes_[0] == 0:
        return CurveForm(alpha_s=c.seconds[0], beta_s_per_byte=c.tail_s_per_byte)
    return CurveForm(bytes_=c.bytes_, seconds=c.seconds, tail_s_per_byte=c.tail_s_per_byte)


def _curve(form: CurveForm) -> SendTime:
    line, table, tail = (
        (form.alpha_s, form.beta_s_per_byte),
        (form.bytes_, form.seconds),
        form.tail_s_per_byte,
    )
    if form.alpha_s is not UNSET and form.beta_s_per_byte is not UNSET and {*table, tail} == {UNSET}:
        return SendTime.alpha_beta(alpha_s=form.alpha_s, beta_s_per_byte=form.beta_s_per_byte)
    if form.bytes_ is UNSET or form.seconds is UNSET or {*line} != {UNSET}:
        raise PaseError(
            "the keys are not those of one form of curve",
            where="cost curve",
            fix="give either alpha_s and beta_s_per_byte, or bytes and seconds",
        )
    if tail is not UNSET:
        return SendTime(bytes_=form.bytes_, seconds=form.seconds, tail_s_per_byte=tail)
    if len(form.bytes_) != len(form.seconds):
        raise PaseError(
            f"it has {len(form.bytes_)} bytes but {len(form.seconds)} seconds",
            where="cost curve",
            fix="give as many seconds as bytes",
        )
    return SendTime.table(form.bytes_, form.seconds)


def _link_form(link: Link) -> JsonObject:
    """The link as a JSON tree, without the values that are defaults."""
    form = LinkForm(
        name=link.name,
        curve=_curve_form(link.curve),
        by_axes={str(k): _curve_form(c) for k, c in link.by_axes.items()},
        axes=None if link.axes is None else tuple(map(str, link.axes)),
    )
    tree: JsonObject = to_tree(form)
    return {k: v for k, v in tree.items() if v not in (None, {})}


def _link(form: LinkForm) -> Link:
    by_axes = {AxisGroup.parse(k): _curve(c) for k, c in form.by_axes.items()}
    axes = None if form.axes is None else tuple(map(AxisGroup.parse, form.axes))
    return Link(name=form.name, curve=_curve(form.curve), by_axes=by_axes, axes=axes)


def problem_to_json(p: ScheduleProblem) -> JsonObject:
    """The problem as a JSON object of schema "pase.schedule.problem/1"."""
    blocks = tuple(form_of(b, BlockForm) for b in p.blocks)
    tensors = tuple(form_of(t, TransferForm, axes=str(t.axes)) for t in p.tensors)
    form = form_of(p, ProblemForm, schema=PROBLEM_SCHEMA, blocks=blocks, tensors=tensors, links=())
    return {**to_tree(form), "links": [_link_form(link) for link in p.links]}


def problem_from_json(data: Json, *, where: str = "problem") -> ScheduleProblem:
    """Read a problem. where: the name of the file, for errors."""
    form = _read(data, ProblemForm, PROBLEM_SCHEMA, where)
    try:
        links = tuple(map(_link, form.links))
        if form.blocks is UNSET:
            return _from_times(form, links)
        if form.forward_s is not UNSET or form.backward_s is not UNSET:
            raise PaseError(
                "it has blocks and also forward_s or backward_s",
                where="problem",
                fix="give blocks, or forward_s and backward_s, but not both",
            )
        for i, t in enumerate(form.tensors):
            if t.ready_s is not UNSET or t.next_use_s is not UNSET:
                raise PaseError(
                    "the tensor gives times, but the problem gives blocks",
                    where=f"tensors/{i} '{t.name}'",
                    fix="use ready_after and needed_before, or replace blocks by forward_s and backward_s",
                )
        return value_of(
            form,
            ScheduleProblem,
            blocks=tuple(
                value_of(b, ComputeBlock, name=f"{b.phase} {i}" if b.name is UNSET else b.name)
                for i, b in enumerate(form.blocks)
            ),
            tensors=tuple(value_of(t, Transfer, axes=AxisGroup.parse(t.axes)) for t in form.tensors),
            links=links,
        )
    except PaseError as e:
        raise PaseError(e.what, where=f"{where}: {e.where}", fix=e.fix) from e


def _from_times(form: ProblemForm, links: tuple[Link, ...]) -> ScheduleProblem:
    if form.forward_s is UNSET or form.backward_s is UNSET:
        raise PaseError(
            "it has neither blocks nor forward_s and backward_s",
            where="problem",
            fix="give blocks, or forward_s and backward_s with tensors given by times",
        )
    rows = []
    for i, t in enumerate(form.tensors):
        if t.ready_s is UNSET or t.next_use_s is UNSET:
            raise PaseError(
                "the problem has no blocks, and the tensor gives no times",
                where=f"tensors/{i} '{t.name}'",
                fix="give ready_s and next_use_s",
            )
        rows.append((t.name, t.nbytes, t.ready_s, t.next_use_s))
    axes = {t.axes for t in form.tensors}
    if len(axes) > 1:
        raise PaseError(
            f"tensors that are given by times have different axes: {sorted(axes)}",
            where="tensors",
            fix="give all of them the same axes, or give blocks",
        )
    return problem_from_times(
        name=form.name,
        forward_s=form.forward_s,
        backward_s=form.backward_s,
        tensors=rows,
        links=links,
        axes=AxisGroup.parse(axes.pop() if axes else ""),
        source=form.source,
    )


def plan_to_json(
    problem: ScheduleProblem,
    plan: BucketPlan,
    *,
    evaluation: JsonObject | None = None,
    starts_s: Sequence[float] | np.ndarray | None = None,
    link_costs: bool = False,
) -> JsonObject:
    """The plan as a JSON object of schema "pase.schedule.bucket_plan/1". It has names instead of indices.

    evaluation: figures of the plan to store with it. starts_s: start of each message in seconds.
    link_costs: whether to store the links' cost curves, so that `links_from_json` can read them.
    """
    messages = tuple(
        form_of(
            m,
            MessageForm,
            link=problem.links[m.link].name,
            nbytes=m.nbytes,
            pieces=tuple(form_of(p, PieceForm, tensor=problem.tensors[p.tensor].name) for p in m.pieces),
            start_s=UNSET if starts_s is None else float(starts_s[i]),
        )
        for i, m in enumerate(plan.messages)
    )
    form = form_of(
        plan,
        PlanForm,
        schema=PLAN_SCHEMA,
        problem=problem.name,
        links=tuple(link.name for link in problem.links),
        updates=tuple(form_of(u, UpdateForm) for u in plan.updates),
        messages=messages,
        evaluation=UNSET if evaluation is None else evaluation,
    )
    costs = {"link_costs": [_link_form(link) for link in problem.links]} if link_costs else {}
    return {**to_tree(form), **costs}


def links_from_json(data: Json, *, where: str = "bucket plan") -> tuple[Link, ...]:
    """The links that a bucket plan was made for; empty if the plan does not store them."""
    form = _read(data, PlanForm, PLAN_SCHEMA, where)
    try:
        return () if form.link_costs is UNSET else tuple(map(_link, form.link_costs))
    except PaseError as e:
        raise PaseError(e.what, where=f"{where}: {e.where}", fix=e.fix) from e


def plan_from_json(data: Json, problem: ScheduleProblem, *, where: str = "bucket plan") -> BucketPlan:
    """Read a plan that was made for this problem.

    Raises PaseError if a name is missing from the problem or is not unique in it, or if the plan is not valid.
    """
    form = _read(data, PlanForm, PLAN_SCHEMA, where)
    links = {link.name: i for i, link in enumerate(problem.links)}
    tensors: dict[str, int] = {}
    for i, t in enumerate(problem.tensors):
        if t.name in tensors:
            raise PaseError(
                f"problem '{problem.name}' has two tensors named '{t.name}'",
                where=where,
                fix="give each tensor its own name",
            )
        tensors[t.name] = i
    for i, m in enumerate(form.messages):
        if m.link not in links:
            raise PaseError(
                f"problem '{problem.name}' has no link '{m.link}'",
                where=f"{where}, at messages/{i}",
                fix="use the problem that the plan was made for",
            )
        for p in m.pieces:
            if p.tensor not in tensors:
                raise PaseError(
                    f"problem '{problem.name}' has no tensor '{p.tensor}'",
                    where=f"{where}, at messages/{i}",
                    fix="use the problem that the plan was made for",
                )
    plan = value_of(
        form,
        BucketPlan,
        messages=tuple(_message(m, links[m.link], tensors) for m in form.messages),
        updates=tuple(value_of(u, Update) for u in form.updates),
    )
    try:
        check_plan(problem, plan)
    except PaseError as e:
        raise PaseError(e.what, where=f"{where}: {e.where}", fix=e.fix) from e
    return plan


def _message(form: MessageForm, link: int, tensors: Mapping[str, int]) -> Message:
    pieces = tuple(value_of(p, Piece, tensor=tensors[p.tensor]) for p in form.pieces)
    return value_of(form, Message, pieces=pieces, link=link)
