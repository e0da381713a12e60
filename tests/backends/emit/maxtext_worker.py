"""Reads a configuration with MaxText's own parser and rules, under an interpreter that has MaxText. Not a test module.

python maxtext_worker.py FILE prints one JSON object: the batch, the mesh, and the layout of each
array of ``LOGICAL``, dim by dim. The models' sizes are small, so that eight CPU devices of one process do.
"""

import json
import os
import sys

LOGICAL = {
    "attention.wq": ("embed_attn", "q_heads", "kv"),
    "attention.wk": ("embed_attn", "kv_heads", "kv_head_dim"),
    "attention.wv": ("embed_attn", "kv_heads", "kv_head_dim"),
    "attention.wo": ("heads", "kv", "embed_attn"),
    "ff.gate": ("embed", "mlp"),
    "ff.up": ("embed", "mlp"),
    "ff.down": ("mlp", "embed"),
    "norm1": ("norm",),
    "norm2": ("norm",),
    "embedding": ("vocab", "embed_vocab"),
    "output": ("embed_vocab", "vocab"),
}
"""Weight -> the logical axes that MaxText 0.2.5 gives it (layers/attentions.py, linears.py, embeddings.py)."""


def main(file: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from maxtext.configs import pyconfig
    from maxtext.utils.maxtext_utils import create_device_mesh
    from maxtext.utils.sharding import logical_to_mesh_axes

    run = ["run_name=read", "base_output_directory=/tmp/read", "hardware=gpu", "dataset_type=synthetic"]
    config = pyconfig.initialize([None, file, *run, "enable_checkpointing=false"])
    mesh = jax.sharding.Mesh(create_device_mesh(config), config.mesh_axes)

    def layout(axes: tuple[str, ...]) -> list[list[str]]:
        spec = logical_to_mesh_axes(axes, mesh, rules=config.logical_axis_rules)
        dims = [(x,) if isinstance(x, str) else x or () for x in (*spec, *[None] * (len(axes) - len(spec)))]
        return [[a for a in dim if mesh.shape[a] > 1] for dim in dims]

    found = {
        "batch": config.global_batch_size_to_train_on,
        "mesh": {k: n for k, n in mesh.shape.items() if n > 1},
        "remat": config.remat_policy,
        "layouts": {name: layout(axes) for name, axes in LOGICAL.items()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
