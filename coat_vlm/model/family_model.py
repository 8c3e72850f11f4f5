"""A published vision-language model in training: transformers' own class with the project's loss.

:func:`trainable_class` makes a subclass that has the original's name, parameters and files. Its
``forward`` computes the loss without storing the logits when training asks for that
(``skip_logits``), and otherwise is the original's.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import is_flash_attention_requested

from coat_data.load.encode import EncodedSample
from coat_vlm.config import ModuleName
from coat_vlm.model.compressed import METHOD, make_load_arguments, read_compression
from coat_vlm.model.families import Family, find_family, find_parts
from coat_vlm.model.family_layout import Placeholders, known_placeholders
from coat_vlm.model.family_towers import one_pass
from coat_vlm.model.loss import (
    IGNORE_INDEX,
    balance_loss,
    loss_for_logits,
    next_token_loss,
    why_logits_are_needed,
)
from coat_vlm.model.packing import (
    PACKED,
    PACKED_IMAGES,
    Packing,
    check_packing,
    make_empty_mask,
    mask_for_loss,
    read_packing,
    skip_packing_search,
)
from coat_vlm.model.placeholders import KINDS, copy_to_device, find_placeholders
from coat_vlm.model.pretrained import TENSORS, load_weights, read_files
from coat_vlm.model.sequence_parallel import SHARD, SequenceShard


class FamilyVlm:
    """What :func:`trainable_class` adds to transformers' class."""

    family: Family
    unused: tuple[str, ...] = ()
    """Modules and parameters of :func:`find_unused`, which training leaves as they are."""
    base_files: dict[str, bytes]
    """config.json and tensors.json of the folder that the model comes from."""

    def generate(self: Any, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """Generate as the original; token types may be left out."""
        ids = kwargs.get("input_ids", inputs)
        kwargs = kwargs if ids is None else complete_inputs(self, kwargs, ids)
        with one_pass(self.base_model, kwargs):
            return super().generate(inputs, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def language(self: Any) -> PreTrainedModel:
        """The decoder, without the output layer."""
        return self.get_submodule(self.family.parts["language"][0])

    @property
    def part_names(self) -> dict[ModuleName, tuple[str, ...]]:
        """Names of modules and parameters by part of the model."""
        return self.family.parts

    def find_parts(self: Any) -> dict[ModuleName, nn.Module]:
        """Return the parts of the model."""
        return find_parts(self, self.family)

    @property
    def packs(self) -> bool:
        """Whether packed samples get the positions and attention of single samples."""
        return self.family.is_known

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks may share a sequence's tokens, if the decoder's attention allows it."""
        return self.family.is_known and self.family.shares_tokens

    def distribute_media(self, batch: Mapping[str, Any], *_: Any) -> tuple[dict[str, Any], None]:
        """Return all images and videos for every rank of a group."""
        return {name: batch[name] for name in ("pixel_values", "extras") if name in batch}, None

    def prepare_attention(self: Any, *, packed: bool) -> None:
        """Have all images attend in one call, and samples of a sequence if they are ``packed``."""
        if not self.family.is_known:
            return
        vision = self.config.vision_config
        if "image_grid_thw" in self.family.inputs and vision._attn_implementation == "sdpa":
            vision._attn_implementation = PACKED_IMAGES
        if packed and self.language.config._attn_implementation == "sdpa":
            self.language.set_attn_implementation(PACKED)

    def make_token_types(self: Any, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Make the family's input of token types, if it has one, for ids (B, T).

        ``labels`` (B, T) are given for conversations; None for prompts.
        """
        name = self.family.token_types
        if name is None:
            return {}
        if not self.family.has_prefix:
            types = (ids == self.config.image_token_id).int()
            types += 2 * (ids == getattr(self.config, "video_token_id", -1)).int()
            return {name: types}
        if labels is None:
            return {name: torch.zeros_like(ids)}
        types = (labels != IGNORE_INDEX).long().cummax(1).values
        return {name: copy_to_device(types, ids.device)}

    @cached_property
    def why_logits_are_needed(self: Any) -> str | None:
        """See :func:`coat_vlm.model.loss.why_logits_are_needed`."""
        return why_logits_are_needed(self)


@functools.cache
def trainable_class(family: Family) -> Any:
    """Create the subclass of a family's class, with the same name."""
    original: Any = getattr(transformers, family.model_class)

    @functools.wraps(original.forward)  # generate() reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Computes only the loss as CoatVlm.forward does, or what the original computes.
        skip = kwargs.pop("skip_logits", False)
        kwargs = complete_inputs(self, kwargs)
        labels = kwargs.pop("labels", None)
        if not skip or labels is None:
            kwargs |= {} if labels is None else {"labels": labels}
            with known_layout(self, kwargs):
                return original.forward(self, *args, **kwargs)
        divisor, shard = kwargs.pop("num_items_in_batch", None), kwargs.get(SHARD)
        mask = kwargs.get("attention_mask")
        kwargs["attention_mask"] = mask_for_loss(mask, self.language)
        kwargs.setdefault("use_cache", False)
        packing = _read_packing(self, kwargs)
        if packing is not None and shard is None:
            labels = packing.ignore_first_tokens(labels)
        divided = (labels, divisor, shard is not None)
        fused = self.why_logits_are_needed is None
        loss_inside: AbstractContextManager[None] = nullcontext()
        if fused:
            loss_inside = loss_for_logits(self.get_output_embeddings(), *divided)
        with loss_inside, known_layout(self, kwargs), skip_packing_search(True, packing):
            out = original.forward(self, *args, **kwargs, return_dict=True)
        if shard is not None:
            shard.check(self.language)
        loss = out.logits if fused else next_token_loss(out.logits, *divided)
        if (router_logits := getattr(out, "router_logits", None)) is not None:
            loss = loss + balance_loss(self, router_logits, mask, labels, divisor)
        return CausalLMOutputWithPast(loss=loss)

    return type(
        original.__name__,
        (FamilyVlm, original),
        {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "family": family,
            "forward": forward,
        },
    )


def complete_inputs(
    model: Any, inputs: Mapping[str, Any], ids: Tensor | None = None
) -> dict[str, Any]:
    """Return the inputs with pixels in the model's dtype, and with the family's token types."""
    inputs = dict(inputs)
    for name in ("pixel_values", "pixel_values_videos"):
        pixels = inputs.pop(name, None)
        if pixels is not None and len(pixels):
            inputs[name] = pixels.to(model.dtype)
    ids = inputs.get("input_ids") if ids is None else ids
    if ids is not None and inputs.get(model.family.token_types) is None:
        inputs.update(model.make_token_types(ids, inputs.get("labels")))
    bounds = [n for n in inputs if n.endswith(("_cu_seqlens", "_cu_window_seqlens"))]
    grids = [n for n in inputs if n.endswith("_grid_thw") and inputs[n] is not None]
    if not bounds:  # the tower reads the grids on its device
        inputs |= {name: inputs[name].to(model.device) for name in grids}
    elif is_flash_attention_requested(model.config.vision_config):
        inputs |= {name: copy_to_device(inputs[name], model.device) for name in bounds}
    return inputs


def _read_packing(model: Any, inputs: dict[str, Any]) -> Packing | None:
    """Return the packing of the inputs, which are completed.

    Raises ValueError if the attention would ignore it, or the positions of images are missing.
    """
    ids, mask, shard = inputs["input_ids"], inputs["attention_mask"], inputs.get(SHARD)
    batch, tokens = ids.shape
    if shard is not None:
        inputs["attention_mask"] = make_empty_mask(tokens, ids.device)
        tokens *= shard.group.size
    packing = read_packing(batch, tokens, ids.device, mask, inputs)
    if packing is None:
        return None
    check_packing(model.language)
    inputs |= packing.to_kwargs() | {"use_cache": False}
    config = model.language.config
    if config._attn_implementation != PACKED and not is_flash_attention_requested(config):
        raise ValueError(
            f"attention {config._attn_implementation} would mix packed samples; load the model "
            "with attention sdpa and call prepare_attention(packed=True)"
        )
    if inputs.get("position_ids") is None:
        if hasattr(model.base_model, "get_rope_index"):
            raise ValueError(
                f"a packed sequence of {model.family.name} needs the positions of its images; pass "
                "the batch through the encoder's complete"
            )
        inputs["position_ids"] = packing.positions(tokens)
    return packing


@contextmanager
def known_layout(model: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """Run the tower once, and place features where the batch says; reads that from ``inputs``."""
    places: dict[str, Placeholders] = {}
    shard: SequenceShard | None = inputs.get(SHARD)
    for kind in KINDS:
        if shard is not None:
            places[kind] = Placeholders.of_shard(shard, kind, inputs["input_ids"].device)
        elif (given := inputs.pop(f"{kind}_positions", None)) is not None:
            is_placeholder = inputs["input_ids"] == getattr(model.config, f"{kind}_token_id")
            places[kind] = Placeholders.of_batch(find_placeholders(is_placeholder, given))
    core = model.base_model
    known = known_placeholders(core, model.language, places) if places else nullcontext()
    with known, one_pass(core, inputs):
        yield


def find_unused(model: Any, image: EncodedSample) -> tuple[str, ...]:
    """Return the modules and parameters on which no input of the language model depends.

    These are blocks after ``vision_feature_layer``, a pooling head and the like, found in the
    autograd graph of one ``image``. A module without a used parameter is listed by its own name.
    """
    inputs: list[Any] = []

    class _ReachedError(Exception):
        """The language model is called."""

    def record(**kwargs: Any) -> None:
        inputs.extend(leaf for leaf in tree_leaves(kwargs) if isinstance(leaf, Tensor))
        raise _ReachedError

    language = model.get_submodule(model.family.language[0])
    language.forward = record
    save_none: Any = {}.get
    try:
        hooks = saved_tensors_hooks(save_none, save_none)
        with suppress(_ReachedError), torch.enable_grad(), hooks:
            pixels = {"pixel_values": image.pixel_values, **image.extras}
            model(input_ids=image.input_ids[None], **pixels)
    finally:
        del language.forward
    used = {id(p) for p in model.find_parts()["language"].parameters()}
    nodes: list[Any] = [tensor.grad_fn for tensor in inputs]
    seen: set[Any] = {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            used.add(id(getattr(node, "variable", None)))  # of a leaf
            nodes += [before for before, _ in node.next_functions]
    unused: list[str] = []
    for name, whole in (*model.named_modules(), *model.named_parameters()):
        ids = {id(p) for p in ([whole] if isinstance(whole, Tensor) else whole.parameters())}
        if ids and not used & ids:
            unused.append(name)
            used |= ids
    return tuple(unused)


def load_family_model(
    where: str,
    path: str,
    dtype: torch.dtype,
    attention: str | None = None,
    state: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Load a published model, or one that training wrote; ValueError if it is incomplete.

    ``state`` has the weights, if they are not in the folder.
    """
    family, config = find_family(where, path)
    options: dict[str, Any] = {} if state is None else {"config": config, "state_dict": state}
    quantized: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    is_local = Path(path).is_dir() and quantized.get("quant_method") == METHOD
    if is_local and (scheme := read_compression(path)) is not None:
        options |= make_load_arguments(Path(path), scheme, config, dtype)
    elif quantized:
        raise ValueError(
            f"{where}={path!r} has quantized weights; use the original model, in FP32, BF16 or FP16"
        )
    kind = trainable_class(family)
    with _explain_attention(where, path, family, attention):
        options = {"dtype": dtype, "attn_implementation": attention, **options}
        model: Any = load_weights(kind, where, path, **options)
    model.find_parts()
    model.base_files = read_files(path, "config.json", TENSORS)
    return model


@contextmanager
def _explain_attention(
    where: str, path: str, family: Family, attention: str | None
) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        raise ValueError(
            f"{where}={path!r}: transformers' {family.model_class} cannot compute attention with "
            f"{attention}; set model.attn_implementation: eager"
        ) from error


def create_meta_family_model(
    where: str, path: str, dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """Create the model of a folder's configuration on ``meta``, with tied embeddings if so set."""
    family, config = find_family(where, path)
    config._attn_implementation = attention
    with torch.device("meta"), _explain_attention(where, path, family, attention):
        model = trainable_class(family)(config)
    model.to(dtype)
    model.tie_weights()
    model.base_files = read_files(path, "config.json", TENSORS)
    return model
