"""Every family of models that is served, with several caches each, through a KServe client that sends token ids."""

import functools
import json
import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient import grpc as grpcclient

from kvasir_process import BINARY, ROOT, KvasirProcess, run
from test_kserve import trt_tokens

GOLDEN = ROOT / "tests/golden/models"
# One checkpoint for each family of model/shapes/family.h.
MODELS = {
    "llama": "llama-gqa-tied",
    "mistral": "mistral-window",
    "qwen2": "qwen2-tied",
    "gpt_neox": "neox-parallel-quarter",
    "opt": "opt-tied",
    "qwen3": "qwen3-tied",
    "smollm3": "smollm3-tied",
    "olmo2": "olmo2",
    "phi3": "phi3-longrope-long",
    "gemma3_text": "gemma3-tied",
    "gemma2": "gemma2-tied",
    "mixtral": "mixtral-one-of-three",
    "qwen3_moe": "qwen3moe-mixed",
}
PLANS = ["dense-bf16", "dense-8bit", "rotated-4bit", "a file", "planned"]
MAX_TOKENS = 24
COMPRESS = BINARY.with_name("kvasir-compress")
# Why the planner refuses these checkpoints.
NOT_PLANNED = {
    "qwen3": "QK-norm",
    "qwen3_moe": "QK-norm",
    "olmo2": "QK-norm",
    "gemma3_text": "QK-norm",
    "gemma2": "caps its scores or logits",
    "gpt_neox": "needs RoPE on all dims of a head; this model rotates 2 of 8",
    "phi3": "rotates by LongRoPE",
}


def test_the_table_has_every_family():
    header = (ROOT / "model/shapes/family.h").read_text()
    assert set(MODELS) == set(re.findall(r'\.model_type = "(\w+)"', header))
    for family, name in MODELS.items():
        assert json.loads((GOLDEN / name / "config.json").read_text())["model_type"] == family


def plan_of_file(config):
    """A plan whose even layers have keys of 8 and values of 3 bits. The odd ones have BF16 keys, rotated values of
    4 bits and exact tokens."""
    def codes(bits):
        return {"bits": {"schedule": [bits]}, "per_token": {}, "param_dtype": "F16"}

    def side(stored, codec, window=0):
        return {"parts": [{"full": {}, "stored": stored, "codec": codec}], "exact_window": window}

    def layer(index):
        rotates = config["model_type"] != "opt" and config.get("no_rope_layers", [1] * 9)[index]
        key = "POST_ROPE" if rotates else "NO_ROPE"
        if index % 2 == 0:
            return {"key": side(key, codes(8)), "value": side("NO_ROPE", codes(3))}
        rotated = codes(4) | {"hadamard_online": {}}
        return {"key": side(key, {"dtype": "BF16"}), "value": side("NO_ROPE", rotated, 5),
                "exact_sinks": 2}

    return {"schema_version": 1, "layers": [layer(i) for i in range(config["num_hidden_layers"])]}


def planned(base, folder):
    """A checkpoint with the plan that `kvasir-compress apply --method auto` makes for the model in `base`."""
    if not COMPRESS.exists():
        pytest.skip("this build has no kvasir-compress")
    config = json.loads((base / "config.json").read_text())
    model = folder / "model"
    shutil.copytree(base, model)
    # Calibration needs a tokenizer. Each of its tokens is one letter.
    letters = [chr(ord("A") + i) for i in range(26)] + [chr(ord("a") + i) for i in range(13)]
    (model / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": {c: i for i, c in enumerate(letters)},
                  "merges": []}}))
    text = folder / "text.txt"
    text.write_text("".join(random.Random(20261129).choices(letters, k=4000)))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dense = 2 * 2 * heads * dim * config["num_hidden_layers"]
    done = subprocess.run(
        [COMPRESS, "apply", "--model", model, "--method", "auto", "--kv-bytes-per-token", str(dense // 2),
         "--windows", "0", "--exact-sinks", "0", "--text", text, "--calibration-tokens", "512", "--sequence-tokens", "32",
         "--out", folder / "planned", "--quiet"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")})
    if config["model_type"] in NOT_PLANNED:
        assert done.returncode == 1 and NOT_PLANNED[config["model_type"]] in done.stderr, done.stderr
        return None
    assert done.returncode == 0, done.stderr
    report = json.loads(run("inspect", folder / "planned", "--json").stdout)
    assert report["kv_payload_bytes_per_token"] <= dense / 2
    return folder / "planned"


def complete(client, model, prompt, max_tokens=MAX_TOKENS):
    """The ids and log probabilities of a greedy completion of `max_tokens` tokens."""
    inputs = trt_tokens(prompt, max_tokens, streaming=False, return_log_probs=(True, "BOOL"),
                        runtime_top_k=(1, "INT32"), end_id=(-1, "INT32"))
    result = client.infer(model, inputs)
    # The schema puts the prompt in front.
    return (result.as_numpy("output_ids").flatten().tolist()[len(prompt):],
            result.as_numpy("output_log_probs").flatten().tolist())


def answers(folder, flags, prompts, max_tokens=MAX_TOKENS):
    """Returns the answers to requests sent one after another, those to requests sent at once, the tokens found in the
    prefix cache, and the number of preemptions."""
    with KvasirProcess("serve", "--threads", 2, "--plan-check", "off", *flags, model=folder) as server:
        ask = functools.partial(complete, model=server.ready["model"], max_tokens=max_tokens)
        with grpcclient.InferenceServerClient(server.grpc) as client, \
                ThreadPoolExecutor(len(prompts)) as pool:
            # In the second round, prefixes are in the cache.
            alone = [ask(client, prompt=prompt) for prompt in prompts]
            together = list(pool.map(lambda prompt: ask(client, prompt=prompt), prompts))
        return (alone, together, server.metric("kvasir_prefix_cache_hit_tokens_total"),
                server.metric("kvasir_num_preemptions_total"))


def least_pool(folder, flags):
    """The bytes of the smallest KV cache that is accepted."""
    done = run("serve", "--plan-check", "off", *flags, "--kv-cache-bytes", 1, "--model", folder,
               "--grpc-port", 0, "--metrics-port", 0, "--admin-port", 0, "--health-port", 0, check=False)
    return int(re.search(r"raise --kv-cache-bytes to at least (\d+) bytes", done.stderr)[1])


@pytest.mark.parametrize("family", NOT_PLANNED)
def test_the_planner_refuses_models_that_it_cannot_plan_with_the_reason(family, tmp_path):
    assert planned(GOLDEN / MODELS[family], tmp_path) is None


@pytest.mark.parametrize("family, plan", [
    (family, plan) for family in MODELS for plan in PLANS if plan != "planned" or family not in NOT_PLANNED])
def test_a_client_gets_the_same_tokens_whatever_the_batch_the_chunks_the_prefixes_and_the_preemptions(
        family, plan, tmp_path):
    folder = GOLDEN / MODELS[family]
    config = json.loads((folder / "config.json").read_text())
    expected = json.loads((folder / "expected.json").read_text())
    flags = ["--kv-plan", plan, "--page-tokens", 16, "--max-model-len", 64]
    if plan == "planned":
        # Without --deterministic, prompts lift this plan's latents, which rounds differently.
        flags = [*flags[2:], "--deterministic"]
        folder = planned(folder, tmp_path)
    if plan == "a file":
        (tmp_path / "plan.json").write_text(json.dumps(plan_of_file(config)))
        flags[1] = tmp_path / "plan.json"
    prompt = expected["input_ids"]
    prompts = [prompt[:length] for length in (40, 17, 1)] + [prompt[begin:begin + 10] for begin in range(3, 6)]
    alone, together, hits, _ = answers(folder, flags, prompts)
    assert all(len(ids) == MAX_TOKENS for ids, _ in alone)
    assert all(np.isfinite(log_probs).all() for _, log_probs in alone)
    assert together == alone
    assert hits > 0
    # Chunks of 7 tokens, and a pool that is too small for all sequences.
    small = [*flags, "--max-batched-tokens", 7, "--max-num-seqs", 6, "--no-prefix-caching",
             *([] if plan == "planned" else ["--deterministic"])]
    least = least_pool(folder, small)
    preempted = False
    # The pages that a sequence takes decide which pool preempts.
    for times in (1.5, 1.75, 1.25):
        *both, _, preemptions = answers(folder, [*small, "--kv-cache-bytes", int(times * least)], prompts)
        assert both == [alone, alone]
        preempted = preempted or preemptions > 0
        if preempted:
            break
    assert preempted
    if plan != "dense-bf16":
        return
    # The recorded logits are those of transformers for the whole sequence.
    logits = np.fromfile(folder / "expected.f32", np.float32).reshape(expected["logits_shape"])
    for (ids, _), own in zip(alone, prompts):
        if own == prompt[:len(own)]:
            row = np.sort(logits[len(own) - 1])
            assert row[-1] - row[-2] < 0.05 or ids[0] == logits[len(own) - 1].argmax()


@pytest.mark.parametrize("family", MODELS)
def test_a_client_gets_the_greedy_tokens_of_transformers(family):
    folder = GOLDEN / MODELS[family]
    expected = json.loads((folder / "expected.json").read_text())
    if "greedy" not in expected:
        pytest.skip("the recorded output of this checkpoint has only logits, which the test above compares")
    with KvasirProcess("serve", "--kv-plan", "dense-bf16", "--plan-check", "off", model=folder) as server, \
            grpcclient.InferenceServerClient(server.grpc) as client:
        ids, _ = complete(client, server.ready["model"], expected["input_ids"][:9], len(expected["greedy"]))
    assert ids == expected["greedy"]


# Why these checkpoints are refused for two ranks.
UNDIVIDED = {
    "gpt_neox": "3 KV heads, 3 query heads and 32 MLP features cannot be divided",
    "opt": "3 KV heads, 3 query heads and 32 MLP features cannot be divided",
    "olmo2": r"the norm of queries and keys \(QK-norm\) sums over all heads",
}


@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_give_the_tokens_of_one_rank(family):
    folder = GOLDEN / MODELS[family]
    prompt = json.loads((folder / "expected.json").read_text())["input_ids"]
    prompts = [prompt[:40], prompt[3:20]]
    flags = ["--kv-plan", "rotated-4bit", "--tp", 2, "--local-ranks", 2]
    if family in UNDIVIDED:
        with pytest.raises(RuntimeError, match=UNDIVIDED[family]):
            answers(folder, flags, prompts)
        return
    # Few tokens, because a rounding error grows when it changes a code of the cache.
    two = answers(folder, flags, prompts, max_tokens=6)[0]
    one = answers(folder, flags[:2], prompts, max_tokens=6)[0]
    assert [ids for ids, _ in two] == [ids for ids, _ in one]
    for (_, mine), (_, other) in zip(two, one):
        assert mine == pytest.approx(other, abs=2e-3)
