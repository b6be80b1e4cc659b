"""Every `kvasir bench` command prints one JSON object of the same form. No time is asserted, because figures of
--quick mean nothing."""

import concurrent.futures
import contextlib
import json
import numbers
import os
import shutil
import signal
import subprocess

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvasir_process import BINARY, TINY, KvasirProcess, run, wait_until

MACHINE = {
    "cpu": str,
    "threads": int,
    "simd": str,
    "llc_bytes": int,
    "read_bandwidth_bytes_per_second": numbers.Real,
    "f32_flops": numbers.Real,
}
FIGURES = {
    "capacity": ["pool_bytes", "sequence_tokens"],
    "attention": ["rows_with_target"],
    "decode": ["read_bandwidth_share", "batch8_speedup", "bytes_read_per_step"],
    "prefill": ["prefill_tokens_per_second"],
    "router": ["chat_hit_rate_of_best", "chat_imbalance"],
    "scheduler": ["step_us", "metadata_share"],
    "serve": ["router_added_ms_p50", "router_over_worker", "closed_ttft_ms_p50", "open_itl_ms_p99"],
    "proxy": ["kserve_rate_over_null_proxy", "vllm_engine_rate_over_null_proxy",
              "kserve_p99_over_null_proxy", "null_proxy_cpu_us_per_request",
              *(f"{facade}_cpu_us_per_{what}" for facade in ("kserve", "vllm_engine", "vllm_inference")
                for what in ("request", "token"))],
    "load": ["load_over_read", "rss_over_weights_and_pool"],
}


def bench(command, *flags):
    done = run("bench", command, "--quick", "--json", *flags)
    report = json.loads(done.stdout)  # exactly one object and nothing else
    for key, kind in MACHINE.items():
        assert isinstance(report["machine"][key], kind), key
    assert report["machine"]["read_bandwidth_bytes_per_second"] > 0
    for name, value in report["figures"].items():
        assert isinstance(value, numbers.Real), name
    for part in ("undecided", "spread", "targets"):
        assert set(report[part]) <= set(report["figures"]), part
    # --quick measures two pairs, which is too few for any ratio.
    assert set(report["spread"]) <= set(report["undecided"])
    assert not report["spread"] or any("fewer than 7" in note for note in report["notes"])
    return report


@pytest.mark.parametrize("command", FIGURES)
def test_each_benchmark_prints_one_json_object_with_named_figures(command):
    report = bench(command)
    # These may be 0: the few tokens of a quick request may all come in one message, and what the router adds is a
    # difference of two noisy times.
    may_be_zero = {"router_added_ms_p50", "open_itl_ms_p99"}
    for name in FIGURES[command]:
        assert name.endswith("_cpu_us_per_token") or name in may_be_zero or report["figures"][name] > 0, name
    if command == "serve":
        assert "router_added_ms_p50" in report["spread"]


def test_the_server_program_contains_neither_the_benchmarks_nor_the_compression():
    names = subprocess.run(["nm", "-C", BINARY], capture_output=True, text=True, check=True).stdout
    assert "kvasir::worker::" in names and "kvasir::router::" in names
    assert "kvasir::bench::" not in names and "kvasir::compress::" not in names
    libraries = subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
    assert "torch" not in libraries and "dnnl" not in libraries


def test_a_server_without_benchmarks_names_the_program_that_has_them(tmp_path):
    copy = tmp_path / "copy" / "kvasir"
    copy.parent.mkdir()
    shutil.copy(BINARY, copy)
    done = subprocess.run([copy, "bench", "decode", "--quick"], env={"PATH": str(copy.parent)},
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert "kvasir-bench: No such file or directory" in done.stderr and "scripts/build kvasir-bench" in done.stderr


def test_bench_router_simulates_each_policy_with_a_recorded_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * i, "input_length": 1024, "output_length": 4, "hash_ids": [1, i % 3]} for i in range(30)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = bench("router", "--file", str(trace), "--page-tokens", "512", "--replicas", "3")["rows"]
    by = {row["policy"]: row for row in rows}
    assert set(by) == {"prefix_affinity", "least_loaded", "two_choices", "round_robin"}
    # Three of the prompts are new; two of these three share their first page. In the other prompts, all but one token is a hit.
    assert by["prefix_affinity"]["of_best"] == 1
    assert all(0 < row["hit_rate"] <= by["prefix_affinity"]["hit_rate"] for row in rows)
    done = run("bench", "router", "--quick", "--file", str(trace), check=False)
    assert done.returncode == 1 and "line 1: 1024 tokens have 16 full pages of 64 (--page-tokens)" in done.stderr


def test_bench_decode_reads_each_weight_once_per_step():
    report = bench("decode")
    # The tiny model's weights fit into the last-level cache, so their bandwidth is not that of memory.
    assert "read_bandwidth_share" in report["undecided"]
    read, weights = (report["figures"][name] for name in ("bytes_read_per_step", "weight_bytes"))
    assert weights * 0.9 < read < weights * 1.2  # the rest is the KV cache of one sequence
    assert [row["batch"] for row in report["rows"]] == [1, 8]
    assert report["rows"][0]["bytes_per_step"] == read
    assert read < report["rows"][1]["bytes_per_step"] < 2 * read  # the KV caches of eight sequences
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])


ATTENTION = {
    "method": str, "shape": str, "context": int, "batch": int, "us_per_token": numbers.Real,
    "bytes_per_token": numbers.Real, "flops_per_token": numbers.Real,
    "bandwidth_share": numbers.Real, "floor_ratio": numbers.Real,
    "speedup_over_dense": numbers.Real, "bytes_ratio": numbers.Real,
    "footprint_bytes": numbers.Real, "arenas": int, "undecided": bool,
}


def test_bench_attention_has_a_row_for_each_method_and_context():
    rows = bench("attention")["rows"]
    for row in rows:
        for name, kind in ATTENTION.items():
            assert isinstance(row[name], kind), (row["method"], name)
        assert row["us_per_token"] > 0 and row["floor_ratio"] > 0
        assert row["undecided"] and not row.get("met")  # two pairs
        assert row["arenas"] >= 2  # so that no launch finds data of the previous one in a CPU cache
    methods = {row["method"] for row in rows}
    assert len(rows) == 2 * len(methods)  # one row for each context, 96 and 256
    assert {"dense-bf16", "dense-8bit", "rap-50", "commuting-50", "palu-50-g1", "palu-50-g2",
            "palu-50-g4", "palu-50-g1-4bit", "palu-50-g4-4bit", "palu-50-g4-3bit", "palu-50-g4-2bit",
            "svdq-84442200"} <= methods


def test_bench_attention_counts_the_bytes_of_the_cache_slots_that_it_reads():
    by = {(row["method"], row["context"]): row for row in bench("attention")["rows"]}
    # kvasir-tiny has 8 KV heads of 32 dimensions, keys and values, in bf16.
    assert by["dense-bf16", 96]["bytes_per_token"] == 96 * 2 * 8 * 32 * 2
    for context in (96, 256):
        for half in ("rap-50", "commuting-50", "palu-50-g1", "palu-50-g4"):
            assert by[half, context]["bytes_ratio"] == 2.0, half
        dense = by["dense-bf16", context]
        assert dense["bytes_ratio"] == 1.0 and dense["speedup_over_dense"] == 1.0
        # 16 query heads take two multiply-adds for each dimension, for the score and for the sum.
        assert dense["flops_per_token"] == context * 16 * 32 * 2 * 2
        # This counts rebuilding every key of a group of four heads from half of its numbers.
        assert (by["palu-50-g4", context]["flops_per_token"]
                > dense["flops_per_token"] + context * 8 * 2 * 32 * 64)
    # A group has 64 numbers of 4 bits, and a scale and a minimum of 16 bits.
    assert by["palu-50-g4-4bit", 96]["bytes_per_token"] == 96 * 2 * 2 * (32 + 4)


def test_bench_attention_measures_the_settings_of_its_flags():
    report = bench("attention", "--method", "palu-50-g2", "--context", "70", "--batch", "3",
                   "--page-tokens", "16", "--threads", "1")
    (row,) = report["rows"]
    assert (row["method"], row["context"], row["batch"]) == ("palu-50-g2", 70, 3)
    assert report["machine"]["threads"] == 1


def test_benchmarks_can_run_without_avx_512():
    report = bench("attention", "--avx2", "--method", "dense-bf16", "--context", "70")
    assert not report["machine"]["simd"].startswith("AVX3")


def test_bench_attention_compares_the_time_of_whole_layers_for_prompt_chunks():
    rows = bench("attention", "--prefill", "--context", "100", "--chunk", "30",
                 "--method", "dense-bf16,rap-50")["rows"]
    assert [(row["method"], row["chunk"]) for row in rows] == [("dense-bf16", 30), ("rap-50", 30)]
    assert rows[0]["over_dense"] == 1.0
    assert "target" not in rows[0] and "met" not in rows[0]  # the dense cache would be compared with itself
    assert rows[1]["target"] == 1.1 and all(row["us_per_token"] > 0 for row in rows)


def test_the_error_for_an_unknown_method_lists_the_known_methods():
    done = run("bench", "attention", "--quick", "--method", "magic", check=False)
    assert done.returncode == 1 and "magic" in done.stderr and "palu-50-g4-3bit" in done.stderr


PARTS = {"rest", "projections", "rotation", "append", "lifts", "attention", "eviction", "output", "mlp",
         "norms", "sum", "head", "sampling"}


@pytest.mark.parametrize("flags, expected", [
    (["--shape", "qwen2.5-0.5b"], "--bias-cost measures one plan: want one --plan, have 0"),
    (["--shape", "kvasir-tiny", "--plan", "rotated-4bit"], "--shape kvasir-tiny has no biases"),
])
def test_the_cost_of_biases_is_measured_only_with_a_plan_and_a_model_with_biases(flags, expected):
    done = run("bench", "decode", "--quick", "--bias-cost", "--random-weights", *flags, check=False)
    assert done.returncode != 0 and expected in done.stderr


def test_the_breakdown_of_a_step_adds_up_to_the_step():
    row = bench("decode", "--breakdown")["rows"][1]
    assert set(row["breakdown"]) == PARTS
    assert abs(sum(row["breakdown"].values()) - 1) < 1e-9
    assert all(row["breakdown"][part] > 0 for part in PARTS - {"lifts", "sum", "eviction"})


def test_bench_decode_with_eviction_reads_only_the_slots_that_stay():
    def row(*flags):
        return bench("decode", "--breakdown", "--context", "256", "--steps", "16", *flags)["rows"][1]

    whole = row()
    evicting = row("--eviction", "streaming", "--eviction-budget", "32", "--eviction-every", "8")
    assert whole["breakdown"]["eviction"] == 0 < evicting["breakdown"]["eviction"]
    weights = bench("decode")["figures"]["weight_bytes"]
    # 32 to 40 slots stay, of at least 256. Each has a few bytes of metadata.
    assert 0.1 < (evicting["bytes_per_step"] - weights) / (whole["bytes_per_step"] - weights) < 0.25


def test_bench_decode_compares_plans_with_the_uncompressed_cache():
    report = bench("decode", "--plan", "palu-50-g4-4bit,rap-50", "--breakdown", "--batch", "3")
    dense, palu, rap = report["rows"]
    assert [row["plan"] for row in report["rows"]] == ["dense-bf16", "palu-50-g4-4bit", "rap-50"]
    # There are three sequences of 64 tokens, which grow by a few until the last sample.
    layers_of_tiny = 6
    slot_bytes = 2 * 8 * 32 * 2 * layers_of_tiny
    assert 64 < dense["cache_bytes_per_step"] / 3 / slot_bytes < 64 + 16
    assert abs(dense["cache_bytes_per_step"] / rap["cache_bytes_per_step"] - 2) < 1e-6
    # A group of four heads stores 64 numbers of 4 bits and two of 16 in place of 128.
    assert abs(dense["cache_bytes_per_step"] / palu["cache_bytes_per_step"] - 256 / 36) < 1e-6
    assert dense["speedup_over_dense"] == 1.0 and dense["bytes_ratio"] == 1.0
    for row in report["rows"]:
        assert row["tokens_per_second"] > 0 and row["undecided"]
        assert row["bytes_per_step"] == row["cache_bytes_per_step"] + row["weight_bytes_per_step"]
        assert set(row["breakdown"]) == PARTS
    assert palu["breakdown"]["attention"] > 0
    assert any("random latents" in note for note in report["notes"])


def rows_of_ranks(tp, *flags):
    """The rows of one rank and those of each of `tp` ranks, by batch."""
    report = bench("decode", "--tp", tp, "--threads", 2, *flags)
    assert set(report["spread"]) == {f"tp{tp}_batch1_speedup", f"tp{tp}_batch8_speedup"}
    rows = {batch: [row for row in report["rows"] if row["batch"] == batch] for batch in (1, 8)}
    for of_batch in rows.values():
        assert [(row["tp"], row["rank"]) for row in of_batch] == [(1, 0), *((tp, r) for r in range(tp))]
        assert len({row["step_ms"] for row in of_batch[1:]}) == 1  # the step time is the group's
        for row in of_batch[1:]:
            assert 0 < row["wait_share"] < 1
    return report, rows


@pytest.mark.parametrize("tp", [2, 4])
def test_bench_decode_compares_several_ranks_with_one_rank(tp):
    report, rows = rows_of_ranks(tp)
    layers, hidden, vocab = 6, 256, 4096  # kvasir-tiny
    sent = {}
    for batch, (whole, *ranks) in rows.items():
        assert whole["threads"] == 2 and all(row["threads"] == 2 // tp or 1 for row in ranks)
        assert "collectives_per_step" not in whole
        # One collective is for the embedding, two for each layer, one for rows that are not finite and one for the
        # logits.
        assert {row["collectives_per_step"] for row in ranks} == {1 + 2 * layers + 1 + 1}
        (sent[batch],) = {row["sent_bytes_per_step"] for row in ranks}
        # A rank holds 1 / tp of each page and of all weights except norms.
        assert {row["cache_bytes"] * tp for row in ranks} == {whole["cache_bytes"]}
        norms = (2 * layers + 1) * hidden * 4
        for row in ranks:
            assert row["weight_bytes"] - norms == (whole["weight_bytes"] - norms) / tp
    # Each rank sends its float32 numbers to all others: for each token one row per sum, one number, and the rank's part
    # of the logits.
    token = 4 * ((1 + 2 * layers) * hidden + 1 + vocab // tp)
    assert sent[8] - sent[1] == 7 * token * (tp - 1)
    # The rest is Gloo's overhead for each message.
    around = (sent[1] - token * (tp - 1)) / (15 * (tp - 1))
    assert around == int(around) and 0 < around < 256
    assert report["figures"]["rank_cache_share"] == 1 / tp
    assert any("4 in all" in note for note in report["notes"]) == (tp == 4)


def test_benchmarked_ranks_that_evict_and_prefill_have_equal_collectives_per_step():
    report, rows = rows_of_ranks(2, "--fill", "prefill", "--breakdown", "--steps", 16, "--eviction", "h2o",
                                 "--eviction-budget", 32, "--eviction-recent", 8, "--eviction-every", 8)
    for of_batch in rows.values():
        for row in of_batch:
            assert row["breakdown"]["eviction"] > 0
            assert set(row["breakdown"]) == PARTS
        assert len({row["collectives_per_step"] for row in of_batch[1:]}) == 1


@pytest.mark.parametrize("flags, code, said", [
    (["--tp", 3], 1, "8 KV heads, 16 query heads and 640 MLP features cannot be divided among 3 tensor-parallel "
     "ranks in equal parts; possible numbers of ranks: 1, 2, 4, 8 or 16"),
    (["--tp", 2, "--plan", "rotated-4bit"], 1, "cannot be used with --plan"),
    (["--tp", 0], 2, "--tp"),
    (["--tp", 2, "--device", "cuda"], 2, "--device"),
])
def test_an_impossible_number_of_ranks_is_refused(flags, code, said):
    done = run("bench", "decode", "--quick", *flags, check=False)
    assert done.returncode == code and said in done.stderr
    assert "loading weights" not in done.stderr


def test_random_latents_of_one_layer_do_not_overwrite_the_exact_rows_of_another(tmp_path):
    """Layers with few bits store their random latents in the arena of a layer with many bits."""
    def side(stored, bits):
        codec = {"bits": {"schedule": [bits]}, "per_token": {}, "param_dtype": "F16", "none": {}}
        return {"exact_window": 120, "parts": [{"full": {}, "stored": stored, "codec": codec}]}

    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema_version": 1, "layers": [
        {"exact_sinks": 4, "key": side("POST_ROPE", bits), "value": side("NO_ROPE", bits)}
        for bits in [2, 1, 1, 1, 1, 8]]}))
    report = bench("decode", "--plan", str(plan), "--batch", "2", "--context", "300")
    assert report["rows"][1]["tokens_per_second"] > 0


@pytest.mark.parametrize("plans", [[], ["--plan", "rap-50,palu-50-g4"]])
def test_bench_decode_with_paced_requires_exactly_one_plan(plans):
    done = run("bench", "decode", "--quick", "--paced", *plans, check=False)
    assert done.returncode != 0
    assert f"want one --plan, have {2 if plans else 0}" in done.stderr


def test_bench_decode_with_paced_measures_once_for_each_line_of_input():
    done = subprocess.run(
        [str(BINARY), "bench", "decode", "--quick", "--json", "--paced", "--plan", "rap-50",
         "--steps", "1", "--batch", "1"],
        input="go\ngo\n", capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert json.loads(lines[0]) == {"ready": True}
    first, second = (json.loads(line) for line in lines[1:3])
    assert second["seconds_per_step"] > 0
    assert second["weight_bytes_per_step"] == first["weight_bytes_per_step"] > 0
    assert second["cache_bytes_per_step"] > first["cache_bytes_per_step"]  # the context is one token longer


def test_bench_decode_refuses_to_compare_batch_1_with_itself():
    done = run("bench", "decode", "--quick", "--batch", "1", check=False)
    assert done.returncode != 0 and "--batch 1 needs --plan or --baseline" in done.stderr


def test_bench_decode_with_plans_refuses_real_weights_without_a_baseline():
    done = run("bench", "decode", "--quick", "--plan", "rap-50", "--model", "/no/such", check=False)
    assert done.returncode == 1 and "--baseline DIR" in done.stderr


def test_the_flag_quick_does_not_override_explicit_settings():
    report = bench("decode", "--context", "200", "--batch", "2")
    assert report["figures"]["context_tokens"] == 200


def test_bench_prefill_compares_each_shape_with_onednn_if_the_build_has_it():
    report = bench("prefill")
    if "gemm_share" in report["figures"]:
        assert [row["shape"] for row in report["rows"]] == ["qkv", "o", "gate_up", "down"]
        assert all(row["onednn_gflops"] > 0 for row in report["rows"])
    else:
        assert any("oneDNN" in note for note in report["notes"])


def test_bench_serve_sends_load_to_a_running_server():
    with KvasirProcess("serve") as server:
        report = bench("serve", "--endpoint", server.grpc, "--prompt-tokens", "fixed:8")
    closed, opened = report["rows"]
    assert (closed["mode"], opened["mode"]) == ("closed", "open")
    for row in report["rows"]:
        assert (row["requests"], row["failed"]) == (4, 0)
        assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p99"]
    assert "router_added_ms_p50" not in report["figures"]  # no flag named the worker


def test_the_default_lengths_of_bench_serve_fit_a_model_of_short_context():
    with KvasirProcess("serve") as server:
        report = bench("serve", "--endpoint", server.grpc, "--max-model-len", "16",
                       "--mode", "closed")
        assert report["rows"][0]["failed"] == 0
        assert report["rows"][0]["prompt_tokens"] == 4 * 13
        done = run("bench", "serve", "--quick", "--endpoint", server.grpc, "--max-model-len",
                   "16", "--prompt-tokens", "fixed:16", check=False)
    assert done.returncode == 1 and "over the limit of 16" in done.stderr


def test_bench_serve_asks_the_server_for_its_max_model_len():
    with KvasirProcess("serve", "--max-model-len", "16") as server:
        report = bench("serve", "--endpoint", server.grpc, "--mode", "closed")
    row = report["rows"][0]
    assert row["failed"] == 0 and row["prompt_tokens"] == 4 * 13


@contextlib.contextmanager
def server_of_others(config):
    """A server of another kind. It has a model `m`, and a ModelConfig if `config` is set, and serves no requests."""

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
        def RepositoryIndex(self, request, context):
            index = service_pb2.RepositoryIndexResponse()
            index.models.add(name="m", state="READY")
            return index

        def ModelConfig(self, request, context):
            if config is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")
            response = service_pb2.ModelConfigResponse()
            response.config.parameters["max_model_len"].string_value = config
            return response

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def test_bench_serve_uses_the_length_of_its_flag_if_the_server_reports_none():
    with server_of_others(None) as endpoint:
        done = run("bench", "serve", "--quick", "--endpoint", endpoint, check=False)
    # The command got as far as sending its requests.
    assert done.returncode == 1 and "all 4 requests failed" in done.stderr, done.stderr


@pytest.mark.parametrize("length", ["soon", "1", "-5", ""])
def test_the_error_for_an_invalid_max_model_len_of_the_server_names_it(length):
    with server_of_others(length) as endpoint:
        done = run("bench", "serve", "--quick", "--endpoint", endpoint, check=False)
    assert done.returncode == 1 and not done.stdout
    assert f'max_model_len "{length}" for model m: want an integer of at least 2' in done.stderr


def test_a_missing_server_has_its_own_exit_code():
    done = run("bench", "serve", "--quick", "--endpoint", "127.0.0.1:1", check=False)
    assert done.returncode == 3 and not done.stdout, done.stderr


def test_an_unknown_distribution_of_lengths_is_wrong_usage():
    done = run("bench", "serve", "--quick", "--prompt-tokens", "some", check=False)
    assert done.returncode == 2 and "uniform:LOW:HIGH" in done.stderr


def test_lengths_over_the_models_limit_are_refused():
    done = run("bench", "serve", "--quick", "--prompt-tokens", "fixed:99999999", check=False)
    assert done.returncode == 1 and not done.stdout
    assert "--prompt-tokens of up to 99999999" in done.stderr and "limit of 1024" in done.stderr


def test_bench_serve_fails_if_every_request_fails():
    with KvasirProcess("serve") as server:
        to = ("bench", "serve", "--quick", "--endpoint", server.grpc)
        done = run(*to, "--max-model-len", "9999", "--prompt-tokens", "fixed:5000", check=False)
        assert done.returncode == 1 and not done.stdout
        assert "all 4 requests failed" in done.stderr and "1024" in done.stderr
        # No request is sent to a model that is missing.
        done = run(*to, "--model-name", "nosuch", check=False)
    assert done.returncode == 1 and not done.stdout
    assert "requests failed" not in done.stderr and "nosuch" in done.stderr


def test_a_missing_checkpoint_is_not_reported_as_a_missing_server():
    done = run("bench", "load", "--quick", "--model", "/no/such/folder", check=False)
    assert done.returncode == 1 and "--model /no/such/folder" in done.stderr


def test_an_interrupted_bench_serve_leaves_no_checkpoint_behind(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(
        [str(BINARY), "bench", "load", "--quick", "--pairs", "10000"], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.rglob("*.safetensors")), "a temporary checkpoint")
    bench.send_signal(signal.SIGINT)
    assert bench.wait(timeout=60) == 1
    assert list(tmp_path.iterdir()) == []


def test_bench_capacity_has_a_row_for_each_shape_with_each_plan():
    report = bench("capacity", "--shape", "kvasir-tiny,tinyllama-1.1b",
                   "--plan", "dense-8bit,rap-50")
    assert [(row["model"], row["plan"]) for row in report["rows"]] == [
        (model, plan) for model in ("kvasir-tiny", "tinyllama-1.1b")
        for plan in ("dense-8bit", "rap-50")]
    for row in report["rows"]:
        assert row["reached"] == row["predicted"] > 0
        assert row["bytes_per_sequence"] < row["dense_bytes_per_sequence"]


@pytest.mark.parametrize("model", [[], ["--model", TINY]])
def test_bench_capacity_refuses_a_plan_without_a_shape(model):
    done = run("bench", "capacity", "--quick", "--plan", "rap-50", *model, check=False)
    assert done.returncode != 0 and not done.stdout
    assert "--plan requires --shape" in done.stderr


def test_bench_refuses_a_tls_certificate_without_a_certificate_authority(tmp_path):
    done = run("bench", "proxy", "--quick", "--tls-cert", tmp_path / "own.pem", check=False)
    assert done.returncode != 0 and "--tls-cert and --tls-ca must be given together" in done.stderr
