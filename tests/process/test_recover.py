"""kvasir-compress recover: which files it writes, and which files it must not change."""

import json
import signal
import subprocess

import pytest

from kvasir_process import BINARY, ROOT, TINY

COMPRESS = BINARY.with_name("kvasir-compress")
TEXT = TINY / "calibration.txt"
SMALL = ["--batch-tokens", 128, "--crop-tokens", 64]


def command(*args):
    return [str(COMPRESS), "recover", "--model", str(TINY), *map(str, args)]


def recover(*args):
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=300)


def test_a_dense_model_is_trained_and_only_its_weights_change(tmp_path):
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[:3000])
    done = recover("--teacher", TINY, "--text", text, "--valid", text, "--steps", 3, *SMALL,
                   "--lr", 0.01, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert "of memory" in done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 3 and result["tokens"] == 3 * 128
    assert result["before"]["added_nats_per_token"] == 0.0  # the model is its own teacher
    assert result["after"]["added_nats_per_token"] < 0.0  # this is the training text
    for name in ["config.json", "generation_config.json", "tokenizer.json",
                 "tokenizer_config.json"]:
        assert (out / name).read_bytes() == (TINY / name).read_bytes()
    before = (TINY / "model.safetensors").read_bytes()
    after = (out / "model.safetensors").read_bytes()
    assert len(after) == len(before) and after != before
    header = 8 + int.from_bytes(before[:8], "little")
    assert after[:header] == before[:header]
    tensors = json.loads(before[8:header])
    for name, tensor in tensors.items():
        if name != "__metadata__" and ".self_attn." not in name:
            begin, end = (header + offset for offset in tensor["data_offsets"])
            assert after[begin:end] == before[begin:end], name


def test_a_stopped_run_leaves_no_files(tmp_path):
    process = subprocess.Popen(
        command("--teacher", TINY, "--text", TEXT, "--steps", 100000, *SMALL,
                "--out", tmp_path / "out"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "/100000 steps" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "stopped after step" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--teacher", ROOT / "tests/golden/models/llama-mha", "--text", TEXT],
         "the teacher does not match the trained model: the number of layers is"),
        (["--teacher", TINY, "--text", TINY / "generation_config.json"],
         "tokens, but crops of 256 tokens need at least 257"),
        (["--teacher", TINY, "--text", "/no/such/text"], "/no/such/text"),
        (["--teacher", "/no/such/model", "--text", TEXT], "/no/such/model"),
        (["--teacher", TINY, "--text", TEXT, "--ce-weight", 0, "--kl-weight", 0],
         "the weight of the cross entropy"),
    ],
)
def test_bad_input_is_reported_and_nothing_is_written(arguments, named, tmp_path):
    done = recover(*arguments, "--out", tmp_path / "out", "--quiet")
    assert done.returncode == 1, done
    assert named in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_not_replaced_without_overwrite(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = recover("--teacher", TINY, "--text", TEXT, "--out", tmp_path)
    assert done.returncode == 1
    assert "exists; give --overwrite" in done.stderr
    assert (tmp_path / "config.json").read_text() == "{}"


def test_an_input_is_never_replaced(tmp_path):
    done = recover("--teacher", TINY, "--text", TEXT, "--out", TINY, "--overwrite")
    assert done.returncode == 1
    assert "is an input" in done.stderr


def test_static_quantization_ranges_are_measured_again_even_from_a_short_text(tmp_path):
    model, out = tmp_path / "svdq", tmp_path / "out"
    text = tmp_path / "short.txt"
    text.write_bytes(TEXT.read_bytes()[:12000])
    done = subprocess.run(
        [COMPRESS, "apply", "--quiet", "--model", TINY, "--method", "svdq", "--text", text,
         "--calibration-tokens", "512", "--sequence-tokens", "256", "--cache", "none",
         "--out", model], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [COMPRESS, "recover", "--quiet", "--model", model, "--teacher", TINY, "--text", text,
         "--steps", "1", "--batch-tokens", "512", "--out", out],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model, out)]
    assert weights[0] != weights[1] and len(weights[0]) == len(weights[1])
