"""The local program of a plan, run by JAX inside one ``shard_map``."""
