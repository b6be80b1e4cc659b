"""Compressed checkpoints are run by the server's own programs. The loss of every method equals that of the Python
reference in every family, for every chunk size, page size and number of threads. Every method generates text."""

import functools
import json
import math
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

import triton
from kvasir_process import BINARY, TINY, KvasirProcess, altered_model, only_in_soak, run, wait_until

COMPRESS = BINARY.with_name("kvasir-compress")
EVALUATION = TINY / "evaluation.txt"
PROMPT = "Once upon a time"
WINDOWS, WINDOW_TOKENS = 3, 192
# Relative tolerances of the loss. NUMBERS allows for the rounding of sums, CODES also for codes that differ by one.
NUMBERS, CODES = 0.0005, 0.005


def joint(keep, group_heads, codec, window=0):
    """A plan with one latent of key and value for each group of `group_heads` heads (or for all heads)."""
    def plan(base):
        config = json.loads((base / "config.json").read_text())
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        count = heads if group_heads == "all" else min(heads, group_heads)
        groups = [
            {"heads": list(range(first, first + count)), "rank": int(keep * 2 * count * dim)}
            for first in range(0, heads, count)
        ]
        part = {
            "low_rank": {"groups": groups},
            "uses": [{"reconstruct": {}, "serves": "SERVES_KEY"},
                     {"at_runtime": {}, "serves": "SERVES_VALUE"}],
            "stored": "NO_ROPE" if config["model_type"] == "opt" else "PRE_ROPE",
            "codec": codec,
        }
        side = {"exact_window": window}
        layer = {"key": side, "value": side, "joint": [part]}
        return {"schema_version": 1, "method": "joint",
                "layers": [layer] * config["num_hidden_layers"]}
    return plan


FUSED = {"per_token": {}, "param_dtype": "F16", "hadamard_fused": {}}
STATIC = {"channel_static": {}, "basis_static": {}}
PALU = ["palu", "--keep", 0.5]
METHODS = {
    "joint": (joint(0.25, "all", {"dtype": "BF16"}), NUMBERS),
    "joint-4": (joint(0.25, "all", {"bits": {"schedule": [4]}, **FUSED}), CODES),
    "joint-exact": (
        joint(0.5, 4, {"bits": {"schedule": [8, 4, 4, 3, 2, 2, 1, 0]}, **STATIC}, 20), CODES,
    ),
    "palu-each": (PALU + ["--group-heads", 1], NUMBERS),
    "palu-groups": (PALU + ["--group-heads", 4], NUMBERS),
    "palu-joint": (PALU + ["--group-heads", "all"], NUMBERS),
    "palu-4": (PALU + ["--key-bits", 4, "--value-bits", 4], CODES),
    "palu-3": (PALU + ["--key-bits", 3, "--value-bits", 3, "--group-heads", "all"], CODES),
    "palu-2": (PALU + ["--key-bits", 2, "--value-bits", 2, "--group-heads", 4], CODES),
    "palu-schedule": (
        ["uniform", "--keep", 0.75, "--hadamard", "off", "--group-heads", 4]
        + ["--key-bits", "8,4,4,3,2,1,0,0", "--value-bits", "8,8,4,4,4,2,2,0"],
        CODES,
    ),
    "lorc": (["lorc", "--keep", 0.6], NUMBERS),
    "rap": (["rap", "--keep", 0.7], NUMBERS),
    "rap-4": (["rap", "--keep", 0.7, "--key-bits", 4, "--value-bits", 4], CODES),
    "commuting": (["commuting", "--keep", 0.5], NUMBERS),
    "svdq": (["svdq", "--value-bits", 4], CODES),
    "svdq-rotated": (["svdq", "--post-rope"], CODES),
    "channel": (["channel", "--average-bits", 4.5], CODES),
    "palu-2-exact": (
        PALU + ["--key-bits", 2, "--value-bits", 2, "--group-heads", 4, "--exact-window", 48],
        CODES,
    ),
    "palu-2-sinks-exact": (
        PALU + ["--key-bits", 2, "--value-bits", 2, "--group-heads", 4, "--exact-window", 48]
        + ["--exact-sinks", 4],
        CODES,
    ),
    "svdq-exact": (["svdq", "--value-bits", 4, "--exact-window", 20], CODES),
    "svdq-sinks-exact": (["svdq", "--value-bits", 4, "--exact-sinks", 9], CODES),
    "rap-exact": (
        ["rap", "--keep", 0.7, "--key-bits", 3, "--value-bits", 3, "--exact-window", 7], CODES,
    ),
}


# The models cover, in this order: RoPE on a quarter of each head; learned positions; biases and grouped heads; a
# sliding window shorter than the texts; layers with and without RoPE; experts. All are small, with random weights and
# nonzero biases.
FAMILIES = {
    "pythia-160m": ("palu", "rap-exact", "commuting", "svdq-rotated", "channel", "joint-exact"),
    "opt-125m": ("palu", "palu-4", "svdq", "joint-4"),
    "qwen2.5-0.5b": ("palu", "rap-4", "commuting", "svdq", "joint"),
    "mistral-7b": ("palu-4", "commuting", "svdq-exact", "svdq-sinks-exact", "joint-exact"),
    "smollm3-3b": ("palu", "rap-4", "commuting", "svdq", "channel"),
    "mixtral-8x7b": ("palu-4", "rap-4", "svdq"),
}
# scripts/test runs only these models, and only these methods with evictions.
QUICK_FAMILIES = ("pythia-160m", "qwen2.5-0.5b", "mistral-7b", "smollm3-3b")
QUICK_METHODS = ("joint-4", "palu-groups", "palu-4", "rap-4", "commuting", "svdq-exact", "palu-2-sinks-exact")
GROUPED = ("qwen2.5-0.5b", "mistral-7b", "smollm3-3b", "mixtral-8x7b")
SLIDING_WINDOW = 40
UNIFORM_PALU = PALU + ["--search", "uniform", "--group-heads"]
FAMILY_METHODS = {
    **METHODS,
    "palu": (UNIFORM_PALU + [2], NUMBERS),
    "palu-4": (UNIFORM_PALU + [1, "--key-bits", 4, "--value-bits", 4], CODES),
}
# These models are small and compute in float32, so the tolerances are tight.
FAMILY_TOLERANCE = {NUMBERS: 2e-5, CODES: 1e-3}


def compress(*args):
    done = subprocess.run(
        [COMPRESS, *map(str, args)], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory):
    """Makes kvasir-compress keep its measurements in a folder of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def made(base, methods, folder):
    """Makes a checkpoint of every method and returns it with the oracle's loss and bytes."""
    for name, (method, _) in methods.items():
        if callable(method):
            plan = folder / f"{name}.json"
            plan.write_text(json.dumps(method(base)))
            flags = ["--plan", plan]
        else:
            flags = ["--method", *method]
        compress("apply", "--model", base, *flags, "--text",
                 TINY / "calibration.txt", "--calibration-tokens", 1024, "--sequence-tokens",
                 256, "--out", folder / name, "--quiet")
    compress("evaluate", "--teacher", base, *[folder / name for name in methods], "--text",
             EVALUATION, "--windows", WINDOWS, "--window-tokens", WINDOW_TOKENS, "--quiet",
             "--json", folder / "oracle.json")
    rows = json.loads((folder / "oracle.json").read_text())["rows"]
    assert len(rows) == len(methods)
    return {
        name: (folder / name, row["nats_per_token"], row["kv_bytes_per_token"])
        for name, row in zip(methods, rows)
    }


@pytest.fixture(scope="module")
def artifacts(calibrations, tmp_path_factory):
    return made(TINY, METHODS, tmp_path_factory.mktemp("artifacts"))


def amplify_attention(path):
    """Scales the weights of attention. With small random weights, errors of attention would hardly change the loss."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    for name, tensor in json.loads(data[8:8 + length]).items():
        if "attention." not in name and "self_attn." not in name:
            continue
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        numbers = np.frombuffer(bytes(data[begin:end]), np.float32)
        data[begin:end] = (numbers * np.float32(30 if "bias" in name else 6)).tobytes()
    path.write_bytes(data)


@pytest.fixture(scope="module", params=only_in_soak("methods", FAMILIES, QUICK_FAMILIES))
def family(request, calibrations, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    base = folder / "base"
    compress("init", "--like", request.param, "--layers", 2, "--hidden", 64, "--heads", 4,
             "--kv-heads", 2 if request.param in GROUPED else 4, "--head-dim", 16,
             "--intermediate", 96, "--vocab", 4096, "--context", 256, "--tokenizer", TINY,
             "--dtype", "f32", "--out", base, "--quiet")
    amplify_attention(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    # The family's own ids may be outside of this vocabulary.
    config.update(bos_token_id=0, eos_token_id=1)
    (base / "generation_config.json").unlink(missing_ok=True)
    if "sliding_window" in config:
        config["sliding_window"] = SLIDING_WINDOW
    if config["model_type"] == "smollm3":
        config["no_rope_layers"] = [0, 1]
    (base / "config.json").write_text(json.dumps(config))
    methods = {name: FAMILY_METHODS[name] for name in FAMILIES[request.param]}
    return base, methods, made(base, methods, folder)


@functools.cache
def perplexity(model, *flags):
    return json.loads(
        run("perplexity", "--model", model, "--text", EVALUATION, "--window", WINDOW_TOKENS,
            "--max-windows", WINDOWS, "--json", *flags).stdout
    )


# Chunks, pages and threads must not change a bit.
WAYS = (
    ["--page-tokens", 16, "--chunk", 7, "--threads", 1],
    ["--page-tokens", 32, "--chunk", 64, "--threads", 3],
)
LIFTS = "bits but for reused output"


def invariance(folder, *flags):
    return json.loads(run("inspect", folder, "--json", *flags).stdout)["invariance"]


def check_loss(artifact, tolerance, ways=WAYS):
    folder, nats, kv_bytes = artifact
    whole = perplexity(folder)
    assert math.log(whole["perplexity"]) == pytest.approx(nats, rel=tolerance)
    assert whole["kv_bytes_per_token"] == pytest.approx(kv_bytes, rel=1e-6)
    for flags in ways:
        assert perplexity(folder, *flags)["perplexity"] == whole["perplexity"]
    absorbed = perplexity(folder, "--deterministic")["perplexity"]
    assert math.log(absorbed) == pytest.approx(nats, rel=tolerance)
    assert invariance(folder, "--deterministic") == "bits"
    if invariance(folder) == "bits":
        assert absorbed == whole["perplexity"]


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_equals_that_of_the_python_reference(artifacts, name):
    check_loss(artifacts[name], METHODS[name][1])


def test_the_loss_equals_that_of_the_python_reference_in_other_model_families(family):
    _, methods, own = family
    for name, (_, tolerance) in methods.items():
        check_loss(own[name], FAMILY_TOLERANCE[tolerance], WAYS[:1])


# A third of a window's tokens stays: sinks, the tokens that some plans keep exact, and a few others with the
# most attention.
EVICTING = ["--eviction", "q-hitter", "--eviction-lambda", 0.5, "--eviction-sinks", 9,
            "--eviction-recent", 48, "--eviction-every", 24, "--eviction-budget"]
KEPT_SLOTS = 64


def evicted_loss(base, methods, own, folder):
    """Returns the loss of every method with evictions, as the Python reference measures it."""
    table = folder / "evicting.json"
    compress("evaluate", "--teacher", base, *[own[name][0] for name in methods], "--text",
             EVALUATION, "--windows", WINDOWS, "--window-tokens", WINDOW_TOKENS, "--quiet",
             "--json", table, *EVICTING, KEPT_SLOTS)
    rows = json.loads(table.read_text())["rows"]
    assert len(rows) == len(methods)
    return {name: row["nats_per_token"] for name, row in zip(methods, rows)}


@pytest.fixture(scope="module")
def evicted(artifacts, tmp_path_factory):
    return evicted_loss(TINY, METHODS, artifacts, tmp_path_factory.mktemp("evicted"))


def check_evicted_loss(folder, nats, tolerance):
    evicting = [*EVICTING, KEPT_SLOTS]
    found = perplexity(folder, *evicting)
    assert math.log(found["perplexity"]) == pytest.approx(nats, rel=tolerance)
    assert found["perplexity"] != perplexity(folder)["perplexity"]
    assert perplexity(folder, *evicting, *WAYS[0])["perplexity"] == found["perplexity"]
    # A budget as large as the window evicts nothing.
    whole = perplexity(folder, *EVICTING, WINDOW_TOKENS)
    assert whole["perplexity"] == perplexity(folder)["perplexity"]


@pytest.mark.parametrize("name", only_in_soak("methods", METHODS, QUICK_METHODS))
def test_the_loss_with_evictions_equals_that_of_the_python_reference(artifacts, evicted, name):
    check_evicted_loss(artifacts[name][0], evicted[name], METHODS[name][1])


def test_the_loss_with_evictions_equals_that_of_the_python_reference_in_other_families(family, tmp_path):
    base, methods, own = family
    if "sliding_window" in json.loads((base / "config.json").read_text()):
        refused = run("perplexity", "--model", own[next(iter(methods))][0], "--text",
                      EVALUATION, *EVICTING, KEPT_SLOTS, check=False)
        assert "no layer can evict tokens: every layer has a sliding window" in refused.stderr
        return
    nats = evicted_loss(base, methods, own, tmp_path)
    for name, (_, tolerance) in methods.items():
        check_evicted_loss(own[name][0], nats[name], FAMILY_TOLERANCE[tolerance])


def generated(model, *flags):
    done = run("generate", "--model", model, "--prompt", PROMPT, "--max-tokens", 8,
               "--temperature", 0, "--ignore-eos", "--json", *flags)
    return json.loads(done.stdout)["text"]


@pytest.fixture(scope="module", params=["qwen3-0.6b", "qwen3-30b-a3b"])
def qk_norm(request, tmp_path_factory):
    """A small random model with QK-norm, whose heads are wider than hidden size / heads. The second has 128 experts."""
    base = tmp_path_factory.mktemp("qk-norm") / "base"
    compress("init", "--like", request.param, "--layers", 2, "--hidden", 48, "--heads", 4,
             "--kv-heads", 2, "--head-dim", 32, "--intermediate", 96, "--vocab", 4096,
             "--context", 256, "--tokenizer", TINY, "--dtype", "f32", "--out", base, "--quiet")
    amplify_attention(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (base / "generation_config.json").unlink(missing_ok=True)
    (base / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 1}))
    return base


def expert_load(server):
    """The number of tokens that each expert has run."""
    return [value for (name, _), value in server.metrics().items()
            if name == "kvasir_expert_tokens_total"]


def test_a_model_with_qk_norm_has_the_loss_of_the_reference_with_named_plans(qk_norm, tmp_path):
    compress("evaluate", "--teacher", qk_norm, qk_norm, "--text", EVALUATION, "--windows", WINDOWS,
             "--window-tokens", WINDOW_TOKENS, "--quiet", "--json", tmp_path / "rows.json")
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    dense = perplexity(qk_norm, "--kv-dtype", "f32")
    assert math.log(dense["perplexity"]) == pytest.approx(row["nats_per_token"], rel=2e-5)
    for plan, tolerance in ("dense-bf16", 1e-3), ("dense-8bit", 5e-3), ("rotated-4bit", 5e-2):
        flags = ["--kv-plan", plan]
        found = perplexity(qk_norm, *flags)["perplexity"]
        assert math.log(found) == pytest.approx(row["nats_per_token"], rel=tolerance), plan
        assert perplexity(qk_norm, *flags, *WAYS[0])["perplexity"] == found
        with KvasirProcess("serve", "--threads", 2, "--plan-check", "off", *flags,
                           model=qk_norm) as server:
            text, _, tokens = triton.generate(server.grpc, server.ready["model"], PROMPT,
                                              max_tokens=8, temperature=0, ignore_eos=True)
            prompt_tokens = server.metric("kvasir_prompt_tokens_total")
            load = expert_load(server)
        assert tokens == 8
        assert text == generated(qk_norm, *flags), plan
        config = json.loads((qk_norm / "config.json").read_text())
        assert len(load) == config.get("num_experts", 0)
        # Every token but the last one runs through its experts in both layers.
        run_tokens = prompt_tokens + tokens - 1 if load else 0
        assert sum(load) == run_tokens * 2 * config.get("num_experts_per_tok", 0)


def test_a_plan_of_low_rank_keys_is_refused_for_a_model_with_qk_norm(qk_norm, artifacts, tmp_path):
    plan = json.loads((artifacts["palu-each"][0] / "kv_plan.json").read_text())
    plan["layers"] = plan["layers"][:2]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    done = run("inspect", qk_norm, "--kv-plan", path, check=False)
    assert done.returncode != 0
    assert "normalizes its keys (QK-norm) after the projection: only a full space is possible" in done.stderr


def test_prompts_lift_latents_only_if_several_heads_share_them(artifacts):
    lifting = {name for name in METHODS if invariance(artifacts[name][0]) == LIFTS}
    assert {"palu-joint", "palu-groups", "joint", "joint-exact"} <= lifting
    assert not lifting & {"palu-each", "rap", "rap-4", "channel"}


def test_a_server_reports_whether_prompts_lift_latents(artifacts):
    folder = artifacts["palu-joint"][0]
    text = EVALUATION.read_text()[:1500]
    flops = []
    for flags, words in (["--deterministic"], "bits"), ([], LIFTS):
        with KvasirProcess("serve", "--threads", 2, *flags, model=folder) as server:
            assert words in server.log()
            infos = [dict(labels) for name, labels in server.metrics()
                     if name == "kvasir_build_info"]
            assert [labels["invariance"] for labels in infos] == [words]
            triton.generate(server.grpc, server.ready["model"], text, max_tokens=1,
                            temperature=0)
            flops.append(server.metric("kvasir_reconstruction_flops_total"))
    assert 0 < flops[0] < flops[1]


def test_a_window_of_exact_tokens_takes_more_bytes_and_lowers_the_loss(artifacts):
    plain, exact = (artifacts[name] for name in ("palu-2", "palu-2-exact"))
    assert exact[1] < plain[1]
    assert exact[2] == plain[2]
    fixed = [json.loads(run("inspect", folder, "--json").stdout)["kv_fixed_bytes_per_sequence"]
             for folder, _, _ in (plain, exact)]
    assert fixed[0] == 0 and fixed[1] > 0


def test_evaluate_adds_exact_tokens_to_a_checkpoint(artifacts, tmp_path):
    """Codes without exact tokens, evaluated with sinks and a window, have the row of a plan that has both."""
    plain, exact = (artifacts[name] for name in ("palu-2", "palu-2-sinks-exact"))
    compress("evaluate", "--teacher", TINY, f"{plain[0]}:sinks=4,window=48", plain[0], "--text",
             EVALUATION, "--windows", WINDOWS, "--window-tokens", WINDOW_TOKENS, "--quiet",
             "--json", tmp_path / "rows.json")
    added, without = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert added["model"] == without["model"] + ":sinks=4,window=48"
    assert (added["exact_sinks"], added["exact_window"]) == (4, 48)
    assert (without["exact_sinks"], without["exact_window"]) == (0, 0)
    assert added["nats_per_token"] == exact[1] < without["nats_per_token"] == plain[1]
    assert added["kv_bytes_per_token"] == without["kv_bytes_per_token"]
    inspect = json.loads(run("inspect", exact[0], "--json").stdout)
    assert added["fixed_bytes_per_sequence"] == inspect["kv_fixed_bytes_per_sequence"] > 0
    assert without["fixed_bytes_per_sequence"] == 0


@pytest.mark.parametrize("name", ["joint-4", "palu-3", "rap-4", "commuting", "svdq", "palu-2-exact"])
def test_generate_produces_text_with_a_compressed_model(artifacts, name):
    assert generated(artifacts[name][0]).strip()


def test_a_server_answers_as_generate_does(artifacts):
    folder = artifacts["palu-4"][0]
    with KvasirProcess("serve", "--threads", 2, model=folder) as server:
        text, reason, tokens = triton.generate(
            server.grpc, server.ready["model"], PROMPT, max_tokens=8, temperature=0,
            ignore_eos=True)
    assert (text, reason, tokens) == (generated(folder), "length", 8)


def test_the_next_turn_of_a_chat_reuses_cached_pages_and_the_window_of_exact_tokens(artifacts):
    folder = artifacts["palu-2-exact"][0]
    turns = []
    for flag in ("--prefix-caching", "--no-prefix-caching"):
        with KvasirProcess("serve", "--deterministic", flag, model=folder) as server:
            text, counts = EVALUATION.read_text()[:700], [(0, 0)]
            for tokens in (100, 20):
                answer, _, _ = triton.generate(
                    server.grpc, server.ready["model"], text, max_tokens=tokens,
                    temperature=0, ignore_eos=True)
                text += answer + " So"
                wait_until(
                    lambda: server.metric("kvasir_prompt_tokens_total") > counts[-1][0],
                    "the request has ended")
                counts.append((server.metric("kvasir_prompt_tokens_total"),
                             server.metric("kvasir_prompt_tokens_cached_total")))
            turns.append((text, counts))
    (found, [_, (first, none), (both, cached)]), (alone, [_, _, (_, without)]) = turns
    assert found == alone
    assert none == without == 0
    # The prefix cache has the whole pages of the prompt, except where the text of the answer is tokenized differently.
    assert both - first - 2 * PAGE_TOKENS <= cached < both - first


POOL_PAGES, PAGE_TOKENS, LONGEST = 40, 64, 448
SAMPLED = {
    "tokens": "kvasir_kv_cache_logical_tokens",
    "bytes": "kvasir_kv_cache_used_bytes",
    "side_pages": "kvasir_kv_cache_side_bytes",
    "leaked": "kvasir_cache_leaked_pages",
}


def sample(server):
    """The gauges of the cache at one moment."""
    metrics = server.metrics()
    gauges = {key: metrics[(name, frozenset())] for key, name in SAMPLED.items()}
    for kind in ("padding", "unfilled", "side"):
        gauges[kind] = metrics[("kvasir_kv_cache_waste_bytes", frozenset({("kind", kind)}))]
    return gauges


def while_it_runs(server):
    """Samples taken during one long answer. A scrape may come while gauges are being set, so only samples that two
    scrapes in a row agree on count."""
    model = server.ready["model"]
    client = threading.Thread(
        target=triton.generate, args=(server.grpc, model, "Once upon a time"),
        kwargs={"max_tokens": LONGEST - 64, "ignore_eos": True, "timeout": 120},
    )
    client.start()
    samples, last = [], None
    while client.is_alive():
        gauges = sample(server)
        if gauges == last and gauges["tokens"] > 0 and gauges not in samples:
            samples.append(gauges)
        last = gauges
    client.join()
    return samples


BYTES_OF = [
    "dense", "palu-4", "rap", "svdq", "lorc", "palu-2-exact", "rap-exact", "palu-2-sinks-exact",
    "joint-4", "joint-exact",
]
QUICK_BYTES_OF = ("dense", "palu-4", "svdq", "rap-exact", "palu-2-sinks-exact", "joint-4")
# In these plans, keys are read as they are stored.
NOTHING_REBUILT = ("dense", "rap", "rap-exact")


@pytest.mark.parametrize("name", only_in_soak("methods", BYTES_OF, QUICK_BYTES_OF))
def test_inspect_perplexity_metrics_and_allocator_report_the_same_bytes(artifacts, name):
    """All of them are exactly equal."""
    folder = TINY if name == "dense" else artifacts[name][0]
    lengths = ",".join(map(str, range(1, LONGEST + 1)))
    inspect = json.loads(run("inspect", folder, "--json", "--lengths", lengths).stdout)
    at_length = {row["tokens"]: row for row in inspect["at_length"]}
    per_token = inspect["kv_bytes_per_token"]
    fixed = inspect["kv_fixed_bytes_per_sequence"]
    unused = fixed - inspect["kv_fixed_payload_bytes_per_sequence"]
    assert (fixed > 0) == name.endswith("-exact") and (fixed > unused or fixed == 0)
    page_bytes = per_token * PAGE_TOKENS

    measured = perplexity(folder)
    assert measured["kv_bytes_per_token"] == per_token
    assert measured["kv_compression_ratio"] == inspect["kv_compression_ratio_bf16"]
    assert measured["kv_fixed_bytes_per_sequence"] == fixed
    assert measured["kv_pool_bytes"] == measured["kv_pool_pages"] * page_bytes
    assert measured["kv_held_bytes"] == at_length[measured["kv_held_tokens"]]["kv_bytes"]

    pool = int(POOL_PAGES * page_bytes)
    with KvasirProcess("serve", "--kv-cache-bytes", pool, model=folder) as server:
        assert server.metric("kvasir_kv_cache_bytes_per_token") == per_token
        assert server.metric("kvasir_kv_cache_fixed_bytes_per_sequence") == fixed
        # The text form of a metric has fewer digits.
        assert server.metric("kvasir_kv_cache_compression_ratio") == pytest.approx(
            inspect["kv_compression_ratio_bf16"], rel=1e-12)
        assert server.metric("kvasir_kv_cache_pool_bytes") == pool
        layers = [key for key in server.metrics() if key[0] == "kvasir_kv_layer_info"]
        assert {tuple(sorted(labels)) for _, labels in layers} == {
            tuple(sorted({
                ("layer", str(row["layer"])), ("side", row["side"]), ("method", row["method"]),
                ("rank", str(row["rank"])), ("bits", row["bits"]),
            }))
            for row in inspect["layers"]
        }

        samples = while_it_runs(server)
        assert samples
        for gauges in samples:
            row = at_length[int(gauges["tokens"])]
            assert row["components"]["per_sequence"] == fixed
            assert gauges == {
                "tokens": row["tokens"], "bytes": row["kv_bytes"], "side_pages": fixed,
                "side": unused, "leaked": 0,
                **{kind: row["components"][kind] for kind in ("padding", "unfilled")},
            }
        wait_until(lambda: sample(server)["tokens"] == 0, "no sequence is live")
        assert set(sample(server).values()) == {0}
        free = server.metric("kvasir_kv_cache_free_pages")
        assert free + server.metric("kvasir_kv_cache_cached_pages") == POOL_PAGES

        rebuilds = inspect["reconstruction_flops"] > 0
        assert rebuilds == (name not in NOTHING_REBUILT)
        flops = server.metric("kvasir_reconstruction_flops_total")
        if rebuilds:
            assert flops >= inspect["reconstruction_flops"] * LONGEST
        else:
            assert flops == 0
        codes = server.metric("kvasir_kv_static_codes_total")
        clamped = server.metric("kvasir_kv_clamped_codes_total")
        assert (codes > 0) == (name in ("svdq", "joint-exact"))
        assert 0 <= clamped <= codes / 10


SHORT, LONG, LONGER = 1024, 5120, 65536
# For comparison: in float32, all keys of one layer take 5 MiB at LONG, and the keys of one head take 8 MiB at LONGER.
UNEXPLAINED_BYTES = 3 << 20


# The peak of a child counts what its parent held at the fork. This process holds more than the program does, so a small
# process starts it.
PEAK_OF = """
import os, sys
pid = os.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss * 1024, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_of(*args, **options):
    """Peak resident bytes of `kvasir ARGS...`, and its output."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", PEAK_OF, BINARY, *map(str, args)], capture_output=True,
        text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1]), done.stdout


def peak_and_pool(model, window):
    """Peak resident bytes of a run over one window, and the bytes of its pool."""
    peak, output = peak_of("perplexity", "--model", model, "--text", EVALUATION, "--window",
                         window, "--max-windows", 1, "--json")
    report = json.loads(output)
    assert report["kv_held_tokens"] == window - 1
    return peak, report["kv_pool_bytes"]


@pytest.mark.parametrize("name", ["palu-3", "rap-4"])
def test_peak_memory_grows_only_by_the_pool(artifacts, tmp_path, name):
    folder = altered_model(tmp_path / name, artifacts[name][0], max_position_embeddings=LONG)
    short_peak, short_pool = peak_and_pool(folder, SHORT)
    long_peak, long_pool = peak_and_pool(folder, LONG)
    assert long_pool > short_pool
    assert abs((long_peak - short_peak) - (long_pool - short_pool)) < UNEXPLAINED_BYTES


SEQUENCES = 2


def peak_of_a_step(folder, context):
    """Peak resident bytes of one decode step. The model has the built-in shape and random weights, the plan is in
    `folder`, and the pool just holds the sequences."""
    peak, output = peak_of(
        "bench", "decode", "--quick", "--paced", "--random-weights", "--shape", "kvasir-tiny",
        "--plan", folder / "kv_plan.json", "--batch", SEQUENCES, "--context", context,
        "--steps", 1, "--fill", "random", input="\n")
    assert "seconds_per_step" in output
    return peak


@pytest.mark.parametrize("name", ["palu-3", "svdq-exact"])
def test_peak_memory_of_decoding_grows_only_by_the_cache(artifacts, name):
    folder = artifacts[name][0]
    inspect = json.loads(
        run("inspect", folder, "--json", "--lengths", f"{SHORT + 1},{LONGER + 1}").stdout)
    short, long = (SEQUENCES * row["kv_bytes"] for row in inspect["at_length"])
    grown = peak_of_a_step(folder, LONGER) - peak_of_a_step(folder, SHORT)
    assert abs(grown - (long - short)) < UNEXPLAINED_BYTES
