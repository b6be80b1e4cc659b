"""Makes deploy/grafana/*.json from dashboards.toml and the catalogue."""

import json
import pathlib
import re
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
# A PromQL selector with the variables that every dashboard has.
OF = 'job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "$datasource"}
WIDTH = 24  # columns of Grafana's grid
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
# The default width and height of each kind of panel, in cells of the grid.
SIZES = {"graph": (8, 8), "heatmap": (8, 8), "table": (12, 5), "stat": (3, 4)}
# Select workers' GPUs. If the scrape does not honour labels, `pod` is the exporter's own pod, and `exported_pod` the
# worker's.
ON_OUR_GPUS = ('exported_pod=~"kvasir-worker-.*"', 'pod=~"kvasir-worker-.*"')
TYPES = {"graph": "timeseries", "heatmap": "heatmap", "table": "table", "stat": "stat"}


def load():
    return tomllib.loads((HERE / "dashboards.toml").read_text())["dashboard"]


def queries_of(panel):
    """Returns the queries of a panel as [(legend, PromQL)], with OF in place of $of."""
    if "quantiles" in panel:
        name = panel["quantiles"]
        rate = f"rate({name}_%s{{$of}}[$__rate_interval])"
        queries = [
            (legend, f"histogram_quantile({q}, sum by (le) ({rate % 'bucket'}))")
            for legend, q in QUANTILES.items()
        ]
        queries.append(("mean", f"sum({rate % 'sum'}) / sum({rate % 'count'})"))
    elif "rates" in panel:
        by = ", ".join(panel["by"])
        legend = " ".join(f"{{{{{label}}}}}" for label in panel["by"])
        queries = [(legend, f"sum by ({by}) (rate({panel['rates']}{{$of}}[$__rate_interval]))")]
    elif "dcgm" in panel:
        queries = [
            (legend, " or ".join(f"{name}{{{pods}}}" for pods in ON_OUR_GPUS)) for legend, name in panel["dcgm"]
        ]
    else:
        queries = panel["queries"]
    return [(legend, promql.replace("$of", OF)) for legend, promql in queries]


def description(catalogue, queries):
    families = catalogue.families_in(" ".join(promql for _, promql in queries))
    # Links are relative to docs/, so only their words are kept.
    return "\n\n".join(
        f"`{name}`: " + re.sub(r"\s*\(?\[([^]]*)\]\([^)]*\)\)?", "", catalogue.meaning(name))
        for name in families
    )


def unit_of(catalogue, panel, queries):
    if "unit" in panel:
        return "suffix:×" if panel["unit"] == "x" else panel["unit"]
    units = {
        catalogue.unit(name)
        for _, promql in queries
        for name in catalogue.families_in(promql)
    }
    if len(units) != 1:
        raise ValueError(f"panel '{panel['title']}': its queries have the units {sorted(units)}, so set `unit`")
    return units.pop()


def panel_json(catalogue, panel, id_, x, y):
    kind = panel.get("kind", "graph")
    width, height = panel.get("width", SIZES[kind][0]), panel.get("height", SIZES[kind][1])
    queries = queries_of(panel)
    targets = []
    for i, (legend, promql) in enumerate(queries):
        target = {
            "refId": chr(ord("A") + i),
            "datasource": DATASOURCE,
            "expr": promql,
            "legendFormat": legend or "__auto",
        }
        if kind == "table":
            target |= {"format": "table", "instant": True}
        if kind == "heatmap":
            target |= {"format": "heatmap"}
        targets.append(target)
    json_ = {
        "id": id_,
        "type": TYPES[kind],
        "title": panel["title"],
        "description": description(catalogue, queries),
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {
            "defaults": {"unit": unit_of(catalogue, panel, queries), "min": 0},
            "overrides": [],
        },
        "targets": targets,
    }
    defaults = json_["fieldConfig"]["defaults"]
    if "wrong" in panel:
        colours = ("green", "red") if "above" in panel["wrong"] else ("red", "green")
        (limit,) = panel["wrong"].values()
        steps = [{"color": colours[0], "value": None}, {"color": colours[1], "value": limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if kind == "graph":
        defaults["custom"] = {"fillOpacity": 8, "showPoints": "never"}
        if "wrong" in panel:
            defaults["custom"]["thresholdsStyle"] = {"mode": "dashed"}
        json_["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif kind == "stat":
        json_["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    elif kind == "heatmap":
        json_["options"] = {"calculate": False, "yAxis": {"unit": defaults["unit"]}}
    else:
        json_["transformations"] = [
            {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True}}}
        ]
    return json_, width, height


def variable(name, query):
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard_json(catalogue, dashboard):
    panels, id_, y = [], 0, 0
    for row in dashboard["row"]:
        id_ += 1
        panels.append({
            "id": id_, "type": "row", "title": row["title"], "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        })
        y += 1
        x = line = 0
        for panel in row["panels"]:
            id_ += 1
            json_, width, height = panel_json(catalogue, panel, id_, x, y)
            if x + width > WIDTH:
                x, y, line = 0, y + line, 0
                json_["gridPos"] |= {"x": x, "y": y}
            panels.append(json_)
            x, line = x + width, max(line, height)
        y += line
    of = "{__name__=~\"kvasir_(build|router_build|rank)_info\"%s}"
    return {
        "uid": f"kvasir-{dashboard['name']}",
        "title": dashboard["title"],
        "tags": ["kvasir"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
            variable("job", "label_values(" + of % "" + ", job)"),
            variable("instance", "label_values(" + of % ',job=~"$job"' + ", instance)"),
        ]},
        "panels": panels,
    }


def files(catalogue):
    """{file name: text} of deploy/grafana."""
    return {
        f"{dashboard['name']}.json": json.dumps(dashboard_json(catalogue, dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in load()
    }
