"""bench/quality/quality_store.py: what was measured stays, and is what it was."""

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


def test_what_was_put_is_there_for_the_next_program_a_line_each(store):
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


def test_again_sees_what_this_commit_measured_alone(store, monkeypatch):
    store(commit="aaaaaaa").put("k1", "a", row(0.5))
    store(commit="bbbbbbb").put("k2", "b", row(0.5))
    monkeypatch.setattr(quality_store, "commit", lambda: "bbbbbbb")
    again = store(again=True)
    assert "k1" not in again and "k2" in again


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"about": "x"}'])
def test_a_line_that_is_no_measurement_is_named(store, line):
    first = store()
    first.put("k1", "a row", row(0.5))
    first.path.write_text(first.path.read_text() + line + "\n")
    with pytest.raises(SystemExit, match="measured.jsonl:2: not a measurement"):
        store()


def test_rows_that_are_measured_again_must_be_what_they_were(store):
    keys = [f"k{i}" for i in range(5)]
    for key in keys:
        store().put(key, f"row {key}", row(0.5, 0.25))
    found = store(commit="bbbbbbb")
    found.set_aside(2, keys, seed=1)
    aside = [key for key in keys if key not in found]
    assert len(aside) == 2
    found.put(aside[0], f"row {aside[0]}", row(0.5, 0.251))
    # Rows that are not measured again yet are kept.
    assert all(key in store() for key in keys)
    assert found.compare() == [f"row {aside[0]}: within 0.398 % of commit aaaaaaa"]
    found.put(aside[1], f"row {aside[1]}", row(0.5, 0.30))
    with pytest.raises(SystemExit, match=f"rows differ from earlier measurements.*row {aside[1]}"):
        found.compare()


def test_no_more_rows_are_measured_again_than_are_known(store):
    store().put("k1", "a", row(0.5))
    found = store()
    found.set_aside(3, ["k1", "k2"])
    assert "k1" not in found and list(found.old) == ["k1"]


def report(*kls):
    return json.dumps({"teacher": {"window_nats": [1.0], "model": "m"},
                       "rows": [{"window_kl": [kl], "extra": 1} for kl in kls]})


def test_rows_of_a_run_that_was_killed_are_taken_over(store, tmp_path):
    pending = Pending(tmp_path, store())
    rows = [[name, f"row {name}"] for name in "abc"]
    pending.begin(rows)
    pending.report.write_text(report(0.1, 0.2))
    after = Pending(tmp_path, store())  # of the next process
    after.keep()
    assert store().get("b") == {"teacher": {"window_nats": [1.0]}, "row": {"window_kl": [0.2]}}
    assert "c" not in store() and not pending.list.exists() and not pending.report.exists()
    # Nor does a report of other rows count.
    pending.report.write_text(report(9.0))
    pending.begin(rows[2:])
    pending.keep()
    assert "c" not in store()


def test_a_tool_that_tells_no_divergence_of_windows_is_named(store, tmp_path):
    pending = Pending(tmp_path, store())
    pending.begin([["a", "row a"]])
    pending.report.write_text(json.dumps({"teacher": {}, "rows": [{"window_nats": [1.0]}]}))
    with pytest.raises(SystemExit, match="no window_kl"):
        pending.keep()


@pytest.mark.parametrize("name", ["smollm2", "eviction"])
def test_what_the_repository_keeps_can_be_read(name):
    path = ROOT / "bench/quality/measured" / f"{name}.jsonl"
    found = Store(path, "2026-01-02")
    assert found.lines and all(entry["found"] for entry in found.lines.values())
    assert path.stat().st_size < 2**20
