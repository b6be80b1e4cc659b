"""The VllmEngine facade as the gateway smg uses it, unmodified: HTTP to smg, gRPC from smg to `kvasir serve`. smg
fetches the tokenizer over gRPC.

smg has an environment of its own (scripts/setup_venv). Without it the tests are skipped.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import descriptor_pb2

from gateway import (HttpGateway, ROOT, VENV, assert_keys_are_needed, environment_of, idle, statuses_of_a_full_server, text_of,
                     two_free_ports)
from kvasir_process import BINARY, OPERATOR_PORTS, TINY, KvasirProcess, wait_until

pytestmark = pytest.mark.timeout(120)
SMG = environment_of("smg", "smg")
CONTROL_PLANE_KEY = "control-plane-key-of-a-test"


class Gateway(HttpGateway):
    """`smg launch` over one server. It has no model folder of its own."""

    facade = "vllm"

    def __init__(self, server, *flags):
        super().__init__(server, [
            SMG / "smg", "launch", "--worker-urls", f"grpc://{server.grpc}",
            "--health-success-threshold", "1", "--health-check-interval-secs", "1", *flags])

    def ready(self):
        served = super().ready()
        time.sleep(0.2)
        return served


@pytest.fixture(scope="module")
def server():
    with KvasirProcess("serve", "--max-model-len", "512", "--max-num-seqs", "4") as process:
        yield process


@pytest.fixture(scope="module")
def gateway(server):
    with Gateway(server) as process:
        yield process


def test_a_streamed_chat_answer_equals_one_that_is_not_streamed(gateway):
    status, whole = gateway.chat("Once upon a time", max_tokens=12, ignore_eos=True)
    assert status == 200, whole
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 12
    events = gateway.stream("Once upon a time", max_tokens=12, ignore_eos=True,
                            stream_options={"include_usage": True})
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_completions_return_text_and_counts(gateway):
    status, answer = gateway.post("/v1/completions", prompt="Once upon a time", max_tokens=5,
                                  temperature=0, ignore_eos=True)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["text"]


def test_one_request_returns_several_samples(gateway):
    status, answer = gateway.chat("Once", n=2, max_tokens=6, ignore_eos=True)
    assert status == 200, answer
    assert {choice["index"] for choice in answer["choices"]} == {0, 1}
    assert answer["usage"]["completion_tokens"] == 12
    events = gateway.stream("Once", n=2, max_tokens=6, ignore_eos=True)
    for choice in answer["choices"]:
        assert text_of(events, choice["index"]) == choice["message"]["content"]


def test_log_probabilities_are_returned_for_every_token(gateway):
    for stream in (False, True):
        if stream:
            events = gateway.stream("Once", max_tokens=4, ignore_eos=True, logprobs=True,
                                    top_logprobs=2)
            content = [
                entry
                for event in events
                for choice in event["choices"]
                if choice.get("logprobs")
                for entry in choice["logprobs"]["content"]
            ]
        else:
            _, answer = gateway.chat("Once", max_tokens=4, ignore_eos=True, logprobs=True,
                                     top_logprobs=2)
            content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        for entry in content:
            assert entry["logprob"] <= 0
            # With greedy sampling, the chosen token is the likeliest.
            assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])


def test_a_stop_string_ends_the_text_and_the_generation(gateway, server):
    _, whole = gateway.chat("Once upon a time", max_tokens=40, ignore_eos=True)
    text = whole["choices"][0]["message"]["content"]
    stop = text[len(text) // 3 : len(text) // 3 + 3]
    _, answer = gateway.chat("Once upon a time", max_tokens=40, ignore_eos=True, stop=[stop])
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 40
    wait_until(lambda: "finish_reason=stop" in gateway.answers(server)[-1], "the engine's end is logged")
    events = gateway.stream("Once upon a time", max_tokens=40, ignore_eos=True, stop=[stop])
    assert text_of(events) == text[: text.index(stop)]


def test_a_client_that_leaves_ends_its_request_and_frees_its_pages(gateway, server):
    before = len(gateway.answers(server))
    gateway.leave_in_the_middle(n=4)
    gateway.wait_cancelled(server, before)
    wait_until(lambda: idle(server), "its pages are free")


def test_a_bad_request_is_reported_to_the_client_and_not_retried(gateway, server):
    before = len(gateway.answers(server))
    status, answer = gateway.chat("Once", repetition_penalty=0.001)
    assert status == 400, answer
    assert "repetition_penalty is 0.001, want 0.01 to 100" in json.dumps(answer)
    wait_until(lambda: len(gateway.answers(server)) == before + 1, "the request is refused once")
    time.sleep(0.5)
    assert len(gateway.answers(server)) == before + 1


def test_the_error_for_a_feature_that_is_not_implemented_names_it(gateway):
    status, answer = gateway.chat("Once", response_format={"type": "json_object"})
    assert status == 501, answer
    assert "is not implemented" in json.dumps(answer)


def test_the_answer_of_every_request_is_generated_only_once(gateway, server):
    before = server.metric("kvasir_router_output_tokens_total")
    for _ in range(3):
        assert gateway.chat("Once", max_tokens=3, ignore_eos=True)[0] == 200
    def tokens():
        return server.metric("kvasir_router_output_tokens_total") - before

    wait_until(lambda: tokens() >= 9, "all are counted")
    assert tokens() == 9


class Workers:
    """Three workers behind a router. Tests kill some of them."""

    def __enter__(self):
        with contextlib.ExitStack() as running:
            folder = running.enter_context(tempfile.TemporaryDirectory())
            names = [f"unix:{folder}/{i}.sock" for i in range(3)]
            self.workers = [
                running.enter_context(KvasirProcess("worker", "--listen", name, *OPERATOR_PORTS, ports=False)) for name in names]
            self.router = running.enter_context(KvasirProcess("router", "--workers", *names))
            self.running = running.pop_all()
        return self

    def __exit__(self, *unused):
        self.running.close()

    def lose_the_busy_one(self):
        """Kills the worker that generates tokens."""
        before = [each.metric("kvasir_generation_tokens_total") for each in self.workers]

        def busy():
            now = [each.metric("kvasir_generation_tokens_total") for each in self.workers]
            return [each for each, old, new in zip(self.workers, before, now) if new > old]

        wait_until(busy, "a worker generates tokens")
        (lost,) = busy()
        lost.kill()
        self.workers.remove(lost)


def test_answers_go_on_at_another_worker_and_nothing_is_generated_twice():
    with Workers() as behind, Gateway(behind.router) as gateway:
        long = {"max_tokens": 900, "ignore_eos": True}
        whole = gateway.chat("Once", **long)[1]["choices"][0]["message"]["content"]

        def lines():
            return gateway.answers(behind.router)

        wait_until(lambda: "output_tokens=900" in lines()[-1], "it is logged")
        before = len(lines())
        tokens = behind.router.metric("kvasir_router_output_tokens_total")
        for ask in (lambda: gateway.chat("Once", **long)[1]["choices"][0]["message"]["content"],
                    lambda: text_of(gateway.stream("Once", **long))):
            with ThreadPoolExecutor(1) as thread:
                answer = thread.submit(ask)
                behind.lose_the_busy_one()
                assert answer.result() == whole
        wait_until(lambda: len(lines()) == before + 2, "both are logged")
        for moved in lines()[before:]:
            assert "finish_reason=length" in moved and "attempts=2" in moved, moved
        assert behind.router.metric("kvasir_router_output_tokens_total") == tokens + 2 * 900


def test_requests_to_a_full_server_get_http_status_429():
    with KvasirProcess("serve", "--max-model-len", "512", "--max-num-seqs", "1",
                       "--max-queue", "0", "--max-inflight", "1") as server:
        # smg would retry five times, longer than the running request lasts.
        with Gateway(server, "--disable-retries") as gateway:
            statuses = statuses_of_a_full_server(gateway)
            assert 429 in statuses and set(statuses) <= {200, 429}, statuses


def test_a_key_for_the_gateway_must_be_long_and_without_separators():
    for key in ("too-short", "tenant:key-with-a-colon", "sixteen characters and spaces"):
        done = subprocess.run([ROOT / "scripts/serve", "--openai"], env={**os.environ, "KVASIR_OPENAI_KEY": key},
                              capture_output=True, text=True)
        assert done.returncode == 2 and "KVASIR_OPENAI_KEY: want at least 16" in done.stderr, done
        assert key not in done.stderr


def test_our_proto_files_agree_with_those_of_the_gateway(tmp_path):
    """Each of our fields and RPCs is one of smg's with the same number and type."""
    theirs = {}
    script = (
        "import sys;"
        "from google.protobuf import descriptor_pb2 as d;"
        "from smg_grpc_proto.generated import vllm_engine_pb2 as e, common_pb2 as c;"
        "s=d.FileDescriptorSet();"
        "[m.DESCRIPTOR.CopyToProto(s.file.add()) for m in (e,c)];"
        "sys.stdout.buffer.write(s.SerializeToString())"
    )
    done = subprocess.run([SMG / "python", "-c", script], check=True, capture_output=True)
    for file in descriptor_pb2.FileDescriptorSet.FromString(done.stdout).file:
        theirs[file.package] = file
    out = tmp_path / "descriptors"
    subprocess.run(
        ["protoc", "-I", str(ROOT), f"--descriptor_set_out={out}", "--include_imports",
         "proto/vllm/engine.proto"],
        check=True,
    )
    ours = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    compared = 0
    for file in ours.file:
        messages = {message.name: message for message in theirs[file.package].message_type}
        for message in file.message_type:
            fields = {field.name: field for field in messages[message.name].field}
            for field in message.field:
                want = fields[field.name]
                name = f"{message.name}.{field.name}"
                assert (field.number, field.type, field.label, field.type_name) == (
                    want.number, want.type, want.label, want.type_name), name
                assert field.proto3_optional == want.proto3_optional, name
                assert field.HasField("oneof_index") == want.HasField("oneof_index"), name
                compared += 1
    assert compared > 80

    def methods(file):
        return {(m.name, m.input_type, m.output_type, m.server_streaming)
                for m in file.service[0].method}

    assert methods(ours.file[-1]) == methods(theirs["vllm.grpc.engine"])
    # Every field that a request can have is known here, so none is ignored silently.
    for name in ("GenerateRequest", "SamplingParams", "TokenizedInput"):
        have = {f.name for m in ours.file[-1].message_type if m.name == name for f in m.field}
        want = {f.name for m in theirs["vllm.grpc.engine"].message_type if m.name == name
                for f in m.field}
        assert have == want, name


def test_the_printed_openai_example_works_and_server_and_gateway_stop(tmp_path):
    for name, text in {"scripts/setup": "#!/bin/sh\n", "scripts/build": "#!/bin/sh\n",
                       "scripts/setup_venv": "#!/bin/sh\n",
                       "models/fetch": "#!/bin/sh\necho 'known  a model'\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("serve", "openai_ready.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "build/release").mkdir(parents=True)
    (tmp_path / "build/release/kvasir").symlink_to(BINARY.resolve())
    port = two_free_ports()
    commands, watch = set(), threading.Event()

    def read_commands():
        while not watch.wait(0.05):
            listed = subprocess.run(["ps", "-ww", "-o", "args=", "-g", str(process.pid)], capture_output=True, text=True)
            commands.update(listed.stdout.splitlines())

    watcher = threading.Thread(target=read_commands)
    # One key is the user's, the other one is made.
    process = subprocess.Popen(
        [tmp_path / "scripts/serve", "--openai", f"--openai-port={port}", "--model", TINY,
         "--grpc-port", "0", *OPERATOR_PORTS],
        env={**os.environ, "KVASIR_VENV": str(VENV), "KVASIR_CONTROL_PLANE_KEY": CONTROL_PLANE_KEY}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        watcher.start()
        printed = ""
        while "flush=True)" not in printed:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            printed += line
        (export, key), = re.findall(r"^(export KVASIR_OPENAI_KEY=(.*))$", printed, re.MULTILINE)
        watch.set()
        (curl,) = re.findall(r"^curl .*$", printed, re.MULTILINE)
        answer = subprocess.run(f"{export}\n{curl}", shell=True, capture_output=True, text=True, timeout=60, check=True)
        (choice,) = json.loads(answer.stdout)["choices"]
        snippet = printed[printed.index("import os\n"):]
        done = subprocess.run([SMG / "python", "-c", snippet], capture_output=True, text=True,
                              timeout=60, check=True, env={**os.environ, "KVASIR_OPENAI_KEY": key})
        assert done.stdout.strip() == choice["message"]["content"].strip() != ""
        assert CONTROL_PLANE_KEY not in printed
        assert_keys_are_needed(f"http://127.0.0.1:{port}", key, CONTROL_PLANE_KEY)
        watcher.join()
        # smg hides its arguments later, so only those from before it was ready show whether others could have read keys.
        assert any("launch --worker-urls" in each for each in commands), commands
        assert not any(key in each or CONTROL_PLANE_KEY in each for each in commands)
        children = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True)
        assert len(children.stdout.split()) >= 3  # the script, the server, the gateway
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        gone = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True)
        assert gone.stdout == ""
    finally:
        watch.set()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
