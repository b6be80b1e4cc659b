"""If the plan of one layer changes, every reported number of bytes changes by the same amount."""

import json

from kvasir_process import TINY, KvasirProcess, run

POOL_TOKENS = 65536
PAGE_TOKENS = 64


def plan_with(dtypes):
    """The full-rank plan of the built-in model, with one dtype for each layer."""
    side = lambda dtype, stored: {
        "parts": [{"full": {}, "stored": stored, "codec": {"dtype": dtype}}]
    }
    return {
        "schemaVersion": 1,
        "method": "full",
        "layers": [
            {"key": side(dtype, "POST_ROPE"), "value": side(dtype, "NO_ROPE")} for dtype in dtypes
        ],
    }


def measure(path):
    """Bytes per token as each source reports them, and bytes of the pool."""
    inspect = json.loads(run("inspect", TINY, "--kv-plan", path, "--json").stdout)
    text = TINY / "evaluation.txt"
    perplexity = json.loads(
        run("perplexity", "--model", TINY, "--text", text, "--window", "64", "--max-windows", "1",
            "--kv-plan", path, "--json").stdout
    )
    pool = int(inspect["kv_bytes_per_token"] * POOL_TOKENS)
    with KvasirProcess("serve", "--kv-plan", path, "--kv-cache-bytes", pool) as server:
        metric = server.metric("kvasir_kv_cache_bytes_per_token")
        # The bytes that the allocator has given out, divided by the number of its pages.
        allocated = server.metric("kvasir_kv_cache_pool_bytes")
        pages = server.metric("kvasir_kv_cache_free_pages") + server.metric(
            "kvasir_kv_cache_cached_pages") + server.metric("kvasir_kv_cache_used_pages")
        resident = server.resident_bytes()
    return {
        "inspect": inspect["kv_bytes_per_token"],
        "perplexity": perplexity["kv_bytes_per_token"],
        "metric": metric,
        "allocated": allocated,
        "pages": pages,
        "resident": resident,
    }


def test_a_layer_in_float32_increases_every_reported_size_by_its_own_bytes(tmp_path):
    config = json.loads((TINY / "config.json").read_text())
    layers = config["num_hidden_layers"]
    numbers = 2 * config["num_key_value_heads"] * config["head_dim"]
    base_path, more_path = tmp_path / "base.json", tmp_path / "more.json"
    base_path.write_text(json.dumps(plan_with(["BF16"] * layers)))
    more_path.write_text(json.dumps(plan_with(["BF16"] * (layers - 1) + ["F32"])))
    base, more = measure(base_path), measure(more_path)

    for source in ("inspect", "perplexity", "metric"):
        assert base[source] == layers * numbers * 2, source
        assert more[source] - base[source] == numbers * 2, source
    assert base["pages"] == more["pages"] == POOL_TOKENS // PAGE_TOKENS
    # Both pools hold the same number of tokens, so only the layer makes the difference.
    assert more["allocated"] - base["allocated"] == numbers * 2 * POOL_TOKENS
    # The resident memory grows by the same amount, except for variations of the rest of the process.
    difference = more["resident"] - base["resident"]
    assert abs(difference - numbers * 2 * POOL_TOKENS) < 6 << 20
