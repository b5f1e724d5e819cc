"""One long text on several processes: each holds a part of it and trains the same model.

    torchrun --standalone --nproc-per-node 2 examples/ring_attention.py

The sequence is cut into two runs per process (zigzag), which balances the causal work.
DistributedDataParallel averages the gradients, as it does for parts of a batch; they are those of one process
with the whole text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import flashtile
from flashtile import masks
from flashtile.parallel import ring_attention, shard

LENGTH, HEADS, WIDTH, STEPS = 1024, 4, 64, 40


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


def train() -> None:
    torch.manual_seed(0)
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()[: LENGTH + 1]), dtype=torch.uint8).long()[None]
    inputs, labels, positions = text[:, :-1], text[:, 1:], torch.arange(LENGTH)[None]
    whole = Model(on_one_process)
    part = Model(on_all_processes)
    part.load_state_dict(whole.state_dict())
    part = DistributedDataParallel(part)
    own_inputs, own_labels, own_positions = (
        shard(tensor, layout="zigzag") for tensor in (inputs, labels, positions)
    )

    def loss_of_part() -> Tensor:
        """This process's share of the mean over all bytes, times the number that DDP divides by."""
        loss = cross_entropy(
            part(own_inputs, own_positions).flatten(0, 1), own_labels.flatten(), reduction="sum"
        )
        return loss * dist.get_world_size() / LENGTH

    cross_entropy(whole(inputs, positions).flatten(0, 1), labels.flatten()).backward()
    loss_of_part().backward()
    largest = 0.0
    for one, all_ in zip(whole.parameters(), part.parameters(), strict=True):
        torch.testing.assert_close(all_.grad, one.grad, rtol=1e-4, atol=1e-6)
        largest = max(largest, float((all_.grad - one.grad).abs().max()))

    optimizer, losses = torch.optim.Adam(part.parameters(), lr=3e-3), []
    for _ in range(STEPS):
        loss = loss_of_part()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    assert losses[-1] < losses[0] / 2
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {own_inputs.shape[1]} of {LENGTH} bytes on this one")
        print(f"gradients differ from those of one process by at most {largest:.1e}")
        print(f"loss after {STEPS} steps: {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        sys.exit(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train()  # frees what DDP holds of the group before that is destroyed
    dist.destroy_process_group()
