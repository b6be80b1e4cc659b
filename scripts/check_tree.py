"""Checks of the tree that need no compiler.

- A folder includes only headers of folders that cmake/kvasir.cmake lets it link.
- No folders include each other in a circle, directly or through others. Test code is not checked.
- Every *_test.cc and test_*.py is named, uncommented, in the CMakeLists.txt of its
  folder or of one above it.
- Headers have "#pragma once" and at most 400 lines, sources at most 700, kernels 800.
  Test code is not looked at.
- A folder with more than 40 files of its own gets a warning.
- Markdown cites only tests that exist, and only limits that this script has. A figure in the table
  of README.md is also on the page to which its row links.
- People write at most 45,000 words of Markdown, README.md has at most 150 lines,
  ARCHITECTURE.md 130, and the README.md of a folder 150.
- Texts in docs/*.svg do not cross the edge of a box or of the picture.
- Fixtures have at most 4 MiB together, the built-in model 16 MB, any other file 1 MB.
- Shell scripts parse.
"""

import collections
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES_LIMIT = 4 << 20
MODEL_LIMIT = 16 << 20
FILE_LIMIT = 1 << 20
FOLDER_LIMIT = 40
HEADER_LINES = 400
SOURCE_LINES = 700
KERNEL_LINES = 800
MARKDOWN_WORDS = 45000
MARKDOWN_LINES = {"README.md": 150, "ARCHITECTURE.md": 130}
FOLDER_README_LINES = 150
# Generated pages have such a comment in their first lines. They are not counted as written
# by people.
WRITTEN_BY_A_PROGRAM = re.compile(r"<!-- .*(writes|wrote|written by)")


def layer_law():
    text = (ROOT / "cmake/kvasir.cmake").read_text()
    law = {}
    for folder, allowed in re.findall(
        r'set\(KVASIR_MAY_LINK_(\w+)\s+"([^"]*)"\)', text
    ):
        # An entry such as model_tokenizer allows the headers of the whole folder model.
        # CMake checks which targets are linked.
        law[folder] = {name.split("_")[0] for name in allowed.split(";")}
    return law


def registered(test):
    """True if a CMakeLists.txt names the test by its file or, in a folder of kernels, if
    the list OPS has its name without "_test.cc"."""
    stem = re.escape(test.name.removesuffix("_test.cc"))
    for folder in test.relative_to(ROOT).parents:
        lists = ROOT / folder / "CMakeLists.txt"
        if not lists.exists():
            continue
        live = re.sub(r"#.*", "", lists.read_text())
        named = re.escape(
            test.name if test.suffix == ".py" else str(test.relative_to(lists.parent)))
        room = "([a-z]+/)?" if test.suffix == ".py" else ""
        if re.search(rf"(?<![\w/]){room}{named}", live) or (
            lists.parent == test.parent and re.search(rf"\bOPS [\w\s]*\b{stem}\b", live)
        ):
            return True
    return False


# Widths of ' ' to '~' in DejaVu Sans, in hundredths of the font size. It is the widest font that
# a reader may see.
GLYPH_WIDTHS = [int(width) for width in """
    32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 84 84 53
    100 68 69 70 77 63 58 77 75 29 29 66 56 86 75 79 60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50
    50 61 63 55 63 62 35 63 63 28 28 58 28 97 63 61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84
""".split()]
BOLD_WIDTH = 1.12


def text_width(text, size, bold):
    hundredths = sum(
        GLYPH_WIDTHS[ord(c) - 32] if 32 <= ord(c) < 127 else 84 for c in text
    )
    return hundredths / 100 * size * (BOLD_WIDTH if bold else 1)


def crossing_texts(svg):
    """Returns the errors in a picture: every text whose area crosses an edge of a <rect>,
    or an edge of the picture."""
    boxes, texts = [], []

    def walk(element, style):
        style = {**style, **element.attrib}
        at = {key: float(element.get(key, 0)) for key in ("x", "y", "width", "height")}
        if element.tag.endswith("}rect"):
            boxes.append((at["x"], at["y"], at["x"] + at["width"], at["y"] + at["height"]))
        if element.tag.endswith("}text"):
            text = "".join(element.itertext())
            size = float(style.get("font-size", 16))
            width = text_width(text, size, style.get("font-weight") == "bold")
            before = width * {"middle": 0.5, "end": 1}.get(style.get("text-anchor"), 0)
            # Letters reach from 0.75 of the font size above the baseline to 0.25 below it.
            place = (-before, -0.75 * size, width - before, 0.25 * size)
            turned = re.fullmatch(
                r"translate\(([\d.]+) ([\d.]+)\) rotate\(-90\)", element.get("transform", "")
            )
            if turned:
                at["x"], at["y"] = float(turned[1]), float(turned[2])
                place = (place[1], -place[2], place[3], -place[0])
            texts.append((text, [p + at["xy"[i % 2]] for i, p in enumerate(place)]))
        for child in element:
            walk(child, style)

    root = xml.etree.ElementTree.fromstring(svg)
    walk(root, {})
    picture = [float(number) for number in root.get("viewBox").split()]
    boxes.append((0, 0, picture[2], picture[3]))
    for text, (left, top, right, bottom) in texts:
        for box in boxes:
            inside = left >= box[0] and top >= box[1] and right <= box[2] and bottom <= box[3]
            beside = left > box[2] or top > box[3] or right < box[0] or bottom < box[1]
            if box == boxes[-1] and beside or not (inside or beside):
                yield f"'{text}' crosses the edge of the box at {box[0]:g},{box[1]:g}"


def is_test(name):
    return name.name.endswith("_test.cc") or bool(
        {"testing", "fuzz", "tests"} & set(name.parts)
    )


def circles(files):
    """Returns the groups of folders that reach each other by #include lines, with one
    line for each pair of folders that include each other."""
    includes = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in files:
        name = path.relative_to(ROOT)
        if path.suffix not in (".cc", ".h", ".cu") or is_test(name):
            continue
        for included in re.findall(r'^#include "([^"]+)/[^"/]+"', path.read_text(), re.M):
            if included != str(name.parent) and (ROOT / included).is_dir():
                includes[str(name.parent)][included].append(name.name)

    def reaches(begin):
        seen, open_ = set(), [begin]
        while open_:
            for folder in includes.get(open_.pop(), {}):
                if folder not in seen:
                    seen.add(folder)
                    open_.append(folder)
        return seen

    reached = {folder: reaches(folder) for folder in list(includes)}
    done = set()
    for folder in sorted(reached):
        if folder in done or folder not in reached[folder]:
            continue
        circle = sorted(f for f in reached[folder] if folder in reached.get(f, ()))
        done.update(circle)
        edges = [
            f"{a} -> {b} ({', '.join(sorted(set(includes[a][b]))[:3])})"
            for a in circle for b in circle if b in includes[a]
        ]
        yield f"folders include each other in a circle: {'; '.join(edges)}"


def cited_tests(path, known):
    """Returns the names of tests that a page cites but that do not exist."""
    text = path.read_text()
    for suite, test, any_end in re.findall(r"`(\w+Test)\.(\w*)(\*?)", text):
        cited = f"{suite}.{test}"
        if not any(name.startswith(cited) if any_end else name == cited for name in known):
            yield f"cites the test {suite}.{test}, which does not exist"
    for test in re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", text):
        if test not in known:
            yield f"cites the test {test}, which does not exist"


def cited_limits(path):
    """Returns the limits of files and lines that a page cites but that this script does not have."""
    limits = {HEADER_LINES, SOURCE_LINES, KERNEL_LINES, FOLDER_LIMIT, *MARKDOWN_LINES.values()}
    for sentence in re.split(r"(?<=[.;])\s", path.read_text()):
        if "`scripts/check`" not in sentence:
            continue
        for number in re.findall(r"(\d+)(?= (?:lines|files))", sentence):
            if int(number) not in limits:
                yield f"says that scripts/check has a limit of {number}, which it does not have"


def cited_figures(path):
    """Returns errors for rows `| what | figure | [name](page) |` whose page lacks the figure."""
    for what, figure, page in re.findall(
        r"^\| ([^|]+) \| ([\d.]+) \| \[[^]]+\]\(([^)#]+)\) \|$", path.read_text(), re.M
    ):
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", (ROOT / page).read_text()):
            yield f"has the figure {figure} for '{what}', which {page} does not have"


def markdown(files):
    """Checks the lengths of the pages, and the tests, limits and figures that they cite."""
    known = set()
    for path in files:
        if path.suffix in (".cc", ".cu"):
            for suite, test in re.findall(
                r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", path.read_text(), re.M
            ):
                known.add(f"{suite}.{test}")
        elif path.match("test_*.py"):
            known.add(path.stem)
            known.update(re.findall(r"^\s*def (test_\w+)", path.read_text(), re.M))
    words = 0
    for path in files:
        if path.suffix != ".md":
            continue
        name = path.relative_to(ROOT)
        text = path.read_text()
        lines = text.count("\n")
        if path.name == "README.md" or len(name.parts) == 1:
            limit = MARKDOWN_LINES.get(str(name), FOLDER_README_LINES)
            if lines > limit:
                yield f"{name}: {lines} lines, limit {limit}"
        if not WRITTEN_BY_A_PROGRAM.search("\n".join(text.split("\n")[:5])):
            words += len(text.split())
        problems = [*cited_tests(path, known), *cited_limits(path)]
        if str(name) == "README.md":
            problems += cited_figures(path)
        for problem in problems:
            yield f"{name}: {problem}"
    if words > MARKDOWN_WORDS:
        yield f"people's Markdown has {words} words, limit {MARKDOWN_WORDS}"


def main():
    problems = []
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")
    files = [ROOT / name for name in files if name and (ROOT / name).is_file()]
    law = layer_law()

    for path in files:
        name = path.relative_to(ROOT)
        folder = name.parts[0]
        if path.suffix in (".cc", ".h", ".cu"):
            text = path.read_text()
            lines = text.count("\n")
            limit = KERNEL_LINES if folder == "kernels" else SOURCE_LINES
            if path.suffix == ".h" and not path.name.endswith("-inl.h"):
                limit = HEADER_LINES
            if lines > limit and not is_test(name):
                problems.append(f"{name}: {lines} lines, limit {limit}")
            if path.suffix == ".h" and "#pragma once" not in text:
                # Highway's per-target headers are included several times.
                if not name.name.endswith("-inl.h"):
                    problems.append(f"{name}: no #pragma once")
            if "parse_event_t" in text:
                problems.append(f"{name}: json::parse with a callback takes quadratic time; use a SAX pass or model/files/json.h")
            for included in re.findall(r'^#include "([a-z]+)/', text, re.MULTILINE):
                if folder in law and included in law and included not in law[folder]:
                    problems.append(f"{name}: {folder}/ may not include {included}/")
        if path.name.endswith("_test.cc") or path.match("test_*.py"):
            if not registered(path):
                problems.append(f"{name}: not registered in a CMakeLists.txt")
        if path.suffix == ".svg":
            problems += [f"{name}: {problem}" for problem in crossing_texts(path.read_text())]
        if folder in ("scripts", "models", ".ci") and path.suffix == "":
            done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
            if done.returncode:
                problems.append(f"{name}: {done.stderr.strip()}")

    for folder, count in collections.Counter(path.parent for path in files).items():
        if count > FOLDER_LIMIT:
            name = folder.relative_to(ROOT)
            print(f"scripts/check: warning: {name}/ has {count} files of its own "
                  f"(more than {FOLDER_LIMIT}): does it hold two concepts?", file=sys.stderr)

    problems += circles(files)
    problems += markdown(files)

    sizes = {path.relative_to(ROOT): path.stat().st_size for path in files}
    fixtures = sum(
        size for name, size in sizes.items() if name.parts[:2] == ("tests", "golden")
    )
    if fixtures > FIXTURES_LIMIT:
        problems.append(f"tests/golden: {fixtures} bytes, limit {FIXTURES_LIMIT}")
    for name, size in sizes.items():
        limit = MODEL_LIMIT if name.parts[0] == "models" else FILE_LIMIT
        if size > limit:
            problems.append(f"{name}: {size} bytes, limit {limit}")

    for problem in problems:
        print(f"scripts/check: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
