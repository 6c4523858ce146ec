"""Whole merges of small folders: values, bytes, resuming, and everything that is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.merge.methods.registry import METHODS
from finetune.merge.models import execute
from finetune.merge.models.merge import ModelMerge, merge_models
from finetune.merge.place import KEY_FILE
from finetune.merge.shards import open_model
from finetune.recipe.merge_loader import LoadedMerge
from finetune.recipe.merge_methods import METHOD_RULES

Three = tuple[Path, Path, Path]
Recipe = Callable[..., LoadedMerge]
Save = Callable[..., Path]
Tensors = Callable[..., dict[str, torch.Tensor]]


def merge(loaded: LoadedMerge, out: Path, **options: Any) -> ModelMerge:
    return merge_models(loaded, out, **{"load": False, "n_workers": 2, **options})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with open_model(folder) as files:
        return {name: files.read(name) for name in files.entries}


def ties(three: Three) -> dict[str, Any]:
    base, one, two = three
    return {
        "merge": 1,
        "merge_method": "ties",
        "base_model": base,
        "models": [{"model": one}, {"model": two}],
        "parameters": {"density": 0.4},
    }


def test_a_weighted_mean_with_filters_and_gradients(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    _, one, two = three
    loaded = recipe(
        merge=1,
        merge_method="linear",
        models=[
            {
                "model": one,
                "parameters": {"weight": [{"filter": "mlp", "value": [0.0, 1.0]}, {"value": 0.25}]},
            },
            {"model": two, "parameters": {"weight": 0.75}},
        ],
    )
    merge(loaded, tmp_path / "out")
    found, a, b = (weights(folder) for folder in (tmp_path / "out", one, two))
    assert list(found) == list(a)
    for name, value in found.items():
        layer = int(name.split(".")[2]) if "layers" in name else 0
        w = layer / 2 if "mlp" in name else 0.25
        assert torch.allclose(value, (w * a[name] + 0.75 * b[name]) / (w + 0.75), atol=1e-6)


def test_bytes_do_not_depend_on_shards_threads_or_the_seed_of_hashes(
    three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    keys = {**ties(three), "merge_method": "dare_ties"}
    merge(recipe(**keys), tmp_path / "out", n_workers=1, chunk_elements=32)
    merge(recipe(**keys), tmp_path / "small", n_workers=3, chunk_elements=32, shard_bytes=1500)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 3
    one, two = weights(tmp_path / "out"), weights(tmp_path / "small")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    code = (
        "import sys; from pathlib import Path; from finetune.recipe.merge_loader import load_merge; "
        "from finetune.merge.models.merge import merge_models; "
        "merge_models(load_merge(Path(sys.argv[1])), Path(sys.argv[2]), load=False, chunk_elements=32)"
    )
    path = recipe(**keys).path
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "other")], check=True, env=environment
    )
    name = "model.safetensors"
    assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_from_disk_as_in_memory(
    method: str, three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    from finetune.merge.methods.chunk import Settings, merge_tensors
    from finetune.merge.methods.draw import stream

    base, one, two = three
    rule = METHOD_RULES[method]
    chosen = [one, two][: rule.n_models[1]]
    keys: dict[str, Any] = {
        "merge": 1,
        "merge_method": method,
        "models": [{"model": folder} for folder in chosen],
    }
    if rule.base in ("deltas", "end"):
        keys["base_model"] = base
    keys["parameters"] = {
        k: v for k, v in {"density": 0.6, "weight": 0.7, "scale": 2.0}.items() if k in rule.reads
    }
    if method == "ties":
        keys["dialect"] = "mergekit"  # the paper's trims over the whole model, which one tensor does not tell
    merge(recipe(**keys), tmp_path / "out")
    name = "model.layers.1.mlp.down_proj.weight"
    settings = Settings(
        dialect=keys.get("dialect", "paper"),
        weight=(0.7,) * len(chosen),
        density=(0.6,) * len(chosen),
        gamma=(0.01,) * len(chosen),
        epsilon=(0.15,) * len(chosen),
        scale=(2.0,) * len(chosen),
        streams=tuple(stream(17, name, i) for i in range(len(chosen))),
    )
    start = weights(base)[name] if "base_model" in keys else None
    expected = merge_tensors(
        METHODS[method], [weights(folder)[name] for folder in chosen], settings, base=start
    )
    assert torch.allclose(weights(tmp_path / "out")[name], expected, atol=1e-6)


def test_ties_of_the_paper_trims_over_the_whole_model(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    base, one, _ = three
    big = weights(one)
    name = "model.layers.0.mlp.up_proj.weight"
    start = weights(base)
    big[name] = start[name] + 50 * (big[name] - start[name])
    save_file(big, one / "model.safetensors")
    keys = {**ties(three), "models": [{"model": one}], "parameters": {"density": 0.05}}
    merge(recipe(**keys), tmp_path / "paper")
    merge(recipe(**keys, dialect="mergekit"), tmp_path / "kit")
    changed = {
        which: {n: float((v != start[n]).float().mean()) for n, v in weights(tmp_path / which).items()}
        for which in ("paper", "kit")
    }
    total = sum(v.numel() for v in start.values())
    kept = sum(changed["paper"][n] * start[n].numel() for n in start)
    assert kept / total == pytest.approx(0.05, abs=0.005)
    assert changed["paper"][name] > 0.8  # nearly all of the largest changes lie there
    assert sum(share == 0 for share in changed["paper"].values()) > 20
    assert all(0 < share < 0.2 for share in changed["kit"].values())


def test_a_killed_merge_continues_after_its_last_shard(
    three: Three, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ties(three)
    merge(recipe(**keys), tmp_path / "whole", shard_bytes=1500)
    written: list[str] = []
    write_shard = execute.write_shard

    def killed(file: Path, *rest: Any) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(file.name)
        return write_shard(file, *rest)

    monkeypatch.setattr(execute, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        merge(recipe(**keys), tmp_path / "out", shard_bytes=1500)
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.merging"
    assert (partial / KEY_FILE).is_file()
    monkeypatch.setattr(
        execute, "write_shard", lambda *given: written.append(given[0].name) or write_shard(*given)
    )
    done = merge(recipe(**keys), tmp_path / "out", shard_bytes=1500)
    assert done.shards_reused >= 1
    assert not partial.exists()
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_another_recipe_does_not_take_up_what_was_interrupted(
    three: Three, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(merger: Any, folder: Path, checksums: Any) -> None:
        raise KeyboardInterrupt

    verify = execute.ModelMerger.verify
    monkeypatch.setattr(execute.ModelMerger, "verify", killed)
    with pytest.raises(KeyboardInterrupt):
        merge(recipe(**ties(three)), tmp_path / "out")
    monkeypatch.setattr(execute.ModelMerger, "verify", verify)
    keys = {**ties(three), "parameters": {"density": 0.9}}
    assert merge(recipe(**keys), tmp_path / "out").shards_reused == 0


def test_a_tied_head_that_was_saved_is_not_written(
    save: Save, tensors: Tensors, recipe: Recipe, tmp_path: Path
) -> None:
    folders = []
    for seed in (1, 2):
        values = tensors(seed)
        values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
        folders.append(save(f"m{seed}", values, tie_word_embeddings=True))
    loaded = recipe(merge=1, merge_method="linear", models=[{"model": folder} for folder in folders])
    done = merge(loaded, tmp_path / "out")
    assert "lm_head.weight" not in weights(tmp_path / "out")
    assert done.n_parameters == sum(v.numel() for v in weights(tmp_path / "out").values())


def test_layers_are_stacked_and_the_configuration_counts_them(
    three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    _, one, two = three
    loaded = recipe(
        merge_method="passthrough",
        slices=[
            {"sources": [{"model": one, "layer_range": [0, 2]}]},
            {
                "sources": [
                    {
                        "model": two,
                        "layer_range": [1, 3],
                        "parameters": {"scale": [{"filter": "o_proj", "value": 0.0}, {"value": 1.0}]},
                    }
                ]
            },
        ],
    )
    merge_models(loaded, tmp_path / "out")  # with the proof that transformers loads and computes with it
    found, a, b = (weights(folder) for folder in (tmp_path / "out", one, two))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4
    assert torch.equal(found["model.layers.3.mlp.up_proj.weight"], b["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(
        found["model.layers.1.self_attn.o_proj.weight"], a["model.layers.1.self_attn.o_proj.weight"]
    )
    assert not found["model.layers.2.self_attn.o_proj.weight"].any()
    assert torch.equal(found["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], b["lm_head.weight"])


def test_types_are_kept_or_chosen_and_sums_are_taken_in_fp32(
    save: Save, recipe: Recipe, tmp_path: Path
) -> None:
    folders = [save(f"m{i}", i, dtype=torch.bfloat16) for i in range(3)]
    keys: dict[str, Any] = {"merge": 1, "merge_method": "linear", "models": [{"model": f} for f in folders]}
    merge(recipe(**keys), tmp_path / "kept")
    merge(recipe(**keys, dtype="float32"), tmp_path / "wide")
    name = "model.layers.0.mlp.up_proj.weight"
    values = [weights(folder)[name].float() for folder in folders]
    exact = (values[0] + values[1] + values[2]) / 3
    kept = weights(tmp_path / "kept")[name]
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, exact.to(torch.bfloat16))
    assert torch.allclose(weights(tmp_path / "wide")[name], exact)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_diagnostics_of_every_tensor(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    done = merge(recipe(**ties(three)), tmp_path / "out", diagnostics=True)
    rows = json.loads((tmp_path / "out" / "diagnostics.json").read_text())
    base, one, two = (weights(folder) for folder in three)
    name = "model.layers.1.mlp.up_proj.weight"
    row = rows[name]
    deltas = [(other[name] - base[name]).flatten() for other in (one, two)]
    assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(*deltas, dim=0)), abs=1e-5)
    assert row["sign_conflict"] == pytest.approx(float((deltas[0] * deltas[1] < 0).float().mean()))
    change = weights(tmp_path / "out")[name] - base[name]
    assert row["delta_norm"] == pytest.approx(float(change.norm()), rel=1e-5)
    assert row["moved_share"] == pytest.approx(float((change != 0).float().mean()))
    assert rows.keys() == base.keys()
    assert done.diagnostics is not None
    assert done.diagnostics["sign_conflict"]["worst"] == max(row["sign_conflict"] for row in rows.values())


def refused(loaded: LoadedMerge, out: Path, match: str) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        merge(loaded, out)
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}*"))
    return caught.value


def pair(one: Path, two: Path, **given: Any) -> dict[str, Any]:
    return {"merge": 1, "merge_method": "linear", "models": [{"model": one}, {"model": two}], **given}


def test_missing_and_extra_tensors_are_named(
    save: Save, tensors: Tensors, recipe: Recipe, tmp_path: Path
) -> None:
    values = tensors(1)
    values["model.layers.0.mlp.gate.weight"] = values.pop("model.layers.1.mlp.up_proj.weight")
    one, two = save("one", 0), save("two", values)
    error = refused(
        recipe(**pair(one, two)), tmp_path / "out", r"lacks model\.layers\.1\.mlp\.up_proj\.weight"
    )
    assert "has also model.layers.0.mlp.gate.weight" in str(error)


def test_nan_is_found_and_its_tensor_named(
    save: Save, tensors: Tensors, recipe: Recipe, tmp_path: Path
) -> None:
    base, one = save("base", 0), save("one", 1)
    values = tensors(2)
    values["model.layers.2.mlp.down_proj.weight"][3, 3] = float("nan")
    two = save("two", values)
    named = r"model\.layers\.2\.mlp\.down_proj\.weight of .*two holds NaN"
    refused(recipe(**pair(one, two)), tmp_path / "a", named)
    for dialect in ("paper", "mergekit"):
        keys = {**ties((base, one, two)), "dialect": dialect}
        refused(recipe(**keys), tmp_path / "b", named)
    keys = {"merge": 1, "merge_method": "slerp", "base_model": one, "models": [{"model": two}]}
    refused(recipe(**keys), tmp_path / "c", named)


def test_a_result_that_does_not_fit_its_type_is_refused(
    save: Save, tensors: Tensors, recipe: Recipe, tmp_path: Path
) -> None:
    big = {name: value * 1e6 for name, value in tensors(1).items()}
    keys = pair(save("one", big), save("two", 2), dtype="float16")
    refused(recipe(**keys), tmp_path / "out", "overflows float16")


def test_damaged_and_absent_shards_are_refused(save: Save, recipe: Recipe, tmp_path: Path) -> None:
    one, two = save("one", 1), save("two", 2)
    file = two / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-10])
    refused(recipe(**pair(one, two)), tmp_path / "out", "model.safetensors is damaged")
    file.write_bytes(raw)
    file.rename(two / "model-00001-of-00002.safetensors")
    names = dict.fromkeys(
        load_file(two / "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"
    )
    index = {"weight_map": {**names, "model.layers.9.absent": "model-00001-of-00002.safetensors"}}
    (two / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(
        recipe(**pair(one, two)),
        tmp_path / "out",
        "the index and the shards disagree: 1 tensors named but absent",
    )


def test_models_of_other_architectures_are_refused(save: Save, recipe: Recipe, tmp_path: Path) -> None:
    one, two = save("one", 1), save("two", 2, num_attention_heads=4, model_type="mistral")
    error = refused(recipe(**pair(one, two)), tmp_path / "out", "other architectures")
    assert "num_attention_heads 2 and 4" in str(error)


def test_a_used_folder_and_a_small_disk_are_refused(
    three: Three, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, one, two = three
    with pytest.raises(UserError, match="holds weights already"):
        merge(recipe(**pair(one, two)), one)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(recipe(**pair(one, two)), tmp_path / "out", "the result needs")


def test_a_merge_that_equals_a_parent_is_refused(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    _, one, two = three
    keys = pair(one, two)
    keys["models"][1]["parameters"] = {"weight": 0.0}
    refused(recipe(**keys), tmp_path / "out", "the merged model equals .*one, value for value")
    keys = {
        "merge": 1,
        "merge_method": "slerp",
        "base_model": one,
        "models": [{"model": two}],
        "parameters": {"t": 1},
    }
    refused(recipe(**keys), tmp_path / "out", "the merged model equals .*two")


def test_layers_that_do_not_exist_are_refused(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    keys = {
        "merge_method": "passthrough",
        "slices": [{"sources": [{"model": three[0], "layer_range": [1, 4]}]}],
    }
    refused(recipe(**keys), tmp_path / "out", r"layers \[1, 4\] of .*base, which has 3")


def test_slices_of_models_of_other_sizes_are_refused(
    save: Save, tensors: Tensors, recipe: Recipe, tmp_path: Path
) -> None:
    one = save("one", 1)
    values = {name: value[..., :4].contiguous() for name, value in tensors(2).items()}
    two = save("two", values)
    sources = [{"model": folder, "layer_range": [0, 2]} for folder in (one, two)]
    keys = {"merge_method": "linear", "slices": [{"sources": sources}]}
    refused(recipe(**keys), tmp_path / "out", r"has the shape \[12, 4\], another source \[12, 8\]")


def test_two_merges_do_not_write_one_folder(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    from finetune.merge.place import resumable_place

    with resumable_place(tmp_path / "out", "key") as folder:
        with pytest.raises(UserError, match="another process is writing"):
            merge(recipe(**pair(three[1], three[2])), tmp_path / "out")
        (folder / "kept").write_text("x")
    assert (tmp_path / "out" / "kept").is_file()


def test_weights_that_cancel_but_for_binary_rounding_sum_to_zero(
    three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    models = [
        {"model": model, "parameters": {"weight": weight}}
        for model, weight in zip(three, (0.1, 0.2, -0.3), strict=True)
    ]
    with pytest.raises(UserError, match="sum to zero"):
        merge(recipe(merge_method="linear", models=models), tmp_path / "out")


def test_a_window_of_probabilities_that_is_too_wide_is_told_once(
    three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    keys = ties(three) | {"merge_method": "della", "parameters": {"density": 0.1, "epsilon": 0.5}}
    with pytest.raises(UserError) as raised:
        merge(recipe(**keys), tmp_path / "out")
    assert [fault.what.count("the first such tensor") for fault in raised.value.faults] == [1]


def test_a_filter_that_fits_no_tensor_is_a_fault_in_ours_and_a_remark_in_mergekits(
    three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    base, one, two = three
    weight = [{"filter": "mpl", "value": 0.8}, {"filter": "mlp", "value": 0.6}, {"value": 0.4}]
    keys: dict[str, Any] = {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "models": [{"model": one, "parameters": {"weight": weight}}, {"model": two}],
    }
    with pytest.raises(UserError, match="the filter 'mpl' fits no tensor"):
        merge(recipe(merge=1, **keys), tmp_path / "out")
    done = merge(recipe(**keys), tmp_path / "out")
    assert done.remarks == ["the filter 'mpl' fits no tensor, so its value has no effect"]


def test_a_tensor_that_only_a_later_source_of_a_slice_has_is_named(
    save: Save, tensors: Tensors, recipe: Recipe, tmp_path: Path
) -> None:
    extra = tensors(1) | {"model.layers.1.self_attn.q_proj.bias": torch.ones(8)}
    one, two = save("plain", 0), save("biased", extra)
    sources = [{"model": model, "layer_range": [0, 3]} for model in (one, two)]
    keys = {"merge_method": "slerp", "base_model": one, "slices": [{"sources": sources}]}
    with pytest.raises(UserError, match=r"biased has also model\.layers\.1\.self_attn\.q_proj\.bias"):
        merge(recipe(**keys, parameters={"t": 0.5}), tmp_path / "out")


def test_one_folder_under_two_names_is_refused(three: Three, recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(three[1])
    for again in (tmp_path / "link", f"{three[1]}/"):
        models = [{"model": three[1]}, {"model": again}]
        with pytest.raises(UserError, match="are the same folder"):
            merge(recipe(merge_method="linear", models=models), tmp_path / "out")


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_as_output_folder_is_followed(
    three: Three, recipe: Recipe, tmp_path: Path, exists: bool
) -> None:
    target, link = tmp_path / "big-disk", tmp_path / "link"
    if exists:
        target.mkdir()
    link.symlink_to(target)
    merge(recipe(**ties(three)), link)
    assert link.is_symlink() and (target / "model.safetensors").is_file()
    assert not list(tmp_path.glob(".*merging*"))


def test_a_folder_that_was_filled_meanwhile_is_not_written_into(
    three: Three, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = execute.ModelMerger.write

    def fill(*given: Any) -> Any:
        out.mkdir()
        (out / "theirs").write_text("x")
        return write(*given)

    monkeypatch.setattr(execute.ModelMerger, "write", fill)
    with pytest.raises(UserError, match="holds files already"):
        merge(recipe(**ties(three)), out)
    assert [path.name for path in out.iterdir()] == ["theirs"]


def test_damaged_descriptions_of_a_model_are_not_to_be_deleted(
    three: Three, recipe: Recipe, tmp_path: Path
) -> None:
    for text in ("{bad", "[]"):
        (three[1] / "config.json").write_text(text)
        with pytest.raises(UserError) as raised:
            merge(recipe(**ties(three)), tmp_path / "out")
        assert "copy or download" in raised.value.faults[0].fix
