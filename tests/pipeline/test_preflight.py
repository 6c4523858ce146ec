"""What a run refuses before it reads a row, asks a model or loads a weight: all of it at once, each with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.pipeline.inputs import gather_inputs

QUICK = ("eval.max_items=4", "train.epochs=1", "eval.suites=[suite.yaml]")


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("finetune.pipeline.stages.load_model", loaded)
    monkeypatch.setattr("finetune.pipeline.stages.load_before", loaded)


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the dataset was built")

    monkeypatch.setattr("finetune.pipeline.stages.build_dataset", built)
    monkeypatch.setattr("finetune.pipeline.run.ensure_generated", built)


@pytest.mark.parametrize(
    ("overrides", "where", "said", "fix"),
    [
        (
            ("adapter.target_modules=[q_proj,k_prj]",),
            "adapter.target_modules",
            "'k_prj' matches no",
            "k_proj",
        ),
        (("adapter.target_modules=[lm_head]",), "adapter.target_modules", "the output head", "choose among"),
        (
            ("adapter.target_modules=[embed_tokens]",),
            "adapter.target_modules",
            "not a linear layer",
            "choose",
        ),
        (("adapter.target_modules=[input_layernorm]",), "adapter.target_modules", "not a linear", "choose"),
        (("adapter.rank_pattern.dwn_proj=4",), "adapter.rank_pattern", "'dwn_proj' matches no", "down_proj"),
        (("adapter.alpha_pattern.q_poj=4",), "adapter.alpha_pattern", "'q_poj' matches no", "q_proj"),
        (("adapter.modules_to_save=[nrm]",), "adapter.modules_to_save", "'nrm' matches no", "norm"),
        (("adapter.layers=[2]",), "adapter.layers", "there is no layer 2", "use 0 to 1"),
        (("adapter.layers=[-3]",), "adapter.layers", "there is no layer -3", "-2 from the end"),
        (
            ("adapter.kind=none", "adapter.freeze=[embed]"),
            "adapter.freeze",
            "'embed' matches no",
            "embed_tokens",
        ),
        (("adapter.kind=bitfit",), "adapter.kind", "has no biases", "ia3"),
        (("adapter.init=orthogonal", "adapter.rank=7"), "adapter.rank", "even ranks", "even rank"),
        (("adapter.kind=ia3", "adapter.target_modules=[k_poj]"), "adapter.target_modules", "k_poj", "k_proj"),
        (
            ("adapter.kind=vera", "adapter.target_modules=[k_poj]"),
            "adapter.target_modules",
            "k_poj",
            "k_proj",
        ),
        (
            ("data.max_tokens=513",),
            "data.max_tokens",
            "513 tokens do not fit the model's context of 512",
            "512",
        ),
        (
            ("adapter.kind=prompt", "train.packing=false", "data.max_tokens=500"),
            "data.max_tokens",
            "500 tokens behind 20 virtual ones do not fit",
            "at most 492",
        ),
        (("model.new_tokens=[<a>,<a>]",), "model.new_tokens", "named twice", "once"),
        (("model.dtype=fp16",), "model.dtype", "fp16 needs CUDA", "bf16"),
        (("train.optimizer=adamw_paged",), "train.optimizer", "needs CUDA", "adamw"),
        (("train.optimizer_options.bettas=[0.9,0.99]",), "train.optimizer_options", "bettas", "betas"),
        (("train.optimizer_options.betas=[2,0.99]",), "train.optimizer_options", "refuses", "documentation"),
        (("train.activation_offload=true",), "train.activation_offload", "no GPU", "gradient_checkpointing"),
        (("train.fp8=true",), "train.fp8", "8-bit floats", "bf16"),
        (
            ("model.quantize=nf4", "adapter.target_modules=[k_proj]", "adapter.modules_to_save=[q_proj]"),
            "adapter.modules_to_save",
            "quantized",
            "quantize: none",
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_recipe_the_machine_or_the_model_cannot_do(
    overrides: tuple[str, ...], where: str, said: str, fix: str, project: Any, no_rows: None
) -> None:
    with pytest.raises(UserError) as caught:
        project.run(*QUICK, *overrides)
    (fault,) = caught.value.faults
    assert fault.where == where
    assert said in fault.what
    assert fix in fault.fix
    assert caught.value.exit_code == 2


def test_all_faults_come_at_once(project: Any, no_rows: None) -> None:
    with pytest.raises(UserError) as caught:
        project.run(
            *QUICK,
            "adapter.target_modules=[q_proj,k_prj]",
            "adapter.modules_to_save=[nrm]",
            "data.max_tokens=4096",
            "model.dtype=fp16",
            "model.new_tokens=['<|im_end|>']",
        )
    assert {fault.where for fault in caught.value.faults} == {
        "adapter.target_modules",
        "adapter.modules_to_save",
        "data.max_tokens",
        "model.dtype",
        "model.new_tokens",
    }


def test_a_revision_of_a_model_in_a_folder(project: Any, no_rows: None) -> None:
    with pytest.raises(UserError, match="revision 'v1' says nothing about") as caught:
        project.run(*QUICK, "model.revision=v1")
    (fault,) = caught.value.faults
    assert "model.revision" in fault.where
    assert "leave the revision out" in fault.fix


def test_a_revision_that_an_earlier_run_recorded_beside_a_folder(project: Any) -> None:
    """Runs of the time when it was ignored can still be evaluated, published and learnt from."""
    recipe = project.recipe.read_text().replace("id: tiny-model", "id: tiny-model\n  revision: v1")
    (project.folder / "recipe.resolved.yaml").write_text(recipe)
    inputs = gather_inputs(str(project.folder / "recipe.resolved.yaml"), folders={})
    assert inputs.source.folder == project.folder / "tiny-model"


TEXTS = """\
suite: 1
name: texts
task: text
role: forgetting
items: {jsonl: texts.jsonl}
scorers: [nll_per_token]
primary_metric: nll_per_token
margin: 0.05
"""


def add_texts(project: Any, cluster: str = "") -> tuple[str, ...]:
    """A suite of three texts beside the project's own; the overrides that run it."""
    (project.folder / "texts.yaml").write_text(TEXTS + cluster)
    lines = [{"id": str(n), "reference": f"text {n}", "tags": {"author": "one"}} for n in range(3)]
    (project.folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "train.epochs=1", "eval.suites=[suite.yaml, texts.yaml]"


def test_one_text_that_is_left_has_no_margin(project: Any, no_rows: None) -> None:
    with pytest.raises(UserError, match="leaves one text of suite texts") as caught:
        project.run(*add_texts(project), "eval.max_items=1")
    (fault,) = caught.value.faults
    assert fault.where == "eval.max_items"
    assert "2 or more" in fault.fix


@pytest.mark.parametrize(
    ("overrides", "fix"), [(("eval.max_items=2",), "raise eval.max_items"), ((), "cluster: null")]
)
def test_texts_of_one_cluster_are_told_before_any_suite_is_answered(
    overrides: tuple[str, ...], fix: str, project: Any
) -> None:
    with pytest.raises(UserError, match="share one cluster") as caught:
        project.run(*add_texts(project, "cluster: author\n"), *overrides)
    assert fix in caught.value.faults[0].fix
    assert not any("baseline" in line for line in project.said)


def test_a_vocabulary_larger_than_the_embedding(project: Any, no_rows: None) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project.folder / "tiny-model")
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(project.folder / "tiny-model")
    with pytest.raises(UserError, match="2 tokens from id 259") as caught:
        project.run(*QUICK)
    assert "resize_token_embeddings(261)" in caught.value.faults[0].fix


def test_turn_weights_that_leave_no_answer_are_told_before_the_baseline(project: Any) -> None:
    with pytest.raises(UserError, match="no answer of the training rows weighs anything") as caught:
        project.run(*QUICK, "train.loss.turn_weights=[1,0]")
    assert caught.value.faults[0].where == "train.loss.turn_weights"


def test_a_row_longer_than_a_pack_is_told_before_the_baseline(project: Any) -> None:
    with pytest.raises(UserError, match="does not fit a pack of 32") as caught:
        project.run(*QUICK, "train.pack_tokens=32")
    (fault,) = caught.value.faults
    assert fault.where == "train.pack_tokens"
    assert not (project.folder / "runs").joinpath("baseline").exists()


def test_a_pair_longer_than_a_pack_is_told_before_the_baseline(project: Any) -> None:
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "chosen": [{"role": "assistant", "content": f"yes {n}"}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for n in range(40)
    ]
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (project.folder / "suite.yaml").write_text(
        (project.folder / "suite.yaml")
        .read_text()
        .replace("{spec: digits.yaml, split: test}", "{jsonl: i.jsonl}")
    )
    (project.folder / "i.jsonl").write_text('{"id": "a", "prompt": "1?", "reference": "one"}\n')
    few = ("eval.baselines=[zero_shot]", "eval.against=zero_shot", "train.method=dpo")
    with pytest.raises(UserError, match="does not fit a pack of 16"):
        project.run(*QUICK, *few, "train.pack_tokens=16")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.quantize=nf4", "adapter.kind=none"), "cannot be tuned in full"),
        (("model.quantize=int8", "adapter.kind=bitfit"), "cannot be tuned in full"),
        (("model.quantize=nf4", "adapter.init=pissa"), "cannot be split"),
        (("adapter.init=loftq",), "not in 4 bits"),
        (
            ("train.preference.beta=0", "train.method=dpo"),
            "must be greater than 0|greater than 0|above 0|> 0",
        ),
        (("train.preference.label_smoothing=0.5", "train.method=dpo"), "less than 0.5|below 0.5|< 0.5"),
        (("train.preference.losses=[cdpo]", "train.method=dpo"), "cdpo"),
        (("train.lora_plus_ratio=16", "adapter.kind=ia3"), "no matrices A and B"),
        (("model.new_tokens=[<a>]", "adapter.kind=ia3"), "cannot train rows of the embedding"),
        (("adapter.kind=prompt",), "a pack holds several"),
        (("train.optimizer=schedule_free_adamw",), "count twice"),
        (("adapter.virtual_tokens=8",), "means nothing to adapter.kind lora"),
        (("adapter.init=pissa", "adapter.kind=vera"), "means nothing to adapter.kind vera"),
        (("adapter.target_modules=[]",), "no target modules are named"),
        (("adapter.target_modules=all_linear",), "all-linear|list of text"),
        (("train.method=dpo", "adapter.dropout=0.1"), "dropout"),
        (("train.early_stopping=2",), "no validation to judge by"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_settings_that_contradict_one_another(
    overrides: tuple[str, ...], said: str, project: Any, no_rows: None
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        project.run(*QUICK, *overrides)
    assert all(fault.where for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("pin", "said"),
    [("main", "is not a commit"), ("true", "is not a commit|must be"), ("v1.0", "is not a commit")],
)
def test_remote_code_needs_a_pinned_commit(pin: str, said: str, project: Any, no_rows: None) -> None:
    with pytest.raises(UserError, match=said):
        project.run(*QUICK, f"model.trust_remote_code={pin}")


def test_a_model_that_brings_code_is_refused_without_running_it(project: Any, no_rows: None) -> None:
    folder: Path = project.folder / "tiny-model"
    marker = project.folder / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="remote code is off"):
        project.run(*QUICK)
    assert not marker.exists()


def test_an_adapter_of_another_base_is_told_before_either_is_loaded(
    project: Any, no_rows: None, make_tiny_model: Any, make_tiny_tokenizer: Any
) -> None:
    from finetune.model.adapter_files import save_adapter
    from finetune.model.adapters import attach_adapter
    from finetune.model.source import resolve_model
    from finetune.recipe.adapter_section import AdapterSection

    make_tiny_model(seed=5).save_pretrained(project.folder / "other")
    make_tiny_tokenizer().save_pretrained(project.folder / "other")
    model = attach_adapter(make_tiny_model(seed=5), AdapterSection(rank=8, alpha=16), seed=0)
    save_adapter(model, project.folder / "started", source=resolve_model(str(project.folder / "other")))
    with pytest.raises(UserError, match="was trained on"):
        project.run(*QUICK, "adapter.start=started")


@pytest.mark.parametrize(
    ("kind", "own", "overrides", "where", "fix"),
    [
        ("Mamba", {"state_size": 4}, (), "train.packing", "set train.packing: false"),
        (
            "Mamba",
            {"state_size": 4},
            ("train.method=dpo",),
            "train.method",
            "choose a model whose layers attend",
        ),
        (
            "Gemma2",
            {"head_dim": 16},
            ("model.attention=document",),
            "model.attention",
            "model.attention: auto",
        ),
    ],
)
def test_layers_that_cannot_be_trained_as_asked_are_named_from_the_configuration(
    project: Any,
    no_rows: None,
    kind: str,
    own: dict[str, Any],
    overrides: tuple[str, ...],
    where: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no kernel that could reset a state
    sizes = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=4, **own)
    config.save_pretrained(project.folder / "tiny-model")
    with pytest.raises(UserError) as caught:
        project.run(*QUICK, *overrides)
    (fault,) = [fault for fault in caught.value.faults if fault.where == where]
    assert fix in fault.fix
