"""The innermost block of ``flashtile.parallel.context_parallel``, for the integrations.

They learn of it here, so that nothing of torch.distributed is imported before someone needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtile.parallel.context import ContextParallel

# Of the process, not of a thread: the backward pass runs in others, and may attend again (checkpoints).
_contexts: list[ContextParallel] = []


def current() -> ContextParallel | None:
    return _contexts[-1] if _contexts else None


@contextlib.contextmanager
def entered(context: ContextParallel) -> Iterator[None]:
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.remove(context)
