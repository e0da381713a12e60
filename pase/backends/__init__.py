"""Backends: run a plan in JAX or PyTorch, or write it to a file for another program."""

from pase.former import former_names

former_names(
    __name__,
    {
        "mtf_ops": "mesh_tf.runtime_ops",
        "mtf_run": "mesh_tf.run",
        "mtf_shim": "mesh_tf.shim",
        "to_dtensor": "emit.tf_dtensor",
        "to_fsdp2": "emit.fsdp2",
        "to_jax": "jax.plan",
        "to_jax_buckets": "jax.bucket_runner",
        "to_mesh_tf": "emit.mesh_tf",
        "to_names": "emit.shardings_json",
        "to_onnx": "emit.onnx",
        "to_torch": "emit.ddp_hook",
        "to_torch_schedule": "emit.torch_schedule",
        "to_torchtitan": "emit.torchtitan",
        "to_tp_plan": "emit.tp_plan",
    },
)
