"""``python -m flashtile.masks``: the same as ``flashtile masks``."""

import sys

from flashtile.cli import main

if __name__ == "__main__":
    sys.exit(main(["masks", *sys.argv[1:]]))
