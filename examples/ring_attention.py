"""A long text on several processes: each holds a part of every sequence and trains the same model.

    torchrun --standalone --nproc-per-node 2 examples/ring_attention.py            or 4
    torchrun --standalone --nproc-per-node 4 examples/ring_attention.py book.txt   another text

The text is Python's language reference, which comes with Python; a step takes its next 4096 bytes as one
sequence. That is cut into two runs per process (zigzag), which balances the causal work.
DistributedDataParallel averages the gradients, as it does for parts of a batch; they are those of one process
with the whole sequence.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import flashtile
from flashtile import masks
from flashtile.parallel import ring_attention, shard

LENGTH, HEADS, WIDTH, STEPS = 4096, 4, 64, 25


class Model(nn.Module):
    """Predicts the next byte: one layer of attention and one perceptron."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.project, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.predict = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor, positions: Tensor) -> Tensor:
        states = self.bytes(text) + self.positions(positions)
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(states).chunk(3, -1)
        )
        states = states + self.mix(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return self.predict(states + self.perceptron(states))


def on_one_process(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flashtile.attention(query, key, value, mask=masks.causal())


def on_all_processes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ring_attention(query, key, value, mask=masks.causal(), layout="zigzag")


def read_text() -> Tensor:
    """The bytes of the file that is named, or of Python's language reference."""
    if len(sys.argv) > 1:
        content = Path(sys.argv[1]).read_bytes()
    else:
        content = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    if len(content) <= LENGTH:
        sys.exit(f"the text must have more than {LENGTH} bytes, got {len(content)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def sequence(text: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, the bytes that follow each, and positions, (1, LENGTH) each; over and over through the text."""
    start = step * LENGTH % (len(text) - LENGTH)
    piece = text[start : start + LENGTH + 1]
    return piece[None, :-1], piece[None, 1:], torch.arange(LENGTH)[None]


def loss_of_part(model: nn.Module, text: Tensor, step: int) -> Tensor:
    """This process's share of the mean over all bytes, times the number that DDP divides by."""
    # Labels are moved by one before they are cut: the byte after a run is the first of another process's run.
    inputs, labels, positions = (shard(tensor, layout="zigzag") for tensor in sequence(text, step))
    loss = cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss * dist.get_world_size() / LENGTH


def train() -> None:
    torch.manual_seed(0)
    text = read_text()
    whole = Model(on_one_process)
    part = Model(on_all_processes)
    part.load_state_dict(whole.state_dict())
    part = DistributedDataParallel(part)

    inputs, labels, positions = sequence(text, 0)
    cross_entropy(whole(inputs, positions).flatten(0, 1), labels.flatten()).backward()
    loss_of_part(part, text, 0).backward()
    largest = 0.0
    for one, all_ in zip(whole.parameters(), part.parameters(), strict=True):
        torch.testing.assert_close(all_.grad, one.grad, rtol=1e-4, atol=1e-6)
        largest = max(largest, float((all_.grad - one.grad).abs().max()))

    optimizer, losses = torch.optim.Adam(part.parameters(), lr=1e-2), []
    for step in range(STEPS):
        loss = loss_of_part(part, text, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    assert losses[-1] < 0.6 * losses[0]
    if dist.get_rank() == 0:
        own = shard(positions, layout="zigzag").shape[1]
        print(f"{dist.get_world_size()} processes, {own} of {LENGTH} bytes of a sequence on this one")
        print(f"gradients differ from those of one process by at most {largest:.1e}")
        print(f"loss after {STEPS} sequences of {len(text)} bytes: {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        sys.exit(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train()  # frees what DDP holds of the group before that is destroyed
    dist.destroy_process_group()
