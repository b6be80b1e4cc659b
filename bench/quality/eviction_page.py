"""The part of docs/quality.md about eviction, from what eviction.py has measured."""

import math
import os
import platform
from dataclasses import dataclass

import eviction_overlap as overlap
import eviction_settings as settings
import eviction_streams as streams
import quality_page
import quality_stats as stats
from eviction_settings import Budget, Claim, Row
from frontier_page import exponential, log_ratios


@dataclass(frozen=True)
class Measured:
    window_kl: list[float]
    window_nats: list[float]
    teacher_nats: list[float]
    repeat_nats: list[float]  # of second copies
    slot_bytes: float
    top1: float

    @property
    def kl(self) -> stats.Interval:
        return stats.interval(self.window_kl)

    @property
    def added(self) -> stats.Interval:
        return stats.combine([(1, self.window_nats), (-1, self.teacher_nats)])


Found = dict[Row, Measured]


@dataclass(frozen=True)
class Run:
    budget: Budget
    windows: Found
    far: Found
    long: Found
    streams: streams.Found
    overlaps: overlap.Found
    by_lot: float  # what tokens drawn by lot would share
    version: str
    date: str


# ----------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Judgement:
    claim: Claim
    left: Measured
    right: Measured
    log_ratio: stats.Interval  # of KL, by window; at most 0 is claimed
    adjusted: float            # p-value among the claims of its family

    @property
    def verdict(self) -> str:
        if self.adjusted > settings.ERROR_RATE:
            return "undecided"
        return "holds" if self.log_ratio.mean <= 0 else "**does not hold**"


def judge(found: Found) -> list[Judgement]:
    """Claims whose rows were measured; a family is corrected for those alone."""
    judged = []
    for family in dict.fromkeys(claim.family for claim in settings.CLAIMS):
        claims = [claim for claim in settings.CLAIMS if claim.family == family
                  and claim.left in found and claim.right in found]
        ratios = [log_ratios(found[claim.left].window_kl,
                             found[claim.right].window_kl) for claim in claims]
        adjusted = stats.holm([stats.two_sided(one) for one in ratios])
        judged += [Judgement(claim, found[claim.left], found[claim.right],
                             stats.interval(one), p)
                   for claim, one, p in zip(claims, ratios, adjusted)]
    return judged


def shown_ratio(ratio: stats.Interval) -> str:
    mean, low, high = (exponential(value)
                       for value in (ratio.mean, ratio.low, ratio.high))
    return f"{mean} ({low} to {high})"


def claim_lines(judged: list[Judgement]) -> list[str]:
    lines = ["| expected | family | KL | its KL | ratio by window | adjusted p | |",
             "|---|---|--:|--:|--:|--:|---|"]
    for one in judged:
        p = f"{one.adjusted:.3f}" if one.adjusted >= 0.001 else "< 0.001"
        lines.append(
            f"| {one.claim.text} | {one.claim.family} | {one.left.kl.mean:.4f} "
            f"| {one.right.kl.mean:.4f} | {shown_ratio(one.log_ratio)} | {p} "
            f"| {one.verdict} |")
    return lines


# ------------------------------------------------------------------------- rows


def row_lines(found: Found, rows: list[Row]) -> list[str]:
    """Each beside H2O at the same bits and budget, window by window."""
    lines = ["| cache | stays | others go by | bytes/slot | KL | over H2O's "
             "| added nats/token | top-1 |", "|---|--:|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        one = found.get(row)
        if one is None:
            continue
        h2o = found.get(Row(row.cache, "h2o", row.budget))
        ratio = ("–" if h2o is None or h2o is one else shown_ratio(
            stats.interval(log_ratios(one.window_kl, h2o.window_kl))))
        stays = f"{100 * row.budget:g} %" if row.budget else "all"
        shown = row.shown if row.budget else "–"
        lines.append(
            f"| {row.cache.name} | {stays} | {shown} | {one.slot_bytes:.0f} "
            f"| {one.kl.mean:.4f} ± {one.kl.half:.4f} | {ratio} "
            f"| {one.added.mean:+.4f} ± {one.added.half:.4f} | {one.top1:.3f} |")
    return lines


def far_lines(found: Found, rows: list[Row]) -> list[str]:
    lines = ["| cache | stays | others go by | loss on the second copy | over H2O's |",
             "|---|--:|---|--:|--:|"]
    for row in rows:
        one = found.get(row)
        if one is None:
            continue
        h2o = found.get(Row(row.cache, "h2o", row.budget))
        loss = stats.interval(one.repeat_nats)
        added = "–"
        if h2o is not None and h2o is not one:
            difference = stats.combine([(1, one.repeat_nats), (-1, h2o.repeat_nats)])
            added = f"{difference.mean:+.2f} ± {difference.half:.2f}"
        stays = f"{100 * row.budget:g} %" if row.budget else "all"
        half = f" ± {loss.half:.2f}" if math.isfinite(loss.half) else ""
        lines.append(f"| {row.cache.name} | {stays} "
                     f"| {row.shown if row.budget else '–'} "
                     f"| {loss.mean:.2f}{half} | {added} |")
    return lines


# ------------------------------------------------------------------------- page


def section(title: str, text: list[str], lines: list[str]) -> list[str]:
    """Nothing where nothing was measured: a table of its head alone."""
    if len(lines) <= 2:
        return []
    return [f"### {title}", "", *text, *lines, ""]


def part(run: Run) -> str:
    first = next(iter(run.windows.values()))
    teacher = stats.interval(first.teacher_nats)
    note = quality_page.notes().get("eviction")
    asked = sum(len(run.budget.of(rows)) for rows in (
        settings.MATRIX, settings.FAR, settings.OTHERS, settings.LONG_ROWS,
        settings.STREAMS))
    have = len(run.windows) + len(run.far) + len(run.long) + len(run.streams)
    lines = [
        "## Eviction on SmolLM2-135M-Instruct", "",
        "What it costs to give up tokens, from `kvasir-compress evaluate --eviction`:"
        " the oracle that applies a plan's eviction slot by slot. Rows and claims are "
        "in `bench/quality/eviction_settings.py`, committed before the run.", "",
        f"- {len(first.window_kl)} windows of {settings.TOKENS} tokens, from the "
        "beginnings of the four held-out texts, one after the other; loss of the "
        f"dense cache {teacher.mean:.4f} nats per token. A window is one prompt: "
        "slots go at every 128th token, and the share that stays is of the whole "
        "window, so that tokens up to it lose nothing.",
        "- *KL*: the divergence of the next token's distribution from the dense "
        "cache's. Intervals: 95 %, paired over windows, which are counted as "
        "independent; ratios are geometric means.",
        "- 4 first and 64 latest tokens always stay, if a row does not say otherwise; "
        "*recent only* has no first ones. *Random*: the others by lot, seed "
        f"{settings.SEED}.",
        "- 4 and 3 bits: codes as `--kv-plan rotated-4bit` has them, without its "
        "exact tokens; 8: `dense-8bit`; 16: numbers. Units are those of the plan: a "
        "layer evicts as one where it has codes, head by head where it has none "
        "(there is nothing that codes lose, and Q-Hitter is H2O). *Bytes/slot* are "
        "with scores, positions and errors, padding included.",
        "- Claims compare two rows by the ratio of their KL, window by window; "
        "p-values are two-sided and adjusted for the number of comparisons of a "
        f"family (Holm); at most {settings.ERROR_RATE} decides.",
        f"- Measured {run.date} by kvasir-compress {run.version}, "
        f"{platform.machine()}, {os.cpu_count()} CPUs, libtorch on the CPU in "
        f"float32; budget `{run.budget.name}`" +
        (f", {have} of its {asked} rows so far." if have < asked else "."), "",
        "### Expected and found", "", *claim_lines(judge(run.windows)), ""]
    if note:
        lines += [note, ""]
    lines += section("By method, budget and bits", [],
                     row_lines(run.windows, settings.MATRIX))
    lines += section("As it is served", [
        "With the exact tokens of `--kv-plan rotated-4bit`:", ""],
        row_lines(run.windows, settings.SERVED_ROWS))
    lines += section("Codes of one side", [],
                     row_lines(run.windows, settings.SIDES))
    lines += section("Weight of the attention received", [
        "λ = 1 is H2O.", ""], row_lines(run.windows, settings.SWEEP))
    lines += section("Recent and heavy tokens", [
        f"{round(0.5 * (settings.TOKENS - 1))} or "
        f"{round(0.2 * (settings.TOKENS - 1))} slots stay; 64 are recent elsewhere.",
        ""], row_lines(run.windows, settings.SPLIT))
    lines += section("A passage that comes again", [
        f"{settings.PASSAGE_TOKENS} tokens, {settings.FILLER_TOKENS} of another text, "
        "the same passage again: the loss on its second copy, over "
        f"{run.budget.copies} of them.", ""], far_lines(run.far, settings.FAR))
    lines += section(f"At {settings.LONG} tokens", [
        f"{run.budget.long_windows} windows.", ""],
        row_lines(run.long, settings.LONG_ROWS))
    lines += section("Heavy tokens, with codes and without", [
        "![Share of heavy tokens by layer](heavy-overlap.svg)", "",
        f"The first {settings.OVERLAP_BYTES} bytes of each held-out text as a prompt of the "
        f"server, of which {100 * settings.OVERLAP_SHARE:g} % stay by the attention that "
        "they receive, a layer as one: which tokens of the cache of numbers stay under "
        "codes, too (its figure 2; here each cache goes by its own evictions, so that "
        "what differs adds up). Means over texts.", ""],
        overlap.lines(run.overlaps, run.by_lot))
    lines += section("A book as a stream", [
        "The beginning of the held-out novels as one sequence of the server, "
        f"{sum(next(iter(run.streams.values())).tokens) if run.streams else 0} tokens in a "
        "16-bit cache of "
        f"{settings.STREAM_SLOTS} slots at most: {settings.STREAM_SLOTS - settings.STREAM_EVERY} "
        f"stay at every {settings.STREAM_EVERY}th token. Beside it the dense cache "
        f"of as many tokens, run anew for every {settings.STREAM_STRIDE}. Loss of the whole, "
        "and of each tenth, over that of the windows; original positions pass the "
        f"model's own {settings.LONG} on the way.", ""], streams.lines(run.streams))
    return "\n".join(lines)
