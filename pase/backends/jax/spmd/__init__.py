"""The manual lowering for JAX: runs the local program of a plan inside one ``shard_map``."""
