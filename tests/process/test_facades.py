"""Behaviour that the three facades share on their one port: health, refusals that are logged and counted once, and
limits on what a peer may send."""

import json
import signal
import threading
import time

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import floods
import triton
from kvasir_process import KvasirProcess, altered_model, wait_until

pytestmark = pytest.mark.timeout(120)
SERVICES = [
    "", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine", "vllm.Inference", "vllm.Control",
]
MAX_MODEL_LEN = 512
MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with KvasirProcess("serve", "--max-model-len", str(MAX_MODEL_LEN)) as process:
        yield process


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.grpc) as made:
        yield made


@pytest.fixture(scope="module")
def message(channel):
    """Message classes by full name, as the server's reflection describes them."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


class Kserve:
    log = "kserve"
    method = "/inference.GRPCInferenceService/ModelInfer"

    def request(self, message, server, ids=(5, 6, 7)):
        made = message("inference.ModelInferRequest")(model_name=server.ready["model"])
        for name, datatype, field, values in (
            ("input_ids", "INT32", "int_contents", ids), ("request_output_len", "INT32", "int_contents", [2])):
            tensor = made.inputs.add(name=name, datatype=datatype, shape=[len(values)])
            getattr(tensor.contents, field).extend(values)
        return made

    def id(self, request, value):
        request.id = value

    def model(self, request, value):
        request.model_name = value

    def samples(self, request, n):
        """Only requests in the vLLM schema can have several samples."""
        del request.inputs[:]
        for name, value in ("text_input", "Once"), ("sampling_parameters", json.dumps({"n": n, "max_tokens": 2})):
            tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(value.encode())

    def wrong(self, request):
        request.inputs[1].contents.int_contents[0] = -1

    def not_built(self, request):
        tensor = request.inputs.add(name="beam_width", datatype="INT32", shape=[1])
        tensor.contents.int_contents.append(4)


class VllmEngine:
    log = "vllm"
    method = "/vllm.grpc.engine.VllmEngine/Generate"

    def request(self, message, server, ids=(5, 6, 7)):
        made = message("vllm.grpc.engine.GenerateRequest")()
        made.tokenized.input_ids.extend(ids)
        made.sampling_params.max_tokens = 2
        return made

    def id(self, request, value):
        request.request_id = value

    def samples(self, request, n):
        request.sampling_params.n = n

    def endless(self, request, max_tokens=MAX_MODEL_LEN - 8):
        request.stream = True
        request.sampling_params.ignore_eos = True
        request.sampling_params.max_tokens = max_tokens

    model = None  # its requests name no model

    def wrong(self, request):
        request.sampling_params.top_p = 7

    def not_built(self, request):
        request.sampling_params.regex = "a*"


class VllmInference:
    log = "vllm_inference"
    method = "/vllm.Inference/GenerateStream"

    def request(self, message, server, ids=(5, 6, 7)):
        made = message("vllm.GenerateRequest")()
        made.token_ids.ids.extend(ids)
        made.stopping.max_new_tokens = 2
        return made

    def id(self, request, value):
        request.request_id = value

    def samples(self, request, n):
        request.sampling.num_sequences = n

    def endless(self, request, max_tokens=MAX_MODEL_LEN - 8):
        request.stopping.ignore_eos = True
        request.stopping.max_new_tokens = max_tokens

    def model(self, request, value):
        request.model = value

    def wrong(self, request):
        request.sampling.top_p = 7

    def not_built(self, request):
        request.decoding.regex = "a*"


FACADES = [Kserve(), VllmEngine(), VllmInference()]
facades = pytest.mark.parametrize("facade", FACADES, ids=[each.log for each in FACADES])


def call(channel, facade, data):
    """Sends these bytes and returns the status code and the details."""
    made = channel.unary_stream(facade.method)(data, timeout=60)
    try:
        list(made)
    except grpc.RpcError:
        pass
    return made.code().name, made.details()


# --- aborts ---------------------------------------------------------------------


@pytest.mark.parametrize("facade", FACADES[1:], ids=[each.log for each in FACADES[1:]])
@pytest.mark.parametrize("service, package", [("vllm.Control", "vllm"), ("vllm.grpc.engine.VllmEngine", "vllm.grpc.engine")])
def test_an_abort_through_either_protocol_of_vllm_ends_the_request(server, channel, message, facade, service, package):
    request = facade.request(message, server)
    request_id = f"{facade.log}-{package}"
    facade.id(request, request_id)
    facade.endless(request)
    running = channel.unary_stream(facade.method)(request.SerializeToString(), timeout=60)
    next(running)
    aborted = message(f"{package}.AbortRequest")(request_ids=[request_id])
    channel.unary_unary(f"/{service}/Abort")(aborted.SerializeToString(), timeout=60)
    list(running)

    def line():
        return [each for each in server.log().splitlines() if f"client_request_id={request_id} " in each]

    wait_until(line, "the log line of the request")
    assert "finish_reason=cancelled" in line()[0]


# --- quotas ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A server whose clients may together have four samples at once. Its context is so long that no test fills it."""
    folder = tmp_path_factory.mktemp("limited")
    identities = folder / "identities.json"
    identities.write_text(json.dumps({
        "schema_version": 1, "anonymous": {"name": "all", "quota": {"concurrent_requests": 4}}}))
    model = altered_model(folder / "tiny", max_position_embeddings=1 << 15)
    with KvasirProcess("serve", "--identities", identities, "--kv-cache-bytes", "256MiB", model=model) as process:
        yield process


@facades
def test_a_request_with_more_samples_than_the_quota_allows_is_refused(limited, message, facade):
    request = facade.request(message, limited)
    facade.samples(request, 5)
    with grpc.insecure_channel(limited.grpc) as channel:
        code, details = call(channel, facade, request.SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert "n is 5, but the quota of tenant 'all' allows 4 concurrent_requests" in details


@pytest.mark.parametrize("first", FACADES[1:], ids=[each.log for each in FACADES[1:]])
def test_samples_of_running_requests_count_towards_the_quota_through_every_facade(limited, message, first):
    running = first.request(message, limited)
    first.samples(running, 3)
    first.endless(running, 30_000)
    with grpc.insecure_channel(limited.grpc) as channel:
        stream = channel.unary_stream(first.method)(running.SerializeToString(), timeout=60)
        next(stream)
        for facade in FACADES:
            request = facade.request(message, limited)
            facade.samples(request, 2)
            code, details = call(channel, facade, request.SerializeToString())
            assert (code, "runs 4 requests" in details) == ("RESOURCE_EXHAUSTED", True), details
            facade.samples(request, 1)
            assert call(channel, facade, request.SerializeToString())[0] == "OK"
        stream.cancel()
    wait_until(lambda: limited.metric("kvasir_num_requests_running") == 0, "the cancelled request has ended")


# --- health ---------------------------------------------------------------------


@pytest.mark.parametrize("port", ["grpc", "health"])
def test_the_standard_grpc_health_client_gets_the_status_of_each_service(server, port):
    """grpc_health_probe dials, calls Check once for -service, and reads the code and the status."""
    with grpc.insecure_channel(getattr(server, port)) as dialled:
        grpc.channel_ready_future(dialled).result(timeout=10)
        stub = health_pb2_grpc.HealthStub(dialled)
        for service in SERVICES if port == "grpc" else [""]:
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING, service
            # A watch reports the current status at once.
            watch = stub.Watch(request, timeout=10)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        unknown = health_pb2.HealthCheckRequest(service="no.such.Service")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(unknown, timeout=10)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        # The health protocol has its own status for a watch of an unknown service.
        assert next(stub.Watch(unknown, timeout=10)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_a_watch_of_the_health_service_reports_that_the_server_drains():
    with KvasirProcess("serve", "--drain-timeout", "9s") as server, grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in SERVICES]
        assert [next(each).status for each in watches] == [health_pb2.HealthCheckResponse.SERVING] * len(SERVICES)
        server.process.send_signal(signal.SIGTERM)
        statuses = [next(each).status for each in watches]
        assert statuses == [health_pb2.HealthCheckResponse.NOT_SERVING] * len(SERVICES)
        for each in watches:
            each.cancel()
        assert server.process.wait(timeout=60) == 0


def test_the_port_serves_no_grpc_protocol_of_another_engine(channel):
    """A gateway uses the first protocol that it knows, so a port with several could serve it the wrong one."""
    served = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    helpers = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert served - helpers == set(SERVICES) - {""}


# --- refusals -------------------------------------------------------------------


class Counts:
    """The lines of the access log, and the count of refused requests, since this object was made."""

    def __init__(self, server, facade):
        self.server, self.facade = server, facade
        self.lines, self.counted = len(self._lines()), self._counted()

    def _lines(self):
        return [line for line in self.server.log().splitlines() if f" facade={self.facade.log} " in line]

    def _counted(self):
        """The number of requests refused by the router or by its worker."""
        return sum(
            value for (name, labels), value in self.server.metrics().items()
            if name == "kvasir_router_requests_refused_total"
            or name == "kvasir_router_requests_total" and ("finish_reason", "error") in labels)

    def new_lines(self):
        return self._lines()[self.lines:]

    def newly_counted(self):
        return self._counted() - self.counted


def bad_requests(facade, message, server):
    """Returns {what: (the bytes of a request, the code, a part of its text)}."""
    wrong, not_built, unknown = (facade.request(message, server) for _ in range(3))
    facade.wrong(wrong)
    facade.not_built(not_built)
    # Field 900 stands for a field of a later version, which this server does not know.
    future = unknown.SerializeToString() + b"\xa0\x38\x01"
    long = facade.request(message, server, ids=[5] * (MAX_MODEL_LEN + 1))
    cases = {
        "wrong value": (wrong.SerializeToString(), "INVALID_ARGUMENT", ""),
        "not built": (not_built.SerializeToString(), "UNIMPLEMENTED", ""),
        "too long": (long.SerializeToString(), "INVALID_ARGUMENT", str(MAX_MODEL_LEN)),
        "no message": (b"\xff" * 100, "INVALID_ARGUMENT", "the request is not a valid protobuf message for " + facade.method),
    }
    if not isinstance(facade, Kserve):
        cases["unknown field"] = (future, "UNIMPLEMENTED", "900")
    if facade.model is not None:
        other = facade.request(message, server)
        facade.model(other, "no-such-model")
        cases["unknown model"] = (other.SerializeToString(), "NOT_FOUND", "no-such-model")
    return cases


@facades
@pytest.mark.parametrize(
    "what", ["wrong value", "not built", "too long", "no message", "unknown field", "unknown model"])
def test_every_refused_request_has_its_status_code_and_is_logged_and_counted_once(
        server, channel, message, facade, what):
    cases = bad_requests(facade, message, server)
    if what not in cases:
        pytest.skip(f"{facade.log} has no such case")
    data, code, text = cases[what]
    counts = Counts(server, facade)
    code_and_details = call(channel, facade, data)
    assert code_and_details[0] == code and text in code_and_details[1], code_and_details
    wait_until(lambda: counts.new_lines(), "a line in the log")
    (line,) = counts.new_lines()
    assert f" status={code} " in line, line
    wait_until(lambda: counts.newly_counted() > 0, "it is counted")
    assert counts.newly_counted() == 1


@facades
def test_a_message_over_the_size_limit_is_refused_before_it_is_read(server, channel, message, facade):
    limit = 8 * MAX_MODEL_LEN + MIB
    large = facade.request(message, server, ids=[1 << 20] * (limit // 3))
    code, text = call(channel, facade, large.SerializeToString())
    assert code == "RESOURCE_EXHAUSTED" and str(limit) in text, (code, text)


# Regression test: a model name of a megabyte of control characters wrote a log line of six megabytes.
@facades
def test_names_of_a_megabyte_are_shortened_in_the_log_and_in_the_answer(server, channel, message, facade):
    huge = "\x01" * (MIB - 4096)
    for change in (facade.model, facade.id):
        if change is None:
            continue
        request = facade.request(message, server)
        change(request, huge)
        counts = Counts(server, facade)
        before = len(server.log())
        code, text = call(channel, facade, request.SerializeToString())
        assert code in ("OK", "NOT_FOUND", "INVALID_ARGUMENT")
        wait_until(lambda: counts.new_lines(), "a line in the log")
        assert len(server.log()) - before < 16 << 10
        assert len(text) < 4096


# --- costs ----------------------------------------------------------------------


# Regression test: memory grew from 70 MB to 1.3 GB, and half of it stayed allocated.
def test_the_memory_of_six_hundred_prompts_of_a_megabyte_is_freed():
    flags = ["--max-model-len", "200000", "--kv-plan", "dense-8bit", "--eviction", "streaming", "--eviction-budget", "256"]
    with KvasirProcess("serve", *flags, "--request-bytes", "64MiB") as server:
        model = server.ready["model"]
        triton.generate(server.grpc, model, "Once", max_tokens=2)
        before = server.resident_bytes()
        most = [before]
        stopped = threading.Event()

        def watch():
            while not stopped.is_set():
                most.append(server.resident_bytes())
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        large = service_pb2.ModelInferRequest(model_name=model)
        tensor = large.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"a " * (MIB // 2))
        with grpc.insecure_channel(server.grpc, [("grpc.max_send_message_length", -1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            calls = [stub.ModelInfer.future(large, timeout=90) for _ in range(600)]
            codes = {each.exception().code().name for each in calls}
        stopped.set()
        watcher.join()
        assert codes <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, codes
        # The bound covers the budget of bytes, the buffers of the transport, and the requests that are being parsed.
        assert max(most) - before < 512 * MIB, max(most) - before
        wait_until(lambda: server.resident_bytes() - before < 32 * MIB, "its memory is freed")
        triton.generate(server.grpc, model, "Once", max_tokens=2)


@pytest.mark.parametrize("tls", [False, True], ids=["plain text", "TLS"])
def test_the_memory_of_floods_is_freed_when_clients_are_silent(tls):
    """Regression test: resets, PINGs, tokenizers and half TLS handshakes each left about 100 MB in the server."""
    # The floods take 19 MiB or more with TLS and 150 MiB without. A silent server is trimmed when it has grown by 8 MiB
    # since it was last trimmed, which may be in the middle of a flood.
    counts, limit = ({"handshakes": 60}, 14) if tls else ({"resets": 10, "pings": 4, "connections": 4, "tokenizer": 50}, 32)
    with floods.serving(tls) as server:
        assert floods.fetch_tokenizer(server) == "OK"
        before = server.resident_bytes()
        for name, count in counts.items():
            outcomes = {floods.FLOODS[name](server) for _ in range(count)}
            assert outcomes == {floods.DONE[name]}
        wait_until(lambda: server.resident_bytes() - before < limit * MIB, "the memory is freed", seconds=90)
        assert floods.fetch_tokenizer(server) == "OK"


def test_memory_that_was_in_use_when_the_heap_was_trimmed_is_freed_later():
    """Regression test: the server trimmed only if its resident memory had grown since the last trim."""
    with floods.serving(tls=True) as server:
        assert floods.fetch_tokenizer(server) == "OK"
        before = server.resident_bytes()
        # The server looks every 5 seconds, so it is trimmed while the connections are open.
        assert floods.half_handshakes(server, 300, hold_seconds=12) == "begun: 300"
        assert server.resident_bytes() - before > 16 * MIB
        wait_until(lambda: server.resident_bytes() - before < 8 * MIB, "the memory is freed", seconds=90)
