"""``pase doctor``: what is installed, what is missing, which devices are seen, and one tiny plan."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from pase import __version__
from pase.commands.options import JsonOption, print_json, progress
from pase.errors import DISTRIBUTION, PaseError, install_line
from pase.files.json_values import JsonObject
from pase.files.terminal import console

__all__ = ["doctor"]

PURPOSE = "This installation"
USES_DEVICES = True

EXTRAS = {
    "jax": ("JAX models, and plans that run in JAX", ("jax", "optax")),
    "torch": ("PyTorch modules, and plans that run in PyTorch", ("torch",)),
    "onnx": ("ONNX files", ("onnx",)),
    "tf": ("Keras, SavedModel, Mesh-TensorFlow", ("tensorflow-cpu", "mesh-tensorflow")),
    "traces": ("traces of any framework", ("ijson", "pyarrow", "protobuf")),
    "checkpoints": ("checkpoints of JAX plans", ("orbax-checkpoint",)),
}
"""Extra -> (what it is for, its packages)."""
_ALSO = {"tensorflow-cpu": ("tensorflow",)}
"""Package -> others that have the same modules."""

_DEVICES = {
    "jax": "import jax; d = jax.devices(); print(len(d), d[0].platform, getattr(d[0], 'device_kind', ''))",
    "torch": "import torch; n = torch.cuda.device_count(); "
    "print(n or 1, 'cuda ' + torch.cuda.get_device_name(0) if n else 'cpu')",
}
"""Framework -> a program that prints the devices that it sees. It runs in a process of its own, which may fail."""


def doctor(json: JsonOption = False) -> None:
    """Check this installation: packages, devices, a tiny plan.

    Prints which frameworks are installed and with which versions, what each missing extra would bring and the command
    that installs it, the devices that JAX and PyTorch see, the folder of compiled kernels, and the time of a tiny plan.
    The exit status is 1 if the tiny plan cannot be made.

    \b
    Example:
      pase doctor
    """
    with progress() as say:
        say("looking at packages")
        extras = {name: _extra(name) for name in EXTRAS}
        say("asking for devices")
        devices = {name: _devices(name) for name in _DEVICES if not extras[name]["missing"]}
        say("making a tiny plan")
        plan = _tiny_plan()
    kernels = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parents[1])
    found: JsonObject = {
        "pase": __version__,
        "other_pase": _other_pase(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("numpy", "scipy", "numba")},
        "extras": extras,
        "devices": devices,
        "kernel_cache": {"folder": str(kernels), "writable": os.access(kernels, os.W_OK)},
        "plan": plan,
    }
    if json:
        print_json(found)
    else:
        _print(found)
    if plan["error"] is not None:
        raise PaseError(f"a tiny plan cannot be made: {plan['error']}", fix="see what is missing above")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _other_pase() -> str | None:
    """The version of the other program called pase, if it is installed too: both write into the folder ``pase``."""
    return None if _version(DISTRIBUTION) is None else _version("pase")


def _extra(name: str) -> JsonObject:
    purpose, packages = EXTRAS[name]
    versions = {
        p: next((v for q in (p, *_ALSO.get(p, ())) if (v := _version(q)) is not None), None) for p in packages
    }
    missing = [p for p, version in versions.items() if version is None]
    return {
        "for": purpose,
        "versions": versions,
        "missing": missing,
        "install": install_line(name) if missing else None,
    }


def _devices(framework: str) -> str:
    """What a framework sees, or why it fails, in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES[framework]],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer within 120 s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return (
        (lines[-1] if lines else "no answer")
        if done.returncode == 0
        else f"fails: {lines[-1] if lines else ''}"
    )


def _tiny_plan() -> JsonObject:
    """Seconds of a plan of two products on two devices, and its mesh; error: why there is none."""
    start = time.perf_counter()
    try:
        from pase.api import compile

        plan = compile("zoo:mlp?layers=1&batch=64", devices=2, baselines=False)
    except (PaseError, ImportError) as e:
        return {"seconds": None, "mesh": None, "error": str(e)}
    return {"seconds": time.perf_counter() - start, "mesh": plan.mesh.by_name, "error": None}


def _print(found: JsonObject) -> None:
    from pase.plan.columns import columns

    out = console()
    packages = ", ".join(f"{k} {v}" for k, v in found["packages"].items())
    out.print(f"pase {found['pase']} with Python {found['python']}, {packages}")
    if found["other_pase"] is not None:
        out.print(
            f"another program called pase ({found['other_pase']}) is installed in the same place: run "
            f"pip uninstall pase, then install {DISTRIBUTION} again",
            style="bold red",
        )
    out.print()
    table = columns("extra", "for", "installed", left=("extra", "for", "installed"), overflow="fold")
    for name, e in found["extras"].items():
        has = ", ".join(f"{p} {v}" for p, v in e["versions"].items() if v is not None)
        table.add_row(name, e["for"], f"no: {e['install']}" if e["missing"] and not has else has)
    out.print(table)
    out.print()
    for name, said in found["devices"].items():
        out.print(f"devices that {name} sees: {said}")
    cache = found["kernel_cache"]
    kept = "kept in" if cache["writable"] else "NOT kept, because nothing can be written in"
    out.print(f"compiled kernels are {kept} {cache['folder']}")
    plan = found["plan"]
    if plan["error"] is None:
        out.print(f"a tiny plan took {plan['seconds']:.1f} s: all is well")
