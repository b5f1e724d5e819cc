"""`flashtile explain`: write the page, and open it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from pathlib import Path


def run(options: argparse.Namespace) -> int:
    """Write the page to ``options.output`` and return the exit code: 1 where no browser opened it.

    ``options.refuse`` is called with a message for a path that cannot be written; it does not return.
    """
    path: Path = options.output.absolute()
    shown = str(options.output)
    if path.is_dir() or path.suffix.lower() not in (".html", ".htm"):
        options.refuse(f"--output must be a file ending in .html or .htm, got {shown!r}")
    if not path.parent.is_dir():
        options.refuse(f"--output must be in a folder that exists, got {shown!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        options.refuse(f"--output must be where files can be written, got {shown!r}")

    from flashtile.explain import build

    page = build(options.language)
    path.write_text(page, encoding="utf-8")
    if options.json:
        print(json.dumps({"output": str(path), "language": options.language, "bytes": len(page.encode())}))
    else:
        print(f"wrote {shown}, {len(page.encode()) / 1024:.0f} KiB; open {path.as_uri()} in a browser")
    if options.open and not webbrowser.open(path.as_uri()):
        print("no browser could be opened", file=sys.stderr)
        return 1
    return 0
