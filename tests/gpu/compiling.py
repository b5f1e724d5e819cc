"""The kernels compiled for GPUs that are not here, and what came of it.

A driver that only names an architecture lets the engine's own host code compile what it would launch.
`python -m tests.gpu.compiling ARCHITECTURE CASE...` does so in a process of its own and prints a line of JSON
for every case; a case is spelled KERNEL:DTYPE:HEAD_DIM:FEATURES.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashtile.gpu.target import Target
from flashtile.problem import AttentionProblem, Gradients, Part
from tests.oracle import random_problem
from tests.packing import into_pages

_KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("sm75", 64 * _KIB, 32, 40),
        Target("sm80", 163 * _KIB, 32, 108),
        Target("sm86", 99 * _KIB, 32, 84),
        Target("sm89", 99 * _KIB, 32, 128),
        Target("sm90", 227 * _KIB, 32, 132),
        Target("sm100", 227 * _KIB, 32, 148),
        Target("sm120", 99 * _KIB, 32, 170),
        Target("gfx90a", 64 * _KIB, 64, 104),
        Target("gfx942", 64 * _KIB, 64, 304),
        Target("gfx1100", 64 * _KIB, 32, 96),
    )
}


class Case(NamedTuple):
    """One call of the engine."""

    kernel: str
    dtype: str
    head_dim: int
    features: str

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @property
    def main(self) -> bool:
        """Whether this is one of the shapes that are to be fast."""
        return self.head_dim in (64, 128) and self.features in ("plain", "causal")

    @classmethod
    def parse(cls, text: str) -> Case:
        kernel, dtype, head_dim, features = text.split(":")
        return cls(kernel, dtype, int(head_dim), features)


class Compiled(NamedTuple):
    """One kernel that a call launches; `repair`: its variant for NaN and infinity."""

    kernel: str
    repair: bool
    registers: int
    stack: int  # bytes of a thread
    # Registers; on NVIDIA's devices those within a loop over tensor-core instructions, of the main shapes.
    spilled: int | None
    shared: int  # bytes
    products: dict[str, int]  # tensor-core instructions by name
    # On NVIDIA's devices: exponentials by what made their argument, apart from differences. "mul": a product
    # that was rounded before something was subtracted from it, "fma": one that was not.
    exponentials: dict[str, int]


def _everything(queries: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Every option that can be switched on."""
    rows = torch.zeros(2, queries, dtype=torch.int32)
    return {
        "mask": torch.ones(2, 1, queries, keys, dtype=torch.bool), "softcap": 30.0, "lower": -100, "upper": 7,
        "first": rows, "last": rows, "bias": torch.zeros(2, 4, queries, keys, dtype=dtype),
        "alibi_slopes": torch.ones(2, 4), "sinks": torch.ones(4), "dropout_p": 0.1, "seed": torch.tensor([1]),
    }  # fmt: skip


FEATURES: dict[str, Callable[[int, int, torch.dtype], dict[str, Any]]] = {
    "plain": lambda *_: {},
    "causal": lambda *_: {"upper": 0},
    "bias": lambda queries, keys, dtype: {"bias": torch.zeros(2, 4, queries, keys, dtype=dtype)},
    "everything": _everything,
    "everything in a part": lambda *sizes: {
        **_everything(*sizes), "part": Part(query=640, key=129, head=4, heads=12, diagonal=0)
    },
    "packed": lambda queries, keys, _: {
        "batch": 1, "upper": 0, "query_starts": torch.tensor([0, queries // 3, queries]),
        "key_starts": torch.tensor([0, keys // 3, keys]),
    },
    "paged": lambda queries, keys, _: {"upper": 0, "key_lengths": torch.tensor([keys, keys - 3])},
    "rare dropout": lambda *_: {"dropout_p": 2.0**-32, "seed": 5},  # a threshold of 1
}  # fmt: skip


def _forward(problem: AttentionProblem) -> None:
    from flashtile.gpu import engine

    rows = problem.query.shape[:3]
    engine.forward(problem, problem.query.new_empty(*rows, problem.value.shape[3]), torch.empty(rows))


def _backward(problem: AttentionProblem) -> None:
    from flashtile.gpu import engine

    rows, small = problem.query.shape[:3], ("bias", "alibi_slopes", "sinks")
    out = problem.query.new_empty(*rows, problem.value.shape[3])
    gradients = Gradients(
        *(torch.empty_like(tensor) for tensor in (problem.query, problem.key, problem.value)),
        **{
            name: None if (tensor := getattr(problem, name)) is None else torch.empty(tensor.shape)
            for name in small
        },
    )
    engine.backward(problem, out, torch.empty(rows), torch.empty_like(out), torch.empty(rows), gradients)


class Kernel(NamedTuple):
    """Queries and keys of a sequence, and what is called."""

    queries: int
    keys: int
    call: Callable[[AttentionProblem], None]


KERNELS = {
    "forward": Kernel(256, 512, _forward),
    "decode": Kernel(2, 4096, _forward),
    "single": Kernel(1, 1, _forward),  # Triton makes a constant of every 1
    "backward": Kernel(256, 512, _backward),
}
# Kernels that multiply no tiles.
WITHOUT_PRODUCTS = {"merge_splits", "row_numbers", "sum_rows"}


def problem_of(case: Case) -> AttentionProblem:
    """Grouped heads, sizes that are multiples of 16."""
    queries, keys, _ = KERNELS[case.kernel]
    dtype = getattr(torch, case.dtype)
    batch, heads = (1, 1) if case.kernel == "single" else (2, 4)
    features = {"batch": batch, **FEATURES[case.features](queries, keys, dtype)}
    problem = random_problem(
        heads=heads, kv_heads=min(heads, 2), query_length=queries, key_length=keys, head_dim=case.head_dim,
        dtype=dtype, **features,
    )  # fmt: skip
    if case.features != "paged":
        return problem
    key, value, table = into_pages(16, problem.key, problem.value)
    return dataclasses.replace(problem, key=key, value=value, block_table=table)


def compile_case(case: Case) -> list[Compiled]:
    """What the kernels that this call would launch compile to; `pretend` was called before."""
    _caught.clear()
    KERNELS[case.kernel].call(problem_of(case))
    return [_inspect(*caught, case.main) for caught in _caught]


_caught: list[tuple[Any, bool]] = []


def pretend(target: Target) -> None:
    """From now on launches compile for this target, and launch nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    nvidia = target.name.startswith("sm")
    there = GPUTarget(
        "cuda" if nvidia else "hip", int(target.name[2:]) if nvidia else target.name, target.warp_size
    )

    class Driver:
        """As much of a driver as compiling needs."""

        launcher_cls = staticmethod(lambda *_: None)
        get_current_target = staticmethod(lambda: there)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        is_active = staticmethod(lambda: True)
        map_python_to_cpp_type = staticmethod(lambda name: name)

    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        _caught.append((kernel, options.get("REPAIR", False)))

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    from flashtile.gpu import engine, engine_backward

    for module in (engine, engine_backward):
        module.target_of = lambda device: target


_PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "v_mfma", "v_wmma")


def _inspect(kernel: Any, repair: bool, main: bool) -> Compiled:
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    names = re.findall(rf"^\s*(?:@!?%p\d+ )?({'|'.join(map(re.escape, _PRODUCTS))})", text, re.M)
    products = dict(Counter(names))
    if "cubin" in kernel.asm:
        registers, stack, spilled = _resources(kernel.asm["cubin"], main and not repair)
    else:
        registers, stack, spilled = (
            int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]
            for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        )
    return Compiled(
        kernel.metadata.name, repair, registers, stack, spilled, kernel.metadata.shared, products,
        _differences(text),
    )  # fmt: skip


def _differences(text: str) -> dict[str, int]:
    made = {
        result: (operation, operands.split(", "))
        for operation, result, operands in re.findall(r"^\s*([\w.]+)\s+(%\w+), (.*);", text, re.M)
    }

    def first_of(register: str) -> str:
        """The operation that a number comes from, behind differences and selections."""
        operation, operands = made.get(register, ("", [""]))
        if not operation.startswith(("sub.", "selp.")):
            return operation.split(".")[0]
        found = {first_of(operand) for operand in operands[:2]}
        return "mul" if "mul" in found else "fma" if "fma" in found else ""

    arguments = [operands[0] for name, operands in made.values() if name.startswith("ex2.")]
    return dict(Counter(filter(None, map(first_of, arguments))))


def _resources(cubin: bytes, with_loops: bool) -> tuple[int, int, int | None]:
    """Registers and stack of a thread, and how often its innermost loops with products move registers to it.

    The path for NaN and infinity is a loop around others, so it does not count.
    """
    import triton.backends.nvidia as nvidia

    def said(program: str, *options: str) -> str:
        command = [Path(nvidia.__file__).parent / "bin" / program, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = said("cuobjdump", "--dump-resource-usage")
        code = said("nvdisasm", "-c") if with_loops else None
    numbers = dict(re.findall(r"(\w+):(\d+)", usage))
    if code is None:
        return int(numbers["REG"]), int(numbers["STACK"]), None
    hot = [loop for loop in innermost_loops(code) if _MMA.search(loop)]
    spilled = sum(len(re.findall(r"\b(?:STL|LDL)\b", loop)) for loop in hot)
    return int(numbers["REG"]), int(numbers["STACK"]), spilled


_MMA = re.compile(r"\b(?:HG?MMA|UTC\w*MMA|OMMA|QG?MMA)\b")


def innermost_loops(code: str) -> list[str]:
    """The loops of disassembled code that hold no other, from a label to a branch back to it."""
    labels = {match[1]: match.start() for match in re.finditer(r"^(\.L_x_\d+):", code, re.M)}
    branches = re.finditer(r"\bBRA\b.*`\((\.L_x_\d+)\)", code)
    spans = {(labels[match[1]], match.end()) for match in branches if labels[match[1]] < match.start()}
    return [
        code[start:end]
        for start, end in sorted(spans)
        if not any(start <= first and last <= end and (first, last) != (start, end) for first, last in spans)
    ]


def main(architecture: str, *cases: str) -> None:
    pretend(TARGETS[architecture])
    for case in cases:
        try:
            kernels, error = [found._asdict() for found in compile_case(Case.parse(case))], None
        except Exception:
            kernels, error = [], traceback.format_exc()
        print(json.dumps({"case": case, "kernels": kernels, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
