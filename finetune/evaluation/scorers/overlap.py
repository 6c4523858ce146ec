"""Scorers that compare the words or characters of an answer with the reference: chrF, BLEU and ROUGE, by their usual
libraries, which are imported when a suite asks for them."""

from __future__ import annotations

from collections.abc import Callable

Compare = Callable[[str, str], float]


def _share(percent: float) -> float:
    """Rounding can leave a perfect answer a hair above 100, which would not be a share any more."""
    return min(1.0, float(percent) / 100.0)


def make_chrf(*, word_order: int = 0) -> Compare:
    """chrF of one answer, from 0 to 1 (sacrebleu's sentence chrF / 100; `word_order` 2 is chrF++)."""
    from sacrebleu import CHRF

    metric = CHRF(word_order=word_order)
    return lambda output, reference: _share(metric.sentence_score(output, [reference]).score)


def make_bleu(*, tokenize: str = "13a") -> Compare:
    """BLEU of one answer, from 0 to 1 (sacrebleu's sentence BLEU / 100, effective order).

    The mean of sentence scores is not corpus BLEU; it is what can be paired item by item.
    """
    from sacrebleu import BLEU

    try:
        metric = BLEU(effective_order=True, tokenize=tokenize)
    except (KeyError, ImportError, RuntimeError) as error:
        known = ", ".join(sorted(BLEU.TOKENIZERS))
        raise ValueError(f"tokenize: '{tokenize}' cannot be used ({error}); sacrebleu has {known}") from None
    return lambda output, reference: _share(metric.sentence_score(output, [reference]).score)


def make_rouge(*, kind: str = "rougeL", stemmer: bool = False) -> Compare:
    """ROUGE F-measure of one answer, from 0 to 1 (rouge_score; kind rouge1, rouge2, rougeL or rougeLsum).

    rouge_score keeps the letters a to z and digits only: two texts in another script share no word and score 0.
    """
    from rouge_score.rouge_scorer import RougeScorer

    if kind not in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        raise ValueError(f"kind: '{kind}' is not rouge1, rouge2, rougeL or rougeLsum")
    metric = RougeScorer([kind], use_stemmer=stemmer)
    return lambda output, reference: float(metric.score(reference, output)[kind].fmeasure)
