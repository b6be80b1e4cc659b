"""Prints what ptxas reports about each kernel. Fails if a kernel spills that must not, and
if a kernel of an op needs over 5 % more than ptxas.txt in this folder says or is not in it.

    ptxas_table.py [--nvcc NVCC] [--without WHY] [--write] REPORT...

A report is the output of nvcc -Xptxas -v. Reports of ops are named <op>_cuda.
Figures are compared only if NVCC has the release of ptxas.txt. --write writes ptxas.txt.
"""

import argparse
import pathlib
import re
import subprocess
import sys

SKIPPED = 77
GROWTH = 1.05
# This kernel keeps the sums and scores of 32 rows in registers. It may spill other
# values, because it does not read these in its loops of tensor-core products.
MAY_SPILL = "prefill_attention: PrefillKernel<"
FIGURES = ("registers", "bytes spilled", "bytes of stack", "bytes of static shared memory")
TABLE = pathlib.Path(__file__).with_name("ptxas.txt")
HEAD = """\
# Kernels of ops as nvcc {release} compiles them, for each architecture: registers of a
# thread / bytes spilled / bytes of stack / bytes of static shared memory.
# ptxas_table.py compares them (test kernels_nvcc) and, with --write, writes them.
"""
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def readable(names):
    done = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    short = []
    for name in done.stdout.splitlines():
        name = name.replace("(anonymous namespace)::", "")
        # c++filt prints a value of an enum as "(Kind)2".
        short.append(re.sub(r"\(\w+\)(?=\d)", "", re.sub(r"\b(?:\w+::)+", "", name)))
    return short


def figures(reports):
    """Returns {"norm: NormKernel<float, 4>": {"sm_80": [FIGURES' values]}} for ops, then others."""
    ops, others = {}, {}
    for report in reports:
        found = list(ENTRY.finditer(report.read_text()))
        if not found:
            sys.exit(f"no kernel in {report}")
        of = ops if report.stem.endswith("_cuda") else others
        for name, entry in zip(readable([e["name"] for e in found]), found):
            shared = re.search(r"(\d+) bytes smem", entry["rest"])
            of.setdefault(f"{report.stem.removesuffix('_cuda')}: {name}", {})[entry["arch"]] = (
                int(entry["registers"]), int(entry["stores"]) + int(entry["loads"]),
                int(entry["stack"]), int(shared[1]) if shared else 0)
    return ops, others


def lines(kernels):
    for name, of in sorted(kernels.items()):
        row = (f"{arch} {'/'.join(map(str, numbers))}" for arch, numbers in sorted(of.items()))
        yield f"{name:56} {'  '.join(row)}\n"


def committed(text):
    kernels = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        name, row = re.fullmatch(r"(.*?) +(sm_.*)", line).groups()
        kernels[name] = {
            arch: tuple(map(int, numbers.split("/")))
            for arch, numbers in re.findall(r"(\w+) ([\d/]+)", row)
        }
    return kernels


def spills(kernels):
    for name, of in sorted(kernels.items()):
        for arch, numbers in sorted(of.items()):
            if numbers[1] and not name.startswith(MAY_SPILL):
                yield f"{name} for {arch} spills {numbers[1]} bytes"


def differences(have, want):
    for name in sorted(have.keys() - want.keys()):
        yield f"{name} is not in {TABLE.name}"
    for name in sorted(want.keys() - have.keys()):
        yield f"{name} is in {TABLE.name}, but no such kernel was compiled"
    for name in sorted(have.keys() & want.keys()):
        if have[name].keys() != want[name].keys():
            yield f"{name} is compiled for {sorted(have[name])}, but {TABLE.name} has {sorted(want[name])}"
        for arch in sorted(have[name].keys() & want[name].keys()):
            for what, now, before in zip(FIGURES, have[name][arch], want[name][arch]):
                if now > before * GROWTH:
                    yield f"{name} for {arch}: {what}: {now}, in {TABLE.name} {before}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--without", default="no reports", help="why there are no reports")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("reports", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    if not args.reports:
        print(f"SKIPPED: {args.without}; no kernel was compiled for a GPU")
        sys.exit(SKIPPED)
    version = subprocess.run([args.nvcc, "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release ([\d.]+)", version.stdout)[1]
    ops, others = figures(args.reports)
    problems = list(spills(ops | others))
    if args.write:
        TABLE.write_text(HEAD.format(release=release) + "".join(lines(ops)))
    else:
        print("".join(lines(ops | others)), end="")
        text = TABLE.read_text()
        of = re.search(r"nvcc ([\d.]+)", text)[1]
        if of == release:
            differing = list(differences(ops, committed(text)))
            if differing:
                differing.append(
                    "if this is intended, run python3 "
                    + " ".join([sys.argv[0], "--write", *map(str, args.reports)]))
            problems += differing
        else:
            print(f"not compared: {TABLE.name} was written with nvcc {of}, this is {release}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
