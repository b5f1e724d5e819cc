"""One library in a process of its own, so that no thread pool meets another.

`python -m benchmarks.worker PEER THREADS` answers JSON lines: `{"prepare": case}` builds the call, checks it
against float64 and warms it up; `{"measure": calls}` times that many calls.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import PEERS, LeftOutError, Run
from flashtile.bench.cases import Case
from flashtile.bench.timing import calls_for, seconds_per_call

ROWS = 32  # of the queries, at the end: they see the most


def error_of(result: Any, case: Case, peer: Any) -> float:
    """Largest error of the last queries' outputs (backward: of their gradients) against float64."""
    if case.direction == "backward":
        result = result[0]
    elif hasattr(peer, "output"):
        result = peer.output(result, case)
    found: Tensor = result[:, :, -ROWS:].double()
    return (found - exact_rows(case)).abs().max().item()


def exact_rows(case: Case) -> Tensor:
    """What `error_of` compares with, from standard attention on those queries alone."""
    query, key, value, grad = (tensor.double() for tensor in case.inputs())
    query, grad = query[:, :, -ROWS:].requires_grad_(), grad[:, :, -ROWS:]
    key, value = (tensor.repeat_interleave(case.groups, 1) for tensor in (key, value))
    scores = query @ key.mT * case.head_dim**-0.5
    if case.causal:
        hidden = torch.ones(case.query_length, case.keys, dtype=torch.bool).triu(1)[-ROWS:]
        scores = scores.masked_fill(hidden, float("-inf"))
    out = scores.softmax(-1) @ value
    return out.detach() if case.direction == "forward" else torch.autograd.grad(out, query, grad)[0]


def prepare(peer: Any, case: Case) -> tuple[Run | None, dict[str, Any]]:
    """The call, and what to answer: its error and how many calls make a measurement."""
    try:
        run = peer.prepare(case)
        error = error_of(run(), case, peer)
        return run, {"error": error, "calls": calls_for(run, at_least=0.02)}
    except LeftOutError as reason:
        return None, {"left_out": str(reason)}
    except Exception as failure:  # a library that fails on a case must not end the others' benchmark
        return None, {"left_out": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"}


def main(name: str, threads: int) -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints must not mix with the answers
    peer, run = PEERS[name](threads), None
    for line in sys.stdin:
        command = json.loads(line)
        if "prepare" in command:
            run = None
            run, answer = prepare(peer, Case(**command["prepare"]))
        else:
            assert run is not None, "measure before prepare"
            answer = {"seconds": seconds_per_call(run, command["measure"])}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
