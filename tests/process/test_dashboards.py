"""Queries of dashboards, rules and alerts run on a real Prometheus that scrapes a server under load."""

import json
import math
import pathlib
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree

import pytest
import yaml

import dcgm
import triton
from certificates import Authority
from kvasir_process import ROOT, KvasirProcess, wait_until
from prometheus import Prometheus

sys.path.insert(0, str(ROOT / "deploy/metrics"))
import catalogue  # noqa: E402

FAMILIES = catalogue.load()
RULES = ROOT / "deploy/prometheus/rules.yml"
WINDOW = "4s"  # the window of rates: several scrapes
# The labels that the operator's monitors add to what they scrape.
POD = {"namespace": "kvasir", "pod": "kvasir-worker-0"}
REPLICA = {"replica": POD["pod"]}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus that scrapes a server of two ranks. The server answers requests until the tests end."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    # An alert fires if the certificate has less than a week left.
    own = authority.sign("server", "IP:127.0.0.1", days=30)
    with KvasirProcess("serve", "--tp", "2", "--tls-cert", own, "--tls-key", own) as server:
        stop = threading.Event()

        def load():
            number = 0
            while not stop.is_set():
                number += 1
                # The prompts share a prefix of several pages, so that the prefix cache finds it again.
                prompt = "It was a dark night in November. " * 40 + str(number)
                triton.generate(server.grpc, server.ready["model"], prompt, tls=authority.clients(), max_tokens=8,
                                ignore_eos=True)

        clients = [threading.Thread(target=load) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            with dcgm.DcgmExporter(FAMILIES.dcgm) as exporter:
                others = {"dcgm": ([exporter.address], dcgm.SCRAPED)}
                with Prometheus([rank["metrics"] for rank in server.ready["ranks"]], rules=RULES, interval="500ms",
                                labels={**POD, **REPLICA}, others=others) as prometheus:
                    wait_until(lambda: prometheus.ups() == 3, "all up in Prometheus", seconds=60)
                    yield prometheus
        finally:
            stop.set()
            for client in clients:
                client.join()


def for_prometheus(promql):
    for name, value in {"$__rate_interval": WINDOW, "$job": ".*", "$instance": ".*"}.items():
        promql = promql.replace(name, value)
    return promql


def dashboard_queries():
    for path in sorted((ROOT / "deploy/grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']}", for_prometheus(target["expr"])


def test_every_query_of_every_panel_returns_data(prometheus):
    # Only a mixture of experts has this metric; test_latent_cache reads it.
    experts = {query for query in dashboard_queries() if "kvasir_expert_tokens_total" in query[1]}
    assert len(experts) == 1
    waiting = dict.fromkeys(query for query in dashboard_queries() if query not in experts)
    assert len(waiting) > 100

    def answered():
        for query in list(waiting):
            if prometheus.query(query[1]):
                del waiting[query]
        return not waiting

    try:
        wait_until(answered, "every panel has data", seconds=40)
    except AssertionError:
        pytest.fail(f"no data: {list(waiting)}")


def test_panels_show_values_above_zero_under_load(prometheus):
    moving = {
        "overview: Tokens a second", "overview: Time to first token", "overview: Processor cores",
        "cache: Prefix hits of tokens looked up", "requests: Steps a second", "router: Dispatch",
        "ranks: Collectives a step", "ranks: Sent to other ranks",
    }
    queries = [(title, query) for title, query in dashboard_queries() if title in moving]
    assert {title for title, _ in queries} == moving
    for title, query in queries:
        wait_until(
            lambda: any(
                math.isfinite(value) and value > 0
                for value in (float(row["value"][1]) for row in prometheus.query(query))
            ),
            f"{title}: {query} is above 0",
        )


def test_values_for_which_an_alert_fires_are_red_on_their_panels():
    limits = {
        "overview: KV cache in use": "KvasirCacheFull", "overview: First token, p90": "KvasirFirstTokenSlow",
        "requests: Share of failed requests of each replica": "KvasirReplicaFails",
    }
    alerts = {rule.get("alert"): rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    for panel in limits:
        board, title = panel.split(": ")
        panels = json.loads((ROOT / f"deploy/grafana/{board}.json").read_text())["panels"]
        (defaults,) = [each["fieldConfig"]["defaults"] for each in panels if each["title"] == title]
        low, high = defaults["thresholds"]["steps"]
        assert low == {"color": "green", "value": None} and high["color"] == "red"
        assert f" > {high['value']}" in alerts[limits[panel]]["expr"]


def groups(prometheus):
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]


def test_every_recording_rule_returns_data(prometheus):
    records = [rule["name"] for rule in groups(prometheus) if rule["type"] == "recording"]
    assert len(records) == RULES.read_text().count("- record: ") > 0
    for record in records:
        wait_until(lambda: prometheus.query(record), f"{record} has data")


def test_the_series_of_every_alert_exist_and_no_alert_fires_on_a_healthy_server(prometheus):
    alerts = [rule for rule in groups(prometheus) if rule["type"] == "alerting"]
    assert len(alerts) == RULES.read_text().count("- alert: ") > 0
    for alert in alerts:
        names = catalogue.NAME.findall(alert["query"])
        for name in names:
            if name == "kvasir" or name.startswith("kvasir:"):
                continue
            assert FAMILIES.family_of(name)
            wait_until(lambda: prometheus.query(name), f"{alert['name']}: {name} is there")
    wait_until(
        lambda: all(rule["health"] == "ok" for rule in groups(prometheus)), "every rule was evaluated"
    )
    # The server has been under load for less than a minute, so an alert that fires now has no `for`, or fires on a
    # healthy server.
    assert [alert["name"] for alert in groups(prometheus) if alert.get("state") == "firing"] == []


def test_the_rule_of_the_metrics_adapter_gives_one_number_per_pod(prometheus):
    (rule,) = yaml.safe_load((ROOT / "deploy/prometheus/adapter.yml").read_text())["rules"]
    assert rule["resources"]["overrides"].keys() == POD.keys()
    found = {series["__name__"] for series in prometheus.get("series", **{"match[]": rule["seriesQuery"]})}
    assert found == {"kvasir_num_requests_waiting", "kvasir_kv_cache_usage_ratio"}
    for series in found:
        promql = rule["metricsQuery"]
        matchers = ",".join(f'{name}="{value}"' for name, value in POD.items())
        for name, value in {"Series": series, "LabelMatchers": matchers, "GroupBy": "pod"}.items():
            promql = promql.replace(f"<<.{name}>>", value)
        (row,) = prometheus.query(promql)
        assert row["metric"] == {"pod": POD["pod"]}


def test_promtool_accepts_the_rules_and_their_unit_tests_pass():
    for command in ("check", str(RULES)), ("test", str(RULES.with_name("rules_test.yml"))):
        done = subprocess.run(
            ["promtool", command[0], "rules", command[1]], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_and_alert_has_a_promtool_test_and_every_alert_has_a_runbook():
    rules, cases = RULES.read_text(), RULES.with_name("rules_test.yml").read_text()
    for record in re.findall(r"- record: (\S+)", rules):
        assert re.search(rf"expr: .*{re.escape(record)}", cases), record
    for alert in re.findall(r"- alert: (\S+)", rules):
        fires = re.search(rf"alertname: {alert}\n\s+exp_alerts:\n\s+- exp_labels", cases)
        assert fires, f"{alert} fires in no case"
    page = (ROOT / "docs/operations.md").read_text()
    headings = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    }
    for anchor in re.findall(r"runbook: docs/operations\.md#(\S+)", rules):
        assert anchor in headings, anchor


def test_the_picture_of_a_dashboard_is_drawn_with_data_of_prometheus(prometheus, tmp_path):
    picture = tmp_path / "dashboard.svg"
    command = [
        ROOT / "deploy/metrics/picture", "--prometheus", prometheus.url, "--seconds", "10",
        "--window", WINDOW, "--out", picture,
    ]

    def drawn():
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode == 0 or "has no data of" not in done.stderr and pytest.fail(done.stderr)

    wait_until(drawn, "the picture")
    svg = xml.etree.ElementTree.parse(picture).getroot()
    words = ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "Time to first token" in words and "Waiting" in words and "p99" in words
    lines = [path.get("d") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
    assert len(lines) > 12 and all(line.startswith("M") for line in lines)
    sys.path.insert(0, str(ROOT / "scripts"))
    import check_tree

    assert list(check_tree.crossing_texts(pathlib.Path(picture).read_text())) == []
