"""Access control by --identities: tokens, certificates, tenants, roles and quotas, by real clients over TLS."""

import contextlib
import hashlib
import json
import os
import re
import uuid

import grpc
import pytest
import triton
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

import access_log
from certificates import Authority
from kvasir_process import OPERATOR_PORTS, ROOT, TINY, KvasirProcess, altered_model, run, wait_until
from test_edge import Clients, request, streamed

pytestmark = pytest.mark.timeout(180)
REFUSED = "kvasir_router_callers_refused_total"
READS = "kvasir_router_identities_reads_total"
STRANGER = "unknown caller refused"
# More tokens than a server generates before a client on a busy machine looks again.
LONG = 8000


def token_of(name):
    return f"token-of-{name}"


def entry(name, **fields):
    """A tenant whose token is token_of(name)."""
    digest = hashlib.sha256(token_of(name).encode()).hexdigest()
    return {"name": name, "tokens": [{"label": f"{name}-laptop", "sha256": digest}], **fields}


TENANTS = [
    entry("red"),
    entry("blue"),
    {"name": "old", "tokens": [{"label": "old", "sha256": hashlib.sha256(b"old").hexdigest(),
                                "not_after": "2026-01-01T00:00:00Z"}]},
    entry("gate", may_set_tenant=True, certificates=["gate.example"]),
    entry("few", quota={"requests_per_second": 0.0001, "burst": 2}),
    entry("one", quota={"concurrent_requests": 1}),
    entry("small", quota={"bytes_in_flight": 4000}),
    entry("both-1", shared_prefix_cache=True),
    entry("both-2", shared_prefix_cache=True),
    entry("operator", roles=["ADMIN"]),
]


def without_certificates(tenants):
    """Returns the tenants without certificates, for a listener that does not ask for any."""
    return [{key: value for key, value in each.items() if key != "certificates"} for each in tenants]


def write(path, tenants, **fields):
    """Replaces the file, so that it is complete at every moment, as when Kubernetes changes a mounted secret."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"schema_version": 1, "tenants": tenants, **fields}))
    os.replace(part, path)


class Served:
    """A server over TLS, and access to what it logged and counted."""

    def __init__(self, server, authority, identities):
        self.server, self.authority, self.identities = server, authority, identities
        self.model = server.ready["model"]

    def channel(self, token=None, certificate=None):
        pair = (self.authority.folder / f"{certificate}.pem").read_bytes() if certificate else None
        credentials = grpc.ssl_channel_credentials(self.authority.ca.read_bytes(), pair, pair)
        if token:
            credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
        return grpc.secure_channel(self.server.grpc, credentials)

    def lines(self, message="request"):
        return access_log.lines(self.server, message)

    def refused(self):
        return [line for line in self.lines() if line["reason"]]

    def who_asked(self, answer):
        """The tenant and the caller that the log has for this answer."""
        line = access_log.line_of(self.server, answer.id)
        return line["tenant"], line["caller"]

    def count(self, reason):
        return self.server.metric(REFUSED, reason=reason)

    @contextlib.contextmanager
    def refusal(self, code, reason, text, caller=None):
        """Asserts that the call within is refused: its code, one line in the log, one count, and no secret in either.
        `caller`: the tenant and caller in that line. None: the caller is unknown, and each reason writes at most one
        line a minute."""
        lines, strangers, count = self.refused(), self.lines(STRANGER), self.count(reason)
        with pytest.raises(grpc.RpcError) as error:
            yield
        assert error.value.code().name == code, error.value.details()
        assert re.search(text, error.value.details()), error.value.details()
        assert self.count(reason) == count + 1
        if caller:
            wait_until(lambda: len(self.refused()) > len(lines), "the log line of the refusal")
        else:
            wait_until(lambda: any(line["reason"] == reason for line in self.lines(STRANGER)), "a log line with the reason")
        assert [(line["status"], line["reason"], line["tenant"], line["caller"])
                for line in self.refused()[len(lines):]] == ([(code, reason, *caller)] if caller else [])
        new = self.lines(STRANGER)[len(strangers):]
        assert len(new) <= (0 if caller else 1)
        for line in new:
            assert (line["status"], line["reason"]) == (code, reason)
            assert not {"client_request_id", "traceparent", "model", "tenant"} & set(line)
        assert "token-of" not in error.value.details()


def infer(channel, model, metadata=(), text="Once"):
    message = request(model, text)
    message.id = uuid.uuid4().hex
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=60, metadata=metadata)


@contextlib.contextmanager
def serving(folder, tenants, *flags, model=TINY, **fields):
    authority = Authority(folder)
    authority.sign("server", "IP:127.0.0.1")
    authority.sign("gate", "DNS:gate.example")
    authority.sign("nobody", "DNS:nobody.example")
    identities = folder / "who.json"
    write(identities, tenants, **fields)
    pair = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "server.pem"]
    with KvasirProcess(
            "serve", *pair, "--identities", identities, "--log-format", "json", *flags, model=model) as server:
        yield Served(server, authority, identities)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity")
    model = altered_model(folder / "tiny", max_position_embeddings=LONG + 192)
    with serving(folder, without_certificates(TENANTS), model=model) as server:
        yield server
        log = server.server.log()
        # This covers all calls of all tests.
        assert "token-of" not in log
        assert not any(token["sha256"] in log for each in TENANTS for token in each["tokens"])


def test_a_triton_client_with_a_token_is_served_and_named_in_the_log(served):
    client = grpcclient.InferenceServerClient(
        served.server.grpc, ssl=True, root_certificates=str(served.authority.ca))
    headers = {"authorization": f"Bearer {token_of('red')}"}
    assert client.is_server_live(headers=headers)
    assert client.get_model_metadata(served.model, headers=headers).name == served.model
    answer = client.infer(
        served.model, triton.text_inputs("Once", stream=False, max_tokens=4, ignore_eos=True), headers=headers,
        request_id="of-triton")
    assert answer.as_numpy("text_output").size == 1
    line = access_log.line_of(served.server, "of-triton")
    assert (line["tenant"], line["caller"], line["status"]) == ("red", "red-laptop", "OK")
    with pytest.raises(InferenceServerException) as error:
        client.is_server_live()
    assert "UNAUTHENTICATED" in str(error.value)
    client.close()


@pytest.mark.parametrize("metadata, reason, text", [
    ((), "no_credentials", "authorization: Bearer TOKEN"),
    ((("authorization", "Bearer token-of-nobody"),), "unknown", "is unknown"),
    ((("authorization", "Bearer old"),), "expired", "expired at 2026-01-01T00:00:00Z"),
    ((("authorization", "Basic token-of-red"),), "malformed", "'Bearer TOKEN'"),
    ((("authorization", "token-of-red"),), "malformed", "'Bearer TOKEN'"),
    ((("authorization", "Bearer token-of-red"), ("authorization", "Bearer token-of-blue")), "malformed", "one value"),
    ((("authorization", "Bearer " + "x" * 15_000),), "malformed", "1 to 512"),
])
def test_an_unknown_caller_is_unauthenticated(served, metadata, reason, text):
    with served.channel() as channel:
        caller = ("old", "old") if reason == "expired" else None
        with served.refusal("UNAUTHENTICATED", reason, text, caller):
            infer(channel, served.model, metadata)
        # Every other method refuses in the same way, even without a message.
        with served.refusal("UNAUTHENTICATED", reason, text, caller):
            channel.unary_unary("/vllm.Control/Abort")(b"", timeout=20, metadata=metadata)
        # Bytes that are not a valid message are refused too, and do not write more log lines.
        with served.refusal("UNAUTHENTICATED", reason, text, caller):
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                b"\xff" * 100, timeout=20, metadata=metadata)
        # Probes need no credentials.
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20) == b"\x08\x01"


# gRPC (1.51) treats metadata over the limit as an error of the connection.
def test_metadata_over_the_limit_closes_only_its_own_connection(served):
    red = (("authorization", f"Bearer {token_of('red')}"),)

    def start(channel, metadata=(), max_tokens=LONG):
        running = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([streamed(served.model, max_tokens)]), timeout=120, metadata=metadata)
        next(running)
        return running

    with served.channel() as channel, served.channel(token_of("blue")) as other:
        stays, ends = start(other, max_tokens=1000), start(channel, red)
        with pytest.raises(grpc.RpcError) as error:
            infer(channel, served.model, (("authorization", "Bearer " + "x" * 20_000),))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as error:
            list(ends)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(stays)[-1].infer_response.parameters["triton_final_response"].bool_param
    with served.channel() as channel:
        infer(channel, served.model, red)


def test_a_stream_without_credentials_ends_at_once(served):
    with served.channel() as channel, served.refusal("UNAUTHENTICATED", "no_credentials", "no credentials"):
        list(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([streamed(served.model, 4)]), timeout=20))


def test_only_known_callers_are_told_that_their_bytes_are_not_a_valid_message(served):
    def refused():
        return [line for line in served.lines() if line["status"] == "INVALID_ARGUMENT" and line["caller"] == "blue-laptop"]

    with served.channel(token_of("blue")) as channel:
        for method, facade in (("inference.GRPCInferenceService/ModelInfer", "kserve"),
                               ("vllm.grpc.engine.VllmEngine/Generate", "vllm"), ("vllm.Control/Abort", "vllm_inference")):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"/{method}")(b"\xff" * 100, timeout=20)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert error.value.details() == f"the request is not a valid protobuf message for /{method}"
            wait_until(lambda: facade in [line["facade"] for line in refused()], "the log line of the call")
    assert [line["tenant"] for line in refused()] == ["blue"] * 3


def test_a_tenant_with_only_the_role_admin_may_not_send_requests(served):
    with served.channel(token_of("operator")) as channel, served.refusal(
            "PERMISSION_DENIED", "role", "role CLIENT", ("operator", "operator-laptop")):
        infer(channel, served.model)


def test_only_a_gateway_with_permission_may_set_the_tenant_header(served):
    with served.channel(token_of("gate")) as channel:
        assert served.who_asked(infer(channel, served.model, (("x-tenant-id", "somebody"),))) == ("somebody", "gate-laptop")
        # A tenant that is listed has its own quota.
        for _ in range(2):
            infer(channel, served.model, (("x-tenant-id", "few"),))
        with served.refusal("RESOURCE_EXHAUSTED", "rate", "tenant 'few'.*requests_per_second.*try again in",
                            ("few", "gate-laptop")):
            infer(channel, served.model, (("x-tenant-id", "few"),))
        with served.refusal("INVALID_ARGUMENT", "tenant", "x-tenant-id", ("gate", "gate-laptop")):
            infer(channel, served.model, (("x-tenant-id", "a b"),))
        # The header gives no tenant the role CLIENT.
        with served.refusal("PERMISSION_DENIED", "role", "'operator' does not have the role CLIENT", ("gate", "gate-laptop")):
            infer(channel, served.model, (("x-tenant-id", "operator"),))
    with served.channel(token_of("red")) as channel:
        infer(channel, served.model, (("x-tenant-id", "red"),))
        with served.refusal("PERMISSION_DENIED", "tenant", "may not set another", ("red", "red-laptop")):
            infer(channel, served.model, (("x-tenant-id", "blue"),))


def test_concurrent_requests_of_a_tenant_and_their_bytes_are_limited(served):
    with served.channel(token_of("one")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        running = stub.ModelStreamInfer(iter([streamed(served.model, LONG)]), timeout=120)
        next(running)
        with served.refusal("RESOURCE_EXHAUSTED", "concurrency", "concurrent_requests is 1", ("one", "one-laptop")):
            infer(channel, served.model)
        # Calls other than requests still work, and so do requests of other tenants.
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20)
        with served.channel(token_of("red")) as other:
            infer(other, served.model)
        running.cancel()

        def again():
            try:
                infer(channel, served.model)
                return True
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        wait_until(again, "the cancelled request no longer counts")
        # Requests in sequence never count as two.
        for _ in range(30):
            infer(channel, served.model)
    with served.channel(token_of("small")) as channel:
        infer(channel, served.model)
        with served.refusal("INVALID_ARGUMENT", "too_large", "at most 4000 together .its quota's bytes_in_flight.",
                            ("small", "small-laptop")):
            infer(channel, served.model, text="x" * 4000)


def test_a_stop_request_ends_only_requests_of_its_own_tenant(served):
    def stop(channel, request_id):
        message = request(served.model)
        del message.inputs[:]
        message.id = request_id
        tensor = message.inputs.add(name="stop", datatype="BOOL", shape=[1])
        tensor.contents.bool_contents.append(True)
        list(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]), timeout=20))

    with served.channel(token_of("red")) as red, served.channel(token_of("blue")) as blue:
        message = streamed(served.model, LONG)
        message.id = "same"
        running = service_pb2_grpc.GRPCInferenceServiceStub(red).ModelStreamInfer(iter([message]), timeout=120)
        next(running)
        stop(blue, "same")
        # Output that was generated before the stop proves nothing, so the engine must generate more.
        started = served.server.metric("kvasir_generation_tokens_total")
        for _ in range(5):
            last = next(running)
            assert not last.infer_response.parameters["triton_final_response"].bool_param
        wait_until(lambda: served.server.metric("kvasir_generation_tokens_total") > started + 50, "the other tenant's request goes on")
        stop(red, "same")
        responses = list(running)
        assert responses[-1].infer_response.parameters["triton_final_response"].bool_param

        def of_same():
            return [(line["tenant"], line["finish_reason"]) for line in served.lines()
                    if line["client_request_id"] == "same" and line["samples"] > 0]

        wait_until(of_same, "the log line of the request")
        assert of_same() == [("red", "cancelled")]


def test_prefixes_are_shared_within_a_tenant_and_between_tenants_that_opted_in(served):
    prompt = "The same long beginning of a story that more than one of them tells, again and again. " * 4

    def hits(name):
        before = served.server.metric("kvasir_prefix_cache_hit_tokens_total")
        with served.channel(token_of(name)) as channel:
            infer(channel, served.model, text=prompt)
        return served.server.metric("kvasir_prefix_cache_hit_tokens_total") - before

    assert hits("red") == 0
    assert hits("red") > 0
    assert hits("blue") == 0, "the prefix is another tenant's"
    assert hits("both-1") == 0
    assert hits("both-2") > 0, "both tenants opted in"


def test_a_certificate_identifies_its_tenant_and_must_agree_with_the_token(tmp_path):
    with serving(tmp_path, TENANTS, "--tls-client-ca", tmp_path / "ca.pem", anonymous={}) as server:
        with server.channel(certificate="gate") as channel:
            assert server.who_asked(infer(channel, server.model, (("x-tenant-id", "acme"),))) == ("acme", "gate.example")
        with server.channel(token_of("red"), certificate="nobody") as channel:
            assert server.who_asked(infer(channel, server.model)) == ("red", "red-laptop")
        with server.channel(certificate="nobody") as channel:
            assert server.who_asked(infer(channel, server.model)) == ("anonymous", "")
        with server.channel(token_of("red"), certificate="gate") as channel, \
                server.refusal("UNAUTHENTICATED", "disagree", "belong to different tenants",
                               ("gate", "gate.example")):
            infer(channel, server.model)


def test_no_token_is_accepted_without_tls(tmp_path):
    identities = tmp_path / "who.json"
    write(identities, TENANTS)
    flags = ["--model", TINY, "--grpc-port", "0", *OPERATOR_PORTS]
    done = run("serve", *flags, "--identities", identities, check=False)
    assert done.returncode != 0
    assert f"--identities {identities}: has tokens" in done.stderr and "--tls-cert" in done.stderr
    for wrong, why in ((["--identities", tmp_path / "none"], "No such file"), (["--identities", ""], "--identities: the value is empty")):
        done = run("serve", *flags, *wrong, check=False)
        assert done.returncode != 0 and why in done.stderr, done.stderr
    done = run("serve", *flags, check=False, env={**os.environ, "KVASIR_IDENTITIES": ""})
    assert done.returncode != 0 and "KVASIR_IDENTITIES: is set and empty" in done.stderr

    write(identities, [{"name": "listed"}], anonymous={})
    with KvasirProcess("serve", "--identities", identities, "--log-format", "json") as process:
        server = Served(process, None, identities)
        with grpc.insecure_channel(process.grpc) as channel:
            assert server.who_asked(infer(channel, server.model)) == ("anonymous", "")
            with server.refusal("UNAUTHENTICATED", "no_tls", "no token is accepted without TLS"):
                infer(channel, server.model, (("authorization", f"Bearer {token_of('red')}"),))
            with server.refusal("PERMISSION_DENIED", "tenant", "may not set another", ("anonymous", "")):
                infer(channel, server.model, (("x-tenant-id", "listed"),))


def test_a_change_of_the_identities_file_fails_no_request_and_refuses_a_removed_tenant(tmp_path):
    tenants = without_certificates(TENANTS)
    with serving(tmp_path, tenants) as server:
        def reads(result):
            return server.server.metric(READS, result=result)

        credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(server.authority.ca.read_bytes()),
            grpc.access_token_call_credentials(token_of("red")))
        with Clients([server.server.grpc], server.model, credentials) as clients:
            write(server.identities, [*tenants, entry("new")])
            wait_until(lambda: reads("ok") == 1, "the new file")
            with server.channel(token_of("new")) as channel:
                infer(channel, server.model)
            # A file with an error changes nothing and is logged once.
            server.identities.write_text('{"schema_version": 1, "tenants": [{"name": "red", "color": 1}]}')
            wait_until(lambda: reads("failed") == 1, "the wrong file")
            after = clients.codes["OK"]
            wait_until(lambda: clients.codes["OK"] > after + 50, "answers by the previous file")
        assert set(clients.codes) == {"OK"}, clients.codes
        (line,) = server.lines("identities cannot be read: the previous ones stay in use")
        assert str(server.identities) in line["why"] and "color" in line["why"]
        assert reads("failed") == 1
        assert server.server.metric("kvasir_router_identities_refused") == 1

        with server.channel(token_of("red")) as channel:
            infer(channel, server.model)
            write(server.identities, [each for each in tenants if each["name"] != "red"])
            wait_until(lambda: reads("ok") == 2, "the file without red")
            assert server.server.metric("kvasir_router_identities_refused") == 0
            with server.refusal("UNAUTHENTICATED", "unknown", "is unknown"):
                infer(channel, server.model)


@pytest.mark.parametrize("anonymous", [False, True])
def test_an_admin_port_open_to_other_machines_requires_a_token_with_the_role_admin(tmp_path, anonymous):
    fields = {"anonymous": {}} if anonymous else {}
    with serving(tmp_path, without_certificates(TENANTS), "--admin-host", "0.0.0.0", **fields) as server:
        endpoint = "127.0.0.1:" + server.server.admin.rsplit(":", 1)[1]
        for name in ("red", "operator"):
            (tmp_path / name).write_text(token_of(name) + "\n")
        drain = ["drain", "--endpoint", endpoint, "--ca", server.authority.ca]
        for _ in range(2):
            done = run(*drain, check=False)
            assert done.returncode != 0
            assert ("'anonymous' does not have the role ADMIN" if anonymous else "no credentials") in done.stderr
        done = run(*drain, "--token-file", tmp_path / "red", check=False)
        assert done.returncode != 0 and "does not have the role ADMIN" in done.stderr
        # Unknown callers write one line a minute for each reason.
        assert [(line["call"], line["status"], line["reason"], line["tenant"], line["caller"])
                for line in server.lines("admin call refused")] == [
            ("Drain", "PERMISSION_DENIED", "role", "anonymous", "") if anonymous else
            ("Drain", "UNAUTHENTICATED", "no_credentials", "", ""),
            ("Drain", "PERMISSION_DENIED", "role", "red", "red-laptop")]
        assert (server.count("no_credentials"), server.count("role")) == ((0, 3) if anonymous else (2, 1))
        assert server.server.process.poll() is None
        assert run(*drain, "--token-file", tmp_path / "operator").returncode == 0
        assert server.server.process.wait(timeout=60) == 0
        (line,) = server.lines("admin call")
        assert (line["tenant"], line["caller"]) == ("operator", "operator-laptop")


def test_the_example_of_identities_in_the_operations_page_works_as_printed(tmp_path):
    page = (ROOT / "docs/operations.md").read_text()
    section = page[page.index("## Who may call"):page.index("## Change versions")]
    (token,) = re.findall(r"^\$ kvasir token --label laptop\n(\S+)$", section, re.MULTILINE)
    (file,) = re.findall(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert hashlib.sha256(token.encode()).hexdigest() in file
    # The page shows what the program prints.
    printed = run("token", "--label", "laptop").stdout.splitlines()
    assert "\n".join(printed[1:-1]) in section
    (made,) = re.findall(r"^kvasir serve (.*)$", section, re.MULTILINE)
    assert "--identities who.json" in made
    with serving(tmp_path, json.loads(file)["tenants"]) as server, server.channel(token) as channel:
        assert server.who_asked(infer(channel, server.model)) == ("research", "laptop")


def test_the_token_command_prints_a_token_and_the_entry_that_accepts_it(tmp_path):
    made = json.loads(run("token", "--label", "laptop", "--valid-for", "1h", "--json").stdout)
    token, of_token = made["token"], made["entry"]
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token)
    assert of_token["sha256"] == hashlib.sha256(token.encode()).hexdigest()
    assert token not in json.dumps(of_token)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", of_token["not_after"])
    shown = run("token").stdout
    assert json.loads(shown.strip().splitlines()[-1])["sha256"] == \
        hashlib.sha256(shown.splitlines()[0].encode()).hexdigest()
    done = run("token", "--label", "a b", check=False)
    assert done.returncode == 2 and "want letters, digits and -_.:@/, but byte 1" in done.stderr
    # The limit is 100 years, so that years in dates have four digits.
    for too_long in ("inf", "876001h"):
        done = run("token", "--valid-for", too_long, check=False)
        assert done.returncode == 2 and "give at most 876000h" in done.stderr, done.stderr
    assert run("token", "--valid-for", "876000h").returncode == 0

    file = tmp_path / "token"
    file.write_text(token + "\n")
    with serving(tmp_path, [{"name": "red", "tokens": [of_token]}]) as server:
        generate = ["generate", "--endpoint", server.server.grpc, "--prompt", "Once", "--max-tokens", "4"]
        tls = ["--ca", server.authority.ca]
        assert run(*generate, *tls, "--token-file", file).stdout.startswith("Once")
        wait_until(server.lines, "the log line of the request")
        assert [(line["tenant"], line["caller"]) for line in server.lines()] == [("red", "laptop")]
        done = run(*generate, *tls, check=False)
        assert done.returncode != 0 and "UNAUTHENTICATED" in done.stderr
        done = run(*generate, "--token-file", file, check=False)
        assert done.returncode != 0 and "a token is sent only over TLS" in done.stderr
        (tmp_path / "two").write_text("one two")
        done = run(*generate, *tls, "--token-file", tmp_path / "two", check=False)
        assert done.returncode != 0 and "must contain one token" in done.stderr
        done = run("bench", "serve", "--endpoint", server.server.grpc, *tls, "--token-file", file, "--mode", "closed",
                   "--requests", "4", "--json")
        assert token not in done.stdout
        assert token not in server.server.log()
