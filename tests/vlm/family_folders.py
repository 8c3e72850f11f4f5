"""Small random checkpoints of published families, in their official layouts."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_vlm.model.processor import train_tokenizer

TEXTS = ["What color is the circle?", "red green blue yellow", "Is there a square? yes no"]
TEXT: Any = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
PIXELS: Any = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
SIZE: Any = {"shortest_edge": 64, "longest_edge": 1024}
TOWER: Any = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
PINPOINTS = [[16, 16], [16, 32], [32, 16]]
TURN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
)
END = (
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in Qwen/Qwen3-VL-2B-Instruct: parts in their order.
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = QWEN_IMAGE.replace("image", "video")
PARTS = (
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + QWEN_IMAGE
    + "{% elif part['type'] == 'video' %}"
    + QWEN_VIDEO
    + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
)
QWEN = TURN + PARTS + END
# As in OpenGVLab/InternVL3-1B-hf (with QWEN above) and HuggingFaceTB/SmolVLM2-2.2B-Instruct.
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}{{ ': ' }}{% endif %}"
    + PARTS.replace(QWEN_IMAGE, "<image>")
    + "<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# As in mistralai/Mistral-Small-3.1-24B-Instruct-2503, which adds a system prompt of its own.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + message['content'][0]['text'] + '[/SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST]' }}"
    + PARTS.replace(QWEN_IMAGE, "[IMG]")
    + "{{ '[/INST]' }}{% else %}{{ message['content'][0]['text'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
# As in zai-org/GLM-4.1V-9B-Thinking and GLM-4.6V-Flash, which write no end token.
GLM = (
    "[gMASK]<sop>{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    + PARTS.replace(QWEN_IMAGE, "<|begin_of_image|><|image|><|end_of_image|>").replace(
        QWEN_VIDEO, "<|begin_of_video|><|video|><|end_of_video|>"
    )
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As in google/gemma-4-31B-it.
GEMMA4 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn>' + message['role'].replace('assistant', 'model') + '\n' }}"
    + PARTS.replace(QWEN_IMAGE, "<|image|>")
    .replace(QWEN_VIDEO, "<|video|>")
    .replace("['text'] }}", "['text'] | trim }}")
    + "{{ '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
# As in LiquidAI/LFM2-VL-1.6B.
LFM2 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    + PARTS.replace(QWEN_IMAGE, "<image>")
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in google/gemma-3-4b-it.
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    + PARTS.replace(QWEN_IMAGE, "<start_of_image>").replace("['text'] }}", "['text'] | trim }}")
    + "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As in llava-hf/llava-1.5-7b-hf, which writes no end token.
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
    "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# As in llava-hf/llava-v1.6-mistral-7b-hf.
LLAVA_NEXT = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
    "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}{{ ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'][0]['text'] + '</s> ' }}{% endif %}{% endfor %}"
)
# As in llava-hf/llava-onevision-qwen2-0.5b-ov-hf: all images, all videos, a line break, all texts.
ONEVISION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}"
    "<video>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + part['text'] }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(*special: str, bos: str | None = None) -> Any:
    """A tokenizer with special tokens, which puts ``bos`` before every text."""
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_tokens([*special, *filter(None, [bos])], special_tokens=True)
    tokenizer.chat_template = None
    if bos is not None:
        tokenizer.bos_token = bos
        backend = tokenizer.backend_tokenizer
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return tokenizer


def name_tokens(tokenizer: Any, marks: dict[str, str], **tokens: str) -> tuple[Any, dict[str, Any]]:
    """The tokenizer with an attribute ``NAME_token`` for each mark, and the marks' ids."""
    named = transformers.PreTrainedTokenizerFast(
        **tokens,
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        extra_special_tokens={f"{name}_token": mark for name, mark in marks.items()},
    )
    return named, {name: named.convert_tokens_to_ids(mark) for name, mark in marks.items()}


def find_ids(tokenizer: Any) -> dict[str, Any]:
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "bos_token_id": None, **ends}


def make_qwen(kind: str, folder: Path, **text: Any) -> None:
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = make_tokenizer(*marks)
    places = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(places, map(tokenizer.convert_tokens_to_ids, marks), strict=True))
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32,
        "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    text = {**TEXT, **find_ids(tokenizer), "rope_parameters": ROPE, **text}
    image = transformers.Qwen2VLImageProcessor(**PIXELS, size=SIZE)
    video: Any = transformers.Qwen2VLVideoProcessor(**PIXELS, size=SIZE)
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 8}
        name = "Qwen3VL"
        if kind == "qwen3_vl_moe":
            text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            name = "Qwen3VLMoe"
        config = getattr(transformers, f"{name}Config")(
            text_config=text, vision_config=vision, tie_word_embeddings=kind == "qwen3_vl", **ids
        )
        video = transformers.Qwen3VLVideoProcessor(**PIXELS, size=SIZE)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        processor = transformers.Qwen3VLProcessor(image, tokenizer, video, chat_template=QWEN)
    elif kind == "qwen3_5":
        vision |= {"num_position_embeddings": 16}
        rope = {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
        text |= {"head_dim": 8, "rope_parameters": rope, "linear_num_key_heads": 2}
        text |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        text |= {"layer_types": ["linear_attention", "full_attention"]}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
        video = transformers.Qwen3VLVideoProcessor(**PIXELS, size=SIZE)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
        processor = transformers.Qwen3VLProcessor(image, tokenizer, video, chat_template=QWEN)
    elif kind == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        del vision["intermediate_size"], vision["out_hidden_size"]
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen2VLForConditionalGeneration(config)
        processor = transformers.Qwen2VLProcessor(image, tokenizer, video, chat_template=QWEN)
    else:
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        processor = transformers.Qwen2_5_VLProcessor(image, tokenizer, video, chat_template=QWEN)
    save(model, processor, folder)
    if kind == "qwen3_vl_moe":  # as published, and as transformers 4 writes it
        weights = load_file(folder / "model.safetensors")
        swapped = {
            name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight
            for name, weight in weights.items()
        }
        save_file(swapped, folder / "model.safetensors", {"format": "pt"})


def make_onevision(folder: Path) -> None:
    tokenizer = make_tokenizer("<image>", "<video>")
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=transformers.Qwen2Config(**TEXT, **find_ids(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
    )
    size: Any = {"height": 16, "width": 16}
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=ONEVISION,
    )
    save(transformers.LlavaOnevisionForConditionalGeneration(config), processor, folder)


def save(model: Any, processor: Any, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():  # outputs that depend on the text and the image
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_llava(folder: Path, kind: str = "Llava", **changes: Any) -> None:
    tokenizer = make_tokenizer("<image>", "</s>", bos="<s>")
    tokenizer.eos_token = "</s>"
    config = getattr(transformers, f"{kind}Config")(
        **changes,
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**TEXT, **find_ids(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    size: Any = {"height": 16, "width": 16}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    save(model, processor, folder)


def make_llava_next(folder: Path) -> None:
    tokenizer = make_tokenizer("<image>", "</s>", bos="<s>")
    tokenizer.eos_token = "</s>"
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.MistralConfig(**TEXT, **find_ids(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
    )
    size: Any = {"height": 16, "width": 16}
    image = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size=size, image_grid_pinpoints=PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        image, tokenizer, 4, "default", LLAVA_NEXT, num_additional_image_tokens=1
    )
    save(transformers.LlavaNextForConditionalGeneration(config), processor, folder)


def make_internvl(folder: Path) -> None:
    marks = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}
    marks["video"] = "<video>"
    tokenizer, _ = name_tokens(make_tokenizer(*marks.values()), marks)
    vision = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}
    config = transformers.InternVLConfig(
        vision_config=vision,
        text_config=transformers.Qwen2Config(**TEXT, **find_ids(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    size: Any = {"height": 16, "width": 16}
    processor = transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(
            size=size, crop_to_patches=False, min_patches=1, max_patches=4
        ),
        tokenizer,
        transformers.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=QWEN.replace(QWEN_IMAGE, "<IMG_CONTEXT>\n").replace(QWEN_VIDEO, "<video>\n"),
    )
    save(transformers.InternVLForConditionalGeneration(config), processor, folder)


def make_idefics(kind: str, folder: Path) -> None:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *rows]
    tokenizer = make_tokenizer(*marks)
    image: Any = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    settings: Any = {
        "vision_config": {**TOWER, "patch_size": 2},
        "text_config": transformers.LlamaConfig(**TEXT, **find_ids(tokenizer)),
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
    }
    options: Any = {"image_seq_len": 16, "chat_template": IDEFICS}
    if kind == "idefics3":
        model: Any = transformers.Idefics3ForConditionalGeneration(
            transformers.Idefics3Config(**settings)
        )
        processor: Any = transformers.Idefics3Processor(
            transformers.Idefics3ImageProcessor(**image), tokenizer, **options
        )
    else:
        model = transformers.SmolVLMForConditionalGeneration(transformers.SmolVLMConfig(**settings))
        videos = transformers.SmolVLMVideoProcessor(**image)
        processor = transformers.SmolVLMProcessor(
            transformers.SmolVLMImageProcessor(**image), tokenizer, videos, **options
        )
    save(model, processor, folder)


def make_gemma(folder: Path) -> None:
    marks = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    tokenizer = make_tokenizer("<start_of_turn>", "<end_of_turn>", *marks.values(), bos="<bos>")
    tokenizer, ids = name_tokens(tokenizer, marks, bos_token="<bos>")
    text = {**TEXT, **find_ids(tokenizer), "head_dim": 8, "sliding_window": 16}
    config = transformers.Gemma3Config(
        text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**TOWER, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=ids["boi"],
        eoi_token_index=ids["eoi"],
        image_token_index=ids["image"],
    )
    size: Any = {"height": 16, "width": 16}
    image = transformers.Gemma3ImageProcessor(size=size)
    processor = transformers.Gemma3Processor(
        image, tokenizer, chat_template=GEMMA, image_seq_length=4
    )
    save(transformers.Gemma3ForConditionalGeneration(config), processor, folder)


def make_mistral(folder: Path) -> None:
    tokenizer = make_tokenizer(
        "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "</s>", bos="<s>"
    )
    tokenizer.eos_token = "</s>"
    config = transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**TOWER, hidden_act="silu"),
        text_config=transformers.MistralConfig(**TEXT, **find_ids(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    image = transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=4)
    processor = transformers.PixtralProcessor(image, tokenizer, 4, 2, MISTRAL)
    save(transformers.Mistral3ForConditionalGeneration(config), processor, folder)


def make_paligemma(folder: Path) -> None:
    tokenizer = make_tokenizer("<image>", "<eos>", bos="<bos>")
    tokenizer.eos_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = None
    image: Any = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
    image.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(image, tokenizer)
    config = transformers.PaliGemmaConfig(
        text_config=transformers.Gemma2Config(
            **TEXT, **find_ids(tokenizer), head_dim=8, sliding_window=16
        ),
        vision_config=transformers.SiglipVisionConfig(**TOWER, vision_use_head=False),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
        hidden_size=32,
    )
    save(transformers.PaliGemmaForConditionalGeneration(config), processor, folder)


def make_glm(kind: str, folder: Path) -> None:
    ends = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
    roles = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    tokenizer = make_tokenizer(*ends, "<|image|>", "<|video|>", *roles)
    names = ("image_start", "image_end", "video_start", "video_end", "image", "video")
    marks = map(tokenizer.convert_tokens_to_ids, [*ends, "<|image|>", "<|video|>"])
    ids: Any = {f"{name}_token_id": mark for name, mark in zip(names, marks, strict=True)}
    vision: Any = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 64, "out_hidden_size": 32,
        "num_heads": 2, "patch_size": 4, "image_size": 16,
    }  # fmt: skip
    rope = {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    text = {**TEXT, **find_ids(tokenizer), "rope_parameters": rope}
    text["model_type"], vision["model_type"] = "glm4v_text", "glm4v_vision"
    prefix = {"glm4v": "Glm4v", "glm46v": "Glm46V"}[kind]

    def make(name: str, *args: Any, **options: Any) -> Any:
        return getattr(transformers, prefix + name)(*args, **options)

    config = make("Config", text_config=text, vision_config=vision, **ids)
    size = {**SIZE, "longest_edge": 2 * SIZE["longest_edge"]}  # an image counts as two frames
    image = make("ImageProcessor", **PIXELS, size=size)
    video = make("VideoProcessor", **PIXELS, size=size)
    processor = make("Processor", image, tokenizer, video, chat_template=GLM)
    save(make("ForConditionalGeneration", config), processor, folder)


def make_gemma4(folder: Path) -> None:
    marks = {
        **{"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>"},
        **{"boa": "<|audio>", "eoa": "<audio|>", "audio": "<|audio|>"},
    }
    tokenizer = make_tokenizer("<|turn>", "<turn|>", *marks.values(), "<|video|>", bos="<bos>")
    tokenizer, ids = name_tokens(tokenizer, marks, bos_token="<bos>")
    text = {**TEXT, **find_ids(tokenizer), "head_dim": 8, "global_head_dim": 16}
    text |= {"hidden_size_per_layer_input": 0, "sliding_window": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    text |= {"use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0}
    text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config={
            **TOWER, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2,
            "position_embedding_size": 64, "standardize": True,
        },
        audio_config=None,
        boi_token_id=ids["boi"],
        eoi_token_id=ids["eoi"],
        image_token_id=ids["image"],
        audio_token_id=ids["audio"],
        video_token_id=cast(int, tokenizer.convert_tokens_to_ids("<|video|>")),
    )  # fmt: skip
    pixels: Any = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(**pixels),
        tokenizer,
        transformers.Gemma4VideoProcessor(**pixels, num_frames=8),
        chat_template=GEMMA4,
    )
    save(transformers.Gemma4ForConditionalGeneration(config), processor, folder)


def make_lfm2(folder: Path) -> None:
    rows = [f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)]
    marks = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *rows)
    tokenizer = make_tokenizer(*marks, bos="<|startoftext|>")
    text = {**TEXT, **find_ids(tokenizer), "block_multiple_of": 16}
    config = transformers.Lfm2VlConfig(
        text_config=transformers.Lfm2Config(**text, layer_types=["conv", "full_attention"]),
        vision_config=transformers.Siglip2VisionConfig(
            **{**TOWER, "num_patches": 16}, vision_use_head=False
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=32,
    )
    image = transformers.Lfm2VlImageProcessor(
        encoder_patch_size=4, tile_size=16, min_image_tokens=1, max_image_tokens=4, max_tiles=4
    )
    processor = transformers.Lfm2VlProcessor(image, tokenizer, LFM2)
    save(transformers.Lfm2VlForConditionalGeneration(config), processor, folder)


MAKERS = {
    "gemma3": make_gemma,
    "gemma4": make_gemma4,
    "glm46v": lambda folder: make_glm("glm46v", folder),
    "glm4v": lambda folder: make_glm("glm4v", folder),
    "idefics3": lambda folder: make_idefics("idefics3", folder),
    "internvl": make_internvl,
    "lfm2_vl": make_lfm2,
    "llava": make_llava,
    "llava_next": make_llava_next,
    "llava_onevision": make_onevision,
    "mistral3": make_mistral,
    "paligemma": make_paligemma,
    "qwen2_5_vl": lambda folder: make_qwen("qwen2_5_vl", folder),
    "qwen2_vl": lambda folder: make_qwen("qwen2_vl", folder),
    "qwen3_5": lambda folder: make_qwen("qwen3_5", folder),
    "qwen3_vl": lambda folder: make_qwen("qwen3_vl", folder),
    "qwen3_vl_moe": lambda folder: make_qwen("qwen3_vl_moe", folder),
    "smolvlm": lambda folder: make_idefics("smolvlm", folder),
}
"""Function that writes a checkpoint of a family into a folder, by ``model_type``."""


def settings_of(source: Path) -> dict[str, Any]:
    """Keys of ``model`` that train a checkpoint or run in a folder with the family's name."""
    # PaliGemma 2's language model has a soft cap of attention, which SDPA has not.
    attention = "eager" if "paligemma" in str(source) else "sdpa"
    return {"pretrained": str(source), "max_length": 1024, "attn_implementation": attention}


def publish(kind: str, folder: Path) -> None:
    """Make a checkpoint whose files are those of the published ones, which transformers 4 wrote.

    Its rotary base is not the 10,000 that transformers 4 takes when it finds none, and there are
    two end tokens.
    """
    MAKERS[kind](folder)
    config = _with_old_names(json.loads((folder / "config.json").read_text()))
    text = config["text_config"]
    text |= {"rope_theta": 5e5, "tie_word_embeddings": config["tie_word_embeddings"]}
    config |= {"torch_dtype": config.pop("dtype"), "transformers_version": "4.57.1"}
    if kind in ("qwen2_vl", "qwen2_5_vl"):  # flat, as Qwen/Qwen2.5-VL-7B-Instruct
        config |= {name: text[name] for name in text if name != "model_type"}
        del config["text_config"]
    ends = [text["eos_token_id"], 5]
    generation = {"do_sample": True, "eos_token_id": ends, "temperature": 0.5, "top_p": 0.9}
    processor = json.loads((folder / "processor_config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        values = processor.pop(part, None)
        if values is not None:
            name = part.replace("image_", "pre").replace("video_", "video_pre")
            write(folder / f"{name}_config.json", values)
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("backend", "extra_special_tokens"):
        tokenizer.pop(name, None)
    tokens = {name: tokenizer[name] for name in tokenizer if name.endswith("_token")}
    more = {n: token for n, token in tokens.items() if n.partition("_")[0] not in _BASIC}
    write(folder / "tokenizer_config.json", tokenizer | {"extra_special_tokens": more})
    write(folder / "processor_config.json", processor)
    write(folder / "generation_config.json", generation)
    write(folder / "config.json", config)
    weights = load_file(folder / "model.safetensors")
    if kind in ("gemma3", "lfm2_vl", "llava", "llava_next", "llava_onevision", "paligemma"):
        tower = "vision_tower."
        weights = {name.replace(tower, f"{tower}vision_model."): w for name, w in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


_BASIC = ("bos", "eos", "pad", "unk")


def _with_old_names(config: dict[str, Any]) -> dict[str, Any]:
    found = {
        name: _with_old_names(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "rope_parameters"
    }
    rope = dict(config.get("rope_parameters", {}))
    if "sliding_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    elif "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if "mrope_section" in rope:
        kind = {"type": "mrope"} if "qwen2" in config["model_type"] else {"rope_type": "default"}
        found["rope_scaling"] = kind | {"mrope_section": rope["mrope_section"]}
    return found


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def make_folders(families: Iterable[str], quick: Sequence[str] = tuple(MAKERS)) -> Any:
    """A module's fixture ``folder`` for each family; those not in ``quick`` are slow."""
    names = [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name in sorted(families)
    ]

    @pytest.fixture(scope="module", params=names)
    def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("published") / request.param
        MAKERS[request.param](folder)
        return folder

    return folder
