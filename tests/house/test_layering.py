"""Checks which module may import which. The imports are read from the code with ast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from tests.house.test_style import parsed

ROOT = Path(__file__).parents[2]

FRAMEWORKS = {
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "equinox",
    "tensorflow",
    "keras",
    "mesh_tensorflow",
    "onnx",
    "onnxscript",
    "torch",
}
SOLVERS = {"ortools", "highspy", "cvxpy"}

# Modules that every layer may import: errors, registries, cached and deferred results, garbage collection, deadlines,
# the type of pytrees, compiled kernels, former names of modules, and files and quantities.
FOUNDATION = {
    "pase.clock",
    "pase.compiled",
    "pase.errors",
    "pase.files",
    "pase.former",
    "pase.garbage",
    "pase.later",
    "pase.once",
    "pase.pytree",
    "pase.registry",
}

# layer -> the other layers of pase that it may import, in addition to the foundation and its own modules. Layers are
# listed from the bottom up. Every package and module of pase has a row, and imports inside functions count.
MAY_IMPORT: dict[str, set[str]] = {
    "pase.errors": set(),
    "pase.clock": set(),
    "pase.former": set(),
    "pase.registry": set(),
    "pase.once": set(),
    "pase.garbage": set(),
    "pase.later": set(),
    "pase.pytree": set(),
    "pase.compiled": set(),
    "pase.files": set(),
    # Building blocks of HTML pages, for any content.
    "pase.pages": set(),
    "pase.ir": set(),
    "pase.ops": {"pase.ir"},
    "pase.machine": {"pase.ir"},
    "pase.frontends": {"pase.ir", "pase.ops"},
    "pase.zoo": {"pase.ir"},
    "pase.costmodels": {"pase.ir", "pase.machine"},
    "pase.tables": {"pase.ir", "pase.machine", "pase.ops"},
    "pase.search": {"pase.tables"},
    "pase.baselines": {"pase.ir", "pase.machine", "pase.tables", "pase.search"},
    "pase.paper": {"pase.ir", "pase.tables", "pase.search"},
    "pase.memory": {"pase.ir", "pase.machine", "pase.tables", "pase.search", "pase.ops"},
    "pase.schedule": {"pase.ir", "pase.machine", "pase.pages"},
    "pase.hlo": {"pase.machine"},
    "pase.replay": {"pase.ir", "pase.machine", "pase.hlo", "pase.pages"},
    "pase.calibrate": {"pase.machine", "pase.replay"},
    # Schedules of stages, their simulation and the best cuts. Inputs and results are numbers.
    "pase.pipeline": set(),
    # Plan data and what follows from it: its file, its table, and its communication as a scheduling problem.
    "pase.plan": {
        "pase.ir",
        "pase.ops",
        "pase.machine",
        "pase.tables",
        "pase.memory",
        "pase.costmodels",
        "pase.schedule",
        "pase.replay",
        "pase.pipeline",
    },
    # The program of one device under a strategy. Backends translate it to their frameworks.
    "pase.local": {"pase.ir", "pase.machine", "pase.tables", "pase.schedule", "pase.plan"},
    # A backend finds its framework's ops by the numbers that the framework's frontend gave them. It reads layouts from
    # the tables and runs bucket plans, but it computes no prices.
    "pase.backends": {
        "pase.ir",
        "pase.ops",
        "pase.machine",
        "pase.plan",
        "pase.memory",
        "pase.frontends",
        "pase.tables",
        "pase.schedule",
        "pase.hlo",
        "pase.local",
        "pase.pipeline",
    },
    "pase.compiler": {
        "pase.ir",
        "pase.machine",
        "pase.frontends",
        "pase.zoo",
        "pase.costmodels",
        "pase.tables",
        "pase.search",
        "pase.baselines",
        "pase.memory",
        "pase.pipeline",
        "pase.plan",
    },
    # Strategies that users give, applied to the same graph and priced as a program runs them.
    "pase.stated": {
        "pase.ir",
        "pase.machine",
        "pase.frontends",
        "pase.costmodels",
        "pase.tables",
        "pase.baselines",
        "pase.memory",
        "pase.pipeline",
        "pase.plan",
        "pase.compiler",
    },
    "pase.questions": {
        "pase.ir",
        "pase.machine",
        "pase.costmodels",
        "pase.tables",
        "pase.search",
        "pase.memory",
        "pase.pipeline",
        "pase.plan",
        "pase.compiler",
        "pase.schedule",
        "pase.pages",
    },
    "pase.api": {
        "pase.frontends",
        "pase.plan",
        "pase.backends",
        "pase.compiler",
        "pase.stated",
        "pase.pages",
    },
    "pase.bridges": {
        "pase.machine",
        "pase.tables",
        "pase.pipeline",
        "pase.schedule",
        "pase.replay",
        "pase.plan",
        "pase.stated",
        "pase.api",
    },
    "pase.commands": {
        "pase.machine",
        "pase.frontends",
        "pase.zoo",
        "pase.costmodels",
        "pase.search",
        "pase.schedule",
        "pase.replay",
        "pase.calibrate",
        "pase.plan",
        "pase.backends",
        "pase.compiler",
        "pase.stated",
        "pase.questions",
        "pase.api",
        "pase.bridges",
    },
    "pase.cli": {"pase.commands"},
    "pase.__main__": {"pase.cli"},
    "pase": {"pase.api", "pase.replay"},
}

# room (a folder inside a package) -> the rooms of the same package that it may import. The files directly in a folder
# are also a room: in pase/search they are types and oracles, which the inner folders use, and the entry point, which
# uses the inner folders.
ROOMS: dict[str, set[str]] = {
    "pase.frontends.common": {"pase.frontends"},
    "pase.frontends.jax": {"pase.frontends", "pase.frontends.common"},
    "pase.frontends.jax.padding": {"pase.frontends", "pase.frontends.jax"},
    "pase.frontends.onnx": {"pase.frontends", "pase.frontends.common"},
    "pase.frontends.tf": {"pase.frontends", "pase.frontends.common"},
    "pase.frontends.torch": {"pase.frontends", "pase.frontends.common", "pase.frontends.torch.export"},
    "pase.frontends.torch.export": {"pase.frontends", "pase.frontends.torch"},
    "pase.search": {"pase.search.bounded", "pase.search.elimination", "pase.search.limits"},
    "pase.search.bounded": {"pase.search", "pase.search.elimination"},
    "pase.search.limits": {"pase.search", "pase.search.bounded", "pase.search.elimination"},
    "pase.search.instances": {"pase.search"},
    "pase.search.methods": {"pase.search", "pase.search.bounded"},
    "pase.pipeline.schedules": {"pase.pipeline"},
    "pase.schedule.policies": {"pase.schedule"},
    "pase.replay.traces": {"pase.replay"},
    "pase.replay.measurement": {"pase.replay"},
    "pase.replay.simulation": {"pase.replay", "pase.replay.measurement"},
    "pase.replay.changes": {"pase.replay", "pase.replay.measurement", "pase.replay.simulation"},
    "pase.replay.reports": {
        "pase.replay",
        "pase.replay.changes",
        "pase.replay.measurement",
        "pase.replay.simulation",
        "pase.replay.traces",
    },
    "pase.compiler.meshes": {"pase.compiler.problem"},
    "pase.compiler.stages": {"pase.compiler.meshes", "pase.compiler.problem"},
    "pase.compiler": {"pase.compiler.meshes", "pase.compiler.problem", "pase.compiler.stages"},
    "pase.backends.emit": {"pase.backends", "pase.backends.mesh_tf"},
    "pase.backends.jax.spmd": {"pase.backends.jax.ops"},
    "pase.backends.jax.steps": {"pase.backends.jax.spmd"},
    "pase.backends.jax": {
        "pase.backends.jax.ops",
        "pase.backends.jax.spmd",
        "pase.backends.jax.steps",
    },
    "pase.backends.jax.pipeline": {
        "pase.backends.jax",
        "pase.backends.jax.ops",
        "pase.backends.jax.spmd",
        "pase.backends.jax.steps",
    },
    "pase.backends.torch": {"pase.backends.jax", "pase.backends.torch.spmd"},
    "pase.backends.torch.pipeline": {"pase.backends.torch", "pase.backends.torch.spmd"},
    "pase.backends.audit": {
        "pase.backends.jax",
        "pase.backends.jax.pipeline",
        "pase.backends.jax.spmd",
        "pase.backends.jax.steps",
        "pase.backends.torch",
        "pase.backends.torch.spmd",
    },
}

# Rooms that import each other: the files directly in a folder, and folders inside it. No entry may be added.
MUTUAL = {
    frozenset({"pase.frontends.torch", "pase.frontends.torch.export"}),
    frozenset({"pase.search", "pase.search.bounded", "pase.search.limits"}),
}

# layer -> the packages that it may import at the top of a file, in addition to the standard library and numpy.
OUTSIDE: dict[str, set[str]] = {
    "pase.compiled": set(),
    "pase.files": {"msgspec"},
    "pase.plan": {"msgspec"},
    "pase.ir": {"sympy", "networkx"},
    "pase.ops": {"sympy"},
    "pase.machine": {"msgspec"},
    "pase.tables": set(),
    "pase.search": {"numba"},
    "pase.schedule": {"numba", "networkx", "scipy", "msgspec"},
    "pase.hlo": set(),
    "pase.pipeline": {"numba", "scipy"},
    "pase.replay": {"numba", "networkx", "scipy", "msgspec"},
    "pase.calibrate": set(),
    "pase.costmodels": set(),
    "pase.frontends": {"sympy", "networkx"},
    "pase.backends": set(),
    "pase.baselines": set(),
    "pase.paper": set(),
    "pase.zoo": {"jax"},  # the models, each of which is loaded when it is used
    "pase.commands": {"typer"},
    "pase": {"typer"},
}

MAY_USE_FRAMEWORKS = {
    "pase.calibrate",
    "pase.frontends",
    "pase.backends",
    "pase.hlo",
    "pase.zoo",
    "pase.commands",
    "pase",
}

# Layers that use numba: at the top of files named *kernel*, and elsewhere inside functions.
COMPILED = {"pase.compiled", "pase.tables", "pase.search", "pase.replay", "pase.schedule", "pase.pipeline"}


def modules() -> list[tuple[str, Path]]:
    """The (dotted name, file) of every module of pase."""
    return [
        (".".join(p for p in file.relative_to(ROOT).with_suffix("").parts if p != "__init__"), file)
        for file in sorted((ROOT / "pase").rglob("*.py"))
    ]


def layer(name: str) -> str:
    """The layer of a module: its package under pase, or the module itself if it is directly under pase."""
    return ".".join(name.split(".")[:2])


def for_types_alone(node: ast.If) -> bool:
    """Whether it is ``if TYPE_CHECKING:``."""
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(
    tree: ast.Module, name: str, package: bool, known: Container[str] = ()
) -> list[tuple[str, bool, int]]:
    """The (module, at the top of the file, line) of each import, without those for type checkers only.

    For "from a.b import c", the module is a.b.c if it is among the known modules, otherwise a.b.
    """
    found: list[tuple[str, bool, int]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and for_types_alone(node):
            for other in node.orelse:
                visit(other, top)
            return
        if isinstance(node, ast.Import):
            found.extend((a.name, top, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = name.split(".")[: len(name.split(".")) - node.level + package]
                base = ".".join([*up, *([base] if base else [])])
            for whole, line in ((f"{base}.{a.name}", node.lineno) for a in node.names):
                # "from pase import search" imports pase.search.
                found.append((whole if base == "pase" or whole in known else base, top, line))
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            # Expressions have no imports.
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                visit(child, inner)

    visit(tree, True)
    return found


@cache
def read() -> list[tuple[str, Path, list[tuple[str, bool, int]]]]:
    """The (name, file, imports) of each module. Files are read when the first test needs them."""
    names = {name for name, _ in modules()}
    return [
        (name, file, imports(parsed(file), name, file.stem == "__init__", names)) for name, file in modules()
    ]


def test_the_reader_of_imports_sees_them():
    source = (
        "from typing import TYPE_CHECKING\nimport a.b\nfrom . import c\nfrom .d import e\n"
        "from pase import search\n"
        "if TYPE_CHECKING:\n    import f\ndef g():\n    import h\n"
    )
    found = imports(ast.parse(source), "pase.x.y", False)
    assert found == [
        ("typing", True, 1),
        ("a.b", True, 2),
        ("pase.x", True, 3),
        ("pase.x.d", True, 4),
        ("pase.search", True, 5),
        ("h", False, 9),
    ]
    assert len(read()) > 30


@pytest.mark.parametrize("upper", sorted(MAY_IMPORT))
def test_layers_import_downwards_only(upper):
    wrong = []
    for name, file, found in read():
        if layer(name) != upper:
            continue
        for target, _, line in found:
            if (
                layer(target) not in MAY_IMPORT or target == "pase"
            ):  # another package, or the names in pase/__init__.py
                continue
            if layer(target) not in MAY_IMPORT[upper] | FOUNDATION | {upper}:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_compiler_names_no_framework():
    """It asks any frontend in the terms of ``pase.frontends.registry`` and ``pase.frontends.blocks``. Models of the zoo
    are JAX programs, and one that generates text says so to JAX's frontend."""
    known = {("pase.compiler.resolve", "pase.frontends.jax.generation")}
    rooms = {room for room in ROOMS if room.startswith("pase.frontends.")} - {"pase.frontends.common"}
    found = {
        (name, target)
        for name, _, targets in read()
        for target, _, _ in targets
        if name.startswith("pase.compiler.") and any(f"{target}.".startswith(f"{room}.") for room in rooms)
    }
    assert found == known


def test_every_module_has_a_row():
    assert {layer(name) for name, _, _ in read()} == set(MAY_IMPORT)


def test_the_rows_lead_downwards():
    """A row names only rows above it in the table, so there is no cycle of layers."""
    order = list(MAY_IMPORT)
    upwards = [f"{a} -> {b}" for a in order for b in MAY_IMPORT[a] if order.index(b) >= order.index(a)]
    assert not upwards, upwards


def test_no_circle_of_files():
    """Imports inside functions count. \"from pase.search import solve\" imports the module if solve is a module."""
    names = {name for name, _, _ in read()}
    graph = nx.DiGraph(
        (name, target)
        for name, _, found in read()
        for target, _, _ in found
        if target in names and target not in (name, "pase")
    )
    circles = [" -> ".join(c) for c in nx.simple_cycles(graph)]
    assert not circles, "\n".join(circles)


def rooms() -> dict[str, set[str]]:
    """room -> the other rooms of its package that its modules import."""
    known = {name for name, _, _ in read()}
    room = {n: n if file.stem == "__init__" else n.rpartition(".")[0] for n, file, _ in read()}
    found: dict[str, set[str]] = {}
    for name, _, targets in read():
        for target in (t for t, _, _ in targets if t in known):
            if room[target] != room[name] and layer(target) == layer(name):
                found.setdefault(room[name], set()).add(room[target])
    return found


def test_rooms_import_what_their_row_says():
    assert rooms() == ROOMS


def test_rooms_are_in_no_circle_but_those_that_are_known():
    circles = [c for c in nx.strongly_connected_components(nx.DiGraph(rooms())) if len(c) > 1]
    assert {frozenset(c) for c in circles} == MUTUAL


@pytest.mark.parametrize("upper", sorted(OUTSIDE))
def test_heavy_packages_are_imported_where_they_are_needed(upper):
    """A file imports at its top only packages of its layer's row, and frameworks only in layers that may use them."""
    wrong = []
    for name, file, found in read():
        if (layer(name) if layer(name) in OUTSIDE else "pase") != upper:
            continue
        for target, top, line in found:
            package = target.split(".")[0]
            if package in sys.stdlib_module_names or package in ("pase", "numpy"):
                continue
            if top and package not in OUTSIDE[upper]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {package} when it is loaded")
            if package in FRAMEWORKS and upper not in MAY_USE_FRAMEWORKS:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {package}")
            if package == "numba" and (upper not in COMPILED or (top and "kernel" not in file.stem)):
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports numba outside of a kernel file")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("loaded", "besides"),
    [
        (["pase"], {"numba", "sympy", "scipy", "networkx", "typer", "rich"}),
        (["pase.cli"], {"numba", "sympy", "scipy", "networkx"}),
        (list(MAY_IMPORT), set()),
    ],
    ids=["pase", "pase.cli", "layers"],
)
def test_importing_loads_nothing_heavy(loaded, besides):
    """All layers are imported in one process, one after another, so this covers what each one loads."""
    heavy = FRAMEWORKS | SOLVERS | {"plotly", "pandas"} | besides
    program = (
        f"import importlib, sys\nfor name in {loaded!r}:\n    importlib.import_module(name)\n"
        f"    assert not (found := {heavy!r} & sys.modules.keys()), (name, found)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
