"""Tiny, randomly initialised models of Transformers, and what is right for them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from flashtile.integrations import transformers
from flashtile.masks import Intervals

transformers.register()
hf.logging.set_verbosity_error()

VOCABULARY = 120
# Large weights: attention is far from uniform, so that a wrong mask shows in every logit.
_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ENCODER = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# (configuration, its arguments, model)
FAMILIES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "llama": (hf.LlamaConfig, _DECODER, hf.LlamaForCausalLM),
    "llama4": (
        hf.Llama4TextConfig,
        {**_DECODER, "attention_chunk_size": 6, "intermediate_size_mlp": 64, "num_local_experts": 2},
        hf.Llama4ForCausalLM,
    ),
    "gemma2": (
        hf.Gemma2Config,
        {**_DECODER, "sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        hf.Gemma2ForCausalLM,
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        {
            **_DECODER,
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        hf.Gemma3ForCausalLM,
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        {
            **_DECODER,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _PLAIN_ROPE,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        hf.GptOssForCausalLM,
    ),
    "mistral": (hf.MistralConfig, {**_DECODER, "sliding_window": 6}, hf.MistralForCausalLM),
    "qwen3": (hf.Qwen3Config, _DECODER, hf.Qwen3ForCausalLM),
    "t5": (
        hf.T5Config,
        {
            "vocab_size": VOCABULARY,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "initializer_factor": 1.0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        hf.T5ForConditionalGeneration,
    ),
    "bert": (hf.BertConfig, {**_ENCODER, "vocab_size": VOCABULARY}, hf.BertModel),
    "vit": (hf.ViTConfig, {**_ENCODER, "image_size": 32, "patch_size": 8}, hf.ViTModel),
    "whisper": (
        hf.WhisperConfig,
        {
            "vocab_size": VOCABULARY,
            "d_model": 48,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 30,
            "max_target_positions": 40,
            "num_mel_bins": 8,
            "init_std": 0.2,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        hf.WhisperForConditionalGeneration,
    ),
}
DECODERS = ["llama", "llama4", "gemma2", "gemma3", "gpt_oss", "mistral", "qwen3"]


def build(family: str, implementation: str = "eager", **changes: Any) -> Any:
    """A model in evaluation mode, in float32; equal for equal arguments but the implementation."""
    configuration, arguments, model_class = FAMILIES[family]
    torch.manual_seed(0)
    config = configuration(**{**arguments, **changes})
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the others know no float64
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` by the name that this version gives it."""
    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def attention_mask(kind: str, batch: int, length: int) -> Tensor | None:
    """Whether a token is there: (batch, length) of 0 and 1, or None."""
    if kind == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.int64)
    if kind == "left":
        mask[0, : length // 3] = 0
    elif kind == "right":
        mask[1, -length // 4 :] = 0
    else:
        mask[0, length // 2] = 0
    return mask


Result = Callable[[Any], Tensor]


@torch.no_grad()
def assert_as_exact_as_eager(
    model: Any, result: Result, exact: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """`result` of the model errs at most twice as much with flashtile as with eager attention, plus one
    rounding; both against the same model in float64."""
    exact = result(copy.deepcopy(model).double()) if exact is None else exact
    assert exact.dtype == torch.float64
    model = model.to(dtype)
    eager = result(model)
    model.set_attn_implementation("flashtile")
    found = result(model)
    model.set_attn_implementation("eager")
    assert found.dtype == eager.dtype
    error, standard = ((tensor.double() - exact).abs().max() for tensor in (found, eager))
    assert error <= 2 * standard + torch.finfo(dtype).eps * exact.abs().max(), (error, standard)
    assert standard < exact.abs().max() / 10  # the comparison means something


@contextmanager
def recorded_intervals() -> Iterator[list[Intervals | None]]:
    """What every attention call in the block could see; None where nothing was hidden."""
    calls: list[Intervals | None] = []
    attend = transformers.attention

    def recording(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        mask = options["mask"]
        sizes = (query.shape[0], query.shape[2], key.shape[2], query.device)
        calls.append(None if mask is None else mask.resolve(*sizes))
        return attend(query, key, value, **options)

    transformers.attention = recording
    try:
        yield calls
    finally:
        transformers.attention = attend
