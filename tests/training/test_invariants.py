"""The exactness suite on tiny models: every invariant holds, and each notices the mistake it is there for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.doctor.invariants import FP32_LIMIT, FP64_LIMIT, check_invariants, choose_rows, disturb
from finetune.training import invariants
from finetune.training.sft_trainer import ExactSftTrainer


@pytest.fixture
def model(make_recipe: Any, adapted_model: Any) -> Any:
    built = adapted_model(make_recipe(train__packing=False))
    disturb(built)
    return built


@pytest.fixture
def gpt2(tiny_tokenizer: Any) -> Any:
    """A model without a part that computes in fp32 whatever its weights are."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=259, n_positions=512, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config).double().eval()


def test_accumulation_in_fp32_and_in_fp64(
    make_recipe: Any, make_rows: Any, model: Any, gpt2: Any, tiny_tokenizer: Any
) -> None:
    recipe, rows = make_recipe(), make_rows(6, turns=2)
    assert invariants.accumulation_error(recipe, model, tiny_tokenizer, rows) < FP32_LIMIT
    full = make_recipe(adapter__kind="none")
    assert invariants.accumulation_error(full, gpt2, tiny_tokenizer, rows) < FP64_LIMIT


def test_four_micro_batches_of_eight_are_one_batch_of_32_to_1e_15(
    make_recipe: Any, make_rows: Any, gpt2: Any, tiny_tokenizer: Any
) -> None:
    """The planning figure: token-weighted and summed, in fp64; the largest difference of any element of the gradient."""
    rows = make_rows(32)
    one = invariants.with_layout(make_recipe(adapter__kind="none"), packing=False, micro=32)
    four = invariants.with_layout(make_recipe(adapter__kind="none"), packing=False, micro=8, accumulation=4)
    steps = []
    for recipe in (one, four):
        with invariants.Bench(recipe, gpt2, tiny_tokenizer, rows) as bench:
            steps.append(bench.step())
    assert float((steps[0].gradient - steps[1].gradient).abs().max()) <= 1e-15
    assert steps[0].loss == pytest.approx(steps[1].loss, abs=1e-14)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "document"])
def test_packing_changes_neither_the_loss_of_a_token_nor_a_gradient(
    attention: str, make_recipe: Any, make_rows: Any, model: Any, tiny_tokenizer: Any
) -> None:
    errors = invariants.packing_error(make_recipe(), model, tiny_tokenizer, make_rows(6, turns=2), attention)
    assert set(errors) == {"per-token loss", "gradient"}
    assert max(errors.values()) < FP32_LIMIT


@pytest.mark.slow
def test_packing_is_exact_under_flex_attention_where_it_runs(
    make_recipe: Any, make_rows: Any, model: Any, tiny_tokenizer: Any
) -> None:
    """Compiled on the spot. Kernels of flash-attn need a GPU, and `document` calls torch's own there."""
    rows = make_rows(4)
    try:
        errors = invariants.packing_error(make_recipe(), model, tiny_tokenizer, rows, "flex_attention")
    except Exception as error:  # no compiler, or no kernel for this processor
        pytest.skip(f"flex attention does not run here: {str(error).splitlines()[0][:100]}")
    assert max(errors.values()) < FP32_LIMIT


def test_documents_that_see_each_other_are_noticed(
    make_recipe: Any, make_rows: Any, model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ExactSftTrainer._losses

    def leaky(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        rest = {
            k: v for k, v in inputs.items() if k not in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids")
        }
        return original(self, model, rest, *args)

    monkeypatch.setattr(ExactSftTrainer, "_losses", leaky)
    monkeypatch.setattr(ExactSftTrainer, "_count", lambda *args: None)
    errors = invariants.packing_error(make_recipe(), model, tiny_tokenizer, make_rows(4), "document")
    assert errors["per-token loss"] > 1e-3


def test_validation_does_not_depend_on_batch_or_packing(
    make_recipe: Any, make_rows: Any, model: Any, tiny_tokenizer: Any
) -> None:
    assert invariants.validation_error(make_recipe(), model, tiny_tokenizer, make_rows(7)) < FP32_LIMIT


def test_no_token_is_lost_or_moved_and_a_lost_one_is_counted(
    make_recipe: Any, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, recipe = make_rows(9), make_recipe(train__pack_tokens=256)
    assert invariants.orphaned_tokens(recipe, rows) == 0
    assert invariants.orphaned_tokens(make_recipe(train__packing=False), rows) == 0
    original = invariants.training_dataset

    def losing(given: Any, settings: Any) -> Any:
        return original(given, settings).map(lambda example: {"input_ids": [7, *example["input_ids"][1:]]})

    monkeypatch.setattr(invariants, "training_dataset", losing)
    assert invariants.orphaned_tokens(recipe, rows) >= 1


def test_the_first_token_of_a_document_is_never_a_target(
    make_recipe: Any, make_rows: Any, model: Any, tiny_tokenizer: Any
) -> None:
    assert invariants.first_token_targets(make_recipe(), tiny_tokenizer, model, make_rows(5)) == 0
    # Rows of text whose very first token is labelled: the loss must still not be taken from another document.
    loose = [TokenisedRow(f"t{n}", [5 + n, 6, 7, 2], [5 + n, 6, 7, 2], 4) for n in range(3)]
    assert invariants.first_token_targets(make_recipe(), tiny_tokenizer, model, loose) == 0


def test_training_and_serving_render_the_same_tokens(tiny_tokenizer: Any) -> None:
    rows = [
        Row(
            id=f"r{n}",
            messages=({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}),
            group="g",
            source="s",
        )
        for n in range(3)
    ]
    tokenised = {row.row_id: row for row in tokenise_rows(rows, tiny_tokenizer, max_tokens=256).rows}
    assert invariants.rendering_differences(rows, tokenised, tiny_tokenizer) == []
    other = copy.deepcopy(tiny_tokenizer)
    other.chat_template = other.chat_template.replace("You are tiny.", "You are small.")
    assert invariants.rendering_differences(rows, tokenised, other) == ["r0", "r1", "r2"]


def test_a_shortened_row_and_an_answer_that_is_not_learnt_are_no_other_rendering(tiny_tokenizer: Any) -> None:
    """What was cut out of a row the model is not given either; the last answer may carry no loss."""
    long = ({"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "yes"})
    read_only = (
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "no", "train": False},
    )
    rows = [
        Row(id=name, messages=messages, group="g", source="s")
        for name, messages in (("long", long), ("read only", read_only))
    ]
    cut = tokenise_rows(rows, tiny_tokenizer, max_tokens=150, long_rows="truncate_prompt").rows
    assert [row.shortened for row in cut] == [True, False]
    tokenised = {row.row_id: row for row in cut}
    assert invariants.rendering_differences(rows, tokenised, tiny_tokenizer) == []


@pytest.mark.parametrize("adapter", [{}, {"adapter__kind": "none"}, {"adapter__kind": "dora"}], ids=str)
def test_all_of_it_on_one_model_which_is_as_it_was_afterwards(
    adapter: dict[str, Any], make_recipe: Any, make_rows: Any, adapted_model: Any, tiny_tokenizer: Any
) -> None:
    recipe = make_recipe(**adapter, train__loss={"label_smoothing": 0.1, "neftune_alpha": 5.0})
    model = adapted_model(recipe)
    disturb(model)
    ids = torch.arange(5, 25)[None]
    before = model(input_ids=ids).logits
    findings = list(check_invariants(recipe, model, tiny_tokenizer, [], make_rows(5, turns=2)))
    assert not [str(finding) for finding in findings if finding.status == "fault"]
    held = {finding.check for finding in findings if finding.status == "ok"}
    assert {"accumulation", "accumulation, fp64", "validation", "tokens", "first tokens", "rendering"} <= held
    assert {f"packing, {name}, gradient" for name in ("eager", "sdpa", "document")} <= held
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("kind", ["Gemma2", "Mamba", "Llama4Text"])
def test_all_of_it_on_models_of_other_makes(
    kind: str, make_recipe: Any, make_rows: Any, tiny_tokenizer: Any
) -> None:
    """An attention of its own, no attention at all, and a class that names a body which it does not have."""
    import transformers

    own: dict[str, dict[str, Any]] = {
        "Gemma2": {"sliding_window": 16, "head_dim": 8, "query_pre_attn_scalar": 8},
        "Mamba": {"state_size": 4},
        "Llama4Text": {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "pad_token_id": 2},
    }
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **own[kind], num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    disturb(model)
    recipe = make_recipe(adapter__kind="none", train__packing=kind != "Mamba")
    findings = list(check_invariants(recipe, model, tiny_tokenizer, [], make_rows(4, turns=2)))
    assert not [str(finding) for finding in findings if finding.status == "fault"]
    held = {finding.check for finding in findings if finding.status == "ok"}
    assert {"accumulation", "validation", "tokens", "rendering"} <= held
    if kind == "Mamba":  # which the recipe does not pack
        packed = make_recipe(adapter__kind="none")
        findings = list(check_invariants(packed, model, tiny_tokenizer, [], make_rows(4, turns=2)))
        assert "packing, eager, per-token loss" in {f.check for f in findings if f.status == "fault"}
    else:
        used = "eager" if kind == "Gemma2" else "document"
        assert f"packing, {used}, gradient" in held


def test_rows_are_chosen_from_short_to_long(make_rows: Any) -> None:
    rows = make_rows(9, turns=3)
    chosen = choose_rows(rows, 4)
    lengths = [len(row.input_ids) for row in chosen]
    assert lengths == sorted(lengths)
    assert lengths[0] == min(len(row.input_ids) for row in rows)
    assert lengths[-1] == max(len(row.input_ids) for row in rows)
    assert len(choose_rows(rows[:2], 4)) == 2
