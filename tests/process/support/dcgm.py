"""NVIDIA's DCGM exporter, imitated. It reports one healthy GPU that a worker's pod uses: the families of the
catalogue, with the labels of the exporter. The real exporter needs a GPU."""

import http.server
import threading

LABELS = {
    "gpu": "0", "UUID": "GPU-1", "device": "nvidia0", "modelName": "NVIDIA H100 80GB HBM3", "Hostname": "node-1",
    "container": "kvasir", "namespace": "kvasir", "pod": "kvasir-worker-0",
}
# The labels that a scrape adds for the exporter's own pod.
SCRAPED = {"namespace": "gpu-operator", "pod": "nvidia-dcgm-exporter-1", "container": "nvidia-dcgm-exporter"}
ERRORS = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_FAILURE")


class DcgmExporter:
    """Serves `families`; use it as a context manager."""

    def __init__(self, families):
        labels = ",".join(f'{name}="{value}"' for name, value in LABELS.items())
        text = "".join(f"# TYPE {name} gauge\n{name}{{{labels}}} {0 if name in ERRORS else 40}\n" for name in families)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *unused):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = "127.0.0.1:%d" % self.server.server_port

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *unused):
        self.server.shutdown()
        self.server.server_close()
