"""What image recognition (``task: image``) is asked beside what every task shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from fvc_lib.services.config_values import split_names


class ImageFields(BaseModel):
    """Fields that 10_image_recognition reads; ``RunConfig`` has them among its own."""

    # Images
    image_layout: Literal["auto", "food101", "nutrition5k", "combined", "folder", "manifest"] = Field(
        "auto", description="how the corpus of images is laid out; auto: by what lies in it"
    )
    image_size: int = Field(224, ge=16, le=2048, description="side in pixels of the square an image is brought to")
    targets: Annotated[tuple[str, ...], BeforeValidator(split_names)] = Field(
        (), description="numeric columns to predict beside the class; empty: all the corpus has; none: no regression"
    )
    dev_samples_per_class: int = Field(
        0, ge=0, description="dev mode: a seeded subset of so many training images per class; 0: all"
    )

    # Image model and loss
    backbone: str = Field(
        "small_resnet", description="small_resnet, or torchvision:NAME or timm:NAME where that package is installed"
    )
    backbone_weights: str = Field("", description="file of the backbone's weights; empty: from scratch")
    freeze_backbone_epochs: int = Field(0, ge=0, description="train only the heads for so many epochs first")
    unfreeze_stage_epochs: int = Field(
        0, ge=0, description="then free the backbone's stages one by one, the last first, each so long; 0: all at once"
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="share of the class target spread over all classes")
    focal_gamma: float = Field(0.0, ge=0, le=5, description="weighs well-classified images down; 0: cross-entropy")
    regression_weight: float = Field(1.0, ge=0, description="of the regression loss beside the class loss's 1")
    mixup_alpha: float = Field(0.2, ge=0, description="Beta parameter of mixup; 0: off")
    cutmix_alpha: float = Field(1.0, ge=0, description="Beta parameter of cutmix; 0: off")
    mix_share: float = Field(0.3, ge=0, le=1, description="share of the training images mixed with another one")
    measure_fits: bool = Field(
        True, description="try out which batch sizes and resolutions fit this machine, in child processes"
    )
