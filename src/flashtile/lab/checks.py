"""What the lab refuses: names that it does not know, and sizes that are none."""

from __future__ import annotations

from collections.abc import Sequence


def check_choice(name: str, given: str, known: Sequence[str]) -> None:
    """A ValueError unless ``given`` is one of those that are known."""
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")


def check_sizes(**sizes: int) -> None:
    """A ValueError for the first of these, by the names of the arguments, that is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
