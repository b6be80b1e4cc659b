"""Waits until a gateway of OpenAI's API answers, and prints an example request. Run by
scripts/serve --openai.

    openai_ready.py PID PORT MODEL"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

SECONDS = 90
QUESTION = "What is the capital of France?"


def ask(url: str, model: str, max_tokens: int) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    pid, port, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    url = f"http://127.0.0.1:{port}/v1"
    deadline = time.monotonic() + SECONDS
    while not ask(url, model, 1):
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
OpenAI's API is on {url} (the gateway smg in front of kvasir). Ctrl-C stops both. In another terminal:

curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'

or, in Python (`pip install openai`; build/venv-smg has it):

from openai import OpenAI
client = OpenAI(base_url="{url}", api_key="none")
messages = [{{"role": "user", "content": "{QUESTION}"}}]
for part in client.chat.completions.create(model="{model}", messages=messages, temperature=0, stream=True):
    print(part.choices[0].delta.content or "", end="", flush=True)
""", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
