"""The PyTorch operators ``flashtile::attention_forward`` and ``flashtile::attention_backward``.

They make the kernels known to autograd, torch.compile, torch.export and torch.func. Both take an attention
problem spelled out in tensors and numbers, always 4-D, and trust it: the front doors validate. Only lengths
and places in a cache are checked again, because a compiled graph passes the front doors without values.
The backward recomputes the probabilities from the LSE (FlashAttention-2, section 3.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flashtile import dispatch, torch_vmap
from flashtile.masks import Intervals
from flashtile.masks.arguments import values_known
from flashtile.problem import AttentionProblem, Gradients, compute_dtype, default_scale
from flashtile.ragged import check_problem

_LIBRARY: Any = torch.library.Library("flashtile", "DEF")  # type: ignore[no-untyped-call]
_PROBLEM_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? first, Tensor? last, Tensor? mask, Tensor? bias, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor? query_starts, Tensor? key_starts, "
    "Tensor? key_lengths, Tensor? batch_index, Tensor? block_table, float? scale, float? softcap, "
    "SymInt? lower, SymInt? upper, float dropout_p"
)
# Positions of the differentiable inputs in the schema above, in the order of the backward's results.
_DIFFERENTIABLE = (0, 1, 2, 6, 7, 8)
_TENSORS = 15


_KEYS = torch._C.DispatchKey
_INCLUDED = torch._C.DispatchKeySet(_KEYS.BackendSelect)
_INCLUDED_KEYS = (_INCLUDED.raw_repr(), _INCLUDED.add(_KEYS.ADInplaceOrView).raw_repr())


def undisturbed(*tensors: Tensor) -> bool:
    """Whether a backend may be called past PyTorch's dispatcher: nobody would notice, and it costs less.

    Nobody does if no gradient is recorded, the tensors are ordinary CPU tensors (no subclass, nothing lazy)
    and no mode, transform, tracer or profiler is active.
    """
    if torch.compiler.is_compiling():
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.is_neg():
            return False
        if recording and tensor.requires_grad:
            return False
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr() in _INCLUDED_KEYS
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
        and forward_ad._current_level < 0
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Intervals,
    *,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
    batch_index: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward operator by the names of its arguments; NotImplementedError where no backend serves it."""
    dispatch.check_device(query.device)
    lower, upper, first, last, dense = intervals
    out, lse = attention_forward(
        query, key, value, first, last, dense, bias, alibi_slopes, sinks, seed, query_starts, key_starts,
        key_lengths, batch_index, block_table, scale, softcap, lower, upper, dropout_p,
    )  # fmt: skip
    return out, lse


def forward(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Allocate the output and the LSE and let the backend of ``problem`` fill them."""
    out, lse = _allocate_outputs(problem.query, problem.value)
    if out.numel():
        dispatch.backend(problem).forward(problem, out, lse)
    return out, lse


def backward(
    problem: AttentionProblem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Sequence[bool] = (True,) * 6,
) -> Gradients:
    """Allocate the gradients of ``problem`` (query, key and value always) and let its backend fill them."""
    if problem.key_lengths is not None:
        raise NotImplementedError(
            "flashtile: attention over a cache (key_lengths, block_table) has no gradient"
        )
    gradients = Gradients(
        query=torch.empty_like(problem.query),
        key=torch.empty_like(problem.key),
        value=torch.empty_like(problem.value),
        bias=_allocate_small(problem.bias, problem.query, wanted[3]),
        alibi_slopes=_allocate_small(problem.alibi_slopes, problem.query, wanted[4]),
        sinks=_allocate_small(problem.sinks, problem.query, wanted[5]),
    )
    if out.numel():
        dispatch.backend(problem, backward=True).backward(problem, out, lse, grad_out, grad_lse, gradients)
    else:
        gradients.zero_()
    return gradients


def _allocate_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, head_dim = query.shape
    value_head_dim = value.shape[3]
    if value_head_dim == head_dim:
        out = torch.empty_like(query)
    elif query.stride(1) < query.stride(2):  # a transposed (batch, length, heads, head_dim) tensor stays one
        out = query.new_empty(batch, length, heads, value_head_dim).transpose(1, 2)
    else:
        out = query.new_empty(batch, heads, length, value_head_dim)
    # Sizes as separate arguments parse twice as fast as a tuple.
    return out, query.new_empty(batch, heads, length, dtype=compute_dtype(query.dtype))


def _allocate_small(tensor: Tensor | None, query: Tensor, wanted: bool) -> Tensor | None:
    if tensor is None or not wanted:
        return None
    return torch.empty_like(tensor, dtype=compute_dtype(query.dtype))


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    key_lengths: Tensor | None,
    batch_index: Tensor | None,
    block_table: Tensor | None,
    scale: float | None,
    softcap: float | None,
    lower: int | None,
    upper: int | None,
    dropout_p: float,
) -> AttentionProblem:
    # The default is no number until here, where head_dim is one even if a compiled graph leaves it open.
    scale = default_scale(query) if scale is None else scale
    number: int | Tensor = 0
    if seed is not None:
        number = int(seed.item()) if seed.is_cpu else seed  # reading it elsewhere would wait for the device
    if block_table is not None:
        block_table = block_table.contiguous()  # a compiled graph may have laid it out anew
    problem = AttentionProblem(
        query, key, value, scale, softcap, lower, upper, first, last, mask, bias, alibi_slopes, sinks,
        dropout_p, number, query_starts, key_starts, key_lengths, batch_index, block_table,
    )  # fmt: skip
    if problem.ragged and values_known(query):
        check_problem(problem)
    return problem


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    return forward(_problem(*arguments))


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _allocate_outputs(query, value)


def _backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    problem = _problem(*arguments)
    gradients = backward(problem, out, lse, grad_out, grad_lse, wanted)
    if gradients.bias is not None:
        gradients.bias = gradients.bias.to(problem.query.dtype)
    return tuple(
        gradient if flag and gradient is not None else problem.query.new_empty(0)
        for gradient, flag in zip(vars(gradients).values(), wanted, strict=True)
    )


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    query: Tensor = arguments[0]
    return tuple(
        torch.empty_like(arguments[position]) if flag else query.new_empty(0)
        for position, flag in zip(_DIFFERENTIABLE, wanted, strict=True)
    )


_NO_FORWARD_MODE = (
    "flashtile.attention has no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode (vjp, "
    "jacrev), or flashtile.reference.attention, which is plain PyTorch"
)


# Not torch.library.register_autograd: its formula is refused inside torch.func.grad and vjp, where an
# operator's own autograd kernel records one level at a time, as those of PyTorch's operators do.
class _Forward(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = _next_level(attention_forward, keyset, inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_TENSORS], out, lse)
        ctx.numbers = inputs[_TENSORS:]
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1 + position] for position in _DIFFERENTIABLE]
        results: list[Tensor | None] = [None] * (1 + _TENSORS + len(ctx.numbers))
        if grad_out is not None or grad_lse is not None:
            grad_out = torch.zeros_like(out) if grad_out is None else grad_out
            gradients = attention_backward(grad_out, grad_lse, out, lse, wanted, *inputs, *ctx.numbers)
            for position, flag, gradient in zip(_DIFFERENTIABLE, wanted, gradients, strict=True):
                results[1 + position] = gradient if flag else None
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


class _Backward(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        gradients = tuple(_next_level(attention_backward, keyset, inputs))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2], *inputs[5 : 5 + _TENSORS])
        ctx.numbers = inputs[5 + _TENSORS :]
        return gradients

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        from flashtile.torch_second import differentiate_backward

        grad_out, grad_lse, *inputs = ctx.saved_tensors
        # Behind the key set: grad_out, grad_lse, out, lse, wanted, and then the problem.
        positions = [1, 2, *(6 + position for position in _DIFFERENTIABLE)]
        problem = _problem(*inputs, *ctx.numbers)
        found = differentiate_backward(problem, grad_out, grad_lse, upstream)
        results: list[Tensor | None] = [None] * (6 + _TENSORS + len(ctx.numbers))
        for position, gradient in zip(positions, found, strict=True):
            results[position] = gradient if ctx.needs_input_grad[position] else None
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


def _below_autograd(operator: Any, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _next_level(operator: Any, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    """Undoes that a function's forward runs without gradients: nested transforms record their own level."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(operator, keyset, inputs)


def _recorded(function: Any, operator: Any) -> Callable[..., Any]:
    """The autograd kernel of ``operator``: records ``function`` where a gradient is asked for."""

    def kernel(keyset: Any, *inputs: Any) -> Any:
        recording = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if recording or forward_ad._current_level >= 0:
            with enable_single_level_autograd_function():
                return function.apply(keyset, *inputs)
        return _below_autograd(operator, keyset, inputs)

    return kernel


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashtile::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.flashtile, name).default


attention_forward = _define(
    "attention_forward", f"({_PROBLEM_SCHEMA}) -> (Tensor out, Tensor lse)", _forward, _forward_fake
)
attention_backward = _define(
    "attention_backward",
    f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[6] wanted, {_PROBLEM_SCHEMA}) -> "
    "(Tensor query, Tensor key, Tensor value, Tensor bias, Tensor alibi_slopes, Tensor sinks)",
    _backward,
    _backward_fake,
)
_LIBRARY.impl("attention_forward", _recorded(_Forward, attention_forward), "Autograd", with_keyset=True)
_LIBRARY.impl("attention_backward", _recorded(_Backward, attention_backward), "Autograd", with_keyset=True)
torch.library.register_vmap(
    "flashtile::attention_forward", torch_vmap.forward_rule(attention_forward), lib=_LIBRARY
)
torch.library.register_vmap(
    "flashtile::attention_backward", torch_vmap.backward_rule(attention_backward), lib=_LIBRARY
)
