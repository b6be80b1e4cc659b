"""Streams of a worker that is killed go on at another one, and the client gets the tokens of an undisturbed run."""

import collections
import contextlib
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

import access_log
from kvasir_process import OPERATOR_PORTS, TINY, CuttableProxy, KvasirProcess, wait_until

pytestmark = pytest.mark.timeout(300)
# More than 300 tokens, so the evicting plans evict before and after the worker is lost.
PROMPT = (TINY / "evaluation.txt").read_text()[2000:3400]
MAX_TOKENS = 300
BEGUN = 5  # responses that each client has received before the worker is lost
SEEDED = {"temperature": 1, "seed": 5, "top_p": 0.9, "logprobs": 2}
SAMPLINGS = [
    {"temperature": 0},
    SEEDED,
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 1, "seed": 7, "top_k": 20, "min_tokens": MAX_TOKENS, "ignore_eos": False},
    {"temperature": 1, "seed": 8, "n": 3},
]
PLANS = [
    [],
    ["--eviction", "h2o", "--eviction-budget", "128", "--eviction-recent", "32", "--eviction-every", "64"],
    ["--kv-plan", "rotated-4bit", "--eviction", "q-hitter", "--eviction-budget", "0.2"],
    ["--eviction", "streaming", "--eviction-budget", "0.3"],
]


class Kserve:
    def __init__(self, channel, model):
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.model = model

    def stream(self, sampling):
        """Yields, for each response and sample, the sample's index, new text, new logprobs and finish reason."""
        message = service_pb2.ModelInferRequest(model_name=self.model)
        for name, value in (("text_input", PROMPT), ("sampling_parameters", json.dumps(sampling))):
            message.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value.encode())
        for name in ("stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs"):
            message.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        for response in self.stub.ModelStreamInfer(iter([message]), timeout=120):
            assert not response.error_message
            outputs = [deserialize_bytes_tensor(each) for each in response.infer_response.raw_output_contents]
            for index, (text, reason, logprobs) in enumerate(zip(*outputs)):
                yield index, text.decode(), json.loads(logprobs) or [], reason.decode()


class VllmInference:
    def __init__(self, channel, _):
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        kind = {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"vllm.{name}"))
                for name in ("GenerateRequest", "GenerateResponse")}
        self.request = kind["GenerateRequest"]
        self.call = channel.unary_stream(
            "/vllm.Inference/GenerateStream", request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind["GenerateResponse"].FromString)

    def stream(self, sampling):
        request = self.request(text=PROMPT, temperature=sampling["temperature"])
        for name in ("seed", "top_p", "top_k"):
            if name in sampling:
                setattr(request.sampling, name, sampling[name])
        request.sampling.num_sequences = sampling.get("n", 1)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if name in sampling:
                setattr(request.decoding, name, sampling[name])
        request.stopping.max_new_tokens = sampling["max_tokens"]
        request.stopping.min_new_tokens = sampling.get("min_tokens", 0)
        request.stopping.ignore_eos = sampling["ignore_eos"]
        request.stopping.stop_strings.extend(sampling.get("stop", []))
        request.response.output_token_ids = True
        request.response.output_logprobs = True
        request.response.output_candidates.top_n = sampling.get("logprobs", 0)
        for response in self.call(request, timeout=120):
            out = response.outputs
            tokens = zip(out.token_ids, out.logprobs, out.ranks, map(str, out.candidate_tokens), strict=True)
            yield out.index, out.text, list(tokens), str(out.finish_info.finish_reason)


FACADES = [Kserve, VllmInference]


def read(stream, begun):
    """Returns the text, the logprobs and the finish reason of each sample; adds the time of each response to `begun`."""
    samples = collections.defaultdict(lambda: ["", [], ""])
    for index, text, logprobs, reason in stream:
        sample = samples[index]
        sample[0] += text
        sample[1] += logprobs
        sample[2] = reason
        begun.append(time.time())
    return dict(samples)


class Clients:
    """Reads streams of all facades with all samplings at once."""

    def __init__(self, stack, router):
        channel = stack.enter_context(grpc.insecure_channel(router.grpc))
        facades = [make(channel, router.ready["model"]) for make in FACADES]
        (text, _, _), = read(facades[0].stream({"max_tokens": MAX_TOKENS, "ignore_eos": True} | SEEDED), []).values()
        # A stop string near the end of the answer, so that most of it comes before.
        samplings = [*SAMPLINGS, SEEDED | {"stop": [text[-20:-10]]}]
        self.kinds = [(facade, {"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling)
                      for facade in facades for sampling in samplings]
        self.threads = stack.enter_context(ThreadPoolExecutor(len(self.kinds)))
        self.router = router
        self.want = [answer.result() for answer in self.start()[0]]
        self.logged = 1 + len(self.kinds)
        self.responses = []  # for each stream of begin(), the times of its responses

    def start(self):
        """Sends all requests; returns their answers to come, and for each a list that grows with its responses."""
        begun = [[] for _ in self.kinds]
        return [self.threads.submit(read, facade.stream(sampling), each)
                for (facade, sampling), each in zip(self.kinds, begun)], begun

    def begin(self):
        """Sends all requests and waits until each has output."""
        answers, self.responses = self.start()
        wait_until(lambda: all(len(each) >= BEGUN for each in self.responses), "tokens of all streams")
        return answers

    def check(self, answers):
        """Each answer is the one of an undisturbed run. Returns the streams' lines in the log."""
        for answer, expected in zip(answers, self.want):
            assert answer.result() == expected
        return self.new_lines(len(answers))

    def new_lines(self, count):
        """Waits until so many more requests are in the log, and returns their lines."""
        first, self.logged = self.logged, self.logged + count
        wait_until(lambda: len(access_log.lines(self.router)) == self.logged, "all are logged")
        return access_log.lines(self.router)[first:]

    def ask(self, count):
        """Sends requests one after the other; returns their lines in the log."""
        for _ in range(count):
            read(self.kinds[0][0].stream({"max_tokens": 1}), [])
        return self.new_lines(count)


def start_worker(stack, address, *flags):
    return stack.enter_context(KvasirProcess("worker", "--listen", address, *OPERATOR_PORTS, *flags, ports=False))


def states(router, address):
    """The states that the router has logged for this worker."""
    return [line["state"] for line in access_log.lines(router, "replica") if line["worker"] == address]


class Two:
    """A router with two workers, of which it can reach the second one only while the proxy is not cut."""

    def __init__(self, stack, *flags):
        self.lost, self.other = (start_worker(stack, "127.0.0.1:0", *flags) for _ in range(2))
        self.proxy = CuttableProxy(self.other.grpc)
        workers = f"{self.lost.grpc},{self.proxy.address}"
        self.router = stack.enter_context(KvasirProcess("router", "--workers", workers, "--policy", "least_loaded", "--log-format", "json"))
        self.clients = Clients(stack, self.router)

    def begin(self, evicts=False):
        """Sends all requests to the first worker, stops it, so that none of them ends, and lets the other come back."""
        self.proxy.cut()
        wait_until(lambda: states(self.router, self.proxy.address)[-1] == "lost", "the cut")
        evicted = self.lost.metric("kvasir_evictions_total") if evicts else 0
        answers = self.clients.begin()
        if evicts:
            wait_until(lambda: self.lost.metric("kvasir_evictions_total") > evicted, "an eviction")
        self.lost.process.send_signal(signal.SIGSTOP)
        self.stopped = time.time()
        self.proxy.heal()
        wait_until(lambda: states(self.router, self.proxy.address)[-1] == "ready", "the other worker")
        return answers

    def check_moved(self, answers):
        assert {(line["attempts"], line["replica"]) for line in self.clients.check(answers)} == {(2, self.proxy.address)}


def check_empty(worker):
    wait_until(lambda: worker.metric("kvasir_kv_cache_used_pages") == 0, "an empty cache")
    assert worker.metric("kvasir_cache_leaked_pages") == 0


@pytest.mark.parametrize("flags", PLANS, ids=["dense", "h2o", "rotated-q-hitter", "streaming"])
def test_streams_of_a_killed_worker_go_on_with_the_tokens_of_an_undisturbed_run(flags):
    with contextlib.ExitStack() as stack:
        two = Two(stack, *flags)
        answers = two.begin(evicts=bool(flags))
        two.lost.kill()
        two.check_moved(answers)
        if flags:
            assert two.other.metric("kvasir_evictions_total") > 0
        check_empty(two.other)


def test_streams_of_a_worker_that_hangs_go_on_elsewhere_and_it_may_come_back():
    with contextlib.ExitStack() as stack:
        two = Two(stack)
        lost, router, clients = two.lost, two.router, two.clients
        answers = two.begin()
        wait_until(lambda: states(router, lost.grpc)[-1] == "hung", "a worker that hangs")
        noticed = time.time() - two.stopped
        two.check_moved(answers)
        assert {line["replica"] for line in clients.ask(4)} == {two.proxy.address}
        paused = max(after - before for times in clients.responses for before, after in zip(times, times[1:]))
        # The times are bounded loosely, because other processes may use the whole machine.
        print(f"noticed after {noticed:.1f} s, streams paused for at most {paused:.1f} s")
        assert noticed < 15 and paused < 20
        lost.process.send_signal(signal.SIGCONT)
        wait_until(lambda: states(router, lost.grpc)[-1] == "ready", "the worker that has come back")
        check_empty(lost)
        assert lost.grpc in {line["replica"] for line in clients.ask(8)}


def test_a_router_that_was_stopped_does_not_regard_its_worker_as_hung(tmp_path):
    with contextlib.ExitStack() as stack:
        worker = start_worker(stack, f"unix:{tmp_path}/a")
        router = stack.enter_context(KvasirProcess("router", "--workers", worker.grpc, "--log-format", "json"))
        router.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        router.process.send_signal(signal.SIGCONT)
        time.sleep(1)
        assert states(router, worker.grpc) == ["ready"]


def test_streams_go_on_at_their_only_worker_after_it_was_killed_and_started_again(tmp_path):
    address = f"unix:{tmp_path}/a"
    with contextlib.ExitStack() as stack:
        worker = start_worker(stack, address)
        router = stack.enter_context(KvasirProcess("router", "--workers", address, "--log-format", "json"))
        clients = Clients(stack, router)
        answers = clients.begin()
        worker.kill()
        again = start_worker(stack, address)
        assert {line["attempts"] for line in clients.check(answers)} == {2}
        check_empty(again)


def test_workers_that_evict_differently_do_not_count_as_equal():
    ids = []
    for flags in (*PLANS, ["--eviction", "streaming", "--eviction-budget", "0.5"]):
        with KvasirProcess("worker", "--listen", "127.0.0.1:0", *OPERATOR_PORTS, *flags, ports=False) as worker:
            ids += re.findall(r'numerics="?([^ "]+)', worker.log())
    assert len(ids) == len(set(ids)) == len(PLANS) + 1, ids
