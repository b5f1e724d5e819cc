"""`python -m flashtile` is the command `flashtile`."""

import sys

from flashtile.cli import main

sys.exit(main())
