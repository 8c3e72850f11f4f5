"""The loss of a stage ``dpo``: TRL's ``DPOTrainer`` computes it, and the metrics, of each batch.

The trainer's own loop is not used. Steps, optimizer, checkpoints, signals and logs are as in
every stage (:mod:`coat_vlm.train.loop`), so TRL sees only :meth:`Preference.loss`.
"""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from coat_data.load.encode import IGNORE_INDEX
from coat_vlm.config import Recipe, StageConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import share_stored
from coat_vlm.model import CoatVlm
from coat_vlm.model.family_model import complete_inputs
from coat_vlm.model.folder import AnyProcessor
from coat_vlm.model.placeholders import copy_to_device
from coat_vlm.train.nf4 import share_nf4

_GROUPS = ("rewards", "logps")


def copy_reference(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of a prepared model that shares the parameters that do not train.

    With LoRA these are all large ones. The copy's adapters stay at zero, as B is at the start, so
    it computes what the model without adapters does, with the model's own rounding.
    """
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()


class Preference:
    """TRL's loss on the preference pairs of one stage.

    The model, from ``model_setup.prepare_model`` and not in an engine yet, is moved to the device,
    and its dropout is turned off. TRL creates ``folder``, the stage's, and writes nothing to it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: AnyProcessor,
        recipe: Recipe,
        stage: StageConfig,
        folder: Path,
        world: World,
    ) -> None:
        # TRL 1.16 uses names that transformers has replaced, and would warn about each.
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is", FutureWarning)
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportPrivateImportUsage]

        assert stage.dpo is not None
        arguments = DPOConfig(
            output_dir=str(folder),
            beta=stage.dpo.beta,
            loss_type=[stage.dpo.loss_type],
            max_length=None,  # the encoder refuses rows that are longer than the model's
            bf16=False,  # no autocast: the weights have the dtype already
            gradient_checkpointing=False,  # the model's own setting counts
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_steps=1,
            seed=recipe.seed,
            use_cpu=world.device.type == "cpu",
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        # A process uses one GPU; TRL would refuse to start where it sees several.
        vars(arguments)["_n_gpu"] = 1
        self._model = model
        self._shares = False
        self._checkpointing = stage.gradient_checkpointing
        self._reference = copy_reference(model)
        settings = dict(vars(model.config))
        # DPOTrainer insists on a data set; this one is never read.
        unused = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
        self._trainer: Any = DPOTrainer(
            model,
            self._reference,
            arguments,
            train_dataset=unused.to_iterable_dataset(),
            processing_class=processor.tokenizer,
        )
        self._trainer.remove_callback(PrinterCallback)
        for module in model.modules():  # TRL disables only nn.Dropout; attention has a float
            for name in ("attention_dropout", "dropout"):
                if isinstance(vars(module).get(name), float):
                    setattr(module, name, 0.0)
        # The trainer sets use_cache: false for its own loop; the configuration is saved.
        vars(model.config).clear()
        vars(model.config).update(settings)
        # TRL averages over ranks on the GPU; a mask on the CPU is dropped where it has no effect.
        self._mask_on_cpu = isinstance(model, CoatVlm) and world.size == 1

    def loss(self, engine: Any, inputs: Mapping[str, Any], divisor: float) -> Tensor:
        """Return the sum of the losses of the pairs of a batch, divided by ``divisor``.

        ``inputs`` are on the device, except ``labels`` and ``attention_mask``: the chosen answers,
        then the rejected ones. ``engine``, the model's, is called once.
        """
        if not self._shares:  # the engine has stored the frozen weights since
            share_stored(self._model, self._reference)
            share_nf4(self._model, self._reference)
            self._shares = True
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        inputs["completion_mask"] = copy_to_device(
            (labels != IGNORE_INDEX).long(), inputs["input_ids"].device
        )
        if not isinstance(self._model, CoatVlm):
            inputs = complete_inputs(self._model, inputs | {"labels": labels})
            del inputs["labels"]
        if not self._mask_on_cpu:
            device = inputs["input_ids"].device
            inputs["attention_mask"] = copy_to_device(inputs["attention_mask"], device)
        mean = self._trainer.compute_loss(engine, inputs)
        if self._checkpointing:  # TRL turned it off and on, and with it gradients of the inputs
            self._model.disable_input_require_grads()
        if not self._model.training:
            self.metrics()  # of a validation: not to be added to a step's
        return mean * (count_pairs(labels) / divisor)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the means of TRL's metrics since the last call, for metrics.jsonl.

        ``rewards``: beta times the log-ratio to the reference of the ``chosen`` and ``rejected``
        answers, ``margins`` between them, and ``accuracies``, the share of pairs whose chosen
        answer has the larger one. ``logps``: log-probabilities of whole answers.
        """
        self._trainer.log({})
        metrics: dict[str, float] = self._trainer.state.log_history.pop()
        return {
            group: {
                name.removeprefix(f"{group}/"): value
                for name, value in metrics.items()
                if name.startswith(f"{group}/")
            }
            for group in _GROUPS
        }


def count_pairs(labels: Tensor) -> int:
    """Count the pairs of a batch whose answers have labels (others fill up the last batch)."""
    return int((labels[: len(labels) // 2] != IGNORE_INDEX).any(1).sum())
