"""Personal data and secrets in texts: found with few false alarms, reported, or masked by their kind, e.g. [EMAIL].

What is not looked for: names and addresses, which no pattern tells from other words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from finetune.data.curate.secrets import Span, find_secrets
from finetune.data.rows import Row

KINDS = ("EMAIL", "PHONE", "CARD", "IBAN", "KEY", "PASSWORD")

_EMAIL = re.compile(
    r"(?<![\w.+%/@-])[A-Za-z0-9](?:[\w.+%-]{0,62}[\w+%-])?@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+([A-Za-z]{2,24})"
    r"(?![\w@-]|\.\w)"
)
_RESERVED_DOMAIN = re.compile(
    r"@(?:.*\.)?(?:example\.(?:com|org|net|edu)|.*\.(?:example|test|invalid|localhost))$", re.I
)
_IN_URL = re.compile(r"://[^\s/]*\Z")
_NO_PERSON = re.compile(r"^(?:git|noreply|no-reply|donotreply|postmaster|mailer-daemon)@", re.I)
_FILE_ENDINGS = "png jpg jpeg gif svg webp ico css js ts py rb go rs java json yaml yml xml html md txt pdf"
_NO_DOMAIN = frozenset(_FILE_ENDINGS.split())
_DIGITS = re.compile(r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?![\w-]|\.\d)")
_CARD_WORDS = re.compile(
    r"card|visa|master|amex|american express|cvv|cvc|credit|debit|karte|carte|tarjeta|carta", re.I
)
_CARD_FORMS = re.compile(  # issuer prefix and length, as the issuers publish them
    r"4\d{12}(?:\d{3}|\d{6})?|5[1-5]\d{14}|(?:222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|3(?:0[0-5]|[68]\d)\d{11}"
)
_TEST_CARDS = """
    4111111111111111 4242424242424242 4012888888881881 5555555555554444 5105105105105100 378282246310005 371449635398431
    6011111111111117 3530111333300000 4000056655665556
"""
_NO_CARD = frozenset(_TEST_CARDS.split())
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}(?![A-Za-z0-9])")
_IBAN_REGISTRY = """
    15NO 16BE 18DK,FI,FO,GL,NL,SD 19MK,SI 20AT,BA,EE,KZ,LT,LU,MN,XK 21CH,CR,HR,LI,LV 22BG,BH,DE,GB,GE,IE,ME,RS,VA
    23AE,GI,IL,IQ,OM,SO,TL 24AD,CZ,ES,MD,PK,RO,SA,SE,SK,TN,VG 25LY,PT,ST 26IS,TR 27BI,DJ,FR,GR,IT,MC,MR,SM
    28AL,AZ,BY,CY,DO,GT,HU,LB,NI,PL,SV 29BR,EG,PS,QA,UA 30JO,KW,MU 31MT,SC 32LC 33RU
"""
_IBAN_LENGTHS = {
    country: int(entry[:2]) for entry in _IBAN_REGISTRY.split() for country in entry[2:].split(",")
}
_MAYBE_PHONE = re.compile(r"\+\d|\d[\d ()./-]{5,}\d")


def find_personal(text: str, *, region: str | None = None) -> list[Span]:
    """(kind, first character, past the last) of all personal data and secrets in `text`, in order, without overlap.

    EMAIL: not of reserved domains (example.com), robots or file names. CARD: issuer's prefix and length, Luhn check, not
    a published test number; without separators only near a word like "card". IBAN: length of its country and check
    digits. PHONE: valid by the numbering plan of its country (phonenumbers); without `region`, an ISO country code, only
    numbers with their country code. KEY, PASSWORD: `find_secrets`.
    """
    found = [*find_secrets(text), *_emails(text), *_ibans(text), *_cards(text), *_phones(text, region)]
    kept: list[Span] = []
    # The first kind that claims a place has it: of an IBAN no part is a card, of a card none a phone number.
    for span in found:
        if all(span[2] <= one[1] or one[2] <= span[1] for one in kept):
            kept.append(span)
    return sorted(kept, key=lambda span: span[1])


def mask_text(text: str, *, region: str | None = None, counts: Counter[str] | None = None) -> str:
    """The text with each finding replaced by its kind in brackets, e.g. "[EMAIL]". Masking twice changes nothing more."""
    parts: list[str] = []
    end = 0
    for kind, first, past in find_personal(text, region=region):
        parts += [text[end:first], f"[{kind}]"]
        end = past
        if counts is not None:
            counts[kind] += 1
    return "".join([*parts, text[end:]]) if parts else text


def mask_row(row: Row, *, region: str | None = None, counts: Counter[str] | None = None) -> Row:
    """The row with every text of it masked, tool calls and reasoning included; the row itself when nothing was found."""
    found = Counter[str]() if counts is None else counts
    before = found.total()
    masked = {
        name: _mask_value(getattr(row, name), region, found)
        for name in ("messages", "tools", "chosen", "rejected", "steps", "text")
    }
    return row if found.total() == before else replace(row, **masked)


def find_in_row(row: Row, *, region: str | None = None) -> Counter[str]:
    """How many findings of each kind the texts of a row hold."""
    counts: Counter[str] = Counter()
    mask_row(row, region=region, counts=counts)
    return counts


def _mask_value(value: Any, region: str | None, counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return mask_text(value, region=region, counts=counts)
    if isinstance(value, list | tuple):
        return type(value)(_mask_value(part, region, counts) for part in value)
    if isinstance(value, dict):
        return {key: _mask_value(part, region, counts) for key, part in value.items()}
    return value


def _emails(text: str) -> Iterator[Span]:
    if "@" not in text:
        return
    for match in _EMAIL.finditer(text):
        is_other = match.group(1).lower() in _NO_DOMAIN or _IN_URL.search(
            text, max(0, match.start() - 80), match.start()
        )
        if not (is_other or _RESERVED_DOMAIN.search(match.group()) or _NO_PERSON.match(match.group())):
            yield "EMAIL", match.start(), match.end()


def _cards(text: str) -> Iterator[Span]:
    for match in _DIGITS.finditer(text):
        written = match.group()
        digits = re.sub(r"\D", "", written)
        if not _CARD_FORMS.fullmatch(digits) or digits in _NO_CARD or not _passes_luhn(digits):
            continue
        around = text[max(0, match.start() - 60) : match.end() + 30]
        if len(written) > len(digits) or _CARD_WORDS.search(around):
            yield "CARD", match.start(), match.end()


def _passes_luhn(digits: str) -> bool:
    """The check of ISO/IEC 7812-1: every second digit from the right doubled, its digits summed, ends in zero."""
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(map(int, digits[-1::-2]))) % 10 == 0


def _ibans(text: str) -> Iterator[Span]:
    for match in _IBAN.finditer(text):
        length = _IBAN_LENGTHS.get(match.group()[:2])
        if length is None:
            continue
        # Words in capitals may follow: only as many characters as the country's numbers have belong to it.
        end, written = match.start(), 0
        while written < length and end < match.end():
            written += text[end] != " "
            end += 1
        number = text[match.start() : end].replace(" ", "")
        if len(number) == length and not text[end : end + 1].isalnum() and _passes_mod_97(number):
            yield "IBAN", match.start(), end


def _passes_mod_97(number: str) -> bool:
    """The check of ISO 13616: country and check digits moved to the end, letters as 10 to 35, leaves 1 over 97."""
    return int("".join(str(int(character, 36)) for character in number[4:] + number[:4])) % 97 == 1


def _phones(text: str, region: str | None) -> Iterator[Span]:
    if not ("+" in text if region is None else True) or not _MAYBE_PHONE.search(text):
        return
    from phonenumbers import Leniency, PhoneNumberMatcher

    for match in PhoneNumberMatcher(text, region, leniency=Leniency.VALID):
        is_international = match.raw_string.lstrip("(").startswith("+")
        if is_international or re.search(
            r"\d\D+\d", match.raw_string
        ):  # a bare run of digits is rather an id
            yield "PHONE", match.start, match.end
