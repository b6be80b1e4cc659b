"""Checks of rendered manifests that no package has: selectors, and resource types without a published Python schema."""

import re


def selectors(resource, path=()):
    """Every label selector in a resource: [(path, labels)]. Selectors of namespaces are left out."""
    if isinstance(resource, list):
        return [found for index, each in enumerate(resource) for found in selectors(each, (*path, index))]
    if not isinstance(resource, dict):
        return []
    found = []
    for name, value in resource.items():
        if name == "namespaceSelector":
            continue
        if name == "matchLabels" or (resource.get("kind") == "Service" and path == () and name == "spec"):
            found.append(((*path, name), value if name == "matchLabels" else value["selector"]))
        else:
            found += selectors(value, (*path, name))
    return found


def selects(wanted, labels):
    return wanted.items() <= labels.items()


class Field:
    """A field of a resource: a pattern that its whole text matches, or a predicate."""

    def __init__(self, allowed, required=False):
        self.allowed, self.required = allowed, required


def judge(value, schema, path="spec"):
    """Raises ValueError if `value` has a field that `schema` lacks, lacks one that it requires, or has a wrong one. A
    schema is a dict of fields, a list with the schema of each element, or a Field."""
    if isinstance(schema, Field):
        schema_of = schema.allowed
        if isinstance(schema_of, (dict, list)):
            return judge(value, schema_of, path)
        ok = re.fullmatch(schema_of, value) if isinstance(schema_of, str) and isinstance(value, str) else (
            callable(schema_of) and schema_of(value))
        if not ok:
            raise ValueError(f"{path}: {value!r} is not allowed")
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{path}: {value!r} is not a list with elements")
        for index, each in enumerate(value):
            judge(each, schema[0], f"{path}[{index}]")
    else:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {value!r} is not an object")
        if unknown := value.keys() - schema.keys():
            raise ValueError(f"{path}: unknown fields {sorted(unknown)}")
        if missing := {name for name, field in schema.items() if field.required} - value.keys():
            raise ValueError(f"{path}: missing fields {sorted(missing)}")
        for name, each in value.items():
            judge(each, schema[name], f"{path}.{name}")


def whole(low, high):
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
# Durations of GEP-2257.
DURATION = r"([0-9]{1,5}(h|m|s|ms)){1,4}"
_PORT = Field(whole(1, 65535))
# gateway.networking.k8s.io/v1, HTTPRoute: the fields of the standard channel that a route here may use.
HTTP_ROUTE = {
    "parentRefs": Field([{
        "group": Field(NAME), "kind": Field(r"[A-Za-z]+"), "namespace": Field(NAME), "name": Field(NAME, True),
        "sectionName": Field(NAME), "port": _PORT}], True),
    "hostnames": Field([Field(r"(\*\.)?" + NAME)]),
    "rules": Field([{
        "name": Field(NAME),
        "matches": Field([{
            "path": Field({"type": Field("Exact|PathPrefix|RegularExpression"), "value": Field(r"/\S*", True)}),
            "method": Field("[A-Z]+")}]),
        "timeouts": Field({"request": Field(DURATION), "backendRequest": Field(DURATION)}),
        "backendRefs": Field([{
            "group": Field(NAME), "kind": Field(r"[A-Za-z]+"), "namespace": Field(NAME), "name": Field(NAME, True),
            # A Service needs its port.
            "port": Field(whole(1, 65535), True), "weight": Field(whole(0, 1_000_000))}], True)}], True),
}
