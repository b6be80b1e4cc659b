"""TLS between clients, routers, workers and operators: who is let in, and certificates that change under load."""

import contextlib
import socket
import ssl
import time

import grpc
import pytest
import triton
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from certificates import Authority
from kvasir_process import OPERATOR_PORTS, TINY, KvasirProcess, run, wait_until
from test_edge import Clients

pytestmark = pytest.mark.timeout(120)
HERE = "IP:127.0.0.1"
WORKER = "URI:spiffe://kvasir/worker"


@pytest.fixture
def authority(tmp_path):
    made = Authority(tmp_path)
    made.sign("worker", WORKER)
    made.sign("router", HERE, "DNS:router.kvasir")
    made.sign("client", "DNS:client.kvasir")
    made.sign("operator", "DNS:operator.kvasir")
    return made


def of(authority, name):
    return authority.folder / f"{name}.pem"


@contextlib.contextmanager
def fleet(authority, *flags):
    """A worker that takes the router alone, and a router that takes that worker alone."""
    ca = authority.ca
    admin = ["--admin-client-ca", ca, "--admin-client-names", "operator.kvasir"]
    with KvasirProcess(
        "worker", "--listen", "127.0.0.1:0", *OPERATOR_PORTS, "--tls-cert", of(authority, "worker"),
        "--tls-key", of(authority, "worker"), "--tls-client-ca", ca, "--tls-client-names", "router.kvasir",
        ports=False,
    ) as worker, KvasirProcess(
        "router", "--workers", worker.grpc, "--tls-cert", of(authority, "router"),
        "--tls-key", of(authority, "router"), "--tls-client-ca", ca, *to_worker(authority), *admin, *flags,
    ) as router:
        yield worker, router


def to_worker(authority):
    return ["--worker-tls-ca", authority.ca, "--worker-tls-cert", of(authority, "router"), "--worker-tls-key",
            of(authority, "router"), "--worker-tls-names", WORKER.removeprefix("URI:")]


def credentials(authority, name=None):
    pair = of(authority, name).read_bytes() if name else None
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), pair, pair)


def refused(target, with_credentials, override=None):
    options = [("grpc.ssl_target_name_override", override)] if override else []
    channel = grpc.secure_channel(target, with_credentials, options) if with_credentials else grpc.insecure_channel(target)
    with channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20)
    return error.value.code() == grpc.StatusCode.UNAVAILABLE


def tls_flags(authority, name):
    return ["--ca", authority.ca, "--cert", of(authority, name), "--key", of(authority, name)]


def test_every_hop_takes_those_it_names_and_nobody_else(authority, tmp_path_factory):
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    stranger.sign("client", "DNS:client.kvasir")
    with fleet(authority) as (worker, router):
        own = str(of(authority, "client"))
        client = grpcclient.InferenceServerClient(
            router.grpc, ssl=True, root_certificates=str(authority.ca), private_key=own, certificate_chain=own)
        model = router.ready["model"]
        answer = client.infer(model, triton.text_inputs("Once", stream=False, max_tokens=4, ignore_eos=True))
        assert answer.as_numpy("text_output").size == 1
        client.close()
        with pytest.raises(InferenceServerException):
            grpcclient.InferenceServerClient(router.grpc).is_server_live(client_timeout=20)
        assert refused(router.grpc, credentials(authority))  # no certificate
        theirs = of(stranger, "client").read_bytes()
        assert refused(router.grpc, grpc.ssl_channel_credentials(authority.ca.read_bytes(), theirs, theirs))
        assert refused(router.grpc, credentials(stranger, "client"))  # does not believe the router

        # A client's certificate is of the right authority, but no router's.
        at_worker = worker.grpc
        assert refused(at_worker, credentials(authority, "client"))
        assert refused(at_worker, None)
        text = run("router", "--workers", at_worker, "--grpc-port", "0", *OPERATOR_PORTS, "--model", TINY,
                   "--start-timeout", "3s", *to_worker(authority)[:-1], "spiffe://kvasir/another", check=False)
        assert text.returncode != 0

        told = run("generate", "--endpoint", router.grpc, "--prompt", "Once", "--max-tokens", "4",
                   *tls_flags(authority, "client"))
        assert told.stdout.startswith("Once")
        assert run("generate", "--endpoint", router.grpc, "--prompt", "Once", check=False).returncode != 0

        assert run("drain", "--endpoint", router.admin, *tls_flags(authority, "client"), check=False).returncode != 0
        assert router.process.poll() is None
        assert run("drain", "--endpoint", router.admin, *tls_flags(authority, "operator")).returncode == 0
        assert router.process.wait(timeout=60) == 0


def serial(target):
    """The bytes of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as plain, context.wrap_socket(plain) as shown:
        return shown.getpeercert(binary_form=True)


def test_certificates_that_are_replaced_under_load_lose_no_call(authority):
    with fleet(authority, "--max-connection-age", "1s") as (worker, router):
        targets = [router.grpc, worker.grpc]
        with Clients([router.grpc], router.ready["model"], credentials(authority, "client")) as clients:
            before = [serial(target) for target in targets]
            authority.sign("worker", WORKER)
            authority.sign("router", HERE, "DNS:router.kvasir")
            wait_until(lambda: all(serial(t) != b for t, b in zip(targets, before)), "new certificates")
            # Connections from before are told to go within 1.1 s.
            time.sleep(2)
            after = clients.codes["OK"]
            wait_until(lambda: clients.codes["OK"] > after + 50, "answers by the new ones")
        assert set(clients.codes) == {"OK"}, clients.codes


def test_plain_text_leaves_the_machine_only_where_somebody_says_so(tmp_path):
    at = ["--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS]
    for command, flags, named in (
        ("serve", ["--host", "0.0.0.0"], "--host 0.0.0.0"),
        ("worker", ["--listen", "0.0.0.0:0"], "--listen 0.0.0.0"),
        ("serve", ["--admin-host", "0.0.0.0"], "--admin-host 0.0.0.0"),
        ("router", ["--workers", "10.0.0.1:8100"], "10.0.0.1:8100"),
    ):
        rest = at if command != "worker" else ["--model", TINY, *OPERATOR_PORTS]
        done = run(command, *rest, *flags, check=False)
        assert done.returncode != 0
        assert named in done.stderr and "--insecure" in done.stderr and "tls-c" in done.stderr, done.stderr


def test_files_that_do_not_fit_are_named_at_start(authority):
    done = run("serve", "--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS, "--tls-cert", of(authority, "router"),
               "--tls-key", of(authority, "client"), check=False)
    assert done.returncode != 0
    assert f"--tls-key {of(authority, 'client')}: is not the key of --tls-cert" in done.stderr
