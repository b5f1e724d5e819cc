"""flashtile beside other attention libraries: `python -m benchmarks.cpu` (see README.md here)."""
