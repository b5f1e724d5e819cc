"""A training run: the model, its optimizer, and what happens in a step.

Whatever is random in a step (rows of text, dropout) depends on the seed and the number of the step alone, not
on what was drawn before. Parameters, the optimizer's state and the number are all that has to be kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile.dropout import filled_seed
from flashtile.train.data import Corpus, derived_seed
from flashtile.train.model import GPT
from flashtile.train.settings import Settings

_DATA, _DROPOUT, _MODEL = range(3)  # what a derived seed is for


class Training:
    """A run after ``done`` steps; ``step`` makes the next one.

    Args:
        corpus: the text, its tokenizer fitting the settings'.
        compiled: compile the model with torch.compile (on a CPU this needs a C++ compiler).
    """

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        device: torch.device | str = "cpu",
        *,
        compiled: bool = False,
    ) -> None:
        self.settings, self.corpus, self.device = settings, corpus, torch.device(device)
        torch.manual_seed(derived_seed(settings.seed, _MODEL))
        shape = settings.shape(corpus.tokenizer.vocabulary)
        self.model = GPT(shape, settings.attention).to(self.device)
        self.optimizer = make_optimizer(self.model, settings)
        self.done = 0
        self._loss = torch.compile(self.model.loss) if compiled else self.model.loss

    @property
    def tokens_per_step(self) -> int:
        return self.settings.batch * self.settings.accumulate * self.settings.context

    def step(self) -> float:
        """Learn from the next rows, and return their loss before that, in nats per token."""
        settings, parts = self.settings, self.settings.accumulate
        self.model.train()
        rate = settings.rate(self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = self.corpus.rows(
            self.done, settings.batch * parts, settings.context + 1, derived_seed(settings.seed, _DATA)
        )
        total = torch.zeros((), device=self.device)
        for part, tokens in enumerate(rows.chunk(parts)):
            loss = self.loss(tokens, derived_seed(settings.seed, _DROPOUT, self.done, part)) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return float(total)

    def loss(self, rows: Tensor, dropout_seed: int | None = None) -> Tensor:
        """Mean loss of rows of tokens (B, S + 1), each token given those before it in its document."""
        seed = None
        if dropout_seed is not None and self.settings.dropout > 0.0:
            torch.manual_seed(dropout_seed)
            seed = filled_seed(dropout_seed, self.device)
        tokenizer = self.corpus.tokenizer
        several = bool((rows[:, 1:-1] == tokenizer.start).any())  # in host memory: nothing waits for a GPU
        rows = rows.to(self.device)
        documents = tokenizer.document_ids(rows) if several else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            return self._loss(rows, documents, seed)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss of the rows that are held out, without dropout."""
        settings = self.settings
        self.model.eval()
        rows = self.corpus.held_out_rows(settings.context + 1, settings.validation_rows)
        parts = torch.split(rows, settings.batch)
        return math.fsum(float(self.loss(part)) * len(part) for part in parts) / len(rows)

    def state(self) -> dict[str, Any]:
        """What has to be kept to go on, of tensors and plain numbers."""
        return {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; of the same settings and corpus."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def make_optimizer(model: GPT, settings: Settings) -> torch.optim.Optimizer:
    """AdamW with GPT-3's moments; matrices decay, the scales of the norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": scales, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
