#!/usr/bin/env python3
"""Writes the golden fixtures beside this file; README.md says what each is.

  make_fixtures.py               writes everything (seeds are names)
  make_fixtures.py --tokenizers  writes the tokenizers only (needs no torch)
  make_fixtures.py --gguf        writes the GGUF blocks only (needs only gguf)
  make_fixtures.py --check       writes to a temporary folder and compares
"""

import argparse
import filecmp
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FOLDERS = ("gguf", "models", "refused", "tokenizers")
SIZE_LIMIT_BYTES = 3_000_000


def all_files(root):
    return sorted(
        p.relative_to(root)
        for folder in FOLDERS
        for p in (root / folder).rglob("*")
        if p.is_file()
    )


def write_models(root):
    # The import is here because torch is a large download and takes seconds to load.
    import golden_models

    golden_models.write(root)


def write_tokenizers(root):
    import golden_tokenizers

    # The tokenizer of the built-in model is read from the source tree. Its cases are written to `root`.
    golden_tokenizers.write(root, HERE.parent.parent / "models" / "tiny")


def write_gguf(root):
    import golden_gguf

    golden_gguf.write(root)


def check():
    with tempfile.TemporaryDirectory() as tmp:
        fresh = pathlib.Path(tmp)
        write_models(fresh)
        write_tokenizers(fresh)
        write_gguf(fresh)
        want, have = all_files(fresh), all_files(HERE)
        bad = [f"missing or extra: {p}" for p in set(want) ^ set(have)]
        bad += [
            f"differs: {p}"
            for p in set(want) & set(have)
            if not filecmp.cmp(fresh / p, HERE / p, shallow=False)
        ]
    for line in sorted(bad):
        print(line)
    print(f"{len(want)} files compared, {len(bad)} differences")
    return not bad


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tokenizers", action="store_true")
    parser.add_argument("--gguf", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if check() else 1)
    writes_all = not arguments.tokenizers and not arguments.gguf
    if writes_all:
        write_models(HERE)
    if writes_all or arguments.tokenizers:
        write_tokenizers(HERE)
    if writes_all or arguments.gguf:
        write_gguf(HERE)
    total = sum((HERE / p).stat().st_size for p in all_files(HERE))
    print(f"{len(all_files(HERE))} files, {total} bytes (limit {SIZE_LIMIT_BYTES})")
    sys.exit(0 if total <= SIZE_LIMIT_BYTES else 1)


if __name__ == "__main__":
    main()
