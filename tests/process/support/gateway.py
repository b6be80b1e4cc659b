"""A gateway from PyPI in front of `kvasir serve`: HTTP to the gateway, gRPC from it to the server.

Each gateway has an environment of its own (scripts/setup_venv).
"""

import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

import pytest

from kvasir_process import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[3]
VENV = pathlib.Path(os.environ.get("KVASIR_VENV", ROOT / "build/venv"))


def environment_of(name, program):
    """Returns the folder of programs of build/venv-NAME. Skips the test module if `program` is not installed there."""
    programs = VENV.with_name(f"{VENV.name}-{name}") / "bin"
    if not (programs / program).exists():
        pytest.skip(f"no {program} in {programs}: run scripts/setup_venv",
                    allow_module_level=True)
    return programs


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def two_free_ports():
    """Returns the first of two neighbouring free ports, below the range from which the system gives ports to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for each in (port, port + 1):
                stack.enter_context(socket.create_server(("127.0.0.1", each)))
            return port


class HttpGateway:
    """Context manager that runs a gateway. It counts as ready when it answers a chat request."""

    facade = None  # as the access log names it

    def __init__(self, server, command, environment=None):
        self.port = free_port()
        self.last = None  # the answer to the first request
        self.log = tempfile.TemporaryFile()
        self.model = server.ready["model"]
        self.process = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(self.port),
             "--prometheus-port", str(free_port())],
            stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )

    def __enter__(self):
        try:
            wait_until(self.ready, "the gateway serves the model", seconds=60)
        except BaseException:
            print(self.last, self.text()[-2000:], file=sys.stderr)
            self.__exit__()
            raise
        return self

    def ready(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"the gateway ended with exit code {self.process.returncode}")
        try:
            self.last = self.chat("hi", max_tokens=1)
            return self.last[0] == 200
        except OSError:
            return False

    def __exit__(self, *unused):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def post(self, path, **body):
        """Returns (status, decoded JSON or text)."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            client.request("POST", path, json.dumps({"model": self.model, **body}),
                           {"Content-Type": "application/json"})
            answer = client.getresponse()
            text = answer.read().decode()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, text
        finally:
            client.close()

    def chat(self, text, **body):
        body = {"temperature": 0, "seed": 1, **body}
        return self.post("/v1/chat/completions",
                         messages=[{"role": "user", "content": text}], **body)

    def stream(self, text, **body):
        """Returns the events of a streamed chat, without the last [DONE]."""
        status, answer = self.chat(text, stream=True, **body)
        assert status == 200, answer
        events = re.findall(r"^data: (.*)$", answer, re.MULTILINE)
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def leave_in_the_middle(self, **body):
        """Plays a client that goes away after the first event of a long answer."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        client.request("POST", "/v1/chat/completions", json.dumps({
            "model": self.model, "messages": [{"role": "user", "content": "Once"}],
            "stream": True, "max_tokens": 400, "ignore_eos": True, "temperature": 1, **body,
        }), {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.readline().startswith(b"data:")
        answer.close()
        client.close()

    def answers(self, server):
        """The lines of the server's access log, one for each request of this gateway."""
        return [line for line in server.log().splitlines() if f"facade={self.facade} " in line]


    def wait_cancelled(self, server, before):
        """Waits for the line of a cancelled request after the first `before` lines. Lines of earlier requests may
        come first: the server writes a line after the client has its answer."""
        wait_until(lambda: any("finish_reason=cancelled" in line for line in self.answers(server)[before:]),
                   "a request has been cancelled")


def status_with_key(url, key, body=None):
    """The status code of a GET, or of a POST of `body` as JSON, with this key or with none."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def assert_keys_are_needed(url, tenant, control_plane):
    """smg at `url` runs prompts only with the tenant's key, and lets only the other key see or change its workers."""
    wrong = [None, "wrong" + tenant, tenant[:-1]]
    chat = {"model": "unknown", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"model": "unknown", "prompt": "hi"}),
                       ("/generate", {"text": "hi"}), ("/v1/tokenize", {"model": "unknown", "prompt": "hi"}),
                       ("/v1/messages", chat), ("/v1/responses", {"model": "unknown", "input": "hi"}),
                       ("/v1/embeddings", {"model": "unknown", "input": "hi"})):
        for key in (*wrong, control_plane):
            assert status_with_key(url + path, key, body) == 401, (path, key)
        assert status_with_key(url + path, tenant, body) != 401, path
    for path, body in (("/workers", None), ("/workers", {"url": "grpc://127.0.0.1:9"}), ("/flush_cache", {}), ("/get_loads", None),
                       ("/v1/tokenizers", None), ("/wasm", None), ("/heap_profile", {})):
        for key in (*wrong, tenant):
            assert status_with_key(url + path, key, body) == 401, (path, key)
    assert status_with_key(url + "/workers", control_plane) == 200
    assert status_with_key(url + "/liveness", None) == 200


def idle(server):
    """True if nothing runs and every page is free or in the prefix cache."""
    return (
        server.metric("kvasir_num_requests_running") == 0
        and server.metric("kvasir_router_inflight_requests") == 0
        and server.metric("kvasir_kv_cache_used_pages") == 0
        and server.metric("kvasir_cache_leaked_pages") == 0
    )


def text_of(events, index=0):
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def statuses_of_a_full_server(gateway):
    """The status codes of short chats while a long one takes the server's only place, up to the first 429."""
    statuses = []
    while 429 not in statuses and len(statuses) < 10:
        runs = threading.Thread(target=gateway.chat, args=("Once",), kwargs={"max_tokens": 480, "ignore_eos": True})
        runs.start()
        for _ in range(20):
            statuses.append(gateway.chat("Once", max_tokens=1)[0])
            if statuses[-1] == 429 or not runs.is_alive():
                break
        runs.join()
    return statuses
