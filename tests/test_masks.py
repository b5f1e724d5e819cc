"""Masks against their definitions, spelled out as one Python predicate per (batch, query, key)."""

from __future__ import annotations

import importlib
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flashtile.masks import (
    Mask,
    causal,
    chunks,
    documents,
    from_dense,
    key_lengths,
    key_range,
    key_starts,
    prefix,
    window,
)
from tests.conftest import combines_masks_in_a_graph

CPU = torch.device("cpu")
LENGTHS = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 7), (7, 1), (6, 6), (5, 9), (9, 5)]


def expected(sees: Callable[[int, int, int], bool], batch: int, query_length: int, key_length: int) -> Tensor:
    visible = torch.zeros(batch, 1, query_length, key_length, dtype=torch.bool)
    for b, i, j in itertools.product(range(batch), range(query_length), range(key_length)):
        visible[b, 0, i, j] = sees(b, i, j)
    return visible


def check(
    mask: Mask, sees: Callable[[int, int, int], bool], batch: int, query_length: int, key_length: int
) -> None:
    dense = mask.dense(batch, query_length, key_length)
    assert dense.dtype == torch.bool
    assert dense.shape[0] in (1, batch)
    assert dense.shape[1:] == (1, query_length, key_length)
    assert torch.equal(dense.expand(batch, -1, -1, -1), expected(sees, batch, query_length, key_length)), (
        f"{mask!r}\n{mask.draw(query_length, key_length)}"
    )


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
class TestAligned:
    def test_causal(self, alignment, query_length, key_length):
        diagonal = key_length - query_length if alignment == "bottom-right" else 0
        check(causal(alignment=alignment), lambda b, i, j: j <= i + diagonal, 2, query_length, key_length)

    @pytest.mark.parametrize(
        ("left", "right"),
        [(0, 0), (2, 1), (None, 1), (2, None), (None, None), (99, 99), (sys.maxsize, sys.maxsize)],
    )
    def test_window(self, alignment, query_length, key_length, left, right):
        diagonal = key_length - query_length if alignment == "bottom-right" else 0

        def sees(b, i, j):
            distance = j - (i + diagonal)
            return (left is None or distance >= -left) and (right is None or distance <= right)

        check(window(left, right, alignment=alignment), sees, 1, query_length, key_length)

    def test_prefix(self, alignment, query_length, key_length):
        diagonal = key_length - query_length if alignment == "bottom-right" else 0
        lengths = [0, key_length // 2, key_length]
        check(
            prefix(lengths, alignment=alignment),
            lambda b, i, j: j < lengths[b] or j <= i + diagonal,
            3,
            query_length,
            key_length,
        )

    @pytest.mark.parametrize("size", [1, 3, 100, 2**31 - 1, 2**31, sys.maxsize])
    def test_chunks(self, alignment, query_length, key_length, size):
        diagonal = key_length - query_length if alignment == "bottom-right" else 0
        check(
            chunks(size, alignment=alignment),
            lambda b, i, j: (i + diagonal) // size == j // size,
            1,
            query_length,
            key_length,
        )


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
class TestKeyRanges:
    def test_lengths_and_starts(self, query_length, key_length):
        values = [0, key_length // 2, key_length]
        check(key_lengths(values), lambda b, i, j: j < values[b], 3, query_length, key_length)
        check(key_starts(values), lambda b, i, j: j >= values[b], 3, query_length, key_length)

    def test_one_int_serves_every_batch_entry(self, query_length, key_length):
        middle = key_length // 2
        check(key_lengths(middle), lambda b, i, j: j < middle, 3, query_length, key_length)

    def test_range_per_query(self, query_length, key_length):
        generator = torch.Generator().manual_seed(0)
        starts, ends = torch.randint(key_length + 1, (2, 3, query_length), generator=generator)
        check(
            key_range(starts, ends),
            lambda b, i, j: starts[b, i] <= j < ends[b, i],
            3,
            query_length,
            key_length,
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_and_lengths_beyond_it(dtype):
    resolved = key_lengths(torch.tensor([100, 3], dtype=dtype)).resolve(2, 1, 1000, CPU)
    assert resolved.last.tolist() == [[100], [3]]
    assert resolved.last.dtype == resolved.first.dtype == torch.int32


class TestDocuments:
    def test_per_batch(self):
        ids = torch.tensor([[5, 5, -1, -1, -1, 3], [0, 1, 2, 3, 4, 5]])
        check(documents(ids), lambda b, i, j: bool(ids[b, i] == ids[b, j]), 2, 6, 6)

    def test_one_row_serves_the_batch(self):
        ids = [7, 7, 7, 2, 2, 9]
        check(documents(ids), lambda b, i, j: ids[i] == ids[j], 3, 6, 6)

    def test_queries_of_their_own(self):
        ids = torch.tensor([[5, 5, -1, -1, -1, 3], [0, 1, 1, 3, 4, 5]])
        query_ids = torch.tensor([[3, 8, -1, 5], [5, 1, 0, -7]], dtype=torch.int32)
        check(documents(ids, query_ids), lambda b, i, j: bool(query_ids[b, i] == ids[b, j]), 2, 4, 6)
        check(documents(ids, query_ids[0]), lambda b, i, j: bool(query_ids[0, i] == ids[b, j]), 2, 4, 6)

    def test_ids_are_not_narrowed(self):
        ids = torch.tensor([2**40, 2**40 + 2**32])
        check(documents(ids), lambda b, i, j: i == j, 1, 2, 2)
        narrow = torch.tensor([0, 2**32]), torch.tensor([0, 0], dtype=torch.int32)
        check(documents(narrow[1], narrow[0]), lambda b, i, j: i == 0, 1, 2, 2)

    @pytest.mark.parametrize(("query_length", "key_length"), [(0, 0), (0, 3), (3, 0)])
    def test_empty(self, query_length, key_length):
        mask = documents(
            torch.zeros(key_length, dtype=torch.int64), torch.zeros(query_length, dtype=torch.int64)
        )
        check(mask, lambda b, i, j: True, 2, query_length, key_length)
        check(documents([]), lambda b, i, j: True, 2, 0, 0)

    def test_refuses_an_id_that_comes_back(self):
        with pytest.raises(ValueError, match="contiguous"):
            documents([[0, 1, 1], [0, 1, 0]])

    def test_refuses_missing_query_ids_and_wrong_lengths(self):
        with pytest.raises(ValueError, match=r"query_ids where lengths differ \(2 queries, 3 keys\)"):
            documents([0, 0, 1]).dense(1, 2, 3)
        with pytest.raises(ValueError, match=r"ids must have length 4, got shape \(1, 3\)"):
            documents([0, 0, 1]).dense(1, 4, 4)


class TestComposition:
    def test_and_is_intersection(self):
        parts = [
            causal(),
            window(3, 2),
            key_lengths([7, 4]),
            key_starts([2, 0]),
            key_range(torch.arange(8)[None] // 2, 8),
            documents([0, 0, 0, 0, 1, 1, 1, 2]),
            prefix([3, 1]),
            chunks(5),
            from_dense(torch.arange(64).reshape(8, 8) % 3 > 0),
        ]
        for left, right in itertools.product(parts, repeat=2):
            both = left.dense(2, 8, 8) & right.dense(2, 8, 8)
            assert torch.equal((left & right).dense(2, 8, 8).expand_as(both), both)
        everything = torch.stack([part.dense(2, 8, 8).expand(2, 1, 8, 8) for part in parts]).all(dim=0)
        combined = parts[0]
        for part in parts[1:]:
            combined = combined & part
        assert torch.equal(combined.dense(2, 8, 8), everything)

    def test_tensor_on_either_side(self):
        pattern = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4) % 5 > 1
        band = causal().dense(2, 4, 4)
        assert torch.equal((causal() & pattern).dense(2, 4, 4), band & pattern)
        assert torch.equal((pattern & causal()).dense(2, 4, 4), band & pattern)

    @pytest.mark.parametrize("shape", [(), (4,), (5, 1), (5, 4), (3, 5, 4), (2, 1, 1, 4), (2, 3, 5, 4)])
    def test_lower_rank_broadcasts_as_torch(self, shape):
        pattern = torch.ones(shape, dtype=torch.bool)
        dense = from_dense(pattern).dense(2, 5, 4)
        assert dense.expand(2, 3, 5, 4).all()

    def test_dense_is_not_copied(self):
        pattern = torch.ones(1, 4, dtype=torch.bool).expand(2**20, 4)
        resolved = (causal(alignment="top-left") & pattern).resolve(1, 2**20, 4, CPU)
        assert resolved.dense.data_ptr() == pattern.data_ptr()
        assert resolved.dense.stride(2) == 0

    def test_bands_make_no_tensor(self):
        resolved = (causal(alignment="bottom-right") & window(5, 9, alignment="top-left")).resolve(
            1, 10, 12, CPU
        )
        assert resolved == (-5, 2, None, None, None)

    def test_has_no_truth_value(self):
        with pytest.raises(TypeError, match="combine masks with &"):
            causal() and window(3)
        with pytest.raises(TypeError, match="unsupported operand"):
            causal() & True


class TestRefusals:
    @pytest.mark.parametrize(
        "mask", [causal(), window(2, 1), prefix(1), chunks(4), causal() & key_lengths(2)]
    )
    def test_alignment_is_explicit_where_lengths_differ(self, mask):
        with pytest.raises(
            ValueError, match=r'differ \(3 queries, 4 keys\): alignment="top-left".*"bottom-right"'
        ):
            mask.dense(1, 3, 4)
        mask.dense(1, 4, 4)

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: causal(alignment="left"), ValueError, "alignment must be .* got 'left'"),
            (lambda: window(-1, 0), ValueError, "left must be an int >= 0, or None for no bound, got -1"),
            (lambda: window(1, 0.5), ValueError, "right must be an int"),
            (lambda: chunks(0), ValueError, "size must be an int >= 1, got 0"),
            (lambda: chunks(True), ValueError, "size must be an int"),
            (lambda: key_lengths([1.0]), TypeError, "key_lengths must hold integers, got torch.float32"),
            (lambda: key_lengths([True]), TypeError, "key_lengths must hold integers, got torch.bool"),
            (lambda: key_lengths("no"), TypeError, "key_lengths must be an int, a list .* got 'no'"),
            (lambda: key_lengths([[1], [2]]), ValueError, r"0 to 1 dimensions, got shape \(2, 1\)"),
            (lambda: documents(3), ValueError, "ids must have 1 to 2 dimensions"),
            (lambda: from_dense(torch.ones(3)), TypeError, "boolean tensor .* got a tensor of torch.float32"),
            (lambda: from_dense([True]), TypeError, "boolean tensor .* got list"),
            (lambda: from_dense(torch.ones(5 * [1], dtype=torch.bool)), ValueError, "at most 4 dimensions"),
            (lambda: causal() & torch.ones(3), TypeError, "boolean tensor"),
        ],
    )
    def test_constructors(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (key_lengths([1, 2]), "key_lengths: the batch dimension must be 3 or 1, got 2"),
            (key_range(torch.zeros(1, 5, dtype=torch.int64), 4), "query dimension must be 4 or 1, got 5"),
            (key_lengths(5), r"key_lengths: values must be in 0\.\.4, the number of keys, got \[5\]"),
            (key_starts([-1, 0, 0]), r"key_starts: values must be .* got \[-1, 0, 0\]"),
            (prefix(9), "prefix: values must be in"),
            (
                documents(torch.zeros(2, 4, dtype=torch.int64)),
                "ids: the batch dimension must be 3 or 1, got 2",
            ),
            (from_dense(torch.ones(3, 4, dtype=torch.bool)), "query dimension must be 4 or 1, got 3"),
            (from_dense(torch.ones(4, 3, dtype=torch.bool)), "key dimension must be 4 or 1, got 3"),
            (from_dense(torch.ones(2, 1, 4, 4, dtype=torch.bool)), "batch dimension must be 3 or 1, got 2"),
        ],
    )
    def test_sizes(self, mask, message):
        with pytest.raises(ValueError, match=message):
            mask.resolve(3, 4, 4, CPU)


ALL_KINDS = [
    causal(),
    causal(alignment="bottom-right"),
    window(3, None, alignment="top-left"),
    key_lengths([3, 4]),
    key_starts([3, 4]),
    key_range([1, 0], [6, 8]),
    key_range(torch.arange(8)[None], 8),
    documents([0, 0, 1, 1, 1, 2, 2, 2]),
    documents([[0, 0, 1, 1, 1, 2, 2, 2], [0] * 8], [2] * 8),
    prefix([3, 1]),
    chunks(3, alignment="bottom-right"),
    window(2, 0) & key_lengths(5) & chunks(4),
]


@pytest.mark.parametrize("mask", ALL_KINDS, ids=repr)
class TestEveryKind:
    def test_repr_is_the_constructor(self, mask):
        again = eval(repr(mask))
        assert repr(again) == repr(mask)
        assert torch.equal(again.dense(2, 8, 8), mask.dense(2, 8, 8))

    def test_pickles(self, mask):
        assert repr(pickle.loads(pickle.dumps(mask))) == repr(mask)

    def test_follows_the_device(self, mask):
        resolved = mask.resolve(2, 8, 8, torch.device("meta"))
        assert all(field.device.type == "meta" for field in resolved if isinstance(field, Tensor))


def test_repr_of_what_is_long():
    assert repr(key_lengths(torch.arange(99))) == "key_lengths(<int64 (99, 1)>)"
    assert repr(from_dense(torch.ones(2, 3, dtype=torch.bool))) == "from_dense(<bool (1, 1, 2, 3)>)"


class TestPictures:
    def test_small(self):
        assert causal(alignment="bottom-right").draw(2, 3) == (
            "       ┌──────┐\n     0 │████ ·│\n     1 │██████│\n       └──────┘"
        )

    def test_tiles_show_full_partial_and_empty(self):
        lines = causal().draw(64, max_size=2).splitlines()
        assert lines[1:3] == ["     0 │▒▒ ·│", "    32 │██▒▒│"]

    def test_batch_entry_and_head(self):
        mask = key_lengths([0, 2])
        assert "██" not in mask.draw(2, batch_index=0)
        assert "██" in mask.draw(2, batch_index=1)
        with pytest.raises(ValueError, match=r"batch_index must be in 0\.\.1 for key_lengths"):
            mask.draw(2, batch_index=2)

    def test_empty(self):
        assert causal(alignment="top-left").draw(0, 0).count("\n") == 1

    def test_plot(self):
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("agg")
        axes = (causal() & window(3)).plot(8)
        assert axes.get_title() == "causal() & window(3, None)"
        assert axes.images[0].get_array().shape == (8, 8)

    def test_picture_of_the_docs(self, tmp_path):
        pytest.importorskip("matplotlib")
        mask_pictures = importlib.import_module("scripts.mask_pictures")
        mask_pictures.main(tmp_path / "masks.png")
        assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")

    def test_gallery_runs(self):
        shown = subprocess.run(
            [sys.executable, "-W", "error", "-m", "flashtile.masks"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stderr == ""
        for name in (
            "causal",
            "window",
            "key_lengths",
            "key_starts",
            "documents",
            "prefix",
            "chunks",
            "from_dense",
        ):
            assert f"{name}(" in shown.stdout


def _as_dense(mask: Mask, x: Tensor) -> Tensor:
    return mask.dense(x.shape[0], x.shape[1], x.shape[2], x.device)


class TestCompile:
    """aot_eager traces as inductor does, and needs no C++ compiler."""

    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()

    def test_closed_over(self):
        for mask in ALL_KINDS:
            torch.compiler.reset()  # one line of code, many masks: the compiler gives up after eight
            compiled = torch.compile(
                lambda x, mask=mask: _as_dense(mask, x), backend="aot_eager", fullgraph=True
            )
            assert torch.equal(compiled(torch.empty(2, 8, 8)), mask.dense(2, 8, 8))

    def test_as_argument(self):
        compiled = torch.compile(_as_dense, backend="aot_eager", fullgraph=True)
        for lengths in ([3, 4], [1, 8]):
            mask = causal() & key_lengths(lengths)
            assert torch.equal(compiled(mask, torch.empty(2, 8, 8)), mask.dense(2, 8, 8))

    @combines_masks_in_a_graph
    def test_built_inside(self):
        def make(lengths: Tensor, ids: Tensor) -> Mask:
            return (
                causal(alignment="bottom-right")
                & window(5, None, alignment="top-left")
                & key_lengths(lengths)
                & documents(ids)
                & prefix(lengths, alignment="top-left")
                & chunks(6, alignment="bottom-right")
            )

        compiled = torch.compile(
            lambda lengths, ids, x: _as_dense(make(lengths, ids), x), backend="aot_eager", fullgraph=True
        )
        ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
        for lengths in (torch.tensor([3, 4]), torch.tensor([8, 1])):
            assert torch.equal(
                compiled(lengths, ids, torch.empty(2, 8, 8)), make(lengths, ids).dense(2, 8, 8)
            )

    def test_dynamic_lengths_compile_once(self):
        mask = causal(alignment="bottom-right") & window(3, 9, alignment="top-left") & key_lengths([2, 3])
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda x: _as_dense(mask, x), backend=counter, fullgraph=True, dynamic=True)
        for query_length, key_length in ((7, 5), (6, 9), (33, 21)):
            assert torch.equal(
                compiled(torch.empty(2, query_length, key_length)), mask.dense(2, query_length, key_length)
            )
        assert counter.frame_count == 1


class TestTransforms:
    def test_vmap_over_the_lengths(self):
        dense = torch.vmap(lambda n: key_lengths(n).dense(1, 3, 5)[0, 0])(torch.tensor([2, 5]))
        assert torch.equal(dense, key_lengths([2, 5]).dense(2, 3, 5)[:, 0])

    def test_vmap_over_documents(self):
        ids = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]])
        dense = torch.vmap(lambda row: documents(row).dense(1, 4, 4)[0, 0])(ids)
        assert torch.equal(dense, documents(ids).dense(2, 4, 4)[:, 0])

    def test_fake_tensors(self):
        with FakeTensorMode():
            mask = key_lengths(torch.empty(2, dtype=torch.int64)) & documents(
                torch.empty(2, 5, dtype=torch.int64)
            )
            assert mask.dense(2, 5, 5).shape == (2, 1, 5, 5)

    def test_dynamic_batch(self):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda lengths, x: _as_dense(key_lengths(lengths), x),
            backend="aot_eager",
            fullgraph=True,
            dynamic=True,
        )
        for lengths in (torch.tensor([1, 2, 3]), torch.tensor([4, 0])):
            x = torch.empty(len(lengths), 6, 7)
            assert torch.equal(compiled(lengths, x), _as_dense(key_lengths(lengths), x))
