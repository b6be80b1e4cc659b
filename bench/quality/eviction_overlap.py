"""Measures which heavy tokens of a layer (those kept for their scores) are the same with codes
and without, as in Q-Hitter's figure 2. Runs the server's own program."""

import json
import pathlib
import statistics
import subprocess

import eviction_settings as settings
import quality_chart
from frontier import tell
from quality_store import Store, digest, file_digest, write

# For each cache, by layer: the share of the uncompressed cache's heavy tokens that are also heavy
# in this cache.
Found = dict[settings.Cache, list[float]]


def heavy(layer: dict, prompt: int) -> set[int]:
    """Returns the prompt's tokens that stay because of their score and not as sinks or recent
    tokens. All heads of the layer must evict together."""
    unit, = layer["units"]
    return {token for token, gone in enumerate(unit["gone_at"][:prompt])
            if gone is None and layer["sinks"] <= token < prompt - layer["recent"]}


def shares(coded: list[set[int]], whole: list[set[int]]) -> list[float]:
    return [len(a & b) / len(b) for a, b in zip(coded, whole, strict=True)]


def traced(engine: pathlib.Path, model: pathlib.Path, text: pathlib.Path,
           plan: pathlib.Path) -> tuple[list[set[int]], int]:
    """Returns the heavy tokens of each layer, and how many tokens they were chosen from."""
    command = [str(engine), "inspect", "--model", str(model), "--kv-plan", str(plan),
               "--trace", str(text), "--trace-tokens", "0", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(command)}")
    trace = json.loads(done.stdout)["trace"]
    prompt, first = trace["prompt_tokens"], trace["layers"][0]
    return ([heavy(layer, prompt) for layer in trace["layers"]],
            prompt - first["sinks"] - first["recent"])


def measure(engine: pathlib.Path, model: pathlib.Path, texts: list[pathlib.Path],
            work: pathlib.Path, store: Store, used: list[str], only_known: bool
            ) -> tuple[Found, float]:
    """Returns the shares, averaged over texts, and the share of a random choice of tokens."""
    plans = {}
    for cache in (settings.DENSE, *settings.CODES.values()):
        plans[cache] = work / f"overlap-{cache.key_bits}.json"
        write(plans[cache], json.dumps(settings.overlap_plan(cache)))
    by_cache: dict[settings.Cache, list[dict]] = {}
    for text in texts:
        keys = {cache: digest("overlap", file_digest(model / "model.safetensors"),
                              settings.overlap_plan(cache), file_digest(text))
                for cache in settings.CODES.values()}
        missing = [cache for cache in keys if keys[cache] not in store]
        if missing and only_known:
            return {}, 0.0
        if missing:
            tell(f"heavy tokens of {text.stem}")
            whole, candidates = traced(engine, model, text, plans[settings.DENSE])
        for cache in missing:
            own, _ = traced(engine, model, text, plans[cache])
            store.put(keys[cache], f"heavy tokens: {cache.name} / {text.stem}", {
                "shares": shares(own, whole), "by_lot": len(whole[0]) / candidates})
        used += keys.values()
        for cache, key in keys.items():
            by_cache.setdefault(cache, []).append(store.get(key))
    return ({cache: [statistics.mean(layer) for layer in zip(
        *(one["shares"] for one in own), strict=True)] for cache, own in by_cache.items()},
        statistics.mean(one["by_lot"] for own in by_cache.values() for one in own))


def chart(found: Found, lot: float) -> str:
    return quality_chart.by_layer(
        {cache.name: layers for cache, layers in found.items()},
        "SmolLM2-135M: heavy tokens that codes leave heavy",
        "layer", "share of the heavy tokens of the cache of numbers",
        ("by lot", lot))


def lines(found: Found, lot: float) -> list[str]:
    if not found:
        return []
    table = ["| cache | mean over layers | least | of layer |", "|---|--:|--:|--:|"]
    for cache, layers in found.items():
        least = min(layers)
        table.append(f"| {cache.name} | {statistics.mean(layers):.3f} | {least:.3f} "
                     f"| {layers.index(least)} |")
    table.append(f"| by lot | {lot:.3f} | | |")
    return table
