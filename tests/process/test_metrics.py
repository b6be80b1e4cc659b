"""A real Prometheus scrapes real processes, and what they export matches the catalogue of metrics."""

import pathlib
import re
import sys
import tempfile
import urllib.request

import pytest

import triton
from certificates import Authority
from kvasir_process import OPERATOR_PORTS, ROOT, KvasirProcess, wait_until
from prometheus import Prometheus

sys.path.insert(0, str(ROOT / "deploy/metrics"))
import catalogue  # noqa: E402


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    made = Authority(tmp_path_factory.mktemp("certificates"))
    made.sign("server", "IP:127.0.0.1")
    made.sign("client", "DNS:client.kvasir")
    return made


def generate(process, tls):
    """Makes a request and waits until it is counted, because the client gets its answer a moment before that."""
    triton.generate(process.grpc, process.ready["model"], "It was a bright morning", max_tokens=8, tls=tls)
    wait_until(lambda: "kvasir_router_requests_total{" in process.metrics_text(), "the request is counted")


# The server uses TLS, so that it has certificates to export.
@pytest.fixture(scope="module")
def server(authority):
    own = authority.folder / "server.pem"
    flags = ["--tls-cert", own, "--tls-key", own, "--tls-client-ca", authority.ca]
    with KvasirProcess("serve", "--metrics-compat", "vllm", *flags) as process:
        process.tls = authority.clients("client")
        generate(process, process.tls)
        yield process


# The same server with two ranks.
@pytest.fixture(scope="module")
def group(authority):
    own = authority.folder / "server.pem"
    with KvasirProcess("serve", "--tp", "2", "--metrics-compat", "vllm", "--tls-cert", own, "--tls-key", own) as process:
        generate(process, authority.clients("client"))
        yield process


FAMILIES = catalogue.load()
RANKS = FAMILIES.exported("rank") - FAMILIES.exported("worker")
# Only mixtures of experts have this metric; test_latent_cache reads it.
EXPERTS = {"kvasir_expert_tokens_total"}


def exported(text):
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def text_of(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return response.read().decode()


def judge(text, names, several_ranks=False):
    """Asserts that the text has the series of exactly these families, with the types and labels of the catalogue."""
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    assert {name: types[name] for name in names} == {name: FAMILIES.families[name]["type"] for name in names}
    labels = {}
    for series, pairs in re.findall(r"^((?:kvasir|process|exposer)_\w+)(?:{(.*)})? ", text, re.MULTILINE):
        keys = set(re.findall(r'(\w+)="', pairs)) - {"le", "quantile"}
        labels.setdefault(FAMILIES.family_of(series), set()).add(frozenset(keys))
    assert labels == {name: {frozenset(FAMILIES.labels(name, several_ranks))} for name in names}


def test_the_server_exports_exactly_the_metrics_of_the_catalogue(server):
    families = exported(server.metrics_text())
    wanted = (FAMILIES.exported("worker", vllm=True) | FAMILIES.exported("router")) - EXPERTS
    assert not wanted & RANKS
    assert families - wanted == set()
    assert wanted - families == set()


def test_metrics_have_the_types_and_labels_that_the_catalogue_lists(server):
    judge(server.metrics_text(), FAMILIES.families.keys() - RANKS - EXPERTS)


def test_a_leader_exports_the_metrics_of_workers_routers_and_ranks(group):
    text = group.metrics_text()
    assert exported(text) == (FAMILIES.exported("worker", vllm=True) | FAMILIES.families.keys()) - EXPERTS
    judge(text, FAMILIES.families.keys() - EXPERTS, several_ranks=True)


def test_a_rank_exports_the_metrics_that_the_catalogue_lists_for_ranks(group):
    leader, other = group.ready["ranks"]
    assert (leader["rank"], leader["metrics"], leader["pid"]) == (0, group.ready["metrics"], group.pid)
    text = text_of(other["metrics"])
    assert exported(text) == FAMILIES.exported("rank")
    # A rank does not listen, and it calls its leader over loopback: it has no TLS series with a role.
    judge(text, {name for name in FAMILIES.exported("rank") if not name.startswith("kvasir_tls_") or "role" not in
                 FAMILIES.labels(name)}, several_ranks=True)


def test_ranks_export_metrics_with_their_number_and_their_work(group):
    def value(text, name, rank):
        (found,) = re.findall(rf'^{name}{{[^}}]*rank="{rank}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return float(found)

    texts = [text_of(rank["metrics"]) for rank in group.ready["ranks"]]
    assert [rank["rank"] for rank in group.ready["ranks"]] == [0, 1]
    for rank, text in enumerate(texts):
        (labels,) = re.findall(r"^kvasir_rank_info{(.*)} 1$", text, re.MULTILINE)
        assert set(labels.split(",")) == {f'rank="{rank}"', 'tp_size="2"', 'collective="gloo"', 'device="cpu"'}
        assert value(text, "kvasir_rank_group_size", rank) == 2
        for name in RANKS:
            if name != "kvasir_rank_info":
                assert value(text, name, rank) > 0, name
    # All ranks make the same calls and hold the same pages.
    for name in ("kvasir_collective_calls_total", "kvasir_rank_kv_cache_pool_bytes"):
        assert value(texts[0], name, 0) == value(texts[1], name, 1)
    assert value(texts[0], "kvasir_rank_weight_bytes", 0) == group.metric("kvasir_weight_bytes")


def test_gauges_that_autoscalers_read_have_exactly_one_series(server):
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


def test_a_request_increases_the_counters(server):
    before = server.metrics()
    triton.generate(server.grpc, server.ready["model"], "She said", tls=server.tls, max_tokens=5, ignore_eos=True)
    wait_until(
        lambda: server.metric("kvasir_generation_tokens_total")
        == before[("kvasir_generation_tokens_total", frozenset())] + 5,
        "5 more generated tokens",
    )
    length = ("kvasir_request_success_total", frozenset({("finished_reason", "length")}))
    assert server.metrics()[length] == before[length] + 1


def test_a_real_prometheus_scrapes_router_and_worker():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        socket = folder / "worker.sock"
        with KvasirProcess(
            "worker", "--listen", f"unix:{socket}", *OPERATOR_PORTS,
            ports=False,
        ) as worker, KvasirProcess("router", "--workers", f"unix:{socket}") as router:
            with Prometheus([worker.ready["metrics"], router.ready["metrics"]]) as prometheus:
                triton.generate(
                    router.grpc, router.ready["model"], "A ship", max_tokens=6, ignore_eos=True
                )

                wait_until(lambda: prometheus.ups() == 2, "both targets up in Prometheus", seconds=60)
                # Each of the two exports its families of the catalogue.
                assert exported(worker.metrics_text()) == FAMILIES.exported("worker") - EXPERTS
                assert exported(router.metrics_text()) == FAMILIES.exported("router")
                wait_until(
                    lambda: [
                        row["value"][1] for row in prometheus.query("kvasir_generation_tokens_total")
                    ]
                    == ["6"],
                    "the worker's tokens in Prometheus",
                )
                wait_until(
                    lambda: any(
                        float(row["value"][1]) == 1
                        for row in prometheus.query("kvasir_router_requests_total")
                    ),
                    "the router's request in Prometheus",
                )
