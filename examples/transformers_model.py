"""A Llama of Hugging Face Transformers, tiny and random, on flashtile and on eager attention: the same."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from flashtile.integrations import transformers

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("this example needs Transformers: pip install 'flashtile[transformers]'")
    sys.exit()


def logits_and_gradients(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The logits of the tokens that are no padding, and what training would get."""
    there = batch["attention_mask"].bool()
    outputs = model(**batch, labels=batch["input_ids"].where(there, -100))
    gradients = torch.autograd.grad(outputs.loss, tuple(model.parameters()))
    return (outputs.logits[there].detach(), *gradients)


def main() -> None:
    transformers.register()  # once per process; Transformers knows attn_implementation="flashtile" then

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=500,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="flashtile",
    )
    model = LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(3, 500, (2, 100)), "attention_mask": torch.ones(2, 100).long()}
    batch["attention_mask"][1, 60:] = 0  # the second text is shorter

    ours = logits_and_gradients(model, batch)
    prompt = {name: tensor.flip(1) for name, tensor in batch.items()}  # generation pads on the left
    tokens = model.generate(**prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)

    model.set_attn_implementation("eager")
    eager = logits_and_gradients(model, batch)
    expected = model.generate(**prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)

    for found, standard in zip(ours, eager, strict=True):
        torch.testing.assert_close(found, standard, rtol=1e-4, atol=1e-5)
    difference = float((ours[0] - eager[0]).abs().max())
    print(
        f"logits of {len(ours[0])} tokens: largest difference {difference:.1e}, and {len(ours) - 1} gradients"
    )
    assert torch.equal(tokens, expected)
    print(f"generated, the same tokens: {tokens[0, -10:].tolist()}")


if __name__ == "__main__":
    main()
