"""Teacher and student before anything is built: whether their tokens fit, and the rows in the teacher's own where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_json
from finetune.distil.aligned.teaching import AlignedRows, align_rows
from finetune.distil.aligned.token_bytes import TokenBytes
from finetune.distil.apart import computes_over_packs, refuse_teacher_state
from finetune.distil.cache.write import coding_of
from finetune.distil.trainer import shared_vocabulary
from finetune.errors import UserError
from finetune.model.load import check_context, model_skeleton
from finetune.pipeline.before import tokenizer_before

if TYPE_CHECKING:
    from finetune.pipeline.inputs import RunInputs


def check_teacher(inputs: RunInputs) -> None:
    """Raise UserError for a teacher that cannot teach this student, before rows are read or a weight is loaded: other tokens
    than the recipe says, a context shorter than its rows, a top k above its vocabulary, layers that carry a state through
    the packs it is run on."""
    section, teacher = inputs.recipe.distil, inputs.teacher
    if section is None or teacher is None or section.way == "answers":
        return
    if teacher.server is None and computes_over_packs(inputs.recipe):
        refuse_teacher_state(
            model_skeleton(teacher.source, teacher.quantization.trust_remote_code), inputs.recipe
        )
    student, own = tokenizer_before(inputs), teacher.load_tokenizer()
    if section.alignment == "tokens":
        n_vocabulary = shared_vocabulary(student, own)
        check_context(teacher.source, inputs.recipe.data.max_tokens)
    else:
        _refuse_same_tokens(student, own)
        for tokenizer in (student, own):
            TokenBytes(tokenizer)
        n_vocabulary = max(own.get_vocab().values()) + 1
    if section.targets == "cache":
        coding_of(k=section.cache.k, vocabulary=n_vocabulary)


def _refuse_same_tokens(student: Any, teacher: Any) -> None:
    if student.get_vocab() == teacher.get_vocab():
        raise UserError(
            "teacher and student have the same tokens",
            where="distil.alignment",
            why="compared token by token nothing is lost, and nothing has to be aligned",
            fix="leave out distil.alignment",
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """Of what decides how rows are read: the tokens, and the chat template around them."""
    return digest_json([tokenizer.get_vocab(), tokenizer.chat_template])


def aligned_rows(
    inputs: RunInputs,
    student_tokenizer: Any,
    rows: Sequence[TokenisedRow],
    source_rows: Callable[[], Sequence[Row]],
) -> AlignedRows | None:
    """The train rows as a teacher with another tokenizer reads them; None where the recipe says that it has the same one.

    Raises UserError as `check_teacher` and `align_rows` do, and for a row that the teacher's context does not hold.
    """
    section, teacher = inputs.recipe.distil, inputs.teacher
    if section is None or teacher is None or section.alignment == "tokens":
        return None
    tokenizer = teacher.load_tokenizer()
    _refuse_same_tokens(student_tokenizer, tokenizer)
    found = align_rows(
        rows, source_rows(), student_tokenizer, tokenizer, train_on=inputs.recipe.data.train_on
    )
    check_context(teacher.source, found.longest_tokens)
    return found
