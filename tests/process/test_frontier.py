"""bench/quality/frontier.py: settings, judging, resuming and charts, on a stand-in for
kvasir-compress that answers at once."""

import argparse
import dataclasses
import json
import math
import pathlib
import random
import re
import stat
import subprocess
import sys
import xml.etree.ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/quality"))

import frontier  # noqa: E402
import frontier_page as page  # noqa: E402
import frontier_settings as settings  # noqa: E402
import quality_chart as chart  # noqa: E402
import quality_engine as engine  # noqa: E402
import quality_page  # noqa: E402
import quality_stats as stats  # noqa: E402
from frontier_settings import LONG, SHORT  # noqa: E402

# ------------------------------------------------------------------ statistics


@pytest.mark.parametrize("t, degrees, p", [(2.2622, 9, 0.05), (3.2498, 9, 0.01),
                                           (3.1824, 3, 0.05), (0.0, 4, 1.0), (1.0, 1, 0.5)])
def test_tail_probabilities_of_students_t_equal_published_tables(t, degrees, p):
    assert stats.t_tails(t, degrees) == pytest.approx(p, abs=2e-5)


def test_an_interval_that_ends_at_0_has_a_p_value_of_5_percent():
    samples = [0.3, -0.1, 0.5, 0.2, 0.9, -0.2, 0.4, 0.1, 0.6, 0.7]
    centre = stats.interval(samples)
    # A mean whose interval just ends at 0 has a p-value of 0.05.
    moved = [one - centre.low for one in samples]
    assert stats.two_sided(moved) == pytest.approx(0.05, abs=1e-4)
    assert stats.two_sided([0.0, 0.0]) == 1.0 and stats.two_sided([1.0, 1.0]) == 0.0
    assert stats.two_sided([1.0]) == 1.0


def test_holms_procedure_gives_the_corrected_p_values_of_a_known_example():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_holms_procedure_keeps_the_error_rate_of_a_family_at_5_percent():
    source = random.Random(3)
    wrong = sum(min(stats.holm([source.random() for _ in range(16)])) <= 0.05
                for _ in range(2000))
    assert 0.03 < wrong / 2000 < 0.07


def test_spearmans_correlation_depends_only_on_ranks():
    assert stats.ranks_agree([1, 2, 3, 4], [10, 1000, 1001, 1e9]) == pytest.approx(1)
    assert stats.ranks_agree([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert stats.ranks_agree([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert math.isnan(stats.ranks_agree([1, 1, 1], [1, 2, 3]))


# -------------------------------------------------------------------- settings


def test_row_names_are_unique_and_claims_and_charts_use_only_measured_rows():
    for rows in (settings.ROWS, settings.LONG_ROWS):
        names = [row.name for row in rows]
        assert len(names) == len(set(names))
    at = {SHORT: settings.ROWS, LONG: settings.LONG_ROWS}
    for claim in settings.CLAIMS:
        assert claim.left in at[claim.tokens] and claim.right in at[claim.tokens], claim.name
        assert (claim.share is None) != (claim.bits is None)
    assert len({claim.name for claim in settings.CLAIMS}) == len(settings.CLAIMS)
    for groups, tokens in ((settings.CHART, SHORT), (settings.LONG_CHART, LONG)):
        for series in groups.values():
            assert all(row in at[tokens] for rows in series.values() for row in rows)
    assert len(settings.LONG_ROWS) <= 12 and set(settings.QUICK_LONG_ROWS) <= set(
        settings.LONG_ROWS)
    assert set(settings.QUICK.rows()) < set(settings.FULL.rows()) == set(settings.ROWS)


def test_a_quick_run_measures_the_rows_of_the_most_important_claims():
    quick = {SHORT: settings.QUICK.rows(), LONG: settings.QUICK.long_rows()}
    found = {claim.name for claim in settings.CLAIMS
             if claim.left in quick[claim.tokens] and claim.right in quick[claim.tokens]}
    assert {"storage_rotated_4", "cpu_rotated_4", "storage_rotated_3",
            "storage_kivi_4"} <= found


def test_a_row_with_other_exact_tokens_uses_the_same_artifact():
    row = settings.STORAGE[3]
    other = settings.PLANNED_RECENT[row]
    assert other.artifact == row.artifact
    assert other.candidate("/a/b") == "/a/b:sinks=4,window=128"
    assert row.candidate("/a/b") == "/a/b"
    assert settings.ROTATED_RECENT[3].candidate(None) == "rotated:k3,v3,sinks=4,window=128"


# --------------------------------------------------------------------- judging


def measured(size, kls, tokens=SHORT, fixed=0.0):
    return page.Measured(bytes_per_token=size, fixed_bytes=fixed, window_tokens=tokens,
                         window_kl=kls, window_nats=[3 + kl for kl in kls],
                         teacher_nats=[3.0] * len(kls), top1=0.9, repeat=1.0, clamp_rate=0.0,
                         kl_by_text={"books": kls[0], "code": kls[1]})


def judged(left, right, share=0.5, bits=None, p=0.01):
    claim = dataclasses.replace(settings.CLAIMS[0], share=share, bits=bits)
    ratios = page.log_ratios(left.window_kl, right.window_kl)
    return page.Judgement(claim, left, right, stats.interval(ratios), p)


HARD = [0.1, 0.4, 0.2, 0.05]


@pytest.mark.parametrize("factor, size, p, said", [
    (0.5, 50, 0.01, "holds"), (0.5, 50, 0.06, "undecided"),
    (2.0, 50, 0.01, "**does not hold**"), (2.0, 50, 0.06, "undecided"),
    (0.5, 51, 0.01, "**not at these bytes**: 0.510 of its bytes")])
def test_a_claim_holds_only_if_its_divergence_and_its_bytes_are_within_their_limits(factor, size, p, said):
    left = measured(size, [factor * kl for kl in HARD])
    assert judged(left, measured(100, HARD), p=p).verdict == said


def test_a_claim_compares_the_bytes_of_whole_sequences():
    # 8 bytes of codes and 2 of exact rows are 10 of 20.
    left = measured(8, HARD, fixed=2.0 * SHORT)
    assert judged(left, measured(20, HARD)).verdict == "holds"
    assert judged(left, measured(20, HARD), share=0.49).verdict.startswith("**not")
    bits = 8 * left.bytes / settings.NUMBERS_PER_TOKEN
    assert judged(left, measured(20, HARD), share=None, bits=bits).verdict == "holds"
    said = judged(left, measured(20, HARD), share=None, bits=0.9 * bits).verdict
    assert said.startswith("**not at these bytes**") and "bits a number" in said


def test_ratios_of_divergences_are_paired_by_window():
    left = measured(1, [0.5 * kl for kl in HARD])
    one = judged(left, measured(2, HARD))
    assert math.exp(one.log_ratio.mean) == pytest.approx(0.5)
    assert one.log_ratio.half == pytest.approx(0.0, abs=1e-9)
    # A plan without any loss also has a ratio.
    assert all(map(math.isfinite, page.log_ratios([0.0, 0.1], [0.1, 0.0])))
    with pytest.raises(ValueError):
        page.log_ratios([0.1], [0.1, 0.2])


def results(budget, source, tokens, windows, factor=lambda row: 1.0):
    rows = budget.rows() if tokens == SHORT else budget.long_rows()
    found = {}
    for index, row in enumerate(rows):
        kls = [factor(row) * (1 + index) * math.exp(source.gauss(-4, 0.2))
               for _ in range(windows)]
        found[row.name] = measured(2000.0 + 400 * index, kls, tokens, 4.0 * 23040)
    return found


def some_run(budget=settings.FULL, factor=lambda row: 1.0):
    source = random.Random(7)
    return page.Run(
        budget=budget, short=results(budget, source, SHORT, 10, factor),
        long=results(budget, source, LONG, budget.long_windows, factor),
        times={row.name: {"time": 0.5 + 0.1 * i, "spread": 0.2 * (i == 0), "attention_time": 0.4,
                          "cpu": "a CPU", "simd": "AVX3", "threads": 2}
               for i, row in enumerate(settings.TIMED)},
        compared=[engine.Comparison("an artifact", "codes", 0.0001, True)],
        predictions={row.name: {"kl": 0.01 * (1 + i), "kl_low": 0.005, "kl_high": 0.02}
                     for i, row in enumerate(settings.PLANNED)},
        version="0.1.0", date="2026-01-01")


def test_p_values_of_a_family_are_corrected_for_the_number_of_measured_claims():
    full, quick = page.judge(some_run()), page.judge(some_run(settings.QUICK))
    assert len(full) == len(settings.CLAIMS) > len(quick) > 0
    for found in (full, quick):
        family = [one for one in found if one.claim.family == "targets"]
        alone = [stats.two_sided(page.log_ratios(one.left.window_kl, one.right.window_kl))
                 for one in family]
        assert [one.adjusted for one in family] == pytest.approx(stats.holm(alone))


def test_the_page_shows_every_row_every_family_of_claims_and_claims_that_fail(capsys):
    # The first claim's left row diverges much more than it may.
    text = page.part(some_run(factor=lambda row: 1e4 if row is settings.STORAGE[2.25] else 1))
    for row in settings.ROWS + settings.LONG_ROWS:
        assert f"| {row.name} |" in text
    first, second, *_ = settings.TIMED
    assert f"| {first.name} | 0.50 (undecided) | 20 % | 0.40 |" in text
    assert f"| {second.name} | 0.60 | 0 % | 0.40 |" in text
    counts = [sum(claim.family == name for claim in settings.CLAIMS)
              for name in ("targets", "order")]
    assert f"{counts[0]} of targets, {counts[1]} of order" in text
    assert "**does not hold**" in text or "**not at these bytes**" in text
    assert "has no paragraph about storage_rotated_4," in capsys.readouterr().err
    assert "Spearman's correlation of the 4: " in text
    assert "| an artifact | codes | 0.0100 % | holds |" in text
    assert "nan" not in text


def test_a_row_over_several_texts_is_the_mean_over_all_their_windows():
    def one(kls, repeat):
        return {"teacher": {"window_nats": [1.0, 2.0]},
                "row": {"kv_bytes_per_token": 10.0, "fixed_bytes_per_sequence": SHORT,
                        "window_kl": kls, "window_nats": [1.5, 2.5], "top1_agreement": kls[0],
                        "repeat_nats_per_token": repeat, "clamp_rate": kls[0],
                        "kl_nats": sum(kls) / 2}}
    found = page.Measured.merge({"a": one([0.1, 0.3], 1.0), "b": one([0.5, 0.7], 2.0)}, SHORT)
    assert found.bytes == 11.0 and found.kl.mean == pytest.approx(0.4)
    assert found.added.mean == pytest.approx(0.5) and found.repeat == 1.5
    assert found.kl_by_text == {"a": pytest.approx(0.2), "b": pytest.approx(0.6)}
    assert found.top1 == pytest.approx(0.3) and found.clamp_rate == 0.5
    without = page.Measured.merge({"a": one([0.1, 0.3], None)}, SHORT)
    assert without.repeat is None


# ----------------------------------------------------------------------- parts


def test_writing_one_section_of_the_page_does_not_change_the_other(tmp_path):
    path = tmp_path / "quality.md"
    marks = [quality_page.BEGIN.format(name) for name in ("smollm2", "tiny")]
    path.write_text(f"# Quality\n\n{marks[0]}\nold\n{quality_page.END}\n\n"
                    f"{marks[1]}\nrows\n{quality_page.END}\n")
    quality_page.write_part(path, "smollm2", "new\n")
    quality_page.write_part(path, "smollm2", "new\n")
    assert path.read_text() == (f"# Quality\n\n{marks[0]}\n\nnew\n\n{quality_page.END}\n\n"
                                f"{marks[1]}\nrows\n{quality_page.END}\n")
    with pytest.raises(SystemExit, match="no part"):
        quality_page.write_part(path, "other", "new")


def test_the_quality_page_has_a_section_for_each_model():
    path = ROOT / "docs/quality.md"
    assert quality_page.read_part(path, "smollm2").startswith("## SmolLM2")
    assert quality_page.read_part(path, "tiny").startswith("## The built-in model")


# ---------------------------------------------------------------------- charts


def luminance(colour):
    def linear(value):
        value /= 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
    red, green, blue = (linear(int(colour[i:i + 2], 16)) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("ground", ["#ffffff", "#0f172a"])
def test_chart_colours_contrast_with_light_and_dark_backgrounds(ground):
    for colour in (one for group in chart.FRONTIER_COLOURS for one in group):
        high, low = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def words(svg):
    """Returns (text, left, right, y) of each text that is not rotated. Letters count as 0.62 em wide."""
    found = []
    for node in xml.etree.ElementTree.fromstring(svg).iter():
        if not node.tag.endswith("}text") or "transform" in node.attrib:
            continue
        width = 0.62 * float(node.get("font-size", 12)) * len(node.text)
        left = float(node.get("x")) - {"middle": width / 2, "end": width}.get(
            node.get("text-anchor"), 0)
        found.append((node.text, left, left + width, float(node.get("y"))))
    return found


@pytest.mark.parametrize("name, groups", [
    ("frontier.svg", settings.CHART), ("frontier-8k.svg", settings.LONG_CHART),
    ("frontier-time.svg", settings.TIME_CHART)])
def test_every_series_is_drawn_and_named_inside_the_chart(name, groups):
    svg = page.charts(some_run())[name]
    found = words(svg)
    for text, left, right, y in found:
        assert 0 <= left and right <= chart.WIDTH, text
        assert 10 <= y <= chart.FRONTIER_HEIGHT - 6, text
    # No two texts overlap.
    for i, (text, left, right, y) in enumerate(found):
        for other, other_left, other_right, other_y in found[i + 1:]:
            assert (abs(y - other_y) >= 12 or right <= other_left or other_right <= left), (
                text, other)
    series = [name for group in groups.values() for name in group]
    assert {text for text, *_ in found} >= {*groups, *series, "bf16", "↙ better"}
    assert svg.count("<polyline") == len(series) and "nan" not in svg
    colours = re.findall(r'<polyline[^>]*stroke="(#\w+)"', svg)
    assert len(set(colours)) == len(series)
    # All points lie inside the plot.
    for x, y in re.findall(r'translate\(([\d.]+) ([\d.]+)\)"[^>]*><title>', svg):
        assert chart.FRONTIER_LEFT <= float(x) <= chart.WIDTH - chart.FRONTIER_RIGHT
        assert chart.TOP <= float(y) <= chart.FRONTIER_HEIGHT - chart.BOTTOM


def test_a_point_below_the_scale_is_hollow_and_an_infinite_interval_has_no_line():
    point = chart.Point
    svg = chart.frontier({"a": {"b": [point(100, 0.0, 0.001, "x"),
                                      point(1000, 0.1, math.inf, "y <z>")]}},
                         "title", "bytes", "nats", ("bf16", 2000.0))
    assert len(re.findall(r'class="bg"><title>', svg)) == 1
    assert "y &lt;z&gt;: 1,000 bytes" in svg and "nan" not in svg and "inf" not in svg


# -------------------------------------------------------------------- resuming

STAND_IN = '''#!{python}
"""Plans, applies and evaluates at once; dies before the candidate named in fail.txt."""
import hashlib, json, pathlib, sys
here = pathlib.Path(__file__).parent
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
command = sys.argv[1]
if command == "--version":
    print("1.2.3")
    sys.exit()
with (here / "calls.txt").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if command == "plan":
    out = pathlib.Path(flag("--out"))
    layer = {{"exact_sinks": 4 if flag("--method") == "auto" else 0,
              "key": {{"parts": [{{"codec": {{"bits": {{}}}}}}]}}}}
    out.write_text(json.dumps({{"layers": [layer]}}))
    if flag("--method") == "auto":
        out.with_name(out.name + ".prediction.json").write_text(
            json.dumps({{"kl": 0.01, "kl_low": 0.005, "kl_high": 0.02}}))
elif command == "apply":
    out = pathlib.Path(flag("--out"))
    out.mkdir()
    (out / "kv_plan.json").write_text(pathlib.Path(flag("--plan")).read_text())
else:
    windows = int(flag("--windows"))
    last = sys.argv.index("--json") + 2
    if "--repeats" in sys.argv:
        last = sys.argv.index("--repeats") + 2
    report = {{"teacher": {{"window_nats": [3.0] * windows}}, "rows": []}}
    fail = here / "fail.txt"
    for name in sys.argv[last:]:
        if fail.exists() and fail.read_text() in name:
            sys.exit("stopped")
        seed = int(hashlib.sha256(name.encode()).hexdigest()[:6], 16) / 2**24
        kl = [0.01 + seed + 0.001 * i for i in range(windows)]
        report["rows"].append({{
            "kv_bytes_per_token": 3000 + 1000 * seed, "fixed_bytes_per_sequence": 0,
            "window_kl": kl, "window_nats": [3 + one for one in kl], "top1_agreement": 0.9,
            "repeat_nats_per_token": 1.0 if "--repeats" in sys.argv else None,
            "clamp_rate": 0.0, "kl_nats": sum(kl) / windows, "nats_per_token": 3.0}})
        pathlib.Path(flag("--json")).write_text(json.dumps(report))
'''


@pytest.fixture
def bench(tmp_path):
    """An object that runs frontier.py with a stand-in for the tool, and that returns the tool's calls
    since they were last asked for. The stand-in answers at once."""
    tool = tmp_path / "tool"
    tool.write_text(STAND_IN.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    model, domains, docs = (tmp_path / name for name in ("model", "domains", "docs"))
    for folder in (model, domains / "evaluation", docs):
        folder.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    for name in settings.DOMAINS:
        (domains / f"{name}.txt").write_text(name)
        (domains / "evaluation" / f"{name}.txt").write_text(name + " held out")
    (tmp_path / "novels.txt").write_text("novels")
    (docs / "quality.md").write_text(
        f"# Title\n\n{quality_page.BEGIN.format('smollm2')}\n{quality_page.END}\n")

    class Bench:
        folder = tmp_path
        page = docs / "quality.md"
        measured = tmp_path / "measured.jsonl"

        def run(self, *options):
            return subprocess.run(
                [sys.executable, ROOT / "bench/quality/frontier.py", "--tool", tool,
                 "--engine", tool, "--model", model, "--domains", domains, "--novels",
                 tmp_path / "novels.txt", "--work", tmp_path / "work", "--out", docs,
                 "--measured", self.measured, "--budget",
                 "quick", *options], capture_output=True, text=True, timeout=60)

        def study(self):
            return frontier.Study(argparse.Namespace(
                tool=tool, engine=tool, model=model, domains=domains,
                novels=tmp_path / "novels.txt", work=tmp_path / "work", budget="quick",
                measured=self.measured, again=False, recheck=0))

        def calls(self):
            log = tmp_path / "calls.txt"
            found = [json.loads(line) for line in log.read_text().splitlines()] if (
                log.exists()) else []
            log.unlink(missing_ok=True)
            return found

        def fail_before(self, name):
            (tmp_path / "fail.txt").write_text(name)

        def mend(self):
            (tmp_path / "fail.txt").unlink()

    return Bench()


def evaluated(calls):
    """Returns the number of candidates in all calls of `evaluate`."""
    total = 0
    for call in calls:
        if call[0] == "evaluate":
            total += len(call) - (call.index("--json") + 2)
    return total


def test_a_run_writes_its_section_and_charts_and_a_second_run_measures_nothing(bench):
    done = bench.run()
    assert done.returncode == 0, done.stderr
    calls = bench.calls()
    rows, long_rows = settings.QUICK.rows(), settings.QUICK.long_rows()
    assert evaluated(calls) == 5 * len(rows) + len(long_rows)
    artifacts = {row.artifact for row in rows + long_rows} - {None}
    for command in ("plan", "apply"):
        assert sum(call[0] == command for call in calls) == len(artifacts)
    # `plan` is called with calibration texts of its own; all other commands use the same texts.
    for call in calls:
        if call[0] == "plan":
            assert ("--text" in call) == ("auto" not in call)
            assert call.count("--text") in (0, len(settings.DOMAINS))
    text = bench.page.read_text()
    assert "budget `quick`" in text and f"| {rows[0].name} |" in text
    assert (bench.page.parent / "frontier.svg").exists()
    again = bench.run()
    assert again.returncode == 0 and bench.calls() == []
    assert bench.page.read_text() == text


def test_an_interrupted_run_continues_at_the_row_where_it_stopped(bench):
    whole = 5 * len(settings.QUICK.rows()) + len(settings.QUICK.long_rows())
    order = [row.baseline for row in settings.QUICK.rows()]
    bench.fail_before("kivi:4,group=32,residual=0")
    done = bench.run()
    assert done.returncode != 0 and "stopped" in done.stderr
    asked = evaluated(bench.calls())
    kept = order.index("kivi:4,group=32,residual=0")
    # All rows are measured on the text "books" before any row is measured on another text.
    lines = bench.measured.read_text().splitlines()
    assert asked == len(order) and sum('/ books, ' in line for line in lines) == kept
    bench.mend()
    # The page can show rows that were measured on all of their texts. There is none yet.
    known = bench.run("--known")
    assert known.returncode != 0 and not evaluated(bench.calls())
    assert bench.run().returncode == 0
    assert evaluated(bench.calls()) == whole - kept
    # Without the last line, one row is missing.
    lines = bench.measured.read_text().splitlines(keepends=True)
    bench.measured.write_text("".join(
        line for line in lines if f'"about":"{settings.KIVI[2, 0].name} / books' not in line))
    known = bench.run("--known")
    assert known.returncode == 0 and not bench.calls(), known.stderr
    rows = len(settings.QUICK.rows()) + len(settings.QUICK.long_rows())
    assert f"{rows - 1} of its {rows} rows so far" in bench.page.read_text()


def test_a_row_that_equals_the_plans_own_settings_is_not_measured_twice(bench):
    own = settings.STORAGE[3]  # keeps 4 sinks
    same = settings.with_exact(own, settings.SINKS)
    other = settings.with_exact(own, settings.RECENT)
    study = bench.study()
    assert study.candidate(same) == study.candidate(own) != study.candidate(other)
    bench.calls()
    found = study.measure([own, same, other], study.short_passages()[:1], False)
    assert evaluated(bench.calls()) == 2
    assert found[same.name] == found[own.name] != found[other.name]


def test_a_row_without_exact_tokens_of_its_own_uses_those_of_the_plan():
    plan = {"layers": [{"exact_sinks": 4, "key": {"exact_window": 64}},
                       {"joint": [{}], "value": {"exact_window": 128}}]}
    own = frontier.exact_tokens(plan)
    assert own == (4, 128)
    assert frontier.asked_tokens("", own) == own
    assert frontier.asked_tokens("sinks=4,window=128", own) == own
    assert frontier.asked_tokens("sinks=4", own) == own
    assert frontier.asked_tokens("sinks=0,window=0", own) == (0, 0)
    assert frontier.exact_tokens({"layers": [{}]}) == (0, 0)


def test_the_error_for_a_missing_model_says_how_to_fetch_it(bench):
    done = bench.run("--model", bench.folder / "none")
    assert done.returncode == 2 and "models/fetch smollm2" in done.stderr
