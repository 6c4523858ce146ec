"""What the speed benchmarks of trainers share: a model of no size, steps in the order of the rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from finetune.model.source import resolve_model


def tiny_source() -> Any:
    """A random Llama of two layers with the embedded model's tokenizer left out: a folder of its own."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(256)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2", pad_token="t2").save_pretrained(
        folder
    )
    return resolve_model(str(folder))


def in_order(trainer: Any) -> None:
    """Let a trainer, ours or TRL's, take its rows as they come, so that all contenders have the same batches."""
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
