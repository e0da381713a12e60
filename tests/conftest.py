"""Settings that must be made before jax or numba is imported, hypothesis profiles, and skipping of tests by need."""

import gc
import os
import re
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.needs import NEEDS
from tests.program import COMPILED_QUICKLY

DEVICES = 8
ROOT = Path(__file__).parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")  # the default layer kills forked child processes
os.environ.pop(
    "COLUMNS", None
)  # pytest-xdist sets it in its workers; a test that depends on the width sets its own
for flag in (f"--xla_force_host_platform_device_count={DEVICES}", *COMPILED_QUICKLY.split()):
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# Compiled programs are cached between runs. A fresh checkout starts with an empty cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))

if "jax" in sys.modules:
    raise RuntimeError(
        "jax was imported before tests/conftest.py, so its device count cannot be set any more"
    )

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts in golden/ folders again")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of this name in the folder ``golden`` beside the test, without source lines.

    After an intended change: ``pytest TEST --update-golden``, read the diff, commit it.
    """

    def check(name: str, text: str) -> None:
        file = request.path.parent / "golden" / f"{name}.txt"
        text = re.sub(r' source="[^"\n]*"', "", text)
        if request.config.getoption("--update-golden", default=False):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert text == file.read_text()

    return check


@pytest.fixture
def double():
    """JAX in float64."""
    import jax

    with jax.enable_x64(True):
        yield


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":  # not xdist's controller, which collects nothing
        # Until tests are collected: imports leave little garbage, and to look for it takes a sixth of that time.
        gc.disable()
    elif not any(ROOT.glob("pase/search/**/*.nbi")):
        compile_kernels(config)
    for name, need in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {need.reason}")
    config.addinivalue_line("markers", "some(n): n of the cases run, evenly spread; the others need release")


def compile_kernels(config: pytest.Config) -> None:
    """Compile kernels into numba's cache while the workers collect tests. Otherwise, each worker would compile them."""
    command = [sys.executable, "-m", "tests.kernels.cases"]
    compiling = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    config.add_cleanup(compiling.wait)
    config.add_cleanup(compiling.terminate)  # cleanups run in reverse order


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that run only before a release."""
    cases = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("some")) is not None:
            cases[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (_, n), of_one in cases.items():
        run = {round((i + 0.5) * len(of_one) / n - 0.5) for i in range(n)}
        for i, item in enumerate(of_one):
            if i not in run:
                item.add_marker("release")


def pytest_collection_finish():
    """Make the garbage collector run less often, which saves a twentieth of the CPU time.

    Tracing makes millions of objects. Collections are thirty times rarer than by default, and never scan the modules
    and tests that exist now. What outlives a full collection is in caches, mostly JAX's, and is not scanned again.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    gc.callbacks.append(_freeze_after_full_collections)
    if "jax" in sys.modules:
        _keep_contexts_of_mlir()


def _freeze_after_full_collections(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def _keep_contexts_of_mlir(programs: int = 100) -> None:
    """JAX lowers so many programs in the same context, instead of one. Most programs of the tests are single ops, and a
    context takes longer than the op: a tenth of the CPU time of the tests that run programs."""
    from jax._src.interpreters import mlir

    make, kept = mlir.make_ir_context, threading.local()

    def context():
        if getattr(kept, "left", 0) == 0:
            kept.context, kept.left = make(), programs  # not forever, because a context keeps all constants
        kept.left -= 1
        return kept.context

    mlir.make_ir_context = context


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for name, need in NEEDS.items():
        for mark in item.iter_markers(name):
            why = "not asked for" if need.asked and name not in item.config.option.markexpr else None
            if (why := why or need.missing(*mark.args)) is not None:
                pytest.skip(f"{need.reason} ({why})")


def skipped(terminal):
    """Reason for skipping -> number of tests. The text in brackets at the end, which differs by test, is removed."""
    reasons = (report.longrepr[2].removeprefix("Skipped: ") for report in terminal.stats.get("skipped", ()))
    return Counter(reason.partition(" (")[0] for reason in reasons)


def pytest_terminal_summary(terminalreporter):
    if found := skipped(terminalreporter):
        terminalreporter.section("skipped, and how to run it")
        for reason, count in sorted(found.items()):
            terminalreporter.write_line(f"{count:5} {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Under CI, a test that is skipped for a reason other than a known need fails the run."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or terminal is None or hasattr(session.config, "workerinput"):
        return
    if others := skipped(terminal).keys() - {need.reason for need in NEEDS.values()}:
        terminal.write_line(
            f"\nskipped for reasons that tests/needs.py does not know: {sorted(others)}", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
