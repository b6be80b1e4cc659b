"""Writes the part of docs/quality.md about SmolLM2, from the results of frontier.py."""

import collections
import math
import os
import platform
import sys
from dataclasses import dataclass

import frontier_settings as settings
import quality_chart
import quality_engine
import quality_page
import quality_stats as stats
from frontier_settings import LONG, SHORT, Budget, Claim, Row


@dataclass(frozen=True)
class Measured:
    """The results of a row for all texts. Windows are in the order of the texts."""
    bytes_per_token: float   # for one more token
    fixed_bytes: float       # for a sequence, independent of its length
    window_tokens: int
    window_kl: list[float]
    window_nats: list[float]
    teacher_nats: list[float]
    top1: float
    repeat: float | None
    clamp_rate: float
    kl_by_text: dict[str, float]

    @classmethod
    def merge(cls, texts: dict[str, dict], window_tokens: int) -> "Measured":
        """Joins the results of texts: name -> {"teacher": ..., "row": ...} of evaluate. All texts
        have the same number of windows."""
        rows = {name: text["row"] for name, text in texts.items()}
        first = next(iter(rows.values()))

        def mean(key):
            return sum(row[key] for row in rows.values()) / len(rows)
        return cls(
            bytes_per_token=first["kv_bytes_per_token"],
            fixed_bytes=first["fixed_bytes_per_sequence"],
            window_tokens=window_tokens,
            window_kl=[kl for row in rows.values() for kl in row["window_kl"]],
            window_nats=[x for row in rows.values() for x in row["window_nats"]],
            teacher_nats=[x for text in texts.values()
                          for x in text["teacher"]["window_nats"]],
            top1=mean("top1_agreement"),
            repeat=(None if first["repeat_nats_per_token"] is None
                    else mean("repeat_nats_per_token")),
            clamp_rate=max(row["clamp_rate"] for row in rows.values()),
            kl_by_text={name: row["kl_nats"] for name, row in rows.items()})

    @property
    def bytes(self) -> float:
        """Returns the bytes per token of a sequence as long as a window, exact tokens included."""
        return self.bytes_per_token + self.fixed_bytes / self.window_tokens

    @property
    def kl(self) -> stats.Interval:
        return stats.interval(self.window_kl)

    @property
    def added(self) -> stats.Interval:
        return stats.combine([(1, self.window_nats), (-1, self.teacher_nats)])


@dataclass(frozen=True)
class Run:
    budget: Budget
    short: dict[str, Measured]  # the keys are names of rows
    long: dict[str, Measured]
    times: dict[str, dict]  # of decode steps, relative to the bf16 cache
    compared: list[quality_engine.Comparison]
    predictions: dict[str, dict]
    version: str
    date: str

    def of(self, row: Row, tokens: int) -> Measured | None:
        return (self.short if tokens == SHORT else self.long).get(row.name)


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
    def share(self) -> float:
        return self.left.bytes / self.right.bytes

    @property
    def too_large(self) -> str:
        """Returns the size of the left row if the claim allows only less, else an empty text."""
        claim = self.claim
        if claim.share is not None and self.share > claim.share:
            return f"{self.share:.3f} of its bytes"
        bits = 8 * self.left.bytes / settings.NUMBERS_PER_TOKEN
        if claim.bits is not None and bits > claim.bits:
            return f"{bits:.3f} bits a number"
        return ""

    @property
    def verdict(self) -> str:
        if self.too_large:
            return f"**not at these bytes**: {self.too_large}"
        if self.adjusted > settings.ERROR_RATE:
            return "undecided"
        return "holds" if self.log_ratio.mean <= 0 else "**does not hold**"


def log_ratios(left: list[float], right: list[float]) -> list[float]:
    """Compares window by window, because both rows diverge more on a hard text."""
    least = 1e-12  # for rows that lose nothing
    return [math.log(max(a, least) / max(b, least))
            for a, b in zip(left, right, strict=True)]


def judge(run: Run) -> list[Judgement]:
    """Judges the claims of which both rows were measured. The p-values of a family are corrected
    for the number of these claims."""
    found = []
    for family in dict.fromkeys(claim.family for claim in settings.CLAIMS):
        pairs = [(claim, left, right) for claim in settings.CLAIMS
                 if claim.family == family
                 and (left := run.of(claim.left, claim.tokens)) is not None
                 and (right := run.of(claim.right, claim.tokens)) is not None]
        ratios = [log_ratios(left.window_kl, right.window_kl)
                  for _, left, right in pairs]
        adjusted = stats.holm([stats.two_sided(one) for one in ratios])
        found += [Judgement(*pair, stats.interval(one), p)
                  for pair, one, p in zip(pairs, ratios, adjusted)]
    return found


def claim_lines(judged: list[Judgement]) -> list[str]:
    lines = ["| claim | family | tokens | share of its bytes | KL | its KL | ratio by "
             "window | adjusted p | |", "|---|---|--:|--:|--:|--:|--:|--:|---|"]
    for one in judged:
        ratio, low, high = (exponential(value) for value in (
            one.log_ratio.mean, one.log_ratio.low, one.log_ratio.high))
        p = f"{one.adjusted:.3f}" if one.adjusted >= 0.001 else "< 0.001"
        lines.append(
            f"| {one.claim.text} | {one.claim.family} | {one.claim.tokens} "
            f"| {one.share:.3f} | {one.left.kl.mean:.4f} | {one.right.kl.mean:.4f} "
            f"| {ratio} ({low} to {high}) | {p} | {one.verdict} |")
    notes = quality_page.notes()
    for one in judged:
        if one.claim.name in notes:
            lines += ["", f"*{one.claim.text}:* {notes[one.claim.name]}"]
        elif one.verdict not in ("holds", "undecided"):
            print(f"quality_notes.md has no paragraph about {one.claim.name}, which "
                  "does not hold", file=sys.stderr)
    return lines


def exponential(value: float) -> str:
    return f"{math.exp(value):.2f}" if value < 20 else "∞"


# ------------------------------------------------------------------------- rows


def row_lines(run: Run, rows: list[Row], tokens: int) -> list[str]:
    lines = ["| cache | bits a number | bytes/token | KL | added nats/token | top-1 | "
             "repeat |", "|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        one = run.of(row, tokens)
        if one is None:
            continue
        size = f"{one.bytes_per_token:.0f}"
        if one.fixed_bytes > 0:
            size += f" + {one.fixed_bytes / tokens:.0f}"
        repeat = "–" if one.repeat is None else f"{one.repeat:.2f}"
        lines.append(
            f"| {row.name} | {8 * one.bytes / settings.NUMBERS_PER_TOKEN:.2f} "
            f"| {size} | {one.kl.mean:.4f} ± {one.kl.half:.4f} "
            f"| {one.added.mean:+.4f} ± {one.added.half:.4f} | {one.top1:.3f} "
            f"| {repeat} |")
    return lines


def text_lines(run: Run, rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.name in run.short]
    if not rows:
        return []
    names = list(run.short[rows[0].name].kl_by_text)
    lines = ["| KL on | " + " | ".join(names) + " |",
             "|---|" + "--:|" * len(names)]
    for row in rows:
        found = run.short[row.name].kl_by_text
        lines.append(f"| {row.name} | " +
                     " | ".join(f"{found[name]:.4f}" for name in names) + " |")
    return lines


def prediction_lines(run: Run) -> list[str]:
    rows = []
    for row in settings.PLANNED + settings.LONG_ROWS:
        tokens = SHORT if row in settings.PLANNED else LONG
        one = run.of(row, tokens)
        if one is not None and row.name in run.predictions:
            rows.append((row, tokens, run.predictions[row.name], one))
    if not rows:
        return []
    lines = ["| plan | tokens | predicted KL | over domains | measured | measured "
             "over predicted |", "|---|--:|--:|--:|--:|--:|"]
    for row, tokens, predicted, one in rows:
        lines.append(
            f"| {row.name} | {tokens} | {predicted['kl']:.4f} | {predicted['kl_low']:.4f} to "
            f"{predicted['kl_high']:.4f} | {one.kl.mean:.4f} "
            f"| {one.kl.mean / predicted['kl']:.2f} |")
    if len(rows) > 2:
        agree = stats.ranks_agree([predicted["kl"] for _, _, predicted, _ in rows],
                                  [one.kl.mean for _, _, _, one in rows])
        lines += ["", f"Spearman's correlation of the {len(rows)}: {agree:.3f}."]
    return lines


def engine_lines(run: Run) -> list[str]:
    if not run.compared:
        return []
    lines = ["The server's loss with every artifact, against the oracle's, over the "
             "windows of the first held-out text, in chunks of "
             f"{quality_engine.CHUNK_TOKENS} tokens and one token at a time. Allowed "
             f"are {100 * quality_engine.LIMITS['numbers']:.2f} % for numbers and "
             f"{100 * quality_engine.LIMITS['codes']:.1f} % for codes.", "", "| artifact | cached as | difference | |",
             "|---|---|--:|---|"]
    for one in run.compared:
        lines.append(f"| {one.name} | {one.kind} | {100 * one.relative:.4f} % "
                     f"| {quality_engine.mark_of(one)} |")
    return lines


# ----------------------------------------------------------------------- charts


def chart(run: Run, groups: dict[str, dict[str, list[Row]]], tokens: int,
          title: str) -> str:
    # Includes groups without rows, because a group's place in the list decides its colour and
    # shape. So a group looks the same in all charts.
    found: dict[str, dict[str, list[quality_chart.Point]]] = {
        group: {} for group in settings.CHART}
    for group, series in groups.items():
        for name, rows in series.items():
            points = [quality_chart.Point(one.bytes, one.kl.mean, one.kl.half,
                                          row.name)
                      for row in rows
                      if (one := run.of(row, tokens)) is not None]
            if points:
                found[group][name] = points
    return quality_chart.frontier(
        found, title,
        f"bytes per token of a sequence of {tokens} tokens, exact ones included",
        "KL divergence from the uncompressed cache, nats per token",
        ("bf16", settings.DENSE_BYTES))


def time_chart(run: Run) -> str:
    found: dict[str, dict[str, list[quality_chart.Point]]] = {
        group: {} for group in settings.CHART}
    for group, series in settings.TIME_CHART.items():
        for name, rows in series.items():
            points = [quality_chart.Point(run.times[row.name]["time"], one.kl.mean,
                                          one.kl.half, row.name)
                      for row in rows if row.name in run.times
                      if (one := run.of(row, LONG)) is not None]
            if points:
                found[group][name] = points
    return quality_chart.frontier(
        found, f"SmolLM2-135M: divergence against time, {settings.TIME_BATCH} × {LONG} tokens",
        "time of a decode step, divided by that of the bf16 cache",
        "KL divergence from the uncompressed cache, nats per token", ("bf16", 1.0),
        unit="of the bf16 cache's time",
        x_steps=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))


def time_lines(run: Run) -> list[str]:
    lines = ["| cache | time of a step | spread | time of attention | KL |",
             "|---|--:|--:|--:|--:|"]
    for row in settings.TIMED:
        if row.name not in run.times:
            continue
        one = run.times[row.name]
        undecided = " (undecided)" if one["spread"] > 0.15 else ""
        lines.append(f"| {row.name} | {one['time']:.2f}{undecided} | {100 * one['spread']:.0f} % "
                     f"| {one['attention_time']:.2f} | {run.of(row, LONG).kl.mean:.4f} |")
    machines = sorted({f"{one['cpu']}, {one['simd']}, {one['threads']} threads"
                       for one in run.times.values()})
    return [f"Decode steps of {settings.TIME_BATCH} sequences of {LONG} tokens with random "
            f"weights, relative to the bf16 cache, on a CPU ({'; '.join(machines)}). Only named "
            "plans have been timed.", "",
            "![Divergence against decode time](frontier-time.svg)", "", *lines]


def charts(run: Run) -> dict[str, str]:
    """Returns the pictures by their names in docs/."""
    name = "SmolLM2-135M: what fewer bytes of KV cache cost"
    timed = {"frontier-time.svg": time_chart(run)} if run.times else {}
    return timed | {
        "frontier.svg": chart(run, settings.CHART, SHORT, name),
        "frontier-8k.svg": chart(run, settings.LONG_CHART, LONG,
                                 f"{name}, at {LONG} tokens"),
    }


# ------------------------------------------------------------------------- page


def windows_of(found: dict[str, Measured]) -> int:
    return len(next(iter(found.values())).window_kl)


def part(run: Run) -> str:
    first = next(iter(run.short.values()))
    judged = judge(run)
    teacher = stats.interval(first.teacher_nats)
    texts = ", ".join(first.kl_by_text)
    counts = collections.Counter(one.claim.family for one in judged)
    families = ", ".join(f"{count} of {name}" for name, count in counts.items())
    passages = run.budget.repeats_per_text
    asked = len(run.budget.rows()) + len(run.budget.long_rows())
    have = len(run.short) + len(run.long)
    repeat = [] if first.repeat is None else [
        "- *Repeat* is the loss on the second copy of a passage, which is low if the "
        "cache still distinguishes its tokens; "
        f"{passages} passage{'s' * (passages > 1)} of each text."]
    lines = [
        "## SmolLM2-135M-Instruct", "",
        "A trained model of 30 layers with 9 query and 3 KV heads of 64, as "
        "`models/fetch smollm2` makes it. Rows, claims and budgets are in "
        "`bench/quality/frontier_settings.py`, which was committed before the run.", "",
        "![Divergence against bytes](frontier.svg)", "",
        f"- Loss of the dense bf16 cache, {settings.DENSE_BYTES} bytes a token: "
        f"{teacher.mean:.4f} nats per token.",
        f"- Texts: {texts}; none of them was used for calibration. "
        f"{windows_of(run.short)} windows of {SHORT} tokens in all, the first of each "
        "text (books and novels are different passages of one author), and "
        f"{windows_of(run.long)} of {LONG} tokens, from the joined beginnings of the "
        "first four.",
        "- Rows are judged by *KL*, the divergence of the next token's distribution "
        "from the dense cache's; the loss is shown as well. Intervals have 95 %, are "
        "paired over windows, and hold for one calibration. Neighbouring windows of "
        "one text count as independent.",
        "- *Bytes/token*: the bytes of one more token in pages, with scales, norms and "
        "padding, plus the exact tokens of a sequence, divided by the tokens of a "
        "window. Baselines are counted without the padding of pages. *Bits a "
        f"number* is the sum over {settings.NUMBERS_PER_TOKEN} numbers.",
        "- *Exact*: this many first and latest tokens stay in bf16. A planned row keeps "
        "the first 4 and a window that the planner chooses, unless its name says "
        "otherwise.",
        "- The planner calibrates on the four built-in domains, and the papers' methods "
        f"and OSCAR on {settings.CALIBRATION_TOKENS} tokens of the same texts; seed "
        f"{settings.SEED}. OSCAR (arXiv 2605.17757) has the settings of its paper: 64 + 256 "
        "exact tokens, 2 bits, and a range for each token and group of 128 channels. Here a "
        "head has only 64, so its ranges cost 0.5 bits a number instead of 0.25.",
        "- Claims compare two rows by the ratio of their KL, window by window (its "
        "geometric mean with a 95 % interval). p-values are two-sided and adjusted "
        f"for the number of comparisons of a family (Holm): {families}. A claim is "
        f"decided at {settings.ERROR_RATE} or less.",
        f"- Measured {run.date} by kvasir-compress {run.version}, "
        f"{platform.machine()}, {os.cpu_count()} CPUs, libtorch on the CPU in "
        f"float32; budget `{run.budget.name}`" +
        (f", {have} of its {asked} rows so far." if have < asked else "."),
        *repeat, "",
        "### Claims", "", *claim_lines(judged), "",
        f"### At {SHORT} tokens", "",
        *row_lines(run, settings.OURS, SHORT), "",
        "Methods of the papers:", "", *row_lines(run, settings.PAPERS, SHORT), "",
        "Caches that other servers use, and OSCAR:", "", *row_lines(run, settings.BASELINES, SHORT), "",
        "By text:", "",
        *text_lines(run, settings.PLANNED + [
            settings.SVDQ[2], settings.ROTATED_SINKS[4], settings.KIVI[4, 0]]), "",
        f"### At {LONG} tokens", "",
        f"![Divergence against bytes at {LONG} tokens](frontier-8k.svg)", "",
        *row_lines(run, settings.LONG_ROWS, LONG), "",
        *([*time_lines(run), ""] if run.times else []),
    ]
    for title, found in (("Predicted and measured", prediction_lines(run)),
                         ("The server", engine_lines(run))):
        if found:
            lines += [f"### {title}", "", *found, ""]
    return "\n".join(lines)


