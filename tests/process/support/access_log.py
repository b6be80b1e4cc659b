"""Lines of a server's log (--log-format json). A line may come a moment after the answer that it is of."""

import json

from kvasir_process import wait_until


def lines(server, message="request"):
    """All of them so far that are whole."""
    whole, _, _ = server.log().rpartition("\n")
    every = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return [line for line in every if line["message"] == message]


def line_of(server, request_id):
    """The line of the request with this id of its client's, when it is there."""
    def found():
        return [line for line in lines(server) if line["client_request_id"] == request_id]

    wait_until(found, f"the line of {request_id}")
    (line,) = found()
    return line
