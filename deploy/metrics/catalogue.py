"""Reads the catalogue of metrics, and looks up the families that PromQL expressions name."""

import pathlib
import re
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
# A histogram or summary X exports series whose names are X and one of these suffixes.
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
NAME = re.compile(r"\b(?:(?:kvasir|process|exposer)_|DCGM_FI_)\w+")
# The last word of a family's name, without _total, determines its unit. Other families are plain numbers.
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
                    raise ValueError(f"catalogue: {name} is defined twice")
                self.families[name] = {
                    **family, "processes": section["processes"], "ranked": section.get("ranked", False)}
        for name in self.vllm.keys() - self.families.keys():
            raise ValueError(f"catalogue: [vllm] names {name}, but no section defines it")

    def family_of(self, series):
        """Returns the family of a series. Raises a KeyError that names the series if there is none."""
        if series in self.families or series in self.dcgm:
            return series
        for type_, suffixes in SUFFIXES.items():
            for suffix in suffixes:
                name = series.removesuffix(suffix)
                if name != series and self.families.get(name, {}).get("type") == type_:
                    return name
        raise KeyError(f"{series}: catalogue.toml has no family with this series")

    def families_in(self, promql):
        """Returns the families that an expression names, each once, in the expression's order."""
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
        """Returns the labels of a family's series. several_ranks: the replica has several ranks."""
        family = self.families[name]
        return {*family.get("labels", []), *(["rank"] if several_ranks and family["ranked"] else [])}

    def exported(self, process, vllm=False):
        """Returns the names of the families that a process exports; vllm: with vLLM's names, too."""
        names = {name for name, family in self.families.items() if process in family["processes"]}
        return names | ({self.vllm[name] for name in names & self.vllm.keys()} if vllm else set())


def load():
    return Catalogue((HERE / "catalogue.toml").read_text())
