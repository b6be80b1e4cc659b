#!/usr/bin/env python3
"""Cuts calibration.txt and evaluation.txt out of the training and validation
texts, in whole chapters.

    ./make_texts.py --train train.txt --valid valid.txt --out .

The calibration text takes chapters from all over the training text (one place
in every twelfth of it), so that it has all authors. The evaluation text
is the beginning of the validation text, which the model has never seen.
"""

import argparse
import pathlib
import re

LIMIT_BYTES = 300_000
PLACES = 12
HEADING = re.compile(
    r"^(CHAPTER|Chapter|ADVENTURE|BOOK|PART)\s+[IVXLC\d]+\b"
    r"|^[IVX]+\. THE ADVENTURE OF")


def chapters(path: pathlib.Path) -> list[str]:
    parts = [""]
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        # Many headings in a row are a table of contents. A heading on its own
        # is a short line.
        if HEADING.match(line) and len(line) < 100:
            parts.append("")
        parts[-1] += line
    return parts


def size(text: str) -> int:
    return len(text.encode("utf-8"))


def calibration(path: pathlib.Path) -> str:
    parts = chapters(path)
    share = LIMIT_BYTES // PLACES
    total = sum(map(size, parts))
    taken: list[str] = []
    passed = 0
    for part in parts:
        # The first chapter of each twelfth that fits its share and is more than
        # a heading.
        if (passed >= len(taken) * total // PLACES
                and share * 3 // 5 <= size(part) <= share):
            taken.append(part)
        passed += size(part)
    return "".join(taken)


def evaluation(path: pathlib.Path) -> str:
    text = ""
    for part in chapters(path):
        if size(text) + size(part) > LIMIT_BYTES:
            break
        text += part
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=pathlib.Path, required=True)
    parser.add_argument("--valid", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    for name, text in (("calibration.txt", calibration(args.train)),
                       ("evaluation.txt", evaluation(args.valid))):
        (args.out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {size(text)} bytes")


if __name__ == "__main__":
    main()
