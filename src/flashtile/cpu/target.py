"""Which instructions the kernels may use: read from Numba, so NUMBA_CPU_NAME and NUMBA_CPU_FEATURES restrict
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.core.registry import cpu_target


@dataclass(frozen=True)
class Target:
    """One instruction set and the register tile that suits it (rows x columns accumulators)."""

    name: str
    vector_bytes: int
    rows: int
    columns: int
    bfloat16_dot: bool = False
    scale_exponent: bool = False
    half_conversion: bool = False

    @property
    def lanes(self) -> int:
        """float32 values in one vector."""
        return self.vector_bytes // 4


def detect() -> Target:
    """The target of this process: AVX-512 (with or without bfloat16 dot products), AVX2, ARM, or generic."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return from_features(triple, set(features.split(",")))


def from_features(triple: str, features: set[str]) -> Target:
    """The target for an LLVM triple and its enabled features, spelled '+avx2'."""
    if triple.startswith(("aarch64", "arm64")):
        return Target("ARM NEON", 16, 4, 4, half_conversion=True)
    if {"+avx512f", "+avx512vl", "+avx512bw", "+avx512dq"} <= features:
        dot = "+avx512bf16" in features
        name = "AVX-512 + BF16 dot products" if dot else "AVX-512"
        return Target(name, 64, 4, 4, bfloat16_dot=dot, scale_exponent=True, half_conversion=True)
    if {"+avx2", "+fma", "+f16c"} <= features:
        return Target("AVX2", 32, 6, 2, half_conversion=True)
    return Target("generic", 16, 4, 2)
