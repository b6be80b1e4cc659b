"""bench/quality/eviction.py: rows, calls of `evaluate`, resuming and the page, on a
stand-in for kvasir-compress that answers at once."""

import json
import pathlib
import stat
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/quality"))

import eviction  # noqa: E402
import eviction_page as page  # noqa: E402
import eviction_settings as settings  # noqa: E402
import eviction_streams as streams  # noqa: E402
import quality_page  # noqa: E402
from eviction_settings import CODES, DENSE, Row  # noqa: E402

STAND_IN = '''#!{python}
import hashlib, json, pathlib, sys
if sys.argv[1] == "--version":
    print("0.0")
    sys.exit(0)
here = pathlib.Path(__file__).parent
with (here / "calls.txt").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
def flag(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
if sys.argv[1] == "apply":
    out = pathlib.Path(flag("--out"))
    out.mkdir()
    (out / "kv_plan.json").write_text(pathlib.Path(flag("--plan")).read_text())
    sys.exit(0)
if flag("--eviction") == "none" and "--eviction-lambda" in sys.argv:
    sys.exit("--eviction-lambda says how --eviction evicts")
windows, copies = int(flag("--windows")), int(flag("--repeats", 0))
report = {{"teacher": {{"window_nats": [3.0] * windows}}, "rows": []}}
names = [arg for arg in sys.argv[2:] if arg.startswith("/") and "/texts/" not in arg
         and (pathlib.Path(arg.partition(":")[0]) / "kv_plan.json").exists()]
names += [flag("--teacher")] * (sys.argv.count(flag("--teacher")) - 1)
for name in names:
    for method in flag("--eviction").split(","):
        for budget in flag("--eviction-budget", "0").split(","):
            if (here / "fail.txt").exists() and method == "streaming":
                sys.exit("stopped")
            kl = {{"none": 0.1, "q-hitter": 0.5, "h2o": 0.2}}.get(method, 0.3)
            report["rows"].append({{
                "model": f"{{method}} {{budget}}", "kv_bytes_per_token": 100.0,
                "window_kl": [kl * (1 + 0.01 * i * i) for i in range(windows)],
                "window_nats": [3 + kl] * windows, "top1_agreement": 0.9,
                "repeat_nats": [kl + i for i in range(copies)]}})
            pathlib.Path(flag("--json")).write_text(json.dumps(report))
'''


ENGINE = '''#!{python}
import json, pathlib, sys
with (pathlib.Path(__file__).parent / "streams.txt").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "inspect":
    # 3 layers keep 4 sinks, 64 recent tokens and 8 others of 100 tokens. With codes, half
    # of the 8 are different tokens.
    plan = pathlib.Path(sys.argv[sys.argv.index("--kv-plan") + 1]).read_text()
    heavy = range(10, 18) if "BF16" in plan else range(10, 26, 2)
    gone = [None if token < 4 or token >= 36 or token in heavy else 64
            for token in range(100)]
    layer = {{"sinks": 4, "recent": 64, "units": [{{"heads": [0, 1, 2], "gone_at": gone}}]}}
    print(json.dumps({{"trace": {{"prompt_tokens": 100, "layers": 3 * [layer]}}}}))
    sys.exit(0)
more = 0.05 if "h2o" in sys.argv else 0.2 if "--stream" in sys.argv else 0
print(json.dumps({{"kv_held_bytes": 2000000, "parts": [
    {{"nats_per_token": 2.0 + more * (1 + tenth % 2), "tokens": 100}}
    for tenth in range(10)]}}))
'''


@pytest.fixture
def bench(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(STAND_IN.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    engine = tmp_path / "engine"
    engine.write_text(ENGINE.format(python=sys.executable))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    model, texts, docs = (tmp_path / name for name in ("model", "texts", "docs"))
    for folder in (model, texts / "evaluation", docs):
        folder.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    for name in settings.DOMAINS:
        (texts / "evaluation" / f"{name}.txt").write_text(name + " held out")
    (texts / "novel.txt").write_text(70000 * "x")
    (docs / "quality.md").write_text(
        f"# Title\n\n{quality_page.BEGIN.format('eviction')}\n{quality_page.END}\n")

    class Bench:
        folder = tmp_path
        measured = tmp_path / "measured.jsonl"

        def run(self, *options):
            return subprocess.run(
                [sys.executable, ROOT / "bench/quality/eviction.py", "--tool", tool,
                 "--engine", engine, "--novels", texts / "novel.txt",
                 "--model", model, "--domains", texts, "--work", tmp_path / "work",
                 "--measured", self.measured, "--out", docs, "--budget", "quick",
                 *options],
                capture_output=True, text=True, timeout=60)

        def evaluations(self):
            log = tmp_path / "calls.txt"
            lines = log.read_text().splitlines() if log.exists() else []
            log.unlink(missing_ok=True)
            return [call for line in lines
                    if (call := json.loads(line))[0] == "evaluate"]

        def streams(self):
            log = tmp_path / "streams.txt"
            lines = log.read_text().splitlines() if log.exists() else []
            log.unlink(missing_ok=True)
            return [call for call in map(json.loads, lines) if call[0] == "perplexity"]

        def page(self):
            return (docs / "quality.md").read_text()

    return Bench()


@pytest.mark.parametrize("budget", settings.BUDGETS.values())
def test_every_row_is_measured_by_exactly_one_call_of_the_tool(budget):
    for rows in (settings.MATRIX + settings.OTHERS, settings.FAR,
                 settings.LONG_ROWS):
        rows = budget.of(rows)
        assert len(set(rows)) == len(rows)
        calls = eviction.commands(rows)
        assert sorted(map(repr, rows)) == sorted(repr(r) for c in calls for r in c)
        for call in calls:
            assert len({row.options for row in call}) == 1
            methods, budgets, caches = ({get(row) for row in call} for get in (
                lambda r: r.method, lambda r: r.budget, lambda r: r.cache))
            assert len(call) == len(methods) * len(budgets) * len(caches)


def test_quantization_levels_of_a_normal_distribution_equal_the_table_of_j_max():
    assert settings.normal_levels(2) == pytest.approx(
        [-1.510, -0.4528, 0.4528, 1.510], abs=1e-3)
    assert settings.normal_levels(4)[-1] == pytest.approx(2.733, abs=1e-3)


def test_a_row_of_a_stream_is_judged_by_the_whole_text():
    window = streams.Stream([2.0] * 10, [100] * 10, 1000000)
    own = streams.Stream([2.0] * 9 + [2.5], [100] * 9 + [50], 1000000)
    found = {settings.STREAM_WINDOW: window, settings.STREAM_CLAIM: own}
    *_, line = streams.lines(found)
    # The loss of the whole text is the mean of 2.0 for 900 tokens and 2.5 for 50.
    assert "| 2.0263 | 1.013 | 1.000 |" in line and line.endswith("| 1.250 | ≤ 1.03: met |")
    assert streams.lines({settings.STREAM_WINDOW: window}) == []


def test_a_second_run_measures_nothing_and_writes_the_same_section(bench):
    done = bench.run()
    assert done.returncode == 0, done.stderr
    assert bench.evaluations()
    text = bench.page()
    # In the stand-in, Q-Hitter is worse than H2O, and H2O is better than keeping only recent tokens.
    assert "| 4 bits, 50 %: Q-Hitter, λ = 0.5 ≤ H2O | q-hitter | 0.51" in text
    assert text.count("**does not hold**") >= 4
    assert "| 4 bits | 20 % | H2O | 100 | 0.2" in text
    assert "| 4 bits | all | – | 100 | 0.1" in text
    assert "rows so far" not in text
    calls = bench.streams()
    assert len(calls) == len(settings.QUICK.of(settings.STREAMS))
    assert len({call[call.index("--text") + 1] for call in calls}) == 1
    assert (bench.folder / "work/novel.txt").stat().st_size == settings.QUICK.stream_bytes
    # The whole stream has a loss of 2.075, its first tenth 2.05, and the window 2.
    assert ("| H2O, 0.0625 heavy, rolling positions | 2.0 | 2.0750 | 1.038 | 1.025 | 1.050 |"
            in text) and "≤ 1.03: **missed**" in text
    # With codes, 4 of the 8 tokens 10 to 17 are chosen. A random choice would contain 8 of 32.
    assert "| 3 bits | 0.500 | 0.500 | 0 |" in text and "| by lot | 0.250 | | |" in text
    svg = (bench.folder / "docs/heavy-overlap.svg").read_text()
    assert svg.count("<polyline") == len(settings.CODES) and "by lot: 0.25" in svg
    again = bench.run()
    assert again.returncode == 0 and not bench.evaluations() and not bench.streams()
    assert bench.page() == text


def test_the_page_of_a_stopped_run_shows_the_rows_measured_so_far(bench):
    (bench.folder / "fail.txt").touch()
    assert bench.run().returncode != 0
    first = len(bench.evaluations())
    (bench.folder / "fail.txt").unlink()
    known = bench.run("--known")
    assert known.returncode == 0, known.stderr
    assert "Heavy tokens" not in bench.page()
    assert "rows so far" in bench.page() and not bench.evaluations()
    # Rows that were measured before the failure are not measured again.
    assert bench.run().returncode == 0
    asked = [call[call.index("--eviction") + 1] for call in bench.evaluations()]
    assert first == 2 and "none" not in asked[0]
    assert not any("h2o" in names and "streaming" in names for names in asked[:1])




def test_rows_of_a_streamed_text_have_different_flags_of_eviction():
    flags = [row.flags for row in settings.STREAMS]
    assert len(set(map(tuple, flags))) == len(flags)
    assert settings.STREAM_WINDOW.flags == ["--window", "1024", "--stride", "256"]
    claim = settings.STREAM_CLAIM.flags
    assert claim[claim.index("--eviction-budget") + 1] == "896"
    assert claim[claim.index("--eviction-recent") + 1] == "840"
    assert "--eviction-rolling" in claim


def test_q_hitter_is_not_measured_on_an_unquantized_cache_where_it_equals_h2o():
    assert not any(row.cache == DENSE and row.method == "q-hitter"
                   for row in settings.MATRIX + settings.OTHERS)
    assert Row(CODES[4], "h2o", 0.2, quick=True) == Row(CODES[4], "h2o", 0.2)


def test_a_claim_about_eviction_is_judged_by_its_ratio_with_a_corrected_p_value():
    def rows(kl):
        return page.Measured([kl * (1 + 0.01 * i * i) for i in range(6)], [3.0] * 6,
                             [3.0] * 6, [], 100, 0.9)
    found = {}
    for bits in (4, 3):
        found[Row(CODES[bits], "h2o", 0.2)] = rows(0.2)
        found[Row(CODES[bits], "q-hitter", 0.2)] = rows(0.1 if bits == 4 else 0.3)
    verdicts = [one.verdict for one in page.judge(found)]
    assert verdicts == ["holds", "**does not hold**"]
