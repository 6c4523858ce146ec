"""A teacher with another tokenizer teaches through the whole pipeline, from its cache and live."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from finetune.errors import UserError
from finetune.paths import read_json
from finetune.pipeline.make_cache import fill_recipe_cache
from finetune.telemetry.events import read_events

DISTIL = """\
extends: recipe.yaml
name: distil
train: {method: distil, max_steps: 3}
distil:
  teacher: {id: big, dtype: fp32}
  alignment: text
  cache: {k: 64}
eval:
  baselines: [start]
  against: start
"""


def other_tokenizer(make_tiny_tokenizer: Callable[..., Any]) -> Any:
    """Byte-level with merges, and tokens of its own for the turns."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"n": "one two three four five six seven"}'] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = (
        make_tiny_tokenizer().chat_template.replace("<|im_end|>", "</s>").replace("<|im_start|>", "<s>")
    )
    return fast


@pytest.fixture
def recipe(
    project: Any, make_tiny_model: Callable[..., Any], make_tiny_tokenizer: Callable[..., Any]
) -> Path:
    tokenizer = other_tokenizer(make_tiny_tokenizer)
    make_tiny_model(seed=3, vocab_size=len(tokenizer)).save_pretrained(project.folder / "big")
    tokenizer.save_pretrained(project.folder / "big")
    path: Path = project.folder / "distil.yaml"
    path.write_text(DISTIL)
    return path


def run(recipe: Path, said: list[str], *overrides: str) -> Any:
    from finetune.pipeline.run import run_recipe

    return run_recipe(str(recipe), overrides, say=said.append)


def test_a_teacher_with_other_tokens_teaches_and_is_compared(recipe: Path) -> None:
    said: list[str] = []
    facts = fill_recipe_cache(str(recipe), say=said.append)
    assert facts["k"] == 64 and facts["complete"]
    outcome = run(recipe, said)
    assert len(list((recipe.parent / "runs" / "teachers").iterdir())) == 1  # the command's own cache
    steps = [event for event in read_events(outcome.folder / "events.jsonl") if event["event"] == "step"]
    assert len(steps) == 3 and all(event["loss"] > 0 for event in steps)
    told = read_json(outcome.folder / "alignment.json")
    assert told["targets"] == told["targets_one_to_one"] + told["targets_in_groups"]
    assert any(line.startswith("alignment: 257 tokens are") for line in said)
    page = (outcome.folder / "report.html").read_text()
    assert "257 tokens are both models&#39;" in page or "257 tokens are both models'" in page
    assert {one["baseline"] for one in outcome.comparison["comparisons"]} == {"start", "teacher"}
    said.clear()
    assert not run(recipe, said).worked


def test_the_same_teacher_live_and_with_uld(recipe: Path) -> None:
    live = recipe.with_name("live.yaml")
    live.write_text(DISTIL.replace("cache: {k: 64}", "targets: live\n  loss: {kind: uld}"))
    outcome = run(live, [])
    steps = [event for event in read_events(outcome.folder / "events.jsonl") if event["event"] == "step"]
    assert len(steps) == 3 and all(0 < step["divergence"] <= 2 for step in steps)
    terms = read_json(outcome.folder / "forecast.json")["terms_bytes"]
    assert terms["teacher"] > 4 * 64 * 200  # at the least its embeddings, in fp32


def test_other_tokens_are_refused_token_by_token_and_the_same_ones_by_text(
    recipe: Path, project: Any
) -> None:
    with pytest.raises(UserError, match="teacher and student have different tokenizers") as told:
        run(recipe, [], "distil.alignment=tokens")
    assert "distil.alignment: text" in told.value.faults[0].fix
    with pytest.raises(UserError, match="teacher and student have the same tokens"):
        run(recipe, [], "distil.teacher.id=tiny-model")
    with pytest.raises(UserError, match="k = 321, but"):
        run(recipe, [], "distil.cache.k=321")


SERVED = """\
extends: recipe.yaml
name: served
train: {method: distil, max_steps: 2}
distil:
  teacher: {id: far, server: {url: http://127.0.0.1:PORT/v1, model: big}}
  cache: {k: 16}
eval:
  baselines: [start]
  against: start
"""


class Vllm(BaseHTTPRequestHandler):
    """A completions endpoint over the tiny model: answers, and log-probabilities of a prompt's tokens where it tells them."""

    model: Any = None
    tells = True
    asked: ClassVar[list[int]] = []

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        k = body.get("prompt_logprobs")
        choice: dict[str, Any] = {"text": "two", "finish_reason": "stop"}
        if k is not None and self.tells:
            type(self).asked.append(len(body["prompt"]))
            with torch.no_grad():
                logits = self.model(torch.tensor([body["prompt"]])).logits[0, :-1].float()
            values, ids = torch.log_softmax(logits, dim=-1).topk(k)
            choice["prompt_logprobs"] = [
                None,
                *(
                    {str(i): {"logprob": v} for i, v in zip(*place, strict=True)}
                    for place in zip(ids.tolist(), values.tolist(), strict=True)
                ),
            ]
        found = json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)


@pytest.fixture
def served(
    project: Any, make_tiny_model: Callable[..., Any], make_tiny_tokenizer: Callable[..., Any]
) -> Iterator[Path]:
    """A recipe whose teacher has its tokenizer and configuration here, and its weights behind a server."""
    teacher = make_tiny_model(seed=4)
    teacher.config.save_pretrained(project.folder / "far")
    make_tiny_tokenizer().save_pretrained(project.folder / "far")
    Vllm.model, Vllm.tells, Vllm.asked = teacher.eval(), True, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path: Path = project.folder / "served.yaml"
    path.write_text(SERVED.replace("PORT", str(server.server_address[1])))
    yield path
    server.shutdown()
    server.server_close()


def test_a_teacher_behind_a_server_teaches_without_its_weights(served: Path) -> None:
    said: list[str] = []
    outcome = run(served, said)
    facts = read_json(outcome.folder / "teacher_cache.json")
    assert facts["complete"] and facts["k"] == 16 and len(Vllm.asked) == facts["rows"]
    told = read_json(outcome.folder / "distillation.json")["teacher"]
    assert told["server"] == "big" and told["licence"] is None and told["parameters"] is None
    assert {one["baseline"] for one in outcome.comparison["comparisons"]} == {"start", "teacher"}
    page = (outcome.folder / "report.html").read_text()
    assert "does not say what the teacher" in page
    n_asked = len(Vllm.asked)
    assert not run(served, said).worked and len(Vllm.asked) == n_asked


def test_a_server_without_log_probabilities_is_told_with_its_remedy(served: Path) -> None:
    Vllm.tells = False
    with pytest.raises(UserError, match="does not tell the 16 most likely tokens") as told:
        fill_recipe_cache(str(served), say=lambda line: None)
    assert (
        "--max-logprobs 16" in told.value.faults[0].fix
        and "finished shards are kept" in told.value.faults[0].fix
    )
    Vllm.tells = True
    assert fill_recipe_cache(str(served), say=lambda line: None)["complete"]
