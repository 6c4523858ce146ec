"""The model card of a published model: what it was made of, by digest; how well it does, with intervals; how it was trained.

Everything comes from files that a run or a merge wrote. What was not recorded is said to be unknown, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.report.comparison import Comparison, read_comparisons
from finetune.report.numbers import arm_name, grouped
from finetune.report.read import Record, RunFiles, as_dict, as_text
from finetune.report.verdict import read_verdict
from finetune.units import format_duration

RECIPE_FILE = "training_recipe.yaml"
# What the hub knows by name; any other licence is `other` there, with its name beside it.
_LICENCE_NAMES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigcode-openrail-m afl-3.0
artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl apple-ascl mpl-2.0 odc-
by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl llama2 llama3 llama3.1
llama3.2 llama3.3 gemma unknown other
"""
_HUB_LICENCES = frozenset(_LICENCE_NAMES.split())


@dataclass(frozen=True, slots=True)
class Ingredient:
    """One thing a model was made of. `sha256` identifies its content; `licence` is None where nobody wrote it down."""

    what: str
    name: str
    sha256: str | None
    licence: str | None


@dataclass(frozen=True, slots=True)
class Publication:
    """Everything the card says. `base_ids` are hub ids that a hub can link to; `proof` the figures of the merge in words.

    kind: 'adapter', 'merged' (an adapter in its base), 'merge' (of models), or 'model'. `merge_recipe` of a merge of models.
    chat: whether the tokenizer has a template.
    """

    title: str
    kind: str
    licence: str | None
    ingredients: tuple[Ingredient, ...]
    base_ids: tuple[str, ...] = ()
    run: RunFiles | None = None
    proof: dict[str, str] = field(default_factory=dict)
    merge_recipe: str | None = None
    hub_id: str | None = None
    chat: bool = True


def hub_card(given: Publication) -> str:
    """README.md, front matter included."""
    parts = [
        f"---\n{_front(given)}\n---",
        f"# {given.title}",
        *_opening(given),
        "## What it is made of",
        *_ingredients(given),
        "## How well it does",
        *_evaluation(given),
        *_training(given.run),
        *_merging(given),
        "## How to use it",
        _usage(given),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(given: Publication) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    licence = given.licence
    named = licence.lower() if licence and licence.lower() in _HUB_LICENCES else None
    scores = [
        EvalResult(
            task_type="text-generation",
            dataset_type=one.text("suite"),
            dataset_name=one.text("suite"),
            metric_type=one.text("metric"),
            metric_value=one.record["mean_b"],
            metric_name=f"{one.metric}, n = {one.n}",
        )
        for one in _compared(given)
        if one.number("mean_b") is not None
    ]
    relation = {"adapter": "adapter", "merged": "finetune", "merge": "merge"}.get(given.kind, "finetune")
    related: dict[str, Any] = {"base_model_relation": relation} if given.base_ids else {}
    tags = [relation] if relation != "finetune" else []
    data = ModelCardData(
        license=named or ("other" if licence else None),
        license_name=None if named else licence,
        base_model=list(given.base_ids) or None,
        library_name="peft" if given.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        model_name=given.title if scores else None,
        eval_results=scores or None,
        tags=[*tags, "finetune"],
        **related,
    )
    text: str = data.to_yaml()
    return text.strip()


def _compared(given: Publication) -> list[Comparison]:
    """Comparisons with the model's own base, that of a suite against its declared baseline alone."""
    if given.run is None:
        return []
    found: dict[tuple[str, str], Comparison] = {}
    for one in read_comparisons(given.run):
        key = one.text("suite"), one.text("metric")
        declared = as_dict(given.run.suite_records.get(key[0])).get("against")
        if one.origin is None and (key not in found or one.text("baseline") == declared):
            found[key] = one
    return list(found.values())


def _opening(given: Publication) -> list[str]:
    what = {
        "adapter": "An adapter (PEFT): it needs its base model.",
        "merged": "An adapter merged into its base model: loads like any model.",
        "merge": "Several models merged into one.",
    }.get(given.kind, "A tuned model: all of its weights were trained.")
    told = as_text(given.run.recipe_value("description")) if given.run else None
    return [line_of(told) if told else "", what]


def _ingredients(given: Publication) -> list[str]:
    rows = [
        (
            one.what,
            line_of(one.name),
            f"`{one.sha256}`" if one.sha256 else "—",
            line_of(one.licence or "unknown"),
        )
        for one in given.ingredients
    ]
    licence = (
        f"Licence of this model: {line_of(given.licence)}."
        if given.licence
        else "Licence of this model: unknown."
    )
    taken = [one.name for one in given.ingredients if one.what == "base" and one.name not in given.base_ids]
    elsewhere = (
        f"The base was taken from {line_of(', '.join(taken))} when this model was made; the digest is of that content."
        if given.base_ids and taken
        else ""
    )
    unknown = [
        f"the {one.what} {one.name}" for one in given.ingredients if not one.licence and one.what != "adapter"
    ]
    warning = (
        f"**Warning**: nobody wrote down what the terms of {line_of(', '.join(unknown))} allow. Find out before this model "
        "is used or passed on."
        if unknown
        else ""
    )
    return [table(("", "name", "content (SHA-256)", "licence"), rows), elsewhere, licence, warning]


def _evaluation(given: Publication) -> list[str]:
    run, found = given.run, _compared(given)
    if run is None:
        return ["No evaluation was recorded with this model. Nothing is known about how well it answers."]
    if not found:
        return [read_verdict(run).sentence]
    rows = []
    for one in found:
        name = one.text("suite")
        base, own = (_level(run, one, arm) for arm in (one.text("baseline"), one.text("arm") or "tuned"))
        difference = f"{one.difference or '—'} [{one.interval or 'no interval'}]"
        rows.append((line_of(name), one.metric, base, own, difference, one.n or "—", one.judged.word.lower()))
    baselines = ", ".join(sorted({arm_name(one.text("baseline")) for one in found}))
    paired = (
        f"Every suite was asked of this model and of its base ({baselines}) with the same items, and compared item by item. "
        "In brackets: 95 % intervals."
    )
    if given.kind == "merged":
        paired += " The answers are those of the adapter on its base; that the merged weights answer alike is shown below."
    limits = [
        f"{one.text('suite')}, {one.metric}: {text}"
        for one in found
        if one.decides_suite and (text := one.limits())
    ]
    return [
        f"**{line_of(read_verdict(run).sentence)}**",
        table(("suite", "metric", "base", "this model", "difference", "items", "verdict"), rows),
        paired,
        "\n".join(f"- {line_of(text)}" for text in limits),
        "Nothing is known about what these suites do not ask.",
    ]


def _level(run: RunFiles, one: Comparison, name: str) -> str:
    arm = run.arm(one.text("suite"), name)
    held = arm.metric(one.text("metric")) if arm else {}
    value = one.unit.value(held.get("mean"))
    spread = one.unit.range(held.get("low"), held.get("high"))
    return f"{value} [{spread or 'no interval'}]" if value else "—"


def _training(run: RunFiles | None) -> list[str]:
    if run is None:
        return []
    steps = [event for event in run.events if event.get("event") == "step"]
    last = steps[-1] if steps else {}
    seconds = as_dict(as_dict(run.manifest.get("stages")).get("train")).get("seconds")
    value = run.recipe_value
    rows = [
        ("method", f"{value('train.method')}, {_adapter_words(run)}"),
        ("rows", grouped(as_dict(as_dict(run.data_manifest.get("splits")).get("train")).get("rows"))),
        ("epochs, steps", f"{_number(value('train.epochs'))}, {grouped(last.get('step')) or 'unknown'}"),
        ("tokens seen", grouped(last.get("tokens"))),
        (
            "optimizer",
            f"{value('train.optimizer')}, rate {value('train.learning_rate')}, {value('train.schedule')}",
        ),
        ("precision", f"{value('model.dtype')}, quantization of the base: {value('model.quantize')}"),
        ("seed", str(value("seed"))),
        ("time", format_duration(float(seconds)) if isinstance(seconds, int | float) else None),
        ("machine", _machine(run.environment)),
        ("recipe", f"[{RECIPE_FILE}]({RECIPE_FILE}), digest `{run.manifest.get('recipe_digest')}`"),
    ]
    return [
        "## How it was trained",
        table(("", ""), [(name, line_of(text or "unknown")) for name, text in rows]),
    ]


def _adapter_words(run: RunFiles) -> str:
    kind = run.recipe_value("adapter.kind")
    if kind in (None, "none"):
        return "all weights"
    return (
        f"{kind}, rank {run.recipe_value('adapter.rank')}, alpha {_number(run.recipe_value('adapter.alpha'))}"
    )


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "unknown"


def _machine(environment: Record) -> str | None:
    if not environment:
        return None
    devices = [str(as_dict(device).get("name")) for device in environment.get("accelerators") or []]
    packages = as_dict(environment.get("packages"))
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "transformers", "peft", "trl") if name in packages
    )
    where = ", ".join(devices) or f"{environment.get('processor')}, {environment.get('cores')} cores"
    return f"{where}; {versions}"


def _merging(given: Publication) -> list[str]:
    if not given.proof:
        return []
    lines = [
        "## How it was merged",
        table(("", ""), [(name, line_of(text)) for name, text in given.proof.items()]),
    ]
    if given.merge_recipe:
        lines.append(f"```json\n{given.merge_recipe.strip()}\n```")
    return lines


_CHAT_PROMPT = (
    'prompt = [{"role": "user", "content": "…"}]',
    'given = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
)
_PLAIN_PROMPT = ('given = tokenizer("…", return_tensors="pt")',)


def _usage(given: Publication) -> str:
    name = json.dumps(given.hub_id or ".")
    lines = ["```python"]
    if given.kind == "adapter":
        base = json.dumps(given.base_ids[0] if given.base_ids else "path/to/the/base")
        lines += [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), {name})",
        ]
    else:
        lines += [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({name})",
        ]
    lines += [
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        *(_CHAT_PROMPT if given.chat else _PLAIN_PROMPT),
        "answer = model.generate(**given, max_new_tokens=128)",
        'print(tokenizer.decode(answer[0, given["input_ids"].shape[1]:], skip_special_tokens=True))',
        "```",
    ]
    return "\n".join(lines)


def line_of(text: str) -> str:
    """Text from elsewhere on one line of a Markdown table: no cell ends early, and no tag or heading begins in it."""
    plain = " ".join(str(text).split())
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are one line each."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def readable(value: Any) -> Any:
    """A copy of a record in which folders of this machine are called by their last name: nobody else has them."""
    if isinstance(value, dict):
        return {key: readable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [readable(entry) for entry in value]
    if isinstance(value, str) and value[:1] in ("/", "~", ".") and "/" in value and Path(value).name:
        return Path(value).name
    return value
