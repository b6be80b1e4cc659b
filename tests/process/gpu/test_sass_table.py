"""kernels/simt/sass_table.py: which loops it finds in code, and which changes fail."""

import subprocess
import sys

import pytest

from kvasir_process import ROOT

sys.path.insert(0, str(ROOT / "kernels/simt"))

import sass_table  # noqa: E402

SOURCE = """\
class Attention {
  KVASIR_DEVICE void SumCodes4(const Chunk& chunk, int32_t block,
                               const char* stage) {
    for (int32_t k = 0; k < 4; ++k) {
      Product<F16>(sum_, a, b);
    }
  }
};
"""
NAME = "_ZN6kvasir7kernels3gpu12_GLOBAL__N_19MmaKernelINS0_3F16EEEvi"
# One loop contains another, into whose body `extra` is inserted. A third loop has no mma instruction.
CODE = """\
\t.section\t.text.{name},"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_2:
        /*0020*/                   LDS R3, [R4] ;
{extra}        /*0030*/                   LOP3.LUT R3, R3, 0xf000f, RZ, 0xc0, !PT ;
        /*0040*/                   HFMA2.MMA R3, R3, R5, R6 ;
\t//## File "{file}", line 5 inlined at "{file}", line 4
\t//## File "{file}", line 4
        /*0050*/                   HMMA.16816.F32 R8, R3, R10, R8 ;
        /*0060*/              @!P0 HMMA.16816.F32 R12, R3, R14, R12 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0090*/               @P3 BRA `(.L_x_3) ;
        /*00a0*/                   EXIT ;
"""
EXTRA = "        /*0028*/                   PRMT R3, R3, 0x7531, R3 ;\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(extra, *arguments) -> (exit code or exit message, stdout)"""
    source = tmp_path / "attention.h"
    source.write_text(SOURCE)
    table = tmp_path / "sass.txt"
    monkeypatch.setattr(sass_table, "TABLE", table)
    code = tmp_path / "code"
    stubs = {"nvcc": "echo 'release 13.0, V13.0.88'",
             "nvdisasm": f"cat {code}",
             "cuobjdump": f"case $1 in -lptx) cat {tmp_path}/ptx ;; *) touch x.sm_80.cubin ;; esac"}
    for name, does in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ptx").write_text("PTX file    1: x.sm_80.ptx\n")

    def go(extra="", *arguments):
        code.write_text(CODE.format(name=NAME, file=source, extra=extra))
        monkeypatch.setattr(sys, "argv", [
            "sass_table.py", "--nvcc", str(tmp_path / "nvcc"), *arguments, str(tmp_path / "attention_cuda.o")])
        try:
            sass_table.main()
        except SystemExit as end:
            return str(end.code), capsys.readouterr().out
        return "", capsys.readouterr().out

    go.table, go.ptx = table, tmp_path / "ptx"
    return go


def test_the_innermost_loop_with_mma_is_counted_for_its_function(run):
    assert run("", "--write")[0] == ""
    # A load, LOP3, HFMA2 and 2 HMMA. LOP3 counts twice, and one HMMA without a predicate has 8 numbers: (5 + 1) / 8.
    assert run.table.read_text().splitlines()[-2:] == [
        "attention: MmaKernel<F16> sm_80", "  SumCodes4 5/1/1/1 0.75"]
    assert run() == ("", "attention: MmaKernel<F16> sm_80\n  SumCodes4 5/1/1/1 0.75\n")


def test_a_loop_that_grows_by_more_than_five_percent_fails_with_the_functions_name(run):
    run("", "--write")
    code, _ = run(EXTRA)
    assert "MmaKernel<F16> sm_80: SumCodes4 6/2/1/1 1.00, in sass.txt SumCodes4 5/1/1/1 0.75" in code
    assert "--write" in code
    run(EXTRA, "--write")
    assert run("")[0] == ""  # a smaller loop passes


def test_functions_that_the_table_lacks_fail(run):
    run("", "--write")
    run.table.write_text(run.table.read_text().replace("SumCodes4", "SumCodes8"))
    assert "its loops are in ['SumCodes4'], but in sass.txt they are in ['SumCodes8']" in run()[0]
    run("", "--write")
    run.ptx.write_text("")
    assert run()[0] == "attention_cuda.o has no PTX of compute_80"


def test_without_tools_or_objects_the_test_is_skipped_with_a_reason(run, monkeypatch):
    monkeypatch.setattr(sass_table, "tool", lambda *_: None)
    code, out = run()
    assert code == str(sass_table.SKIPPED) and "SKIPPED: no cuobjdump and nvdisasm" in out
    done = subprocess.run([sys.executable, ROOT / "kernels/simt/sass_table.py", "--without", "nvcc 11.8"],
                          capture_output=True, text=True)
    assert done.returncode == sass_table.SKIPPED and "SKIPPED: nvcc 11.8; no instruction" in done.stdout
