"""Keys and passwords in texts, by the forms that their issuers document; nothing is reported for being random alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

Span = tuple[str, int, int]  # kind, first character, past the last

# (a part that every such key has, looked for first because it is cheap; the whole form)
_FORMS = [
    ("AKIA", r"\bAKIA[A-Z2-7]{16}\b"),  # AWS access key
    ("ASIA", r"\bASIA[A-Z2-7]{16}\b"),
    ("gh", r"\bgh[pousr]_[A-Za-z0-9]{36,255}\b"),  # GitHub tokens
    ("github_pat_", r"\bgithub_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}\b"),
    ("glpat-", r"\bglpat-[\w-]{20,}"),  # GitLab
    ("sk-", r"\bsk-(?:proj-|svcacct-|ant-[a-z]+\d+-)?[A-Za-z0-9_-]{32,}"),  # OpenAI, Anthropic
    ("_live_", r"\b[rs]k_live_[A-Za-z0-9]{24,}\b"),  # Stripe
    ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{20,}"),  # Slack
    ("hooks.slack.com", r"https://hooks\.slack\.com/services/T\w+/B\w+/\w{20,}"),
    ("AIza", r"\bAIza[\w-]{35}(?![\w-])"),  # Google
    ("hf_", r"\bhf_[A-Za-z]{34}\b"),  # Hugging Face
    ("npm_", r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("pypi-", r"\bpypi-AgEIcHlwaS5vcmc[\w-]{50,}"),
    ("SG.", r"\bSG\.[\w-]{22}\.[\w-]{43}(?![\w-])"),  # SendGrid
    ("eyJ", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}"),  # JSON web token
    ("PRIVATE KEY", r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]+?(?:-----END (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)"),
]  # fmt: skip
_KEYS = [(part, re.compile(form)) for part, form in _FORMS]
_VALUE = re.compile(r"""["'`]([^\s"'`]{16,200})["'`]""")
_ASSIGNED_TO = re.compile(
    r"""(?:(?:api|access|secret|private|auth|client|encryption)[_-]?(?:key|token|secret)|\b(?:secret|token|passw(?:or)?d|pwd))"""
    r"""["']?\s*(?::|=>?|:=)\s*\Z""",
    re.IGNORECASE,
)
_LONGEST_NAME = 40
_PASSWORD_IN_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:([^\s/@]{3,})@[\w.-]+")
_PLACEHOLDER = re.compile(
    r"your|example|sample|placeholder|change|insert|replace|dummy|secret|password|passwd|token|key_?here|x{4}|\*{3}|\.{3}"
    r"|1234|abcd|[<>${}%\[\]()]",
    re.IGNORECASE,
)
_LEAST_BITS = 3.5  # a character, of the value's own distribution; words have about 3


def find_secrets(text: str) -> Iterator[Span]:
    """Every key ('KEY') and password ('PASSWORD') in `text` that has the form of one.

    Besides documented forms: a quoted value that looks random, assigned to a name like api_key, and the password of a
    URL. Placeholders ("your-api-key", "xxxx", "${TOKEN}") are none.
    """
    for part, form in _KEYS:
        if part in text:
            for match in form.finditer(text):
                if not re.search(r"(.)\1{9}|x{6}|X{6}|EXAMPLE", match.group()[:200]):
                    yield "KEY", match.start(), match.end()
    for value in _VALUE.finditer(text):
        if _ASSIGNED_TO.search(text[max(0, value.start() - _LONGEST_NAME) : value.start()]) and _looks_random(
            value.group(1)
        ):
            yield "KEY", value.start(1), value.end(1)
    if "://" in text:
        for match in _PASSWORD_IN_URL.finditer(text):
            if not _PLACEHOLDER.search(match.group(1)) and match.group(1) not in (
                "pass",
                "pwd",
                "pw",
                "postgres",
            ):
                yield "PASSWORD", match.start(1), match.end(1)


def _looks_random(value: str) -> bool:
    counts = Counter(value).values()
    bits = -sum(n / len(value) * math.log2(n / len(value)) for n in counts)
    mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return bits >= _LEAST_BITS and mixed and not _PLACEHOLDER.search(value)
