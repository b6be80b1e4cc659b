"""Makes docs/metrics.md from the catalogue."""

OPENING = """\
# Metrics

<!-- deploy/metrics/write writes this page, from deploy/metrics/catalogue.toml -->

Each process serves `GET /metrics` on its own port (`--metrics-port`, 8002 by default) in Prometheus text format, and
`GET` or `HEAD /healthz`: 200 if the process is ready, otherwise 503. Base units are in the names. A family is one series per process unless it lists labels. A test compares
this page with what real processes export. [operations.md](operations.md) says which metrics to watch; [deploy/README.md](../deploy/README.md) has dashboards and alerts.

`--metrics-compat=vllm` adds the families of the last section under vLLM's names, so that dashboards, autoscalers and endpoint pickers made
for vLLM work unchanged. They come from a worker's families, so a router by itself has none of them.
"""

DCGM = """
## NVIDIA's DCGM exporter

The dashboard `gpu` and some alerts also use these, if [that exporter](https://github.com/NVIDIA/dcgm-exporter) is installed, for the GPUs of workers' pods.

| family | meaning |
|---|---|
"""

VLLM = """
## vLLM's names

Labels `model_name` and `engine` are added.

| ours | vLLM's |
|---|---|
"""


def page(catalogue):
    lines = [OPENING]
    for section in catalogue.sections:
        lines.append(f"\n## {section['title']}\n")
        if "text" in section:
            lines.append(f"\n{section['text'].strip()}\n")
        lines.append("\n| family | type | meaning |\n|---|---|---|\n")
        for name, family in section["families"].items():
            lines.append(f"| `{name}` | {family['type']} | {family['meaning']} |\n")
    lines.append(DCGM)
    for name, family in catalogue.dcgm.items():
        lines.append(f"| `{name}` | {family['meaning']} |\n")
    lines.append(VLLM)
    for ours, theirs in catalogue.vllm.items():
        lines.append(f"| `{ours}` | `{theirs}` |\n")
    return "".join(lines)
