"""A server answers the same prompts; a busy one is asked again, a faulty one is a user error that loses no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.items import Item
from finetune.evaluation.records import partial_path, read_records
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.server import ServerModel
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import load_suite_data


@pytest.fixture
def evaluate(server: Any, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path) -> Any:
    def call(suite: Suite = suite, key: str = "k", **changes: Any) -> Any:
        model = ServerModel(server.url, "mine", **{"wait_seconds": 0.0, "timeout_seconds": 5.0, **changes})
        options: dict[str, Any] = {
            "arm": "zero_shot",
            "batch_size": 3,
            "out_folder": tmp_path / "out",
            "key": key,
        }
        return evaluate_arm(model, tiny_tokenizer, suite, items, **options)

    return call


def test_the_server_gets_our_tokens_and_decodes_greedily(evaluate: Any, server: Any, tmp_path: Path) -> None:
    summary = evaluate()
    records = read_records(tmp_path / "out", "zero_shot")
    assert [record["output"] for record in records] == [
        f"mine {r['prompt_tokens']} STOP more" for r in records
    ]
    assert len(server.asked) == 10
    assert all(body["temperature"] == 0.0 and body["max_tokens"] == 12 for body in server.asked)
    assert {len(body["prompt"]) for body in server.asked} == {record["prompt_tokens"] for record in records}
    assert (summary.backend, summary.output_tokens) == ("server", 40)


def test_stop_strings_are_sent_and_cut(evaluate: Any, server: Any, suite: Suite, tmp_path: Path) -> None:
    suite.decoding.stop.append("STOP")
    evaluate()
    assert server.asked[0]["stop"] == ["STOP"]
    assert all(record["output"].endswith(" ") for record in read_records(tmp_path / "out", "zero_shot"))


def test_text_is_sent_to_servers_that_take_no_tokens(evaluate: Any, server: Any) -> None:
    evaluate(sends_tokens=False)
    assert server.asked[0]["prompt"].startswith("<|im_start|>system\nAnswer with JSON.")


def test_a_busy_server_is_asked_again(evaluate: Any, server: Any) -> None:
    server.faults = [
        (503, b"busy"),
        (500, b"oops"),
        (200, b"not json"),
    ]  # one fewer than tries: one item may meet all
    assert evaluate().n == 10
    assert len(server.asked) == 13


def test_a_refusal_is_told_at_once_and_answers_are_kept(evaluate: Any, server: Any, tmp_path: Path) -> None:
    server.faults = [(200, b"")] * 4 + [(404, b"no such model")] * 6
    with pytest.raises(UserError, match="answered 404: no such model") as caught:
        evaluate()
    assert "model mine" in str(caught.value)
    kept = len(partial_path(tmp_path / "out", "zero_shot").read_text().splitlines())
    asked = len(server.asked)
    server.faults = []
    assert evaluate().n == 10
    assert len(server.asked) == asked + 10 - kept


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[]}',
        b'{"choices":[{"text":"a"}]}',
        b'{"error":"x"}',
        b'{"choices":[{"text":null}],"usage":{"completion_tokens":1}}',
        b'{"choices":[{"text":5}],"usage":{"completion_tokens":1}}',
        b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":-1}}',
        b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":NaN}}',
    ],
)
def test_an_answer_in_another_format_is_named(evaluate: Any, server: Any, answer: bytes) -> None:
    server.faults = [(200, answer)] * 10
    with pytest.raises(UserError, match="answered in another format"):
        evaluate()


@pytest.mark.parametrize("answer", [b"<html>", b" ", b"[]", b"[" * 100_000, b'{"choices":'])
def test_what_is_no_json_object_is_asked_again_and_then_told(
    evaluate: Any, server: Any, answer: bytes
) -> None:
    server.faults = [(200, answer)] * 100
    with pytest.raises(UserError, match="gave no usable answer"):
        evaluate(tries=2)


def test_half_a_surrogate_pair_in_an_answer_is_replaced(evaluate: Any, server: Any, tmp_path: Path) -> None:
    answer = b'{"choices":[{"text":"a\\ud800b","finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
    server.faults = [(200, answer)] * 100
    evaluate()
    assert {one["output"] for one in read_records(tmp_path / "out", "zero_shot")} == {
        "a\N{REPLACEMENT CHARACTER}b"
    }


@pytest.mark.parametrize("url", ["localhost:8000", "", "file:///etc", "http://[::1/v1"])
def test_what_is_no_url_is_told_at_once(url: str) -> None:
    with pytest.raises(UserError, match="is no URL of a server"):
        ServerModel(url, "mine").post("completions", {})


def test_a_server_that_is_not_there_is_a_user_error(evaluate: Any, server: Any) -> None:
    server.faults = [(503, b"down")] * 100
    with pytest.raises(UserError, match="answered 503"):
        evaluate(tries=2)


def test_the_key_comes_from_the_environment(
    evaluate: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match="MY_KEY is not set"):
        evaluate(key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", "s3cret")
    evaluate(key_variable="MY_KEY")
    assert set(server.keys) == {"Bearer s3cret"}


@pytest.mark.parametrize(
    "said",
    [
        b'{"error":{"message":"This model\'s maximum context length is 512 tokens. However, you requested 600"}}',
        b'{"error":{"message":"the request exceeds the available context size"}}',
        b'{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 512"}',
    ],
)
def test_an_item_too_long_for_the_server_is_named(evaluate: Any, server: Any, said: bytes) -> None:
    server.faults = [(400, said)] * 10
    with pytest.raises(UserError, match="item item-") as caught:
        evaluate()
    assert "longer context" in str(caught.value)


def test_a_slow_server_is_asked_again(evaluate: Any, server: Any) -> None:
    server.slow = 2
    assert evaluate(timeout_seconds=0.3).n == 10
    assert len(server.asked) == 12


def test_a_server_that_never_answers_is_given_up(evaluate: Any, server: Any) -> None:
    server.slow = 100
    with pytest.raises(UserError, match="gave no usable answer: timed out"):
        evaluate(timeout_seconds=0.1, tries=2)


def test_a_busy_server_says_how_long_to_wait(
    evaluate: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("finetune.evaluation.server.time.sleep", slept.append)
    server.headers = {"Retry-After": "7"}
    server.faults = [(429, b"slow down")]
    evaluate()
    assert slept == [7.0]


LETTERS = """\
suite: 1
name: letters
task: choice
items: {jsonl: items.jsonl}
scorers: [choice_accuracy, choice_accuracy_per_token]
primary_metric: choice_accuracy
cluster: null
"""


@pytest.fixture
def letters(tmp_path: Path) -> tuple[Suite, list[Item]]:
    folder = tmp_path / "letters"
    folder.mkdir()
    lines = [
        {
            "id": f"q{n}",
            "prompt": f"question {n}",
            "reference": "yes",
            "check": {"choices": ["yes", "no, never"]},
        }
        for n in range(4)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "letters.yaml").write_text(LETTERS)
    suite = load_suite(folder / "letters.yaml")
    return suite, list(load_suite_data(suite).items)


def test_likelihoods_of_a_server_are_the_models_own(
    server: Any, lively_model: Any, tiny_tokenizer: Any, letters: tuple[Suite, list[Item]], tmp_path: Path
) -> None:
    server.model = lively_model
    found = {}
    for name, model in (("here", lively_model), ("there", ServerModel(server.url, "mine"))):
        evaluate_arm(
            model, tiny_tokenizer, *letters, arm="tuned", batch_size=2, out_folder=tmp_path / name, key=name
        )  # fmt: skip
        found[name] = read_records(tmp_path / name, "tuned")
    for here, there in zip(found["here"], found["there"], strict=True):
        mine, theirs = json.loads(here["output"]), json.loads(there["output"])
        assert theirs["log_likelihoods"] == pytest.approx(mine["log_likelihoods"], rel=1e-4)
        assert theirs["tokens"] == mine["tokens"]
        assert here["scores"] == there["scores"]
    assert all(body["echo"] and body["max_tokens"] == 1 for body in server.asked)


def test_a_server_without_logprobs_is_refused(
    server: Any, tiny_tokenizer: Any, letters: tuple[Suite, list[Item]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "arm": "zero_shot",
        "batch_size": 1,
        "out_folder": tmp_path / "out",
        "key": "k",
    }
    with pytest.raises(UserError, match="does not give the log-probability"):
        evaluate_arm(ServerModel(server.url, "mine"), tiny_tokenizer, *letters, **options)
    with pytest.raises(UserError, match="takes token ids"):
        evaluate_arm(ServerModel(server.url, "mine", sends_tokens=False), tiny_tokenizer, *letters, **options)


def test_kl_to_the_base_is_refused_on_a_server(server: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    suite = load_suite("forgetting")
    items = load_suite_data(suite, max_items=2).items
    with pytest.raises(UserError, match="which a server does not show"):
        evaluate_arm(
            ServerModel(server.url, "mine"), tiny_tokenizer, suite, items,
            arm="tuned", batch_size=1, out_folder=tmp_path, key="k",
        )  # fmt: skip
    assert server.asked == []


def test_sampling_gives_the_server_a_seed_of_each_answers_own(
    evaluate: Any, server: Any, suite: Suite
) -> None:
    evaluate()
    assert {(body["temperature"], "seed" in body, "top_p" in body) for body in server.asked} == {
        (0.0, False, False)
    }
    server.asked.clear()
    wanted = {"temperature": 0.7, "top_p": 0.9, "repeats": 3, "seed": 11}
    sampled = suite.model_copy(update={"decoding": suite.decoding.model_copy(update=wanted)})
    assert evaluate(suite=sampled).n == 30
    assert {(body["temperature"], body["top_p"], body["n"]) for body in server.asked} == {(0.7, 0.9, 1)}
    assert len({body["seed"] for body in server.asked}) == 30
    first = {(str(body["prompt"]), body["seed"]) for body in server.asked}
    server.asked.clear()
    evaluate(suite=sampled, key="another model")
    assert {(str(body["prompt"]), body["seed"]) for body in server.asked} == first  # the same for both arms
