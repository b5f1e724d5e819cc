"""What the lab and the training run refuse: names that they do not know, and sizes that are none."""

from __future__ import annotations

from collections.abc import Collection


def check_choice(name: str, given: object, known: Collection[str]) -> None:
    """A ValueError unless ``given`` is one of those that are known."""
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")


def check_sizes(**sizes: object) -> None:
    """A TypeError or ValueError for the first of these, by their names, that is no int or is below 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
