"""Which backend serves a problem, and why: the only place that knows the backends by name."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from flashtile.gpu import fallback, target
from flashtile.problem import SUPPORTED_DTYPES, AttentionProblem, Gradients


class Backend(Protocol):
    """What a backend module offers; both functions write into tensors that the caller allocated."""

    def forward(self, problem: AttentionProblem, out: Tensor, lse: Tensor) -> None:
        """Write the attention output and the log-sum-exp of every row."""

    def backward(
        self,
        problem: AttentionProblem,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        gradients: Gradients,
    ) -> None:
        """Write every gradient that is not None."""


# Device type -> module; a backend is imported at its first use, because compiling machinery is slow to load.
# ROCm's devices are "cuda" in torch, too.
_MODULES = {"cpu": "flashtile.cpu", "cuda": "flashtile.gpu.engine"}
_loaded: dict[str, Backend] = {}
UNSERVED = "backend: none"  # the line of an explanation


def backend(problem: AttentionProblem, *, backward: bool = False) -> Backend:
    """What serves a pass of ``problem``; NotImplementedError with the reason where nothing does."""
    query = problem.query
    device_type = query.device.type
    if device_type == "cuda":
        reason = _kernels_refusal(
            query.device, query.dtype, query.shape[3], problem.value.shape[3], backward=backward
        )
        if reason is not None:
            return _fallback(problem, reason)
    found = _loaded.get(device_type)
    return _load(device_type) if found is None else found


def _load(device_type: str) -> Backend:
    check_device(torch.device(device_type))
    module = cast(Backend, importlib.import_module(_MODULES[device_type]))
    _loaded[device_type] = module
    return module


def _kernels_refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, *, backward: bool = False
) -> str | None:
    """Why the GPU kernels cannot serve such a call, or None if they can."""
    if dtype == torch.float64:
        return "the kernels accumulate in float32, which is too little for float64"
    return target.unsupported_reason(device, head_dim, value_head_dim, backward=backward)


def _fallback(problem: AttentionProblem, reason: str) -> Backend:
    """PyTorch's own attention, if it means the same."""
    refusal = fallback.refusal(problem)
    if refusal is not None:
        raise NotImplementedError(
            f"flashtile: the kernels cannot serve this call ({reason}), "
            f"and PyTorch's own attention does not compute it: {refusal}"
        )
    return fallback


def check_device(device: torch.device) -> None:
    """Raise NotImplementedError with the reason where no backend serves ``device``; "meta" needs none."""
    if device.type not in _MODULES and device.type != "meta":
        raise NotImplementedError(f"flashtile: {unserved_reason(device.type)}")


def check_part(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, *, backward: bool
) -> None:
    """Raise NotImplementedError with the reason where no backend serves parts of such a problem."""
    check_device(device)
    if device.type == "cuda":
        reason = _kernels_refusal(device, dtype, head_dim, value_head_dim, backward=backward)
        if reason is not None:
            raise NotImplementedError(
                f"flashtile: attention over several ranks needs the kernels, which cannot serve it: {reason}"
            )


def unserved_reason(device_type: str) -> str | None:
    """Why no backend serves tensors on this kind of device, or None when one does."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here"
    if device_type in _MODULES:
        return None
    served = ", ".join(sorted(_MODULES))
    return (
        f"no backend serves {device_type} tensors (this version has kernels for: {served}); "
        f"move the inputs, for example query.cpu(), or use torch.nn.functional.scaled_dot_product_attention"
    )


def explain(
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 8,
    kv_heads: int | None = None,
    query_length: int = 4096,
    key_length: int | None = None,
    head_dim: int = 64,
    value_head_dim: int | None = None,
) -> str:
    """Say in words which backend would serve such a call, and why (one line per fact).

    The second line is ``UNSERVED`` where none would.

    Sizes as in ``flashtile.attention``: query (B, heads, query_length, head_dim), key (B, kv_heads,
    key_length, head_dim), value (B, kv_heads, key_length, value_head_dim). Nothing is computed or compiled.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    key_length = query_length if key_length is None else key_length
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    device = torch.device(device)
    lines = [
        f"query ({heads} heads, {query_length} queries, head_dim {head_dim}), key and value "
        f"({kv_heads} heads, {key_length} keys, value head_dim {value_head_dim}), {_name(dtype)} on {device}"
    ]
    problems = _refusals(device, dtype, heads, kv_heads, head_dim, value_head_dim)
    if problems:
        return "\n".join([*lines, UNSERVED, *(f"  - {problem}" for problem in problems)])
    if device.type == "cuda":
        lines += _gpu_facts(device, dtype, head_dim, value_head_dim)
    else:
        lines.append(f"backend: {_MODULES[device.type]}")
        lines.append(f"  - {_name(dtype)} tensors on {device.type} are all it asks for")
    lines.append(f"  - sums are accumulated in {'float64' if dtype == torch.float64 else 'float32'}")
    if kv_heads != heads:
        in_place = "repeated for each" if fallback.__name__ in lines[1] else "read in place, never repeated"
        lines.append(f"  - {heads // kv_heads} query heads share each key head, {in_place}")
    return "\n".join(lines)


def _gpu_facts(device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int) -> list[str]:
    """What serves each pass on a GPU, and why it is not the kernels if it is not."""
    name = f"{torch.cuda.get_device_name(device)} ({target.target_of(device).name})"
    forward, backward = (
        _kernels_refusal(device, dtype, head_dim, value_head_dim, backward=backward)
        for backward in (False, True)
    )
    served = f"backend: {_MODULES['cuda'] if forward is None else fallback.__name__}"
    if (forward is None) != (backward is None):
        served += f"; backward: {fallback.__name__}"
    lines = [served, f"  - {name}, {_triton()}"]
    reason = forward or backward
    if reason is not None:
        lines.append(f"  - not the kernels: {reason}")
        lines.append(f"  - PyTorch's own attention serves {fallback.SERVES}; it refuses the rest")
    return lines


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "no Triton"
    return f"Triton {triton.__version__}"


def _refusals(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, value_head_dim: int
) -> list[str]:
    problems = []
    reason = unserved_reason(device.type)
    if reason:
        problems.append(reason)
    if dtype not in SUPPORTED_DTYPES:
        problems.append(f"{_name(dtype)} is not one of {', '.join(map(_name, SUPPORTED_DTYPES))}")
    if kv_heads < 1 or heads % kv_heads:
        problems.append(f"{heads} query heads cannot be shared evenly by {kv_heads} key heads")
    if head_dim < 1 or value_head_dim < 1:
        problems.append(f"head_dim must be at least 1, not {min(head_dim, value_head_dim)}")
    return problems


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
