"""Explains to a model's author why PyTorch cannot export it: what the code does, where, and what to do."""

from __future__ import annotations

import contextlib
import copy
import keyword
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.pytree import Tree

if TYPE_CHECKING:
    from torch.export._draft_export import FailureReport
    from torch.nn import Module

__all__ = ["lines_kept", "of_pytorch", "real_places", "why"]

_ASKS = (
    "its Python code asks for the value of a tensor (.item(), if tensor:, a loop over one), which does not exist "
    "before the model runs: use torch.where, or a size that is known beforehand"
)
_REASONS = {
    "GuardOnDataDependentSymNode": _ASKS,
    "DynamicOutputShapeException": "the size of a tensor depends on the data (nonzero, a mask as an index): use "
    "torch.where, or a fixed capacity",
    "DataDependentOutputException": "it asks for the value of a tensor (.item(), .tolist(), bool(tensor)), which does "
    "not exist before the model runs",
    "UnsupportedOperatorException": "it calls an op that has no shape rule: give your custom op one by "
    "torch.library.register_fake",
}
"""PyTorch's exceptions -> what they mean for the one who wrote the model."""
_PACKED = (
    "how many sequences of a packed batch are left at a step depends on the data: pass the padded sequences themselves "
    "(batch_first=True), and leave what is behind their ends out of the loss (ignore_index, torch.where)"
)
_CTC = (
    "ctc_loss makes a table whose size depends on the lengths of its targets, and cannot be exported: compute it "
    "outside of the step, or write its recursion as a loop (scan) over a table of fixed size"
)
_MOST_BYTES = 1 << 30
"""Of a larger model no copy is run to find all places."""
_MOST_PLACES = 8


def of_pytorch(file: str) -> bool:
    """Is it a file of PyTorch's own, or code that PyTorch made?"""
    import torch

    return file.startswith((str(Path(torch.__file__).parent), "<"))


@contextlib.contextmanager
def lines_kept(step_file: str) -> Iterator[None]:
    """While a step is traced, its nodes have the lines of all functions that it calls; PyTorch keeps those of methods
    named forward. step_file: where the step is defined that calls the user's module."""
    import torch.fx.proxy

    tracer = torch.fx.proxy.TracerBase
    usual = tracer._filter_traceback_frames
    here = str(Path(__file__).parent)

    def of_the_step(self: object, frames: traceback.StackSummary) -> traceback.StackSummary:
        steps = [i for i, f in enumerate(frames) if f.filename == step_file and f.name in ("forward", "loss")]
        own = [f for f in frames[steps[-1] + 1 :] if not f.filename.startswith(here)] if steps else []
        return traceback.StackSummary.from_list(
            f for f in own if f.name == "forward" or not of_pytorch(f.filename)
        )

    tracer._filter_traceback_frames = of_the_step  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        tracer._filter_traceback_frames = usual  # type: ignore[method-assign]


def why(name: str, e: Exception, places: Sequence[str], module: Module) -> str:
    """What PyTorch says, in a few words, with the line of the user's code where it is known. places: all of them."""
    keywords = [path for path, _ in module.named_modules() if keyword.iskeyword(path.split(".")[-1])]
    if isinstance(e, SyntaxError) and keywords:  # PyTorch writes self.blocks.in, and cannot read it back
        return (
            f"PyTorch cannot export {name}: a part of it is named by a keyword of Python, {', '.join(keywords)}: give "
            f"it another name"
        )
    told = next((_REASONS[t.__name__] for t in type(e).__mro__ if t.__name__ in _REASONS), None)
    frames = list(traceback.extract_tb(e.__traceback__))
    if any(f.filename.endswith("nn/modules/rnn.py") for f in frames) and (told or "zeros()" in str(e)):
        told = _PACKED
    if any(f.name == "ctc_loss" and of_pytorch(f.filename) for f in frames):
        told = _CTC
    frames = [f for f in frames if not of_pytorch(f.filename)]
    frames = [f for f in frames if "/pase/" not in f.filename]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = " ".join(str(e).split())[:400]
    listed = ""
    if len(places) > 1:
        shown = "\n".join(f"  {p}" for p in places[:_MOST_PLACES])
        listed = f"There are {len(places)} such places:\n{shown}\n"
    reason = f"{told}. " if told else ""
    return f"PyTorch cannot export {name}{where}: {reason}{listed}It says: {type(e).__name__}: {said}"


def real_places(module: Module, batch: tuple[Tree, ...], step: Callable[[Module], Module]) -> list[str]:
    """All lines at which a model's code depends on its data, as PyTorch's draft export finds them; [] where it cannot.

    That runs the step on real tensors: a copy of the module, which is left out where the module or the batch has meta
    or fake tensors, or is large. step: from a module to one whose forward is the step.
    """
    import torch
    from torch._logging.structured import INTERN_TABLE
    from torch._subclasses.fake_tensor import FakeTensor

    held = [*module.parameters(), *module.buffers(), *torch.utils._pytree.tree_leaves(batch)]
    tensors = [t for t in held if isinstance(t, torch.Tensor)]
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return []
    if sum(t.nbytes for t in tensors) > _MOST_BYTES:
        return []
    try:
        with (
            _silent(),
            torch.random.fork_rng(),
        ):  # neither the batch nor the program's random state may change
            own = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), batch)
            drafted: Any = torch.export.draft_export(step(copy.deepcopy(module)), own, strict=False)
    except Exception:  # this only improves the message; the model's own error is reported
        return []
    report = drafted._report
    # Files are numbered once per process; the report names only the files that are new in it.
    files = {number: file for file, number in INTERN_TABLE.items()} | dict(report.str_to_filename)
    return list(dict.fromkeys(line for f in report.failures if (line := _line(f, files))))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """PyTorch writes its own report to these logs; to others it writes what the report is made of."""
    loggers = [
        logging.getLogger(n) for n in ("torch.export._draft_export", "torch.fx.experimental.symbolic_shapes")
    ]
    before = [x.level for x in loggers]
    for x in loggers:
        x.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for x, level in zip(loggers, before, strict=True):
            x.setLevel(level)


def _line(failure: FailureReport, files: Mapping[int, str]) -> str:
    """The user's line for one of draft export's findings."""
    for frame in reversed(failure.data.get("user_stack") or failure.data.get("stack") or []):
        file = files.get(frame["filename"], "")
        if file and not of_pytorch(file):
            return f"{file}:{frame['line']}: {frame.get('loc') or frame['name']}"
    return ""
