"""Makes the Markdown of docs/performance.md from the benchmarks' JSON. No figure on the
page is copied by hand."""

import json
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / name) for name in ("gpu", "measured")]

import codes_page  # noqa: E402
import gpu_page  # noqa: E402
import llama_cpp_page  # noqa: E402


class PageError(Exception):
    """The page needs a result that is missing, or results that do not belong together."""


def table(head, rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float) -> str:
    """Returns a text with three significant digits, or with all digits from 1000 on."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def verdict(row) -> str:
    if row.get("undecided"):
        return "undecided"
    return {True: "met", False: "**missed**", None: ""}[row.get("met")]


# -------------------------------------------------------------------- sections

def check_sources(results, quick: bool) -> None:
    """Raises PageError if the results come from several binaries or hosts or, unless `quick`
    is true, from a smoke test."""
    found = {}
    for name, report in results.items():
        run = report.get("run", {})
        if "--quick" in run.get("argv", []) and not quick:
            raise PageError(f"{name} comes from a run with --quick, whose figures mean nothing")
        source = f"{run.get('binary', 'unknown')[:12]} on {run.get('host', 'unknown')}"
        found.setdefault(source, []).append(name)
    if len(found) > 1:
        listed = "; ".join(f"{source}: {', '.join(names)}" for source, names in found.items())
        raise PageError(f"results of several binaries or hosts, which a page may not mix: {listed}; "
                        "measure the old ones again, or remove their files")


def machine(results) -> str:
    for name in ("attention", "decode", "prefill"):
        if name in results:
            m = results[name]["machine"]
            days = sorted(report["machine"]["time"][:10] for report in results.values()
                          if "time" in report["machine"])
            span = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
            cache = (f"last-level cache {m['llc_bytes'] / 2**20:.0f} MiB" if m["llc_bytes"]
                     else "no cache size reported")
            return (f"{span}: {m['cpu']}, {m['threads']} threads, {m['simd']}, {cache}, memory "
                    f"{size(m['memory_bytes'])}. Measured with `bench {name}`: "
                    f"{m['read_bandwidth_bytes_per_second'] / 1e9:.3g} GB/s read bandwidth over "
                    f"{size(m['read_bandwidth_footprint_bytes'])}, "
                    f"{m['f32_flops'] / 1e9:.0f} GFLOP/s float32. Release build, all results of "
                    f"one binary (SHA-256 `{results[name]['run']['binary'][:12]}`).")
    raise PageError("no result names the machine")


def figure_rows(name, report):
    for figure, value in report["figures"].items():
        target = report["targets"].get(figure)
        spread = report["spread"].get(figure)
        if target is None and spread is None:
            continue
        undecided = figure in report["undecided"]
        row = {"undecided": undecided}
        asked = ""
        if target is not None:
            (kind, limit), = target.items()
            asked = f"{'≥' if kind == 'at_least' else '≤'} {limit:g}"
            row["met"] = value >= limit if kind == "at_least" else value <= limit
        yield [name, f"`{figure}`", asked, number(value),
               "exact" if spread is None else f"{100 * spread:.1f} %", verdict(row)]


def figures(results) -> str:
    rows = []
    lines = []
    for name in ("decode", "prefill", "scheduler", "serve", "load", "capacity"):
        if name in results:
            rows += figure_rows(name, results[name])
        if name in results and name != "capacity":  # capacity has a section of its own
            lines += [f"- {name}: {note}" for note in results[name].get("notes", [])]
    return "\n".join([table(["bench", "figure", "target", "measured", "spread", ""], rows),
                      *([""] if lines else []), *lines])


def summary(rows, value, name, form=".2f") -> str:
    """Returns a sentence that says how many rows meet their targets, and which do not."""
    asked = [row for row in rows if "target" in row]
    met = [row for row in asked if row.get("met")]
    text = [f"{len(met)} of {len(asked)} rows meet their targets."]
    missed = [row for row in asked if not row.get("met") and not row["undecided"]]
    if missed:
        text.append("Missed: " + ", ".join(
            f"{name(row)} ({row[value]:{form}}, target {row['target']:{form}})"
            for row in missed) + ".")
    undecided = [row for row in asked if row["undecided"]]
    if undecided:
        text.append("Undecided: " + ", ".join(map(name, undecided)) + ".")
    return " ".join(text)


def attention(results) -> str:
    rows = results["attention"]["rows"]
    parts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        parts.append(f"### {shape}\n")
        parts.append(summary(own, "floor_ratio",
                             lambda row: f"{row['method']} at {row['context']}"))
        parts.append("")
        parts.append(table(
            ["method", "context", "batch", "µs/token", "bytes/token", "MFLOP/token",
             "bandwidth share", "bound by", "time / floor", "target", "", "× dense",
             "bytes ratio"],
            [[row["method"], str(row["context"]), str(row["batch"]), number(row["us_per_token"]),
              size(row["bytes_per_token"]), number(row["flops_per_token"] / 1e6),
              f"{row['bandwidth_share']:.2f}", row["bound"], f"{row['floor_ratio']:.2f}",
              f"≤ {row['target']:g}" if "target" in row else "", verdict(row),
              f"{row['speedup_over_dense']:.2f}"
              + (" (undecided)" if row.get("speedup_undecided") else ""),
              f"{row['bytes_ratio']:.2f}"] for row in own]))
        parts.append("")
    shares = [row["footprint_over_llc"] for row in rows if "footprint_over_llc" in row]
    least = min(row["footprint_bytes"] for row in rows)
    parts.append(
        f"Every method's arenas together are {min(shares):.1f} times the last-level cache or more."
        if shares else
        f"This machine reports no cache size; every method's arenas together are {size(least)} "
        "or more.")
    return "\n".join(parts + notes(results["attention"]))


def notes(report):
    return ["", *(f"- {note}" for note in report.get("notes", []))] if report.get("notes") else []


def attention_prefill(results, name="attention_prefill") -> str:
    rows = results[name]["rows"]
    return "\n".join([
        summary(rows, "over_dense", lambda row: f"{row['method']} of {row['shape']}"), "",
        table(["shape", "method", "context", "chunk", "µs/token", "× dense time", "target", ""],
              [[row["shape"], row["method"], str(row["context"]), str(row["chunk"]),
                number(row["us_per_token"]), f"{row['over_dense']:.2f}",
                f"≤ {row['target']:g}" if "target" in row else "", verdict(row)]
               for row in rows]),
        *notes(results[name])])


def attention_prefill_deterministic(results) -> str:
    return attention_prefill(results, "attention_prefill_deterministic")


def decode_plans(results) -> str:
    report = results["decode_plans"]
    rows = report["rows"]
    return "\n".join([
        table(["cache", "batch", "context", "tokens/s", "ms/step", "weights/step", "cache/step",
               "× dense", "spread", "× fewer bytes", ""],
              [[row["plan"], str(row["batch"]), str(row["context"]),
                number(row["tokens_per_second"]), number(row["step_ms"]),
                size(row["weight_bytes_per_step"]), size(row["cache_bytes_per_step"]),
                f"{row['speedup_over_dense']:.2f}", f"{100 * row['speedup_spread']:.1f} %",
                f"{row['bytes_ratio']:.2f}", verdict(row)] for row in rows]),
        *notes(report)])


def breakdown(results) -> str:
    rows = results["decode_plans"]["rows"]
    parts = [part for part in rows[0]["breakdown"] if any(row["breakdown"][part] for row in rows)]
    return table(["cache", *parts],
                 [[row["plan"], *(f"{100 * row['breakdown'][part]:.1f} %" for part in parts)]
                  for row in rows])


def llama_cpp(_) -> str:
    """Returns the section on llama.cpp, from committed results."""
    return llama_cpp_page.marked(json.loads(llama_cpp_page.RESULTS.read_text()))


def codes(_) -> str:
    """Returns the section on caches of codes, from committed results."""
    return codes_page.marked(json.loads(codes_page.RESULTS.read_text()))


def capacity(results) -> str:
    report = results["capacity"]
    tokens = report["figures"]["sequence_tokens"]
    return "\n".join([
        f"Sequences of {tokens:.0f} tokens in a pool of "
        f"{report['figures']['pool_bytes'] / 2**30:g} GiB.", "",
        table(["model", "cache", "bytes/token", "MB/sequence", "predicted", "reached",
               "dense bf16 reaches", "× dense"],
              [[row["model"], row["plan"] or row["method"], number(row["kv_bytes_per_token"]),
                f"{row['bytes_per_sequence'] / 1e6:.1f}", str(row["predicted"]),
                str(row["reached"]), str(row["dense_reached"]),
                "" if row["reached_over_dense"] is None else f"{row['reached_over_dense']:.2f}"]
               for row in report["rows"]]),
        *notes(report)])


def gpu(_) -> str:
    """Returns the section on GPUs, which was measured on other machines than the rest."""
    try:
        return gpu_page.marked(gpu_page.section())
    except gpu_page.ResultError as error:
        raise PageError(str(error)) from error


WRITTEN = "<!-- bench/performance.sh writes this page, with the words of bench/performance_page.md -->"

SECTIONS = {
    "written": lambda _: WRITTEN,
    "gpu": gpu,
    "machine": machine, "figures": figures, "attention": attention,
    "attention_prefill": attention_prefill,
    "attention_prefill_deterministic": attention_prefill_deterministic,
    "decode_plans": decode_plans, "breakdown": breakdown,
    "codes": codes, "llama_cpp": llama_cpp, "capacity": capacity,
}


def fill(text: str, results) -> str:
    """Returns `text` with each {{section}} replaced. Raises PageError if a result is missing."""
    def section(found):
        name = found.group(1)
        if name not in SECTIONS:
            raise PageError(f"the page asks for {name}, which is none of {', '.join(SECTIONS)}")
        try:
            return SECTIONS[name](results)
        except KeyError as error:
            raise PageError(f"section {name}: no result has {error}") from error
    return re.sub(r"\{\{(\w+)\}\}", section, text)
