"""What ptxas says of each kernel: registers, spilled bytes, stack. Fails where
one spills.

    ptxas_table.py REPORT...     (outputs of nvcc -Xptxas -v)
"""

import pathlib
import re
import subprocess
import sys

SKIPPED = 77


def rows(report):
    entry = re.compile(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        re.DOTALL,
    )
    for name, arch, *numbers in entry.findall(report.read_text()):
        stack, stores, loads, registers = map(int, numbers)
        yield name, arch, registers, stores + loads, stack


def readable(names):
    done = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True
    )
    if done.returncode:
        return names
    short = []
    for name in done.stdout.splitlines():
        name = name.replace("(anonymous namespace)::", "")
        short.append(re.sub(r"\b(?:\w+::)+", "", name))
    return short


def main():
    reports = [pathlib.Path(name) for name in sys.argv[1:]]
    if not reports:
        print("SKIPPED: nvcc is not on PATH; no kernel was compiled for a GPU")
        sys.exit(SKIPPED)
    table = [row for report in reports for row in rows(report)]
    if not table:
        sys.exit(f"no kernel in {' '.join(map(str, reports))}")
    print(f"{'kernel':44} {'for':8} {'registers':>9} {'spilled':>8} {'stack':>6}")
    names = readable([row[0] for row in table])
    for name, (_, arch, registers, spilled, stack) in zip(names, table):
        print(f"{name:44} {arch:8} {registers:9} {spilled:8} {stack:6}")
    spilling = [name for name, row in zip(names, table) if row[3]]
    if spilling:
        sys.exit(f"registers are spilled: {', '.join(spilling)}")


if __name__ == "__main__":
    main()
