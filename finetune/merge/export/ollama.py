"""A Modelfile for Ollama beside a GGUF file: where the weights are, what ends an answer, and how turns are written.

Ollama's templates are another language than the model's. Turns of the form `START role NEWLINE text END NEWLINE` are proven
on renderings and written out; any other form is left to what Ollama makes of the template inside the file, and said so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.paths import write_atomic

_ASKED, _TOLD, _SAID = "QUESTION-7f3a", "SYSTEM-51bc", "ANSWER-02de"


def write_modelfile(path: Path, weights: Path, tokenizer: Any, *, context_tokens: int) -> bool:
    """Write `path`; returns whether the turns could be written out. `tokenizer` is that of the exported model."""
    turns = _turns(tokenizer)
    lines = [f"FROM ./{weights.name}", f"PARAMETER num_ctx {context_tokens}"]
    if tokenizer.eos_token:
        lines.append(f"PARAMETER stop {_quoted(tokenizer.eos_token)}")
    if turns is not None:
        start, end, system = turns
        lines.append(f'TEMPLATE """{_go_template(start, end)}"""')
        if system:
            lines.append(f'SYSTEM """{system}"""')
    elif tokenizer.chat_template:
        lines.append(
            "# The chat template lies in the weights file; check that Ollama recognised it: ollama show --template"
        )
    write_atomic(path, "\n".join(lines) + "\n")
    return turns is not None


def _go_template(start: str, end: str) -> str:
    turn = f"{start}{{{{ .Role }}}}\n{{{{ .Content }}}}{end}\n"
    return f"{{{{- range .Messages }}}}{turn}{{{{- end }}}}{start}assistant\n"


def _turns(tokenizer: Any) -> tuple[str, str, str] | None:
    """(before the role, after the text, system turn that the template adds by itself) where every rendering has that form."""
    if not isinstance(tokenizer.chat_template, str):
        return None
    system, user, said = (
        {"role": role, "content": text}
        for role, text in (("system", _TOLD), ("user", _ASKED), ("assistant", _SAID))
    )
    try:
        whole = _rendered(tokenizer, [system, user, said, user])
        start, _, rest = whole.partition(f"system\n{_TOLD}")
        end = rest.split(f"{start}user\n", 1)[0].removesuffix("\n")
        alone = _rendered(tokenizer, [user])
    except Exception:  # a template may refuse a role, in whatever way it likes
        return None
    if not start or not end:
        return None

    def written(*messages: dict[str, str]) -> str:
        turns = "".join(f"{start}{one['role']}\n{one['content']}{end}\n" for one in messages)
        return f"{turns}{start}assistant\n"

    if whole != written(system, user, said, user):
        return None
    if alone == written(user):
        return start, end, ""
    added = alone.removeprefix(f"{start}system\n").split(f"{end}\n", 1)[0]
    return (start, end, added) if alone == written({"role": "system", "content": added}, user) else None


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
