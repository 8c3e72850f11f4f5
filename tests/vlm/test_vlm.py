import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from coat_vlm.model.vision import VISION_MODELS

IMAGE = 2


def sequence(*parts, num_tokens=4):
    """Token ids; an ``IMAGE`` among the parts stands for a whole image's placeholders."""
    ids = []
    for part in parts:
        ids += [IMAGE] * num_tokens if part == IMAGE else [part]
    return torch.tensor([ids])


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.model()


@pytest.fixture
def training(tiny):
    return tiny.model(vision=tiny.vision("clip")).train()


@pytest.fixture
def images():
    return torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("feature", ["patch", "cls_patch"])
def test_logits_and_loss_are_llavas(tiny, images, feature):
    """An independent composition of the same parts: transformers' own LLaVA."""
    ours = tiny.model(
        vision=tiny.vision("clip"),
        language=tiny.language("llama", vocab_size=60),
        projector="mlp2x_gelu",
        select_feature=feature,
    )
    config = LlavaConfig(
        vision_config=tiny.vision("clip"),
        text_config=ours.config.text_config,
        image_token_index=IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default" if feature == "patch" else "full",
    )
    llava = LlavaForConditionalGeneration(config).eval()
    tower, projector, language = ours.vision_tower, ours.projector, ours.language_model
    loaded = llava.model.vision_tower.load_state_dict(tower.model.state_dict(), strict=False)
    assert all(
        "layers.2." in key or "post_layernorm" in key or "position_ids" in key
        for key in loaded.missing_keys
    )
    llava.model.multi_modal_projector.linear_1.load_state_dict(projector.layers[0].state_dict())
    llava.model.multi_modal_projector.linear_2.load_state_dict(projector.layers[2].state_dict())
    llava.model.language_model.load_state_dict(language.model.state_dict())
    llava.lm_head.load_state_dict(language.lm_head.state_dict())

    tokens = ours.config.tokens_per_image
    assert tokens == (16 if feature == "patch" else 17)
    ids = torch.cat(
        [
            sequence(5, IMAGE, 7, 8, 9, num_tokens=tokens),
            sequence(5, 6, 7, IMAGE, 9, num_tokens=tokens),
        ]
    )
    labels = ids.masked_fill(ids == IMAGE, -100)
    with torch.no_grad():
        wanted = llava(input_ids=ids, pixel_values=images, labels=labels)
        output = ours(input_ids=ids, pixel_values=images, labels=labels)
        swapped = ours(input_ids=ids, pixel_values=images.flip(0))
    torch.testing.assert_close(output.logits, wanted.logits)
    torch.testing.assert_close(output.loss, wanted.loss)
    assert not torch.allclose(swapped.logits, wanted.logits, atol=1e-4)


@pytest.mark.parametrize("num_items", [None, 0, 5])
def test_loss_without_supervised_tokens_is_zero_with_a_graph(training, num_items):
    ids = sequence(5, 6, 7)
    loss = training(ids, labels=torch.full_like(ids, -100), num_items_in_batch=num_items).loss
    assert loss.item() == 0.0
    loss.backward()
    gradients = [parameter.grad for parameter in training.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("pixel_values", [None, torch.zeros(0, 3, 28, 28)])
def test_training_without_images_gives_exact_zero_gradients(training, pixel_values):
    ids = sequence(5, 6, 7, 8)
    training(ids, labels=ids, pixel_values=pixel_values).loss.backward()
    for part in (training.vision_tower, training.projector):
        assert all(p.grad is not None and not p.grad.any() for p in part.parameters())
    assert all(p.grad.any() for p in training.language_model.parameters())


def test_training_without_images_does_not_run_a_frozen_tower(training):
    ids, calls = sequence(5, 6, 7, 8), []
    training.vision_tower.register_forward_hook(lambda *_: calls.append(1))
    loss = training(ids, labels=ids).loss
    for part in (training.vision_tower, training.projector):
        part.requires_grad_(False)
    assert training(ids, labels=ids).loss == loss
    assert len(calls) == 1


@pytest.mark.parametrize("kind", [*VISION_MODELS, "open_clip"])
def test_every_parameter_gets_a_gradient_from_an_image(tiny, images, kind):
    vision = (
        {"library": "open_clip", "config": {"vision_cfg": tiny.open_clip["clip"]}}
        if kind == "open_clip"
        else {"config": tiny.vision(kind.removesuffix("_vision_model"))}
    )
    model = tiny.model(**vision).train()
    ids = sequence(5, IMAGE, 6, IMAGE, 7, 8)
    model(ids, pixel_values=images, labels=ids.masked_fill(ids == IMAGE, -100)).loss.backward()
    # Keys' biases shift all scores of a query alike and so have no gradient but rounding.
    without = [name for name, p in model.named_parameters() if p.grad is None]
    zero = [n for n, p in model.named_parameters() if not p.grad.any() and "k_proj.bias" not in n]
    assert without == []
    assert zero == []


@pytest.mark.parametrize(
    ("parts", "count", "message"),
    [
        ((5, IMAGE, 6), 2, "4 image placeholders .* 2 images with 8 features"),
        ((5, 6), 1, "0 image placeholders .* 1 images"),
        ((5, IMAGE, 6), None, r"4 image placeholders .* 0 images.*give 4 placeholders per image"),
    ],
)
def test_placeholders_and_images_must_match(model, images, parts, count, message):
    pixel_values = None if count is None else images[:count]
    with pytest.raises(ValueError, match=message):
        model(sequence(*parts), pixel_values=pixel_values)
