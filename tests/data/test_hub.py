"""The hub's real client, against a server on this machine that speaks enough of its protocol."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

REVISION = "0" * 40
CARD = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train-*}
  - {split: validation, path: en/validation-*}
---
"""
ARTICLE = "\n_START_ARTICLE_\nBöblingen\n_START_PARAGRAPH_\nIt was founded in 1253._NEWLINE_It has a lake."


def rows(texts: list[str]) -> bytes:
    """Parquet in Wiki-40B's schema."""
    table = {"wikidata_id": ["Q1"] * len(texts), "text": texts, "version_id": ["1"] * len(texts)}
    parquet.write_table(pa.table(table), file := io.BytesIO())
    return file.getvalue()


REPOSITORIES = {
    "google/wiki40b": {
        "README.md": CARD.encode(),
        "en/train-0.parquet": rows([ARTICLE] * 40),
        "en/validation-0.parquet": rows([ARTICLE] * 20),
    },
    "owner/coded": {"README.md": b"", "coded.py": b"import datasets"},
}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api").removeprefix("/datasets/")
        name, files = next(((n, f) for n, f in REPOSITORIES.items() if path.startswith(n)), ("", None))
        wanted = path.removeprefix(name).replace("main", REVISION).partition(REVISION)[2].strip("/")
        headers, content = {"X-Repo-Commit": REVISION}, None
        if files is None:
            headers["X-Error-Code"] = "RepoNotFound"
        elif "/resolve/" in path:
            content = files.get(wanted)
            headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'} if content is not None else {}
            headers |= {"X-Error-Code": "EntryNotFound"} if content is None else {}
        elif "/tree/" in path:
            names = [file for file in files if file.startswith(wanted) and (wanted or "/" not in file)]
            found = [{"type": "file", "path": file, "size": len(files[file]), "oid": file} for file in names]
            folders = {file.partition("/")[0] for file in files if "/" in file and not wanted}
            found += [{"type": "directory", "path": folder, "oid": folder} for folder in folders]
            content = json.dumps(found).encode()
        else:
            siblings = [{"rfilename": file} for file in files]
            content = json.dumps({"id": name, "sha": REVISION, "siblings": siblings}).encode()
        self.send_response(404 if content is None else 200)
        for key, value in {**headers, "Content-Length": str(len(content or b""))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        pass


SCRIPT = """
import sys
from lingpt.common.errors import UserError
from lingpt.data import DataConfig, prepare
for source in sys.argv[2:]:
    try:
        dataset = prepare(DataConfig(source, sys.argv[1], 16))
        begins = dataset.tokenizer.decode(dataset.train[0])
        print(dataset.train.stream_length, dataset.val.stream_length, begins)
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_rows_of_the_hub_and_its_errors(tmp_path: Path, tokenizer, tokenizer_path):
    """In a process of its own, as the hub's address is read at import. Wiki-40B by its name is cleaned, as a
    data set it is rows like any other; its config must be named. What the hub does not have, and what needs
    code, is one line."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "LINGPT_CACHE": str(tmp_path / "cache"),
    }
    names = ["en", "en:validation", "en:nosuch", "fr"]
    sources = ["wiki40b", *(f"hf:google/wiki40b:{name}" for name in names), "hf:owner/none", "hf:owner/coded"]
    command = [sys.executable, "-c", SCRIPT, tokenizer_path, *sources]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    server.shutdown()
    cleaned = "Böblingen\n\nIt was founded in 1253.\nIt has a lake."
    lengths = [len(tokenizer.encode(text)) + 1 for text in (cleaned, ARTICLE)]
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert out.startswith(f"{40 * lengths[0]} {20 * lengths[0]} Böblingen\n\n")
    assert f"\n{40 * lengths[1]} {20 * lengths[1]} \n_START_ARTICLE_" in out
    for line in (
        "google/wiki40b:en:nosuch has no split 'nosuch': name one, as hf:owner/name:config:split (of train",
        "the data set google/wiki40b has other configs: give one as hf:google/wiki40b:<config> (of ['en'])",
        "the data set owner/none is neither a path nor on the hub: check the name",
    ):
        assert line in out
    assert "the data set owner/coded needs code of its own, which is not run: take a copy in Parquet" in out
