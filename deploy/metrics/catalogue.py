"""The metrics catalogue, and what it says about PromQL that names its families."""

import pathlib
import re
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
# Suffixes of the series that a histogram or summary adds.
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
NAME = re.compile(r"\b(?:(?:kvasir|process|exposer)_|DCGM_FI_)\w+")
# Units by the last word of a name without _total; other families are plain numbers.
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}


class Catalogue:
    def __init__(self, text):
        data = tomllib.loads(text)
        self.sections = data["section"]
        self.vllm = data["vllm"]
        self.dcgm = data["dcgm"]
        self.families = {}
        for section in self.sections:
            for name, family in section["families"].items():
                if name in self.families:
                    raise ValueError(f"catalogue: {name} is there twice")
                self.families[name] = {
                    **family, "processes": section["processes"], "ranked": section.get("ranked", False)}
        for name in self.vllm.keys() - self.families.keys():
            raise ValueError(f"catalogue: [vllm] has {name}, no section has")

    def family_of(self, series):
        """The family that a series belongs to; otherwise a KeyError with the series' name."""
        if series in self.families or series in self.dcgm:
            return series
        for type_, suffixes in SUFFIXES.items():
            for suffix in suffixes:
                name = series.removesuffix(suffix)
                if name != series and self.families.get(name, {}).get("type") == type_:
                    return name
        raise KeyError(f"{series}: no family of catalogue.toml")

    def families_in(self, promql):
        """The families that an expression names, each once, in the expression's order."""
        return list(dict.fromkeys(self.family_of(name) for name in NAME.findall(promql)))

    def meaning(self, family):
        return {**self.families, **self.dcgm}[family]["meaning"]

    def unit(self, family):
        if family in self.dcgm:
            return self.dcgm[family]["unit"]
        word = family.removesuffix("_total").rsplit("_", 1)[1]
        if family.endswith("_per_token") or family.endswith("_per_sequence"):
            word = family.rsplit("_per_", 1)[0].rsplit("_", 1)[1]
        return UNITS.get(word, "short")

    def labels(self, name, several_ranks=False):
        """The labels of a family's series; several_ranks: in a replica with several ranks."""
        family = self.families[name]
        return {*family.get("labels", []), *(["rank"] if several_ranks and family["ranked"] else [])}

    def exported(self, process, vllm=False):
        """Names of the families that a process exports."""
        names = {name for name, family in self.families.items() if process in family["processes"]}
        return names | ({self.vllm[name] for name in names & self.vllm.keys()} if vllm else set())


def load():
    return Catalogue((HERE / "catalogue.toml").read_text())
