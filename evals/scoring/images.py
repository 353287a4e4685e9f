"""Scores image classifiers on a folder with one subfolder for each class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17's other one needs torchvision

from crosshead.common.errors import EvalError
from crosshead.common.images import processed_image

from ..open_model import Opened, from_pretrained
from .data import Data, label_outcomes
from .files import class_folders, class_of
from .metrics import TOP, Score, image_scores


class LabelledImages(Data):
    """Images labelled with the class that their folder names; a limit takes evenly spaced images."""

    auto_class = AutoModelForImageClassification
    title = "image classification"

    def __init__(self, opened: Opened, path: Path, limit: int | None, context: int) -> None:
        """Find the images; they are read when the model runs."""
        self.opened = opened
        folders = class_folders(path)
        labels = {folder: class_of(opened.config, folder.name, str(folder)) for folder in folders}
        labelled = [(file, labels[folder]) for folder, files in folders.items() for file in files]
        self.files = [file for file, _ in labelled]
        count = min(limit or len(labelled), len(labelled))
        self.images = [labelled[index * len(labelled) // count] for index in range(count)]
        self.lengths = [1] * count
        self.processor = from_pretrained(AutoImageProcessor, opened.name, "image processor", opened.trust_remote_code)
        self.channels = opened.config.num_channels

    def outcomes(self, model: Any, indices: Sequence[int]) -> Tensor:
        """Return losses, predicted classes, and 1 if the label is among the five likeliest classes (B, 3)."""
        pixels = [processed_image(self.images[index][0], self.processor, self.channels) for index in indices]
        if len({image.shape for image in pixels}) > 1:
            raise EvalError(f"the image processor of {self.opened.label} gives images of different sizes")
        logits = model(pixel_values=torch.cat(pixels).to(model.device, model.dtype)).logits
        return label_outcomes(logits, [self.images[index][1] for index in indices], TOP)

    def scores(self, outcomes: Tensor) -> list[Score]:
        """Return accuracy, top-5 accuracy if there are more than five classes, and loss."""
        labels = torch.tensor([label for _, label in self.images])
        scores = image_scores(outcomes[:, 0], outcomes[:, 1].long(), labels, outcomes[:, 2])
        return scores if self.opened.config.num_labels > TOP else [scores[0], scores[-1]]
