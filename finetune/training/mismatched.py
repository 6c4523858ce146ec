"""The second answer that KTO's estimate of the KL divergence takes for each example: that of another prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.recipe.preference_section import PreferenceSection
from finetune.recipe.train_section import TrainSection
from finetune.training.branches import row_tokens


def as_trained(examples: Sequence[AnsweredPrompt], train: TrainSection) -> Sequence[AnsweredPrompt]:
    """The examples as the recipe's method lays them out: with KTO's mismatched answers, which take tokens of a pack too.

    Examples that have theirs already are left as they are.
    """
    needs_them = train.method == "kto" and uses_mismatched_answers(train.preference)
    if not needs_them or not examples or len(examples[0].answers) > 1:
        return examples
    return with_mismatched_answers(examples)


def trained_tokens(examples: Sequence[AnsweredPrompt], train: TrainSection) -> list[int]:
    """Tokens that each example takes in a pack, as the recipe's method lays it out."""
    share = train.preference.share_prompts
    return [row_tokens(example, share_prompts=share) for example in as_trained(examples, train)]


def uses_mismatched_answers(preference: PreferenceSection) -> bool:
    """Whether the loss of train.method kto measures from the KL divergence."""
    return preference.answers_of("kto") == 2


def with_mismatched_answers(examples: Sequence[AnsweredPrompt]) -> list[AnsweredPrompt]:
    """Each example with the answer of the nearest one before it, round the end, that has another prompt.

    Where all prompts are the same it is the example before: then nothing is mismatched, and KTO has no estimate to use.
    """
    found = []
    for place, example in enumerate(examples):
        others = (examples[(place - back) % len(examples)] for back in range(1, len(examples)))
        other = next((one for one in others if one.prompt != example.prompt), examples[place - 1])
        found.append(replace(example, answers=(example.chosen, other.chosen)))
    return found
