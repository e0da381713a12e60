if __name__ != "pase.backends":  # a second copy of every module would follow, silently
    raise ImportError(
        "import pase.backends, not backends (the folder at the top of the repository is linked into pase)"
    )
