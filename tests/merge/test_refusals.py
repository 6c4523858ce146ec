"""Everything that must not be merged: one clear message, and nothing left behind."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.merge import adapter as merging
from finetune.merge import proof as proving
from finetune.merge.adapter import merge_adapter
from finetune.model.source import resolve_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Merge, expect a UserError, and check that neither the target nor anything beside it was left."""

    def attempt(pair: Any, **options: Any) -> str:
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(UserError) as caught:
            merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out", **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert caught.value.faults[0].fix
        return str(caught.value)

    return attempt


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_bytes())
    for key, value in changes.items():
        if value is ...:
            del config[key]
        else:
            config[key] = value
    (folder / CONFIG).write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    (folder / WEIGHTS).unlink()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_layers_that_are_missing_are_counted(make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    edit_tensors(pair.adapter, lambda tensors: {k: v for k, v in tensors.items() if "layers.1" not in k})
    assert "of 8 tensors 4 missing" in refused(pair)


def test_layers_that_are_too_many_are_counted(make_pair: Any, make_tiny_model: Any, refused: Any) -> None:
    pair = make_pair(model=make_tiny_model(layers=3))
    make_tiny_model(layers=2).save_pretrained(pair.base)
    assert "4 unexpected" in refused(pair)


def test_a_renamed_prefix_inside_is_refused_with_both_counts(make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    edit_tensors(
        pair.adapter,
        lambda tensors: {
            k.replace(".model.layers", ".model.language_model.layers"): v for k, v in tensors.items()
        },
    )
    assert "8 missing" in (message := refused(pair))
    assert "8 unexpected" in message


def test_tensors_without_a_target_are_refused(make_pair: Any, refused: Any) -> None:
    pair = make_pair(target_modules=["q_proj", "k_proj"])
    edit_config(pair.adapter, target_modules=["q_proj"])
    assert "4 unexpected" in refused(pair)


def test_a_prefix_that_peft_does_not_know_is_refused(make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    edit_tensors(pair.adapter, lambda tensors: {"my." + k: v for k, v in tensors.items()})
    assert "8 of the 8 tensors do not begin with 'base_model.model.'" in refused(pair)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_half_a_pair_is_refused(part: str, make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    edit_tensors(pair.adapter, lambda tensors: {k: v for k, v in tensors.items() if part not in k})
    assert "4 missing, 0 unexpected" in refused(pair)


def test_a_dora_adapter_whose_configuration_says_lora_is_refused(make_pair: Any, refused: Any) -> None:
    pair = make_pair(use_dora=True)
    edit_config(pair.adapter, use_dora=False)
    assert "0 missing, 4 unexpected" in refused(pair)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lora_alpha": ...}, "lacks lora_alpha"),
        ({"lora_alpha": None}, "lacks lora_alpha"),
        ({"lora_alpha": 0}, "`lora_alpha` of the adapter's configuration is 0"),
        ({"r": ...}, "lacks r"),
        ({"peft_type": "LOHA"}, "type LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "belongs to a changed base"),
        ({"init_lora_weights": "olora"}, "belongs to a changed base"),
        ({"alora_invocation_tokens": [1]}, "active for some tokens only"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "parameters inside fused modules"),
    ],
)
def test_a_configuration_that_cannot_be_merged(
    changes: dict[str, Any], expected: str, make_pair: Any, refused: Any
) -> None:
    pair = make_pair()
    edit_config(pair.adapter, **changes)
    assert expected in refused(pair)


def test_the_adapter_of_a_wider_base(make_pair: Any, refused: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    pair = make_pair()
    config = LlamaConfig.from_pretrained(pair.base)
    config.intermediate_size, config.hidden_size = 256, 128
    LlamaForCausalLM(config).save_pretrained(pair.base)
    assert "4 of another shape" in refused(pair)


def test_the_adapter_of_another_architecture(make_pair: Any, refused: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    pair = make_pair()
    GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4)).save_pretrained(pair.base)
    assert "no module of the base matches" in refused(pair)


def test_an_adapter_that_notes_a_base_of_other_content(
    tmp_path: Path, make_pair: Any, make_tiny_model: Any, refused: Any
) -> None:
    """Same shapes, other weights: only the noted digest can tell."""
    from finetune.model.adapter_files import ORIGIN_FILE

    pair = make_pair()
    digest = resolve_model(str(pair.base)).digest
    (pair.adapter / ORIGIN_FILE).write_text(json.dumps({"id": "mine", "digest": digest}))
    make_tiny_model(seed=5).save_pretrained(pair.base)
    assert "was trained on mine" in refused(pair)
    merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out", other_base=True)


def test_a_bias_that_the_base_has_no_place_for(make_pair: Any, refused: Any) -> None:
    pair = make_pair(lora_bias=True)
    assert "4 adapted layers have a trained bias (lora_bias) but no bias in the base" in refused(pair)


def test_nan_in_the_adapter_is_named(make_pair: Any, refused: Any) -> None:
    pair = make_pair()

    def poison(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[min(tensors)][0, 0] = float("nan")
        return tensors

    edit_tensors(pair.adapter, poison)
    message = refused(pair)
    assert "1 of 8 adapter tensors hold NaN or infinity" in message
    assert "layers.0.self_attn.q_proj.lora_A.weight" in message


def test_infinity_in_a_base_tensor_that_is_no_target_is_named(make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    tensors = load_file(pair.base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, pair.base / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight holds NaN or infinity" in refused(pair)


def test_a_base_that_is_stored_quantized(make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    config = json.loads((pair.base / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (pair.base / "config.json").write_text(json.dumps(config))
    assert "is stored quantized (gptq)" in refused(pair)


def test_a_base_that_runs_its_own_code(make_pair: Any, refused: Any) -> None:
    assert "runs on code of its own" in refused(make_pair(), trust_remote_code="0" * 40)


class Trap:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_pickles_are_refused_and_never_run(tmp_path: Path, make_pair: Any, refused: Any) -> None:
    pair = make_pair()
    mark = tmp_path / "pickle" / "ran"
    mark.parent.mkdir()
    (pair.adapter / WEIGHTS).unlink()
    (pair.adapter / "adapter_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    assert "is a pickle file and is refused" in refused(pair)
    (pair.base / "model.safetensors").unlink()
    (pair.base / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(UserError, match="pickle"):
        resolve_model(str(pair.base))
    assert not mark.exists()


def test_safetensors_win_over_pickles_beside_them(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    mark = tmp_path / "ran"
    for folder, names in (
        (pair.adapter, ("adapter_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")),
        (pair.base, ("pytorch_model.bin",)),
    ):
        for name in names:
            (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out")
    assert not mark.exists()
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.suffix in (".bin", ".pt", ".pth")]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "notes.txt"])
def test_a_folder_that_holds_files_is_not_written_into(name: str, tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(UserError, match=r"holds (weights|files) already"):
        merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_an_empty_folder_is_used(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    (tmp_path / "out").mkdir()
    merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_disk_too_small_is_noticed_before_writing(
    make_pair: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("finetune.merge.place.shutil.disk_usage", lambda path: usage._replace(free=1000))
    assert "has 1 kB free" in refused(make_pair())


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    make_pair: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("finetune.merge.shards.os.fsync", full)
    assert "no space left" in refused(make_pair())


def test_a_merge_that_answers_otherwise_is_thrown_away(
    make_pair: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong scale on our side: the files are sound, only the proof can notice."""
    monkeypatch.setattr(
        "finetune.merge.adapter_file.lora_scaling", lambda alpha, rank, **_: 1.01 * alpha / rank
    )
    pair = make_pair()
    assert "the largest logit difference is" in refused(pair, dtype="fp32")


def test_a_bf16_merge_that_answers_otherwise_is_thrown_away(
    make_pair: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "finetune.merge.adapter_file.lora_scaling", lambda alpha, rank, **_: 1.5 * alpha / rank
    )
    assert "times the" in refused(make_pair(), dtype="bf16")


def test_a_non_target_that_changed_on_the_way_is_noticed(
    tmp_path: Path, make_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    real = merging.Merger.write

    def write_wrongly(self: Any, folder: Path, size: int) -> dict[str, int]:
        checksums = real(self, folder, size)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] += 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return checksums

    monkeypatch.setattr(merging.Merger, "write", write_wrongly)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight changed although"):
        merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_that_read_back_wrong_are_noticed(
    make_pair: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = merging.Merger.write

    def forget(self: Any, folder: Path, size: int) -> dict[str, int]:
        return {name: checksum + 1 for name, checksum in real(self, folder, size).items()}

    monkeypatch.setattr(merging.Merger, "write", forget)
    assert "reads back other bytes" in refused(make_pair())


def test_the_remains_of_a_killed_merge_are_cleared_away(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    stale = tmp_path / ".out.merging-999999999-abc"
    stale.mkdir()
    merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out")
    assert not stale.exists()


def test_the_gate_of_bf16_counts_in_multiples_of_its_noise() -> None:
    within = proving.Distance(mean_kl=2.9e-6, max_difference=0.1)
    beyond = proving.Distance(mean_kl=3.1e-6, max_difference=0.1)
    common: dict[str, Any] = {"dtype": "bf16", "noise_kl": 1e-6, "identical": 40, "n_greedy": 48}
    proving.check_gate(merged=within, **common)
    with pytest.raises(UserError, match="above 3 times"):
        proving.check_gate(merged=beyond, **common)


@pytest.mark.parametrize(
    ("difference", "identical", "expected"),
    [(1.1e-4, 48, "largest logit difference"), (9e-5, 47, "47 of 48 greedy"), (float("nan"), 48, "NaN")],
)
def test_the_gate_of_fp32(difference: float, identical: int, expected: str) -> None:
    merged = proving.Distance(mean_kl=0.0, max_difference=difference)
    with pytest.raises(UserError, match=expected):
        proving.check_gate(dtype="fp32", merged=merged, noise_kl=None, identical=identical, n_greedy=48)
