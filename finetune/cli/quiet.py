"""Silences remarks of libraries that a user can do nothing about; errors still come through."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Call before transformers, TRL or datasets are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    for name in ("transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers

    transformers.utils.logging.disable_progress_bar()
