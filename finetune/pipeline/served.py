"""Base and tuned model of a run behind a server: one that the user started, or one of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from finetune.errors import UserError
from finetune.evaluation.server import ServerModel
from finetune.evaluation.serving import START_TIMEOUT_SECONDS, VllmModel, find_vllm, running_server
from finetune.pipeline.inputs import RunInputs

SERVED_FOLDER = (
    "server"  # below a suite's folder: answers of a server are kept apart from those computed here
)
BASE, TUNED = "base", "tuned"


class Served(Protocol):
    """Both arms are answered by the same backend, or by none."""

    @property
    def base(self) -> ServerModel: ...

    @property
    def tuned(self) -> ServerModel: ...

    def key(self, *, tuned: bool) -> str:
        """What stands for the backend in the keys of answers; starts nothing."""

    def close(self) -> None:
        """End what was started; nothing else can be answered afterwards."""


def serving(
    run_folder: Path,
    *,
    server: str | None = None,
    names: tuple[str, str] = (BASE, TUNED),
    key_variable: str | None = None,
    start: str | None = None,
    arguments: Sequence[str] = (),
    timeout_seconds: float = START_TIMEOUT_SECONDS,
    say: Callable[[str], None],
) -> Callable[[RunInputs], Served] | None:
    """How the answers of a run are served: by a running server's URL, by starting one (`vllm`), or, with None, not at all.

    Raises UserError when both are wanted, or what should be started is not installed.
    """
    if server is not None and start is not None:
        raise UserError(
            "either a server that runs or one to start",
            where="--server, --serve",
            fix="leave one of them out",
        )
    if start is not None:
        find_vllm()  # before anything is loaded
        return lambda inputs: vllm_servers(
            inputs, run_folder, more=tuple(arguments), timeout_seconds=timeout_seconds, say=say
        )
    if server is None:
        return None
    base, tuned = (ServerModel(server, name, key_variable) for name in names)
    return lambda inputs: ServedModels(base, tuned)


@dataclass(frozen=True)
class ServedModels:
    """Both models behind a server that the user has started."""

    base: ServerModel
    tuned: ServerModel

    def key(self, *, tuned: bool) -> str:
        return f"server {self.tuned.name if tuned else self.base.name}"

    def close(self) -> None:
        """Leave the user's server as it is."""


@dataclass
class VllmServers:
    """vLLM as a process of ours, started when the first answer is missing: one server for base and adapter, or for a
    fully tuned model two, one after the other. `close` ends it."""

    base_model: VllmModel
    tuned_model: VllmModel
    log: Path
    say: Callable[[str], None]
    timeout_seconds: float = START_TIMEOUT_SECONDS
    _running: VllmModel | None = None
    _url: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def base(self) -> ServerModel:
        return ServerModel(self._serving(self.base_model), BASE)

    @property
    def tuned(self) -> ServerModel:
        return ServerModel(self._serving(self.tuned_model), TUNED)

    def key(self, *, tuned: bool) -> str:
        model = self.tuned_model if tuned else self.base_model
        return f"vllm {TUNED if tuned else BASE} {model.dtype} {' '.join(model.more)}".strip()

    def close(self) -> None:
        """End the server, if one runs."""
        self._running = None
        self._stack.close()

    def _serving(self, model: VllmModel) -> str:
        if self._running != model:
            self.close()
            server = running_server(
                model.command, self.log, timeout_seconds=self.timeout_seconds, say=self.say
            )
            self._url = self._stack.enter_context(server)
            self._running = model
        return self._url


def vllm_servers(
    inputs: RunInputs,
    run_folder: Path,
    *,
    more: tuple[str, ...] = (),
    timeout_seconds: float = START_TIMEOUT_SECONDS,
    say: Callable[[str], None],
) -> VllmServers:
    """The servers of a finished run. Raises UserError for adapters that vLLM cannot serve."""
    recipe, folder = inputs.recipe, inputs.source.folder
    base = VllmModel(folder, BASE, recipe.eval.dtype, more=more)
    if recipe.adapter.kind == "none":
        tuned = VllmModel(run_folder / "model", TUNED, recipe.eval.dtype, more=more)
    elif recipe.adapter.kind == "lora":
        base = tuned = VllmModel(
            folder,
            BASE,
            recipe.eval.dtype,
            adapter=run_folder / "adapter",
            adapter_name=TUNED,
            adapter_rank=recipe.adapter.rank,
            more=more,
        )
    else:
        raise UserError(
            f"vLLM does not serve adapters of kind {recipe.adapter.kind}",
            where="--serve vllm",
            fix="merge the adapter (finetune merge adapter), serve base and merged model, and name them with --server",
        )
    if recipe.model.quantize != "none":
        say(
            f"note: the adapter was trained over {recipe.model.quantize} weights and is served over those of the base "
            f"in {recipe.eval.dtype}; the figures are those of that combination"
        )
    return VllmServers(base, tuned, run_folder / "eval" / "vllm.log", say, timeout_seconds)
