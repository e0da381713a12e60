"""Tests the wheel and the sdist as users get them: installed without constraints, with the newest frameworks.

    python tests/wheel.py [--python 3.11,3.13] [--extras jax,onnx]     # what `make test-wheel` runs

Builds both from this tree. For each installed Python and each set of extras, makes an empty environment, installs the
wheel without pins, and runs the README's first commands for these extras in an empty folder. The sdist is unpacked and
built again, and its wheel must have the same files. Prints one line per trial. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
JAX = (
    "pase zoo",
    "pase compile zoo:gpt2 --devices 32 -o layout.json",
    "pase run layout.json --reduced --devices 8",
    "pase schedule layout.json --policy all",
)
TRIALS: dict[str, tuple[str, ...]] = {
    "": ("pase --version", "pase machines"),
    "jax": JAX,
    "jax,onnx": (
        f"python {ROOT}/examples/make_onnx.py",
        "pase compile model.onnx --devices 32 --dim batch=64",
    ),
    "jax,traces": JAX[1:2],
    "jax,tf": (
        'python -c "import keras, pase; print(pase.compile(keras.applications.MobileNetV2(weights=None), devices=8, '
        "dims={'batch': 64}).cost)\"",
    ),
    "jax,torch": ("python -c 'import torch, pase.backends.emit.ddp_hook'", *JAX[1:2]),
}
"""Extras -> the commands that a user of them runs first, in an empty folder."""
HEAVY = ("jax,torch",)
"""Extras that are tried only on request: they take gigabytes if the index has no build for CPUs."""


def run(*command: object, where: Path, path: Path | None = None) -> None:
    """Run a command. Raises RuntimeError with the end of its output if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    shell = len(command) == 1
    done = subprocess.run(
        str(command[0]) if shell else [str(c) for c in command],
        cwd=where,
        env=environment,
        shell=shell,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-1500:]
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{said}")


def built(folder: Path) -> tuple[Path, Path]:
    """Build (wheel, sdist) of this tree, from a copy because building leaves folders behind."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    run(uv(), "build", "-q", "-o", folder / "dist", source, where=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def uv() -> Path:
    """The installer uv of this environment."""
    return Path(sys.executable).with_name("uv")


def check_sdist(wheel: Path, sdist: Path, folder: Path) -> None:
    """Raise RuntimeError unless the sdist builds the same wheel and has the files of a clone."""
    with tarfile.open(sdist) as packed:
        names = {n.partition("/")[2] for n in packed.getnames()}
        # Python 3.11.4 and later have filters; the archive is our own.
        packed.extractall(
            folder / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    for wanted in (
        "tests/conftest.py",
        "docs/explanation/cost-model.md",
        "examples/train.py",
        "constraints.txt",
        "constraints-corpus.txt",
        "Makefile",
    ):
        if wanted not in names:
            raise RuntimeError(f"{sdist.name} lacks {wanted}")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(uv(), "build", "-q", "--wheel", "-o", folder / "again", unpacked, where=folder)
    (again,) = (folder / "again").glob("*.whl")
    differ = set(zipfile.ZipFile(wheel).namelist()) ^ set(zipfile.ZipFile(again).namelist())
    if differ:
        raise RuntimeError(f"the wheel from the sdist differs: {sorted(differ)[:10]}")


def found(version: str) -> Path | None:
    """A Python of this version, from the path or from pyenv; None if there is none that runs."""
    on_path = shutil.which(f"python{version}")
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (*([Path(on_path)] if on_path else []), *pyenv):
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return candidate
    return None


def attempt(wheel: Path, python: Path, extras: str, place: Path) -> None:
    """Install and run in one new environment. Raises RuntimeError if something fails."""
    empty = place / "here"
    empty.mkdir(parents=True)
    run(uv(), "venv", "-q", "-p", python, place / "env", where=empty)
    wanted = f"{wheel.name.partition('-')[0]}[{extras}] @ {wheel.as_uri()}" if extras else wheel
    if "torch" in extras.split(
        ","
    ):  # with pip, whose configuration may have an index of CPU builds; the default index has CUDA builds
        run(uv(), "pip", "install", "-q", "-p", place / "env/bin/python", "pip", where=empty)
        run(place / "env/bin/python", "-m", "pip", "install", "-q", "torch", where=empty)
    run(uv(), "pip", "install", "-q", "-p", place / "env/bin/python", wanted, where=empty)
    for command in TRIALS[extras]:
        run(command, where=empty, path=place / "env/bin")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=",".join(PYTHONS))
    parser.add_argument(
        "--extras",
        action="append",
        help="one set of extras, for example jax,onnx; may be given several times",
    )
    chosen = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, sdist = built(folder)
        check_sdist(wheel, sdist, folder)
        print(
            f"built {wheel.name} ({wheel.stat().st_size >> 10} KiB), {sdist.name}; the sdist makes the same wheel"
        )
        for python in chosen.python.split(","):
            interpreter = found(python)
            if interpreter is None:
                print(f"Python {python}: not on this machine, left out")
                continue
            for extras in (
                chosen.extras if chosen.extras is not None else [e for e in TRIALS if e not in HEAVY]
            ):
                began = time.perf_counter()
                try:
                    attempt(wheel, interpreter, extras, folder / f"{python}-{extras or 'bare'}")
                    said = "ok"
                except RuntimeError as error:
                    said, failed = f"FAILED\n{error}", failed + 1
                print(
                    f"Python {python} pase[{extras}]: {said} ({time.perf_counter() - began:.0f} s)",
                    flush=True,
                )
                shutil.rmtree(folder / f"{python}-{extras or 'bare'}", ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
