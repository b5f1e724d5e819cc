"""What needs a GPU itself: graphs, compiled code, autocast, streams, and torch's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile import dispatch, masks, reference
from flashtile.gpu import fallback, target
from flashtile.problem import AttentionProblem
from tests.oracle import assert_close_to_oracle, random_gradients, random_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        target.triton_reason() is not None, reason="Triton is not installed, or older than the kernels need"
    ),
]


@pytest.fixture(autouse=True)
def torchs_kernels_after() -> Iterator[None]:
    yield
    flashtile.deactivate()


def qkv(dtype: torch.dtype = torch.float16, length: int = 130, requires_grad: bool = False) -> list[Tensor]:
    shapes = ((2, heads, length, 64) for heads in (4, 2, 2))
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=requires_grad) for shape in shapes]


def random_again(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``call`` and what it writes to, after a warm-up on another stream, as torch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(20, 0)},
        {"softcap": 5.0},
        {"dropout_p": 0.2, "seed": 7},
    ],
)
def test_graphs_hold_both_passes(options: dict[str, Any]):
    leaves = qkv(requires_grad=True)
    grad_out = torch.randn_like(leaves[0])

    def call() -> tuple[Tensor, ...]:
        out = flashtile.attention(*leaves, **options)
        return (out, *torch.autograd.grad(out, leaves, grad_out))

    graph, results = captured(call)
    with torch.no_grad():
        random_again(*leaves, grad_out)
    graph.replay()
    for found, expected in zip(results, call(), strict=True):
        assert torch.equal(found, expected)


def test_graphs_draw_new_dropout():
    query, key, value = qkv()
    graph, out = captured(lambda: flashtile.attention(query, key, value, dropout_p=0.5))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


@torch.no_grad()
def test_graphs_hold_packed_sequences_and_caches():
    packed = [torch.randn(200, heads, 64, dtype=torch.float16, device="cuda") for heads in (4, 2, 2)]
    starts = torch.tensor([0, 70, 71, 200], dtype=torch.int32, device="cuda")
    cache = torch.randn(2, 2, 512, 64, dtype=torch.float16, device="cuda")
    pages = torch.randn(64, 2, 16, 64, dtype=torch.float16, device="cuda")
    table = torch.randperm(64, device="cuda").to(torch.int32).view(2, 32)
    lengths = torch.tensor([300, 17], dtype=torch.int32, device="cuda")
    query = torch.randn(2, 4, 1, 64, dtype=torch.float16, device="cuda")

    def call() -> tuple[Tensor, ...]:
        return (
            flashtile.attention_varlen(*packed, starts, mask=masks.causal()),
            flashtile.attention_kvcache(query, cache, cache, cache_lengths=lengths),
            flashtile.attention_kvcache(query, pages, pages, cache_lengths=lengths, block_table=table),
        )

    graph, results = captured(call)
    starts.copy_(torch.tensor([0, 9, 150, 180]))
    lengths.copy_(torch.tensor([1, 511]))
    random_again(*packed, query)
    graph.replay()
    for found, expected in zip(results, call(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_code_is_one_graph(dtype: torch.dtype):
    torch._dynamo.reset()

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flashtile.attention(query.sin(), key, value, mask=masks.causal()).cos()

    leaves = qkv(dtype, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    found, expected = compiled(*leaves), model(*leaves)
    grad_out = torch.randn_like(found)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for gradient, exact in zip(
        torch.autograd.grad(found, leaves, grad_out),
        torch.autograd.grad(expected, leaves, grad_out),
        strict=True,
    ):
        torch.testing.assert_close(gradient, exact, rtol=4 * tolerance, atol=4 * tolerance)


def test_autocast_chooses_the_dtype():
    leaves = qkv(torch.float32, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = flashtile.attention(*leaves)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_another_stream_gets_the_same():
    query, key, value = qkv()
    expected = flashtile.attention(query, key, value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = flashtile.attention(query, key, value)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees one GPU")
def test_another_gpu_serves_its_tensors():
    query, key, value = (tensor.to("cuda:1") for tensor in qkv())
    with torch.cuda.device(0):
        out = flashtile.attention(query, key, value)
    assert out.device.index == 1
    problem = AttentionProblem(query.cpu(), key.cpu(), value.cpu(), 0.125)
    assert_close_to_oracle({"out": out.cpu()}, problem)


def test_explain_names_the_gpu():
    text = dispatch.explain(device="cuda", dtype=torch.float16)
    assert "backend: flashtile.gpu.engine" in text
    assert torch.cuda.get_device_name() in text


@pytest.mark.parametrize("name", ["plain", "grouped", "causal", "dropout"])
def test_torchs_function_is_served(name: str, monkeypatch: pytest.MonkeyPatch):
    passes: list[bool] = []
    right = dispatch.backend

    def noted(problem: AttentionProblem, *, backward: bool = False) -> Any:
        passes.append(backward)
        return right(problem, backward=backward)

    monkeypatch.setattr(dispatch, "backend", noted)
    leaves = qkv(requires_grad=True)
    if name != "grouped":
        leaves[0] = leaves[0].detach()[:, :2].contiguous().requires_grad_()
    options: dict[str, Any] = {"causal": {"is_causal": True}, "dropout": {"dropout_p": 0.5}}.get(name, {})
    options |= {"enable_gqa": True} if name == "grouped" else {}
    grad_out = torch.randn_like(leaves[0])
    results = []
    for switch in (flashtile.activate, flashtile.deactivate):
        switch()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*leaves, **options)
        results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
    assert passes == [False, True]
    for found, expected in zip(*results, strict=True):
        assert found.stride() == expected.stride()
        if name != "dropout":  # its bits are flashtile's own
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


FALLBACK_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal(alignment="top-left")},
    "mask": {"mask": torch.rand(2, 4, 33, 47) < 0.2},
    "rows that see nothing": {"mask": torch.rand(2, 1, 33, 47) < 0.03},
    "bias": {"random_bias": (1, 4, 33, 47)},
    "wide": {"head_dim": 528, "value_head_dim": 12},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FALLBACK_PROBLEMS)
def test_torchs_attention_means_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Without kernels: PyTorch's own memory-efficient kernel, or standard attention in float64."""
    monkeypatch.setattr(target, "unsupported_reason", lambda *sizes, backward=False: "asked for")
    problem = random_problem(**FALLBACK_PROBLEMS[name], dtype=dtype)
    grad_out, _ = random_gradients(problem)
    names = [name for name in ("query", "key", "value", "bias") if getattr(problem, name) is not None]
    leaves = [getattr(problem, name).cuda().requires_grad_() for name in names]
    given = dict(zip(names, leaves, strict=True))
    mask = FALLBACK_PROBLEMS[name].get("mask")
    options = {"mask": mask.cuda() if isinstance(mask, Tensor) else mask, "bias": given.pop("bias", None)}
    assert dispatch.backend(AttentionProblem(*leaves[:3], scale=1.0)) is fallback
    out, lse = flashtile.attention(**given, **options, return_lse=True)
    found = dict(
        zip(
            [f"grad_{name}" for name in names], torch.autograd.grad(out, leaves, grad_out.cuda()), strict=True
        )
    )
    found |= {"out": out.detach(), "lse": lse.detach()}
    assert_close_to_oracle({name: tensor.cpu() for name, tensor in found.items()}, problem, grad_out)


def test_gradcheck_in_float64():
    leaves = [
        torch.randn(1, heads, 5, 4, dtype=torch.float64, device="cuda", requires_grad=True)
        for heads in (2, 1, 1)
    ]
    assert torch.autograd.gradcheck(
        lambda *inputs: flashtile.attention(*inputs, mask=masks.causal(), softcap=2.0), leaves
    )
    exact, _ = reference.attention(AttentionProblem(*leaves, scale=0.5))
    torch.testing.assert_close(flashtile.attention(*leaves), exact)
