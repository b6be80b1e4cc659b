"""Waits until a gateway of OpenAI's API answers, and prints an example request. Run by
scripts/serve --openai, with the keys in KVASIR_OPENAI_KEY and KVASIR_CONTROL_PLANE_KEY. Prints
the values of only those that are named: scripts/serve has made them.

    openai_ready.py PID PORT MODEL [KEY...]"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

SECONDS = 90
QUESTION = "What is the capital of France?"


def ask(url: str, model: str, key: str, max_tokens: int) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    pid, port, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    made = "".join(f"export {name}={os.environ[name]}\n" for name in sys.argv[4:])
    key = os.environ["KVASIR_OPENAI_KEY"]
    url = f"http://127.0.0.1:{port}/v1"
    deadline = time.monotonic() + SECONDS
    while not ask(url, model, key, 1):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 1
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.5)
    body = json.dumps({"model": model, "temperature": 0,
                       "messages": [{"role": "user", "content": QUESTION}]})
    print(f"""
OpenAI's API is on {url} (the gateway smg in front of kvasir). Ctrl-C stops both.
The control plane of smg ({url.removesuffix("/v1")}/workers) has the key KVASIR_CONTROL_PLANE_KEY. In another terminal:

{made}curl -s {url}/chat/completions -H "Authorization: Bearer $KVASIR_OPENAI_KEY" -H 'Content-Type: application/json' -d '{body}'

or, in Python (`pip install openai`; build/venv-smg has it):

import os
from openai import OpenAI
client = OpenAI(base_url="{url}", api_key=os.environ["KVASIR_OPENAI_KEY"])
messages = [{{"role": "user", "content": "{QUESTION}"}}]
for part in client.chat.completions.create(model="{model}", messages=messages, temperature=0, stream=True):
    print(part.choices[0].delta.content or "", end="", flush=True)
""", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
