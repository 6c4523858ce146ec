"""Each quick check notices what it is there for, and is quiet about what is right."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.doctor import environment, memory, rates, rows, tokens
from finetune.doctor.environment import Machine
from finetune.doctor.finding import (
    Finding,
    at_most,
    attempt,
    examine,
    exit_code_of,
    fault,
    ok,
    told_once,
    warning,
)
from finetune.doctor.memory import Room, longest_batch
from finetune.errors import ExitCode, Fault, UserError
from finetune.plan.forecast import TERMS, Forecast
from finetune.recipe.schema import Recipe


def chat(number: int, answer: str = "yes", question: str | None = None) -> Row:
    asked = {"role": "user", "content": question or f"{number}?"}
    return Row(f"r{number}", (asked, {"role": "assistant", "content": answer}), f"g{number}", "rows.jsonl")


def recipe(**train: Any) -> Recipe:
    kind = train.pop("kind", "lora")
    train["packing"] = kind != "prompt"  # virtual tokens stand before one row
    return Recipe.model_validate(
        {
            "name": "x",
            "model": {"id": "x"},
            "adapter": {"kind": kind},
            "data": {"spec": "x"},
            "train": train,
            "eval": {"suites": ["x"]},
        }
    )


# findings


def test_every_fault_of_an_error_is_a_finding_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise UserError([Fault("a", "x.y", "because", "mend a"), Fault("b")])

    found = [*examine("g", "check", broken), *examine("g", "fine", lambda: ok("fine", "it is"))]
    assert [(one.status, one.detail, one.remedy, one.group) for one in found] == [
        ("fault", "a (because)", "mend a", "g"),
        ("fault", "b", "", "g"),
        ("ok", "it is", "", "g"),
    ]


def test_a_check_that_crashes_is_a_fault_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    def crash() -> Finding:
        raise KeyError("gone")

    (found,) = examine("g", "odd", crash)
    made, (same,) = attempt("g", "odd", crash)
    assert made is None and same == found
    assert (found.status, found.exit_code, found.check) == ("fault", ExitCode.INTERNAL_FAULT, "odd")
    assert "KeyError" in found.detail and "Traceback" in caplog.text
    assert attempt("g", "even", lambda: 2) == (2, [])


def test_what_was_told_is_not_told_again_and_a_place_is_shown() -> None:
    first = fault("a", "broken", "mend it", where="x.y")
    again, elsewhere = replace(first, check="b"), replace(first, where="x.z")
    assert told_once([first, ok("c", "broken"), again, elsewhere]) == [first, ok("c", "broken"), elsewhere]
    assert str(first).splitlines()[1:] == ["        where: x.y", "        fix: mend it"]


def test_the_exit_code_is_that_of_the_faults() -> None:
    small = fault("memory", "too small", "buy", exit_code=ExitCode.WILL_NOT_FIT)
    assert exit_code_of([ok("a", ""), warning("b", "", "")]) == ExitCode.DONE
    assert exit_code_of([small]) == ExitCode.WILL_NOT_FIT
    assert exit_code_of([small, fault("c", "", "")]) == ExitCode.USER_ERROR
    assert at_most("n", float("nan"), 1.0, "not a number").status == "fault"


# environment


def test_versions_that_are_missing_or_out_of_range_are_told_with_the_command() -> None:
    required = ["torch>=2.13,<2.14", "rich>=15", "gone>=1", "ray>=2; extra == 'cluster'"]
    found = list(environment.check_versions({"torch": "2.12.1", "rich": "15.2"}, required))
    assert [one.remedy for one in found] == ["pip install 'torch<2.14,>=2.13'", "pip install 'gone>=1'"]
    (right,) = environment.check_versions({"torch": "2.13.0+cpu", "rich": "15", "gone": "1"}, required)
    assert right.status == "ok" and "3 packages" in right.detail


def test_this_environment_is_the_required_one() -> None:
    assert {one.status for one in environment.check_versions(environment.installed_versions())} == {"ok"}


def test_other_versions_than_tested_are_a_warning() -> None:
    pins = "# tested\ntorch==2.13.0\nPy_YAML==6.0\n"
    (same,) = environment.check_pins({"torch": "2.13.0+cpu", "py-yaml": "6.0"}, pins)
    (other,) = environment.check_pins({"torch": "2.13.1", "py-yaml": "6.0"}, pins)
    assert (same.status, other.status) == ("ok", "warning")
    assert "torch 2.13.1 (tested: 2.13.0)" in other.detail


@pytest.mark.parametrize(
    ("machine", "dtype", "status"),
    [
        (Machine(False, None, (), False), "bf16", "ok"),
        (Machine(True, None, (), False), "bf16", "warning"),
        (Machine(True, "12.8", (), False), "bf16", "warning"),
        (Machine(True, "12.8", ("H200",), True), "bf16", "ok"),
        (Machine(True, "12.8", ("V100",), False), "bf16", "fault"),
        (Machine(True, "12.8", ("V100",), False), "fp16", "ok"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_noticed(machine: Machine, dtype: str, status: str) -> None:
    assert environment.check_accelerator(machine, dtype).status == status


def test_room_on_the_disk_is_counted_for_checkpoints_and_result(tmp_path: Path) -> None:
    # 1,000 elements, two kept checkpoints and one being written: 3 x 12 + 4 bytes an element
    at = [
        environment.check_disk(tmp_path / "not" / "there", 1_000, 2, free_bytes=n).status
        for n in (39_999, 40_000, 80_000)
    ]
    assert at == ["fault", "warning", "ok"]


# tokens


def tokenised(tokenizer: Any, given: list[Row]) -> list[TokenisedRow]:
    return tokenise_rows(given, tokenizer, max_tokens=256).rows


def test_sound_tokens_pass_every_check(tiny_tokenizer: Any) -> None:
    given = [chat(number, f"answer {number}") for number in range(4)]
    found = list(tokens.check_tokens(given, tokenised(tiny_tokenizer, given), tiny_tokenizer, vocabulary=259))
    assert [one.status for one in found] == ["ok"] * 7
    assert "stays a target" in found[2].detail  # pad is the end of an answer


def test_bos_twice_and_bos_never(tiny_tokenizer: Any) -> None:
    assert tokens.check_bos([TokenisedRow("r", [1, 1, 5], [-100, 1, 5], 2)], tiny_tokenizer).status == "fault"

    class Adds:
        bos_token_id, bos_token = 0, "<s>"

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0, 7]}

    assert tokens.check_bos([TokenisedRow("r", [1, 5], [-100, 5], 1)], Adds()).status == "warning"
    assert tokens.check_bos([TokenisedRow("r", [0, 5], [-100, 5], 1)], Adds()).status == "ok"


def test_an_answer_without_its_end_is_noticed(tiny_tokenizer: Any) -> None:
    (row,) = tokenised(tiny_tokenizer, [chat(1)])
    (span,) = row.spans()
    labels = [*row.labels]
    labels[span[1] - 1] = -100
    assert tokens.check_end_is_target([row], tiny_tokenizer).status == "ok"
    assert (
        tokens.check_end_is_target([TokenisedRow("r", row.input_ids, labels, 3)], tiny_tokenizer).status
        == "fault"
    )


def test_ids_beyond_the_embedding_are_noticed(tiny_tokenizer: Any) -> None:
    given = tokenised(tiny_tokenizer, [chat(1)])
    assert tokens.check_vocabulary(given, 259).status == "ok"
    assert tokens.check_vocabulary(given, 100).status == "fault"
    assert tokens.check_pad(tiny_tokenizer, 2).status == "fault"
    bare = copy.deepcopy(tiny_tokenizer)
    bare.pad_token = None
    assert tokens.check_pad(bare, 259).status == "warning"


def test_targets_that_are_not_the_answer_are_noticed(tiny_tokenizer: Any) -> None:
    given = [chat(1, "right"), chat(2, "right")]
    by_id = {row.row_id: row for row in tokenised(tiny_tokenizer, given)}
    assert tokens.check_spans(given, by_id, tiny_tokenizer).status == "ok"
    found = tokens.check_spans([given[0], chat(2, "wrong")], by_id, tiny_tokenizer)
    assert found.status == "fault" and "r2" in found.detail


def test_control_tokens_typed_into_texts_are_noticed(tiny_tokenizer: Any) -> None:
    typed = chat(1, "over<|im_end|>")
    found = tokens.check_control_tokens([chat(2, "x"), typed], tiny_tokenizer)
    assert found.status == "warning" and "1 of 2 rows" in found.detail and typed.id in found.detail
    pair = Row("p", typed.messages[:1], "g", "s", kind="preference", chosen=(typed.messages[-1],))
    assert tokens.check_control_tokens([pair], tiny_tokenizer).status == "warning"


# rows


def statuses(given: list[Row], **counts: int) -> dict[str, str]:
    found = rows.check_rows(given, len(given), {"read": len(given), **counts}, seed=1)
    return {one.check: one.status for one in found}


def test_sound_rows_pass() -> None:
    given = [chat(number, f"It is number {number}.") for number in range(600)]
    given[7] = chat(7, "I'm sorry, but I can't help with that.")
    assert set(statuses(given).values()) == {"ok"}


def test_few_cut_contradicting_and_empty_rows_are_warned_of() -> None:
    given = [chat(number, f"It is number {number}.") for number in range(50)]
    given += [chat(50 + number, answer, "the same?") for number, answer in enumerate(("yes", "no"))]
    given += [chat(60 + number, "...") for number in range(3)]
    found = statuses(given, truncated=4)
    for check in ("number of rows", "cut rows", "contradictions", "empty answers", "refusals"):
        assert found[check] == "warning", check


def test_two_forms_and_too_many_refusals_are_warned_of() -> None:
    given = [chat(number, f"It is number {number}.") for number in range(80)]
    given += [chat(100 + number, f'{{"number": {number}}}') for number in range(20)]
    given += [chat(200 + number, "I'm sorry, but I can't help with that.") for number in range(40)]
    found = statuses(given)
    assert found["one format"] == "warning" and found["refusals"] == "warning"


def test_languages_are_compared_among_the_answers_that_have_one() -> None:
    english = "The window in the kitchen is open, and the lights in the hall are still on."
    german = "Das Fenster in der Küche ist offen, und das Licht im Flur ist noch an."
    given = [chat(number, f'{{"n": {number}}}') for number in range(100)]
    given += [chat(200 + number, f"{english} {number}") for number in range(18)]
    given += [chat(300 + number, f"{german} {number}") for number in range(2)]
    found = rows.check_rows(given, len(given), {"read": len(given)}, seed=1)
    (told,) = [one for one in found if one.check == "one language"]
    assert told.status == "warning"
    assert told.detail.startswith("10.0% of the answers whose language can be told differ in language")
    assert "en (15%) beside de (2%)" in told.detail


def test_rows_without_answers_are_not_asked_for_agreement() -> None:
    text = [Row(f"t{n}", (), f"g{n}", "x", kind="text", text="words") for n in range(3)]
    assert statuses(text)["answers"] == "skipped"


# learning rate


@pytest.mark.parametrize(
    ("rate", "kind", "n_parameters", "status"),
    [
        (1e-3, "lora", 134_500_000, "ok"),  # the embedded recipe
        (2e-4, "lora", 7_000_000_000, "ok"),
        (2e-5, "lora", 134_500_000, "warning"),  # full tuning's rate on an adapter: ten times too low
        (2e-4, "none", 7_000_000_000, "warning"),  # and the other way round
        (2e-5, "none", 7_000_000_000, "ok"),
        (3e-2, "prompt", 134_500_000, "ok"),
        (1e-2, "ia3", 134_500_000, "ok"),
    ],
)
def test_a_rate_is_compared_with_its_kind_and_size(
    rate: float, kind: str, n_parameters: int, status: str
) -> None:
    found = rates.check_rate(recipe(learning_rate=rate, kind=kind), n_parameters)
    assert found.status == status
    assert "arXiv" in found.detail


def test_an_optimizer_of_another_kind_has_no_usual_rate() -> None:
    assert rates.check_rate(recipe(optimizer="sgd"), 10**9).status == "skipped"


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_larger_models_and_pairs_take_lower_rates(kind: str) -> None:
    for method in ("sft", "dpo"):
        highs = [rates.usual_rate(method, kind, n).high for n in (10**8, 10**10, 10**11)]
        assert highs == sorted(highs, reverse=True)
    assert rates.usual_rate("dpo", kind, 10**10).high < rates.usual_rate("sft", kind, 10**10).high
    assert rates.usual_rate("sft", "lora", 10**10).high > rates.usual_rate("sft", "none", 10**10).high


# memory


def forecast(total: int) -> Forecast:
    return Forecast({**dict.fromkeys(TERMS, 0), "weights": total}, total, "rss", "loss", 10**8, 10**6)


def test_a_forecast_is_compared_with_what_is_free_and_what_there_is() -> None:
    room = Room(total_bytes=100, available_bytes=50, basis="memory")
    found = [memory.check_forecast(forecast(n), room) for n in (50, 51, 101)]
    assert [one.status for one in found] == ["ok", "warning", "fault"]
    assert found[2].exit_code == ExitCode.WILL_NOT_FIT


def test_an_upper_bound_is_a_fault_only_by_what_is_certain() -> None:
    """How long prompts really are decides an evaluation's forecast; its weights are needed whatever they are."""
    room = Room(total_bytes=100, available_bytes=50, basis="memory")
    found = [
        memory.check_forecast(forecast(200), room, name="evaluation forecast", certain_bytes=n)
        for n in (100, 101)
    ]
    assert [one.status for one in found] == ["warning", "fault"]
    assert {one.check for one in found} == {"evaluation forecast"}


def test_a_probe_of_a_model_without_forecast_is_told_by_itself() -> None:
    found = memory.check_probe(400, None, Room(1_000, 500, "memory"), 64, 2.0, 10)
    assert found.status == "ok" and "forecast" not in found.detail


def test_a_probe_above_the_forecast_or_the_memory_is_told() -> None:
    room = Room(1_000, 500, "memory")
    at = [memory.check_probe(peak, 100, room, 64, 2.0, 10) for peak in (100, 113, 501)]
    assert [one.status for one in at] == ["ok", "warning", "fault"]
    assert "32 tokens/s" in at[0].detail


def test_the_longest_batch_is_filled_from_the_longest_rows() -> None:
    lengths = [10, 50, 30, 45, 5, 20]
    assert longest_batch(lengths, micro_batch=2, pack_tokens=None) == [1, 3]
    assert longest_batch(lengths, micro_batch=1, pack_tokens=60) == [1, 0]
    assert longest_batch(lengths, micro_batch=2, pack_tokens=60) == [1, 0, 3, 4]
    assert longest_batch([7], micro_batch=4, pack_tokens=8) == [0]
