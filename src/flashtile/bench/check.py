"""`flashtile check`: every dtype and option on this machine against the float64 oracle.

Under a minute on a CPU; on a GPU some minutes the first time, for every option is a kernel of its own there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import masks, reference
from flashtile.bench.console import Progress, styled, table
from flashtile.cache_folder import folder
from flashtile.problem import AttentionProblem, compute_dtype

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GPU_DTYPES = DTYPES[1:]  # those of the kernels
Options = dict[str, Any]
Inputs = tuple[Tensor, Tensor, Tensor]


def _attend(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    return flashtile.attention(*inputs, **options, return_lse=True)


def _attend_packed(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """One batch entry as packed sequences, as its documents are."""
    length = inputs[0].shape[2]
    first = options["mask"].resolve(1, length, length, torch.device("cpu")).first[0]
    starts = torch.cat((torch.unique_consecutive(first), torch.tensor([length]))).to(inputs[0].device)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in inputs)
    out, lse = flashtile.attention_varlen(query, key, value, starts, return_lse=True)
    return out.transpose(0, 1)[None], lse[None]


@dataclass(frozen=True)
class Trial:
    """One call: sizes, and the options beside query, key and value."""

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    query_length: int = 127
    key_length: int = 127
    head_dim: int = 40
    value_head_dim: int = 40
    options: Callable[[Trial, torch.dtype], Options] = field(default=lambda trial, dtype: {})
    attend: Callable[[Inputs, Options], tuple[Tensor, Tensor]] = _attend


def _documents(trial: Trial, dtype: torch.dtype) -> Options:
    return {"mask": masks.documents(torch.arange(trial.key_length) // 50)}


def _padding(trial: Trial, dtype: torch.dtype) -> Options:
    return {"mask": masks.key_lengths(torch.tensor([0, 90])) & masks.causal()}


def _bias(trial: Trial, dtype: torch.dtype) -> Options:
    return {"bias": torch.randn(1, trial.heads, trial.query_length, trial.key_length).to(dtype)}


def _per_head(trial: Trial, dtype: torch.dtype) -> Options:
    numbers = torch.linspace(0.1, 1, trial.heads).to(compute_dtype(dtype))
    return {"alibi_slopes": numbers, "sinks": numbers}


TRIALS = (
    Trial("plain"),
    Trial("causal", options=lambda trial, dtype: {"mask": masks.causal()}),
    Trial("window", options=lambda trial, dtype: {"mask": masks.window(left=20, right=0)}),
    Trial("documents", options=_documents),
    Trial("packed sequences", batch=1, kv_heads=2, options=_documents, attend=_attend_packed),
    Trial("padding, causal, an empty sequence", options=_padding),
    Trial("grouped heads, lengths differ", kv_heads=2, query_length=65, key_length=300),
    Trial("decode, one query", kv_heads=1, query_length=1, key_length=1023),
    Trial("head_dim 72, value head_dim 24", head_dim=72, value_head_dim=24),
    Trial("bias", options=_bias),
    Trial("softcap", options=lambda trial, dtype: {"softcap": 5.0}),
    Trial("ALiBi and sinks", options=_per_head),
    Trial("dropout", options=lambda trial, dtype: {"dropout_p": 0.2, "seed": 1234}),
)


@dataclass(frozen=True)
class Verdict:
    """The largest error of a trial relative to what is allowed, and the result it belongs to."""

    trial: str
    dtype: str
    error: float
    allowed: float
    worst: str
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and self.error <= self.allowed


def problem_of(trial: Trial, inputs: Inputs, options: Options) -> AttentionProblem:
    """The call as the reference takes it."""
    options = dict(options)
    mask = options.pop("mask", None)
    if mask is not None:
        lower, upper, first, last, dense = mask.resolve(
            trial.batch, trial.query_length, trial.key_length, inputs[0].device
        )
        options |= {"lower": lower, "upper": upper, "first": first, "last": last, "mask": dense}
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].unsqueeze(0)
    return AttentionProblem(*inputs, scale=trial.head_dim**-0.5, **options)


def _inputs(trial: Trial, dtype: torch.dtype, device: torch.device) -> tuple[Inputs, Tensor]:
    query = torch.randn(trial.batch, trial.heads, trial.query_length, trial.head_dim)
    key = torch.randn(trial.batch, trial.kv_heads, trial.key_length, trial.head_dim)
    value = torch.randn(trial.batch, trial.kv_heads, trial.key_length, trial.value_head_dim)
    grad = torch.randn(trial.batch, trial.heads, trial.query_length, trial.value_head_dim)
    query, key, value, grad = (tensor.to(device, dtype) for tensor in (query, key, value, grad))
    return (query, key, value), grad


def _results(
    attend: Callable[[Inputs], tuple[Tensor, Tensor]],
    inputs: Inputs,
    grad: Tensor,
) -> dict[str, Tensor]:
    leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    out, lse = attend((leaves[0], leaves[1], leaves[2]))
    gradients = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    names = ("output", "lse", "query gradient", "key gradient", "value gradient")
    return dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True))


def judge(trial: Trial, dtype: torch.dtype, device: torch.device | str = "cpu") -> Verdict:
    """Run one trial: an error may be twice that of standard attention in the same dtype, plus rounding."""
    torch.manual_seed(0)
    inputs, grad = _inputs(trial, dtype, torch.device(device))
    options = {
        name: option.to(device) if isinstance(option, Tensor) else option
        for name, option in trial.options(trial, dtype).items()
    }
    problem = problem_of(trial, inputs, options)

    def standard(cast: torch.dtype) -> dict[str, Tensor]:
        def attend(leaves: Inputs) -> tuple[Tensor, Tensor]:
            return reference.attention(reference.cast(problem_of(trial, leaves, options), cast))

        return _results(attend, inputs, grad)

    name = str(dtype).removeprefix("torch.")
    try:
        found = _results(lambda leaves: trial.attend(leaves, options), inputs, grad)
    except Exception as error:  # whatever goes wrong on a user's machine belongs in the table
        return Verdict(trial.name, name, float("inf"), 0.0, "call", f"{type(error).__name__}: {error}")
    return compare(trial.name, name, found, standard(torch.float64), standard(problem.query.dtype))


def compare(
    trial: str, dtype: str, found: dict[str, Tensor], exact: dict[str, Tensor], standard: dict[str, Tensor]
) -> Verdict:
    """The worst of what was ``found`` beside float64 and beside standard attention in the inputs' dtype."""
    verdicts = []
    for name, tensor in found.items():
        finite = exact[name].isfinite()
        if not torch.equal(tensor.isfinite(), finite):
            return Verdict(trial, dtype, float("inf"), 0.0, name, f"{name} is not finite where it should be")
        truth = exact[name][finite]
        error = _largest(tensor[finite].double() - truth)
        baseline = _largest(standard[name][finite].double() - truth)
        roundings = 32 if tensor.dtype == torch.float64 else 4  # the oracle itself is rounded to float64
        floor = roundings * torch.finfo(tensor.dtype).eps * max(_largest(truth), 1.0)
        verdicts.append(Verdict(trial, dtype, error, 2 * baseline + floor, name))
    return max(verdicts, key=lambda verdict: verdict.error / verdict.allowed)


def _largest(numbers: Tensor) -> float:
    return numbers.abs().max().item() if numbers.numel() else 0.0


def run(
    trials: tuple[Trial, ...] = TRIALS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    device: torch.device | str = "cpu",
) -> Iterator[Verdict]:
    """Judge every trial in every dtype, with a progress bar."""
    with Progress("checking", len(trials) * len(dtypes)) as progress:
        for trial in trials:
            for dtype in dtypes:
                progress.step(f"{trial.name}, {dtype}")
                yield judge(trial, dtype, device)


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """For JSON, which has no infinity: that is the error of a call that failed."""
    error = verdict.error if math.isfinite(verdict.error) else None
    return {**asdict(verdict), "error": error, "passed": verdict.passed}


def report(verdicts: list[Verdict]) -> str:
    """A table of the largest errors, trials by dtypes, and what failed."""
    dtypes = list(dict.fromkeys(verdict.dtype for verdict in verdicts))
    by_trial: dict[str, list[str]] = {}
    for verdict in verdicts:
        cell = f"{verdict.error:.1e} ok" if verdict.passed else f"{verdict.error:.1e} FAILED"
        by_trial.setdefault(verdict.trial, []).append(cell)
    lines = [table(["option", *dtypes], [[name, *cells] for name, cells in by_trial.items()])]
    for verdict in verdicts:
        if not verdict.passed:
            why = verdict.failure or f"{verdict.worst}: {verdict.error:.2e}, allowed {verdict.allowed:.2e}"
            lines.append(styled(f"  FAILED {verdict.trial}, {verdict.dtype}: {why}", "red"))
    passed = sum(verdict.passed for verdict in verdicts)
    if passed < len(verdicts):
        lines.append(
            f"\n  Delete the compiled kernels in {folder()} and check again. What still fails is a bug:"
            "\n  please report it with what `flashtile info` says."
        )
    lines.append(
        f"\n  {passed} of {len(verdicts)} passed: largest error of output, LSE and gradients against float64;"
    )
    lines.append("  allowed is twice the error of standard attention in the same dtype, plus rounding.")
    return "\n".join(lines)
