"""A Transformers model on flashtile: a padded batch, and generating from it, as with eager attention.

The model is a small Llama with random weights; `AutoModelForCausalLM.from_pretrained(...,
attn_implementation="flashtile")` does the same for one with real ones.
"""

from __future__ import annotations

import sys

import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM

    from flashtile.integrations import transformers
except ImportError:
    print("this example needs Transformers: pip install 'flashtile[transformers]'")
    sys.exit()


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=199,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(2, 199, (2, 40))
    tokens[1, :15] = 0  # a shorter prompt, padded on the left
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}

    transformers.register()
    logits, generated = {}, {}
    for name in ("eager", "flashtile"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(**inputs).logits[inputs["attention_mask"].bool()]
        generated[name] = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    torch.testing.assert_close(logits["flashtile"], logits["eager"], rtol=1e-4, atol=1e-4)
    assert torch.equal(generated["flashtile"], generated["eager"])
    error = float((logits["flashtile"] - logits["eager"]).abs().max())
    print(
        f"logits differ by {error:.1e} at most; same tokens: {generated['eager'][1, -12:].tolist()}"
    )


if __name__ == "__main__":
    main()
