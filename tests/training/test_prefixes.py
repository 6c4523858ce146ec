"""Packs that compute common beginnings once: the same losses, gradients and weights as packs that repeat them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.data.prefixes import shared_beginnings
from finetune.data.row_tokens import IGNORED, TokenisedRow
from finetune.model.attention import register_document_attention
from finetune.telemetry.events import read_events
from finetune.training import invariants
from finetune.training.bench import BatchProbe
from finetune.training.prefixes import PrefixCollator, prefixes_can_be_shared

SYSTEMS = [list(range(3, 3 + 24)), list(range(60, 60 + 12))]


def _rows(n: int = 9, *, weights: bool = False) -> list[TokenisedRow]:
    """Rows of two system prompts, and every fifth of none."""
    drawn = torch.Generator().manual_seed(5)
    rows = []
    for number in range(n):
        system = [] if number % 5 == 4 else SYSTEMS[number % 2]
        own = torch.randint(3, 250, (6 + number % 4,), generator=drawn).tolist()
        answer = torch.randint(3, 250, (3 + number % 3,), generator=drawn).tolist()
        ids = [*system, *own, *answer]
        labels = [IGNORED] * (len(system) + len(own)) + answer
        weight = [0.0] * (len(system) + len(own)) + [0.5 + number % 2] * len(answer)
        rows.append(
            TokenisedRow(
                f"r{number}", ids, labels, len(answer), weight if weights else None, f"s{number % 2}"
            )
        )
    return rows


@pytest.fixture
def model(make_recipe: Any, adapted_model: Any) -> Any:
    built = adapted_model(make_recipe())
    for name, parameter in built.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return built


def _step(recipe: Any, model: Any, tokenizer: Any, rows: Any) -> tuple[Any, torch.Tensor, float, int]:
    with invariants.Bench(recipe, model, tokenizer, rows) as bench:
        step = bench.step()
        repeated = bench.trainer.tally.n_repeated
        return step, bench.target_losses(), bench.trainer.evaluate()["eval_loss"], repeated


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_same_losses_and_gradients(
    micro: int, weights: bool, dtype: torch.dtype, make_recipe: Any, model: Any, tiny_tokenizer: Any
) -> None:
    model.to(dtype)
    rows, limit = _rows(weights=weights), 1e-5
    found = {}
    for share in (True, False):
        recipe = make_recipe(
            train__share_prefixes=share, train__pack_tokens=160, train__micro_batch_size=micro
        )
        found[share] = _step(recipe, model, tiny_tokenizer, rows)
    (step, losses, validation, repeated), (plain, expected, apart, none) = found[True], found[False]
    assert (repeated > 50, none) == (True, 0)
    assert step.distance(plain) < limit
    assert float((losses - expected).abs().max()) < limit
    assert abs(validation - apart) < limit


def test_the_batch_by_hand(tiny_tokenizer: Any) -> None:
    system = SYSTEMS[0][:8]
    pack = {
        "input_ids": [*system, 50, 51, 52, 7, 8, *system, 53, 54, 55],
        "labels": [*[-100] * 9, 51, 52, -100, 8, *[-100] * 9, 54, 55],
        "seq_lengths": [11, 2, 11],
        "rows": [4, 5, 6],
        "weights": [*[0.0] * 9, 1.0, 1.0, 0.0, 1.0, *[0.0] * 9, 2.0, 2.0],
    }
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from finetune.training.turn_weights import WeightedCollator

    collate = WeightedCollator(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    batch = PrefixCollator(collate)([pack, pack])
    one = [*system, 50, 51, 52, 7, 8, 53, 54, 55]
    assert batch["input_ids"].tolist() == [one * 2]
    assert batch["position_ids"].tolist() == [[*range(11), 0, 1, 8, 9, 10] * 2]
    assert batch["labels"].tolist() == [[*[-100] * 9, 51, 52, -100, 8, -100, 54, 55] * 2]
    assert batch["cu_seq_lens_q"].tolist() == [0, 11, 13, 16, 27, 29, 32]
    assert batch["branches"].tolist() == [
        [0, 11, 0, 0], [11, 13, 11, 11], [13, 16, 0, 8],
        [16, 27, 16, 16], [27, 29, 27, 27], [29, 32, 16, 24],
    ]  # fmt: skip
    assert (batch["repeated_tokens"], batch["rows"]) == (16, [4, 5, 6, 4, 5, 6])
    assert batch["target_weights"].tolist() == [[*[0.0] * 9, 1.0, 1.0, 0.0, 1.0, 0.0, 2.0, 2.0] * 2]
    alone = {**pack, "input_ids": list(range(200, 224))}
    assert "branches" not in PrefixCollator(collate)([alone])


def test_a_run_ends_in_the_same_weights_and_says_what_it_shared(train: Any, make_recipe: Any) -> None:
    ends = {}
    for share in (True, False):
        recipe = make_recipe(train__share_prefixes=share, train__epochs=2, train__pack_tokens=96)
        _, folder, model = train(recipe, name=f"share-{share}", rows=_rows(12), validation=_rows(4))
        events = read_events(folder / "events.jsonl")
        steps = [event for event in events if event["event"] == "step"]
        weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        ends[share] = (weights, [step["loss"] for step in steps], [step["tokens"] for step in steps])
    assert torch.allclose(ends[True][0], ends[False][0], atol=1e-4)
    assert ends[True][1] == pytest.approx(ends[False][1], abs=1e-4)
    assert ends[True][2] == ends[False][2]  # tokens are the rows' own


def test_where_rows_compute_their_own_beginning(
    make_recipe: Any, adapted_model: Any, model: Any, make_tiny_model: Any
) -> None:
    rows = _rows()
    assert prefixes_can_be_shared(model, make_recipe(), rows)
    for settings in (
        {"train__share_prefixes": False},
        {"train__packing": False},
        {"model__attention": "sdpa"},
        {"adapter__dropout": 0.1},
        {"train__model_dropout": 0.1},
        {"train__loss": {"neftune_alpha": 5.0}},
    ):
        assert not prefixes_can_be_shared(model, make_recipe(**settings), rows), settings
    assert not prefixes_can_be_shared(model, make_recipe(), [])
    model.set_attn_implementation("sdpa")
    assert not prefixes_can_be_shared(model, make_recipe(), rows)


def test_operations_are_counted_of_what_is_computed(
    make_recipe: Any, model: Any, tiny_tokenizer: Any
) -> None:
    rows = _rows()
    with invariants.Bench(make_recipe(train__pack_tokens=400), model, tiny_tokenizer, rows) as bench:
        bench.step()
        tally = bench.trainer.tally
    shared = shared_beginnings([(row.input_ids, row.labels) for row in rows])
    own = [len(row.input_ids) - length for row, (_, length) in zip(rows, shared, strict=True)]
    assert tally.n_tokens == sum(len(row.input_ids) for row in rows)
    assert tally.n_tokens - tally.n_repeated == sum(own)
    assert tally.sum_squared_lengths == sum(
        n * (n + 2 * length) for n, (_, length) in zip(own, shared, strict=True)
    )


def test_the_longest_batch_is_the_one_that_computes_most(
    make_recipe: Any, model: Any, tiny_tokenizer: Any
) -> None:
    """Three rows of one system prompt, and a row that is shorter than all of them but has nothing to share."""
    system, draw = list(range(3, 83)), torch.Generator().manual_seed(0)
    alike = [[*system, *torch.randint(3, 250, (10,), generator=draw).tolist()] for _ in range(3)]
    alone = torch.randint(3, 250, (250,), generator=draw).tolist()
    rows = [
        TokenisedRow(str(n), ids, [IGNORED] * 85 + ids[85:], len(ids) - 85)
        for n, ids in enumerate([*alike, alone])
    ]
    recipe = make_recipe(train__pack_tokens=270)
    with BatchProbe(recipe, model, tiny_tokenizer, rows) as probe:
        assert [probe.run(recipe, number) for number in range(2)] == [250, 270]


def test_the_doctor_notices_rows_that_go_on_from_a_wrong_place(
    make_recipe: Any, model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, right = _rows(6), PrefixCollator.__call__

    def check() -> float:
        found = invariants.packing_error(make_recipe(), model, tiny_tokenizer, rows, "document")
        return max(found.values())

    def wrong(self: Any, examples: Any) -> Any:
        batch = right(self, examples)
        for start, stop, *prefix in batch["branches"].tolist():
            batch["position_ids"][0, start:stop] += 5 * (prefix[0] < prefix[1])
        return batch

    assert check() < 1e-5
    monkeypatch.setattr(PrefixCollator, "__call__", wrong)
    assert check() > 1e-3


def test_models_that_cannot_are_noticed(make_recipe: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

    register_document_attention()
    size: dict[str, Any] = {"vocab_size": 259, "attn_implementation": "document"}
    window = MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8, **size,
    )  # fmt: skip
    assert not prefixes_can_be_shared(MistralForCausalLM(window), make_recipe(), _rows())
    drops = GPT2Config(n_embd=32, n_layer=1, n_head=2, **size)  # dropout 0.1 of its own
    assert not prefixes_can_be_shared(GPT2LMHeadModel(drops), make_recipe(), _rows())
    still = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size
    )
    assert prefixes_can_be_shared(GPT2LMHeadModel(still), make_recipe(), _rows())


def test_models_that_draw_random_numbers_are_noticed(make_recipe: Any, make_tiny_model: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM, SeedOssConfig, SeedOssForCausalLM

    size: dict[str, Any] = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": "document",
    }  # fmt: skip
    register_document_attention()

    def can(build: Any, config: Any) -> bool:
        return prefixes_can_be_shared(build(config), make_recipe(), _rows())

    chooses = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert can(MixtralForCausalLM, MixtralConfig(**size, **chooses))
    assert not can(MixtralForCausalLM, MixtralConfig(**size, **chooses, router_jitter_noise=0.01))
    assert can(SeedOssForCausalLM, SeedOssConfig(**size, residual_dropout=0.0, attention_dropout=0.0))
    assert not can(SeedOssForCausalLM, SeedOssConfig(**size, residual_dropout=0.1, attention_dropout=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_looks_at_the_token_before_is_noticed(
    dtype: torch.dtype, make_recipe: Any, model: Any
) -> None:
    """Of an answer's states only the first few show it, and the last one hardly."""
    model.to(dtype)
    assert prefixes_can_be_shared(model, make_recipe(), _rows())
    layer = model.base_model.model.model.layers[0]

    def shift(module: Any, arguments: Any) -> Any:
        hidden = arguments[0]
        return (hidden + 0.5 * hidden.roll(1, dims=1), *arguments[1:])

    handle = layer.mlp.register_forward_pre_hook(shift)
    assert not prefixes_can_be_shared(model, make_recipe(), _rows())
    handle.remove()


def test_a_forward_pass_that_does_not_hand_branches_on_is_noticed(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose logits are scaled, so that training goes through its own forward pass."""
    from transformers import CohereConfig, CohereForCausalLM

    register_document_attention()
    config = CohereConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logit_scale=0.5, attn_implementation="document",
    )  # fmt: skip
    model = CohereForCausalLM(config)
    assert prefixes_can_be_shared(model, make_recipe(), _rows())
    whole = model.forward
    monkeypatch.setattr(model, "forward", lambda branches, **options: whole(**options))
    assert not prefixes_can_be_shared(model, make_recipe(), _rows())


def test_rows_are_silenced_in_their_own_part(make_recipe: Any, model: Any, tiny_tokenizer: Any) -> None:
    rows = _rows()
    recipe = make_recipe(train__pack_tokens=400)
    with invariants.Bench(recipe, model, tiny_tokenizer, rows) as bench:
        trainer = bench.trainer
        trainer.row_ids = [row.row_id for row in rows]
        (batch,) = list(trainer.get_train_dataloader())
        assert "branches" in batch
        before = int((batch["labels"] != IGNORED).sum())
        trainer.silence([batch], frozenset({"r2", "r3"}))
        assert before - int((batch["labels"] != IGNORED).sum()) == rows[2].n_targets + rows[3].n_targets


def test_the_rows_of_these_tests_share_something() -> None:
    shared = shared_beginnings([(row.input_ids, row.labels) for row in _rows()])
    assert [length for _, length in shared] == [0, 0, 24, 12, 0, 12, 24, 12, 24]
