"""Before a server uses a plan, it compares the plan with a dense cache. These tests use real checkpoints, with and
without keys that are much larger in some dimensions."""

import json
import re

import numpy as np
import pytest

import triton
from kvasir_process import TINY, KvasirProcess, altered_model, run
from test_artifact import read_tensors, write_tensors

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 6, 16, 8, 32, 256


def bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def scaled(tensors, name, exponent, dims):
    """Multiplies these rows of each head of a projection by 2^exponent."""
    for layer in range(LAYERS):
        key = f"model.layers.{layer}.self_attn.{name}_proj.weight"
        dtype, shape, data = tensors[key]
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(-1, DIM, HIDDEN).copy()
        values[:, dims] = np.ldexp(values[:, dims], exponent)
        tensors[key] = (dtype, shape, bf16(values))


@pytest.fixture(scope="module")
def with_uneven_keys(tmp_path_factory):
    """The tiny model with keys that are 2^7 times as large in the slowest pair of each head. It computes the same as before,
    because its queries are as much smaller there."""
    folder = altered_model(tmp_path_factory.mktemp("uneven") / "tiny")
    tensors = read_tensors(folder / "model.safetensors")
    scaled(tensors, "q", -7, [DIM // 2 - 1, DIM - 1])
    scaled(tensors, "k", 7, [DIM // 2 - 1, DIM - 1])
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def divergence(log, plan):
    (kl,) = re.findall(rf" plan check plan={plan} kl_per_token=(\S+) tokens=256 ", log)
    return float(kl)


def test_the_divergence_of_a_plan_is_logged_and_exported():
    with KvasirProcess("serve", "--kv-plan", "dense-8bit") as server:
        kl = divergence(server.log(), "dense-8bit")
        assert 0 < kl < 0.01
        assert server.metric("kvasir_kv_plan_check_kl") == pytest.approx(kl, rel=1e-4)


def test_a_plan_that_changes_a_model_too_much_is_refused_unless_a_flag_says_otherwise(with_uneven_keys):
    done = run("serve", "--model", with_uneven_keys, "--kv-plan", "rotated-4bit", "--grpc-port", "0", check=False)
    assert done.returncode == 1
    assert re.search(r"the plan rotated-4bit changes this model: .* divergence of \S+ nats a token, the limit is 0.5; use "
                     "--kv-plan auto, or --plan-check warn", done.stderr), done.stderr
    with KvasirProcess("serve", "--kv-plan", "rotated-4bit", "--plan-check", "warn", model=with_uneven_keys) as server:
        assert divergence(server.log(), "rotated-4bit") > 0.5
        assert "W the plan rotated-4bit changes this model" in server.log()
    with KvasirProcess("serve", "--kv-plan", "rotated-4bit", "--plan-check", "off", model=with_uneven_keys) as server:
        assert "plan check off" in server.log()


def test_codes_leave_out_the_bias_of_keys(tmp_path):
    """With the bias in its codes, a rotated plan diverges by more than 1 on this model, and has ten times the perplexity on
    Qwen2.5. RoPE hardly turns the slowest pair of each head, so the softmax cancels the biases, and the model computes the
    same as without them."""
    folder = altered_model(tmp_path / "tiny", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    tensors = read_tensors(folder / "model.safetensors")
    key = np.zeros((KV_HEADS, DIM), np.float32)
    key[:, [DIM // 2 - 1, DIM - 1]] = 200 / np.sqrt(2)
    for layer in range(LAYERS):
        for name, values in ("q", np.zeros(HEADS * DIM)), ("k", key.reshape(-1)), ("v", np.zeros(KV_HEADS * DIM)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = ("BF16", [len(values)], bf16(values))
    write_tensors(folder / "model.safetensors", tensors)
    done = run("check-plan", "--model", folder, "--kv-plan", "rotated-4bit", "--json")
    assert json.loads(done.stdout)["kl"] < 0.005, done.stdout


def test_auto_chooses_no_plan_that_cannot_store_the_lengths_of_keys(tmp_path):
    """Codes store a key's length or scale as a float16. These keys are longer, but the model computes the same as before,
    because its queries are as much smaller."""
    folder = altered_model(tmp_path / "tiny")
    tensors = read_tensors(folder / "model.safetensors")
    scaled(tensors, "q", -20, slice(None))
    scaled(tensors, "k", 20, slice(None))
    write_tensors(folder / "model.safetensors", tensors)
    done = run("check-plan", "--model", folder, "--kv-plan", "rotated-4bit")
    assert "W the plan rotated-4bit changes this model" in done.stderr, done.stderr
    done = run("check-plan", "--model", folder, "--kv-plan", "auto", "--json")
    assert json.loads(done.stdout)["plan"] == "full", done.stdout


@pytest.mark.parametrize("uneven", [False, True])
def test_auto_chooses_the_smallest_plan_that_hardly_changes_the_model(uneven, with_uneven_keys):
    model = with_uneven_keys if uneven else TINY
    with KvasirProcess("serve", "--kv-plan", "auto", model=model) as server:
        (plan,) = re.findall(r" --kv-plan auto plan=(\S+)", server.log())
        tried = re.findall(r" plan check plan=(\S+) kl_per_token=(\S+) ", server.log())
        assert [name for name, _ in tried] == ["rotated-3bit", "rotated-4bit", "dense-8bit"][:len(tried)] != []
        for name, kl in tried:
            assert (float(kl) <= 0.02) == (name == plan), (name, kl)
        assert plan in (("dense-8bit", "full") if uneven else ("rotated-3bit", "rotated-4bit"))
        assert triton.generate(server.grpc, server.ready["model"], "It was", max_tokens=4, temperature=0.0)


def test_auto_keeps_the_plan_of_a_compressed_model():
    with KvasirProcess("serve", "--kv-plan", "auto", model=TINY.with_name("tiny-palu")) as server:
        assert "--kv-plan auto plan=palu" in server.log()
        assert 'I plan check skipped plan=palu why="the plan has weights of its own"' in server.log()


def test_auto_judges_the_plan_of_a_folder_like_a_named_one(tmp_path):
    """Regression test: `auto` served a plan without weights of its own whatever its divergence."""
    folder = altered_model(tmp_path / "tiny")
    tensors = read_tensors(folder / "model.safetensors")
    scaled(tensors, "q", -7, [DIM // 2 - 1, DIM - 1])
    scaled(tensors, "k", 7, [DIM // 2 - 1, DIM - 1])
    write_tensors(folder / "model.safetensors", tensors)
    codec = {"bits": {"schedule": [2]}, "per_token": {}, "param_dtype": "F16", "hadamard_online": {}}
    layer = {side: {"parts": [{"full": {}, "stored": stored, "codec": codec}]}
             for side, stored in (("key", "POST_ROPE"), ("value", "NO_ROPE"))}
    plan = {"schema_version": 1, "base_model": "tiny", "method": "codes", "layers": [layer] * LAYERS}
    (folder / "kv_plan.json").write_text(json.dumps(plan))
    done = run("check-plan", "--model", folder, "--kv-plan", "auto", check=False)
    assert done.returncode == 1 and "the plan codes changes this model" in done.stderr, done.stderr


def test_ranks_of_a_group_compare_plans_together(with_uneven_keys):
    with KvasirProcess("serve", "--kv-plan", "auto", "--tp", "2", "--threads", "1", model=with_uneven_keys) as server:
        log = server.log()
        (plan,) = re.findall(r" --kv-plan auto plan=(\S+)", log)
        tried = re.findall(r" plan check plan=(\S+) kl_per_token=(\S+) ", log)
        assert [(float(kl) <= 0.02) for _, kl in tried] == [name == plan for name, _ in tried] != []
        assert triton.generate(server.grpc, server.ready["model"], "It was", max_tokens=4, temperature=0.0)
    done = run("serve", "--model", with_uneven_keys, "--kv-plan", "rotated-4bit", "--tp", "2", "--threads", "1", "--grpc-port", "0", check=False)
    assert done.returncode == 1 and "the plan rotated-4bit changes this model" in done.stderr, done.stderr


def test_the_result_of_a_plan_check_is_reused_at_later_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def known():
        with KvasirProcess("serve", "--kv-plan", "dense-8bit") as server:
            (found,) = re.findall(r" plan check plan=dense-8bit kl_per_token=(\S+) .* known=(\w+)", server.log())
            return found

    kl, before = known()
    (file,) = (tmp_path / "kvasir/plan-checks").iterdir()
    assert before == "no" and known() == (kl, "yes")
    for content in "", "[]", '{"kl": "x", "tokens": 256}', '{"kl": 1e300, "tokens": 256}', "\0" * 10_000:
        file.write_text(content)
        assert known() == (kl, "no"), content
    # Nothing is kept if the folder cannot be written.
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert known() == (kl, "no")


def test_check_plan_prints_the_divergence_and_fails_if_a_server_would_refuse_the_plan(with_uneven_keys):
    done = run("check-plan", "--model", TINY, "--kv-plan", "rotated-4bit")
    assert re.search(r"^plan check: rotated-4bit: KL 0\.00\d+ a token over 256 tokens, \d+\.\d s$", done.stdout, re.M), done.stdout
    done = run("check-plan", "--model", TINY, "--kv-plan", "auto", "--json")
    found = json.loads(done.stdout)
    assert found["plan"].startswith("rotated-") and found["tokens"] == 256 and 0 < found["kl"] < 0.02
    done = run("check-plan", "--model", with_uneven_keys, "--kv-plan", "rotated-4bit", check=False)
    assert done.returncode == 1 and "changes this model" in done.stderr
    assert run("check-plan", "--model", TINY).stdout == "plan check: the cache is not compressed\n"
    done = run("check-plan", "--model", TINY.with_name("tiny-palu"), check=False)
    assert done.returncode == 0 and "not compared: the plan has weights of its own" in done.stdout


def test_check_plan_compares_on_a_text_of_the_users_own_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = TINY / "evaluation.txt"

    def found(*flags):
        return json.loads(run("check-plan", "--model", TINY, "--kv-plan", "rotated-2bit", "--json", *flags).stdout)

    built_in, short, long = found(), found("--text", text), found("--text", text, "--tokens", "900")
    assert [one["tokens"] for one in (built_in, short, long)] == [256, 256, 450]
    assert 0 < short["kl"] < long["kl"], "most tokens of a short text are exact"
    assert len({one["kl"] for one in (built_in, short, long)}) == 3
    assert len(list((tmp_path / "kvasir/plan-checks").iterdir())) == 1, "only the built-in text's"
    done = run("check-plan", "--model", TINY, "--tokens", "900", check=False)
    assert done.returncode == 2 and "--text" in done.stderr


def test_a_command_for_one_prompt_measures_and_keeps_nothing(tmp_path, monkeypatch):
    """Its context is so short that a plan with exact tokens would seem to have no error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["generate", "--model", TINY, "--prompt", "It was", "--max-tokens", "4", "--temperature", "0"]
    assert run(*command, "--kv-plan", "auto").stdout == run(*command).stdout
    run(*command, "--kv-plan", "rotated-3bit")
    assert not list(tmp_path.iterdir())


def test_no_plan_is_compared_if_the_check_is_off():
    with KvasirProcess("serve", "--kv-plan", "auto", "--plan-check", "off") as server:
        assert "plan check off" in server.log() and "plan check plan=" not in server.log()
        assert server.metric("kvasir_kv_plan_check_kl") == 0  # for a dense cache


def test_codes_without_the_means_of_keys_diverge_less():
    def kl(*flags):
        done = run("check-plan", "--model", TINY, "--kv-plan", "rotated-3bit", "--json", *flags)
        return json.loads(done.stdout)["kl"]

    assert 0 < kl() < 0.9 * kl("--no-key-means")


@pytest.mark.parametrize("flags, left_out", [([], "yes"), (["--no-key-means"], "no")])
def test_the_log_says_whether_codes_leave_out_the_means_of_keys(flags, left_out):
    with KvasirProcess("serve", "--kv-plan", "rotated-4bit", "--plan-check", "off", *flags) as server:
        assert f"means of keys left_out_of_codes={left_out}" in server.log()


def test_without_a_readable_tokenizer_codes_contain_the_means_of_keys_and_a_warning_says_so(tmp_path):
    model = altered_model(tmp_path / "tiny")
    (model / "tokenizer.json").write_text("{")
    for plan, warns in (("rotated-4bit", True), ("dense-bf16", False)):
        done = run("bench", "load", "--model", model, "--kv-plan", plan, "--quick")
        assert ("the means of keys are not measured: the tokenizer cannot be read" in done.stderr) == warns
