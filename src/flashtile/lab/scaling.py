"""What attention over many GPUs takes, on paper: the bytes that each sends, and when products hide them.

A model of ``flashtile.parallel``: its bytes are those that a run counts, its times are those of data sheets
and so the best that could be. docs/scaling.md derives the formulas and says what they give.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.lab.roofline import CARDS, Card
from flashtile.lab.theory import DIRECTIONS, Direction

LSE_SIZE = GRADIENT_SIZE = 4  # the LSE, and dK and dV on their way around the ring, are float32


@dataclass(frozen=True)
class Shape:
    """One attention call. Causal sequences lie zigzag on the ranks, so that all have the same work."""

    length: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    batch: int = 1
    causal: bool = True
    element_size: int = 2  # bytes: bfloat16

    def flops(self, direction: Direction) -> float:
        """4 B H S S D, half of that if causal, 2.5 times as much backward (FlashAttention-2, section 4.1)."""
        forward = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim / (1 + self.causal)
        return forward * (2.5 if direction == "backward" else 1.0)


@dataclass(frozen=True)
class Split:
    """``ring`` ranks pass keys around, and each is ``heads`` ranks that share the heads; either may be 1.

    ``gathering``: keys are gathered instead of passed around.
    """

    ring: int = 1
    heads: int = 1
    gathering: bool = False

    @property
    def ranks(self) -> int:
        return self.ring * self.heads


@dataclass(frozen=True)
class Sent:
    """Bytes that each rank sends: around the ring (or to all that gather), and in all-to-alls."""

    ring: int
    heads: int

    @property
    def bytes(self) -> int:
        return self.ring + self.heads


def refusal(shape: Shape, split: Split) -> str | None:
    """Why there is no closed form, or no way to split so; None if there is."""
    pieces = split.ranks * (2 if shape.causal and split.ring > 1 else 1)
    if shape.length % pieces:
        return f"{shape.length} tokens do not lie evenly on {split.ranks} ranks"
    if split.heads > shape.heads:
        return f"{split.heads} ranks cannot share {shape.heads} heads"
    if shape.heads % split.heads or (shape.kv_heads % split.heads and split.heads % shape.kv_heads):
        return f"{split.heads} ranks cannot share {shape.heads} heads on {shape.kv_heads} evenly"
    return None


def sent(shape: Shape, split: Split, direction: Direction) -> Sent:
    """What each rank sends in one pass.

    Raises:
        ValueError: sizes that the ranks cannot share evenly.
    """
    if (reason := refusal(shape, split)) is not None:
        raise ValueError(reason)
    keys, own = _keys_around(shape, split), shape.length // split.ranks
    size = shape.element_size
    if direction == "backward":  # K and V again, and dK and dV; or the gradients of what was gathered
        size = shape.element_size + (0 if split.gathering else GRADIENT_SIZE)
    # Q and O of as many heads as another rank has, K and V of the key heads that these read, the LSE;
    # backward dO, dQ, dK, dV and the gradient of the LSE.
    heads = shape.heads // split.heads
    to_each = 2 * (heads + _kv_heads(shape, split)) * shape.head_dim * shape.element_size + heads * LSE_SIZE
    return Sent((split.ring - 1) * keys * size, (split.heads - 1) * shape.batch * own * to_each)


def _kv_heads(shape: Shape, split: Split) -> int:
    return max(1, shape.kv_heads // split.heads)


def _keys_around(shape: Shape, split: Split) -> int:
    """Numbers of K and V that one rank of the ring has."""
    return 2 * shape.batch * _kv_heads(shape, split) * (shape.length // split.ring) * shape.head_dim


@dataclass(frozen=True)
class Link:
    """One GPU's way out: bytes/s in one direction, and the seconds of a message however short it is."""

    name: str
    bandwidth: float
    latency: float
    source: str


# NCCL's own model of its ring (src/graph/tuning.cc, protocol Simple): 8.4 us for a call, and for each step
# 3.4 us over NVLink or 9.6 us over a network.
NVLINK = Link("NVLink", 450e9, 11.8e-6, "NVIDIA's data sheet of the H100 SXM: 900 GB/s, both directions")
INFINIBAND = Link(
    "InfiniBand", 50e9, 18e-6, "NVIDIA's data sheet of the DGX H100: one 400 Gb/s port for each GPU"
)


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes: ``near`` inside a node, ``far`` between nodes, of which each GPU has one of its own.

    ``efficiency``: what a kernel reaches of the card's data sheet; an assumption.
    """

    card: Card = CARDS["h100"]
    node: int = 8
    near: Link = NVLINK
    far: Link = INFINIBAND
    efficiency: float = 0.6

    @property
    def flops(self) -> float:
        """FLOP/s of one GPU, bfloat16."""
        return self.card.matmul["bf16"] * self.efficiency


@dataclass(frozen=True)
class Time:
    """Seconds of one pass: products, and what of the messages they do not hide."""

    compute: float
    exposed: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def time(shape: Shape, split: Split, cluster: Cluster, direction: Direction) -> Time:
    """One pass on all ranks; those that share heads are neighbours in a node as far as it reaches.

    All-to-alls and gathering wait, messages of the ring travel while a rank computes. All of a rank's
    messages of one step take the way out together, one behind the other.
    """
    moved = sent(shape, split, direction)
    compute = shape.flops(direction) / split.ranks / cluster.flops
    exposed = _all_to_alls(moved.heads, split.heads, cluster)
    link = cluster.near if split.ranks <= cluster.node else cluster.far
    if split.gathering:
        return Time(compute, exposed + (split.ring - 1) * link.latency + moved.ring / link.bandwidth)
    keys = _keys_around(shape, split)
    out = link.latency + keys * shape.element_size / link.bandwidth
    home = link.latency + keys * GRADIENT_SIZE / link.bandwidth if direction == "backward" else 0.0
    return Time(compute, exposed + _around(split.ring, compute / split.ring, out, home))


def _all_to_alls(size: int, ranks: int, cluster: Cluster) -> float:
    """Five of them (Q, K, V, O, LSE): to each rank the same size, inside the node and beyond at once."""
    if ranks == 1:
        return 0.0
    to_each = size / (ranks - 1)
    inside = min(ranks, cluster.node) - 1
    near, far = (
        inside * to_each / cluster.near.bandwidth,
        (ranks - 1 - inside) * to_each / cluster.far.bandwidth,
    )
    return max(near, far) + 5 * (cluster.far.latency if far else cluster.near.latency)


def _around(ring: int, step: float, out: float, home: float) -> float:
    """What the ring waits for: K and V (``out``) of the next step, dK and dV (``home``) of the one before."""
    if ring == 1:
        return 0.0
    both = (ring - 2) * max(0.0, out + home - step)
    return max(0.0, out - step) + both + max(0.0, home - step) + home


def speedup_share(shape: Shape, split: Split, cluster: Cluster) -> float:
    """Forward and backward: the speed of one GPU with the whole sequence over that of each of the ranks."""
    whole = sum(shape.flops(direction) for direction in DIRECTIONS) / cluster.flops
    taken = sum(time(shape, split, cluster, direction).seconds for direction in DIRECTIONS)
    return whole / split.ranks / taken


def hiding_tokens(shape: Shape, link: Link, cluster: Cluster, heads: int = 1) -> float:
    """From how many tokens on each rank of a ring the forward pass hides its messages, latency apart.

    The products of a step take 4 H n n D / F seconds (half of that if causal), K and V have 2 Hkv n D
    numbers. ``heads``: ranks that share the heads of each rank of the ring; n counts for all of them.
    """
    split = Split(heads=heads)
    each = 2 * _kv_heads(shape, split) * shape.element_size / link.bandwidth
    return each * cluster.flops * (1 + shape.causal) / (4 * shape.heads / heads)


def break_even_tokens(shape: Shape, ranks: int, link: Link, cluster: Cluster) -> float:
    """From how many tokens on each rank a ring's forward pass waits less than Ulysses', latency apart.

    Both over the same link; 0 where the ring sends less anyway.

    Raises:
        ValueError: more ranks than heads, which Ulysses cannot share.
    """
    if ranks > shape.heads:
        raise ValueError(f"{ranks} ranks cannot share {shape.heads} heads")
    volume = (shape.heads + max(shape.kv_heads, ranks)) / (ranks * shape.kv_heads)
    return hiding_tokens(shape, link, cluster) * max(0.0, 1.0 - volume)
