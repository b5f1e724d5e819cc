"""Transformers' own flash_attention_2 on flashtile: what it does after it has looked for a GPU.

Transformers refuses flash-attn on CPUs before it calls it. These tests skip that look, in a process of their
own, and everything behind it is Transformers' code as it is.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("transformers", minversion="5.0")

SETUP = """
    from flashtile.compat import install
    install()
    import torch
    import transformers.modeling_flash_attention_utils as flash
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

    flash.is_flash_attn_2_available = lambda *_, **__: True
    PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
    SIZES = dict(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )

    def pair(kind, config):
        names = ("eager", "flash_attention_2")
        eager, ours = (kind._from_config(config, attn_implementation=name) for name in names)
        ours.load_state_dict(eager.state_dict())
        assert ours.config._attn_implementation == "flash_attention_2"
        return eager.eval(), ours.eval()

    def same(ours, eager, **inputs):
        found, expected = (model(**inputs) for model in (ours, eager))
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)
        for model, outputs in ((ours, found), (eager, expected)):
            model.zero_grad()
            outputs.logits[real].sin().sum().backward()
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)

    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 20))
    padding = torch.ones_like(tokens)
    padding[0, :5] = 0
"""


def run(code: str) -> None:
    program = textwrap.dedent(SETUP) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_llama_with_padding_and_generation():
    run("""
        eager, ours = pair(LlamaForCausalLM, LlamaConfig(**SIZES))
        same(ours, eager, input_ids=tokens)
        same(ours, eager, input_ids=tokens, attention_mask=padding)
        options = dict(attention_mask=padding, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(ours.generate(tokens, **options), eager.generate(tokens, **options))
    """)


def test_a_sliding_window():
    run("""
        eager, ours = pair(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=6))
        same(ours, eager, input_ids=tokens, attention_mask=padding)
    """)
