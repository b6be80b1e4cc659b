"""Triton's perf_analyzer, unmodified, against `kvasir serve`. It fails if the counts of the server's statistics
disagree."""

import csv
import json
import subprocess

import pytest

from kvasir_process import ROOT, KvasirProcess, wait_until

pytestmark = pytest.mark.timeout(240)
REQUESTS = 24
CONCURRENCIES = [1, 3]
TOKENS = 8


@pytest.fixture(scope="session")
def perf_analyzer():
    done = subprocess.run([ROOT / "scripts/setup_perf_analyzer"], capture_output=True, text=True, timeout=180)
    if done.returncode != 0:
        pytest.skip(f"perf_analyzer is not run: it cannot be installed here: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def server():
    with KvasirProcess("serve", "--max-model-len", "512") as process:
        yield process


def load(tmp_path, stream):
    """Writes a file for --input-data: one request, which is sent again and again."""
    sampling = json.dumps({"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True})
    one = {
        name: {"content": [value], "shape": [1]}
        for name, value in {"text_input": "Once upon a time", "stream": stream, "sampling_parameters": sampling}.items()
    }
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"data": [one]}))
    return path


def test_perf_analyzer_completes_a_streamed_run_and_the_server_counts_its_requests(perf_analyzer, server, tmp_path):
    table = tmp_path / "table.csv"
    done = subprocess.run(
        [perf_analyzer, "-m", server.ready["model"], "--service-kind", "triton", "-i", "grpc", "-u", server.grpc,
         "--streaming", "--async", "--input-data", load(tmp_path, True),
         # A window has REQUESTS requests, and the first three windows count as stable.
         "--measurement-mode", "count_windows", "--measurement-request-count", str(REQUESTS), "-s", "999",
         "--concurrency-range", f"{CONCURRENCIES[0]}:{CONCURRENCIES[-1]}:{CONCURRENCIES[-1] - CONCURRENCIES[0]}",
         "-f", table, "--verbose-csv"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for concurrency in CONCURRENCIES:
        assert f"\nConcurrency: {concurrency}, throughput: " in output, output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    # Rows are sorted by throughput.
    assert sorted(int(row["Concurrency"]) for row in rows) == CONCURRENCIES
    for row in rows:
        assert all(value not in (None, "") for value in row.values()), row
        assert float(row["Inferences/Second"]) > 0
        # perf_analyzer takes this value from the server's statistics.
        assert float(row["Server Compute Infer"]) > 0, row
    print(output)
    wanted = len(CONCURRENCIES) * REQUESTS

    def ended():
        return sum(value for (name, labels), value in server.metrics().items()
                   if name == "kvasir_router_requests_total" and ("finish_reason", "length") in labels)

    wait_until(lambda: ended() >= wanted, "its requests are counted")
    assert server.metric("kvasir_router_output_tokens_total") == TOKENS * ended()
