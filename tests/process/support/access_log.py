"""Reads lines of a server's log (--log-format json). A line may be written a moment after its answer is sent."""

import json

from kvasir_process import wait_until


def lines(server, message="request"):
    """Returns the complete lines of the log, decoded from JSON."""
    whole, _, _ = server.log().rpartition("\n")
    every = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return [line for line in every if line["message"] == message]


def line_of(server, request_id):
    """Waits for the line of the request that has this client's id, and returns it."""
    def found():
        return [line for line in lines(server) if line["client_request_id"] == request_id]

    wait_until(found, f"the line of {request_id}")
    (line,) = found()
    return line
