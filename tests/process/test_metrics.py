"""Real Prometheus scrapes real processes; the metrics page tells the truth."""

import json
import pathlib
import re
import subprocess
import tempfile
import urllib.request

import pytest

import triton
from kvasir_process import ROOT, KvasirProcess, wait_until

PROMETHEUS = "/usr/bin/prometheus"


@pytest.fixture(scope="module")
def server():
    with KvasirProcess("serve", "--metrics-compat", "vllm") as process:
        model = process.ready["model"]
        triton.generate(process.grpc, model, "It was a bright morning", max_tokens=8)
        yield process


def documented():
    return set(re.findall(r"`(kvasir_\w+|vllm:\w+|exposer_\w+)`", (ROOT / "docs/metrics.md").read_text()))


def exported(text):
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def test_every_exported_family_is_documented_and_every_documented_one_exported(server):
    families = exported(server.metrics_text())
    assert families - documented() == set()
    assert documented() - families == set()


def test_contract_gauges_have_exactly_one_series(server):
    text = server.metrics_text()
    for name in (
        "kvasir_num_requests_waiting",
        "kvasir_num_requests_running",
        "kvasir_kv_cache_usage_ratio",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
    ):
        assert len(re.findall(rf"^{name}(?:{{| )", text, re.MULTILINE)) == 1, name


def test_counters_move_with_a_request(server):
    before = server.metrics()
    triton.generate(server.grpc, server.ready["model"], "She said", max_tokens=5, ignore_eos=True)
    wait_until(
        lambda: server.metric("kvasir_generation_tokens_total")
        == before[("kvasir_generation_tokens_total", frozenset())] + 5,
        "5 more generated tokens",
    )
    length = ("kvasir_request_success_total", frozenset({("finished_reason", "length")}))
    assert server.metrics()[length] == before[length] + 1


def query(port, expression):
    url = f"http://127.0.0.1:{port}/api/v1/query?query={expression}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.loads(response.read())["data"]["result"]


def test_a_real_prometheus_scrapes_router_and_worker():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        socket = folder / "worker.sock"
        with KvasirProcess(
            "worker", "--listen", f"unix:{socket}", "--metrics-port", 0, "--admin-port", 0,
            ports=False,
        ) as worker, KvasirProcess("router", "--workers", f"unix:{socket}") as router:
            targets = [worker.ready["metrics"], router.ready["metrics"]]
            (folder / "prometheus.yml").write_text(
                "global: {scrape_interval: 1s}\n"
                "scrape_configs:\n"
                "- job_name: kvasir\n"
                f"  static_configs: [{{targets: {json.dumps(targets)}}}]\n"
            )
            port = free_port()
            prometheus = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                triton.generate(
                    router.grpc, router.ready["model"], "A ship", max_tokens=6, ignore_eos=True
                )

                def ups():
                    try:
                        return sum(float(row["value"][1]) for row in query(port, "up"))
                    except OSError:
                        return 0

                wait_until(lambda: ups() == 2, "both targets up in Prometheus", seconds=60)
                # Each half exports what the page says, and the two all of it.
                halves = [exported(worker.metrics_text()), exported(router.metrics_text())]
                assert halves[0] | halves[1] == {
                    name for name in documented() if not name.startswith("vllm:")
                }
                assert halves[0] & halves[1] == {
                    name for name in documented() if name.startswith("exposer_")
                }
                assert all(name.startswith(("kvasir_router_", "exposer_")) for name in halves[1])
                assert not any(name.startswith("kvasir_router_") for name in halves[0])
                wait_until(
                    lambda: [
                        row["value"][1] for row in query(port, "kvasir_generation_tokens_total")
                    ]
                    == ["6"],
                    "the worker's tokens in Prometheus",
                )
                wait_until(
                    lambda: any(
                        float(row["value"][1]) == 1
                        for row in query(port, "kvasir_router_requests_total")
                    ),
                    "the router's request in Prometheus",
                )
            finally:
                prometheus.kill()
                prometheus.wait()


def free_port():
    import socket as sockets

    with sockets.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
