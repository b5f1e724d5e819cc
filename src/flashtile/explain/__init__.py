"""The explainer: one page, in one file, that shows how FlashAttention works and lets one try it.

Its numbers are traces of `flashtile.lab`; what the reader edits is computed in the page. `flashtile explain`
writes it.
"""

from flashtile.explain.page import LANGUAGES, build

__all__ = ["LANGUAGES", "build"]
