"""The model zoo: ordinary JAX models at their published sizes, and also in small sizes that run anywhere.

>>> from pase import zoo
>>> zoo.get("gpt2?batch=32&seq=512").settings["seq"]
512

A model is a pure function ``loss_fn(params, batch) -> scalar`` over plain dicts, together with the shapes of both.
The compiler has no knowledge of these models; it traces them like any user's model. Importing this package does not
import JAX; asking for a model does.
"""

from pase.zoo.catalog import Entry
from pase.zoo.registry import ZooModel, entry, get, names, reduced

__all__ = ["Entry", "ZooModel", "entry", "get", "names", "reduced"]
