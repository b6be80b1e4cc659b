"""Hundreds of requests are cancelled, or their connections are cut, in every state. Afterwards no resources are in use."""

import collections
import os
import random
import threading

import pytest
import triton
from kvasir_process import TINY, CuttableProxy, KvasirProcess, wait_until
from tritonclient.utils import InferenceServerException

REQUESTS = int(os.environ.get("KVASIR_STORM_REQUESTS", "500"))
COMPRESSED = TINY.with_name("tiny-palu")
THREADS = 8


KINDS = ["finish", "cancel", "disconnect", "stop", "half_close", "deadline"]
DEADLINE_SECONDS = 0.05


def one_request(server, randomness, index, most_words=400, most_tokens=60, endless=900):
    """Sends a request, ends it in a random way, and returns this way."""
    kind = randomness.choice(KINDS)
    proxy = CuttableProxy(server.grpc) if kind == "disconnect" else None
    timeout = {"stream_timeout": DEADLINE_SECONDS} if kind == "deadline" else {}
    stream = triton.Stream(proxy.address if proxy else server.grpc, **timeout)
    try:
        # Each prompt begins differently, because a shared prefix would take no new pages.
        words = randomness.randint(1, most_words)
        tokens = randomness.randint(1, most_tokens)
        if kind == "deadline":  # takes longer than the deadline
            words, tokens = 1, endless
        prompt = f"{index} of {server.pid}: " + "word " * words
        inputs = triton.text_inputs(
            prompt,
            max_tokens=tokens,
            temperature=randomness.choice([0.0, 1.0]),
            n=randomness.choice([1, 1, 2]),
            ignore_eos=True,
        )
        try:
            stream.send(server.ready["model"], inputs, f"r{index}")
        except InferenceServerException:
            if kind != "deadline":  # the deadline may come before the request starts
                raise
        if kind == "finish":
            while True:
                result, error = stream.results.get(timeout=120)
                assert error is None, error
                if triton.final(result):
                    break
        elif kind == "deadline":
            error = None
            while error is None:
                result, error = stream.results.get(timeout=120)
                assert error is not None or not triton.final(result), "faster than its deadline"
            # If the server notices the deadline first, a response reports it.
            noticed = error.status() is None and "deadline" in error.message().lower()
            assert noticed or error.status() == "StatusCode.DEADLINE_EXCEEDED", error.message()
        elif kind in ("cancel", "disconnect"):
            for _ in range(randomness.randint(0, 3)):
                result, error = stream.results.get(timeout=120)
                if error is not None or triton.final(result):
                    break
        elif kind == "stop":
            stream.send(server.ready["model"], stop_inputs(), f"r{index}",
                        parameters={"Streaming": True})
    finally:
        if proxy:
            proxy.cut()
        # Other kinds half-close, which waits for the remaining responses.
        stream.close(cancel=kind in ("cancel", "disconnect", "deadline"))
    if kind in ("half_close", "stop"):
        finals = 0
        while not stream.results.empty():
            result, error = stream.results.get_nowait()
            assert error is None, error
            last = triton.final(result)
            finals += last
        # The last response of the request and, after a stop, the answer to the stop.
        assert last and finals == (2 if kind == "stop" else 1), finals
    return kind


def stop_inputs():
    import numpy as np
    import tritonclient.grpc as grpcclient

    inputs = []
    for name, datatype, value in (
        ("input_ids", "INT32", np.array([1], dtype=np.int32)),
        ("input_lengths", "INT32", np.array([1], dtype=np.int32)),
        ("request_output_len", "UINT32", np.array([1], dtype=np.uint32)),
        ("stop", "BOOL", np.array([True])),
    ):
        tensor = grpcclient.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def storm(server, requests, seed, **sizes):
    """Returns how many requests ended in each way, and the errors. `sizes` are arguments of one_request."""
    ended = collections.Counter()
    errors = []

    def work(worker):
        randomness = random.Random(seed * 1000 + worker)
        for index in range(worker, requests, THREADS):
            try:
                ended[one_request(server, randomness, index, **sizes)] += 1
            except Exception as error:  # a failure in a thread does not fail the test
                errors.append(f"r{index}: {error!r} {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended, errors


def is_empty(server):
    """True if the server holds nothing at this moment. A cancelled request may reach the server later than the
    client's next one."""
    samples = server.metrics()

    def value(name):
        return samples[(name, frozenset())]

    (config,) = [key for key in samples if key[0] == "kvasir_cache_config_info"]
    pages = value("kvasir_kv_cache_free_pages") + value("kvasir_kv_cache_cached_pages")
    return (
        pages == int(dict(config[1])["num_gpu_blocks"])
        and value("kvasir_num_requests_running") == 0
        and value("kvasir_num_requests_waiting") == 0
        and value("kvasir_kv_cache_used_pages") == 0
        and value("kvasir_cache_leaked_pages") == 0
        and value("kvasir_host_pool_used_bytes") == 0
        and value("kvasir_router_inflight_requests") == 0
    )


# The pool has 18 pages and a sequence takes up to 8, so some sequences are preempted.
@pytest.mark.parametrize("model, pool, requests", [
    (TINY, "7MiB", REQUESTS), (COMPRESSED, "1MiB", REQUESTS // 2),
], ids=["dense", "compressed"])
def test_no_request_or_page_is_left_after_a_storm_of_requests(model, pool, requests):
    with KvasirProcess("serve", "--kv-cache-bytes", pool, "--max-num-seqs", "8",
                       "--log-level", "warning", model=model) as server:
        # The first storm warms up: connections and threads reach their usual numbers.
        assert storm(server, THREADS * 8, seed=1)[1] == []
        wait_until(lambda: is_empty(server), "an empty server after the warm-up", 60)
        own, threads, descriptors = server.own_threads(), server.threads(), server.descriptors()
        ended, errors = storm(server, requests, seed=2)
        assert errors == []
        assert sorted(ended) == sorted(KINDS) and ended.total() == requests
        wait_until(lambda: is_empty(server), "an empty server", 60)
        wait_until(
            lambda: server.descriptors() <= descriptors,
            f"descriptors back to {descriptors}", 60)
        assert server.own_threads() == own
        # gRPC's executor grows by one thread at a time, up to twice the number of cores.
        assert server.threads() <= threads + 2 * (os.cpu_count() or 1)
        assert server.metric("kvasir_num_preemptions_total") > 0
        # The server still answers.
        text, reason, tokens = triton.generate(
            server.grpc, server.ready["model"], "After the storm", max_tokens=4, ignore_eos=True)
        assert (reason, tokens) == ("length", 4) and text
        assert server.stop() == 0
