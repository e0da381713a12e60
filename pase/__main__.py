"""``python -m pase`` runs the ``pase`` program, for environments whose scripts are not on the path."""

from __future__ import annotations

from pase.cli import main

if __name__ == "__main__":
    main()
