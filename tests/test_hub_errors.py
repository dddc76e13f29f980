"""Models that the hub does not give: the error comes within seconds, and names the way out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.harness import ROOT, SETTINGS


class Refuses(BaseHTTPRequestHandler):
    """Answers as the hub does for a gated repository, or with another status."""

    status = 403

    def do_GET(self):
        self.send_response(self.status)
        if self.status == 403:
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("X-Error-Message", "Access to model me/gated is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def refuses():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


WORDS = {
    "gated": "run hf auth login",
    "unreachable": "the hub cannot be reached at http://127.0.0.1:9: Connection refused",
    "offline": "HF_HUB_OFFLINE is set",
}
SAMPLE = {("gated", "recipe"), ("unreachable", "plan"), ("offline", "chat"), ("gated", "inspect")}
"""Every case and every command once."""


@pytest.mark.parametrize(
    "case, what",
    [
        pytest.param(case, what, marks=[] if (case, what) in SAMPLE else pytest.mark.full)
        for case in WORDS
        for what in ("recipe", "chat", "plan", "inspect")
    ],
)
def test_a_model_that_the_hub_does_not_give(tmp_path, refuses, what, case):
    (tmp_path / "text.txt").write_text("some text " * 200)
    endpoint = {"gated": refuses, "unreachable": "http://127.0.0.1:9", "offline": "http://127.0.0.1:9"}[case]
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint}
    environment["HF_HUB_OFFLINE"] = "1" if case == "offline" else "0"
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    recipe = [str(ROOT / "recipes" / "causal_lm.py"), "--model_name_or_path", "me/gated", "--train_file", "text.txt"]
    line = {
        "recipe": recipe, "chat": ["-m", "zerobook.cli.main", "chat", "me/gated"],
        "plan": ["-m", "zerobook.cli.main", "plan", "--gpus", "8", *recipe],
        "inspect": ["-m", "zerobook.cli.main", "data", "inspect", "chats.jsonl", "--model", "me/gated"],
    }[what]  # fmt: skip
    done = subprocess.run([sys.executable, *line], cwd=tmp_path, env=environment, capture_output=True, text=True, input="",
                          timeout=60, check=False)  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2 and WORDS[case] in said and "me/gated" in said, said
    assert "Traceback" not in said
