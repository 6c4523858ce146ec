"""What an lm-eval task is, read from its YAML without its data: leaf tasks, metrics, filters, and a digest."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finetune.digest import digest_file, digest_json
from finetune.errors import UserError, did_you_mean

INSTALL = "pip install 'finetune-pipeline[lm-eval]'"
# Aggregations under which the mean over documents of one number a document is the task's figure, or its logarithm.
_LOGARITHMIC = frozenset({"perplexity", "weighted_perplexity"})
_PLAIN = frozenset({"mean", "nanmean", "bits_per_byte"})


@dataclass(frozen=True)
class TaskMetric:
    """One number a document. `name` is ours: the harness's, with `log_` before a perplexity, whose logarithm is a mean
    over documents, and with the filter behind a comma where the task has filters."""

    name: str
    metric: str
    filter: str
    higher_is_better: bool


@dataclass(frozen=True)
class TaskDefinition:
    """A task, group or tag. `manager` loads it by name; `leaves` are the tasks in it."""

    name: str
    manager: Any
    leaves: tuple[str, ...]
    metrics: tuple[TaskMetric, ...]
    digest: str


def define(name: str, include_path: Path | None = None) -> TaskDefinition:
    """The definition of a task by name. Raises UserError when lm_eval is not installed or knows no such task."""
    try:
        version = importlib.metadata.version("lm_eval")
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        import lm_eval.tasks  # noqa: F401
    except ImportError:
        raise UserError(
            f"the suite lm_eval:{name} needs the lm-evaluation-harness, which is not installed", fix=INSTALL
        ) from None
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"no folder of task files: {include_path}", where="items.include_path")
    return _define(name, include_path, version)


@cache
def _define(name: str, include_path: Path | None, version: str) -> TaskDefinition:
    manager, leaves = _find(name, include_path)
    configs = {leaf: manager.task_index[leaf].cfg or {} for leaf in leaves}
    own = [] if include_path is None else sorted([*include_path.rglob("*.yaml"), *include_path.rglob("*.py")])
    return TaskDefinition(
        name=name,
        manager=manager,
        leaves=tuple(leaves),
        metrics=_shared_metrics([_metrics_of(config) for config in configs.values()]),
        digest=digest_json(
            {
                "lm_eval": version,
                "tasks": {leaf: _portable(config) for leaf, config in configs.items()},
                "files": [[path.name, digest_file(path)] for path in own],
            }
        ),
    )


def _find(name: str, include_path: Path | None) -> tuple[Any, list[str]]:
    """A manager that knows the task, and its leaf tasks. Indexing every task takes many seconds: folders that may hold
    it are tried first."""
    from lm_eval.tasks import TaskManager

    folders = [include_path] if include_path is not None else []
    for folder in [*folders, *_folders_naming(name)]:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        leaves = _leaves(name, manager.task_index)
        if leaves:
            return manager, leaves
    manager = TaskManager(include_path=str(include_path) if include_path is not None else None)
    leaves = _leaves(name, manager.task_index)
    if not leaves:
        raise UserError(
            f"lm_eval has no task '{name}'",
            where=f"lm_eval:{name}",
            fix=_nearest(name, manager.all_tasks) + "; `lm_eval ls tasks` lists them",
        )
    return manager, leaves


def _nearest(name: str, known: Sequence[str]) -> str:
    found = did_you_mean(name, known)
    return found if found.startswith("did you mean") else f"there are {len(known)} tasks"


def _folders_naming(name: str) -> Iterator[Path]:
    """Folders of shipped tasks with a YAML that names this task itself."""
    import lm_eval.tasks

    line = re.compile(rf"^task:\s*[\"']?{re.escape(name)}[\"']?\s*$", re.MULTILINE)
    for path in sorted(Path(str(lm_eval.tasks.__file__)).parent.rglob("*.yaml")):
        if line.search(path.read_text(encoding="utf-8", errors="replace")):
            yield path.parent


def _leaves(name: str, index: Mapping[str, Any]) -> list[str]:
    """Names of the tasks behind a task, group or tag; none when anything in it is unknown."""
    entry = index.get(name)
    if entry is None:
        return []
    if entry.kind.name in ("TASK", "PY_TASK"):
        return [name]
    members = sorted(entry.tags) if entry.kind.name == "TAG" else list((entry.cfg or {}).get("task") or [])
    found: list[str] = []
    for member in members:
        known = member if isinstance(member, str) else member.get("task", member.get("group"))
        leaves = _leaves(known, index) if isinstance(known, str) else []
        if not leaves:
            return []
        found += leaves
    return list(dict.fromkeys(found))


def _metrics_of(config: Mapping[str, Any]) -> list[TaskMetric]:
    """Metrics that are one number a document; those of a whole set only (F1, BLEU of a corpus) cannot be paired."""
    from lm_eval.api import metrics as _  # noqa: F401  (fills the registries)
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, is_higher_better

    filters = [one["name"] for one in config.get("filter_list") or []] or ["none"]
    listed = config.get("metric_list")
    if listed is None:
        listed = [{"metric": metric} for metric in DEFAULT_METRIC_REGISTRY.get(config.get("output_type"), [])]
    found = []
    for one in listed:
        metric, aggregation = one["metric"], _aggregation(one)
        if not isinstance(metric, str) or "/" in metric or aggregation is None:
            continue
        better = one.get("higher_is_better")
        better = bool(is_higher_better(metric) if better is None else better)
        for name in filters:
            logarithmic = aggregation in _LOGARITHMIC
            shown = f"log_{metric}" if logarithmic else metric
            shown = shown if name == "none" else f"{shown},{name}"
            found.append(TaskMetric(shown, metric, name, better and not logarithmic))
    return found


def _aggregation(listed: Mapping[str, Any]) -> str | None:
    name = listed.get("aggregation") or aggregation_name(_default_aggregation(listed["metric"]))
    return name if name in _LOGARITHMIC | _PLAIN else None


def _default_aggregation(metric: Any) -> Any:
    from lm_eval.api.registry import METRIC_AGGREGATION_REGISTRY, get_metric_aggregation

    return get_metric_aggregation(metric) if metric in METRIC_AGGREGATION_REGISTRY else None


def aggregation_name(function: Any) -> str | None:
    """The registered name of an aggregation; None for one of the task's own."""
    from lm_eval.api import metrics as _  # noqa: F401
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    return next((name for name, known in AGGREGATION_REGISTRY.items() if known is function), None)


def _shared_metrics(each: Sequence[Sequence[TaskMetric]]) -> tuple[TaskMetric, ...]:
    return tuple(metric for metric in each[0] if all(metric in others for others in each[1:]))


def _portable(value: Any) -> Any:
    """A task's configuration without the folder that it is installed in; functions are named by file and name."""
    if isinstance(value, Mapping):
        return {str(key): _portable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(one) for one in value]
    if isinstance(value, str) and value.startswith("/"):
        return "/".join(value.split("/")[-2:])
    return value if isinstance(value, str | int | float | bool | None) else str(value)
