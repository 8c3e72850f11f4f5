"""Checks a recipe before the engine starts, and lists all problems with their remedies.

Everything that the recipe, the headers of files and sixteen rows of every source show is checked in
seconds, without loading weights and without DeepSpeed. The same checks run in training,
``coat-vlm plan``, ``lint`` and ``export``, here on a model without memory (device ``meta``).
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from coat_data.load.encode import Encoder
from coat_data.load.loader import check_batch_sizes
from coat_vlm.checkpoint.manifest import find_problem
from coat_vlm.config import STAGES, Recipe, StageName
from coat_vlm.export.llava import check_llava
from coat_vlm.fp8 import arithmetic_of, find_gpu_problem
from coat_vlm.model import CoatVlm
from coat_vlm.model.build import build_meta_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.folder import AnyProcessor, check_start, start_processor
from coat_vlm.model.loss import why_logits_are_needed
from coat_vlm.model.processor import (
    CoatVlmProcessor,
    build_processor,
    load_tokenizer,
    prepare_tokenizer,
    train_tokenizer,
)
from coat_vlm.run.lock import LOCK
from coat_vlm.train.check_data import check_stage_data
from coat_vlm.train.model_setup import (
    build_planned_model,
    check_run_folder,
    describe_missing_start,
    find_start,
    select_stages,
)

_META = torch.device("meta")
_TOKENIZER_SIZE = 512


@dataclass
class Findings:
    """What the checks found."""

    problems: list[str] = field(default_factory=list)
    """Each with its remedy; training cannot start, or would stop."""
    notes: list[str] = field(default_factory=list)
    """What the user should know; training starts."""

    @contextmanager
    def collect(self, where: str = "") -> Iterator[None]:
        """Add an error of the block to the problems, after ``where`` if it names no key."""
        try:
            yield
        except (ValueError, OSError, ImportError) as error:
            self.add(f"{where}: {error}" if where else f"{error}")

    def add(self, problem: str) -> None:
        """Add a problem, once if several stages have it."""
        if problem not in self.problems:
            self.problems.append(problem)

    def raise_problems(self) -> None:
        """Raise ValueError with all problems, if there are any.

        Only the first rank of a node lists them; other ranks raise their first problem.
        """
        if not self.problems:
            return
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        if os.environ.get("LOCAL_RANK", "0") != "0":
            first = self.problems[0].splitlines()[0]
            raise ValueError(f"{count} found, see local rank 0 of this node; the first: {first}")
        lines = [problem.replace("\n", "\n    ") for problem in self.problems]
        raise ValueError("\n  - ".join([f"{count} found before training:", *lines]))


def check_recipe(
    recipe: Recipe,
    *,
    only_stage: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    num_ranks: int = 1,
) -> Findings:
    """Check what training with the same arguments needs; with ``resume``, of unfinished stages."""
    findings = Findings()
    run_dir = Path(recipe.output_dir)
    names: list[StageName] = []
    with findings.collect():
        names = select_stages(recipe, only_stage)
    if not (run_dir / LOCK).exists():  # else the lock says whether another run writes the folder
        with findings.collect():
            check_run_folder(run_dir, continues=resume or only_stage is not None or overwrite)
    if resume:
        names = [name for name in names if find_problem(run_dir / name / "model") is not None]
    if not names:
        return findings
    _check_packages(recipe, names, findings)
    for name in names:
        stage = recipe.stages[name]
        with findings.collect(f"stages.{name}"):
            replicas = stage.count_replicas(num_ranks)
            check_batch_sizes(stage.batch_size, stage.micro_batch_size, 0, replicas)
    _check_device(recipe, findings)
    known = len(findings.problems)
    emptied = overwrite and (run_dir / "recipe.yaml").is_file()
    if emptied:
        _check_kept(recipe, names, run_dir, findings)
    start = _check_start(recipe, names[0], run_dir, findings, emptied=emptied)
    processor, vocab_size = None, 0
    if len(findings.problems) == known:
        processor, vocab_size = _build_processor(recipe, start, findings)
    for name in names:
        check_stage_data(recipe, name, processor, findings.problems, findings.notes)
    if processor is not None and not _needs_weights(recipe):
        # The next stages have the shapes of the first one's model.
        planned = dataclasses.replace(recipe, init_from=None if start is None else str(start))
        size = vocab_size if start is None else None
        _check_meta_models(planned, names, size, processor, findings)
    return findings


def _check_packages(recipe: Recipe, names: Sequence[StageName], findings: Findings) -> None:
    if recipe.tracking.wandb_project and find_spec("wandb") is None:
        findings.add(
            f"tracking.wandb_project={recipe.tracking.wandb_project!r} needs the wandb package; "
            "pip install -e '.[wandb]', or remove the key"
        )
    for name in names:
        if recipe.stages[name].dpo is not None and find_spec("trl") is None:
            findings.add(
                f"stages.{name}: dpo needs trl, which is not installed: pip install -e '.[trl]'"
            )


def _check_device(recipe: Recipe, findings: Findings) -> None:
    if torch.cuda.is_available():
        with findings.collect():
            arithmetic_of(recipe.precision, recipe.fp8, torch.device("cuda", 0))
    elif recipe.precision != "fp32":
        findings.notes.append(
            f"there is no GPU: precision {recipe.precision} is emulated on the CPU, with FP32 "
            "storage and values rounded in the linear layers; it is slower than precision=fp32 and "
            "saves no memory"
        )


def _check_kept(
    recipe: Recipe, names: Sequence[StageName], run_dir: Path, findings: Findings
) -> None:
    start = find_start(recipe, names[0], run_dir, emptied=True)
    sources = [
        s for name in names for s in (*recipe.stages[name].data, *recipe.stages[name].val_data)
    ]
    needed = {start: "the model from which it would start"} if start is not None else {}
    needed |= {Path(s.path): f"data of {s.name}" for s in sources}
    needed |= {Path(s.exclude): f"exclude of {s.name}" for s in sources if s.exclude is not None}
    for path, what in needed.items():
        if run_dir.resolve() in path.resolve().parents:
            findings.add(
                f"--overwrite would delete {path} ({what}); keep this run and train in another "
                "folder with output_dir=NEW" + (f" init_from={path}" if path == start else "")
            )


def _check_start(
    recipe: Recipe, name: StageName, run_dir: Path, findings: Findings, *, emptied: bool
) -> Path | None:
    """Return the folder of the model from which the first stage starts, if it can be read."""
    start = find_start(recipe, name, run_dir, emptied=emptied)
    if start is None:
        return None
    if start.parent.parent == run_dir and str(start) != recipe.init_from:
        problem = find_problem(start)
        if problem is not None:
            findings.add(describe_missing_start(name, start, problem))
            return None
        return start
    with findings.collect():
        check_start(recipe, str(start))
        return start
    return None


def _needs_weights(recipe: Recipe) -> bool:
    """Whether only loading the weights of the tower gives its configuration."""
    vision = recipe.model.vision
    return vision is not None and vision.library == "open_clip" and vision.name_or_path is not None


def _build_processor(
    recipe: Recipe, start: Path | None, findings: Findings
) -> tuple[AnyProcessor | None, int]:
    """Build the processor as training does; returns it, if possible, and the vocabulary's size.

    A tokenizer that the run will train is represented by a small one.
    """
    model, size = recipe.model, recipe.model.tokenizer.train_vocab_size
    images = model.vision is not None
    if start is not None or model.pretrained is not None:
        with findings.collect("init_from" if start else ""):
            return start_processor(recipe, str(start) if start else None), 0
        return None, 0
    if _needs_weights(recipe):
        return None, 0
    tokenizer = None
    with findings.collect("" if size is None else "model.tokenizer"):
        if size is None:
            tokenizer = load_tokenizer(model)
        else:
            tokenizer = train_tokenizer(["text"], min(size, _TOKENIZER_SIZE))
            tokenizer = prepare_tokenizer(tokenizer, images=images)
    vocab_size = size or (0 if tokenizer is None else len(tokenizer))
    with findings.collect():
        # Also without a tokenizer: other keys of the model may be wrong.
        meta_model = build_meta_model(model, vocab_size, torch.float32)
        if tokenizer is not None:
            config = cast(CoatVlmConfig, meta_model.config)
            return build_processor(model, tokenizer, config), vocab_size
    return None, 0


def make_recipe_encoder(recipe: Recipe, start: Path | None = None) -> Encoder:
    """Build the encoder of a recipe's last stage, from the model in ``start`` or the recipe's own.

    Raises ValueError if the model's section has problems, or the run trains the tokenizer first.
    """
    if start is None and recipe.init_from is not None:
        start = Path(recipe.init_from)
    if start is None and recipe.model.tokenizer.train_vocab_size is not None:
        raise ValueError(
            "the recipe trains its tokenizer (model.tokenizer.train_vocab_size), which makes the "
            "tokens; give the folder of a finished run"
        )
    findings = Findings()
    processor, _ = _build_processor(recipe, start, findings)
    findings.raise_problems()
    if processor is None:
        raise ValueError("the tower of open_clip is not loaded here; give the folder of a run")
    stage = recipe.stages[max(recipe.stages, key=STAGES.index)]
    encoder = processor.encoder(template=stage.template)
    encoder.preferences = stage.dpo is not None
    return encoder


def _check_meta_models(
    recipe: Recipe,
    names: Sequence[StageName],
    vocab_size: int | None,
    processor: AnyProcessor,
    findings: Findings,
) -> None:
    meta_models: list[PreTrainedModel] = []
    for name in names:
        with findings.collect():  # most problems are in all stages
            arithmetic = arithmetic_of(recipe.precision, recipe.fp8, _META)
            stage = recipe.stages[name]
            meta_models.append(build_planned_model(recipe, stage, arithmetic, vocab_size))
    if not meta_models:
        return
    meta_model = meta_models[0]
    needs_kernel = why_logits_are_needed(meta_model) is None
    problem = find_gpu_problem() if needs_kernel else None
    if problem is not None:
        findings.add(problem)
    if not isinstance(meta_model, CoatVlm) or not isinstance(processor, CoatVlmProcessor):
        return
    if meta_model.config.has_vision:
        try:
            check_llava(meta_model, processor)
        except ValueError as error:
            why = f"{error}".removeprefix("--format llava: ")
            findings.notes.append(f"this model cannot be exported as llava: {why}")
