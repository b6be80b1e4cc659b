"""A whole server with the kernels of a GPU, which run on the host (`--device emulated`), and real clients."""

import json
import platform
from concurrent.futures import ThreadPoolExecutor

import pytest

import triton
from kvasir_process import BINARY, TINY, KvasirProcess, altered_model, run, wait_until
from test_storm import is_empty, storm

MODULE = BINARY.parent / "kvasir-emulated.so"
if platform.machine() != "x86_64":
    pytest.skip("the emulated device needs x86-64", allow_module_level=True)

PROMPT = "It was a bright cold morning, and she said to him"
# The steps are small, because the warm-up runs the largest one.
SMALL = ["--max-batched-tokens", 16, "--max-num-seqs", 2, "--max-model-len", 64, "--kv-cache-bytes", "4MiB"]


def refused(*args):
    done = run(*args, check=False)
    assert done.returncode == 1, done
    return done.stderr


def serve(device, *flags, model=TINY):
    return KvasirProcess("serve", "--device", device, *SMALL, *flags, model=model)


def answer(server, prompt=PROMPT, **sampling):
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
    return triton.generate(server.grpc, server.ready["model"], prompt, timeout=300, **options)


@pytest.fixture(scope="module")
def emulated():
    with serve("emulated", "--kv-plan", "rotated-4bit") as server:
        yield server


def test_the_error_for_a_missing_gpu_names_its_requirements(tmp_path):
    for command in (["serve", "--grpc-port", 0], ["generate", "--prompt", "a"], ["inspect"]):
        command += ["--model", TINY]
        module = tmp_path / "none.so"
        text = refused(*command, "--device", "emulated", "--device-module", module)
        assert f"{module}: no such file" in text and "KVASIR_EMULATION=ON" in text
        text = refused(*command, "--device", "emulated", "--device-module", TINY / "README.md")
        assert "is not a device module" in text
        text = refused(*command, "--device", "emulated:f64")
        assert f'{MODULE}: the setting "f64"' in text
    assert run("inspect", "--model", TINY, "--device", "gpu", check=False).returncode == 2


def test_inspect_reports_page_sizes_in_the_layout_of_the_emulated_gpu():
    def pages(*flags):
        return json.loads(run("inspect", TINY, "--json", "--kv-plan", "rotated-4bit", *flags).stdout)

    here, there = pages(), pages("--device", "emulated")
    assert here["kv_payload_bytes_per_token"] == there["kv_payload_bytes_per_token"]
    assert here["kv_bytes_per_token"] <= there["kv_bytes_per_token"]


def test_the_server_reports_its_device(emulated):
    infos = [dict(labels) for name, labels in emulated.metrics() if name == "kvasir_build_info"]
    assert [labels["device"] for labels in infos] == ["emulated"]
    log = emulated.log()
    assert "device=emulated" in log and "numerics=emulated-bf16-3-fast" in log, log


def test_concurrent_requests_get_the_answers_of_single_requests(emulated):
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(answer, emulated, text) for text in (PROMPT, "A house in the")]
        together = [each.result() for each in running]
    for text, reason, tokens in together:
        assert text and reason == "length" and tokens == 8
    # Other requests in the same step change no answer.
    assert answer(emulated) == together[0]
    wait_until(lambda: emulated.metric("kvasir_num_requests_running") == 0, "an idle engine")
    assert emulated.metric("kvasir_cache_leaked_pages") == 0


def test_a_request_with_many_sampling_settings_is_served(emulated):
    _, reason, tokens = answer(emulated, temperature=0.8, top_p=0.9, top_k=20, seed=3,
                               repetition_penalty=1.2)
    assert reason == "length" and tokens == 8


def test_many_aborted_requests_leave_no_cache_page_and_no_device_memory(emulated):
    def allocated():
        return [emulated.metric(f"kvasir_{name}_bytes") for name in ("kv_cache_pool", "host_pool", "weight")]

    before = allocated()
    # A step takes a second, so the requests are few and short, but more than run at once.
    ended, errors = storm(emulated, 16, seed=3, most_words=9, most_tokens=3, endless=30)
    assert errors == [] and ended.total() == 16 and len(ended) >= 4, (ended, errors)
    wait_until(lambda: is_empty(emulated), "an empty server", 120)
    assert emulated.metric("kvasir_kv_cache_used_bytes") == 0
    assert emulated.metric("kvasir_kv_cache_side_bytes") == 0
    assert allocated() == before
    # The server still answers.
    assert answer(emulated, max_tokens=2)[1:] == ("length", 2)
    assert emulated.stop() == 0


def test_float32_on_the_emulated_gpu_gives_the_tokens_of_the_cpu(tmp_path):
    # With a seed, the device runs warps in a random order, which takes long for six layers.
    model = altered_model(tmp_path / "tiny", num_hidden_layers=2)
    answers = []
    for device in ("cpu", "emulated:f32,seed=5"):
        with serve(device, "--kv-plan", "dense-bf16", model=model) as server:
            answers.append(answer(server))
    assert answers[0] == answers[1]


def test_generate_runs_on_the_emulated_gpu():
    done = run("generate", "--model", TINY, "--device", "emulated", "--max-tokens", 4,
               "--temperature", 0, "--prompt", "It was a", "--json")
    assert json.loads(done.stdout)["output_tokens"] == 4
