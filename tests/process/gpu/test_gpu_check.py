"""Tests scripts/gpu_check without a GPU: its messages, and its report about a bundle whose programs are stand-ins. A
library with a few functions stands in for the driver."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from kvasir_process import BINARY, ROOT, wait_until

DRIVER = r"""
#include <cstdlib>
#include <cstring>
extern "C" {
int cuInit(unsigned) { return std::getenv("FAKE_INIT") ? std::atoi(std::getenv("FAKE_INIT")) : 0; }
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
int cuDeviceGetCount(int* count) {
  *count = std::getenv("FAKE_COUNT") ? std::atoi(std::getenv("FAKE_COUNT")) : 1;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int, int) { std::strcpy(name, "Fake GPU"); return 0; }
int cuDeviceTotalMem_v2(unsigned long* bytes, int) { *bytes = 80ul << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 75 ? 9 : 0; return 0; }
}
"""
# Prints what gtest prints. The outcomes of its tests are in a file next to it.
PROGRAM = r"""#!/usr/bin/env python3
import json, os, sys, time
assert os.environ["KVASIR_REQUIRE_GPU"] == "1"
tests = json.load(open(sys.argv[0] + ".json"))
print("on a GPU, sm_90", flush=True)
if "--gtest_list_tests" in sys.argv:
    print("Norm.  # TypeParam = float")
    for name in tests:
        print("  " + name)
    sys.exit(0)
wanted = ["Norm." + name for name in tests]
for argument in sys.argv[1:]:
    if argument.startswith("--gtest_flagfile="):
        line, = open(argument.split("=", 1)[1])
        wanted = line.strip().split("=", 1)[1].split(":")
failed = broken = False
for name, what in tests.items():
    if "Norm." + name not in wanted:
        continue
    print("[ RUN      ] Norm." + name, flush=True)
    if what == "hangs":
        time.sleep(600)
    if what == "dies" or broken:
        print("an illegal address", flush=True)
        os.abort()
    if what == "breaks":  # like a lost CUDA context: all later tests crash
        broken, what = True, "failed"
    if what == "failed":
        print("file.cc:7: Failure, 1 is not 2")
        failed = True
    end = {"passed": "      OK", "failed": " FAILED ", "skipped": " SKIPPED"}[what]
    print(f"[ {end} ] Norm.{name}{', where GetParam() = 3' if what == 'failed' else ''} (0 ms)", flush=True)
if failed:
    print("[  FAILED  ] 1 test, listed below:")
    print("[  FAILED  ] Norm." + "X")
code = sys.argv[0] + ".code"
sys.exit(int(open(code).read()) if os.path.exists(code) else int(failed))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cc").write_text(DRIVER)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "libfake.so", folder / "driver.cc"], check=True)
    return str(folder / "libfake.so")


class Bundle:
    def __init__(self, folder, driver):
        self.folder, self.driver = folder, driver
        (folder / "bin").mkdir()
        for name in "gpu_check", "gpu_check.py":
            shutil.copy(ROOT / "scripts" / name, folder)
        self.manifest("2.17", [])

    def manifest(self, glibc, programs):
        (self.folder / "manifest.json").write_text(json.dumps(
            {"commit": "abc", "glibc": glibc, "stages": {"primitives": [], "ops": programs}}))

    def program(self, name, tests, code=None):
        """Adds a program. `tests`: {name: "passed", "failed", "skipped", "dies", "breaks" or "hangs"}."""
        path = self.folder / "bin" / name
        path.write_text(PROGRAM)
        path.chmod(0o755)
        path.with_name(f"{name}.json").write_text(json.dumps(tests))
        if code is not None:
            path.with_name(f"{name}.code").write_text(str(code))

    def path(self, *others):
        """A PATH with the tools that the scripts need and nothing else of this machine."""
        tools = self.folder / "tools"
        tools.mkdir(exist_ok=True)
        for tool in "bash", "env", "dirname":
            if not (tools / tool).exists():
                (tools / tool).symlink_to(shutil.which(tool))
        python = tools / "python3"
        python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return ":".join(map(str, [*others, tools]))

    def check(self, *flags, **environment):
        done = subprocess.run(
            [self.folder / "gpu_check", "--stage", "ops", "--driver", self.driver, *flags],
            cwd=self.folder, env={**os.environ, **environment}, capture_output=True, text=True)
        report = self.folder / "gpu-ops.json"
        return done.returncode, done.stdout, json.loads(report.read_text()) if report.exists() else None


@pytest.fixture
def bundle(tmp_path, driver):
    return Bundle(tmp_path, driver)


def test_a_missing_gpu_is_reported_with_its_own_exit_code(bundle):
    code, said, report = bundle.check("--driver", "libnone-such.so.1")
    assert code == 3 and said == "gpu_check: no GPU: there is no NVIDIA driver (libnone-such.so.1)\n"
    assert report is None
    code, said, _ = bundle.check(FAKE_INIT="999")
    assert code == 3 and "cuInit of the NVIDIA driver gives error 999" in said
    code, said, _ = bundle.check(FAKE_COUNT="0")
    assert code == 3 and "the NVIDIA driver sees none" in said


def test_a_checkout_without_a_gpu_builds_nothing():
    done = subprocess.run([ROOT / "scripts/gpu_check", "--stage", "primitives", "--driver", "libnone-such.so.1"],
                          capture_output=True, text=True)
    assert done.returncode == 3 and "no GPU" in done.stdout


def test_the_result_of_each_test_is_printed_and_reported(bundle):
    bundle.program("rows", {"A": "passed", "B": "skipped"})
    bundle.program("linear", {"C": "passed"})
    bundle.manifest("2.17", ["rows", "linear"])
    code, said, report = bundle.check()
    assert code == 0, said
    assert said.startswith("== ops on Fake GPU, compute capability 9.0, 80.0 GiB, driver of CUDA 13.1; commit abc\n")
    assert "rows: 1 passed, 0 failed, 1 skipped" in said
    assert said.endswith("2 passed, 0 failed, 1 skipped\n")
    assert report["passed"] and report["stage"] == "ops" and report["commit"] == "abc" and report["date"]
    assert report["gpu"] == {"name": "Fake GPU", "compute_capability": "9.0", "memory_bytes": 80 << 30,
                             "driver_cuda": "13.1", "gpus": 1}
    assert [test["status"] for test in report["programs"][0]["tests"]] == ["passed", "skipped"]


def statuses(result):
    return [(test["name"].removeprefix("Norm."), test["status"]) for test in result["tests"]]


def test_a_failed_test_fails_its_stage(bundle):
    bundle.program("rows", {"A": "passed", "B": "failed"})
    bundle.program("latents", {"D": "passed"})
    bundle.manifest("2.17", ["rows", "latents"])
    code, said, report = bundle.check()
    assert code == 1 and not report["passed"] and report["finished"]
    assert "failed: Norm.B: file.cc:7: Failure, 1 is not 2" in said
    assert said.endswith("2 passed, 1 failed, 0 skipped\n")  # the other tests were run


def test_a_test_that_crashes_does_not_lose_the_results_of_others(bundle):
    bundle.program("rows", {"A": "passed", "B": "dies", "C": "passed", "D": "breaks", "E": "passed", "F": "skipped"})
    bundle.manifest("2.17", ["rows"])
    code, said, report = bundle.check()
    rows, = report["programs"]
    assert code == 1
    # E crashed because of what D had left on the GPU. In a new process, it passes.
    assert sorted(statuses(rows)) == [("A", "passed"), ("B", "failed"), ("C", "passed"), ("D", "failed"),
                                      ("E", "passed"), ("F", "skipped")]
    assert rows["processes"] == 4 and "by 4 processes" in said
    died = next(test for test in rows["tests"] if test["name"] == "Norm.B")
    assert died["text"] == "ended by SIGABRT\nan illegal address"


def test_the_tests_after_a_test_that_hangs_are_run(bundle):
    bundle.program("rows", {"A": "passed", "B": "hangs", "C": "passed"})
    bundle.manifest("2.17", ["rows"])
    code, _, report = bundle.check("--test-seconds", "1")
    assert code == 1
    assert statuses(report["programs"][0]) == [("A", "passed"), ("B", "failed"), ("C", "passed")]
    assert "stopped after 1 s of one test" in report["programs"][0]["tests"][1]["text"]


def test_a_program_that_dies_before_its_tests_is_reported_with_its_last_output(bundle):
    path = bundle.folder / "bin/rows"
    path.write_text("#!/bin/sh\nsleep 600\n")
    path.chmod(0o755)
    bundle.manifest("2.17", ["rows"])
    code, said, _ = bundle.check("--test-seconds", "1")
    assert code == 1 and "its tests could not be listed; its last output:\nstopped after 1 s" in said
    path.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    code, said, report = bundle.check()
    assert code == 1 and "its tests could not be listed; its last output:\nexit code 3: no room" in said
    assert report["programs"][0]["ended"] == "its tests could not be listed"


def test_an_exit_code_fails_the_stage_even_if_every_test_passed(bundle):
    bundle.program("rows", {"A": "passed"}, code=9)
    bundle.manifest("2.17", ["rows"])
    code, _, report = bundle.check()
    assert code == 1 and report["programs"][0]["ended"] == "exit code 9"


def test_the_result_of_each_test_is_written_as_soon_as_it_ends(bundle):
    bundle.program("rows", {"A": "passed"})
    bundle.program("linear", {"B": "passed", "C": "hangs"})
    bundle.manifest("2.17", ["rows", "linear"])
    running = subprocess.Popen([bundle.folder / "gpu_check", "--stage", "ops", "--driver", bundle.driver],
                               cwd=bundle.folder, stdout=subprocess.PIPE, text=True)
    path = bundle.folder / "gpu-ops.json"
    wait_until(lambda: path.exists() and statuses(json.loads(path.read_text())["programs"][-1]) == [("B", "passed")],
               "the first test of the second program, which runs on")
    running.terminate()  # SIGTERM lets it end its program and remove its own files
    running.wait()
    report = json.loads(path.read_text())
    assert statuses(report["programs"][0]) == [("A", "passed")]
    assert not report["finished"] and not report["passed"]


def test_child_processes_of_a_program_end_when_the_time_of_the_stage_is_up(bundle):
    bundle.program("rows", {"A": "hangs"})
    bundle.manifest("2.17", ["rows"])
    pid = bundle.folder / "pid"
    tool = bundle.folder / "compute-sanitizer"  # the process starts the program and waits for it
    tool.write_text(f'#!/bin/bash\n"${{@:7}}" &\necho $! > {pid}\nwait\n')
    tool.chmod(0o755)
    code, said, _ = bundle.check("--sanitizer", "memcheck", "--seconds", "2", PATH=bundle.path(bundle.folder))
    assert code == 1 and "the stage's time is up" in said

    def is_gone():
        stat = pathlib.Path(f"/proc/{pid.read_text().strip()}/stat")
        return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    wait_until(is_gone, "the program's end")


def test_a_stage_without_any_passed_test_fails(bundle):
    bundle.program("rows", {"A": "skipped"})
    bundle.manifest("2.17", ["rows"])
    assert bundle.check()[0] == 1
    bundle.manifest("2.17", [])
    assert bundle.check()[0] == 1


def test_a_stage_ends_when_its_time_is_up(bundle):
    bundle.program("rows", {"A": "passed", "B": "hangs", "C": "passed"})
    bundle.program("linear", {"D": "passed"})
    bundle.manifest("2.17", ["rows", "linear"])
    code, said, report = bundle.check("--seconds", "2")
    assert code == 1
    assert statuses(report["programs"][0]) == [("A", "passed")]
    assert [program["log"] for program in report["programs"]] == ["not run: Norm.B Norm.C", "not run: Norm.D"]
    assert [program["ended"] for program in report["programs"]] == ["the stage's time is up"] * 2


def test_a_stage_whose_time_ends_during_the_build_is_reported_as_not_run(tmp_path, driver):
    # This checkout's bundle is packed at once, but no time is left for its stage.
    (tmp_path / "scripts").mkdir()
    for name in "gpu_check", "gpu_check.py":
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    manifest = json.dumps({"commit": "abc", "glibc": "2.17", "stages": {"ops": ["rows"]}})
    (tmp_path / "scripts/bundle").write_text(f"#!/bin/bash\nmkdir -p $5\necho '{manifest}' > $5/manifest.json\n")
    (tmp_path / "scripts/bundle").chmod(0o755)
    done = subprocess.run([tmp_path / "scripts/gpu_check", "--stage", "ops", "--driver", driver, "--seconds", "0"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 4 and "nothing was run: the build took 0 s of the stage's 0" in done.stdout


def test_programs_for_a_newer_system_are_not_started(bundle):
    bundle.manifest("99.1", [])
    code, said, _ = bundle.check()
    assert code == 4 and "need glibc 99.1" in said


def test_programs_run_under_the_given_sanitizer(bundle):
    bundle.program("rows", {"A": "passed"})
    bundle.manifest("2.17", ["rows"])
    assert bundle.check("--sanitizer", "memcheck", PATH=bundle.path())[0] == 4
    tool = bundle.folder / "compute-sanitizer"
    tool.write_text('#!/bin/bash\necho "$@" $KVASIR_GPU_SMALL > ' + str(bundle.folder / "asked") + '\nexec "${@:7}"\n')
    tool.chmod(0o755)
    code, said, report = bundle.check("--sanitizer", "memcheck", PATH=bundle.path(bundle.folder))
    assert code == 0 and report["sanitizer"] == "memcheck", said
    asked = (bundle.folder / "asked").read_text()
    # the sanitizer runs small sizes
    assert asked.startswith("--tool memcheck --report-api-errors no --error-exitcode 1 ") and asked.endswith(" 1\n")


def test_only_tests_with_the_given_names_run(bundle):
    bundle.program("rows", {"A": "passed", "B": "failed", "AOfNone": "passed"})
    bundle.program("others", {"C": "failed"})
    bundle.manifest("2.17", ["rows", "others"])
    code, said, report = bundle.check("--tests", "*.A", "--tests", "*OfNone")
    assert code == 0, said
    assert [statuses(program) for program in report["programs"]] == [[("A", "passed"), ("AOfNone", "passed")], []]
    assert bundle.check("--tests", "*.Nothing")[0] == 1  # no test ran


def test_the_error_for_a_stage_without_programs_lists_the_stages_that_have_some(bundle):
    (bundle.folder / "manifest.json").write_text(json.dumps(
        {"commit": "abc", "glibc": "2.17", "stages": {"primitives": ["rows"]}}))
    code, said, _ = bundle.check()
    assert code == 4 and "no programs of stage ops, only of primitives" in said


def test_the_check_understands_a_real_gtest_program(bundle):
    program = BINARY.parent / "bench/bench_paired_test"
    if not program.exists():
        pytest.skip("bench_paired_test is not built")
    shutil.copy(program, bundle.folder / "bin/paired")
    bundle.manifest("2.17", ["paired"])
    code, said, report = bundle.check()
    assert code == 0, said
    listed = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    assert len(report["programs"][0]["tests"]) == listed.count("\n  ") and report["programs"][0]["processes"] == 1


def test_the_usage_lists_every_stage():
    usage = subprocess.run([ROOT / "scripts/gpu_check", "--help"], capture_output=True, text=True, check=True).stdout
    for stage in "primitives", "ops", "attention", "engine", "serve", "bench":
        assert f"\n  {stage}  " in usage
    done = subprocess.run([ROOT / "scripts/gpu_check", "--stage", "all"], capture_output=True, text=True)
    assert done.returncode == 2 and "invalid choice: 'all'" in done.stderr
