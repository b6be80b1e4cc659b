"""Checks of the tree that need no compiler.

- an #include stays within the layer law of cmake/kvasir.cmake;
- every *_test.cc is named, uncommented, in the CMakeLists.txt of its folder or of
  one above it;
- no folder has more than 40 files of its own: more are two rooms;
- headers open with #pragma once;
- sizes: fixtures 2 MB in all, the built-in model 16 MB, no other file > 1 MB;
- shell scripts parse.
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES_LIMIT = 2 << 20
MODEL_LIMIT = 16 << 20
FILE_LIMIT = 1 << 20
FOLDER_LIMIT = 40


def layer_law():
    text = (ROOT / "cmake/kvasir.cmake").read_text()
    law = {}
    for folder, allowed in re.findall(
        r'set\(KVASIR_MAY_LINK_(\w+)\s+"([^"]*)"\)', text
    ):
        # model_tokenizer allows the folder's headers; linking is checked by
        # CMake target by target.
        law[folder] = {name.split("_")[0] for name in allowed.split(";")}
    return law


def registered(test):
    """Named outright, or by its stem among the OPS of a room of kernels."""
    stem = re.escape(test.name.removesuffix("_test.cc"))
    for folder in test.relative_to(ROOT).parents:
        lists = ROOT / folder / "CMakeLists.txt"
        if not lists.exists():
            continue
        live = re.sub(r"#.*", "", lists.read_text())
        named = re.escape(str(test.relative_to(lists.parent)))
        if re.search(rf"(?<![\w/]){named}", live) or (
            lists.parent == test.parent and re.search(rf"\bOPS [\w\s]*\b{stem}\b", live)
        ):
            return True
    return False


def main():
    problems = []
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")
    files = [ROOT / name for name in files if name and (ROOT / name).is_file()]
    law = layer_law()

    for path in files:
        name = path.relative_to(ROOT)
        folder = name.parts[0]
        if path.suffix in (".cc", ".h", ".cu"):
            text = path.read_text()
            if path.suffix == ".h" and "#pragma once" not in text:
                # Highway's per-target headers are included several times.
                if not name.name.endswith("-inl.h"):
                    problems.append(f"{name}: no #pragma once")
            for included in re.findall(r'^#include "([a-z]+)/', text, re.MULTILINE):
                if folder in law and included in law and included not in law[folder]:
                    problems.append(f"{name}: {folder}/ may not include {included}/")
        if path.name.endswith("_test.cc"):
            if not registered(path):
                problems.append(f"{name}: not registered in a CMakeLists.txt")
        if folder in ("scripts", ".ci") and path.suffix == "":
            done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
            if done.returncode:
                problems.append(f"{name}: {done.stderr.strip()}")

    for folder, count in collections.Counter(path.parent for path in files).items():
        if count > FOLDER_LIMIT:
            name = folder.relative_to(ROOT)
            problems.append(f"{name}/: {count} files of its own, limit {FOLDER_LIMIT}")

    sizes = {path.relative_to(ROOT): path.stat().st_size for path in files}
    fixtures = sum(
        size for name, size in sizes.items() if name.parts[:2] == ("tests", "golden")
    )
    if fixtures > FIXTURES_LIMIT:
        problems.append(f"tests/golden: {fixtures} bytes, limit {FIXTURES_LIMIT}")
    for name, size in sizes.items():
        limit = MODEL_LIMIT if name.parts[0] == "models" else FILE_LIMIT
        if size > limit:
            problems.append(f"{name}: {size} bytes, limit {limit}")

    for problem in problems:
        print(f"scripts/check: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
