"""Near duplicates beside datasketch, text-dedup and semhash: seconds, recall and false pairs against brute force.

    python benchmarks/near_duplicates.py [--rows 20000] [--rounds 5] [--beside FOLDER]

Rows of 121 words; a fifth of them have one to three copies with 1 to 20 words changed. The truth is every pair with a
Jaccard similarity of at least 0.6 over word 3-grams, counted through an inverted index. All take turns in each round, in
one process, on the same texts. The others need not be part of the environment, whose pins some of them contradict:

    pip install --no-deps --target FOLDER datasketch text-dedup==0.4.0 semhash vicinity usearch numkong model2vec frozendict \
        pyversity click-option-group bitarray ftfy pybloom-live
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import table, write_section

from finetune.data.curate.near import find_near_duplicates

THRESHOLD = 0.6
NGRAM = 3
WORDS = 121
Pairs = set[tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="Folder into which the others were installed.")
    given = parser.parse_args()
    if given.beside:
        sys.path.append(str(given.beside))
    texts = make_texts(given.rows, seed=17)
    similar = similarities(texts)
    truth = {pair for pair, value in similar.items() if value >= THRESHOLD}
    contenders = {
        name: find for name, (module, find) in CONTENDERS.items() if importlib.util.find_spec(module)
    }
    absent = sorted(set(CONTENDERS) - set(contenders))
    seconds: dict[str, list[float]] = defaultdict(list)
    found: dict[str, Pairs] = {}
    for _ in range(given.rounds):
        for name, find in contenders.items():
            start = time.perf_counter()
            answer = find(texts)
            seconds[name].append(time.perf_counter() - start)
            found[name] = as_pairs(answer)
    write_section(
        "Near duplicates",
        [
            f"{given.rows} rows of {WORDS} words, {len(truth)} true pairs (word {NGRAM}-grams, Jaccard ≥ {THRESHOLD}); "
            f"medians of {given.rounds}, all in turn. False pairs are reported pairs below {THRESHOLD}.",
            "",
            *compare(given.rows, truth, seconds, found),
            *([f"\nNot installed, so not measured: {', '.join(absent)}."] if absent else []),
        ],
    )


def compare(rows: int, truth: Pairs, seconds: dict[str, list[float]], found: dict[str, Pairs]) -> list[str]:
    ours = statistics.median(seconds["finetune"])
    lines = []
    for name, times in seconds.items():
        median = statistics.median(times)
        lines.append(
            [
                name,
                f"{median:.2f} s",
                f"{rows / median:,.0f}",
                f"{median / ours:.1f}",
                f"{len(truth & found[name]) / len(truth):.3f}",
                f"{len(found[name] - truth)}",
            ]
        )
    return table(["", "median", "rows/s", "times as long", "recall", "false pairs"], lines)


def make_texts(n: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    texts: list[str] = []
    while len(texts) < n:
        row = draw.choices(words, k=WORDS)
        texts.append(" ".join(row))
        for _ in range(draw.randint(1, 3) if draw.random() < 0.2 else 0):
            copy = list(row)
            for _ in range(draw.randint(1, 20)):
                copy[draw.randrange(WORDS)] = draw.choice(words)
            texts.append(" ".join(copy))
    del texts[n:]
    draw.shuffle(texts)
    return texts


def shingles(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)}


def similarities(texts: list[str]) -> dict[tuple[int, int], float]:
    """Exact Jaccard similarity of every pair that shares an n-gram."""
    sets = [shingles(text) for text in texts]
    rows_with: dict[str, list[int]] = defaultdict(list)
    for row, grams in enumerate(sets):
        for gram in grams:
            rows_with[gram].append(row)
    common = Counter(pair for rows in rows_with.values() for pair in itertools.combinations(rows, 2))
    return {(i, j): n / (len(sets[i]) + len(sets[j]) - n) for (i, j), n in common.items()}


def as_pairs(answer: Any) -> Pairs:
    """Pairs, or groups of rows taken for one another, as pairs (lower row, higher row)."""
    groups = (sorted(set(group)) for group in answer)
    return {pair for group in groups for pair in itertools.combinations(group, 2)}


def with_finetune(texts: list[str]) -> Any:
    return [pair[:2] for pair in find_near_duplicates(texts, threshold=THRESHOLD, ngram=NGRAM)]


def with_datasketch(texts: list[str]) -> Any:
    from datasketch import MinHash, MinHashLSH

    grams = [[gram.encode() for gram in shingles(text)] for text in texts]
    hashes = MinHash.bulk(grams, num_perm=128)
    index = MinHashLSH(threshold=THRESHOLD, num_perm=128)
    with index.insertion_session() as session:
        for row, value in enumerate(hashes):
            session.insert(row, value)
    return [(row, other) for row, value in enumerate(hashes) for other in index.query(value) if other != row]


def with_text_dedup(texts: list[str]) -> Any:
    """Its command as it is meant to be run: a dataset on disk, two processes, clusters by union-find."""
    import datasets
    from text_dedup import minhash

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(f"{folder}/in")
        options = {
            "--path": f"{folder}/in", "--cache_dir": f"{folder}/cache", "--output": f"{folder}/out", "--column": "text",
            "--ngram": NGRAM, "--threshold": THRESHOLD, "--num_perm": 128, "--num_proc": 2, "--min_length": 1,
        }  # fmt: skip
        arguments = [str(part) for option in options.items() for part in option]
        minhash.main.main(["--local", *arguments], standalone_mode=False)
    groups = defaultdict(list)
    for row in range(len(texts)):
        groups[minhash.uf.find(row)].append(row)
    return groups.values()


def with_semhash(texts: list[str]) -> Any:
    """Mean word vectors, drawn at random for want of a trained model, so that similarity is overlap of words."""
    from model2vec import StaticModel
    from semhash import SemHash
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {
        word: place for place, word in enumerate(dict.fromkeys(["[UNK]", *" ".join(texts).split()]))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.random.default_rng(0).standard_normal((len(vocabulary), 256), dtype=np.float32)
    place_of: dict[str, int] = {text: row for row, text in enumerate(texts)}
    hashed = SemHash.from_records(texts, model=StaticModel(vectors, tokenizer))
    groups = defaultdict(list)
    for one in hashed.self_deduplicate(threshold=0.85).filtered:
        groups[place_of[one.duplicate_of]].append(place_of[one.record])
    return [[kept, *left_out] for kept, left_out in groups.items()]


CONTENDERS: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    "finetune": ("finetune", with_finetune),
    "datasketch": ("datasketch", with_datasketch),
    "text-dedup": ("text_dedup", with_text_dedup),
    "semhash": ("semhash", with_semhash),
}


if __name__ == "__main__":
    main()
