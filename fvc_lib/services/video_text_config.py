"""What video-text training (``task: video_text``) is asked beside what every task shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from fvc_lib.services.config_values import split_numbers


class VideoTextFields(BaseModel):
    """Fields that 20_video_text reads; ``RunConfig`` has them among its own."""

    # Videos and texts
    manifest_separator: str = Field(",", min_length=1, description="between the manifest's columns; any text")
    max_text_tokens: int = Field(32, ge=4, le=512, description="longer texts are cut; beginning and end count")
    vocabulary_size: int = Field(2000, ge=300, description="most byte-pair tokens learned from the training texts")

    # Video-text model and losses
    text_encoder: str = Field("own", description="own: the small transformer; or the folder of a transformers model")
    embedding_size: int = Field(128, ge=8, description="numbers in the space that videos and texts share")
    text_width: int = Field(128, ge=16, description="numbers per token in the text transformer and the decoder")
    text_layers: int = Field(2, ge=1, description="layers of the text transformer, and of the decoder")
    text_heads: int = Field(4, ge=1, description="attention heads; divides text_width")
    contrastive_loss: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="softmax as in CLIP, or sigmoid with a bias as in SigLIP"
    )
    contrastive_weight: float = Field(1.0, ge=0, description="of the contrastive loss; 0: off")
    caption_weight: float = Field(1.0, ge=0, description="of the captioning loss; 0: no decoder")
    masked_weight: float = Field(0.0, ge=0, description="of masked modelling of the clip's features; 0: off")
    masked_share: float = Field(0.3, gt=0, lt=1, description="share of a clip's frames hidden in masked modelling")
    beam_width: int = Field(1, ge=1, le=32, description="captions are searched with so many beams; 1: greedily")

    # Retrieval
    recall_at: Annotated[tuple[int, ...], BeforeValidator(split_numbers)] = Field(
        (1, 5, 10), description="the k of recall@k"
    )
    retrieval_memory_mb: int = Field(64, ge=16, description="retrieval metrics take no more beyond the embeddings")
