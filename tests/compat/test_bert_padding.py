"""Padding out and back in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtile.compat import InputError
from flashtile.compat.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])


def places(mask: Tensor, *rest: int) -> Tensor:
    """(batch, seqlen, *rest), all numbers different."""
    return torch.arange(mask.numel() * torch.Size(rest).numel(), dtype=torch.float64).reshape(
        *mask.shape, *rest
    )


@pytest.mark.parametrize(
    "mask", [MASK, MASK.bool(), MASK.int(), MASK.double()], ids=lambda mask: str(mask.dtype)
)
@pytest.mark.parametrize("rest", [(), (5,), (2, 3)])
def test_unpad_keeps_the_tokens_in_order(mask, rest):
    states = places(MASK, *rest)
    unpadded, indices, cu_seqlens, longest, used = unpad_input(states, mask)
    assert torch.equal(unpadded, states[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 9, 11]
    assert indices.dtype == torch.int64
    assert torch.equal(cu_seqlens, torch.tensor([0, 3, 3, 5], dtype=torch.int32))
    assert longest == 3
    assert type(longest) is int
    assert torch.equal(used, torch.tensor([3, 0, 2], dtype=torch.int32))
    back = pad_input(unpadded, indices, 3, 4)
    assert torch.equal(back, states * MASK.reshape(3, 4, *(1 for _ in rest)))


def test_unused_places_stay_but_are_not_counted():
    unused = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    states = places(MASK, 2)
    unpadded, indices, cu_seqlens, longest, used = unpad_input(states, MASK, unused)
    assert torch.equal(unpadded, states[(MASK + unused) > 0])  # a place may be both
    assert indices.tolist() == [0, 1, 2, 3, 4, 9, 11]
    assert cu_seqlens.tolist() == [0, 4, 5, 7]
    assert longest == 4
    assert used.tolist() == [3, 0, 2]


def test_gradients_go_where_the_tokens_came_from():
    states = places(MASK, 3).requires_grad_()

    def there_and_back(states: Tensor) -> Tensor:
        unpadded, indices, *_ = unpad_input(states, MASK)
        return pad_input(unpadded.square(), indices, *MASK.shape)

    grad = torch.randn(3, 4, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad(there_and_back(states), states, grad)
    torch.testing.assert_close(found, 2 * states.detach() * grad * MASK[..., None], rtol=0, atol=0)
    assert torch.autograd.gradcheck(there_and_back, states)


def test_any_memory_order():
    states = places(MASK.T, 2).transpose(0, 1)
    assert torch.equal(unpad_input(states, MASK)[0], states[MASK.bool()])


def test_nothing_to_keep():
    unpadded, indices, cu_seqlens, longest, used = unpad_input(places(MASK, 2), torch.zeros_like(MASK))
    assert (unpadded.shape, indices.shape, longest) == ((0, 2), (0,), 0)
    assert cu_seqlens.tolist() == [0, 0, 0, 0]
    assert used.tolist() == [0, 0, 0]
    assert torch.equal(pad_input(unpadded, indices, 3, 4), torch.zeros(3, 4, 2, dtype=torch.float64))
    assert unpad_input(torch.zeros(0, 4, 2), torch.zeros(0, 4))[3] == 0


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    states = places(lengths, 2)
    unpadded, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(states, lengths)
    assert torch.equal(unpadded, torch.cat([states[0, :5], states[1, :5], states[2]]))
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert torch.equal(cu_seqlens, torch.tensor([0, 2, 5, 8, 10, 16], dtype=torch.int32))
    assert longest == 6


def test_rows_by_index():
    rows = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(index_first_axis(rows, indices), rows[indices])
    assert torch.equal(index_first_axis(rows, indices.int()), rows[indices])
    placed = index_put_first_axis(rows[:2], torch.tensor([3, 1], dtype=torch.int32), 4)
    assert torch.equal(placed, torch.stack([0 * rows[0], rows[1], 0 * rows[0], rows[0]]))
    assert torch.autograd.gradcheck(lambda rows: index_first_axis(rows, indices), rows)
    assert torch.autograd.gradcheck(
        lambda rows: index_put_first_axis(rows, torch.tensor([6, 0, 2, 5, 1]), 8), rows
    )
    assert torch.autograd.gradcheck(lambda rows: index_first_axis_residual(rows, indices), rows)


def test_what_is_refused_is_named():
    states = places(MASK, 2)
    for name, call in (
        ("attention_mask", lambda: unpad_input(states, MASK[:2])),
        ("attention_mask", lambda: unpad_input(states, MASK[..., None])),
        ("attention_mask", lambda: unpad_input(states, [1])),
        ("unused_mask", lambda: unpad_input(states, MASK, MASK.T)),
        ("attention_mask_in_length", lambda: unpad_input_for_concatenated_sequences(states, MASK.T)),
    ):
        with pytest.raises(InputError, match=rf"^{name} must .*, got ") as refusal:
            call()
        assert isinstance(refusal.value, ValueError)
        assert isinstance(refusal.value, RuntimeError)
