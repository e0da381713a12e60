"""The numbers among an op's operands (counts, epsilons, factors), which the lowered graph does not hold.

They are needed to run the parts of an op one by one, and to compare a step with the step on a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pase.errors import PaseError
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchOperand, arguments
from pase.ir import Op
from pase.registry import Registry

__all__ = ["NumberUnknown", "node_numbers", "numbers_missing", "numbers_of", "op_name"]


class NumberUnknown(PaseError):
    """The numbers among an op's operands are not known. The message says why."""


_MISSING = {"select": 3}
"""Function -> its number of operands, if that is not two."""

_BINARY = frozenset({"add", "sub", "mul", "div", "ne", "eq", "gt", "lt", "ge", "le", "max", "min"})


def numbers_missing(op: Op) -> int:
    """How many operands of an op are plain numbers, which the lowered graph does not hold."""
    if op.kind != "elementwise":
        return 0
    wanted = _MISSING.get(op.function.name, 2 if op.function.name in _BINARY else 1)
    return max(0, wanted - len(op.reads))


def node_numbers(n: FxNode) -> Iterator[float]:
    """The plain numbers of a call, in the order in which its ops were traced. Raises NumberUnknown."""
    given = arguments(n.target, n.args, n.kwargs)
    tensors = {k: v.meta["val"] for k, v in given.items() if hasattr(v, "meta")}
    return numbers_of(op_name(n), {**given, **tensors}, {k: tuple(t.shape) for k, t in tensors.items()})


def op_name(n: FxNode) -> str:
    """The name of a call's op, with its library unless that is aten; for a higher-order op, its target's name."""
    schema = getattr(n.target, "_schema", None)
    return str(n.target) if schema is None else str(schema.name).removeprefix("aten::")


Numbers = Callable[[Mapping[str, TorchOperand], Mapping[str, tuple[int, ...]]], Iterator[float]]
_NUMBERS: Registry[Numbers] = Registry("numbers of ATen op")


def numbers_of(
    name: str, given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[float]:
    """The operands of an op that are plain numbers, in the order in which its ops were traced.

    given: operands by name. shapes: unsharded shapes of the tensor operands. Raises NumberUnknown for an operand that
    no rule reads.
    """
    found = _NUMBERS.get(name)
    if found is None:
        return iter(())
    read = _OperandsRead(given)
    numbers = tuple(found(read, shapes))
    for word, value in given.items():
        if word not in read.names | _NO_NUMBER and not hasattr(value, "shape") and value is not None:
            raise NumberUnknown(f"the effect of its operand '{word}' on the parts of the op is not known")
    return iter(numbers)


class _OperandsRead(Mapping[str, TorchOperand]):
    """Operands that record which of them were read, so that no rule silently ignores one.

    The overloads of an op may have different names for the same operand.
    """

    def __init__(self, given: Mapping[str, TorchOperand]) -> None:
        self.given, self.names = given, set[str]()

    def __getitem__(self, name: str) -> TorchOperand:
        self.names.add(name)
        return self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


_IN_GRAPH = {"dim", "keepdim", "dtype", "out_dtype", "reduction", "normalized_shape", "output_size"}
_IN_SHAPES = {"N", "C", "HxW"}
_NO_NUMBER = frozenset(_IN_GRAPH | _IN_SHAPES | {"cudnn_enable", "cudnn_enabled"})
"""Operands that need no rule: the graph or the shapes determine them, or they have no effect on the numbers."""


def _count(shape: tuple[int, ...], dims: int | Sequence[int] | None) -> int:
    n = 1
    for d in [dims] if isinstance(dims, int) else dims or range(len(shape)):
        n *= shape[d]
    return n


@_NUMBERS.register("mean", "mse_loss", "l1_loss")
def _mean(given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[float]:
    yield _count(shapes["self"], given.get("dim"))


@_NUMBERS.register(*(f"{kind}adaptive_avg_pool{n}d" for kind in ("", "_") for n in (1, 2, 3)))
def _adaptive_mean(
    given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[float]:
    size, shape = given["output_size"], shapes["self"]
    yield _count(shape, list(range(-1 if isinstance(size, int) else -len(size), 0)))


@_NUMBERS.register("var", "std", "var_mean", "std_mean")
def _variance(given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[float]:
    n = _count(shapes["self"], given.get("dim"))
    if "unbiased" in given:
        correction = int(given["unbiased"])
    else:
        correction = 1 if given["correction"] is None else given["correction"]
    yield n
    yield n - correction


@_NUMBERS.register("layer_norm", "native_layer_norm", "rms_norm")
def _layer_norm(given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[float]:
    import torch

    axes = given["normalized_shape"]
    n = _count(shapes["input"], list(range(-len(axes), 0)))
    yield n
    if "bias" in given:
        yield n
    eps = given.get("eps")
    yield torch.finfo(given["input"].dtype).eps if eps is None else eps


@_NUMBERS.register("group_norm", "native_group_norm")
def _of_group_norm(
    given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[float]:
    shape = shapes["input"]
    n = _count(shape, list(range(1, len(shape)))) // int(given.get("num_groups") or given["group"])
    yield from (n, n, given["eps"])


@_NUMBERS.register(
    "batch_norm",
    "_native_batch_norm_legit_functional",
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
)
def _batch_norm(given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[float]:
    shape, m = shapes["input"], given["momentum"]
    if not given.get("training") and given.get("running_mean") is not None:
        yield given["eps"]
        return
    n = _count(shape, [i for i in range(len(shape)) if i != 1])
    yield from (n, n, given["eps"])
    yield from (1 - m, m, 1 - m, m * n / max(n - 1, 1))


@_NUMBERS.register("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss2d")
def _cross_entropy(
    given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[float]:
    """Ignored labels add zero. If labels are probabilities, a mean is over all of them."""
    ignored = given.get("ignore_index", -100)  # only for labels that are class indices
    if given["target"].is_floating_point():
        if given.get("weight") is not None or given.get("label_smoothing"):
            raise NumberUnknown("its labels are probabilities, and it weights classes or smooths labels")
        shape = shapes["self"]
        yield -_count(shape, None) / shape[min(1, len(shape) - 1)]
        return
    yield ignored
    if given.get("weight") is not None:
        yield 0.0
    if smoothing := given.get("label_smoothing"):
        shape = shapes["self"]
        yield from (1 - smoothing, -smoothing / shape[min(1, len(shape) - 1)])
    yield 0.0


@_NUMBERS.register("addmm", "baddbmm")
def _addmm(given: Mapping[str, TorchOperand], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[float]:
    if given.get("beta", 1) != 1:
        raise NumberUnknown("it scales the added tensor (beta), which the parts of the op do not do")
    yield given.get("alpha", 1)
