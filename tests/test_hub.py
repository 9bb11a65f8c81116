from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from checkpoints import COMMIT, save_checkpoint

from vegas_runtime.engine import hub
from vegas_runtime.engine.loading import fetch, load_model, load_tokenizer, resolve_model
from vegas_runtime.errors import ModelError

REPO = "owner/tiny"


class FakeHub:
    """One repository, served over HTTP as the Hub does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fetched(self) -> set[str]:
        """Names of the files whose content was sent."""
        return {path.split("/", 5)[5] for path in self.requests if path.startswith("GET /owner")}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Keep test output clean."""

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, *, with_body: bool) -> None:
                path = self.path.split("?")[0]
                fake.requests.append(f"{self.command} {path}")
                status, body, headers = fake.reply(path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        return Handler

    def reply(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        files = {str(p.relative_to(self.folder)): p for p in self.folder.rglob("*") if p.is_file()}
        if path.startswith(f"/api/models/{REPO}/revision/"):
            return 200, json.dumps({"id": REPO, "sha": COMMIT}).encode(), {}
        if path.startswith(f"/api/models/{REPO}/tree/"):
            rows = [
                {"type": "file", "path": name, "size": p.stat().st_size, "oid": "0" * 40}
                for name, p in files.items()
            ]
            return 200, json.dumps(rows).encode(), {}
        if not path.startswith(f"/{REPO}/resolve/"):
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        revision, name = path.removeprefix(f"/{REPO}/resolve/").split("/", 1)
        if revision not in ("main", COMMIT):
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if name not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
        body = files[name].read_bytes()
        digest = hashlib.sha256(body).hexdigest()
        return 200, body, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}


@pytest.fixture
def use_hub(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Point the Hub client at a server, with an empty cache of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)

    def use(url: str) -> None:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return use


@pytest.fixture
def fake_hub(tmp_path: Path, use_hub: Callable[[str], None]) -> Iterator[FakeHub]:
    folder = tmp_path / "repo"
    save_checkpoint(folder)
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"the same weights once more")
    (folder / "pytorch_model.bin").write_bytes(b"and again")
    server = FakeHub(folder)
    use_hub(server.url)
    yield server
    server.close()


@pytest.fixture
def no_network(use_hub: Callable[[str], None]) -> None:
    """A Hub whose port nobody listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    use_hub(url)


def test_model_is_fetched_pinned_and_loaded(fake_hub: FakeHub) -> None:
    reports: list[str] = []
    loaded = load_model(resolve_model(REPO), dtype="float32", report=reports.append)
    assert loaded.source.revision == COMMIT
    assert loaded.facts["id"] == REPO
    assert loaded.facts["revision"] == COMMIT
    weights = fake_hub.folder / "model.safetensors"
    assert loaded.facts["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert reports == [f"fetching {REPO} at {COMMIT[:12]}: 1 weight file, 0.00 GB in all"]


def test_only_what_is_needed_is_fetched(fake_hub: FakeHub) -> None:
    fetch(resolve_model(REPO))
    wanted = {path.name for path in fake_hub.folder.iterdir() if path.is_file()}
    assert fake_hub.fetched() == wanted - {"pytorch_model.bin"}


def test_sharded_weights_are_all_fetched_and_their_size_told(fake_hub: FakeHub) -> None:
    (fake_hub.folder / "model.safetensors").unlink()
    model = save_checkpoint(fake_hub.folder)
    (fake_hub.folder / "model.safetensors").unlink()
    model.save_pretrained(fake_hub.folder, max_shard_size="300KB")
    shards = {path.name for path in fake_hub.folder.glob("model-*.safetensors")}
    assert len(shards) > 1
    reports: list[str] = []
    fetched = fetch(resolve_model(REPO), reports.append)
    assert fetched.location is not None
    assert shards <= {path.name for path in fetched.location.iterdir()}
    assert f"{len(shards)} weight files, 0.00 GB in all" in reports[0]


def test_fetched_commit_asks_the_hub_nothing_more(fake_hub: FakeHub) -> None:
    first = fetch(resolve_model(REPO))
    fake_hub.requests.clear()
    assert fetch(first) == first
    assert fetch(resolve_model(REPO, COMMIT)) == first
    load_tokenizer(first)
    assert fake_hub.requests == []


def test_without_network_the_cached_copy_is_used_and_that_is_told(fake_hub: FakeHub) -> None:
    first = fetch(resolve_model(REPO))
    fake_hub.close()
    reports: list[str] = []
    started = time.perf_counter()
    assert fetch(resolve_model(REPO), reports.append) == first
    assert time.perf_counter() - started < 5
    assert "cannot be reached" in reports[0]
    assert f"using {REPO} as cached" in reports[0]


def test_switched_off_fetching_uses_the_cache_without_asking(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(resolve_model(REPO))
    fake_hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(resolve_model(REPO)) == first
    assert fake_hub.requests == []


def test_switched_off_fetching_names_the_missing_weights(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = fetch(resolve_model(REPO)).location
    assert location is not None
    (location / "model.safetensors").unlink()
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"only partly .*model\.safetensors is missing"):
        fetch(resolve_model(REPO))


def test_without_network_a_missing_model_fails_fast_and_names_three_ways(no_network: None) -> None:
    started = time.perf_counter()
    with pytest.raises(ModelError, match="cannot be reached") as caught:
        fetch(resolve_model("Qwen3-8B"))
    # The Hub client alone retries for 23 s; the probe must answer at once when refused.
    assert time.perf_counter() - started < 5
    for way in ("hf download Qwen/Qwen3-8B", "path of a checkpoint", "smollm2-135m"):
        assert way in caught.value.hint


def test_hub_that_never_answers_is_given_up(
    use_hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.perf_counter()
        with pytest.raises(ModelError, match="ReadTimeout"):
            fetch(resolve_model(REPO))
        assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("name", "revision", "wanted"),
    [
        ("owner/other", None, "no model owner/other"),
        (REPO, "v9", "no revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_have_is_told(
    fake_hub: FakeHub, name: str, revision: str | None, wanted: str
) -> None:
    with pytest.raises(ModelError, match=wanted):
        fetch(resolve_model(name, revision))


def test_repository_without_config_is_refused(fake_hub: FakeHub) -> None:
    (fake_hub.folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        fetch(resolve_model(REPO))


def test_repository_without_safetensors_is_refused(fake_hub: FakeHub) -> None:
    (fake_hub.folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        fetch(resolve_model(REPO))


def test_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    fake_hub: FakeHub,
) -> None:
    config = fake_hub.folder / "config.json"
    config.write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    with pytest.raises(ModelError, match="encoder-decoder"):
        fetch(resolve_model(REPO))
    assert "model.safetensors" not in fake_hub.fetched()


def test_download_that_breaks_off_is_told_and_not_used(fake_hub: FakeHub) -> None:
    reply = fake_hub.reply

    def broken(path: str) -> tuple[int, bytes, dict[str, str]]:
        return (403, b"", {}) if path.endswith("model.safetensors") else reply(path)

    fake_hub.reply = broken  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="fetching broke off") as caught:
        fetch(resolve_model(REPO))
    assert "Three ways" in caught.value.hint
