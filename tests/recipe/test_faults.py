"""Each message of the recipe loader: what, where (line and column), and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.recipe.resolve import load_recipe

from .conftest import VALID, Faults, Write


def with_lines(*lines: str) -> str:
    """The valid recipe with lines appended; the first appended line is line 7."""
    return VALID + "\n".join(lines) + "\n"


ONE_FAULT: dict[str, tuple[str, str, str, str]] = {
    # name: (text, where, part of what, part of fix)
    "typing error at the top": (with_lines("trian:", "  epochs: 1"), "7:1", "unknown key 'trian'", "'train'"),
    "typing error in a section": (
        with_lines("train:", "  wieght_decay: 0.1"),
        "8:3",
        "unknown key 'train.wieght_decay'",
        "did you mean 'weight_decay'?",
    ),
    "misspelt name of another tool": (
        with_lines("adapter:", "  lora_alhpa: 32"),
        "8:3",
        "unknown key 'adapter.lora_alhpa'",
        "did you mean 'alpha'?",
    ),
    "name of another tool at the top": (
        with_lines("max_seq_length: 4096"),
        "7:1",
        "unknown key 'max_seq_length'",
        "did you mean 'data.max_tokens' (key 'max_tokens' of section 'data')?",
    ),
    "right key in the wrong section": (
        with_lines("adapter:", "  learning_rate: 1e-4"),
        "8:3",
        "unknown key 'adapter.learning_rate'",
        "'train.learning_rate'",
    ),
    "section in place of the top": (
        with_lines("train:", "  seed: 3"),
        "8:3",
        "unknown key 'train.seed'",
        "did you mean 'seed' (at the top of the file)?",
    ),
    "capitals and dashes": (
        with_lines("train:", "  Learning-Rate: 1e-4"),
        "8:3",
        "unknown key 'train.Learning-Rate'",
        "did you mean 'learning_rate'?",
    ),
    "dotted key in a file": (
        with_lines("train.epochs: 1"),
        "7:1",
        "unknown key 'train.epochs'",
        "(key 'epochs' of section 'train')",
    ),
    "no such key anywhere": (
        with_lines("adapter:", "  zzzz: 1"),
        "8:3",
        "unknown key 'adapter.zzzz'",
        "keys known here: kind, rank",
    ),
    "key that needs none": (with_lines("output_dir: x"), "7:1", "unknown key 'output_dir'", "FINETUNE_RUNS"),
    "fraction for a whole number": (
        with_lines("seed: 1.5"),
        "7:7",
        "'seed' must be a whole number, not 1.5",
        "without fraction",
    ),
    "boolean for a whole number": (
        with_lines("adapter:", "  rank: true"),
        "8:9",
        "'adapter.rank' must be a whole number, not true",
        "",
    ),
    "boolean for a number": (
        with_lines("train:", "  epochs: false"),
        "8:11",
        "'train.epochs' must be a number, not false",
        "",
    ),
    "number for a boolean": (
        with_lines("train:", "  packing: 1"),
        "8:12",
        "'train.packing' must be true or false, not 1",
        "write true without quotes",
    ),
    "yes for a boolean": (
        with_lines("train:", "  packing: yes"),
        "8:12",
        "'train.packing' must be true or false, not 'yes'",
        "write true without quotes",
    ),
    "off for a boolean": (
        with_lines("train:", "  packing: off"),
        "8:12",
        "'train.packing' must be true or false, not 'off'",
        "write false without quotes",
    ),
    "quoted boolean": (
        with_lines("train:", "  packing: 'false'"),
        "8:12",
        "must be true or false",
        "write false without quotes",
    ),
    "text for a number": (
        with_lines("train:", "  learning_rate: fast"),
        "8:18",
        "'train.learning_rate' must be a number, not 'fast'",
        "",
    ),
    "one name for a list that may also be a word": (
        with_lines("adapter:", "  target_modules: q_proj"),
        "8:19",
        "'adapter.target_modules' must be all-linear or a list of text, not 'q_proj'",
        "write it as a list: [q_proj]",
    ),
    "a slip in that word": (
        with_lines("adapter:", "  target_modules: all_linear"),
        "8:19",
        "not 'all_linear'",
        "did you mean 'all-linear'?",
    ),
    "not a number": (with_lines("adapter:", "  alpha: .nan"), "8:10", "not .nan", "finite"),
    "infinite by its size": (with_lines("adapter:", "  alpha: 1e999"), "8:10", "not 1e999", "finite"),
    "boolean for text": (
        with_lines("description: true"),
        "7:14",
        "'description' must be text, not true",
        'in quotes: "true"',
    ),
    "nothing for text": (
        with_lines("description:"),
        "7:1",
        "'description' must be text, not empty",
        "delete the key",
    ),
    "null for a number": (with_lines("seed: null"), "7:7", "not null", "delete the key"),
    "list for a number": (with_lines("seed: [1]"), "7:7", "'seed' must be a whole number, not a list", ""),
    "mapping for a number": (
        with_lines("seed: {a: 1}"),
        "7:7",
        "'seed' must be a whole number, not a map",
        "",
    ),
    "text for a section": (with_lines("train: fast"), "7:8", "'train' must be a section, not 'fast'", ""),
    "list for a section": (with_lines("train: [fast]"), "7:8", "'train' must be a section, not a list", ""),
    "text for a list": (
        VALID.replace("[home_intents]", "home_intents"),
        "6:11",
        "'eval.suites' must be a list of text, not 'home_intents'",
        "[home_intents]",
    ),
    "unknown choice": (
        with_lines("train:", "  schedule: cosin"),
        "8:13",
        "'train.schedule' must be one of cosine, linear, wsd, inverse_sqrt, constant, not 'cosin'",
        "did you mean 'cosine'?",
    ),
    "unknown choice in a list": (
        with_lines("train:", "  report_to: [wandb, tensorbord]"),
        "8:22",
        "'train.report_to[1]' must be one of",
        "did you mean 'tensorboard'?",
    ),
    "too small": (
        with_lines("adapter:", "  rank: 0"),
        "8:9",
        "'adapter.rank' must be at least 1, not 0",
        "",
    ),
    "too small where null is fine": (
        with_lines("train:", "  max_steps: -1"),
        "8:14",
        "'train.max_steps' must be at least 1, not -1",
        "",
    ),
    "not above": (
        with_lines("train:", "  learning_rate: 0"),
        "8:18",
        "'train.learning_rate' must be greater than 0",
        "",
    ),
    "not below": (with_lines("train:", "  learning_rate: 1"), "8:18", "must be less than 1", ""),
    "too large": (with_lines("adapter:", "  dropout: 1.5"), "8:12", "must be less than 1", ""),
    "empty list": (VALID.replace("[home_intents]", "[]"), "6:11", "'eval.suites' must not be empty", ""),
    "pattern": (with_lines("name: a b"), "7:7", "'name' must match the pattern", ""),
    "missing key": (
        VALID.replace("  id: builtin:smollm2-135m-instruct", "  dtype: bf16"),
        "2:3",
        "missing key 'model.id'",
        "add `id: …` under `model:` (text)",
    ),
    "missing section": (
        VALID.replace("data:\n  spec: home_intents\n", ""),
        "1:1",
        "missing key 'data'",
        "add `data: …` (a section)",
    ),
    "rule between keys": (
        VALID + "  baselines: [zero_shot]\n  against: few_shot\n",
        "8:12",
        "'eval.against': 'few_shot' is not among the baselines",
        "add it to eval.baselines",
    ),
    "rule between sections": (
        VALID.replace("data:", "  quantize: nf4\ndata:") + "adapter:\n  kind: none\n",
        "9:9",
        "'adapter.kind': quantized weights (nf4) cannot be tuned in full",
        "use adapter.kind: lora",
    ),
    "duplicate key": (
        with_lines("seed: 1", "seed: 2"),
        "8:1",
        "duplicate key 'seed'",
        "delete one of the two",
    ),
    "duplicate key in a section": (
        with_lines("train:", "  epochs: 1", "  epochs: 1"),
        "9:3",
        "duplicate key 'epochs'",
        "delete one",
    ),
    "list as a key": (with_lines("? [a, b]", ": 1"), "7:3", "a key must be text", "quotes"),
    "empty key": (with_lines(": 1"), "7:1", "a key must be text", "quotes"),
    "foreign tag": (
        with_lines("name: !!python/name:os.system x"),
        "7:7",
        "tag !!python/name:os.system",
        "remove",
    ),
    "half a surrogate pair": (with_lines('description: "\\ud83d"'), "7:14", "half of a surrogate pair", ""),
    "bad merge": (with_lines("<<: 3"), "7:5", "`<<` takes a mapping", "anchor"),
    "unknown profile": (with_lines("profile: smoke"), "7:10", "unknown profile 'smoke'", "has no profiles"),
}


@pytest.mark.parametrize("name", ONE_FAULT)
def test_message(name: str, faults: Faults) -> None:
    text, where, what, fix = ONE_FAULT[name]
    (fault,) = faults(text)
    assert fault.where == f"job.yaml:{where}"
    assert what in fault.what
    assert fix in fault.fix


SYNTAX: dict[str, tuple[str, str, str, str]] = {
    "unclosed bracket": ("a: [1, 2\nb: 3\n", "2:2", "not valid YAML", "brackets"),
    "tab": ("train:\n\tepochs: 1\n", "2:1", "not valid YAML", "spaces"),
    "colon in text": ("description: a: b\n", "1:15", "mapping values are not allowed", "quotes"),
    "undefined alias": ("seed: *x\n", "1:7", "undefined alias 'x'", "anchor"),
    "two documents": ("a: 1\n---\nb: 2\n", "2:1", "another document", "second"),
    "control character": ('name: "a\x00b"\n', "1:9", "U+0000", "remove it"),
    "unclosed quote": ("name: 'abc\n", "2:1", "end of stream", "quotes"),
}


@pytest.mark.parametrize("name", SYNTAX)
def test_syntax_message(name: str, faults: Faults) -> None:
    text, where, what, fix = SYNTAX[name]
    (fault,) = faults(text)
    assert (fault.where, what in fault.what, fix in fault.fix) == (f"job.yaml:{where}", True, True), fault


@pytest.mark.parametrize("text", ["", "\n\n", "# only a remark\n", "---\n"])
def test_empty_file(text: str, faults: Faults) -> None:
    (fault,) = faults(text)
    assert (fault.what, fault.where) == ("the file is empty", "job.yaml:1:1")


@pytest.mark.parametrize("text", ["[1, 2]\n", "hello\n", "3\n"])
def test_not_a_mapping(text: str, faults: Faults) -> None:
    (fault,) = faults(text)
    assert (fault.what, fault.where) == ("the file must hold a mapping (`key: value` lines)", "job.yaml:1:1")


def test_not_utf8(faults: Faults) -> None:
    (fault,) = faults(b"seed: 1\nname: caf\xe9\n")
    assert fault.where == "job.yaml:2:10"
    assert "0xe9" in fault.what
    assert "UTF-8" in fault.fix


def test_utf16_is_refused_and_a_byte_order_mark_is_not(faults: Faults, write: Write) -> None:
    (fault,) = faults(VALID.encode("utf-16"))
    assert "not UTF-8" in fault.what
    assert load_recipe(write(b"\xef\xbb\xbf" + VALID.encode())).name == "job"


def test_missing_file_names_the_nearest_shipped_recipe() -> None:
    with pytest.raises(UserError, match="no such file or shipped recipes entry") as caught:
        load_recipe("sft/home_intents_lra")
    assert caught.value.faults[0].fix == "did you mean 'sft/home_intents_lora'?"


@pytest.mark.parametrize("name", ["", ".", "a" * 400, "a\x00b", "~nobody-of-this-name/x.yaml", "recipes"])
def test_names_that_are_no_files(name: str) -> None:
    with pytest.raises(UserError, match="no such file or shipped recipes entry"):
        load_recipe(name)


def test_all_faults_of_a_file_come_at_once_in_its_order(faults: Faults) -> None:
    text = """\
lr: 1e-4
seed: 1.5
model:
  dtype: bf17
data:
  spec: x
  max_tokens: 0
eval:
  suites: [x]
  baselines: [zero_shot]
train:
  epochs: many
  wieght_decay: 0
  optim: {fused: true}
profiles:
  smoke:
    train.epcohs: 1
"""
    found = faults(text, "train.rank=3", "adapter.rank=x", "oops")
    places = [fault.where for fault in found]
    assert places == [
        "--set oops",
        "--set adapter.rank=x",
        "--set train.rank=3",
        *(
            f"job.yaml:{place}"
            for place in ("1:1", "2:7", "4:3", "4:10", "7:15", "9:3", "12:11", "13:3", "14:3", "17:5")
        ),
    ]


def test_a_bad_value_is_reported_once_and_not_again_by_a_rule_between_keys(faults: Faults) -> None:
    text = VALID + "  baselines: [zero_shot, few]\n  against: few_shot\n"
    (fault,) = faults(text)
    assert "'eval.baselines[1]'" in fault.what


def test_the_working_folder_shortens_a_path_that_lies_below_it(tmp_path: Path, faults: Faults) -> None:
    (fault,) = faults("seed: x\n" + VALID)
    assert fault.where == "job.yaml:1:7"
    assert str(tmp_path) not in str(fault)


def test_recursion_and_explosion_by_aliases(faults: Faults) -> None:
    itself = faults(VALID + "profiles: &a {smoke: {train.report_to: *a}}\n")
    assert itself[0].what == "an alias holds itself"
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    found = faults(VALID + "\n".join(lines) + "\n")
    assert sum("multiply" in fault.what for fault in found) == 1


def test_deep_nesting(faults: Faults) -> None:
    (fault,) = faults("a: " + "[" * 1000 + "]" * 1000)
    assert "nested too deeply" in fault.what
