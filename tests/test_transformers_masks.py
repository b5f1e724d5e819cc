"""The masks of the Transformers integration: key intervals that mean what Transformers' functions say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, masking_utils

from flashtile.integrations import transformers, transformers_masks, transformers_rules
from flashtile.integrations.interval_mask import IntervalMask, mask_and_bias
from flashtile.integrations.transformers_masks import interval_mask
from flashtile.masks import Intervals

BATCH = 2
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 2, 2, -1, -1, 3, 3, 3, -1, -1]]).expand(BATCH, -1)
causal = masking_utils.causal_mask_function


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    transformers.register()


def custom_prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 4)


FUNCTIONS = {
    "causal": causal,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window of both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "blocks": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(BLOCKS)),
    "window and blocks": masking_utils.or_masks(
        masking_utils.sliding_window_causal_mask_function(4), masking_utils.blockwise_overlay(BLOCKS)
    ),
    "custom": custom_prefix,
    "custom in both": masking_utils.and_masks(custom_prefix, causal),
}
# (queries, keys, position of query 0, position of key 0)
SIZES = {
    "square": (9, 9, 0, 0),
    "cache": (3, 12, 9, 0),
    "one query": (1, 12, 11, 0),
    "static cache": (5, 14, 0, 0),
    "static cache, filled": (3, 14, 6, 0),
    "sliding cache": (3, 6, 9, 6),
}


def padding_of(kind: str, length: int) -> Tensor | None:
    if kind == "none":
        return None
    visible = torch.ones(BATCH, length, dtype=torch.bool)
    if kind in ("left", "both sides"):
        visible[0, : length // 3] = False
    if kind in ("right", "both sides"):
        visible[-1, -length // 4 :] = False
    if kind == "holes":
        visible[0, length // 2] = False
    if kind == "nothing":
        visible[0] = False
    return visible


def options(function: Any, sizes: tuple[int, int, int, int], padding: Tensor | None) -> dict[str, Any]:
    names = ("q_length", "kv_length", "q_offset", "kv_offset")
    given = dict(zip(names, sizes, strict=True))
    return {**given, "batch_size": BATCH, "mask_function": function, "attention_mask": padding}


def assert_same(mask: Tensor, given: dict[str, Any]) -> None:
    """`mask` is what Transformers' dense function makes of the same arguments, as a mask and as a tensor."""
    expected = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    assert isinstance(mask, IntervalMask)
    resolved, bias = mask_and_bias(mask)
    assert bias is None
    assert resolved is not None
    visible = resolved.dense(BATCH, given["q_length"], given["kv_length"])
    assert torch.equal(visible.expand(expected.shape), expected)
    lowest = torch.finfo(mask.dtype).min
    assert torch.equal(mask + 0.0, torch.where(expected, 0.0, lowest).to(mask.dtype))


@pytest.mark.parametrize("padding", ["none", "left", "right", "both sides", "holes", "nothing"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_masks_become_intervals(function, sizes, padding):
    given = options(function, sizes, padding_of(padding, sizes[1] + sizes[3]))
    mask = interval_mask(**given)
    if padding == "holes":
        assert mask.visible is None or mask.visible.numel() <= BATCH * sizes[1]
    else:
        assert mask.visible is None
    assert_same(mask, given)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_padding_shorter_than_a_static_cache_and_an_offset_as_a_tensor(function):
    given = options(function, (3, 14, 6, 0), padding_of("left", 9))
    mask = interval_mask(**{**given, "q_offset": torch.tensor([6])})
    assert mask.visible is None
    assert_same(mask, given)


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: (query + key) % 2 == 0,
        masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(2), custom_prefix),
        masking_utils.and_masks(causal, lambda batch, head, query, key: key != 3),
        masking_utils.or_masks(  # two windows with a gap between them
            masking_utils.sliding_window_causal_mask_function(1),
            masking_utils.and_masks(causal, masking_utils.blockwise_overlay(torch.zeros(BATCH, 9).long())),
        ),
    ],
)
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_what_is_no_interval_is_dense(function, padding):
    given = options(function, SIZES["square"], padding_of(padding, 9))
    assert_same(interval_mask(**given), given)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_evaluation_finds_the_same_as_the_rules(function, monkeypatch):
    monkeypatch.setattr(transformers_rules, "_RULES", {})
    monkeypatch.setattr(transformers_masks, "_PROBED", 40)  # two rows at once
    for sizes in SIZES.values():
        given = options(function, sizes, None)
        mask = interval_mask(**given)
        assert mask.visible is None
        assert_same(mask, given)


def test_functions_that_need_vmap():
    first = torch.tensor([3, 5])

    def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < first[batch]

    given = {**options(masking_utils.or_masks(causal, prefix), (9, 9, 0, 0), None), "use_vmap": True}
    mask = interval_mask(**given)
    assert mask.visible is None
    assert_same(mask, given)


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [5, 6, 7, 0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("kind", ["causal", "sliding_window_causal", "chunked_causal"])
def test_packed_sequences(kind):
    create = getattr(masking_utils, f"create_{kind}_mask")
    embeddings = torch.zeros(BATCH, 9, 8)
    masks = []
    for implementation in ("flashtile", "eager"):
        config = LlamaConfig(attn_implementation=implementation)
        config.sliding_window = 3
        config.attention_chunk_size = 3
        masks.append(create(config, embeddings, None, None, PACKED))
    assert isinstance(masks[0], IntervalMask)
    assert masks[0].visible is None
    assert torch.equal(masks[0] + 0.0, masks[1])
    assert (masks[1] != 0).sum() > (torch.ones(9, 9).triu(1) * BATCH).sum()  # packing hides something


def test_every_factory_of_this_version_has_its_rule():
    names = [
        "and_masks",
        "or_masks",
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
        "chunked_overlay",
        "blockwise_overlay",
        "packed_sequence_mask_function",
        "remap_positions_for_packed_sequence",
    ]
    assert len(transformers_rules._RULES) == sum(hasattr(masking_utils, name) for name in names)


@pytest.mark.parametrize(
    "rule",
    [
        lambda sizes, packing, sliding_window: Intervals(
            lower=sizes.q_offset - sizes.kv_offset - sliding_window
        ),
        lambda sizes, packing, window: Intervals(),
    ],
    ids=["another mask", "another argument"],
)
def test_a_rule_that_disagrees_with_its_closures_is_not_used(rule, monkeypatch):
    monkeypatch.setattr(transformers_rules, "_RULES", {})
    transformers_rules._add("sliding_window_overlay", rule, 3)
    transformers_rules._add("no_such_factory", rule, 3)
    assert not transformers_rules._RULES
    transformers_rules._add("sliding_window_overlay", transformers_rules._window, 3)
    assert len(transformers_rules._RULES) == 1


def test_length_costs_no_memory():
    length = 2**20
    mask = interval_mask(
        1, length, length, mask_function=masking_utils.sliding_window_causal_mask_function(9)
    )
    assert mask.shape == (1, 1, length, length)
    assert mask_and_bias(mask)[0].resolve(1, length, length, mask.device) == Intervals(-8, 0)


# From here on: one mask in the hands of code that takes it for a tensor.

GIVEN = options(causal, (3, 5, 2, 0), padding_of("left", 5))


@pytest.fixture
def mask() -> IntervalMask:
    return interval_mask(**GIVEN)


@pytest.fixture
def eager() -> Tensor:
    return masking_utils.eager_mask(**GIVEN)


def test_it_looks_like_the_mask_of_eager_attention(mask, eager):
    assert isinstance(mask, Tensor)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        assert getattr(mask, name) == getattr(eager, name)
    assert "IntervalMask" in repr(mask)


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask[:, :, 1:, :4],
        lambda mask: mask[0],
        lambda mask: mask + torch.ones(BATCH, 4, 3, 5),
        lambda mask: torch.ones(BATCH, 4, 3, 5) + mask,
        lambda mask: mask == 0,
        lambda mask: torch.where(mask < 0, 2, 3),
        lambda mask: torch.cat([mask, torch.zeros(BATCH, 1, 3, 2)], dim=-1),
        lambda mask: mask.expand(-1, 4, -1, -1),
        lambda mask: mask.to(torch.bfloat16),
        lambda mask: mask.masked_fill(torch.ones(5, dtype=torch.bool), 7.0),
        lambda mask: torch.nn.functional.pad(mask, (0, 2)),
    ],
)
def test_operations_give_what_they_give_of_the_eager_mask(operation, mask, eager):
    for _ in range(2):
        found = operation(mask)
        assert type(found) is Tensor
        assert torch.equal(found, operation(eager))
    resolved, bias = mask_and_bias(mask)
    assert resolved is None
    assert torch.equal(bias, eager)
    assert "tensor" in repr(mask)


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask[:, :, 0].fill_(1.0),
        lambda mask: mask.__setitem__((0, 0, 1), -1.0),
        lambda mask: mask.mul_(2.0),
        lambda mask: mask.transpose(2, 3).zero_(),
    ],
)
def test_what_is_written_into_it_counts(write, mask, eager):
    write(mask)
    write(eager)
    assert torch.equal(mask_and_bias(mask)[1], eager)


def test_copies_stay_intervals(mask, eager):
    fields, context = mask.__tensor_flatten__()
    copies = [
        mask.detach(),
        mask.clone(),
        copy.deepcopy(mask),
        mask[:, :, :, :5],
        mask[..., : mask.shape[-1]],
        mask.to("cpu"),
        mask.to(torch.float32),
        torch.ops.aten._to_copy(mask, device="cpu"),
        IntervalMask.__tensor_unflatten__(
            {name: getattr(mask, name) for name in fields}, context, mask.shape, mask.stride()
        ),
    ]
    assert all(isinstance(other, IntervalMask) and other.elements is None for other in [mask, *copies])
    assert all(torch.equal(other + 0.0, eager) for other in copies)


@pytest.mark.parametrize("written", [False, True], ids=["intervals", "elements"])
def test_a_compiled_graph_takes_it_for_tensors(written, mask, eager):
    if written:
        mask.mul_(1.0)
    fields, context = mask.__tensor_flatten__()
    assert fields == (["elements"] if written else ["first", "last"])
    assert (mask.lower, mask.upper) == (None, None)
    assert context == (torch.float32, torch.device("cpu"))
    assert torch.equal(mask + 0.0, eager)


@pytest.mark.parametrize("sizes", [(BATCH, 3, 6), (BATCH, 4, 5), (3, 3, 5)])
def test_it_belongs_to_its_sizes(sizes, mask):
    batch, queries, keys = sizes
    with pytest.raises(ValueError, match=r"\(2, 1, 3, 5\), got batch"):
        mask_and_bias(mask)[0].resolve(batch, queries, keys, mask.device)


def test_it_is_no_view_of_the_padding():
    padding = padding_of("holes", 5)
    before = padding.clone()
    mask = interval_mask(BATCH, 1, 5, 4, attention_mask=padding)
    mask.fill_(0.0)
    assert torch.equal(padding, before)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of Transformers' own code
def test_graphs_of_plain_tensors_get_a_plain_tensor():
    traced = torch.jit.trace(
        lambda hidden: interval_mask(**GIVEN) + hidden, torch.zeros(1), check_trace=False
    )
    assert torch.equal(traced(torch.zeros(1)), masking_utils.eager_mask(**GIVEN))
