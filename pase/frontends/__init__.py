if __name__ != "pase.frontends":  # a second copy of every module would follow, silently
    raise ImportError(
        "import pase.frontends, not frontends (the folder at the top of the repository is linked into pase)"
    )
