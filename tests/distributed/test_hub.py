"""Models and datasets by their names on the hub: a server on this machine answers as the hub does."""

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
DATASET = "somebody/chats"


class HubDataset:
    """A dataset on the hub: files of each commit. Its main branch is the newest commit."""

    def __init__(self):
        self.commits = {}

    def commit(self, *texts):
        """Add a commit with a file of rows for each of ``texts``."""
        sha = f"{len(self.commits):040x}"
        rows = [json.dumps({"text": text}) + "\n" for text in texts]
        self.commits[sha] = {f"train-{i}.jsonl": row.encode() for i, row in enumerate(rows)} | {"README.md": b"# chats\n"}
        return sha

    def answer(self, path):
        """Return (the commit that a request is about, the content of the answer or None)."""
        newest = list(self.commits)[-1]
        # What to do, a revision, and a file.
        action, _, rest = path.split(f"/datasets/{DATASET}")[1].strip("/").partition("/")
        revision, _, name = rest.partition("/")
        sha = {"": newest, "main": newest}.get(revision, revision)
        files = self.commits.get(sha, {})
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        if action == "resolve":
            return sha, files.get(name)
        if action in ("tree", "paths-info"):
            return sha, json.dumps(entries).encode()
        siblings = [{"rfilename": name} for name in files]
        return sha, json.dumps({"id": DATASET, "sha": sha, "siblings": siblings, "tags": [], "private": False}).encode()


@pytest.fixture
def dataset():
    return HubDataset()


@pytest.fixture
def hub(tiny, dataset):
    """(its address, counts of files that were sent, per name). Weights take two seconds."""
    files = {f.name: f.read_bytes() for f in (tiny / "llama").iterdir()} | {"pytorch_model.bin": b"another kind"}
    sent: Counter = Counter()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(body=True)

        def answer(self, body):
            path = unquote(urlsplit(self.path).path)
            entries = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()]
            name = path.rpartition("/")[2]
            commit = COMMIT
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
            elif path.startswith((f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/")):
                commit, content = dataset.answer(path)
            else:
                content = None
            if content is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            etag = hashlib.sha1(content).hexdigest()
            # A stream asks for ranges of a file, and one after its end is empty.
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            content = content[int(first or 0) : int(last or len(content)) + 1]
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()


def online_settings(hub, tmp_path):
    return {"HF_ENDPOINT": hub[0], "HF_HOME": tmp_path / "home", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


@pytest.fixture
def train(tiny, tmp_path, hub):
    """Return a function that trains the model of the hub for two steps."""
    online = online_settings(hub, tmp_path)
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


@pytest.mark.launch
@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_run_goes_on_with_the_commit_of_a_dataset_that_it_began_with(tiny, tmp_path, hub, dataset, streaming):
    began_with = dataset.commit(*(f"text {i} " * 200 for i in range(3)))
    flags = dict(
        model_name_or_path=tiny / "llama", dataset_name=DATASET, streaming=streaming, validation_split_percentage=0,
        block_size=64, per_device_train_batch_size=2, save_steps=2, resume_from_checkpoint="auto", lr_scheduler_type="constant",
    )  # fmt: skip

    def train(name, steps):
        environment = online_settings(hub, tmp_path)
        return launch("ddp", 2, "causal_lm", tmp_path / name, environment=environment, max_train_steps=steps, **flags)

    whole = train("whole", 4)
    train("run", 2)
    newest = dataset.commit("other text " * 900)
    resumed = train("run", 4)
    assert [step["loss"] for step in resumed.steps[-2:]] == [step["loss"] for step in whole.steps[-2:]]
    other = train("other", 2)
    revisions = [run.event("run_start")["config"]["dataset_revision"] for run in (whole, resumed, other)]
    assert revisions == [began_with, began_with, newest]
