"""`finetune plan RECIPE` and `finetune plan break-even`: bytes, time and money, before any weight is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import ExitCode
from finetune.plan.sharding import Offload, Sharding

_RECIPE_COMMAND = "recipe"


class RecipeByDefault(TyperGroup):
    """`plan RECIPE …` means `plan recipe RECIPE …`: the name of that command may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [_RECIPE_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="plan",
    cls=RecipeByDefault,
    help="Forecast memory, time and cost before anything is loaded: finetune plan RECIPE --memory 24GB",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key of the recipe.")
]
MemoryOption = Annotated[
    str | None, typer.Option(help="Memory of one device, e.g. 24GB; default: that of --device.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, or a GPU whose memory and speed are known: l4, rtx4090, a100-80gb, h100, …"
    ),
]
ShardingOption = Annotated[
    Sharding | None,
    typer.Option(help="How several devices share the model; default ddp."),
]
OffloadOption = Annotated[Offload, typer.Option(help="What is held in the host's memory.")]
LongestOption = Annotated[
    int | None, typer.Option(min=1, help="Longest pack or row in the data; default: the recipe's limit.")
]
NewTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest answer in the evaluation; default: the largest decoding.max_new_tokens of the suites.",
    ),
]
TokensOption = Annotated[int | None, typer.Option(min=1, help="Tokens of one epoch; adds steps and hours.")]
RateOption = Annotated[
    float | None, typer.Option(help="Measured tokens a second of one device; default: by --device.")
]
ProbeOption = Annotated[
    bool,
    typer.Option(
        "--probe", help="Train a few steps here, for the rate and the tokens of the whole training."
    ),
]
ProbeStepsOption = Annotated[
    int | None, typer.Option(min=2, help="Steps of --probe, default 3; the first one warms up.")
]
PriceOption = Annotated[float | None, typer.Option(min=0.0, help="Price of one device for an hour.")]


@app.command(_RECIPE_COMMAND)
def plan_recipe(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a shipped name.")],
    overrides: SetOption = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 1,
    sharding: ShardingOption = None,
    offload: OffloadOption = "none",
    longest_pack: LongestOption = None,
    new_tokens: NewTokensOption = None,
    train_tokens: TokensOption = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Train rows; counts steps without packing.")] = None,
    tokens_per_second: RateOption = None,
    probe: ProbeOption = False,
    probe_steps: ProbeStepsOption = None,
    price_per_hour: PriceOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Forecast a recipe term by term, and say whether it fits (exit code 13 if not) and what to change."""
    from finetune.cli.plan_flags import PROBE_STEPS, refuse_for_recipe, refuse_unused
    from finetune.cli.plan_inputs import answer_tokens, config_of_recipe
    from finetune.cli.plan_page import Forecasts, Plan, find_target, plan_time, run_probe
    from finetune.cli.plan_teacher import teacher_of_recipe
    from finetune.plan.cost import training_cost
    from finetune.plan.fits import fits
    from finetune.recipe.resolve import read_recipe

    refuse_unused(
        train_tokens=train_tokens,
        tokens_per_second=tokens_per_second,
        price_per_hour=price_per_hour,
        probe=probe,
        probe_steps=probe_steps,
    )
    found = read_recipe(recipe, overrides or ())
    config, teacher = config_of_recipe(found), teacher_of_recipe(found)
    loaded, answers = found.value, answer_tokens(found, new_tokens)
    target = find_target(device, memory)

    forecasts = Forecasts(config, target, devices, sharding, offload, longest_pack, answers.tokens, teacher)
    refuse_for_recipe(loaded, forecasts, train_tokens, rows)
    worst = forecasts.worst(loaded)
    fit = fits(worst, target.memory_bytes, loaded, forecasts.worst) if target.memory_bytes else None
    planned = forecasts.training(loaded)
    probed = run_probe(recipe, overrides or (), target, probe_steps or PROBE_STEPS) if probe else None
    time = plan_time(loaded, config, target, planned, train_tokens, rows, tokens_per_second, devices, probed)
    cost = None
    if time is not None and price_per_hour is not None:
        cost = training_cost(time.seconds, price_per_hour, n_devices=devices)
    plan = Plan(loaded, target, planned, forecasts.evaluation(loaded), answers, fit, time, cost, probed)
    emit(plan.to_dict(), plan.to_text(), as_json=as_json)
    if fit is not None and not fit.fits:
        raise typer.Exit(int(ExitCode.WILL_NOT_FIT))


@app.command("break-even")
def plan_break_even(
    tuning_cost: Annotated[float, typer.Option(help="Price of the tuning: data, people and training.")],
    large_price: Annotated[float, typer.Option(help="Large model, price of a million tokens.")],
    small_price: Annotated[float, typer.Option(help="Tuned model, price of a million tokens.")],
    gpu_per_month: Annotated[float, typer.Option(help="Fixed price of serving the tuned model.")] = 0.0,
    months: Annotated[float, typer.Option(help="How long the tuned model will be used.")] = 12.0,
    large_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt of the large model, its examples included.")
    ] = None,
    small_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt of the tuned model, which needs no examples.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=0, help="Tokens of an answer.")] = 0,
    page: Annotated[Path | None, typer.Option(help="Also write it as a page, e.g. break_even.html.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """From which monthly volume a tuned small model is cheaper than a large one, with the curve of cost over volume."""
    from finetune.cli.plan_page import break_even_text
    from finetune.plan.cost import break_even, query_cost

    result = break_even(
        tuning_cost=tuning_cost,
        amortise_months=months,
        large_price_per_million_tokens=large_price,
        small_price_per_million_tokens=small_price,
        gpu_per_month=gpu_per_month,
    )
    queries = {
        name: query_cost(prompt, output_tokens, input_price_per_million=price)
        for name, prompt, price in (
            ("large", large_prompt_tokens, large_price),
            ("tuned", small_prompt_tokens, small_price),
        )
        if prompt is not None
    }
    if page is not None:
        from finetune.report.break_even import write_break_even_page

        note(f"page: {write_break_even_page(page, result, months=months, query_costs=queries)}")
    emit(
        result.to_dict() | {"query_cost": queries},
        break_even_text(result, months=months, query_costs=queries),
        as_json=as_json,
    )
