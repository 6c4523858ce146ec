"""What lies beside the weights of a merged model: tokenizer, chat template, generation configuration, licence, card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.paths import read_json, write_atomic

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TEMPLATE_FOLDER = "additional_chat_templates"
GENERATION_FILE = "generation_config.json"
_KEPT_PATTERNS = (
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
    "preprocessor_config.json",
    "processor_config.json",
)


def has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    )


def load_tokenizer_of(folder: Path) -> Any | None:
    """The tokenizer saved in a folder, None when there is none. Nothing is downloaded and no code is run."""
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded: {(str(error) or type(error).__name__).splitlines()[0]}",
            fix="save it again with tokenizer.save_pretrained(folder)",
        ) from error


def check_tokenizers(base: Path, adapter: Path, n_embedding_rows: int) -> None:
    """The tokenizer saved with the adapter must number its tokens as the base's does, and have a row for every token.

    Sizes say nothing: two tokenizers of equal size with two ids swapped would feed each token the other's row.
    """
    if not has_tokenizer(adapter):
        return
    theirs = load_tokenizer_of(adapter)
    assert theirs is not None
    by_id = {index: token for token, index in theirs.get_vocab().items()}
    ours = load_tokenizer_of(base)
    if ours is not None:
        base_by_id = {index: token for token, index in ours.get_vocab().items()}
        differing = sorted(
            index for index in base_by_id.keys() & by_id.keys() if base_by_id[index] != by_id[index]
        )
        if differing:
            first = differing[0]
            raise UserError(
                f"the adapter was trained with another tokenizer: {len(differing)} ids stand for other tokens, the first "
                f"is {first} ('{base_by_id[first]}' in the base, '{by_id[first]}' in the adapter)",
                where=str(adapter),
                why="each of them would be looked up in the other token's row",
                fix="name the base it was trained on with --base",
            )
    without_row = sorted(index for index in by_id if index >= n_embedding_rows)
    if without_row:
        raise UserError(
            f"{len(without_row)} tokens of the adapter's tokenizer have no embedding row, the first is {without_row[0]} "
            f"('{by_id[without_row[0]]}'); base and adapter hold {n_embedding_rows} rows",
            where=str(adapter),
            why="the vocabulary was enlarged for training, and the new rows were not saved with the adapter",
            fix=f"resize the base to {without_row[-1] + 1} before training, and save the adapter with "
            "model.save_pretrained(folder, save_embedding_layers=True)",
        )


def copy_companions(base: Path, adapter: Path, out: Path) -> None:
    """Copy tokenizer, chat template and generation configuration: the adapter's where it brings its own, else the base's."""
    source = adapter if has_tokenizer(adapter) else base
    _copy(source, out, TOKENIZER_FILES)
    template_source = source if has_template(source) else base
    _copy(template_source, out, TEMPLATE_FILES)
    if (template_source / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(template_source / TEMPLATE_FOLDER, out / TEMPLATE_FOLDER)
    if template_source is not source:
        _inline_template(template_source, out)
    _copy(adapter if (adapter / GENERATION_FILE).is_file() else base, out, (GENERATION_FILE,))
    for pattern in _KEPT_PATTERNS:
        _copy(base, out, tuple(path.name for path in sorted(base.glob(pattern)) if path.is_file()))


def companion_bytes(base: Path, adapter: Path) -> int:
    """An upper bound of what `copy_companions` writes."""
    names = (*TOKENIZER_FILES, *TEMPLATE_FILES, GENERATION_FILE)
    return sum(
        (folder / name).stat().st_size
        for folder in (base, adapter)
        for name in names
        if (folder / name).is_file()
    )


def has_template(folder: Path) -> bool:
    """Whether a tokenizer's folder brings a chat template, as a file or inside its configuration."""
    return any((folder / name).is_file() for name in TEMPLATE_FILES) or bool(
        _tokenizer_config(folder).get("chat_template")
    )


def _inline_template(source: Path, out: Path) -> None:
    """Carry over a template that lies inside the base's tokenizer_config.json."""
    template = _tokenizer_config(source).get("chat_template")
    if template and not has_template(out):
        config = _tokenizer_config(out) | {"chat_template": template}
        write_atomic(out / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content


def _copy(source: Path, out: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


HOW_TO_LOAD = (
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'model = AutoModelForCausalLM.from_pretrained(".")',
    'tokenizer = AutoTokenizer.from_pretrained(".")',
    "```",
)
"""Lines of every model card."""


def model_card(*, base_id: str, facts: dict[str, str]) -> str:
    """README.md of the merged model: front matter that hubs read, and how it was made and proven, one line each."""
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    # Folders and embedded models have no page that a hub could link to.
    if not base_id.startswith((".", "/", "~")) and ":" not in base_id:
        front.append(f"base_model: {json.dumps(base_id)}")
    front += ["tags:", "- merge", "---"]
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(
        [
            *front,
            "",
            "# Merged model",
            "",
            "An adapter merged into its base. The figures compare base plus adapter with these files, read back from disk, "
            "on fixed prompts.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            *HOW_TO_LOAD,
            "",
        ]
    )
