"""The router's edge: shutdowns that lose no request, many connections, and the ports."""

import collections
import contextlib
import pathlib
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

import grpc
import access_log
import pytest
import triton
from google.protobuf.descriptor_pool import DescriptorPool
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvasir_process import OPERATOR_PORTS, TINY, KvasirProcess, run, wait_until

pytestmark = pytest.mark.timeout(120)
NUM_CLIENTS = 24


def request(model, text="Once"):
    sampling = b'{"max_tokens": 4, "temperature": 0, "ignore_eos": true}'
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in (("text_input", text.encode()), ("sampling_parameters", sampling)):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    return message


def streamed(model, max_tokens, **parameters):
    message = service_pb2.ModelInferRequest(model_name=model)
    sampling = f'{{"max_tokens": {max_tokens}, "temperature": 0, "ignore_eos": true}}'
    for name, value in (("text_input", b"Once"), ("sampling_parameters", sampling.encode())):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    stream = message.inputs.add(name="stream", datatype="BOOL", shape=[1])
    stream.contents.bool_contents.append(True)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


class Clients:
    """Threads that send the next request as soon as the last is answered. Each has a channel of its own."""

    def __init__(self, targets, model, credentials=None):
        self.codes = collections.Counter()
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.credentials = credentials  # None: plain text
        self.threads = [
            threading.Thread(target=self._ask, args=(targets, model)) for _ in range(NUM_CLIENTS)
        ]

    def _ask(self, targets, model):
        target = "ipv4:" + ",".join(targets)
        # No retry policy is set. Calls that cross a GOAWAY were seen by no server, so gRPC sends them again by itself
        # unless that is disabled.
        options = [("grpc.lb_policy_name", "round_robin"),
                   ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(target, options) if self.credentials is None else \
                grpc.secure_channel(target, self.credentials, options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self.stopped.is_set():
                try:
                    stub.ModelInfer(request(model), timeout=30)
                    code = "OK"
                except grpc.RpcError as error:
                    code = f"{error.code().name}: {error.details()}"
                with self.lock:
                    self.codes[code] += 1
                if code != "OK":
                    time.sleep(0.02)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        wait_until(lambda: self.codes["OK"] > 2 * NUM_CLIENTS, "answers")
        return self

    def __exit__(self, *unused):
        self.stopped.set()
        for thread in self.threads:
            thread.join()


@contextlib.contextmanager
def worker():
    with tempfile.TemporaryDirectory() as folder:
        path = f"unix:{pathlib.Path(folder) / 'worker.sock'}"
        with KvasirProcess("worker", "--listen", path, *OPERATOR_PORTS, ports=False):
            yield path


def test_a_router_that_ends_loses_no_call_of_clients_that_know_another_router():
    flags = ["--drain-timeout", "9s", "--max-connection-age", "2s"]
    with worker() as path, KvasirProcess("router", "--workers", path, *flags) as ends, \
            KvasirProcess("router", "--workers", path, *flags) as stays:
        with Clients([ends.grpc, stays.grpc], ends.ready["model"]) as clients:
            assert ends.stop() == 0
            at_end = clients.codes["OK"]
            wait_until(lambda: clients.codes["OK"] > at_end + NUM_CLIENTS, "answers of the other router")
        assert set(clients.codes) == {"OK"}, clients.codes
        assert "aborted=0" in ends.log()


# gRPC (1.51) turns a call that arrives while its server shuts down into CANCELLED.
def test_clients_of_a_draining_server_never_receive_cancelled():
    flags = ["--drain-timeout", "3s", "--max-connection-age", "1s"]
    with KvasirProcess("serve", *flags) as server:
        with Clients([server.grpc], server.ready["model"]) as clients:
            assert server.stop() == 0
        names = {code.split(":")[0] for code in clients.codes}
        assert names == {"OK", "UNAVAILABLE"}, clients.codes


# A request may have ended while its client still has to read the output.
def test_a_drain_waits_for_a_slow_reader():
    with KvasirProcess("serve", "--drain-timeout", "60s", "--max-connection-age", "1s") as server:
        # With a window of five bytes, the client accepts no more data than it reads.
        options = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(server.grpc, options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = stub.ModelStreamInfer(iter([streamed(server.ready["model"], 200)]))
            first = next(answers)
            wait_until(lambda: server.metric("kvasir_router_inflight_requests") == 0, "the end of the request")
            server.process.send_signal(signal.SIGTERM)
            # Connections are closed after 1.6 s. If the server did not wait for the slow reader, it would end then.
            time.sleep(2.5)
            assert server.process.poll() is None
            rest = list(answers)
            assert not first.error_message
            assert rest[-1].infer_response.parameters["triton_final_response"].bool_param
            assert server.process.wait(timeout=60) == 0


def test_an_idle_client_does_not_delay_the_end_of_a_router():
    with KvasirProcess("serve", "--drain-timeout", "60s") as server:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(request(server.ready["model"]))
            answers = stub.ModelStreamInfer(iter(()))
            assert list(answers) == []
            assert server.stop() == 0


def connect(target):
    host, port = target.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def infers(server):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request(server.ready["model"]), timeout=30, wait_for_ready=True)


# gRPC's own listener (1.51, CVE-2023-4785) would never accept a connection again in this case.
def test_a_server_that_ran_out_of_descriptors_accepts_connections_again():
    with KvasirProcess("serve") as server:
        in_use = server.descriptors()
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (in_use + 20, before[1]))
        idle = [connect(server.grpc) for _ in range(60)]
        wait_until(lambda: "Too many open files" in server.log(), "the log line about descriptors")
        for each in idle:
            each.close()
        infers(server)


def test_connections_over_the_limit_are_closed():
    with KvasirProcess("serve", "--max-connections", "20") as server:
        idle = [connect(server.grpc) for _ in range(30)]
        ended = [each.recv(1) for each in idle[20:]]
        assert ended == [b""] * 10
        wait_until(lambda: "too many connections" in server.log(), "the log line")
        for each in idle:
            each.close()
        infers(server)


def health(target):
    with grpc.insecure_channel(target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        return {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}[check(b"", timeout=10)]


def healthz(server):
    try:
        with urllib.request.urlopen(f"http://{server.ready['metrics']}/healthz", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_health_port_serves_only_health_and_follows_the_state_of_the_replicas():
    with tempfile.TemporaryDirectory() as folder:
        path = f"unix:{pathlib.Path(folder) / 'worker.sock'}"
        lost = KvasirProcess("worker", "--listen", path, *OPERATOR_PORTS, ports=False)
        with lost, KvasirProcess("router", "--workers", path) as router:
            assert health(router.health) == health(lost.health) == "SERVING"
            assert healthz(router) == healthz(lost) == 200
            text = run("drain", "--endpoint", router.health, check=False).stderr
            assert "cannot be drained" in text
            lost.kill()
            wait_until(lambda: health(router.health) == "NOT_SERVING", "no replica")
            assert healthz(router) == 503
            wait_until(lambda: f"replica worker={path} state=lost" in router.log(), "the log line")


# Regression test: sixty-four idle connections blocked every probe for five minutes.
def test_idle_connections_do_not_block_probes_of_the_health_port():
    with KvasirProcess("serve") as server:
        silent = [connect(server.health) for _ in range(32)]
        idle = [grpc.insecure_channel(server.health, [("grpc.use_local_subchannel_pool", 1)])
                for _ in range(32)]
        for channel in idle:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)

        def answered():
            try:
                return health(server.health) == "SERVING"
            except grpc.RpcError:
                return False

        assert answered()
        # A flood of new connections does not block probes either.
        for _ in range(10):
            silent += [connect(server.health) for _ in range(20)]
            assert answered()
        for each in silent + idle:
            each.close()


def with_files(files):
    """A command prefix. The command after it sees other files at these paths ({path: file}). Skips if this machine
    cannot do that."""
    mounts = "; ".join(f'mount --bind "{file}" {path}' for path, file in files.items())
    command = ["unshare", "--mount", "sh", "-euc", f'mount --make-rprivate /; {mounts}; exec "$@"', "sh"]
    seen = subprocess.run([*command, "cat", *files], capture_output=True, text=True, timeout=60)
    if seen.stdout != "".join(file.read_text() for file in files.values()):
        pytest.skip(f"{', '.join(files)} cannot be replaced here: {seen.stderr.strip()}")
    return command


# Only dns:/// makes each address a worker. Otherwise the name is one worker, and gRPC chooses one of its addresses.
def test_a_worker_name_with_several_addresses_causes_a_warning(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost one\n127.0.0.1 pods\n127.0.0.2 pods\n")
    router = KvasirProcess("router", "--workers", "pods:9,one:9", "--insecure", "--start-timeout", "1s")
    router.args = [*with_files({"/etc/hosts": hosts}), *router.args]
    with router:
        wait_until(lambda: "several addresses" in router.log(), "the log line")
        (line,) = [line for line in router.log().splitlines() if "several addresses" in line]
        assert "worker=pods:9 addresses=2 want=dns:///pods:9" in line


# Waiting for the system's resolver would take two minutes.
@pytest.mark.parametrize("entry", ["pods.example", "dns:///pods.example"])
def test_a_router_that_ends_does_not_wait_for_a_resolver(entry, tmp_path):
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.77\noptions timeout:30 attempts:5\n")
    sources = tmp_path / "nsswitch.conf"
    sources.write_text("hosts: files dns\n")
    files = with_files({"/etc/resolv.conf": resolver, "/etc/nsswitch.conf": sources})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        try:
            deaf.bind(("127.0.0.77", 53))
        except OSError as error:
            pytest.skip(f"no name server can listen on this machine: {error}")
        router = KvasirProcess("router", "--workers", f"{entry}:9", "--insecure", "--start-timeout", "1s")
        router.args = [*files, *router.args]
        with router:
            # The name server was asked. If the end waited for the system's resolver, it would take too long.
            deaf.settimeout(20)
            assert b"pods" in deaf.recv(512)
            assert router.stop() == 0


def test_the_admin_port_stays_on_loopback_when_the_other_ports_are_open():
    with tempfile.TemporaryDirectory() as folder:
        admin = f"unix:{folder}/admin.sock"
        with KvasirProcess("serve", "--host", "0.0.0.0", "--insecure") as everywhere, \
                KvasirProcess("serve", "--admin-host", admin) as on_unix:
            assert everywhere.grpc.startswith("0.0.0.0:")
            assert everywhere.health.startswith("0.0.0.0:")
            assert everywhere.admin.startswith("127.0.0.1:")
            assert on_unix.admin == admin
            assert pathlib.Path(folder, "admin.sock").stat().st_mode & 0o777 == 0o600
            assert run("drain", "--endpoint", admin).returncode == 0


def test_a_connection_age_as_long_as_the_drain_timeout_is_refused():
    text = run("serve", "--model", TINY, "--drain-timeout", "5s", "--max-connection-age", "5s",
               "--grpc-port", "0", *OPERATOR_PORTS, check=False).stderr
    assert "--max-connection-age 5s" in text and "--drain-timeout 5s" in text


# Regression test: sixty thousand names in a megabyte blocked every other client for ten seconds.
def test_a_request_with_many_tensors_delays_no_other_client():
    with KvasirProcess("serve") as server:
        many = service_pb2.ModelInferRequest(model_name=server.ready["model"])
        for i in range(30000):
            many.inputs.add(name=f"t{i}", datatype="BOOL", shape=[0])
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            refused = [stub.ModelInfer.future(many, timeout=60) for _ in range(4)]
            stub.ModelInfer(request(server.ready["model"]), timeout=5)
            for each in refused:
                assert each.exception().code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "inputs: want at most 64, have 30000" in each.exception().details()


# Regression test: six hundred prompts of a megabyte at once took 1.3 GB, and half of it stayed allocated.
def test_all_requests_share_one_budget_of_bytes():
    flags = ["--max-model-len", "1024", "--request-bytes", "1MiB", "--drain-timeout", "9s"]
    with KvasirProcess("serve", *flags) as server:
        large = request(server.ready["model"], text="a " * 100_000)
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            calls = [stub.ModelInfer.future(large, timeout=60) for _ in range(64)]
            codes = collections.Counter(each.exception().code().name for each in calls)
            reasons = {each.exception().details() for each in calls}
            # Some requests are read, and refused because of their length.
            assert set(codes) == {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, codes
            assert any("--request-bytes" in reason for reason in reasons), reasons
            wait_until(lambda: stub.ModelInfer(request(server.ready["model"]), timeout=30), "room for a request in the budget")


def test_a_server_with_a_drain_timeout_of_0_still_answers_requests():
    with KvasirProcess("serve", "--drain-timeout", "0s") as server:
        triton.generate(server.grpc, server.ready["model"], "A ship", max_tokens=6)
    text = run("serve", "--model", TINY, "--max-connection-age", "10ms", "--grpc-port", "0",
               *OPERATOR_PORTS, check=False).stderr
    assert "--max-connection-age 10ms must be at least 1s" in text


@pytest.mark.parametrize("samples", [1, 3])
def test_an_answer_in_one_message_survives_the_loss_of_its_worker(samples, tmp_path):
    """Another worker continues it. Several samples are generated again, with the same seed."""
    sockets = [f"unix:{tmp_path}/{name}" for name in "ab"]
    with contextlib.ExitStack() as stack:
        lost, other = [stack.enter_context(
            KvasirProcess("worker", "--listen", address, *OPERATOR_PORTS, ports=False)) for address in sockets]
        router = stack.enter_context(KvasirProcess("router", "--workers", ",".join(sockets)))
        channel = stack.enter_context(grpc.insecure_channel(router.grpc))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages = []
        for seed in range(4):
            message = service_pb2.ModelInferRequest(model_name=router.ready["model"])
            sampling = f'{{"n": {samples}, "max_tokens": 150, "temperature": 1, "seed": {seed}, "ignore_eos": true}}'
            for name, value in (("text_input", b"Once"), ("sampling_parameters", sampling.encode())):
                message.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value)
            messages.append(message)
        expected = [stub.ModelInfer(message, timeout=60).raw_output_contents for message in messages]
        generated = lost.metric("kvasir_generation_tokens_total")
        calls = [stub.ModelInfer.future(message, timeout=60) for message in messages]
        wait_until(lambda: lost.metric("kvasir_generation_tokens_total") > generated, "tokens of the worker")
        lost.kill()
        assert [call.result().raw_output_contents for call in calls] == expected
        retries = [value for (name, _), value in router.metrics().items() if name == "kvasir_router_retries_total"]
        assert sum(retries) > 0
        assert other.process.poll() is None


SERVICES = {
    "inference.GRPCInferenceService", "vllm.Control", "vllm.Inference",
    "vllm.grpc.engine.VllmEngine",
}


def reflection(channel):
    """The reflection database that grpcurl asks for."""
    name = "grpc_reflection.v1alpha.proto_reflection_descriptor_database"
    return pytest.importorskip(name).ProtoReflectionDescriptorDatabase(channel)


def test_reflection_lists_the_services_and_describes_their_messages():
    with KvasirProcess("serve") as server, grpc.insecure_channel(server.grpc) as channel:
        database = reflection(channel)
        assert set(database.get_services()) >= SERVICES
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("vllm.Inference")
        assert service.methods_by_name["GenerateStream"].server_streaming
        request = service.methods_by_name["GenerateStream"].input_type
        assert request.fields_by_name["token_ids"].number == 4
        # The reflection calls above do not delay the end.
        assert server.stop() == 0


def services_of(target):
    with grpc.insecure_channel(target) as channel:
        return set(reflection(channel).get_services())


@pytest.mark.parametrize("flags", [["--reflection", "off"], ["--host", "0.0.0.0", "--insecure"]])
def test_reflection_is_on_only_if_it_is_enabled_on_a_loopback_host(flags):
    with KvasirProcess("serve", *flags) as server:
        for target in (server.grpc, server.admin, server.health):
            with pytest.raises(grpc.RpcError) as caught:
                services_of(target)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED, target


ENDLESS = ["--max-num-seqs", "1", "--kv-plan", "dense-8bit", "--eviction", "h2o", "--eviction-budget",
           "256", "--eviction-rolling", "--max-model-len", str(1 << 24)]


def test_a_request_of_higher_priority_overtakes_waiting_requests():
    with KvasirProcess("serve", *ENDLESS) as server:
        model = server.ready["model"]
        with grpc.insecure_channel(server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            runs = stub.ModelStreamInfer(iter([streamed(model, 1 << 23)]))
            next(runs)
            hasty = stub.ModelStreamInfer(iter([streamed(model, 1, timeout=50_000)]))
            (refused,) = list(hasty)
            assert "DEADLINE_EXCEEDED" in refused.error_message or "wait" in refused.error_message
            # The server runs one request at a time, so the first one that runs is the one of higher priority.
            calls = {}
            for waiting, (priority, tokens) in enumerate({3: 1, 1: 1 << 23}.items(), start=1):
                calls[priority] = stub.ModelStreamInfer(iter([streamed(model, tokens, priority=priority)]))
                wait_until(lambda: server.metric("kvasir_num_requests_waiting") == waiting, "a request that waits")
            runs.cancel()
            next(calls[1])
            wait_until(lambda: server.metric("kvasir_num_requests_waiting") == 1, "the other request still waits")
            calls[1].cancel()
            assert not [each.error_message for each in calls[3] if each.error_message]


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def endless_header_block(target, most):
    """Sends HEADERS without END_HEADERS, then CONTINUATION frames, until the server closes. Returns the number of
    bytes sent."""
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 0, 1, b""))
        # Each header is small, but gRPC keeps the whole buffer into which it was read as long as the header.
        headers = (b"\x00\x01a\x64" + b"v" * 100) * 100
        batch = frame(9, 0, 1, headers) * 16
        sent = 0
        try:
            while sent < most:
                client.sendall(batch)
                sent += len(batch)
        except OSError:
            pass
        return sent


# Regression test: 200 MB of headers took several hundred megabytes, or gigabytes in small packets, before any
# credential was checked.
def test_an_endless_header_block_takes_no_memory_and_closes_only_its_connection():
    most = 200 << 20
    with KvasirProcess("serve") as server, grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request(server.ready["model"]), timeout=30)
        before = server.resident_bytes()
        targets = (server.grpc, server.health, server.admin)
        for target in targets:
            assert endless_header_block(target, most) < most, target
        assert server.resident_bytes() < before + (32 << 20)
        assert server.metric("kvasir_header_blocks_refused_total") == len(targets)
        assert "its header block is too long" in server.log()
        stub.ModelInfer(request(server.ready["model"]), timeout=30)


def test_http_requests_that_are_only_half_sent_do_not_delay_a_metrics_scrape():
    with KvasirProcess("serve") as server, contextlib.ExitStack() as stack:
        host, port = server.ready["metrics"].rsplit(":", 1)
        for _ in range(200):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert server.metric("exposer_scrapes_total") >= 0


def test_requests_that_end_at_their_deadline_are_logged_and_counted_as_such():
    with KvasirProcess("serve", "--log-format", "json", *ENDLESS) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(6):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.ModelStreamInfer(iter([streamed(server.ready["model"], 1 << 20)]), timeout=0.3))
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: len(access_log.lines(server)) == 6, "the lines of all requests")
        assert {(line["finish_reason"], line["status"]) for line in access_log.lines(server)} == {("deadline", "DEADLINE_EXCEEDED")}
        assert server.metric("kvasir_router_requests_total", facade="kserve", finish_reason="deadline") == 6
