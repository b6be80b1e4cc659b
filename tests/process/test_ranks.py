"""A model on several ranks, each of which is a process: they give the same answers and end together."""

import concurrent.futures
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import time
import urllib.request

import pytest

import triton
from kvasir_process import (BINARY, OPERATOR_PORTS, TINY, CuttableProxy, KvasirProcess, altered_model, run,
                            wait_until)
from prometheus import free_port

COMPRESSED = TINY.with_name("tiny-palu")
PROMPTS = [f"Chapter {i}. It was a bright cold morning, and she said to him" for i in range(4)]
# The longest time until all streams and processes end after a rank is lost. An idle machine needs less than a second.
END_SECONDS = 20
ROUNDS = int(os.environ.get("KVASIR_RANK_ROUNDS", "1"))
ONE_THREAD = ["--threads", "1"]
# By default the caches of the model with a long context would take half of the machine's memory.
SMALL_CACHE = ["--kv-cache-bytes", "256MiB", "--host-pool-bytes", "0"]
FAKE_NCCL = os.environ.get("KVASIR_FAKE_NCCL_LIBRARY")


def serve(tp, *flags, model=TINY):
    return KvasirProcess("serve", "--tp", tp, *ONE_THREAD, *flags, model=model)


def answers(server, tokens=40):
    """All answers, from requests that run at once and share steps."""
    def answer(prompt):
        return triton.generate(server.grpc, server.ready["model"], prompt, max_tokens=tokens, temperature=0.0,
                               ignore_eos=True)

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(answer, PROMPTS))


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def rank_pids(server):
    return [rank["pid"] for rank in server.ready["ranks"]]


def rank_metrics(rank):
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{rank['metrics']}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {sample.name: sample for family in families for sample in family.samples}


def shared_memory():
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """The tiny model with a context that no request fills while a test runs."""
    return altered_model(tmp_path_factory.mktemp("long") / "tiny", max_position_embeddings=1 << 15)


class Endless:
    """Requests that run until something ends them; the model needs a long context. There are enough for a router to
    give some to each of two replicas, even if its last load report of one still counts all requests of `answers`."""

    def __init__(self, address, model, count=3 * len(PROMPTS)):
        self.stream = triton.Stream(address)
        for i in range(count):
            inputs = triton.text_inputs(f"{i}: It was", max_tokens=100_000, temperature=0.0, ignore_eos=True)
            self.stream.send(model, inputs, str(i))
        self.count = count
        self.wait_for_tokens()

    def wait_for_tokens(self):
        """Waits until every stream has a token more than those in the queue now. No stream may end."""
        seen = self.stream.results.qsize()
        new = set()
        while len(new) < self.count:
            result, error = self.stream.results.get(timeout=60)
            assert error is None, error
            seen -= 1
            if seen < 0:
                new.add(result.get_response().id)

    def error(self, seconds):
        """The status code and text with which the first stream ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                _, error = self.stream.results.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no stream has ended within {seconds} s") from None
            if error is not None:
                return (error.status() or error.message()).removeprefix("StatusCode.")

    def close(self):
        self.stream.close(cancel=True)


@pytest.fixture(scope="module")
def wanted():
    """The answers of a server that is one process, by model."""
    found = {}
    for model in (TINY, COMPRESSED):
        with KvasirProcess("serve", "--kv-dtype", "f32", *ONE_THREAD, model=model) as server:
            assert "ranks" not in server.ready
            found[model] = answers(server)
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_a_group_of_ranks_gives_the_answers_of_a_single_process(wanted, tp):
    before = shared_memory()
    with serve(tp, "--kv-dtype", "f32") as server:
        assert answers(server) == wanted[TINY]
        ranks = server.ready["ranks"]
        assert [rank["rank"] for rank in ranks] == list(range(tp))
        weights = [rank_metrics(rank)["kvasir_rank_weight_bytes"].value for rank in ranks]
        for rank in ranks:
            metrics = rank_metrics(rank)
            info = metrics["kvasir_rank_info"].labels
            assert info == {"rank": str(rank["rank"]), "tp_size": str(tp), "collective": "gloo", "device": "cpu"}
            assert metrics["kvasir_collective_calls_total"].value > 0
            assert metrics["kvasir_collective_sent_bytes_total"].value > 0
            assert metrics["kvasir_device_memory_bytes"].labels["rank"] == str(rank["rank"])
        assert max(weights) < 1.1 * min(weights)
        pids = rank_pids(server)
        assert all(map(alive, pids)) and len(set(pids)) == tp
        assert server.stop() == 0
        assert not any(map(alive, pids))
        assert "rank=1" in server.log()
    assert shared_memory() == before


def test_ranks_with_a_quantized_cache_and_preemption_give_the_same_answers():
    with serve(2, "--kv-cache-bytes", "64MiB", "--host-pool-bytes", "0", model=COMPRESSED) as server:
        want = answers(server, tokens=300)
        assert server.metric("kvasir_num_preemptions_total") == 0
    # Each rank has half of the cache.
    with serve(2, "--kv-cache-bytes", "448KiB", "--host-pool-bytes", "8MiB", model=COMPRESSED) as server:
        assert answers(server, tokens=300) == want
        assert server.metric("kvasir_preemptions_by_kind_total", kind="copy") > 0
        assert server.metric("kvasir_cache_leaked_pages") == 0
    with serve(2, "--kv-cache-bytes", "448KiB", "--host-pool-bytes", "0", model=COMPRESSED) as server:
        assert answers(server, tokens=300) == want
        assert server.metric("kvasir_preemptions_by_kind_total", kind="recompute") > 0


@pytest.mark.parametrize("index", [0, 1], ids=["leader", "rank"])
def test_a_signal_to_any_rank_drains_the_whole_group(index):
    with serve(2) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(triton.generate, server.grpc, server.ready["model"], "Once", max_tokens=200,
                                  temperature=0.0, ignore_eos=True)
            wait_until(lambda: server.metric("kvasir_num_requests_running") > 0, "a request that runs")
            os.kill(rank_pids(server)[index], signal.SIGTERM)
            assert running.result()[2] == 200
        assert server.process.wait(timeout=60) == 0, server.log()
        assert not any(map(alive, rank_pids(server)))


def test_a_signal_to_the_whole_group_drains_it_under_load(long_model):
    """Regression test: ranks aborted requests that their leader was still finishing."""
    with serve(2, "--drain-timeout", "1s", *SMALL_CACHE, model=long_model) as server:
        load = Endless(server.grpc, server.ready["model"])
        for pid in rank_pids(server):
            os.kill(pid, signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0, server.log()
        load.close()
        assert "gave up" not in server.log()


def test_if_a_rank_dies_during_a_drain_the_group_exits_with_an_error():
    with serve(2, "--rank-heartbeat-timeout", "1m") as server:
        rank = rank_pids(server)[1]
        os.kill(rank, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log(), "a drain")
        os.kill(rank, signal.SIGKILL)
        assert server.process.wait(timeout=60) == 1, server.log()


def test_ranks_serve_requests_if_the_watchdog_is_off():
    with serve(2, "--watchdog", "0") as server:
        assert server.stop() == 0


@pytest.mark.parametrize("tp", [2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("index", [1, 0], ids=["rank", "leader"])
def test_the_loss_of_one_rank_ends_all_ranks(how, index, tp, long_model):
    for _ in range(ROUNDS):
        before = shared_memory()
        with serve(tp, *SMALL_CACHE, model=long_model) as server:
            load = Endless(server.grpc, server.ready["model"])
            pids = rank_pids(server)
            os.kill(pids[index], how)
            error = load.error(END_SECONDS)
            assert error.startswith("UNAVAILABLE"), error
            load.close()
            code = server.process.wait(timeout=END_SECONDS)
            assert code != 0, server.log()
            wait_until(lambda: not any(map(alive, pids)), "all processes gone", END_SECONDS)
        assert shared_memory() == before


def test_a_router_uses_another_replica_after_a_group_of_ranks_is_lost(tmp_path, long_model):
    sockets = [f"unix:{tmp_path}/{name}" for name in "ab"]
    flags = ["--tp", 2, *ONE_THREAD, *OPERATOR_PORTS, *SMALL_CACHE]
    with KvasirProcess("worker", "--listen", sockets[0], *flags, ports=False, model=long_model) as lost, \
            KvasirProcess("worker", "--listen", sockets[1], *flags, ports=False, model=long_model) as other, \
            KvasirProcess("router", "--workers", ",".join(sockets)) as router:
        assert answers(router) == answers(router)
        load = Endless(router.grpc, router.ready["model"])
        os.kill(rank_pids(lost)[1], signal.SIGKILL)
        assert lost.process.wait(timeout=END_SECONDS) != 0
        load.wait_for_tokens()
        load.close()
        # The remaining replica answers all requests.
        assert len(answers(router)) == len(PROMPTS)
        assert other.process.poll() is None


class Group:
    """A leader, and a rank that joins it over loopback as if from another host."""

    def __init__(self, folder, *leader_flags, secret="hush", tp=2, port=None, model=TINY):
        self.folder = folder
        self.model = model
        self.port = port or free_port()
        self.secret = folder / "secret"
        self.secret.write_text(secret)
        self.flags = [*ONE_THREAD, "--rank-interface", "127.0.0.1"]
        self.leader = subprocess.Popen(
            list(map(str, [BINARY, "worker", "--model", model, "--listen", f"unix:{folder}/worker", *OPERATOR_PORTS,
                           *self.flags, "--tp", tp, "--local-ranks", 1, "--rank-listen", f"127.0.0.1:{self.port}",
                           "--rank-secret-file", self.secret, "--ready-file", folder / "ready", *leader_flags])),
            stdout=open(folder / "log", "wb"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def rank(self, *flags, tp=2, port=None, secret=None, model=None, name="rank"):
        return subprocess.Popen(
            list(map(str, [BINARY, "rank", "--model", model or self.model, *OPERATOR_PORTS, *self.flags, "--tp", tp, "--rank", 1, "--leader",
                           f"127.0.0.1:{port or self.port}", "--rank-secret-file", secret or self.secret, *flags])),
            stdout=open(self.folder / f"{name}.log", "wb"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def refused(self, *flags, **options):
        """Starts a rank that the leader must refuse, and returns the rank's log."""
        process = self.rank(*flags, name="refused", **options)
        assert process.wait(timeout=60) == 1
        return (self.folder / "refused.log").read_text()

    def log(self):
        return (self.folder / "log").read_text()

    def wait_ready(self):
        wait_until((self.folder / "ready").exists, "a leader that is ready", 60)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.leader.kill()
        self.leader.wait()


def test_a_rank_of_another_host_joins_and_leaves_with_the_group(tmp_path):
    with Group(tmp_path) as group:
        rank = group.rank()
        group.wait_ready()
        leader = f"127.0.0.1:{group.port}"
        assert f'joining the group leader={leader} within=5m' in (tmp_path / "rank.log").read_text()
        wait_until(lambda: f"kvasir rank is ready: leader {leader}," in (tmp_path / "rank.log").read_text(), "a rank")
        ranks = json.loads((tmp_path / "ready").read_text())["ranks"]
        assert [each["pid"] for each in ranks] == [group.leader.pid, rank.pid]
        group.leader.send_signal(signal.SIGTERM)
        assert group.leader.wait(timeout=60) == 0, group.log()
        assert rank.wait(timeout=60) == 0


def test_a_rank_that_does_not_match_its_group_is_refused_with_the_field_that_differs(tmp_path):
    other = tmp_path / "other"
    other.write_text("guess")
    with Group(tmp_path) as group:
        wait_until(lambda: "waiting for ranks" in group.log(), "a listener")
        for _ in range(2):
            assert "secret" in group.refused(secret=other)
        assert "tp_size" in group.refused(tp=4)
        assert "max_num_seqs" in group.refused("--max-num-seqs", 7)
        assert "checkpoint_id" in group.refused(model=COMPRESSED)
        rank = group.rank()
        group.wait_ready()
        assert "rank 1" in group.refused()  # the rank has already joined
        log = group.log()
        assert log.count("UNAUTHENTICATED") == 1, log
        assert "tp_size is 4" in log and "max_num_seqs is 7" in log and "checkpoint_id is" in log, log
        assert "hush" not in log and "guess" not in log
        assert rank.poll() is None and group.leader.poll() is None
        rank.kill()
        rank.wait()
        assert group.leader.wait(timeout=END_SECONDS) != 0


def test_a_process_whose_child_rank_dies_before_joining_the_group_ends(tmp_path):
    """Regression test: the parent process went on waiting for other ranks, and then used a destroyed object."""
    with Group(tmp_path, tp=4) as group:
        wait_until(lambda: "waiting for ranks" in group.log(), "a listener")
        rank = group.rank("--local-ranks", 2, tp=4)
        wait_until(lambda: 'rank="rank 2' in group.log(), "a rank that has joined")
        (child,) = map(int, pathlib.Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split())
        os.kill(child, signal.SIGKILL)
        assert rank.wait(timeout=END_SECONDS) == 1
        assert not alive(child)
        assert group.leader.poll() is None  # other ranks may join instead


def test_if_the_rank_port_is_taken_the_log_has_only_this_error(tmp_path):
    """Regression test: the leader logged the end of a group that had never started, and only then the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with Group(tmp_path, port=taken.getsockname()[1]) as group:
            assert group.leader.wait(timeout=60) == 1
            (line,) = group.log().splitlines()
            assert f"127.0.0.1:{group.port}: Address already in use; choose another address with --rank-listen" in line


def test_a_leader_reports_which_ranks_have_not_joined(tmp_path):
    with Group(tmp_path, "--rank-join-timeout", "1s") as group:
        assert group.leader.wait(timeout=30) == 1
        assert "rank 1" in group.log() and "1s" in group.log(), group.log()


def zero_rows(folder, tensor, first, count):
    """Sets rows of a tensor to zero. The checkpoint is one file, and all of its tensors have 16 or 32 bits."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    info = json.loads(data[8:8 + header_bytes])[tensor]
    begin, end = info["data_offsets"]
    row_bytes = (end - begin) // info["shape"][0]
    at = 8 + header_bytes + begin + first * row_bytes
    data[at:at + count * row_bytes] = bytes(count * row_bytes)
    file.unlink()
    file.write_bytes(data)


def test_changed_weights_of_one_rank_change_the_answers_of_the_group(tmp_path):
    """No rank reads the weights of the others, so the id of the group's weights must depend on those of each rank."""
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in TINY.iterdir():
        if file.is_file():
            (changed / file.name).symlink_to(file)
    # Rank 1 has the second half of the 640 features.
    zero_rows(changed, "model.layers.0.mlp.gate_proj.weight", 384, 128)
    texts = {}
    for model in (TINY, changed):
        folder = tmp_path / model.name
        folder.mkdir(exist_ok=True)
        with Group(folder) as group:
            rank = group.rank(model=model)
            group.wait_ready()
            with KvasirProcess("router", "--workers", f"unix:{folder}/worker") as router:
                texts[model] = answers(router)
            group.leader.send_signal(signal.SIGTERM)
            assert group.leader.wait(timeout=60) == 0 and rank.wait(timeout=60) == 0
    assert texts[TINY] != texts[changed]


def test_the_lost_connection_of_one_rank_ends_all_ranks(tmp_path, long_model):
    for round_ in range(ROUNDS):
        folder = tmp_path / str(round_)
        folder.mkdir()
        with Group(folder, *SMALL_CACHE, model=long_model) as group:
            proxy = CuttableProxy(f"127.0.0.1:{group.port}")
            wait_until(lambda: "waiting for ranks" in group.log(), "a listener")
            rank = group.rank(port=proxy.address.rsplit(":", 1)[1])
            group.wait_ready()
            # Otherwise the stream would wait for its worker to come back.
            with KvasirProcess("router", "--workers", f"unix:{folder}/worker", "--move-streams", "off") as router:
                load = Endless(router.grpc, router.ready["model"])
                proxy.cut()
                error = load.error(END_SECONDS)
                assert error.startswith("UNAVAILABLE"), error
                load.close()
            assert group.leader.wait(timeout=END_SECONDS) != 0, group.log()
            assert rank.wait(timeout=END_SECONDS) != 0


@pytest.mark.skipif(FAKE_NCCL is None, reason="this build has no fake NCCL library")
def test_ranks_on_the_emulated_gpu_with_nccl_give_the_answers_of_a_single_process(tmp_path):
    """The kernels run on the emulated device and NCCL over shared memory. Everything else is what runs on GPUs."""
    model = altered_model(tmp_path / "tiny", num_hidden_layers=2)

    def first_words(*flags):
        before = shared_memory()
        with KvasirProcess("serve", "--device", "emulated:f32", "--kv-dtype", "f32", "--max-num-seqs", 4,
                           "--max-batched-tokens", 16, "--max-model-len", 64, *ONE_THREAD, *flags,
                           model=model) as server:
            words = triton.generate(server.grpc, server.ready["model"], "It was", max_tokens=4, temperature=0.0)
            ranks = server.ready.get("ranks", [])
            assert [rank_metrics(rank)["kvasir_rank_info"].labels["collective"] for rank in ranks] == ["nccl"] * len(ranks)
            if "--cuda-graphs" in flags:
                wait_until(lambda: server.metric("kvasir_steps_replayed_total") >= 2, "steps that are replayed")
            began = time.monotonic()
            assert server.stop() == 0, server.log()
            # Ranks and the leader's communicator must not wait for each other's timeouts of five seconds.
            assert time.monotonic() - began < 5
            assert not any(map(alive, [rank["pid"] for rank in ranks]))
        assert shared_memory() == before
        return words

    group = ["--tp", 2, "--nccl-library", FAKE_NCCL, "--collective", "nccl"]
    words = first_words()
    assert first_words(*group) == words
    assert first_words("--cuda-graphs") == words
    assert first_words(*group, "--cuda-graphs") == words


@pytest.mark.parametrize("flags, words", [
    (["--tp", "3"], ["3", "8 KV heads", "possible numbers of ranks: 1, 2, 4, 8 or 16"]),
    (["--tp", "2", "--local-ranks", "1"], ["--rank-listen"]),
    (["--tp", "0"], ["--tp"]),
    (["--tp", "2", "--device", "emulated", "--collective", "gloo"], ["--collective gloo", "give --collective nccl"]),
    (["--tp", "2", "--device", "auto"], ["--device auto"]),
    (["--cuda-graphs"], ["--cuda-graphs", "--device cpu"]),
])
def test_the_error_for_an_impossible_group_of_ranks_has_the_numbers(flags, words):
    done = run("serve", "--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS, *flags, check=False)
    assert done.returncode in (1, 2)
    for word in words:
        assert word in done.stderr, done.stderr


def test_more_ranks_than_heads_are_served_and_duplicated_heads_are_logged():
    with serve(16, "--kv-dtype", "f32", "--kv-cache-bytes", "4MiB", "--max-num-seqs", 2) as server:
        log = server.log()
        assert 'what="layers 0-5 key, heads 0 on ranks 0-1: ' in log, log
        assert "kvasir inspect --tp 16" in log
        text, _, tokens = triton.generate(server.grpc, server.ready["model"], "It was", max_tokens=8, temperature=0.0)
        assert text and tokens == 8


def test_the_printed_configuration_has_the_number_of_ranks_but_no_internal_flags():
    text = run("serve", "--model", TINY, "--tp", "2", "--print-config").stdout
    assert "tp=2" in text and "join-fd" not in text
    assert "--join-fd" not in run("rank", "--help").stdout
