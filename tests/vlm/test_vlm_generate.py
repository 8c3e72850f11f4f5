import pytest
import torch

IMAGE, PAD = 2, 0
NEW = 6


@pytest.fixture(scope="module")
def model(tiny):
    """Sharper than a random model: its choices are no near-ties and depend on all tokens."""
    model = tiny.model(vision=tiny.vision("clip"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(5))


def tokens(*parts):
    return [token for part in parts for token in ([IMAGE] * 4 if part == IMAGE else [part])]


def generate(model, ids, pixel_values, **kwargs):
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD} | kwargs
    return model.generate(input_ids=torch.tensor(ids), pixel_values=pixel_values, **settings)


def test_beams_keep_each_rows_images_together(model, images):
    rows = [tokens(IMAGE, 5, IMAGE, 6), [PAD, *tokens(7, 8, 9, IMAGE, 4, 5)]]
    mask = (torch.tensor(rows) != PAD).long()
    both = generate(model, rows, images, num_beams=3, attention_mask=mask)
    first = generate(model, rows[:1], images[:2], num_beams=3, attention_mask=mask[:1])
    second = generate(model, rows[1:], images[2:], num_beams=3, attention_mask=mask[1:])
    assert both[0, : first.shape[1]].tolist() == first[0].tolist()
    assert both[1, : second.shape[1]].tolist() == second[0].tolist()


def test_the_placeholder_is_never_generated(model, images):
    head = model.get_output_embeddings()
    before = head.weight.detach().clone()
    ids = tokens(5, IMAGE, 7)
    with torch.no_grad():
        hidden = model.language_model.model(
            inputs_embeds=model.embed(torch.tensor([ids]), images[:1])
        ).last_hidden_state[0, -1]
        head.weight[IMAGE] = 100 * hidden  # by far the likeliest next token
        assert model(torch.tensor([ids]), pixel_values=images[:1]).logits[0, -1].argmax() == IMAGE
        output = generate(model, [ids], images[:1])
        head.weight.copy_(before)
    assert IMAGE not in output[0, len(ids) :].tolist()


ROWS = [tokens(IMAGE, 5, IMAGE, 6), [PAD, *tokens(7, 8, 9, IMAGE, 4, 5)]]


@pytest.mark.parametrize("new", [[], [IMAGE, 9]], ids=["same images", "another image"])
def test_a_second_turn_continues_from_the_cache(model, images, new):
    """The whole conversation is given again; its cache has the images of the first turn."""
    first = generate(
        model, ROWS, images, return_dict_in_generate=True, max_new_tokens=3, eos_token_id=-1
    )
    asked = torch.tensor([tokens(*new)] * 2, dtype=torch.long)
    ids = torch.cat([first.sequences, asked], dim=1)
    pixels = images
    if new:  # each row has one more: rows of three and two images
        pixels = torch.cat([images[:2], images[2:], images[2:], images[:1]])
    mask = (ids != PAD).long()
    mask[:, len(ROWS[0]) :] = 1
    given = {"attention_mask": mask, "eos_token_id": -1}
    wanted = generate(model, ids.tolist(), pixels, **given)
    cache = first.past_key_values
    assert cache.get_seq_length() > len(ROWS[0])
    found = generate(model, ids.tolist(), pixels, past_key_values=cache, **given)
    assert torch.equal(found, wanted)
