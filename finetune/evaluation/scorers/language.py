"""Which language a text is in, by script and by its commonest small words. For checks, not for linguistics."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

# Words that are frequent in one language and rare in the others listed.
_SMALL_WORDS = {
    "en": "the and of to is that it was for with are this have not you he she they his her from which were been",
    "de": "der die das und ist nicht ein eine ich sie mit auf für dem den von zu sich auch wir wird sind oder war",
    "fr": "le la les des est et une un dans que qui pour pas sur avec plus je vous nous il elle sont au du ce cette",
    "es": "el los las es y una en que por para con no se del lo como más pero su al está son muy yo",
    "it": "il lo gli è e una in che per con non si del della di sono come più ma anche io nel alla questo",
    "pt": "o os as é e uma em que por para com não se do da dos das são mais mas eu no na você isso muito",
    "nl": "de het een en is van ik niet dat op te zijn met voor er maar ook aan hij zij wij naar bij deze",
}
_WORDS = {language: frozenset(words.split()) for language, words in _SMALL_WORDS.items()}
_SCRIPTS = {
    "CYRILLIC": "ru", "GREEK": "el", "HEBREW": "he", "ARABIC": "ar", "DEVANAGARI": "hi", "HANGUL": "ko",
    "HIRAGANA": "ja", "KATAKANA": "ja", "KATAKANA-HIRAGANA": "ja", "THAI": "th", "CJK": "zh",
}  # fmt: skip

LANGUAGES = frozenset([*_SMALL_WORDS, *_SCRIPTS.values()])  # what `guess_language` can tell


def guess_language(text: str) -> str | None:
    """ISO 639-1 code, or None when nothing can be told.

    A text mostly in another script is named by it (Cyrillic as `ru`, and so on; any kana makes Han `ja`). Latin text
    goes to the language most of whose small words occur; None when two lead alike or none occurs.
    """
    scripts = Counter(unicodedata.name(letter, "?").split(" ")[0] for letter in text if letter.isalpha())
    if not scripts:
        return None
    codes = Counter(dict.fromkeys(_SCRIPTS.values(), 0))
    for script, count in scripts.items():
        codes[_SCRIPTS.get(script, "latin")] += count
    if codes["ja"]:  # kana beside Han is Japanese
        codes["ja"] += codes.pop("zh")
    code, count = codes.most_common(1)[0]
    if code != "latin":
        return code if count * 2 > codes.total() else None
    words = re.findall(r"[^\W\d_]+", text.casefold())
    hits = {language: sum(word in small for word in words) for language, small in _WORDS.items()}
    ranked = sorted(hits.values(), reverse=True)
    if ranked[0] == 0 or ranked[0] == ranked[1]:
        return None
    return max(hits, key=lambda language: hits[language])
