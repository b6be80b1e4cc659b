"""Every `kvasir bench` prints one JSON object of the same form. No time is
asserted: --quick figures mean nothing."""

import json
import numbers
import os
import signal
import subprocess

import pytest

from kvasir_process import BINARY, KvasirProcess, run, wait_until

MACHINE = {
    "cpu": str,
    "threads": int,
    "simd": str,
    "llc_bytes": int,
    "read_bandwidth_bytes_per_second": numbers.Real,
    "f32_flops": numbers.Real,
}
FIGURES = {
    "decode": ["read_bandwidth_share", "batch8_speedup", "bytes_read_per_step"],
    "prefill": ["prefill_tokens_per_second"],
    "rope": ["speedup_kept_50", "lookup_cost_kept_50"],
    "scheduler": ["step_us", "metadata_share"],
    "serve": ["router_added_ms_p50", "router_over_worker", "closed_ttft_ms_p50", "open_itl_ms_p99"],
    "load": ["load_over_read", "rss_over_weights_and_pool"],
}


def bench(command, *flags):
    done = run("bench", command, "--quick", "--json", *flags)
    report = json.loads(done.stdout)  # exactly one object, nothing beside it
    for key, kind in MACHINE.items():
        assert isinstance(report["machine"][key], kind), key
    assert report["machine"]["read_bandwidth_bytes_per_second"] > 0
    for name, value in report["figures"].items():
        assert isinstance(value, numbers.Real), name
    for part in ("undecided", "spread", "targets"):
        assert set(report[part]) <= set(report["figures"]), part
    # --quick measures two pairs: too few for any ratio.
    assert set(report["spread"]) <= set(report["undecided"])
    assert not report["spread"] or any("fewer than 7" in note for note in report["notes"])
    return report


@pytest.mark.parametrize("command", FIGURES)
def test_prints_one_object_of_figures_by_name(command):
    report = bench(command)
    for name in FIGURES[command]:
        assert report["figures"][name] > 0 or name == "router_added_ms_p50", name
    if command == "serve":
        assert "router_added_ms_p50" in report["spread"]


def test_decode_reads_each_weight_once_per_step_and_says_when_caches_hold_them():
    report = bench("decode")
    # The tiny model's step is far below the last-level cache.
    assert "read_bandwidth_share" in report["undecided"]
    read, weights = (report["figures"][name] for name in ("bytes_read_per_step", "weight_bytes"))
    assert weights * 0.9 < read < weights * 1.2  # and the cache of one sequence
    assert [row["batch"] for row in report["rows"]] == [1, 8]
    assert report["rows"][0]["bytes_per_step"] == read
    assert read < report["rows"][1]["bytes_per_step"] < 2 * read  # the caches of eight
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])


def test_quick_keeps_what_was_asked_for():
    report = bench("decode", "--context", "200", "--batch", "2")
    assert report["figures"]["context_tokens"] == 200


def test_prefill_compares_each_shape_with_onednn_where_the_build_has_it():
    report = bench("prefill")
    if "gemm_share" in report["figures"]:
        assert [row["shape"] for row in report["rows"]] == ["qkv", "o", "gate_up", "down"]
        assert all(row["onednn_gflops"] > 0 for row in report["rows"])
    else:
        assert any("oneDNN" in note for note in report["notes"])


def test_serve_loads_a_running_server():
    with KvasirProcess("serve") as server:
        report = bench("serve", "--endpoint", server.grpc, "--prompt-tokens", "fixed:8")
    closed, opened = report["rows"]
    assert (closed["mode"], opened["mode"]) == ("closed", "open")
    for row in report["rows"]:
        assert (row["requests"], row["failed"]) == (4, 0)
        assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p99"]
    assert "router_added_ms_p50" not in report["figures"]  # nobody named its worker


def test_a_server_that_is_not_there_has_its_own_exit_code():
    done = run("bench", "serve", "--quick", "--endpoint", "127.0.0.1:1", check=False)
    assert done.returncode == 3 and not done.stdout, done.stderr


def test_a_distribution_of_lengths_that_is_none_is_wrong_usage():
    done = run("bench", "serve", "--quick", "--prompt-tokens", "some", check=False)
    assert done.returncode == 2 and "uniform:LOW:HIGH" in done.stderr


def test_lengths_over_the_models_are_refused_not_cut():
    done = run("bench", "serve", "--quick", "--prompt-tokens", "fixed:99999999", check=False)
    assert done.returncode == 1 and not done.stdout
    assert "--prompt-tokens of 99999999" in done.stderr and "limit of 1024" in done.stderr


def test_a_load_of_which_every_request_fails_is_a_failure():
    with KvasirProcess("serve") as server:
        done = run("bench", "serve", "--quick", "--endpoint", server.grpc, "--model-name", "nosuch",
                   check=False)
    assert done.returncode == 1 and not done.stdout
    assert "all 4 requests failed" in done.stderr and "nosuch" in done.stderr


def test_a_checkpoint_that_is_not_there_is_no_missing_server():
    done = run("bench", "load", "--quick", "--model", "/no/such/folder", check=False)
    assert done.returncode == 1 and "--model /no/such/folder" in done.stderr


def test_an_interrupted_load_leaves_no_checkpoint_behind(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(
        [str(BINARY), "bench", "load", "--quick", "--pairs", "10000"], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.rglob("*.safetensors")), "a temporary checkpoint")
    bench.send_signal(signal.SIGINT)
    assert bench.wait(timeout=60) == 1
    assert list(tmp_path.iterdir()) == []
