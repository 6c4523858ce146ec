from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.merge.base_weights import StoredWeights
from finetune.merge.layout import CHUNK_BYTES, read_layout, row_chunks
from finetune.merge.shards import open_model
from finetune.merge.streamed import StreamedModel
from finetune.model.load import model_skeleton
from finetune.model.source import resolve_model


def answers(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the streamed model and of the same model loaded whole by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = torch.randint(0, 250, (3, 10), generator=torch.Generator().manual_seed(0))
    with open_model(folder) as files, torch.no_grad():
        layout = read_layout(model_skeleton(resolve_model(str(folder))), files)
        streamed = StreamedModel(
            AutoConfig.from_pretrained(folder), StoredWeights(files, layout), layout, dtype
        )
        streamed.attach_hooks()
        ours = streamed.model(input_ids=ids).logits
        again = streamed.model(input_ids=ids).logits
        assert torch.equal(ours, again)
        for parameter in streamed.model.parameters():
            assert parameter.untyped_storage().nbytes() <= 8, "a weight stayed in memory"
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return ours, whole(input_ids=ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [True, False])
def test_a_streamed_model_is_the_loaded_model_bit_by_bit(
    tie: bool, dtype: torch.dtype, tmp_path: Path, make_tiny_model: Any, make_tiny_tokenizer: Any
) -> None:
    make_tiny_model(tie=tie).bfloat16().save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    ours, theirs = answers(tmp_path, dtype)
    assert torch.equal(ours, theirs)


def test_a_head_multiplied_in_chunks(
    tmp_path: Path, make_tiny_model: Any, make_tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.merge.streamed._CHUNKED_ELEMENTS", 1000)
    monkeypatch.setattr("finetune.merge.layout.CHUNK_BYTES", 4 * 64 * 100)
    make_tiny_model().save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    ours, theirs = answers(tmp_path, torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_configuration_that_ties_what_the_files_hold_apart(
    tmp_path: Path, make_tiny_model: Any, make_tiny_tokenizer: Any
) -> None:
    """transformers believes the files; so does the layout."""
    make_tiny_model(tie=True).save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours, theirs = answers(tmp_path, torch.float32)
    assert torch.equal(ours, theirs)


def test_parameters_without_a_tensor_are_counted(
    tmp_path: Path, make_tiny_model: Any, make_tiny_tokenizer: Any
) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"1 parameters lie in the files under other names.*model\.norm\.weight"
    ):
        answers(tmp_path, torch.float32)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 3), (3, CHUNK_BYTES)])
def test_chunks_cover_every_row_once(shape: tuple[int, int]) -> None:
    covered = [row for start, stop in row_chunks(*shape) for row in range(start, stop)]
    assert covered == list(range(shape[0]))
