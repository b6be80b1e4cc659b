"""Compares the server's loss of an artifact with the oracle's, over the same windows and
through the paged cache."""

import json
import math
import pathlib
import subprocess
from dataclasses import dataclass

import quality_page

# Tokens of a step. Tests show that the result has the same bits for any number.
CHUNK_TOKENS = 64
# The number of windows that also run one token at a time.
DECODED_WINDOWS = 2
# Limits for the relative difference of the loss. Without codes only the rounding of sums differs;
# with codes a number may also be rounded to a neighbouring code.
LIMITS = {"numbers": 0.0005, "codes": 0.005}


@dataclass(frozen=True)
class Comparison:
    name: str
    kind: str          # a key of LIMITS
    relative: float    # |engine - oracle| / oracle
    same_bytes: bool

    @property
    def sound(self) -> bool:
        return self.same_bytes and self.relative <= LIMITS[self.kind]


def served(table) -> list:
    """Returns the rows that are artifacts, because the server can load only these."""
    return [config for config in table.configs if config.baseline is None]


def kind_of(plan: str) -> str:
    """Returns "codes" if the text of a kv_plan.json stores anything as codes, else "numbers"."""
    def has_bits(value) -> bool:
        if isinstance(value, dict):
            return "bits" in value or any(map(has_bits, value.values()))
        return isinstance(value, list) and any(map(has_bits, value))
    return "codes" if has_bits(json.loads(plan)) else "numbers"


def measure(engine: pathlib.Path, artifact: pathlib.Path, text: pathlib.Path,
            windows: int, window_tokens: int) -> dict:
    """Measures all windows in chunks, and the first ones also token by token, as in decoding."""
    def run(windows: int, *options) -> dict:
        done = subprocess.run(
            [str(engine), "perplexity", "--model", str(artifact), "--text",
             str(text), "--window", str(window_tokens), "--max-windows",
             str(windows), "--json", *options], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"failed: {engine.name} perplexity --model "
                             f"{artifact}\n{done.stderr}")
        return json.loads(done.stdout)
    decoded_windows = min(windows, DECODED_WINDOWS)
    prompt = run(windows, "--chunk", str(CHUNK_TOKENS))
    # The chunks of a prompt may lift latents to heads, but decoded tokens never do. So lifting is
    # switched off by --deterministic.
    decoded = run(decoded_windows, "--chunk", "1", "--deterministic")
    return {"nats_per_token": math.log(prompt["perplexity"]),
            "decoded_windows": decoded_windows,
            "decoded_nats_per_token": math.log(decoded["perplexity"]),
            "kv_bytes_per_token": prompt["kv_bytes_per_token"],
            "kind": kind_of((artifact / "kv_plan.json").read_text())}


def compare(name: str, engine: dict, oracle: dict) -> Comparison:
    def relative(nats: float, expected: float) -> float:
        return abs(nats - expected) / expected
    first = oracle["window_nats"][:engine["decoded_windows"]]
    return Comparison(
        name, engine["kind"],
        max(relative(engine["nats_per_token"], oracle["nats_per_token"]),
            relative(engine["decoded_nats_per_token"], sum(first) / len(first))),
        math.isclose(engine["kv_bytes_per_token"], oracle["kv_bytes_per_token"],
                     rel_tol=1e-9))


def bytes_verdict(tables: dict[str, list[Comparison]]) -> str:
    other = [row.name for found in tables.values() for row in found
             if not row.same_bytes]
    if not other:
        return ("In every row the arenas took exactly the plan's bytes per "
                "token.")
    return (f"**In {len(other)} rows the arenas took other bytes per token than the "
            f"plan's:** {', '.join(other)}.")


def mark_of(worst: Comparison) -> str:
    if worst.relative > LIMITS[worst.kind]:
        return "**over the limit**"
    return "holds" if worst.same_bytes else "**other bytes**"


HEADING = "### The engine"


def replace(page: pathlib.Path, section: str) -> None:
    """Replaces the section about the engine, the last one of the built-in model's part."""
    text = quality_page.read_part(page, "tiny").partition(HEADING)[0]
    quality_page.write_part(page, "tiny", f"{text.rstrip()}\n\n{section}")


def lines(tables: dict[str, list[Comparison]], *, seed: int, windows: int,
          window_tokens: int, version: str, date: str) -> list[str]:
    """Makes a row for each table, with the number of artifacts and the largest difference."""
    text = [HEADING, "",
            "`kvasir perplexity` computes the loss of every artifact of these tables, made "
            f"with calibration seed {seed}, through the paged cache: in chunks of "
            f"{CHUNK_TOKENS} tokens over the same {windows} windows of "
            f"{window_tokens} tokens, and one token at a time over the first "
            f"{min(windows, DECODED_WINDOWS)} of them. The table has the largest "
            f"relative difference from the oracle (version {version}, {date}). "
            "Allowed are "
            f"{100 * LIMITS['numbers']:.2f} % for numbers and "
            f"{100 * LIMITS['codes']:.1f} % for codes. "
            + bytes_verdict(tables), "",
            "| table | cached as | artifacts | largest difference | of | |",
            "|---|---|--:|--:|---|---|"]
    for title, found in tables.items():
        for kind in LIMITS:
            rows = [row for row in found if row.kind == kind]
            if not rows:
                continue
            # The worst row: a loss over the limit counts more than bytes that differ.
            worst = max(rows, key=lambda row: (
                row.relative > LIMITS[kind], not row.same_bytes, row.relative))
            text.append(f"| {title} | {kind} | {len(rows)} | "
                        f"{100 * worst.relative:.4f} % | {worst.name} | "
                        f"{mark_of(worst)} |")
    return text
