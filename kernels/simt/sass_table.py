"""Counts the compiled instructions of the loops that feed tensor cores. Fails if a loop
has over 5 % more per mma than sass.txt in this folder says, if there are other loops than
in sass.txt, or if a program lacks the PTX of compute_80.

    sass_table.py --nvcc NVCC [--without WHY] [--write] OBJECT...

Objects are <op>_cuda.o, which nvcc compiled with -lineinfo. cuobjdump and nvdisasm are
searched next to NVCC, then in build/cuda-toolkit (scripts/setup cuda), then on PATH. If
they are missing, the test is skipped. --write writes sass.txt.
"""

import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from ptxas_table import GROWTH, SKIPPED, readable

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = pathlib.Path(__file__).with_name("sass.txt")
OWN_TOOLKIT = ROOT / "build/cuda-toolkit/nvidia/cu13/bin"
HEAD = """\
# Innermost loops with mma, in the order of their code, as nvcc {release} compiles them:
# instructions per lane / integer instructions / mma without a predicate / with one; then
# instructions per number of the first operand, with integer instructions counted twice.
# (An mma without a predicate takes 8 numbers from a lane. One of bytes counts as two.)
# sass_table.py compares them (test kernels_sass) and, with --write, writes them.
"""
INSTRUCTION = re.compile(r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?(?P<guard>U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>[^;]*);")
LABEL = re.compile(r"^(\.L_\w+):")
FRAME = re.compile(r'//## File "([^"]+)", line (\d+)')
# Integer arithmetic, which runs at half the rate of floats. Loads, moves, branches
# and barriers are not arithmetic.
INTEGER = re.compile(
    r"(IADD|IMAD|LOP|SHF|SHL|SHR|PRMT|ISETP|LEA|VIADD|IMNMX|VIMNMX|VIADDMNMX|SEL|SGXT|BMSK|POPC|FLO|IABS|I2F|F2I|F2F)")
PADDING = ("NOP", "BRA", "BSYNC", "BSSY", "WARPSYNC", "BAR", "EXIT")

MMA = ("HMMA", "IMMA")  # products of 16-bit numbers and of bytes
WRAPPERS = ("?", "Mma", "MmaBf16", "MmaF16", "Product", "MmaU8", "MmaS8", "CodeProduct")

Loop = collections.namedtuple("Loop", "of all integer mma guarded")


def tool(name, nvcc):
    for folder in ([pathlib.Path(nvcc).parent] if nvcc else []) + [OWN_TOOLKIT]:
        if (folder / name).exists():
            return str(folder / name)
    return shutil.which(name)


def function_at(path, line):
    """Returns the name of the function that contains a line of a source file."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return "?"
    for text in reversed(lines[:line]):
        found = re.match(r"(?: {2})?(?!asm|return|if|for|while|else|switch|using|template)"
                         r"[\w:<>,&*\[\]]+(?: [\w:<>,&*\[\]]+)* [&*]?(\w+)\(", text)
        if found:
            return found[1]
    return "?"


def loops(lines):
    """Yields the innermost loops with mma among the instructions of one function."""
    code, places, frames = [], {}, []
    for line in lines:
        if label := LABEL.match(line.strip()):
            places[label[1]] = len(code)
        elif frame := FRAME.search(line):
            if "inlined" not in frames[-1][2] if frames else True:
                frames = []
            frames.append((frame[1], int(frame[2]), line))
        elif found := INSTRUCTION.search(line):
            code.append((found["name"], found["guard"], found["rest"],
                         [(path, number) for path, number, _ in frames]))
    spans = []
    for end, (name, _, rest, _) in enumerate(code):
        target = re.search(r"\((\.L_\w+)\)", rest)
        if name.startswith("BRA") and target and places.get(target[1], end + 1) <= end:
            begin = places[target[1]]
            if any(each[0].startswith(MMA) for each in code[begin:end + 1]):
                spans.append((begin, end + 1))
    for begin, end in sorted(set(spans)):
        if any((b, e) != (begin, end) and begin <= b and e <= end for b, e in spans):
            continue  # not the innermost
        body = [each for each in code[begin:end] if not each[0].startswith(PADDING)]
        mma = [each for each in body if each[0].startswith(MMA)]
        # The innermost frames are wrappers of mma. The functions that call them
        # are reported.
        names = collections.Counter(
            next((of for of in (function_at(*frame) for frame in each[3])
                  if of not in WRAPPERS), "?") for each in mma)
        counts = [2 if each[0].startswith("IMMA") else 1 for each in mma]
        guarded = sum(count for count, each in zip(counts, mma) if each[1])
        yield Loop(names.most_common(1)[0][0], len(body),
                   sum(1 for each in body if INTEGER.match(each[0])),
                   sum(counts) - guarded, guarded)


def kernels(cubin, nvdisasm):
    """Returns {mangled name: [Loop]} for the kernels with such loops."""
    done = subprocess.run([nvdisasm, "-c", "-gi", cubin], capture_output=True, text=True, check=True)
    found, name, lines = {}, None, []

    def close():
        if name and (of := list(loops(lines))):
            found[name] = of

    for line in done.stdout.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\w+)", line)
        if section:
            close()
            name, lines = section[1], []
        else:
            lines.append(line)
    close()
    return found


def measured(objects, cuobjdump, nvdisasm):
    """Returns {"attention: MmaKernel<Bf16> sm_80": [Loop]} and the objects without PTX."""
    table, without_ptx = {}, []
    for path in objects:
        path = path.resolve()
        said = subprocess.run([cuobjdump, "-lptx", path], capture_output=True, text=True).stdout
        if ".sm_80.ptx" not in said:
            without_ptx.append(path.name)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([cuobjdump, "-xelf", "all", path], cwd=folder, capture_output=True, check=True)
            for cubin in sorted(pathlib.Path(folder).glob("*.cubin")):
                arch = cubin.name.split(".")[-2]
                of = kernels(cubin, nvdisasm)
                for name, found in zip(readable(list(of)) if of else [], of.values()):
                    name = re.sub(r"\(.*", "", name)
                    table[f"{path.stem.removesuffix('_cuda')}: {name} {arch}"] = found
    return table, without_ptx


def per_number(loop):
    return (loop.all + loop.integer) / (8 * max(loop.mma, 1))


def text_of(loop):
    return f"{loop.of} {loop.all}/{loop.integer}/{loop.mma}/{loop.guarded} {per_number(loop):.2f}"


def lines_of(table):
    for name, found in sorted(table.items()):
        yield f"{name}\n"
        for loop in found:
            yield f"  {text_of(loop)}\n"


def committed(text):
    table, name = {}, None
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        if not line.startswith(" "):
            name = line
            table[name] = []
            continue
        of, numbers = line.split()[:2]
        table[name].append(Loop(of, *map(int, numbers.split("/"))))
    return table


def differences(have, want):
    for name in sorted(have.keys() | want.keys()):
        now, before = ([loop.of for loop in table.get(name, [])] for table in (have, want))
        if now != before:
            yield f"{name}: its loops are in {now}, but in {TABLE.name} they are in {before}"
            continue
        for a, b in zip(have[name], want[name]):
            mma = [max(loop.mma + loop.guarded, 1) for loop in (a, b)]
            if (a.all + a.integer) / mma[0] > GROWTH * (b.all + b.integer) / mma[1]:
                yield f"{name}: {text_of(a)}, in {TABLE.name} {text_of(b)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", default="")
    parser.add_argument("--without", default="no objects", help="why there are no objects")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("objects", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    tools = [tool(name, args.nvcc) for name in ("cuobjdump", "nvdisasm")]
    if not args.objects or None in tools:
        why = args.without if not args.objects else "no cuobjdump and nvdisasm; scripts/setup cuda gets them"
        print(f"SKIPPED: {why}; no instruction of a kernel for a GPU was counted")
        sys.exit(SKIPPED)
    version = subprocess.run([args.nvcc, "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release ([\d.]+)", version.stdout)[1]
    table, without_ptx = measured(args.objects, *tools)
    problems = [f"{name} has no PTX of compute_80" for name in without_ptx]
    if args.write:
        TABLE.write_text(HEAD.format(release=release) + "".join(lines_of(table)))
    else:
        print("".join(lines_of(table)), end="")
        text = TABLE.read_text()
        of = re.search(r"nvcc ([\d.]+)", text)[1]
        if of == release:
            differing = list(differences(table, committed(text)))
            if differing:
                differing.append("if this is intended, run python3 " + " ".join(
                    [sys.argv[0], "--nvcc", args.nvcc, "--write", *map(str, args.objects)]))
            problems += differing
        else:
            print(f"not compared: {TABLE.name} was written with nvcc {of}, this is {release}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
