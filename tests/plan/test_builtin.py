"""The shipped configuration of the embedded model is that of its converted folder."""

from __future__ import annotations

import pytest

from finetune.plan.architecture import read_architecture
from finetune.plan.builtin import BUILTIN_CONFIGS


@pytest.mark.embedded
@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_shape_and_parameters_are_those_of_the_embedded_model(name: str) -> None:
    from finetune.model.source import read_config, resolve_model

    source = resolve_model(f"builtin:{name}")
    ours, theirs = read_architecture(BUILTIN_CONFIGS[name]), read_architecture(read_config(source))
    assert ours == theirs
    assert ours.n_parameters == 134_515_008
    assert source.n_parameters == ours.n_parameters


def test_every_embedded_model_can_be_planned() -> None:
    from finetune.model.embedded import BUILTIN_MODELS

    assert set(BUILTIN_CONFIGS) == set(BUILTIN_MODELS)
