"""Stage `serve` of gpu_check: `kvasir serve` on a GPU with the built-in model, with a dense
and a compressed cache. `kvasir generate` is its client; its metrics are read over HTTP, and
a signal stops it. Needs only Python and the bundle."""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

PROMPT = "It was a bright cold morning, and she said to him"
SMALL = ["--max-batched-tokens", "16", "--max-num-seqs", "2", "--max-model-len", "64", "--kv-cache-bytes", "4MiB"]


class Failure(Exception):
    pass


class Server:
    """A process of `kvasir serve` on free ports, which is stopped when the `with` block ends."""

    def __init__(self, kvasir, model, flags, seconds):
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-serve-")
        self.kvasir, self.deadline = kvasir, time.monotonic() + seconds
        folder = pathlib.Path(self.folder.name)
        self.log, ready = folder / "log", folder / "ready.json"
        ports = [word for name in ("grpc", "admin", "health", "metrics") for word in (f"--{name}-port", "0")]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [kvasir, "serve", "--model", model, *ports, "--ready-file", ready, *flags], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, env={**os.environ, "TMPDIR": self.folder.name})
        while not (ready.exists() and ready.stat().st_size):
            if self.process.poll() is not None:
                raise Failure(f"exit code {self.process.returncode} at start:\n{self.last_words()}")
            if time.monotonic() > self.deadline:
                raise Failure(f"not ready in time:\n{self.last_words()}")
            time.sleep(0.05)
        self.ready = json.loads(ready.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def last_words(self):
        return self.log.read_text(errors="replace")[-2000:]

    def metrics(self):
        with urllib.request.urlopen(f"http://{self.ready['metrics']}/metrics", timeout=10) as answer:
            return answer.read().decode()

    def metric(self, name):
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.metrics(), re.MULTILINE)
        if found is None:
            raise Failure(f"/metrics has no {name}")
        return float(found[1])

    def generate(self, max_tokens):
        done = subprocess.run(
            [self.kvasir, "generate", "--endpoint", self.ready["grpc"], "--prompt", PROMPT, "--temperature", "0",
             "--ignore-eos", "--max-tokens", str(max_tokens), "--json"],
            capture_output=True, text=True, timeout=max(1, self.deadline - time.monotonic()))
        if done.returncode:
            raise Failure(f"kvasir generate: exit code {done.returncode}: {done.stderr}\n{self.last_words()}")
        return json.loads(done.stdout)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=max(1, self.deadline - time.monotonic()))


def check(is_so, text):
    if not is_so:
        raise Failure(text)


def serve(arguments, plan, deadline):
    """Runs one server and returns its figures."""
    kvasir = arguments.programs / "bin/kvasir"
    flags = ["--device", arguments.device, "--kv-plan", plan, *(SMALL if arguments.quick else [])]
    tokens, requests = (4, 2) if arguments.quick else (128, 16)
    with Server(kvasir, arguments.programs / "models/tiny", flags, deadline - time.monotonic()) as server:
        device = arguments.device.split(":")[0]
        info = re.search(r"^kvasir_build_info{([^}]*)}", server.metrics(), re.MULTILINE)
        check(info and f'device="{device}"' in info[1], f"kvasir_build_info: want device {device}, have {info and info[1]}")
        first = server.generate(tokens)
        check(first["output_tokens"] == tokens and first["text"],
              f"want {tokens} tokens and a text, have {first}")
        begin = time.monotonic()
        with ThreadPoolExecutor(requests) as threads:
            others = list(threads.map(lambda _: server.generate(tokens), range(requests)))
        seconds = time.monotonic() - begin
        # Equal requests get the same answer, even if they run in the same steps.
        check(all(other["text"] == first["text"] for other in others), "the same request got two answers")
        check(server.metric("kvasir_cache_leaked_pages") == 0, "pages leaked")
        code = server.stop()
        check(code == 0, f"exit code {code} after SIGTERM:\n{server.last_words()}")
        return {"requests": requests, "tokens_per_second": round(requests * tokens / seconds, 1), "text": first["text"][:80]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="the bundle's folder")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    report = {"tests": [], "figures": {}}
    for plan in "dense-bf16", "rotated-4bit":
        test = {"name": f"serve.{plan}", "status": "passed"}
        try:
            report["figures"][plan] = serve(arguments, plan, deadline)
            print(f"serve over {plan}: {report['figures'][plan]}", flush=True)
        except (Failure, OSError, subprocess.TimeoutExpired) as failure:
            test |= {"status": "failed", "text": str(failure)}
        report["tests"].append(test)
        part = arguments.json.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(arguments.json)
    return 1 if any(test["status"] == "failed" for test in report["tests"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
