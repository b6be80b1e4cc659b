"""Sequences that give up slots: what stays, what it costs in pages, and who may ask for what."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import triton
from kvasir_process import TINY, KvasirProcess, run, wait_until

# More than 600 tokens of tiny's, from the place that it names on.
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


def test_slots_go_and_metrics_tell(evicting):
    before = {name: evicting.metric(f"kvasir_{name}_total")
              for name in ("evictions", "evicted_slots", "eviction_pages_reclaimed")}
    answer(evicting)
    wait_until(lambda: evicting.metric("kvasir_evictions_total") > before["evictions"], "evictions")
    wait_until(lambda: evicting.metric("kvasir_kv_cache_used_pages") == 0, "an empty cache")
    # The prompt's, but for those that stay, at least.
    assert evicting.metric("kvasir_evicted_slots_total") - before["evicted_slots"] > 400
    assert (evicting.metric("kvasir_eviction_pages_reclaimed_total")
            > before["eviction_pages_reclaimed"])
    assert evicting.metric("kvasir_cache_leaked_pages") == 0


def test_where_nothing_goes_answers_are_those_without_eviction(evicting, whole):
    # 128 slots hold all of it.
    assert answer(evicting, SHORT) == answer(whole, SHORT)
    want = answer(whole)
    assert answer(evicting) != want
    for none in ("none", "1", 1, "1000"):
        assert answer(evicting, eviction_budget=none) == want, none


def test_a_request_has_the_budget_that_it_asks_for(evicting):
    own = answer(evicting)
    assert answer(evicting, eviction_budget=128) == own
    assert answer(evicting, eviction_budget="400") != own
    before = evicting.metric("kvasir_evicted_slots_total")
    answer(evicting, eviction_budget="64")
    wait_until(lambda: evicting.metric("kvasir_evicted_slots_total") > before, "evictions")
    refused(evicting, "eviction_budget is 63 and keeps 63 slots", eviction_budget=63)
    refused(evicting, "--eviction-min-budget is 64", eviction_budget=63)
    refused(evicting, "want at least 36: sinks and recent tokens always stay", eviction_budget=20)
    refused(evicting, "'eviction_budget': want slots", eviction_budget="half")


def test_a_plan_that_evicts_nothing_takes_no_budget(whole):
    for budget in ("0.5", "none"):
        refused(whole, "but the served plan evicts nothing", eviction_budget=budget)


def test_a_prompt_of_three_times_the_pool_is_served_and_no_budget_may_outgrow_it():
    # 128 that stay and 64 more are 3 pages of 64: all that there are. The prompt takes 10.
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
def test_many_in_a_small_pool_are_answered_as_alone(pool, flags):
    # Some have budgets of their own.
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


def test_commands_that_run_a_model_evict(evicting):
    text = TINY / "evaluation.txt"
    common = ["perplexity", "--model", TINY, "--text", text, "--max-windows", "2",
              "--window", "512", "--json"]
    losses = {name: json.loads(run(*common, *map(str, flags)).stdout)["nats_per_byte"]
              for name, flags in {"whole": [], "evicting": EVICTS,
                                  "all": ["--eviction", "h2o", "--eviction-budget", 512]}.items()}
    assert losses["all"] == losses["whole"] < losses["evicting"] < 1.5 * losses["whole"]
    asked = ["generate", "--prompt", LONG, "--temperature", "0", "--max-tokens", "20", "--json"]
    told = {name: json.loads(run(*asked, *map(str, flags)).stdout)["text"]
            for name, flags in {
                "whole": ["--model", TINY], "evicting": ["--model", TINY, *EVICTS],
                "asked": ["--endpoint", evicting.grpc, "--request-eviction-budget", "none"],
            }.items()}
    assert told["asked"] == told["whole"] != told["evicting"]


@pytest.mark.parametrize("flags, named", [
    (["--eviction", "h2o", "--eviction-budget", 20, "--eviction-recent", 32],
     "the budget of 20 slots is below sinks + recent = 36"),
    (["--eviction-budget", 128], "how --eviction evicts"),
    (["--eviction-min-budget", "0.1"], "but the served plan evicts nothing"),
])
def test_settings_without_a_meaning_are_refused_at_start(flags, named):
    done = run("serve", "--model", TINY, "--grpc-port", "0", "--metrics-port", "0",
               "--admin-port", "0", *map(str, flags), check=False)
    assert done.returncode in (1, 2)
    assert named in done.stderr
