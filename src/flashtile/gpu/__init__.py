"""The GPU engine: ``engine``, Triton kernels forward and backward; ``fallback``, what serves without them.

Importing this package loads no compiler.
"""
