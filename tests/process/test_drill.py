"""Workers and routers are lost under load, and every client gets the answers of an undisturbed run."""

import os

import pytest

import drill

# A pool that is too small for a worker's share of the clients, so some requests wait or are preempted.
SMALL_POOL = ["--kv-cache-bytes", "16MiB"]


@pytest.mark.timeout(1800)
def test_no_answer_is_lost_or_changed_while_workers_and_routers_are_lost(capsys):
    seed = int.from_bytes(os.urandom(4), "little")
    with capsys.disabled():
        print(f" seed {seed}", flush=True)
    results, problems = drill.drill(1, seed, flags=SMALL_POOL)
    assert not problems, (seed, problems)
    assert {one["name"] for one in results} == set(drill.Drill.DISTURBANCES)
    assert sum(one["ok"] for one in results) >= 24 * len(results)
    assert sum(one["moved"] for one in results) > 0


def test_the_page_on_reliability_has_a_row_for_each_disturbance():
    names = list(drill.Drill.DISTURBANCES)
    result = {"running": 24, "seconds": 9.0, "ok": 30, "failed": 0, "different": 0, "elsewhere": 2, "moved": 3}
    text = drill.page([{"name": names[0], **result, "pauses": [0.1, 0.2, 6.0]},
                       {"name": names[0], **result, "pauses": [0.3]}], [], 7, 2, 24, SMALL_POOL)
    assert f"| {names[0]} | 2 | 60 | 6 | 4 | 0 | 0 | 0.25 s | 6.0 s |" in text
    assert all(f"| {name} | 0 |" in text for name in names[1:])
    assert "2 rounds, seed 7" in text and "other problems: none" in text
