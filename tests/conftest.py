"""Settings that must stand before jax or numba is imported, and the hypothesis profiles."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")  # the default one kills forked children
# Tests compile much and run little: machine code is left unoptimised (the program it is made from is not).
for flag, value in (("xla_force_host_platform_device_count", DEVICES), ("xla_backend_optimization_level", 0)):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}".strip()
# Compiled programs are kept between runs; a fresh checkout starts without any.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py; its device count is already settled")

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
