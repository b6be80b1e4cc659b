"""Bundles of this build's programs, for machines on which nothing can be built."""

import ctypes
import json
import os
import pathlib
import re
import subprocess

import pytest

from kvasir_process import ROOT

BUILD = pathlib.Path(os.environ["KVASIR_BUNDLE_BUILD"])
# Every system has the dynamic loader and the libraries of glibc.
OF_THE_SYSTEM = re.compile(r"/(libc|libm|libdl|librt|libpthread|libresolv)\.so|ld-linux")
# Only `kvasir bench prefill` needs these libraries, for its baseline. Builds of scripts/bundle do not have them.
OF_BENCHMARKS = re.compile(r"lib(dnnl|gomp|OpenCL)\.so")
needs_nvcc = pytest.mark.skipif(not (BUILD / "kernels/cuda/kernels_gpu_primitives_test").exists(),
                                reason="needs a whole build with nvcc")


def bundle(*flags, cwd=None):
    return subprocess.run([ROOT / "scripts/bundle", *flags], cwd=cwd, capture_output=True, text=True)


def pack(what, folder, *flags):
    """Packs a bundle and returns the pieces and the folder that they unpack to."""
    done = bundle(what, "--build-dir", BUILD, "--out", folder / "pieces", *flags)
    assert done.returncode == 0, done.stderr
    pieces = sorted((folder / "pieces").iterdir())
    subprocess.run(f"cat {folder}/pieces/kvasir-{what}.tar.xz.* | tar xJ -C {folder}", shell=True, check=True)
    return pieces, folder / f"kvasir-{what}"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    pieces, folder = pack("gpu", tmp_path_factory.mktemp("gpu"), "--piece-mib", "1", "--stage", "primitives")
    assert len(pieces) > 1 and max(piece.stat().st_size for piece in pieces) <= 1 << 20
    return folder


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "it"
    done = bundle("serve", "--build-dir", BUILD, "--unpacked", folder)
    assert done.returncode == 0, done.stderr
    return folder


def libraries(folder, program):
    """The libraries of a program of the bundle, found in the bundle's own folder."""
    needs = subprocess.run(["ldd", program], env={**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")},
                           capture_output=True, text=True, check=True).stdout
    assert "not found" not in needs
    return re.findall(r"=> (\S+)", needs)


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_libraries(folder):
    for program in (folder / "bin").iterdir():
        if program.suffix == ".py":
            continue
        for path in libraries(folder, program):
            assert "libcuda" not in path, path
            assert path.startswith(str(folder / "lib")) or OF_THE_SYSTEM.search(path), path


@needs_nvcc
def test_a_bundle_has_every_library_that_a_system_may_lack(gpu):
    check_libraries(gpu)
    stages = json.loads((gpu / "manifest.json").read_text())["stages"]
    assert list(stages) == ["primitives"] and stages["primitives"]


@needs_nvcc
def test_the_list_of_programs_has_every_stage():
    stages = {line.split()[0] for line in (BUILD / "gpu_programs.txt").read_text().splitlines()}
    usage = subprocess.run([ROOT / "scripts/gpu_check", "--help"], capture_output=True, text=True, check=True).stdout
    assert stages == set(re.search(r"--stage \{([a-z,]+)\}", usage)[1].split(","))


@needs_nvcc
def test_programs_of_a_bundle_start_without_a_driver_and_report_their_skips(gpu):
    if has_driver():
        pytest.skip("this host has an NVIDIA driver")
    for program in (gpu / "bin").iterdir():
        for required in ({}, {"KVASIR_REQUIRE_GPU": "1"}):
            done = subprocess.run([program], env={"LD_LIBRARY_PATH": str(gpu / "lib"), **required},
                                  capture_output=True, text=True)
            assert done.returncode == (1 if required else 0)
            assert "needs a GPU: no NVIDIA driver" in done.stdout + done.stderr
    done = subprocess.run([gpu / "gpu_check", "--stage", "primitives"], capture_output=True, text=True)
    assert done.returncode == 3 and "no GPU" in done.stdout


def test_a_bundled_server_runs_with_only_the_files_of_its_bundle(serve):
    check_libraries(serve)
    done = subprocess.run([serve / "kvasir", "generate", "--model", "models/tiny", "--prompt", "It was a",
                           "--max-tokens", "4", "--temperature", "0", "--json"],
                          cwd=serve, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output_tokens"] == 4


def test_programs_and_libraries_of_a_server_fit_32_mib(serve, tmp_path):
    packed = tmp_path / "packed.tar.xz"
    files = [str(path.relative_to(serve)) for part in ("bin", "lib") for path in (serve / part).iterdir()
             if not OF_BENCHMARKS.search(path.name)]
    with open(packed, "wb") as out:
        tar = subprocess.Popen(["tar", "-C", serve, "-c", *files], stdout=subprocess.PIPE)
        subprocess.run(["xz", "-T0", "-2"], stdin=tar.stdout, stdout=out, check=True)
        assert tar.wait() == 0
    assert packed.stat().st_size <= 32 << 20


def test_a_folder_that_is_not_a_bundle_is_not_changed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").write_text("dear")
    (tmp_path / "file").write_text("")
    # A relative path starts at the caller's working directory. The error is reported before anything is built.
    for folder, why in [("mine", "is neither empty nor a bundle"), (".", "is neither empty nor a bundle"),
                        (tmp_path / "mine", "is neither empty"), ("file", "is not a folder")]:
        done = bundle("serve", "--unpacked", str(folder), "--build-dir", "none-such", cwd=tmp_path)
        assert done.returncode == 2 and why in done.stderr, done
        assert str(tmp_path) in done.stderr
    assert (tmp_path / "mine/letter").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_only_the_files_of_an_earlier_bundle_are_replaced(serve):
    (serve / "bin/old").touch()
    (serve / "letter").write_text("dear")
    done = bundle("serve", "--build-dir", BUILD, "--unpacked", serve.name, cwd=serve.parent)
    assert done.returncode == 0, done.stderr
    assert (serve / "bin/kvasir").exists() and not (serve / "bin/old").exists()
    assert (serve / "letter").read_text() == "dear"


def test_the_error_for_wrong_arguments_lists_the_allowed_ones(tmp_path):
    (tmp_path / "empty").mkdir()
    for flags, why in [((), "want gpu or serve, have ''"), (("all",), "want gpu or serve, have 'all'"),
                       (("gpu", "--piece-mib", "0"), "want a whole number above 0, have '0'"),
                       (("gpu", "--pieces"), "unknown argument '--pieces'"),
                       (("gpu", "--out"), "--out needs a value"),
                       (("serve", "--stage", "ops"), "--stage applies only to gpu"),
                       (("gpu", "--model", tmp_path / "empty"), "no config.json there"),
                       (("gpu", "--build-dir", tmp_path / "empty"), "has no programs for a GPU"),
                       (("serve", "--build-dir", tmp_path / "empty"), "empty/kvasir is not built")]:
        done = bundle(*flags)
        assert done.returncode == 2 and why in done.stderr, (flags, done)
    usage = bundle("--help")
    assert usage.returncode == 0 and "--unpacked DIR" in usage.stdout and "gpu_check --stage" in usage.stdout
