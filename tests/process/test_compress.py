"""kvasir-compress refuses impossible commands before it reads or writes."""

import subprocess

import pytest

from kvasir_process import BINARY, TINY

COMPRESS = BINARY.with_name("kvasir-compress")


def compress(*args):
    return subprocess.run(
        [COMPRESS, *map(str, args)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["init", "--like", "foo"], "--like: there is no model shape 'foo'"),
        (["init", "--like", "kvasir-tiny", "--layers", "100000000"],
         "--layers: '100000000' is not a number from 1 to 1024"),
        (["init", "--like", "kvasir-tiny", "--hidden", "-1"],
         "--hidden: '-1' is not a number above 0"),
        (["init", "--like", "kvasir-tiny", "--max-shard-bytes", "0"], "--max-shard-bytes"),
    ],
)
def test_wrong_usage_has_its_own_exit_code_and_writes_nothing(arguments, named, tmp_path):
    done = compress(*arguments, "--out", tmp_path / "out")
    assert done.returncode == 2, done
    assert named in done.stderr and len(done.stderr) < 500
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", TINY, "--text", "/no/such/text", "--method", "palu", "--keep", "0.5"],
        ["apply", "--model", TINY, "--text", "/no/such/text", "--method", "palu", "--keep", "0.5"],
        ["recover", "--model", TINY, "--teacher", TINY, "--text", "/no/such/text"],
        ["evaluate", "--teacher", TINY, "--text", "/no/such/text", "per-token:k4"],
    ],
)
def test_missing_cuda_is_reported_before_the_text_is_read(arguments, tmp_path):
    out = "--json" if arguments[0] == "evaluate" else "--out"
    done = compress(*arguments, "--device", "cuda", out, tmp_path / "out")
    assert done.returncode == 1
    # On a machine with a GPU, only the text is missing.
    assert "--device cuda" in done.stderr or "/no/such/text" in done.stderr
    assert done.stderr.count("\n") == 1


def test_creating_a_small_model_with_init_prints_at_most_two_lines(tmp_path):
    done = compress("init", "--like", "kvasir-tiny", "--hidden", "64", "--intermediate", "64",
                    "--heads", "2", "--kv-heads", "2", "--vocab", "64", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") <= 2
    assert (tmp_path / "out" / "model.safetensors").exists()
