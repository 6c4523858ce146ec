"""Adapters on disk: what is written, and every way in which a file may not fit."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.model.adapter_files import (
    ADAPTER_WEIGHTS,
    ORIGIN_FILE,
    adapter_digest,
    load_adapter,
    save_adapter,
)
from finetune.model.adapters import adapter_active, attach_adapter, trainable_parameters
from finetune.model.load import load_model
from finetune.model.source import ADAPTER_CONFIG, resolve_model
from finetune.recipe.schema import AdapterSection

IDS = torch.arange(5, 25)[None]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def _base(folder: Path) -> Any:
    return load_model(resolve_model(str(folder)), dtype="fp32")


def _trained(base: Any, kind: str = "lora", targets: Any = ("q_proj", "k_proj")) -> Any:
    section = AdapterSection(kind=kind, rank=4, alpha=8.0, target_modules=list(targets))
    model = attach_adapter(base, section, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def adapter(tiny_model_folder: Path, tmp_path: Path) -> Path:
    save_adapter(_trained(_base(tiny_model_folder)), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_saved_adapter_loads_bit_by_bit_here_and_in_plain_peft(
    tiny_model_folder: Path, tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel

    model = _trained(_base(tiny_model_folder), kind)
    expected = model(IDS).logits
    save_adapter(model, tmp_path / "adapter")
    ours = load_adapter(_base(tiny_model_folder), tmp_path / "adapter")
    assert torch.equal(ours(IDS).logits, expected)
    assert not ours.training
    assert trainable_parameters(ours) == {}
    plain = PeftModel.from_pretrained(_base(tiny_model_folder), str(tmp_path / "adapter"))
    assert torch.equal(plain(IDS).logits, expected)
    assert adapter_active(ours, {"input_ids": IDS})


def test_training_can_be_continued(tiny_model_folder: Path, adapter: Path) -> None:
    model = load_adapter(_base(tiny_model_folder), adapter, trainable=True)
    parameters = trainable_parameters(model)
    assert len(parameters) == 8
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    def edit(folder: Path) -> None:
        save_file(change(load_file(folder / ADAPTER_WEIGHTS)), folder / ADAPTER_WEIGHTS)

    return edit


def _edit_config(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        config = {key: value for key, value in (config | changes).items() if value is not None}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config))

    return edit


def _drop_layer_1(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if "layers.1." not in key}


def _rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key.replace("model.layers", "model.language_model.layers"): tensor for key, tensor in tensors.items()
    }


def _shorten(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key: tensor[:, :32].contiguous() if "lora_A" in key else tensor for key, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_edit_tensors(_drop_layer_1), r"of 8 tensors 4 missing"),
        (_edit_tensors(_rename), r"of 8 tensors 8 missing .*, 8 unexpected"),
        (_edit_config(target_modules=["q_proj"]), r"of 4 tensors 4 unexpected"),
        (_edit_config(target_modules=["q_proj", "k_proj", "v_proj"]), r"of 12 tensors 4 missing"),
        (_edit_tensors(_shorten), r"of 8 tensors 4 of another shape"),
        (_edit_config(r=2), r"of 8 tensors 8 of another shape"),
        (_edit_config(use_dora=True), r"of 12 tensors 4 missing"),
        (_edit_config(target_modules=["c_attn"]), r"no module of the base matches"),
        (_edit_config(lora_alpha=None), r"lacks lora_alpha"),
        (_edit_config(r=None, lora_alpha=None), r"lacks lora_alpha, r"),
        (_edit_config(peft_type="ADALORA"), r"type ADALORA"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), r"not valid JSON"),
        (lambda folder: (folder / ADAPTER_CONFIG).unlink(), r"not an adapter"),
        (lambda folder: (folder / ORIGIN_FILE).write_text("[1]"), r"base_model.json holds no keys"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), r"holds no adapter_model.safetensors"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_base_is_untouched(
    tiny_model_folder: Path, adapter: Path, edit: Callable[[Path], None], said: str
) -> None:
    edit(adapter)
    base = _base(tiny_model_folder)
    before = base(IDS).logits
    names = [name for name, _ in base.named_parameters()]
    with pytest.raises(UserError, match=said):
        load_adapter(base, adapter)
    assert [name for name, _ in base.named_parameters()] == names
    assert torch.equal(base(IDS).logits, before)
    assert all(parameter.requires_grad for parameter in base.parameters())
    attach_adapter(base, AdapterSection(), seed=0)


@pytest.mark.parametrize(("layers", "said"), [(1, "4 unexpected"), (3, "4 missing")])
def test_a_base_with_another_number_of_layers(tiny_model: Any, adapter: Path, layers: int, said: str) -> None:
    tiny_model.config.num_hidden_layers = layers
    tiny_model.config.layer_types = None
    with pytest.raises(UserError, match=said):
        load_adapter(type(tiny_model)(tiny_model.config), adapter)


def test_a_base_of_the_same_shape_with_other_weights(
    tiny_model: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    source = resolve_model(str(tiny_model_folder))
    save_adapter(_trained(_base(tiny_model_folder)), tmp_path / "adapter", source=source)
    load_adapter(_base(tiny_model_folder), tmp_path / "adapter", source=source)
    with torch.no_grad():
        tiny_model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    tiny_model.save_pretrained(tiny_model_folder)
    other = resolve_model(str(tiny_model_folder))
    with pytest.raises(UserError, match="was trained on"):
        load_adapter(_base(tiny_model_folder), tmp_path / "adapter", source=other)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("beside", [True, False])
def test_pickle_adapters_are_never_read(
    tiny_model_folder: Path, adapter: Path, tmp_path: Path, beside: bool
) -> None:
    marker = tmp_path / "ran"
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(_Bomb(marker)))
    if beside:
        load_adapter(_base(tiny_model_folder), adapter)  # safetensors are preferred
    else:
        (adapter / ADAPTER_WEIGHTS).unlink()
        with pytest.raises(UserError, match="is refused"):
            load_adapter(_base(tiny_model_folder), adapter)
    assert not marker.exists()


def _grown(base: Any) -> Any:
    """Four new rows with known values, as after adding tokens."""
    base.resize_token_embeddings(263, mean_resizing=False)
    with torch.no_grad():
        base.get_input_embeddings().weight[259:] = torch.randn(
            4, 64, generator=torch.Generator().manual_seed(9)
        )
    return base


@pytest.mark.parametrize("resized_first", [True, False])
def test_new_tokens_travel_with_the_adapter(
    tiny_model_folder: Path, tmp_path: Path, tiny_tokenizer: Any, resized_first: bool
) -> None:
    model = _trained(_grown(_base(tiny_model_folder)), targets=["q_proj"])
    new_ids = torch.tensor([[259, 260, 261, 262]])
    expected = model(new_ids).logits
    tiny_tokenizer.add_tokens(["<a>", "<b>", "<c>", "<d>"])
    source = resolve_model(str(tiny_model_folder))
    save_adapter(model, tmp_path / "adapter", tokenizer=tiny_tokenizer, source=source)
    base = _base(tiny_model_folder)
    if resized_first:
        base.resize_token_embeddings(263, mean_resizing=False)
    loaded = load_adapter(base, tmp_path / "adapter", source=source)
    assert torch.equal(loaded(new_ids).logits, expected)
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "adapter" / ORIGIN_FILE).read_text())["embedding_rows"] == 263


def test_new_tokens_of_a_base_built_in_memory(tiny_model: Any, tmp_path: Path) -> None:
    import copy

    unresized = copy.deepcopy(tiny_model)
    model = _trained(_grown(tiny_model), targets=["q_proj"])
    new_ids = torch.tensor([[259, 260, 261, 262]])
    expected = model(new_ids).logits
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(load_adapter(unresized, tmp_path / "adapter")(new_ids).logits, expected)


def test_an_adapter_of_an_unresized_base_holds_no_embedding(adapter: Path) -> None:
    assert all("lora_" in key for key in load_file(adapter / ADAPTER_WEIGHTS))


def test_an_existing_adapter_is_replaced_whole(tiny_model_folder: Path, adapter: Path) -> None:
    (adapter / "leftover.txt").write_text("old")
    first = adapter_digest(adapter)
    save_adapter(_trained(_base(tiny_model_folder), targets=["v_proj"]), adapter)
    assert not (adapter / "leftover.txt").exists()
    assert adapter_digest(adapter) != first
    assert [path.name for path in adapter.parent.iterdir() if path.name.startswith(".adapter")] == []


def test_a_failed_save_leaves_the_old_adapter(
    tiny_model_folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    first = adapter_digest(adapter)
    model = _trained(_base(tiny_model_folder), targets=["v_proj"])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(PeftModel, "save_pretrained", full)
    with pytest.raises(UserError, match="no space left"):
        save_adapter(model, adapter)
    assert adapter_digest(adapter) == first
    assert [path.name for path in adapter.parent.iterdir() if path.name.startswith(".adapter")] == []


def test_the_digest_counts_what_is_computed_and_not_where(adapter: Path) -> None:
    first = adapter_digest(adapter)
    _edit_config(base_model_name_or_path="/elsewhere", inference_mode=False)(adapter)
    assert adapter_digest(adapter) == first
    _edit_config(lora_alpha=9)(adapter)
    assert adapter_digest(adapter) != first


def test_the_configuration_is_the_same_in_every_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from finetune.model.source import resolve_model\n"
        "from finetune.model.load import load_model\n"
        "from finetune.model.adapters import attach_adapter\n"
        "from finetune.model.adapter_files import save_adapter\n"
        "from finetune.recipe.schema import AdapterSection\n"
        "base = load_model(resolve_model(sys.argv[1]), dtype='fp32')\n"
        "save_adapter(attach_adapter(base, AdapterSection(rank=2), seed=1), Path(sys.argv[2]))\n"
    )
    contents = []
    for hash_seed in ("1", "2"):
        out = tmp_path / f"adapter-{hash_seed}"
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-c", program, str(tiny_model_folder), str(out)],
            check=True,
            env=environment,
            capture_output=True,
        )
        contents.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert contents[0].keys() == contents[1].keys()
    assert "README.md" not in contents[0], "a form that nobody has filled in"
    for name in contents[0]:
        assert contents[0][name] == contents[1][name], name
