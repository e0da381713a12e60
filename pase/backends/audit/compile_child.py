"""Compiles an exported step in a process of its own: ``python -m pase.backends.audit.compile_child FOLDER``.

XLA's flags and platforms are those of a whole process, and a compiler may crash. The folder has ``job.json``
(``Job``) and ``step.bin``, the exported step. The process writes ``compiled.txt``, the compiled program, and then
``result.json``, or else ``error.json`` with the compiler's message.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pase.files.atomic import write_atomically
from pase.machine.jax_devices import as_linked

if TYPE_CHECKING:
    from jax import Device as JaxDevice

    from pase.files.json_values import JsonObject

__all__ = ["main"]


def main(folder: Path) -> None:
    import jax

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    try:
        result = _compiled(folder, job)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as e:
        error = {"type": type(e).__name__, "message": str(e)}
        write_atomically(folder / "error.json", json.dumps(error))
        sys.exit(1)
    write_atomically(folder / "result.json", json.dumps(result))


def _compiled(folder: Path, job: JsonObject) -> JsonObject:
    import jax
    import numpy as np

    exported = jax.export.deserialize(bytearray((folder / "step.bin").read_bytes()))
    found = np.array(as_linked(_devices(job))[: job["devices"]], dtype=object)
    mesh = jax.sharding.Mesh(found.reshape(job["sizes"]), job["names"])
    inputs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    step = jax.jit(
        exported.call,
        out_shardings=tuple(exported.out_shardings_jax(mesh)),
        donate_argnums=tuple(range(job["donated"])),
    )
    began = time.perf_counter()
    compiled = step.lower(*inputs).compile()
    seconds = time.perf_counter() - began
    text, m = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and m is not None  # every platform of these has both
    write_atomically(folder / "compiled.txt", text)
    return {
        "compile_s": seconds,
        "arguments": m.argument_size_in_bytes,
        "outputs": m.output_size_in_bytes,
        "aliased": m.alias_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "peak": m.peak_memory_in_bytes,
    }


def _devices(job: JsonObject) -> list[JaxDevice]:
    """The devices to compile for, in JAX's order."""
    import jax
    from jax.experimental import topologies

    if job["platform"] == "cpu":
        return jax.devices()
    if job["platform"] == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices
    return topologies.get_topology_desc(
        "", "cuda", target_config=job["config"], topology=job["topology"]
    ).devices


if __name__ == "__main__":
    main(Path(sys.argv[1]))
