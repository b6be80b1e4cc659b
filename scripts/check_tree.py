"""Checks of the tree that need no compiler.

- an #include stays within the layer law of cmake/kvasir.cmake;
- every *_test.cc is named in its folder's CMakeLists.txt, uncommented;
- headers open with #pragma once;
- sizes: fixtures 2 MB in all, the built-in model 16 MB, no other file > 1 MB;
- shell scripts parse.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES_LIMIT = 2 << 20
MODEL_LIMIT = 16 << 20
FILE_LIMIT = 1 << 20


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


def registered(test, cmake):
    """Named outright, or by its stem where a loop registers ${...}_test.cc."""
    live = re.sub(r"#.*", "", cmake)
    stem = test.removesuffix("_test.cc")
    return re.search(rf"\b{re.escape(test)}", live) or (
        re.search(r"\$\{\w+\}_test\.cc", live) and re.search(rf"\b{re.escape(stem)}\b", live)
    )


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
            lists = path.parent / "CMakeLists.txt"
            if not (lists.exists() and registered(path.name, lists.read_text())):
                problems.append(f"{name}: not registered in {lists.relative_to(ROOT)}")
        if folder in ("scripts", ".ci") and path.suffix == "":
            done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
            if done.returncode:
                problems.append(f"{name}: {done.stderr.strip()}")

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
