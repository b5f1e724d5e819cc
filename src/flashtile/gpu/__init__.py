"""The GPU engine: ``engine``, Triton kernels in both passes; ``fallback``, what serves where they cannot.

Importing this package loads no compiler.
"""
