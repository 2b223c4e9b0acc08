"""What of a run's configuration a fold's training depends on, and what the engine gets of it."""

from __future__ import annotations

from typing import Any

from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.models import default_micro_batch
from fvc_lib.learning.random_state import stable_seed
from fvc_lib.services.config import RunConfig

# What a checkpoint is bound to. batch_size and device are left out: a fold that ran out of memory or lost its GPU may
# go on with others, because the effective batch, and so the result up to rounding, stays the same.
TRAINING_PARAMETERS = (
    "seed", "num_folds", "inner_validation_share", "num_frames", "fixed_size", "augmentations_per_video",
    "augmentations", "augmentation_strength", "model", "epochs", "effective_batch_size", "learning_rate",
    "weight_decay", "warmup_share", "max_gradient_norm", "class_balance", "early_stopping_epochs", "amp",
    "shuffle_labels", "shuffled_label_control",
)  # fmt: skip


def training_parameters(config: RunConfig, fold: int) -> dict[str, Any]:
    """The fold and the parameters that its weights depend on, as JSON values."""
    values = config.model_dump(mode="json")
    return {"fold": fold, **{name: values[name] for name in TRAINING_PARAMETERS}}


def engine_settings(config: RunConfig, fold: int) -> EngineSettings:
    """The engine's share of ``config`` for one fold."""
    return settings_of(
        config,
        seed=stable_seed("fold", config.seed, fold),
        micro_batch=default_micro_batch(config.model),
        balance_classes=config.class_balance == "sampler",
    )


def settings_of(config: RunConfig, *, seed: int, micro_batch: int, balance_classes: bool) -> EngineSettings:
    """The engine's share of ``config`` for one training; ``micro_batch`` where ``batch_size`` says nothing."""
    return EngineSettings(
        epochs=config.epochs,
        effective_batch_size=config.effective_batch_size,
        micro_batch=config.batch_size or micro_batch,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_share=config.warmup_share,
        max_gradient_norm=config.max_gradient_norm,
        early_stopping_epochs=config.early_stopping_epochs,
        seed=seed,
        balance_classes=balance_classes,
        num_workers=config.num_workers,
        max_nonfinite_steps=config.max_nonfinite_steps,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        checkpoint_epochs=config.checkpoint_epochs,
        micro_batch_recovery_steps=config.micro_batch_recovery_steps,
        gradient_checkpointing=config.gradient_checkpointing,
    )
