"""Tests of scripts/ that need no build."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from kvasir_process import ROOT, wait_until

WITHIN = ROOT / "scripts/within"
AUTO = ["--kv-plan", "auto"]
# Leaves a grandchild and prints its process id.
LEAVES_A_CHILD = "(trap '' TERM; exec sleep 300) & echo $!; wait"


def is_running(pid):
    try:
        state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def start(seconds, command):
    return subprocess.Popen(
        [WITHIN, str(seconds), "bash", "-c", command], stdout=subprocess.PIPE, text=True)


def test_a_command_over_its_time_budget_ends_with_all_its_child_processes():
    process = start(1, LEAVES_A_CHILD)
    child = int(process.stdout.readline())
    assert process.wait(timeout=60) == 124
    wait_until(lambda: not is_running(child), "the end of the grandchild")


def test_ctrl_c_ends_a_command_and_all_its_child_processes():
    process = start(300, LEAVES_A_CHILD)
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    wait_until(lambda: not is_running(child), "the end of the grandchild")


def test_a_command_within_its_time_budget_keeps_its_exit_code_and_its_signals():
    assert start(60, "exit 7").wait(timeout=60) == 7
    # The command can be interrupted.
    assert start(60, "kill -INT $$; exit 7").wait(timeout=60) == 130


def test_the_serve_script_prints_its_usage():
    done = subprocess.run([ROOT / "scripts/serve", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--demo" in done.stdout


@pytest.mark.parametrize("seconds, part, named", [
    ("60", "storms", "no part 'storms'"), ("60", "st.rm", "no part 'st.rm'"), ("60", "", "no part ''"),
    ("soon", "storm", "want a whole number above 0, have 'soon'"),
])
def test_the_soak_script_refuses_unknown_arguments_before_it_builds(seconds, part, named):
    done = subprocess.run([ROOT / "scripts/soak", part], capture_output=True, text=True,
                          env={**os.environ, "KVASIR_SOAK_SECONDS": seconds})
    assert done.returncode == 2 and named in done.stderr


def test_tests_without_a_gpu_are_counted_separately_and_other_skips_have_a_reason(tmp_path):
    stage = tmp_path / "dev"
    (stage / "gtest").mkdir(parents=True)
    why = "gpu_main.cc:18&#x0A;needs a GPU: no NVIDIA driver&#x0A;"
    (stage / "gtest/kernels_gpu_test.xml").write_text(
        '<testsuites><testsuite name="A"><testcase name="a" classname="A" result="completed"/>'
        + f'<testcase name="b" classname="A" result="skipped"><skipped message="{why}"/></testcase>' * 2
        + '<testcase name="c" classname="A" result="skipped"><skipped message="other"/></testcase>'
        "</testsuite></testsuites>")
    (stage / "ctest.xml").write_text(
        '<testsuite><testcase name="kernels_gpu_test" status="run"/>'
        '<testcase name="kernels_nvcc" status="notrun"><skipped/>'
        "<system-out>SKIPPED: nvcc 11.8; no kernel was compiled\n</system-out></testcase></testsuite>")
    done = subprocess.run(["python3", ROOT / "scripts/count_results.py", tmp_path],
                          capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "dev: 1 passed, 0 failed, 4 skipped",
        "  kernels_nvcc: SKIPPED: nvcc 11.8; no kernel was compiled",
        "tests skipped because they need a GPU: 2",
        "1 passed, 0 failed, 4 skipped"]


# The stub of kvasir prints its arguments; setup and build have nothing to do.
STUBS = {
    "scripts/setup": "#!/bin/sh\n",
    "scripts/build": "#!/bin/sh\n",
    "build/release/kvasir": "#!/bin/sh\nprintf '%s\\n' \"$@\"\n",
    "models/fetch": "#!/bin/sh\n[ $1 = --list ] && echo 'known  a model' || echo fetch $1\n",
    "models/recommend": "#!/bin/sh\n[ $1 = --folder ] && echo $2-recommended || echo recommend $1\n",
}


@pytest.fixture
def serve(tmp_path):
    """scripts/serve in a tree without a build. The fixture returns the arguments that the server gets."""
    for name, text in STUBS.items():
        stub = tmp_path / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(text)
        stub.chmod(0o755)
    shutil.copy(ROOT / "scripts/serve", tmp_path / "scripts/serve")
    bare = {name: value for name, value in os.environ.items()
            if not name.startswith("KVASIR_")}

    def arguments(*flags, cwd=None, **environment):
        done = subprocess.run(
            [tmp_path / "scripts/serve", *flags], env={**bare, **environment}, cwd=cwd,
            capture_output=True, text=True, check=True)
        return done.stdout.replace(f"{tmp_path}/", "").splitlines()

    return arguments


def test_the_serve_script_measures_plans_unless_flags_name_one(serve):
    model = ["--model", "models/tiny"]
    default = [*model, *AUTO]
    assert (ROOT / model[1] / "config.json").is_file()
    assert serve() == ["serve", *default]
    assert serve("--grpc-port", "0") == ["serve", *default, "--grpc-port", "0"]
    for flags in ["--model", "DIR"], ["--model=DIR"]:
        assert serve(*flags) == ["serve", *AUTO, *flags]
    for flags in ["--random-weights"], ["--config=FILE"]:
        assert serve(*flags) == ["serve", *flags]
    # A flag for the cache replaces the default plan.
    for flags in ["--kv-plan", "dense-bf16"], ["--kv-dtype=f32"]:
        assert serve(*flags) == ["serve", *model, *flags]
    assert serve(KVASIR_KV_PLAN="dense-8bit") == ["serve", *model]
    assert serve(KVASIR_MODEL="DIR") == ["serve", *AUTO]
    assert serve(KVASIR_RANDOM_WEIGHTS="1") == ["serve"]


def test_the_serve_script_compresses_a_known_model_as_recommended(serve, tmp_path):
    name, folder = ["--served-model-name", "known"], "known-recommended"
    for flags in ["--plan", "recommended", "--model", "known"], ["--model=known", "--plan=recommended"]:
        model = ["--model", folder] if "--model" in flags else [f"--model={folder}"]
        assert serve(*flags, "--threads", "2") == [
            "recommend known", "serve", *model, "--threads", "2", *name]
    assert serve("--plan", "recommended", KVASIR_MODEL="known") == ["recommend known", "serve", *name]
    # With --help, the script neither fetches nor compresses anything.
    assert serve("--plan", "recommended", *(asks := ["--model", "known", "--help"])) == ["serve", *asks]
    mine = ["--served-model-name=mine"]
    assert serve("--plan=recommended", *mine, KVASIR_MODEL="known")[1:] == ["serve", *mine]
    for flags, why in [
            (["--plan", "recommended"], "the built-in one needs none"),
            (["--plan", "recommended", "--model", "DIR"], "is for models that models/fetch gets"),
            (["--model", "known", "--plan"], "--plan nothing: want recommended"),
            (["--model", "known", "--plan=best"], "--plan best: want recommended"),
            (["--model", "known", "--plan="], "--plan nothing: want recommended"),
            (["--model", "known", "--plan=recommended", "--kv-dtype", "bf16"], "excludes --kv-plan")]:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            serve(*flags)
        assert refused.value.returncode == 2 and why in refused.value.stderr
        assert refused.value.stdout == ""


def test_the_serve_script_refuses_an_invalid_port_for_the_gateway(serve):
    for port in "0", "65535", "x", "":
        with pytest.raises(subprocess.CalledProcessError) as refused:
            serve("--openai", f"--openai-port={port}")
        assert refused.value.returncode == 2
        assert f"--openai-port {port}: want 1 to 65534" in refused.value.stderr
    assert serve("--openai", "--help")[-1] == "--help"


def test_the_serve_script_fetches_a_known_model_before_it_starts_the_server(serve, tmp_path):
    for flags in ["--model", "known"], ["--threads", "2", "--model=known"]:
        assert serve(*flags) == ["fetch known", "serve", *AUTO, *flags]
    assert serve(KVASIR_MODEL="known") == ["fetch known", "serve", *AUTO]
    # Flags for the cache replace the plan `auto`.
    for flags in ["--kv-plan", "FILE"], ["--kv-plan=FILE"], ["--kv-dtype", "bf16"], ["--config=F"]:
        assert serve("--model=known", *flags) == ["fetch known", "serve", "--model=known", *flags]
    assert serve(KVASIR_MODEL="known", KVASIR_KV_PLAN="FILE") == ["fetch known", "serve"]
    # The flag has priority over the environment, and a folder over a known name.
    assert serve("--model", "DIR", KVASIR_MODEL="known") == ["serve", *AUTO, "--model", "DIR"]
    (tmp_path / "known").mkdir()
    assert serve("--model", "known", cwd=tmp_path) == ["serve", *AUTO, "--model", "known"]


@pytest.mark.parametrize("anchor, crosses", [("start", True), ("middle", False), ("end", True)])
def test_the_check_of_drawings_names_a_label_that_crosses_the_edge_of_its_box(anchor, crosses):
    place = importlib.util.spec_from_file_location("check_tree", ROOT / "scripts/check_tree.py")
    check_tree = importlib.util.module_from_spec(place)
    place.loader.exec_module(check_tree)
    problems = list(check_tree.crossing_texts(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 100">'
        '<rect x="100" y="20" width="200" height="60"/><g font-size="12">'
        f'<text x="200" y="50" text-anchor="{anchor}">KV heads that share a latent</text></g></svg>'))
    assert problems == (["'KV heads that share a latent' crosses the edge of the box at 100,20"]
                        if crosses else [])


def test_side_by_side_counts_the_instructions_of_the_work_and_not_of_the_start(tmp_path):
    """Fake programs: a valgrind that counts 5000 instructions for the start and some for each step."""
    for side, each in (("old", 1000), ("new", 1020)):
        (tmp_path / side).mkdir()
        for name in ("kvasir", "kvasir-bench"):
            (tmp_path / side / name).write_text(str(each))
    valgrind = tmp_path / "valgrind"
    valgrind.write_text(
        '#!/bin/sh\nfor each; do case $each in --log-file=*) log=${each#*=};; */kvasir-bench) program=$each;; esac; done\n'
        'echo "==1== Collected : $((5000 + each * $(cat "$program")))" >"$log"\n')
    valgrind.chmod(0o755)

    def run(*flags, path=f"{tmp_path}:{os.environ['PATH']}"):
        return subprocess.run([sys.executable, ROOT / "scripts/side_by_side.py", tmp_path / "old", tmp_path / "new", "--instructions",
                               "--only", "decode", *flags], env={**os.environ, "PATH": path}, capture_output=True, text=True)

    slower = run()
    assert slower.returncode == 1 and re.search(r"decode +4,000 +4,080 +1.020 more", slower.stdout), slower
    assert run("--at-most", "1.03").returncode == 0
    missing = run(path="/nowhere")
    assert missing.returncode == 1 and "needs valgrind" in missing.stderr
