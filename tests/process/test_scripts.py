"""What the scripts promise, where that can be tried without building."""

import signal
import subprocess

from kvasir_process import ROOT, wait_until

WITHIN = ROOT / "scripts/within"
# Leaves a grandchild, and says who it is.
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


def test_a_command_over_its_budget_ends_with_all_that_it_started():
    process = start(1, LEAVES_A_CHILD)
    child = int(process.stdout.readline())
    assert process.wait(timeout=60) == 124
    wait_until(lambda: not is_running(child), "the end of the grandchild")


def test_ctrl_c_ends_all_that_a_command_started():
    process = start(300, LEAVES_A_CHILD)
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    wait_until(lambda: not is_running(child), "the end of the grandchild")


def test_a_command_within_its_budget_keeps_its_exit_code_and_its_signals():
    assert start(60, "exit 7").wait(timeout=60) == 7
    # What it starts can be interrupted.
    assert start(60, "kill -INT $$; exit 7").wait(timeout=60) == 130


def test_serve_tells_how_it_is_used():
    done = subprocess.run([ROOT / "scripts/serve", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--demo" in done.stdout
