"""The reference page and the JSON Schema of the dataset spec, written from the schema.

To renew the committed page: finetune data schema --markdown > docs/dataset_reference.md
"""

from __future__ import annotations

from typing import Any

from finetune.data.spec import DatasetSpec
from finetune.recipe.reference import section_tables

_HEAD = """\
# Dataset reference

Written from the schema by `finetune data schema --markdown > docs/dataset_reference.md`; do not edit by hand.
A dataset spec is one YAML file (YAML 1.2) that fixes a dataset build; `data/README.md` explains it by examples. Unknown
keys, wrong types and values out of range are refused, all at once, each with file, line and column. Paths are relative
to the spec. `finetune data inspect FILE --write SPEC` writes one for your rows.
"""


def dataset_reference_markdown() -> str:
    """The whole page, with a final newline; the same schema gives the same bytes."""
    return "\n".join([_HEAD, *section_tables(DatasetSpec, "", "Top of the file")])


def dataset_json_schema() -> dict[str, Any]:
    """JSON Schema of a dataset spec, for editors."""
    return DatasetSpec.model_json_schema()
