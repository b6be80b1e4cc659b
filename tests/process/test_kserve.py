"""The KServe facade as its real client uses it: tritonclient, over gRPC.

Every test runs against three servers. `protocol` is the facade over an engine that echoes its prompt byte by byte, so
that the answers are known exactly. `model` is `kvasir serve` with the built-in model, whose answers are compared with
each other. `mutual TLS` is the same server, and each side shows a certificate.
"""

import asyncio
import json
import os
import pathlib
import queue
import subprocess

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import kvasir_process
from certificates import Authority
from kvasir_process import KvasirProcess

pytestmark = pytest.mark.timeout(120)
ROOT = pathlib.Path(__file__).resolve().parents[2]
TEST_SERVER = pathlib.Path(
    os.environ.get("KVASIR_KSERVE_TEST_SERVER", ROOT / "build/dev/kserve_test_server")
)
WAIT_SECONDS = 60


class Server(KvasirProcess):
    tls = {}  # the TLS options of tritonclient

    def channel(self):
        if not self.tls:
            return grpc.insecure_channel(self.grpc)
        files = [pathlib.Path(self.tls[name]).read_bytes()
                 for name in ("root_certificates", "private_key", "certificate_chain")]
        return grpc.secure_channel(self.grpc, grpc.ssl_channel_credentials(*files))


class TestServer(Server):
    __test__ = False
    echoes = True

    def __init__(self):
        super().__init__(model=None, ports=False)
        self.args = [str(TEST_SERVER), "--ready-file", str(self.ready_path)]


class ModelServer(Server):
    echoes = False


class TlsServer(ModelServer):
    def __init__(self, folder, *flags):
        authority = Authority(folder)
        own = authority.sign("server", "IP:127.0.0.1")
        authority.sign("client", "DNS:client.kvasir")
        super().__init__(*flags, "--tls-cert", own, "--tls-key", own, "--tls-client-ca", authority.ca)
        self.tls = authority.clients("client")


@pytest.fixture(scope="module", params=["protocol", "model", "mutual TLS"])
def server(request, tmp_path_factory):
    if request.param == "protocol":
        process = TestServer()
    else:
        if not kvasir_process.BINARY.exists():
            pytest.skip(f"no {kvasir_process.BINARY}: this build has no command line")
        flags = ["serve", "--max-model-len", "1024"]
        process = ModelServer(*flags) if request.param == "model" else TlsServer(
            tmp_path_factory.mktemp("certificates"), *flags)
    with process:
        yield process


@pytest.fixture
def client(server):
    with grpcclient.InferenceServerClient(server.grpc, **server.tls) as made:
        yield made


# --- requests -----------------------------------------------------------------


def tensor(name, value, datatype, shape=(1,)):
    made = grpcclient.InferInput(name, list(shape), datatype)
    kinds = {
        "BYTES": np.object_,
        "BOOL": bool,
        "INT32": np.int32,
        "UINT32": np.uint32,
        "UINT64": np.uint64,
        "FP32": np.float32,
    }
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    made.set_data_from_numpy(np.array(values, dtype=kinds[datatype]).reshape(shape))
    return made


def vllm(prompt, stream=True, flags=(), **sampling):
    """Returns a request in the schema of Triton's vLLM backend. Numbers are strings, as in that backend's sample client."""
    sampling = {key: str(v) if isinstance(v, (int, float)) else v for key, v in sampling.items()}
    return [
        tensor("text_input", prompt, "BYTES"),
        tensor("stream", stream, "BOOL"),
        tensor("sampling_parameters", json.dumps(sampling), "BYTES"),
    ] + [tensor(flag, True, "BOOL") for flag in flags]


def trt_text(prompt, max_tokens, shape=(1, 1), **extra):
    inputs = [
        tensor("text_input", prompt, "BYTES", shape),
        tensor("max_tokens", max_tokens, "INT32", shape),
    ]
    for name, (value, datatype) in extra.items():
        size = shape if not isinstance(value, list) else (1, len(value))
        inputs.append(tensor(name, value, datatype, size))
    return inputs


def trt_tokens(ids, max_tokens, streaming=True, **extra):
    return [
        tensor("input_ids", list(ids), "INT32", (1, len(ids))),
        tensor("input_lengths", len(ids), "INT32", (1, 1)),
        tensor("request_output_len", max_tokens, "INT32", (1, 1)),
        tensor("streaming", streaming, "BOOL", (1, 1)),
    ] + [tensor(name, value, kind, (1, 1)) for name, (value, kind) in extra.items()]


def stop_request():
    """The stop request of LlamaIndex and of TensorRT-LLM's sample clients."""
    return [
        tensor("input_ids", 0, "INT32", (1, 1)),
        tensor("input_lengths", 0, "INT32", (1, 1)),
        tensor("request_output_len", 0, "UINT32", (1, 1)),
        tensor("stop", True, "BOOL", (1, 1)),
    ]


# --- answers ------------------------------------------------------------------


class Stream:
    def __init__(self, server, **options):
        self.model = server.ready["model"]
        self.client = grpcclient.InferenceServerClient(server.grpc, **server.tls)
        self.results = queue.Queue()
        self.client.start_stream(lambda result, error: self.results.put((result, error)), **options)
        self.open = True

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        if self.open:
            self.stop(cancel=True)
        self.client.close()

    def send(self, inputs, request_id="1", model=None, **options):
        self.client.async_stream_infer(
            model or self.model, inputs, request_id=request_id, **options
        )

    def next(self):
        return self.results.get(timeout=WAIT_SECONDS)

    def stop(self, cancel=False):
        """Half-closes (or resets) the call and returns when the server has ended it."""
        self.open = False
        self.client.stop_stream(cancel_requests=cancel)

    def answers(self, count=1):
        """Returns the responses until `count` requests have had their last one."""
        responses = []
        while count > 0:
            result, error = self.next()
            assert error is None, error
            responses.append(result)
            count -= final(result)
        return responses

    def error(self):
        result, error = self.next()
        assert result is None
        return str(error)


def final(result):
    """The final flag. Every streamed response must have it as a bool."""
    parameter = result.get_response().parameters["triton_final_response"]
    assert parameter.WhichOneof("parameter_choice") == "bool_param"
    return parameter.bool_param


def text(responses):
    parts = []
    for result in responses:
        value = result.as_numpy("text_output")
        if value is not None:
            parts += [part.decode() for part in value.flatten()]
    return "".join(parts)


def ids(responses):
    values = [result.as_numpy("output_ids") for result in responses]
    return [int(i) for value in values if value is not None for i in value.flatten()]


def echo(prompt, count):
    return (prompt * count)[:count]


def greedy(**more):
    return dict(temperature=0, ignore_eos=True, **more)


# --- metadata --------------------------------------------------------------------


def test_the_server_returns_metadata_of_itself_and_of_its_model(server, client):
    model = server.ready["model"]
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(model) and client.is_model_ready(model, "1")
    assert not client.is_model_ready("nope")
    metadata = client.get_server_metadata()
    assert metadata.name == "kvasir" and "statistics" in metadata.extensions
    described = client.get_model_metadata(model)
    config = client.get_model_config(model).config
    assert config.model_transaction_policy.decoupled
    assert {i.name for i in config.input} == {i.name for i in described.inputs}
    assert {o.name for o in config.output} == {o.name for o in described.outputs}
    assert all(i.optional for i in config.input)
    index = client.get_model_repository_index()
    assert [m.state for m in index.models if m.name == model] == ["READY"]


def test_every_call_for_an_unknown_model_fails_with_not_found(server, client):
    for call in (
        lambda: client.get_model_metadata("nope"),
        lambda: client.get_model_config("nope"),
        lambda: client.get_inference_statistics("nope"),
        lambda: client.infer("nope", vllm("x", stream=False)),
        lambda: client.infer(server.ready["model"], vllm("x", False), model_version="7"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_the_error_for_a_method_that_is_not_implemented_names_it(client):
    for name, call in {
        "RepositoryModelLoad": lambda: client.load_model("tiny"),
        "SystemSharedMemoryStatus": lambda: client.get_system_shared_memory_status(),
        "CudaSharedMemoryStatus": lambda: client.get_cuda_shared_memory_status(),
        "TraceSetting": lambda: client.get_trace_settings(),
        "LogSettings": lambda: client.get_log_settings(),
    }.items():
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
        assert name in str(caught.value)


def test_the_standard_grpc_health_service_reports_serving(server):
    # Request and response have one field each, so they are written as bytes and no package is needed.
    with server.channel() as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        serving = bytes([0x08, 1])
        name = b"inference.GRPCInferenceService"
        assert check(b"", timeout=20) == serving
        assert check(bytes([0x0A, len(name)]) + name, timeout=20) == serving
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\x0a\x04nope", timeout=20)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_the_statistics_of_a_model_count_its_requests(server, client):
    model = server.ready["model"]

    def count():
        stats = client.get_inference_statistics(model).model_stats[0]
        return stats.inference_stats.success.count

    before = count()
    client.infer(model, vllm("ab", stream=False, **greedy(max_tokens=2)))
    assert count() == before + 1
    # perf_analyzer fails if these counts differ.
    stats = client.get_inference_statistics(model).model_stats[0].inference_stats
    parts = [stats.compute_input, stats.compute_infer, stats.compute_output]
    assert {part.count for part in parts} == {stats.success.count}
    assert server.echoes or all(part.ns > 0 for part in parts)
    assert sum(part.ns for part in parts) + stats.queue.ns <= stats.success.ns * 1.01


# --- unary ----------------------------------------------------------------------


def test_a_unary_call_returns_the_prompt_and_the_generated_text(server, client):
    model = server.ready["model"]
    flags = ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"]
    result = client.infer(model, vllm("Once upon", False, flags, **greedy(max_tokens=5)), request_id="u")
    response = result.get_response()
    assert response.id == "u" and response.model_name == model
    output = result.as_numpy("text_output")[0].decode()
    assert output.startswith("Once upon")
    assert result.as_numpy("finish_reason")[0] == b"length"
    assert result.as_numpy("num_output_tokens")[0] == 5
    if server.echoes:
        assert output == "Once upon" + echo("Once upon", 5)
        assert result.as_numpy("num_input_tokens")[0] == 9
    without = client.infer(
        model, vllm("Once upon", False, ["exclude_input_in_output"], **greedy(max_tokens=5))
    )
    assert "Once upon" + without.as_numpy("text_output")[0].decode() == output


def test_a_unary_call_joins_the_output_of_a_streaming_request(server, client):
    model = server.ready["model"]
    plain = client.infer(
        model, vllm("The sea", False, ["exclude_input_in_output"], **greedy(max_tokens=8))
    )
    folded = client.infer(model, vllm("The sea", True, **greedy(max_tokens=8)))
    assert folded.as_numpy("text_output")[0] == plain.as_numpy("text_output")[0]


# A megabyte of gzip may contain a message of a gigabyte.
@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_the_error_for_a_compressed_request_names_the_compression(server, client, compression):
    with pytest.raises(InferenceServerException) as refused:
        client.infer(
            server.ready["model"],
            vllm("ab" * 100, False, **greedy(max_tokens=2)),
            compression_algorithm=compression,
        )
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
    assert compression in refused.value.message()


def test_requests_of_the_asyncio_client_run_concurrently(server):
    async def run():
        model = server.ready["model"]
        async with aioclient.InferenceServerClient(server.grpc, **server.tls) as client:
            assert await client.is_server_ready()
            results = await asyncio.gather(
                *(
                    client.infer(model, vllm(f"Count {i}", False, **greedy(max_tokens=4)))
                    for i in range(8)
                )
            )
            for i, result in enumerate(results):
                assert result.as_numpy("text_output")[0].decode().startswith(f"Count {i}")

            async def requests():
                for i in range(3):
                    yield {
                        "model_name": model,
                        "inputs": vllm(f"S{i}", True, **greedy(max_tokens=3)),
                        "request_id": str(i),
                    }
                await done.wait()

            done = asyncio.Event()
            texts, open_requests = {}, 3
            async for result, error in client.stream_infer(requests()):
                assert error is None
                answer_id = result.get_response().id
                texts[answer_id] = texts.get(answer_id, "") + text([result])
                open_requests -= final(result)
                if open_requests == 0:
                    done.set()
            assert set(texts) == {"0", "1", "2"}
            return texts

    texts = asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
    if server.echoes:
        assert texts == {str(i): echo(f"S{i}", 3) for i in range(3)}


# --- streaming ------------------------------------------------------------------


def test_the_streamed_pieces_together_equal_the_text_of_a_unary_call(server, client):
    prompt = "It was a dark"
    with Stream(server) as stream:
        stream.send(vllm(prompt, **greedy(max_tokens=20)))
        responses = stream.answers()
        stream.stop()
    flags = [final(r) for r in responses]
    assert flags == [False] * (len(flags) - 1) + [True]
    assert all(r.get_response().id == "1" for r in responses)
    whole = client.infer(
        server.ready["model"],
        vllm(prompt, False, ["exclude_input_in_output"], **greedy(max_tokens=20)),
    )
    assert text(responses) == whole.as_numpy("text_output")[0].decode()
    if server.echoes:
        assert text(responses) == echo(prompt, 20)


def test_sampling_parameters_may_be_numbers_or_strings(server):
    for value in (6, "6"):
        with Stream(server) as stream:
            inputs = vllm("ab", flags=["return_num_output_tokens"])
            inputs[2] = tensor(
                "sampling_parameters",
                json.dumps({"max_tokens": value, "temperature": "0", "ignore_eos": "true"}),
                "BYTES",
            )
            stream.send(inputs)
            responses = stream.answers()
        assert sum(int(r.as_numpy("num_output_tokens")[0]) for r in responses) == 6


def test_many_requests_share_one_stream(server):
    count = 12
    with Stream(server) as stream:
        for i in range(count):
            stream.send(vllm(f"Story {i}:", **greedy(max_tokens=6 + i)), request_id=f"r{i}")
        responses = stream.answers(count)
        stream.stop()
    by_id = {}
    for result in responses:
        by_id.setdefault(result.get_response().id, []).append(result)
    assert set(by_id) == {f"r{i}" for i in range(count)}
    for i in range(count):
        mine = by_id[f"r{i}"]
        assert [final(r) for r in mine].count(True) == 1 and final(mine[-1])
        if server.echoes:
            assert text(mine) == echo(f"Story {i}:", 6 + i)


def test_a_half_close_does_not_cancel_requests(server):
    with Stream(server) as stream:
        stream.send(vllm("abc", flags=["return_num_output_tokens"], **greedy(max_tokens=100)))
        stream.stop()  # returns when the server has answered everything
        responses = stream.answers()
    assert sum(int(r.as_numpy("num_output_tokens")[0]) for r in responses) == 100
    assert final(responses[-1])


def test_a_half_close_without_requests_ends_the_call(server):
    with Stream(server) as stream:
        stream.stop()


def test_cancelling_the_stream_ends_it_before_the_request_does(server):
    with Stream(server) as stream:
        stream.send(vllm("abc", **greedy(max_tokens=900)))
        stream.next()
        stream.stop(cancel=True)
        errors = []
        while not stream.results.empty():
            errors.append(stream.results.get_nowait()[1])
        # All except the error are answers of at least one token.
        assert len(errors) < 900
        assert any(e is not None and e.status() == "StatusCode.CANCELLED" for e in errors)


def test_a_stop_request_ends_the_request_with_its_id(server):
    with Stream(server) as stream:
        stream.send(vllm("abc", flags=["return_finish_reason"], **greedy(max_tokens=900)), "long")
        stream.send(vllm("xyz", **greedy(max_tokens=4)), "other")
        results = [stream.next()]
        stream.send(stop_request(), "long", parameters={"Streaming": True})
        stream.stop()
        while not stream.results.empty():
            results.append(stream.results.get_nowait())
        last = {}
        finals = {}
        for result, error in results:
            assert error is None, error
            name = result.get_response().id
            finals[name] = finals.get(name, 0) + final(result)
            if result.as_numpy("finish_reason") is not None:
                last[name] = result.as_numpy("finish_reason")[0]
    # Both the request and the stop request have a last response.
    assert finals == {"long": 2, "other": 1}
    assert last["long"] == b"abort"


def test_a_stop_request_for_an_id_that_is_not_running_is_answered(server):
    with Stream(server) as stream:
        stream.send(vllm("abc", **greedy(max_tokens=2)), "a")
        stream.answers()
        stream.send(stop_request(), "a", parameters={"Streaming": True})
        (answer,) = stream.answers()
        assert len(answer.get_response().outputs) == 0
        stream.stop()


def test_streams_and_unary_calls_end_at_their_deadlines(server, client):
    # The request takes seconds, so that it still runs at the deadline.
    deadline, work = 0.3, greedy(max_tokens=900, n=16)
    with pytest.raises(InferenceServerException) as caught:
        client.infer(
            server.ready["model"],
            vllm("abc", False, **work),
            client_timeout=deadline,
        )
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with Stream(server, stream_timeout=deadline) as stream:
        stream.send(vllm("abc", **work))
        while True:
            result, error = stream.next()
            if error is not None:
                break
    assert error.status() == "StatusCode.DEADLINE_EXCEEDED"
    # The request has ended, and the server answers others.
    assert client.is_server_ready()


def test_an_empty_final_response_is_sent_only_to_clients_that_enable_it(server):
    for wanted in (False, True):
        with Stream(server) as stream:
            stream.send(vllm("abc", **greedy(max_tokens=3)), enable_empty_final_response=wanted)
            responses = stream.answers()
        assert all(final(r) is False for r in responses[:-1])
        assert all(len(r.get_response().outputs) > 0 for r in responses[:-1])
        # Only a client that enabled the empty response gets a response without outputs.
        assert wanted or len(responses[-1].get_response().outputs) > 0
        for result in responses:
            answer = result.get_response()
            assert len(answer.raw_output_contents) == len(answer.outputs)


def test_stop_strings_span_tokens_and_end_the_text(server, client):
    model = server.ready["model"]
    whole = client.infer(
        model, vllm("Once upon a", False, ["exclude_input_in_output"], **greedy(max_tokens=60))
    ).as_numpy("text_output")[0].decode()
    stop = whole[20:26]
    want = whole[: whole.index(stop)]
    for include in (False, True):
        with Stream(server) as stream:
            stream.send(
                vllm(
                    "Once upon a",
                    flags=["return_finish_reason"],
                    **greedy(max_tokens=60, stop=[stop], include_stop_str_in_output=include),
                )
            )
            responses = stream.answers()
            stream.stop()
        assert text(responses) == want + (stop if include else "")
        assert responses[-1].as_numpy("finish_reason")[0] == b"stop"


def test_one_request_returns_several_samples(server, client):
    result = client.infer(
        server.ready["model"],
        vllm("ab", False, ["exclude_input_in_output", "return_finish_reason"], max_tokens=5, n=3, seed=1),
    )
    assert result.as_numpy("text_output").shape == (3,)
    assert result.as_numpy("finish_reason").shape == (3,)


def test_log_probabilities_are_returned_for_every_token(server, client):
    result = client.infer(
        server.ready["model"],
        vllm(
            "ab",
            False,
            ["return_logprobs", "return_cumulative_logprob"],
            **greedy(max_tokens=4, logprobs=1),
        ),
    )
    entries = json.loads(result.as_numpy("logprobs")[0])
    assert len(entries) == 4
    chosen = [next(iter(entry.values())) for entry in entries]
    assert all({"logprob", "rank", "decoded_token"} <= set(entry) for entry in chosen)
    total = sum(entry["logprob"] for entry in chosen)
    assert result.as_numpy("cumulative_logprob")[0] == pytest.approx(total, rel=1e-4, abs=1e-4)


def test_duplicate_ids_are_refused_while_the_first_runs(server):
    with Stream(server) as stream:
        stream.send(vllm("abc", **greedy(max_tokens=900)), "same")
        stream.send(vllm("abc", **greedy(max_tokens=2)), "same")
        while True:
            result, error = stream.next()
            if error is not None:
                break
        assert "ALREADY_EXISTS" in str(error)


# --- TensorRT-LLM's schemas -------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensorrt_text_requests_are_accepted_in_every_scalar_shape(server, shape):
    """LlamaIndex sends 0-d scalars, openai_trtllm [1, 1]."""
    with Stream(server) as stream:
        stream.send(
            trt_text(
                "Tell me",
                7,
                shape,
                stream=(True, "BOOL"),
                bad_words=([""], "BYTES"),
                stop_words=(["</s>"], "BYTES"),
                beam_width=(1, "INT32"),
                length_penalty=(1.0, "FP32"),
                repetition_penalty=(1.0, "FP32"),
                temperature=(1.0, "FP32"),
                top_k=(1, "INT32"),
                top_p=(0.0, "FP32"),
                random_seed=(7, "UINT64"),
                end_id=(-1, "INT32"),
            ),
            parameters={"Streaming": True},
        )
        responses = stream.answers()
        stream.stop()
    for result in responses:
        assert result.get_response().outputs[0].name == "text_output"
    if server.echoes:
        assert text(responses) == echo("Tell me", 7)


def test_a_unary_tensorrt_text_request_returns_its_optional_outputs(server, client):
    result = client.infer(
        server.ready["model"],
        trt_text(
            "Tell me",
            6,
            exclude_input_in_output=(True, "BOOL"),
            end_id=(-1, "INT32"),
            return_log_probs=(True, "BOOL"),
            return_num_input_tokens=(True, "BOOL"),
            return_num_output_tokens=(True, "BOOL"),
        ),
    )
    assert result.as_numpy("output_log_probs").shape == (1, 1, 6)
    assert result.as_numpy("cum_log_probs")[0][0] == pytest.approx(
        result.as_numpy("output_log_probs").sum(), rel=1e-4
    )
    assert result.as_numpy("num_output_tokens")[0][0] == 6
    assert result.as_numpy("num_input_tokens")[0][0] > 0
    if server.echoes:
        assert result.as_numpy("text_output")[0] == echo("Tell me", 6).encode()


def test_a_tensorrt_token_request_returns_the_same_tokens_streamed_and_unary(server, client):
    prompt = [70, 71, 72, 73]
    with Stream(server) as stream:
        stream.send(trt_tokens(prompt, 9, end_id=(-1, "INT32")))
        responses = stream.answers()
        stream.stop()
    for result in responses:
        shape = result.as_numpy("output_ids").shape
        assert shape[:2] == (1, 1)
        assert result.as_numpy("sequence_length").tolist() == [[shape[2]]]
    streamed = ids(responses)
    assert len(streamed) == 9
    model = server.ready["model"]
    whole = client.infer(model, trt_tokens(prompt, 9, False, end_id=(-1, "INT32")))
    assert ids([whole]) == prompt + streamed
    only = client.infer(
        model,
        trt_tokens(
            prompt, 9, False, end_id=(-1, "INT32"), exclude_input_in_output=(True, "BOOL")
        ),
    )
    assert ids([only]) == streamed
    if server.echoes:
        assert streamed == [prompt[i % 4] for i in range(9)]


def test_only_the_requested_outputs_are_returned(server, client):
    def infer(*names):
        return client.infer(
            server.ready["model"], vllm("ab", stream=False, **greedy(max_tokens=3)),
            outputs=[grpcclient.InferRequestedOutput(name) for name in names])

    result = infer("finish_reason", "num_output_tokens", "logprobs")
    given = [output.name for output in result.get_response().outputs]
    assert given == ["finish_reason", "logprobs", "num_output_tokens"]
    assert result.as_numpy("finish_reason").tolist() == [b"length"]
    assert result.as_numpy("num_output_tokens").tolist() == [3]
    assert len(json.loads(result.as_numpy("logprobs")[0])) == 3
    with pytest.raises(InferenceServerException, match="requested output 'output_ids' does not exist"):
        infer("text_output", "output_ids")


# --- refusals --------------------------------------------------------------------


def wrong_requests(server):
    too_long = "a b c d e f g h " * 1000
    return {
        "two values": (
            [tensor("text_input", ["a", "b"], "BYTES", (2,))],
            "INVALID_ARGUMENT",
            "'text_input': want one value",
        ),
        "datatype": (
            trt_text("a", 1, (1,), top_k=(1.5, "FP32")),
            "INVALID_ARGUMENT",
            "'top_k': want datatype INT32",
        ),
        "no prompt": ([tensor("max_tokens", 1, "INT32")], "INVALID_ARGUMENT", "text_input"),
        "both schemas": (
            trt_text("a", 1) + [tensor("sampling_parameters", "{}", "BYTES")],
            "INVALID_ARGUMENT",
            "sampling_parameters",
        ),
        "no JSON": (
            [tensor("text_input", "a", "BYTES"), tensor("sampling_parameters", "{x", "BYTES")],
            "INVALID_ARGUMENT",
            "JSON",
        ),
        "bad value": (vllm("a", max_tokens="lots"), "INVALID_ARGUMENT", "max_tokens"),
        "oversized prompt": (vllm(too_long, max_tokens=1), "INVALID_ARGUMENT", "1024"),
        "beams": (trt_text("a", 1, beam_width=(4, "INT32")), "UNIMPLEMENTED", "beam_width"),
        "lora": (vllm("a", lora_name="x"), "UNIMPLEMENTED", "lora_name"),
        "guided": (
            trt_text("a", 1, guided_decoding_guide=("x", "BYTES")),
            "UNIMPLEMENTED",
            "guided_decoding_guide",
        ),
    }


@pytest.mark.parametrize(
    "case",
    [
        "two values",
        "datatype",
        "no prompt",
        "both schemas",
        "no JSON",
        "bad value",
        "oversized prompt",
        "beams",
        "lora",
        "guided",
    ],
)
def test_the_error_for_a_wrong_request_names_what_is_wrong(server, client, case):
    inputs, code, name = wrong_requests(server)[case]
    with pytest.raises(InferenceServerException) as caught:
        client.infer(server.ready["model"], inputs)
    assert caught.value.status() == f"StatusCode.{code}"
    assert name in caught.value.message()
    with Stream(server) as stream:
        stream.send(inputs)
        error = stream.error()
        assert code in error and name in error
        # The stream continues.
        stream.send(vllm("ab", **greedy(max_tokens=2)), "next")
        assert stream.answers()[-1].get_response().id == "next"
        stream.stop()


def raw_request(server):
    request = service_pb2.ModelInferRequest(model_name=server.ready["model"], id="raw")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    return request


def test_a_tensor_with_the_wrong_number_of_raw_bytes_is_refused(server):
    with server.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = raw_request(server)
        request.raw_input_contents.append(b"\xff\xff\xff\x7fx")
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request, timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "text_input" in caught.value.details()


def test_tensors_with_typed_contents_instead_of_raw_bytes_are_accepted(server):
    with server.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = raw_request(server)
        request.inputs[0].contents.bytes_contents.append(b"ab")
        request.parameters["max_tokens"].int64_param = 2
        response = stub.ModelInfer(request, timeout=20)
        assert response.raw_output_contents[0][4:].startswith(b"ab")


def test_errors_end_the_stream_if_the_client_asks_for_that(server):
    with Stream(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.send([tensor("max_tokens", 1, "INT32")])
        result, error = stream.next()
        assert error.status() == "StatusCode.INVALID_ARGUMENT"


# --- the wire contract ----------------------------------------------------------


def messages(file):
    found = {}

    def walk(prefix, message):
        found[prefix + message.name] = message
        for nested in message.nested_type:
            walk(prefix + message.name + ".", nested)

    for message in file.message_type:
        walk("", message)
    return found


def enums(file):
    found = {enum.name: enum for enum in file.enum_type}
    for name, message in messages(file).items():
        found.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
    return found


def test_our_proto_files_agree_with_those_of_the_client(tmp_path):
    """For each of our fields, the client has a field with the same number and type."""
    out = tmp_path / "descriptors"
    subprocess.run(
        ["protoc", "-I", str(ROOT), f"--descriptor_set_out={out}", "--include_imports",
         "proto/inference/grpc_service.proto"],
        check=True,
    )
    ours = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    theirs = {}
    for name, module in (("grpc_service", service_pb2), ("model_config", model_config_pb2)):
        theirs[name] = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(theirs[name])
    compared = 0
    for file in ours.file:
        other = theirs[pathlib.Path(file.name).stem]
        assert file.package == other.package
        their_messages = messages(other)
        for name, message in messages(file).items():
            fields = {field.name: field for field in their_messages[name].field}
            for field in message.field:
                want = fields[field.name]
                assert (field.number, field.type, field.label, field.type_name) == (
                    want.number,
                    want.type,
                    want.label,
                    want.type_name,
                ), f"{name}.{field.name}"
                assert field.HasField("oneof_index") == want.HasField("oneof_index")
                compared += 1
        for name, enum in enums(file).items():
            assert {(v.name, v.number) for v in enum.value} == {
                (v.name, v.number) for v in enums(other)[name].value
            }
    assert compared > 100
    methods = {
        (m.name, m.input_type, m.output_type, m.client_streaming, m.server_streaming)
        for m in ours.file[-1].service[0].method
    }
    assert methods == {
        (m.name, m.input_type, m.output_type, m.client_streaming, m.server_streaming)
        for m in theirs["grpc_service"].service[0].method
    }
