"""Other instruction sets than this machine's best: in processes of their own, told by Numba's variables.

The results are checked where the processor can run them; for ARM the code is only compiled.
"""

from __future__ import annotations

import platform
import re
from typing import NamedTuple

import llvmlite.binding as llvm
import pytest

from flashtile.cpu.kinds import TARGET
from flashtile.cpu.target import from_features
from tests.cpu.processes import python


class Restricted(NamedTuple):
    """A processor for Numba to compile for, and the target that must come of it."""

    expected: str
    cpu: str
    features: str


_BASE = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt"
TARGETS = {
    "avx512": Restricted(
        "AVX-512", "skylake-avx512", _BASE + ",+avx512f,+avx512cd,+avx512vl,+avx512bw,+avx512dq"
    ),
    "avx2": Restricted("AVX2", "haswell", _BASE),
    "generic": Restricted("generic", "x86-64", "+sse,+sse2"),
}


def skip_unless_runnable(target: Restricted) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{target.expected} code runs on x86-64, and this is {platform.machine()}")
    has = llvm.get_host_cpu_features()
    missing = [name for name in target.features.replace("+", "").split(",") if not has.get(name, False)]
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    if target.expected == TARGET.name:
        pytest.skip(f"{target.expected} is what every other test runs with on this processor")


CHECK = """
import itertools, sys
import torch
from flashtile import cpu
from flashtile.cpu.kinds import TARGET
from tests.cpu import decode_shapes
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem, results_of_backend

OPTIONS = (
    {},
    {"upper": 60, "random_bias": (1, 4, 1, 1), "softcap": 3.0, "random_sinks": True},
    {"dropout_p": 0.2, "seed": 5, "random_alibi": True, "value_head_dim": 7},
    {"head_dim": 33, "mask": torch.rand(2, 1, 1, 1) < 0.5},
    {"head_dim": 64, "lower": -3, "upper": 2},
)
expected, *cases = sys.argv[1:]
assert TARGET.name == expected, TARGET
for case in cases:
    name, *passes = case.split()
    dtype, checked = getattr(torch, name), 0
    sizes = [(30, 140)] if "forward" in passes else []
    sizes += [(1, 140), (1, 1100), (1, 3)] if "decode" in passes else []
    for options, (queries, keys) in itertools.product(OPTIONS, sizes):
        options = {"head_dim": 20} | options
        if "mask" in options:
            options["mask"] = torch.rand(2, 1, queries, keys) < 0.5
        problem = random_problem(query_length=queries, key_length=keys, dtype=dtype, **options)
        grad_out, grad_lse = random_gradients(problem)
        if "backward" in passes and queries > 1:
            actual = results_of_backend(cpu, problem, grad_out, grad_lse)
        else:
            out = torch.full_like(grad_out, torch.nan)
            actual = {"out": out, "lse": torch.full_like(grad_lse, torch.nan)}
            cpu.forward(problem, out, actual["lse"])
        assert_close_to_oracle(actual, problem, grad_out, grad_lse)
        checked += 1
    if "decode" in passes:
        checked += decode_shapes.check(dtype)
        decode_shapes.check_shared_vectors(dtype)
    print(name, "checked", checked)
"""

# In one process: its kernels share what Numba finds out of their parts.
CASES = {
    "avx512": ["bfloat16 forward backward decode"],
    "avx2": ["float32 forward backward decode", "bfloat16 forward backward decode"],
    "generic": [
        "float32 forward backward", "bfloat16 forward backward", "float16 forward decode", "float64 decode"
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_restricted(name):
    target = TARGETS[name]
    skip_unless_runnable(target)
    environment = {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.features}
    out = python(CHECK, target.expected, *CASES[name], timeout=900, **environment)
    checked = dict(line.split(" checked ") for line in out.splitlines())
    assert list(checked) == [case.split()[0] for case in CASES[name]]
    assert all(int(count) >= 5 for count in checked.values())


ARM = """
import re, sys, types
import flashtile

# flashtile.cpu itself would look at the processor as soon as it is imported.
package = types.ModuleType("flashtile.cpu")
package.__path__ = [f"{folder}/cpu" for folder in flashtile.__path__]
sys.modules["flashtile.cpu"] = package
import flashtile.cpu.target as target

arm = target.from_features("aarch64-unknown-linux-gnu", set())
target.from_features = lambda triple, features: arm
import llvmlite.binding as llvm
from numba import int64, njit
from flashtile.cpu import kinds
import flashtile.cpu.backward, flashtile.cpu.decode, flashtile.cpu.forward

assert kinds.TARGET == arm, kinds.TARGET
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
triple = "aarch64-unknown-linux-gnu"
machine = llvm.Target.from_triple(triple).create_target_machine(cpu="generic", opt=3, reloc="pic")
for name in sys.argv[1:]:
    kernel_name, kind_name = name.split(":")
    kernel = getattr(sys.modules[f"flashtile.cpu.{kernel_name}"], kernel_name)
    kind = getattr(kinds, kind_name)
    # A kernel has no code of its own.
    work = njit(lambda call, scratch, task: kernel(kind, call, scratch, task))
    work.compile((int64, int64, int64))
    code = work.inspect_llvm(work.signatures[0])
    code = re.sub('target triple = ".*"', f'target triple = "{triple}"', code)
    code = re.sub('target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', code)
    module = llvm.parse_assembly(code)
    module.verify()
    print("kernel", name)
    print(machine.emit_assembly(module))
"""
ARM_KERNELS = (
    "forward:FLOAT32", "backward:FLOAT32", "forward:BFLOAT16", "backward:BFLOAT16", "decode:FLOAT16",
    "decode:FLOAT64",
)  # fmt: skip

# What any aarch64 process with Python and Numba in it has: libc, libm and the two themselves.
AVAILABLE = re.compile(r"log2?f?|powf?|exp2f?|mem(cpy|set|move)|sched_yield|_?Py\w+|NRT_\w+|numba_\w+")


@pytest.fixture(scope="module")
def arm_assemblies() -> dict[str, str]:
    """The assembly of every kernel, from one process: they share what Numba finds out of their parts."""
    if "aarch64" not in llvm_targets():
        pytest.skip("this LLVM cannot compile for aarch64")
    found = re.split(r"^kernel (\S+)$", python(ARM, *ARM_KERNELS, timeout=600), flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("aarch64")
@pytest.mark.parametrize("kernel", ARM_KERNELS)
def test_compiles_for_aarch64(kernel, arm_assemblies):
    assembly = arm_assemblies[kernel]
    lanes = "2d" if kernel.endswith("FLOAT64") else "4s"
    # A number of K or V, loaded once, times a vector: no broadcast of its own.
    products = re.findall(rf"\bfmla\s+v\d+\.{lanes}, v\d+\.{lanes}, v\d+\.{lanes[1]}\[\d\]", assembly)
    assert len(products) >= 16, f"{len(products)} products by register"
    defined = set(re.findall(r"^(\S+):", assembly, re.MULTILINE))
    called = set(re.findall(r"^\s+bl?\s+([A-Za-z_]\S*)$", assembly, re.MULTILINE)) - defined
    # Functions whose address is loaded first.
    called |= set(re.findall(r":got_lo12:([A-Za-z_]\w*)\]", assembly)) - defined
    foreign = sorted(name for name in called if not AVAILABLE.fullmatch(name) and not name.startswith("_ZN"))
    assert not foreign, foreign


def llvm_targets() -> set[str]:
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        return set()
    return {"aarch64"}


@pytest.mark.parametrize(
    ("triple", "features", "name"),
    [
        ("arm64-apple-darwin23.4.0", "+neon", "ARM NEON"),
        ("aarch64-unknown-linux-gnu", "", "ARM NEON"),
        ("x86_64-pc-linux-gnu", "+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx2,+fma,+f16c", "AVX-512"),
        (
            "x86_64-pc-linux-gnu",
            "+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx512bf16",
            "AVX-512 + BF16 dot products",
        ),
        ("x86_64-pc-linux-gnu", "+avx512f,-avx512vl,+avx2,+fma,+f16c", "AVX2"),
        ("x86_64-pc-linux-gnu", "+avx2,-fma", "generic"),
        ("riscv64-unknown-linux-gnu", "", "generic"),
    ],
)
def test_target_from_features(triple, features, name):
    target = from_features(triple, set(features.split(",")))
    assert target.name == name
    assert target.rows * target.columns <= {64: 24, 32: 12, 16: 16}[target.vector_bytes]  # fits the registers
