"""scripts/gpu_check where there is no GPU: what it says then, and what it makes of programs,
of which a bundle of stand-ins has some. A driver is a library of a few functions."""

import json
import os
import shutil
import subprocess

import pytest

from kvasir_process import ROOT

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
# Gives gtest's report that lies beside it, and its exit code.
PROGRAM = """#!/bin/bash
for argument; do case "$argument" in --gtest_output=json:*) report=${argument#*json:} ;; esac; done
[ "$KVASIR_REQUIRE_GPU" = 1 ] || exit 9
echo "last words of $(basename $0)"
[ ! -f $0.sleeps ] || exec sleep 600
[ ! -f $0.json ] || cp $0.json $report
exit $(cat $0.code)
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

    def program(self, name, tests, code=0):
        """tests: name -> "passed", "failed" or "skipped"; None leaves no report."""
        path = self.folder / "bin" / name
        path.write_text(PROGRAM)
        path.chmod(0o755)
        path.with_name(f"{name}.code").write_text(str(code))
        if tests is not None:
            cases = []
            for case, status in tests.items():
                cases.append({"name": case, "result": "SKIPPED" if status == "skipped" else "COMPLETED"})
                if status == "failed":
                    cases[-1]["failures"] = [{"failure": "1 is not 2"}]
            path.with_name(f"{name}.json").write_text(
                json.dumps({"testsuites": [{"name": "Norm", "testsuite": cases}]}))

    def check(self, *flags, **environment):
        done = subprocess.run(
            [self.folder / "gpu_check", "--stage", "ops", "--driver", self.driver, *flags],
            cwd=self.folder, env={**os.environ, **environment}, capture_output=True, text=True)
        report = self.folder / "gpu-ops.json"
        return done.returncode, done.stdout, json.loads(report.read_text()) if report.exists() else None


@pytest.fixture
def bundle(tmp_path, driver):
    return Bundle(tmp_path, driver)


def test_without_a_gpu_it_says_so_with_an_exit_code_of_its_own(bundle):
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


def test_what_came_of_each_test_is_told_and_written(bundle):
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


def test_failures_and_crashes_fail_the_stage(bundle):
    bundle.program("rows", {"A": "passed", "B": "failed"}, code=1)
    bundle.program("linear", None, code=134)
    bundle.program("latents", {"D": "passed"})
    bundle.manifest("2.17", ["rows", "linear", "latents"])
    code, said, report = bundle.check()
    assert code == 1 and not report["passed"]
    assert "failed: Norm.B: 1 is not 2" in said
    assert "exit code 134; its last words:\nlast words of linear" in said
    assert said.endswith("2 passed, 1 failed, 0 skipped\n")  # the others were run


def test_a_program_that_showed_nothing_is_no_success(bundle):
    bundle.program("rows", {"A": "skipped"})
    bundle.manifest("2.17", ["rows"])
    assert bundle.check()[0] == 1
    bundle.manifest("2.17", [])
    assert bundle.check()[0] == 1


def test_a_stage_ends_when_its_time_is_up(bundle):
    bundle.program("rows", {"A": "passed"})
    (bundle.folder / "bin/rows.sleeps").touch()
    bundle.program("linear", {"C": "passed"})
    bundle.manifest("2.17", ["rows", "linear"])
    code, said, report = bundle.check("--seconds", "1")
    assert code == 1
    assert ["stopped after" in report["programs"][0]["ended"], "not run" in report["programs"][1]["ended"]] == [True, True]


def test_programs_of_a_newer_system_are_not_tried(bundle):
    bundle.manifest("99.1", [])
    code, said, _ = bundle.check()
    assert code == 4 and "need glibc 99.1" in said


def test_programs_run_in_the_sanitizer_that_is_asked_for(bundle):
    bundle.program("rows", {"A": "passed"})
    bundle.manifest("2.17", ["rows"])
    assert bundle.check("--sanitizer", "memcheck", PATH="/usr/bin:/bin")[0] == 4
    tool = bundle.folder / "compute-sanitizer"
    tool.write_text('#!/bin/bash\necho "$@" > ' + str(bundle.folder / "asked") + '\nexec "${@:5}"\n')
    tool.chmod(0o755)
    code, said, report = bundle.check("--sanitizer", "memcheck", PATH=f"{bundle.folder}:/usr/bin:/bin")
    assert code == 0 and report["sanitizer"] == "memcheck", said
    assert (bundle.folder / "asked").read_text().startswith("--tool memcheck --error-exitcode 1 ")


def test_it_knows_the_stages_that_there_are():
    told = subprocess.run([ROOT / "scripts/gpu_check", "--help"], capture_output=True, text=True, check=True).stdout
    assert "primitives" in told and "ops" in told and "bench" not in told
    done = subprocess.run([ROOT / "scripts/gpu_check", "--stage", "bench"], capture_output=True, text=True)
    assert done.returncode == 2 and "invalid choice: 'bench'" in done.stderr
    told = subprocess.run([ROOT / "scripts/gpu_bundle", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--piece-mib" in told
    for flags, why in [(["--piece-mib", "0"], "want a whole number above 0, have '0'"),
                       (["--pieces"], "unknown argument '--pieces'"),
                       (["--build-dir", "none-such"], "none-such has no programs for a GPU")]:
        done = subprocess.run([ROOT / "scripts/gpu_bundle", *flags], capture_output=True, text=True)
        assert done.returncode == 2 and why in done.stderr
