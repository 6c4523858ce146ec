"""What a distillation recipe may say: student and teacher that fit, and no key that means nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import Fault
from finetune.recipe.distil_section import StudentSection
from finetune.recipe.resolve import load_recipe, recipe_digest

Faults = Callable[..., list[Fault]]
VALID = """\
model:
  id: builtin:smollm2-135m-instruct
data:
  spec: home_intents
train:
  method: distil
distil:
  teacher: {run: runs/home_intents_lora, licence: Apache-2.0}
  student: {init: "layers[0, 2]"}
eval:
  suites: [home_intents]
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("distil=null", "'distil': train.method distil needs to know who teaches"),
        ("train.method=sft", "'train.method': the section distil is not read by train.method sft"),
        ("distil.teacher.run=null", "'distil.teacher.run': give either run or id"),
        ("distil.teacher.id=other", "'distil.teacher.run': give either run or id"),
        ("distil.teacher.adapter=there", "'distil.teacher.adapter': a run knows its own base and adapter"),
        ("distil.teacher.quantize=nf4", "a run's model is held as it was trained"),
        ("distil.teacher.licence=''", "'distil.teacher.licence' must not be empty"),
        ("distil.student.init=layers[]", "neither model nor layers of the teacher"),
        ("distil.student.init=layers[0-3]", "neither model nor layers of the teacher"),
        ("distil.student.init=layer[0,3]", "neither model nor layers of the teacher"),
        ("distil.student.init=modle", "neither model nor layers of the teacher"),
        ("distil.student.init=layers[2,0]", "layers are named once each, in their order"),
        ("distil.student.init=layers[1,1]", "layers are named once each, in their order"),
        ("distil.student.init=layers[,]", "neither model nor layers of the teacher"),
        ("distil.loss.kind=kl", "'distil.loss.kind' must be"),
        ("distil.loss.beta=0.1", "forward_kl has no mixture"),
        ("distil.loss={kind: jsd, beta: 0}", "compares nothing"),
        ("distil.loss={kind: skew_forward_kl, beta: 0.0001}", "compares nothing"),
        ("distil.loss.temperature=0", "must be greater than 0"),
        ("distil.cache.k=0", "must be at least 1"),
        ("distil.cache.temperatures=[0]", "must be greater than 0"),
        ("train.loss.label_smoothing=0.1", "the loss of distil is distil.loss"),
        ("train.loss.neftune_alpha=5", "the loss of distil is distil.loss"),
        ("train.auto=true", "the batching of distil is not searched"),
        (
            "model.new_tokens=[<tool>]",
            "the teacher has no probability for tokens that only the student knows",
        ),
        ("distil={way: answers, loss: {kind: jsd}}", "way answers learns text"),
        ("distil.way=on_policy", "'distil.targets': what the student will say cannot be cached"),
        ("distil.on_policy.share=0.5", "way logits samples nothing"),
        ("adapter.start=runs/other", "starts from the teacher's weights"),
        ("distil.loss.kind=uld", "uld takes no notice of which token is which"),
        ("distil.alignment=text", "a student that is cut from its teacher has the teacher's tokens"),
        ("distil.teacher.server={url: 'http://localhost/v1', model: big}", "a run's model is here"),
    ],
)
def test_what_means_nothing_is_refused(faults: Faults, setting: str, message: str) -> None:
    (fault,) = faults(VALID, setting)
    assert message in fault.what
    assert fault.fix or "'" in fault.what


def test_a_cache_that_is_not_used_is_refused(faults: Faults) -> None:
    (fault,) = faults(VALID, "distil.targets=live", "distil.cache.k=8")
    assert "nothing is cached" in fault.what


def test_faults_of_several_sections_come_together(faults: Faults) -> None:
    found = faults(VALID, "distil.loss.temperature=0", "distil.cache.k=0", "distil.teacher.licence=''")
    assert len(found) == 3


@pytest.mark.parametrize(
    ("text", "layers"), [("layers[0]", (0,)), ("layers[0, 3,6]", (0, 3, 6)), ("model", None)]
)
def test_layers_are_read_from_the_text(text: str, layers: tuple[int, ...] | None) -> None:
    assert StudentSection(init=text).layers == layers


def test_a_licence_does_not_change_the_run_and_a_loss_does(write: Callable[..., Path]) -> None:
    path = str(write(VALID))
    digest = recipe_digest(load_recipe(path))
    assert recipe_digest(load_recipe(path, ["distil.teacher.licence=MIT"])) == digest
    assert recipe_digest(load_recipe(path, ["distil.loss.temperature=2"])) != digest


OTHER_TOKENS = VALID.replace("run: runs/home_intents_lora", "id: other").replace(
    '  student: {init: "layers[0, 2]"}', "  alignment: text"
)
SERVED = OTHER_TOKENS.replace("id: other", "id: other, server: {url: http://localhost:8000/v1, model: big}")


@pytest.mark.parametrize(
    ("text", "setting", "message"),
    [
        (
            OTHER_TOKENS,
            "data.long_rows=split",
            "a row that split changes would be another one for the teacher",
        ),
        (OTHER_TOKENS, "data.long_rows=truncate_prompt", "would be another one for the teacher"),
        (OTHER_TOKENS, "distil.loss={kind: uld, beta: 0.5}", "uld has no mixture"),
        (OTHER_TOKENS, "distil.way=answers", "way answers learns text"),
        (SERVED, "distil.targets=live", "a teacher behind a server runs once, for the cache"),
        (SERVED, "distil.loss.temperature=2", "log-probabilities are those of temperature 1 only"),
        (SERVED, "distil.cache.temperatures=[1,2]", "log-probabilities are those of temperature 1 only"),
        (SERVED, "distil.teacher.quantize=nf4", "the server decides how the teacher is held"),
        (SERVED, "distil.teacher.adapter=there", "the server decides how the teacher is held"),
        (SERVED, "distil.teacher.server.url=localhost", "must match the pattern"),
    ],
)
def test_other_tokens_and_servers_cannot_be_asked_for_what_they_do_not_give(
    faults: Faults, text: str, setting: str, message: str
) -> None:
    (fault,) = faults(text, setting)
    assert message in fault.what


def test_what_the_student_samples_is_judged_in_its_own_tokens(faults: Faults) -> None:
    (fault,) = faults(OTHER_TOKENS, "distil.way=on_policy", "distil.targets=live")
    assert "judged in its own tokens" in fault.what


@pytest.mark.parametrize("setting", ["distil.loss.kind=uld", "distil.targets=live", "data.long_rows=drop"])
def test_a_teacher_with_other_tokens_is_a_recipe(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(OTHER_TOKENS)
    assert load_recipe(str(path), [setting]).distil is not None


def test_a_student_cut_from_a_served_teacher_is_refused(faults: Faults) -> None:
    text = SERVED.replace("  alignment: text", '  student: {init: "layers[0, 2]"}')
    (fault,) = faults(text)
    assert "the teacher's layers are not here" in fault.what
