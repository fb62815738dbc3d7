# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by hub id: online against a small hub of our own, and offline."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.tiny_models import tiny_lm

from statescan.errors import ArgumentError, CheckpointError, MissingExtraError
from statescan.models import load_model, load_tokenizer, save_model

SOURCES = Path(__file__).resolve().parents[2] / "src"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

CHILD = """
import json, sys
from statescan.errors import StatescanError
from statescan.models import load_model, load_tokenizer
outcomes = []
for call, source, options in json.loads(sys.argv[1]):
    try:
        found = {"model": load_model, "tokenizer": load_tokenizer}[call](source, **options)
        outcomes.append("loaded " + type(found).__name__)
    except StatescanError as error:
        outcomes.append(type(error).__name__ + ": " + str(error))
print(json.dumps(outcomes))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for files of ``root``/owner/name, of one revision."""

    root: Path

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def answer(self, with_content: bool) -> None:
        parts = self.path.lstrip("/").split("?")[0].split("/", 4)
        if len(parts) != 5 or parts[2] != "resolve":
            # Questions about anything but files, which some versions of the client ask.
            self.reply(404, b"", "")
            return
        owner, name, _, revision, file = parts
        folder = self.root / owner / name
        if owner == "gated":
            self.reply(403, b"", "GatedRepo")
        elif not folder.is_dir():
            self.reply(404, b"", "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.reply(404, b"", "RevisionNotFound")
        elif not (folder / file).is_file():
            self.reply(404, b"", "EntryNotFound")
        else:
            self.reply(200, (folder / file).read_bytes(), "", with_content)

    def reply(self, code: int, content: bytes, problem: str, with_content: bool = True) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        if problem:
            self.send_header("X-Error-Code", problem)
            self.send_header("X-Error-Message", problem)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """No lines on stderr."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a hub with one checkpoint of each kind."""
    root = tmp_path / "hub"
    save_model(tiny_lm(), root / "lab" / "plain")
    save_model(tiny_lm(), root / "lab" / "original", weights="torch")
    save_model(tiny_lm(), root / "lab" / "sharded", layout="transformers", max_shard_size=5000)
    save_model(tiny_lm(), root / "lab" / "broken", layout="transformers", max_shard_size=5000)
    next((root / "lab" / "broken").glob("model-00002*")).unlink()
    (root / "lab" / "empty").mkdir()
    (root / "lab" / "weightless").mkdir()
    (root / "lab" / "weightless" / "config.json").write_text("{}")
    handler = type("Handler", (Hub,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", root
    server.shutdown()
    server.server_close()
    thread.join()


def outcomes(cache: Path, calls: list, said: str = "", **environment: str) -> list[str]:
    """What each call gives, in a process of its own: the hub's client reads its settings once."""
    proxies = {"NO_PROXY": "*", "no_proxy": "*", "HTTP_PROXY": "", "http_proxy": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(calls)],
        env={**os.environ, **proxies, "HF_HOME": str(cache), "PYTHONPATH": str(SOURCES),
             "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Nothing beside the error, and no silence where the cache stands in for the hub.
    assert said in done.stderr if said else done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


def models(*names: str) -> list:
    return [["model", name, {}] for name in names]


@pytest.mark.slow
def test_checkpoints_on_the_hub_are_downloaded_and_then_found_offline(
    hub: tuple[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub", reason="pip install 'statescan[models]' to test the hub")
    address, _ = hub
    good = models("lab/plain", "lab/original", "lab/sharded")
    good.append(["model", "lab/plain", {"revision": COMMIT}])
    bad = models("lab/broken", "lab/empty", "lab/weightless", "lab/nobody", "gated/model")
    bad += [["model", "lab/plain", {"revision": "v9"}], ["tokenizer", "lab/original", {}]]
    got = outcomes(tmp_path / "cache", good + bad, HF_ENDPOINT=address)
    assert got[:4] == ["loaded MambaLM"] * 4
    expected = [
        "lacks model-00002-of-", "has no config.json", "holds none of model.safetensors, ",
        "neither a folder nor a checkpoint on the hub", "accepted its terms", "no revision 'v9'",
        "lab/original has no tokenizer.json; the original state-spaces checkpoints have none",
    ]  # fmt: skip
    for line, part in zip(got[4:], expected, strict=True):
        assert line.startswith("CheckpointError: ")
        assert part in line
        assert "\n" not in line

    # The same cache without a network: what was fetched is still there.
    said = "HF_HUB_OFFLINE is set: lab/plain is taken from the local cache"
    offline = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "1"}
    got = outcomes(tmp_path / "cache", [*good, *models("lab/other"), bad[-1]], said, **offline)
    assert got[:4] == ["loaded MambaLM"] * 4
    assert "lab/other is no folder and not complete in the local cache (config.json)" in got[4]
    assert "HF_HUB_OFFLINE is set" in got[4]
    assert "in the local cache, and the hub is out of reach (HF_HUB_OFFLINE is set)" in got[5]


def test_without_a_network_there_is_one_clear_line(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="pip install 'statescan[models]' to test the hub")
    # Names below .invalid never resolve (RFC 2606).
    (line,) = outcomes(tmp_path, models("lab/m"), HF_ENDPOINT="http://hub.invalid")
    assert line.startswith(
        "CheckpointError: lab/m is no folder and not complete in the local cache"
    )
    assert "out of reach (hub.invalid: " in line
    assert "give the path of a folder" in line
    assert "\n" not in line


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (load_model, load_tokenizer):
        with pytest.raises(MissingExtraError, match=r"pip install 'statescan\[models\]'") as caught:
            call("lab/model")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["nowhere", "/no/where", "a/b/c", "../a", "a/..", "https://x/y", "a b/c", "a/b\n", "a\0/b"],
)
def test_what_is_neither_a_folder_nor_an_id(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder") as caught:
        load_model(source)
    assert str(caught.value).isprintable()


def test_paths_are_never_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        load_model(Path("lab/model"))
    Path("lab").mkdir()
    Path("lab/model").write_text("a file")
    with pytest.raises(CheckpointError, match="not a folder"):
        load_model("lab/model")


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    save_model(tiny_lm(), tmp_path)
    with pytest.raises(ArgumentError, match="Leave revision out"):
        load_model(tmp_path, revision="main")
