"""The contest's own example (README of its repository), and the example with a change."""

from __future__ import annotations

import json
from typing import Any

# The contest's own example (README of its repository): 5 is forbidden, one edge, two strategies each.
PROBLEM = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[15, 75], [50, 65], [0, 0]],
            "costs": [[15, 55, 65], [45, 10], [1, 0]],
            "usages": [[10, 25, 20], [45, 50], [99, 99]],
        },
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[30, 40, 10, 10**18, 0, 5], [1, 2, 3, 4]]},
        "usage_limit": 70,
    }
}


def changed(*path_and_value: Any) -> Any:
    """PROBLEM with one value changed."""
    doc = json.loads(json.dumps(PROBLEM))
    *path, last, value = path_and_value
    at = doc
    for key in path:
        at = at[key]
    at[last] = value
    return doc
