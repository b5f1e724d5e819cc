"""Concurrent callers, forked processes, Ctrl-C, tensors beyond 2**31 elements, and memory."""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flashtile import cpu
from flashtile.cpu import workers
from flashtile.problem import AttentionProblem, Gradients
from tests.cpu.processes import python
from tests.oracle import random_gradients, random_problem, results_of_backend

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")


def seeded_results(seed: int, **options: object) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    problem = random_problem(generator=generator, **options)
    return results_of_backend(cpu, problem, *random_gradients(problem, generator))


CALLS = [
    {"query_length": 300, "key_length": 700, "dtype": torch.float32, "upper": 400},
    {"query_length": 2, "key_length": 3000, "dtype": torch.bfloat16},
    {"query_length": 100, "key_length": 500, "head_dim": 80, "dtype": torch.bfloat16, "random_alibi": True},
    {"query_length": 257, "key_length": 257, "dtype": torch.float16, "dropout_p": 0.1},
    {"query_length": 5, "key_length": 5, "dtype": torch.float64},
    {"query_length": 200, "key_length": 600, "random_bias": (1, 1, 200, 600)},
    {"query_length": 1, "key_length": 2000, "dtype": torch.float16, "random_sinks": True},
    {"query_length": 400, "key_length": 100, "dtype": torch.float64, "softcap": 5.0},
]


@pytest.mark.parametrize("in_forked_child", [False, True], ids=["OpenMP", "Python threads"])
def test_eight_threads_call_at_once(monkeypatch, in_forked_child):
    monkeypatch.setattr(workers, "_in_forked_child", in_forked_child)
    monkeypatch.setattr(workers, "_INLINE_FLOPS", 0.0)
    torch.set_num_threads(3)
    expected = [seeded_results(seed, **options) for seed, options in enumerate(CALLS)]
    with ThreadPoolExecutor(8) as threads:
        rounds = [
            [threads.submit(seeded_results, seed, **options) for seed, options in enumerate(CALLS)]
            for _ in range(6)
        ]
        for calls in rounds:
            for call, right in zip(calls, expected, strict=True):
                found = call.result(timeout=120)
                for name, tensor in found.items():
                    assert torch.equal(tensor, right[name]), name


def test_first_calls_of_several_threads_at_once():
    """Nothing is loaded or compiled yet when eight threads begin."""
    assert "right" in python(
        """
import threading, torch
from flashtile import cpu
from tests.oracle import random_problem
problem = random_problem(query_length=100, key_length=300)
outs = [torch.full_like(problem.query, torch.nan) for _ in range(8)]
lse = torch.zeros(8, 2, 4, 100)
barrier = threading.Barrier(8)
def work(i):
    barrier.wait()
    cpu.forward(problem, outs[i], lse[i])
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
expected = torch.full_like(problem.query, torch.nan)
cpu.forward(problem, expected, lse[0])
assert not expected.isnan().any()
assert all(torch.equal(out, expected) for out in outs)
print("right")
"""
    )


SETUP = """
import os, signal, sys, threading, time
import torch
from flashtile import cpu
from flashtile.cpu import workers
from tests.oracle import random_gradients, random_problem, results_of_backend

torch.set_num_threads(3)
torch.manual_seed(0)
# Few enough elements (2**15) that PyTorch's own operators never use OpenMP, which hangs in a forked child.
problems = [random_problem(query_length=n, key_length=200, head_dim=32) for n in (100, 3)]
gradients = [random_gradients(problem) for problem in problems]

def results():
    return [results_of_backend(cpu, p, *g) for p, g in zip(problems, gradients)]

def same(found, expected):
    return all(torch.equal(f[name], e[name]) for f, e in zip(found, expected) for name in e)

"""


@needs_fork
@pytest.mark.parametrize("used_before", ["results()", "workers._in_forked_child = True; results()", ""])
def test_calls_after_fork(used_before):
    """In children, grandchildren and the parent, whether or not the parent's threads had begun."""
    code = f"""
torch.set_num_threads(3)
{used_before}
torch.set_num_threads(1)
expected = results()  # one thread: no team is started
torch.set_num_threads(3)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        good = same(results(), expected)
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(60)
            os._exit(0 if same(results(), expected) else 1)
        good = good and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if good else 1)
    children.append(child)
assert same(results(), expected)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
print("right")
"""
    assert "right" in python(SETUP + code)


@needs_fork
def test_calls_in_a_data_loader_worker():
    code = """
import warnings
from torch.utils.data import DataLoader, Dataset

class Attended(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        torch.set_num_threads(index % 3 + 1)
        return results()[index % 2]["out"]

expected = results()
loader = DataLoader(Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
for index, out in enumerate(loader):
    assert torch.equal(out, expected[index % 2]["out"])
assert same(results(), expected)
print("right")
"""
    assert "right" in python(SETUP + code)


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
workers._in_forked_child = {in_forked_child}
workers._VISIT_FLOPS = 1e8
expected = results()
long = random_problem(batch=1, heads=8, kv_heads=8, query_length=4096, key_length=4096, head_dim=32)
out, lse = torch.empty_like(long.query), torch.empty(1, 8, 4096)
grad_out, _ = random_gradients(long)
from flashtile.problem import Gradients
grads = Gradients(*(torch.empty_like(t) for t in (long.query, long.key, long.value)), None, None, None)
cpu.forward(long, out, lse)
complete = out.clone()
heard, cut = 0, 0
for attempt in range(30):
    backward = attempt % 3 == 2
    out.fill_(torch.nan)
    timer = threading.Timer(0.003 * (attempt % 10), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            if backward:
                cpu.backward(long, complete, lse, grad_out, None, grads)
            else:
                cpu.forward(long, out, lse)
                assert torch.equal(out, complete)
                out.fill_(torch.nan)
    except KeyboardInterrupt:
        heard += 1
    timer.join()
    cut += bool(out.isnan().any() and not out.isnan().all())
    before = out.clone()
    time.sleep(0.02)
    assert torch.equal(out.nan_to_num(7.0), before.nan_to_num(7.0)), "somebody still works on the call"
assert heard == 30, heard
assert cut > 0, "no call was cut short"
assert same(results(), expected)
print("right")
"""


@pytest.mark.parametrize("in_forked_child", [False, True], ids=["OpenMP", "Python threads"])
def test_interrupted_calls(in_forked_child):
    """Ctrl-C ends a long call early; nobody works on it any longer, and later calls are right."""
    code = SETUP + INTERRUPTED.format(in_forked_child=in_forked_child)
    # More threads than processors, which other tests need too: none may wait in a busy loop.
    assert "right" in python(code, OMP_WAIT_POLICY="passive")


# Beyond 2**31 elements. The memory below is reserved, never touched but for a few pages.

FAR = 2**32  # elements between the first and the last row (head, batch entry, number)


@pytest.fixture(scope="module")
def huge() -> Tensor:
    """9 GiB of address space as bfloat16."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reserves memory without using it as Linux does")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    try:
        return torch.frombuffer(mmap.mmap(-1, 9 * 2**30, flags=flags), dtype=torch.bfloat16)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"cannot reserve 9 GiB of address space: {error}")


def spread(tensor: Tensor, far: int, huge: Tensor, place: int) -> Tensor:
    """`tensor` in the huge memory, with dimension `far` so spread that its offsets pass 2**31 elements."""
    strides, step = [0] * 4, 1
    for dim in (3, 2, 1, 0):
        strides[dim] = FAR // (tensor.shape[dim] - 1) + 64 if dim == far else step
        step *= 1 if dim == far else tensor.shape[dim]
    return huge.as_strided(tensor.shape, strides, 4096 * place).copy_(tensor)


@pytest.mark.parametrize("far", [0, 1, 2, 3], ids=["batch", "heads", "rows", "head_dim"])
@pytest.mark.parametrize("query_length", [4, 40], ids=["decode", "tiles"])
def test_strides_beyond_int32(huge, far, query_length):
    problem = random_problem(
        batch=3, heads=4, kv_heads=2, query_length=query_length, key_length=5, head_dim=4,
        dtype=torch.bfloat16, random_bias=(3, 4, query_length, 5),
    )  # fmt: skip
    grad_out, grad_lse = random_gradients(problem)
    near = results_of_backend(cpu, problem, grad_out, grad_lse)
    names = ("query", "key", "value", "bias")
    given = {name: spread(getattr(problem, name), far, huge, i) for i, name in enumerate(names)}
    wide = AttentionProblem(**given | {"scale": problem.scale})
    rows = spread(torch.full_like(grad_out, torch.nan), far, huge, 5)
    lse = torch.full_like(grad_lse, torch.nan)
    gradients = Gradients(
        *(spread(torch.full_like(given[n], torch.nan), far, huge, 6 + i) for i, n in enumerate(names[:3])),
        bias=torch.full(problem.bias.shape, torch.nan),
        alibi_slopes=None,
        sinks=None,
    )
    cpu.forward(wide, rows, lse)
    cpu.backward(wide, rows, lse, spread(grad_out, far, huge, 10), grad_lse, gradients)
    found = {"out": rows, "lse": lse, **{f"grad_{n}": getattr(gradients, n) for n in names}}
    for name, tensor in found.items():
        assert torch.equal(tensor, near[name]), name


def test_expanded_beyond_int32_elements():
    """A mask and a bias of 2**32 elements each, all the same one; a window keeps the work small."""
    length = 2**16
    problem = random_problem(batch=1, heads=1, kv_heads=1, query_length=length, key_length=length, head_dim=2)
    problem.lower, problem.upper = -1, 1
    row = torch.randn(length)
    plain = results_by_window(problem, row)
    problem.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, length, length)
    problem.bias = row.expand(1, 1, length, length)
    out, lse = torch.full_like(problem.query, torch.nan), torch.full((1, 1, length), torch.nan)
    cpu.forward(problem, out, lse)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)


def results_by_window(problem: AttentionProblem, bias: Tensor) -> Tensor:
    """Attention to the key before, at and after each query."""
    length = problem.query.shape[2]
    index = (torch.arange(length)[:, None] + torch.arange(-1, 2)).clamp(0, length - 1)
    inside = index == torch.arange(length)[:, None] + torch.arange(-1, 2)
    scores = (problem.query[0, 0, :, None] * problem.key[0, 0, index]).sum(-1) * problem.scale + bias[index]
    weights = scores.masked_fill(~inside, -torch.inf).softmax(-1)
    return (weights[..., None] * problem.value[0, 0, index]).sum(1)[None, None]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's peak memory of a process")
def test_extra_memory_is_small():
    """At 32768 keys, beyond inputs and outputs: megabytes forward, a few copies of the inputs backward."""
    code = """
from pathlib import Path
from flashtile.problem import Gradients

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

def extra(call):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

def made(queries, keys):
    return random_problem(batch=1, heads=1, kv_heads=1, query_length=queries, key_length=keys, head_dim=64)

for queries, upper in ((32768, 200), (1024, None), (4, None)):
    for warm in (True, False):
        p = made(64 if warm and queries > 64 else queries, 128 if warm else 32768)
        if upper is not None:
            p.lower, p.upper = -upper, upper
        out, lse = torch.zeros_like(p.query), torch.zeros(p.query.shape[:3])
        forward = extra(lambda: cpu.forward(p, out, lse))
        grads = Gradients(*(torch.zeros_like(t) for t in (p.query, p.key, p.value)), None, None, None)
        backward = extra(lambda: cpu.backward(p, out, lse, out, None, grads))
    print(queries, forward, backward)
"""
    for line in python(SETUP + code).splitlines():
        queries, forward, backward = (float(word) for word in line.split())
        assert forward < 16, f"forward, {queries:.0f} queries: {forward:.1f} MiB"
        assert backward < 48, f"backward, {queries:.0f} queries: {backward:.1f} MiB"
