"""Packed rows attend as if every document were alone: outputs, gradients, caches, masks, checkpointing."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from finetune.model import attention
from finetune.model.attention import document_attention, document_mask, register_document_attention
from finetune.model.documents import Segment, branch_mask, find_segments
from finetune.model.varlen import varlen_attention

LENGTHS = [5, 1, 9, 4, 9]


@pytest.fixture
def model(tiny_model: Any) -> Any:
    tiny_model.set_attn_implementation(register_document_attention())
    return tiny_model


def _documents(lengths: list[int] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 259, (length,), generator=generator) for length in lengths]


def _packed(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What TRL's padding-free collator passes, without labels."""
    lengths = torch.tensor([len(document) for document in documents])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(document)) for document in documents])[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
    }


def _alone(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])


def _loss(logits: torch.Tensor, documents: list[torch.Tensor]) -> torch.Tensor:
    """Sum over tokens of every document's next-token loss; `logits` [sum of lengths, V]."""
    lengths = [len(document) for document in documents]
    total = logits.new_zeros(())
    for document, part in zip(documents, logits.split(lengths), strict=True):
        total = total + functional.cross_entropy(part[:-1].float(), document[1:], reduction="sum")
    return total


@pytest.mark.parametrize("use_cache", [True, False, None])
@pytest.mark.parametrize("told_by", ["offsets", "positions"])
@pytest.mark.parametrize("ones", [True, False])
def test_packed_logits_equal_those_of_documents_alone(
    model: Any, use_cache: bool | None, told_by: str, ones: bool
) -> None:
    documents = _documents()
    batch = _packed(documents)
    if told_by == "positions":
        batch = {name: batch[name] for name in ("input_ids", "position_ids")}
    if ones:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        packed = model(**batch, use_cache=use_cache).logits[0]
        expected = _alone(model, documents)
    assert (packed - expected).abs().max() < 1e-5
    # The yardstick can fail: a row without boundaries is far off.
    assert (model(batch["input_ids"]).logits[0] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_packed_gradients_equal_those_of_documents_alone(
    model: Any, use_cache: bool, checkpointing: bool | None
) -> None:
    documents = _documents()
    model.train()
    _loss(_alone(model, documents), documents).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    _loss(model(**_packed(documents), use_cache=use_cache).logits[0], documents).backward()
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max()
        assert (parameter.grad - expected[name]).abs().max() <= 1e-5 * max(1.0, float(scale)), name


def test_gradients_are_exact_in_double_precision(model: Any) -> None:
    documents = _documents()
    model.double()
    _loss(_alone(model, documents), documents).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    _loss(model(**_packed(documents)).logits[0], documents).backward()
    for name, parameter in model.named_parameters():
        # The loss and the rotary embedding work in fp32, so this is where both roads round.
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-6, atol=1e-6), name


def test_the_kernel_agrees_with_the_formula() -> None:
    """Gradcheck in fp64 against softmax(q kᵀ / √D) v over two documents with grouped heads."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 6, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    key, value = (
        torch.randn(1, 2, 6, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(2)
    )
    segments = (Segment(0, 1, 0, 2), Segment(0, 1, 2, 6))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = attention._CpuDocuments.apply(q, k, v, segments, None)
        return result

    assert torch.autograd.gradcheck(attend, (query, key, value))
    allowed = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(4, 4).tril()).bool()
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert torch.allclose(attend(query, key, value), expected)


def test_bf16_attention_is_as_exact_as_its_inputs() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 20, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    segments = (Segment(0, 1, 0, 7), Segment(0, 1, 7, 20))
    given = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    wide = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    output = attention._CpuDocuments.apply(*given, segments, None)
    exact = attention._CpuDocuments.apply(*wide, segments, None)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact.bfloat16())
    gradient = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(gradient)
    exact.backward(gradient.float())
    for narrow, reference in zip(given, wide, strict=True):
        assert narrow.grad is not None
        assert reference.grad is not None
        error = (narrow.grad.float() - reference.grad).norm() / reference.grad.norm()
        assert error < 5e-3  # bf16 keeps 8 bits


def test_rows_with_boundaries_of_their_own(model: Any) -> None:
    first, second = _documents([3, 7]), _documents([6, 4], seed=3)
    rows = [_packed(first), _packed(second)]
    batch = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits = model(**batch).logits
        assert (logits[0] - _alone(model, first)).abs().max() < 1e-5
        assert (logits[1] - _alone(model, second)).abs().max() < 1e-5


def test_plain_rows_are_one_batched_call(model: Any) -> None:
    rows = torch.stack(_documents([8, 8, 8]))
    with torch.no_grad():
        expected = torch.stack([model(row[None]).logits[0] for row in rows])
        assert (model(rows).logits - expected).abs().max() < 1e-5
    assert find_segments(3, 8, torch.arange(8)[None], None) == (Segment(0, 3, 0, 8),)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_unpadded_ones(model: Any, side: str) -> None:
    documents = _documents([4, 9, 6])
    width = 9
    ids = torch.full((3, width), 2)
    mask = torch.zeros(3, width, dtype=torch.long)
    places = []
    for row, document in enumerate(documents):
        place = slice(width - len(document), width) if side == "left" else slice(0, len(document))
        ids[row, place], mask[row, place] = document, 1
        places.append(place)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        for row, document in enumerate(documents):
            assert (logits[row, places[row]] - model(document[None]).logits[0]).abs().max() < 1e-5


def test_packed_and_padded_at_once(model: Any) -> None:
    documents = _documents([3, 4])
    batch = _packed(documents)
    padding = torch.zeros(1, 2, dtype=torch.long)
    ids = torch.cat([batch["input_ids"], padding + 2], 1)
    positions = torch.cat([batch["position_ids"], padding], 1)
    mask = torch.cat([torch.ones(1, 7, dtype=torch.long), padding], 1)
    with torch.no_grad():
        expected = _alone(model, documents)
        for _ in range(2):  # the second time from memory
            logits = model(ids, position_ids=positions, attention_mask=mask).logits
            assert (logits[0, :7] - expected).abs().max() < 1e-5


def test_two_masks_with_one_position_tensor(model: Any) -> None:
    documents = _documents([3, 4])
    batch = _packed(documents)
    positions = batch["position_ids"]
    for n_hidden in (1, 2):
        mask = torch.ones(1, 7, dtype=torch.long)
        mask[0, -n_hidden:] = 0
        with torch.no_grad():
            logits = model(batch["input_ids"], position_ids=positions, attention_mask=mask).logits
        n_seen = 7 - n_hidden
        assert (logits[0, :n_seen] - _alone(model, documents)[:n_seen]).abs().max() < 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_that_of_sdpa(model: Any, cache: str) -> None:
    ids = torch.tensor([[2, 2, 2, 1, 40, 50], [1, 60, 61, 62, 63, 64]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    ours = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, model.generate(ids, attention_mask=mask, **options))
    alone = model.generate(ids[:1, 3:], **options)
    assert torch.equal(ours[0, 3:], alone[0])


def test_no_dense_mask_is_built_for_a_packed_row(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.masking_utils

    def refuse(**_: Any) -> torch.Tensor:
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", refuse)
    for use_cache in (True, False):
        model(**_packed(_documents()), use_cache=use_cache)
    with pytest.raises(AssertionError, match="dense mask"):
        model(torch.tensor([[2, 5]]), attention_mask=torch.tensor([[0, 1]]))


def test_a_sliding_window_keeps_its_window_inside_each_document() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    model = MistralForCausalLM(config).eval()
    documents = _documents([9, 3, 7])
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = _alone(model, documents)
        model.set_attn_implementation(register_document_attention())
        for use_cache in (True, False):
            packed = model(**_packed(documents), use_cache=use_cache).logits[0]
            assert (packed - expected).abs().max() < 1e-5


def test_attention_dropout_still_separates_documents(model: Any) -> None:
    """With dropout the first document's output depends on the second's values only if they leak."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    documents = _documents([4, 6])
    batch = _packed(documents)
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 4:] = 77
    outputs = []
    for given in (batch, changed):
        torch.manual_seed(5)
        outputs.append(model(**given).logits[0, :4])
    assert torch.equal(*outputs)
    torch.manual_seed(6)
    assert not torch.equal(outputs[0], model(**batch).logits[0, :4])


def test_the_public_road_equals_the_fast_one() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, heads, 10, 16, generator=generator) for heads in (4, 2, 2))
    for segments in (
        (Segment(0, 2, 0, 3), Segment(0, 2, 3, 10)),
        (Segment(0, 1, 0, 10), Segment(1, 2, 0, 6), Segment(1, 2, 6, 10)),
    ):
        slow = attention._each_by_sdpa(q, k, v, segments, 0.0, None)
        assert torch.allclose(slow, attention._CpuDocuments.apply(q, k, v, segments, None), atol=1e-6)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(0, 2, 0, 3), Segment(0, 2, 3, 10)),
        (Segment(0, 1, 0, 10), Segment(1, 2, 0, 6), Segment(1, 2, 6, 10)),
        (Segment(0, 1, 0, 6), Segment(0, 1, 6, 10, 0, 4)),
    ],
)
def test_the_varlen_call_lays_rows_end_to_end(
    monkeypatch: pytest.MonkeyPatch, segments: tuple[Segment, ...]
) -> None:
    """Without a GPU: torch's kernel is replaced by its definition, so that layout, offsets and options are checked."""
    import torch.nn.attention.varlen as varlen

    def reference(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> torch.Tensor:
        assert window_size == (-1, 0)  # causal
        assert cu_seq_q.dtype == torch.int32
        bounds, key_bounds = cu_seq_q.tolist(), cu_seq_k.tolist()
        assert max_q == max(b - a for a, b in itertools.pairwise(bounds))
        assert max_k == max(b - a for a, b in itertools.pairwise(key_bounds))
        parts = []
        for (a, b), (c, d) in zip(itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True):
            sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(
                (d - c) - (b - a)
            )  # counted from the last key
            attended = functional.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None],
                k[c:d].transpose(0, 1)[None],
                v[c:d].transpose(0, 1)[None],
                attn_mask=sees,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", reference)
    generator = torch.Generator().manual_seed(4)
    n_rows = max(segment.last_row for segment in segments)
    q, k, v = (torch.randn(n_rows, heads, 10, 16, generator=generator) for heads in (4, 2, 2))
    expected = attention._each_by_sdpa(q, k, v, segments, 0.0, 0.3)
    assert torch.allclose(varlen_attention(q, k, v, segments, 0.3), expected, atol=1e-6)


def test_offsets_that_do_not_cover_the_row(model: Any) -> None:
    batch = _packed(_documents())
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"][:-1]
    with pytest.raises(ValueError, match="does not cover 1 rows of 28 tokens"):
        model(**batch)


def test_a_changed_position_tensor_is_read_again() -> None:
    positions = torch.tensor([[0, 1, 2, 3]])
    assert len(find_segments(1, 4, positions, None)) == 1
    positions[0, 2:] = torch.tensor([0, 1])
    assert find_segments(1, 4, positions, None) == (Segment(0, 1, 0, 2), Segment(0, 1, 2, 4))


def test_offsets_are_cut_at_the_ends_of_rows() -> None:
    offsets = torch.tensor([0, 3, 3, 6, 8])
    assert find_segments(2, 4, None, offsets) == (
        Segment(0, 1, 0, 3),
        Segment(0, 1, 3, 4),
        Segment(1, 2, 0, 2),
        Segment(1, 2, 2, 4),
    )


def test_masks_that_say_more_than_causal_are_dense() -> None:
    from transformers.masking_utils import (
        causal_mask_function,
        sliding_window_causal_mask_function,
    )

    size: dict[str, Any] = {"batch_size": 1, "q_length": 6, "kv_length": 6, "attention_mask": None}
    assert document_mask(**size, mask_function=causal_mask_function) is None
    sliding: Callable[..., Any] = sliding_window_causal_mask_function(2)
    mask = document_mask(**size, mask_function=sliding, local_size=2)
    assert mask is not None
    assert mask[0, 0].sum() == 11


@pytest.mark.parametrize("name", ["s_aux", "sinks", "softcap"])
@pytest.mark.parametrize("n_tokens", [6, 1])
def test_what_the_kernels_leave_out_is_refused_by_name(name: str, n_tokens: int) -> None:
    """Sinks would fall away without a word, and a model of that name would be another one."""
    query = torch.randn(1, 4, n_tokens, 8)
    with pytest.raises(ValueError, match=f"`{name}`"):
        document_attention(torch.nn.Module(), query, query, query, None, **{name: torch.zeros(4)})
    output, _ = document_attention(torch.nn.Module(), query, query, query, None, **{name: None})
    assert output.shape == (1, n_tokens, 4, 8)


def test_every_option_of_transformers_layers_is_known() -> None:
    """What a layer passes beside queries, keys and values is computed, refused, or known to change nothing."""
    computed = set(inspect.signature(document_attention).parameters) | {"position_bias"}
    harmless = {
        "cu_seq_lens_k",  # the offsets of the keys, which are those of the queries
        "max_length_q",
        "max_length_k",  # sizes that other kernels allocate by
        "sliding_window",  # the mask says it too
        "indices",
        "block_indices",  # keys that were chosen: the mask has them
        "output_attentions",  # asks for weights, which SDPA does not give either
        "deterministic",  # of a kernel on GPUs
    }
    models = Path(transformers.__file__).parent / "models"
    passed: dict[str, str] = {}
    for path in sorted(models.glob("*/modeling_*.py")):
        for call in re.finditer(r"attention_interface\(\n((?: {12}.*\n)+) {8}\)", path.read_text()):
            names = re.findall(r"^ {12}(\w+)=", call[1], re.MULTILINE)
            passed |= dict.fromkeys(names, path.stem)
    assert {"s_aux", "softcap", "sliding_window", "scaling"} <= passed.keys(), (
        "the layers are read as they are written"
    )
    unknown = {
        name: where
        for name, where in passed.items()
        if name not in computed | harmless | attention._LEFT_OUT.keys()
    }
    assert not unknown, "new options: does document_attention compute them?"


def test_additive_masks_are_cut_too() -> None:
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    lowest = torch.finfo(torch.float32).min
    additive = torch.full((6, 6), lowest).triu(1)[None, None]
    masked, _ = document_attention(module, q, k, v, additive, position_ids=positions)
    plain, _ = document_attention(module, q, k, v, None, position_ids=positions)
    assert torch.allclose(masked, plain, atol=1e-6)


def test_the_same_step_gives_the_same_bytes(model: Any) -> None:
    documents = _documents([30, 41, 57])
    gradients = []
    for _ in range(3):
        model.zero_grad()
        _loss(model(**_packed(documents)).logits[0], documents).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


BRANCHES = [[0, 9, 0, 0], [9, 13, 0, 6], [13, 18, 13, 13], [18, 20, 13, 16]]
"""Two prompts (6 and 3 tokens), each with an answer right behind it and a second one that goes on from the prompt."""


def _branched() -> tuple[dict[str, torch.Tensor], list[tuple[list[int], list[int]]]]:
    """A row of branches, and for every answer the places of its prompt and of its own tokens."""
    positions = [*range(9), *range(6, 10), *range(5), *range(3, 5)]
    ids = torch.randint(3, 259, (20,), generator=torch.Generator().manual_seed(5))
    batch = {
        "input_ids": ids[None],
        "position_ids": torch.tensor([positions]),
        "branches": torch.tensor(BRANCHES),
    }
    first, second = list(range(6)), list(range(13, 16))
    answers = [
        (first, list(range(6, 9))),
        (first, list(range(9, 13))),
        (second, list(range(16, 18))),
        (second, list(range(18, 20))),
    ]
    return batch, answers


def _answer_loss(model: Any, batch: dict[str, torch.Tensor], answers: Any, *, together: bool) -> torch.Tensor:
    """Sum over the answers' tokens of their losses, from one row of branches or from every answer with its own prompt."""
    ids, total = batch["input_ids"][0], torch.zeros(())
    logits = model(**batch, use_cache=False).logits[0] if together else None
    for prompt, own in answers:
        places = [*prompt, *own]
        rows = logits[places] if together else model(ids[places][None], use_cache=False).logits[0]
        scored = rows[len(prompt) - 1 : -1]
        total = total + functional.cross_entropy(scored, ids[own], reduction="sum")
    return total


@pytest.mark.parametrize("road", ["kernel", "kernel without mask", "public", "dense mask"])
def test_answers_that_share_a_prompt_equal_answers_with_their_own(
    model: Any, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    batch, answers = _branched()
    model.double()
    expected = _answer_loss(model, batch, answers, together=False)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    if road == "dense mask":
        model.set_attn_implementation("sdpa")
        segments = find_segments(1, 20, None, None, batch.pop("branches"))
        batch["attention_mask"] = branch_mask(segments, 20, torch.float64)
    elif road == "kernel without mask":  # as answers longer than so many tokens
        monkeypatch.setattr(attention, "_LONGEST_MASK", 0)
        monkeypatch.setattr(Segment, "visible", None)
    elif road == "public":
        monkeypatch.setattr(
            attention._CpuDocuments,
            "apply",
            lambda q, k, v, segments, scale: attention._each_by_sdpa(q, k, v, segments, 0.0, scale),
        )
    loss = _answer_loss(model, batch, answers, together=True)
    loss.backward()
    assert float((loss - expected).detach()) == pytest.approx(0.0, abs=1e-10)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert float((parameter.grad - gradient).norm() / gradient.norm()) < 1e-6  # the norms compute in fp32


def test_two_answers_of_one_prompt_do_not_see_each_other(model: Any) -> None:
    batch, _ = _branched()
    before = model(**batch, use_cache=False).logits[0]
    batch["input_ids"][0, 6:9] += 1
    after = model(**batch, use_cache=False).logits[0]
    assert torch.equal(before[9:], after[9:])
    assert not torch.allclose(before[6:9], after[6:9])


@pytest.mark.parametrize(
    "branches",
    [
        [[0, 9, 0, 0], [9, 19, 0, 6]],
        [[0, 9, 0, 0], [10, 20, 0, 6]],
        [[0, 9, 10, 12], [9, 20, 0, 6]],
    ],
)
def test_branches_that_do_not_cover_the_row(branches: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="do not cover"):
        find_segments(1, 20, None, None, torch.tensor(branches))
