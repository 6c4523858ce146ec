"""What `finetune plan` needs around the arithmetic: the model's configuration, the device, and the printed page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.errors import UserError
from finetune.plan.time import DeviceSpec
from finetune.units import format_amount, format_bytes, format_count, format_duration, parse_bytes

if TYPE_CHECKING:
    from finetune.cli.plan_inputs import AnswerTokens
    from finetune.pipeline.probe import Probe
    from finetune.plan.cost import BreakEven
    from finetune.plan.fits import Fit, Suggestion
    from finetune.plan.memory import Forecast
    from finetune.plan.sharding import Offload, Sharding
    from finetune.plan.teacher import TeacherPlan
    from finetune.plan.time import TrainingTime
    from finetune.recipe.schema import Recipe

_LEAST_MEMORY_BYTES = 1_000_000  # a number without its unit is bytes, and never meant so
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_TERM_NAMES = {
    "weights": "weights",
    "quantization_constants": "quantization constants",
    "master_copy": "fp32 master copy",
    "adapters": "adapters",
    "teacher": "teacher",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "kv_cache": "keys and values",
    "fragmentation": "fragmentation",
    "kernel_cache": "kernels kept by torch",
    "process": "process and libraries",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where the recipe is to run. `memory_bytes` is None when nobody said and nothing is known."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int | None
    spec: DeviceSpec | None


def find_target(device: str | None, memory: str | None) -> Target:
    """The device by name; without one, CUDA where its driver is loaded, else this machine's processor and memory."""
    from finetune.plan.time import device_spec

    memory_bytes = parse_bytes(memory, where="--memory") if memory is not None else None
    if memory_bytes is not None and memory_bytes < _LEAST_MEMORY_BYTES:
        raise UserError(
            f"'{memory}' is {format_bytes(memory_bytes)}, and holds nothing",
            where="--memory",
            fix="write it with its unit, like 24GB, 500MB or 16GiB",
        )
    if device is None:
        device = "cuda" if _NVIDIA_DRIVER.exists() else "cpu"
    if device == "cuda":
        return Target("cuda", "cuda", memory_bytes, None)
    if device == "cpu":
        import psutil

        return Target("cpu", "cpu", memory_bytes or psutil.virtual_memory().total, None)
    spec = device_spec(device)
    return Target("cuda", spec.name, memory_bytes or spec.memory_bytes, spec)


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The memory forecasts of a recipe and its variants on one target. `longest_pack` None: the recipe's limit."""

    config: dict[str, Any]
    target: Target
    n_devices: int
    sharding: Sharding | None
    offload: Offload
    longest_pack: int | None
    new_tokens: int
    teacher: TeacherPlan | None = None

    def training(self, recipe: Recipe) -> Forecast:
        from finetune.plan.memory import forecast_training, most_row_tokens

        limit = most_row_tokens(recipe)
        return forecast_training(
            recipe,
            self.config,
            longest_pack_tokens=min(self.longest_pack or limit, limit),
            device=self.target.kind,
            world_size=self.n_devices,
            sharding=self.sharding or ("ddp" if self.n_devices > 1 else "none"),
            offload=self.offload,
            teacher=self.teacher,
        )

    def evaluation(self, recipe: Recipe) -> Forecast:
        from finetune.plan.memory import forecast_generation

        return forecast_generation(
            self.config,
            recipe.eval.batch_size,
            recipe.data.max_tokens,
            self.new_tokens,
            recipe.eval.dtype,
            device=self.target.kind,
            behind_training=recipe.model.dtype != "fp32",
        )

    def worst(self, recipe: Recipe) -> Forecast:
        return max(self.training(recipe), self.evaluation(recipe), key=lambda forecast: forecast.total_bytes)


def plan_time(
    recipe: Recipe,
    config: dict[str, Any],
    target: Target,
    training: Forecast,
    train_tokens: int | None,
    n_rows: int | None,
    tokens_per_second: float | None,
    n_devices: int,
    probe: Probe | None = None,
) -> TrainingTime | None:
    """Length of the training: by the probe, or when the tokens are given and a rate is given or known."""
    from finetune.plan.architecture import read_architecture
    from finetune.plan.time import device_rate, training_time

    if probe is not None:
        return probe.time(recipe, n_devices=n_devices)
    if train_tokens is None:
        return None
    basis, rate = "given", tokens_per_second
    if rate is None:
        if target.spec is None:
            raise UserError(
                f"no rate is known for device '{target.name}'",
                where="--tokens-per-second",
                fix="add --probe to measure it here, give a measured rate, or name a GPU with --device",
            )
        basis = target.spec.name
        rate = device_rate(
            target.spec, read_architecture(config), recipe, recipe.data.max_tokens, training.n_trainable
        )
    return training_time(recipe, train_tokens, rate, n_rows=n_rows, n_devices=n_devices, basis=basis)


def run_probe(recipe: str, overrides: Sequence[str], target: Target, n_steps: int) -> Probe:
    """A few steps on this machine. Raises UserError where the plan is for another one."""
    if target.spec is not None:
        raise UserError(
            f"--probe measures this machine, and the plan is for {target.name}",
            where="--probe",
            fix="leave out --device, or give --train-tokens and take the rate of the device table",
        )
    from finetune.cli.output import note
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.pipeline.probe import probe_training

    return probe_training(recipe, overrides, n_steps=n_steps, say=note)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `finetune plan RECIPE` answers."""

    recipe: Recipe
    target: Target
    training: Forecast
    evaluation: Forecast
    answers: AnswerTokens
    fit: Fit | None
    time: TrainingTime | None
    cost: float | None
    probe: Probe | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "model": self.recipe.model.id,
            "device": self.target.name,
            "training": self.training.to_dict(),
            "evaluation": self.evaluation.to_dict(),
            "new_tokens": asdict(self.answers),
            "peak_bytes": max(self.training.total_bytes, self.evaluation.total_bytes),
            "fit": self.fit.to_dict() if self.fit is not None else None,
            "time": asdict(self.time) if self.time is not None else None,
            "cost": self.cost,
            "probe": self.probe.to_dict() if self.probe is not None else None,
        }

    def to_text(self) -> str:
        from finetune.cli.plan_inputs import answers_lines

        training = self.training
        lines = [
            f"{self.recipe.name}: {self.recipe.model.id}, {format_count(training.n_parameters)} parameters, "
            f"{format_count(training.n_trainable)} trained, on {self._devices()}",
            "",
            *_term_lines(training),
            "",
            f"  training at its worst ({training.moment}, {training.assumptions['tokens_per_forward']} tokens a "
            f"forward pass, {training.assumptions['attention']} attention): {format_bytes(training.total_bytes)}",
            f"  evaluation ({self.evaluation.assumptions['batch']} answers at once, up to "
            f"{self.evaluation.assumptions['prompt_tokens']} + {self.evaluation.assumptions['new_tokens']} tokens, "
            f"{self.evaluation.assumptions['dtype']}): {format_bytes(self.evaluation.total_bytes)}",
            *answers_lines(self.answers),
        ]
        if training.host_bytes:
            lines.append(f"  offloaded to the host: {format_bytes(training.host_bytes)}")
        if self.time is not None:
            lines.append(
                f"  time: {self.time.steps} steps, {self.time.tokens:,} tokens at {self.time.tokens_per_second:,.0f} "
                f"tokens/s ({self.time.basis}): {format_duration(self.time.seconds)}"
                + (f", cost {self.cost:,.4g}" if self.cost is not None else "")
            )
        if self.probe is not None:
            used = format_bytes(self.probe.peak_bytes)
            ratio = training.total_bytes / self.probe.peak_bytes
            lines.append(f"  the probe used {used} (forecast / used {ratio:.2f})")
        return "\n".join([*lines, "", *self._fit_lines()])

    def _devices(self) -> str:
        """The device, or how many of them share the work and how."""
        count, how = (self.training.assumptions[name] for name in ("world_size", "sharding"))
        return self.target.name if count == 1 else f"{count} × {self.target.name} ({how}; figures of one)"

    def _fit_lines(self) -> list[str]:
        fit = self.fit
        if fit is None:
            return ["give --memory 24GB to see whether it fits"]
        if fit.fits:
            spare = format_bytes(fit.memory_bytes - fit.needed_bytes)
            return [f"fits in {format_bytes(fit.memory_bytes)}: {spare} to spare"]
        lines = [
            f"does not fit in {format_bytes(fit.memory_bytes)}: "
            f"{format_bytes(fit.needed_bytes - fit.memory_bytes)} too much"
        ]
        if not fit.suggestions:
            return [
                *lines,
                "no key of the recipe would make it smaller: take a smaller model or more devices",
            ]
        if fit.suggestions[0].fits:
            lines.append("any one of these makes it fit, cheapest first:")
        else:
            lines.append("not even all of this is enough; take a smaller model, or more devices (--devices):")
        return [*lines, *(line for suggestion in fit.suggestions for line in _suggestion_lines(suggestion))]


def _term_lines(forecast: Forecast) -> list[str]:
    lines = []
    for name, size in forecast.terms_bytes.items():
        if size:
            share = size / forecast.total_bytes
            lines.append(
                f"  {_TERM_NAMES[name]:<22} {format_bytes(size):>9}  {share:>4.0%}  {'█' * round(share * 40)}"
            )
    return lines


def _suggestion_lines(suggestion: Suggestion) -> list[str]:
    flags = " ".join(f"--set {key}={_written(value)}" for key, value in suggestion.changes.items())
    from finetune.plan.fits import SACRIFICES

    return [
        f"  {flags}",
        f"      {format_bytes(suggestion.total_bytes)}, time ×{suggestion.slowdown:.2f}, {SACRIFICES[suggestion.sacrifice]}: {suggestion.note}",
    ]


def _written(value: str | int | float | bool) -> str:
    """A value as `--set` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def break_even_text(result: BreakEven, *, months: float, query_costs: dict[str, float]) -> str:
    """The volume, and both costs a month over the volume."""
    lines = [
        f"fixed cost of the tuned model: {result.fixed_cost_per_month:,.2f} a month over {months:g} months"
    ]
    if result.million_tokens_per_month is None or result.of_which_gpu_only is None:
        lines.append("the tuned model saves nothing on a token: no volume pays for it")
    else:
        lines.append(
            f"pays from {format_amount(result.million_tokens_per_month)} million tokens a month "
            f"({format_amount(result.of_which_gpu_only)} once the tuning is paid off); "
            f"each million saves {result.saving_per_million_tokens:,.2f}"
        )
    lines += [f"a query costs {cost:.6f} with the {name} model" for name, cost in query_costs.items()]
    lines += ["", f"  {'million tokens':>14}  {'large':>12}  {'tuned':>12}"]
    for point in result.curve:
        cheaper = "tuned is cheaper" if point.tuned_model < point.large_model else ""
        lines.append(
            f"  {format_amount(point.million_tokens_per_month):>14}  {point.large_model:>12,.2f}  "
            f"{point.tuned_model:>12,.2f}  {cheaper}".rstrip()
        )
    return "\n".join(lines)
