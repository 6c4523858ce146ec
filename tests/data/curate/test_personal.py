"""Personal data and secrets: found where they are, and not in code, ids, versions and placeholders."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate.personal import find_in_row, find_personal, mask_row, mask_text
from finetune.data.rows import Row

HIDDEN = "Q7vZ2kLm9TxW4bRn8YcD3pFh6JsG1aEu"  # random letters and digits, no real key


def found(text: str, region: str | None = None) -> list[tuple[str, str]]:
    return [(kind, text[first:past]) for kind, first, past in find_personal(text, region=region)]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("write to jane.doe+x@mail.uni-bonn.de.", "EMAIL", "jane.doe+x@mail.uni-bonn.de"),
        ("<a href='mailto:bob@corp.io'>", "EMAIL", "bob@corp.io"),
        ("Email:ann@web.de,", "EMAIL", "ann@web.de"),
        ("card 4539 1488 0343 6467 please", "CARD", "4539 1488 0343 6467"),
        ("my visa is 4539148803436467", "CARD", "4539148803436467"),
        ("3714-496353-98490", "CARD", None),
        ("IBAN DE89 3704 0044 0532 0130 00 BIC COBADEFF", "IBAN", "DE89 3704 0044 0532 0130 00"),
        ("GB82WEST12345698765432", "IBAN", "GB82WEST12345698765432"),
        ("NO9386011117947", "IBAN", "NO9386011117947"),
        ("call +49 30 901820 now", "PHONE", "+49 30 901820"),
        ("+1 (650) 253-0000", "PHONE", "+1 (650) 253-0000"),
        ("key AKIAQ3EGWZ4NPT7UVXYZ", "KEY", "AKIAQ3EGWZ4NPT7UVXYZ"),
        (f"token: ghp_{HIDDEN}abcd", "KEY", f"ghp_{HIDDEN}abcd"),
        (f"OPENAI=sk-proj-{HIDDEN}", "KEY", f"sk-proj-{HIDDEN}"),
        (f'api_key = "{HIDDEN}"', "KEY", HIDDEN),
        (f"'client-secret': '{HIDDEN[:20]}'", "KEY", HIDDEN[:20]),
        ("postgres://admin:hunter9!@db.host/x", "PASSWORD", "hunter9!"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "KEY",
         "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----"),
    ],
)  # fmt: skip
def test_what_is_there_is_found(text: str, kind: str, value: str | None) -> None:
    assert found(text) == ([(kind, value)] if value is not None else [])


@pytest.mark.parametrize(
    "text",
    [
        "user@example.com", "a@b.test", "git@github.com:x/y.git", "noreply@shop.de", "logo@2x.png", "react@18.2.0",
        "@property", "x @ y", "https://medium.com/@name/post", "scp me@host:/tmp", "https://u:pass@host.com/x",
        "4539148803436467",  # sixteen digits with the right check, but nothing says that it is a card
        "card 4539 1488 0343 6468",  # the check digit is wrong
        "card 1234 5678 9012 3456", "card 4111 1111 1111 1111", "visa 4242424242424242",
        "id 1234567890123456789", "3.14159265358979323846", "0x4539148803436467", "commit 4539148803436467abcdef",
        "DE89 3704 0044 0532 0130 01", "XX89370400440532013000", "GB82 WEST 1234 5698 7654 33", "AB12CDEF34567890123456",
        "2024-01-05 10:00", "1,234,567", "version 10.0.19041.1234", "192.168.0.1", "+1", "C++ 11", "1 + 2 = 3",
        "ISBN 978-3-16-148410-0", "0301234567", "call 555-1234",
        "AKIAIOSFODNN7EXAMPLE", 'api_key = "your-api-key-goes-here-1"', 'password = "${DB_PASSWORD_PROD_1}"',
        'token = "xxxxxxxxxxxxxxxxxxxx1"', 'secret = "correct horse battery staple"', 'api_key = os.environ["API_KEY_1"]',
        "550e8400-e29b-41d4-a716-446655440000", "d41d8cd98f00b204e9800998ecf8427e",
        "sk-learn", "ask-me-anything-about-this-and-that-please", "ghp_short", "postgres://user:password@localhost/db",
    ],
)  # fmt: skip
def test_what_is_not_personal_is_left_alone(text: str) -> None:
    assert found(text) == []
    assert mask_text(text) is text


def test_national_phone_numbers_need_a_region() -> None:
    text = "Ruf 030 901820 an, Bestellung 4711 0815, Kundennummer 030901820."
    assert found(text) == []
    assert found(text, "DE") == [("PHONE", "030 901820")]


def test_masking_names_the_kind_counts_and_changes_nothing_else() -> None:
    counts: Counter[str] = Counter()
    text = "Ann (ann@web.de, +49 30 901820) pays from DE89370400440532013000; bob@corp.io too."
    assert mask_text(text, counts=counts) == "Ann ([EMAIL], [PHONE]) pays from [IBAN]; [EMAIL] too."
    assert counts == {"EMAIL": 2, "PHONE": 1, "IBAN": 1}


@given(
    st.lists(
        st.sampled_from(
            [
                "ann@web.de",
                " ",
                "+49 30 901820",
                "DE89370400440532013000",
                "text",
                ".",
                "4539 1488 0343 6467",
                f'api_key="{HIDDEN}"',
                "https://u:s3cr1x@h.io",
                "\n",
                "@",
                "今",
            ]
        ),
        max_size=8,
    )
)
def test_masked_text_holds_nothing_more_and_masking_again_changes_nothing(parts: list[str]) -> None:
    masked = mask_text("".join(parts))
    assert mask_text(masked) == masked
    spans = find_personal("".join(parts))
    assert all(one[2] <= other[1] for one, other in pairwise(spans))


@given(st.text(max_size=80))
def test_any_text_is_read_without_a_fault(text: str) -> None:
    spans = find_personal(text)
    assert (mask_text(text) == text) == (not spans)
    assert all(0 <= first < past <= len(text) for _, first, past in spans)


def test_all_texts_of_a_row_are_masked_and_other_rows_are_not_touched() -> None:
    call = {"function": {"name": "send", "arguments": '{"to": "ann@web.de"}'}}
    row = Row(
        "r",
        (
            {"role": "user", "content": "mail ann@web.de"},
            {
                "role": "assistant",
                "content": "ok",
                "tool_calls": [call],
                "reasoning_content": "ann@web.de it is",
            },
        ),
        "g",
        "s",
        chosen=({"role": "assistant", "content": "+49 30 901820"},),
        text="bob@corp.io",
    )
    masked = mask_row(row)
    assert masked.messages[0]["content"] == "mail [EMAIL]"
    assert masked.messages[1]["tool_calls"][0]["function"] == {
        "name": "send",
        "arguments": '{"to": "[EMAIL]"}',
    }
    assert masked.messages[1]["reasoning_content"] == "[EMAIL] it is"
    assert (masked.chosen[0]["content"], masked.text, masked.id) == ("[PHONE]", "[EMAIL]", "r")
    assert find_in_row(row) == {"EMAIL": 4, "PHONE": 1}
    clean = Row("c", ({"role": "user", "content": "q"},), "g", "s")
    assert mask_row(clean) is clean
