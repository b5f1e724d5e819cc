"""The GPU engine: ``kernels``, Triton forward and backward; ``fallback``, what serves where they cannot.

Importing this package loads no compiler.
"""
