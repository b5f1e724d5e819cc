"""The GPT: the three attentions compute the same, documents stay apart, and a cache changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flashtile.train import ATTENTIONS, GPT, Shape, model_flops
from flashtile.train.flops import attention_share, predicted_speedup
from flashtile.train.model import rotary_tables

SHAPE = Shape(vocabulary=37, layers=2, width=24, heads=4, context=33, kv_heads=2)
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64, another order of summation, two layers


def exact_model(shape: Shape = SHAPE) -> GPT:
    """In float64, with weights large enough that attention is far from uniform."""
    model = GPT(shape).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    model.cos, model.sin = rotary_tables(shape.context, shape.head_dim, torch.float64)
    return model


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and documents in them that end at different places in every row."""
    tokens = torch.randint(SHAPE.vocabulary, shape)
    return tokens, (torch.rand(shape) < 0.15).cumsum(-1)


def losses_and_gradients(
    model: GPT, attention: str, documents: Tensor | None, tokens: Tensor
) -> tuple[Tensor, ...]:
    model.use(attention)
    loss = model.loss(tokens, documents, torch.tensor([5]))
    return loss.detach(), *torch.autograd.grad(loss, tuple(model.parameters()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("attention", "dropout"), [("sdpa", 0.0), ("standard", 0.0), ("standard", 0.3)])
def test_attentions_have_the_same_loss_and_gradients(attention, dropout, packed):
    model = exact_model(dataclasses.replace(SHAPE, dropout=dropout))
    tokens, documents = rows(3, 34)
    found = []
    for name in ("flashtile", attention):
        torch.manual_seed(1)  # of the dropout outside attention
        found.append(losses_and_gradients(model, name, documents if packed else None, tokens))
    for ours, theirs in zip(*found, strict=True):
        assert ours.count_nonzero()
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_each_layer_and_each_seed_drops_other_entries():
    model = exact_model(dataclasses.replace(SHAPE, dropout=0.5)).eval()
    tokens, _ = rows(1, 20)
    seeds: list[int] = []
    for layer in model.layers:
        own = layer.attention.attention

        def noted(query, key, value, visible, dropout, own=own):
            seeds.append(int(dropout.seed))
            return own(query, key, value, visible, dropout)

        layer.attention.attention = noted
    model.train()
    for seed in (7, 2**62):
        model(tokens, seed=torch.tensor([seed]))
    assert seeds == [7, 8, 2**62, 2**62 + 1]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_documents_do_not_see_each_other(attention):
    model = exact_model()
    model.use(attention)
    tokens = torch.randint(SHAPE.vocabulary, (1, 33))
    documents = torch.tensor([[0] * 5 + [1] + [4] * 20 + [9] * 7])
    found = model(tokens, documents)
    alone = [model(part) for part in tokens.split([5, 1, 20, 7], dim=1)]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), **EXACT)


def test_a_cache_gives_the_logits_of_the_whole_row():
    model = exact_model()
    tokens, _ = rows(1, SHAPE.context)
    cache = model.new_cache(SHAPE.context)
    found = torch.cat([model.decode(part, cache) for part in tokens.split([11, 1, 1, 19, 1], 1)], dim=1)
    torch.testing.assert_close(found, model(tokens).detach(), **EXACT)


def test_beyond_its_context_a_token_sees_a_context():
    model = exact_model(dataclasses.replace(SHAPE, layers=1))
    tokens, _ = rows(1, 3 * SHAPE.context)
    cache = model.new_cache(tokens.shape[1])
    found = torch.cat([model.decode(part, cache) for part in tokens.split(10, 1)], dim=1)
    for end in (SHAPE.context, SHAPE.context + 1, tokens.shape[1]):
        expected = model(tokens[:, end - SHAPE.context : end])[0, -1]
        torch.testing.assert_close(found[0, end - 1], expected.detach(), **EXACT)


def test_writing_takes_the_likeliest_token_or_draws_by_the_seed_and_stops_at_the_end():
    model = exact_model()
    prompt = torch.tensor([3, 1, 4])
    written = model.write(prompt, 20, end=-1, temperature=0.0)
    expected = prompt
    for _ in range(20):
        expected = torch.cat([expected, model(expected[None])[0, -1].argmax(keepdim=True)])
    assert written.tolist() == expected[3:].tolist()
    draws = [model.write(prompt, 30, end=-1, seed=seed).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    end = draws[0][9]
    assert model.write(prompt, 30, end=end, seed=1).tolist() == draws[0][: draws[0].index(end)]
    assert model.write(prompt, 0, end=-1).tolist() == []


def test_parameters_are_counted():
    for shape in (SHAPE, dataclasses.replace(SHAPE, kv_heads=None)):
        assert sum(p.numel() for p in GPT(shape).parameters()) == shape.parameters


def test_flops_are_those_of_the_papers_formula():
    # GPT3-1.3B at a context of 8192: 6 N = 7.9e9, 12 x 24 x 2048 x 8192 = 4.8e9 operations a token
    shape = Shape(50304, 24, 2048, 16, 8192)
    assert shape.parameters == 50304 * 2048 + 24 * (12 * 2048**2 + 2 * 2048) + 2048
    assert model_flops(shape) == 6 * shape.parameters + 12 * 24 * 2048 * 8192
    assert model_flops(shape, causal=True) == 6 * shape.parameters + 6 * 24 * 2048 * 8192
    share = attention_share(shape)
    assert share == pytest.approx(0.235, abs=0.001)
    assert predicted_speedup(share, 1.0) == 1.0
    assert predicted_speedup(1.0, 2.5) == 2.5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"width": 20}, "width must be an even multiple of the 4 heads .*, got 20"),
        ({"kv_heads": 3}, "kv_heads must divide the 4 heads, got 3"),
        ({"kv_heads": 0}, "kv_heads must divide the 4 heads, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **sizes)


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="attention must be one of flashtile, sdpa, standard, got 'flash'"):
        GPT(SHAPE, "flash")
    model = GPT(dataclasses.replace(SHAPE, dropout=0.1))
    with pytest.raises(ValueError, match="seed must be given in training with dropout, got None"):
        model(torch.zeros(1, 3, dtype=torch.int64))
