"""Equal texts, contradictions and semantic duplicates, against truths made by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate.contradictions import find_contradictions
from finetune.data.curate.exact import first_of_equal, groups_of_equal, text_digests
from finetune.data.curate.semantic import find_semantic_duplicates, load_embedding
from finetune.errors import UserError


@given(st.lists(st.text(st.characters(), max_size=2), max_size=20))
def test_the_first_of_equal_texts(texts: list[str]) -> None:
    first = first_of_equal(text_digests(texts))
    assert first.tolist() == [texts.index(text) for text in texts]
    groups = groups_of_equal(text_digests(texts))
    assert sorted(map(tuple, (group.tolist() for group in groups))) == sorted(
        {rows for text in texts if len(rows := tuple(r for r, one in enumerate(texts) if one == text)) > 1}
    )
    assert [len(group) for group in groups] == sorted(map(len, groups), reverse=True)


def test_the_digest_of_a_text_is_the_same_everywhere() -> None:
    assert text_digests(["a"]).tolist() == [[0x7F8773936E5EC327, 0x7E49464E4662E529]]
    assert text_digests(["\ud800"]).shape == (1, 2)


def test_the_same_question_with_different_answers_is_listed() -> None:
    prompts = ["What is 1+1?", "what  is 1+1?", "Capital?", "", "", "What is 1+1?", "Capital?", "alone"]
    answers = ["2", "two", "Paris", "x", "y", "2", "PARIS", "z"]
    (found,) = find_contradictions(prompts, answers)
    assert found.answers == ((0, 5), (1,))
    assert found.to_dict() == {"rows": [0, 1, 5], "answers": [[0, 5], [1]]}
    assert find_contradictions([], []) == []


def test_contradictions_with_most_rows_stand_first() -> None:
    prompts = ["a", "a", "b", "b", "b"]
    found = find_contradictions(prompts, ["1", "2", "1", "2", "3"])
    assert [one.rows for one in found] == [(2, 3, 4), (0, 1)]


def _embed(texts: list[str]) -> Any:
    """Two dimensions: angles in degrees, as the texts say."""
    angles = np.radians([float(text.strip() or 0) for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_semantic_duplicates_are_all_pairs_above_the_cosine(tmp_path: Path) -> None:
    texts = ["0", "90", "10", "", "100", "45", " "]
    found = find_semantic_duplicates(texts, _embed, threshold=float(np.cos(np.radians(11))))
    assert [(i, j) for i, j, _ in found] == [(0, 2), (1, 4)]
    assert found.similarity == pytest.approx(np.cos(np.radians(10)), abs=1e-6)
    assert found.empty.tolist() == [3, 6]
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef embed(texts):\n    return np.ones((len(texts), 3))\n"
    )
    embed = load_embedding("mine.py:embed", folder=tmp_path)
    assert len(find_semantic_duplicates(["a", "b", "c"], embed)) == 3
    assert len(find_semantic_duplicates([], embed)) == 0


def test_more_rows_than_a_block() -> None:
    texts = [str(n % 1100 * 0.3) for n in range(2200)]
    found = find_semantic_duplicates(texts, _embed, threshold=1 - 5e-6)
    assert [(i, j) for i, j, _ in found] == [(n, n + 1100) for n in range(1100)]


@pytest.mark.parametrize("made", [np.ones(3), np.ones((2, 4)), np.full((3, 4), np.nan)])
def test_an_embedding_of_another_shape_is_refused(made: Any) -> None:
    with pytest.raises(UserError, match="one finite vector a text"):
        find_semantic_duplicates(["a", "b", "c"], lambda texts: made)


def test_a_static_model_is_loaded_by_model2vec_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Model:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        @classmethod
        def from_pretrained(cls, folder: Path) -> Model:
            return cls(folder)

        def encode(self, texts: list[str]) -> Any:
            return np.array([[len(text), len(str(self.folder))] for text in texts])

    module = ModuleType("model2vec")
    module.StaticModel = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model2vec", module)
    assert load_embedding("model2vec:words", folder=tmp_path)(["ab"])[0][0] == 2
    monkeypatch.setitem(sys.modules, "model2vec", None)
    with pytest.raises(UserError, match="pip install model2vec"):
        load_embedding("model2vec:words", folder=tmp_path)
