"""models/tiny/pretrain.py refuses invalid input, and the model that it writes has the loss that it reported. Training needs
PyTorch (models/tiny/requirements.txt); without it those cases are skipped."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from kvasir_process import BINARY, TINY

SCRIPT = TINY / "pretrain.py"
NEEDED = [name for name in ("safetensors", "tokenizers", "torch")
          if importlib.util.find_spec(name) is None]
trains = pytest.mark.skipif(
    bool(NEEDED), reason=f"no {', '.join(NEEDED)}: pip install -r models/tiny/requirements.txt")
SMALL = ["--layers", 2, "--hidden", 64, "--intermediate", 128, "--heads", 4, "--kv-heads", 2,
         "--head-dim", 16, "--context", 512, "--batch", 512, "--crops", "64,128@0.5"]


def pretrain(*args):
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True,
                          text=True, timeout=500)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--steps", "0"], "--steps: want an integer above 0, have '0'"),
        (["--steps", "1", "--crops", "8@0.5"], "want TOKENS or TOKENS,TOKENS@PART"),
        ([], "--steps"),
    ],
)
def test_the_error_for_wrong_usage_names_the_flag(arguments, named, tmp_path):
    done = pretrain("--text", "x", "--tokenizer", TINY, "--out", tmp_path / "out", *arguments)
    assert done.returncode == 2 and named in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not NEEDED, reason="everything is installed")
def test_the_error_for_a_missing_file_or_package_says_what_to_do(tmp_path):
    done = pretrain("--text", "x", "--tokenizer", TINY, "--out", tmp_path, "--steps", 1)
    assert done.returncode == 1
    assert "requirements.txt" in done.stderr and done.stderr.count("\n") == 1


@trains
@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--crops", "1024"], "--crops: want 2 to --context 512"),
        (["--heads", 3], "--kv-heads"),
        (["--tokenizer", "/no/such/folder"], "has no tokenizer.json"),
        (["--text", "/no/such/text"], "/no/such/text"),
        (["--lr", "1e30"], "a lower --lr may help"),
    ],
)
def test_bad_input_gives_an_error_of_one_line_and_no_checkpoint(arguments, named, tmp_path):
    text = tmp_path / "text"
    text.write_bytes((TINY / "calibration.txt").read_bytes()[:4000])
    done = pretrain("--text", text, "--tokenizer", TINY, "--out", tmp_path / "out", "--steps", 4,
                    *SMALL, *arguments)
    assert done.returncode == 1
    assert named in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()


@trains
def test_the_engine_measures_the_loss_that_the_training_reported(tmp_path):
    valid = tmp_path / "valid"
    valid.write_bytes((TINY / "evaluation.txt").read_bytes()[:1200])
    out = tmp_path / "out"
    done = pretrain("--text", TINY / "calibration.txt", "--valid", valid, "--tokenizer", TINY,
                    "--out", out, "--steps", 60, "--lr", 0.02, "--device", "cpu", *SMALL)
    assert done.returncode == 0, done.stderr
    first = float(re.search(r"step 1 of 60, loss ([\d.]+)", done.stderr)[1])
    last = float(re.search(r"step 60 of 60, loss ([\d.]+)", done.stderr)[1])
    assert first == pytest.approx(8.32, abs=0.1)  # ln 4096
    assert last < first - 1
    measured = float(re.search(r"validation ([\d.]+) nats per byte", done.stdout)[1])
    served = subprocess.run(
        [BINARY, "perplexity", "--model", out, "--text", valid, "--window", "512", "--json"],
        capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(served.stdout)["nats_per_byte"] == pytest.approx(measured, rel=1e-3)
    # The fields are those of the built-in model.
    config = json.loads((out / "config.json").read_text())
    assert list(config) == list(json.loads((TINY / "config.json").read_text()))
