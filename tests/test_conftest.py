"""The poison works: without it, tests that forget an element could pass."""

import torch


def test_fresh_memory_is_poisoned():
    like = torch.zeros(3, 5)
    for fresh in (
        torch.empty(3, 5),
        torch.empty_like(like),
        torch.empty_strided((3, 5), (1, 3)),
        like.new_empty(3, 5),
        like.new_empty_strided((3, 5), (1, 3)),
    ):
        assert torch.isnan(fresh).all()
    assert (torch.empty(4, dtype=torch.int32) == torch.iinfo(torch.int32).min).all()
    assert torch.isnan(torch.empty(16, dtype=torch.uint8).view(torch.float64)).all()


def test_poison_keeps_shape_dtype_and_strides(dtype):
    fresh = torch.empty_strided((2, 3), (1, 2), dtype=dtype)
    assert fresh.shape == (2, 3)
    assert fresh.stride() == (1, 2)
    assert fresh.dtype == dtype
