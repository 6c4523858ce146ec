"""The one resolver: a recipe file, what it extends, its profile and `--set` overrides become one Recipe with every default
written out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, cast

from finetune.digest import digest_json
from finetune.paths import find_declarative
from finetune.recipe.constraints import MISSING
from finetune.recipe.extends import read_chain, without_extends
from finetune.recipe.fit import fit
from finetune.recipe.nodes import leaves
from finetune.recipe.overrides import apply_overrides, has_key, parse_overrides
from finetune.recipe.profiles import (
    apply_profile,
    chosen_profile,
    profile_faults,
    profile_names,
    without_entries,
)
from finetune.recipe.renamed import RECIPE_NAMES_ELSEWHERE
from finetune.recipe.schema import Recipe, RecipeFile
from finetune.recipe.yaml_loader import Loaded, raise_faults, with_defaults

_UNICODE_BREAK = re.compile("[\x85\u2028\u2029\ufeff]")
RESULT_NEUTRAL = (
    "description",
    "profile",
    "profiles",
    "eval.batch_size",
    "eval.prices",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.pin_checkpoints",
    "train.report_to",
    "train.samples",
    "distil.teacher.licence",
)
"""Keys outside the digest: words, profiles (applied by then), and switches that change speed, disk, trackers or prices but
no number of the result. A run may be continued after changing one of them, e.g. a smaller batch after running out of memory."""


def read_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[Recipe]:
    """Like `load_recipe`, with the origin of every value."""
    file = find_declarative("recipes", str(path))
    chain = read_chain(file)
    parsed, override_faults = parse_overrides(overrides)
    parsed, refused = without_extends(parsed)
    faults, placed = [*chain.faults, *override_faults, *refused], [*chain.placed]
    root = with_defaults(chain.root, {"name": file.stem})
    # `profile` itself may come from a flag; the other flags go on top of the profile.
    root = apply_overrides(root, [override for override in parsed if override.key == "profile"])
    name, unknown = chosen_profile(root)
    # The file is checked by itself too, and its unused profiles with those flags that give what the file leaves open.
    _, alone = fit(root, RecipeFile, RECIPE_NAMES_ELSEWHERE)
    written = apply_overrides(root, [override for override in parsed if not has_key(root, override.key)])
    _, own = fit(written, RecipeFile, RECIPE_NAMES_ELSEWHERE)
    placed += (unknown if chain.whole else []) + [
        pair for pair in alone if not pair[1].what.startswith(MISSING)
    ]
    placed += profile_faults(written, RECIPE_NAMES_ELSEWHERE, own)
    if name is not None:
        root = apply_profile(root, name)
    root = apply_overrides(root, [override for override in parsed if override.key != "profile"])
    root = without_entries(root, name)
    value, found = fit(root, RecipeFile, RECIPE_NAMES_ELSEWHERE)
    placed += found
    if not chain.whole:  # what is missing may stand in the base that could not be read
        placed = [pair for pair in placed if not pair[1].what.startswith(MISSING)]
    raise_faults(faults, placed)
    return Loaded(cast(RecipeFile, value).resolved(), file, dict(leaves(root)))


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` (or a shipped name such as 'sft/home_intents_lora') with `overrides` ('a.b=c') applied.

    The name defaults to the file's stem. `profile=smoke` among the overrides applies that entry of `profiles` before
    the others; in the result `profiles` keeps only the applied name, empty, so that reading it again changes nothing.
    Raises UserError with every fault at once.
    """
    return read_recipe(path, overrides).value


def profiles_of(path: Path | str) -> list[str]:
    """Names of the profiles that the file at `path` offers, inherited ones included."""
    return profile_names(read_chain(find_declarative("recipes", str(path))).root)


def resolved_yaml(recipe: Recipe) -> str:
    """YAML with every default written out, in schema order; the same recipe gives the same bytes, and reads back equal."""
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class Representer(SafeRepresenter):
        """Text with a line break of Unicode in quotes: written plain, it would be folded to a space when read."""

    def text(representer: Any, value: str) -> Any:
        style = '"' if _UNICODE_BREAK.search(value) else None
        return representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Representer.add_representer(str, text)
    writer: Any = YAML(typ="safe", pure=True)
    writer.Representer = Representer
    writer.default_flow_style = False
    writer.allow_unicode = True
    writer.sort_base_mapping_type_on_output = False
    writer.width = 2**20
    stream = StringIO()
    writer.dump(recipe.model_dump(mode="json"), stream)
    return stream.getvalue()


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 hex of the resolved recipe without RESULT_NEUTRAL: equal digests promise equal results.

    What has its default has no part in it, so that a key that a later version adds leaves the names of older runs alone.
    """
    content: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    for dotted in RESULT_NEUTRAL:
        *sections, leaf = dotted.split(".")
        held: Any = content
        for section in sections:
            held = (held or {}).get(section)
        if held is not None:
            held.pop(leaf, None)
    return digest_json(_without_empty(content))


def _without_empty(value: dict[str, Any]) -> dict[str, Any]:
    """Sections in which everything has its default are left out, too."""
    kept = {key: _without_empty(held) if isinstance(held, dict) else held for key, held in value.items()}
    return {key: held for key, held in kept.items() if held != {}}
