"""Plans that are remembered: another call of the same layout gets what it would get alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flashtile import cpu
from flashtile.cpu import plans
from flashtile.problem import AttentionProblem, Part
from tests.options import NAMES, problem_with


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", {})


def output(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    out = torch.empty(*problem.query.shape[:3], problem.value.shape[3], dtype=problem.query.dtype)
    lse = torch.empty(problem.query.shape[:3])
    cpu.forward(problem, out, lse)
    return out, lse


def alone(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    plans._plans.clear()
    return output(problem)


@pytest.mark.parametrize("sizes", [(2, 4, 2, 70), (2, 4, 33, 70)], ids=["decode", "tiles"])
@pytest.mark.parametrize("option", NAMES)
def test_tensors_elsewhere(option, sizes):
    one = problem_with(sizes, torch.float32, option)
    given = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    other = AttentionProblem(
        **{name: x.roll(1, -1) if isinstance(x, Tensor) else x for name, x in given.items()}
    )
    expected = [alone(problem) for problem in (one, other)]
    plans._plans.clear()
    for problem, results in zip((one, other), expected, strict=True):
        assert all(map(torch.equal, output(problem), results))
    assert len(plans._plans) == (0 if one.dropout_p else 1)


def test_parts_of_a_whole():
    """Slopes count from where a part lies."""
    whole = problem_with((2, 4, 33, 70), torch.float32, "alibi")
    part = dataclasses.replace(whole, part=Part(query=5, key=100, heads=4, diagonal=-3))
    expected = [alone(problem) for problem in (whole, part)]
    assert not torch.equal(expected[0][0], expected[1][0])
    plans._plans.clear()
    for problem, results in zip((whole, part), expected, strict=True):
        assert all(map(torch.equal, output(problem), results))


def test_layouts_that_differ():
    """Tensors of the same problem that lie otherwise in memory, or are broadcast, or of other length."""
    plain = problem_with((2, 4, 33, 70), torch.float32, "no sharing")
    mask, bias = torch.rand(2, 4, 33, 70) < 0.7, torch.randn(2, 4, 33, 70)
    turned = torch.randn(2, 4, 70, 33).mT
    last = torch.randint(1, 70, (2, 33), dtype=torch.int32)
    given = [
        {"mask": mask}, {"mask": mask[:, :1, :1]}, {"mask": mask[:1]}, {"bias": bias}, {"bias": turned},
        {"bias": bias[:, :, :, :1]}, {"last": last}, {"last": last[:1]}, {"last": last[:, :1]},
        {"first": last},
    ]  # fmt: skip
    problems = [dataclasses.replace(plain, **options) for options in given]
    expected = [alone(problem) for problem in problems]
    plans._plans.clear()
    for problem, results in zip(problems, expected, strict=True):
        assert all(map(torch.equal, output(problem), results))
    assert len(plans._plans) == len(problems)


def test_pages_and_lengths_that_differ():
    whole = problem_with((2, 4, 2, 96), torch.float32, "no sharing")
    key, value = (
        tensor.unflatten(2, (6, 16)).permute(0, 2, 1, 3, 4).flatten(0, 1)
        for tensor in (whole.key, whole.value)
    )
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    wide = torch.cat((table, table), 1)
    problems = [
        dataclasses.replace(
            whole, key=key, value=value, block_table=pages, key_lengths=torch.full((2,), length)
        )
        for pages, length in ((table, 96), (wide, 96), (wide[:, :6], 96), (table, 50))
    ]
    expected = [alone(problem) for problem in problems]
    plans._plans.clear()
    for problem, results in zip(problems, expected, strict=True):
        assert all(map(torch.equal, output(problem), results))
    assert all(torch.equal(results[0], output(whole)[0]) for results in expected[:3])
