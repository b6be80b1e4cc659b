"""Tests the GPU benchmark on the emulated device, the stage that tests a server, and the page with both results."""

import json
import os
import shutil
import subprocess
import sys
import time
import types
import warnings

import pytest

from kvasir_process import BINARY, ROOT
from test_gpu_check import driver  # noqa: F401

sys.path.insert(0, str(ROOT / "bench/gpu"))

import gpu_bench  # noqa: E402
import gpu_page  # noqa: E402

BUILD = BINARY.parent
BENCH, MODULE = BUILD / "bench/gpu/bench_gpu", BUILD / "kvasir-emulated.so"
FAKE_NCCL = os.environ.get("KVASIR_FAKE_NCCL_LIBRARY")
needs_bench = pytest.mark.skipif(not (BENCH.exists() and MODULE.exists()), reason="bench_gpu is not built")


@pytest.fixture
def programs(tmp_path):
    """A bundle with the programs of the stages `serve` and `bench`."""
    folder = tmp_path / "bundle"
    (folder / "bin").mkdir(parents=True)
    (folder / "models").symlink_to(ROOT / "models")
    for source in BENCH, MODULE, BINARY:
        (folder / "bin" / source.name).symlink_to(source)
    for script in "scripts/gpu_serve.py", "bench/gpu/gpu_bench.py":
        shutil.copy(ROOT / script, folder / "bin")
    for script in "gpu_check", "gpu_check.py":
        shutil.copy(ROOT / "scripts" / script, folder)
    (folder / "manifest.json").write_text(json.dumps(
        {"commit": "abc", "glibc": "2.17", "stages": {"serve": ["kvasir", "gpu_serve.py"],
                                                      "bench": ["bench_gpu", "gpu_bench.py"]}}))
    return folder


def check(programs, driver, stage):  # noqa: F811
    done = subprocess.run(
        [programs / "gpu_check", "--stage", stage, "--quick", "--device", "emulated", "--driver", driver],
        cwd=programs, env=os.environ, capture_output=True, text=True)
    report = json.loads((programs / f"gpu-{stage}.json").read_text())
    assert done.returncode == 0 and report["passed"] and report["finished"] and report["quick"], done.stdout + done.stderr
    program, = report["programs"]
    return done.stdout, program


@needs_bench
@pytest.mark.skipif(FAKE_NCCL is None, reason="this build has no fake NCCL library")
def test_the_gpu_benchmark_measures_every_row_on_the_emulated_gpu(programs, driver, monkeypatch):  # noqa: F811
    monkeypatch.setenv("KVASIR_NCCL_LIBRARY", FAKE_NCCL)
    said, program = check(programs, driver, "bench")
    figures = program["figures"]
    assert [row["plan"] for row in figures["attention"]] == gpu_bench.PLANS
    for row in figures["attention"]:
        assert row["us"] > 0 and row["bytes"] > 0 and row["best_baseline"] == "dense"
        assert row["share_undecided"] is True if "share_target" in row else True
    by = {row["plan"]: (row["attended_by"], row["why"]) for row in figures["attention"]}
    assert by["dense-bf16"] == by["rap-50"] == ("attention", "")
    # The plan has runs of 16 codes of 4 bits.
    assert by["rap-50-4bit"] == (
        "attention_plain", "keys: run 0 has 16 codes of 4 bits, which are not whole pieces of 16 bytes")
    assert figures["machine"]["numerics"] == "emulated" == figures["decode"][0]["numerics"]
    dense, eight, four = (row["bytes"] for row in figures["attention"][:3])
    assert dense > eight > four > 0.2 * dense
    assert [(row["plan"], row["batch"], row["context"]) for row in figures["decode"]] == [
        ("dense-bf16", 1, 30), ("dense-bf16", 2, 40), ("palu-50-g4", 1, 30), ("palu-50-g4", 2, 40)]
    assert all(row["ms"] > 0 and row["cache_bytes"] > 0 and row["share_undecided"] for row in figures["decode"])
    assert all(row["graphs_ms"] > 0 and row["graphs_undecided"] for row in figures["decode"])  # with CUDA graphs
    assert [row["plan"] for row in figures["prefill"]] == list(gpu_bench.PREFILL_SHARES)
    for row in figures["prefill"]:
        assert row["attended_by"].startswith("attention_prefill of") and row["us"] > 0 and row["share_undecided"]
        # There are 16 query heads of 32 numbers; row i of 40 attends to i slots.
        assert row["tokens"] == 40 and row["operations"] == 4 * 16 * 32 * sum(range(1, 41))
        assert row["mma_operations_per_second"] > 0 and list(row["baselines_us"]) == ["dense"]
    assert [(row["gpus"], row["bytes"]) for row in figures["all_reduce"]] == [(2, 4096), (2, 100000)]
    # Bus bytes are the bytes times 2 (n - 1) / n, which is 1 for two GPUs.
    assert all(abs(row["bus_bytes_per_second"] * row["us"] - 1e6 * row["bytes"]) < 1 for row in figures["all_reduce"])
    assert figures["machine"]["timed_by"] == "host" and "the device is emulated" in figures["baselines"]
    assert figures["left_out"] == [{"row": "transformers.kvasir-tiny", "why": "none: the device is emulated"}]
    assert {test["status"] for test in program["tests"]} == {"passed"}
    assert "kvasir-tiny rap-50-4bit batch 2" in said


@needs_bench
def test_requests_after_an_invalid_request_are_served():
    lines = ['{"do": "run", "name": "a"}', "{", '{"do": "bytes", "shape": "llama-3-8b"}',
             '{"do": "bytes", "shape": "none", "plan": "rap-50"}', '{"do": "open", "device": "gpu"}',
             '{"do": "bytes", "shape": "llama-3-8b", "plan": "dense-bf16"}']
    done = subprocess.run([BENCH], input="\n".join(lines), capture_output=True, text=True, check=True)
    *wrong, right = map(json.loads, done.stdout.splitlines())
    for answer, why in zip(wrong, ["no device is open", "parse error", "plan", "none", "gpu"]):
        assert why in answer["error"], answer
    assert right == {"bytes_per_slot": 4096.0}


@needs_bench
def test_the_serve_stage_passes_on_the_emulated_gpu(programs, driver):  # noqa: F811
    said, program = check(programs, driver, "serve")
    assert [(test["name"], test["status"]) for test in program["tests"]] == [
        ("serve.dense-bf16", "passed"), ("serve.rotated-4bit", "passed")]
    assert all(figures["text"] for figures in program["figures"].values()) and "serve over rotated-4bit" in said


def test_a_server_that_does_not_start_fails_with_its_error(programs):
    report = programs / "report.json"
    done = subprocess.run([sys.executable, programs / "bin/gpu_serve.py", "--programs", programs, "--json", report,
                           "--device", "emulated:f64", "--quick"], capture_output=True, text=True)
    assert done.returncode == 1
    assert all("at start" in test["text"] and "f64" in test["text"] for test in json.loads(report.read_text())["tests"])


# ---------------------------------------------------- time and unserved cases

def test_the_all_reduce_benchmark_needs_two_gpus(tmp_path):
    stand_in = StandIn(0)
    stand_in.facts = {**StandIn.facts, "gpus": 1}
    run = gpu_bench.Run(types.SimpleNamespace(quick=False, json=tmp_path / "report.json"), stand_in, gpu_bench.NoTorch("a test"))
    run.all_reduce(gpu_bench.ALL_REDUCE_BYTES, 20)
    assert run.report["figures"]["left_out"] == [
        {"row": "all_reduce", "why": "never run: needs 2 GPUs, there is 1"}]
    assert run.report["tests"] == []


class StandIn:
    """A bench_gpu that has time for a given number of requests."""

    facts = {"name": "a GPU", "l2_bytes": 1 << 20, "free_bytes": 80 << 30}

    def __init__(self, requests):
        self.requests = requests

    def ask(self, do, **more):
        if self.is_over():
            raise gpu_bench.TimeUp
        self.requests -= 1
        return {"bytes": {"bytes_per_slot": 4096.0}, "copy": {"bytes_per_second": 1e12},
                "multiply": {"operations_per_second": 5e14},
                "run": {"seconds": 1e-3, "kernel_seconds": 1e-3, "attended_by": "a kernel", "why": ""},
                "decode_make": {"weight_bytes": 1e9, "numerics": "a GPU's"},
                "decode_run": {"seconds": 8e-3 if more.get("graphs") else 1e-2, "cache_bytes": 1e9,
                               "replayed": more.get("steps", 0) if more.get("graphs") else 0}}.get(do, {})

    def seconds_left(self):
        return 3000 if self.requests > 0 else 0

    def is_over(self):
        return self.requests <= 0

    def close(self):
        return 0


def test_a_plan_without_a_kernel_is_listed_with_its_reason_and_does_not_fail_the_stage(tmp_path):
    class Refusing(StandIn):
        def ask(self, do, **more):
            if do == "decode_make":
                raise gpu_bench.Unserved("no kernel")
            return super().ask(do, **more)

    arguments = types.SimpleNamespace(json=tmp_path / "report.json", quick=False)
    run = gpu_bench.Run(arguments, Refusing(100), gpu_bench.NoTorch("a test"))
    run.decode("llama-3-8b", "dense-bf16", [(1, 4096, None)], 8)
    row = "decode.llama-3-8b.dense-bf16"
    assert run.report["figures"]["left_out"] == [{"row": row, "why": "not served: no kernel"}]
    assert run.report["tests"] == [{"name": row, "status": "skipped", "text": "no kernel"}]


def run_with(requests, tmp_path):
    arguments = types.SimpleNamespace(json=tmp_path / "report.json", quick=False)
    run = gpu_bench.Run(arguments, StandIn(requests), gpu_bench.NoTorch("a test"))
    run.attention(["llama-3-8b"], [(1, 4096), (64, 1 << 20)])
    run.decode("llama-3-8b", "dense-bf16", gpu_bench.DECODE_ROWS, 8)
    run.attention(["llama-2-7b"], [(1, 4096)])
    run.end()
    report = json.loads(arguments.json.read_text())
    left = {row["row"]: row["why"] for row in report["figures"]["left_out"]}
    return report, [row for row in left if left[row] == "not run: the time is up"], left


def test_the_stage_passes_if_time_ran_out_after_all_rows_of_one_shape(tmp_path):
    report, no_time, left = run_with(10 ** 6, tmp_path)
    assert not no_time and len(report["figures"]["attention"]) == 12
    assert [(row["batch"], row["context"]) for row in report["figures"]["decode"]] == [(1, 4096), (16, 16384)]
    assert "does not fit: 80.2 GiB" in left["decode.llama-3-8b.dense-bf16.b32.c16384"]
    assert "does not fit" in left["attention.llama-3-8b.b64.c1048576"]
    # Attention of one shape takes 194 requests, the first decode row takes 22 and the next takes 20.
    report, no_time, _ = run_with(225, tmp_path)
    assert no_time == ["decode.llama-3-8b.dense-bf16.b16.c16384", "attention.llama-2-7b.b1.c4096"]
    assert {test["status"] for test in report["tests"]} == {"passed"} and len(report["figures"]["decode"]) == 1


class Decoder:
    """A stand-in for Hugging Face's decoder. It fails at the steps in `fails`."""

    def __init__(self, *fails):
        self.fails, self.did, self.rows = fails, [], set()

    def do(self, what, *row):
        self.did.append((what, *row))
        if (what, *row) in self.fails or what in self.fails:
            raise RuntimeError(f"no {what}\nand more")

    def load(self, shape):
        self.do("load")

    def make(self, batch, context, steps):
        self.do("make", batch, context)
        self.rows.add((batch, context))

    def has(self, batch, context):
        return (batch, context) in self.rows

    def sample(self, batch, context):
        if ("sample", batch, context) in self.fails:
            raise RuntimeError("out of memory")
        return 0.05

    def drop(self, batch, context):
        self.rows.discard((batch, context))
        self.do("drop", batch, context)

    def close(self):
        self.rows = set()
        self.do("close")


def decode_beside(decoder, tmp_path):
    """Returns the rows of two plans by batch, and the rows that were left out."""
    arguments = types.SimpleNamespace(json=tmp_path / "report.json", quick=False)
    run = gpu_bench.Run(arguments, StandIn(10 ** 6), gpu_bench.NoTorch("a test"), (decoder, "transformers 5"))
    run.decoders("llama-3-8b", ["dense-bf16", "rotated-4bit"], gpu_bench.DECODE_ROWS, 8)
    assert all(test["status"] == "passed" for test in run.report["tests"])
    rows = run.report["figures"]["decode"]
    assert [(row["plan"], row["batch"]) for row in rows] == [
        (plan, batch) for plan in ("dense-bf16", "rotated-4bit") for batch in (1, 16)]
    left = {row["row"]: row["why"] for row in run.report["figures"]["left_out"]}
    return {batch: [row for row in rows if row["batch"] == batch] for batch in (1, 16)}, left


def test_decode_is_compared_with_hugging_face_whose_cache_is_freed_if_memory_is_short(tmp_path):
    decoder = Decoder()
    rows, left = decode_beside(decoder, tmp_path)
    assert "does not fit: 80.2 GiB" in left["transformers.llama-3-8b.b32.c16384"]
    for row in rows[1] + rows[16]:
        assert row["transformers_ms"] == pytest.approx(50) and row["speedup"] == pytest.approx(5)
        assert row["interleaved"] is (row["batch"] == 1)
    # If both caches do not fit, Hugging Face's cache is freed before ours is allocated.
    assert decoder.did == [("load",), ("make", 16, 16384), ("drop", 16, 16384), ("make", 1, 4096), ("close",)]


def test_decode_is_also_measured_with_cuda_graphs_if_a_second_model_fits(tmp_path):
    for gib, made in (200, True), (100, False):
        stand_in = StandIn(10 ** 6)
        stand_in.facts = {**StandIn.facts, "free_bytes": gib << 30}
        arguments = types.SimpleNamespace(json=tmp_path / "report.json", quick=False)
        run = gpu_bench.Run(arguments, stand_in, gpu_bench.NoTorch("a test"))
        run.decode("llama-3-8b", "dense-bf16", [(16, 16384, 0.6)], 8)
        row, = run.report["figures"]["decode"]
        left = [row["row"] for row in run.report["figures"]["left_out"]]
        if made:
            assert row["graphs"] == pytest.approx(1.25) and row["graphs_ms"] == pytest.approx(8) and row["graphs_met"]
        assert ("graphs" in row, left) == (made, [] if made else ["graphs.llama-3-8b.dense-bf16"])


def test_a_failure_of_hugging_face_is_reported_but_does_not_fail_the_stage(tmp_path):
    rows, left = decode_beside(Decoder("load"), tmp_path)
    assert left["transformers.llama-3-8b"] == "failed: no load" and "speedup" not in rows[1][0]
    rows, left = decode_beside(Decoder(("sample", 16, 16384)), tmp_path)
    assert left["transformers.llama-3-8b.b16.c16384"] == "failed: out of memory" and "speedup" not in rows[16][0]
    assert all(row["speedup"] == pytest.approx(5) for row in rows[1])
    decoder = Decoder(("make", 1, 4096), "close")
    rows, left = decode_beside(decoder, tmp_path)
    assert left["transformers.llama-3-8b"] == "failed: no close"
    assert left["transformers.llama-3-8b.b1.c4096"] == "failed: no make" and "speedup" in rows[16][0]
    assert decoder.did[-3:] == [("drop", 1, 4096), ("close",), ("close",)]  # before our cache is made, and at the end
    # After its context was lost, a GPU cannot free memory either.
    rows, left = decode_beside(Decoder(("sample", 1, 4096), "drop"), tmp_path)
    assert left["transformers.llama-3-8b.b1.c4096"] == "failed: no drop" and "speedup" not in rows[1][0]
    rows, left = decode_beside(Decoder("make", "drop", "close"), tmp_path)
    assert left["transformers.llama-3-8b.b16.c16384"] == "failed: no drop" and "speedup" not in rows[1][0]


def test_prefill_is_rated_by_the_speed_of_mma(tmp_path):
    def prefill(requests):
        arguments = types.SimpleNamespace(json=tmp_path / "report.json", quick=False)
        run = gpu_bench.Run(arguments, StandIn(requests), gpu_bench.NoTorch("a test"))
        run.prefill("llama-3-8b", 8192)
        return run

    run = prefill(10 ** 6)
    rows = run.report["figures"]["prefill"]
    assert [row["plan"] for row in rows] == list(gpu_bench.PREFILL_SHARES) and not run.out_of_time
    # 550 GFLOP in 1 ms are compared with 500 TFLOP/s.
    assert all(abs(row["share"] - 1.0997) < 1e-4 and row["share_met"] and row["speedup"] == 1.0 for row in rows)
    assert prefill(2).out_of_time == ["prefill.llama-3-8b.c8192"]
    run = prefill(40)
    assert [row["plan"] for row in run.report["figures"]["prefill"]] == ["dense-bf16"]
    assert run.out_of_time[0] == "prefill.llama-3-8b.dense-8bit.c8192"


def test_the_stage_fails_if_its_time_ends_before_all_rows_of_one_shape(tmp_path):
    report, no_time, _ = run_with(100, tmp_path)
    assert no_time[0].startswith("attention.llama-3-8b.") and no_time[-1] == "attention.llama-2-7b.b1.c4096"
    failed, = (test for test in report["tests"] if test["status"] == "failed")
    assert failed["name"] == "bench.time" and "more --seconds" in failed["text"]


def test_a_request_that_takes_too_long_is_given_up(tmp_path):
    program = tmp_path / "bin/bench_gpu"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nread line\necho '{}'\nexec sleep 600\n")
    program.chmod(0o755)
    seconds = time.monotonic() - gpu_bench.BEGIN + gpu_bench.RESERVE_SECONDS + 1
    bench = gpu_bench.Bench(types.SimpleNamespace(programs=tmp_path, seconds=seconds, device="cuda:0"))
    for _ in range(2):
        with pytest.raises(gpu_bench.TimeUp):
            bench.ask(do="decode_make")
    assert bench.is_over() and bench.close() == 0 and bench.process.returncode == -9


def test_if_the_benchmark_program_dies_each_remaining_row_is_reported_as_failed(tmp_path):
    program = tmp_path / "bin/bench_gpu"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nread line\necho '" + json.dumps(StandIn.facts) + "'\nread line\nexit 7\n")
    program.chmod(0o755)
    seconds = time.monotonic() - gpu_bench.BEGIN + gpu_bench.RESERVE_SECONDS + 100
    arguments = types.SimpleNamespace(programs=tmp_path, seconds=seconds, device="cuda:0", quick=False,
                                      json=tmp_path / "report.json")
    run = gpu_bench.Run(arguments, gpu_bench.Bench(arguments), gpu_bench.NoTorch("a test"))
    run.attention(["llama-3-8b"], [(1, 4096), (16, 4096)])
    run.prefill("llama-3-8b", 8192)
    run.decoders("llama-3-8b", ["dense-bf16"], gpu_bench.DECODE_ROWS, 8)
    run.end()
    failed = {test["name"]: test.get("text", "") for test in json.loads(arguments.json.read_text())["tests"]}
    assert list(failed) == ["attention.llama-3-8b.b1.c4096", "attention.llama-3-8b.b16.c4096",
                            "prefill.llama-3-8b.c8192", "transformers.llama-3-8b", "decode.llama-3-8b.dense-bf16",
                            "bench.end"]
    assert all("bench_gpu ended with exit code 7" in text for name, text in failed.items() if name != "bench.end")
    assert not run.whole_shapes


def test_a_case_that_a_backend_does_not_support_is_reported_only_once(capsys):
    def refused():
        warnings.warn("Memory efficient kernel not used because:", UserWarning)
        raise RuntimeError("No available kernel. Aborting execution.\nand more")

    def served():
        warnings.warn("a TF32 setting", UserWarning)

    torch = object.__new__(gpu_bench.Torch)  # this build has no PyTorch
    torch.torch = types.SimpleNamespace(randn=lambda *_, **__: None, bfloat16=None)
    torch.told, torch.flashinfer, torch.backends = set(), None, {"flash": served, "efficient": refused}
    torch.sdpa, torch.time = lambda backend, causal: backend, lambda call: call()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in 1, 16:
            assert torch.make("llama-3-8b", batch, 4096, 1) == ["torch_flash"]
    assert [str(warning.message) for warning in said] == ["a TF32 setting"] * 2
    assert capsys.readouterr().out == "  torch_efficient does not serve llama-3-8b: No available kernel. Aborting execution.\n"


# -------------------------------------------------------------------- figures

def test_a_ratio_is_judged_only_with_enough_pairs_and_a_narrow_spread():
    for values, target, pairs, met, open_ in [([0.9] * 9, 0.85, 9, True, False), ([0.8] * 9, 0.85, 9, False, False),
                                              ([0.9] * 5, 0.85, 5, False, True),
                                              ([0.5, 0.9, 1.5] * 3, 0.85, 9, False, True)]:
        row = {}
        gpu_bench.judged(row, "share", gpu_bench.middle(values), target, pairs)
        assert (row["share_met"], row["share_undecided"]) == (met, open_), values
    row = {}
    gpu_bench.judged(row, "share", gpu_bench.middle([1.0]), None, 9)
    assert "share_met" not in row


def attention_row(**others):
    row = {"shape": "llama-3-8b", "plan": "rap-50", "batch": 16, "context": 4096, "us": 123.4, "bytes": 1,
           "best_baseline": "torch_flash", "baselines_us": {"dense": 300.0, "torch_flash": 250.0}}
    gpu_bench.judged(row, "share", {"median": 0.8, "spread": 0.01}, 0.85, 9)
    gpu_bench.judged(row, "speedup", {"median": 2.03, "spread": 0.01}, 1.7, 9)
    return row | others


def prefill_row():
    row = {"shape": "llama-3-8b", "plan": "dense-8bit", "tokens": 8192, "operations": 5.5e11, "us": 2345.6,
           "mma_operations_per_second": 6.1e14, "best_baseline": "torch_cudnn",
           "baselines_us": {"dense": 3000.0, "torch_cudnn": 1100.0}}
    gpu_bench.judged(row, "share", {"median": 0.65, "spread": 0.01}, 0.6, 9)
    gpu_bench.judged(row, "speedup", {"median": 0.47, "spread": 0.01}, None, 9)
    return row


def decode_row(interleaved):
    row = {"shape": "llama-3-8b", "plan": "rotated-4bit", "batch": 1, "context": 4096, "ms": 8.9, "tokens_per_second": 112.0,
           "interleaved": interleaved, "transformers_ms": 10.0}
    gpu_bench.judged(row, "share", {"median": 0.59, "spread": 0.01}, 0.75, 9)
    gpu_bench.judged(row, "speedup", {"median": 1.12, "spread": 0.01}, None, 9)
    if interleaved:
        row["graphs_ms"] = 7.5
        gpu_bench.judged(row, "graphs", {"median": 1.187, "spread": 0.01}, 1.0, 9)
    return row


def report_of(stage):
    figures = {"machine": {"name": "NVIDIA H100", "timed_by": "events"}, "baselines": "PyTorch 2.9",
               "decoder": "transformers 5", "pairs": 9,
               "attention": [attention_row()], "prefill": [prefill_row()], "decode": [decode_row(True), decode_row(False)],
               "left_out": [{"row": "attention.llama-2-7b.b64.c131072", "why": "does not fit"}]}
    return {"stage": stage, "passed": True, "finished": True, "quick": False, "date": "2026-11-25T10:00:00Z",
            "commit": "abc", "sanitizer": None, "gpu": {"name": "NVIDIA H100", "driver_cuda": "13.0"},
            "programs": [{"program": "p", "figures": figures, "tests": [{"name": "a", "status": "passed"}]}]}


def test_stages_that_never_ran_are_reported_as_such(tmp_path):
    text = gpu_page.section(tmp_path)
    for stage in gpu_page.STAGES:
        assert any(line.startswith(f"| `{stage}` |") and gpu_page.NEVER in line for line in text.splitlines())
    for plan in gpu_bench.PLANS:
        assert any(f"`{plan}`" in line and line.endswith("| never run |") for line in text.splitlines())


def test_stages_that_ran_are_reported_with_date_gpu_and_verdict(tmp_path):
    for stage in "ops", "bench":
        (tmp_path / f"gpu-{stage}.json").write_text(json.dumps(report_of(stage)))
    text = gpu_page.section(tmp_path)
    assert "| `ops` | kernels against their references | 2026-11-25 | NVIDIA H100 (CUDA 13.0), `abc` | 1 passed, 0 failed, 0 skipped |" in text
    assert ("| llama-3-8b | rap-50 | 16 | 4096 | 123.4 | 0.80 | ≥ 0.85 | **missed** | 2.03 | ≥ 1.7 | met | "
            "torch_flash, 250 µs |") in text
    assert ("| llama-3-8b | dense-8bit | 8192 | 2346 | 0.65 | ≥ 0.6 | met | 610 | 0.47 | torch_cudnn, 1100 µs |") in text
    step = "| llama-3-8b | rotated-4bit | 1 | 4096 | 8.9 | 112 | 0.59 | ≥ 0.75 | **missed** |"
    assert f"{step} 7.5 ms, × 1.19 | 1.12 | 10 ms |\n{step} never run | 1.12 | 10 ms, not in turn |" in text
    assert "PyTorch 2.9; transformers 5." in text
    assert "- attention.llama-2-7b.b64.c131072: does not fit" in text
    assert "| `engine` | logits and losses against the CPU engine | never run |" in text


@pytest.mark.parametrize("others, why", [({"quick": True}, "figures mean nothing"), ({"finished": False}, "finished run"),
                                         ({"stage": "ops"}, "want a finished run of stage bench")])
def test_incomplete_results_are_refused(tmp_path, others, why):
    (tmp_path / "gpu-bench.json").write_text(json.dumps(report_of("bench") | others))
    with pytest.raises(gpu_page.ResultError, match=why):
        gpu_page.section(tmp_path)


@pytest.mark.parametrize("page", ["performance.md", "performance-avx2.md"])
def test_the_documents_have_the_figures_of_the_gpu_results(page):
    text = (ROOT / "docs" / page).read_text()
    assert gpu_page.rewritten(text) == text
    with pytest.raises(gpu_page.ResultError, match="the page has no"):
        gpu_page.rewritten(text.replace(gpu_page.END, ""))
