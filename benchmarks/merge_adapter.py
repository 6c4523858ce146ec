"""Merging an adapter into a base: peak resident memory above the interpreter, and wall time.

    python benchmarks/merge_adapter.py [--size 1.5GB] [--runs 3] [--dtypes bf16,fp32]

A synthetic Llama in bf16 and a LoRA of rank 16 on all its linear layers. Every merge, proof included, runs in a process of
its own; memory is the kernel's own peak after everything is imported, so the load of the machine does not change it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from merge_models import HIDDEN, INTERMEDIATE, make_model
from results import table, write_section

from finetune.units import format_bytes, parse_bytes

RANK = 16
GOAL_BYTES = 500_000_000
LINEAR = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="1.5GB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--folder", type=Path, default=None, help="where the models are made")
    parser.add_argument("--one", nargs=4, metavar=("BASE", "ADAPTER", "OUT", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(merge_once(*options.one)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report(Path(folder), options)


def report(folder: Path, options: argparse.Namespace) -> None:
    size = make_model(folder / "base", parse_bytes(options.size), 0)
    make_adapter(folder / "base", folder / "adapter")
    rows = []
    for dtype in options.dtypes.split(","):
        found = []
        for run in range(options.runs):
            out = folder / f"out_{dtype}_{run}"
            given = [str(folder / "base"), str(folder / "adapter"), str(out), dtype]
            command = [sys.executable, __file__, "--one", *given]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(answer.stdout.splitlines()[-1]))
            for file in out.iterdir():
                file.unlink()
        seconds = statistics.median(one["seconds"] for one in found)
        peak = max(one["peak_bytes"] for one in found)
        rows.append([dtype, f"{seconds:.1f} s", format_bytes(peak), f"≤ {format_bytes(GOAL_BYTES)}"])
    write_section(
        "Merging an adapter: memory",
        [
            f"A base of {format_bytes(size)} in bf16 and a LoRA of rank {RANK} on all linear layers; time holds the proof. "
            f"Median time and largest peak of {options.runs}.",
            "",
            *table(["written", "seconds", "peak resident memory", "goal"], rows),
        ],
    )


def make_adapter(base: Path, folder: Path) -> None:
    """A LoRA in PEFT's form, made without loading the base."""
    import torch
    from safetensors.torch import save_file

    n_layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(n_layers):
        for name, (n_out, n_in) in LINEAR.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("A", (RANK, n_in)), ("B", (n_out, RANK))):
                tensors[f"{at}.lora_{part}.weight"] = torch.empty(shape).normal_(0, 0.02, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in LINEAR}), "base_model_name_or_path": str(base),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merge_once(base: str, adapter: str, out: str, dtype: str) -> dict[str, float]:
    """One merge in this process; the kernel's peak of resident memory is reset once everything is imported."""
    import peft  # noqa: F401 - what the merge imports
    from transformers import LlamaForCausalLM  # noqa: F401

    from finetune.merge.adapter import merge_adapter
    from finetune.model.source import resolve_model

    source = resolve_model(base)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    merge_adapter(source, Path(adapter), Path(out), dtype="fp32" if dtype == "fp32" else "bf16")
    return {"seconds": time.perf_counter() - start, "peak_bytes": memory_bytes("VmHWM") - before}


def memory_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
