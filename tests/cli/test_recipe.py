"""`finetune recipe validate | show | schema | diff`, as a user and as a script see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.paths import shipped_names
from finetune.recipe.reference import recipe_json_schema, reference_markdown
from finetune.recipe.resolve import load_recipe, recipe_digest, resolved_yaml

SHIPPED = "sft/home_intents_lora"
DATASET = 'name: mine\nsource: {kind: jsonl, files: ["rows.jsonl"]}\n'


@pytest.fixture
def finetune(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line: `finetune("recipe", "show", …)` -> (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            main(["recipe", *arguments])
        output = capsys.readouterr()
        return int(done.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in the working folder whose dataset spec and suite lie beside it."""
    monkeypatch.chdir(tmp_path)
    suite = "items: {spec: ./mine.yaml}\nscorers: [exact_match]\nprimary_metric: exact_match\n"
    Path("suite.yaml").write_text(suite + "name: suite\nsuite: 1\ndescription: d\n")
    Path("mine.yaml").write_text(DATASET)
    Path("job.yaml").write_text(
        "model: {id: x}\ndata:\n  spec: ./mine.yaml\neval:\n  suites: [./suite.yaml]\n"
        "profiles: {smoke: {train.epochs: 1}}\n"
    )
    return Path("job.yaml")


def test_validate_names_the_digest_of_each_valid_recipe(finetune: Any, recipe: Path) -> None:
    code, out, err = finetune("validate", str(recipe))
    digest = recipe_digest(load_recipe(recipe))
    assert (code, out, err) == (0, f"valid: job.yaml (name job, digest {digest[:8]})\n", "")


def test_validate_in_json(finetune: Any, recipe: Path) -> None:
    code, out, _ = finetune("validate", str(recipe), "--set", "seed=3", "--json")
    digest = recipe_digest(load_recipe(recipe, ["seed=3"]))
    assert code == 0
    assert json.loads(out) == {"valid": [{"recipe": "job.yaml", "name": "job", "digest": digest}]}


def test_validate_without_a_name_checks_all_that_is_shipped(finetune: Any) -> None:
    code, out, err = finetune("validate", "--json")
    assert code == 0, err + out
    every = [name for kind in ("recipes", "merges", "searches") for name in shipped_names(kind)]
    assert [row["recipe"] for row in json.loads(out)["valid"]] == every


def test_validate_knows_merges_and_searches_over_them(finetune: Any, tmp_path: Path) -> None:
    code, out, _ = finetune("validate", "merge/ties", "merge/slerp", "merge/home_intents_languages")
    assert code == 0
    assert out.splitlines()[0] == "valid: merge/ties (ties, dialect paper, models named when it runs)"
    assert out.splitlines()[2] == "valid: merge/home_intents_languages (search over 7 merges)"
    theirs = tmp_path / "theirs.yml"
    theirs.write_text("merge_method: linear\nmodels: [{model: a}, {model: b}]\ndtype: bfloat16\n")
    assert "linear, dialect mergekit, 2 models" in finetune("validate", str(theirs))[1]
    theirs.write_text("merge_method: linear\nmodels: [{model: a}]\ndtyp: bfloat16\n")
    code, _, err = finetune("validate", str(theirs), "merge/ties")
    assert code == 2 and "theirs.yml:3:1: unknown key 'dtyp'" in err


def test_validate_looks_into_the_suites_and_the_parents_of_a_search(finetune: Any, tmp_path: Path) -> None:
    search = tmp_path / "search.yaml"
    search.write_text(
        "merge_search: 1\nname: s\nbase: b\nparents: [{name: one, recipe: sft/home_intents_lor}]\n"
        "candidates: [{merge: merge/base_average}]\nsuites: [generel, general]\n"
    )
    code, _, err = finetune("validate", str(search))
    assert code == 2
    assert "no such file or shipped eval entry: 'generel'" in err
    assert "no such file or shipped recipes entry: 'sft/home_intents_lor'" in err
    search.write_text(search.read_text().replace("generel, ", "").replace("_lor}", "_lora}"))
    code, _, err = finetune("validate", str(search))
    assert code == 2 and "no suite has the role task" in err  # nothing would decide


def test_validate_tells_every_fault_of_every_file(finetune: Any, recipe: Path) -> None:
    Path("other.yaml").write_text(recipe.read_text() + "lr: 1\nseed: x\n")
    code, out, err = finetune("validate", "other.yaml", str(recipe), "absent", "--set", "train.epcohs=1")
    assert code == 2
    assert out == ""
    assert "other.yaml:7:1: unknown key 'lr'\n  fix: did you mean 'train.learning_rate'" in err
    assert "other.yaml:8:7: 'seed' must be a whole number, not 'x'" in err
    assert err.count("--set train.epcohs=1: unknown key 'train.epcohs'\n  fix: did you mean 'epochs'?") == 1
    assert "no such file or shipped recipes entry: 'absent'" in err
    assert "Traceback" not in err


def test_faults_in_json(finetune: Any, recipe: Path) -> None:
    code, out, _ = finetune("validate", str(recipe), "--set", "seed=x", "--json")
    answer = json.loads(out)
    assert (code, answer["exit_code"]) == (2, 2)
    assert answer["error"] == [
        {
            "what": "'seed' must be a whole number, not 'x'",
            "where": "--set seed=x",
            "why": "",
            "fix": "",
        }
    ]


def test_validate_looks_into_the_dataset_spec_and_the_suites(finetune: Any, recipe: Path) -> None:
    Path("mine.yaml").write_text(DATASET + "sourec: 1\n")
    Path("suite.yaml").write_text(Path("suite.yaml").read_text() + "primry: x\n")
    code, _, err = finetune("validate", str(recipe))
    assert code == 2
    assert "mine.yaml:3:1: unknown key 'sourec'\n  fix: did you mean 'source'?" in err
    assert "suite.yaml:7:1: unknown key 'primry'" in err


def test_validate_places_a_missing_file_where_it_is_named(finetune: Any, recipe: Path) -> None:
    Path("mine.yaml").unlink()
    Path("suite.yaml").unlink()
    code, _, err = finetune("validate", str(recipe))
    assert code == 2
    assert "job.yaml:3:9: no such file or shipped data entry: './mine.yaml'" in err
    assert "job.yaml:5:11: no such file or shipped eval entry: './suite.yaml'" in err


def test_show_tells_value_and_origin_of_every_key(finetune: Any, recipe: Path) -> None:
    code, out, _ = finetune("show", str(recipe), "--set", "profile=smoke", "--set", "seed=3")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert code == 0
    assert lines["model.id"].split() == ["model.id", "x", "job.yaml:1"]
    assert lines["seed"].split() == ["seed", "3", "--set", "seed=3"]
    assert lines["train.epochs"].split() == ["train.epochs", "1.0", "profile", "smoke", "(job.yaml:6)"]
    assert lines["train.learning_rate"].split() == ["train.learning_rate", "0.0002", "default"]
    assert lines["profiles"].split() == ["profiles", "smoke"]


def test_show_in_json(finetune: Any, recipe: Path) -> None:
    code, out, _ = finetune("show", str(recipe), "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["digest"] == recipe_digest(load_recipe(recipe))
    assert answer["profiles"] == ["smoke"]
    rows = {row["key"]: row for row in answer["values"]}
    assert rows["data.spec"] == {
        "key": "data.spec",
        "value": "./mine.yaml",
        "source": "file",
        "origin": "job.yaml:3",
        "description": rows["data.spec"]["description"],
    }
    assert rows["train.epochs"]["value"] == 2.0


def test_show_reads_the_resolved_recipe_of_a_run_folder(finetune: Any, recipe: Path) -> None:
    folder = Path("runs/job-12345678")
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(resolved_yaml(load_recipe(recipe, ["seed=99"])))
    code, out, _ = finetune("show", str(folder), "--json")
    rows = {row["key"]: row for row in json.loads(out)["values"]}
    assert (code, rows["seed"]["value"], rows["name"]["value"]) == (0, 99, "job")


def test_schema(finetune: Any) -> None:
    assert finetune("schema", "--markdown") == (0, reference_markdown(), "")
    code, out, _ = finetune("schema")
    assert (code, json.loads(out)) == (0, recipe_json_schema())


def test_diff_of_two_recipes(finetune: Any, recipe: Path) -> None:
    Path("other.yaml").write_text(recipe.read_text() + "name: job\nseed: 1\n")
    code, out, _ = finetune("diff", str(recipe), "other.yaml")
    assert (code, out) == (0, "seed: 17 -> 1\nthe digests differ\n")
    assert (
        finetune("diff", str(recipe), str(recipe))[1] == "the digests are equal: the results are the same\n"
    )


def test_diff_of_a_recipe_with_its_own_overrides(finetune: Any, recipe: Path) -> None:
    code, out, _ = finetune("diff", str(recipe), "--set", "profile=smoke", "--set", "eval.batch_size=4")
    assert code == 0
    assert "train.epochs: 2.0 -> 1.0\neval.batch_size: 32 -> 4  (changes no result)" in out
    code, out, _ = finetune("diff", str(recipe), "--set", "eval.batch_size=4", "--json")
    row = {"key": "eval.batch_size", "left": 32, "right": 4, "changes_result": False}
    assert json.loads(out) == {"same_result": True, "differences": [row]}


@pytest.mark.parametrize("command", ["validate", "show", "diff"])
def test_a_flag_that_does_not_exist_is_a_user_error(finetune: Any, command: str) -> None:
    code, _, err = finetune(command, SHIPPED, "--ste", "seed=1")
    assert code == 2
    assert "--ste" in err
