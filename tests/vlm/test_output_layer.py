"""Training and validating the composed model without its logits."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import Arithmetic
from coat_vlm.model import loss as loss_module
from coat_vlm.model.loss import next_token_loss, why_logits_are_needed

IMAGE = 2


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


class Created(TorchDispatchMode):
    """Notes the shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.shapes.add(tensor.shape)
        return result

    @property
    def largest(self) -> int:
        return max(shape.numel() for shape in self.shapes)


def batch(rows: int = 2) -> dict[str, Tensor]:
    """Each row begins with an image; its placeholders and some words are not trained."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 60, (rows, 30), generator=generator)
    ids[:, 1:5] = IMAGE
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    images = torch.randn(rows, 3, 28, 28, generator=generator)
    return {
        "input_ids": ids,
        "labels": labels.masked_fill(ids == IMAGE, -100),
        "pixel_values": images,
    }


def compare(model: Any, tolerance: float, **changes: Any) -> None:
    """Loss and every gradient with logits, then without them."""
    with_logits = model.train()(**batch(), **changes, skip_logits=False)
    assert with_logits.logits.shape == (2, 30, 60)
    with_logits.loss.backward()
    wanted = {name: g if g is None else g.clone() for name, g in gradients(model).items()}
    model.zero_grad()
    without = model(**batch(), **changes)
    assert without.logits is None
    assert without.loss.dtype == torch.float32
    without.loss.backward()
    assert without.loss.item() == pytest.approx(with_logits.loss.item(), rel=tolerance)
    for name, gradient in gradients(model).items():
        if wanted[name] is None:
            assert gradient is None, name
        elif "k_proj.bias" not in name:  # its gradient is nothing but rounding
            assert relative_error(gradient, wanted[name]) < tolerance, name  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_training_without_logits_changes_rounding_only(
    tiny: Any, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 60 * 4)
    model = tiny.model(language=tiny.language(family, tie_word_embeddings=tied))
    compare(model, 2e-6, num_items_in_batch=17)


def test_frozen_modules_and_checkpointed_blocks(tiny: Any) -> None:
    model = tiny.model()
    model.vision_tower.requires_grad_(False)
    model.language_model.requires_grad_(False)
    compare(model, 2e-6)
    assert model.get_output_embeddings().weight.grad is None
    model = tiny.model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(model, 2e-6)


def test_an_fp8_output_layer_is_as_exact_as_with_logits(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scales are those of a chunk's tokens, so the two differ by FP8's rounding."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 64 * 10)
    model = tiny.model(language=tiny.language(vocab_size=64, intermediate_size=64)).train()
    head = model.get_output_embeddings()
    losses, weight_gradients = [], []
    for skip, fp8 in ((False, False), (False, True), (True, True)):
        if fp8:
            settings = Fp8Config(vision="bf16", language="bf16", lm_head="fp8_linear")
            Arithmetic(torch.float32, settings).apply(model)
        model.zero_grad()
        loss = model(**batch(), skip_logits=skip).loss
        loss.backward()
        losses.append(loss.item())
        weight_gradients.append(head.weight.grad.clone())
    assert type(head).__name__ == "Fp8Linear"
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)
    error, chunked = (relative_error(g, weight_gradients[0]) for g in weight_gradients[1:])
    assert 0 < chunked < 1.2 * error < 0.2


def test_no_tensor_is_larger_than_a_chunk_of_logits(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, tokens_per_chunk = 4096, 40  # more tokens than the width, 32: the weight is less
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * vocabulary * tokens_per_chunk)
    model = tiny.model(language=tiny.language(vocab_size=vocabulary)).train()
    many = {name: value.repeat(10, *[1] * (value.ndim - 1)) for name, value in batch().items()}
    assert int((many["labels"][:, 1:] != -100).sum()) > 5 * tokens_per_chunk
    with Created() as created:
        model(**many).loss.backward()
    assert created.largest <= tokens_per_chunk * vocabulary
    assert created.largest > (tokens_per_chunk - 2) * vocabulary
    with Created() as created, torch.no_grad():
        model.eval()(**many, skip_logits=True)
    assert created.largest <= tokens_per_chunk * vocabulary
    with Created() as created:
        model.train()(**many, skip_logits=False).loss.backward()
    assert created.largest >= many["labels"].numel() * vocabulary


def test_the_output_layer_stays_what_it_was(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    head, names = model.get_output_embeddings(), list(model.state_dict())
    calls: list[torch.Size] = []
    head.register_forward_hook(lambda _m, _i, output: calls.append(output.shape))
    ids = batch()["input_ids"][:, :1]
    prompt = {"input_ids": ids, "max_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        before = model(ids).logits
    answers = model.generate(**prompt)
    calls.clear()
    model.train()(**batch()).loss.backward()
    # Once and in its own call, where ZeRO-3 has gathered its weight.
    assert calls == [torch.Size([])]
    bad = {**batch(), "labels": torch.zeros(2, 7, dtype=torch.int64)}
    with pytest.raises(ValueError, match="skip_logits"):
        model(**bad)
    with monkeypatch.context() as patch:
        patch.setattr(model.language_model.model, "forward", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch())
    assert type(head) is nn.Linear
    assert "forward" not in vars(head)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, before)
    assert torch.equal(model.generate(**prompt), answers)


def wrapped(language: Any, change: Any) -> Any:
    """The language model with a change of its outputs."""

    class Wrapped(type(language)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            change(self, outputs)
            return outputs

    language.__class__ = Wrapped
    return language


def halve(_: Any, outputs: Any) -> None:
    outputs.logits.mul_(0.5)  # the same tensor, but not its values


def cast(model: Any, outputs: Any) -> None:
    outputs.logits = outputs.logits.to(model.lm_head.weight.dtype)  # would round a loss to BF16


@pytest.mark.parametrize(
    ("family", "settings", "change"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}, None),
        ("llama", {}, halve),
        ("llama", {}, cast),
    ],
)
def test_models_that_change_their_logits_keep_them(
    tiny: Any, family: str, settings: Any, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    language = tiny.language(family, **settings)
    model = tiny.model(language=language, attn_implementation="eager")
    if change is not None:
        model.language_model = wrapped(model.language_model, change)
    assert "a soft cap, a scale" in str(why_logits_are_needed(model.language_model))
    ids = torch.arange(4, 30)[None]
    with caplog.at_level(logging.WARNING):
        outputs = [model.train()(ids, labels=ids) for _ in range(2)]
    wanted = next_token_loss(model.language_model(ids).logits, ids)
    for output in outputs:
        assert output.logits is None
        torch.testing.assert_close(output.loss, wanted)
    warnings = [r.getMessage() for r in caplog.records if r.name == "coat_vlm.model.vlm"]
    assert len(warnings) == 1
    assert "stores all logits: it changes what" in warnings[0]
