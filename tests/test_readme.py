"""The README: its code runs, its links lead somewhere, and measured numbers get into it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import readme
from flashtile.bench.cases import Case
from tests.documents import ROOT, blocks, broken, links

README = ROOT / "README.md"


@pytest.mark.usefixtures("inactive_after", "launched_alone")
@pytest.mark.parametrize("block", blocks(README), ids=lambda block: f"line{block.line}")
def test_every_code_block_runs_alone(block):
    names: dict[str, Any] = {}
    printed = block.run(names)
    if "out" in names:
        assert names["out"].isfinite().all()
    if "bias" in names:
        assert names["bias"].grad.count_nonzero()
    assert ("██" in printed) == (".draw(" in block.source)


def test_there_are_code_blocks():
    assert len(blocks(README)) >= 10


def test_links_lead_to_files():
    assert links(README)
    assert not broken(README)


def timed(seconds: float) -> dict[str, Any]:
    return {"seconds": {"median": seconds, "p20": seconds, "p80": seconds, "rounds": 1}, "error": 0.0}


@pytest.fixture
def found() -> dict[str, Any]:
    """What `python -m benchmarks.cpu` writes, made up: three cases and memory at two lengths."""
    long = Case("long", 1, 8, 1000, 50)  # 1.6 GFLOP
    decode = Case("decode", 1, 32, 1, 128, "bf16", kv_heads=8, key_length=8192)
    backward = Case("long", 1, 8, 1000, 50, "fp16", direction="backward")
    peers = {
        "flashtile": timed(4e-3),
        "torch": timed(10e-3),
        "openvino": timed(5e-3),
        "ort-mha": timed(6e-3),
        "flex": {"left_out": "no compiler"},
    }
    alone = {"flashtile": timed(10e-3), "torch": {"left_out": "no"}, "openvino": {"left_out": "no"}}
    points = [{"length": 2048, "mib": 1.26}, {"length": 4096, "mib": 2.0}]
    return {
        "machine": {
            "cpu": "Some CPU",
            "threads": 2,
            "instruction_set": "AVX2",
            "system": "Linux x86_64",
            "versions": {"flashtile": "0.1.0", "torch": "2.13.0"},
            "commit": None,
        },
        "ceilings": {
            "fma_gflops": 500.0,
            "bf16_dot_gflops": None,
            "read_gb_per_s": 38.0,
            "read_gb_per_s_of_32_mib": 40.0,
        },
        "results": [
            {"case": long.as_dict(), "peers": peers},
            {"case": backward.as_dict(), "peers": alone},
            {"case": decode.as_dict(), "peers": {"flashtile": timed(1e-3), "torch": timed(0.5e-3)}},
        ],
        "memory": {"flashtile forward": points, "torch backward": points[1:]},
    }


def rows_of(text: str) -> dict[str, list[str]]:
    tables = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in tables}


def test_rows_compare_with_torch_and_the_fastest_other(found):
    rows = rows_of(readme.numbers(found))
    assert rows["forward fp32 1x8x1000x50"] == [
        "4.00 ms", "400", "80% FMA", "10.0 ms", "2.50x", "5.00 ms OpenVINO SDPA", "1.25x"
    ]  # fmt: skip
    nothing = readme.NOTHING
    assert rows["backward fp16 1x8x1000x50"] == [
        "10.0 ms", "400", "80% FMA", nothing, nothing, nothing, nothing
    ]  # fmt: skip
    decode = rows["forward bf16 1x32x1x128 kv 8x8192"]
    assert decode == ["1.00 ms", nothing, "84% reread", "500 us", "0.50x", nothing, nothing]


def test_machine_ceilings_and_memory_are_named(found):
    text = readme.numbers(found)
    assert text.startswith("Some CPU, 2 threads, AVX2, Linux x86_64; flashtile 0.1.0, torch 2.13.0.\n")
    assert "500 GFLOP/s of float32" in text
    assert "bfloat16 dot" not in text
    assert "38 GB/s read from memory (read), 40 GB/s reading 32 MiB again and again (reread)." in text
    rows = rows_of(text)
    assert rows["length"] == ["2048", "4096"]
    assert rows["flashtile, forward"] == ["1.3", "2.0"]
    assert rows["torch SDPA, backward"] == [readme.NOTHING, "2.0"]


@pytest.fixture
def found_doors(found):
    def calls(**medians):
        return {who.replace("_", " "): {"median": median} for who, median in medians.items()}

    cache = {"name": "cache fp32", "calls": calls(flashtile=1e-4, torch_SDPA=2e-4, reading=5e-5)}
    packed = {"name": "packed fp32", "calls": calls(flashtile=1e-3, padded=5e-4)}
    return {"machine": found["machine"], "results": [cache, packed]}


def test_doors_compare_with_reading_and_the_others(found_doors):
    other = found_doors | {"machine": found_doors["machine"] | {"cpu": "Another CPU"}}
    text = readme.fill_doors(readme.DOORS_BEGIN + readme.DOORS_END, found_doors, other)
    assert text.index("Some CPU, 2 threads") < text.index("Another CPU, 2 threads")
    assert text.count("| cache fp32 |") == 2
    rows = rows_of(text)
    assert rows["cache fp32"] == ["100 us", "50.0 us (50%)", "torch SDPA 200 us (2.00x)"]
    assert rows["packed fp32"] == ["1.00 ms", "-", "padded 500 us (0.50x)"]


@pytest.fixture
def found_parallel(found):
    def results(name, seconds, ranks, threads=1):
        way = {"method": name.split(",")[0], "ranks": ranks, "threads": threads}
        pair = (("forward", seconds), ("backward", 2 * seconds))
        return [
            {"name": name, "direction": d, "way": way, "seconds": {"median": median}} for d, median in pair
        ]

    alone = results("one process, 1 thread", 1.0, 1)
    threads = results("one process, 2 threads", 0.625, 1, threads=2)
    rings = results("ring, zigzag", 0.5, 2) + results("ring, zigzag", 0.4, 4)
    work = {"length": 8192, "heads": 8, "head_dim": 64, "dtype": "fp32"}
    return {
        "machine": found["machine"] | {"cores": 2, "threads": 1},
        "work": work,
        "results": alone + threads + rings,
    }


def test_processes_are_compared_where_each_has_a_core(found_parallel):
    text = readme.fill_parallel(readme.PARALLEL_BEGIN + readme.PARALLEL_END, found_parallel)
    assert "Some CPU, 1 thread, AVX2" in text
    assert "2 cores; 8192 causal positions, 8 heads, head_dim 64, fp32. Percent of 2 times" in text
    rows = rows_of(text)
    assert set(rows) == {"way", "---", "one process, 2 threads", "ring, zigzag"}
    assert rows["one process, 2 threads"] == ["80%", "80%"]
    assert rows["ring, zigzag"] == ["100%", "100%"]


def test_only_the_places_between_the_marks_change(found, found_doors, found_parallel, tmp_path):
    text = (
        f"{readme.BEGIN}\nold\n{readme.END}\nbetween\n{readme.DOORS_BEGIN}\nold\n{readme.DOORS_END}\nafter\n"
    )
    paths = {name: tmp_path / f"{name}.json" for name in ("results", "doors", "parallel")}
    target = tmp_path / "performance.md"
    pages = {
        tmp_path / "README.md": (readme.SUMMARY_BEGIN, readme.SUMMARY_END),
        tmp_path / "devices.md": (readme.PARALLEL_BEGIN, readme.PARALLEL_END),
        tmp_path / "numerics.md": (readme.ERRORS_BEGIN, readme.ERRORS_END),
    }
    for page, marks in pages.items():
        page.write_text("\nold\n".join(marks))
    paths["results"].write_text(json.dumps(found))
    paths["doors"].write_text(json.dumps(found_doors))
    paths["parallel"].write_text(json.dumps(found_parallel))
    target.write_text(f"before\n{text}")
    for _ in range(2):
        options = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
        readme.main([*options, "--readme", str(tmp_path / "README.md"), "--docs", str(tmp_path)])
        written = target.read_text()
        assert written.startswith(f"before\n{readme.BEGIN}\nSome CPU")
        assert f"|\n{readme.END}\nbetween\n{readme.DOORS_BEGIN}\nReading alone" in written
        assert written.endswith(f"|\n{readme.DOORS_END}\nafter\n")
        assert written.count("Some CPU") == 2
        assert "old" not in written
    for page in pages:
        assert "| --- |" in page.read_text()
        assert "old" not in page.read_text()


def test_a_summary_has_the_range_of_each_kind(found):
    found["results"][1]["case"] |= {"direction": "forward", "dtype": "fp32"}
    found["results"][1]["peers"]["torch"] = timed(40e-3)
    rows = rows_of(readme.fill_summary(readme.SUMMARY_BEGIN + readme.SUMMARY_END, found))
    assert rows["long, forward fp32"] == ["2", "160 to 400", "32 to 80% FMA", "2.50 to 4.00x", "1.25x"]
    assert rows["decode, forward bf16"] == ["1", readme.NOTHING, "84% reread", "0.50x", readme.NOTHING]
    assert rows["flashtile, forward"] == ["1.3", "2.0"]


def test_errors_are_the_largest_of_the_long_cases(found):
    peers = found["results"][0]["peers"]
    peers["flashtile"]["error"], peers["torch"]["error"] = 2e-7, 3e-7
    found["results"][2]["peers"]["flashtile"]["error"] = 1.0
    rows = rows_of(readme.fill_errors(readme.ERRORS_BEGIN + readme.ERRORS_END, found))
    assert rows["forward fp32"] == ["2.0e-07", "3.0e-07", readme.NOTHING]
    assert set(rows) == {"work", "---", "forward fp32", "backward fp16"}


@pytest.mark.parametrize("text", ["", readme.BEGIN, f"{readme.END}{readme.BEGIN}"])
def test_a_text_without_the_marks_is_refused(text, found):
    with pytest.raises(ValueError, match="marks"):
        readme.fill(text, found)


@pytest.mark.parametrize(
    ("page", "results", "fill"),
    [
        ("README.md", ["cpu"], readme.fill_summary),
        ("docs/performance.md", ["cpu"], readme.fill),
        ("docs/performance.md", ["doors", "doors_avx2"], readme.fill_doors),
        ("docs/devices.md", ["parallel"], readme.fill_parallel),
        ("docs/numerics.md", ["cpu"], readme.fill_errors),
    ],
)
def test_pages_have_the_numbers_of_the_last_run(page, results, fill):
    """`python -m benchmarks.readme` puts them there."""
    text = (ROOT / page).read_text()
    found = [json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in results]
    assert fill(text, *found) == text
