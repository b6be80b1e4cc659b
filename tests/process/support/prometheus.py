"""Starts a real Prometheus (Debian's package) on a free port, and stops it in any case."""

import json
import pathlib
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request

PROMETHEUS = "/usr/bin/prometheus"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Prometheus:
    """Scrapes `targets`, and `others` ({job: (targets, labels)}). Use it as a context manager."""

    def __init__(self, targets, rules=None, interval="1s", job="kvasir", labels=None, others=None):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-prometheus-"))
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": interval},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": scraped, "labels": given or {}}]}
                for name, (scraped, given) in {job: (targets, labels), **(others or {})}.items()
            ],
        }
        (self.dir / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.url = f"http://127.0.0.1:{free_port()}"
        self.process = None

    def __enter__(self):
        self.process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={self.dir}/prometheus.yml",
                f"--storage.tsdb.path={self.dir}/data",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, *unused):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def get(self, path, **parameters):
        """Returns the data of an answer of the HTTP API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.loads(response.read())["data"]

    def query(self, promql):
        return self.get("query", query=promql)["result"]

    def ups(self):
        """Returns the number of targets that answer, or 0 if Prometheus itself does not answer yet."""
        try:
            return sum(float(row["value"][1]) for row in self.query("up"))
        except OSError:
            return 0
