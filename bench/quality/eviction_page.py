"""Writes the part of docs/quality.md about eviction, from the results of eviction.py."""

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
    repeat_nats: list[float]  # losses of the second copies of passages
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
    by_lot: float  # the overlap of a random choice of tokens
    version: str
    date: str


# ----------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Judgement:
    claim: Claim
    left: Measured
    right: Measured
    # log(KL of left / KL of right), paired by window. The claim is that it is at most 0.
    log_ratio: stats.Interval
    adjusted: float  # the p-value, corrected for the number of claims in the family

    @property
    def verdict(self) -> str:
        if self.adjusted > settings.ERROR_RATE:
            return "undecided"
        return "holds" if self.log_ratio.mean <= 0 else "**does not hold**"


def judge(found: Found) -> list[Judgement]:
    """Judges the claims of which both rows were measured. The p-values of a family are corrected
    for the number of these claims."""
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
    """Compares each row with H2O at the same bits and budget, window by window."""
    lines = ["| cache | stays | others stay by | bytes/slot | KL | over H2O's "
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
    lines = ["| cache | stays | others stay by | loss on the second copy | over H2O's |",
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
    """Returns nothing if the table has only its head, because nothing was measured."""
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
        "The cost of evicting tokens, measured with `kvasir-compress evaluate "
        "--eviction`: the oracle applies a plan's eviction slot by slot. Rows and "
        "claims are in `bench/quality/eviction_settings.py`, which was committed "
        "before the run.", "",
        f"- {len(first.window_kl)} windows of {settings.TOKENS} tokens, from the joined "
        "beginnings of the four held-out texts; the loss of the dense cache is "
        f"{teacher.mean:.4f} nats per token. A window is one prompt. Slots are freed at "
        "every 128th token. The share that stays is of the whole window, so the "
        "first tokens up to that number lose nothing.",
        "- *KL*: the divergence of the next token's distribution from the dense "
        "cache's. Intervals have 95 % and are paired over windows, which count as "
        "independent. Ratios are geometric means.",
        "- The first 4 and the latest 64 tokens always stay, unless a row says otherwise; "
        "*recent only* keeps no first ones. *Random*: the others are chosen at "
        f"random, seed {settings.SEED}.",
        "- 4 and 3 bits: the codes of `--kv-plan rotated-4bit`, without its exact "
        "tokens; 8: `dense-8bit`; 16: numbers. Units are those of the plan: a layer "
        "with codes evicts as one, a layer without codes head by head (no code loses "
        "anything there, so Q-Hitter is H2O). *Bytes/slot* include scores, positions, "
        "errors and padding.",
        "- Claims compare two rows by the ratio of their KL, window by window; "
        "p-values are two-sided and adjusted for the number of comparisons of a "
        f"family (Holm). A claim is decided at {settings.ERROR_RATE} or less.",
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
        f"A passage of {settings.PASSAGE_TOKENS} tokens, {settings.FILLER_TOKENS} tokens of "
        "another text, and the passage again: the loss on the second copy, over "
        f"{run.budget.copies} copies.", ""], far_lines(run.far, settings.FAR))
    lines += section(f"At {settings.LONG} tokens", [
        f"{run.budget.long_windows} windows.", ""],
        row_lines(run.long, settings.LONG_ROWS))
    lines += section("Heavy tokens, with codes and without", [
        "![Share of heavy tokens by layer](heavy-overlap.svg)", "",
        f"The first {settings.OVERLAP_BYTES} bytes of each held-out text are a prompt of the "
        f"server, and {100 * settings.OVERLAP_SHARE:g} % of its tokens stay, by the "
        "attention that they received in a layer. The table shows which share of the "
        "tokens that stay in the cache of numbers also stay with codes (Q-Hitter's "
        "figure 2; here each cache has its own evictions, so differences add up). "
        "Means over texts.", ""],
        overlap.lines(run.overlaps, run.by_lot))
    lines += section("A book as a stream", [
        "The beginning of the held-out novels is one sequence of the server, with "
        f"{sum(next(iter(run.streams.values())).tokens) if run.streams else 0} tokens in a "
        "16-bit cache of at most "
        f"{settings.STREAM_SLOTS} slots: {settings.STREAM_SLOTS - settings.STREAM_EVERY} "
        f"stay at every {settings.STREAM_EVERY}th token. The baseline is a dense cache "
        f"of as many tokens, computed again every {settings.STREAM_STRIDE} tokens. The table "
        "has the loss of the whole text, and of each tenth, over that of these windows. "
        f"Original positions exceed the model's own {settings.LONG} on the way.", ""], streams.lines(run.streams))
    return "\n".join(lines)
