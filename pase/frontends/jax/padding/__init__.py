"""JAX programs in which some extents are padded."""

from pase.frontends.blocks import PADDINGS, PaddingWays
from pase.frontends.jax.padding.program import extents, padded

PADDINGS.add("jax", PaddingWays(padded=padded, extents=extents))
