"""The files generated from the catalogue of metrics are up to date, and they cover the catalogue."""

import json
import re
import subprocess
import sys

import pytest

from kvasir_process import ROOT

sys.path.insert(0, str(ROOT / "deploy/metrics"))
import catalogue  # noqa: E402
import dashboards  # noqa: E402

FAMILIES = catalogue.load()
GRAFANA = ROOT / "deploy/grafana"


def test_the_generated_page_dashboards_and_rules_are_up_to_date():
    done = subprocess.run(
        [ROOT / "deploy/metrics/write", "--check"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def panels():
    for path in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield path.stem, panel


def test_every_metric_is_on_a_dashboard_and_every_panel_shows_metrics_of_the_catalogue():
    shown = set()
    for _, panel in panels():
        families = FAMILIES.families_in(" ".join(target["expr"] for target in panel["targets"]))
        assert families, panel["title"]
        shown |= set(families)
    assert shown == set(FAMILIES.families) | set(FAMILIES.dcgm)


def test_metrics_of_nvidias_exporter_are_marked_and_have_their_own_row():
    for path in sorted(GRAFANA.glob("*.json")):
        row = None
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
                continue
            families = set(FAMILIES.families_in(" ".join(target["expr"] for target in panel["targets"])))
            theirs = families & set(FAMILIES.dcgm)
            assert theirs in (set(), families), panel["title"]
            assert bool(theirs) == panel["title"].startswith("DCGM: ") == ("NVIDIA's DCGM exporter" in row)
    # By the catalogue, none of our processes exports them.
    for process in ("worker", "router", "rank"):
        assert not set(FAMILIES.dcgm) & FAMILIES.exported(process)


def test_the_page_of_metrics_lists_every_metric_and_no_other():
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (?:gauge|counter|histogram|summary) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES.families)
    assert re.findall(r"^\| `(DCGM_\w+)` \|", page, re.MULTILINE) == list(FAMILIES.dcgm)
    assert dict(re.findall(r"^\| `(\w+)` \| `(vllm:\w+)` \|", page, re.MULTILINE)) == FAMILIES.vllm


def test_metrics_of_a_rank_have_the_label_rank_if_there_are_several_ranks():
    ranked = {name for name, family in FAMILIES.families.items() if family["ranked"]}
    assert ranked < FAMILIES.exported("rank") and ranked > FAMILIES.exported("rank") - FAMILIES.exported("worker")
    for name in FAMILIES.families:
        assert FAMILIES.labels(name, several_ranks=True) - FAMILIES.labels(name) == ({"rank"} if name in ranked else set())


def test_panels_of_a_dashboard_have_unique_ids_and_do_not_overlap():
    for path in GRAFANA.glob("*.json"):
        dashboard = json.loads(path.read_text())
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        taken = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, (path.name, panel["title"])
            assert place["x"] + place["w"] <= dashboards.WIDTH, (path.name, panel["title"])
            taken |= cells


SMALL = """
[[section]]
title = "T"
processes = ["worker"]
[section.families]
kvasir_wait_seconds = { type = "histogram", meaning = "waiting" }
kvasir_pool_bytes = { type = "gauge", meaning = "bytes" }
kvasir_made_total = { type = "counter", meaning = "made" }
[dcgm]
DCGM_FI_DEV_POWER = { unit = "watt", meaning = "power" }
[vllm]
"""


def test_titles_are_unique_within_a_dashboard():
    for dashboard in dashboards.load():
        titles = [panel["title"] for row in dashboard["row"] for panel in row["panels"]]
        assert len(set(titles)) == len(titles), dashboard["name"]


def test_the_error_for_a_query_of_an_unknown_metric_names_it():
    small = catalogue.Catalogue(SMALL)
    assert small.families_in("kvasir_wait_seconds_bucket / kvasir_wait_seconds_sum") == [
        "kvasir_wait_seconds"
    ]
    with pytest.raises(KeyError, match="kvasir_pool_bytes_sum: catalogue.toml has no family"):
        small.families_in("kvasir_pool_bytes_sum")
    with pytest.raises(KeyError, match="kvasir_gone"):
        small.families_in("rate(kvasir_gone[5m])")
    assert small.families_in("DCGM_FI_DEV_POWER or up") == ["DCGM_FI_DEV_POWER"]
    with pytest.raises(KeyError, match="DCGM_FI_DEV_GONE"):
        small.families_in("DCGM_FI_DEV_GONE > 0")


def test_a_dashboard_panel_with_metrics_of_several_units_must_name_one_unit():
    small = catalogue.Catalogue(SMALL)
    assert dashboards.unit_of(small, {"title": "P"}, [("", "kvasir_pool_bytes")]) == "bytes"
    assert dashboards.unit_of(small, {"title": "P"}, [("", "DCGM_FI_DEV_POWER")]) == "watt"
    mixed = [("", "kvasir_pool_bytes"), ("", "kvasir_made_total")]
    with pytest.raises(ValueError, match=r"panel 'P': its queries have the units \['bytes', 'short'\]"):
        dashboards.unit_of(small, {"title": "P"}, mixed)
    assert dashboards.unit_of(small, {"title": "P", "unit": "reqps"}, mixed) == "reqps"
