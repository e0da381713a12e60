"""The two ways in which a request fails; the CLI turns them into exit codes 2 and 1."""

__all__ = ["Infeasible", "PaseError"]


class PaseError(ValueError):
    """Bad input: the message says what, where, and what to do. Exit code 2."""


class Infeasible(PaseError):
    """A sound request that cannot be met: nothing fits, no strategy exists. Exit code 1."""
