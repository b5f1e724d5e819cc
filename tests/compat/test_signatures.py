"""The signatures are flash-attn 2.8's: names, order, defaults. What flash-attn 4 adds is keyword-only."""

from __future__ import annotations

import inspect

import pytest

from flashtile.compat import bert_padding, flash_attn
from flashtile.compat.layers import rotary

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
CACHE = {
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}
EXTRAS = {"learnable_sink": None, "return_lse": False}
# Function: parameters without a default, parameters with one, keyword-only ones.
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), OPTIONS, EXTRAS),
    "flash_attn_kvpacked_func": (("q", "kv"), OPTIONS, EXTRAS),
    "flash_attn_qkvpacked_func": (("qkv",), OPTIONS, EXTRAS),
    "flash_attn_varlen_func": (("q", "k", "v", *LENGTHS), {**OPTIONS, "block_table": None}, EXTRAS),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *LENGTHS), OPTIONS, EXTRAS),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), OPTIONS, EXTRAS),
    "flash_attn_with_kvcache": (("q", "k_cache", "v_cache"), CACHE, {"learnable_sink": None}),
}
HELPERS = {
    bert_padding.unpad_input: (("hidden_states", "attention_mask"), {"unused_mask": None}),
    bert_padding.unpad_input_for_concatenated_sequences: (("hidden_states", "attention_mask_in_length"), {}),
    bert_padding.pad_input: (("hidden_states", "indices", "batch", "seqlen"), {}),
    bert_padding.index_first_axis: (("input", "indices"), {}),
    bert_padding.index_put_first_axis: (("values", "indices", "first_axis_dim"), {}),
    bert_padding.index_first_axis_residual: (("input", "indices"), {}),
    rotary.apply_rotary_emb: (
        ("x", "cos", "sin"),
        {"interleaved": False, "inplace": False, "seqlen_offsets": 0, "cu_seqlens": None, "max_seqlen": None},
    ),
    rotary.apply_rotary_emb_torch: (("x", "cos", "sin"), {"interleaved": False}),
    rotary.apply_rotary_emb_qkv_: (
        ("qkv", "cos", "sin"),
        {"cos_k": None, "sin_k": None, "interleaved": False, "seqlen_offsets": 0, "num_heads_q": None},
    ),
    rotary.apply_rotary_emb_kv_: (("kv", "cos", "sin"), {"interleaved": False, "seqlen_offsets": 0}),
}


def described(function):
    """(names without a default, name to default in order, keyword-only name to default)"""
    parameters = inspect.signature(function).parameters.values()
    ordinary = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    only = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(ordinary) + len(only) == len(parameters)
    required = tuple(p.name for p in ordinary if p.default is p.empty)
    return required, [(p.name, p.default) for p in ordinary[len(required) :]], only


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_function(name):
    required, defaults, only = SIGNATURES[name]
    assert described(getattr(flash_attn, name)) == (required, list(defaults.items()), only)


@pytest.mark.parametrize("helper", HELPERS, ids=lambda function: function.__name__)
def test_signature_of_helper(helper):
    required, defaults = HELPERS[helper]
    assert described(helper) == (required, list(defaults.items()), {})


def test_nothing_else_is_offered():
    assert sorted(flash_attn.__all__) == sorted(SIGNATURES)
    names = {function.__name__ for function in HELPERS}
    assert names | {"apply_rotary_emb_func"} == {*bert_padding.__all__, *rotary.__all__}
