"""kvasir-compress plan, apply and evaluate: they make a compressed checkpoint, and they refuse bad input before
anything is written."""

import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess

import pytest

from kvasir_process import BINARY, ROOT, TINY, altered_model, run

COMPRESS = BINARY.with_name("kvasir-compress")
CALIBRATION = TINY / "calibration.txt"
GOLDEN = ROOT / "tests" / "golden"
# Two sequences are enough to run every path.
FEW_TOKENS = ["--text", CALIBRATION, "--calibration-tokens", 512, "--sequence-tokens", 256]


@pytest.fixture
def compress(tmp_path):
    """Runs kvasir-compress with a cache of its own."""

    def compress(*args, ok=True, **environment):
        done = subprocess.run(
            [COMPRESS, *map(str, args)], capture_output=True, text=True, timeout=120,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment})
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done

    return compress


def refused(done, *parts, code=1):
    """Asserts that the command failed with this exit code and reason, and without a trace of C++."""
    assert done.returncode == code, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr
    assert "Exception raised from" not in done.stderr


def inspected(*args):
    """The report of `kvasir inspect --json`. It fails unless the server finds the tensors that the plan needs."""
    return json.loads(run("inspect", *args, "--json").stdout)


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length])


@pytest.mark.parametrize(
    "method",
    [
        ["palu", "--keep", 0.5],
        ["palu", "--keep", 0.5, "--key-bits", 4, "--value-bits", 3],
        ["uniform", "--keep", 0.5, "--decomposition", "svd"],
        ["lorc", "--keep", 0.6],
        ["rap", "--keep", 0.7],
        ["commuting", "--keep", 0.5],
        ["svdq", "--value-bits", 4],
        ["svdq", "--post-rope"],
        ["channel", "--average-bits", 4.5],
        ["auto", "--kv-bytes-per-token", 700, "--speed", "storage", "--windows", 0],
        ["auto", "--kv-bytes-per-token", 900, "--windows", 0],
    ],
    ids=lambda m: "-".join(map(str, m)).replace("--", ""),
)
def test_every_compression_method_can_plan_and_apply(compress, tmp_path, method):
    out = tmp_path / "out"
    done = compress("apply", "--model", TINY, "--method", *method, *FEW_TOKENS, "--out", out,
                    "--json", "--quiet")
    report = json.loads(done.stdout)
    assert report["kv_bytes_per_token"] < report["dense_bf16_bytes_per_token"]
    assert (out / "kv_plan.json").exists() and (out / "tokenizer.json").exists()
    assert (out / "kv_plan.prediction.json").exists() == (method[0] == "auto")
    assert inspected(out)["kv_bytes_per_token"] == report["kv_bytes_per_token"]
    assert not (tmp_path / "out.partial").exists()


# The first model has biases, and RoPE rotates a quarter of each head. The second model has no RoPE.
@pytest.mark.parametrize("shape", ["pythia-160m", "opt-125m"])
def test_model_families_with_other_layers_and_tensor_names_are_compressed(compress, tmp_path, shape):
    base, out = tmp_path / "base", tmp_path / "out"
    compress("init", "--like", shape, "--layers", 2, "--hidden", 64, "--heads", 4, "--kv-heads",
             4, "--head-dim", 16, "--intermediate", 96, "--vocab", 4096, "--context", 256,
             "--tokenizer", TINY, "--dtype", "f32", "--out", base, "--quiet")
    done = compress("apply", "--model", base, "--method", "palu", "--search", "uniform",
                    "--keep", 0.5, *FEW_TOKENS, "--out", out, "--json", "--quiet")
    assert json.loads(done.stdout)["kept_numbers"] == pytest.approx(0.5, abs=0.1)
    before, after = header(base / "model.safetensors"), header(out / "model.safetensors")
    for name in before:
        if "attention." not in name and "self_attn." not in name:
            assert name in after, name
    assert "model.layers.1.self_attn.v_proj.down.weight" in after
    assert not any("query_key_value" in name or "out_proj" in name for name in after)
    done = compress("evaluate", "--teacher", base, out, "--text", TINY / "evaluation.txt",
                    "--windows", 2, "--window-tokens", 128, "--quiet")
    assert "out " in done.stdout and "nan" not in done.stdout
    inspected(out)


# So that ranks have equal bytes, groups of heads that would span ranks are made smaller.
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "method",
    [
        ["uniform", "--keep", 0.5],
        ["uniform", "--keep", 0.5, "--key-bits", 4, "--value-bits", 4],
        ["lorc", "--keep", 0.6],
        ["svdq", "--value-bits", 4],
        ["channel", "--average-bits", 4.5],
        ["q-hitter", "--eviction-budget", 0.2],
    ],
    ids=lambda m: "-".join(map(str, m)).replace("--", ""),
)
def test_a_plan_for_several_ranks_stores_no_keys_or_values_on_two_ranks(compress, tmp_path, method, tp):
    plan = tmp_path / "plan.json"
    done = compress("plan", "--model", TINY, "--method", *method, "--tp", tp, "--out", plan,
                    "--json", *FEW_TOKENS)
    report = json.loads(done.stdout)
    ranks = report["tensor_parallel"]
    assert len(ranks["ranks"]) == ranks["size"] == tp
    assert ranks["uneven_layers"] == []
    # Only slot metadata may be replicated, because all heads of a layer evict the same tokens.
    assert all(replica["side"] is None for replica in ranks["replicas"])
    assert ranks["most_kv_bytes_per_token"] <= 1.1 * report["kv_bytes_per_token"] / tp
    # The figures equal those of inspect, which also counts weights.
    inspection = inspected(TINY, "--kv-plan", plan, "--tp", tp)
    assert inspection["provenance"]["target_tp"] == tp
    of_inspect = inspection["tensor_parallel"]
    for key in ("most_kv_bytes_per_token", "replicas", "replicated_bytes_per_token"):
        assert of_inspect[key] == ranks[key], key
    weights = [rank["weight_bytes"] for rank in of_inspect["ranks"]]
    assert max(weights) < of_inspect["one_rank_weight_bytes"]


def test_groups_of_heads_that_span_several_ranks_are_reported(compress, tmp_path):
    plan = tmp_path / "plan.json"
    uniform = ["plan", "--model", TINY, "--method", "uniform", "--keep", 0.5]
    compress(*uniform, "--group-heads", "all", "--out", plan)
    spans = ["plan", "--model", TINY, "--method", "q-hitter", "--evict-from", plan,
             "--eviction-budget", 0.2, "--tp", 2]
    text = compress(*spans).stdout
    assert "tensor parallel       2 ranks" in text and "on several ranks" in text
    ranks = json.loads(compress(*spans, "--json").stdout)["tensor_parallel"]
    assert {"key", "value"} <= {replica["side"] for replica in ranks["replicas"]}
    assert ranks["replicated_bytes_per_token"] > 0
    refused(compress(*uniform, "--tp", 3, ok=False), "cannot be divided among 3", "possible numbers of ranks: 1, 2")
    refused(compress(*uniform, "--tp", 4, "--group-heads", 4, ok=False),
            "groups of 4 heads do not divide", "possible group sizes: 1, 2")


def test_plan_and_then_apply_write_the_same_bytes_as_apply_only(compress, tmp_path):
    palu = ["--method", "palu", "--keep", 0.5]
    plan = tmp_path / "plan.json"
    shown = compress("plan", "--model", TINY, *palu, *FEW_TOKENS, "--out", plan)
    assert "kept numbers" in shown.stdout and "calibration:" in shown.stderr
    first = compress("apply", "--model", TINY, "--plan", plan, *FEW_TOKENS, "--out",
                     tmp_path / "a")
    assert "from the cache" in first.stderr  # plan has measured it
    compress("apply", "--model", TINY, *palu, *FEW_TOKENS, "--out", tmp_path / "b")
    for name in ("model.safetensors", "kv_plan.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_apply_uses_the_calibration_that_the_plan_was_made_with(compress, tmp_path):
    """apply must not silently calibrate again with the defaults if the plan's calibration had other settings."""
    plan = tmp_path / "plan.json"
    compress("plan", "--model", TINY, "--method", "palu", "--keep", 0.5, "--cache", tmp_path / "cache", *FEW_TOKENS,
             "--out", plan)
    settings = json.loads(plan.read_text())["provenance"]["calibration"]
    assert (settings["tokens"], settings["sequence_tokens"]) == ("512", "256")
    assert settings["texts"] == [str(CALIBRATION)]
    # apply needs no gradients, so its calibration has another id although it has the same settings.
    explicit = compress("apply", "--model", TINY, "--plan", plan, "--cache", "none", *FEW_TOKENS, "--out", tmp_path / "a")
    calibration = re.search(r"^calibration: ([0-9a-f]{32}), ", explicit.stderr, re.M)[1]
    applied = compress("apply", "--model", TINY, "--plan", plan, "--cache", tmp_path / "cache", "--out", tmp_path / "b")
    assert f"calibration: {calibration}, from the cache" in applied.stderr
    # Without the cache the calibration is repeated. Its cost is printed before it begins.
    again = compress("apply", "--model", TINY, "--plan", plan, "--cache", "none", "--out", tmp_path / "c")
    assert "calibration: 512 tokens in 2 sequences" in again.stderr
    assert f"calibration: {calibration}, " in again.stderr
    for name in ("model.safetensors", "kv_plan.json"):
        assert len({(tmp_path / folder / name).read_bytes() for folder in "abc"}) == 1


# Bits are planned by the predicted cost of their errors. The prediction is of second order and treats errors of
# different tokens as independent.
@pytest.mark.parametrize("speed, spaces", [("storage", "joint all"), ("cpu", "rope keys")])
def test_a_planned_cache_diverges_about_as_predicted(compress, tmp_path, speed, spaces):
    text = ["--calibration-tokens", 8192, "--sequence-tokens", 256]
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    shown = compress("plan", "--model", TINY, "--method", "auto", "--kv-bytes-per-token", 800,
                     "--speed", speed, "--windows", 0, *text, "--out", plan, "--quiet")
    for part in ("predicted KL", "channels by bits", "left out of the calibration", " > ", spaces):
        assert part in shown.stdout
    predicted = json.loads((tmp_path / "plan.json.prediction.json").read_text())
    assert predicted["bytes_per_token"] <= 800
    assert predicted["kl_low"] <= predicted["kl"] <= predicted["kl_high"]
    compress("apply", "--model", TINY, "--plan", plan, *text, "--out", out, "--quiet")
    evaluation = tmp_path / "evaluation.json"
    compress("evaluate", "--teacher", TINY, out, "--text", TINY / "evaluation.txt", "--windows", 12,
             "--window-tokens", 256, "--json", evaluation, "--quiet")
    measured = json.loads(evaluation.read_text())["rows"][0]
    assert 0.25 < measured["kl_nats"] / predicted["kl"] < 4
    assert measured["kv_bytes_per_token"] == predicted["marginal_bytes_per_token"]


def test_a_prediction_is_copied_only_with_its_own_plan(compress, tmp_path):
    plan, beside = tmp_path / "plan.json", tmp_path / "plan.json.prediction.json"
    auto = ["--model", TINY, "--method", "auto", "--kv-bytes-per-token", 800, "--windows", 0,
            *FEW_TOKENS]
    compress("plan", *auto, "--out", plan, "--quiet")

    def apply(name):
        done = compress("apply", "--model", TINY, "--plan", plan, *FEW_TOKENS, "--out",
                        tmp_path / name)
        return tmp_path / name / "kv_plan.prediction.json", done.stderr

    kept, _ = apply("kept")
    assert kept.read_bytes() == beside.read_bytes()
    compress("apply", *auto, "--out", tmp_path / "once", "--quiet")
    assert (tmp_path / "once" / "kv_plan.prediction.json").read_bytes() == beside.read_bytes()
    for model in ([tmp_path / "kept"], [TINY, "--kv-plan", plan]):
        assert inspected(*model)["prediction"]["curve"] == json.loads(beside.read_text())["curve"]

    changed = json.loads(plan.read_text())
    changed["method"] = "another"
    plan.write_text(json.dumps(changed))
    other, said = apply("other")
    assert not other.exists() and "plan.json.prediction.json belongs to another plan" in said


# The divergence of rotated 4-bit codes on one text is the limit for a plan. The plan must take fewer bytes, and it must
# not diverge more on another text.
def test_a_plan_for_a_target_divergence_stays_within_it_on_another_text(compress, tmp_path):
    words = (TINY / "evaluation.txt").read_text()
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    texts[0].write_text(words[:len(words) // 2])
    texts[1].write_text(words[len(words) // 2:])

    def measured(text, *candidates):
        path = tmp_path / "evaluation.json"
        compress("evaluate", "--teacher", TINY, *candidates, "--text", text, "--windows", 12,
                 "--window-tokens", 256, "--json", path, "--quiet")
        return json.loads(path.read_text())["rows"]

    [rotated] = measured(texts[0], "rotated:k4,v4")
    compress("apply", "--model", TINY, "--method", "auto", "--max-kl", rotated["kl_nats"],
             "--windows", 0, "--probes", 2, "--text", CALIBRATION, "--calibration-tokens", 8192,
             "--sequence-tokens", 256, "--out", tmp_path / "out", "--quiet")
    planned, rotated = measured(texts[1], tmp_path / "out", "rotated:k4,v4")
    assert planned["kl_nats"] <= 1.25 * rotated["kl_nats"]
    assert planned["kv_bytes_per_token"] < 0.9 * rotated["kv_bytes_per_token"]


def test_a_plan_takes_at_most_the_requested_bytes_per_token(compress):
    done = compress("plan", "--model", TINY, "--method", "uniform", "--kv-bytes-per-token", 1500,
                    "--key-bits", 4, "--value-bits", 4, "--json", "--quiet")
    report = json.loads(done.stdout)
    assert 1400 < report["kv_bytes_per_token"] <= 1500
    assert report["kv_parameter_bytes_per_token"] > 0


def test_flags_can_be_environment_variables(compress):
    done = compress("plan", "--method", "uniform", "--quiet", KVASIR_MODEL=str(TINY),
                    KVASIR_KEEP="0.5", KVASIR_JSON="true")
    assert json.loads(done.stdout)["kept_numbers"] == pytest.approx(0.5, abs=0.02)


def test_dry_run_writes_nothing(compress, tmp_path):
    done = compress("apply", "--model", TINY, "--method", "uniform", "--keep", 0.5, "--dry-run",
                    "--out", tmp_path / "out")
    assert "compression ratio" in done.stdout
    assert tree(tmp_path) == []


def test_tensors_that_no_plan_changes_are_copied_bit_by_bit(compress, tmp_path):
    out = tmp_path / "out"
    compress("apply", "--model", TINY, "--method", "uniform", "--keep", 0.5, "--decomposition",
             "svd", "--out", out, "--quiet")
    before, after = TINY / "model.safetensors", out / "model.safetensors"
    old, new = header(before), header(after)

    def content(path, head, name):
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        begin, end = head[name]["data_offsets"]
        return data[start + begin:start + end]

    copied = [name for name in old if "_proj" not in name and name != "__metadata__"
              or ".mlp." in name]
    assert len(copied) > 20
    for name in copied:
        assert content(before, old, name) == content(after, new, name), name
    assert "model.layers.0.self_attn.k_proj.weight" not in new
    assert "model.layers.0.self_attn.k_proj.down.weight" in new


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--method", "foo", "--keep", 0.5], "--method: foo not in"),
        (["--method", "palu"], "either --keep or --kv-bytes-per-token"),
        (["--method", "palu", "--keep", 1.5], "--keep: '1.5' is not a number from 0 to 1"),
        (["--method", "svdq", "--keep", 0.5],
         "instead of --keep give --key-bits with eight widths"),
        (["--method", "channel", "--kv-bytes-per-token", 900],
         "instead of --kv-bytes-per-token give --average-bits"),
        (["--method", "palu", "--keep", 0.5, "--key-bits", 5], "'5' is not a bit width"),
        (["--method", "palu", "--keep", 0.5, "--key-bits", "8,4,4"], "8 bit widths, or one for all channels, but has 3"),
        (["--method", "palu", "--keep", 0.5, "--group-heads", 0], "'0' is not valid: give a number of heads"),
        (["--method", "palu", "--keep", 0.5, "--key-keep", 0.5], "--key-keep"),
        (["--method", "auto", "--keep", 0.5], "give --kv-bytes-per-token, --max-kl or both"),
    ],
)
def test_wrong_usage_has_its_own_exit_code_and_an_error_that_names_it(compress, arguments, named):
    refused(compress("plan", "--model", TINY, *arguments, ok=False), named, code=2)


AUTO = ["auto", "--windows", 0, *FEW_TOKENS]


@pytest.mark.parametrize("method, parts", [
    (["uniform", "--keep", 0.01], ["with a rank multiple of 8, take"]),
    (["uniform", "--keep", 0.5, "--group-heads", 3], ["3", "8"]),
    (["uniform", "--kv-bytes-per-token", 20], ["no plan of at most 20 KV bytes per token was found: the smallest plan takes"]),
    (["uniform", "--keep", 0.5, "--model", GOLDEN / "refused" / "qwen2-shared-expert"], ["Qwen2Moe"]),
    (["uniform", "--keep", 0.5, "--model", GOLDEN / "models" / "qwen3-tied"],
     ["Qwen3ForCausalLM normalizes its keys", "--kv-plan rotated-4bit"]),
    (["palu", "--keep", 0.5], ["a calibration text is needed: give --text"]),
    (["palu", "--keep", 0.5, "--text", "/no/such/text"], ["/no/such/text"]),
    ([*AUTO, "--kv-bytes-per-token", 10], ["10.0 bytes per token are too few: the smallest"]),
    ([*AUTO, "--kv-bytes-per-token", 300, "--max-kl", 1e-3],
     ["more than the 0.0010 of --max-kl; ", " bytes per token would suffice"]),
])
def test_a_plan_that_cannot_be_made_is_refused_with_the_reason(compress, method, parts):
    model = [] if "--model" in method else ["--model", TINY]
    refused(compress("plan", *model, "--method", *method, ok=False), *parts)


@pytest.mark.parametrize("layer, side, changes, parts", [
    (2, "key", {"rank": 999}, ["bad.json", "layer 2", "key", "999"]),
    (1, "value", {"heads": [0, 1, 2]}, ["layer 1", "value", "head 3 is in no group"]),
    (0, "key", {}, ["is not a plan for llama-mha"]),
    (0, "key", None, ["bad.json", "colour"]),
], ids=["rank larger than the matrix", "head in no group", "other model", "no plan"])
def test_a_plan_that_does_not_fit_is_refused_and_nothing_is_written(compress, tmp_path, layer, side, changes, parts):
    path, bad = tmp_path / "plan.json", tmp_path / "bad.json"
    compress("plan", "--model", TINY, "--method", "uniform", "--keep", 0.5, "--decomposition", "svd", "--out", path,
             "--quiet")
    plan = json.loads(path.read_text()) if changes is not None else {"layers": [], "colour": "red"}
    if changes:
        plan["layers"][layer][side]["parts"][0]["low_rank"]["groups"][0].update(changes)
    bad.write_text(json.dumps(plan))
    before = tree(tmp_path)
    model = GOLDEN / "models" / "llama-mha" if changes == {} else TINY
    refused(compress("apply", "--model", model, "--plan", bad, "--out", tmp_path / "out", ok=False), *parts)
    assert tree(tmp_path) == before


def test_a_float32_model_is_compared_with_an_uncompressed_float32_cache(compress, tmp_path):
    base = tmp_path / "base"
    compress("init", "--like", "kvasir-tiny", "--layers", 2, "--vocab", 4096, "--tokenizer", TINY,
             "--dtype", "f32", "--out", base, "--quiet")

    report = inspected(base)
    assert report["dense_type"] == "f32" and report["kv_compression_ratio"] == 1
    assert report["kv_compression_ratio_bf16"] == 0.5
    assert report["weight_bytes"] == report["dense_weight_bytes"]
    assert report["at_length"][-1]["kv_bytes"] == report["at_length"][-1]["dense_kv_bytes"]
    assert "compression ratio     1.000 (bf16 0.500)" in run("inspect", base).stdout
    done = compress("plan", "--model", base, "--method", "uniform", "--keep", 0.5, "--quiet")
    assert "dense f32" in done.stdout and "compression ratio     2.0" in done.stdout


def test_the_default_steps_of_the_method_rap_are_those_with_the_least_measured_loss(compress):
    """The default is steps of 2 dimensions. In measurements, steps of 8 had 2.5 times the loss."""
    def options(*method):
        done = compress("plan", "--model", TINY, "--method", *method, *FEW_TOKENS, "--json",
                        "--quiet")
        return json.loads(done.stdout)["options"]

    shown = options("rap", "--keep", 0.7)
    assert "--rank-multiple 2 " in shown and "--search fisher-root" in shown
    assert "--rank-multiple 4 " in options("rap", "--keep", 0.7, "--rank-multiple", 4)
    assert "--rank-multiple 8 " in options("palu", "--keep", 0.5)


def test_the_help_says_when_to_use_each_compression_method(compress):
    text = compress("plan", "--help").stdout
    assert "Which method when" in text
    for method in ("palu --keep", "svdq --value-bits", "rap --keep", "commuting --keep", "lorc"):
        assert method in text
    assert max(map(len, text[text.index("Which method when"):].splitlines())) <= 80


def test_the_method_auto_refuses_a_model_with_qk_norm_before_calibration(compress, tmp_path):
    before = tree(tmp_path)
    done = compress("apply", "--model", GOLDEN / "models" / "qwen3-tied", "--method", "auto",
                    "--kv-bytes-per-token", 800, "--out", tmp_path / "out", ok=False)
    refused(done, "Qwen3ForCausalLM", "QK-norm", "rotated-4bit")
    assert "calibration" not in done.stderr and tree(tmp_path) == before


def test_a_text_that_is_too_short_is_refused(compress, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("A few words only.\n")
    done = compress("plan", "--model", TINY, "--method", "palu", "--keep", 0.5, "--text", text,
                    ok=False)
    refused(done, "short.txt", "too short: it has", "16384 are needed (16 sequences of 1024 tokens)")


def test_the_error_for_a_calibration_domain_that_is_too_short_names_it(compress, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("A few words only.\n")
    done = compress("calibrate", "--model", TINY, "--text", f"long={CALIBRATION}", "--text",
                    f"brief={text}", "--calibration-tokens", 512, "--sequence-tokens", 64,
                    ok=False)
    refused(done, "domain brief (a share of 1/2 of 512 tokens)", "too short: it has",
            "256 are needed (4 sequences of 64 tokens)")


def test_calibrate_uses_the_built_in_domains(compress, tmp_path):
    arguments = ("calibrate", "--model", TINY, "--calibration-tokens", 512, "--sequence-tokens",
                 64, "--cache", tmp_path)
    first = compress(*arguments)
    # Each domain has two sequences and holds one out. Four tokens of each sequence are sinks.
    assert "4 sequences, 240 tokens counted" in first.stdout
    for domain in ("books", "encyclopedia", "code", "dialogue"):
        assert f"  {domain}: 60 tokens" in first.stdout
    assert "memory up to" in first.stderr
    again = compress(*arguments)
    assert again.stdout == first.stdout
    assert "from the cache" in again.stderr


def test_a_text_of_one_domain_causes_a_warning(compress):
    done = compress("calibrate", "--model", TINY, "--text", CALIBRATION, "--calibration-tokens",
                    128, "--sequence-tokens", 64, "--cache", "none")
    assert "warning: the calibration text has only one domain" in done.stderr
    assert "  calibration.txt: 60 tokens" in done.stdout


def model_with(tmp_path, name, value):
    """The built-in model with the first number of a tensor replaced."""
    folder = tmp_path / "broken"
    shutil.copytree(TINY, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin, _ = json.loads(data[8:8 + length])[name]["data_offsets"]
    data[8 + length + begin:8 + length + begin + 2] = value
    path.write_bytes(data)
    return folder


NAN_BF16 = b"\xc0\x7f"


def test_the_error_for_weights_that_are_nan_names_the_tensor(compress, tmp_path):
    name = "model.layers.3.self_attn.k_proj.weight"
    model = model_with(tmp_path, name, NAN_BF16)
    done = compress("apply", "--model", model, "--method", "uniform", "--keep", 0.5,
                    "--decomposition", "svd", "--out", tmp_path / "out", ok=False)
    refused(done, name, "not finite")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_the_error_for_nan_in_calibration_names_the_layer(compress, tmp_path):
    model = model_with(tmp_path, "model.layers.3.mlp.up_proj.weight", NAN_BF16)
    done = compress("plan", "--model", model, "--method", "palu", "--keep", 0.5, *FEW_TOKENS,
                    ok=False)
    refused(done, "not finite", "layer")


def test_a_compressed_model_is_not_compressed_again(compress, tmp_path):
    uniform = ["--method", "uniform", "--keep", 0.5, "--decomposition", "svd"]
    compress("apply", "--model", TINY, *uniform, "--out", tmp_path / "once")
    done = compress("apply", "--model", tmp_path / "once", *uniform, "--out", tmp_path / "twice",
                    ok=False)
    refused(done, "already compressed")


def test_an_output_that_cannot_be_created_is_refused(compress, tmp_path):
    uniform = ["--model", TINY, "--method", "uniform", "--keep", 0.5]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    done = compress("apply", *uniform, "--out", tmp_path / "out", ok=False)
    refused(done, "exists; give --overwrite to replace")
    done = compress("apply", *uniform, "--out", tmp_path / "out", "--overwrite", ok=False)
    refused(done, "is not a checkpoint")
    (tmp_path / "file").write_text("x")
    done = compress("apply", *uniform, "--out", tmp_path / "file" / "out", ok=False)
    refused(done, "cannot create")
    done = compress("plan", *uniform, "--out", tmp_path / "file" / "plan.json", ok=False)
    refused(done, "--out: cannot write")
    assert tree(tmp_path) == ["file", "out", "out/thesis.tex"]


def test_a_full_disk_is_reported_and_no_output_is_left(tmp_path):
    """A limit on file sizes makes writes fail, as a full disk does."""

    def no_large_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        [COMPRESS, "apply", "--model", TINY, "--method", "uniform", "--keep", "0.5",
         "--decomposition", "svd", "--out", tmp_path / "out"],
        capture_output=True, text=True, timeout=120, preexec_fn=no_large_files)
    refused(done, "cannot write", "out.partial/weights-00001", "File too large")
    assert tree(tmp_path) == []


def test_an_interrupted_run_leaves_no_output_and_can_continue(tmp_path):
    """Ctrl-C during the calibration gives exit code 1 and leaves a state. A second run continues from it and writes
    the same bytes as an uninterrupted run."""
    command = [COMPRESS, "apply", "--model", TINY, "--method", "palu", "--keep", "0.5", "--text",
               CALIBRATION, "--calibration-tokens", "3072", "--sequence-tokens", "512", "--threads", "1"]

    def start(out, cache):
        return subprocess.Popen(
            [*map(str, command), "--out", str(tmp_path / out)], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / cache)})

    whole = start("whole", "cache-a")
    assert "mean loss" in whole.communicate(timeout=120)[1] and whole.returncode == 0
    stopped = start("out", "cache-b")
    for line in stopped.stderr:  # the first progress line shows that the calibration runs
        if "layer passes" in line:
            break
    stopped.send_signal(signal.SIGINT)
    text = stopped.communicate(timeout=120)[1]
    assert stopped.returncode == 1 and "the same command continues it" in text
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    again = start("out", "cache-b")
    assert "resuming where the last run stopped" in again.communicate(timeout=120)[1]
    assert again.returncode == 0
    for name in ("model.safetensors", "kv_plan.json"):
        assert ((tmp_path / "out" / name).read_bytes()
                == (tmp_path / "whole" / name).read_bytes())


def test_the_next_run_removes_the_files_of_a_killed_run(compress, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "weights-00001.partial").write_text("half")
    uniform = ["--model", TINY, "--method", "uniform", "--keep", 0.5, "--decomposition", "svd",
               "--out", tmp_path / "out"]
    refused(compress("apply", *uniform, ok=False), "this name is needed for a temporary folder")
    (partial / "kvasir-compress.unfinished").write_text("x")
    compress("apply", *uniform)
    assert not partial.exists() and (tmp_path / "out" / "kv_plan.json").exists()


# ------------------------------------------------------------ evaluate


def test_evaluate_compares_candidates_with_the_teacher(compress, tmp_path):
    compress("apply", "--model", TINY, "--method", "uniform", "--keep", 0.25, "--decomposition",
             "svd", "--out", tmp_path / "small")
    done = compress("evaluate", "--teacher", TINY, TINY, tmp_path / "small", "per-token:k4,v4",
                    "--text", TINY / "evaluation.txt", "--windows", 3, "--window-tokens", 128,
                    "--json", tmp_path / "result.json")
    assert "added nats" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    same, small, quantized = result["rows"]
    assert same["added_nats_per_token"] == 0 and same["top1_agreement"] == 1
    assert small["added_nats_per_token"] > quantized["added_nats_per_token"]
    assert small["kv_bytes_per_token"] < 0.3 * result["teacher"]["kv_bytes_per_token"]
    assert result["windows"] == 3


def test_progress_lines_do_not_interrupt_the_table(tmp_path):
    done = subprocess.run(
        [COMPRESS, "evaluate", "--teacher", TINY, TINY, "per-token:k4,v4", "--text",
         TINY / "evaluation.txt", "--windows", "2", "--window-tokens", "64"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("model "))
    assert [line.split()[0] for line in lines[head + 1:]] == ["tiny", "per-token:k4,v4"]
    assert any("windows" in line for line in lines[:head])


def test_a_folders_name_sends_no_escape_codes_to_the_terminal(tmp_path):
    folder = tmp_path / "evil\x1b[31mred"
    shutil.copytree(TINY, folder)
    text = tmp_path / "text\x1b[2J.txt"
    shutil.copy(TINY / "evaluation.txt", text)
    done = subprocess.run(
        [COMPRESS, "evaluate", "--teacher", folder, folder, "--text", text, "--windows", "2",
         "--window-tokens", "64"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=True)
    assert "\x1b" not in done.stdout
    # It appears in the progress lines, the head and the row.
    assert done.stdout.count("evil\\x1b[31mred") >= 3 and "text\\x1b[2J.txt" in done.stdout


def test_evaluate_refuses_invalid_models_and_texts_before_it_starts(compress, tmp_path):
    evaluate = ["evaluate", "--teacher", TINY, "--text", TINY / "evaluation.txt"]
    refused(compress(*evaluate, "/no/such/folder", "--windows", 2, "--window-tokens", 64,
                     ok=False), "/no/such/folder")
    short = tmp_path / "short.txt"
    short.write_text("A few words.\n")
    refused(compress("evaluate", "--teacher", TINY, TINY, "--text", short, ok=False), "token")
    # These errors are found before the teacher is evaluated, which takes long, so nothing is printed before them.
    for name in ("tiny-hlf", "per-tokn:k4"):
        done = compress(*evaluate, TINY, name, ok=False)
        refused(done, name, "there is no model folder", "baselines begin with ", "rotated:")
        assert done.stdout == ""
    done = compress(*evaluate, TINY, "--json", "/no/such/folder/x.json", ok=False)
    refused(done, "/no/such/folder/x.json")
    assert done.stdout == ""
    refused(compress(*evaluate, ok=False), "candidate", code=2)


def test_oscar_takes_its_rotations_from_the_calibration_text(compress, tmp_path):
    evaluate = ["evaluate", "--teacher", TINY, "--text", TINY / "evaluation.txt", "--windows", 2,
                "--window-tokens", 64]
    done = compress(*evaluate, "oscar:2", ok=False)
    refused(done, 'baseline "oscar:2"', "takes its rotations from a calibration text")
    assert done.stdout == ""
    compress(*evaluate, "oscar:2,sinks=0,window=0", "oscar:16,sinks=0,window=0",
             "--calibration-text", TINY / "calibration.txt", "--calibration-tokens", 1024,
             "--json", tmp_path / "result.json")
    coded, exact = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert coded["kl_nats"] > 0.01
    assert exact["kl_nats"] == pytest.approx(0, abs=1e-5)


def test_settings_of_eviction_are_checked_before_the_teacher_is_evaluated(compress, tmp_path):
    evaluate = ["evaluate", "--quiet", "--teacher", TINY, "--text", TINY / "evaluation.txt",
                "--windows", 2, "--window-tokens", 64]
    done = compress(*evaluate, TINY, "per-token:k4,v4,window=32", "--eviction", "none,h2o",
                    "--eviction-recent", 16, ok=False)
    refused(done, "per-token:k4,v4,window=32: h2o 0.2", "must keep at least 0 sinks and 32 recent tokens")
    assert done.stdout == ""
    art = tmp_path / "art"
    compress("apply", "--quiet", "--model", TINY, "--method", "q-hitter", "--key-bits", 4,
             "--exact-sinks", 6, "--out", art)
    # Candidates may follow a flag whose value is a list.
    done = compress(*evaluate, "--eviction-sinks", 4, "--eviction", "recent,streaming",
                    "--eviction-budget", 0.2, TINY, art, ok=False)
    refused(done, f"{art}: streaming 0.2", "must keep the 6 exact_sinks, but sinks is only 4")
    assert done.stdout == ""
    done = compress(*evaluate, TINY, "per-token:k99", ok=False)
    refused(done, "per-token:k99")
    assert done.stdout == ""


def test_rows_evaluated_before_a_failure_are_written(compress, tmp_path):
    out = tmp_path / "result.json"
    short = altered_model(tmp_path / "short", max_position_embeddings=64)
    done = compress("evaluate", "--teacher", TINY, "per-token:k4,v4", short, "--text",
                    TINY / "evaluation.txt", "--windows", 2, "--window-tokens", 64, "--json", out,
                    ok=False)
    refused(done, "has a context of 64 tokens")
    row, = json.loads(out.read_text())["rows"]
    assert row["model"] == "per-token:k4,v4"
    assert sum(row["window_kl"]) / 2 == pytest.approx(row["kl_nats"])


def test_only_the_listed_layers_are_compressed(compress, tmp_path):
    plan = tmp_path / "plan.json"
    only = ["plan", "--quiet", "--model", TINY, "--method", "uniform", "--keep", 0.5,
            "--out", plan, "--only-layers"]
    compress(*only, "1,4")
    layers = json.loads(plan.read_text())["layers"]
    spaces = [sorted(layer["key"]["parts"][0].keys() & {"full", "low_rank"}) for layer in layers]
    assert spaces == [["full"], ["low_rank"], ["full"], ["full"], ["low_rank"], ["full"]]
    plan.unlink()
    refused(compress(*only, "6", ok=False), "--only-layers: layers must be 0..5, but layer 6 is listed")


def test_eviction_can_be_added_to_any_plan(compress, tmp_path):
    whole, lorc, both = (tmp_path / f"{name}.json" for name in ("whole", "lorc", "both"))
    plan = ["plan", "--quiet", "--model", TINY, "--method"]
    done = compress(*plan, "q-hitter", "--eviction-budget", 0.3, "--out", whole)
    assert "30 % of the prompt, 68 slots at least" in done.stdout
    compress(*plan, "lorc", "--keep", 0.5, "--ranks", "uniform", "--key-bits", 4, "--value-bits", 4,
             "--exact-window", 96, "--eviction", "h2o", "--eviction-budget", 256, *FEW_TOKENS,
             "--out", lorc)
    compress(*plan, "q-hitter", "--evict-from", lorc, "--eviction-budget", 400,
             "--eviction-lambda", 0.7, "--out", both)
    made = [json.loads(path.read_text()) for path in (whole, lorc, both)]
    assert [plan["method"] for plan in made] == ["q-hitter", "lorc+h2o", "lorc+q-hitter"]
    first, second, third = (plan["layers"][0]["eviction"] for plan in made)
    assert first["budget_ratio"] == 0.3
    report = json.loads(compress(*plan, "q-hitter", "--eviction-budget", 0.3, "--eviction-lambda",
                                 1, "--json").stdout)
    assert report["eviction"] == {"method": "q-hitter", "budget": 0.3, "kept_slots": round(
        0.3 * report["sequence_tokens"]), "sinks": 4, "recent": 64, "lambda": 1}
    assert report["kv_bytes_per_sequence"] == pytest.approx(
        report["eviction"]["kept_slots"] * report["kv_bytes_per_token"])
    # Sinks and the exact window of the plan are never evicted.
    assert (second["budget"], second["recent"], second["lambda"]) == (256, 96, 1)
    assert (third["budget"], third["recent"], third["lambda"]) == (400, 100, 0.7)
    assert made[1]["layers"][3]["key"] == made[2]["layers"][3]["key"]

    art = tmp_path / "art"
    compress("apply", "--quiet", "--model", TINY, "--plan", lorc, "--eviction", "streaming",
             "--eviction-budget", 256, *FEW_TOKENS, "--out", art)
    applied = json.loads((art / "kv_plan.json").read_text())
    assert applied["method"] == "lorc+streaming"
    assert applied["layers"][0]["eviction"]["others"] == "LATEST"

    refused(compress(*plan, "q-hitter", "--keep", 0.5, ok=False), "--eviction-budget", code=2)
    refused(compress(*plan, "q-hitter", "--eviction-budget", "1.5", ok=False),
            "'1.5' is not an eviction budget", code=2)
    refused(compress(*plan, "lorc", "--keep", 0.5, "--evict-from", lorc, ok=False),
            "--evict-from can only be used with --method q-hitter", code=2)
    refused(compress(*plan, "q-hitter", "--evict-from", lorc, "--eviction-recent", 64, ok=False),
            "layer 0 eviction", "exact_window of 96 tokens, but recent is only 64")


def test_a_plan_with_only_eviction_has_the_requested_bits_of_keys_and_values(compress, tmp_path):
    out = tmp_path / "plan.json"
    plan = ["plan", "--quiet", "--model", TINY, "--method", "q-hitter", "--out", out]
    for flags, key, value in ((["--value-bits", 4], None, 4), (["--key-bits", 2], 2, None),
                              (["--key-bits", 8, "--value-bits", 4], 8, 4)):
        compress(*plan, *flags)
        made = json.loads(out.read_text())
        layer = made["layers"][3]
        for side, bits in (("key", key), ("value", value)):
            codec, = (part["codec"] for part in layer[side]["parts"])
            assert codec.get("bits", {}).get("schedule") == (bits and [bits])
        assert "full" in layer["key"]["parts"][0] and layer["eviction"]["budget_ratio"] == 0.2
        assert " ".join(map(str, flags)) in made["provenance"]["options"]
    refused(compress(*plan, "--evict-from", out, "--value-bits", 4, ok=False),
            "--key-bits and --value-bits cannot be used with --evict-from", code=2)


def test_the_budget_of_bytes_per_token_includes_the_metadata_of_eviction(compress, tmp_path):
    plan = ["plan", "--quiet", "--model", TINY, "--method", "uniform", "--kv-bytes-per-token",
            2048, "--eviction", "q-hitter", "--json"]
    assert 1900 < json.loads(compress(*plan).stdout)["kv_bytes_per_token"] <= 2048
    refused(compress("plan", "--model", TINY, "--method", "auto", "--kv-bytes-per-token", 2048,
                     "--eviction", "h2o", ok=False), "--evict-from", code=2)


def test_only_the_layers_that_are_listed_evict(compress, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    plan = ["plan", "--quiet", "--model", TINY, "--method"]
    compress(*plan, "uniform", "--keep", 0.5, "--eviction", "h2o", "--only-layers", "1,4", "--seed",
             7, "--out", first)
    layers = json.loads(first.read_text())["layers"]
    assert [l for l, layer in enumerate(layers) if "eviction" in layer] == [1, 4]
    # The other layers of an existing plan and its seed stay as they are.
    compress(*plan, "q-hitter", "--evict-from", first, "--eviction-lambda", 0.7, "--only-layers",
             "4,5", "--out", second)
    made = json.loads(second.read_text())
    assert [layer.get("eviction", {}).get("lambda") for layer in made["layers"]] == [
        None, 1, None, None, 0.7, 0.7]
    assert [layer["key"] for layer in made["layers"]] == [layer["key"] for layer in layers]
    assert int(made["provenance"]["seed"]) == 7
    refused(compress("apply", "--quiet", "--model", TINY, "--plan", first, "--eviction", "h2o",
                     "--only-layers", 6, "--dry-run", ok=False), "must be 0..5, but layer 6 is listed")
    refused(compress(*plan, "auto", "--max-kl", 0.1, "--only-layers", 1, ok=False),
            "--only-layers", code=2)


def test_flags_of_eviction_that_would_have_no_effect_are_refused(compress, tmp_path):
    made = tmp_path / "plan.json"
    compress("plan", "--quiet", "--model", TINY, "--method", "q-hitter", "--out", made)
    for flags in (["apply", "--plan", made, "--out", tmp_path / "art"],
                  ["plan", "--method", "auto", "--max-kl", 0.1]):
        refused(compress(*flags, "--model", TINY, "--evict-from", made, ok=False),
                "--evict-from can only be used with --method q-hitter", code=2)
        for unread in ("--eviction-budget", "--eviction-lambda"):
            refused(compress(*flags, "--model", TINY, unread, 0.3, ok=False),
                    "have no effect without --eviction", code=2)
    refused(compress("evaluate", "--teacher", TINY, TINY, "--text", TINY / "evaluation.txt",
                     "--eviction-recent", 16, ok=False), "have no effect without --eviction", code=2)


def test_a_plan_records_all_given_settings_of_eviction(compress, tmp_path):
    out = tmp_path / "plan.json"
    plan = ["plan", "--quiet", "--model", TINY, "--method", "q-hitter", "--out", out]
    given = ("--eviction q-hitter --eviction-budget 256 --eviction-every 64 --eviction-lambda 0.25 "
             "--eviction-sinks 2 --eviction-recent 32 --eviction-decay 0.5 "
             "--eviction-observation-window 48 --eviction-half-friendliness")
    compress(*plan, *given.split())
    assert json.loads(out.read_text())["provenance"]["options"] == given
    compress(*plan)
    assert "decay" not in json.loads(out.read_text())["provenance"]["options"]


def test_an_eviction_decay_of_0_is_refused(compress):
    # In a plan, 0 means unset, and nothing would decay.
    refused(compress("plan", "--model", TINY, "--method", "q-hitter", "--eviction-decay", 0,
                     ok=False), "--eviction-decay", code=2)


def test_an_evaluation_has_a_row_for_each_method_and_budget_of_eviction(compress, tmp_path):
    out = tmp_path / "result.json"
    done = compress("evaluate", "--quiet", "--teacher", TINY, "per-token:k4,v4", "--text",
                    TINY / "evaluation.txt", "--windows", 2, "--window-tokens", 128, "--eviction",
                    "none,q-hitter,h2o,streaming,recent,random", "--eviction-budget", "0.25,128",
                    "--eviction-recent", 16, "--eviction-every", 16, "--json", out)
    results = json.loads(out.read_text())["rows"]
    rows = {row["model"]: row["kl_nats"] for row in results}
    evictions = ("q-hitter", "h2o", "streaming", "recent", "random")
    assert list(rows) == ["per-token:k4,v4"] + [
        f"per-token:k4,v4 + {name} {budget}" for name in evictions for budget in ("0.25", "128")]
    none = rows["per-token:k4,v4"]
    for name in evictions:
        # A budget of the whole window evicts nothing.
        assert rows[f"per-token:k4,v4 + {name} 128"] == pytest.approx(none, rel=1e-4)
        assert rows[f"per-token:k4,v4 + {name} 0.25"] != pytest.approx(none, rel=1e-3)
    assert "random 0.25" in done.stdout
    # Eviction saves slots: each slot takes the same bytes, and fewer slots stay.
    saved = {row["model"]: row for row in results}
    whole = saved["per-token:k4,v4"]
    assert "eviction" not in whole
    assert whole["kv_bytes_per_sequence"] == 128 * whole["kv_bytes_per_token"]
    fewer = saved["per-token:k4,v4 + h2o 0.25"]
    assert fewer["eviction"] == {"method": "h2o", "budget": 0.25, "kept_slots": 32, "sinks": 4,
                                 "recent": 16, "lambda": 1}
    assert fewer["kv_bytes_per_sequence"] == 32 * whole["kv_bytes_per_token"]
    assert saved["per-token:k4,v4 + recent 128"]["eviction"]["budget"] == 128
    refused(compress("evaluate", "--teacher", TINY, "per-token:k4,v4", "--text",
                     TINY / "evaluation.txt", "--eviction", "lru", ok=False), "'lru' is not an eviction method")
