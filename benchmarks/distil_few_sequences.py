"""With few sequences of a teacher: learn what it wrote, or what it thought at every token? On text of it that is unseen.

    python benchmarks/distil_few_sequences.py [--model base|tiny] [--sizes 4 16 64 256] [--seeds 3] [--steps 40]

The teacher answers prompts by sampling at temperature 1. A student, cut from it, then learns from n of these sequences: the
tokens alone (cross-entropy), or the distribution at the same tokens (forward KL to what a cache of k = 1,024 keeps, the mass
of all others included: at 64 it would lack a fifth of what an untuned teacher thinks). Both take the same steps over the same batches from the same start, and the distance that counts is the
forward KL to the teacher, over all tokens of the vocabulary, on sequences that neither saw. The statement under test:
distributions win with little data, and the gap narrows as the data grow.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distil_speed import BASE, load_student, load_teacher, write_models
from results import table, write_section
from torch import Tensor

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.row_tokens import IGNORED, prompt_ids
from finetune.data.tokenise import TokenisedRow
from finetune.distil.cache.coding import Coding, TopK
from finetune.distil.cache.measure import read_back
from finetune.distil.cache.write import ModelSaying, coding_of, padded
from finetune.distil.head import live_targets
from finetune.distil.losses import chunked_distillation_loss, divergence, target_places
from finetune.distil.on_policy import sample_answers
from finetune.distil.targets import TeacherTargets
from finetune.model.load import load_tokenizer
from finetune.model.source import resolve_model
from finetune.paths import find_declarative
from finetune.recipe.distil_section import OnPolicySection
from finetune.telemetry.progress import Progress

ANSWERS, DISTRIBUTIONS = "answers", "distributions"
LAYERS = (0, 7, 15, 22, 29)
K, BATCH_ROWS, SAMPLED_ROWS, LEARNING_RATE = 1024, 4, 32, 5e-4
FIGURE = Path(__file__).parent / "results" / "distil_few_sequences.svg"


@dataclass(frozen=True)
class Taught:
    """A sequence of the teacher and what it thought at each of its targets."""

    row: TokenisedRow
    thought: TopK


@dataclass(frozen=True)
class Unseen:
    """A batch of sequences that no student learns from, with all that the teacher thinks of them."""

    inputs: dict[str, Tensor]
    teacher: TeacherTargets


def sequences(teacher: Any, tokenizer: Any, n: int, side: str, max_new_tokens: int) -> list[TokenisedRow]:
    """What the teacher says to n prompts of a side, as rows whose targets are its own tokens."""
    build = build_dataset(find_declarative("data", "home_intents"), default_builds_root())
    prompts = [list(prompt_ids(row.prompt, tokenizer)[0]) for row in build.rows(side)[:n]]
    section = OnPolicySection(max_new_tokens=max_new_tokens)
    rows = []
    for start in range(0, len(prompts), SAMPLED_ROWS):
        part = prompts[start : start + SAMPLED_ROWS]
        answers = sample_answers(teacher, part, section, [tokenizer.eos_token_id], seed=start)
        for prompt, answer in zip(part, answers, strict=True):
            labels = [IGNORED] * len(prompt) + answer
            rows.append(TokenisedRow(f"{side}-{len(rows)}", prompt + answer, labels, len(answer)))
    return rows


def taught(teacher: Any, rows: list[TokenisedRow], coding: Coding) -> list[Taught]:
    """The rows with the teacher's top k at each of their targets, as a cache keeps it."""
    top, _ = ModelSaying(teacher).top_k(rows, coding, sample_every=1 << 30)
    found, start = [], 0
    for row in rows:
        stop = start + row.n_targets
        found.append(Taught(row, TopK(*(part[start:stop] for part in (top.ids, top.gaps, top.logsumexp)))))
        start = stop
    return found


def states(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Last hidden states [n, D] at the places that predict the batch's targets, and the targets' ids [n]."""
    places, answers = target_places(inputs["labels"])
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.autocast(inputs["labels"].device.type, torch.bfloat16):
        hidden = model.base_model(**plain, use_cache=False).last_hidden_state
    return hidden[places], answers


def learn(
    start: Any, chosen: list[Taught], way: str, coding: Coding, *, steps: int, seed: int, unseen: list[Unseen]
) -> float:
    """Distance to the teacher on unseen text, after `steps` steps over batches drawn from the seed."""
    student = copy.deepcopy(start)
    student.get_input_embeddings().weight.requires_grad_(False)
    head = student.get_output_embeddings().weight.detach().bfloat16()
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = [chosen[at] for at in torch.randint(len(chosen), (BATCH_ROWS,), generator=generator)]
        inputs = {name: one.to(head.device) for name, one in padded([one.row for one in batch]).items()}
        hidden, answers = states(student, inputs)
        parts = [(one.thought.ids, one.thought.gaps, one.thought.logsumexp) for one in batch]
        thought = TopK(*(torch.cat(column) for column in zip(*parts, strict=True)))
        loss = chunked_distillation_loss(
            hidden, head, read_back(thought, coding, 1.0).to(head.device), answers,
            kind="forward_kl", answer_weight=1.0 if way == ANSWERS else 0.0,
        ).loss  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return distance(student, head, unseen)


@torch.no_grad()
def distance(student: Any, head: Tensor, unseen: list[Unseen]) -> float:
    """Mean forward KL in nats a token, over all tokens of the vocabulary."""
    total, n_targets = 0.0, 0
    for batch in unseen:
        hidden, _ = states(student, batch.inputs)
        logits = torch.nn.functional.linear(hidden.to(head.dtype), head)
        total += float(divergence("forward_kl", logits, batch.teacher).sum())
        n_targets += len(logits)
    return total / n_targets


def draw(sizes: list[int], found: dict[str, dict[int, list[float]]], before: float) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for way, by_size in found.items():
        means = [statistics.fmean(by_size[size]) for size in sizes]
        axes.plot(sizes, means, marker="o", label=way)
        lowest, highest = ([pick(by_size[n]) for n in sizes] for pick in (min, max))
        axes.fill_between(sizes, lowest, highest, alpha=0.2)
    axes.axhline(before, linestyle=":", color="grey", label="before learning")
    axes.set(
        xscale="log", xlabel="teacher sequences", ylabel="KL to the teacher on unseen sequences, nats a token"
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
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
    shown = ", ".join(f"{size}: {statistics.fmean(gaps[size]):+.3f}" for size in sizes)
    return [
        f"Answers minus distributions, mean over seeds, by sequences: {shown} nats a token.",
        f"Distributions win with the fewest sequences in every seed: {wins}. The gap is smaller with the most than with the "
        f"fewest, in every seed: {narrows}.",
    ]


def measure(options: argparse.Namespace) -> tuple[float, dict[str, dict[int, list[float]]]]:
    """Distance before learning, and after it by way and number of sequences, one a seed."""
    tokenizer = load_tokenizer(resolve_model(BASE))
    write_models(options.model, LAYERS, options.folder)
    teacher = load_teacher(options.folder)
    sizes, coding = options.sizes, coding_of(k=K, vocabulary=len(tokenizer))
    seen = sequences(teacher, tokenizer, max(sizes), "train", options.max_new_tokens)
    apart = sequences(teacher, tokenizer, options.unseen, "test", options.max_new_tokens)
    lessons = taught(teacher, seen, coding)
    device = next(teacher.parameters()).device
    unseen = []
    for at in range(0, len(apart), SAMPLED_ROWS):
        inputs = {name: one.to(device) for name, one in padded(apart[at : at + SAMPLED_ROWS]).items()}
        unseen.append(Unseen(inputs, live_targets(teacher, inputs, coding.vocabulary)))
    start = load_student(options.folder, dtype="fp32", attention="sdpa")
    head = start.get_output_embeddings().weight.detach().bfloat16()
    found: dict[str, dict[int, list[float]]] = {
        way: {size: [] for size in sizes} for way in (ANSWERS, DISTRIBUTIONS)
    }
    with Progress("students", 2 * len(sizes) * options.seeds, "students") as progress:
        for size in sizes:
            for seed in range(options.seeds):
                # Other seeds take other sequences, where there are more.
                first = (seed * size) % max(len(lessons) - size + 1, 1)
                for way in found:
                    found[way][size].append(
                        learn(start, lessons[first : first + size], way, coding,
                              steps=options.steps, seed=seed, unseen=unseen)
                    )  # fmt: skip
                    progress.advance(1)
    return distance(start, head, unseen), found


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="base", choices=["base", "tiny"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--unseen", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args()
    options.sizes.sort()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        before, found = measure(options)
    draw(options.sizes, found, before)
    rows = []
    for size in options.sizes:
        cells = [found[way][size] for way in found]
        rows.append(
            [str(size), *(f"{statistics.fmean(one):.3f} ({min(one):.3f}–{max(one):.3f})" for one in cells)]
        )
    lines = table(["teacher sequences", *found], rows)
    lines += [
        "",
        f"Forward KL to the teacher on unseen text, nats a token; before learning {before:.3f}. Mean (lowest–highest) of "
        f"{options.seeds} seeds.",
        *verdict(options.sizes, found),
        f"{options.model}; a student of {len(LAYERS)} layers, {options.steps} steps of {BATCH_ROWS} sequences of up to "
        f"{options.max_new_tokens} sampled tokens, {options.unseen} unseen sequences; {(time.monotonic() - began) / 60:.0f} min.",
        "",
        f"![curve](results/{FIGURE.name})",
    ]
    if options.model == "tiny":
        print("\n".join(lines))
    else:
        write_section("Distillation from few sequences", lines)


if __name__ == "__main__":
    main()
