"""Floods a server in several ways that could slow down its other clients, and prints what each flood costs: the p99
latency of another client before and during it, the server's memory before, during and after it, and the codes that the
flood gets. The exit code is 1 if the other client or a probe fails, or if the server keeps the memory of a flood.
scripts/soak runs it.

    floods.py [--seconds N] [NAME...]
"""

import argparse
import collections
import contextlib
import json
import pathlib
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from certificates import Authority
from kvasir_process import KvasirProcess

SETTLE_SECONDS = 15  # the server gives memory back after some seconds of silence
MOST_KEPT_BYTES = 64 << 20  # the most memory that the server may keep after a flood
# gRPC 1.51 does not limit resets (CVE-2023-44487, SECURITY.md), so this flood is measured but does not fail the soak.
UNBOUNDED = {"resets"}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def infer(model, text, sampling):
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in (("text_input", text), ("sampling_parameters", sampling)):
        message.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value)
    return message


def channel_to(server):
    """A channel over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if server.ca is None:
        return grpc.insecure_channel(server.grpc, options)
    return grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(server.ca.read_bytes()), options)


def connect(target):
    host, port = target.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def call(server, message):
    """Sends a unary request over a new connection, and returns its status code."""
    with channel_to(server) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=60)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name


def sends(server, batch):
    """Sends the bytes to the client port again and again, until the server closes the connection."""
    with connect(server.grpc) as client:
        client.sendall(PREFACE + frame(4, 0, 0, b""))
        client.setblocking(True)
        with contextlib.suppress(OSError):
            for _ in range(500):
                client.sendall(batch)
                client.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    client.recv(1 << 16)
                client.settimeout(5)
            return "stayed open"
        return "closed"


def literal(name, value):
    """A header in HPACK's form without index and without compression."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


RESET_HEADERS = b"".join(literal(*pair) for pair in [
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"a"), (b"content-type", b"application/grpc"), (b"te", b"trailers")])


def reset_streams(server):
    with connect(server.grpc) as client:
        client.sendall(PREFACE + frame(4, 0, 0, b""))
        with contextlib.suppress(OSError):
            for stream in range(1, 4001, 2):
                client.sendall(frame(1, 4, stream, RESET_HEADERS) + frame(3, 0, stream, struct.pack(">I", 8)))
            return "stayed open"
        return "closed"


def hold(target, count, data=b""):
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            with contextlib.suppress(OSError):
                stack.enter_context(connect(target)).sendall(data)
        time.sleep(0.2)
    return "connected"


def half_handshakes(server, count=100, hold_seconds=0):
    """Begins many TLS handshakes, up to the server's certificate, and goes on with none of them."""
    with contextlib.ExitStack() as stack:
        begun = 0
        for _ in range(count):
            client = ssl.create_default_context(cafile=server.ca)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            with contextlib.suppress(ssl.SSLWantReadError):
                client.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
            with contextlib.suppress(OSError):
                connection = stack.enter_context(connect(server.grpc))
                connection.sendall(outgoing.read())
                begun += len(connection.recv(1 << 12)) > 0
        time.sleep(hold_seconds)
    return f"begun: {begun}"


def fetch_tokenizer(server):
    with channel_to(server) as channel:
        for _ in range(20):
            list(channel.unary_stream("/vllm.grpc.engine.VllmEngine/GetTokenizer")(b"", timeout=60))
    return "OK"


def many_keys(server):
    sampling = json.dumps({str(key): {} for key in range(26_500)}).encode()
    return call(server, infer(server.ready["model"], b"Once", sampling))


FLOODS = {
    "json": many_keys,
    "headers": lambda server: sends(server, frame(1, 0, 1, b"") + frame(9, 0, 1, literal(b"a", b"v" * 100) * 100) * 16),
    "prompts": lambda server: call(server, infer(server.ready["model"], b"a " * (1 << 19), b"{}")),
    "pings": lambda server: sends(server, frame(6, 0, 0, b"12345678") * 1000),
    "connections": lambda server: hold(server.grpc, 200),
    "health": lambda server: hold(server.health, 200),
    "http": lambda server: hold(server.ready["metrics"], 200, b"GET /metrics HTTP/1.1\r\nHost: "),
    "resets": reset_streams,
    "tokenizer": fetch_tokenizer,
    "handshakes": half_handshakes,
}
OVER_TLS = {"handshakes"}
# Each flood returns this if the server has received all of it.
DONE = {"pings": "closed", "connections": "connected", "resets": "stayed open", "tokenizer": "OK", "handshakes": "begun: 100"}


@contextlib.contextmanager
def serving(tls):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flags, ca = [], None
        if tls:
            authority = Authority(folder)
            own = authority.sign("server", "IP:127.0.0.1")
            flags, ca = ["--tls-cert", own, "--tls-key", own], pathlib.Path(authority.ca)
        server = stack.enter_context(KvasirProcess("serve", *flags))
        server.ca = ca
        yield server


class OtherClient(threading.Thread):
    """Asks for a few tokens, and probes health and metrics, again and again."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.ended = server, threading.Event()
        self.seconds, self.codes = [], collections.Counter()
        self.start()

    def probe(self):
        with grpc.insecure_channel(self.server.health, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        with urllib.request.urlopen(f"http://{self.server.ready['metrics']}/healthz", timeout=5) as answer:
            answer.read()

    def run(self):
        message = infer(self.server.ready["model"], b"Once", b'{"max_tokens": 4, "temperature": 0}')
        with channel_to(self.server) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self.ended.is_set():
                begin = time.monotonic()
                for name, act in (("request", lambda: stub.ModelInfer(message, timeout=30)), ("probe", self.probe)):
                    try:
                        act()
                    except (grpc.RpcError, OSError) as error:
                        self.codes[f"{name}: {error.code().name if isinstance(error, grpc.RpcError) else error}"] += 1
                    if name == "request":
                        self.seconds.append(time.monotonic() - begin)

    def p99_ms(self):
        """Ends the measurement."""
        self.ended.set()
        self.join()
        return 1000 * sorted(self.seconds)[int(0.99 * len(self.seconds))]


def run(name, server, seconds):
    calm = OtherClient(server)
    time.sleep(seconds / 2)
    before_ms, before = calm.p99_ms(), server.resident_bytes()
    other, end = OtherClient(server), time.monotonic() + seconds
    outcomes, most = collections.Counter(), before

    def attack():
        while time.monotonic() < end:
            try:
                outcomes[FLOODS[name](server)] += 1
            except Exception as error:  # the flood goes on, whatever the server does to it
                outcomes[type(error).__name__] += 1

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, server.resident_bytes())
        time.sleep(0.05)
    during_ms = other.p99_ms()
    failures = calm.codes + other.codes
    time.sleep(SETTLE_SECONDS)
    after = server.resident_bytes()
    mib = [f"{bytes / (1 << 20):.0f}" for bytes in (before, most, after)]
    print(f"{name:12} p99 {before_ms:7.1f} -> {during_ms:8.1f} ms   memory {' -> '.join(mib)} MiB   "
          f"{dict(outcomes)}   failures of the other client: {dict(failures) or 'none'}", flush=True)
    if not outcomes or server.process.poll() is not None:
        return False
    return name in UNBOUNDED or not failures and after < before + MOST_KEPT_BYTES


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="how long each flood lasts")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"floods: {', '.join(FLOODS)}; default: all")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FLOODS]:
        parser.error(f"no flood '{unknown[0]}': want {', '.join(FLOODS)}")
    passed = True
    for tls in False, True:
        names = [name for name in options.names or FLOODS if (name in OVER_TLS) == tls]
        if names:
            with serving(tls) as server:
                for name in names:
                    passed &= run(name, server, options.seconds)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
