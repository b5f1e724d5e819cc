"""Flashtile as an attention implementation of Hugging Face Transformers.

    from flashtile.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashtile")

or ``model.set_attn_implementation("flashtile")`` on a model that exists. Both the attention and its mask
function are registered: the mask function hands over key intervals instead of a matrix (see
``transformers_masks``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flashtile import masks
from flashtile.attention import attention
from flashtile.integrations import active
from flashtile.integrations.interval_mask import IntervalMask, mask_and_bias
from flashtile.masks import Mask
from flashtile.masks.arguments import shown_value, values_known

if TYPE_CHECKING:
    from flashtile.parallel.context import ContextParallel

NAME = "flashtile"
OLDEST = (5, 6)  # the oldest that is tested; the first of 5 gave their mask functions other arguments

# What models hand on to every attention function, and what changes nothing in it.
_HARMLESS = frozenset(
    [
        *("cache", "past_key_values", "cache_position", "use_cache", "position_ids", "position_embeddings"),
        *("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids"),
        *("encoder_hidden_states", "encoder_outputs", "output_hidden_states", "output_router_logits"),
        *("return_dict", "num_items_in_batch", "max_length_q", "max_length_k", "max_seqlen", "seq_idx"),
        "shift_labels",
        *("grid_thw", "deterministic"),
    ]
)


def register() -> None:
    """Make ``attn_implementation="flashtile"`` known to Transformers; calling it again does no harm.

    Transformers takes every implementation with "flash" in its name for a flavour of the flash_attn package,
    and would try to load that. This one is none, so the function that decides it
    (``transformers.utils.generic.is_flash_attention_requested``) is replaced by one that says so.

    Raises:
        ImportError: Transformers is not installed, or older than 5.6.
    """
    wanted = "pip install 'flashtile[transformers]'"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"flashtile.integrations.transformers needs Transformers: {wanted}") from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"flashtile.integrations.transformers needs Transformers {oldest} or newer, {version} is "
            f"installed: {wanted}"
        )
    from flashtile.integrations.transformers_masks import interval_mask

    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, interval_mask)
    _tell_apart_from_flash_attn()


def _tell_apart_from_flash_attn() -> None:
    from transformers.utils import generic

    asked: Callable[..., bool] = generic.is_flash_attention_requested
    if getattr(asked, "knows_flashtile", False):
        return

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **options: Any
    ) -> bool:
        names = (requested_attention_implementation, getattr(config, "_attn_implementation", None))
        if names in ((NAME, None), (None, NAME)):
            return False
        return asked(config, requested_attention_implementation, **options)

    is_flash_attention_requested.knows_flashtile = True  # type: ignore[attr-defined]
    # Modules that are imported later take it from where it is defined; these have it already.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is asked:
            module.is_flash_attention_requested = is_flash_attention_requested  # type: ignore[attr-defined]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers' attention modules call it.

    Args:
        module: the calling module; its ``is_causal`` counts where neither a mask nor ``is_causal`` is given.
        query: (B, Hq, Sq, D). Its batch may be 1 where the keys' is not.
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), not repeated for the query heads.
        attention_mask: an IntervalMask, a bool tensor (True = attend) or a floating one that is added to the
            scores, both 4-D, or None. A mask says all: ``is_causal`` and ``sliding_window`` count where there
            is none. Then query 0 stands at key 0, and a single query at the last key.
        scaling, softcap, dropout: scale, softcap and dropout_p of :func:`flashtile.attention`.
        sliding_window: how many keys a query sees at most, itself among them.
        s_aux: sinks, one per query head.
        position_bias: added to the scores, broadcasts to (B, Hq, Sq, Sk).
        cu_seq_lens_q, cu_seq_lens_k: where the packed sequences of a batch of one row begin, and its length.

    Returns:
        The output, contiguous (B, Sq, Hq, Dv), and None in the place of the attention weights. In a block of
        ``flashtile.parallel.context_parallel`` all tensors are this rank's part of a sequence.

    Raises:
        ValueError, TypeError: an argument that does not fit, that asks for the attention weights, or that is
            unknown and might change the result.
    """
    if output_attentions:
        raise ValueError(
            "output_attentions=True needs the matrix of attention weights, which flashtile never makes: use "
            'attn_implementation="eager" (model.set_attn_implementation("eager"))'
        )
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown:
        raise TypeError(
            f"{type(module).__name__} passes {', '.join(unknown)} to the attention, which flashtile does not "
            'know and which may change the result: use attn_implementation="eager" or "sdpa"'
        )
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
        "dropout_p": dropout,
    }
    if (context := active.current()) is not None:
        matrix = position_bias is not None or cu_seq_lens_q is not None or cu_seq_lens_k is not None
        positions = kwargs.get("position_ids")
        masking = _Masking(module, attention_mask, is_causal, sliding_window, positions, matrix)
        return _output(_attend_in_parts(context, query, key, value, masking, options)), None
    mask, bias = _mask_and_bias(module, query.shape[2] == 1, attention_mask, is_causal, sliding_window)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packed = _packed(query, key, cu_seq_lens_q, cu_seq_lens_k)
        mask = packed if mask is None else packed & mask
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (query, key, value))
    dtype = query.dtype
    if bias is not None and bias.dtype != dtype:
        wide = torch.promote_types(dtype, bias.dtype)
        query, key, value, bias = (tensor.to(wide) for tensor in (query, key, value, bias))
    out = attention(query, key, value, mask=mask, bias=bias, **options)
    return _output(out if bias is None else out.to(dtype)), None


def _output(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous()


class _Masking(NamedTuple):
    """What a call says of its mask; ``other``: a bias, or lengths of packed sequences."""

    module: nn.Module
    attention_mask: Tensor | None
    is_causal: bool | None
    sliding_window: int | None
    position_ids: Tensor | None
    other: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_in_parts(
    context: ContextParallel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masking: _Masking,
    options: dict[str, Any],
) -> Tensor:
    """On all ranks of ``context_parallel``; what one of them refuses is an error of all."""
    mask, refusal = None, None
    try:
        _check_part(context, query, key, masking)
        mask, _ = _mask_and_bias(
            masking.module, False, masking.attention_mask, masking.is_causal, masking.sliding_window
        )
    except (TypeError, ValueError) as error:
        refusal = error
    return context.attend(query, key, value, refusal, mask=mask, **options)


def _check_part(context: ContextParallel, query: Tensor, key: Tensor, masking: _Masking) -> None:
    """Refuses what is no part of one sequence on all ranks, or a mask that is not known for all of it."""
    mask, position_ids = masking.attention_mask, masking.position_ids
    if masking.other:
        raise ValueError(
            "context_parallel supports no position_bias, and takes packed documents as cu_seqlens of its "
            "own, not as cu_seq_lens_q of the model"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            "context_parallel needs the keys of the queries' own part: no cache (generation; "
            "use_cache=False) and no cross-attention, got "
            f"{query.shape[2]} queries and {key.shape[2]} keys"
        )
    if mask is None:
        return
    if not isinstance(mask, IntervalMask) or mask.elements is not None:
        raise ValueError(
            "context_parallel does not support masks that are matrices, nor models that change their mask, "
            "which makes it one"
        )
    if position_ids is None or position_ids.dim() != 2:  # of several axes: what they mean is the model's
        return
    expected = context.positions(mask.shape[2]).to(query.device)
    if position_ids.shape[1] != len(expected) or not bool((position_ids == expected).all()):
        raise ValueError(
            "position_ids must be those of this rank's part of the whole sequence (context.shard_batch gives "
            f"them): {shown_value(expected)}, got {shown_value(position_ids)}"
        )


def _mask_and_bias(
    module: nn.Module,
    decoding: bool,
    attention_mask: object,
    is_causal: bool | None,
    sliding_window: int | None,
) -> tuple[Mask | None, Tensor | None]:
    if attention_mask is None:
        return _mask_of_none(module, decoding, is_causal, sliding_window), None
    if isinstance(attention_mask, IntervalMask):
        return mask_and_bias(attention_mask)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.dim() != 4:
        raise ValueError(
            "attention_mask must have the dimensions (batch, 1 or heads, queries, keys), got shape "
            f"{tuple(attention_mask.shape)}"
        )
    if attention_mask.dtype == torch.bool:
        return masks.from_dense(attention_mask), None
    if not attention_mask.is_floating_point():
        raise TypeError(f"attention_mask must be bool or floating, got {attention_mask.dtype}")
    return None, attention_mask


def _mask_of_none(
    module: nn.Module, decoding: bool, is_causal: bool | None, sliding_window: int | None
) -> Mask | None:
    """What is visible where no mask says it."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if decoding:
        is_causal = False  # a single query: it sees all that came before
    elif is_causal is None:
        raise ValueError(
            f"{type(module).__name__} gives neither an attention_mask nor is_causal, nor has it an attribute "
            "is_causal: whether its attention is causal cannot be known"
        )
    left = right = None
    if sliding_window is not None:
        left = right = sliding_window - 1
    if is_causal:
        right = 0
    if left is None and right is None:
        return None
    # A cache of fixed length is longer than the queries that begin to fill it.
    return masks.window(left, right, alignment="bottom-right" if decoding else "top-left")


def _packed(query: Tensor, key: Tensor, starts: Tensor | None, key_starts: Tensor | None) -> Mask:
    """Every query sees the keys of its own sequence: ``starts`` (sequences + 1,), the length at its end."""
    batch, _, length, _ = query.shape
    if starts is None or key_starts is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together")
    known = values_known(starts) and values_known(key_starts)
    if known and not (torch.equal(starts, key_starts) and int(starts[-1]) == length == key.shape[2]):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be equal and end with the number of queries and of keys, "
            f"{length} and {key.shape[2]}, got {starts.tolist()} and {key_starts.tolist()}"
        )
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of 1, got a batch of {batch}")
    sequence = torch.searchsorted(
        starts[1:].contiguous(), torch.arange(length, device=starts.device), right=True
    )
    return masks.key_range(starts[sequence][None], starts[sequence + 1][None])
