"""The options of a compilation. Each is defined once, for the API's signature and help and for the command line."""

# This module has no deferred annotations, because the options' types are read. It imports little, so that help is fast.

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from pase.compiler.problem.pairs import parse_chances, parse_layouts, parse_places, parse_sizes
from pase.errors import PaseError, did_you_mean
from pase.files.quantities import parse_bytes
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.machine import Machine

__all__ = ["CompileOptions", "Flag", "takes_options"]

R = TypeVar("R")
About = Literal[
    "devices",
    "the model",
    "what the plan must be",
    "memory",
    "how the program runs",
    "the search",
]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How the command line takes an option.

    names: its flags. If there are none, only the API has the option.
    minimum: the least value of a number.
    pairs: a parser of NAME=VALUE texts, for an option that may be given several times.
    about: what the option is about. The help lists options by this.
    """

    names: tuple[str, ...] = ()
    metavar: str | None = None
    minimum: int | None = None
    pairs: Callable[[Sequence[str] | None], Mapping[object, object]] | None = None
    about: About = "the search"


def _option(default: Any, says: str, *names: str, **flag: Any) -> Any:
    """Return a field of ``CompileOptions``. says: its help, in one or more sentences."""
    return field(default=default, metadata={"help": says, "flag": Flag(names=names, **flag)})


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The options of ``pase.compile``, made from user input. Raises PaseError for invalid values."""

    devices: int = _option(
        MISSING, "How many devices to split the model over.", "--devices", "-n", minimum=1, about="devices"
    )
    mesh: str | None = _option(
        None,
        "Fix the mesh: 4x8, or with names data=4,model=8. Default: search every mesh of at most three axes (in Python, "
        "max_axes).",
        "--mesh",
        about="devices",
    )
    machine: "str | Path | Machine | None" = _option(  # noqa: RUF009 it is a field
        None,
        "A name ('pase machines') or a .toml file (in Python also a Machine). Default: h100x8.",
        "--machine",
        about="devices",
    )
    cost_model: str = _option(
        "analytic",
        "analytic: seconds on the machine; paper: PaSE's FLOP-equivalents.",
        "--cost-model",
        about="devices",
    )
    optimizer: str = _option(
        "adam",
        "The optimizer, whose state counts as memory and whose update is priced: sgd, momentum, adam, …",
        "--optimizer",
        about="the model",
    )
    unknown: Literal["error", "replicate"] = _option(
        "error",
        "What to do with an op that has no rule: 'error', or 'replicate' (the op is not split).",
        "--unknown",
        about="the model",
    )
    dims: Mapping[str, int] | None = _option(
        None,
        "Bind a symbolic size of the model (batch=64), or set how often a while loop runs (while0=100).",
        "--dim",
        "--trips",
        metavar="NAME=SIZE",
        pairs=parse_sizes,
        about="the model",
    )
    constraints: Mapping[str, Any] | None = _option(
        None,
        "Layouts that the plan must have; the search decides the rest, and the plan says what each costs. A name or "
        "pattern of parameters and batch arrays, or 'batch' for all of these -> one entry for each dim: an axis of the "
        "mesh, a tuple of axes, None (whole) or ... (the search decides); or one axis for the first dim. For example "
        "{'blocks.*.wq': P(None, 'model'), 'batch': 'data'} with mesh='data=4,model=2'; on the command line "
        "'blocks.*.wq=-,model' and batch=data (- is whole, ? is open, a+b are two axes).",
        "--constrain",
        metavar="NAME=DIMS",
        pairs=parse_layouts,
        about="what the plan must be",
    )
    mode: Literal["train", "inference", "step"] = _option(
        "train",
        "'train': the model is a loss, and its gradient and update are priced too. 'inference': the model is any "
        "function, and nothing is trained. 'step': the model is a whole train step, step(params, opt_state, *batch) -> "
        "(params, opt_state, …).",
        "--mode",
        about="the model",
    )
    objective: Literal["latency", "throughput"] = _option(
        "latency",
        "'latency': the fewest seconds for one call. 'throughput': the most examples per second and device. The batch "
        "size must be left open (a zoo model without batch=, or one symbolic size). Powers of two are tried, up to "
        "what fits in memory or until twice the batch gains less than 1%.",
        "--objective",
        about="what the plan must be",
    )
    carry: Mapping[int, Tree] | None = _option(
        None,
        "State that one call returns and the next takes, such as batch statistics or a KV cache: the number of an "
        "argument after the parameters, from 0 -> the position of its next value in the function's result. For "
        "example {1: 1} or {1: (1, 'batch_stats')}; on the command line 1=1 or 1=1.batch_stats. Both values get the "
        "same layout.",
        "--carry",
        metavar="ARGUMENT=PLACE",
        pairs=parse_places,
        about="the model",
    )
    chances: Mapping[str, Sequence[float]] | None = _option(
        None,
        "How likely each branch of a conditional is: {'cond0': (0.9, 0.1)}; on the command line cond0=0.9,0.1. cond0 "
        "is the first conditional of the program, and its first branch is taken if the condition is false. Default: "
        "the most expensive branch is always taken.",
        "--chance",
        metavar="NAME=CHANCES",
        pairs=parse_chances,
        about="the model",
    )
    loss: Callable[..., Tree] | None = _option(  # noqa: RUF009 it is a field
        None,
        "For a PyTorch module that does not return its loss: loss(module, *batch) -> scalar.",
        about="the model",
    )
    max_axes: int = _option(3, "Search meshes of at most this many axes.", minimum=1, about="the search")
    meshes: Literal["few", "all"] = _option(
        "few",
        "The meshes over which the answer is proven. 'few': those of at most three axes (in Python, max_axes). 'all': "
        "every mesh of the devices; those with more axes are searched as long as they may be cheaper, which takes "
        "seconds for each, and the plan names those that remain.",
        "--meshes",
        about="the search",
    )
    baselines: bool = _option(
        True,
        "Also price data parallelism, FSDP, Megatron, …. The answer is never worse than any of them; with a "
        "fixed mesh, than any on that mesh.",
        about="the search",
    )
    memory_limit: float | str | None = _option(
        "machine",
        "How much a device may hold: a number of bytes, such as 80GiB or 16e9; 'machine': its memory minus what the "
        "machine file reserves; 'none': no limit. Finds the cheapest strategy whose predicted memory fits. If none "
        "fits, 'machine' gives the best strategy without a limit and a warning; a given size raises an error.",
        "--memory-limit",
        about="memory",
    )
    accumulate: int | None = _option(
        None,
        "The number of micro-batches in a step, whose gradients are summed. The loss must be a mean or a sum over "
        "the batch, or a mean by a count. Default: 1, or what the memory limit requires.",
        "--accumulate",
        minimum=1,
        about="memory",
    )
    remat: Literal["auto", "none", "attention", "light", "all"] = _option(
        "auto",
        "What backward recomputes in repeated blocks (a loop's body, equal layers) that the model does not mark "
        "itself: 'none'; 'attention'; 'light' work (everything but products with weights and fused attention); 'all'; "
        "or 'auto', the cheapest within the memory limit.",
        "--remat",
        about="memory",
    )
    once: Literal["none", "gathers", "all", "auto"] = _option(
        "none",
        "Which collectives of split parameters run once per step, instead of once per micro-batch and per "
        "recomputation: 'none'; 'gathers', after which parameters stay gathered; 'all', also the sums of gradients, "
        "which stay unreduced until then; 'auto', the cheapest within the memory limit. plan.jax runs such a plan with "
        "lowering='manual'.",
        "--once",
        about="memory",
    )
    regather: Literal["none", "all", "auto"] = _option(
        "auto",
        "Whether backward gathers split parameters again, instead of keeping them gathered from forward on: 'none'; "
        "'all', as FSDP2 does with reshard_after_forward=True; 'auto', the cheaper within the memory limit. For losses "
        "in PyTorch, without stages.",
        "--regather",
        about="memory",
    )
    idle: Literal["allowed", "none"] = _option(
        "allowed",
        "Whether devices may be left idle. 'allowed': if the devices would repeat each other's work, because they "
        "divide few of the model's sizes, smaller numbers of them are searched too, and the plan is for fewer if that "
        "is at least 5% faster; it says so. 'none': the plan is for all of them.",
        "--idle",
        about="devices",
    )
    uneven: Literal["whole", "padded"] = _option(
        "whole",
        "What to do with dims that the devices do not divide. 'whole': they are split as far as they divide. 'padded': "
        "the model is also searched with these dims padded, in parameters and batch too, and the cheaper plan is "
        "taken; plan.jax adds and removes the padding. For JAX programs that pass nothing to their next call.",
        "--uneven",
        about="how the program runs",
    )
    precision: Literal["model", "fp8"] = _option(
        "model",
        "Precision of products with weights. 'model': the model's own dtypes. 'fp8': all but the last in eight bits, "
        "at the machine's rate, including the traffic of scaling. Your program must request fp8 itself: plan.jax runs "
        "the model's own dtypes.",
        "--precision",
        about="how the program runs",
    )
    overlap: Literal["none", "parameters", "machine"] = _option(
        "machine",
        "What overlaps with compute. 'parameters': gathers of parameters and sums of gradients; only what compute at "
        "their position cannot hide is priced. 'machine': the same, in training, if the machine file says that "
        "collectives overlap with compute. 'none': nothing; compute and communication are added up.",
        "--overlap",
        about="how the program runs",
    )
    decompose: Literal["none", "products"] = _option(
        "none",
        "Which collectives between compute the executor decomposes. 'products': gathers and scatters next to products "
        "with weights run during them, chunk by chunk (collective matmul, async tensor parallelism), and only what the "
        "product does not hide is priced; your executor must do it. 'none': compute waits for them.",
        "--decompose",
        about="how the program runs",
    )
    target: str = _option(
        "any",
        "Search only what this program can express, so that 'pase emit --to' can write the plan for it: ddp, fsdp2, "
        "torchtitan, tp-plan, maxtext, flax-rules, dtensor or mesh-tf. The plan says what this costs against the best "
        "plan of all. Default 'any': everything is searched.",
        "--for",
        metavar="TARGET",
        about="what the plan must be",
    )
    pipeline: int | str = _option(
        "none",
        "Cut the model into stages on groups of devices: 'none', 'auto' (if that is cheaper) or the number of groups. "
        "The mesh is then that of one group. The plan runs in JAX, stage by stage.",
        "--pipeline",
        metavar="none|auto|N",
        about="what the plan must be",
    )
    stage_schedule: str = _option(
        "auto",
        "The order in which stages run micro-batches. 'auto': the fastest of those that run stage by stage. Or the "
        "name of one, such as 1f1b, interleaved or zb-h1; 'circular' runs as one JAX program.",
        "--stage-schedule",
        about="what the plan must be",
    )
    work: float = _option(
        60.0,
        "The work that the searches under a memory limit and over pipelines may do, in seconds of a quiet core. It is "
        "counted, not timed, so that the answer does not depend on what else runs. A search that has used it up may be "
        "inexact, and the plan says so.",
        "--work",
        about="the search",
    )
    time_limit: float | None = _option(
        None,
        "Seconds from the start of the compilation after which these searches stop, wherever they are, with the best "
        "answer so far. Tracing the model and searching its meshes without a memory limit count, but are not cut "
        "short. Default: no limit.",
        "--time-limit",
        about="the search",
    )
    print_after: str | None = _option(
        None,
        "Print on standard error what is known after a pass of the compilation: the graph with its variants, the "
        "strategy, or the plan. A name ('pase passes' lists them), or 'all'.",
        "--print-after",
        metavar="PASS",
        about="the search",
    )

    def __post_init__(self) -> None:
        from pase.tables.work import OPTIMIZERS

        if not _whole(self.devices):
            raise PaseError(f"must be a positive whole number, got {self.devices!r}", where="devices")
        if self.mesh is not None and not isinstance(self.mesh, str):
            raise PaseError(
                f"must be text, got a {type(self.mesh).__name__}",
                where="mesh",
                fix=f"write mesh='{_mesh_text(self.mesh)}'",
            )
        if self.optimizer not in OPTIMIZERS:
            raise PaseError(
                f"no optimizer '{self.optimizer}'",
                where="optimizer",
                fix=f"use one of {', '.join(OPTIMIZERS)}",
            )
        if not self.work > 0 or (self.time_limit is not None and not self.time_limit >= 0):
            raise PaseError(
                f"work must be a positive number of seconds and time_limit at least 0, got {self.work!r} and "
                f"{self.time_limit!r}",
                where="work, time_limit",
            )
        if self.accumulate is not None and not _whole(self.accumulate):
            raise PaseError(
                f"must be a positive number of micro-batches, got {self.accumulate!r}", where="accumulate"
            )
        if self.meshes == "all" and (self.mesh is not None or self.ranks):
            raise PaseError(
                "it proves what one program without stages costs on every mesh, so neither the mesh nor a number of "
                "groups may be given",
                where="meshes='all'",
                fix="leave out mesh and pipeline",
            )
        if self.meshes == "all" and self.once == "auto":
            raise PaseError(
                "it proves one way to run the step, but once is 'auto'",
                where="meshes='all'",
                fix="set once to 'none', 'gathers' or 'all'",
            )
        if self.pipeline not in ("none", "auto") and self.ranks is None:
            raise PaseError(
                f"must be 'none', 'auto' or a number of groups above 1, got {self.pipeline!r}",
                where="pipeline",
            )
        if self.target != "any":
            self._check_target()
        if self.pipeline != "none" and self.uneven != "whole":
            raise PaseError(
                "it takes no stages", where="uneven='padded'", fix="leave out pipeline (--pipeline)"
            )
        if self.pipeline != "none" and self.regather == "all":
            raise PaseError(
                "it is for steps without stages; the search over stages decides itself what to gather again",
                where="regather='all'",
                fix="leave out regather",
            )
        if self.pipeline != "none" and self.once in ("gathers", "all"):
            raise PaseError(
                "it is for steps without stages; the search over stages decides itself what to hoist",
                where=f"once='{self.once}'",
                fix="leave out once",
            )
        if self.decompose != "none" and self.overlap == "none":
            raise PaseError(
                "it overlaps collectives with compute, but overlap='none' excludes that",
                where=f"decompose='{self.decompose}'",
                fix="leave out one of them",
            )
        if self.stage_schedule != "auto":
            from pase.pipeline.registry import SCHEDULES

            _ = SCHEDULES[self.stage_schedule]
            if self.pipeline == "none":
                raise PaseError(
                    "it applies to stages only",
                    where=f"stage_schedule='{self.stage_schedule}'",
                    fix="give pipeline=N or 'auto' (--pipeline)",
                )
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                *most, last = map(repr, choices)
                raise PaseError(
                    f"must be {', '.join(most)} or {last}, got {getattr(self, name)!r}", where=name
                )

    def _check_target(self) -> None:
        """Raise PaseError if the target is unknown, or takes no plan that these options ask for."""
        from pase.plan.targets import TARGETS

        _ = TARGETS[self.target]
        where = f"target '{self.target}'"
        if self.pipeline != "none":
            raise PaseError("it takes no stages", where=where, fix="leave out pipeline (--pipeline)")
        if self.uneven != "whole":
            raise PaseError("it takes no padded dims", where=where, fix="leave out uneven (--uneven)")

    @property
    def ranks(self) -> int | None:
        """The number of groups of devices for the stages, if one is given."""
        text = str(self.pipeline)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 1 else None

    def limit_bytes(self, machine: "Machine") -> float | None:
        """Return the memory limit on this machine in bytes, or None if there is no limit.

        Raises PaseError if it is not a size.
        """
        if self.memory_limit is None or self.memory_limit == "none":
            return None
        if self.memory_limit == "machine":
            return float(machine.device.usable_bytes)
        if isinstance(self.memory_limit, str):
            nbytes = parse_bytes(self.memory_limit, "memory limit", "80GiB, 16e9, machine or none")
            if nbytes < _LEAST_LIMIT and self.memory_limit.strip()[-1:].isdecimal():
                raise PaseError(
                    f"{self.memory_limit} is {nbytes:g} bytes, too few for any model",
                    where="memory limit",
                    fix=f"write a unit: {nbytes:g}GiB",
                )
            return nbytes
        if not self.memory_limit > 0:
            raise PaseError(
                f"{self.memory_limit} is not a size",
                where="memory limit",
                fix="write a size such as 80GiB or 16e9, machine or none",
            )
        return float(self.memory_limit)


_LEAST_LIMIT = 1e6
"""A smaller number without a unit was not meant in bytes."""


def _mesh_text(mesh: object) -> str:
    """Return a mapping from names to sizes, or a mesh of JAX, as the option takes it; an example for anything else."""
    sizes = getattr(mesh, "shape", mesh)
    return ",".join(f"{k}={v}" for k, v in sizes.items()) if isinstance(sizes, Mapping) else "data=4,model=2"


def _whole(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1


def _choices() -> dict[str, tuple[str, ...]]:
    """Return the options that accept a fixed set of words."""
    return {f.name: get_args(f.type) for f in fields(CompileOptions) if get_origin(f.type) is Literal}


def takes_options(function: Callable[..., R]) -> Callable[..., R]:
    """Let callers pass each option as a keyword to a function that takes ``options: CompileOptions``.

    The signature of the function, and its docstring at the line ``{options}``, then list the options.
    """
    taken = fields(CompileOptions)
    given = inspect.signature(function)
    plain = [p for p in given.parameters.values() if p.name != "options"]
    listed = [_parameter(f) for f in taken]
    order = sorted([*plain, *listed], key=lambda p: p.kind)  # stable, so keywords keep their order
    signature = given.replace(parameters=order)

    @functools.wraps(function)
    def called(*args: object, **keywords: Any) -> R:
        for name in keywords:
            if name not in signature.parameters:
                hint = did_you_mean(name, signature.parameters, quote="")
                raise TypeError(f"{function.__name__}() has no option {name!r}{hint}")
        try:
            signature.bind(*args, **keywords)
        except TypeError as e:
            raise TypeError(f"{function.__name__}(): {e}") from None
        chosen = {f.name: keywords.pop(f.name) for f in taken if f.name in keywords}
        return function(*args, options=CompileOptions(**chosen), **keywords)

    called.__signature__ = signature  # type: ignore[attr-defined]
    if function.__doc__ is not None:  # python -OO removes docstrings
        called.__doc__ = function.__doc__.replace("{options}", _help(taken))
    return called


def _parameter(f: Field[object]) -> inspect.Parameter:
    default = inspect.Parameter.empty if f.default is MISSING else f.default
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=f.type)


def _help(taken: tuple[Field[object], ...]) -> str:
    lines = (
        textwrap.fill(
            f"{f.name}: {f.metadata['help']}", 110, subsequent_indent=" " * 8, initial_indent=" " * 4
        )
        for f in taken
    )
    return "\n".join(lines).lstrip()
