"""The vllm.Inference facade as vllm-router uses it, unmodified: HTTP to vllm-router, gRPC from it to `kvasir serve`.
vllm-router tokenizes by itself.

vllm-router has an environment of its own (scripts/setup_venv). Without it the tests are skipped.
"""

import concurrent.futures
import subprocess

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gateway import HttpGateway, ROOT, environment_of, idle, statuses_of_a_full_server, text_of
from kvasir_process import TINY, KvasirProcess, wait_until

pytestmark = pytest.mark.timeout(120)
PROGRAMS = environment_of("vllm-router", "vllm-router")
HEALTH = "/grpc.health.v1.Health/Check"
STREAM = "/vllm.Inference/GenerateStream"


class Gateway(HttpGateway):
    """`vllm-router` over one server. It reads that server's model folder."""

    facade = "vllm_inference"

    def __init__(self, server, *flags):
        super().__init__(
            server,
            [PROGRAMS / "vllm-router", "--worker-urls", f"grpc://{server.grpc}",
             "--worker-startup-check-interval", "1", *flags],
            {"VLLM_ROUTER_TOKENIZER": str(TINY)})


# vllm-router sometimes loses a request that it sends while its connection is being closed: its HTTP library reports
# "operation was canceled". It tries again elsewhere only if retries are enabled.
NO_AGEING = ["--max-connection-age", "250s", "--drain-timeout", "300s"]


@pytest.fixture(scope="module")
def server():
    with KvasirProcess("serve", "--max-model-len", "512", "--max-num-seqs", "4",
                       *NO_AGEING) as process:
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
    assert text_of(events) == whole["choices"][0]["message"]["content"] != ""
    assert events[-1]["usage"] == whole["usage"]


def test_completions_accept_token_ids(gateway):
    status, answer = gateway.post("/v1/completions", prompt=[5, 6, 7], max_tokens=5,
                                  temperature=0, ignore_eos=True)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 5


def test_an_answer_without_a_length_limit_ends_by_itself(gateway):
    status, answer = gateway.chat("Once", temperature=1, ignore_eos=True)
    assert status == 200, answer
    assert answer["usage"]["total_tokens"] == 512


def test_a_stop_string_ends_the_text_and_the_generation(gateway, server):
    _, whole = gateway.chat("Once upon a time", max_tokens=40, ignore_eos=True)
    text = whole["choices"][0]["message"]["content"]
    stop = text[len(text) // 3 : len(text) // 3 + 3]
    _, answer = gateway.chat("Once upon a time", max_tokens=40, ignore_eos=True, stop=[stop])
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    assert answer["usage"]["completion_tokens"] < 40
    assert answer["choices"][0]["message"]["content"].startswith(text[: text.index(stop)])
    wait_until(lambda: "finish_reason=stop" in gateway.answers(server)[-1],
               "the engine's end is logged")


def test_a_client_that_leaves_ends_its_request_and_frees_its_pages(gateway, server):
    before = len(gateway.answers(server))
    gateway.leave_in_the_middle()
    gateway.wait_cancelled(server, before)
    wait_until(lambda: idle(server), "its pages are free")


def test_a_bad_request_is_reported_to_the_client(gateway, server):
    wait_until(lambda: idle(server), "earlier requests have ended")
    before = len(gateway.answers(server))
    status, answer = gateway.chat("Once", repetition_penalty=0.001)
    assert status == 400, answer
    assert "repetition_penalty is 0.001, want 0.01 to 100" in str(answer)
    wait_until(lambda: len(gateway.answers(server)) == before + 1, "the request is refused once")


def test_the_error_for_a_feature_that_is_not_implemented_names_it(gateway):
    status, answer = gateway.chat("Once", response_format={"type": "json_object"})
    assert status >= 400, answer
    assert "decoding.json_object is not implemented" in str(answer)


def test_a_cache_salt_separates_prompts_in_the_prefix_cache(gateway, server):
    prompt = "A story that is long enough to fill a page. " * 12
    def hits(**body):
        before = server.metric("kvasir_prefix_cache_hit_tokens_total")
        assert gateway.chat(prompt, max_tokens=1, **body)[0] == 200
        return server.metric("kvasir_prefix_cache_hit_tokens_total") - before
    assert hits(cache_salt="a") == 0
    assert hits(cache_salt="a") > 0
    assert hits(cache_salt="b") == 0


def test_requests_to_a_full_server_get_http_status_429():
    with KvasirProcess("serve", "--max-model-len", "512", "--max-num-seqs", "1",
                       "--max-queue", "0", "--max-inflight", "1", *NO_AGEING) as server:
        with Gateway(server, "--disable-retries") as gateway:
            statuses = statuses_of_a_full_server(gateway)
            assert 429 in statuses and set(statuses) <= {200, 429}, statuses


def our_messages(tmp_path):
    out = tmp_path / "descriptors"
    subprocess.run(
        ["protoc", "-I", str(ROOT), f"--descriptor_set_out={out}", "--include_imports",
         "proto/vllm/inference.proto", "proto/vllm/control.proto"],
        check=True,
    )
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"vllm.{name}"))


class Recorder(grpc.GenericRpcHandler):
    """A worker that records requests and answers in our messages."""

    def __init__(self, message):
        self.message = message
        self.calls = []
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((self,))
        self.grpc = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.ready = {"model": "tiny"}
        self.server.start()

    def service(self, details):
        if details.method == STREAM:
            return grpc.unary_stream_rpc_method_handler(self.generate)
        if details.method == HEALTH:  # SERVING
            return grpc.unary_unary_rpc_method_handler(lambda *unused: b"\x08\x01")
        return None

    def generate(self, request, unused_context):
        self.calls.append(request)
        response = self.message("GenerateResponse")
        yield response(prompt_info={"num_prompt_tokens": 11},
                       outputs={"num_tokens": 2, "token_ids": [65, 66]}).SerializeToString()
        yield response(outputs={"finish_info": {
            "num_output_tokens": 2, "finish_reason": 2, "stop_token_id": 66}}).SerializeToString()


def unknown_fields(message):
    """The numbers of fields that our .proto does not have, in the message and its parts."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    found = [(message.DESCRIPTOR.name, field.field_number) for field in UnknownFieldSet(message)]
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE and not field.is_repeated:
            found += unknown_fields(value)
    return found


def test_our_proto_files_agree_with_those_of_the_gateway(tmp_path):
    """vllm-router has no .proto files. The test reads the requests that it sends and checks its answers, with every
    field that its HTTP API can set."""
    message = our_messages(tmp_path)
    recorder = Recorder(message)
    try:
        with Gateway(recorder) as gateway:
            recorder.calls.clear()
            status, answer = gateway.chat(
                "Once", max_tokens=12, min_tokens=2, temperature=0.5, seed=7, top_k=5, top_p=0.5,
                min_p=0.125, presence_penalty=0.5, frequency_penalty=0.25,
                repetition_penalty=1.5, ignore_eos=True, logit_bias={"5": 1.0},
                stop=["zz"], stop_token_ids=[9], priority=3, cache_salt="pepper")
            assert status == 200, answer
    finally:
        recorder.server.stop(None)
    (raw,) = recorder.calls
    request = message("GenerateRequest").FromString(raw)
    assert unknown_fields(request) == []
    assert request.request_id and request.model == "tiny" and request.token_ids.ids
    del request.token_ids.ids[:]
    request.request_id = ""
    want = message("GenerateRequest")(
        model="tiny", token_ids={}, temperature=0.5, priority=3,
        sampling={"top_k": 5, "top_p": 0.5, "min_p": 0.125, "seed": 7},
        decoding={"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5,
                  "logit_bias": {5: 1.0}},
        stopping={"max_new_tokens": 12, "min_new_tokens": 2, "stop_token_ids": [9],
                  "stop_strings": ["zz"], "ignore_eos": True},
        # It decodes ids by itself, except when a string may stop the answer.
        response={"output_text": True, "output_token_ids": True, "skip_special_tokens": True},
        kv={"cache_salt": "pepper"})
    assert request == want
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}
    assert answer["choices"][0]["finish_reason"] == "stop"
