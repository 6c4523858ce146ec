"""A run whose training is complete, a suite that shows examples, and a stand-in for the `vllm` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.paths import write_jsonl

RECIPE = """\
recipe: 1
name: mine
model: {id: MODEL}
adapter: {kind: KIND}
data: {spec: SPEC}
eval: {max_items: 12, suites: [SUITES], baselines: [zero_shot], against: zero_shot}
"""
ANSWERED_SUITE = """\
suite: 1
name: task
items: {jsonl: task.jsonl}
scorers: [text_match, normalised_match]
primary_metric: text_match
"""
SHOWING_SUITE = """\
suite: 1
name: task
items: {{jsonl: task.jsonl}}
zero_shot: {{system: "Say yes."}}
few_shot: {{k: 2, jsonl: shown.jsonl}}
decoding: {{max_new_tokens: 3}}
scorers: [{scorer}]
primary_metric: {scorer}
"""
# Speaks enough of the protocol: lists models, and answers with the name of the model that is asked.
VLLM = """\
#!{python}
import http.server, json, os, sys
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
served = [value("--served-model-name")]
if "--lora-modules" in arguments:
    served.append(value("--lora-modules").split("=")[0])
with open({log!r}, "a") as stream:
    stream.write(json.dumps({{"pid": os.getpid(), "arguments": arguments}}) + "\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, value, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        self.reply({{"data": [{{"id": name}} for name in served]}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] not in served:
            return self.reply({{"error": "no such model"}}, 404)
        self.reply({{"choices": [{{"text": body["model"], "finish_reason": "stop"}}], "usage": {{"completion_tokens": 1}}}})
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def make_showing_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A suite of `n` items that shows others of its kind; runs, and the store of answers, lie beside it."""

    def make(scorer: str, reference: str, n: int) -> Path:
        folder = tmp_path / "eval"
        folder.mkdir()
        for name, start in (("task", 0), ("shown", 100)):
            lines = [
                {"id": f"i{number}", "prompt": f"q{number}", "reference": reference}
                for number in range(start, start + n)
            ]
            write_jsonl(folder / f"{name}.jsonl", lines)
        (folder / "task.yaml").write_text(SHOWING_SUITE.format(scorer=scorer))
        monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
        return folder / "task.yaml"

    return make


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """A command with --json: its exit code and its answer."""

    def made(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments), "--json"])
        return int(str(stop.value.code)), json.loads(capsys.readouterr().out)

    return made


@pytest.fixture
def make_finished_run(tiny_model_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run with a saved adapter (or, with kind `none`, a saved full model) and no answers yet."""

    def make(suite_path: Path, *, kind: str = "lora") -> Path:
        import torch

        from finetune.model.adapter_files import save_adapter
        from finetune.model.adapters import attach_adapter
        from finetune.model.load import load_model
        from finetune.pipeline.inputs import gather_inputs
        from finetune.pipeline.manifest import RunManifest
        from finetune.recipe.resolve import resolved_yaml

        answer = {"role": "assistant", "content": "a"}
        rows = [{"messages": [{"role": "user", "content": f"q{index}"}, answer]} for index in range(20)]
        write_jsonl(tmp_path / "rows.jsonl", rows)
        (tmp_path / "mine.yaml").write_text("name: mine\nsource: {kind: jsonl, files: [rows.jsonl]}\n")
        text = RECIPE.replace("MODEL", str(tiny_model_folder)).replace("KIND", kind)
        text = text.replace("SPEC", str(tmp_path / "mine.yaml"))
        (tmp_path / "recipe.yaml").write_text(text.replace("SUITES", str(suite_path)))
        inputs = gather_inputs(str(tmp_path / "recipe.yaml"))
        run = tmp_path / "run"
        run.mkdir()
        manifest = RunManifest.open(run, recipe_digest=inputs.digest, recipe_name=inputs.recipe.name)
        (run / "recipe.resolved.yaml").write_text(resolved_yaml(inputs.recipe))
        model = load_model(inputs.source, dtype="fp32")
        saved = run / ("model" if kind == "none" else "adapter")
        outputs: list[Path] = []
        with manifest.running("train", {"model": inputs.source.digest}, outputs):
            if kind == "none":
                model.save_pretrained(saved)
            else:
                model = attach_adapter(model, inputs.recipe.adapter, seed=1)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if "lora_B" in name:
                            parameter.normal_(0, 0.5)
                save_adapter(model, saved, source=inputs.source)
            outputs += [path for path in saved.iterdir() if path.is_file()]
        return run

    return make


@pytest.fixture
def make_answered_run(tmp_path: Path) -> Callable[..., Path]:
    """A run folder with both arms of a suite of 40 items answered: the untuned model had none right, the tuned one all."""

    def make(name: str = "run", *, more: str = "", n: int = 40) -> Path:
        from finetune.evaluation.items import items_digest
        from finetune.evaluation.records import write_arm
        from finetune.evaluation.scoring import score_records, summarise_arm
        from finetune.evaluation.suite import load_suite
        from finetune.evaluation.suite_data import load_suite_data

        folder = tmp_path / f"eval-{name}"
        folder.mkdir()
        asked = [{"id": f"i{k}", "prompt": f"q{k}", "reference": "yes", "cluster": f"c{k}"} for k in range(n)]
        write_jsonl(folder / "task.jsonl", asked)
        (folder / "task.yaml").write_text(ANSWERED_SUITE + more)
        suite = load_suite(folder / "task.yaml")
        items = load_suite_data(suite).items
        run = tmp_path / name
        run.mkdir()
        recipe = RECIPE.replace("MODEL", "base").replace("KIND", "lora").replace("SPEC", "mine")
        (run / "recipe.resolved.yaml").write_text(recipe.replace("SUITES", str(suite.path)))
        for arm, place, output in (("zero_shot", "baseline", "no"), ("tuned", "eval", "yes")):
            records = score_records(
                suite,
                [
                    {
                        "item": item.id, "arm": arm, "cluster": item.cluster, "source": item.source, "tags": item.tags,
                        "prompt": item.asked, "reference": item.reference, "output": output, "prompt_tokens": 5,
                        "output_tokens": 3, "finish_reason": "stop", "latency_seconds": 0.1, "scores": {},
                    }
                    for item in items
                ],
            )  # fmt: skip
            summary = summarise_arm(
                suite, records, arm=arm, seconds=1.0, key="k", items_digest=items_digest(items),
                adapter_sha256=None, batch_size=8, template_sha256="t" * 64,
            )  # fmt: skip
            write_arm(run / place / "task", summary, records)
        return run

    return make


@pytest.fixture
def vllm_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a stand-in for `vllm` on PATH; the file has one JSON line a start, with its process id and arguments."""
    log, command = tmp_path / "vllm-calls.jsonl", tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(VLLM.format(python=sys.executable, log=str(log)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    return log
