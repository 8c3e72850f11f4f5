"""A stage of a single step, for tests that train a tiny model without files."""

from typing import Any

from coat_vlm.config import ModuleTraining, SourceConfig, StageConfig

TRAINS = ModuleTraining(train=True, lr=1e-3)


def one_stage(*trained: str, **changes: Any) -> StageConfig:
    """Return a stage that trains these modules."""
    settings: dict[str, Any] = {"batch_size": 1, "micro_batch_size": 1, "max_steps": 1}
    settings |= dict.fromkeys(trained, TRAINS) | changes
    return StageConfig(data=[SourceConfig(name="a", path="a.json")], **settings)
