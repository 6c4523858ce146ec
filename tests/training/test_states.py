"""States come back equal, and nothing but data is ever written."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import UserError
from finetune.training.states import load_state, save_state

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(NESTED)
def test_plain_data_comes_back_with_its_types(tmp_path_factory: Any, state: Any) -> None:
    path = tmp_path_factory.mktemp("state") / "state"
    save_state(path, state)
    assert repr(load_state(path)) == repr(state)


def test_tensors_keep_every_bit_and_their_type(tmp_path: Path) -> None:
    shared = torch.arange(256, dtype=torch.float32)
    state = {
        "state": {
            0: {
                "step": torch.tensor(3.0),
                "a": torch.randn(3, 4).bfloat16(),
                "codes": torch.arange(9, dtype=torch.uint8),
            },
            1: {
                "a": shared,
                "b": shared,
                "nan": torch.tensor([float("nan"), -0.0]),
                "list": [torch.ones(2), []],
            },
        },
        "param_groups": [{"params": [0, 1], "betas": (0.9, 0.999), "lr": 0.1 + 0.2, "fused": True}],
    }
    save_state(tmp_path / "optimizer", state)
    found = load_state(tmp_path / "optimizer")
    assert found["param_groups"] == state["param_groups"]
    for index, tensors in state["state"].items():
        for name, value in tensors.items():
            got = found["state"][index][name]
            if isinstance(value, list):
                assert torch.equal(got[0], value[0]) and got[1] == []
            else:
                assert got.dtype == value.dtype
                assert torch.equal(
                    got.view(torch.uint8) if got.dim() else got,
                    value.view(torch.uint8) if value.dim() else value,
                )


def test_a_matrix_keeps_its_order_in_memory(tmp_path: Path) -> None:
    matrices = [
        torch.randn(3, 4).T,
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(4, 4)[:, :2],
        torch.randn(5),
    ]
    save_state(tmp_path / "state", matrices)
    for value, found in zip(matrices, load_state(tmp_path / "state"), strict=True):
        assert torch.equal(value, found)
        dense = value.numel() == value.untyped_storage().nbytes() // 4
        assert found.stride() == (value.stride() if dense else value.contiguous().stride())


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    generator = np.random.RandomState(5)
    dice = random.Random(5)
    generator.normal(), dice.random()
    save_state(
        tmp_path / "rng",
        {"numpy": generator.get_state(), "python": dice.getstate(), "cpu": torch.get_rng_state()},
    )
    expected = generator.normal(size=3), dice.random()
    found = load_state(tmp_path / "rng")
    generator.set_state(found["numpy"])
    dice.setstate(found["python"])
    torch.set_rng_state(found["cpu"])
    assert (generator.normal(size=3) == expected[0]).all() and dice.random() == expected[1]


def test_an_object_is_no_state(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="neither a tensor nor plain data"):
        save_state(tmp_path / "state", {"hook": print})


@pytest.mark.parametrize("content", [b"", b"{", pickle.dumps({"a": 1}), b'{"\\u0000tensor": ["000000", []]}'])
def test_a_damaged_state_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        load_state(tmp_path / "state")


def test_views_of_one_tensor_and_tensors_named_twice_come_back_each_as_they_were(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    state = {"all": table, "again": table, "row": table[1], "turned": table.T, "tail": table[2:]}
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert loaded["turned"].stride() == table.T.stride()


def test_a_state_is_written_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda self, *a, **k: copies.append(self.numel()) or clone(self, *a, **k)
    )
    moments = [torch.randn(100) for _ in range(3)]
    save_state(tmp_path / "state", {"moments": moments, "book": moments[0][:10]})
    assert copies == [10]
