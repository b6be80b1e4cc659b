"""Streams one text through an evicting cache of the server's own program. Compares the loss of
each tenth with a dense cache of the latest tokens, which is computed anew at each stride."""

import json
import pathlib
import subprocess
from dataclasses import dataclass

import eviction_settings as settings
from eviction_settings import StreamRow
from frontier import tell
from quality_store import Store, digest, file_digest


@dataclass(frozen=True)
class Stream:
    parts: list[float]  # nats per token of each tenth
    tokens: list[int]
    held_bytes: int     # the most bytes of pages that the run held

    @property
    def nats(self) -> float:
        return (sum(map(lambda nats, count: nats * count, self.parts, self.tokens))
                / sum(self.tokens))


Found = dict[StreamRow, Stream]


def measure(engine: pathlib.Path, model: pathlib.Path, text: pathlib.Path,
            store: Store, used: list[str], rows: list[StreamRow], only_known: bool,
            threads: int | None = None) -> Found:
    """Measures the rows that the store lacks, and appends the keys of all rows to `used`."""
    identity = digest(*map(file_digest, (model / "model.safetensors", text)))
    found: Found = {}
    for row in rows:
        key = digest("stream", identity, row.flags)
        if key not in store:
            if only_known:
                continue
            tell(f"stream: {row.shown}")
            command = [str(engine), "perplexity", "--model", str(model), "--text",
                       str(text), "--json", *row.flags]
            if threads:
                command += ["--threads", str(threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode != 0:
                raise SystemExit(f"failed: {' '.join(command)}")
            report = json.loads(done.stdout)
            store.put(key, f"stream: {row.shown}", {
                "parts": report["parts"], "kv_held_bytes": report["kv_held_bytes"]})
        report = store.get(key)
        used.append(key)
        found[row] = Stream([part["nats_per_token"] for part in report["parts"]],
                            [part["tokens"] for part in report["parts"]],
                            report["kv_held_bytes"])
    return found


def lines(found: Found) -> list[str]:
    """Makes the table. The loss of each tenth is divided by that of the dense cache, which is
    computed anew at each stride."""
    window = found.get(settings.STREAM_WINDOW)
    if window is None or len(found) == 1:
        return []
    table = ["| cache | MB held | nats/token | over windows | " +
             " | ".join(f"{tenth}" for tenth in range(1, 11)) + " | |",
             "|---|--:|--:|--:|" + 10 * "--:|" + "---|"]
    for row, one in found.items():
        ratio = one.nats / window.nats
        tenths = [f"{own / other:.3f}" for own, other in zip(one.parts, window.parts)]
        verdict = ""
        if row == settings.STREAM_CLAIM:
            met = ratio <= settings.STREAM_TARGET
            verdict = f"≤ {settings.STREAM_TARGET:g}: " + (
                "met" if met else "**missed**")
        table.append(f"| {row.shown} | {one.held_bytes / 1e6:.1f} | {one.nats:.4f} "
                     f"| {ratio:.3f} | {' | '.join(tenths)} | {verdict} |")
    return table
