from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.merge.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    PlannedTensor,
    TensorFiles,
    open_model,
    plan_shards,
    read_header,
    write_model,
)

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "b": torch.arange(10, dtype=torch.bfloat16).reshape(5, 2),
    "c": torch.tensor(3.5),
    "d": torch.tensor([True, False, True]),
    "e": torch.zeros(0, 4),
    "f": torch.arange(6, dtype=torch.int64).reshape(1, 2, 3),
}


def planned(tensors: dict[str, torch.Tensor]) -> list[PlannedTensor]:
    return [PlannedTensor(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]


def write(folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int) -> dict[str, int]:
    shards = plan_shards(planned(tensors), max_shard_bytes)
    rows = ((tensor.name, [tensors[tensor.name]]) for shard in shards for tensor in shard)
    return write_model(folder, shards, rows)


def test_what_the_library_writes_is_read_back_whole_by_rows_and_by_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    with open_model(tmp_path) as files:
        for name, value in TENSORS.items():
            assert torch.equal(files.read(name), value)
        assert torch.equal(files.read("a", 2, 4), TENSORS["a"][2:4])
        assert torch.equal(files.read("a", 4, 99), TENSORS["a"][4:])
        rows = torch.tensor([5, 0, 5])
        assert torch.equal(files.gather("a", rows), TENSORS["a"][rows])
        with pytest.raises(IndexError, match="a has 6 rows, asked for 6 to 6"):
            files.gather("a", torch.tensor([6]))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 60])
def test_what_is_written_is_read_back_by_the_library(tmp_path: Path, max_shard_bytes: int) -> None:
    write(tmp_path, TENSORS, max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], value) for name, value in TENSORS.items())
    assert (tmp_path / INDEX_FILE).is_file() == (max_shard_bytes == 60)
    assert (len(files) > 1) == (max_shard_bytes == 60)


def test_every_tensor_of_a_shard_is_aligned_to_its_type(tmp_path: Path) -> None:
    tensors = {"odd": torch.zeros(3, dtype=torch.bfloat16), "wide": torch.zeros(2, dtype=torch.float64)}
    write(tmp_path, tensors, 10**9)
    for entry in read_header(tmp_path / SINGLE_FILE):
        assert entry.offset % entry.dtype.itemsize == 0


def test_chunks_make_the_same_file_as_whole_tensors(tmp_path: Path) -> None:
    value = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    plan = planned({"w": value})
    (tmp_path / "whole").mkdir()
    (tmp_path / "chunks").mkdir()
    one = write_model(tmp_path / "whole", [plan], iter([("w", [value])]))
    two = write_model(tmp_path / "chunks", [plan], iter([("w", [value[:2], value[2:5], value[5:]])]))
    assert one == two
    files = [(tmp_path / name / SINGLE_FILE).read_bytes() for name in ("whole", "chunks")]
    assert files[0] == files[1]


def damage_cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def damage_header_length(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


def damage_header(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[9] = 0xFF
    file.write_bytes(bytes(raw))


def damage_offsets(file: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [damage_cut, damage_longer, damage_header_length, damage_header, damage_offsets, damage_empty],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object) -> None:
    file = tmp_path / SINGLE_FILE
    save_file({"a": torch.ones(2)}, file)
    damage(file)  # type: ignore[operator]
    with pytest.raises(UserError, match=f"{SINGLE_FILE} is damaged"):
        open_model(tmp_path)


def sharded(folder: Path) -> dict[str, str]:
    write(folder, {"a": torch.ones(4), "b": torch.ones(4)}, 16)
    index: dict[str, str] = json.loads((folder / INDEX_FILE).read_bytes())["weight_map"]
    return index


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path) | {"ghost": "model-00001-of-00002.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"1 tensors named but absent.*ghost"):
        open_model(tmp_path)


def test_an_index_that_names_an_absent_shard_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="lacks 1 of the 2 weight files"):
        open_model(tmp_path)


def test_two_sets_of_weights_in_one_folder_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    with pytest.raises(UserError, match="two sets of weights"):
        open_model(tmp_path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"holds no \*\.safetensors"):
        open_model(tmp_path)


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="two files hold a tensor called a"):
        TensorFiles([tmp_path / "x.safetensors", tmp_path / "y.safetensors"])
