"""The choice of nvcc by the build (cmake/cuda.cmake), and the toolkit that scripts/setup_cuda leaves."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from kvasir_process import ROOT

PROJECT = f"""\
cmake_minimum_required(VERSION 3.25)
project(asks LANGUAGES NONE)
include({ROOT}/cmake/cuda.cmake)
kvasir_find_nvcc()
message(STATUS "found [${{KVASIR_FOUND_NVCC}}] without [${{KVASIR_WITHOUT_NVCC}}]")
"""
WANT = "want 13.0 or a later 13"


def put_nvcc(path, release):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho x >> '{path}.asked'\n"
                    f"echo 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def configure(tmp_path):
    """configure(*flags, path=FOLDER) -> (the chosen nvcc, the reason why there is none, all output)"""
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    # PATH has only the generator and a shell, because the machine's own nvcc may be next to them.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("ninja", "sh"):
        (tools / name).symlink_to(shutil.which(name))

    def go(*flags, path=tmp_path / "none"):
        done = subprocess.run(
            [shutil.which("cmake"), "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "out",
             "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", *flags],
            env={"PATH": f"{path}:{tools}"}, capture_output=True, text=True)
        said = done.stdout + done.stderr
        found = re.search(r"found \[(.*)\] without \[(.*)\]", said)
        return (*(found.groups() if found else ("", "")), said)

    return go


def test_the_error_for_an_nvcc_of_another_release_names_it(configure, tmp_path):
    for release in ("11.8", "12.9", "14.0"):
        old = put_nvcc(tmp_path / release / "nvcc", release)
        assert configure(path=old.parent)[:2] == ("", f"nvcc {release}, {WANT}")
        _, _, said = configure("-DKVASIR_CUDA=ON", path=old.parent)
        assert f"KVASIR_CUDA=ON: nvcc {release}, {WANT}" in said
        assert configure("-DKVASIR_CUDA=AUTO", path=old.parent)[0] == ""
    assert "says no release" in configure(f"-DKVASIR_NVCC={tmp_path}/nothing")[1]


def test_configuring_the_build_runs_a_suitable_nvcc_only_once(configure, tmp_path):
    nvcc = put_nvcc(tmp_path / "bin/nvcc", "13.1")
    assert configure(path=nvcc.parent)[:2] == (str(nvcc), "")
    assert (tmp_path / "bin/nvcc.asked").read_text() == "x\n"
    # The next run searches again: no path is remembered.
    assert configure()[:2] == ("", "nvcc is not on PATH; scripts/setup cuda gets it")
    assert "nvcc is not on PATH" in configure("-DKVASIR_CUDA=1")[2]


@pytest.mark.parametrize("off", ["OFF", "0", "FALSE", "NO"])
def test_the_build_runs_no_nvcc_if_kvasir_cuda_is_off(configure, tmp_path, off):
    nvcc = put_nvcc(tmp_path / "bin/nvcc", "13.0")
    assert configure(f"-DKVASIR_CUDA={off}", path=nvcc.parent)[:2] == ("", f"KVASIR_CUDA is {off}")
    assert not (tmp_path / "bin/nvcc.asked").exists()


@pytest.mark.parametrize("on", ["ON", "1", "TRUE", "yes"])
def test_kvasir_cuda_accepts_every_word_that_cmake_accepts_for_on(configure, on):
    assert f"KVASIR_CUDA={on}: nvcc is not on PATH" in configure(f"-DKVASIR_CUDA={on}")[2]


def test_the_cuda_toolkit_in_the_build_folder_has_priority_over_the_one_on_path(configure, tmp_path):
    machines = put_nvcc(tmp_path / "bin/nvcc", "11.8")
    own = put_nvcc(tmp_path / "build/cuda-toolkit/nvidia/cu13/bin/nvcc", "13.0")
    assert configure(path=machines.parent)[0] == str(own)


class Tree:
    """scripts/setup_cuda in a tree with a package index of its own, which is a folder with wheels."""

    def __init__(self, root):
        self.root = root
        (root / "scripts").mkdir()
        (root / "index").mkdir()
        shutil.copy(ROOT / "scripts/pip_certificates", root / "scripts")
        text = (ROOT / "scripts/setup_cuda").read_text()
        self.wheels = re.findall(r"(nvidia-[a-z-]+)==([\d.]+)", text)
        # The tests' own Python replaces a new environment, which would take seconds to make.
        command = '/usr/bin/python3 -m venv "$new/venv"\n'
        assert command in text
        script = root / "scripts/setup_cuda"
        script.write_text(text.replace(
            command, f'mkdir "$new"; ln -s "{sys.prefix}" "$new/venv"\n'))
        script.chmod(0o755)

    def offer(self, release="13.0"):
        for name, version in self.wheels:
            module = name.replace("-", "_")
            info = f"{module}-{version}.dist-info"
            files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                     f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                     f"{info}/RECORD": ""}
            if name == "nvidia-cuda-nvcc":
                files["nvidia/cu13/bin/nvcc"] = f"#!/bin/sh\necho 'release {release}, V{release}.88'\n"
            if name == "nvidia-cuda-runtime":
                files["nvidia/cu13/lib/libcudart.so.13"] = "a library"
            if name == "nvidia-cublas":
                files["nvidia/cu13/include/cublasLt.h"] = "a header"
                files["nvidia/cu13/lib/libcublasLt.so.13"] = "which is large"
            wheel = self.root / f"index/{module}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as file:
                for path, text in files.items():
                    entry = zipfile.ZipInfo(path)
                    entry.external_attr = (0o100755 if "/bin/" in path else 0o100644) << 16
                    file.writestr(entry, text)

    def run(self):
        done = subprocess.run([self.root / "scripts/setup_cuda"], capture_output=True, text=True,
                              env={**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull,
                                   "PIP_FIND_LINKS": str(self.root / "index")})
        return done.returncode, done.stdout, done.stderr

    def left(self):
        build = self.root / "build"
        return sorted(path.name for path in build.iterdir()) if build.exists() else []


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_the_fetched_cuda_toolkit_is_complete_and_a_second_run_downloads_nothing(tree):
    tree.offer()
    code, out, error = tree.run()
    assert code == 0, error
    assert "530 MB to fetch, 280 MB there" in out
    assert tree.left() == ["cuda-toolkit"]
    root = tree.root / "build/cuda-toolkit/nvidia/cu13"
    assert (root / "lib64/libcudart.so").read_text() == "a library"
    assert os.access(root / "bin/nvcc", os.X_OK)
    # Only the headers of cuBLAS are installed. The machine that runs the program has the library.
    assert (root / "include/cublasLt.h").read_text() == "a header"
    assert not (root / "lib/libcublasLt.so.13").exists()
    shutil.rmtree(tree.root / "index")
    assert tree.run() == (0, "", "")


def test_a_toolkit_of_another_release_or_without_an_index_leaves_no_files(tree):
    code, _, error = tree.run()
    assert code == 1 and "could not fetch nvidia-cuda-nvcc==13.0.88" in error
    assert tree.left() == []
    tree.offer(release="13.2")
    code, _, error = tree.run()
    assert code == 1 and "bin/nvcc is not 13.0" in error
    assert tree.left() == []


def test_build_and_test_scripts_never_fetch_the_cuda_toolkit_themselves():
    for script in ("test", "check", "build", "serve", "soak", "setup_venv"):
        assert "setup_cuda" not in (ROOT / "scripts" / script).read_text()
        assert "setup cuda" not in (ROOT / "scripts" / script).read_text()
