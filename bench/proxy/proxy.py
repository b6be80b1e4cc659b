"""Runs `kvasir bench proxy` and writes docs/router-performance.md: see
bench/proxy/proxy.sh."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import performance_page as page  # noqa: E402
import provenance  # noqa: E402

WAYS = {"direct": "the worker itself", "null_proxy": "null proxy", "kserve": "router, KServe",
        "vllm_engine": "router, VllmEngine", "vllm_inference": "router, vllm.Inference",
        "kserve_tls": "router, KServe by TLS", "kserve_mtls": "router, KServe by mutual TLS"}

PAGE = """# Cost of the router

<!-- bench/proxy/proxy.sh writes this page -->

`kvasir bench proxy` sends requests of {prompt} prompt token ids, each with a streamed answer of {output} tokens, to a worker that computes nothing. There
are seven ways: directly to the worker; through a *null proxy* (gRPC's C++ callback API with the same transport and settings, which passes bytes on
unread); and through the router, by each facade and with TLS. Workers, null proxy, routers and the load generator are separate processes on loopback.
On every way requests are encoded once, and answers are counted and not parsed. A round has, on each way in turn, {requests} requests for one token and
as many for {output}, {concurrency} at a time, and then {latency} requests one at a time. Ratios are medians over {pairs} rounds. *Spread* is the middle half
relative to the median; above 15 % a figure is *undecided*. No figure is copied by hand.

{machine}

{verdicts}

{figures}

Medians over rounds, by way. CPU time is that of the worker, the null proxy or the router.

{ways}

- **rate over null proxy**: requests a second under load.
- **added ms**: the time to an answer's first message, one request at a time, minus the worker's own in the same round: the median of differences.
- **p99 over null proxy**: the 99th percentile of that time in a round, over the null proxy's.
- **CPU us**: for an answer of one token, and for each further token. A router writes tokens that arrive together in one message.
- The router has no tokenizer and logs a line for each request (to /dev/null). All ways use plain text except the last two: *by TLS* encrypts the
  connection of clients, and *by mutual TLS* also the one to a separate worker, with certificates on both sides (keys of P-256). Connections exist
  before a round begins, so it has no handshake.
- **rate over plain**: requests a second under load, over those of the same router without TLS in the same round.
- On the first two ways the first message is the worker's `Accepted`. Facades send nothing before the first token, so theirs comes later.
"""


def certificates(folder: Path) -> list:
    """Makes an authority, a key and its certificate in the folder. Returns the flags for them."""
    def openssl(*arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    ca, own = folder / "ca.pem", folder / "own.pem"
    openssl("req", "-x509", *curve, "-days", 2, "-subj", "/CN=bench", "-keyout", folder / "ca.key", "-out", ca)
    openssl("req", *curve, "-subj", "/CN=own", "-keyout", folder / "key", "-out", folder / "request")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl("x509", "-req", "-in", folder / "request", "-days", 2, "-CA", ca, "-CAkey", folder / "ca.key",
            "-extfile", folder / "names", "-out", folder / "certificate")
    own.write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return ["--tls-cert", str(own), "--tls-ca", str(ca)]


def ways(rows) -> str:
    head = ["way", "requests/s", "ms p50 / p99 under load", "first message ms p50 / p99, one at a time",
            "CPU us a request", "CPU us a token", "bytes of a request"]
    number = page.number
    return page.table(head, [
        [WAYS[row["way"]], number(row["requests_per_second"]),
         f"{number(row['load_ms_p50'])} / {number(row['load_ms_p99'])}",
         f"{number(row['first_ms_p50'])} / {number(row['first_ms_p99'])}",
         number(row["cpu_us_per_request"]), number(row["cpu_us_per_token"]),
         str(row["request_bytes"])] for row in rows])


def verdicts(report) -> str:
    """Returns sentences that say which targets are met."""
    found = {"met": [], "missed": [], "undecided": []}
    for name, target in report["targets"].items():
        (kind, limit), = target.items()
        value = report["figures"][name]
        met = value >= limit if kind == "at_least" else value <= limit
        sign = "at least" if kind == "at_least" else "at most"
        key = "undecided" if name in report["undecided"] else "met" if met else "missed"
        found[key].append(f"`{name}` is {page.number(value)} (target: {sign} {limit:g})")
    return "\n\n".join(f"**{key.capitalize()}**: {'; '.join(names)}."
                       for key, names in found.items() if names)


def text_of(report, options, flags) -> str:
    machine = report["machine"]
    figures = report["figures"]
    rows = [[cells[1], *cells[2:]] for cells in page.figure_rows("proxy", report)]
    return PAGE.format(
        prompt=int(figures["prompt_tokens"]), output=int(figures["output_tokens"]),
        concurrency=int(figures["concurrency"]), requests=int(figures["requests"]),
        latency=int(figures["latency_requests"]), pairs=int(figures["rounds"]),
        machine=f"{machine['time'][:10]}: {machine['cpu']}, {machine['threads']} threads; preset "
                f"`{options.kvasir.resolve().parent.name}`, binary (SHA-256) `{report['run']['binary'][:12]}`, `kvasir {' '.join(flags)}`.",
        verdicts=verdicts(report),
        figures=page.table(["figure", "target", "measured", "spread", ""], rows),
        ways=ways(report["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/proxy/proxy.sh")
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/router-performance.md")
    parser.add_argument("flags", nargs="*", help="flags of `kvasir bench proxy`, after --")
    options = parser.parse_args()
    if "--quick" in options.flags and options.out.resolve() == parser.get_default("out").resolve():
        parser.error("--quick: its figures mean nothing and may not be on the page; give --out")
    arguments = ["bench", "proxy", "--json", *options.flags]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([options.kvasir, *arguments, *certificates(Path(folder))], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"bench/proxy/proxy.sh: `kvasir {' '.join(arguments)}` failed")
    report = json.loads(done.stdout) | {"run": provenance.of(options.kvasir, arguments)}
    options.out.write_text(text_of(report, options, arguments))


if __name__ == "__main__":
    main()
