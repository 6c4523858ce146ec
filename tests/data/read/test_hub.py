"""Datasets of the hub: which files are a split, and fetching them once from a server that stands in for the hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.data.read import iter_rows, source_files
from finetune.data.read.hub_layout import split_files
from finetune.data.rows import Row
from finetune.data.spec_source import HubSource
from finetune.errors import UserError

CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: [data/test.jsonl, "extra/**/*.jsonl"]
- config_name: other
  data_dir: more
  data_files: "*.csv"
---
# A dataset
"""
NAMES = [
    "README.md",
    "data/train-00001-of-00002.jsonl",
    "data/train-00000-of-00002.jsonl",
    "data/test.jsonl",
    "extra/a/b.jsonl",
    "extra/c.jsonl",
    "more/x.csv",
    "more/deep/y.csv",
]


def split(names: list[str], card: str = "", config: str | None = None, wanted: str = "train") -> list[str]:
    return split_files(names, card, config, wanted, "source.id")


def test_the_card_says_which_files_are_a_split() -> None:
    assert split(NAMES, CARD) == ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
    assert split(NAMES, CARD, wanted="test") == ["data/test.jsonl", "extra/a/b.jsonl", "extra/c.jsonl"]
    assert split(NAMES, CARD, "other") == ["more/x.csv"]
    with pytest.raises(UserError, match=r"no configuration 'othr'(?s:.*)did you mean 'other'"):
        split(NAMES, CARD, "othr")
    with pytest.raises(UserError, match=r"no split 'tset'(?s:.*)did you mean 'test'"):
        split(NAMES, CARD, wanted="tset")
    with pytest.raises(UserError, match=r"2 configurations(?s:.*)source.name to one of en, other"):
        split(NAMES, CARD.replace("config_name: default", "config_name: en"))
    with pytest.raises(UserError, match="no file of the dataset is of the split 'test'"):
        split(NAMES[:3], CARD, wanted="test")


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (["train.parquet", "test.parquet", "README.md"], "train", ["train.parquet"]),
        (["data/train-0.parquet", "data/dev-0.parquet"], "validation", ["data/dev-0.parquet"]),
        (["en/train/0.jsonl", "en/valid/0.jsonl"], "validation", ["en/valid/0.jsonl"]),
        (["my-training-set.csv"], "train", ["my-training-set.csv"]),
        (
            ["a.jsonl", "b.jsonl", "notes.md", ".x.jsonl", "dataset_infos.json"],
            "train",
            ["a.jsonl", "b.jsonl"],
        ),
        (["constraints.csv", "latest.csv"], "train", ["constraints.csv", "latest.csv"]),
        (
            ["train-0.parquet", "train-1.parquet", "train.csv"],
            "train",
            ["train-0.parquet", "train-1.parquet"],
        ),
    ],
)
def test_without_a_card_the_names_say_it(names: list[str], wanted: str, expected: list[str]) -> None:
    assert split(names, wanted=wanted) == expected
    assert split(names, "---\nbroken: [\n---\n", wanted=wanted) == expected


def test_a_configuration_is_a_folder_where_no_card_says_otherwise() -> None:
    assert split(["en/train.jsonl", "de/train.jsonl"], config="de") == ["de/train.jsonl"]
    with pytest.raises(UserError, match="no files of rows for the configuration 'fr'"):
        split(["en/train.jsonl"], config="fr")


def test_a_dataset_made_by_a_script_is_named() -> None:
    with pytest.raises(UserError, match=r"made by a script(?s:.*)refs/convert/parquet|no files of rows"):
        split(["README.md", "mine.py"])


def test_a_copy_in_a_folder_is_read_like_the_dataset(tmp_path: Path) -> None:
    for name in NAMES:
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CARD if name == "README.md" else json.dumps({"text": name}) + "\n")
    source = HubSource(kind="hub", id="copy", revision="v1", split="test")
    files = source_files(source, tmp_path)
    rows = [row for file in files for row in iter_rows(file, source)]
    assert [row.text for row in rows if isinstance(row, Row)] == [
        "data/test.jsonl",
        "extra/a/b.jsonl",
        "extra/c.jsonl",
    ]
    assert rows[0].source == "copy/data/test.jsonl:1"


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": b"# no front matter\n",
    "data/train.jsonl": b'{"prompt": "q", "completion": "2024-01-05"}\n{"prompt": "q2", "completion": "007"}\n',
    "data/test.jsonl": b'{"prompt": "t", "completion": "NA"}\n',
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as fetching one dataset needs."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        type(self).asked.append(path)
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if path in (f"/api/datasets/owner/set/revision/{revision}" for revision in (COMMIT, "v1")):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "owner/set", "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
            headers = {"Content-Type": "application/json"}
        elif path.startswith(f"/api/datasets/owner/set/tree/{COMMIT}"):
            body = json.dumps(
                [
                    {"type": "file", "path": name, "size": len(raw), "oid": "0" * 40}
                    for name, raw in FILES.items()
                ]
            ).encode()
            headers = {"Content-Type": "application/json"}
        elif name in FILES:
            body = FILES[name]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            body, headers = b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"}
        self.send_response(200 if "X-Error-Code" not in headers else 404)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


READ = """
import sys
from pathlib import Path
from finetune.data.read import iter_rows, source_files
from finetune.data.spec_source import HubSource
from finetune.errors import UserError
source = HubSource(kind="hub", id=sys.argv[1], revision=sys.argv[2])
try:
    for file in source_files(source, Path()):
        for row in iter_rows(file, source):
            print(row.source, row.answer)
except UserError as error:
    print(error)
"""


def read(endpoint: str, cache: Path, *arguments: str) -> list[str]:
    """The rows that a process of its own reads from the hub at `endpoint`."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache / "hf"),
        "FINETUNE_CACHE": str(cache / "own"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_dataset_is_fetched_once_and_read_as_text(hub: str, tmp_path: Path) -> None:
    expected = [
        f"owner/set@{COMMIT[:12]}/data/train.jsonl:1 2024-01-05",
        f"owner/set@{COMMIT[:12]}/data/train.jsonl:2 007",
    ]
    assert read(hub, tmp_path, "owner/set", COMMIT) == expected
    assert not any("test.jsonl" in path for path in Hub.asked)
    n_asked = len(Hub.asked)
    assert read(hub, tmp_path, "owner/set", COMMIT) == expected
    assert not any("resolve" in path for path in Hub.asked[n_asked:])
    nowhere = "http://127.0.0.1:9"
    assert read(nowhere, tmp_path, "owner/set", COMMIT) == expected


def test_what_the_hub_does_not_have_is_a_user_error(hub: str, tmp_path: Path) -> None:
    said = "\n".join(read(hub, tmp_path, "owner/none", "v1"))
    assert "the dataset owner/none at revision v1 cannot be fetched" in said
    assert "source.revision" in said
    said = "\n".join(read("http://127.0.0.1:9", tmp_path, "owner/set", "v1"))
    assert "name its folder as source.id" in said
