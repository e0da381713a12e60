if __name__ != "pase.frontends":  # a second copy of every module would follow, silently
    raise ImportError(
        "import pase.frontends, not frontends (the folder at the repository's top is pase's own)"
    )
