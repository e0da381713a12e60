if __name__ != "pase.costmodels":  # a second copy of every module would follow, silently
    raise ImportError(
        "import pase.costmodels, not costmodels (the folder at the repository's top is pase's own)"
    )

from pase.costmodels.registry import get, names, register

__all__ = ["get", "names", "register"]
