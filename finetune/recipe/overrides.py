"""`--set key=value`: the value follows YAML's rules, the key is dotted, and every fault names the whole argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import Fault
from finetune.recipe.nodes import Mapping, Node, Origin, Scalar, set_node
from finetune.recipe.yaml_nodes import parse_yaml


@dataclass(frozen=True)
class Override:
    """One parsed `--set`."""

    key: str
    node: Node
    origin: Origin


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[Fault]]:
    """Each 'a.b=value' of `arguments`; an empty value is null (`--set train.max_steps=`)."""
    overrides: list[Override] = []
    faults: list[Fault] = []
    for argument in arguments:
        origin = Origin("set", " ".join(f"--set {argument}".split()))
        key, equals, text = argument.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            what = f"'{argument}' is not of the form key=value"
            faults.append(Fault(what, str(origin), fix="write it like --set train.learning_rate=1e-4"))
            continue
        node, found = parse_yaml(text, lambda line, column, origin=origin: origin)  # type: ignore[misc]
        faults += found
        if not found:
            overrides.append(Override(key.strip(), node or Scalar("null", "", origin), origin))
    return overrides, faults


def apply_overrides(root: Mapping, overrides: Sequence[Override]) -> Mapping:
    """`root` with every override set; the last one of a key counts."""
    for override in overrides:
        path = tuple(part.strip() for part in override.key.split("."))
        root = set_node(root, path, override.node, override.origin)
    return root


def has_key(root: Mapping, key: str) -> bool:
    """Whether the tree holds the dotted key."""
    node: Node = root
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node.entries:
            return False
        node = node.entries[part].node
    return True
