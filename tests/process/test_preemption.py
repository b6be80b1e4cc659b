"""If a sequence is preempted, its cache is copied to the host pool or computed again. Its answer stays the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import triton
from kvasir_process import TINY, KvasirProcess, run, wait_until
from test_storm import COMPRESSED

PROMPTS = [f"Chapter {i}. It was a bright cold morning, and she said to him" for i in range(6)]


def answers(server):
    """The answers of requests that run at once and are long enough to exhaust the pages."""
    def answer(prompt):
        return triton.generate(
            server.grpc, server.ready["model"], prompt, max_tokens=300, temperature=0.0,
            ignore_eos=True)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(answer, PROMPTS))


def serve(model, pool, host_pool):
    return KvasirProcess("serve", "--kv-cache-bytes", pool, "--host-pool-bytes", host_pool,
                         "--max-num-seqs", "8", model=model)


def by_kind(server, kind):
    return server.metric("kvasir_preemptions_by_kind_total", kind=kind)


@pytest.mark.parametrize(
    "model, pool", [(TINY, "7MiB"), (COMPRESSED, "1MiB")], ids=["dense", "compressed"])
def test_preemption_that_copies_the_cache_to_the_host_changes_no_answer(model, pool):
    with serve(model, "64MiB", "0") as server:
        want = answers(server)
        assert server.metric("kvasir_num_preemptions_total") == 0
        assert server.metric("kvasir_host_pool_bytes") == 0
    with serve(model, pool, "16MiB") as server:
        assert 0 < server.metric("kvasir_host_pool_bytes") <= 16 << 20
        assert answers(server) == want
        assert by_kind(server, "copy") > 0
        out = server.metric("kvasir_host_pool_copied_bytes_total", direction="out")
        back = server.metric("kvasir_host_pool_copied_bytes_total", direction="in")
        assert out >= back > 0
        wait_until(lambda: server.metric("kvasir_host_pool_used_bytes") == 0, "an empty host pool")
        assert server.metric("kvasir_cache_leaked_pages") == 0
    with serve(model, pool, "0") as server:
        assert answers(server) == want
        assert by_kind(server, "copy") == 0
        assert by_kind(server, "recompute") > 0


def test_the_error_for_a_host_pool_that_is_too_large_has_its_flag_and_sizes():
    done = run("serve", "--model", TINY, "--kv-cache-bytes", "16MiB", "--host-pool-bytes",
               "1000000GiB", "--grpc-port", "0", "--metrics-port", "0", "--admin-port", "0",
               "--health-port", "0",
               check=False)
    assert done.returncode == 1
    assert "lower --host-pool-bytes to at most" in done.stderr
