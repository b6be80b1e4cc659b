"""Reads and writes the parts of docs/quality.md, one for each study, and reads the
paragraphs below tables."""

import pathlib

NOTES = pathlib.Path(__file__).with_name("quality_notes.md")
BEGIN, END = "<!-- quality.sh {} writes this -->", "<!-- to here -->"


def split(page: pathlib.Path, name: str) -> tuple[str, str, str]:
    """Splits the page into the text before a part, the part, and the text after it."""
    begin = BEGIN.format(name)
    before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    if not mark or END not in rest:
        raise SystemExit(f"{page} has no part {begin} {END}")
    text, _, after = rest.partition(END)
    return before + begin, text, END + after


def read_part(page: pathlib.Path, name: str) -> str:
    return split(page, name)[1].strip()


def write_part(page: pathlib.Path, name: str, text: str) -> None:
    """Replaces the text between a part's marks."""
    before, _, after = split(page, name)
    page.write_text(f"{before}\n\n{text.strip()}\n\n{after}", encoding="utf-8")


def notes() -> dict[str, str]:
    """Returns the paragraphs of quality_notes.md by the name of their claim; "run" is about
    the whole run."""
    found: dict[str, str] = {}
    name = None
    for line in NOTES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            name = line[3:].strip()
            found[name] = ""
        elif name is not None:
            found[name] += line + "\n"
    return {key: text.strip() for key, text in found.items()}
