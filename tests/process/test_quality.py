"""bench/quality/quality.py: its statistics, its settings, and one small run."""

import json
import math
import pathlib
import random
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from kvasir_process import BINARY, TINY

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/quality"))

import quality_chart  # noqa: E402
import quality_engine as engine  # noqa: E402
import quality_page  # noqa: E402
import quality_settings as settings  # noqa: E402
import quality_stats as stats  # noqa: E402


@pytest.mark.parametrize("degrees, quantile", [(9, 2.2622), (29, 2.0452), (99, 1.9842)])
def test_quantiles_of_students_t_equal_published_tables(degrees, quantile):
    assert stats.t_quantile(degrees) == pytest.approx(quantile, abs=2e-4)


def test_a_95_percent_interval_contains_the_mean_in_95_percent_of_cases():
    source = random.Random(5)
    held = 0
    for _ in range(2000):
        found = stats.interval([source.gauss(3.0, 2.0) for _ in range(12)])
        held += found.low <= 3.0 <= found.high
    assert 0.935 < held / 2000 < 0.965


def test_differences_of_losses_are_paired_by_window():
    easy, hard = [1.0, 5.0, 2.0], [1.1, 5.1, 2.1]
    difference = stats.combine([(1, easy), (-1, hard)])
    assert difference.mean == pytest.approx(-0.1)
    assert difference.half == pytest.approx(0.0, abs=1e-12)
    assert stats.combine([(2, easy)], constant=-1).mean == pytest.approx(13 / 3)
    with pytest.raises(ValueError):
        stats.combine([(1, easy), (-1, hard[:2])])


@pytest.mark.parametrize("mean, half, said", [
    (-1.0, 0.5, "confirmed"), (-0.1, 0.5, "undecided"), (0.1, 0.5, "undecided"),
    (1.0, 0.5, "contradicted"), (1.0, math.inf, "undecided")])
def test_a_claim_is_contradicted_only_if_the_whole_interval_contradicts_it(mean, half, said):
    assert stats.verdict(stats.Interval(mean, half), []) == said


@pytest.mark.parametrize("mean, seeds, said", [
    (-1.0, (-1.5, -0.6), "confirmed"), (-1.0, (-2.1, 0.1), "confirmed"),
    (-1.0, (-2.6, 0.6), "seeds disagree"), (1.0, (2.6, -0.6), "seeds disagree"),
    (1.0, (2.1, -0.1), "contradicted"), (0.1, (0.8, -0.6), "undecided")])
def test_a_claim_is_undecided_if_one_seed_contradicts_the_others(mean, seeds, said):
    by_seed = [stats.Interval(seed, 0.5) for seed in seeds]
    assert stats.verdict(stats.Interval(mean, 0.5), by_seed) == said


def test_every_row_of_a_claim_is_measured_and_no_two_settings_share_a_name():
    by_name = {}
    for table in settings.TABLES:
        for config in table.configs:
            assert by_name.setdefault(config.name, config.identity()) == config.identity()
        measured = {config.name for config in table.configs}
        for claim in table.claims:
            assert {config.name for _, config in claim.terms} <= measured, claim.name
        for group in table.equal_bytes:
            assert {config.name for config in group} <= measured
    for configs in settings.CURVES.values():
        assert {config.name for config in configs} <= set(by_name)
    names = [claim.name for table in settings.TABLES for claim in table.claims]
    assert len(names) == len(set(names))


def compared(kind, nats, kv_bytes=864.0, decoded=3.5):
    oracle = {"nats_per_token": 4.0, "kv_bytes_per_token": 864.0,
              "window_nats": [3.0, 4.0, 5.0]}
    return engine.compare("row", {"kind": kind, "nats_per_token": nats,
                                  "decoded_windows": 2, "decoded_nats_per_token": decoded,
                                  "kv_bytes_per_token": kv_bytes}, oracle)


@pytest.mark.parametrize("row, sound", [
    (compared("numbers", 4.0019), True), (compared("numbers", 4.0021), False),
    (compared("numbers", 3.9979), False), (compared("codes", 4.019), True),
    (compared("codes", 3.979), False), (compared("codes", 4.0, 865.0), False),
    (compared("numbers", 4.0, decoded=3.5014), True),
    (compared("numbers", 4.0, decoded=3.5019), False)])
def test_an_engine_row_holds_only_if_it_has_the_loss_and_bytes_of_the_reference(row, sound):
    assert row.sound == sound


def engine_lines(rows):
    return engine.lines({"a table": rows}, seed=3, windows=2, window_tokens=32, version="1.0",
                        date="2026-01-01")


def test_the_summary_of_a_table_shows_its_worst_row():
    rows = [compared("codes", 4.001), compared("codes", 4.01)]
    text = "\n".join(engine_lines(rows))
    assert text.endswith("| a table | codes | 2 | 0.2500 % | row | holds |")
    assert "In every row the arenas took exactly the plan's bytes per token." in text
    # A row with a loss over the limit is named first, then one with other bytes.
    rows.append(compared("codes", 4.0, 865.0))
    text = "\n".join(engine_lines(rows))
    assert text.endswith("| a table | codes | 3 | 0.0000 % | row | **other bytes** |")
    assert "In 1 rows the arenas took other bytes per token than the plan's:** row." in text
    assert "exactly" not in text
    rows.append(compared("codes", 4.1))
    assert engine_lines(rows)[-1].endswith("| 2.5000 % | row | **over the limit** |")


def test_the_plan_determines_whether_a_cache_counts_as_quantized():
    assert engine.kind_of('{"layers":[{"key":{"parts":[{"codec":{"bits":[4]}}]}}]}') == "codes"
    assert engine.kind_of('{"layers":[{"key":{"parts":[{"codec":{"dtype":"BF16"}}]}}]}') == "numbers"


@pytest.mark.parametrize("low, high, ticks", [
    (1e-3, 0.012, [0.001, 0.002, 0.005, 0.01]), (1e-4, 2e-4, [1e-4, 2e-4]),
    (1900, 5200, [2000, 5000]), (9.9, 10.1, [10])])
def test_axis_ticks_are_round_numbers_within_the_scale(low, high, ticks):
    assert quality_chart.decades(low, high) == ticks


def test_charts_escape_names_and_draw_every_point_inside_the_chart():
    svg = quality_chart.curves({"a<b & c": [(100.0, 0.01, 0.002), (200.0, 0.0, 0.001)]},
                               'A "title" & more', "bytes", "nats", ("whole <b>", 300.0))
    # A point below the scale is drawn hollow at its lower end.
    assert svg.count('class="bg"><title>') == 1
    assert "a&lt;b &amp; c" in svg and "a<b" not in svg
    assert svg.count("<circle") == 2 and "nan" not in svg
    # The chart has the label, the value to compare with, and the better direction.
    xml.etree.ElementTree.fromstring(svg)
    assert 'aria-label="A &quot;title&quot; &amp; more"' in svg
    assert "whole &lt;b&gt;: 300, 0" in svg and "better" in svg


def test_a_table_is_printed_and_a_second_run_reads_it_from_the_work_folder(tmp_path):
    command = [sys.executable, ROOT / "bench/quality/quality.py", "--tool",
               BINARY.with_name("kvasir-compress"), "--engine", BINARY, "--model", TINY,
               "--work", tmp_path, "--windows", "6", "--window-tokens", "32", "--only", "lorc"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    assert "| LoRC 60 %, progressive |" in first.stdout
    assert "progressive ≤ uniform" in first.stdout
    assert "| LoRC: progressive ranks | numbers | 2 |" in first.stdout
    assert first.stdout.rstrip().endswith("| holds |")
    kept = sorted(path for path in (tmp_path / "results").iterdir()
                  if not path.name.startswith("engine-"))
    assert len(kept) == 2
    found = json.loads(kept[0].read_text())
    row = found["row"]
    assert row["method"] == "lorc" and len(row["window_nats"]) == 6
    # The page and `evaluate` compute statistics with separate code, so each checks the other.
    added = stats.combine([(1, row["window_nats"]), (-1, found["teacher"]["window_nats"])])
    assert row["added_ci95"] == pytest.approx([added.low, added.high], rel=1e-3)
    assert not list(tmp_path.glob("artifact-*"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert again.stdout == first.stdout


def test_a_run_with_only_the_engine_writes_only_its_section_of_the_page(tmp_path):
    page = tmp_path / "quality.md"
    begin, end = quality_page.BEGIN.format("tiny"), quality_page.END
    head = f"# Quality\n\nother\n\n{begin}\n"
    page.write_text(f"{head}rows\n\n### The engine\n\nold\n{end}\nmore\n")
    written = f"{head}\nrows\n\n### The engine\n\nnew\n\n{end}\nmore\n"
    engine.replace(page, "### The engine\n\nnew\n")
    assert page.read_text() == written
    # A page without this section gets it as well.
    page.write_text(f"{head}rows\n{end}\nmore\n")
    engine.replace(page, "### The engine\n\nnew\n")
    assert page.read_text() == written
    done = subprocess.run([sys.executable, ROOT / "bench/quality/quality.py", "--tool",
                           BINARY.with_name("kvasir-compress"), "--engine", BINARY, "--model",
                           TINY, "--work", tmp_path / "work", "--windows", "2",
                           "--window-tokens", "32", "--engine-only", "--only", "lorc",
                           "baselines"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "made with calibration seed 3" in done.stdout
    assert "same 2 windows of 32 tokens" in done.stdout
    assert done.stdout.rstrip().endswith("| holds |")
    assert "+0." not in done.stdout  # no rows that only the oracle measured
    # The artifacts are kept, so that another build of the engine can be measured with them.
    assert len(list((tmp_path / "work" / "artifacts").iterdir())) == 2


def test_the_error_for_an_unknown_table_names_it(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "bench/quality/quality.py", "--tool",
                           BINARY.with_name("kvasir-compress"), "--engine", BINARY, "--work",
                           tmp_path, "--only", "palu_group"],
                          capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "palu_groups" in done.stderr
