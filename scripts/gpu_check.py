"""Runs a stage of the tests that need a GPU, reports as it goes and writes what came
of each test as JSON.

What it runs comes from a bundle of scripts/gpu_bundle, unpacked, in which this file
lies; or, in a checkout, is built first, which needs nvcc and all that the build needs.
Exits with 0 when all passed, 1 when something failed, 2 for a wrong call, 3 where there
is no GPU, 4 where there is nothing to run.
"""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
STAGES = {
    "primitives": "each primitive equal to its emulation; memory, copies and launches of the device",
    "ops": "each op's kernel against the op's reference",
}
FAILED, NO_GPU, NOTHING_TO_RUN = 1, 3, 4
GIB = 1 << 30


class Refused(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def say(text):
    print(text, flush=True)


def find_gpu(driver):
    """The first GPU, asked of the driver itself: nothing has to be built for it."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        raise Refused(NO_GPU, f"no GPU: there is no NVIDIA driver ({driver})") from None

    def ask(name, *args):
        code = getattr(cuda, name)(*args)
        if code:
            raise Refused(NO_GPU, f"no GPU: {name} of the NVIDIA driver gives error {code}")

    ask("cuInit", 0)
    count, version, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    ask("cuDriverGetVersion", ctypes.byref(version))
    ask("cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise Refused(NO_GPU, "no GPU: the NVIDIA driver sees none")
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    ask("cuDeviceGet", ctypes.byref(device), 0)
    ask("cuDeviceGetName", name, 256, device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    capability = []
    for attribute in 75, 76:  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        ask("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return {
        "name": name.value.decode(),
        "compute_capability": "{}.{}".format(*capability),
        "memory_bytes": memory.value,
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "gpus": count.value,
    }


def build():
    """The manifest of a checkout, where the programs are built."""
    root = HERE.parent
    done = subprocess.run([root / "scripts/gpu_bundle", "--unpacked", root / "build/gpu-programs"])
    if done.returncode:
        raise Refused(NOTHING_TO_RUN, "nothing to run: the programs could not be built here; "
                      "build a bundle elsewhere (scripts/gpu_bundle) and run its gpu_check")
    return root / "build/gpu-programs"


def check_glibc(manifest):
    have = platform.libc_ver()[1]

    def version(text):
        return [int(part) for part in text.split(".")]

    if have and version(have) < version(manifest["glibc"]):
        raise Refused(NOTHING_TO_RUN, f"the programs need glibc {manifest['glibc']}, this machine has {have}: "
                      "build the bundle on an older system")


def sanitized(tool):
    if tool is None:
        return []
    if shutil.which("compute-sanitizer") is None:
        raise Refused(NOTHING_TO_RUN, "--sanitizer: compute-sanitizer is not on PATH")
    return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]


def tests_of(report):
    """(name, status, text) of each test in gtest's JSON."""
    for suite in report["testsuites"]:
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test.get("failures"):
                yield name, "failed", test["failures"][0]["failure"]
            elif test.get("result") != "COMPLETED":
                why = test.get("skipped", [{}])[0].get("message", "")
                yield name, "skipped", why
            else:
                yield name, "passed", ""


def run_program(program, folder, prefix, seconds):
    with tempfile.TemporaryDirectory() as scratch:
        report = pathlib.Path(scratch) / "report.json"
        log = pathlib.Path(scratch) / "log"
        environment = {**os.environ, "KVASIR_REQUIRE_GPU": "1"}
        environment["LD_LIBRARY_PATH"] = ":".join(
            filter(None, [str(folder / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
        begin = time.monotonic()
        ended = ""
        with open(log, "w") as out:
            try:
                code = subprocess.run(
                    [*prefix, folder / "bin" / program, f"--gtest_output=json:{report}"],
                    stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=seconds).returncode
                ended = f"exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"stopped after {seconds:.0f} s: the stage's time is up"
        took = time.monotonic() - begin
        tests = []
        if report.exists():
            tests = [{"name": name, "status": status, **({"text": text} if text else {})}
                     for name, status, text in tests_of(json.loads(report.read_text()))]
        result = {"program": program, "seconds": round(took, 2), "tests": tests}
        if ended:
            result["ended"] = ended
            result["log"] = log.read_text(errors="replace")[-4000:]
        return result


def count(result, status):
    return sum(test["status"] == status for test in result["tests"])


def is_right(result):
    """A program that ran no test, or skipped all, has shown nothing."""
    return "ended" not in result and count(result, "passed") > 0 and count(result, "failed") == 0


def tell(result):
    say(f"{result['program']}: {count(result, 'passed')} passed, {count(result, 'failed')} failed, "
        f"{count(result, 'skipped')} skipped in {result['seconds']} s")
    for test in result["tests"]:
        if test["status"] == "failed":
            say(f"  failed: {test['name']}: {test['text']}")
    if "ended" in result:
        say(f"  {result['ended']}; its last words:\n{result['log']}")


def main():
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "".join(f"  {name:12}{what}\n" for name, what in STAGES.items()))
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="results (default: gpu-STAGE.json here)")
    parser.add_argument("--seconds", type=float, default=480, help="the stage's time (default: %(default)s)")
    parser.add_argument("--sanitizer", choices=["memcheck", "racecheck", "synccheck", "initcheck"],
                        help="runs each program in this tool of compute-sanitizer")
    parser.add_argument("--driver", default="libcuda.so.1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begin = time.monotonic()
    try:
        gpu = find_gpu(arguments.driver)
        folder = HERE if (HERE / "manifest.json").exists() else build()
        manifest = json.loads((folder / "manifest.json").read_text())
        check_glibc(manifest)
        prefix = sanitized(arguments.sanitizer)
    except Refused as refused:
        say(f"gpu_check: {refused}")
        sys.exit(refused.code)
    say(f"== {arguments.stage} on {gpu['name']}, compute capability {gpu['compute_capability']}, "
        f"{gpu['memory_bytes'] / GIB:.1f} GiB, driver of CUDA {gpu['driver_cuda']}; commit {manifest['commit']}")
    results = []
    for program in manifest["stages"][arguments.stage]:
        left = arguments.seconds - (time.monotonic() - begin)
        if left <= 0:
            results.append({"program": program, "seconds": 0, "tests": [], "log": "",
                            "ended": "not run: the stage's time is up"})
        else:
            results.append(run_program(program, folder, prefix, left))
        tell(results[-1])
    seconds = round(time.monotonic() - begin, 1)
    passed = bool(results) and all(map(is_right, results))
    report = {
        "stage": arguments.stage, "passed": passed, "seconds": seconds, "gpu": gpu,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": manifest["commit"], "sanitizer": arguments.sanitizer, "programs": results,
    }
    path = arguments.json or pathlib.Path(f"gpu-{arguments.stage}.json")
    path.write_text(json.dumps(report, indent=1) + "\n")
    totals = [sum(count(result, status) for result in results) for status in ("passed", "failed", "skipped")]
    say(f"== {arguments.stage}: {'ok' if passed else 'FAILED'} in {seconds} s, written to {path}")
    say("{} passed, {} failed, {} skipped".format(*totals))
    sys.exit(0 if passed else FAILED)


if __name__ == "__main__":
    main()
