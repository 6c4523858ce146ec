"""The language of a text, offline, by py3langid (a maintained fork of langid.py; BSD-3-Clause, 4.5 MB with its model).

Short texts often carry too little to tell: those are 'und' (undetermined, ISO 639-2), never a guess.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

# The languages that users tune for. The library knows many more; of two close relatives it would often take the rare one.
_CODES = """
    af am ar az be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hr ht hu hy id is it ja jv ka kk km
    kn ko ku ky la lb lo lt lv mg mk ml mn mr ms mt ne nl no oc or pa pl ps pt qu ro ru rw se si sk sl sq sr sv sw ta te
    th tl tr ug uk ur uz vi vo wa xh zh zu
"""
LANGUAGES = tuple(_CODES.split())
UNDETERMINED = "und"
_LEAST_LETTERS = 12
_CHARACTERS_READ = 400
_NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|\S+@\S+|[^\W\d_]*[\d_][\w.]*|[{}\[\]<>|=;/\\]", re.DOTALL
)
_OWN_SCRIPT = re.compile(r"[\u0370-\u03ff\u0530-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def language_of(text: str) -> str:
    """ISO 639-1 code of the language of the beginning of `text`; 'und' where that cannot be told.

    Code, links and numbers are left out first. Three letters are enough in a script of one or few languages, twelve
    elsewhere; and the identifier must give its answer at least one half, or 0.3 and three times what the next has.
    """
    prose = _NO_PROSE.sub(" ", text[: 4 * _CHARACTERS_READ])[:_CHARACTERS_READ]
    n_own = len(_OWN_SCRIPT.findall(prose))
    if n_own < 3 and sum(character.isalpha() for character in prose) < _LEAST_LETTERS:
        return UNDETERMINED
    (code, probability), (_, next_best) = _identifier().rank(prose.strip())[:2]
    is_clear = probability >= 0.5 or (probability >= 0.3 and probability >= 3 * next_best)
    return str(code) if is_clear else UNDETERMINED


def forget_languages() -> None:
    """Give back the 80 MB that telling languages takes; the next text loads them anew, in half a second."""
    _identifier.cache_clear()


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([code for code in LANGUAGES if code in identifier.labels])
    return identifier
