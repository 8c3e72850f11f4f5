"""What converting a model changes and what it leaves alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import Arithmetic, arithmetic_of, convert, fp8_blocks
from coat_vlm.fp8.convert import _warn_of_gpu


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 96,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**settings, **changes}))


def test_parameters_and_checkpoints_are_those_of_the_original(tmp_path: Path) -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    report = convert(model, Fp8Config())
    assert list(report.converted) == [*(f"model.layers.{i}" for i in range(4)), "lm_head"]
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert not fp8_blocks(loaded)
    assert all(torch.equal(loaded.state_dict()[name], before[name]) for name in before)


def test_generate_uses_its_cache() -> None:
    """Also where backward would compute q, k and v again, which a cache must save."""
    model = llama().eval()
    original = copy.deepcopy(model)
    convert(model, Fp8Config(recompute_qkv=True))
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    out = model.generate(ids, **settings, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1]).logits[:, -6:]
        exact = original(out.sequences[:, :-1]).logits[:, -6:]
    cached = torch.stack(out.logits, 1)
    # Scales depend on the tokens of a call, so the two differ by FP8's rounding, no more.
    assert 0 < (cached - whole).norm() < 1.5 * (whole - exact).norm() < 0.5 * exact.norm()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 72, "num_attention_heads": 4}, "multiples of 16"),
        ({"head_dim": 10}, "multiples of 16"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' has no FP8 kernel; allowed here: silu"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    changes: dict[str, Any], words: str
) -> None:
    model = llama(**changes)
    with pytest.raises(ValueError, match=r"model\.layers\.0") as caught:
        convert(model, Fp8Config())
    assert words in str(caught.value)
    assert not fp8_blocks(model)


def test_an_unknown_architecture_is_named() -> None:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no block .* LlamaDecoderLayer"):
        convert(model, Fp8Config())


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((8, 9), "compute capability 8.9: FP8 was tested on 9.0"),
        ((9, 0), ""),
        ((10, 0), "compute capability 10.0"),
        ((12, 0), "compute capability 12.0"),
    ],
)
def test_gpus_that_differ_from_hopper_are_named_once(
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_of_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for _ in range(2):
        arithmetic_of("coat", None, torch.device("cuda"))
    assert [message in record.message for record in caplog.records] == [True] * bool(message)


def test_an_old_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(8, 9), (9, 0), (8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found.pop(0))
    gpu = torch.device("cuda")
    for _ in range(2):
        assert arithmetic_of("coat", None, gpu).fp8 is not None
    with pytest.raises(ValueError, match=r"this GPU has 8\.0: train with precision=bf16"):
        arithmetic_of("coat", None, gpu)


def test_bf16_on_a_cpu_rounds_the_operands_and_the_result() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    x, dy = torch.randn(8, 64, requires_grad=True), torch.randn(8, 32)
    weight, bias = (parameter.detach() for parameter in model.parameters())
    Arithmetic(torch.float32, round_linears=True).apply(model)
    y = model(x)
    y.backward(dy)

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.detach().bfloat16().float()

    assert torch.equal(y, rounded(rounded(x) @ rounded(weight).t() + bias))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, rounded(rounded(dy) @ rounded(weight)))
    assert not torch.allclose(y, torch.nn.functional.linear(x, weight, bias), rtol=1e-5)


def test_a_wrapped_linear_is_refused() -> None:
    """An adapter would be passed by without a word: the block reads the weights itself."""

    class Adapted(torch.nn.Linear):
        pass

    model = llama()
    model.model.layers[1].self_attn.v_proj = Adapted(64, 32)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj is a Adapted"):
        convert(model, Fp8Config())
    assert not fp8_blocks(model)


def test_linear_layers_alone_become_fp8() -> None:
    """The activation and the group size do not matter then; norms and residuals stay."""
    model = llama(hidden_act="relu")
    original = copy.deepcopy(model)
    report = convert(model, Fp8Config(language="fp8_linear"))
    assert set(report.converted.values()) == {"linear layers in FP8"}
    assert not fp8_blocks(model)
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if "proj" in name}
    assert set(kinds.values()) == {"Fp8Linear"}
    assert len(kinds) == 4 * 7
    ids = torch.arange(12)[None]
    y, exact = model(input_ids=ids).logits, original(input_ids=ids).logits
    assert 1e-3 < (y - exact).norm() / exact.norm() < 0.1
