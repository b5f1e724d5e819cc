"""What the tests of ``context_parallel`` let every rank do, with tiny models of Transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import flashtile
from flashtile import masks, parallel
from tests.parallel import jobs
from tests.tiny_models import attention_mask, build, tokens

BATCH, LENGTH = 2, 61


@dataclass(frozen=True)
class Training:
    """A loss and its gradients: of one process, or in a ``context_parallel`` of so many ranks."""

    family: str
    ranks: int
    context: dict[str, Any] = field(default_factory=dict)
    padding: str = "none"
    checkpoints: bool = False

    def whole(self) -> dict[str, Any]:
        """What one process gives its model."""
        input_ids = tokens(BATCH, LENGTH)
        labels = input_ids.clone()
        labels[0, 9:23] = -100
        given = {"input_ids": input_ids, "labels": labels, "use_cache": False}
        if self.padding != "none":
            given["attention_mask"] = attention_mask(self.padding, BATCH, LENGTH)
        if "cu_seqlens" in self.context:
            documents = [torch.arange(end - start) for start, end in pairwise(self.context["cu_seqlens"])]
            given["position_ids"] = torch.cat(documents).expand(BATCH, -1)
        return given

    def on_one_process(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
        model = build(self.family, "flashtile").to(dtype)
        loss = model(**self.whole()).loss
        loss.backward()
        return loss.detach(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def train(group: Any, training: Training) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of all ranks, and the sums of their gradients."""
    context = dict(training.context)
    group = jobs.meshes[context.pop("mesh")] if "mesh" in context else group
    whole = training.whole()
    model = build(training.family, "flashtile")
    if training.checkpoints:
        with warnings.catch_warnings():  # a newer version has another name for it
            warnings.simplefilter("ignore", FutureWarning)
            model.train().gradient_checkpointing_enable()
    with parallel.context_parallel(group, **context) as one:
        batch = one.shard_batch(whole["input_ids"], whole["labels"], whole.get("attention_mask"))
        loss = model(**batch).loss
        loss.backward()
        return one.total(loss), {name: one.total(x) for name, x in gradients_of(model).items()}


def train_wrapped(group: Any, wrapper: str, copies: int = 1) -> dict[str, Tensor]:
    """The weights of a Llama after a step in a wrapper that averages gradients over the ranks.

    Each of ``copies`` has a batch of its own: data along one dimension of a mesh, sequences along the other.
    """
    ranks = dist.get_world_size(group) // copies
    sequence = group if copies == 1 else jobs.meshes[copies, ranks].get_group(1)
    model = build("llama", "flashtile")
    if wrapper == "DDP":
        wrapped = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    with parallel.context_parallel(sequence, layout="zigzag") as one:
        input_ids = tokens(BATCH * copies, LENGTH).chunk(copies)[dist.get_rank(group) // ranks]
        loss = wrapped(**one.shard_batch(input_ids, input_ids)).loss
        (loss * ranks).backward()  # the wrapper's average over parts, which ought to be added up
    return jobs.weights_after_a_step(model, 0.1)


def train_unwrapped(batch: int = BATCH) -> dict[str, Tensor]:
    """The weights after the same step of one process."""
    model = build("llama", "flashtile")
    input_ids = tokens(batch, LENGTH)
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    return jobs.weights_after_a_step(model, 0.1)


def _forward(family: str, **changes: Any) -> Callable[[Any], Any]:
    """The model on a batch of the context, some of whose entries are others."""

    def run(context: Any) -> Any:
        batch = context.shard_batch(tokens(BATCH, LENGTH)) | changes
        return build(family, "flashtile")(**batch)

    return run


def _generate(context: Any) -> Any:
    # No key is padding, so that the mask is that of the part, one token longer in each step.
    batch = context.shard_batch(tokens(BATCH, LENGTH)) | {"use_cache": True}
    return build("llama", "flashtile").generate(**batch, max_new_tokens=3, do_sample=False)


def _documents_of_the_part(context: Any) -> Any:
    batch = context.shard_batch(tokens(BATCH, LENGTH))
    return build("llama", "flashtile")(**batch | {"position_ids": batch["position_ids"] % 7})


def _another_length(context: Any) -> Any:
    own = 20 + dist.get_rank()
    return build("llama", "flashtile")(tokens(1, own), position_ids=torch.arange(own)[None], use_cache=False)


def _left_padding(context: Any) -> Any:
    batch = context.shard_batch(tokens(BATCH, LENGTH), None, attention_mask("left", BATCH, LENGTH))
    return build("llama4", "flashtile")(**batch)


def _encoder_and_decoder(context: Any) -> Any:
    return build("t5", "flashtile")(tokens(1, 8), decoder_input_ids=tokens(1, 8))


def _sdpa(**options: Any) -> Callable[[Any], Any]:
    def run(context: Any) -> Any:
        query = torch.randn(1, 2, 8, 16)
        with flashtile.activated():
            return F.scaled_dot_product_attention(
                query, query[:, :, : options.pop("keys", 8)], query, **options
            )

    return run


MISTAKES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "positions of the part": ({}, _forward("mistral", position_ids=None)),
    "documents of the part": ({}, _documents_of_the_part),
    "matrix": ({}, _forward("llama", attention_mask=torch.ones(BATCH, 1, 31, 31, dtype=torch.bool))),
    "generation": ({}, _generate),
    "another length": ({}, _another_length),
    "chunks and padding": ({}, _left_padding),
    "chunks and documents": ({"cu_seqlens": [0, 30, LENGTH]}, _forward("llama4")),
    "cross-attention": ({}, _encoder_and_decoder),
    "documents of another length": ({"cu_seqlens": [0, 30]}, _forward("llama")),
    "labels": ({}, lambda context: context.shard_batch(tokens(1, 8), tokens(1, 7))),
    "attn_mask": ({}, _sdpa(attn_mask=torch.zeros(8, 8))),
    "method": ({"method": "star"}, print),
    "zigzag heads": ({"method": "ulysses", "layout": "zigzag"}, print),
    "no mesh": ({"method": "mesh"}, print),
    "no documents": ({"cu_seqlens": [0]}, print),
    "nobody attends": ({}, lambda context: None),
}  # fmt: skip


def mistakes(group: Any) -> dict[str, str]:
    """What this rank is told of each mistake."""
    said = {}
    for name, (options, run) in MISTAKES.items():
        said[name] = "no error"
        try:
            with parallel.context_parallel(group, **options) as context:
                run(context)
        except Exception as error:  # warnings are errors
            said[name] = f"{type(error).__name__}: {error}"
    return said


def attend_behind_sdpa(group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradient of torch's function on the parts of all ranks, put together, and on the whole."""
    query, key, value = torch.randn(1, 4, LENGTH, 16), *torch.randn(2, 1, 2, LENGTH, 16)
    found = []
    with flashtile.activated(), parallel.context_parallel(group, layout="zigzag") as context:
        own = context.shard(query, 2).requires_grad_()
        parts = (own, context.shard(key, 2), context.shard(value, 2))
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        out.square().sum().backward()
        found = [context.unshard(out.detach(), 2), context.unshard(own.grad, 2)]
    whole = query.clone().requires_grad_()
    expected = flashtile.attention(whole, key, value, mask=masks.causal())
    expected.square().sum().backward()
    assert whole.grad is not None
    return found[0], found[1], expected.detach(), whole.grad
