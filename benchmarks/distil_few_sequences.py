"""With few sequences of a teacher: learn what it wrote, or what it thought at every token? On text of it that is unseen.

    python benchmarks/distil_few_sequences.py [--model smollm2|tiny] [--sizes 8 32 128] [--seeds 3] [--steps 60]

The teacher answers prompts by sampling. A student, cut from it, then learns from the first n sequences: the tokens alone
(cross-entropy), or the whole distribution at the same tokens (forward KL). Both take the same steps over the same batches
from the same start, and the distance that counts is the forward KL to the teacher on sequences that neither saw. The
statement under test: distributions win with little data, and the gap narrows as the data grow.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from distil_speed import distance, models
from results import table, write_section

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.row_tokens import IGNORED, prompt_ids
from finetune.data.tokenise import TokenisedRow
from finetune.distil.cache.write import padded
from finetune.distil.head import live_targets
from finetune.distil.losses import chunked_distillation_loss, target_places
from finetune.distil.on_policy import sample_answers
from finetune.model.load import load_tokenizer
from finetune.model.source import resolve_model
from finetune.paths import find_declarative
from finetune.recipe.distil_section import OnPolicySection

ANSWERS, DISTRIBUTIONS = "answers", "distributions"
BATCH_ROWS, LEARNING_RATE = 8, 3e-4
FIGURE = Path(__file__).parent / "results" / "distil_few_sequences.svg"


def sequences(teacher: Any, n: int, side: str, max_new_tokens: int) -> list[TokenisedRow]:
    """What the teacher says to n prompts of a side, as rows whose targets are its own tokens."""
    tokenizer = load_tokenizer(resolve_model("builtin:smollm2-135m-instruct"))
    build = build_dataset(find_declarative("data", "home_intents"), default_builds_root())
    prompts = [list(prompt_ids(row.prompt, tokenizer)[0]) for row in build.rows(side)[:n]]
    section = OnPolicySection(max_new_tokens=max_new_tokens)
    rows = []
    for start in range(0, len(prompts), 16):
        part = prompts[start : start + 16]
        for prompt, answer in zip(
            part, sample_answers(teacher, part, section, [tokenizer.eos_token_id], seed=start), strict=True
        ):
            labels = [IGNORED] * len(prompt) + answer
            rows.append(TokenisedRow(f"{side}-{len(rows)}", prompt + answer, labels, len(answer)))
    return rows


def learn(
    student: Any, teacher: Any, rows: list[TokenisedRow], way: str, steps: int, seed: int, n_vocabulary: int
) -> Any:
    """The student after `steps` steps over batches of the rows, drawn from the seed."""
    student = copy.deepcopy(student).train()
    student.get_input_embeddings().weight.requires_grad_(False)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    device = next(student.parameters()).device
    for _ in range(steps):
        chosen = torch.randint(len(rows), (BATCH_ROWS,), generator=generator).tolist()
        inputs = {name: value.to(device) for name, value in padded([rows[index] for index in chosen]).items()}
        places, answers = target_places(inputs["labels"])
        plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        hidden = student.base_model(**plain, use_cache=False).last_hidden_state
        loss = chunked_distillation_loss(
            hidden[places],
            student.get_output_embeddings().weight,
            live_targets(teacher, inputs, n_vocabulary),
            answers,
            kind="forward_kl",
            answer_weight=1.0 if way == ANSWERS else 0.0,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return student


def draw(sizes: list[int], found: dict[str, dict[int, list[float]]], before: float) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for way, by_size in found.items():
        means = [statistics.fmean(by_size[size]) for size in sizes]
        axes.plot(sizes, means, marker="o", label=way)
        axes.fill_between(
            sizes, [min(by_size[n]) for n in sizes], [max(by_size[n]) for n in sizes], alpha=0.2
        )
    axes.axhline(before, linestyle=":", color="grey", label="before learning")
    axes.set(
        xscale="log", xlabel="teacher sequences", ylabel="KL to the teacher on unseen sequences, nats a token"
    )
    axes.legend()
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


def verdict(sizes: list[int], found: dict[str, dict[int, list[float]]]) -> list[str]:
    """Whether each half of the statement is borne out by these seeds, in words."""
    gaps = {
        size: [a - d for a, d in zip(found[ANSWERS][size], found[DISTRIBUTIONS][size], strict=True)]
        for size in sizes
    }
    least, most = gaps[sizes[0]], gaps[sizes[-1]]
    wins = "confirmed" if min(least) > 0 else "refuted" if max(least) < 0 else "not decided"
    pairs = [few - many for few, many in zip(least, most, strict=True)]
    narrows = "confirmed" if min(pairs) > 0 else "refuted" if max(pairs) < 0 else "not decided"
    shown = ", ".join(f"{size}: {statistics.fmean(gaps[size]):+.4f}" for size in sizes)
    return [
        f"Answers minus distributions, mean over seeds, by sequences: {shown} nats a token.",
        f"Distributions win with the fewest sequences in every seed: {wins}. The gap is smaller with the most than with the "
        f"fewest, in every seed: {narrows}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "tiny"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--unseen", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    teacher, student, n_vocabulary = models(options)
    teacher = teacher.float()
    sizes = sorted(options.sizes)
    seen = sequences(teacher, sizes[-1], "train", options.max_new_tokens)
    unseen = sequences(teacher, options.unseen, "test", options.max_new_tokens)
    before = distance(student, teacher, unseen, n_vocabulary)
    found: dict[str, dict[int, list[float]]] = {way: {} for way in (ANSWERS, DISTRIBUTIONS)}
    for way, by_size in found.items():
        for size in sizes:
            by_size[size] = []
            for seed in range(options.seeds):
                # Other seeds take other sequences, where there are more.
                first = (seed * size) % max(len(seen) - size + 1, 1)
                rows = seen[first : first + size]
                learnt = learn(student, teacher, rows, way, options.steps, seed, n_vocabulary)
                by_size[size].append(distance(learnt, teacher, unseen, n_vocabulary))
    draw(sizes, found, before)
    rows_of_table = [
        [str(size), *(f"{statistics.fmean(found[way][size]):.4f} ({min(found[way][size]):.4f}–{max(found[way][size]):.4f})"
                      for way in found)]
        for size in sizes
    ]  # fmt: skip
    lines = table(["teacher sequences", *found], rows_of_table)
    lines += [
        "",
        f"Before learning: {before:.4f}. Mean (lowest–highest of {options.seeds} seeds).",
        *verdict(sizes, found),
    ]
    lines += [
        f"{options.model}, {options.steps} steps of {BATCH_ROWS} sequences, {options.unseen} unseen sequences; curve: "
        f"benchmarks/results/{FIGURE.name}."
    ]
    write_section("Distillation from few sequences", lines)


if __name__ == "__main__":
    main()
