"""Keeps measurements in the repository. The pages can be written anew from them, and a run
measures only what is missing."""

import hashlib
import json
import pathlib
import random
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The largest relative difference that is allowed if a loss or divergence is measured again. Another
# machine may add numbers in another order.
RECHECK_LIMIT = 0.02
DIGITS = 7


def digest(*values) -> str:
    text = json.dumps(values, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def file_digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def write(path: pathlib.Path, text: str) -> None:
    """Writes the file completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def commit() -> str:
    """Returns the commit of the tree, with "+" if files have changed since."""
    def git(*command):
        return subprocess.run(["git", "-C", str(ROOT), *command], text=True,
                              capture_output=True, check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=7", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


class Store:
    """A file with one line of JSON for each measurement. `key` identifies model, texts, settings
    and row, and `about` describes them. `commit` and `date` say by which programs and when the
    row was measured."""

    def __init__(self, path: pathlib.Path, date: str, again: bool = False):
        """If `again` is true, measurements of other commits are ignored."""
        self.path, self.date, self.commit = path, date, commit()
        self.lines: dict[str, dict] = {}
        self.old: dict[str, dict] = {}  # earlier results of rows that this run measures again
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()
                                      if path.exists() else [], 1):
            try:
                entry = json.loads(line)
                self.lines[entry["key"]] = entry
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path}:{number}: not a measurement") from None
        if again:
            self.lines = {key: entry for key, entry in self.lines.items()
                          if entry["commit"] == self.commit}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def get(self, key: str) -> dict | None:
        return self.lines[key]["found"] if key in self.lines else None

    def put(self, key: str, about: str, found: dict) -> None:
        self.lines[key] = {"key": key, "about": about, "commit": self.commit,
                           "date": self.date, "found": rounded(found)}
        entries = self.lines | {key: entry for key, entry in self.old.items()
                                if key not in self.lines}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, "".join(
            json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"
            for entry in sorted(entries.values(),
                                key=lambda one: (one["about"], one["key"]))))

    def span(self, keys: list[str]) -> str:
        """Returns when and by which commits the keys were measured."""
        entries = [self.lines[key] for key in keys]
        dates = sorted({entry["date"] for entry in entries})
        commits = list(dict.fromkeys(entry["commit"] for entry in sorted(
            entries, key=lambda entry: entry["date"])))
        return (" to ".join(dict.fromkeys((dates[0], dates[-1]))) +
                f" (commit{'s' * (len(commits) > 1)} {', '.join(commits)})")

    # --------------------------------------------------------------- rechecks

    def set_aside(self, count: int, keys: list[str], seed: int | None = None) -> None:
        """Chooses `count` of `keys` at random, to be measured again."""
        known = sorted(key for key in keys if key in self.lines)
        for key in random.Random(seed).sample(known, min(count, len(known))):
            self.old[key] = self.lines.pop(key)

    def compare(self) -> list[str]:
        """Returns a line for each row that was measured again. Raises SystemExit if one
        differs too much."""
        lines, wrong = [], []
        for key, before in self.old.items():
            if key not in self.lines:
                continue
            pairs = [(a, b) for values in ("window_kl", "window_nats", "repeat_nats")
                     for a, b in zip(before["found"]["row"].get(values) or [],
                                     self.lines[key]["found"]["row"].get(values) or [],
                                     strict=True)]
            worst = max(abs(a - b) / max(abs(a), abs(b), 1e-5) for a, b in pairs)
            lines.append(f"{before['about']}: within {100 * worst:.3f} % of commit "
                         f"{before['commit']}")
            if worst > RECHECK_LIMIT:
                wrong.append(lines[-1])
        if wrong:
            raise SystemExit("rows differ from earlier measurements (--again measures all): " +
                             "; ".join(wrong))
        return lines


class Pending:
    """The rows of a running `evaluate`. It writes its report after each row, so that finished
    rows are kept even if it or this program is killed."""

    def __init__(self, work: pathlib.Path, store: Store):
        self.report = work / "evaluation.json"
        self.list = work / "pending.json"
        self.store = store

    def begin(self, rows: list[tuple[str, str]]) -> None:
        """Records which rows `evaluate` will measure. rows: (key, about) of each, in the order of
        the report."""
        self.report.unlink(missing_ok=True)
        write(self.list, json.dumps(rows))

    def keep(self) -> None:
        if self.list.exists() and self.report.exists():
            report = json.loads(self.report.read_text())
            for (key, about), row in zip(json.loads(self.list.read_text()),
                                         report["rows"]):
                if "window_kl" not in row:
                    raise SystemExit("evaluate reports no window_kl: build "
                                     "kvasir-compress from this tree")
                teacher = {"window_nats": report["teacher"]["window_nats"]}
                self.store.put(key, about, {"teacher": teacher, "row": {
                    name: row[name] for name in ROW_FIELDS if name in row}})
        self.list.unlink(missing_ok=True)
        self.report.unlink(missing_ok=True)


# The fields of evaluate's report that the pages use.
ROW_FIELDS = ("kv_bytes_per_token", "fixed_bytes_per_sequence", "window_kl",
              "window_nats", "top1_agreement", "repeat_nats_per_token", "repeat_nats",
              "clamp_rate", "kl_nats", "nats_per_token")
