"""Compressed checkpoints are inspected, checked against their plans, and run. Errors for invalid ones name the cause."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess

import pytest
import quickjs
from kvasir_process import BINARY, TINY, altered_model, run

RANK = 24


def read_tensors(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], raw[8 + size :][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write_tensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def zeros(*shape):
    size = 2
    for length in shape:
        size *= length
    return ("BF16", list(shape), bytes(size))


@pytest.fixture
def artifact(tmp_path):
    """The built-in model with values of rank 24 for each half of the heads."""
    folder = tmp_path / "a \"b\" <c> & d"
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "config.json").read_text())
    heads, dims = config["num_key_value_heads"], config["head_dim"]
    half = heads // 2
    groups = [list(range(half)), list(range(half, heads))]
    value = {
        "low_rank": {"groups": [{"heads": group, "rank": RANK} for group in groups]},
        "uses": [{"at_runtime": {}}],
        "stored": "NO_ROPE",
        "codec": {"bits": {"schedule": [4]}, "per_token": {}, "param_dtype": "F16"},
    }
    key = {"full": {}, "stored": "POST_ROPE", "codec": {"dtype": "BF16"}}
    layer = {"key": {"parts": [key]}, "value": {"parts": [value]}}
    plan = {
        "schema_version": 1,
        "method": "values only",
        "layers": [layer] * config["num_hidden_layers"],
    }
    (folder / "kv_plan.json").write_text(json.dumps(plan))
    tensors = read_tensors(TINY / "model.safetensors")
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}.self_attn.v_proj."
        del tensors[prefix + "weight"]
        tensors[prefix + "down.weight"] = zeros(2 * RANK, config["hidden_size"])
        for group in range(2):
            tensors[f"{prefix}up.{group}.weight"] = zeros(half * dims, RANK)
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def test_inspect_reports_the_latent_ranks_the_bytes_and_the_weights(artifact):
    report = json.loads(run("inspect", artifact, "--json").stdout)
    values = [side for side in report["layers"] if side["side"] == "value"]
    assert [side["rank"] for side in values] == [2 * RANK] * report["num_layers"]
    # Each of two groups has 24 codes of 4 bits and a scale and a minimum of 16 bits.
    assert [side["bytes_per_token"] for side in values] == [2 * (12 + 4)] * report["num_layers"]
    stored = sum(len(t[2]) for t in read_tensors(artifact / "model.safetensors").values())
    assert report["weight_bytes"] == stored
    text = run("inspect", artifact).stdout
    assert "2x24" in text and "at_runtime" in text


def test_inspect_reports_the_cache_and_the_weights_of_each_rank(artifact):
    report = json.loads(run("inspect", artifact, "--tp", 2, "--json").stdout)
    ranks = report["tensor_parallel"]
    heads = [(rank["first_kv_head"], rank["num_kv_heads"]) for rank in ranks["ranks"]]
    half = report["num_kv_heads"] // 2
    assert heads == [(0, half), (half, half)]
    # Each of the two groups has half of the heads and belongs to one rank.
    assert ranks["replicas"] == [] and ranks["uneven_layers"] == []
    assert 2 * ranks["most_kv_bytes_per_token"] == report["kv_bytes_per_token"]
    weights = [rank["weight_bytes"] for rank in ranks["ranks"]]
    assert sum(weights) == ranks["one_rank_weight_bytes"] + ranks["replicated_weight_bytes"]
    # With more ranks than groups, each group spans several ranks in every layer.
    spread = json.loads(run("inspect", artifact, "--tp", 4, "--json").stdout)["tensor_parallel"]
    of_values = [r for r in spread["replicas"] if r["side"] == "value"]
    assert [r["ranks"] for r in of_values] == [[0, 1], [2, 3]]
    assert [r["last_layer"] for r in of_values] == [report["num_layers"] - 1] * 2
    assert [r["bytes_per_token"] for r in of_values] == [report["num_layers"] * (12 + 4)] * 2
    text = run("inspect", artifact, "--tp", 4).stdout
    assert "on several ranks" in text and "tensor parallel       4 ranks" in text
    refused = run("inspect", artifact, "--tp", 3, check=False)
    assert refused.returncode == 1 and "cannot be divided among 3" in refused.stderr
    assert "possible numbers of ranks: 1, 2" in refused.stderr
    assert json.loads(run("inspect", artifact, "--json").stdout)["tensor_parallel"] is None


@pytest.fixture
def evaluation(tmp_path):
    """A file in the format of kvasir-compress evaluate --json, and its content."""
    row = {
        "model": "m", "method": "palu <4>", "keep": 0.5, "kv_bytes_per_token": 100,
        "kv_payload_bytes_per_token": 100, "fixed_bytes_per_sequence": 0, "nats_per_token": 3,
        "nats_per_byte": 1, "perplexity": 20, "added_nats_per_token": 0.1,
        "added_ci95": [0.05, 0.15], "top1_agreement": 0.9, "kl_nats": 0.1,
    }
    teacher = {"model": "t", "nats_per_token": 2.9, "nats_per_byte": 1, "kv_bytes_per_token": 200}
    path = tmp_path / "results.json"
    content = {
        "teacher": teacher, "text": "x", "window_tokens": 512, "windows": 100, "rows": [row],
    }
    path.write_text(json.dumps(content))
    return path, content


def test_the_html_page_shows_an_evaluation_that_has_an_interval(
        artifact, evaluation, tmp_path):
    path, content = evaluation
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page, "--evaluation", path)
    data = json.loads(script_of(page)[0])
    assert data["report"] == json.loads(run("inspect", artifact, "--json").stdout)
    assert data["evaluations"][0]["rows"][0]["method"] == "palu <4>"

    del content["rows"][0]["added_ci95"]
    path.write_text(json.dumps(content))
    refused = run("inspect", artifact, "--html", page, "--evaluation", path, check=False)
    assert refused.returncode == 1
    assert "rows[0]" in refused.stderr and "added_ci95" in refused.stderr


def script_of(page):
    """Returns the data of a page and its script."""
    return re.search('<script type="application/json" id="data">(.*?)</script>\n'
                     "<script>(.*?)</script>", page.read_text(), re.DOTALL).groups()


def run_script(page):
    """Runs the page's script outside of a browser."""
    data, script = script_of(page)
    context = quickjs.Context()
    context.set("pageData", data)
    context.eval((pathlib.Path(__file__).parent / "page_document.js").read_text() + script)
    return context


def draw_by_script(page):
    return run_script(page).eval("main.outerHTML")


@pytest.fixture(scope="module", params=["script", "browser"])
def drawn(request, tmp_path_factory):
    """A function that draws a page: its elements after its script has run."""
    if request.param == "script":
        return draw_by_script
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium to draw the page")
    home = tmp_path_factory.mktemp("home")

    def draw(page):
        return subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "HOME": str(home)}).stdout

    return draw


def test_the_html_page_shows_which_tokens_of_a_text_stayed_in_the_cache(drawn, tmp_path):
    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text("<b>" + (TINY / "evaluation.txt").read_text()[:1500])
    run("inspect", TINY, "--trace", text, "--html", page, "--eviction", "streaming",
        "--eviction-budget", "96")
    report = json.loads(script_of(page)[0])["report"]["trace"]
    assert report["layers"][0]["last"]["kept_slots"] == 96
    assert drawn(page).count('class="slot"') == len(report["tokens"])


def test_the_html_page_draws_the_layer_that_the_reader_chooses(tmp_path):
    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text((TINY / "evaluation.txt").read_text()[:1500])
    run("inspect", TINY, "--trace", text, "--html", page, "--eviction", "h2o",
        "--eviction-budget", "96", "--eviction-recent", "32")
    layers = json.loads(script_of(page)[0])["report"]["trace"]["layers"]
    context = run_script(page)
    assert context.eval("main.find('option').length") == sum(len(l["units"]) for l in layers)
    gone = "main.outerHTML.split('evicted when').length - 1"
    for choice, unit in enumerate(unit for layer in layers for unit in layer["units"]):
        context.eval(f"main.find('select')[0].value = '{choice}';"
                     "main.find('select')[0].listeners.change()")
        assert context.eval(gone) == sum(at is not None for at in unit["gone_at"])


def test_the_html_page_draws_every_layer_and_the_ticks_of_its_scale(artifact, evaluation, drawn, tmp_path):
    path, content = evaluation
    inspected = json.loads(run("inspect", artifact, "--json").stdout)
    # The rows have two widths of one method and losses in a narrow range. One belongs to the inspected plan.
    own, other = content["rows"][0], dict(content["rows"][0], model="other")
    own |= {"model": inspected["model"], "kv_bytes_per_token": inspected["kv_bytes_per_token"],
            "kv_payload_bytes_per_token": 64, "added_nats_per_token": 0.0037,
            "added_ci95": [-0.0003, 0.0078]}
    other |= {"kv_payload_bytes_per_token": 25, "added_nats_per_token": 0.0044,
              "added_ci95": [0.0031, 0.0057]}
    content["rows"] = [own, other]
    path.write_text(json.dumps(content))
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page, "--evaluation", path)
    html = drawn(page)
    for layer in range(6):
        assert f"<title>layer {layer} value: low_rank, 48 numbers" in html
    assert "palu &lt;4&gt;, 50.0 % of the numbers kept" in html
    quality = html[html.index("<h2>Quality against bytes"):html.index("<h2>Bytes by component")]
    assert len(re.findall(r">0\.00\d+</text>", quality)) >= 3  # at least three ticks
    assert quality.count(">this plan</text>") == 1
    # No line joins points of different widths. Only the two points and the teacher's have lines of their own.
    assert len(re.findall(r'class="line" d="M[\d.]+ [\d.]+" stroke', quality)) == 3


def test_the_html_page_places_an_eviction_at_the_bytes_of_the_slots_it_keeps(artifact, evaluation, tmp_path):
    path, content = evaluation
    whole, = content["rows"]
    fewer = dict(whole, kv_bytes_per_token=104, kv_bytes_per_sequence=128 * 104,
                 eviction={"method": "h2o", "kept_slots": 128})
    content["rows"] = [whole, fewer]
    path.write_text(json.dumps(content))
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page, "--evaluation", path)
    html = draw_by_script(page)
    assert "100 KV bytes per token, 100 of a window" in html
    assert "104 KV bytes per token, 26 of a window" in html
    # The plans with and without eviction are drawn as different methods, so that no line joins them.
    assert "palu &lt;4&gt;, " in html and "palu &lt;4&gt; + h2o, " in html


@pytest.fixture
def prediction(artifact):
    """The prediction that a planner writes next to the plan."""
    content = {
        "plan_sha256": hashlib.sha256((artifact / "kv_plan.json").read_bytes()).hexdigest(),
        "kl": 0.0123, "kl_low": 0.009, "kl_high": 0.03, "bytes_per_token": 800,
        "kappa": {"probes": [{"bytes_per_token": 640, "predicted": 0.02, "measured": 0.04}]},
        "curve": [{"bytes_per_token": 300, "kl": 0.5}, {"bytes_per_token": 790, "kl": 0.0125},
                  {"bytes_per_token": 3000, "kl": 0}],
    }
    path = artifact / "kv_plan.prediction.json"
    path.write_text(json.dumps(content))
    return path, content


def test_the_html_page_draws_the_predicted_divergence_and_marks_the_plan(
        artifact, prediction, drawn, tmp_path):
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page)
    html = drawn(page)
    start = html.index("<h2>Predicted divergence against bytes")
    curve = html[start:html.index("<h2>Bytes by component")]
    assert "<title>predicted: 300 bytes per token, 0.5 nats</title>" in curve
    assert "<title>measured: 640 bytes per token, 0.04 nats</title>" in curve
    assert curve.count(">this plan</text>") == 1
    # The chart leaves out the point of 0 nats, which has no logarithm. It has one line, and ticks on both axes.
    assert "NaN" not in curve and "Infinity" not in curve and "3000 bytes" not in curve
    [line] = re.findall(r'class="line" d="(M[\d.L ]+)" stroke', curve)
    assert line.count("L") == 1
    assert ">500</text>" in curve and ">0.1</text>" in curve
    assert "predicted divergence  0.01230 nats" in run("inspect", artifact).stdout


def test_the_html_page_draws_the_cache_memory_with_and_without_eviction(artifact, drawn, tmp_path):
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page)
    assert "without eviction" not in draw_by_script(page)
    run("inspect", artifact, "--html", page, "--eviction", "q-hitter", "--eviction-budget", 128,
        "--eviction-lambda", 0.5)
    html = drawn(page)
    start = html.index("<h2>KV cache with and without eviction")
    chart = html[start:html.index("<summary>Rank table")]
    assert "NaN" not in chart and "Infinity" not in chart
    own, whole = re.findall(r'class="line" d="(M[\d.L ]+)" stroke', chart)
    own, whole = ([float(point.split()[1]) for point in re.split("[ML]", line) if point]
                  for line in (own, whole))
    # y grows downwards. From some length on, the curve of the plan is level; without eviction it rises further.
    assert own[-1] == own[len(own) // 2] and whole[-1] < whole[len(whole) // 2] < own[-1]
    assert ">q-hitter</td>" in chart and ">128</td>" in chart


@pytest.mark.parametrize("values", [
    {"curve": []}, {"curve": [], "kl": 0, "kl_low": 0}, {"curve": [], "kl": 5e-324, "kl_low": 5e-324},
])
def test_the_html_page_accepts_a_prediction_without_points(artifact, prediction, tmp_path, values):
    path, content = prediction
    path.write_text(json.dumps(content | values | {"kappa": {}}))
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page)
    html = draw_by_script(page)
    assert ("Predicted divergence" in html) == ("kl" not in values)
    assert "NaN" not in html and "Infinity" not in html


@pytest.mark.parametrize("field, value, named", [
    ("kl", float("nan"), "not valid JSON"), ("kl", None, "kl: is missing"),
    ("curve", "<script>", "curve: must be a list"), ("curve", [7] * 5000, "found 5000"),
    ("curve", [{"bytes_per_token": -1, "kl": 1}], "curve[0]: bytes_per_token")])
def test_the_error_for_an_invalid_prediction_names_the_field(artifact, prediction, field, value, named):
    path, content = prediction
    path.write_text(json.dumps(content | {field: value}))
    refused = run("inspect", artifact, check=False)
    assert refused.returncode == 1
    assert "kv_plan.prediction.json" in refused.stderr and named in refused.stderr


def test_a_prediction_of_another_plan_is_not_shown(artifact, prediction):
    path, content = prediction
    path.write_text(json.dumps(content | {"plan_sha256": 64 * "0"}))
    assert "not known: the prediction next to this plan is for another plan" in run("inspect", artifact).stdout
    assert json.loads(run("inspect", artifact, "--json").stdout)["prediction"] is None


@pytest.mark.parametrize("low, high, scale", [
    (-0.0003, 0.0078, 0.0009), (0, 0.0095, 0.001), (-0.02, 5.5, 0.0004), (0, 0.9, 0.1)])
def test_a_scale_around_0_has_at_least_four_ticks_that_do_not_overlap(
        artifact, tmp_path, low, high, scale):
    page = tmp_path / "page.html"
    run("inspect", artifact, "--html", page)
    axis = f"(y => y.ticks.map(tick => [tick, y.at(tick)]))(bothAxis({low}, {high}, {scale}, 334, 18))"
    ticks = sorted(json.loads(run_script(page).eval(f"JSON.stringify({axis})")))
    assert len(ticks) >= 4 and 0 in [tick for tick, _ in ticks]
    assert all(low <= tick <= high for tick, _ in ticks)
    assert all(above - below >= 24 for (_, above), (_, below) in zip(ticks, ticks[1:]))


def test_perplexity_with_a_compressed_checkpoint_uses_the_bytes_that_inspect_reports(artifact):
    report = json.loads(
        run("perplexity", "--model", artifact, "--text", TINY / "evaluation.txt", "--window", "32",
            "--max-windows", "1", "--json").stdout
    )
    inspected = json.loads(run("inspect", artifact, "--json").stdout)
    assert report["kv_bytes_per_token"] == inspected["kv_bytes_per_token"]


@pytest.mark.parametrize(
    "command", [("serve",), ("generate", "--prompt", "x"), ("perplexity", "--text", "x")]
)
def test_the_error_for_a_plan_that_is_not_implemented_names_the_layer(artifact, command):
    plan = json.loads((artifact / "kv_plan.json").read_text())
    plan["layers"][2] = json.loads(json.dumps(plan["layers"][2]))
    plan["layers"][2]["selection"] = {
        "chunk_slots": 8, "budget": 64, "landmark_codec": {"dtype": "BF16"},
    }
    (artifact / "kv_plan.json").write_text(json.dumps(plan))
    run("inspect", artifact)
    refused = run(*command, "--model", artifact, check=False)
    assert refused.returncode == 1
    assert "UNIMPLEMENTED: layer 2: the plan asks for selection" in refused.stderr


def test_an_uncompressed_plan_with_uncompressed_weights_is_served(tmp_path):
    folder = tmp_path / "full"
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "config.json").read_text())
    side = lambda stored: {"parts": [{"full": {}, "stored": stored, "codec": {"dtype": "F16"}}]}
    layer = {"key": side("POST_ROPE"), "value": side("NO_ROPE")}
    plan = {"schema_version": 1, "layers": [layer] * config["num_hidden_layers"]}
    (folder / "kv_plan.json").write_text(json.dumps(plan))
    report = json.loads(
        run("perplexity", "--model", folder, "--text", TINY / "evaluation.txt", "--window", "32",
            "--max-windows", "1", "--json").stdout
    )
    assert report["tokens"] > 0


def test_weights_of_another_plan_are_refused(artifact):
    plan = json.loads((artifact / "kv_plan.json").read_text())
    for group in plan["layers"][3]["value"]["parts"][0]["low_rank"]["groups"]:
        group["rank"] = RANK - 4
    (artifact / "kv_plan.json").write_text(json.dumps(plan))
    refused = run("inspect", artifact, check=False)
    assert refused.returncode == 1
    assert "layer 3" in refused.stderr and "v_proj.down.weight" in refused.stderr
    assert "want shape [40, 256], have [48, 256]" in refused.stderr


def test_a_plan_can_be_inspected_before_it_is_applied(artifact):
    report = json.loads(
        run("inspect", TINY, "--kv-plan", artifact / "kv_plan.json", "--json").stdout
    )
    assert not report["weights_fit"]
    applied = json.loads(run("inspect", artifact, "--json").stdout)
    assert applied["weights_fit"]
    assert report["kv_bytes_per_token"] == applied["kv_bytes_per_token"]
    assert report["weight_bytes"] == applied["weight_bytes"]


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.v_proj.up.1.weight",
                                  "model.layers.5.mlp.up_proj.weight"])
def test_the_error_for_weights_that_are_not_finite_names_the_tensor(artifact, name):
    tensors = read_tensors(artifact / "model.safetensors")
    dtype, shape, content = tensors[name]
    row, column = shape[0] - 1, 7
    at = 2 * (row * shape[1] + column)
    tensors[name] = (dtype, shape, content[:at] + b"\xc0\x7f" + content[at + 2:])
    write_tensors(artifact / "model.safetensors", tensors)
    for command in (["perplexity", "--text", TINY / "evaluation.txt", "--window", "32",
                     "--max-windows", "1"], ["generate", "--prompt", "x"]):
        refused = run(*command, "--model", artifact, check=False)
        assert refused.returncode == 1 and refused.stdout == ""
        assert (f"tensor {name}: row {row}, column {column}: must be a finite number, but is nan"
                in refused.stderr)


def test_if_logits_overflow_generate_fails_and_prints_no_text(tmp_path):
    """The weights are finite, but their products are not."""
    folder = tmp_path / "overflow"
    shutil.copytree(TINY, folder)
    tensors = read_tensors(folder / "model.safetensors")
    dtype, shape, content = tensors["model.norm.weight"]
    assert dtype == "BF16"
    tensors["model.norm.weight"] = (dtype, shape, b"\x7f\x7f" * shape[0])
    write_tensors(folder / "model.safetensors", tensors)
    for command in (["perplexity", "--text", TINY / "evaluation.txt", "--window", "32",
                     "--max-windows", "1"], ["generate", "--prompt", "x", "--temperature", "0"]):
        failed = run(*command, "--model", folder, check=False)
        assert failed.returncode == 1 and failed.stdout == ""
        assert "INTERNAL" in failed.stderr and "a logit that is not a finite number" in failed.stderr


def test_control_characters_in_the_names_of_a_plan_are_not_printed(artifact):
    plan = json.loads((artifact / "kv_plan.json").read_text())
    plan["method"] = "red \x1b[31m\x07 and \x9b2J"
    (artifact / "kv_plan.json").write_text(json.dumps(plan))
    text = run("inspect", artifact).stdout
    assert "red \\x1b[31m\\x07 and \\u009b2J" in text
    plan["layers"][0]["\x1b[2J"] = 1
    (artifact / "kv_plan.json").write_text(json.dumps(plan))
    refused = run("inspect", artifact, check=False)
    assert refused.returncode == 1 and "\x1b" not in refused.stderr


def test_generate_reports_a_missing_tokenizer(tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(TINY, folder)
    (folder / "tokenizer.json").unlink()
    refused = run("generate", "--model", folder, "--prompt", "x", check=False)
    assert refused.returncode == 1
    assert "has no tokenizer" in refused.stderr and "accepts token ids" in refused.stderr


def test_generate_allocates_a_pool_only_for_its_own_tokens(tmp_path):
    """A pool for the whole context of 2^20 positions would take gigabytes."""
    folder = altered_model(tmp_path / "long", max_position_embeddings=1 << 20)
    command = ["generate", "--prompt", "Once", "--max-tokens", "8", "--temperature", "0"]
    child = subprocess.Popen([str(BINARY), *command, "--model", str(folder)],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert text == run(*command, "--model", TINY).stdout
    assert usage.ru_maxrss < 1 << 20  # in KiB
