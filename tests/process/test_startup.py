"""Settings that cannot work are refused at start, with the numbers and the flag."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from concurrent import futures

import grpc
import pytest

import access_log
import triton
from kvasir_process import BINARY, OPERATOR_PORTS, TINY, KvasirProcess, run, wait_until


def refused(*args):
    done = run(*args, check=False, timeout=120)
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    return done.stderr


def built_with_cuda():
    text = refused("inspect", "--model", TINY, "--device", "cuda:999")
    return "was built without CUDA" not in text


@pytest.mark.parametrize("command", [["serve", "--grpc-port", "0"], ["worker", "--listen", "127.0.0.1:0"],
                                     ["generate", "--prompt", "a"], ["perplexity", "--text", TINY / "README.md"],
                                     ["inspect"]], ids=lambda command: command[0])
def test_a_missing_gpu_is_refused_with_the_reason(command):
    if pathlib.Path("/dev/nvidiactl").exists():
        pytest.skip("this host has an NVIDIA GPU")
    ports = OPERATOR_PORTS if command[0] in ("serve", "worker") else []
    text = refused(*command, "--model", TINY, "--device", "cuda", *ports)
    assert "--device cuda: " in text and "--device cpu" in text
    if built_with_cuda():
        assert "FAILED_PRECONDITION" in text
        assert "no NVIDIA driver (libcuda.so.1) on this host; install one for CUDA 13.0 or later" in text
    else:
        assert "UNIMPLEMENTED" in text and "built without CUDA" in text and "nvcc" in text


def test_a_program_with_cuda_serves_on_a_host_without_cuda():
    if not built_with_cuda():
        pytest.skip("this program was built without CUDA")
    needed = subprocess.run(["ldd", BINARY], check=True, capture_output=True, text=True).stdout
    assert "libc.so" in needed
    assert not re.search(r"lib(cuda|cudart|cublas|cublasLt|nvrtc|nvidia)", needed), needed
    with KvasirProcess("serve", "--device", "cpu") as server:
        text, _, tokens = triton.generate(server.grpc, server.ready["model"], "Once", max_tokens=2, temperature=0.0)
        assert text and tokens == 2


def test_device_auto_uses_the_cpu_without_a_gpu_and_logs_why():
    if pathlib.Path("/dev/nvidiactl").exists():
        pytest.skip("this host has an NVIDIA GPU")
    with KvasirProcess("serve", "--device", "auto") as server:
        log = server.log()
        assert "device=cpu" in log
        assert "why_not_cuda" in log and ("no NVIDIA driver" in log or "built without CUDA" in log), log


def test_a_client_cannot_choose_the_device_of_its_server():
    for flags in (["--device", "cuda:0"], ["--device", "auto"], ["--device", "cpu"], ["--device-module", "m.so"]):
        for endpoint in ([], ["--endpoint", "127.0.0.1:1"]):
            text = refused("generate", "--prompt", "a", *endpoint, *flags)
            assert flags[0] in text and "the server at 127.0.0.1:" in text, text


@pytest.mark.parametrize("share", ["0", "1.01", "-1", "x"])
def test_a_share_of_gpu_memory_must_be_above_0_and_at_most_1(share):
    assert "--gpu-memory-utilization" in refused("serve", "--model", TINY, "--gpu-memory-utilization", share)


def test_a_share_of_a_gpus_memory_is_refused_on_the_cpu():
    assert ("--gpu-memory-utilization 0.5 is a share of a GPU's memory, but the device is --device cpu"
            in refused("serve", "--model", TINY, "--gpu-memory-utilization", 0.5))


def test_the_error_for_a_pool_too_small_for_one_sequence_has_its_bytes_and_flag():
    text = refused("serve", "--model", TINY, "--kv-cache-bytes", "64KiB", "--grpc-port", "0",
                   *OPERATOR_PORTS)
    assert "--kv-cache-bytes" in text and "--max-model-len" in text
    assert "16 pages" in text  # each of 64 slots, for the model's 1024 tokens
    assert "64.00 KiB" in text


@pytest.mark.parametrize("flag", ["--grpc-port", "--admin-port", "--health-port", "--metrics-port"])
def test_the_error_for_a_port_in_use_names_the_port_and_its_flag(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ports = {"--grpc-port": "0", "--admin-port": "0", "--health-port": "0",
                 "--metrics-port": "0", flag: port}
        text = refused("serve", "--model", TINY, *[x for pair in ports.items() for x in pair])
    assert port in text and flag in text
    assert len(text.splitlines()) == 1  # it is found before gRPC tries, which would log more


def test_a_port_in_use_is_reported_before_the_router_waits_for_workers():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        text = refused("router", "--workers", "127.0.0.1:1", "--start-timeout", "60s",
                       "--grpc-port", port, *OPERATOR_PORTS)
    assert port in text and "--grpc-port" in text and "--workers" not in text


def test_a_router_without_a_tokenizer_suggests_token_ids():
    with tempfile.TemporaryDirectory() as folder:
        listen = f"unix:{folder}/w"
        ports = ["--grpc-port", "0", *OPERATOR_PORTS]
        with KvasirProcess("worker", "--listen", listen, *ports[2:], ports=False):
            for flags, hint in (["--model", TINY], "--prompt"), ([], "token ids"):
                with KvasirProcess("router", "--workers", listen, *flags, model=None) as router:
                    wait_until(lambda: hint in router.log(), hint)


@pytest.mark.parametrize("template, hint", [
    ("<|im_start|>{{ message['role'] }}", r"--prompt $'<|im_start|>user\n"),
    ("{{ message['content'] }}", '--prompt "It was'),
])
def test_the_example_request_in_the_log_uses_the_chat_template_of_the_model(tmp_path, template, hint):
    for file in TINY.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with KvasirProcess("serve", model=tmp_path) as server:
        wait_until(lambda: hint in server.log(), hint)


def test_generate_asks_a_server_or_runs_a_model_but_not_both():
    text = refused("generate", "--model", TINY, "--endpoint", "127.0.0.1:1", "--prompt", "a")
    assert "--endpoint 127.0.0.1:1" in text and "--model" in text


def test_the_error_for_an_unknown_plan_names_it_and_its_flag():
    text = refused("serve", "--model", TINY, "--kv-plan", "palu-50-g1")
    assert "--kv-plan palu-50-g1 needs tensors" in text and "rotated-4bit" in text
    text = refused("serve", "--model", TINY, "--kv-plan", "palu-5")
    assert "--kv-plan: palu-5" in text and "must be a plan file" in text and "rotated-4bit" in text
    text = refused("serve", "--model", TINY, "--kv-plan", TINY / "README.md")
    assert "--kv-plan" in text and "README.md" in text


def test_a_model_path_that_is_another_file_is_refused():
    assert "is neither a folder nor a GGUF file" in refused("serve", "--model", TINY / "README.md")


@pytest.mark.parametrize("command", ["serve", "worker", "inspect", "generate", "perplexity"])
def test_the_error_for_a_missing_model_names_its_folder_and_flag(command):
    needed = {"generate": ["--prompt", "x"], "perplexity": ["--text", TINY / "evaluation.txt"]}
    text = refused(command, "--model", "/no/such/folder", *needed.get(command, []))
    assert "--model" in text and "/no/such/folder" in text


def test_inspect_accepts_a_plan_that_other_commands_refuse_and_reports_the_reason(tmp_path):
    """The plan is valid, but its value latent has one run more than the kernels accept."""
    def part(stored, rest):
        return {"parts": [{**rest, "stored": stored}]}

    heads = list(range(32))
    latent = {"low_rank": {"groups": [{"heads": heads, "rank": 1028}]}, "uses": [{"fold": {}}],
              "codec": {"bits": {"schedule": [4]}, "per_token": {"group": 4},
                        "param_dtype": "F16"}}
    layer = {"key": part("POST_ROPE", {"full": {}, "codec": {"dtype": "BF16"}}),
             "value": part("NO_ROPE", latent)}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema_version": 1, "layers": [layer] * 32}))
    shape = ["--random-weights", "--shape", "llama-2-7b", "--kv-plan", plan]
    report = json.loads(run("inspect", *shape, "--json").stdout)
    assert report["served"] is False
    assert report["not_served"] == (
        "layer 0 value part 0: 257 runs of codes in a latent; this build serves at most 256")
    for command in (["serve", *shape], ["bench", "decode", *shape],
                    ["bench", "capacity", "--shape", "llama-2-7b", "--plan", plan]):
        done = run(*command, check=False)
        assert done.returncode == 1 and report["not_served"] in done.stderr, done.stderr


def test_the_error_for_a_max_model_len_over_the_models_own_names_both_numbers():
    text = refused("serve", "--model", TINY, "--max-model-len", "1000000")
    assert "1000000" in text and "--max-model-len" in text


def test_unknown_flags_and_values_are_usage_errors():
    assert run("serve", "--no-such-flag", check=False).returncode == 2
    assert run("serve", "--model", TINY, "--page-tokens", "63", check=False).returncode == 2
    assert run("serve", check=False).returncode == 2
    # A worker takes its address from --listen, so it refuses --grpc-port instead of ignoring it.
    assert run("worker", "--model", TINY, "--grpc-port", "1", check=False).returncode == 2


def test_a_router_without_a_reachable_worker_starts_and_names_the_worker_that_does_not_answer():
    with tempfile.TemporaryDirectory() as folder:
        with KvasirProcess("router", "--workers", f"unix:{folder}/none.sock", "--start-timeout", "1s") as router:
            assert "model" not in router.ready
            wait_until(lambda: re.search("not ready: no worker can answer.*none.sock", router.log()), "the log line")
            assert router.stop() == 0


@pytest.mark.parametrize("flags, wrong", [
    (["--workers", "dns:///workers"], "dns:///workers"),
    (["--workers", "dns://8.8.8.8/workers:1"], "name server"),
    (["--workers", "a:1", "--workers-refresh", "1ms"], "--workers-refresh"),
])
def test_wrong_entries_of_workers_are_usage_errors(flags, wrong):
    done = run("router", *flags, check=False)
    assert done.returncode == 2 and wrong in done.stderr


def test_print_config_shows_flags_environment_and_defaults(monkeypatch):
    monkeypatch.setenv("KVASIR_MAX_QUEUE", "17")
    text = run("serve", "--model", TINY, "--max-num-seqs", "5", "--print-config").stdout
    assert "max-queue=17" in text
    assert "max-num-seqs=5" in text
    assert "default-max-tokens=" in text


def test_a_config_file_is_read_and_flags_override_it(tmp_path):
    config = tmp_path / "kvasir.toml"
    config.write_text('[serve]\nmax-num-seqs = 7\nmax-queue = 9\n')
    text = run("--config", config, "serve", "--model", TINY, "--max-queue", "11",
               "--print-config").stdout
    assert "max-num-seqs=7" in text
    assert "max-queue=11" in text


@pytest.mark.parametrize(
    "command, flags",
    [
        ("serve", ["--model", TINY, "--no-prefix-caching", "--kv-cache-bytes", "24MiB"]),
        ("worker", ["--model", TINY, "--listen", "unix:/tmp/a.sock"]),
        ("router", ["--workers", "127.0.0.1:1,127.0.0.1:2", "--served-model-name", "a,b"]),
    ],
)
def test_the_output_of_print_config_is_a_config_file(command, flags, tmp_path):
    printed = run(command, *flags, "--print-config").stdout
    assert printed.startswith(f"[{command}]\n")
    (tmp_path / "kvasir.toml").write_text(printed)
    again = run("--config", tmp_path / "kvasir.toml", command, "--print-config").stdout
    assert again == printed


def test_a_config_file_with_an_unknown_key_is_refused(tmp_path):
    config = tmp_path / "kvasir.toml"
    config.write_text("[serve]\nmax-que = 7\n")
    done = run("--config", config, "serve", "--model", TINY, "--print-config", check=False)
    assert done.returncode == 2 and "serve.max-que" in done.stderr


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["nosuch"], "'nosuch' is not a command"),
        (["worker", "--model", TINY, "--listen", "nonsense"], "--listen"),
        (["serve", "--random-weights", "--shape", "foo"], "--shape"),
        (["serve", "--shape", "kvasir-tiny"], "--shape kvasir-tiny is used only with --random-weights"),
        (["inspect", TINY, "--shape", "kvasir-tiny"], "give no --shape beside --model"),
        (["serve", "--model", TINY, "--kv-cache-bytes", "99999999999999999999"],
         "--kv-cache-bytes: '99999999999999999999' is over the limit of 9223372036854775807"),
        (["serve", "--model", TINY, "--kv-cache-bytes", "-1"],
         "--kv-cache-bytes: '-1' is not a size"),
        (["bench", "serve", "--rate", "-1"], "--rate: '-1' is not a number of at least 0"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "--temperature: 'nan'"),
    ],
)
def test_wrong_usage_has_its_own_exit_code_and_names_the_flag(arguments, named):
    done = run(*arguments, check=False)
    assert done.returncode == 2, done
    assert named in done.stderr and len(done.stderr) < 500


@pytest.mark.parametrize(
    "command", ["serve", "router", "worker", "generate", "perplexity", "inspect", "convert", "bench", "drain"]
)
def test_every_command_has_help(command):
    text = run(command, "--help").stdout
    assert "--" in text and len(text) > 200


@pytest.fixture(scope="module")
def server():
    with KvasirProcess("serve") as process:
        yield process


def test_a_call_to_the_wrong_port_names_the_port_and_the_right_flag(server):
    text = refused("generate", "--endpoint", server.admin, "--prompt", "A secret prompt")
    assert server.admin in text and "admin port" in text and "--grpc-port" in text
    text = refused("drain", "--endpoint", server.grpc)
    assert server.grpc in text and "--admin-port" in text


def test_a_missing_server_is_reported_with_the_command_that_starts_one():
    done = run("generate", "--endpoint", "127.0.0.1:1", "--prompt", "x", check=False)
    assert done.returncode == 3
    assert "127.0.0.1:1: no server answers there; scripts/serve starts one" in done.stderr


def test_a_shape_without_random_weights_is_refused():
    done = run("generate", "--shape", "kvasir-tiny", "--prompt", "x", check=False)
    assert done.returncode == 1 and "--shape kvasir-tiny is used only with" in done.stderr


def test_generate_prints_no_prompt_if_there_is_no_answer():
    done = run("generate", "--endpoint", "127.0.0.1:1", "--prompt", "A secret prompt", check=False)
    assert done.returncode == 3 and done.stdout == ""


def test_errors_of_perplexity_name_its_own_flags():
    text = refused("perplexity", "--model", TINY, "--text", "/tmp")
    assert "/tmp: is not a regular file" in text
    text = refused("perplexity", "--model", TINY, "--text", TINY / "evaluation.txt",
                   "--window", "100000")
    assert "--window 100000" in text and "1024" in text and "--max-model-len" not in text


def test_sigterm_finishes_running_requests_and_exits_0():
    with KvasirProcess("serve") as server:
        stream = triton.Stream(server.grpc)
        stream.send(server.ready["model"], triton.text_inputs(
            "The captain", max_tokens=200, ignore_eos=True), "a")
        result, error = stream.results.get(timeout=60)
        assert error is None
        server.process.send_signal(signal.SIGTERM)
        tokens = 1
        while not triton.final(result):
            result, error = stream.results.get(timeout=60)
            assert error is None, error
            tokens += 1
        reason = result.as_numpy("finish_reason")[0].decode()
        assert reason == "length"
        stream.close()
        assert server.process.wait(timeout=60) == 0


def test_a_stalled_engine_ends_the_process_with_an_error_that_shows_its_step():
    # No step is that fast, so the watchdog reports the warm-up as stalled.
    done = run("serve", "--model", TINY, "--watchdog", "1us", "--grpc-port", "0",
               *OPERATOR_PORTS, check=False, timeout=60)
    assert done.returncode == 1
    assert "no step finished in time" in done.stderr
    assert "tokens" in done.stderr


def test_a_second_signal_ends_a_drain_at_once():
    with KvasirProcess("serve", "--drain-timeout", "60s") as server:
        stream = triton.Stream(server.grpc)
        stream.send(server.ready["model"], triton.text_inputs(
            "The captain", max_tokens=900, n=8, ignore_eos=True), "a")
        stream.results.get(timeout=60)
        server.process.send_signal(signal.SIGTERM)
        # The second signal follows at once, because a small model finishes its requests quickly.
        wait_until(lambda: "draining" in server.log(), "the drain")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 128 + signal.SIGTERM
        stream.close(cancel=True)


def test_sigint_ends_the_perplexity_command_at_once():
    tool = subprocess.Popen(
        [str(BINARY), "perplexity", "--model", str(TINY), "--text", str(TINY / "evaluation.txt"),
         "--window", "1024"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # A shell's background jobs ignore SIGINT, and so would these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while (line := tool.stderr.readline()) and "tokens" not in line:
        pass  # until it reports its progress
    tool.send_signal(signal.SIGINT)
    tool.communicate(timeout=10)
    assert line and tool.returncode == -signal.SIGINT


def test_the_server_turns_off_core_dumps(server):
    with open(f"/proc/{server.pid}/limits") as limits:
        line = next(line for line in limits if line.startswith("Max core file size"))
    assert line.split()[4:6] == ["0", "0"]


def test_the_access_log_has_one_line_per_request_and_no_prompt():
    prompt = "A most peculiar sentence about the Duchess"
    with KvasirProcess("serve", "--log-format", "json") as server:
        triton.generate(server.grpc, server.ready["model"], prompt, max_tokens=4)
        assert server.stop() == 0
        requests, log = access_log.lines(server), server.log()
    assert len(requests) == 1
    assert requests[0]["finish_reason"] in ("length", "stop")
    assert requests[0]["output_tokens"] == 4
    assert "Duchess" not in log


def test_a_worker_of_another_version_is_refused_with_both_versions_and_the_flag():
    # This WorkerInfo has only its first field, api_version.
    version = b"kvasir.v99"
    info = bytes([0x0A, len(version)]) + version
    handler = grpc.method_handlers_generic_handler(
        "kvasir.v1.Worker",
        {"GetInfo": grpc.unary_unary_rpc_method_handler(lambda request, context: info)})
    worker = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    port = worker.add_insecure_port("127.0.0.1:0")
    worker.start()
    try:
        text = refused("router", "--workers", f"127.0.0.1:{port}", "--start-timeout", "5s",
                       "--grpc-port", "0", *OPERATOR_PORTS)
    finally:
        worker.stop(None)
    assert "--workers" in text and f"127.0.0.1:{port}" in text
    assert "kvasir.v99" in text and "kvasir.v1'" in text


def loading():
    """The arguments of a router that waits for a worker and serves nothing yet."""
    return ["router", "--workers", "127.0.0.1:1", "--start-timeout", "60s", "--grpc-port", "0"]


def test_a_drain_before_serving_is_refused_and_sigterm_ends_the_process(tmp_path):
    # Otherwise preStop would wait for a drain that begins only after everything is loaded.
    admin = f"unix:{tmp_path}/admin"
    process = subprocess.Popen(
        [BINARY, *loading(), "--metrics-port", "0", "--health-port", "0", "--admin-host", admin],
        stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (tmp_path / "admin").exists(), "the admin socket is there")
        done = run("drain", "--endpoint", admin, check=False, timeout=30)
        assert done.returncode != 0 and "SIGTERM ends the process" in done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_server_that_ends_while_it_loads_leaves_nothing_in_tmpdir(tmp_path):
    admin, temporary = tmp_path / "admin", tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [BINARY, "serve", "--random-weights", "--shape", "tinyllama-1.1b", "--grpc-port", "0", "--metrics-port", "0",
         "--health-port", "0", "--admin-host", f"unix:{admin}"],
        env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(admin.exists, "the admin socket is there")
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_tmpdir_too_long_for_the_path_of_a_socket_is_not_used(tmp_path):
    temporary = tmp_path / ("long" * 25)
    temporary.mkdir()
    done = subprocess.run([BINARY, "generate", "--model", TINY, "--prompt", "Once", "--max-tokens", "2"],
                          env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_sigterm_ends_process_1_of_a_container_before_it_serves(tmp_path):
    # Process 1 ignores signals for which it has no handler.
    admin = tmp_path / "admin"
    command = ["unshare", "--pid", "--fork", "--kill-child", str(BINARY), *loading(),
               "--metrics-port", "0", "--health-port", "0", "--admin-host", f"unix:{admin}"]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("no process namespaces here")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(admin.exists, "the admin socket is there")
        (child,) = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True,
                                  text=True).stdout.split()
        subprocess.run(["kill", "-TERM", child], check=True)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


# Otherwise each kill would leave a folder of sockets for good.
def test_the_private_folder_of_a_killed_server_is_removed_by_the_next_server():
    killed = KvasirProcess("serve")
    with killed:
        folders = lambda: {path for path in killed.dir.iterdir() if path.is_dir()}
        left = folders()
        assert left
        killed.kill()
        assert folders() == left
        after = KvasirProcess("serve")
        own = after.dir
        after.dir = killed.dir  # also its TMPDIR
        try:
            after.start()
            assert not left & folders()
        finally:
            after.kill()
            shutil.rmtree(own)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_tokenizers_end_token_ends_an_output_and_is_logged(tmp_path, place):
    """Regression test: a model whose config.json named no end token never stopped, although its tokenizer named one."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "generation_config.json").unlink()
    for name, change in [("config.json", {"eos_token_id": None}), ("tokenizer_config.json", {"eos_token": None}),
                         (place, {"eos_token": "."})]:
        path = folder / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(fields | change))
    with KvasirProcess("serve", model=folder) as server:
        text, reason, tokens = triton.generate(server.grpc, server.ready["model"], "Once upon a time",
                                               max_tokens=60, temperature=0.0)
        assert reason == "stop" and tokens < 60 and "." not in text
        log = server.log()
        assert f'model="none ({folder}/config.json)"' in log
        ids = re.search(r"end tokens ids=(\d+) ", log)
        assert ids and f"tokenizer={ids[1]}" in log


def test_a_model_without_an_end_token_is_served_with_a_warning(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": -1}')
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with KvasirProcess("serve", model=folder) as server:
        assert "the model has no end token" in server.log()
