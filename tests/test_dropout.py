"""Philox against the published vectors and plain Python integers, and the layout of the dropout mask."""

from __future__ import annotations

import pytest
import torch

from flashtile.dropout import draw_seed, dropout_mask, keep_scale, kept_entries, philox, seed_tensor


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    """The paper's round function on unbounded integers."""
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (4 * (2**32 - 1,), 2 * (2**32 - 1,), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, expected):
    """The known answers of the Random123 distribution (kat_vectors, philox4x32-10)."""
    assert tuple(word.item() for word in philox(words(*counter), words(*key))) == expected
    assert tuple(philox_in_python(list(counter), list(key))) == expected


class TestMask:
    @pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 0x123456789ABCDEF0])
    @pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
    def test_every_entry_is_its_own_word(self, seed, dropout_p):
        batch, heads, query_length, key_length = 2, 3, 4, 7
        mask = dropout_mask(seed, dropout_p, batch, heads, query_length, key_length)
        assert mask.shape == (batch, heads, query_length, key_length)
        assert mask.dtype == torch.bool
        key = [seed % 2**32, seed // 2**32 % 2**32]
        for b, h, i, j in torch.cartesian_prod(*map(torch.arange, mask.shape)).tolist():
            four_words = philox_in_python([j // 4, i, b * heads + h, 0], key)
            assert mask[b, h, i, j].item() == (four_words[j % 4] >= int(dropout_p * 2**32))

    def test_does_not_depend_on_the_lengths(self):
        mask = dropout_mask(5, 0.4, 1, 2, 20, 33)
        assert torch.equal(dropout_mask(5, 0.4, 1, 2, 9, 14), mask[:, :, :9, :14])

    def test_a_part_is_that_part_of_the_whole(self):
        seed, head_index = seed_tensor(5, torch.device("cpu")), torch.arange(2)
        whole = kept_entries(seed, 2**31, head_index, 9, 23)
        for first_query, first_key, queries, keys in (
            (0, 0, 9, 23),
            (3, 4, 2, 8),
            (8, 5, 1, 13),
            (2, 22, 7, 1),
        ):
            part = kept_entries(
                seed, 2**31, head_index, queries, keys, first_query=first_query, first_key=first_key
            )
            rows, columns = slice(first_query, first_query + queries), slice(first_key, first_key + keys)
            assert torch.equal(part, whole[:, rows, columns])

    def test_seeds_agree_bit_by_bit(self):
        mask = dropout_mask(2**64 - 3, 0.5, 1, 1, 8, 8)
        assert torch.equal(dropout_mask(-3, 0.5, 1, 1, 8, 8), mask)
        assert torch.equal(dropout_mask(torch.tensor(-3), 0.5, 1, 1, 8, 8), mask)
        assert torch.equal(dropout_mask(torch.tensor([[-3]]), 0.5, 1, 1, 8, 8), mask)
        assert not torch.equal(dropout_mask(-4, 0.5, 1, 1, 8, 8), mask)
        assert not torch.equal(dropout_mask(2**64 - 3 - 2**32, 0.5, 1, 1, 8, 8), mask)

    @pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.8])
    def test_rate_and_independence(self, dropout_p):
        mask = dropout_mask(11, dropout_p, 2, 2, 128, 128).double()
        spread = (dropout_p * (1 - dropout_p) / mask.numel()) ** 0.5
        assert abs(mask.mean().item() - (1 - dropout_p)) < 5 * spread
        centred = mask - (1 - dropout_p)
        for dim in range(4):
            size = mask.shape[dim] - 1
            neighbours = centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)
            limit = 5 * dropout_p * (1 - dropout_p) / neighbours.numel() ** 0.5
            assert abs(neighbours.mean().item()) < limit

    def test_extremes(self):
        assert dropout_mask(0, 0.0, 2, 2, 9, 9).all()
        assert not dropout_mask(0, 1.0, 2, 2, 9, 9).any()
        assert (keep_scale(0.0), keep_scale(0.75), keep_scale(1.0)) == (1.0, 4.0, 0.0)

    @pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
    def test_empty(self, shape):
        assert dropout_mask(0, 0.5, *shape).shape == shape

    def test_device(self):
        seed = torch.tensor([1], device="meta")
        assert dropout_mask(seed, 0.5, 1, 1, 2, 3, device="meta").device.type == "meta"

    @pytest.mark.parametrize(
        ("seed", "dropout_p", "error", "message"),
        [
            (0, -0.1, ValueError, r"dropout_p must be in \[0, 1\], got -0.1"),
            (0, float("nan"), ValueError, "dropout_p must be in"),
            (2**64, 0.5, ValueError, "seed must fit in 64 bits, got 18446744073709551616"),
            (1.5, 0.5, TypeError, "seed must be an int .* got 1.5"),
            (True, 0.5, TypeError, "seed must be an int .* got True"),
            (torch.zeros(2, dtype=torch.int64), 0.5, ValueError, r"one element, got torch.int64 \(2,\)"),
            (torch.zeros(1), 0.5, ValueError, "int64 tensor of one element, got torch.float32"),
        ],
    )
    def test_refusals(self, seed, dropout_p, error, message):
        with pytest.raises(error, match=message):
            dropout_mask(seed, dropout_p, 1, 1, 2, 2)

    def test_refuses_negative_sizes(self):
        with pytest.raises(ValueError, match="key_length must be at least 0, got -1"):
            dropout_mask(0, 0.5, 1, 1, 2, -1)


class TestSeeds:
    def test_manual_seed_governs(self):
        torch.manual_seed(3)
        first, second = draw_seed("cpu"), draw_seed("cpu")
        torch.manual_seed(3)
        assert draw_seed("cpu") == first != second
        assert first.shape == (1,)
        assert first.dtype == torch.int64

    def test_all_bits_are_drawn(self):
        drawn = torch.cat([draw_seed("cpu") for _ in range(200)])
        ones = (drawn[:, None] >> torch.arange(64) & 1).double().mean(dim=0)
        assert ones.min() > 0.3
        assert ones.max() < 0.7

    def test_traces(self):
        torch.compiler.reset()
        traced = torch.compile(lambda: draw_seed("cpu"), backend="aot_eager", fullgraph=True)
        assert traced() != traced()

    def test_seed_tensor_keeps_the_bits(self):
        assert seed_tensor(2**64 - 1, torch.device("cpu")).tolist() == [-1]
        assert seed_tensor(2**63 - 1, torch.device("cpu")).tolist() == [2**63 - 1]
