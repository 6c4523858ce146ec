"""From a template of this package to one self-contained page.

Model output, data and file names are hostile until shown otherwise. Three layers keep them text: every value passes
`_printed` (hidden characters spelled out, absent values named), Jinja escapes it, and the content security policy
runs nothing but the two blocks whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finetune.report.numbers import arm_name, sentence_case, words
from finetune.report.untrusted import visible

_TEMPLATES = Path(__file__).parent / "templates"
_ABSENT = Markup('<span class="absent">not recorded</span>')


def render(template: str, **values: Any) -> str:
    """The whole page as HTML, with the package's style and script in it; equal values give equal bytes."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = _policy(style, script)
    return _environment().get_template(template).render(policy=policy, style=style, script=script, **values)


def _printed(value: Any) -> Any:
    """What any expression of a template becomes before it is escaped. A bare float is a formatting that was forgotten."""
    if value is None:
        return _ABSENT
    if isinstance(value, float):
        raise TypeError(f"a number reached the page unformatted: {value!r}")
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["words"] = words
    environment.filters["arm"] = arm_name
    environment.filters["sentence_case"] = sentence_case
    return environment


@cache
def _asset(name: str) -> Markup:
    """A style sheet or script of this package, to stand inside its element as it is."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    """A content security policy that allows the page's own two inline blocks, by hash, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
