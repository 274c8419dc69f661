"""Serve a FoX over the OpenAI API, and request a completion: pip install 'hf-longctx[serve]'."""

import json
import subprocess
import sys
import time
import urllib.request


MODEL, PORT = "model_cards/fox-demo", 8123
URL = f"http://localhost:{PORT}"

server = subprocess.Popen([sys.executable, "-m", "hf_longctx", "serve", MODEL, "--port", str(PORT)])
try:
    while True:
        try:
            urllib.request.urlopen(f"{URL}/health")
            break
        except OSError:
            if server.poll() is not None:
                sys.exit("The server ended before it answered; its output says why.")
            time.sleep(0.5)
    body = {"model": MODEL, "prompt": "The import statement", "max_tokens": 20, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode(), headers)
    print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
finally:
    server.terminate()
    server.wait()
