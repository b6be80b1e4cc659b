"""Runs a stage of the tests that need a GPU, reports progress and writes results as JSON.

The programs come from an unpacked bundle of scripts/bundle that contains this file. In a
checkout they are built first, which needs nvcc and everything else that the build needs.
The exit code is 0 if all passed, 1 if something failed, 2 for a wrong call, 3 without a
GPU, 4 if there is nothing to run.
"""

import argparse
import ctypes
import datetime
import fnmatch
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
STAGES = {
    "primitives": "each primitive equal to its emulation; memory, copies and launches of the device",
    "ops": "each op's kernel against the op's reference",
    "attention": "attention on the shapes of models, against the CPU",
    "engine": "whole models: logits and losses against the CPU engine",
    "serve": "`kvasir serve` on the GPU, called over the network",
    "bench": "attention and decode steps, compared with PyTorch",
}
FAILED, NO_GPU, NOTHING_TO_RUN = 1, 3, 4
GIB = 1 << 30
LOG_CHARACTERS = 4000
WRITE_SECONDS, TELL_SECONDS = 1, 10  # how often results of a running program are written, and progress is printed


class Refused(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def say(text):
    print(text, flush=True)


def find_gpu(driver):
    """Returns facts about the first GPU. They come from the driver, so nothing has to be built."""
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


def build(stage):
    """Builds the stage's programs in a checkout. Returns their folder, which has a manifest."""
    root = HERE.parent
    folder = root / "build/gpu-programs" / stage
    done = subprocess.run([root / "scripts/bundle", "gpu", "--stage", stage, "--unpacked", folder])
    if done.returncode:
        raise Refused(NOTHING_TO_RUN, "nothing to run: the programs could not be built here; "
                      "build a bundle elsewhere (scripts/bundle gpu) and run its gpu_check")
    return folder


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
    # Some tests make invalid CUDA calls and check the errors, so errors of the API are not reported.
    of_tool = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return ["compute-sanitizer", "--tool", tool, *of_tool, "--error-exitcode", "1"]


# ----------------------------------------------------------------- processes

class Process:
    """A program in its own session, which is killed as a whole: otherwise a tool that started
    the program could leave it running on the GPU. Owns: the file with its output."""

    def __init__(self, command, environment):
        self.log = tempfile.NamedTemporaryFile("r", errors="replace", prefix="gpu_check_")
        with open(self.log.name, "w") as out:
            self.child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment,
                                          stdin=subprocess.DEVNULL, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.log.close()

    def kill(self):
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def ended(self):
        """How the program ended, in words; empty if it ended well."""
        code = self.child.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"exit code {code}" if code else ""


# The line that gtest prints when a test begins or ends.
EVENT = re.compile(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] (\S+?)(?:,| \(|$)", re.MULTILINE)
KINDS = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}


def follow(text):
    """Parses a test program's log. Returns the tests that have ended [(name, status, its lines)],
    and the test that is running, with its lines."""
    done, running, begin = [], None, 0
    for event in EVENT.finditer(text):
        kind, name = event[1], event[2]
        if kind == "RUN":
            running, begin = name, event.end()
        elif name == running:  # at its end gtest names failed tests again
            done.append((name, KINDS[kind], text[begin:event.start()].strip()))
            running = None
    return done, running, text[begin:].strip()


class Tests:
    """The tests of one program, run in as few processes as possible: after a test that crashes
    or hangs, a new process continues with the next test."""

    def __init__(self, program, folder, prefix, limits):
        self.path = folder / "bin" / program
        self.prefix, self.limits = prefix, limits
        self.environment = environment_of(folder)
        if prefix:  # a sanitizer makes the program many times slower
            self.environment["KVASIR_GPU_SMALL"] = "1"
        self.result = {"program": program, "seconds": 0.0, "processes": 0, "tests": []}

    def run(self):
        """Yields the result whenever tests have ended."""
        self.begin = time.monotonic()
        try:
            left = self.listed()
        except Refused as refused:
            self.end("its tests could not be listed", str(refused))
            yield self.result
            return
        if not left:  # --tests matches none of this program's tests
            self.result["left_out"] = True
            yield self.result
            return
        first, self.listed_tests = True, len(left)
        while left:
            if self.limits.left() <= 0:
                self.end("the stage's time is up", "not run: " + " ".join(left))
                break
            left = yield from self.run_process(left, all_of_them=first and self.limits.tests == ["*"])
            first = False
            self.result["seconds"] = round(time.monotonic() - self.begin, 2)
            yield self.result
        self.result["seconds"] = round(time.monotonic() - self.begin, 2)
        yield self.result

    def listed(self):
        try:
            listing = subprocess.run([self.path, "--gtest_list_tests"], env=self.environment, capture_output=True,
                                     text=True, errors="replace", timeout=self.limits.test_seconds)
        except subprocess.TimeoutExpired:
            raise Refused(FAILED, f"stopped after {self.limits.test_seconds:g} s") from None
        names, suite = [], ""
        for line in listing.stdout.splitlines():
            line = line.split("#")[0].rstrip()
            if re.fullmatch(r"\S+\.", line):
                suite = line
            elif suite and re.fullmatch(r"  \S+", line):
                names.append(suite + line.strip())
        if listing.returncode or not names:
            raise Refused(FAILED, f"exit code {listing.returncode}: {(listing.stdout + listing.stderr)[-LOG_CHARACTERS:]}")
        names = [name for name in names if not re.search(r"(^|\.)DISABLED_|/DISABLED_", name)]
        return [name for name in names if any(fnmatch.fnmatchcase(name, wanted) for wanted in self.limits.tests)]

    def add(self, name, status, text):
        self.result["tests"].append(
            {"name": name, "status": status, **({"text": text[-LOG_CHARACTERS:]} if status != "passed" and text else {})})

    def run_process(self, names, all_of_them):
        """Runs the named tests in one process; yields the result meanwhile. Returns the tests that are left."""
        self.result["processes"] += 1
        before = len(self.result["tests"])
        with tempfile.NamedTemporaryFile("w", suffix=".flags") as flags:
            command = [*self.prefix, self.path]
            if not all_of_them:  # the list is too long for an argument
                flags.write("--gtest_filter=" + ":".join(names) + "\n")
                flags.flush()
                command.append(f"--gtest_flagfile={flags.name}")
            with Process(command, self.environment) as process:
                hung = yield from self.watch(process, before)
                text = process.text()
                ended = hung or process.ended()
        done, running, words = follow(text)
        self.take(done, before)
        left = [name for name in names if name not in {name for name, _, _ in done}]
        if self.limits.left() <= 0:
            return left
        if running is not None:
            left.remove(running)
            if done and not hung:
                # An earlier test may have caused this: run the test once more, as the first one.
                return [running, *left]
            self.add(running, "failed", f"{ended}\n{words}")
        elif left and not done:
            self.end(ended or "ran no test", text)
            return []
        elif not left and ended and all(status != "failed" for _, status, _ in done):
            self.end(ended, text)  # from a sanitizer, or after the last test
        return left

    def end(self, how, text):
        self.result["ended"], self.result["log"] = how, text[-LOG_CHARACTERS:]

    def take(self, done, before):
        """Adds the tests of this process that have ended to the result, unless they are in it."""
        for name, status, lines in done[len(self.result["tests"]) - before:]:
            self.add(name, status, lines)

    def watch(self, process, before):
        """Waits for the process. If a test or the stage takes too long, kills it and returns the reason."""
        running, since = None, time.monotonic()
        written = told = since
        while True:
            try:
                process.child.wait(timeout=0.05)
                return ""
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            done, test, _ = follow(process.text())
            if test != running:
                running, since = test, now
            if now - written >= WRITE_SECONDS:
                written = now
                self.take(done, before)
                self.result["seconds"] = round(now - self.begin, 2)
                yield self.result
            if now - told >= TELL_SECONDS:
                told = now
                say(f"  {self.result['program']}: {len(self.result['tests'])} of {self.listed_tests} tests after "
                    f"{now - self.begin:.0f} s")
            if self.limits.left() <= 0:
                process.kill()
                return "stopped: the stage's time is up"
            if now - since > self.limits.test_seconds:
                process.kill()
                return f"stopped after {self.limits.test_seconds:g} s of one test"


class Limits:
    def __init__(self, seconds, test_seconds, tests):
        self.seconds, self.test_seconds, self.tests = seconds, test_seconds, tests
        self.begin = time.monotonic()

    def taken(self):
        return time.monotonic() - self.begin

    def left(self):
        return self.seconds - self.taken()


def environment_of(folder):
    environment = {**os.environ, "KVASIR_REQUIRE_GPU": "1", "KVASIR_SOURCE_DIR": str(folder)}
    environment["LD_LIBRARY_PATH"] = ":".join(
        filter(None, [str(folder / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
    environment.pop("GTEST_OUTPUT", None)  # it would make the programs write into the caller's results
    return environment


class Script:
    """A stage that a script runs. The script writes its tests and figures as JSON, repeatedly
    while it runs."""

    def __init__(self, program, folder, flags, limits):
        self.command = [sys.executable, folder / "bin" / program, "--programs", folder, *flags]
        self.environment, self.limits = environment_of(folder), limits
        self.result = {"program": program, "seconds": 0.0, "tests": []}

    def run(self):
        with tempfile.TemporaryDirectory() as scratch:
            report = pathlib.Path(scratch) / "report.json"
            command = [*self.command, "--json", report, "--seconds", str(self.limits.left())]
            with Process(command, self.environment) as process:
                told, written = 0, None
                while True:
                    try:
                        process.child.wait(timeout=0.05)
                    except subprocess.TimeoutExpired:
                        if self.limits.left() <= 0:
                            process.kill()
                    text = process.text()
                    sys.stdout.write(text[told:])
                    sys.stdout.flush()
                    told = len(text)
                    now = report.stat().st_mtime_ns if report.exists() else None
                    self.result["seconds"] = round(self.limits.taken(), 2)
                    if process.child.returncode is not None or now != written:
                        written = now
                        if now is not None:  # complete, because it was renamed into place
                            self.result.update(json.loads(report.read_text()))
                        if process.child.returncode is None:
                            yield self.result
                            continue
                    if process.child.returncode is not None:
                        break
                ended = process.ended()
                if self.limits.left() <= 0:
                    ended = "stopped: the stage's time is up"
                if ended and not any(test["status"] == "failed" for test in self.result["tests"]):
                    self.result["ended"], self.result["log"] = ended, text[-LOG_CHARACTERS:]
        yield self.result


# ------------------------------------------------------------------- results

def count(result, status):
    return sum(test["status"] == status for test in result["tests"])


def is_right(result):
    """True if all passed. A program that ran no test, or skipped all, does not count."""
    return "ended" not in result and count(result, "passed") > 0 and count(result, "failed") == 0


def tell(result):
    processes = f" by {result['processes']} processes" if result.get("processes", 1) > 1 else ""
    say(f"{result['program']}: {count(result, 'passed')} passed, {count(result, 'failed')} failed, "
        f"{count(result, 'skipped')} skipped in {result['seconds']} s{processes}")
    for test in result["tests"]:
        if test["status"] == "failed":
            say(f"  failed: {test['name']}: {test.get('text', '')}")
    if "ended" in result:
        say(f"  {result['ended']}; its last output:\n{result.get('log', '')}")


def write(path, report):
    """Replaces the file in one step, so that it is complete even if this program is killed."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.rename(path)


def main():
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "".join(f"  {name:12}{what}\n" for name, what in STAGES.items()))
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE",
                        help="the file of results, rewritten after each program (default: gpu-STAGE.json here)")
    parser.add_argument("--seconds", type=float, default=480, help="the stage's time (default: %(default)s)")
    parser.add_argument("--test-seconds", type=float, default=120, metavar="SECONDS",
                        help="a test that takes longer is stopped, and the next one begins (default: %(default)s)")
    parser.add_argument("--tests", action="append", metavar="PATTERN",
                        help="run only tests whose names match (such as `*Exact*`); can be repeated")
    parser.add_argument("--sanitizer", choices=["memcheck", "racecheck", "synccheck", "initcheck"],
                        help="run each test program in this tool of compute-sanitizer")
    parser.add_argument("--models", type=pathlib.Path, action="append", default=[], metavar="FOLDER",
                        help="engine: a model in addition to those of the bundle")
    parser.add_argument("--quick", action="store_true", help="serve, bench: small sizes; the figures mean nothing")
    parser.add_argument("--device", default="cuda:0", help="serve, bench: the device (default: %(default)s)")
    parser.add_argument("--driver", default="libcuda.so.1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    limits = Limits(arguments.seconds, arguments.test_seconds, arguments.tests or ["*"])
    try:
        gpu = find_gpu(arguments.driver)
        in_bundle = (HERE / "manifest.json").exists()
        folder = HERE if in_bundle else build(arguments.stage)
        manifest = json.loads((folder / "manifest.json").read_text())
        check_glibc(manifest)
        prefix = sanitized(arguments.sanitizer)
        if arguments.stage not in manifest["stages"]:
            raise Refused(NOTHING_TO_RUN, f"nothing to run: this bundle has no programs of stage {arguments.stage}, "
                          f"only of {', '.join(manifest['stages'])}")
        if not in_bundle and limits.left() <= 0:
            raise Refused(NOTHING_TO_RUN, f"nothing was run: the build took {limits.taken():.0f} s of the stage's "
                          f"{limits.seconds:.0f}; the built programs stay, so run it again")
    except Refused as refused:
        say(f"gpu_check: {refused}")
        sys.exit(refused.code)
    os.environ["KVASIR_GPU_MODELS"] = ":".join(str(model.resolve()) for model in arguments.models)
    say(f"== {arguments.stage} on {gpu['name']}, compute capability {gpu['compute_capability']}, "
        f"{gpu['memory_bytes'] / GIB:.1f} GiB, driver of CUDA {gpu['driver_cuda']}; commit {manifest['commit']}")
    path = arguments.json or pathlib.Path(f"gpu-{arguments.stage}.json")
    results = []
    report = {
        "stage": arguments.stage, "passed": False, "finished": False, "seconds": 0, "gpu": gpu,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": manifest["commit"], "sanitizer": arguments.sanitizer, "quick": arguments.quick, "programs": results,
    }
    programs = manifest["stages"][arguments.stage]
    # If the stage has a script, the script runs the other programs.
    scripts = [program for program in programs if program.endswith(".py")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    for program in scripts or programs:
        if scripts:
            flags = ["--device", arguments.device, *(["--quick"] if arguments.quick else [])]
            runner = Script(program, folder, flags, limits)
        else:
            runner = Tests(program, folder, prefix, limits)
        results.append(runner.result)
        for _ in runner.run():
            report["seconds"] = round(limits.taken(), 1)
            write(path, report)
        tell(results[-1])
    report["seconds"] = round(limits.taken(), 1)
    judged = [result for result in results if "left_out" not in result]
    report["passed"] = bool(judged) and all(map(is_right, judged))
    report["finished"] = True
    write(path, report)
    totals = [sum(count(result, status) for result in results) for status in ("passed", "failed", "skipped")]
    say(f"== {arguments.stage}: {'ok' if report['passed'] else 'FAILED'} in {report['seconds']} s, written to {path}")
    say("{} passed, {} failed, {} skipped".format(*totals))
    sys.exit(0 if report["passed"] else FAILED)


if __name__ == "__main__":
    main()
