"""A drill: clients of all protocols send requests through two routers to three workers, while workers and routers are
killed, stopped, cut off and drained. Every answer is compared with that of an undisturbed run.

  scripts/soak drill      20 rounds, and docs/reliability.md

A round has each disturbance once, in a random order whose seed is printed. Every kind of request has a greedy or a
seeded sampling, so its answer is always the same. A client that a router refuses before the first response asks the
other router, as a load balancer would do; everything else that is not the expected answer counts as a failure.
"""

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import sys
import threading
import time

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import access_log
from kvasir_process import OPERATOR_PORTS, TINY, CuttableProxy, KvasirProcess, wait_until

TEXT = (TINY / "evaluation.txt").read_text()
MAX_TOKENS = 120
REQUEST_TIMEOUT_SECONDS = 300
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded, log probabilities": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "logprobs": 2},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4,
                  "frequency_penalty": 0.3},
    "three samples": {"temperature": 1.0, "seed": 8, "n": 3},
    "stop string": {"temperature": 1.0, "seed": 9, "stop": ["the"], "min_tokens": 60},
}


class Messages:
    """Message classes of a server, as its reflection describes them."""

    def __init__(self, channel):
        self.pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def __call__(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))


# A protocol makes requests, and gets from each response the index of a sample, its new text, token ids and log
# probabilities, and the reason of its end.


class Kserve:
    name = "KServe"

    def __init__(self, message, model):
        self.made, self.model = message, model

    def request(self, prompt, sampling, streamed):
        request = self.made("inference.ModelInferRequest")(model_name=self.model)
        parameters = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling
        for name, value in (("text_input", prompt), ("sampling_parameters", json.dumps(parameters))):
            request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value.encode())
        for name, value in (("stream", streamed), ("exclude_input_in_output", True), ("return_finish_reason", True),
                            ("return_logprobs", True)):
            request.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(value)
        method = "ModelStreamInfer" if streamed else "ModelInfer"
        return f"/inference.GRPCInferenceService/{method}", request

    def parts(self, data, streamed):
        response = self.made(f"inference.Model{'Stream' * streamed}InferResponse").FromString(data)
        if streamed:
            if response.error_message:
                raise RuntimeError(response.error_message)
            response = response.infer_response
        columns = [self.strings(each) for each in response.raw_output_contents]
        for sample, (text, reason, logprobs) in enumerate(zip(*columns, strict=True)):
            yield sample, text.decode(), [], json.loads(logprobs) or [], reason.decode()

    @staticmethod
    def strings(raw):
        """Returns the strings of a BYTES tensor: each has its length before it."""
        found, at = [], 0
        while at < len(raw):
            length = int.from_bytes(raw[at:at + 4], "little")
            found.append(raw[at + 4:at + 4 + length])
            at += 4 + length
        return found


class VllmEngine:
    name = "vllm.grpc.engine"

    def __init__(self, message, _):
        self.made = message

    def request(self, prompt, sampling, streamed):
        request = self.made("vllm.grpc.engine.GenerateRequest")(text=prompt, stream=streamed)
        for name, value in ({"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling).items():
            if name == "stop":
                request.sampling_params.stop.extend(value)
            else:
                setattr(request.sampling_params, name, value)
        return "/vllm.grpc.engine.VllmEngine/Generate", request

    def parts(self, data, streamed):
        response = self.made("vllm.grpc.engine.GenerateResponse").FromString(data)
        if response.HasField("chunk"):
            part, ids, reason = response.chunk, response.chunk.token_ids, ""
        else:
            part, ids = response.complete, response.complete.output_ids
            reason = part.finish_reason + part.matched_stop_str
        logprobs = list(zip(part.output_logprobs.token_logprobs, map(str, part.output_logprobs.top_logprobs)))
        if streamed and reason:  # the last response of a stream repeats what has come in chunks
            ids, logprobs = [], []
        yield part.index, "", list(ids), logprobs, reason


class VllmInference:
    name = "vllm.Inference"

    def __init__(self, message, _):
        self.made = message

    def request(self, prompt, sampling, streamed):
        request = self.made("vllm.GenerateRequest")(text=prompt, temperature=sampling["temperature"])
        for name in ("seed", "top_p"):
            if name in sampling:
                setattr(request.sampling, name, sampling[name])
        request.sampling.num_sequences = sampling.get("n", 1)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if name in sampling:
                setattr(request.decoding, name, sampling[name])
        request.stopping.max_new_tokens = MAX_TOKENS
        request.stopping.min_new_tokens = sampling.get("min_tokens", 0)
        request.stopping.ignore_eos = True
        request.stopping.stop_strings.extend(sampling.get("stop", []))
        request.response.output_token_ids = True
        request.response.output_logprobs = True
        return f"/vllm.Inference/Generate{'Stream' * streamed}", request

    def parts(self, data, streamed):
        out = self.made("vllm.GenerateResponse").FromString(data).outputs
        reason = str(out.finish_info) if out.HasField("finish_info") else ""
        yield out.index, out.text, list(out.token_ids), list(out.logprobs), reason


PROTOCOLS = [Kserve, VllmEngine, VllmInference]


@dataclasses.dataclass
class Kind:
    """A request that always has the same answer."""
    name: str
    streamed: bool
    protocol: object
    method: str
    data: bytes

    def answer(self, channel, begun=lambda: None):
        """Returns each sample's text, ids, log probabilities and end, and the longest pause between two responses.
        Calls `begun` at the first response."""
        samples = collections.defaultdict(lambda: ["", [], [], ""])
        before, pause = None, 0.0
        for data in channel.unary_stream(self.method)(self.data, timeout=REQUEST_TIMEOUT_SECONDS):
            now = time.monotonic()
            parts = list(self.protocol.parts(data, self.streamed))
            if before is None:
                begun()
            else:
                pause = max(pause, now - before)
            before = now
            for index, *new, reason in parts:
                sample = samples[index]
                for at, part in enumerate(new):
                    sample[at] += part
                sample[3] = reason
        return dict(samples), pause


def kinds(channel, model):
    """Returns every kind of request: protocols, samplings, streams and answers in one response."""
    message, found = Messages(channel), []
    for number, (protocol, (name, sampling), streamed) in enumerate(itertools.product(
            PROTOCOLS, SAMPLINGS.items(), (True, False))):
        if protocol is VllmInference and "n" in sampling and not streamed:
            continue  # refused by this protocol
        made = protocol(message, model)
        prompt = TEXT[3000 * (number % 3):][:900]
        method, request = made.request(prompt, sampling, streamed)
        found.append(Kind(f"{made.name}, {name}, {'stream' if streamed else 'one response'}", streamed, made, method,
                          request.SerializeToString()))
    return found


def difference(answer, expected):
    """Describes the first difference between two answers."""
    if set(answer) != set(expected):
        return f"samples {sorted(answer)} instead of {sorted(expected)}"
    for index in expected:
        for name, have, want in zip(("text", "ids", "log probabilities", "reason"), answer[index], expected[index]):
            if have != want:
                at = next((i for i, (a, b) in enumerate(zip(have, want)) if a != b), min(len(have), len(want)))
                return (f"sample {index}: {name} differ at {at} of {len(want)}: {have[max(at - 2, 0):at + 3]!r} "
                        f"instead of {want[max(at - 2, 0):at + 3]!r}")
    return "none"


class Worker:
    """A worker that can be lost in several ways. Routers reach it through a proxy."""

    def __init__(self, flags):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = "127.0.0.1:%d" % free.getsockname()[1]
        self.process = KvasirProcess("worker", "--listen", self.address, *OPERATOR_PORTS, *flags, ports=False)
        self.process.start()
        self.proxy = CuttableProxy(self.address)

    def restart(self):
        self.process.ready_path.unlink(missing_ok=True)
        self.process.start()

    def end(self):
        self.process.__exit__()
        self.proxy.cut()


class Drill:
    """Workers, routers and clients. Use as a context manager."""

    def __init__(self, clients=24, workers=3, flags=()):
        self.num_clients, self.flags = clients, list(flags)
        self.workers = [Worker(self.flags) for _ in range(workers)]
        self.routers = [self.router() for _ in range(2)]
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.done = collections.Counter()  # of the current disturbance: ok, failed, different, elsewhere
        self.pauses = []  # the longest pause of each stream
        self.problems = []
        self.running = 0
        self.ended = [0] * clients  # how many requests of each client have ended
        self.moved_before = 0  # by routers that have ended

    def router(self):
        return KvasirProcess("router", "--workers", ",".join(each.proxy.address for each in self.workers),
                             "--log-format", "json").start()

    def __enter__(self):
        with grpc.insecure_channel(self.routers[0].grpc) as channel:
            self.kinds = kinds(channel, self.routers[0].ready["model"])
            self.expected = [kind.answer(channel)[0] for kind in self.kinds]
        self.threads = [threading.Thread(target=self.client, args=(number,)) for number in range(self.num_clients)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *unused):
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        for each in [*self.routers, *(worker.process for worker in self.workers)]:
            each.process.send_signal(signal.SIGCONT)
        for router in self.routers:
            router.__exit__()
        for worker in self.workers:
            worker.end()

    # ------------------------------------------------------------------ clients

    def client(self, number):
        """Sends one request after the other until the drill ends."""
        choice = random.Random(number)
        while not self.stopped.is_set():
            index = choice.randrange(len(self.kinds))
            with self.lock:
                self.running += 1
            outcome = self.ask(index, number)
            with self.lock:
                self.running -= 1
                self.ended[number] += 1
                self.done[outcome] += 1

    def ask(self, index, number):
        kind = self.kinds[index]
        for attempt in range(20):
            responses = []
            router = self.routers[(number + attempt) % len(self.routers)]
            try:
                with grpc.insecure_channel(router.grpc) as channel:
                    answer, pause = kind.answer(channel, lambda: responses.append(1))
            except Exception as error:  # a wrong answer must not end the client either
                text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else repr(error)
                if "UNAVAILABLE" in text and not responses and router.draining:
                    with self.lock:
                        self.done["elsewhere"] += 1
                    time.sleep(0.1)
                    continue
                return self.problem("failed", f"{kind.name}: {text}")
            if answer != self.expected[index]:
                return self.problem("different", f"{kind.name}: {difference(answer, self.expected[index])}")
            if kind.streamed:
                with self.lock:
                    self.pauses.append(pause)
            return "ok"
        return self.problem("failed", f"{kind.name}: refused by both routers 20 times")

    def problem(self, outcome, text):
        with self.lock:
            self.problems.append(text)
        return outcome

    # ------------------------------------------------------------- disturbances

    def kill(self, worker):
        worker.process.kill()
        time.sleep(1)
        worker.restart()

    def stop(self, worker):
        worker.process.process.send_signal(signal.SIGSTOP)
        time.sleep(10)
        worker.process.process.send_signal(signal.SIGCONT)

    def cut(self, worker):
        worker.proxy.cut()
        time.sleep(2)
        worker.proxy.heal()

    def silence(self, worker):
        worker.proxy.silence()
        time.sleep(10)
        worker.proxy.cut()
        worker.proxy.heal()

    def drain(self, worker):
        if worker.process.stop() != 0:
            self.problem("failed", f"a drained worker ended with {worker.process.process.returncode}")
        worker.restart()

    def end_router(self, _):
        old = self.routers[-1]
        old.draining = True
        if old.stop() != 0:
            self.problem("failed", f"a drained router ended with {old.process.returncode}")
        self.moved_before += self.moves_of(old)
        self.routers[-1] = self.router()
        old.__exit__()

    DISTURBANCES = {
        "a worker is killed (SIGKILL) and started again": kill,
        "a worker is stopped for 10 s (SIGSTOP)": stop,
        "all connections of a worker are reset; it cannot be reached for 2 s": cut,
        "the network drops all bytes of a worker for 10 s": silence,
        "a worker drains (SIGTERM) and is started again": drain,
        "a router drains (SIGTERM), and a new one is started": end_router,
    }

    def run(self, name, worker):
        """Disturbs, waits until all workers are used again, and returns what happened to the requests."""
        wait_until(lambda: self.running >= self.num_clients // 2, "requests in flight")
        with self.lock:
            self.done.clear()
            self.pauses.clear()
            running = self.running
        moved = self.moved()
        begin = time.monotonic()
        self.DISTURBANCES[name](self, worker)
        wait_until(lambda: all(router.metric("kvasir_router_replicas", state="ready") == len(self.workers)
                               for router in self.routers), "all workers in use again", 60)
        # No request sees two disturbances, because a router gives a request up that two workers have died of.
        with self.lock:
            before = list(self.ended)
        wait_until(lambda: all(now > then for now, then in zip(self.ended, before)), "an answer for every client",
                   REQUEST_TIMEOUT_SECONDS)
        with self.lock:
            return {"name": name, "running": running, "seconds": time.monotonic() - begin, **{
                outcome: self.done[outcome] for outcome in ("ok", "failed", "different", "elsewhere")},
                "moved": self.moved() - moved, "pauses": list(self.pauses)}

    @staticmethod
    def moves_of(router):
        """Returns how many requests the router has sent to a second worker."""
        return sum(line["attempts"] > 1 for line in access_log.lines(router))

    def moved(self):
        return self.moved_before + sum(map(self.moves_of, self.routers))

    def leaks(self):
        """Ends the clients, and returns what the workers still hold."""
        found = [f"client {number} has ended early" for number, thread in enumerate(self.threads)
                 if not thread.is_alive()]
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        for number, worker in enumerate(self.workers):
            def metric(name, worker=worker):
                return worker.process.metric(f"kvasir_{name}")

            try:
                wait_until(lambda: metric("kv_cache_used_pages") == 0, "an empty cache")
            except AssertionError:
                found.append(f"worker {number} holds {metric('kv_cache_used_pages')} pages")
            if leaked := metric("cache_leaked_pages"):
                found.append(f"worker {number} has leaked {leaked} pages")
        return found


def drill(rounds, seed, clients=24, flags=(), tell=print):
    """Returns (results of every disturbance, problems)."""
    source = random.Random(seed)
    results = []
    with Drill(clients, flags=flags) as running:
        for number in range(rounds):
            names = list(Drill.DISTURBANCES)
            source.shuffle(names)
            for name in names:
                one = running.run(name, source.choice(running.workers))
                results.append(one)
                tell(f"round {number + 1} of {rounds}: {name}: {one['ok']} answers, {one['failed']} failed, "
                     f"{one['different']} different, {one['moved']} moved, longest pause "
                     f"{max(one['pauses'], default=0):.1f} s")
        return results, running.problems + running.leaks()


def page(results, problems, seed, rounds, clients, flags) -> str:
    """Returns the text of docs/reliability.md."""
    rows = []
    for name in Drill.DISTURBANCES:
        own = [one for one in results if one["name"] == name]
        pauses = sorted(pause for one in own for pause in one["pauses"])
        rows.append([name, str(len(own)), *(str(sum(one[key] for one in own))
                                            for key in ("ok", "moved", "elsewhere", "different", "failed")),
                     f"{statistics.median(pauses):.2f} s" if pauses else "", f"{pauses[-1]:.1f} s" if pauses else ""])
    head = ["disturbance", "times", "answers", "moved", "asked the other router", "different", "failed",
            "median of the longest pauses", "longest pause"]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])
    return f"""# Reliability

<!-- scripts/soak drill writes this page: tests/process/support/drill.py -->

{clients} clients of all three protocols send requests (streams and single responses; greedy, seeded with log probabilities, penalties, three
samples, stop strings) through two routers to three workers, which are disturbed meanwhile. Every answer is compared, token by token, with
that of an undisturbed run. A disturbance's row has the answers that ended from its start until all workers were in use again and every
client had one more answer, so that no request sees two disturbances.

{table}

- *moved*: sent to a second worker. *Asked the other router*: a draining router refused a new request, and the client asked the other one. *Pause*: between two
  responses of a stream; the longest of each stream. If the workers' pool is small, this includes the time of preempted requests.
- {datetime.date.today().isoformat()}, {rounds} rounds, seed {seed}, {os.cpu_count()} CPUs, workers {' '.join(map(str, flags)) or 'without flags'}, built-in model of
  `models/tiny`.
- Pages that workers still held or had leaked at the end, and other problems: {len(problems) or 'none'}.

The same drill with other sizes: `PYTHONPATH=tests/process build/venv/bin/python tests/process/support/drill.py --help`. On a cluster, run your own load through
the gateway and, meanwhile, `kubectl delete pod --force` (killed), `kill -STOP PID` on the node (stopped) and `kubectl rollout restart` (drained). The panel
*Moved to another replica a second* and the clients' errors show the result.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=pathlib.Path, help="also write the page to this file, if nothing failed")
    parser.add_argument("flags", nargs="*", help="flags of the workers, after --")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    results, problems = drill(options.rounds, options.seed, options.clients, options.flags,
                              lambda text: print(text, flush=True))
    for problem in problems:
        print(problem, file=sys.stderr)
    text = page(results, problems, options.seed, options.rounds, options.clients, options.flags)
    if problems:
        print(text)
        sys.exit(1)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
