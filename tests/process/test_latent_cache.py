"""Compressed checkpoints through the server's own programs: the loss of every
method is the oracle's, whatever the chunks and pages, and all of them generate."""

import json
import math
import os
import subprocess

import pytest

from kvasir_process import BINARY, TINY, KvasirProcess, run

COMPRESS = BINARY.with_name("kvasir-compress")
EVALUATION = TINY / "evaluation.txt"
WINDOWS, WINDOW_TOKENS = 3, 192
# Of the loss, relative: rounding of sums; one code more or less.
NUMBERS, CODES = 0.0005, 0.005

PALU = ["palu", "--keep", 0.5]
METHODS = {
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
    "svdq-exact": (["svdq", "--value-bits", 4, "--exact-window", 20], CODES),
    "rap-exact": (
        ["rap", "--keep", 0.7, "--key-bits", 3, "--value-bits", 3, "--exact-window", 7], CODES,
    ),
}


def compress(*args):
    done = subprocess.run(
        [COMPRESS, *map(str, args)], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Every method's checkpoint, and the oracle's loss of it."""
    folder = tmp_path_factory.mktemp("artifacts")
    environment = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        for name, (method, _) in METHODS.items():
            compress("apply", "--model", TINY, "--method", *method, "--text",
                     TINY / "calibration.txt", "--calibration-tokens", 1024, "--sequence-tokens",
                     256, "--out", folder / name, "--quiet")
        compress("evaluate", "--teacher", TINY, *[folder / name for name in METHODS], "--text",
                 EVALUATION, "--windows", WINDOWS, "--window-tokens", WINDOW_TOKENS, "--quiet",
                 "--json", folder / "oracle.json")
    finally:
        if environment is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = environment
    rows = json.loads((folder / "oracle.json").read_text())["rows"]
    assert len(rows) == len(METHODS)
    return {
        name: (folder / name, row["nats_per_token"], row["kv_bytes_per_token"])
        for name, row in zip(METHODS, rows)
    }


def perplexity(model, *flags):
    return json.loads(
        run("perplexity", "--model", model, "--text", EVALUATION, "--window", WINDOW_TOKENS,
            "--max-windows", WINDOWS, "--json", *flags).stdout
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_the_oracles(artifacts, name):
    folder, nats, kv_bytes = artifacts[name]
    whole = perplexity(folder)
    assert math.log(whole["perplexity"]) == pytest.approx(nats, rel=METHODS[name][1])
    assert whole["kv_bytes_per_token"] == pytest.approx(kv_bytes, rel=1e-6)
    # Chunks, pages and threads change no bit.
    for flags in (["--page-tokens", 16, "--chunk", 7], ["--page-tokens", 32, "--chunk", 64]):
        assert perplexity(folder, *flags)["perplexity"] == whole["perplexity"]


def test_an_exact_window_costs_bytes_and_gives_quality(artifacts):
    plain, exact = (artifacts[name] for name in ("palu-2", "palu-2-exact"))
    assert exact[1] < plain[1]
    assert exact[2] == plain[2]
    fixed = [json.loads(run("inspect", folder, "--json").stdout)["kv_fixed_bytes_per_sequence"]
             for folder, _, _ in (plain, exact)]
    assert fixed[0] == 0 and fixed[1] > 0


@pytest.mark.parametrize("name", ["palu-3", "rap-4", "commuting", "svdq", "palu-2-exact"])
def test_it_generates(artifacts, name):
    folder, _, _ = artifacts[name]
    told = run("generate", "--model", folder, "--prompt", "Once upon a time", "--max-tokens", 8)
    assert told.stdout.strip()


def test_it_serves(artifacts):
    with KvasirProcess(model=artifacts["palu-4"][0]) as server:
        assert server.ready["grpc"]
