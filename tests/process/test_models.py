"""The figures that the repository's pages state for its own models: models/tiny, and its
compressed form, models/tiny-palu."""

import json
import re
import shutil

import pytest

from kvasir_process import TINY, run

PALU = TINY.with_name("tiny-palu")


def page():
    """{folder and flags: (bytes per token, nats per byte)}, from models/tiny/README.md."""
    rows = re.findall(r"\(`models/([\w -]+)`\) \| (\d+) bytes per token, ([\d.]+) nats per byte \|",
                      (TINY / "README.md").read_text())
    return {name: (int(size), float(nats)) for name, size, nats in rows}


def perplexity(arguments):
    folder, *flags = arguments.split()
    return json.loads(run("perplexity", "--model", TINY.with_name(folder), *flags, "--text", TINY / "evaluation.txt",
                          "--max-windows", 3, "--json").stdout)


def test_the_compressed_model_can_be_served_and_matches_its_base_model():
    report = json.loads(run("inspect", "--model", PALU, "--json").stdout)
    assert report["served"], report["not_served"]
    assert report["weights_fit"]
    assert (report["method"], report["base_model"]) == ("palu", "tiny")


def test_both_models_have_the_bytes_and_the_loss_that_their_page_reports():
    said = page()
    served = "tiny --kv-plan rotated-3bit"
    assert set(said) == {"tiny", served, "tiny-palu"}
    measured = {name: perplexity(name) for name in said}
    for name, (size, _) in said.items():
        assert measured[name]["kv_bytes_per_token"] == size
    # The page has the loss of the whole text. Three windows give nearly the same differences between the caches.
    for name in served, "tiny-palu":
        apart = measured[name]["nats_per_byte"] - measured["tiny"]["nats_per_byte"]
        assert apart == pytest.approx(said[name][1] - said["tiny"][1], abs=0.02)


def test_the_compressed_model_is_refused_with_other_weights(tmp_path):
    for folder in (TINY, PALU):
        shutil.copytree(folder, tmp_path / folder.name, symlinks=True)
    run("inspect", "--model", tmp_path / PALU.name)
    weights = tmp_path / TINY.name / "model.safetensors"
    with open(weights, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    done = run("inspect", "--model", tmp_path / PALU.name, check=False)
    assert done.returncode != 0
    assert "this is not the base model" in done.stderr
