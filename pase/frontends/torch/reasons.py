"""Explains to the author of a model why PyTorch cannot export it: what the code does, where, and what to do instead."""

from __future__ import annotations

import contextlib
import copy
import keyword
import logging
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch.export._draft_export import FailureReport
    from torch.nn import Module

__all__ = ["lines_kept", "of_pytorch", "real_places", "why"]

_NO_VALUE = (
    "compute with the tensor itself: use torch.where for if, and tensor.detach() for tensor.item(); or pass what "
    "Python code needs as a number, not as a tensor"
)
_REASONS = {
    "GuardOnDataDependentSymNode": (
        "its Python code needs the value of a tensor (.item(), if tensor:, a loop over a tensor), which does not exist "
        "before the model runs",
        _NO_VALUE,
    ),
    "DynamicOutputShapeException": (
        "the size of a tensor depends on the data (nonzero, a mask as an index)",
        "use torch.where, or a fixed capacity",
    ),
    "DataDependentOutputException": (
        "it needs the value of a tensor (.item(), .tolist(), bool(tensor)), which does not exist before the model runs",
        _NO_VALUE,
    ),
    "UnsupportedOperatorException": (
        "it calls an op that has no shape rule",
        "give your custom op a shape rule with torch.library.register_fake",
    ),
}
"""PyTorch's exceptions -> (what is wrong with the model, what its author can do)."""
_PACKED = (
    "the number of sequences of a packed batch that are left at each time step depends on the data",
    "pass the padded sequences themselves (batch_first=True), and mask the padding out of the loss (ignore_index, "
    "torch.where)",
)
_NUMPY = (
    "its code makes a NumPy array of a tensor, which has no values",
    "compute it with PyTorch's functions",
)
_CTC = (
    "ctc_loss makes a table whose size depends on the lengths of its targets, so it cannot be exported",
    "compute the loss outside of the step, or write its recursion as a loop (scan) over a table of fixed size",
)
_CUMULATIVE = (
    "batch normalization with momentum=None divides by the number of batches that it has seen, a tensor whose value "
    "does not exist before the model runs",
    "give it a momentum, such as PyTorch's default of 0.1",
)
_MOST_BYTES = 1 << 30
"""Parameters, buffers and batch of at most this size are copied and run, to find all places that cannot be exported."""
_MOST_PLACES = 8


def of_pytorch(file: str) -> bool:
    """Whether a file belongs to PyTorch, or is code that PyTorch generated."""
    import torch

    return file.startswith((str(Path(torch.__file__).parent), "<"))


@contextlib.contextmanager
def lines_kept(step_file: str) -> Iterator[None]:
    """Within, nodes that are traced keep the lines of all user functions on the stack.

    PyTorch itself keeps only lines of methods named forward. step_file: the file that defines the step which calls the
    user's module.
    """
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


def why(name: str, e: Exception, places: Sequence[str], module: Module) -> PaseError:
    """The error to raise when PyTorch cannot export a model: the reason, and the user's line if it is known.

    name: of the model. e: PyTorch's exception. places: all lines of the user's code that cannot be exported, as far as
    they are known.
    """
    keywords = [path for path, _ in module.named_modules() if keyword.iskeyword(path.split(".")[-1])]
    if isinstance(e, SyntaxError) and keywords:  # PyTorch writes self.blocks.in, and cannot read it back
        return PaseError(
            f"PyTorch cannot export a module whose name is a keyword of Python: {', '.join(keywords)}",
            where=name,
            fix="give the module another name",
        )
    told = next((_REASONS[t.__name__] for t in type(e).__mro__ if t.__name__ in _REASONS), None)
    frames = list(traceback.extract_tb(e.__traceback__))
    if any(f.filename.endswith("nn/modules/rnn.py") for f in frames) and (told or "zeros()" in str(e)):
        told = _PACKED
    if ".numpy()" in str(e):
        told = _NUMPY
    if any(f.name == "ctc_loss" and of_pytorch(f.filename) for f in frames):
        told = _CTC
    elif any(f.name == "forward" and f.filename.endswith("nn/modules/batchnorm.py") for f in frames):
        told = _CUMULATIVE
    elif told is not None and told in _REASONS.values() and (place := _library_place(frames)):
        checked = place.startswith("distributions/")
        fix = "leave out validate_args=True" if checked else "write what it computes in tensor operations"
        told = f"{told[0]}. The code is PyTorch's own, {place}", fix
    frames = [f for f in frames if not of_pytorch(f.filename)]
    frames = [f for f in frames if "/pase/" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = textwrap.shorten(str(e).partition("For more information, run with")[0], 400, placeholder=" …")
    listed = ""
    if len(places) > 1:
        shown = "\n".join(f"  {p}" for p in places[:_MOST_PLACES])
        listed = f"There are {len(places)} such places:\n{shown}\n"
    reason, fix = told or ("", "")
    return PaseError(
        f"PyTorch cannot export {name}: {reason}{reason and '. '}{listed}PyTorch's error: {type(e).__name__}: {said}",
        where=where,
        fix=fix,
    )


def _library_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The line of PyTorch's library that the user's code calls and that an error comes from; "" if there is none."""
    users = [i for i, f in enumerate(frames) if not of_pytorch(f.filename) and "/pase/" not in f.filename]
    library = ("/torch/nn/", "/torch/distributions/", "/torch/functional.py")
    below = frames[users[-1] + 1 :] if users else []
    called = (f for f in below if any(part in f.filename for part in library))
    return next((f"{f.filename.rpartition('/torch/')[2]}:{f.lineno}" for f in called), "")


def real_places(module: Module, batch: tuple[Tree, ...], step: Callable[[Module], Module]) -> list[str]:
    """All lines at which a model's code depends on its data, found by PyTorch's draft export; [] if it finds none.

    Draft export runs the step on real tensors, so a copy of the module is made. Returns [] if the module or the batch
    has meta or fake tensors or is large. step: makes the module whose forward is the step from the user's module.
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
        ):  # the batch and the random state of the user's program must not change
            own = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), batch)
            drafted: Any = torch.export.draft_export(step(copy.deepcopy(module)), own, strict=False)
    except Exception:  # this only improves the message: the original error is reported in any case
        return []
    report = drafted._report
    # PyTorch numbers files once per process, and a report names only the files that are new in it.
    files = {number: file for file, number in INTERN_TABLE.items()} | dict(report.str_to_filename)
    return list(dict.fromkeys(line for f in report.failures if (line := _line(f, files))))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Within, draft export logs and warns of nothing. Other loggers keep their levels: the report is made from them."""
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
    """The user's line for one failure that draft export found; "" if there is none."""
    for frame in reversed(failure.data.get("user_stack") or failure.data.get("stack") or []):
        file = files.get(frame["filename"], "")
        if file and not of_pytorch(file):
            return f"{file}:{frame['line']}: {frame.get('loc') or frame['name']}"
    return ""
