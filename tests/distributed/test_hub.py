"""Models by their names on the hub: a server on this machine answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from tests.harness import launch

COMMIT = "c" * 40
NAME = "somebody/tiny"


@pytest.fixture
def hub(tiny):
    """(its address, counts of files that were sent, per name). Weights take two seconds."""
    files = {f.name: f.read_bytes() for f in (tiny / "llama").iterdir()} | {"pytorch_model.bin": b"another kind"}
    sent: Counter = Counter()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = unquote(urlsplit(self.path).path)
            entries = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()]
            name = path.rpartition("/")[2]
            if path.startswith(f"/api/models/{NAME}/tree/"):
                content = json.dumps(entries).encode()
            elif path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}/revision/{COMMIT}"):
                siblings = [{"rfilename": n} for n in files]
                content = json.dumps({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
            elif path.startswith(f"/{NAME}/resolve/") and name in files:
                content = files[name]
                if body:
                    sent[name] += 1
                time.sleep(2 if body and name == "model.safetensors" else 0)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()


@pytest.fixture
def train(tiny, tmp_path, hub):
    """Return a function that trains the model of the hub for two steps."""
    address, _ = hub
    online = {"HF_ENDPOINT": address, "HF_HOME": tmp_path / "home", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    flags = dict(
        model_name_or_path=NAME, train_file=tiny / "epoch24.jsonl", validation_split_percentage=0, block_size=64,
        max_train_steps=2, per_device_train_batch_size=2, save_steps=2,
    )  # fmt: skip

    def run(strategy, processes, name, **variables):
        run = launch(strategy, processes, "causal_lm", tmp_path / name, environment=online | variables, **flags)
        assert len(run.steps) == 2

    return run


@pytest.mark.launch
@pytest.mark.full
def test_a_model_of_the_hub_is_downloaded_once_before_it_is_loaded(train, hub):
    _, sent = hub
    train("zero3", 2, "run")
    assert list(sent)[-1] == "model.safetensors", "`from_pretrained` alone asks for other files after the weights"
    assert sent["model.safetensors"] == 1 and sent["pytorch_model.bin"] == 0 and sent["config.json"] == 1


@pytest.mark.launch
@pytest.mark.full
def test_a_model_in_the_cache_is_enough_offline(train, hub):
    _, sent = hub
    train("single", 1, "online")
    train("single", 1, "offline", HF_HUB_OFFLINE="1")
    assert sent["model.safetensors"] == 1
