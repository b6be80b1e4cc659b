"""models/recommend: the folders that it leaves, whatever happens while it runs."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from kvasir_process import BINARY, ROOT, TINY, run

# This stands in for kvasir-compress.
COMPRESS = """#!/usr/bin/env python3
import os, pathlib, sys
assert not [name for name in os.environ if name.startswith("KVASIR_")]
folder = pathlib.Path(sys.argv[-1])
folder.mkdir()
(folder / "arguments").write_text(" ".join(sys.argv[1:]))
"""


class Tree:
    """models/recommend in a tree with a cache of its own, in which smollm2 is a copy of the tiny model."""

    def __init__(self, root):
        self.root = root
        self.models = root / "cache/kvasir/models"
        self.compress = root / "build/release/kvasir-compress"
        for name, text in {
                "models/fetch": "#!/bin/sh\necho fetch $1\n", "scripts/setup": "#!/bin/sh\n",
                "scripts/build": "#!/bin/sh\n", "build/release/kvasir-compress": COMPRESS,
                "models/recommend": (ROOT / "models/recommend").read_text()}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
            (root / name).chmod(0o755)
        shutil.copytree(TINY, self.models / "smollm2")
        (self.models / "smollm2/fetched.txt").write_text("a wheel\n")
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache"),
                            "KVASIR_TEXT": "the server's"}

    def recommended(self, options):
        script = self.root / "models/recommend"
        text, count = re.subn(r"options=\(.*\)", f"options=({options})", script.read_text())
        assert count == 1
        script.write_text(text)

    def start(self, *names):
        return subprocess.Popen([self.root / "models/recommend", *names], env=self.environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)

    def recommend(self, *names):
        process = self.start(*(names or ["smollm2"]))
        out, error = process.communicate(timeout=300)
        return process.returncode, out, error

    def folder(self):
        return self.models / self.recommend("--folder", "smollm2")[1].strip()

    def left(self):
        return sorted(path.name for path in self.models.iterdir() if path.name != ".recommend.lock")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_a_recommended_model_is_created_only_once_and_its_folder_is_printed(tree):
    folder = tree.folder()
    code, out, error = tree.recommend()
    assert code == 0, error
    for part in ("fetch smollm2", "minutes on two free cores", "GB of memory",
                 "scripts/setup compress installs it", str(folder)):
        assert part in out
    assert tree.left() == ["smollm2", folder.name]
    assert " --kv-bytes-per-token " in (folder / "arguments").read_text()

    # A second run has nothing to do.
    tree.compress.unlink()
    code, out, _ = tree.recommend()
    assert code == 0 and out.splitlines()[1:] == [
        f"models/recommend: smollm2 with its recommended plan is in {folder}"]


def test_other_options_or_another_model_give_another_folder(tree):
    folders = {tree.folder()}
    tree.recommended("--method palu --keep 0.5")
    folders.add(tree.folder())
    (tree.models / "smollm2/fetched.txt").write_text("a newer wheel\n")
    folders.add(tree.folder())
    assert len(folders) == 3


def test_a_failed_run_reports_the_reason_and_leaves_no_folder(tree):
    code, _, error = tree.recommend("tiny")
    assert code == 2 and "nothing is recommended for 'tiny'" in error
    tree.compress.write_text("#!/bin/sh\nexit 1\n")
    code, out, _ = tree.recommend()
    assert code == 1 and "is in" not in out
    (tree.root / "scripts/build").write_text("#!/bin/sh\necho no target; exit 1\n")
    code, _, error = tree.recommend()
    assert code == 1 and "if libtorch is missing, run scripts/setup compress" in error
    shutil.rmtree(tree.models / "smollm2")
    code, _, error = tree.recommend("--folder", "smollm2")
    assert code == 1 and "run models/fetch smollm2" in error


def test_a_model_is_calibrated_planned_and_can_be_served(tree):
    shutil.copy(BINARY.with_name("kvasir-compress"), tree.compress)
    tree.recommended("--method auto --kv-bytes-per-token 900 --windows 0 "
                     "--calibration-tokens 2048 --sequence-tokens 64")
    process = tree.start("smollm2")
    while "; memory up to " not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0 and tree.left() == ["smollm2"]

    # The second run continues the calibration, or the first had already finished it.
    code, out, error = tree.recommend()
    assert code == 0, error
    assert "resuming where the last run stopped" in error or "from the cache" in error
    folder = tree.folder()
    assert tree.left() == ["smollm2", folder.name]
    assert (folder / "tokenizer.json").is_symlink()  # not copied
    report = json.loads(run("inspect", folder, "--json").stdout)
    assert report["kv_bytes_per_token"] <= 900
