"""Small helpers for the real tritonclient."""

import json
import queue

import numpy as np
import tritonclient.grpc as grpcclient


def text_inputs(text, stream=True, **sampling):
    """The inputs of the vLLM text schema."""
    inputs = []

    def add(name, datatype, value):
        tensor = grpcclient.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)

    add("text_input", "BYTES", np.array([text.encode()], dtype=object))
    add("stream", "BOOL", np.array([stream]))
    add(
        "sampling_parameters",
        "BYTES",
        np.array([json.dumps(sampling).encode()], dtype=object),
    )
    add("exclude_input_in_output", "BOOL", np.array([True]))
    add("return_finish_reason", "BOOL", np.array([True]))
    add("return_num_output_tokens", "BOOL", np.array([True]))
    return inputs


class Stream:
    """One ModelStreamInfer call; results arrive in a queue as (result, error)."""

    def __init__(self, url, tls=None, **start):
        """`tls`: the TLS options of tritonclient; none for plain text."""
        self.client = grpcclient.InferenceServerClient(url, **(tls or {}))
        self.results = queue.Queue()
        self.client.start_stream(
            callback=lambda result, error: self.results.put((result, error)), **start
        )

    def send(self, model, inputs, request_id, **options):
        self.client.async_stream_infer(
            model, inputs, request_id=request_id, **options
        )

    def close(self, cancel=False):
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def generate(url, model, text, timeout=60, tls=None, **sampling):
    """Runs one streamed completion and returns (text, finish reason, tokens)."""
    stream = Stream(url, tls)
    try:
        stream.send(model, text_inputs(text, **sampling), "1")
        output, reason, tokens = "", "", 0
        while True:
            result, error = stream.results.get(timeout=timeout)
            if error is not None:
                raise RuntimeError(str(error))
            output += result.as_numpy("text_output")[0].decode()
            counted = result.as_numpy("num_output_tokens")
            tokens += 0 if counted is None else int(counted.flatten()[0])
            finish = result.as_numpy("finish_reason")
            if finish is not None and finish[0]:
                reason = finish[0].decode()
            if final(result):
                return output, reason, tokens
    finally:
        stream.close()
