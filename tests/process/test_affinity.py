"""Conversations through a router stay at the worker that has their pages, and the workers share the load."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

import triton
from kvasir_process import OPERATOR_PORTS, TINY, KvasirProcess, wait_until

pytestmark = pytest.mark.timeout(120)
CONVERSATIONS = 8
TURNS = 3
TEXT = (TINY / "evaluation.txt").read_text()


class Worker(KvasirProcess):
    def tokens(self):
        """The prompt tokens that were looked up in the prefix cache, and those found there."""
        return [self.metric(f"kvasir_prefix_cache_{name}_tokens_total") for name in ("query", "hit")]


def test_each_turn_finds_the_pages_of_the_turn_before_at_its_worker(tmp_path):
    sockets = [f"unix:{tmp_path}/{name}" for name in "ab"]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker("worker", "--listen", each, "--page-tokens", "16", *OPERATOR_PORTS, ports=False))
                   for each in sockets]
        router = stack.enter_context(KvasirProcess("router", "--workers", ",".join(sockets)))

        def ask(prompt):
            return prompt + triton.generate(router.grpc, router.ready["model"], prompt, max_tokens=40, ignore_eos=True)[0]

        # The first turns come at the same time, and no worker gets more than the bound: 5 of 8.
        with ThreadPoolExecutor(CONVERSATIONS) as pool:
            chats = list(pool.map(ask, [TEXT[700 * i:700 * (i + 1)] for i in range(CONVERSATIONS)]))
        shares = [worker.tokens()[0] for worker in workers]
        assert min(shares) > 0.25 * sum(shares)

        places, lengths = {}, {}
        for turn in range(1, TURNS):
            for i, chat in enumerate(chats):
                before = [worker.tokens() for worker in workers]
                chats[i] = ask(f"{chat} {TEXT[9000 + 40 * i:9040 + 40 * i]}")
                wait_until(lambda: [worker.tokens() for worker in workers] != before, "the lookup is counted")
                grown = [(after[0] - then[0], after[1] - then[1])
                         for worker, then in zip(workers, before) for after in [worker.tokens()]]
                (place,) = (number for number, (looked_up, _) in enumerate(grown) if looked_up)
                looked_up, found = grown[place]
                # All but the new message and the last two pages, one of which is not full.
                assert found > looked_up - 32 - 40
                assert places.setdefault(i, place) == place
                assert looked_up > lengths.get(i, 100)
                lengths[i] = looked_up
