"""The capacity table of docs/operations.md has the figures of `kvasir inspect`."""

import os
import shutil
import subprocess

from kvasir_process import BINARY, ROOT

ENVIRONMENT = {**os.environ, "KVASIR_BINARY": str(BINARY)}


def check(root):
    return subprocess.run(
        [root / "deploy/capacity", "--check"], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )


def test_every_figure_of_the_capacity_table_equals_that_of_inspect():
    done = check(ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_script_corrects_a_wrong_figure_in_the_table(tmp_path):
    for name in ("deploy/capacity", "docs/operations.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs/operations.md"
    right = page.read_text()
    row = next(line for line in right.splitlines() if line.startswith("| qwen2.5-7b | `dense-bf16`"))
    page.write_text(right.replace(row, row.replace("57344", "57345")))
    assert page.read_text() != right
    done = check(tmp_path)
    assert done.returncode == 1 and row in done.stdout
    subprocess.run([tmp_path / "deploy/capacity"], check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    assert page.read_text() == right
