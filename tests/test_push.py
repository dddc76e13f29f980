"""`zerobook export --push`, with the hub's own client against a server on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.harness import ROOT, SETTINGS

PUSH = """
import sys
from pathlib import Path
from zerobook.errors import ConfigError
from zerobook.models.push import check_push, push
try:
    check_push(sys.argv[2])
    print(push(Path(sys.argv[1]), sys.argv[2], private=True))
except ConfigError as error:
    print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that an upload of small files uses."""

    status = 200
    asked: list[tuple[str, dict]] = []
    private = True
    files: list[str] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path = self.path.partition("?")[0]
        lines = [json.loads(line) for line in body.splitlines()] if path.endswith("/commit/main") else [json.loads(body)]
        self.asked.extend((path, line) for line in lines)
        if path == "/api/repos/create":
            return self.answer({"url": f"http://{self.headers['Host']}/me/mine", "name": "me/mine"}, self.status)
        if path.endswith("/preupload/main"):
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in lines[0]["files"]]
            return self.answer({"files": files})
        return self.answer({"commitUrl": f"http://{self.headers['Host']}/me/mine/commit/abc", "commitOid": "abc"})

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/api/models/me/mine" and self.status == 200:
            return self.answer({"id": "me/mine", "private": self.private})
        if path == "/api/models/me/mine/tree/main":
            return self.answer([{"type": "file", "path": file, "size": 1, "oid": "0"} for file in self.files])
        return self.answer({"error": "Not Found"}, 404)

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    Hub.asked, Hub.status, Hub.private, Hub.files = [], 200, True, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def pushed(folder, name, **variables) -> str:
    environment = (
        os.environ | SETTINGS | {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", **variables}
    )
    environment |= {"HF_HOME": str(folder.parent / "home")}
    if "HF_TOKEN" not in variables:
        environment.pop("HF_TOKEN", None)
    done = subprocess.run([sys.executable, "-c", PUSH, str(folder), name], env=environment, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("name", ["me/mine", "mine"])
def test_an_export_is_uploaded(tmp_path, hub, name):
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("# card\n")
    said = pushed(folder, name, HF_ENDPOINT=hub, HF_TOKEN="hf_of_a_test")
    assert "me/mine" in said
    create = next(body for path, body in Hub.asked if path == "/api/repos/create")
    owner, _, repository = name.rpartition("/")
    assert (create["name"], create["organization"] or "") == (repository, owner)
    assert {path.rpartition("/commit")[0] for path, _ in Hub.asked if path.endswith("/commit/main")} == {"/api/models/me/mine"}
    assert "private" in (create.get("visibility"), *create), "a new repository is private"
    files = [body["value"] for path, body in Hub.asked if path.endswith("/commit/main") and body["key"] == "file"]
    assert {file["path"]: base64.b64decode(file["content"]).decode() for file in files} == {
        "config.json": '{"model_type": "llama"}', "README.md": "# card\n",
    }  # fmt: skip


def test_files_that_would_be_read_in_place_of_the_new_ones_are_deleted(tmp_path, hub):
    Hub.files = ["model.safetensors", "adapter_config.json", "adapter_model.safetensors", "config.json", "results/mine.json"]
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (folder / name).write_text("{}")

    pushed(folder, "me/mine", HF_ENDPOINT=hub, HF_TOKEN="hf_of_a_test")

    deleted = [body["value"]["path"] for _, body in Hub.asked if body.get("key") == "deletedFile"]
    assert deleted == ["model.safetensors", "adapter_config.json", "adapter_model.safetensors"]


def test_nothing_is_uploaded_as_private_into_a_public_repository(tmp_path, hub):
    Hub.private = False
    assert "and public" in pushed(tmp_path, "me/mine", HF_ENDPOINT=hub, HF_TOKEN="hf_of_a_test")
    assert not [path for path, _ in Hub.asked if "/commit/" in path]


def test_what_forbids_an_upload_is_said(tmp_path, hub):
    assert "hf auth login" in pushed(tmp_path, "me/mine", HF_ENDPOINT=hub)
    assert "HF_HUB_OFFLINE is set" in pushed(tmp_path, "me/mine", HF_ENDPOINT=hub, HF_HUB_OFFLINE="1", HF_TOKEN="hf_x")
    assert "no name of a repository" in pushed(tmp_path, "a/b/c", HF_ENDPOINT=hub, HF_TOKEN="hf_x")
    Hub.status = 403
    assert "The token needs write access" in pushed(tmp_path, "me/mine", HF_ENDPOINT=hub, HF_TOKEN="hf_x")
    said = pushed(tmp_path, "me/mine", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="hf_x")
    assert "cannot be reached" in said and "uploads it later" in said
