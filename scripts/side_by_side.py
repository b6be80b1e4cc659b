#!/usr/bin/env python3
"""Compares the speed of two builds, for example of a release and of the tree.

    scripts/side_by_side.py OLD NEW                  two build folders
    scripts/side_by_side.py OLD NEW --json F         and the samples as JSON
    scripts/side_by_side.py OLD NEW --instructions   if the machine is too busy to measure time

The benchmarks of both builds run in turn on the same random data; the order alternates
from pair to pair. Each row shows the median speed of both and the median ratio of the
pairs: above 1, NEW is faster. A ratio whose middle half spreads by more than 15 % of
the median is `undecided`. Exit status 1 if a decided ratio is below --at-least. Both
builds need the same CMake preset. The routers of both serve the load generator of NEW.
It takes a quarter of an hour on two quiet cores.

--instructions runs the benchmarks in valgrind, which counts instructions of one thread
with AVX2. A figure is the difference between a large and a small run, so that the work
at the start does not count; attention counts only its kernel. Exit status 1 if NEW
needs more than --at-most times the instructions of OLD. It takes about 15 minutes,
however busy the machine is.
"""

import argparse
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

MODEL = ["--random-weights", "--shape", "tinyllama-1.1b", "--pairs", "1"]
# benchmark: (arguments, {figure of its rows: 1 if more is better, else -1}, keys that name a row)
BENCHMARKS = {
    "decode": ([*MODEL, "--context", "512", "--fill", "random", "--steps", "4"], {"step_ms": -1}, ["batch"]),
    "prefill": ([*MODEL, "--tokens", "256"], {"gflops": 1}, ["shape"]),
    "attention": (["--shape", "tinyllama-1.1b", "--context", "4096", "--cached-tokens", "32768", "--pairs", "3", "--method",
                   "dense-bf16,rotated-4bit,rap-50-4bit,palu-50-g4-3bit"], {"us_per_token": -1}, ["method"]),
    "scheduler": (["--pairs", "3"], {"step_us": -1}, []),
    "proxy": (["--pairs", "2", "--requests", "600", "--latency-requests", "50"],
              {"requests_per_second": 1, "first_ms_p50": -1}, ["way"]),
}
# For --instructions: (arguments, a flag, its values in a small and a large run, or only one value).
METHODS = ["dense-bf16", "dense-8bit", "rotated-4bit", "rotated-3bit", "rap-50-4bit", "palu-50-g4-3bit"]
SMALL_MODEL = ["decode", "--random-weights", "--shape", "kvasir-tiny", "--batch", "4", "--pairs", "1", "--threads", "1"]
COUNTED = {
    "decode": ([*SMALL_MODEL, "--context", "256", "--fill", "random"], "--steps", (1, 5)),
    "prefill": ([*SMALL_MODEL, "--steps", "1", "--fill", "prefill"], "--context", (32, 128)),
    **{f"attention {method}": (["attention", "--quick", "--shape", "tinyllama-1.1b", "--context", "2048", "--cached-tokens", "4096",
                                "--threads", "1", "--method", method], "--pairs", (3,)) for method in METHODS},
    "scheduler": (["scheduler", "--pairs", "1"], "--steps", (100, 500)),
    "router": (["proxy", "--pairs", "1", "--latency-requests", "10"], "--requests", (200, 600)),
}
VALGRIND = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
UNDECIDED = 0.15
ENOUGH = 7


def command(folder):
    bench = folder / "kvasir-bench"
    return [str(bench)] if bench.exists() else [str(folder / "kvasir"), "bench"]


def measured(folder, name):
    """Returns {row: speed}. The speed of a time is its inverse."""
    arguments, figures, keys = BENCHMARKS[name]
    run = subprocess.run([*command(folder), name, *arguments, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(run.args)}: {run.stderr.strip()}")
    found = json.loads(run.stdout)
    speeds = {}
    for row in [*found["rows"], found["figures"]]:
        for figure, sign in figures.items():
            if row.get(figure):
                label = " ".join([name, *(str(row[key]) for key in keys if key in row), figure])
                speeds.setdefault(label, row[figure] ** sign)
    return speeds


def instructions(program, arguments, folder):
    """Runs the program in valgrind, and returns the number of its instructions, or of those in the kernel of attention."""
    log = folder / "valgrind.log"
    only = ["--toggle-collect=kvasir::kernels::PagedAttentionSimd*"] if arguments[0] == "attention" else []
    run = subprocess.run([*VALGRIND, *only, f"--log-file={log}", *program, *arguments], stdout=subprocess.DEVNULL,
                         stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(run.args)}: {run.stderr.strip()}")
    return collected(log)


def router_instructions(folder, arguments):
    """Runs the load generator of `folder`, whose `kvasir` is a script that runs the router in valgrind."""
    run = subprocess.run([folder / "kvasir-bench", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(map(str, run.args))}: {run.stderr.strip()}")
    return collected(folder / "valgrind.log")


def collected(log):
    found = re.search(r"Collected : (\d+)", log.read_text())
    if not found:
        sys.exit(f"{log}: valgrind counted no instructions:\n{log.read_text()}")
    return int(found[1])


def count(options, routers):
    """Prints the instructions of both builds, and returns whether NEW needs more than it may."""
    if shutil.which("valgrind") is None:
        sys.exit("--instructions needs valgrind: apt-get install valgrind")
    for side in ("old", "new"):
        real = (getattr(options, side) / "kvasir").resolve()
        script = routers / side / "kvasir"
        script.write_text(f'#!/bin/sh\nexec {" ".join(VALGRIND)} --log-file="{routers / side}/valgrind.log" "{real}" "$@"\n')
        script.chmod(0o755)
    counts, more = {}, False
    print(f"{'instructions':28} {'old':>16} {'new':>16} {'new/old':>8}")
    for name, (arguments, flag, sizes) in COUNTED.items():
        if options.only and name.split()[0] not in options.only:
            continue
        print(f"{name} ...", file=sys.stderr)
        for side in ("old", "new"):
            def of(size):
                own = [*arguments, flag, str(size)]
                if name == "router":
                    return router_instructions(routers / side, own)
                return instructions(command(getattr(options, side)), own, routers / side)
            found = [of(size) for size in sizes]
            counts[name, side] = found[-1] - sum(found[:-1])
            # For another method, each pair also runs the dense cache.
            if name.startswith("attention ") and name != f"attention {METHODS[0]}":
                counts[name, side] -= counts[f"attention {METHODS[0]}", side]
        old, new = counts[name, "old"], counts[name, "new"]
        verdict = "more" if new > options.at_most * old else ""
        more |= verdict == "more"
        print(f"{name:28} {old:16,} {new:16,} {new / old:8.3f} {verdict}", flush=True)
    return 1 if more else 0


def compare(old, new):
    """Returns (median of old, median of new, median of the ratios, spread of the ratios)."""
    ratios = sorted(b / a for a, b in zip(old, new))
    median = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (0, 0, 0)
    return statistics.median(old), statistics.median(new), median, (high - low) / median


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs; fewer than 7 decide nothing")
    parser.add_argument("--only", choices=[*BENCHMARKS, "router"], action="append", help="only this benchmark")
    parser.add_argument("--at-least", type=float, default=0.97, help="the smallest ratio that is accepted")
    parser.add_argument("--json", type=pathlib.Path, help="writes the samples")
    parser.add_argument("--instructions", action="store_true", help="counts instructions, and measures no time")
    parser.add_argument("--at-most", type=float, default=1.01, help="the largest ratio of instructions that is accepted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as routers:
        return run(options, pathlib.Path(routers))


def run(options, routers):
    # kvasir-bench starts the `kvasir` of its own folder.
    for side in ("old", "new"):
        (routers / side).mkdir()
        shutil.copy(options.new / "kvasir-bench", routers / side)
    if options.instructions:
        return count(options, routers)
    for side in ("old", "new"):
        shutil.copy(getattr(options, side) / "kvasir", routers / side)
    samples, slower = {}, False
    for name in options.only or BENCHMARKS:
        for pair in range(options.pairs):
            print(f"{name}: pair {pair + 1} of {options.pairs}", file=sys.stderr)
            order = ["old", "new"] if pair % 2 == 0 else ["new", "old"]
            for side in order:
                folder = routers / side if name == "proxy" else getattr(options, side)
                for label, speed in measured(folder, name).items():
                    samples.setdefault(label, {"old": [], "new": []})[side].append(speed)
    print(f"{'':44} {'old':>12} {'new':>12} {'new/old':>8} {'spread':>7}")
    for label, sides in samples.items():
        if len(sides["old"]) != len(sides["new"]):
            print(f"{label:44} only one of the builds has this row")
            continue
        old, new, ratio, spread = compare(sides["old"], sides["new"])
        decided = spread <= UNDECIDED and len(sides["old"]) >= ENOUGH
        verdict = "" if decided and ratio >= options.at_least else "slower" if decided else "undecided"
        slower |= verdict == "slower"
        print(f"{label:44} {old:12.5g} {new:12.5g} {ratio:8.3f} {spread:6.1%} {verdict}")
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1) + "\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
