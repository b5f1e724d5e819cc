"""The benchmark of several processes measures and draws; the paper model prints, draws and is in the docs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import parallel, parallel_plots, scaling
from benchmarks.parallel import Way, Work
from flashtile.lab.scaling import Cluster
from tests.parallel.jobs import benchmark

WORK = Work(length=96, heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def found(ranks):
    """What the first of eight processes writes; two of them attend, or four."""
    found, *others = ranks.run(benchmark, work=WORK, chosen=parallel.ways([2, 4], cores=1), rounds=2)
    assert others == [None] * 7
    return json.loads(json.dumps(found))


def test_every_way_is_measured(found):
    assert len(found["results"]) == 2 * len(parallel.ways([2, 4], cores=1)) == 2 * 12
    for result in found["results"]:
        count = result["way"]["ranks"]
        assert result["seconds"]["rounds"] == 2
        assert len(result["bytes"]) == len(result["kernel_seconds"]) == count
        assert count == 1 or min(result["kernel_seconds"]) > 0
        if result["formula_bytes"] is None:
            assert result["name"] in ("ring, contiguous", "one process, 1 thread")
        else:
            assert set(result["bytes"]) == {result["formula_bytes"]}


def test_work_is_balanced_by_zigzag(found):
    assert found["visible_pairs"] == {
        "contiguous": {"2": [1176, 3480], "4": [300, 876, 1452, 2028]},
        "zigzag": {"2": [2328, 2328], "4": [1164] * 4},
    }


def test_the_table_and_the_figure(found, tmp_path):
    rows = parallel.rows(found)
    assert all(len(row) == len(parallel.COLUMNS) for row in rows)
    assert rows[0][:3] == ["one process, 1 thread", "forward", "1"]
    assert rows[0][4:6] == ["100%", "100%"]
    parallel_plots.draw(found, tmp_path / "parallel.png")
    assert (tmp_path / "parallel.png").stat().st_size > 10_000


def test_efficiency_is_per_process():
    def result(seconds: float, **way: object) -> dict[str, object]:
        return {"seconds": {"median": seconds}, "direction": "forward", "way": way}

    alone = result(8.0, method="one process", threads=1, ranks=1)
    ring = result(2.5, method="ring", threads=1, ranks=4)
    assert parallel.efficiency({"results": [alone, ring]}, ring) == pytest.approx(0.8)


def test_a_result_that_differs_is_not_measured(ranks):
    told = ranks.outcomes(benchmark, work=WORK, chosen=[Way("ring", 8, "zigzag")], rounds=1, wrong=True)
    assert all("ring, zigzag: output differs by" in str(error) for error in told)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "at least 2"),
        (["--kv-heads", "3"], "divide --heads"),
        (["--dtype", "int"], "invalid"),
    ],
)
def test_unknown_options_of_the_benchmark(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parallel.parse(arguments)
    assert said in capsys.readouterr().err


def test_a_quick_run_does_not_replace_the_results():
    assert parallel.parse(["--quick"]).output.name == "quick"
    assert parallel.parse([]).output.name == "results"


def test_the_docs_show_what_the_model_gives():
    """If not: `python -m benchmarks.scaling --write`."""
    text = (scaling.DOCS / "scaling.md").read_text()
    assert scaling.report(scaling.SHAPES, Cluster()) in text


def test_the_paper_model_prints_and_draws(tmp_path, capsys):
    path = tmp_path / "scaling.png"
    scaling.main(["--length", "8192", "--kv-heads", "4", "--heads", "16", "--node", "4", "--plot", str(path)])
    printed = capsys.readouterr().out
    assert "8,192 tokens, 16 heads on 4" in printed
    assert "4 GPUs in a node" in printed
    assert path.stat().st_size > 10_000
    shape = replace(scaling.SHAPES[0], length=8192)
    split, cluster = scaling.ways(64, Cluster())["mesh"]
    assert (split.ring, split.heads) == (8, 8)
    assert scaling.share(shape, *scaling.ways(64, cluster)["Ulysses"]) is None


@pytest.mark.parametrize(
    "arguments", [["--length", "1000"], ["--kv-heads", "5"], ["--write", "--length", "2048"]]
)
def test_unknown_options_of_the_model(arguments, capsys):
    with pytest.raises(SystemExit):
        scaling.main(arguments)
    assert arguments[0] in capsys.readouterr().err
