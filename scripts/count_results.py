"""Adds up the test results in a folder and prints the last line of scripts/test.

Each stage has a folder: gtest/*.xml (one per program),
pytest*.xml, ctest.xml (JUnit; a program that left no XML of its own counts as
one case) and `failed` when the stage as a whole failed. Exits 1 unless
everything passed and something ran. Tests that were skipped because they need a GPU are counted
separately. For programs that skipped all their tests, the reason that they printed is shown.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def wants_gpu(case):
    return any("needs a GPU" in (skip.get("message") or "") + (skip.text or "")
               for skip in case.iter("skipped"))


def why_skipped(case):
    """Returns the output lines in which a program says why it skipped its tests."""
    said = case.findtext("system-out") or ""
    return [line for line in said.splitlines() if line.startswith("SKIPPED: ")]


def count_cases(path):
    """Returns (passed, failed, skipped, names of failed tests) of a JUnit file."""
    passed = failed = skipped = 0
    failures = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname') or path.stem}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
            failures.append(name)
        elif (
            case.find("skipped") is not None
            or case.get("result") == "skipped"
            or case.get("status") in ("notrun", "disabled")
        ):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped, failures


def count_gpu(folder):
    """The number of a stage's tests that need a GPU and were skipped, and the reasons that programs gave."""
    cases = [case for path in sorted(folder.glob("gtest/*.xml"))
             for case in ElementTree.parse(path).getroot().iter("testcase")]
    ctest = folder / "ctest.xml"
    programs = ElementTree.parse(ctest).getroot().iter("testcase") if ctest.exists() else []
    return (sum(map(wants_gpu, cases)),
            [f"{case.get('name')}: {line}" for case in programs for line in why_skipped(case)])


def count_stage(folder):
    own = {}
    for path in sorted(folder.glob("gtest/*.xml")) + sorted(folder.glob("pytest*.xml")):
        own[path.stem.removeprefix("pytest_")] = count_cases(path)
    total = [0, 0, 0]
    failures = []
    for passed, failed, skipped, names in own.values():
        total = [total[0] + passed, total[1] + failed, total[2] + skipped]
        failures += names
    ctest = folder / "ctest.xml"
    if ctest.exists():
        for case in ElementTree.parse(ctest).getroot().iter("testcase"):
            name = case.get("name")
            bad = case.find("failure") is not None or case.get("status") == "fail"
            if name in own:
                # A program that crashes after its last test leaves a file without failures.
                if bad and own[name][1] == 0:
                    total[1] += 1
                    failures.append(name)
            elif bad:
                total[1] += 1
                failures.append(name)
            elif case.get("status") in ("notrun", "disabled") or case.find("skipped") is not None:
                total[2] += 1
            else:
                total[0] += 1
    if (folder / "failed").exists() and total[1] == 0:
        total[1] += 1
        failures.append(f"stage {folder.name}")
    return total, failures


def main():
    root = pathlib.Path(sys.argv[1])
    total = [0, 0, 0]
    without_gpu = 0
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        counts, failures = count_stage(folder)
        total = [a + b for a, b in zip(total, counts)]
        print(f"{folder.name}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
        for name in failures:
            print(f"  failed: {name}")
        skipped, said = count_gpu(folder)
        without_gpu += skipped
        for line in said:
            print(f"  {line}")
    print(f"tests skipped because they need a GPU: {without_gpu}")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    sys.exit(0 if total[1] == 0 and total[0] > 0 else 1)


if __name__ == "__main__":
    main()
