"""A million tokens as one sequence of the built-in model: what memory it holds and what
it loses at the end, against the second pass over its text."""

import json
import pathlib
import subprocess

from frontier import tell
from quality_store import ROOT, Store, digest, file_digest

MODEL = ROOT / "models" / "tiny"
TEXT = MODEL / "evaluation.txt"
TOKENS = 1_000_000
SLOTS = 256
FLAGS = ["--kv-plan", "dense-8bit", "--eviction", "h2o", "--eviction-budget", str(SLOTS),
         "--eviction-rolling", "--tokens", str(TOKENS)]
# Of figures, what is shown.
KEPT = ("tokens", "passes", "loss_over_second_least", "loss_over_second_most",
        *(f"{name}_{when}" for name in ("kv_held_bytes", "allocated_bytes", "rss_bytes")
          for when in ("warm", "end")))
LOSS_LIMIT = 0.01  # of a pass, against the second


def measure(engine: pathlib.Path, store: Store, used: list[str], only_known: bool
            ) -> dict | None:
    key = digest("endless", file_digest(MODEL / "model.safetensors"),
                 file_digest(TEXT), FLAGS)
    if key not in store:
        if only_known:
            return None
        tell(f"{TOKENS:,} tokens as one sequence")
        command = [str(engine), "bench", "stream", "--model", str(MODEL), "--text",
                   str(TEXT), "--json", *FLAGS]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"failed: {' '.join(command)}")
        keep(store, key, json.loads(done.stdout))
    used.append(key)
    return store.get(key)


def keep(store: Store, key: str, report: dict) -> None:
    store.put(key, f"endless: {TOKENS} tokens", {
        name: report["figures"][name] for name in KEPT})


def lines(found: dict | None) -> list[str]:
    if found is None:
        return []
    table = ["| bytes | behind the second pass | at the end | |", "|---|--:|--:|---|"]
    for words, name in (("pages held", "kv_held_bytes"),
                        ("all that the rank allocated", "allocated_bytes"),
                        ("the process holds", "rss_bytes")):
        warm, end = (int(found[f"{name}_{when}"]) for when in ("warm", "end"))
        # Pages come and go between evictions; what the system counts as the process's
        # is not the program's to say.
        same = "" if name != "allocated_bytes" else (
            "constant" if warm == end else "**not constant**")
        table.append(f"| {words} | {warm:,} | {end:,} | {same} |")
    least, most = (found[f"loss_over_second_{end}"] for end in ("least", "most"))
    within = max(most - 1, 1 - least) <= LOSS_LIMIT
    return [*table, "", f"{int(found['tokens']):,} tokens in {int(found['passes'])} "
            f"passes; a pass loses {least:.4f} to {most:.4f} times what the second does "
            f"(within {100 * LOSS_LIMIT:g} %: {'met' if within else '**missed**'})."]
