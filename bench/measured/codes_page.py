"""Measures caches of codes against the dense cache, and writes the section on them of
docs/performance.md and docs/performance-avx2.md.

  python3 bench/measured/codes_page.py --measure    about ten minutes on two quiet cores
  python3 bench/measured/codes_page.py              only writes the sections

Measured ratios are kept in bench/measured/codes.json, which is committed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import provenance  # noqa: E402
from llama_cpp_page import table  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "codes.json"
PAGES = [ROOT / "docs" / name for name in ("performance.md", "performance-avx2.md")]
BEGIN, END = "<!-- bench/measured/codes_page.py writes this -->", "<!-- to here -->"

METHODS = "dense-bf16,dense-8bit,rotated-4bit,rotated-3bit,rotated-2bit,rap-50-4bit"
SHAPES = ("llama-2-7b", "llama-3-8b", "tinyllama-1.1b")
STEP_CACHES = ("dense-8bit", "rotated-4bit", "rotated-3bit")
CONTEXTS = (8192, 16384)  # of whole steps
BATCH = 8
SIMD = {"AVX-512": (), "AVX2": ("--avx2",)}

# The least ratio to the dense cache that attention should reach at 16384 tokens.
ATTENTION_TARGETS = {
    ("AVX-512", "llama-2-7b", "rotated-4bit"): 3.2,
    ("AVX-512", "llama-3-8b", "rotated-4bit"): 2.6,
    ("AVX-512", "llama-2-7b", "rotated-3bit"): 3.4,
    ("AVX-512", "llama-3-8b", "rotated-3bit"): 2.6,
    ("AVX-512", "llama-2-7b", "rotated-2bit"): 4.0,
    ("AVX-512", "llama-3-8b", "rotated-2bit"): 3.0,
    ("AVX2", "llama-2-7b", "rotated-4bit"): 1.5,
    ("AVX2", "llama-3-8b", "rotated-4bit"): 1.5,
}
# The least ratio that whole steps should reach with AVX-512.
STEP_TARGETS = {
    8192: {"rotated-4bit": 1.30, "rotated-3bit": 1.35, "dense-8bit": 1.15},
    16384: {"rotated-4bit": 1.6, "rotated-3bit": 1.7, "dense-8bit": 1.3},
}


def run(kvasir: Path, arguments) -> dict:
    done = subprocess.run([kvasir, "bench", *arguments, "--json"], stdout=subprocess.PIPE,
                          text=True, check=True)
    return json.loads(done.stdout)


def measure(kvasir: Path, pairs: int) -> None:
    """Measures one command at a time and keeps each result at once."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    binary = provenance.binary_hash(kvasir)
    if kept.get("binary") != binary:
        kept = {"binary": binary, "attention": {}, "steps": {}}
    jobs = [("attention", f"{simd}, {shape}",
             ("attention", "--shape", shape, "--method", METHODS, "--context", "16384", *flags))
            for simd, flags in SIMD.items() for shape in SHAPES]
    jobs += [("steps", f"{simd}, {context}",
              ("decode", "--shape", "tinyllama-1.1b", "--random-weights", "--batch", str(BATCH),
               "--context", str(context), "--plan", ",".join(STEP_CACHES), *flags))
             for simd, flags in SIMD.items() for context in CONTEXTS]
    for kind, name, arguments in jobs:
        if name in kept[kind]:
            continue
        print(name, file=sys.stderr)
        report = run(kvasir, (*arguments, "--pairs", str(pairs)))
        kept["machine"] = {key: report["machine"][key] for key in ("cpu", "threads", "simd")}
        kept["date"] = report["machine"]["time"][:10]
        kept["pairs"] = pairs
        kept[kind][name] = [
            {"cache": row.get("method", row.get("plan")), "bytes_ratio": row["bytes_ratio"],
             "ratio": row["speedup_over_dense"], "spread": row["speedup_spread"]}
            for row in report["rows"] if row.get("speedup_over_dense") and
            row.get("method", row.get("plan")) != "dense-bf16"]
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def ratio(row, target) -> str:
    """Returns the cell of a ratio: bold if it misses its target."""
    text = f"{row['ratio']:.2f}"
    if row["spread"] > 0.15:
        return f"{text} (undecided)"
    return f"**{text}**" if target is not None and row["ratio"] < target else text


def rows_of(report, kind, name, targets) -> dict[str, tuple[dict, float | None]]:
    return {row["cache"]: (row, targets(row["cache"]))
            for row in report[kind].get(name, [])}


def section(report) -> str:
    machine = report["machine"]
    counted = {True: 0, False: 0, None: 0}

    def lines(kind, place, targets):
        found = {simd: rows_of(report, kind, f"{simd}, {place}",
                               lambda cache, simd=simd: targets(simd, cache)) for simd in SIMD}
        for cache, (row, _) in found["AVX-512"].items():
            cells = [str(place), cache, f"{row['bytes_ratio']:.2f}"]
            for simd in SIMD:
                one, target = found[simd].get(cache, (None, None))
                cells += ["", ""] if one is None else [
                    ratio(one, target), "" if target is None else f"≥ {target:.2f}"]
                if one is not None and target is not None:
                    met = None if one["spread"] > 0.15 else one["ratio"] >= target
                    counted[met] += 1
            yield cells

    head = ["", "cache", "bytes ratio", "× dense, AVX-512", "target", "× dense, AVX2", "target"]
    attention = [line for shape in SHAPES for line in lines(
        "attention", shape, lambda simd, cache, shape=shape:
            ATTENTION_TARGETS.get((simd, shape, cache)))]
    steps = [line for context in CONTEXTS for line in lines(
        "steps", context, lambda simd, cache, context=context:
            STEP_TARGETS[context].get(cache) if simd == "AVX-512" else None)]
    return "\n".join([
        f"{report['date']}, {machine['cpu']}, {machine['threads']} threads, {report['pairs']} pairs, "
        f"one binary (SHA-256 `{report['binary'][:12]}`); AVX2 is the same machine with `--avx2`. "
        f"Ratios with a target: {sum(counted.values())}, met {counted[True]}, undecided "
        f"{counted[None]}, missed {counted[False]} (**bold**).", "",
        "Attention of one layer at 16384 tokens, 4 sequences:", "",
        table(["shape", *head[1:]], attention), "",
        f"Whole decode steps of tinyllama-1.1b, {BATCH} sequences (bytes: weights and cache):", "",
        table(["context", *head[1:]], steps)])


def marked(report) -> str:
    return f"{BEGIN}\n\n{section(report)}\n\n{END}"


def rewritten(page: str, report) -> str:
    """Returns the page with a new section between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return before + marked(report) + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure what codes.json lacks")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    options = parser.parse_args()
    if options.measure:
        measure(options.kvasir.resolve(), options.pairs)
    report = json.loads(RESULTS.read_text())
    for path in PAGES:
        path.write_text(rewritten(path.read_text(), report))


if __name__ == "__main__":
    main()
