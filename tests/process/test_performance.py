"""bench/performance.sh and bench/vs_llama_cpp.sh: their arithmetic, and the page
from a smoke run of every benchmark. No time is asserted."""

import ctypes
import json
import pathlib
import struct
import subprocess
import sys
import types

import numpy as np
import pytest

from kvasir_process import BINARY

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import llama_cpp_cache  # noqa: E402
import llama_cpp_gguf  # noqa: E402
import performance_page as page  # noqa: E402
import codes_page  # noqa: E402  # performance_page adds its folder to the path
import llama_cpp_page  # noqa: E402
import vs_llama_cpp as versus  # noqa: E402


# ---------------------------------------------------------------- the page

def test_the_performance_page_is_written_from_a_run_of_every_benchmark(tmp_path):
    out = tmp_path / "performance.md"
    command = [sys.executable, ROOT / "bench/performance.py", "--quick", "--kvasir", BINARY,
               "--results", tmp_path / "results", "--out", out]
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path)
    text = out.read_text()
    assert "{{" not in text
    for found in ("| palu-50-g4-3bit | 96 |", "`step_us`", "`rows_", "rap-50-4bit", "undecided",
                  "| MB/sequence |"):
        assert (found in text) == (found != "`rows_"), found  # counts have no target
    # Existing results are not measured again, but those of another binary are.
    prefill, scheduler = (tmp_path / "results" / f"{name}.json" for name in ("prefill", "scheduler"))
    stamp = scheduler.stat().st_mtime_ns
    old = json.loads(prefill.read_text())
    assert old["run"]["argv"] == ["bench", "prefill", "--json", "--quick"]
    prefill.write_text(json.dumps(old | {"run": old["run"] | {"binary": "0" * 64}}))
    told = subprocess.run([*command, "--write"], capture_output=True, text=True)
    assert told.returncode != 0 and "several binaries or hosts" in told.stderr
    assert "000000000000 on " in told.stderr
    subprocess.run(command, check=True, timeout=100)
    assert json.loads(prefill.read_text())["run"] == old["run"]
    assert scheduler.stat().st_mtime_ns == stamp
    prefill.write_text("broken")
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_the_performance_page_of_the_router_is_written_from_a_run(tmp_path):
    out = tmp_path / "router.md"
    command = [sys.executable, ROOT / "bench/proxy/proxy.py", "--kvasir", BINARY]
    subprocess.run([*command, "--out", out, "--", "--quick", "--pairs", "2"], check=True, timeout=100)
    text = out.read_text()
    for found in ("| null proxy |", "| router, KServe |", "| router, KServe by mutual TLS |",
                  "`kserve_tls_rate_over_plain`", "`kserve_mtls_rate_over_plain`", "`kserve_rate_over_null_proxy`",
                  "`vllm_engine_p99_over_null_proxy`", "**Undecided**"):
        assert found in text, found
    refused = subprocess.run([*command, "--", "--quick"], capture_output=True, text=True)
    assert refused.returncode == 2 and "figures mean nothing" in refused.stderr


def test_figures_of_quick_runs_are_not_written_to_the_documents(tmp_path):
    quick = {"scheduler": {"run": {"argv": ["bench", "scheduler", "--quick"]}}}
    with pytest.raises(page.PageError, match="scheduler comes from a run with --quick"):
        page.check_sources(quick, False)
    page.check_sources(quick, True)
    done = subprocess.run([sys.executable, ROOT / "bench/performance.py", "--quick", "--results",
                           tmp_path],
                          capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "give --out" in done.stderr


def test_a_page_template_that_needs_a_missing_result_is_refused():
    with pytest.raises(page.PageError, match="section attention: no result has 'attention'"):
        page.fill("{{attention}}", {})
    with pytest.raises(page.PageError, match="none of"):
        page.fill("{{nothing}}", {})


def attention_row(**others):
    return {"shape": "s", "method": "m", "context": 1, "batch": 1, "us_per_token": 1.0,
            "bytes_per_token": 1.0, "flops_per_token": 1.0, "bandwidth_share": 1.0,
            "bound": "bytes", "floor_ratio": 1.0, "undecided": False, "speedup_over_dense": 1.0,
            "bytes_ratio": 1.0, "footprint_bytes": 3e9} | others


def test_the_performance_page_can_be_written_if_the_cpu_reports_no_cache_size():
    with_one = page.attention({"attention": {"rows": [
        attention_row(footprint_over_llc=4.5), attention_row(footprint_over_llc=9.0)]}})
    assert with_one.endswith("together are 4.5 times the last-level cache or more.")
    none = page.attention({"attention": {"rows": [attention_row()]}})
    assert none.endswith("reports no cache size; every method's arenas together are 3 GB or more.")


def figures_of(value, undecided=(), at_least=True):
    return {"figures": {"share": value}, "spread": {"share": 0.02}, "undecided": list(undecided),
            "targets": {"share": {"at_least" if at_least else "at_most": 0.75}}}


@pytest.mark.parametrize("report, said", [
    (figures_of(0.8), "| ≥ 0.75 | 0.8 | 2.0 % | met |"),
    (figures_of(0.7), "| ≥ 0.75 | 0.7 | 2.0 % | **missed** |"),
    (figures_of(0.8, ["share"]), "| undecided |"),
    (figures_of(0.8, at_least=False), "| ≤ 0.75 | 0.8 | 2.0 % | **missed** |")])
def test_a_figure_is_judged_by_its_target(report, said):
    assert said in page.figures({"decode": report})


def test_the_summary_names_the_missed_and_the_undecided_targets():
    rows = [{"name": "a", "value": 1.1, "target": 1.25, "met": True, "undecided": False},
            {"name": "b", "value": 1.4, "target": 1.25, "met": False, "undecided": False},
            {"name": "c", "value": 1.0, "target": 1.25, "met": False, "undecided": True},
            {"name": "d", "value": 9.0, "undecided": False}]
    assert page.summary(rows, "value", lambda row: row["name"]) == (
        "1 of 3 rows meet their targets. Missed: b (1.40, target 1.25). Undecided: c.")


# --------------------------------------------------------------- llama.cpp

def samples(seconds, cache_bytes):
    return [{"seconds_per_step": s, "weight_bytes_per_step": 100.0,
             "cache_bytes_per_step": cache_bytes} for s in seconds]


def row(plan, cache, ours, theirs, context=8192, batch=8):
    return versus.row_of(plan, cache, context, batch, samples(ours, 100.0), samples(theirs, 300.0))


def test_a_rows_ratio_is_the_median_of_pairs():
    made = row("rotated-4bit", "q8_0", [1.0] * 7, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 9.0])
    assert made["ratio"] == 2.0 and made["bytes_ratio"] == 2.0
    assert made["target"] == 1.2 and made["met"] and not made["undecided"]
    assert (made["kvasir_tokens_per_second"], made["llama_cpp_tokens_per_second"]) == (8.0, 4.0)


def test_a_target_is_undecided_with_fewer_than_seven_pairs_or_a_wide_spread():
    few = row("dense-bf16", "f16", [1.0] * 6, [2.0] * 6)
    assert few["undecided"] and not few["met"]
    assert row("dense-bf16", "f16", [1.0] * 8, [2.0, 3.0] * 4)["undecided"]


@pytest.mark.parametrize("plan, caches", [
    ("dense-bf16", ["f16", "f16-no-flash"]), ("dense-8bit", ["f16", "f16-no-flash", "q8_0"]),
    ("rotated-4bit", ["f16", "f16-no-flash", "q8_0", "q4_0"]), ("rap-50-4bit", [])])
def test_a_plan_has_a_target_against_caches_with_at_least_as_many_bits(plan, caches):
    assert [cache for cache in versus.CACHES if versus.target_of(plan, cache)] == caches


def report(*rows, **others):
    return {"shape": "tinyllama-1.1b", "threads": 2, "pairs": 7, "date": "2026-11-30",
            "weights": "bf16", "llama_cpp_python": "0.3.36",
            "machine": {"cpu": "a CPU", "simd": "AVX3"}, "rows": list(rows)} | others


def test_rows_that_are_measured_again_replace_those_of_the_file(tmp_path):
    file = tmp_path / "rows.json"
    old = row("dense-bf16", "f16", [1.0] * 7, [2.0] * 7, context=512)
    new = row("dense-bf16", "f16", [1.0] * 7, [3.0] * 7, context=512)
    other = row("dense-bf16", "f16", [1.0] * 7, [2.0] * 7, context=64)
    for rows in ([old], [other], [new]):
        versus.write_rows(file, report(*rows))
    assert json.loads(file.read_text())["rows"] == [other, new]
    versus.write_rows(file, report(date="2026-12-01"))
    with pytest.raises(ValueError, match='weights of the file\'s rows is "bf16", and of this run "f16"'):
        versus.write_rows(file, report(weights="f16"))
    assert json.loads(file.read_text())["rows"] == [other, new]


def test_the_section_on_llama_cpp_marks_missed_and_undecided_ratios():
    text = llama_cpp_page.section(report(
        row("dense-bf16", "f16", [1.0] * 7, [1.1] * 7), row("dense-bf16", "q8_0", [1.0] * 7, [0.5] * 7),
        row("rotated-4bit", "q8_0", [0.5] * 7, [1.0] * 7), row("rotated-4bit", "q4_0", [1.0] * 6, [2.0] * 6)))
    assert "1 of 3 ratios with a target meet it, 1 are undecided" in text
    assert "| 8192 | 8 | dense-bf16 | 8.0 | **1.10** |  | 0.50 |  |" in text
    assert "| 8192 | 8 | rotated-4bit | 12.0 |  |  | 2.00 | 2.00 (undecided) |" in text
    assert "| 8192 | 8 | llama.cpp, tokens/s |  | 7.3 |  | 8.0 | 4.0 |" in text


@pytest.mark.parametrize("section", [llama_cpp_page, codes_page])
@pytest.mark.parametrize("name", ["performance.md", "performance-avx2.md"])
def test_the_documents_have_the_committed_figures(name, section):
    text = (ROOT / "docs" / name).read_text()
    measured = json.loads(section.RESULTS.read_text())
    assert section.rewritten(text, measured) == text
    with pytest.raises(ValueError, match="the page has no"):
        section.rewritten(text.replace(section.BEGIN, ""), measured)


def test_the_section_on_codes_marks_missed_and_undecided_ratios():
    def measured(**ratios):
        return [{"cache": cache.replace("_", "-"), "bytes_ratio": 2.0, "ratio": ratio, "spread": spread}
                for cache, (ratio, spread) in ratios.items()]
    text = codes_page.section({
        "machine": {"cpu": "a CPU", "threads": 2}, "date": "2026-11-30", "pairs": 7, "binary": "0" * 64,
        "attention": {"AVX-512, llama-2-7b": measured(rotated_4bit=(3.2, 0.15), rotated_3bit=(3.3, 0.1)),
                      "AVX2, llama-2-7b": measured(rotated_4bit=(9.0, 0.16))},
        "steps": {"AVX-512, 8192": measured(dense_8bit=(1.2, 0.0))}})
    assert "Ratios with a target: 4, met 2, undecided 1, missed 1 (**bold**)." in text
    assert "| llama-2-7b | rotated-4bit | 2.00 | 3.20 | ≥ 3.20 | 9.00 (undecided) | ≥ 1.50 |" in text
    assert "| llama-2-7b | rotated-3bit | 2.00 | **3.30** | ≥ 3.40 |  |  |" in text
    assert "| 8192 | dense-8bit | 2.00 | 1.20 | ≥ 1.15 |  |  |" in text


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_fails_if_kvasir_exits_with_an_error(tmp_path, code):
    program = tmp_path / "kvasir"
    program.write_text(f"#!/bin/sh\necho '{{}}'; read line; exit {code}\n")
    program.chmod(0o755)
    kvasir = versus.Kvasir(versus.parse(["--kvasir", str(program)]), "dense-bf16", 512, 1)
    if code == 0:
        kvasir.close()
    else:
        with pytest.raises(RuntimeError, match="exit code 3"):
            kvasir.close()


def state(cells, rows, layers=2, streams=3, transposed=0):
    """A state as llama.cpp saves it: keys of all layers, then values."""
    out = struct.pack("<Iii", 0x1234, 0, streams)
    for stream in range(streams):
        out += struct.pack("<I", cells if stream == 0 else 0)
        if stream:
            continue
        for position in range(cells):
            out += struct.pack("<iIi", position, 1, 0)
        out += struct.pack("<II", transposed, layers)
        for part in range(2 * layers):
            if transposed and part >= layers:  # numbers of two bytes
                out += struct.pack("<iII", 1, 2, rows // 2)
                out += bytes((part * 50 + cell) % 251 for _ in range(rows // 2)
                             for cell in range(cells) for _ in range(2))
                continue
            out += struct.pack("<iQ", 1, rows)
            out += bytes((part * 50 + cell) % 251 for cell in range(cells) for _ in range(rows))
    return out


def test_a_lengthened_llama_cpp_state_repeats_the_rows_of_the_short_one():
    made = llama_cpp_cache.longer(state(4, 6), 100)
    assert made.cell_bytes == 2 * 2 * 6
    assert len(made.state) == len(state(100, 6))
    # The lengthened state has the headers, positions and layers of a real state of that length.
    again = llama_cpp_cache.longer(made.state, 100)
    assert len(again.state) == len(made.state)
    body = made.state[-100 * 6 - 8:-8]  # the last values; two streams are empty
    kinds = {body[i:i + 6] for i in range(0, len(body), 6)}
    assert len(kinds) == 4 and all(len(set(kind)) == 1 for kind in kinds)


def test_without_flash_attention_a_lengthened_state_repeats_columns_of_values():
    made = llama_cpp_cache.longer(state(4, 6, transposed=1), 100)
    assert made.cell_bytes == 2 * 2 * 6
    assert len(made.state) == len(state(100, 6, transposed=1))
    columns = np.frombuffer(made.state[-3 * 100 * 2 - 8:-8], np.uint8).reshape(3, 100, 2)
    # All numbers of a cell are copied from the same cell of the prompt.
    assert (columns == columns[:1, :, :1]).all()
    assert set(columns[0, :, 0]) == {(3 * 50 + cell) % 251 for cell in range(4)}


@pytest.mark.parametrize("broken, said", [
    (state(4, 6, transposed=2), "transposed: want 0 or 1, have 2"), (state(4, 6)[:-1], "ends before"),
    (state(4, 6) + b"x", "1 bytes are left"),
    (state(4, 6)[:16] + struct.pack("<i", 7) + state(4, 6)[20:], "cell 0")])
def test_a_llama_cpp_state_of_another_layout_is_refused(broken, said):
    with pytest.raises(ValueError, match=said):
        llama_cpp_cache.longer(broken, 10)


def test_the_converter_interleaves_the_rows_of_a_head_as_llama_cpp_does():
    weight = np.arange(8)[:, None] * np.ones((1, 3))
    rows = llama_cpp_gguf.interleave_pairs(weight, 2)[:, 0]
    assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_converted_tensors_have_the_names_that_llama_cpp_uses():
    assert llama_cpp_gguf.gguf_name("model.layers.11.self_attn.q_proj.weight") == (
        "blk.11.attn_q.weight")
    assert llama_cpp_gguf.gguf_name("model.norm.weight") == "output_norm.weight"


LLAMA = {"model_type": "llama", "hidden_size": 8, "rope_scaling": None, "attention_bias": False}


@pytest.mark.parametrize("other, said", [
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: want null"),
    ({"attention_bias": True}, "attention_bias: want false, have true"),
    ({"model_type": "mistral"}, "model_type"), ({"sliding_window": 4}, "sliding_window is unknown")])
def test_models_that_the_converter_does_not_know_are_refused(other, said):
    llama_cpp_gguf.check_config(LLAMA)
    with pytest.raises(ValueError, match=said):
        llama_cpp_gguf.check_config(LLAMA | other)


def test_bf16_tensors_are_read_as_they_are(tmp_path):
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]}}).encode()
    numbers = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + numbers.astype("<u2").tobytes())
    (name, read), = llama_cpp_gguf.tensors(tmp_path)
    assert name == "a" and read.tolist() == [[1.5, -2.0]]


def test_a_setting_that_llama_cpp_does_not_know_is_an_error():
    class Params(ctypes.Structure):
        _fields_ = [("n_ctx", ctypes.c_uint32)]

    params = Params()
    versus.assign(params, n_ctx=7)
    assert params.n_ctx == 7
    with pytest.raises(RuntimeError, match="Params has no field use_mmap"):
        versus.assign(params, use_mmap=False)


def test_the_comparison_with_llama_cpp_describes_the_machine_with_a_benchmark_that_exists():
    machine = versus.machine_of(types.SimpleNamespace(kvasir=BINARY))
    assert machine["threads"] > 0 and machine["cpu"]


@pytest.mark.parametrize("script", ["vs_llama_cpp.sh", "performance.sh"])
def test_scripts_print_their_options_without_building_anything(script):
    done = subprocess.run([ROOT / "bench" / script, "--help"], capture_output=True, text=True,
                          check=True, timeout=20)
    assert "--json" in done.stdout or "--only" in done.stdout
