"""deploy/smoke over a kubectl that forwards to servers of this machine: made-up ones that may be faulty, and real ones."""

import base64
import http.server
import json
import pathlib
import re
import ssl
import subprocess
import sys
import threading

import pytest

from certificates import Authority
from gateway import HttpGateway, VENV, status_with_key
from kvasir_process import ROOT, KvasirProcess

KEY = "tenant-key-of-a-test"
# It records its calls and its process, and fails at the call that a test chooses.
KUBECTL = f"""#!{sys.executable}
import json, os, re, sys, time
args = sys.argv[1:]
with open(os.environ["CALLS"], "a") as log:
    log.write(json.dumps([os.getpid(), args]) + "\\n")
if (fails := os.environ["FAILS"]) and re.search(fails, " ".join(args)):
    sys.exit("kubectl: this call fails")
about = " ".join(args)
if "port-forward" in args:
    for port in args[args.index("port-forward") + 2:]:
        print("Forwarding from 127.0.0.1:%d -> %s" % (json.loads(os.environ["PORTS"])[port[1:]], port[1:]), flush=True)
        print("Forwarding from [::1]:1 -> " + port[1:], flush=True)
    time.sleep(600)
elif "wait" in args:
    print("pod/a condition met")
elif "secret" in args:
    print("{base64.b64encode(KEY.encode()).decode()}", end="")
elif "containers" in about:
    print(os.environ["CONTAINERS"])
elif "name=kvasir-router" in about:
    print("pod/kvasir-router-a\\npod/kvasir-router-b")
elif "name=kvasir-worker" in about:
    print("pod/kvasir-worker-0\\npod/kvasir-worker-1")
elif args == ["version"] or "deployments,statefulsets,pods" in args:
    print("a table")
else:
    sys.exit("unexpected: " + about)
"""


class Installation(http.server.ThreadingHTTPServer):
    """A healthy router, gateway and worker at one address. A test may change what a path answers."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens = 0
        self.key = KEY
        self.leaked = 0
        self.ready = 2
        self.answers = {"/healthz": (200, "ok"), "/readiness": (200, "ok"),
                        "/v1/models": (200, '{"data": [{"id": "a-model", "permission": [{"id": "p"}]}]}')}
        self.bodies = []

    def metrics(self):
        return (
            f'kvasir_router_replicas{{state="lost"}} 7\nkvasir_router_replicas{{state="ready"}} {self.ready}\n'
            'kvasir_router_build_info{version="1"} 1\nkvasir_build_info{version="1"} 1\n'
            f"kvasir_router_requests_total{{facade=\"vllm\"}} {self.tokens / 4}\n"
            f"kvasir_generation_tokens_total {self.tokens}\nkvasir_cache_leaked_pages {self.leaked}\n")


class Handler(http.server.BaseHTTPRequestHandler):
    def send(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.send(*(self.server.answers.get(self.path) or (200, self.server.metrics())))

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.send(401, "no key")
        else:
            self.server.tokens += 8
            self.send(*self.server.answers.get(self.path, (200, '{"choices": [{"text": " there"}]}')))

    def log_message(self, *unused):
        pass


@pytest.fixture
def installation():
    with Installation() as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.fixture
def smoke(tmp_path):
    """A function that runs deploy/smoke over that kubectl: (its result, the calls)."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)

    def run_it(*args, metrics=None, gateway=None, fails="", containers="kvasir gateway"):
        calls = tmp_path / "calls"
        calls.write_text("")
        done = subprocess.run(
            [ROOT / "deploy/smoke", *args], capture_output=True, text=True, timeout=120,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "FAILS": fails, "TMPDIR": str(tmp_path),
                 "CONTAINERS": containers, "PORTS": json.dumps({"8002": metrics, "30000": gateway})})
        made = [json.loads(line) for line in calls.read_text().splitlines()]
        # Nothing of it is left: no forwarder, and no file with the key.
        assert [pid for pid, call in made if pathlib.Path(f"/proc/{pid}/cmdline").exists()
                and str(kubectl).encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()] == []
        assert sorted(each.name for each in tmp_path.iterdir()) == ["calls", "kubectl"]
        assert KEY not in done.stdout + done.stderr
        return done, [call for _, call in made]

    return run_it


def test_a_healthy_installation_passes_with_a_line_for_each_step(smoke, installation):
    port = installation.server_port
    done, calls = smoke("--namespace", "chat", "--instance", "green", metrics=port, gateway=port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^ok +(.*)$", done.stdout, re.MULTILINE) == [
        "every worker's pod is ready: 1", "every router's pod is ready: 1", "the router is ready: pod/kvasir-router-a",
        'the router has ready replicas: 2; build: kvasir_router_build_info{version="1"}',
        "the gateway is ready: model a-model", "a completion without a key is refused: 401", "a completion with the key: 200",
        "the router counts the completion: kvasir_router_requests_total 2",
        'metrics of pod/kvasir-worker-0: 8 tokens; build: kvasir_build_info{version="1"}',
        'metrics of pod/kvasir-worker-1: 8 tokens; build: kvasir_build_info{version="1"}',
        "the workers count the completion: 16 tokens",
    ]
    assert done.stdout.endswith("deploy/smoke: passed\n")
    assert installation.bodies == 2 * [{"model": "a-model", "prompt": "Once upon a time", "max_tokens": 8}]
    assert all(call[:2] == ["-n", "chat"] for call in calls if call != ["version"])
    selectors = [word for call in calls for word in call if "instance=" in word]
    assert len(selectors) == 4 and all(word.endswith("instance=green") for word in selectors)
    # It changes nothing.
    assert {call[2] for call in calls if call != ["version"]} == {"get", "wait", "port-forward"}


def test_without_a_gateway_it_says_that_no_completion_was_made(smoke, installation):
    done, calls = smoke(metrics=installation.server_port, containers="kvasir")
    assert done.returncode == 0 and "skipped a completion" in done.stdout, done.stdout
    assert installation.bodies == [] and not any("secret" in call for call in calls)


def test_a_gateway_with_https_needs_the_flag(smoke, installation, tmp_path_factory):
    pem = Authority(tmp_path_factory.mktemp("certificates")).sign("server", "DNS:chat.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    installation.tokens = 8
    with Installation() as gateway:
        gateway.socket = context.wrap_socket(gateway.socket, server_side=True)
        threading.Thread(target=gateway.serve_forever).start()
        for flags, status in (["--https"], 0), ([], 1):
            done, _ = smoke(*flags, metrics=installation.server_port, gateway=gateway.server_port)
            assert done.returncode == status, done.stdout + done.stderr
        assert "failed: the gateway is ready" in done.stderr
        gateway.shutdown()


@pytest.mark.parametrize("fault, step, found", [
    ({"fails": "deployments"}, "report", "this call fails"),
    ({"fails": "wait.*kvasir-worker"}, "every worker's pod is ready", "this call fails"),
    ({"fails": "wait.*kvasir-router"}, "every router's pod is ready", "this call fails"),
    ({"fails": "forward.*router"}, "the router is ready", "this call fails"),
    ({"/healthz": (503, "not ready")}, "the router is ready", "status 503 instead of 200: not ready"),
    ({"ready": 0}, "the router has ready replicas", "none"),
    ({"/metrics": (200, "up 1\n")}, "the router has ready replicas", "the metric kvasir_router_replicas is missing"),
    ({"/readiness": (503, "")}, "the gateway is ready", "status 503 instead of 200"),
    ({"/v1/models": (200, '{"data": []}')}, "the gateway is ready", "/v1/models names no model"),
    ({"key": None}, "a completion without a key is refused", "status 200 instead of 401"),
    ({"key": "another"}, "a completion with the key", "status 401 instead of 200: no key"),
    ({"fails": "secret"}, "a completion with the key", None),
    ({"/v1/completions": (200, '{"choices": []}')}, "a completion with the key", "no text"),
    ({"leaked": 3}, "metrics of pod/kvasir-worker-0", "kvasir_cache_leaked_pages is 3"),
    ({"fails": "forward.*worker-1"}, "metrics of pod/kvasir-worker-1", "this call fails"),
])
def test_the_first_step_that_fails_is_named_with_what_was_found(smoke, installation, fault, step, found):
    port = installation.server_port
    for name, value in fault.items():
        if name.startswith("/"):
            installation.answers[name] = value
        else:
            setattr(installation, name, value)
    done, _ = smoke(metrics=port, gateway=port, fails=fault.get("fails", ""))
    assert done.returncode == 1
    assert f"deploy/smoke: failed: {step}\n" in done.stderr and done.stdout.endswith(f"FAILED  {step}\n"), done.stdout
    assert found is None or found in done.stdout
    assert "passed" not in done.stdout


def test_it_refuses_arguments_that_it_does_not_know_and_has_a_help(smoke):
    for args, named in ((["x"], "unknown argument x"), (["--timeout"], "--timeout needs a value")):
        done, calls = smoke(*args)
        assert done.returncode == 2 and named in done.stderr and calls == []
    done, calls = smoke("--help")
    assert done.returncode == 0 and "--https" in done.stdout and "set -e" not in done.stdout and calls == []


class GatewayWithKey(HttpGateway):
    def ready(self):
        try:
            return status_with_key(f"http://127.0.0.1:{self.port}/readiness", None) == 200
        except OSError:
            return False


def test_a_real_server_behind_the_real_gateway_passes(smoke):
    smg = VENV.with_name(f"{VENV.name}-smg") / "bin/smg"
    if not smg.exists():
        pytest.skip(f"no gateway: {smg} is missing")
    with KvasirProcess("serve") as server:
        command = [smg, "launch", "--worker-urls", f"grpc://{server.grpc}", "--health-success-threshold", "1",
                   "--health-check-interval-secs", "1", "--tenant-api-key", f"clients:{KEY}"]
        with GatewayWithKey(server, command) as gateway:
            metrics = int(server.ready["metrics"].rpartition(":")[2])
            done, _ = smoke(metrics=metrics, gateway=gateway.port)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"model {server.ready['model']}" in done.stdout
