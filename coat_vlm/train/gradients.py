"""Watches gradients: do all modules that should train get one, and which are not finite."""

from types import TracebackType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from coat_vlm.config import ModuleName, StageConfig
from coat_vlm.model.vlm import CoatVlm, module_parameters


class _Hooks:
    """Hooks on parameters that go with the end of a context."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()


class GradientWatch(_Hooks):
    """Notes which modules a backward pass reaches.

    Hooks see the gradients before ZeRO takes them away. A module counts as reached when one of its
    parameters is.

    Args:
        model: the model.
        stage: what trains.
        active: False does nothing.
    """

    def __init__(self, model: CoatVlm, stage: StageConfig, active: bool) -> None:
        self._trained: list[ModuleName] = [
            name for name in module_parameters(model) if active and stage.module(name).train
        ]
        super().__init__()
        self._model = model
        self._reached: set[str] = set()

    def __enter__(self) -> "GradientWatch":
        parts = module_parameters(self._model)
        for name in self._trained:
            for parameter in parts[name].parameters():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(self._note(name)))
        return self

    def check(self, stage_name: str) -> None:
        """Raise ValueError if a module that should train was not reached."""
        missed = [name for name in self._trained if name not in self._reached]
        if missed:
            raise ValueError(
                f"stage {stage_name}: {', '.join(missed)} should train but got no gradient in the "
                "first step; check that the data has images and that nothing detaches them"
            )

    def _note(self, name: str):
        def hook(_gradient: torch.Tensor) -> None:
            self._reached.add(name)

        return hook


class NonFiniteWatch(_Hooks):
    """Notes which parameters get a gradient with a NaN or an infinity.

    Args:
        model: the model; ZeRO may have split its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.names: list[str] = []
        """Parameters found so far."""

    def __enter__(self) -> "NonFiniteWatch":
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._note(name)))
        return self

    def _note(self, name: str):
        def hook(gradient: torch.Tensor) -> None:
            if name not in self.names and not gradient.isfinite().all():
                self.names.append(name)

        return hook
