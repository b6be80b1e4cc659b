"""Sequences that give up slots: which slots stay, how many pages they take, and which requests may set a budget."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import triton
from kvasir_process import BINARY, TINY, KvasirProcess, run, wait_until

# LONG has more than 600 tokens of the tiny model.
TEXT = (TINY / "evaluation.txt").read_text()
LONG = TEXT[2000:4200]
SHORT = "It was a bright cold morning, and she said to him"
EVICTS = ["--eviction", "h2o", "--eviction-budget", 128, "--eviction-recent", 32,
          "--eviction-every", 64]


def serve(*flags):
    return KvasirProcess("serve", *map(str, flags))


def answer(server, prompt=LONG, **sampling):
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | sampling
    return triton.generate(server.grpc, server.ready["model"], prompt, **options)


def refused(server, named, **sampling):
    with pytest.raises(RuntimeError) as caught:
        answer(server, **sampling)
    assert "INVALID_ARGUMENT" in str(caught.value) and named in str(caught.value)


@pytest.fixture(scope="module")
def evicting():
    with serve(*EVICTS, "--eviction-min-budget", 64) as server:
        yield server


@pytest.fixture(scope="module")
def whole():
    with serve() as server:
        yield server


def test_evicted_slots_and_freed_pages_are_counted_in_the_metrics(evicting):
    before = {name: evicting.metric(f"kvasir_{name}_total")
              for name in ("evictions", "evicted_slots", "eviction_pages_reclaimed", "eviction_seconds")}
    scored = {how: evicting.metric("kvasir_eviction_scored_tokens_total", how=how)
              for how in ("kept", "again", "no_room")}
    answer(evicting)
    wait_until(lambda: evicting.metric("kvasir_evictions_total") > before["evictions"], "evictions")
    wait_until(lambda: evicting.metric("kvasir_kv_cache_used_pages") == 0, "an empty cache")
    # At least the prompt's slots beyond the budget are evicted.
    assert evicting.metric("kvasir_evicted_slots_total") - before["evicted_slots"] > 400
    assert (evicting.metric("kvasir_eviction_pages_reclaimed_total")
            > before["eviction_pages_reclaimed"])
    assert evicting.metric("kvasir_eviction_seconds_total") > before["eviction_seconds"]
    more = {how: evicting.metric("kvasir_eviction_scored_tokens_total", how=how) - scored[how]
            for how in scored}
    # Decode keeps the attention weights of all output tokens except the last, which no step runs. It may also keep
    # those of the prompt's last token.
    assert 39 <= more["kept"] < 39 + 20 and more["again"] > 500
    assert more["no_room"] == 0
    assert evicting.metric("kvasir_cache_leaked_pages") == 0


def test_a_drain_finishes_running_requests_whose_cache_evicts_tokens():
    with serve(*EVICTS) as server:
        want = answer(server, max_tokens=300)
        evictions = server.metric("kvasir_evictions_total")
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(answer, server, max_tokens=300)
            wait_until(lambda: server.metric("kvasir_evictions_total") > evictions, "an eviction")
            server.process.send_signal(signal.SIGTERM)
            assert running.result() == want
        assert server.process.wait(timeout=60) == 0


def test_eviction_changes_no_answer_if_the_budget_holds_the_whole_prompt(evicting, whole):
    # The budget of 128 slots holds the whole sequence.
    assert answer(evicting, SHORT) == answer(whole, SHORT)
    want = answer(whole)
    assert answer(evicting) != want
    for none in ("none", "1", 1, "1000"):
        assert answer(evicting, eviction_budget=none) == want, none


def test_a_request_gets_the_eviction_budget_that_it_asks_for(evicting):
    own = answer(evicting)
    assert answer(evicting, eviction_budget=128) == own
    assert answer(evicting, eviction_budget="400") != own
    before = evicting.metric("kvasir_evicted_slots_total")
    answer(evicting, eviction_budget="64")
    wait_until(lambda: evicting.metric("kvasir_evicted_slots_total") > before, "evictions")
    refused(evicting, "eviction_budget is 63 and keeps 63 slots", eviction_budget=63)
    refused(evicting, "the server's smallest budget is 64", eviction_budget=63)
    refused(evicting, "want at least 36: sinks and recent tokens always stay", eviction_budget=20)
    refused(evicting, "'eviction_budget': want slots", eviction_budget="half")


def test_an_eviction_budget_is_refused_if_the_plan_evicts_nothing(whole):
    for budget in ("0.5", "none"):
        refused(whole, "but the served plan evicts nothing", eviction_budget=budget)


def test_a_prompt_may_exceed_the_pool_if_its_eviction_budget_does_not():
    # A sequence has up to 128 + 64 slots, which are 3 pages of 64: the whole pool. The prompt has 10 pages.
    with serve(*EVICTS, "--kv-cache-bytes", "1200KiB", "--host-pool-bytes", 0) as server:
        assert sum(server.metric(f"kvasir_kv_cache_{kind}_pages") for kind in ("free", "used")) == 3
        with serve(*EVICTS) as roomy:
            assert answer(server) == answer(roomy)
        refused(server, "pages of page group 0, want at most its 3", eviction_budget="none")
        assert answer(server, SHORT, eviction_budget="none") == answer(server, SHORT)


@pytest.mark.parametrize("pool, flags", [
    ("5MiB", EVICTS),
    ("2500KiB", ["--kv-plan", "rotated-4bit", "--eviction", "q-hitter", "--eviction-budget", "0.2"]),
    ("5MiB", ["--eviction", "streaming", "--eviction-budget", "0.3"]),
], ids=["h2o", "rotated-q-hitter", "streaming"])
def test_requests_that_share_a_small_pool_get_the_answers_of_single_requests(pool, flags):
    # Some requests have budgets of their own.
    budgets = [None, 160, "0.5", None, "0.4", 192]

    def one(server, i):
        return answer(server, TEXT[i * 300:i * 300 + 1500], max_tokens=80,
                      eviction_budget=budgets[i])

    def answers(server):
        with ThreadPoolExecutor(len(budgets)) as threads:
            return list(threads.map(lambda i: one(server, i), range(len(budgets))))

    with serve(*flags) as server:
        want = [one(server, i) for i in range(len(budgets))]
        assert answers(server) == want
    for host_pool in ("0", "16MiB"):
        with serve(*flags, "--kv-cache-bytes", pool, "--host-pool-bytes", host_pool,
                   "--max-num-seqs", 6) as server:
            assert answers(server) == want
            wait_until(lambda: server.metric("kvasir_kv_cache_used_pages") == 0, "an empty cache")
            assert server.metric("kvasir_cache_leaked_pages") == 0


def test_perplexity_and_generate_apply_the_flags_of_eviction(evicting):
    text = TINY / "evaluation.txt"
    common = ["perplexity", "--model", TINY, "--text", text, "--max-windows", "2",
              "--window", "512", "--json"]
    losses = {name: json.loads(run(*common, *map(str, flags)).stdout)["nats_per_byte"]
              for name, flags in {"whole": [], "evicting": EVICTS,
                                  "all": ["--eviction", "h2o", "--eviction-budget", 512]}.items()}
    assert losses["all"] == losses["whole"] < losses["evicting"] < 1.5 * losses["whole"]
    asked = ["generate", "--prompt", LONG, "--temperature", "0", "--max-tokens", "20", "--json"]
    texts = {name: json.loads(run(*asked, *map(str, flags)).stdout)["text"]
            for name, flags in {
                "whole": ["--model", TINY], "evicting": ["--model", TINY, *EVICTS],
                "asked": ["--endpoint", evicting.grpc, "--request-eviction-budget", "none"],
            }.items()}
    assert texts["asked"] == texts["whole"] != texts["evicting"]


@pytest.mark.parametrize("flags, named", [
    (["--eviction", "h2o", "--eviction-budget", 20, "--eviction-recent", 32],
     "the budget of 20 slots is below sinks + recent = 36"),
    (["--eviction-budget", 128], "have no effect without --eviction"),
    (["--eviction-min-budget", "0.1"], "but the served plan evicts nothing"),
])
def test_contradictory_settings_of_eviction_are_refused_at_start(flags, named):
    done = run("serve", "--model", TINY, "--grpc-port", "0", "--metrics-port", "0",
               "--admin-port", "0", "--health-port", "0", *map(str, flags), check=False)
    assert done.returncode in (1, 2)
    assert named in done.stderr


STREAMS = ["--kv-plan", "dense-8bit", "--eviction-budget", 256, "--eviction-rolling"]


def test_a_text_repeated_ten_times_takes_no_more_cache_and_keeps_its_loss(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:3500])
    report = json.loads(run("perplexity", "--model", TINY, "--text", text, "--stream", "--passes",
                          10, "--json", "--eviction", "h2o", *STREAMS).stdout)
    passes = report["parts"]
    assert len(passes) == 10 and sum(part["tokens"] for part in passes) >= 9600
    assert {part["allocated_bytes"] for part in passes} == {passes[0]["allocated_bytes"]}
    # 256 slots stay and 128 are added until the next eviction, in pages of 64.
    most = (256 + 128) * report["kv_bytes_per_token"]
    assert max(part["kv_held_bytes"] for part in passes) <= most * 1.01
    for part in passes[2:]:
        assert part["nats_per_token"] == pytest.approx(passes[1]["nats_per_token"], rel=0.01)


def test_the_table_of_a_streamed_text_has_a_row_for_each_tenth(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:5000])
    table = run("perplexity", "--model", TINY, "--text", text, "--stream", "--eviction",
                "streaming", *STREAMS).stdout
    assert "tenth" in table and table.count(" MiB") + table.count(" KiB") == 20


def test_generation_continues_beyond_the_length_of_the_model_until_it_is_stopped(tmp_path):
    stream = subprocess.Popen(
        [str(BINARY), "generate", "--model", str(TINY), "--prompt", "Once", "--stream-forever",
         "--temperature", "0.9", "--seed", "3", "--eviction", "streaming", *map(str, STREAMS)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        # Tokens have fewer than 8 bytes on average, and the model has 1024 positions.
        assert len(stream.stdout.read(8 * 1024)) == 8 * 1024
        assert stream.poll() is None
    finally:
        stream.send_signal(signal.SIGTERM)
        stream.communicate(timeout=60)


@pytest.mark.parametrize("flags, named", [
    ([], "--max-model-len 134217728 is more than the 1024 positions of tiny"),
    (["--eviction", "h2o", "--eviction-budget", "0.2"], "slots that stay"),
    (["--eviction", "h2o", "--eviction-budget", "256", "--kv-plan", "rotated-4bit",
      "--eviction-rolling"], "HADAMARD_ONLINE mixes channels after the rotation"),
])
def test_generation_without_end_is_refused_unless_eviction_bounds_its_memory(flags, named):
    done = run("generate", "--model", TINY, "--prompt", "Once", "--stream-forever", *flags,
               check=False)
    assert done.returncode == 1 and named in done.stderr


def trace(*flags):
    return json.loads(run("inspect", TINY, "--json", *map(str, flags)).stdout)["trace"]


def kept_at(unit, seen):
    return [token for token, gone in enumerate(unit["gone_at"][:seen])
            if gone is None or gone > seen]


def test_inspect_shows_which_tokens_of_a_text_stay_in_the_cache(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(LONG)
    report = trace("--trace", text, "--trace-tokens", 70, *EVICTS)
    prompt, tokens = report["prompt_tokens"], len(report["tokens"])
    assert tokens == prompt + 70 > 600 and "".join(report["tokens"][1:prompt]).strip() == LONG.strip()
    # Evictions come at every 64th token after the 128 that stay, and at the end of the prompt. After the last token
    # there is none, because no token follows that would need slots.
    points = sorted({*range(192, tokens, 64), prompt})
    for layer in report["layers"]:
        assert layer["evicted_at"] == points and layer["kept_slots"] == 128
        for unit in layer["units"]:
            for seen in points:
                kept = kept_at(unit, seen)
                assert len(kept) == 128
                assert kept[:4] == [0, 1, 2, 3] and kept[-32:] == list(range(seen - 32, seen))
        last = layer["last"]
        assert (last["sinks"], last["recent"], last["heavy"]) == tuple(
            len(layer["units"]) * count for count in (4, 32, 128 - 36))
        assert 4 <= last["oldest_heavy"] < points[-1] - 32
    units = [unit for layer in report["layers"] for unit in layer["units"]]
    assert len({str(unit["gone_at"]) for unit in units}) > 1
    page = tmp_path / "page.html"
    short = run("inspect", TINY, "--trace", text, *map(str, EVICTS)).stdout
    assert short.count(" 128 of ") == len(report["layers"]) and "oldest heavy" in short
    text.write_text("</script> <b>&" + LONG)
    run("inspect", TINY, "--trace", text, "--html", page, *map(str, EVICTS))
    assert page.read_text().count("</script") == 2


def test_inspect_shows_no_evictions_for_a_text_that_fits_into_the_budget(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(SHORT)
    for layer in trace("--trace", text, "--trace-tokens", 0, *EVICTS)["layers"]:
        assert layer["evicted_at"] == [] and layer["last"] is None


@pytest.mark.parametrize("flags, named", [
    ([], "the plan evicts none: give --eviction"),
    (["--trace-tokens", 16000, *EVICTS], "they may be at most 16384"),
    (["--eviction", "h2o", "--eviction-budget", "0.9"], "slots that stay"),
])
def test_inspect_refuses_a_trace_with_invalid_settings(tmp_path, flags, named):
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:9000])
    done = run("inspect", TINY, "--trace", text, *map(str, flags), check=False)
    assert done.returncode == 1 and "--trace" in done.stderr and named in done.stderr
