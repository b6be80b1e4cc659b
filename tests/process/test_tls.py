"""TLS between clients, routers, workers and operators: who is let in, and certificates that change under load."""

import contextlib
import itertools
import os
import re
import socket
import ssl
import time

import grpc
import pytest
import triton
import tritonclient.grpc as grpcclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from certificates import Authority
from kvasir_process import OPERATOR_PORTS, TINY, KvasirProcess, run, wait_until
from test_edge import Clients

pytestmark = pytest.mark.timeout(240)
HERE = "IP:127.0.0.1"
WORKER = "URI:spiffe://kvasir/worker"
CAUSES = ["no_certificate", "certificate", "names", "peer", "no_tls", "version", "other"]


@pytest.fixture
def authority(tmp_path):
    made = Authority(tmp_path)
    made.sign("worker", WORKER, "DNS:worker.kvasir")
    made.sign("router", HERE, "DNS:router.kvasir")
    made.sign("client", "DNS:client.kvasir")
    made.sign("operator", "DNS:operator.kvasir")
    return made


def pair_of(authority, name):
    return authority.folder / f"{name}.pem"


def worker_flags(authority, certificate=None, key=None):
    return ["--listen", "127.0.0.1:0", *OPERATOR_PORTS, "--tls-cert", certificate or pair_of(authority, "worker"),
            "--tls-key", key or pair_of(authority, "worker"), "--tls-client-ca", authority.ca,
            "--tls-client-names", "router.kvasir"]


@contextlib.contextmanager
def fleet(authority, *flags, router_files=None, worker_files=()):
    """A worker that accepts only the router, and a router that accepts only that worker."""
    admin = ["--admin-client-ca", authority.ca, "--admin-client-names", "operator.kvasir"]
    certificate, key = router_files or (pair_of(authority, "router"), pair_of(authority, "router"))
    with KvasirProcess("worker", *worker_flags(authority, *worker_files), ports=False) as worker, KvasirProcess(
        "router", "--workers", worker.grpc, "--tls-cert", certificate, "--tls-key", key, "--tls-client-ca",
        authority.ca, *to_worker(authority), *admin, *flags,
    ) as router:
        yield worker, router


def to_worker(authority, names=WORKER.removeprefix("URI:")):
    return ["--worker-tls-ca", authority.ca, "--worker-tls-cert", pair_of(authority, "router"), "--worker-tls-key",
            pair_of(authority, "router"), "--worker-tls-names", names]


def credentials(authority, name=None):
    pair = pair_of(authority, name).read_bytes() if name else None
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), pair, pair)


def channel_to(target, with_credentials, name=None):
    """A channel with a connection of its own: gRPC retries a failed connection only after a second, and every call
    that shares it fails until then. `name`: a name in the server's certificate, if it is not the host."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if not with_credentials:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, with_credentials, options + [("grpc.ssl_target_name_override", name)] * bool(name))


def live(target, with_credentials, name=None):
    """The status and details of a call. A worker has no such service: the clients that it accepts get UNIMPLEMENTED."""
    with channel_to(target, with_credentials, name) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20)
            return grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            return error.code(), error.details()


def refused_handshakes(process):
    return {cause: process.metric("kvasir_tls_handshakes_refused_total", cause=cause) for cause in CAUSES}


def refuses(process, with_credentials, cause, name=None):
    """Asserts that clients get UNAVAILABLE, that only `cause` is counted, and that the log names it only once."""
    before = refused_handshakes(process)
    for _ in range(2):
        code, _ = live(process.grpc, with_credentials, name)
        assert code == grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: refused_handshakes(process)[cause] >= before[cause] + 2, f"{cause} is counted")
    after = refused_handshakes(process)
    assert {each for each in CAUSES if after[each] != before[each]} == {cause}
    assert process.log().count(f"TLS handshake refused cause={cause} ") == 1, process.log()


def tls_flags(authority, name):
    return ["--ca", authority.ca, "--cert", pair_of(authority, name), "--key", pair_of(authority, name)]


def test_router_and_worker_accept_only_certificates_with_the_names_they_list(authority, tmp_path_factory, monkeypatch):
    # Handshakes are counted from the log lines of gRPC. This variable must not switch them off.
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    stranger.sign("client", "DNS:client.kvasir")
    with fleet(authority) as (worker, router):
        client = grpcclient.InferenceServerClient(router.grpc, **authority.clients("client"))
        model = router.ready["model"]
        answer = client.infer(model, triton.text_inputs("Once", stream=False, max_tokens=4, ignore_eos=True))
        assert answer.as_numpy("text_output").size == 1
        client.close()

        with pytest.raises(InferenceServerException) as error:
            grpcclient.InferenceServerClient(router.grpc).is_server_live(client_timeout=20)
        assert "UNAVAILABLE" in error.value.status(), error.value
        refuses(router, None, "no_tls")
        refuses(router, credentials(authority), "no_certificate")
        theirs = pair_of(stranger, "client").read_bytes()
        refuses(router, grpc.ssl_channel_credentials(authority.ca.read_bytes(), theirs, theirs), "certificate")
        code, why = live(router.grpc, credentials(stranger, "client"))  # does not trust the router
        assert code == grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in why
        assert live(router.grpc, credentials(authority, "client"))[0] == grpc.StatusCode.OK

        # The client's certificate is of the right authority, but it does not have the router's name.
        code, why = live(worker.grpc, credentials(authority, "router"), "worker.kvasir")
        assert code == grpc.StatusCode.UNIMPLEMENTED, why
        refuses(worker, credentials(authority, "client"), "names", "worker.kvasir")
        assert "listener: the certificate has the names [client.kvasir], --tls-client-names has [router.kvasir]" \
            in worker.log()

        generate = ["generate", "--endpoint", router.grpc, "--prompt", "Once", "--max-tokens", "4"]
        assert run(*generate, *tls_flags(authority, "client")).stdout.startswith("Once")
        before = refused_handshakes(router)["no_tls"]
        assert run(*generate, check=False).returncode == 3
        assert refused_handshakes(router)["no_tls"] > before

        before = refused_handshakes(router)["names"]
        assert run("drain", "--endpoint", router.admin, *tls_flags(authority, "client"), check=False).returncode != 0
        assert refused_handshakes(router)["names"] > before
        assert "admin: the certificate has the names [client.kvasir], --admin-client-names has [operator.kvasir]" \
            in router.log()
        assert router.process.poll() is None
        assert run("drain", "--endpoint", router.admin, *tls_flags(authority, "operator")).returncode == 0
        assert router.process.wait(timeout=60) == 0


def test_a_router_names_the_worker_that_is_not_allowed_and_the_names_that_it_has(authority):
    """Regression test: the router reported only "Deadline Exceeded"."""
    has = "spiffe://kvasir/worker"
    with KvasirProcess("worker", *worker_flags(authority), ports=False) as worker:
        with KvasirProcess("router", "--workers", worker.grpc, "--start-timeout", "0s",
                           *to_worker(authority, "spiffe://kvasir/wroker")) as misspelt:
            wait_until(lambda: re.search(
                "not ready: no worker can answer.*none of the certificate's names is allowed by --worker-tls-names.*"
                + re.escape(has), misspelt.log()), "the log line")
            assert f"workers: the certificate has the names [worker.kvasir, {has}], --worker-tls-names has " \
                "[spiffe://kvasir/wroker]" in misspelt.log()

        # Only one of two workers has an allowed name. The log names the other; a client only reads that no replica is ready.
        authority.sign("other", "URI:spiffe://kvasir/other")
        other_flags = worker_flags(authority, pair_of(authority, "other"), pair_of(authority, "other"))
        with KvasirProcess("worker", *other_flags, ports=False) as other, KvasirProcess(
            "router", "--workers", f"{worker.grpc},{other.grpc}", "--queue-timeout", "1s", *to_worker(authority),
        ) as router:
            assert "the certificate has the names [spiffe://kvasir/other]" in router.log()
            assert refused_handshakes(router)["names"] > 0
            worker.kill()

            def refusal():
                client = grpcclient.InferenceServerClient(router.grpc)
                with pytest.raises(InferenceServerException) as error:
                    client.infer(router.ready["model"], triton.text_inputs("Once", stream=False, max_tokens=4))
                client.close()
                return error.value.message()

            wait_until(lambda: refusal().endswith("no replica is ready"), "no replica")


def shown(target):
    """The certificate that `target` shows to a new connection, as bytes."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as plain, context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True)


class Files:
    """`tls.key` and `tls.crt` in one folder. They are links, as in a secret that Kubernetes mounts."""

    def __init__(self, authority, folder, *names):
        self.authority, self.folder, self.names, self.version = authority, folder, names, 0
        folder.mkdir()
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.pair = self.certificate, self.key
        self.swap()
        for each in self.pair:
            each.symlink_to(f"..data/{each.name}")

    def made(self):
        """The texts of a new key and of its certificate."""
        both = self.authority.sign("made", *self.names).read_text()
        at = both.index("-----BEGIN CERTIFICATE")
        return both[:at], both[at:]

    # Each of the following methods replaces the files in another way. It yields a cause whenever a process must refuse
    # the files in their present state.

    def swap(self):
        """Replaces both at one moment, by a link to another folder."""
        self.version += 1
        into = self.folder / f"..{self.version}"
        into.mkdir()
        key, certificate = self.made()
        (into / "tls.key").write_text(key)
        (into / "tls.crt").write_text(certificate)
        link = self.folder / "..new"
        link.symlink_to(into.name)
        os.replace(link, self.folder / "..data")
        return ()

    def replace(self):
        """Replaces one after the other, each by another file."""
        for file, text in zip((self.key, self.certificate), self.made()):
            part = file.with_suffix(".part")
            part.write_text(text)
            os.replace(part, file)
        return ()

    def write(self):
        """Writes in place, the key long before the certificate. Each file is empty for a while."""
        key, certificate = self.made()
        self.key.write_text("")
        yield f"--tls-key {self.key}: has no private key"
        self.key.write_text(key)
        yield f"--tls-key {self.key}: is not the key of --tls-cert"
        self.certificate.write_text("")
        yield f"--tls-cert {self.certificate}: has no certificate in PEM"
        self.certificate.write_text(certificate)


@pytest.mark.parametrize("way", ["swap", "replace", "write"])
def test_certificates_that_are_replaced_under_load_lose_no_call(authority, tmp_path, way):
    of_router = Files(authority, tmp_path / "router", HERE, "DNS:router.kvasir")
    of_worker = Files(authority, tmp_path / "worker", WORKER)
    with fleet(authority, "--max-connection-age", "1s", router_files=of_router.pair,
               worker_files=of_worker.pair) as (worker, router):
        targets = [router.grpc, worker.grpc]
        with Clients([router.grpc], router.ready["model"], credentials(authority, "client")) as clients:
            before = [shown(target) for target in targets]
            for causes in itertools.zip_longest(getattr(of_router, way)(), getattr(of_worker, way)()):
                for process, cause in zip((router, worker), causes):
                    wait_until(lambda: cause in process.log(), cause)
            wait_until(lambda: all(shown(t) != b for t, b in zip(targets, before)), "new certificates", 60)
            # Connections that were opened with the old certificates are asked to close within 1.1 s.
            time.sleep(1.5)
            after = clients.codes["OK"]
            wait_until(lambda: clients.codes["OK"] > after + 50, "answers with the new certificates")
        assert set(clients.codes) == {"OK"}, clients.codes
        for process in (router, worker):
            assert process.metric("kvasir_tls_reloads_total", role="listener", result="ok") == 1
            assert process.metric("kvasir_tls_files_refused", role="listener") == 0
            refused = process.metric("kvasir_tls_reloads_total", role="listener", result="refused")
            assert process.log().count("TLS files refused, the old ones stay in use role=listener ") == refused
            if way == "swap":
                assert refused == 0


def test_a_changed_file_of_certificate_authorities_decides_which_clients_are_accepted(
        authority, tmp_path, tmp_path_factory):
    """First the file has the old authority, then both, then only the new one."""
    new = Authority(tmp_path_factory.mktemp("new"))
    theirs = new.sign("client", "DNS:client.kvasir").read_bytes()
    of_new = grpc.ssl_channel_credentials(authority.ca.read_bytes(), theirs, theirs)
    ca = tmp_path / "clients.pem"
    ca.write_text(authority.ca.read_text())
    flags = ["--tls-cert", pair_of(authority, "router"), "--tls-key", pair_of(authority, "router"), "--tls-client-ca", ca]
    with KvasirProcess("serve", *flags) as server:
        refuses(server, of_new, "certificate")
        ca.write_text(authority.ca.read_text() + new.ca.read_text())
        wait_until(lambda: live(server.grpc, of_new)[0] == grpc.StatusCode.OK, "the new authority is accepted")
        assert live(server.grpc, credentials(authority, "client"))[0] == grpc.StatusCode.OK
        ca.write_text(new.ca.read_text())
        wait_until(lambda: live(server.grpc, credentials(authority, "client"))[0] != grpc.StatusCode.OK,
                   "the old authority is refused")
        refuses(server, credentials(authority, "client"), "certificate")
        assert live(server.grpc, of_new)[0] == grpc.StatusCode.OK


def test_connections_without_tls_to_other_machines_need_a_flag():
    at = ["--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS]
    for command, flags, named in (
        ("serve", ["--host", "0.0.0.0"], "--host 0.0.0.0"),
        ("worker", ["--listen", "0.0.0.0:0"], "--listen 0.0.0.0"),
        ("router", ["--workers", "10.0.0.1:8100"], "10.0.0.1:8100"),
    ):
        rest = at if command != "worker" else ["--model", TINY, *OPERATOR_PORTS]
        done = run(command, *rest, *flags, check=False)
        assert done.returncode != 0
        assert named in done.stderr and "--insecure" in done.stderr and "tls-c" in done.stderr, done.stderr


def test_the_flag_for_connections_without_tls_does_not_admit_every_client(authority):
    at = ["--model", TINY, *OPERATOR_PORTS]
    done = run("serve", *at, "--grpc-port", "0", "--admin-host", "0.0.0.0", "--insecure", check=False)
    assert done.returncode != 0
    assert "--admin-host 0.0.0.0" in done.stderr and "--admin-client-ca" in done.stderr, done.stderr
    own = ["--tls-cert", pair_of(authority, "worker"), "--tls-key", pair_of(authority, "worker")]
    done = run("worker", *at, "--listen", "0.0.0.0:0", *own, check=False)
    assert done.returncode != 0
    assert "--listen 0.0.0.0" in done.stderr and "--tls-any-client" in done.stderr, done.stderr
    with KvasirProcess("worker", "--listen", "0.0.0.0:0", *OPERATOR_PORTS, *own, "--tls-any-client", ports=False) as worker:
        at_worker = worker.grpc.replace("0.0.0.0", "127.0.0.1")
        assert live(at_worker, credentials(authority), "worker.kvasir")[0] == grpc.StatusCode.UNIMPLEMENTED


def test_the_error_for_an_empty_tls_flag_or_variable_names_it(authority):
    own = pair_of(authority, "router")
    flags = ["--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS, "--tls-cert", own, "--tls-key", own]
    done = run("serve", *flags, "--tls-client-ca", "", check=False)
    assert done.returncode == 2 and "--tls-client-ca: the value is empty" in done.stderr, done.stderr
    done = run("serve", *flags, check=False, env={**os.environ, "KVASIR_TLS_CLIENT_CA": ""})
    assert done.returncode == 2 and "KVASIR_TLS_CLIENT_CA: is set and empty" in done.stderr, done.stderr


def test_the_start_fails_with_the_name_of_a_key_that_does_not_match_its_certificate(authority):
    done = run("serve", "--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS, "--tls-cert", pair_of(authority, "router"),
               "--tls-key", pair_of(authority, "client"), check=False)
    assert done.returncode != 0
    assert f"--tls-key {pair_of(authority, 'client')}: is not the key of --tls-cert" in done.stderr


def test_commands_ignore_the_http_proxy_variables_of_the_environment(authority):
    own = pair_of(authority, "router")
    # Nothing listens at that port.
    proxied = {**os.environ, "http_proxy": "http://127.0.0.1:1", "grpc_proxy": "http://127.0.0.1:1"}
    with KvasirProcess("serve", "--tls-cert", own, "--tls-key", own) as server:
        done = run("generate", "--endpoint", server.grpc, "--prompt", "Once", "--max-tokens", "2", "--ca", authority.ca,
                   env=proxied)
        assert done.stdout.startswith("Once")
        assert run("drain", "--endpoint", server.admin, env=proxied).returncode == 0
        assert server.process.wait(timeout=60) == 0


def test_the_health_and_the_metrics_port_can_listen_on_hosts_of_their_own():
    def open_at(host, address):
        with socket.socket() as probe:
            return probe.connect_ex((host, int(address.rsplit(":", 1)[1]))) == 0

    with KvasirProcess("serve", "--host", "127.0.0.2", "--metrics-host", "127.0.0.3", "--health-host", "127.0.0.4") as server:
        for name, own in (("grpc", "127.0.0.2"), ("metrics", "127.0.0.3"), ("health", "127.0.0.4"), ("admin", "127.0.0.1")):
            address = server.ready[name]
            assert address.startswith(own + ":")
            assert [host for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4") if open_at(host, address)] == [own]
    with KvasirProcess("serve", "--host", "127.0.0.2") as server:
        assert server.ready["metrics"].startswith("127.0.0.2:") and server.ready["health"].startswith("127.0.0.2:")
    for flag in ("--metrics-host", "--health-host"):
        done = run("serve", "--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS, flag, "192.0.2.1", check=False)
        assert done.returncode != 0 and f"use {flag} to choose a host other than 192.0.2.1" in done.stderr, done.stderr


def probe(target, service="", with_credentials=None, seconds=20):
    """Does what grpc_health_probe does and returns its exit code: it dials, waits for a connection, calls Check and
    reads the status."""
    connected, failed, unhealthy = 2, 3, 4
    with channel_to(target, with_credentials) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return connected
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=seconds,
                metadata=[("user-agent", "grpc_health_probe")])
        except grpc.RpcError:
            return failed
        return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else unhealthy


def test_health_is_reported_to_a_real_client_and_to_the_probe_of_kubernetes(authority):
    facade = "inference.GRPCInferenceService"
    with fleet(authority) as (worker, router):
        by_tls = credentials(authority, "client")
        # The health port has no TLS and serves only the health of the process.
        for process in (router, worker):
            assert probe(process.health) == 0
            assert probe(process.health, "nobody") == 3
            assert probe(process.health, with_credentials=by_tls, seconds=1) == 2
        assert probe(router.grpc, with_credentials=by_tls) == 0
        assert probe(router.grpc, facade, by_tls) == 0
        assert probe(router.grpc, "nobody", by_tls) == 3
        for with_credentials, cause in ((None, "no_tls"), (credentials(authority), "no_certificate")):
            assert probe(router.grpc, with_credentials=with_credentials, seconds=1) == 2
            wait_until(lambda: refused_handshakes(router)[cause] > 0, f"{cause} is counted")
        with channel_to(router.grpc, by_tls) as channel:
            seen = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=facade), timeout=60)
            assert next(seen).status == health_pb2.HealthCheckResponse.SERVING
            worker.kill()
            assert next(seen).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # The server changes the status of one service after the other.
        wait_until(lambda: probe(router.health) == 4, "the process's health follows")
        assert probe(router.grpc, facade, by_tls) == 4
