"""Scorers that stand on packages outside the fixed stack: install them with `pip install 'finetune-pipeline[scorers]'`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

from finetune.errors import UserError

Compare = Callable[[str, str], float]


def _package(name: str, scorer: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"the scorer '{scorer}' needs the package '{name}', which is not installed",
            fix="pip install 'finetune-pipeline[scorers]'",
        ) from None


def _share(percent: float) -> float:
    """Rounding can leave a perfect answer a hair above 100, which would not be a share any more."""
    return min(1.0, float(percent) / 100.0)


def make_chrf(*, word_order: int = 0) -> Compare:
    """chrF of one answer, from 0 to 1 (sacrebleu's sentence chrF / 100; `word_order` 2 is chrF++)."""
    metric = _package("sacrebleu", "chrf").CHRF(word_order=word_order)
    return lambda output, reference: _share(metric.sentence_score(output, [reference]).score)


def make_bleu(*, tokenize: str = "13a") -> Compare:
    """BLEU of one answer, from 0 to 1 (sacrebleu's sentence BLEU / 100, effective order).

    The mean of sentence scores is not corpus BLEU; it is what can be paired item by item.
    """
    metric = _package("sacrebleu", "bleu").BLEU(effective_order=True, tokenize=tokenize)
    return lambda output, reference: _share(metric.sentence_score(output, [reference]).score)


def make_rouge(*, kind: str = "rougeL", stemmer: bool = False) -> Compare:
    """ROUGE F-measure of one answer, from 0 to 1 (rouge_score; kind rouge1, rouge2 or rougeL)."""
    if kind not in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        raise ValueError(f"kind: '{kind}' is not rouge1, rouge2, rougeL or rougeLsum")
    metric = _package("rouge_score.rouge_scorer", "rouge").RougeScorer([kind], use_stemmer=stemmer)
    return lambda output, reference: float(metric.score(reference, output)[kind].fmeasure)


def make_json_schema(*, schema: dict[str, Any] | None = None) -> Compare:
    """1.0 when the answer is one JSON value that the schema accepts; without `schema` the reference is the schema."""
    validators = _package("jsonschema.validators", "json_schema")
    if schema is not None:
        validators.validator_for(schema).check_schema(schema)

    def json_schema(output: str, reference: str) -> float:
        wanted = schema if schema is not None else json.loads(reference)
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            return 0.0
        return float(validators.validator_for(wanted)(wanted).is_valid(value))

    return json_schema
