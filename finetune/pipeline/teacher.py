"""The teacher of a recipe: what a run has tuned, or a model with or without an adapter; and a student cut from it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from finetune.digest import digest_file, digest_json
from finetune.errors import UserError
from finetune.evaluation.server import ServerModel
from finetune.model.adapter_files import ADAPTER_WEIGHTS, adapter_digest, check_base, load_adapter
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import ADAPTER_CONFIG, ModelSource, read_config, resolve_model
from finetune.paths import disk_faults, read_json, runs_root
from finetune.pipeline.manifest import FILE_NAME
from finetune.pipeline.starts import find_folder, model_folder
from finetune.recipe.model_section import ModelSection
from finetune.recipe.teacher_section import TeacherSection, TeacherServerSection
from finetune.units import format_count

Say = Callable[[str], None]
_STUDENT_FORMAT = 1
# What two models must share for layers of one to stand in the other.
_SHAPE = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size")


@dataclass(frozen=True)
class Teacher:
    """A model that teaches. `digest` names its weights; `quantization` how its base is held.

    server: where it runs, when it is not here; `source` then has configuration and tokenizer alone.
    """

    name: str
    source: ModelSource
    adapter: Path | None
    quantization: ModelSection
    digest: str
    licence: str | None = None
    server: ServerModel | None = None

    def key(self, dtype: str) -> str:
        """Digest of what decides its answers and logits in a compute type."""
        return digest_json({"teacher": self.digest, "dtype": dtype})

    def answering(self, *, dtype: str) -> Any:
        """Who answers for it: its server, or the model itself."""
        return self.server if self.server is not None else self.load(dtype=dtype)

    def load(self, *, dtype: str, attention: str = "sdpa") -> Any:
        """The model, frozen and in eval mode, with its adapter on it."""
        assert self.server is None, "its weights are not here"
        section = self.quantization
        model = load_model(
            self.source,
            dtype=dtype,
            quantize=section.quantize,
            double_quantization=section.double_quantization,
            attention=attention,
            trust_remote_code=section.trust_remote_code,
        )
        if self.adapter is not None:
            model = load_adapter(model, self.adapter, source=self.source)
        return model.requires_grad_(False).eval()

    def load_tokenizer(self) -> Any:
        """Its own: that of the adapter where it brought one, else the base's."""
        tokenizer = load_tokenizer(self.source)
        if self.adapter is None or not (self.adapter / "tokenizer_config.json").is_file():
            return tokenizer
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.adapter), local_files_only=True)

    @property
    def adapter_parameters(self) -> int:
        """Elements of its adapter, which lies beside its base."""
        path = self.adapter / ADAPTER_WEIGHTS if self.adapter is not None else None
        if path is None or not path.is_file():
            return 0
        with safe_open(path, framework="np") as tensors:
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118

    @property
    def n_parameters(self) -> int | None:
        """Of the model as it is served: an adapter merges into its base."""
        return self.source.n_parameters


def teacher_of_run(
    section: TeacherSection, folder: Path, source: ModelSource, quantization: ModelSection
) -> Teacher:
    """The tuned model of the finished run in `folder`; `source` and `quantization` are its base's.

    Raises UserError when its weights are not those that its training wrote.
    """
    for name, digest in read_json(folder / FILE_NAME)["stages"]["train"]["outputs"].items():
        path = folder / name
        if not path.is_file() or digest_file(path) != digest:
            raise UserError(
                f"{path} is not what the training of this run wrote",
                where="distil.teacher.run",
                fix="bring the file back, or train the teacher again: finetune run with its recipe",
            )
    name = section.run or folder.name
    if (folder / "model").is_dir():
        whole = resolve_model(str(folder / "model"))
        return _teacher(name, whole, None, ModelSection(id=whole.id), section)
    return _teacher(name, source, folder / "adapter", quantization, section)


def run_of_teacher(section: TeacherSection, folder: Path, where: str) -> Path:
    """The folder of `teacher.run`. Raises UserError, saying how to make it, when no such run is finished."""
    assert section.run is not None
    found = find_folder(section.run, folder)
    manifest = read_json(found / FILE_NAME) if found is not None and (found / FILE_NAME).is_file() else {}
    if found is None or not manifest.get("stages", {}).get("train", {}).get("completed"):
        raise UserError(
            f"there is no finished run '{section.run}' that could teach",
            where=where,
            fix="run the teacher's recipe first: finetune run RECIPE (for runs/home_intents_lora: "
            "finetune run sft/home_intents_lora); `ls runs` lists the runs",
        )
    return found


def named_teacher(
    section: TeacherSection,
    folder: Path,
    where: str,
    say: Say | None,
    revision_where: str = "distil.teacher.revision",
) -> Teacher:
    """The teacher of `teacher.id`, with `teacher.adapter` on it. `folder`: where relative paths start."""
    assert section.id is not None
    source = resolve_model(
        model_folder(section.id, folder, where),
        section.revision,
        weights=section.server is None,
        announce=say,
        where=where,
        revision_where=revision_where,
    )
    if section.server is not None:
        return _served_teacher(section, section.server, source)
    adapter = None
    if section.adapter is not None:
        adapter = find_folder(section.adapter, folder)
        if adapter is not None and (adapter / FILE_NAME).is_file():
            adapter = adapter / "adapter"
        if adapter is None or not (adapter / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"'{section.adapter}' holds no {ADAPTER_CONFIG}, so it is no adapter",
                where=where,
                fix="name a folder that PEFT saved, or a run that trained one",
            )
        check_base(adapter, source, key="distil.teacher.id")
    quantization = ModelSection(id=source.id, quantize=section.quantize)
    return _teacher(section.id, source, adapter, quantization, section)


def _served_teacher(section: TeacherSection, server: TeacherServerSection, source: ModelSource) -> Teacher:
    """A teacher known by its name and by the server's; the same model at another address is the same teacher."""
    assert section.id is not None
    tokenizer = load_tokenizer(source)
    content = {
        "model": section.id,
        "revision": section.revision,
        "served_as": server.model,
        "tokenizer": [digest_json(tokenizer.get_vocab()), digest_json(tokenizer.chat_template)],
    }
    return Teacher(
        section.id,
        source,
        None,
        ModelSection(id=source.id),
        digest_json(content),
        section.licence,
        ServerModel(server.url, server.model, server.key_variable),
    )


def _teacher(
    name: str, source: ModelSource, adapter: Path | None, quantization: ModelSection, section: TeacherSection
) -> Teacher:
    digest = digest_json(
        {
            "model": source.digest,
            "adapter": adapter_digest(adapter) if adapter is not None else None,
            "quantize": [quantization.quantize, quantization.double_quantization],
        }
    )
    return Teacher(name, source, adapter, quantization, digest, section.licence)


def cut_student(
    teacher: Teacher, layers: tuple[int, ...], base: ModelSource, *, where: str, say: Say | None
) -> ModelSource:
    """The student that consists of these layers of the teacher, its adapter merged: made once, kept under runs/students.

    base: the model that the recipe calls the teacher's base; `where`: that key. Raises UserError when it has another shape,
    for layers that are not there, and for a teacher whose weights are held as codes.
    """
    shapes = [read_config(one) for one in (base, teacher.source)]
    other = [key for key in _SHAPE if shapes[0].get(key) != shapes[1].get(key)]
    if other:
        key = other[0]
        raise UserError(
            f"the student is cut from {teacher.name}, whose {key} is {shapes[1].get(key)}, and model.id has "
            f"{shapes[0].get(key)}",
            where=where,
            fix="set model.id to the teacher's base, or distil.student.init: model",
        )
    if teacher.quantization.quantize != "none":
        raise UserError(
            f"a student cannot be cut from a teacher in {teacher.quantization.quantize}",
            where="distil.student.init",
            why="its adapter would have to be merged into codes, which rounds it away",
            fix="merge it first and teach with the result: finetune merge adapter …, then distil.teacher.id",
        )
    key = digest_json({"format": _STUDENT_FORMAT, "teacher": teacher.digest, "layers": layers})
    folder = runs_root() / "students" / key[:16]
    if not folder.is_dir():
        _write_student(teacher, layers, folder)
    student = resolve_model(str(folder), where="distil.student.init")
    if say is not None:
        of = f" of {format_count(teacher.n_parameters)}" if teacher.n_parameters else ""
        say(
            f"student: layers {', '.join(map(str, layers))} of {teacher.name}, "
            f"{format_count(student.n_parameters or 0)}{of} parameters"
        )
    return student


def _write_student(teacher: Teacher, layers: tuple[int, ...], folder: Path) -> None:
    from finetune.distil.student import cut_layers

    stored = str(read_config(teacher.source).get("dtype") or read_config(teacher.source).get("torch_dtype"))
    # In half precision much of what an adapter adds would be rounded away.
    plain = teacher.adapter is None and stored.endswith("bfloat16")
    model = teacher.load(dtype="bf16" if plain else "fp32")
    if teacher.adapter is not None:
        model = model.merge_and_unload()
    model = cut_layers(model, layers)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    with disk_faults(folder):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        model.save_pretrained(aside)
        teacher.load_tokenizer().save_pretrained(aside)
        try:
            aside.replace(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(aside)  # another process was faster, and wrote the same
