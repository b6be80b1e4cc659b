"""Every family of models that is served, with several caches each, through a KServe client that sends token ids."""

import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient import grpc as grpcclient

from kvasir_process import ROOT, KvasirProcess
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
PLANS = ["dense-bf16", "dense-8bit", "rotated-4bit", "a file"]
MAX_TOKENS = 6


def test_the_table_has_every_family():
    header = (ROOT / "model/shapes/family.h").read_text()
    assert set(MODELS) == set(re.findall(r'\.model_type = "(\w+)"', header))
    for family, name in MODELS.items():
        assert json.loads((GOLDEN / name / "config.json").read_text())["model_type"] == family


def plan_of_file(config):
    """A plan whose layers differ: keys of 8 and values of 3 bits, then numbers and rotated values of 4 bits with
    exact tokens."""
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


def complete(client, model, prompt):
    """The ids and log probabilities of a greedy completion."""
    inputs = trt_tokens(prompt, MAX_TOKENS, streaming=False, return_log_probs=(True, "BOOL"),
                        runtime_top_k=(1, "INT32"))
    result = client.infer(model, inputs)
    # The schema puts the prompt in front.
    return (result.as_numpy("output_ids").flatten().tolist()[len(prompt):],
            result.as_numpy("output_log_probs").flatten().tolist())


def answers(folder, flags, prompts):
    with KvasirProcess("serve", "--threads", 2, "--plan-check", "off", *flags, model=folder) as server:
        ask = functools.partial(complete, model=server.ready["model"])
        with grpcclient.InferenceServerClient(server.grpc) as client, \
                ThreadPoolExecutor(len(prompts)) as pool:
            # The prompts run one after another, and then at once, when the cache has their prefixes.
            alone = [ask(client, prompt=prompt) for prompt in prompts]
            together = list(pool.map(lambda prompt: ask(client, prompt=prompt), prompts))
        return alone, together, server.metric("kvasir_prefix_cache_hit_tokens_total")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", MODELS)
def test_a_client_gets_the_same_tokens_whatever_the_batch_the_chunks_and_the_prefixes(
        family, plan, tmp_path):
    folder = GOLDEN / MODELS[family]
    config = json.loads((folder / "config.json").read_text())
    expected = json.loads((folder / "expected.json").read_text())
    flags = ["--kv-plan", plan, "--page-tokens", 16]
    if plan == "a file":
        (tmp_path / "plan.json").write_text(json.dumps(plan_of_file(config)))
        flags[1] = tmp_path / "plan.json"
    prompt = expected["input_ids"]
    prompts = [prompt[:length] for length in (40, 17, 1)] + [prompt[3:41]]
    alone, together, hits = answers(folder, flags, prompts)
    # A random model may end at once, but not after most prompts.
    assert sum(len(ids) for ids, _ in alone) > MAX_TOKENS
    assert all(np.isfinite(log_probs).all() for _, log_probs in alone)
    assert together == alone
    assert hits > 0
    small = ["--max-batched-tokens", 7, "--max-num-seqs", 4, "--no-prefix-caching", "--deterministic"]
    assert answers(folder, [*flags, *small], prompts)[:2] == (alone, alone)
    if plan != "dense-bf16":
        return
    # The recorded logits are those of transformers, of the whole sequence.
    logits = np.fromfile(folder / "expected.f32", np.float32).reshape(expected["logits_shape"])
    for (ids, _), own in zip(alone, prompts):
        if ids and own == prompt[:len(own)]:
            row = np.sort(logits[len(own) - 1])
            assert row[-1] - row[-2] < 0.05 or ids[0] == logits[len(own) - 1].argmax()


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
    two = answers(folder, flags, prompts)[0]
    one = answers(folder, flags[:2], prompts)[0]
    assert [ids for ids, _ in two] == [ids for ids, _ in one]
    for (_, mine), (_, other) in zip(two, one):
        assert mine == pytest.approx(other, abs=2e-3)
