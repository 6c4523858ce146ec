"""Merging models beside mergekit: wall time, peak anonymous memory, and whether the results are equal.

    python benchmarks/merge_models.py [--size 1.5GB] [--runs 5] [--methods slerp,ties] [--mergekit FOLDER]

Synthetic Llama shapes, a base and two models, bf16. Every merge runs in a process of its own, from a mergekit file that
both read, ours and theirs in turn; times leave out imports. On a busy machine the seconds of the processors say more than
those of the clock, and the load is printed. `--mergekit` is a folder that mergekit was installed into (`pip install --target`).
Without mergekit its columns stay empty.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import table, write_section

from finetune.units import format_bytes, parse_bytes

DENSE = {"weight": 0.5, "density": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"weight": 0.5},
    "slerp": {},
    "task_arithmetic": {"weight": 0.5},
    "ties": DENSE,
    "dare_ties": DENSE,
    "model_stock": {},
    "karcher": {},
    "sce": {},
}
GOALS = {"linear": 0.8, "task_arithmetic": 0.8, "slerp": 0.5, "ties": 0.5, "dare_ties": 0.5}
HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 8192, 32_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="1.5GB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--methods", default=",".join(CASES))
    parser.add_argument("--mergekit", type=Path, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="where the models are made")
    parser.add_argument("--one", nargs=3, metavar=("TOOL", "RECIPE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mergekit is not None:
        sys.path.append(str(options.mergekit))
    if options.one:
        print(json.dumps(merge_once(*options.one)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report(Path(folder), options)


def report(folder: Path, options: argparse.Namespace) -> None:
    wanted = parse_bytes(options.size)
    sizes = [make_model(folder / name, wanted, seed) for seed, name in enumerate(("base", "one", "two"))]
    bandwidth = copy_bandwidth(folder / "base" / "model.safetensors", folder / "copy")
    rows = []
    for method in options.methods.split(","):
        recipe = write_recipe(folder, method)
        n_models = 2 if method == "slerp" else 3
        limit = (n_models + 1) * sizes[0] / bandwidth
        own = recipe.with_name(f"{method}.own.yaml")
        own.write_text(json.dumps({"merge": 1, **json.loads(recipe.read_text())}))
        jobs = {"ours": ("finetune", recipe)}
        if has_mergekit():
            jobs["theirs"] = ("mergekit", recipe)
        if method in ("ties", "dare_ties"):
            jobs["paper"] = ("finetune", own)
        found = measure(jobs, folder, options)
        rows.append(line(method, found["ours"], found.get("theirs"), limit))
        if "paper" in found:
            rows.append(line(f"{method}, dialect paper", found["paper"], found.get("theirs"), limit, method))
        print(" | ".join(rows[-1]), flush=True)
    head = [
        "method", "finetune", "of it proof", "mergekit", "ratio", "without proof", "goal", "of the limit",
        "processor seconds, theirs", "peak anonymous", "mergekit's",
    ]  # fmt: skip
    lines = [
        f"A base and two models of {format_bytes(sizes[0])}, bf16; median of {options.runs}. The limit is (models + 1) · size "
        f"over {format_bytes(bandwidth)}/s, the speed of copying a file. Peak anonymous memory is above the interpreter "
        "with everything imported; its goal is 0.5 GB. The time of finetune holds the proof: all bytes read back, and a "
        "forward pass. Both times end when the weights are on disk (on a disk of few MB/s that is most of them; `--folder` on a "
        "file system in memory leaves it out). Same recipe for both, so in the dialect `mergekit`, unless the row says "
        f"otherwise. Processes that wanted a core, on average of the last minutes: {os.getloadavg()[1]:.1f}, of which one "
        f"merge is at most {os.cpu_count()}.",
        "",
        *table(head, rows),
    ]
    if not has_mergekit():
        lines += [
            "",
            "mergekit is not installed here, so nothing stands beside: pip install --target DIR mergekit==0.1.5",
        ]
    write_section("Merging models", lines)
    if has_mergekit():
        from merge_equality import equality_rows

        write_section(
            "Merging models: equal to mergekit",
            [
                "fp32, dialect `mergekit`; largest difference over largest value of the result. Draws of DARE and DELLA are "
                "given to both.",
                "",
                *table(["method", "difference", "goal"], equality_rows()),
            ],
        )


def line(
    name: str, ours: dict[str, float], theirs: dict[str, float] | None, limit: float, goal: str = ""
) -> list[str]:
    wanted = GOALS.get(goal or name)
    return [
        name,
        f"{ours['seconds']:.1f} s",
        f"{ours['proof_seconds']:.1f} s",
        f"{theirs['seconds']:.1f} s" if theirs else "—",
        f"{ours['seconds'] / theirs['seconds']:.2f}" if theirs else "—",
        f"{(ours['seconds'] - ours['proof_seconds']) / theirs['seconds']:.2f}" if theirs else "—",
        f"≤ {wanted}" if wanted else "",
        f"{ours['seconds'] / limit:.2f}",
        f"{ours['processor_seconds']:.1f}, {theirs['processor_seconds']:.1f}"
        if theirs
        else f"{ours['processor_seconds']:.1f}",
        format_bytes(ours["peak_bytes"]),
        format_bytes(theirs["peak_bytes"]) if theirs else "—",
    ]


def has_mergekit() -> bool:
    return importlib.util.find_spec("mergekit") is not None


def make_model(folder: Path, n_bytes: int, seed: int) -> int:
    """A Llama of about `n_bytes` in one file, written tensor by tensor; models after the base are a little beside it."""
    import torch

    from finetune.merge.shards import PlannedTensor, plan_shards, write_model

    per_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
    layers = max(1, round((n_bytes / 2 - 2 * VOCABULARY * HIDDEN) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}"
        for name in "qkvo":
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    planned = [PlannedTensor(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    generator, beside = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed + 100)

    def values() -> Any:
        for tensor in planned:
            value = torch.empty(tensor.shape).normal_(0, 0.02, generator=generator)
            if seed:
                value += torch.empty(tensor.shape).normal_(0, 0.001, generator=beside)
            yield tensor.name, [value.to(torch.bfloat16)]

    folder.mkdir()
    write_model(folder, plan_shards(planned), values())
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
        "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return sum(tensor.n_bytes for tensor in planned)


def write_recipe(folder: Path, method: str) -> Path:
    """A mergekit file, which both tools read."""
    names = ["one"] if method == "slerp" else ["one", "two"]
    if method in ("linear", "karcher"):
        names = ["base", *names]
    models = [{"model": str(folder / name), "parameters": CASES[method]} for name in names]
    content: dict[str, Any] = {"merge_method": method, "models": models, "dtype": "bfloat16"}
    if method not in ("linear", "karcher"):
        content["base_model"] = str(folder / "base")
    if method == "slerp":
        content["parameters"] = {"t": 0.4}
    path = folder / f"{method}.yaml"
    path.write_text(json.dumps(content))
    return path


def copy_bandwidth(source: Path, target: Path) -> float:
    """Bytes read plus written a second, for one copy that reaches the disk."""
    start = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 23)
        writer.flush()
        os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return 2 * source.stat().st_size / seconds


def measure(
    jobs: dict[str, tuple[str, Path]], folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Medians of each job, (tool, recipe); the jobs run in turn, so that what disturbs one disturbs all."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    for _ in range(options.runs):
        for name, (tool, recipe) in jobs.items():
            found[name].append(run_alone(tool, recipe, folder / "out", options))
    return {
        name: {
            "seconds": statistics.median(run["seconds"] for run in runs),
            "processor_seconds": statistics.median(run["processor_seconds"] for run in runs),
            "proof_seconds": statistics.median(run["proof_seconds"] for run in runs),
            "peak_bytes": max(run["peak_bytes"] for run in runs),
        }
        for name, runs in found.items()
    }


def run_alone(tool: str, recipe: Path, out: Path, options: argparse.Namespace) -> dict[str, float]:
    """One merge in a process of its own."""
    command = [sys.executable, __file__, "--one", tool, str(recipe), str(out)]
    if options.mergekit is not None:
        command += ["--mergekit", str(options.mergekit)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(out)
    measured: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return measured


def merge_once(tool: str, recipe: str, out: str) -> dict[str, float]:
    """One merge in this process: seconds by the clock and of the processors, and the largest anonymous memory above what
    was there before.
    """
    merge = prepare_ours(recipe, out) if tool == "finetune" else prepare_mergekit(recipe, out)
    before = anonymous_bytes()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start, busy = time.perf_counter(), time.process_time()
    report = merge()
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - busy
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "peak_bytes": peak[0] - before,
        "proof_seconds": getattr(report, "proof_seconds", 0.0),
    }


def prepare_ours(recipe: str, out: str) -> Callable[[], object]:
    from transformers import AutoConfig, LlamaForCausalLM  # noqa: F401 - what the proof imports

    from finetune.merge.models.merge import merge_models
    from finetune.recipe.merge_loader import load_merge

    loaded = load_merge(Path(recipe))
    return lambda: merge_models(loaded, Path(out))


def prepare_mergekit(recipe: str, out: str) -> Callable[[], object]:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    config = MergeConfiguration.model_validate(json.loads(Path(recipe).read_text()))
    choices = MergeOptions(quiet=True, write_model_card=False, random_seed=17)

    def merge() -> None:
        run_merge(config, out, choices)
        for file in Path(out).glob(
            "*.safetensors"
        ):  # ours is on disk when it returns, so theirs is awaited, too
            with file.open("rb") as stream:
                os.fsync(stream.fileno())

    return merge


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
