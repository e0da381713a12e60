"""The versions of JAX that pase reads, and everything that differs between their jaxprs.

Code that inspects a jaxpr uses the functions here, so that supporting a new version of JAX changes only this file: run
the tests with the version, fix what differs below, and add it to ``KNOWN`` and to the bounds in ``pyproject.toml``.

- Up to 0.10, a ClosedJaxpr holds an open Jaxpr and its constants; from 0.11 on, one class serves as both.
- Up to 0.10, a scan has the numbers of its constant and carried operands (num_consts, num_carry); from 0.11 on,
  ``ft_in`` has the operands in three groups.
- ``jax.nn.dot_product_attention`` calls one of two functions of its own module, by name.
- The kernels of cuDNN and Pallas return the logarithms of their sums, and take them in backward, by inner functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

from pase.errors import PaseError, install_line
from pase.frontends.jax.types import Aval, ClosedJaxpr, Eqn, Jaxpr, LiteralVar, Var
from pase.ir.places import NOWHERE, SourceLine
from pase.ir.types import FactorPrecision, OpKind
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes
    from jax.extend.core import DebugInfo as DebugInfo  # also imported from here by other modules
    from numpy.typing import NDArray

__all__ = [
    "KNOWN",
    "assuming_cudnn",
    "at_line",
    "attention_by",
    "called",
    "check",
    "closed",
    "cudnn_attention",
    "cudnn_attention_backward",
    "evaluate",
    "flash_attention",
    "flash_attention_backward",
    "function_of",
    "implementation",
    "is_dropped",
    "is_literal",
    "jaxprs_inside",
    "line_of_error",
    "literal_array",
    "opened",
    "outside_jit",
    "plain_array",
    "precision",
    "pulled_back",
    "scan_groups",
    "source_line",
    "static_arguments",
    "tangents_of",
    "threefry",
    "value_of",
    "values_around",
    "without_dead_code",
    "written_as",
]

KNOWN = ((0, 10), (0, 11), (0, 12))
"""The minor versions with which the tests were run, oldest first."""


@cache
def check(version: str | None = None) -> None:
    """Raises PaseError if the installed JAX (or ``version``) is older than any known version. Warns once if it is
    newer.

    >>> check("0.12.1")
    >>> check("0.4.30")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    pase.errors.PaseError: JAX 0.4.30 is too old: pase reads 0.10 to 0.12; upgrade it: pip install ...
    """
    if version is None:
        import jax

        version = jax.__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    oldest, newest = (f"{a}.{b}" for a, b in (KNOWN[0], KNOWN[-1]))
    if (major, minor) < KNOWN[0]:
        raise PaseError(
            f"JAX {version} is too old: pase reads {oldest} to {newest}",
            fix=f"upgrade it: {install_line('jax')}",
        )
    if (major, minor) > KNOWN[-1]:
        warnings.warn(
            f"JAX {version} is newer than the versions that pase was tested with ({oldest} to {newest}), and is read "
            f"like {newest}. If that fails, install an older one: pip install 'jax<{KNOWN[-1][0]}.{KNOWN[-1][1] + 1}'",
            stacklevel=2,
        )


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns an open or closed jaxpr as (jaxpr with constvars, invars, eqns and outvars; values of its constvars)."""
    from jax.extend.core import ClosedJaxpr

    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())  # type: ignore[return-value]


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants. An open program has no constants."""
    from jax.extend.core import ClosedJaxpr

    return ClosedJaxpr(*opened(jaxpr))  # type: ignore[arg-type,return-value]


def plain_array(value: Array) -> NDArray[Any]:
    """A constant as an array of numbers. Random keys become the words that they consist of."""
    import jax
    import numpy as np

    keys = hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if keys else value)


def jaxprs_inside(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the programs that an equation calls, loops over or chooses from."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, (Jaxpr, ClosedJaxpr)):
                yield opened(x)[0]  # type: ignore[arg-type]


def scan_groups(eqn: Eqn) -> tuple[int, int]:
    """The numbers of a scan's constant and carried operands. The operands after these are sliced."""
    p = eqn.params
    if "ft_in" in p:
        consts, carry, _ = p["ft_in"].unpack()
        return len(consts), len(carry)
    return p["num_consts"], p["num_carry"]


def values_around(rule: Eqn) -> int:
    """The number of a ``jax.custom_jvp``'s operands that its function reads from the function around it."""
    around: int = rule.params["num_consts"]
    return around


def is_literal(var: Var) -> TypeGuard[LiteralVar]:
    """Whether this is a number in the equation rather than a variable."""
    from jax.extend.core import Literal

    return isinstance(var, Literal)


def literal_array(var: LiteralVar) -> Array:
    """A literal's number as an array of its dtype in the program.

    In a literal, JAX stores Python's bool and int and its own subclass of float. These have no shape, and their dtype
    would depend on whether x64 is enabled.
    """
    import numpy as np

    return np.asarray(var.val, var.aval.dtype)  # type: ignore[return-value]


def value_of(var: Var, env: Mapping[Var, Array]) -> Array:
    """The value of a variable in ``env``, or of a literal."""
    return literal_array(var) if is_literal(var) else env[var]


def is_dropped(var: Var) -> bool:
    """Whether nothing reads this result."""
    return type(var).__name__ == "DropVar"


_PRECISIONS: dict[FactorPrecision, set[str]] = {
    "highest": {"HIGHEST", "F32_F32_F32", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3"},
    "high": {"HIGH", "BF16_BF16_F32_X3", "TF32_TF32_F32"},
}
"""The names of jax.lax's precisions and algorithms of products. X3 to X9: passes whose sum has the bits of the next
wider format."""


def precision(eqn: Eqn) -> dict[OpKind, FactorPrecision]:
    """The precision that an equation of a product states for factors of float32, by kind of op.

    JAX writes ``jax.default_matmul_precision`` into it, too. XLA takes the higher one of the two operands'.
    """
    stated = eqn.params.get("precision")
    names = {getattr(p, "name", "") for p in (stated if isinstance(stated, tuple) else (stated,))}
    found = next((p for p, called in _PRECISIONS.items() if names & called), None)
    return {} if found is None else {"matmul": found, "conv": found}


def source_line(eqn: Eqn) -> SourceLine:
    """The user's line. NOWHERE if JAX has lost it, as in a cached inner jaxpr."""
    from jax.extend import source_info_util

    try:
        return SourceLine.parse(source_info_util.summarize(eqn.source_info))
    except AttributeError:
        return NOWHERE


@contextmanager
def written_as(eqn: Eqn) -> Iterator[None]:
    """A context whose traced code gets the equation's line, its named scopes, and the settings it was traced under."""
    from jax._src import source_info_util

    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    settings = eqn.ctx.manager  # type: ignore[attr-defined]
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes), settings:
        yield


@contextmanager
def at_line(eqn: Eqn) -> Iterator[None]:
    """A context whose traced code gets the equation's line. Errors of its transformations have this line, too."""
    from jax._src import source_info_util

    with source_info_util.user_context(eqn.source_info.traceback):
        yield


def line_of_error(error: BaseException | None) -> SourceLine:
    """The line of the operation whose transformation (such as taking its gradient) raised an error. NOWHERE if JAX does
    not record it."""
    import traceback

    while error is not None and type(error).__name__ != "JaxStackTraceBeforeTransformation":
        error = error.__cause__
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    return SourceLine(f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].name) if frames else NOWHERE


def outside_jit() -> bool:
    """Whether no function is being traced."""
    from jax._src.core import trace_state_clean

    return bool(trace_state_clean())


def scope(eqn: Eqn) -> str:
    """The named scopes in which an equation was written, and the later transformations, joined by slashes."""
    return str(eqn.source_info.name_stack)


def without_effects(of: Eqn | Jaxpr) -> bool:
    """Whether it does nothing except compute its results. Naming an axis of the mesh does not count as an effect."""
    return all(type(e).__name__ == "NamedAxisEffect" for e in of.effects)


def static_arguments(eqn: Eqn) -> tuple[Tree, ...] | None:
    """The arguments, other than arrays, of a call with its own derivative rule (``nondiff_argnums``), in order.

    They are stored with the backward rule, which takes them as its first arguments. None if they are not found.
    """
    for transform, args in getattr(eqn.params.get("bwd"), "transforms", ()):
        if transform.__name__ == "_prepend_static_args":
            return tuple(a.val for a in args[0])
    return None


@cache
def _excluded(file: str) -> None:
    """Makes a file's lines not count as the user's, once per process: JAX adds a file as often as it is given, and then
    compiles an expression of all of them again."""
    from jax._src import source_info_util

    source_info_util.register_exclusion(file)


Attention: TypeAlias = "Callable[..., Array]"


@contextmanager
def attention_by(stand_in: Callable[[Attention, Attention], Attention], file: str) -> Iterator[None]:
    """Temporarily replaces cuDNN's attention f in JAX by ``stand_in(f, XLA's implementation)``.

    file: a file whose lines do not count as the user's. If JAX has no such internal functions, nothing changes.
    """
    from jax._src.nn import functions

    _excluded(file)
    namespace, name = vars(functions), "cudnn_dot_product_attention"
    theirs, xla = namespace.get(name), namespace.get("_dot_product_attention_xla")
    if theirs is None or xla is None:
        yield
        return
    namespace[name] = stand_in(theirs, xla)
    try:
        yield
    finally:
        namespace[name] = theirs


@contextmanager
def assuming_cudnn() -> Iterator[None]:
    """Temporarily lets programs with cuDNN's attention be traced on a machine without cuDNN, to be compiled for GPUs
    that have it.

    JAX also wants devices where it lowers these kernels, to split them. A plan calls them on one device's part.
    """
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    kept, wanting = cudnn.check_cudnn_version, dispatch.prim_requires_devices_during_lowering
    cudnn.check_cudnn_version = lambda: 91000  # the version that XLA's facts about H100 name
    dispatch.prim_requires_devices_during_lowering = set()
    try:
        yield
    finally:
        cudnn.check_cudnn_version = kept
        dispatch.prim_requires_devices_during_lowering = wanting


def cudnn_attention(q: Array, k: Array, v: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
    """cuDNN's kernel on [b, positions, heads, d]. Returns the result and the log of each query's sum [b, heads, q]."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    result, sums = cudnn.dot_product_attention(q, k, v, scale=scale, mask_type=mask, return_residual=True)
    return result, sums


def cudnn_attention_backward(
    q: Array, k: Array, v: Array, result: Array, sums: Array, gradient: Array, *, causal: bool, scale: float
) -> tuple[Array, Array, Array]:
    """cuDNN's backward kernel, given the result and the sums. Returns the gradients of q, k and v."""
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    none = jnp.zeros(0, q.dtype)
    given = (q, k, v, *(none,) * 7, sums, result)
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_rule(
        scale,
        42,
        0.0,
        (False, False),
        mask,
        cudnn.AttentionLayout.BTNH.value,
        None,
        None,
        False,
        given,
        gradient,
    )
    return dq, dk, dv


def flash_attention(
    q: Array, k: Array, v: Array, *, causal: bool, scale: float, blocks: BlockSizes
) -> tuple[Array, Array]:
    """Pallas' TPU kernel on [b, heads, positions, d]. Returns the result and the logs of the sums [b, heads, q]."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    result, total, most = flash._flash_attention(q, k, v, None, None, True, causal, scale, blocks, False)
    return result, most + jnp.log(total)


def flash_attention_backward(
    operands: tuple[Array, Array, Array],
    result: Array,
    sums: Array,
    gradient: Array,
    *,
    causal: bool,
    scale: float,
    blocks: BlockSizes,
) -> tuple[Array, Array, Array]:
    """Pallas' backward kernels. operands: q, k and v, whose gradients are returned."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    given = (*operands, None, None, result, jnp.ones_like(sums), sums)
    dq, dk, dv, *_ = flash._flash_attention_bwd(False, causal, scale, blocks, False, given, gradient)
    return dq, dk, dv


def pulled_back(eqn: Eqn, wrt: Sequence[bool]) -> tuple[ClosedJaxpr, ClosedJaxpr, list[bool]]:
    """A call with its own derivative rule, as jax.vjp runs it.

    wrt: for each operand, whether it has a gradient.

    Returns (forward, backward, which results have a gradient). forward is a jaxpr from the operands to the call's
    results and its residuals. backward is a jaxpr from the residuals and the results' gradients to the gradients of the
    operands that have one. Results that nothing reads are left out.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    info = _debug_info_inside(eqn)
    used = [v.aval for v in eqn.outvars if not is_dropped(v)]
    smooth = [bool(jnp.issubdtype(a.dtype, jnp.inexact)) for a in used]

    def forward(*args: Array) -> Tree:
        def of(*mine: Array) -> list[Array]:
            own = iter(mine)
            ins = [next(own) if on else x for x, on in zip(args, wrt, strict=True)]
            return [y for y in evaluate(eqn, ins, info) if y is not None]

        return jax.vjp(of, *(x for x, on in zip(args, wrt, strict=True) if on))

    def backward(pull: Callable[..., Tree], *gradients: Array) -> Tree:
        found, none = iter(gradients), jax.dtypes.float0
        whole = [next(found) if on else np.zeros(a.shape, none) for a, on in zip(used, smooth, strict=True)]
        return pull(whole)

    def shapes(avals: Sequence[Aval]) -> list[ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    ahead, made = jax.make_jaxpr(forward, return_shape=True)(*shapes([v.aval for v in eqn.invars]))
    back = jax.make_jaxpr(backward)(made[1], *shapes([a for a, on in zip(used, smooth, strict=True) if on]))
    return ahead, without_dead_code(back), smooth


def tangents_of(eqn: Eqn, wrt: Sequence[bool]) -> ClosedJaxpr:
    """A call with its own derivative rule, as jax.jvp runs it: a jaxpr from the operands, and from the tangents of
    those marked in ``wrt``, to the results and their tangents."""
    import jax

    info = _debug_info_inside(eqn)
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def both(args: Sequence[Array], tangents: Sequence[Array]) -> Tree:
        def of(*mine: Array) -> list[Array]:
            own = iter(mine)
            return evaluate(eqn, [next(own) if on else x for x, on in zip(args, wrt, strict=True)], info)

        return jax.jvp(of, [x for x, on in zip(args, wrt, strict=True) if on], list(tangents))

    return jax.make_jaxpr(both)(shapes, [s for s, on in zip(shapes, wrt, strict=True) if on])  # type: ignore[return-value]


def threefry(key: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
    """The two words of 32 random bits for each pair of counts. key: a key of the threefry generator."""
    import jax
    from jax.extend.random import threefry2x32_p

    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(first, second, *counts)
    return high, low


def without_dead_code(closed: Any, needed: Sequence[bool] | None = None) -> Any:
    """The jaxpr without equations that no needed result depends on. A derivative rule, for example, also computes the
    gradients of operands that need none.

    needed: for each result, whether it is needed; results that are not needed are removed. None: all are needed.
    """
    from jax.extend.core import ClosedJaxpr
    from jax.interpreters.partial_eval import dce_jaxpr

    jaxpr, consts = opened(closed)
    used = [True] * len(jaxpr.outvars) if needed is None else list(needed)
    live, *_ = dce_jaxpr(jaxpr, used, instantiate=True)  # type: ignore[arg-type]
    return ClosedJaxpr(live, consts)


class DependsOnShapes(ValueError):
    """A result depends on arguments of which only the shapes are known."""


def only_needed(fn: Callable[..., Any], *given: Any) -> Any:
    """The result of a function, traced without the equations that it does not depend on.

    given: shapes of its arguments. Raises DependsOnShapes if the result depends on their values.
    """
    import jax

    run, form = jax.make_jaxpr(fn, return_shape=True)(*given)
    live = without_dead_code(run)
    jaxpr, _ = opened(live)
    if not set(jaxpr.invars).isdisjoint(v for e in jaxpr.eqns for v in e.invars if not is_literal(v)):
        raise DependsOnShapes
    nothing = [jax.numpy.zeros(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.tree.unflatten(jax.tree.structure(form), called(live)(*nothing))


def _debug_info_inside(eqn: Eqn) -> DebugInfo:
    """The debug info of the jaxpr inside a call, used to run only this call."""
    jaxpr: Any = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    return opened(jaxpr)[0].debug_info._replace(arg_names=None, result_paths=None)


def implementation(eqn: Eqn) -> Jaxpr | None:
    """The jaxpr of a primitive that a library implements in JAX code. None for one of JAX's own primitives."""
    import jax

    code: Any = getattr(eqn.primitive, "impl", None)
    module = str(getattr(getattr(code, "func", code), "__module__", "jax"))
    if module.partition(".")[0] == "jax":
        return None
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(lambda *args: code(*args, **eqn.params))(*given).jaxpr


def called(closed: ClosedJaxpr) -> Callable[..., list[Array]]:
    """A program as a function f(*arrays) -> arrays."""
    from jax.extend.core import jaxpr_as_fun

    return jaxpr_as_fun(closed)  # type: ignore[no-any-return]


def function_of(
    closed: ClosedJaxpr, eqns: Sequence[Eqn], reads: Sequence[Var], makes: Sequence[Var]
) -> Callable[..., list[Array]]:
    """Some equations of a jaxpr as a function, from the values of the variables ``reads`` to those of ``makes``."""
    jaxpr, consts = opened(closed)
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return called(_assembled(jaxpr.constvars, reads, makes, eqns, info, consts))


def evaluate(eqn: Eqn, ins: Sequence[Array], info: DebugInfo) -> list[Any]:
    """Runs one equation on values (or tracers). Results that nothing reads are None. info: its jaxpr's debug info.

    An equation may read one variable several times (``y.T @ y``) with a different part of it each time. ``ins`` has one
    value per operand, so each operand becomes a variable of its own.
    """
    from jax.extend import core

    own = (v if is_literal(v) else core.Var(v.aval) for v in eqn.invars)  # type: ignore[arg-type]
    reads = cast("list[Var]", list(own))
    eqn = eqn.replace(invars=reads)
    args = {v: x for v, x in zip(reads, ins, strict=True) if not is_literal(v)}
    kept = [v for v in eqn.outvars if not is_dropped(v)]
    outs = iter(called(_assembled((), list(args), kept, [eqn], info, ()))(*args.values()))
    return [None if is_dropped(v) else next(outs) for v in eqn.outvars]


def _assembled(
    constvars: Sequence[Var],
    reads: Sequence[Var],
    makes: Sequence[Var],
    eqns: Sequence[Eqn],
    info: DebugInfo,
    consts: Sequence[Array],
) -> ClosedJaxpr:
    """A jaxpr of these equations, in JAX's own classes."""
    from jax.extend import core

    effects = frozenset[object]().union(*(e.effects for e in eqns))
    jaxpr: Any = core.Jaxpr
    return core.ClosedJaxpr(jaxpr(constvars, list(reads), list(makes), list(eqns), effects, info), consts)
