"""``python -m pase``: the ``pase`` program, where its folder of scripts is not on the path."""

from __future__ import annotations

from pase.cli import main

if __name__ == "__main__":
    main()
