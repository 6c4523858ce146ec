"""How fast are items answered? Our decoder beside transformers' `generate` and, where installed, lm-eval's `hf` backend.

    python benchmarks/evaluation_speed.py [--items 200] [--batch-size 32] [--arm few_shot|tuned|zero_shot] [--json FILE]

The same model in memory, the same prompt tokens of the suite's arm, greedy, the same limit and stop token, one process, one
after the other. In fp32 the answers must be the same texts; the share that is, is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from results import table, write_section

from finetune.evaluation.generate import common_prefix, generate
from finetune.evaluation.prompts import Prompt, build_prompts
from finetune.evaluation.stopping import StopRule, stop_rule
from finetune.evaluation.suite import load_suite
from finetune.evaluation.suite_data import load_suite_data
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model


def ours(model: Any, prompts: Sequence[Prompt], rule: StopRule, batch_size: int) -> list[str]:
    answers = generate(model, [prompt.ids for prompt in prompts], rule, batch_size=batch_size)
    return [answer.text for answer in sorted(answers, key=lambda answer: answer.index)]


def transformers_generate(
    model: Any, prompts: Sequence[Prompt], rule: StopRule, batch_size: int
) -> list[str]:
    """Length-sorted, left-padded batches of `model.generate`: what harnesses on top of it do."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].ids))
    texts = [""] * len(prompts)
    pad = rule.tokenizer.pad_token_id
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        longest = max(len(prompts[index].ids) for index in batch)
        rows = [[pad] * (longest - len(prompts[index].ids)) + prompts[index].ids for index in batch]
        mask = [[0] * (longest - len(prompts[index].ids)) + [1] * len(prompts[index].ids) for index in batch]
        output = model.generate(
            torch.tensor(rows), attention_mask=torch.tensor(mask), max_new_tokens=rule.max_new_tokens,
            do_sample=False, eos_token_id=sorted(rule.stop_ids), pad_token_id=pad,
        )  # fmt: skip
        for index, row in zip(batch, output[:, longest:].tolist(), strict=True):
            texts[index] = rule.text(row)
    return texts


def lm_eval_hf(model: Any, prompts: Sequence[Prompt], rule: StopRule, batch_size: int) -> list[str]:
    """lm-eval's own transformers backend, given the same model and the rendered prompts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    backend = HFLM(pretrained=model, tokenizer=rule.tokenizer, batch_size=batch_size, max_length=8192)
    stop = rule.tokenizer.eos_token
    requests = [
        Instance(
            request_type="generate_until", doc={}, idx=index,
            arguments=(prompt.text, {"until": [stop], "max_gen_toks": rule.max_new_tokens, "do_sample": False}),
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    return [str(text) for text in backend.generate_until(requests)]


def products_seconds(model: Any, n_rows: int) -> float:
    """Seconds that the model's matrix products alone take for each of `n_rows` rows that go through together."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {
        width: torch.randn(n_rows, width, dtype=layers[0].weight.dtype)
        for width in {layer.in_features for layer in layers}
    }
    times = []
    for _ in range(6):
        started = time.perf_counter()
        for layer in layers:
            torch.nn.functional.linear(inputs[layer.in_features], layer.weight)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) / n_rows


def measure(
    items: int, batch_size: int, arm: str, dtype: str, model_id: str, *, with_generate: bool
) -> dict[str, Any]:
    """Seconds, items and output tokens a second of every backend, and how many answers are ours word for word."""
    source = resolve_model(model_id)
    tokenizer, model = load_tokenizer(source), load_model(source, dtype=dtype, attention="sdpa")
    suite = load_suite("home_intents")
    data = load_suite_data(suite, max_items=items)
    prompts = build_prompts(suite, data.items, tokenizer, arm=arm, few_shot=data.few_shot_rows)  # type: ignore[arg-type]
    rule = stop_rule(
        tokenizer,
        max_new_tokens=suite.decoding.max_new_tokens,
        stop_strings=[],
        stop_ids=[tokenizer.eos_token_id],
    )
    backends: dict[str, Callable[..., list[str]]] = {
        "finetune": ours,
        "transformers generate": transformers_generate,
    }
    if importlib.util.find_spec("lm_eval") is not None:
        backends["lm-eval hf"] = lm_eval_hf
        if not with_generate:
            del backends["transformers generate"]
    ours(model, prompts[:2], rule, 2)  # threads and kernels warmed up
    rows: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}
    for name, answer in backends.items():
        started = time.perf_counter()
        texts[name] = answer(model, prompts, rule, batch_size)
        seconds = time.perf_counter() - started
        same = sum(
            one.strip() == other.strip() for one, other in zip(texts[name], texts["finetune"], strict=True)
        )
        tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts[name])
        rows[name] = {
            "seconds": round(seconds, 1),
            "items_per_second": round(len(prompts) / seconds, 2),
            "output_tokens_per_second": round(tokens / seconds, 1),
            "answers_like_ours": same,
        }
    shared = common_prefix([prompt.ids for prompt in prompts])
    read = shared + sum(len(prompt.ids) - shared for prompt in prompts)
    written = rows["finetune"]["output_tokens_per_second"] * rows["finetune"]["seconds"]
    products = read * products_seconds(model, 512) + written * products_seconds(model, batch_size)
    return {
        "model": source.id, "arm": arm, "dtype": dtype, "items": len(prompts), "batch_size": batch_size,
        "max_new_tokens": rule.max_new_tokens, "products_seconds": round(products, 1),
        "prompt_tokens_per_item": round(sum(len(prompt.ids) for prompt in prompts) / len(prompts)),
        "shared_prefix_tokens": shared,
        "threads": torch.get_num_threads(), "backends": rows,
    }  # fmt: skip


def report(found: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown of several arms' measurements."""
    rows = []
    for one in found:
        fastest = one["backends"]["finetune"]["seconds"]
        for name, row in one["backends"].items():
            rows.append(
                [
                    one["arm"], name, f"{row['seconds']:.1f}", f"{row['items_per_second']:.2f}",
                    f"{row['output_tokens_per_second']:.0f}", f"{row['answers_like_ours']} of {one['items']}",
                    f"{row['seconds'] / fastest:.2f}",
                ]
            )  # fmt: skip
    header = [
        "prompts",
        "backend",
        "seconds",
        "items/s",
        "output tokens/s",
        "answers like ours",
        "time / ours",
    ]
    first = found[0]
    return [
        f"{first['items']} items of home_intents on {first['model']}, {first['dtype']}, greedy, at most "
        f"{first['max_new_tokens']} tokens, batch {first['batch_size']}, one run each, one after the other.",
        "Shared prefix of the prompts: "
        + ", ".join(
            f"{one['arm']} {one['shared_prefix_tokens']} of {one['prompt_tokens_per_item']} tokens"
            for one in found
        )
        + ".",
        "",
        *table(header, rows),
        "",
        *(
            f"Of our {one['backends']['finetune']['seconds']:.1f} s for {one['arm']}, the model's matrix products take "
            f"{one['products_seconds']:.1f} s at {one['batch_size']} rows a step; the rest is attention over the cache, norms, activations."
            for one in found
        ),
        *(
            f"All prompts together, {name}: {sum(one['backends'][name]['seconds'] for one in found):.1f} s, "
            f"{sum(one['backends'][name]['seconds'] for one in found) / sum(one['backends']['finetune']['seconds'] for one in found):.2f} × ours."
            for name in first["backends"]
            if name != "finetune"
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--arm", choices=["zero_shot", "few_shot", "tuned"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--model", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--with-generate", action="store_true", help="also transformers' generate by itself")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    arms = [given.arm] if given.arm else ["few_shot", "tuned"]
    found = [
        measure(
            given.items, given.batch_size, arm, given.dtype, given.model, with_generate=given.with_generate
        )
        for arm in arms
    ]
    write_section("Evaluation: items answered beside other backends", report(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
