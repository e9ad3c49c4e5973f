"""Models and datasets by Hub id, with a stand-in for the Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "models/own/tiny": {
        "config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle", "chat.jinja": b"t"
    },
    "datasets/open/sums": {
        "main/train-00000-of-00002.jsonl": b'{"question": "1+1?", "answer": "2"}\n',
        "main/train-00001-of-00002.jsonl": b'{"question": "2+2?", "answer": "4"}\n',
        "main/test-00000-of-00001.jsonl": b'{"question": "3+3?", "answer": "6"}\n',
        "README.md": b"sums",
    },
    "datasets/open/twice": {"a/train-00000-of-00001.jsonl": b"{}", "b/train-00000-of-00001.jsonl": b"{}"},
}  # fmt: skip
REVISION = "a" * 40
PATIENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}


def git_hash(content: bytes) -> str:
    """The checksum by which the Hub knows a small file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does what `snapshot_download` asks."""

    requests: list[str] = []

    def do_HEAD(self) -> None:
        self.do_GET(has_body=False)

    def do_GET(self, has_body: bool = True) -> None:
        self.requests.append(self.path)
        kind, name, rest = self._parts()
        files = FILES.get(f"{kind}/{name}")
        if files is None:
            self._answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, has_body)
        elif self.path.startswith("/api/"):
            found = {"sha": REVISION, "id": name, "siblings": [{"rfilename": file} for file in files]}
            if "/tree/" in self.path:
                tree = [
                    {"type": "file", "path": file, "size": len(files[file]), "oid": git_hash(files[file])}
                    for file in files
                ]
                self._answer(200, json.dumps(tree).encode(), {}, has_body)
            else:
                self._answer(200, json.dumps(found).encode(), {}, has_body)
        else:
            body = files[rest.partition(f"resolve/{REVISION}/")[2]]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": REVISION}
            self._answer(200, body, headers, has_body)

    def _parts(self) -> tuple[str, str, str]:
        words = self.path.split("?")[0].strip("/").split("/")
        if words[0] == "api":
            return words[1], "/".join(words[2:4]), "/".join(words[4:])
        if words[0] == "datasets":
            return "datasets", "/".join(words[1:3]), "/".join(words[3:])
        return "models", "/".join(words[:2]), "/".join(words[2:])

    def _answer(self, status: int, body: bytes, headers: dict[str, str], has_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


RESOLVE = """
import json, sys
from penstock.config.loading import validate
from penstock.errors import PenstockError
from penstock.feed.dataset_feed import PromptStream
from penstock.hub import with_local_datasets, with_local_models
for fields in json.loads(sys.argv[1]):
    try:
        config = with_local_datasets(with_local_models(validate(fields, "test")))
        numbers = [p.ground_truth for p in PromptStream.read(config).prompts] if config.dataset.file else []
        teachers = [str(role.path) for role in config.learner.roles.values()]
        found = {"model": str(config.model.path), "source": config.dataset.data_source, "truths": numbers}
        print(json.dumps(found | {"teachers": teachers}))
    except PenstockError as error:
        print(json.dumps({"error": str(error)}))
"""


def resolve(cache: Path, hub: str, *configs: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """The resolved configs, by a process of its own: huggingface_hub reads its variables when it is imported."""
    base = {"HF_HOME": str(cache), "HF_ENDPOINT": hub, "PATH": "/usr/bin:/bin", **PATIENT}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(configs)], env=base | environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ids_are_fetched_once_and_then_come_from_the_cache(tmp_path: Path, hub: str) -> None:
    dataset = {"file": "open/sums/main/train", "columns": {"prompt": "question", "ground_truth": "answer"}}
    teacher = {"step": "own.steps:train", "roles": {"teacher": {"worker": "reference", "path": "own/tiny"}}}
    config = {"model": {"path": "own/tiny@main"}, "dataset": dataset, "learner": teacher}
    missing = {"model": {"path": "own/none"}}
    twice = {"model": {"path": str(tmp_path)}, "dataset": {"file": "open/twice"}}
    first, *refused = resolve(tmp_path, hub, config, missing, twice)
    assert sorted(file.name for file in Path(first["model"]).iterdir()) == [
        "chat.jinja", "config.json", "model.safetensors",
    ], "no pickles are fetched"  # fmt: skip
    assert (first["truths"], first["source"]) == (["2", "4"], "open/sums")
    assert first["teachers"] == [first["model"]]
    assert "own/none is neither a path on this machine nor a model that the Hub at http" in refused[0]["error"]
    assert "several sets of files; choose one of open/twice/a/train, open/twice/b/train" in refused[1]["error"]
    Hub.requests.clear()
    again, not_cached = resolve(tmp_path, hub, config, missing, HF_HUB_OFFLINE="1")
    assert again == first and "nor a model that the cache (HF_HUB_OFFLINE is set) gives" in not_cached["error"]
    assert Hub.requests == []


def test_a_model_is_fetched_into_a_folder_and_compared_with_the_hub(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub, **PATIENT}

    def fetch(target: Path) -> subprocess.CompletedProcess[str]:
        words = ["-m", "penstock.cli.main", "fetch-model", "own/tiny@main", str(target)]
        return subprocess.run(
            [sys.executable, *words], env={"PATH": "/usr/bin:/bin", **environment}, cwd=Path(__file__).parents[2],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    done = fetch(tmp_path / "model")
    assert done.stdout.startswith("fetched 3 files"), done.stderr
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"weights"
    assert not (tmp_path / "model" / "pytorch_model.bin").exists()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "git_hash", lambda _: "0" * 40)
        damaged = fetch(tmp_path / "damaged")
    assert damaged.returncode == 2 and "arrived damaged and was removed; fetch again" in damaged.stderr
    assert not (tmp_path / "damaged" / "model.safetensors").exists()
    assert fetch(tmp_path / "damaged").returncode == 0


def test_a_folder_stays_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.hub import local_model

    (tmp_path / "own" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_model(Path("own/tiny"), "model.path") == Path("own/tiny")
    for path in ("/own/tiny", "own/other", "model", "a/b/c"):
        assert local_model(Path(path), "model.path") == Path(path)
