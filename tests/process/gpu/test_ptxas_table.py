"""kernels/simt/ptxas_table.py: how it reads the output of ptxas, and which changes fail."""

import subprocess
import sys

import pytest

from kvasir_process import ROOT

sys.path.insert(0, str(ROOT / "kernels/simt"))

import ptxas_table  # noqa: E402

# The name of NormKernel<float, 4> of an anonymous namespace in the output of ptxas.
ENTRY = """\
ptxas info    : Compiling entry function '_ZN6kvasir7kernels3gpu12_GLOBAL__N_110NormKernelIfLi4EEEvi' for '{arch}'
ptxas info    : Function properties for _ZN6kvasir7kernels3gpu12_GLOBAL__N_110NormKernelIfLi4EEEvi
    {stack} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem, 472 bytes cmem[0]
"""
COMMITTED = "norm: NormKernel<float, 4>   sm_80 40/0/8/1024  sm_90a 60/0/8/1024\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(stem, sm_80, sm_90a, *arguments) -> (exit code or exit message, stdout)"""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    table = tmp_path / "ptxas.txt"
    table.write_text("# nvcc 13.0\n" + COMMITTED)
    monkeypatch.setattr(ptxas_table, "TABLE", table)

    def go(sm_80, sm_90a, *arguments, stem="norm_cuda"):
        report = tmp_path / f"{stem}.ptxas"
        names = ("registers", "spilled", "stack", "shared")
        report.write_text("".join(
            ENTRY.format(arch=arch, **dict(zip(names, numbers)))
            for arch, numbers in (("sm_80", sm_80), ("sm_90a", sm_90a))))
        monkeypatch.setattr(
            sys, "argv", ["ptxas_table.py", "--nvcc", str(nvcc), *arguments, str(report)])
        try:
            ptxas_table.main()
        except SystemExit as end:
            return str(end.code), capsys.readouterr().out
        return "", capsys.readouterr().out

    go.table, go.nvcc = table, nvcc
    return go


def test_register_and_spill_counts_up_to_five_percent_above_the_table_pass(run):
    code, out = run((42, 0, 8, 1024), (20, 0, 0, 0))
    assert code == ""
    assert out.split("  ")[0] == "norm: NormKernel<float, 4>" and "sm_80 42/0/8/1024" in out


@pytest.mark.parametrize("now, named", [
    ((43, 0, 8, 1024), "sm_80: registers: 43, in ptxas.txt 40"),
    ((40, 4, 8, 1024), "sm_80 spills 4 bytes"),
    ((40, 0, 16, 1024), "sm_80: bytes of stack: 16, in ptxas.txt 8"),
    ((40, 0, 8, 2048), "sm_80: bytes of static shared memory: 2048, in ptxas.txt 1024"),
])
def test_larger_register_and_spill_counts_fail_with_the_name_of_the_kernel(run, now, named):
    code, _ = run(now, (60, 0, 8, 1024))
    assert f"norm: NormKernel<float, 4> for {named}" in code


def test_a_kernel_missing_in_the_table_or_in_the_code_fails(run):
    code, _ = run((40, 0, 8, 1024), (60, 0, 8, 1024), stem="rope_cuda")
    assert "rope: NormKernel<float, 4> is not in ptxas.txt" in code
    assert "norm: NormKernel<float, 4> is in ptxas.txt, but no such kernel was compiled" in code
    assert "--write" in code


def test_the_kernel_for_prompts_may_spill_as_much_as_the_table_says():
    assert ptxas_table.MAY_SPILL == "prefill_attention: PrefillKernel<"
    rows = {"prefill_attention: PrefillKernel<F16, 2>": {"sm_80": (255, 8, 8, 0)},
            "prefill_attention: OtherKernel": {"sm_80": (255, 8, 8, 0)}}
    assert list(ptxas_table.spills(rows)) == ["prefill_attention: OtherKernel for sm_80 spills 8 bytes"]


def test_kernels_outside_of_ops_are_checked_only_for_spills(run):
    run.table.write_text("# nvcc 13.0\n")
    assert run((99, 0, 8, 0), (99, 0, 8, 0), stem="primitive_kernels")[0] == ""
    assert "spills 4 bytes" in run((9, 4, 0, 0), (9, 0, 0, 0), stem="primitive_kernels")[0]


def test_the_table_is_compared_only_with_the_nvcc_that_wrote_it(run):
    assert run((50, 0, 0, 0), (70, 0, 0, 16), "--write")[0] == ""
    assert run.table.read_text().splitlines()[-1].split() == [
        "norm:", "NormKernel<float,", "4>", "sm_80", "50/0/0/0", "sm_90a", "70/0/0/16"]
    assert run((50, 0, 0, 0), (70, 0, 0, 16))[0] == ""
    run.nvcc.write_text("#!/bin/sh\necho 'release 13.1, V13.1.80'\n")
    code, out = run((200, 0, 0, 0), (70, 0, 0, 16))
    assert code == "" and "not compared: ptxas.txt was written with nvcc 13.0, this is 13.1" in out


def test_without_reports_the_test_is_skipped_with_a_reason():
    done = subprocess.run([sys.executable, ROOT / "kernels/simt/ptxas_table.py", "--without", "nvcc 11.8"],
                          capture_output=True, text=True)
    assert done.returncode == ptxas_table.SKIPPED and "SKIPPED: nvcc 11.8; no kernel" in done.stdout
