"""Whole training steps with each attention: their time, what they compute, and their memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashtile.bench import machine
from flashtile.bench.memory import peak_bytes, reset_peak
from flashtile.bench.timing import Run, interleave
from flashtile.train import ATTENTIONS, GPT, PRESETS, Settings, Shape, Visible
from flashtile.train.loop import make_optimizer

VOCABULARY = 50304  # GPT-2's 50257 tokens, rounded up to a multiple of 64
SMALL = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 257}


@dataclass(frozen=True)
class Case:
    """One shape of model and rows, in one dtype, on one device."""

    preset: str
    dtype: str
    context: int
    batch: int
    device: str = "cpu"
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.preset} {self.dtype} {self.batch}x{self.context}"

    @property
    def shape(self) -> Shape:
        if self.preset == "small":
            return Shape(context=self.context, **SMALL)
        sizes = {name: PRESETS[self.preset][name] for name in ("layers", "width", "heads")}
        return Shape(vocabulary=VOCABULARY, context=self.context, **sizes)

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class Steps:
    """A model, its optimizer and rows of random tokens; all attentions share them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(case.device)
        with self.device:
            self.model = GPT(case.shape)
            self.tokens = torch.randint(case.shape.vocabulary, (case.batch, case.context + 1))
        self.optimizer = make_optimizer(self.model, Settings())
        self._loss = torch.compile(self.model.loss) if case.compiled else self.model.loss

    def loss(self, attention: str) -> torch.Tensor:
        """Rows are one document each, so that SDPA is told `is_causal` and needs no matrix."""
        self.model.use(attention)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.dtype == "bf16"):
            return self._loss(self.tokens)

    def run(self, attention: str) -> Run:
        def step() -> None:
            self.loss(attention).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return step

    @torch.no_grad()
    def first_loss(self, attention: str) -> dict[str, float]:
        return {"loss": self.loss(attention).item()}

    def allocated(self, attention: str) -> dict[str, float]:
        """The most MiB that a step holds beyond parameters, optimizer and tokens, on a GPU."""
        run = self.run(attention)
        run()  # which makes the optimizer's state and compiles
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return {"mib": (torch.cuda.max_memory_allocated(self.device) - before) / 2**20}


def needed_bytes(case: Case) -> int:
    """What standard attention keeps for the backward pass, at least: a softmax for each layer.

    In float32; under autocast with its copy in bfloat16 beside it.
    """
    scores = case.batch * case.shape.heads * case.context**2
    return case.shape.layers * scores * (6 if case.dtype == "bf16" else 4)


def memory_limit(device: str) -> int:
    """Bytes that a step may need: what the device has, less an eighth."""
    if device == "cpu":
        return machine.memory_bytes() * 7 // 8
    return torch.cuda.get_device_properties(device).total_memory * 7 // 8


def left_out(attention: str, case: Case, limit: int) -> str | None:
    """Why an attention is not tried, or None."""
    if attention == "standard" and needed_bytes(case) > limit:
        return f"needs at least {needed_bytes(case) / 2**30:.1f} GiB for its probabilities"
    return None


def disagreement(losses: Mapping[str, float], case: Case) -> str | None:
    """Of the losses of one model, or None: means over tokens, each of which has roundings of its own."""
    allowed = 16 * torch.finfo(torch.float32).eps
    if case.dtype == "bf16":
        allowed = torch.finfo(torch.bfloat16).eps / case.tokens**0.5
    found = list(losses.values())
    if all(abs(loss - found[0]) <= allowed * found[0] for loss in found):
        return None
    return "losses disagree: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())


def measure_case(
    case: Case, attentions: list[str], rounds: int, seconds: float, limit: int
) -> dict[str, Any]:
    """Losses first: only attentions that agree are timed, step by step in turn."""
    answers: dict[str, Any] = {}
    steps = Steps(case)

    def fits(attention: str, call: Callable[[str], dict[str, float]]) -> bool:
        try:
            answers[attention] |= call(attention)
        except torch.OutOfMemoryError:
            steps.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            answers[attention] = {"left_out": "out of memory"}
        return "left_out" not in answers[attention]

    for attention in attentions:
        reason = left_out(attention, case, limit)
        answers[attention] = {"left_out": reason} if reason else {}
    tried = [name for name in attentions if not answers[name] and fits(name, steps.first_loss)]
    wrong = disagreement({name: answers[name]["loss"] for name in tried}, case)
    if not wrong:
        fitting = [name for name in tried if case.device == "cpu" or fits(name, steps.allocated)]
        runs = {name: steps.run(name) for name in fitting}
        for attention, timing in interleave(runs, rounds, seconds).items():
            speed = case.tokens / timing.median
            answers[attention] |= {"seconds": asdict(timing), "tokens_per_s": speed}
    return {"case": asdict(case), "attentions": answers, "disagreement": wrong}


def attention_speedup(case: Case, rounds: int) -> float:
    """How many times as fast as SDPA's flashtile's attention is alone, forward and backward, causal."""
    shape, device = case.shape, torch.device(case.device)
    size = (case.batch, shape.heads, case.context, shape.head_dim)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    inputs = [torch.randn(size, device=device).to(dtype).requires_grad_() for _ in range(3)]
    visible = Visible(case.batch, case.context, device)

    def run_of(attention: str) -> Run:
        def run() -> None:
            out = ATTENTIONS[attention](*inputs, visible, None)
            torch.autograd.grad(out, inputs, inputs[0])
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    timings = interleave({name: run_of(name) for name in ("flashtile", "sdpa")}, rounds, seconds=5)
    return timings["sdpa"].median / timings["flashtile"].median


def growth(cases: list[Case], attention: str, threads: int) -> list[float]:
    """MiB by which a process grows at most in a step of each case, beyond parameters, optimizer and tokens.

    Kernels are compiled and the optimizer's state is made by a short step before.
    """
    torch.set_num_threads(threads)
    grown = []
    for case in cases:
        steps = Steps(case)
        whole = steps.tokens
        steps.tokens = whole[:, :129]
        run = steps.run(attention)
        run()
        steps.tokens = whole
        reset_peak()
        before = peak_bytes()
        run()
        grown.append((peak_bytes() - before) / 2**20)
    return grown


def measure_growth(cases: list[Case], attention: str) -> list[float]:
    """`growth` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(growth, cases, attention, torch.get_num_threads()).result()
