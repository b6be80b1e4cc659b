"""Writes the section on GPUs of docs/performance.md from the results of scripts/gpu_check,
which are committed in bench/gpu/results (gpu-STAGE.json). bench/performance.sh writes it with
the rest of the page. This writes only the section:

  python3 bench/gpu/gpu_page.py docs/performance.md docs/performance-avx2.md
"""

import json
import sys
from pathlib import Path

import gpu_bench

RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- bench/gpu/gpu_page.py writes this -->", "<!-- to here -->"
NEVER = "never run"
STAGES = {
    "primitives": "primitives, memory, copies and launches", "ops": "kernels against their references",
    "attention": "attention on shapes of models against the CPU", "engine": "logits and losses against the CPU engine",
    "serve": "`kvasir serve --device cuda`", "bench": "the rows below",
}


class ResultError(Exception):
    pass


def table(head, rows):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def read(folder):
    results = {}
    for stage in STAGES:
        path = folder / f"gpu-{stage}.json"
        if not path.exists():
            continue
        report = json.loads(path.read_text())
        if report["quick"]:
            raise ResultError(f"{path.name} comes from a run with --quick, whose figures mean nothing")
        if report["stage"] != stage or not report["finished"]:
            raise ResultError(f"{path.name}: want a finished run of stage {stage}")
        results[stage] = report
    return results


def stage_row(stage, results):
    if stage not in results:
        return [f"`{stage}`", STAGES[stage], NEVER, "", ""]
    report = results[stage]
    counts = [sum(test["status"] == status for program in report["programs"] for test in program["tests"])
              for status in ("passed", "failed", "skipped")]
    tool = f", {report['sanitizer']}" if report["sanitizer"] else ""
    return [f"`{stage}`", STAGES[stage], report["date"][:10],
            f"{report['gpu']['name']} (CUDA {report['gpu']['driver_cuda']}), `{report['commit']}`{tool}",
            ("" if report["passed"] else "**failed**: ") + "{} passed, {} failed, {} skipped".format(*counts)]


def ratio(row, name):
    """Three cells: a ratio, its target, and whether it is met."""
    cells = [f"{row[name]:.2f}", "", ""]
    if f"{name}_target" in row:
        cells[1] = f"≥ {row[f'{name}_target']:g}"
        cells[2] = ("undecided" if row[f"{name}_undecided"] else
                    "met" if row[f"{name}_met"] else "**missed**")
    return cells


def attention(figures):
    return table(
        ["shape", "cache", "batch", "context", "µs", "share of the copy", "target", "", "× the best dense", "target", "",
         "best dense"],
        [[row["shape"], row["plan"], str(row["batch"]), str(row["context"]), f"{row['us']:.4g}", *ratio(row, "share"),
          *ratio(row, "speedup"), f"{row['best_baseline']}, {row['baselines_us'][row['best_baseline']]:.4g} µs"]
         for row in figures["attention"]])


def prefill(figures):
    return table(
        ["shape", "cache", "tokens", "µs", "share of mma.sync", "target", "", "mma.sync, TFLOP/s", "× the best dense",
         "best dense"],
        [[row["shape"], row["plan"], str(row["tokens"]), f"{row['us']:.4g}", *ratio(row, "share"),
          f"{row['mma_operations_per_second'] * 1e-12:.4g}", f"{row['speedup']:.2f}",
          f"{row['best_baseline']}, {row['baselines_us'][row['best_baseline']]:.4g} µs"]
         for row in figures["prefill"]])


def decode(figures):
    return table(["shape", "cache", "batch", "context", "ms/step", "tokens/s", "share of the floor", "target", "",
                  "as a CUDA graph", "× Hugging Face", "Hugging Face"],
                 [[row["shape"], row["plan"], str(row["batch"]), str(row["context"]), f"{row['ms']:.4g}",
                   f"{row['tokens_per_second']:.4g}", *ratio(row, "share"), by_graph(row), *hugging_face(row)]
                  for row in figures["decode"]])


def by_graph(row):
    if "graphs_ms" not in row:
        return NEVER
    return f"{row['graphs_ms']:.4g} ms, × {row['graphs']:.2f}{' (undecided)' if row['graphs_undecided'] else ''}"


def hugging_face(row):
    if "speedup" not in row:
        return ["", ""]
    return [f"{row['speedup']:.2f}", f"{row['transformers_ms']:.4g} ms{'' if row['interleaved'] else ', not in turn'}"]


def all_reduce(figures):
    return table(["GPUs", "bytes", "µs", "bus bandwidth, GB/s"],
                 [[str(row["gpus"]), str(row["bytes"]), f"{row['us']:.4g}", f"{row['bus_bytes_per_second'] * 1e-9:.4g}"]
                  for row in figures["all_reduce"]])


def never_measured():
    rows = []
    for plan in gpu_bench.PLANS:
        asked = [f"≥ {values[plan]:g} {what}" for values, what in (
            (gpu_bench.SHARES, "of the copy's bandwidth"), (gpu_bench.SPEEDUPS, "times the best dense"))
            if plan in values]
        rows.append([f"attention over `{plan}`", ", ".join(asked), NEVER])
    rows += [[f"decode of {gpu_bench.DECODE_SHAPE}, `{plan}`, batch {batch} × {context}",
              "" if target is None else f"≥ {target:g} of the floor", NEVER] for plan in gpu_bench.DECODE_PLANS for batch, context, target in gpu_bench.DECODE_ROWS]
    rows += [["decode against Hugging Face transformers with a static cache", "", NEVER]]
    rows += [["all-reduce between GPUs", "", NEVER]]
    rows += [[f"prefill of {gpu_bench.PREFILL_TOKENS} tokens, `{plan}`", f"≥ {share:g} of what mma.sync reaches", NEVER]
             for plan, share in gpu_bench.PREFILL_SHARES.items()]
    return table(["row", "target", ""], rows)


def section(folder=RESULTS):
    results = read(folder)
    parts = [table(["stage", "tests", "last run", "machine", "result"], [stage_row(stage, results) for stage in STAGES]), ""]
    if "bench" not in results:
        return "\n".join([*parts, never_measured()])
    for program in results["bench"]["programs"]:
        figures = program["figures"]
        machine = figures["machine"]
        baselines = "; ".join(figures[name] for name in ("baselines", "decoder") if name in figures)
        parts += [f"{machine['name']}, timed by {machine['timed_by']}; baselines: {baselines}. "
                  f"Medians of {figures['pairs']} pairs.", ""]
        for name, write in (("attention", attention), ("prefill", prefill), ("decode", decode),
                            ("all_reduce", all_reduce)):
            parts += [write(figures) if figures.get(name) else f"{name}: {NEVER}", ""]
        parts += [f"- {left['row']}: {left['why']}" for left in figures["left_out"]]
    return "\n".join(parts)


def marked(text):
    return f"{BEGIN}\n\n{text}\n\n{END}"


def rewritten(page, folder=RESULTS):
    """Returns the page with a new section between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ResultError(f"the page has no {BEGIN} ... {END}")
    return before + marked(section(folder)) + after


def main():
    for path in map(Path, sys.argv[1:]):
        path.write_text(rewritten(path.read_text()))


if __name__ == "__main__":
    main()
