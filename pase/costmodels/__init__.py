if __name__ != "pase.costmodels":  # a second copy of every module would follow, silently
    raise ImportError(
        "import pase.costmodels, not costmodels (the folder at the top of the repository is linked into pase)"
    )

from pase.costmodels.registry import get, names, register

__all__ = ["get", "names", "register"]
