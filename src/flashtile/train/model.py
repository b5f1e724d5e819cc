"""A GPT: token embedding, layers of attention and MLP, and the embedding again to predict the next token.

Like GPT-2 in its shapes (the MLP is four times as wide as the model, GELU), with what later models changed:
RMSNorm before each part, rotary positions, no biases, and optionally fewer key heads than query heads. The
attention is one of three (`attentions.py`), which can be exchanged at any time and share all parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile import masks, rotary
from flashtile.checks import check_choice, check_sizes
from flashtile.train.attentions import ATTENTIONS, Dropout, Visible


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT.

    Args:
        vocabulary: tokens there are.
        layers, width, heads: the width is divided among the heads.
        kv_heads: heads of keys and values, a divisor of ``heads``; as many by default.
        context: tokens of a row.
        dropout: probability with which entries of the softmax, of each part's result and of the embedding are
            dropped in training.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    context: int
    kv_heads: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "layers", "width", "heads", "context")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be an even multiple of the {self.heads} heads (rotary positions turn pairs), "
                f"got {self.width}"
            )
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(f"kv_heads must divide the {self.heads} heads, got {self.kv_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def parameters(self) -> int:
        """How many numbers are learned; the embedding counts once, as it is used twice."""
        attention = self.width * (2 * self.width + 2 * self.key_heads * self.head_dim)
        layer = attention + 8 * self.width**2 + 2 * self.width
        return self.vocabulary * self.width + self.layers * layer + self.width


class Cache:
    """Keys and values of a sequence that is being written, for every layer, and how many there are."""

    def __init__(self, shape: Shape, places: int, like: Tensor) -> None:
        size = (shape.layers, 2, 1, shape.key_heads, places, shape.head_dim)
        self.layers = like.new_zeros(size)
        tables = rotary_tables(places, shape.head_dim, like.dtype)
        self.cos, self.sin = (table.to(like.device) for table in tables)
        self.length = 0


class SelfAttention(nn.Module):
    """Queries, keys and values of every token, rotated by position; the heads' results mixed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.inputs = nn.Linear(shape.width, shape.width + 2 * shape.key_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.attention = ATTENTIONS["flashtile"]

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, width) to queries (B, H, S, D), keys and values (B, Hkv, S, D): views, nothing is copied."""
        own, others = self.shape.heads, self.shape.key_heads
        heads = self.inputs(x).unflatten(-1, (own + 2 * others, -1)).transpose(1, 2)
        query, key, value = heads.split((own, others, others), dim=1)
        return query, key, value

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Visible, dropout: Dropout | None
    ) -> Tensor:
        query, key, value = self.heads(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        query, key = (rotary.apply(t, cos, sin, positions, interleaved=False) for t in (query, key))
        out = self.attention(query, key, value, visible, dropout)
        mixed: Tensor = self.output(out.transpose(1, 2).flatten(2))
        return mixed

    def decode(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        """The same for the next tokens of one sequence (1, new, width), which the cache is extended by.

        A window as long as the context keeps distances within those the model has been trained with.
        """
        query, key, value = self.heads(x)
        out = flashtile.attention_kvcache(
            query, *cache.layers[layer], key=key, value=value, cache_lengths=cache.length,
            rotary_cos=cache.cos, rotary_sin=cache.sin, rotary_interleaved=False,
            mask=masks.causal() & masks.window(left=self.shape.context - 1),
        )  # fmt: skip
        mixed: Tensor = self.output(out.transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    """Attention, then an MLP for each token; each is added to what was there."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = SelfAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Visible, dropout: Dropout | None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, visible, dropout))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(x)))
        return x + added

    def decode(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        x = x + self.attention.decode(self.attention_norm(x), cache, layer)
        added: Tensor = self.mlp(self.mlp_norm(x))
        return x + added


class GPT(nn.Module):
    """The model; its parameters are drawn from torch's generator."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, attention: str = "flashtile") -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        cos, sin = rotary_tables(shape.context, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added 2 x layers times to the stream is drawn smaller, as in GPT-2.
                added = name.endswith(("attention.output.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if added else 0.02)
        self.use(attention)

    def use(self, attention: str) -> None:
        """Attend with "flashtile", "sdpa" or "standard" from now on."""
        check_choice("attention", attention, ATTENTIONS)
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.attention = ATTENTIONS[attention]

    def forward(self, tokens: Tensor, documents: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """Logits (B, S, vocabulary) of the token after each of ``tokens``.

        Args:
            tokens: int64 (B, S), at most a context long.
            documents: int64 (B, S), an id for each token, documents being contiguous; None: a row is one.
            seed: int64 (1,), of the dropped entries of the softmax: needed in training with dropout. Each
                layer drops others.
        """
        batch, length = tokens.shape
        visible = Visible(batch, length, tokens.device, documents)
        x = self.dropout(self.embedding(tokens))
        for number, layer in enumerate(self.layers):
            dropout = None
            if self.training and self.shape.dropout > 0.0:
                if seed is None:
                    raise ValueError("seed must be given in training with dropout, got None")
                dropout = Dropout(self.shape.dropout, seed + number)
            x = layer(x, self.cos, self.sin, visible, dropout)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor, documents: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """Mean cross-entropy, nats per token, of ``tokens[:, 1:]``, each given what it sees: (B, S + 1)."""
        documents = None if documents is None else documents[:, :-1]
        logits = self(tokens[:, :-1], documents, seed)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def new_cache(self, places: int) -> Cache:
        """An empty cache for a sequence of so many tokens."""
        return Cache(self.shape, places, self.embedding.weight)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (1, new, vocabulary) for ``tokens`` (1, new), which follow what the cache holds."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x = layer.decode(x, cache, number)
        cache.length += tokens.shape[1]
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.inference_mode()
    def write(
        self, prompt: Tensor, count: int, end: int, *, temperature: float = 0.8, seed: int = 0
    ) -> Tensor:
        """At most ``count`` tokens that follow ``prompt`` (length,), drawn one by one until ``end`` comes.

        Any number can be written: what lies further back than a context is not seen. At temperature 0 the
        likeliest token is taken.
        """
        cache = self.new_cache(len(prompt) + count)
        generator = torch.Generator().manual_seed(seed)
        tokens, written = prompt[None].to(cache.layers.device), []
        for _ in range(count):
            logits = self.decode(tokens, cache)[0, -1].float().cpu()
            if temperature == 0.0:
                chosen = logits.argmax(keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            if int(chosen) == end:
                break
            written.append(chosen)
            tokens = chosen[None].to(tokens.device)
        return torch.cat(written) if written else prompt.new_empty(0)


def rotary_tables(positions: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines (positions, head_dim / 2) of the angles by which positions turn pairs."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
