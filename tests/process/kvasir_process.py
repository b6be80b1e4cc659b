"""Starts a kvasir process on free ports for a test, and stops it in any case."""

import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(
    os.environ.get("KVASIR_BINARY", ROOT / "build" / "dev" / "kvasir")
)
TINY = ROOT / "models" / "tiny"
OPERATOR_PORTS = ["--admin-port", "0", "--health-port", "0", "--metrics-port", "0"]
# With these, commands that do not choose ports take free ones, because other tests may use the default ports.
FREE_PORTS = {f"KVASIR_{port}_PORT": "0" for port in ("GRPC", "ADMIN", "HEALTH", "METRICS")}
START_TIMEOUT_SECONDS = 120  # sanitizer builds are slow to start
STOP_TIMEOUT_SECONDS = 60
# Each process gets a cache folder of its own, unless its test names one.
os.environ.pop("XDG_CACHE_HOME", None)


class KvasirProcess:
    """`kvasir COMMAND ...` with --ready-file, as a context manager."""

    def __init__(self, command="serve", *flags, model=TINY, ports=True):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-test-"))
        self.log_path = self.dir / "log"
        self.ready_path = self.dir / "ready.json"
        self.args = [str(BINARY), command]
        if model is not None:
            self.args += ["--model", str(model)]
        if ports:
            self.args += ["--grpc-port", "0", *OPERATOR_PORTS]
        self.args += ["--ready-file", str(self.ready_path), *map(str, flags)]
        self.process = None
        self.ready = None
        self.draining = False  # a test sets it when it asks a router to stop

    def start(self):
        # A killed process may leave files. They go to this folder, which is removed. No test reuses results of others.
        environment = {"XDG_CACHE_HOME": str(self.dir / "cache")} | os.environ | {"TMPDIR": str(self.dir)}
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                self.args, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if self.ready_path.exists() and self.ready_path.stat().st_size > 0:
                self.ready = json.loads(self.ready_path.read_text())
                return self
            if self.process.poll() is not None:
                log = self.log()
                self.__exit__()
                raise RuntimeError(f"exit {self.process.returncode} at start:\n{log}")
            time.sleep(0.05)
        log = self.log()
        self.__exit__()
        raise RuntimeError(f"not ready after {START_TIMEOUT_SECONDS} s:\n{log}")

    __enter__ = start

    def __exit__(self, *unused):
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)

    @property
    def pid(self):
        return self.process.pid

    @property
    def grpc(self):
        return self.ready["grpc"]

    @property
    def admin(self):
        return self.ready["admin"]

    @property
    def health(self):
        return self.ready["health"]

    def log(self):
        return self.log_path.read_text(errors="replace")

    def stop(self, sig=signal.SIGTERM):
        """Asks the process to stop and returns its exit code."""
        self.process.send_signal(sig)
        return self.process.wait(timeout=STOP_TIMEOUT_SECONDS)

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def metrics_text(self):
        with urllib.request.urlopen(
            f"http://{self.ready['metrics']}/metrics", timeout=10
        ) as response:
            return response.read().decode()

    def metrics(self):
        """The value of every sample: {(name, frozenset of labels): value}."""
        from prometheus_client.parser import text_string_to_metric_families

        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.metrics_text())
            for sample in family.samples
        }

    def metric(self, name, **labels):
        return self.metrics()[(name, frozenset(labels.items()))]

    def resident_bytes(self):
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/{self.pid}/status has no VmRSS")

    def threads(self):
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def own_threads(self):
        """The number of threads that kvasir started itself. Libraries give theirs other names."""
        names = []
        for task in os.listdir(f"/proc/{self.pid}/task"):
            try:
                names.append(pathlib.Path(f"/proc/{self.pid}/task/{task}/comm").read_text().strip())
            except FileNotFoundError:  # the thread has just ended
                pass
        return names.count("kvasir")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def run(*args, check=True, timeout=300, **options):
    """Runs `kvasir ARGS...` to its end and returns it with stdout and stderr as text."""
    # A process that ends at once may leave files, so they are in this folder, which is removed.
    with tempfile.TemporaryDirectory(prefix="kvasir-run-") as folder:
        options["env"] = {"XDG_CACHE_HOME": folder, **FREE_PORTS, **(options.get("env") or os.environ), "TMPDIR": folder}
        done = subprocess.run(
            [str(BINARY), *map(str, args)],
            capture_output=True,
            text=True,
            timeout=timeout,
            **options,
        )
    if check and done.returncode != 0:
        raise RuntimeError(f"{args}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done


class CuttableProxy:
    """A TCP proxy to `target`. It can cut all connections, as if a machine had crashed, and accept new ones again."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.lock = threading.Lock()
        self.silent = threading.Event()
        self._listen(0)
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]

    def _listen(self, port):
        self.sockets = []  # None after a cut
        self.listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=[self.listener], daemon=True).start()

    def silence(self):
        """Passes no more bytes, and keeps all connections open, until they are cut."""
        self.silent.set()

    def _accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # cut
                return
            try:
                server = socket.create_connection(self.target)
            except OSError:  # nothing listens there now
                client.close()
                continue
            with self.lock:
                if self.sockets is None:
                    client.close()
                    server.close()
                    return
                self.sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        try:
            while data := source.recv(65536):
                if not self.silent.is_set():
                    sink.sendall(data)
        except OSError:
            pass
        else:
            # Passes on that one side has closed its half.
            try:
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def cut(self):
        """Resets every connection, without a half-close or RST_STREAM, and refuses new ones."""
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self.listener.close()
        with self.lock:
            sockets, self.sockets = self.sockets, None
        self.silent.clear()
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # A closed socket stays alive while a thread is in recv() on it.
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()

    def heal(self):
        self._listen(int(self.address.rsplit(":", 1)[1]))


def altered_model(folder, source=TINY, **fields):
    """A copy of `source` in `folder` whose config.json has these fields."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def only_in_soak(part, values, quick):
    """Parameters of a test. Without KVASIR_SOAK only those of `quick` run; this part of scripts/soak runs all."""
    import pytest  # programs without pytest use this file too

    unknown = set(quick) - set(values)
    assert not unknown, unknown
    skip = pytest.mark.skipif(not os.environ.get("KVASIR_SOAK"), reason=f"scripts/soak {part} runs it")
    return [value if value in quick else pytest.param(value, marks=skip) for value in values]


def wait_until(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")
