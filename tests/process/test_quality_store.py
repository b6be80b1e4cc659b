"""bench/quality/quality_store.py: measurements are kept, and a repeated measurement must equal the stored one."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/quality"))

import quality_store  # noqa: E402
from quality_store import Pending, Store  # noqa: E402


@pytest.fixture
def store(tmp_path):
    def open_store(date="2026-01-02", again=False, commit="aaaaaaa"):
        found = Store(tmp_path / "folder/measured.jsonl", date, again)
        found.commit = commit
        return found
    return open_store


def row(*kls):
    return {"row": {"window_kl": list(kls), "window_nats": [3.0] * len(kls)}}


def test_each_stored_row_is_one_line_that_the_next_process_can_read(store):
    first = store()
    first.put("k2", "the second row", row(0.123456789, 1e-9))
    first.put("k1", "a row", row(0.5))
    second = store(date="2026-01-05", commit="bbbbbbb")
    assert "k1" in second and "k3" not in second and second.get("k3") is None
    assert second.get("k2")["row"]["window_kl"] == [0.1234568, 1e-9]
    second.put("k1", "a row", row(0.25))
    lines = [json.loads(line) for line in second.path.read_text().splitlines()]
    assert [line["about"] for line in lines] == ["a row", "the second row"]
    assert second.span(["k1", "k2"]) == "2026-01-02 to 2026-01-05 (commits aaaaaaa, bbbbbbb)"
    assert second.span(["k2"]) == "2026-01-02 (commit aaaaaaa)"


def test_with_again_only_rows_measured_by_the_current_commit_are_reused(store, monkeypatch):
    store(commit="aaaaaaa").put("k1", "a", row(0.5))
    store(commit="bbbbbbb").put("k2", "b", row(0.5))
    monkeypatch.setattr(quality_store, "commit", lambda: "bbbbbbb")
    again = store(again=True)
    assert "k1" not in again and "k2" in again


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"about": "x"}'])
def test_the_error_for_a_stored_line_that_is_no_measurement_names_it(store, line):
    first = store()
    first.put("k1", "a row", row(0.5))
    first.path.write_text(first.path.read_text() + line + "\n")
    with pytest.raises(SystemExit, match="measured.jsonl:2: not a measurement"):
        store()


def test_a_row_that_is_measured_again_must_equal_its_stored_value(store):
    keys = [f"k{i}" for i in range(5)]
    for key in keys:
        store().put(key, f"row {key}", row(0.5, 0.25))
    found = store(commit="bbbbbbb")
    found.set_aside(2, keys, seed=1)
    aside = [key for key in keys if key not in found]
    assert len(aside) == 2
    found.put(aside[0], f"row {aside[0]}", row(0.5, 0.251))
    # A row that is not measured again yet is not lost.
    assert all(key in store() for key in keys)
    assert found.compare() == [f"row {aside[0]}: within 0.398 % of commit aaaaaaa"]
    found.put(aside[1], f"row {aside[1]}", row(0.5, 0.30))
    with pytest.raises(SystemExit, match=f"rows differ from earlier measurements.*row {aside[1]}"):
        found.compare()


def test_only_rows_that_are_already_stored_are_measured_again(store):
    store().put("k1", "a", row(0.5))
    found = store()
    found.set_aside(3, ["k1", "k2"])
    assert "k1" not in found and list(found.old) == ["k1"]


def report(*kls):
    return json.dumps({"teacher": {"window_nats": [1.0], "model": "m"},
                       "rows": [{"window_kl": [kl], "extra": 1} for kl in kls]})


def test_rows_that_a_killed_run_measured_are_stored_by_the_next_run(store, tmp_path):
    pending = Pending(tmp_path, store())
    rows = [[name, f"row {name}"] for name in "abc"]
    pending.begin(rows)
    pending.report.write_text(report(0.1, 0.2))
    after = Pending(tmp_path, store())  # as the next process would open it
    after.keep()
    assert store().get("b") == {"teacher": {"window_nats": [1.0]}, "row": {"window_kl": [0.2]}}
    assert "c" not in store() and not pending.list.exists() and not pending.report.exists()
    # A report that was written for other rows does not count.
    pending.report.write_text(report(9.0))
    pending.begin(rows[2:])
    pending.keep()
    assert "c" not in store()


def test_a_report_without_the_divergence_of_each_window_is_refused(store, tmp_path):
    pending = Pending(tmp_path, store())
    pending.begin([["a", "row a"]])
    pending.report.write_text(json.dumps({"teacher": {}, "rows": [{"window_nats": [1.0]}]}))
    with pytest.raises(SystemExit, match="no window_kl"):
        pending.keep()


@pytest.mark.parametrize("name", ["smollm2", "eviction"])
def test_the_measurements_kept_in_the_repository_can_be_read(name):
    path = ROOT / "bench/quality/measured" / f"{name}.jsonl"
    found = Store(path, "2026-01-02")
    assert found.lines and all(entry["found"] for entry in found.lines.values())
    assert path.stat().st_size < 2**20
