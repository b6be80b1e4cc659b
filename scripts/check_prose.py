"""Checks the English of comments and Markdown: scripts/check runs it.

    check_prose.py [PATH...]        all files that git knows, or these only
    check_prose.py --count          how many findings each folder has
    check_prose.py --sample SEED    60 comments, 20 error texts and 20 test names,
                                    drawn at random, for a reader to rate

Each pattern below has the reason why it is refused. To fix a finding, rewrite
the sentence; there is no list of exceptions.
"""

import argparse
import collections
import pathlib
import random
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Things to which a comment may not refer as "who".
THINGS = (
    "allocator|block|cache|call|checkpoint|client|codec|collector|command|component|"
    "connection|device|engine|executor|facade|folder|frontend|gateway|group|head|host|"
    "kernel|key|layer|leader|listener|message|method|model|node|op|page|part|peer|plan|"
    "planner|pod|policy|process|processor|program|proxy|rank|replica|request|router|row|"
    "sample|scheduler|sequence|server|service|slot|socket|step|stream|tensor|thread|"
    "token|value|warp|worker|writer"
)
# Before these nouns, `behind` names a real place, so it is allowed.
BACKED = (
    "gateway|proxy|proxies|balancer|interface|contract|listener|router|routers|facade|"
    "flag|server|service|Service|firewall|gateways|frontend|frontends|smg|API"
)

# (name, pattern, reason). A pattern is searched in one sentence.
PATTERNS = [
    ("fragment", r"^(Of|What|Whatever|Whoever|Who|Whom|Whose|Which)\s(?!.*\?$)",
     "a sentence begins with its subject"),
    ("same-of", r"^(The same of|That of|Those of|The same for|The like of)\b",
     "the reader has to search for what is meant: name the thing"),
    ("behind", rf"\bbehind\b(?!\s+((a|an|the|its|another|some|one|that|this|our|such|their)\s+)?(\S+\s+)?(\S+\s+)?[`*]?({BACKED})\b)",
     "for time and order say 'after'; for a place say where"),
    ("alone", r"(?<!stand-)(?<!let )\balone\b",
     "say 'only', or 'by itself'"),
    ("told", r"\b(is|are|was|were|be|been|being|gets|got) told\b|\bhears?\b|\bheard\b",
     "components receive, read and report; nobody talks to them"),
    ("who", rf"\b({THINGS})s?,? (who|whom)\b|\b(whom|whoever|whomever|whosoever)\b",
     "a component is 'it'; 'that' and 'which' stand for it"),
    ("where", r"\b([Nn]ull|[Ee]mpty|[Nn]one|[Nn]othing|[Zz]ero|[Ff]alse|[Tt]rue|but|only|and|not) where\b"
              r"|\bwhere (none|nobody|nothing|there (is|are|was|were) (no|none|one|any)|(it|one|that|this|they|no \w+|a \w+|the \w+) (is|are|has|have) (not|no|none|off|on|given|set|said|absent|empty|null|there)|one is|it is not)\b",
     "a condition is 'if' or 'when'"),
    ("want-of", r"\bfor want of\b", "say 'because there is no'"),
    ("trailing-for", r", for (it|they|that|this|these|those|there|we|he|one|no|nobody|nothing) ",
     "say 'because'"),
]
COMPILED = [(name, re.compile(pattern), reason) for name, pattern, reason in PATTERNS]

CPP = re.compile(
    r'R"([^(\s]*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    r"|(?P<line>//[^\n]*)|(?P<block>/\*(?:.|\n)*?\*/)"
)
HASH_SUFFIXES = {".py", ".sh", ".cmake", ".txt", ".yml", ".yaml", ".toml"}
CPP_SUFFIXES = {".cc", ".h", ".cu", ".cuh", ".proto"}


def cpp_comments(text):
    """Yields (line number, text) of each line of a comment; the last lines of one
    paragraph follow each other without a gap."""
    for match in CPP.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        start = text.rfind("\n", 0, match.start()) + 1
        after_code = text[start:match.start()].strip() != ""
        if re.fullmatch(r"/\*\w*=?\*/", match.group()):
            continue  # the name of a parameter
        if match.group("line"):
            yield number, re.sub(r"^//+!?<?", "", match.group("line")), after_code
        elif match.group("block"):
            for i, line in enumerate(match.group("block").split("\n")):
                yield number + i, re.sub(r"^\s*/?\*+/?|\*/$", "", line), False


def hash_comments(text):
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(r"\s*#(?!!)(.*)", line)
        if match:
            yield number, match.group(1), False


def docstrings(text):
    """Yields the lines of a Python file's docstrings."""
    for match in re.finditer(r'^\s*"""((?:.|\n)*?)"""', text, re.M):
        number = text.count("\n", 0, match.start(1)) + 1
        for i, line in enumerate(match.group(1).split("\n")):
            yield number + i, line, False


def paragraphs(lines):
    """Joins neighbouring lines to paragraphs, and yields (line number, text)."""
    current, begin, last = [], 0, -2
    for number, text, after_code in lines:
        text = text.strip()
        # Tables, pictures and commands are not prose.
        if re.search(r"\S {3,}\S", text):
            text = ""
        ends = not text or re.match(r"[-*]\s|[|+>=]|\d+\.\s|.*[|].*[|]", text)
        if ends or after_code or number != last + 1:
            if current:
                yield begin, " ".join(current)
            current = []
        if text and not re.match(r"[|+=]", text):
            if not current:
                begin = number
                text = re.sub(r"^([-*>]|\d+\.)\s+", "", text)
            current.append(text)
        last = -2 if after_code else number
    if current:
        yield begin, " ".join(current)


def markdown_lines(text):
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*(```|~~~)", line):
            fenced = not fenced
            yield number, "", False
        elif fenced or line.startswith("    "):
            yield number, "", False
        elif line.lstrip().startswith("|"):
            # Each cell of a table is a text of its own.
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield number, re.sub(r"^#+\s*", "", cell.strip()), True
        else:
            yield number, re.sub(r"^#+\s*", "", line), line.startswith("#")


def sentences(text):
    text = re.sub(r"`[^`]*`", "`x`", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"https?://\S+", "x", text)
    for sentence in re.split(r"(?<=[.:;!?])\s+(?=[A-Z`\"])", text):
        yield sentence.strip().strip("*_>[ ")


def is_prose(path):
    return (
        path.suffix in CPP_SUFFIXES | HASH_SUFFIXES | {".md"}
        or path.parts[0] in ("scripts", ".ci") and path.suffix == ""
        or path.suffix == "" and path.name in ("fetch", "write", "run")
    )


def texts(path, content):
    if path.suffix == ".md":
        lines = markdown_lines(content)
    elif path.suffix in CPP_SUFFIXES:
        lines = cpp_comments(content)
    else:
        lines = hash_comments(content)
    yield from paragraphs(lines)
    if path.suffix == ".py":
        yield from paragraphs(docstrings(content))


def findings(path, content):
    for number, text in texts(path, content):
        for sentence in sentences(text):
            for name, pattern, reason in COMPILED:
                if pattern.search(sentence):
                    yield number, name, reason, sentence
                    break


def tracked(paths):
    listed = subprocess.run(
        ["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")
    for name in listed:
        path = pathlib.Path(name)
        if name and (ROOT / path).is_file() and not (ROOT / path).is_symlink():
            yield path


def sample(files, seed):
    """Prints sentences for a reader to rate: each with its place, a comment with its code."""
    comments, errors, tests = [], [], []
    for path in files:
        if path.suffix not in CPP_SUFFIXES:
            continue
        content = (ROOT / path).read_text()
        lines = content.split("\n")
        for number, text in paragraphs(cpp_comments(content)):
            # A list and the line that introduces it are clear only together.
            item = re.match(r"\s*//+!?<?\s*([-*]|\d+\.)\s", lines[number - 1])
            if len(text.split()) >= 3 and not text.endswith(":") and not item:
                end = number - 1
                while end < len(lines) and lines[end].lstrip().startswith("//"):
                    end += 1
                comments.append((path, number, text, "\n".join(lines[end:end + 4])))
        for match in re.finditer(
                r"absl::\w+Error\(\s*(?:absl::Str(?:Cat|Format)\()?((?:[^;]|;(?!\n))*?)\);", content):
            words = " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match.group(1))).split()
            if len(words) >= 4 and not path.stem.endswith("_test") and "testing" not in path.parts:
                errors.append((path, content.count("\n", 0, match.start()) + 1,
                               " ".join(match.group(1).split()), ""))
        for match in re.finditer(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", content, re.M):
            tests.append((path, content.count("\n", 0, match.start()) + 1,
                          f"{match.group(1)}.{match.group(2)}", ""))
    chance = random.Random(seed)
    for title, pool, count in (
        ("comments", comments, 60), ("error texts", errors, 20), ("test names", tests, 20)
    ):
        print(f"== {count} {title} of {len(pool)}, seed {seed}")
        for i, (path, number, text, below) in enumerate(chance.sample(pool, count), 1):
            print(f"{i}. {path}:{number}\n   {text}")
            if below:
                print("      | " + below.replace("\n", "\n      | "))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--sample", type=int, metavar="SEED")
    args = parser.parse_args()
    files = [path for path in tracked(args.paths) if is_prose(path)]
    if args.sample is not None:
        return sample(files, args.sample)
    counts = collections.Counter()
    for path in files:
        for number, name, reason, sentence in findings(path, (ROOT / path).read_text()):
            counts[path.parts[0] if len(path.parts) > 1 else "."] += 1
            if not args.count:
                print(f"{path}:{number}: [{name}] {reason}: {sentence[:120]}")
    if args.count:
        for folder, count in sorted(counts.items()):
            print(f"{folder}: {count}")
    if counts:
        print(f"scripts/check: {sum(counts.values())} sentences to rewrite "
              "(the list of patterns with reasons is in scripts/check_prose.py)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
