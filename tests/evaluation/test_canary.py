"""The tuned model is proven not to be its base, and the base not to carry the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.evaluation.canary import adapter_sha256, canary_differs, canary_logits
from finetune.evaluation.items import Item
from finetune.evaluation.records import read_records, read_summary
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.suite import Suite
from finetune.model.adapters import base_only

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def _tuned(model: Any, *, trained: bool = True) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if trained and "lora_B" in name:
                parameter.normal_(0, 0.3)
    return tuned


def test_wrapping_in_place_leaves_the_base_reachable_and_exact(lively_model: Any) -> None:
    before = canary_logits(lively_model, PROMPTS)
    tuned = _tuned(lively_model)
    assert not torch.equal(
        canary_logits(lively_model, PROMPTS), before
    )  # the kept object carries the adapter
    with base_only(tuned) as base:
        assert torch.equal(canary_logits(base, PROMPTS), before)
    assert canary_differs(tuned, PROMPTS) > 1e-3
    assert canary_differs(tuned, PROMPTS, base_logits=before) == canary_differs(tuned, PROMPTS)


def test_an_adapter_that_changes_nothing_is_refused(lively_model: Any) -> None:
    untrained = _tuned(lively_model, trained=False)
    with pytest.raises(UserError, match="answers like its base"):
        canary_differs(untrained, PROMPTS)


def test_a_model_without_adapter_needs_the_bases_logits(lively_model: Any) -> None:
    with pytest.raises(UserError, match="carries no adapter"):
        canary_differs(lively_model, PROMPTS)
    base = canary_logits(lively_model, PROMPTS)
    with pytest.raises(UserError, match="answers like its base"):
        canary_differs(lively_model, PROMPTS, base_logits=base)
    with torch.no_grad():
        lively_model.lm_head.weight.mul_(1.1)
    assert canary_differs(lively_model, PROMPTS, base_logits=base) > 1e-3


def test_not_a_number_is_no_proof(lively_model: Any) -> None:
    base = canary_logits(lively_model, PROMPTS)
    with torch.no_grad():
        lively_model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError):
        canary_differs(lively_model, PROMPTS, base_logits=base)


def test_a_finished_run_is_evaluated_with_its_saved_adapter(
    lively_model: Any, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path
) -> None:
    """Evaluate again from the folder alone: the saved adapter's logits, not the base's, and its hash in the summary."""
    from peft import PeftModel

    base = canary_logits(lively_model, PROMPTS)
    tuned = _tuned(lively_model)
    trained = canary_logits(tuned, PROMPTS)
    tuned.save_pretrained(tmp_path / "adapter")
    plain = tuned.unload()
    assert torch.equal(canary_logits(plain, PROMPTS), base)

    reloaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert torch.equal(canary_logits(reloaded, PROMPTS), trained)
    assert canary_differs(reloaded, PROMPTS) > 1e-3
    sha256 = adapter_sha256(tmp_path / "adapter")
    assert sha256 == digest_file(tmp_path / "adapter" / "adapter_model.safetensors")
    options: dict[str, Any] = {"batch_size": 4, "out_folder": tmp_path / "eval"}
    evaluate_arm(
        reloaded,
        tiny_tokenizer,
        suite,
        items,
        arm="tuned",
        key=f"base+{sha256}",
        adapter_sha256=sha256,
        **options,
    )
    assert read_summary(tmp_path / "eval", "tuned").adapter_sha256 == sha256
    with base_only(reloaded) as untuned:
        evaluate_arm(untuned, tiny_tokenizer, suite, items, arm="zero_shot", key="base", **options)
    texts = [[r["output"] for r in read_records(tmp_path / "eval", arm)] for arm in ("tuned", "zero_shot")]
    assert texts[0] != texts[1]


def test_a_folder_without_adapter_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter in"):
        adapter_sha256(tmp_path)
