"""What PyTorch saves of a module's forward for its backward, compared with what the plan's account keeps."""

from __future__ import annotations

from typing import Any

__all__ = ["row", "saved_bytes"]


def saved_bytes(module: Any, batch: tuple[Any, ...]) -> int:
    """Returns the bytes of the distinct storages that autograd saves, without parameters, buffers and inputs."""
    import torch

    given = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), *batch)}
    found: dict[int, int] = {}
    alive = []

    def pack(t: Any) -> Any:
        storage = t.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = module(*batch)
    del result
    return sum(found.values())


def row(module: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
    """Returns a row. The account keeps less if a compiler recomputes values in the fusions that read them."""
    from pase.frontends import registry
    from pase.ir import named, simplify
    from pase.memory.residuals import kept_bytes

    kept = kept_bytes(named(simplify(registry.trace(module, *batch).graph)))
    listed = saved_bytes(module, batch)
    near = abs(kept - listed) <= max(0.1 * listed, 1024)
    less = "eager PyTorch saves what a compiler makes again" if kept < listed else "unexplained"
    return {
        "kept": kept,
        "listed": listed,
        "ratio": round(kept / listed, 4) if listed else None,
        "explanation": None if near else less,
    }
