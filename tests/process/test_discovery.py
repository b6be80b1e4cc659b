"""A router finds workers in a file or by DNS, and follows the list while clients call it."""

import contextlib
import socket

import grpc
import pytest
import triton

from certificates import Authority
from kvasir_process import OPERATOR_PORTS, KvasirProcess, run, wait_until
from test_deploy import Streams
from test_edge import Clients, health, healthz, request, with_files

pytestmark = pytest.mark.timeout(300)
REFRESH = ["--workers-refresh", "200ms", "--insecure"]


def worker(listen, *flags):
    return KvasirProcess("worker", "--listen", listen, *OPERATOR_PORTS, *flags, ports=False)


def replaced(path, lines):
    """Replaces the file at once, so that no reader sees a part of it."""
    part = path.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n")
    part.rename(path)


def running(process):
    return process.metric("kvasir_num_requests_running")


def test_workers_of_a_file_come_and_go_and_no_request_fails(tmp_path):
    workers = tmp_path / "workers"
    replaced(workers, ["# none yet"])
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in "abc"]
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(
            KvasirProcess("router", "--workers", f"file:{workers}", "--start-timeout", "0s", *REFRESH))
        assert health(router.health) == "NOT_SERVING" and healthz(router) == 503
        assert router.metric("kvasir_router_replicas", state="ready") == 0
        channel = stack.enter_context(grpc.insecure_channel(router.grpc))
        for method, message in (
            ("inference.GRPCInferenceService/ModelInfer", request("tiny").SerializeToString()),
            ("vllm.grpc.engine.VllmEngine/GetModelInfo", b""),
            ("vllm.Control/GetServerInfo", b""),
        ):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"/{method}")(message, timeout=20)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "no worker" in error.value.details() or "no model is served yet" in error.value.details()

        a, b, c = (stack.enter_context(worker(each)) for each in sockets)
        replaced(workers, sockets[:2])
        wait_until(lambda: health(router.health) == "SERVING", "a ready router")
        assert healthz(router) == 200
        wait_until(lambda: router.metric("kvasir_router_replicas", state="ready") == 2, "two replicas")
        with Clients([router.grpc], "tiny") as clients, Streams(router.grpc, "tiny") as streams:
            replaced(workers, sockets)
            wait_until(lambda: running(c) > 0, "requests at the third worker")
            # The first worker is removed, and later ended. Its streams finish there.
            replaced(workers, sockets[1:])
            wait_until(lambda: "worker removed" in router.log(), "the log line")
            wait_until(lambda: running(a) == 0, "the end of its streams")
            unary, whole = clients.codes["OK"], streams.whole
            assert a.stop() == 0 and "aborted=0" in a.log()
            wait_until(lambda: clients.codes["OK"] > unary + 24 and streams.whole > whole + 4, "answers of the others")
            # A worker that dies is removed from the list afterwards; it returns under the same address.
            b.kill()
            replaced(workers, sockets[2:])
            wait_until(lambda: router.metric("kvasir_router_replicas", state="ready") == 1, "one replica")
            again = stack.enter_context(worker(sockets[1]))
            replaced(workers, sockets[1:])
            wait_until(lambda: running(again) > 0, "requests at the worker that returned")
        assert set(clients.codes) == {"OK"}, clients.codes
        assert streams.failed == []
        assert router.metric("kvasir_router_replicas", state="lost") == 0


@contextlib.contextmanager
def router_with_hosts(hosts, *flags):
    """A router that sees this file as /etc/hosts, and asks no name server."""
    sources = hosts.with_suffix(".sources")
    sources.write_text("hosts: files\n")
    router = KvasirProcess("router", "--start-timeout", "0s", *REFRESH, *flags)
    router.args = [*with_files({"/etc/hosts": hosts, "/etc/nsswitch.conf": sources}), *router.args]
    with router:
        yield router


def test_each_address_of_a_name_is_a_worker(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(worker("127.0.0.2:0", "--insecure"))
        port = one.grpc.rsplit(":", 1)[1]
        other = stack.enter_context(worker(f"127.0.0.3:{port}", "--insecure"))
        router = stack.enter_context(router_with_hosts(hosts, "--workers", f"dns:///pods:{port}"))
        assert health(router.health) == "NOT_SERVING"
        assert f"dns:///pods:{port} has no workers" in router.log()
        # The file is changed in place, because it is mounted.
        hosts.write_text("127.0.0.2 pods\n127.0.0.3 pods\n")
        wait_until(lambda: router.metric("kvasir_router_replicas", state="ready") == 2, "both replicas")
        with Streams(router.grpc, "tiny") as streams:
            for each in (one, other):
                wait_until(lambda: running(each) > 0, "requests at every address")
            hosts.write_text("127.0.0.3 pods\n")
            wait_until(lambda: f"worker removed worker={one.grpc}" in router.log(), "the removal")
            wait_until(lambda: running(one) == 0, "the end of its streams")
            whole = streams.whole
            wait_until(lambda: streams.whole > whole + 4, "answers of the other worker")
        assert streams.failed == []


def test_a_worker_may_have_an_ipv6_address():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with worker("::1:0", "--insecure") as one, KvasirProcess("router", "--workers", f"dns:///{one.grpc}", *REFRESH) as router:
        assert one.grpc.startswith("[::1]:")
        assert health(router.health) == "SERVING"


def test_a_certificate_needs_the_name_of_the_service_and_not_the_address(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.sign("worker", "DNS:pods")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 pods others\n")
    with worker("127.0.0.1:0", "--tls-cert", pair, "--tls-key", pair) as one:
        port = one.grpc.rsplit(":", 1)[1]
        with router_with_hosts(hosts, "--workers", f"dns:///pods:{port}", "--worker-tls-ca", authority.ca) as router:
            wait_until(lambda: health(router.health) == "SERVING", "a ready router")
            assert run("generate", "--endpoint", router.grpc, "--prompt", "Once", "--max-tokens", "2").stdout
        with router_with_hosts(hosts, "--workers", f"dns:///others:{port}", "--worker-tls-ca", authority.ca) as router:
            wait_until(lambda: "'others' was dialled" in router.log(), "the refused name")
            assert health(router.health) == "NOT_SERVING"
