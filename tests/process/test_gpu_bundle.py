"""A bundle for a machine with a GPU, of the programs that this build has."""

import ctypes
import json
import os
import re
import subprocess

import pytest

from kvasir_process import ROOT

BUILD = os.environ["KVASIR_GPU_BUILD"]
# What every system has: the loader's and glibc's.
OF_THE_SYSTEM = re.compile(r"/(libc|libm|libdl|librt|libpthread|libresolv)\.so|ld-linux")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    subprocess.run([ROOT / "scripts/gpu_bundle", "--build-dir", BUILD, "--piece-mib", "1", "--out", folder],
                   check=True, stdout=subprocess.DEVNULL)
    pieces = sorted(folder.iterdir())
    assert len(pieces) > 1 and max(piece.stat().st_size for piece in pieces) <= 1 << 20
    subprocess.run(f"cat {folder}/kvasir-gpu.tar.gz.* | tar xz -C {folder}", shell=True, check=True)
    return folder / "kvasir-gpu"


def programs(unpacked):
    stages = json.loads((unpacked / "manifest.json").read_text())["stages"]
    assert stages["primitives"] and stages["ops"]
    return [unpacked / "bin" / name for names in stages.values() for name in names]


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def run(program, unpacked, **environment):
    return subprocess.run([program], env={"LD_LIBRARY_PATH": str(unpacked / "lib"), **environment},
                          capture_output=True, text=True)


def test_it_brings_every_library_that_a_system_may_lack(unpacked):
    for program in programs(unpacked):
        needs = subprocess.run(["ldd", program], env={**os.environ, "LD_LIBRARY_PATH": str(unpacked / "lib")},
                               capture_output=True, text=True, check=True).stdout
        assert "libcuda" not in needs and "libcudart" not in needs
        for path in re.findall(r"=> (\S+)", needs):
            assert path.startswith(str(unpacked / "lib")) or OF_THE_SYSTEM.search(path), path


def test_its_programs_start_without_a_driver_and_say_what_they_skip(unpacked):
    if has_driver():
        pytest.skip("this host has an NVIDIA driver")
    for program in programs(unpacked):
        done = run(program, unpacked)
        assert done.returncode == 0 and "[  PASSED  ] 0 tests" in done.stdout
        assert "needs a GPU: no NVIDIA driver" in done.stdout
        done = run(program, unpacked, KVASIR_REQUIRE_GPU="1")
        assert done.returncode == 1 and "needs a GPU: no NVIDIA driver" in done.stderr
    done = subprocess.run([unpacked / "gpu_check", "--stage", "primitives"], capture_output=True, text=True)
    assert done.returncode == 3 and "no GPU" in done.stdout
